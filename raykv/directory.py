"""Who is a member. Logic only: the Ray actor around it is `raykv.cluster.actors`.

The directory is on no path of a chunk. While it is away, all goes on with the last view; reborn with empty hands, it
learns the view from the first node that calls.
"""

from dataclasses import dataclass
from typing import Protocol

from raykv.ring import Member, View
from raykv.types import NodeId


@dataclass(frozen=True, slots=True)
class Pulse:
    """What a node hears back.

    Attributes:
        view: A newer view than the node's, or None.
        tell_view: The node's view is newer than the directory's: it should send it with its next beat, at once.
    """

    view: View | None = None
    tell_view: bool = False


class DirectoryPort(Protocol):
    """The directory as a node sees it, wherever it runs."""

    def beat(self, member: Member, epoch: int, view: View | None = None) -> Pulse:
        """I live, this is me, and this is the epoch of my view.

        Raises:
            TransientError: The directory is away.
        """
        ...

    def leave(self, node_id: NodeId) -> None:
        """I go, on purpose."""
        ...


class Directory:
    """Members and the view.

    Attributes:
        view: The present view. Its epoch grows with every change, over the directory's own deaths too.
    """

    def __init__(self, *, member_timeout_s: float) -> None:
        """Args: member_timeout_s: A member that was silent this long leaves the view."""
        self._timeout_s = member_timeout_s
        self._seen_s: dict[NodeId, float] = {}
        self.view = View()

    def beat(self, member: Member, epoch: int, view: View | None, *, now_s: float) -> Pulse:
        """A node lives.

        A node whose member entry changed (a new address, a new incarnation) makes a new view; so does a new node.
        """
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
