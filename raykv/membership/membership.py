"""The directory: the members of a cluster. `raykv.cluster.actors` runs this code in the directory actor.

The view is the list of members. Reading and storing chunks does not need the directory. If the directory fails, nodes
and clients use their last view. After a restart the directory is empty, and adopts the view of the first node that
calls it.
"""

import logging
import secrets
import threading
import time
from typing import Final, Protocol

from raykv.errors import TransientError, UsageError
from raykv.membership.heat_map import HeatMap
from raykv.membership.namespace_registry import NamespaceRegistry
from raykv.protocol import codec
from raykv.protocol.keyring import SECRET_NBYTES, Keyring, Stage
from raykv.protocol.messages import Configure, Heartbeat, HeartbeatAnswer
from raykv.protocol.namespace import Namespace
from raykv.protocol.placement import RESTART_EPOCHS, Member, View
from raykv.types import NodeId

log = logging.getLogger(__name__)

HOT_NBYTES_PER_S: Final = 16e6
"""A prefix gets replicas only if at least this many bytes of it are read per second. One core can send 100 times as
many."""
MAX_EPOCH: Final = (1 << 32) - (1 << 20)
"""Views with a greater epoch are not adopted from a node: no honest node has one, and messages could not carry later
epochs."""


class MembershipPort(Protocol):
    """The calls of a node to the directory. Each raises TransientError if the directory does not answer."""

    def beat(self, heartbeat: Heartbeat) -> HeartbeatAnswer:
        """Send a heartbeat."""
        ...

    def configure(self, change: Configure) -> bytes:
        """Configure or drop a quota group. Return the new list of namespaces, encoded by `NamespaceRegistry.encode`.

        Raises:
            UsageError: A field of the request is wrong.
            CapacityError: Too many namespaces have a config.
        """
        ...

    def leave(self, node_id: NodeId) -> None:
        """Remove from the members a node that stops permanently."""
        ...


class Membership:
    """The logic of the directory. It has no clock and no lock: callers pass the time and hold a lock.

    Attributes:
        view: The list of members. Each change increases the view's epoch. After a restart, the directory adopts a
            node's view, with a greater epoch.
        registry: The list of namespaces that were configured or dropped.
        heat: The load of the members, and the replicas that it needs.
        keyring: The cluster's secrets. None: the nodes do not get them from here.
    """

    def __init__(
        self, *, member_timeout_s: float, hot_nbytes_per_s: float = HOT_NBYTES_PER_S, keyring: Keyring | None = None
    ) -> None:
        """Start without members.

        Args:
            member_timeout_s: A member that sends no heartbeat for this long is removed from the view.
            hot_nbytes_per_s: See `HeatMap`.
            keyring: The secrets that this directory knows; a node may know newer ones. None: secrets are not rotated.
        """
        self._timeout_s = member_timeout_s
        self.keyring = keyring
        self._keyring_versions: dict[NodeId, int] = {}
        self._seen_s: dict[NodeId, float] = {}  # in order of time
        self._merged: set[NodeId] = set()  # nodes whose lists of namespaces are merged into `registry`
        self.view = View()
        self.registry = NamespaceRegistry()
        self.heat = HeatMap(hot_nbytes_per_s=hot_nbytes_per_s)

    def beat(self, heartbeat: Heartbeat, *, now_s: float) -> HeartbeatAnswer:
        """Handle a heartbeat. A new member, a member with a new address, or a restarted member causes a new view.

        Raises:
            UsageError: The heartbeat's `registry` is not a list of namespaces.
        """
        ours, node_id, version = self.registry, heartbeat.member.node_id, heartbeat.version
        if heartbeat.registry is not None:
            ours.merge(NamespaceRegistry.decode(heartbeat.registry))
            self._merged.add(node_id)
        answer = self._update_view(heartbeat, now_s)
        answer.registry = ours.encode() if ours.version > version else None
        answer.want_registry = version > 0 and (node_id not in self._merged or version > ours.version)
        self._update_keyring(heartbeat, answer)
        if heartbeat.heat is not None and not answer.want_view:
            answer.heat = self.heat.beat(node_id, heartbeat.heat, self.view, now_s=now_s)
        return answer

    def _update_keyring(self, heartbeat: Heartbeat, answer: HeartbeatAnswer) -> None:
        ours, theirs, version = self.keyring, heartbeat.keyring, heartbeat.keyring_version
        if ours is None:
            return
        if theirs is not None and theirs.cluster == ours.cluster and theirs.version > ours.version:
            self.keyring = ours = theirs
        self._keyring_versions[heartbeat.member.node_id] = version
        answer.keyring = ours if ours.version > version else None
        answer.want_keyring = version > ours.version

    def behind(self) -> list[NodeId]:
        """Return the members that have not reported that they use the newest secrets."""
        version = 0 if self.keyring is None else self.keyring.version
        names = [member.node_id for member in self.view.members]
        return [name for name in names if self._keyring_versions.get(name) != version]

    def rotate(self, secret: bytes) -> Keyring:
        """Do the next step of a rotation of the secret: see `Keyring.next_step`. Returns the new keyring.

        Raises:
            UsageError: This directory has no secrets.
            TransientError: There is no member, or some members have not finished the last step. Try again later.
        """
        if self.keyring is None:
            raise UsageError("this directory does not hold the cluster's secrets")
        behind = self.behind()
        if behind or not self.view.members:
            raise TransientError(f"not all nodes use the same secrets yet: {', '.join(behind) or 'there is no node'}")
        self.keyring = self.keyring.next_step(secret)
        return self.keyring

    def _update_view(self, heartbeat: Heartbeat, now_s: float) -> HeartbeatAnswer:
        member, view = heartbeat.member, heartbeat.view
        if view is not None and self.view.epoch < view.epoch <= MAX_EPOCH:
            self.view = View(view.epoch + RESTART_EPOCHS, view.members)
            self._seen_s = {known.node_id: now_s for known in view.members}
        if heartbeat.epoch > self.view.epoch:
            return HeartbeatAnswer(want_view=True)
        self._seen_s.pop(member.node_id, None)
        self._seen_s[member.node_id] = now_s
        if self.view.member(member.node_id) != member:
            if self.view.member(member.node_id) is None and self.view.members:
                self.heat.join(member.node_id, now_s=now_s)
            self._publish([*(known for known in self.view.members if known.node_id != member.node_id), member])
        return HeartbeatAnswer(self.view if self.view.epoch > heartbeat.epoch else None)

    def configure(self, change: Configure, *, now_ns: int) -> bytes:
        """Configure or drop a quota group; see `MembershipPort.configure`. `now_ns`: wall-clock time."""
        namespace = Namespace.load(codec.fields(change.namespace))
        if change.registry is not None:  # this directory may have restarted and lost its list
            self.registry.merge(NamespaceRegistry.decode(change.registry))
        if change.fields is None:
            self.registry.drop(namespace, now_ns=now_ns)
        else:
            self.registry.configure(namespace, codec.fields(change.fields), now_ns=now_ns)
        return self.registry.encode()

    def leave(self, node_id: NodeId) -> None:
        """Remove from the members a node that stops permanently."""
        self._seen_s.pop(node_id, None)
        if self.view.member(node_id) is not None:
            self._publish([known for known in self.view.members if known.node_id != node_id])

    def expire(self, *, now_s: float) -> list[NodeId]:
        """Remove members that sent no heartbeat within the timeout. Return the names of the removed nodes."""
        silent = []
        for node_id, seen_s in self._seen_s.items():
            if now_s - seen_s <= self._timeout_s:
                break  # all others were seen later
            silent.append(node_id)
        for node_id in silent:
            del self._seen_s[node_id]
        if silent:
            self._publish([known for known in self.view.members if known.node_id not in silent])
        return silent

    def _publish(self, members: list[Member]) -> None:
        self.view = View(self.view.epoch + 1, tuple(sorted(members, key=lambda member: member.node_id)))


