"""The members of a cluster. Logic only: `raykv.cluster.actors` runs it in the directory actor.

No chunk depends on the directory. While it is away, nodes and clients use their last view. After a restart it has
nothing, and adopts the view of the first node that calls.
"""

from dataclasses import dataclass, replace
from typing import Any, Protocol

from raykv.membership.namespace_registry import NamespaceRegistry
from raykv.protocol.namespace import Namespace
from raykv.protocol.placement import Member, View
from raykv.types import NodeId


@dataclass(frozen=True, slots=True)
class HeartbeatAnswer:
    """What the directory answers to a heartbeat.

    Attributes:
        view: A newer view than the node's, or None.
        want_view: The node's view is newer than the directory's. The node sends it with another heartbeat at once.
        registry: A newer list of namespaces than the node's (`NamespaceRegistry.encode`), or None.
        want_registry: The directory lacks this node's list. The node sends it with another heartbeat at once.
    """

    view: View | None = None
    want_view: bool = False
    registry: bytes | None = None
    want_registry: bool = False


class MembershipPort(Protocol):
    """The directory as a node calls it."""

    def beat(
        self, member: Member, epoch: int, view: View | None = None, version: int = 0, registry: bytes | None = None
    ) -> HeartbeatAnswer:
        """Report that this member lives.

        Args:
            member: Of the calling node.
            epoch: Of its view.
            view: The view itself, if the directory wants it.
            version: Of its list of namespaces.
            registry: The list itself, if the directory wants it.

        Raises:
            TransientError: The directory is away.
        """
        ...

    def configure(self, namespace: Namespace, fields: dict[str, Any] | None, registry: bytes | None = None) -> bytes:
        """Change fields of a namespace's config, or drop the namespace (None).

        Args:
            namespace: Its quota group is meant.
            fields: Of `NamespaceConfig`.
            registry: The calling node's own list. A directory that has just restarted builds on it.

        Returns:
            The new list, as `NamespaceRegistry.encode` writes it.

        Raises:
            TransientError: The directory is away.
            UsageError, CapacityError: As `NamespaceRegistry.configure`.
        """
        ...

    def leave(self, node_id: NodeId) -> None:
        """Remove a node that stops for good."""
        ...


class Membership:
    """Members, the view, and the list of namespaces.

    Attributes:
        view: The present view. Its epoch grows with every change, also over restarts of the directory.
        registry: Namespaces that were configured or dropped.
    """

    def __init__(self, *, member_timeout_s: float) -> None:
        """Args: member_timeout_s: A member that is silent for this long is removed from the view."""
        self._timeout_s = member_timeout_s
        self._seen_s: dict[NodeId, float] = {}
        self._merged: set[NodeId] = set()  # nodes whose list of namespaces was merged into ours
        self.view = View()
        self.registry = NamespaceRegistry()

    def beat(
        self,
        member: Member,
        epoch: int,
        view: View | None,
        *,
        now_s: float,
        version: int = 0,
        registry: bytes | None = None,
    ) -> HeartbeatAnswer:
        """Take a heartbeat. A new member, or one with a new address or incarnation, makes a new view.

        Raises:
            UsageError: `registry` is not a list of namespaces.
        """
        given = None if registry is None else NamespaceRegistry.decode(registry)
        answer = self._update_view(member, epoch, view, now_s)
        if given is not None:
            self.registry.merge(given)
            self._merged.add(member.node_id)
        ours = self.registry
        return replace(
            answer,
            registry=ours.encode() if ours.version > version else None,
            want_registry=version > 0 and (member.node_id not in self._merged or version > ours.version),
        )

    def _update_view(self, member: Member, epoch: int, view: View | None, now_s: float) -> HeartbeatAnswer:
        if view is not None and view.epoch > self.view.epoch:
            self.view = view
            self._seen_s = {known.node_id: now_s for known in view.members}
        if epoch > self.view.epoch:
            return HeartbeatAnswer(want_view=True)
        self._seen_s[member.node_id] = now_s
        if self.view.member(member.node_id) != member:
            self._publish([*(known for known in self.view.members if known.node_id != member.node_id), member])
        return HeartbeatAnswer(self.view if self.view.epoch > epoch else None)

    def configure(
        self, namespace: Namespace, fields: dict[str, Any] | None, registry: bytes | None = None, *, now_ns: int
    ) -> bytes:
        """See `MembershipPort.configure`. `now_ns` is the wall clock."""
        if registry is not None:
            self.registry.merge(NamespaceRegistry.decode(registry))
        if fields is None:
            self.registry.drop(namespace, now_ns=now_ns)
        else:
            self.registry.configure(namespace, fields, now_ns=now_ns)
        return self.registry.encode()

    def leave(self, node_id: NodeId) -> None:
        """Remove a node that stops for good."""
        self._seen_s.pop(node_id, None)
        if self.view.member(node_id) is not None:
            self._publish([known for known in self.view.members if known.node_id != node_id])

    def expire(self, *, now_s: float) -> list[NodeId]:
        """Remove members that were silent for too long. Returns their names."""
        silent = [
            known.node_id
            for known in self.view.members
            if now_s - self._seen_s.get(known.node_id, now_s) > self._timeout_s
        ]
        if silent:
            self._publish([known for known in self.view.members if known.node_id not in silent])
        return silent

    def _publish(self, members: list[Member]) -> None:
        self.view = View(self.view.epoch + 1, tuple(sorted(members, key=lambda member: member.node_id)))
