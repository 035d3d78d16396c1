"""Who is a member. Logic only: the Ray actor around it is `raykv.cluster.actors`.

The directory is on no path of a chunk. While it is away, all goes on with the last view; reborn with empty hands, it
learns the view from the first node that calls.
"""

from dataclasses import dataclass, replace
from typing import Any, Protocol

from raykv.membership.namespace_registry import Register
from raykv.protocol.namespace import Namespace
from raykv.protocol.placement import Member, View
from raykv.types import NodeId


@dataclass(frozen=True, slots=True)
class Pulse:
    """What a node hears back.

    Attributes:
        view: A newer view than the node's, or None.
        tell_view: The node's view is newer than the directory's: it should send it with its next beat, at once.
        register: A newer list of namespaces than the node's (`Register.encode`), or None.
        tell_register: The directory does not know this node's list yet; the same.
    """

    view: View | None = None
    tell_view: bool = False
    register: bytes | None = None
    tell_register: bool = False


class DirectoryPort(Protocol):
    """The directory as a node sees it, wherever it runs."""

    def beat(
        self, member: Member, epoch: int, view: View | None = None, version: int = 0, register: bytes | None = None
    ) -> Pulse:
        """I live, this is me, and these are the epoch of my view and the version of my list of namespaces.

        Raises:
            TransientError: The directory is away.
        """
        ...

    def configure(self, namespace: Namespace, fields: dict[str, Any] | None, register: bytes | None = None) -> bytes:
        """Change fields of a namespace's config, or drop it (None). Returns the list, as `Register.encode` writes it.

        Args:
            register: The node's own list. A directory that was reborn a moment ago builds on it.

        Raises:
            TransientError: The directory is away.
            UsageError, CapacityError: As `Register.configure`.
        """
        ...

    def leave(self, node_id: NodeId) -> None:
        """I go, on purpose."""
        ...


class Directory:
    """Members and the view.

    Attributes:
        view: The present view. Its epoch grows with every change, over the directory's own deaths too.
        register: The namespaces that were configured or dropped.
    """

    def __init__(self, *, member_timeout_s: float) -> None:
        """Args: member_timeout_s: A member that was silent this long leaves the view."""
        self._timeout_s = member_timeout_s
        self._seen_s: dict[NodeId, float] = {}
        self._told: set[NodeId] = set()  # nodes whose lists of namespaces are part of ours
        self.view = View()
        self.register = Register()

    def beat(
        self,
        member: Member,
        epoch: int,
        view: View | None,
        *,
        now_s: float,
        version: int = 0,
        register: bytes | None = None,
    ) -> Pulse:
        """A node lives.

        A node whose member entry changed (a new address, a new incarnation) makes a new view; so does a new node.
        """
        pulse = self._beat(member, epoch, view, now_s)
        if register is not None:
            self.register.merge(Register.decode(register))
            self._told.add(member.node_id)
        ours = self.register
        return replace(
            pulse,
            register=ours.encode() if ours.version > version else None,
            tell_register=version > 0 and (member.node_id not in self._told or version > ours.version),
        )

    def _beat(self, member: Member, epoch: int, view: View | None, now_s: float) -> Pulse:
        if view is not None and view.epoch > self.view.epoch:
            self.view = view
            self._seen_s = {known.node_id: now_s for known in view.members}
        if epoch > self.view.epoch:
            return Pulse(tell_view=True)
        self._seen_s[member.node_id] = now_s
        if self.view.member(member.node_id) != member:
            others = [known for known in self.view.members if known.node_id != member.node_id]
            self._publish([*others, member])
        return Pulse(self.view if self.view.epoch > epoch else None)

    def configure(
        self, namespace: Namespace, fields: dict[str, Any] | None, register: bytes | None = None, *, now_ns: int
    ) -> bytes:
        """See `DirectoryPort.configure`.

        Args:
            now_ns: Wall clock.
        """
        if register is not None:
            self.register.merge(Register.decode(register))
        if fields is None:
            self.register.drop(namespace, now_ns=now_ns)
        else:
            self.register.configure(namespace, fields, now_ns=now_ns)
        return self.register.encode()

    def leave(self, node_id: NodeId) -> None:
        """A node went on purpose."""
        self._seen_s.pop(node_id, None)
        if self.view.member(node_id) is not None:
            self._publish([known for known in self.view.members if known.node_id != node_id])

    def expire(self, *, now_s: float) -> list[NodeId]:
        """Drop members that were silent for too long. Returns their names."""
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