class InProcessMembership:
    """A `MembershipPort` in this process, for `raykv.embedded` and the directory actor. Thread-safe.

    Attributes:
        logic: The members and the list of namespaces.
    """

    def __init__(
        self, *, member_timeout_s: float, hot_nbytes_per_s: float = HOT_NBYTES_PER_S, keyring: Keyring | None = None
    ) -> None:
        self.logic = Membership(member_timeout_s=member_timeout_s, hot_nbytes_per_s=hot_nbytes_per_s, keyring=keyring)
        self._lock = threading.Lock()
        self._gap_s = member_timeout_s / 2
        self._called_s = time.monotonic()
        self._ran_s = 0.0

    def beat(self, heartbeat: Heartbeat) -> HeartbeatAnswer:
        self.expire()
        with self._lock:
            return self.logic.beat(heartbeat, now_s=self._now_s())

    def configure(self, change: Configure) -> bytes:
        with self._lock:
            return self.logic.configure(change, now_ns=time.time_ns())

    def leave(self, node_id: NodeId) -> None:
        with self._lock:
            self.logic.leave(node_id)

    def rotate(self) -> Stage:
        """Do the next step of a rotation of the secret: see `Membership.rotate`. Returns the stage."""
        self.expire()
        with self._lock:
            return self.logic.rotate(secrets.token_bytes(SECRET_NBYTES)).stage

    def expire(self) -> None:
        """Remove members that have sent no heartbeat within the timeout."""
        with self._lock:
            for node_id in self.logic.expire(now_s=self._now_s()):
                log.warning("node %s is silent and is removed from the view", node_id)

    def _now_s(self) -> float:
        """The seconds for which this process has run.

        A paused process receives no heartbeats: it would remove all members when it goes on. Thus the time between two
        calls counts up to half a member's timeout.
        """
        now_s = time.monotonic()
        self._ran_s += min(now_s - self._called_s, self._gap_s)
        self._called_s = now_s
        return self._ran_s
