"""The members of a cluster, without I/O. `raykv.cluster.actors` runs this code in the directory actor.

Reading and storing chunks does not need the directory. If the directory fails, nodes and clients use their last view.
After a restart the directory is empty, and adopts the view of the first node that calls.
"""

from dataclasses import dataclass, replace
from typing import Any, Protocol

from raykv.membership.namespace_registry import NamespaceRegistry
from raykv.protocol.namespace import Namespace
from raykv.protocol.placement import Member, View
from raykv.types import NodeId


@dataclass(frozen=True, slots=True)
class HeartbeatAnswer:
    """The directory's answer to a heartbeat.

    Attributes:
        view: The directory's view. None means that the node's view is not older.
        want_view: The node's view is newer than the directory's. The node must send it with another heartbeat at once.
        registry: The directory's list of namespaces, encoded. None means that the node's list is not older.
        want_registry: The directory lacks this node's list. The node must send it with another heartbeat at once.
    """

    view: View | None = None
    want_view: bool = False
    registry: bytes | None = None
    want_registry: bool = False


class MembershipPort(Protocol):
    """The calls of a node to the directory."""

    def beat(
        self, member: Member, epoch: int, view: View | None = None, version: int = 0, registry: bytes | None = None
    ) -> HeartbeatAnswer:
        """Send a heartbeat.

        Args:
            member: The calling node.
            epoch: Epoch of the node's view.
            view: The node's view, if the directory asked for it.
            version: Version of the node's list of namespaces.
            registry: The node's list of namespaces, if the directory asked for it.

        Raises:
            TransientError: The directory does not answer.
        """
        ...

    def configure(self, namespace: Namespace, fields: dict[str, Any] | None, registry: bytes | None = None) -> bytes:
        """Change the config of a namespace's quota group, or drop the quota group.

        Args:
            namespace: Any namespace of the quota group.
            fields: Fields of `NamespaceConfig` to change. None drops the quota group.
            registry: The calling node's own list. The directory merges it first, in case it has just restarted.

        Returns:
            The new list, encoded by `NamespaceRegistry.encode`.

        Raises:
            TransientError: The directory does not answer.
            UsageError, CapacityError: See `NamespaceRegistry.configure`.
        """
        ...

    def leave(self, node_id: NodeId) -> None:
        """Remove a node that stops for good."""
        ...


class Membership:
    """Members, the view, and the list of namespaces.

    Attributes:
        view: The present view. Every change increases its epoch, also after a restart of the directory.
        registry: The list of namespaces that were configured or dropped.
    """

    def __init__(self, *, member_timeout_s: float) -> None:
        """Args: member_timeout_s: A member that sends no heartbeat for this long is removed from the view."""
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
        """Handle a heartbeat. A new member, or a member with a new address or incarnation, causes a new view.

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
        """Remove members that sent no heartbeat within the timeout. Return their names."""
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
