"""The directory as a thread-safe object. `raykv.embedded` uses it, and the directory actor derives from it."""

import logging
import threading
import time
from typing import Any

from raykv.membership.membership import HeartbeatAnswer, Membership
from raykv.protocol.namespace import Namespace
from raykv.protocol.placement import Member, View
from raykv.types import NodeId

log = logging.getLogger(__name__)


class InProcessMembership:
    """A `MembershipPort` in this process. Thread-safe.

    Attributes:
        logic: Members, view and namespaces.
    """

    def __init__(self, *, member_timeout_s: float) -> None:
        self.logic = Membership(member_timeout_s=member_timeout_s)
        self._lock = threading.Lock()

    def beat(
        self, member: Member, epoch: int, view: View | None = None, version: int = 0, registry: bytes | None = None
    ) -> HeartbeatAnswer:
        """See `MembershipPort`."""
        self.expire()
        with self._lock:
            now_s = time.monotonic()
            return self.logic.beat(member, epoch, view, now_s=now_s, version=version, registry=registry)

    def configure(self, namespace: Namespace, fields: dict[str, Any] | None, registry: bytes | None = None) -> bytes:
        """See `MembershipPort`."""
        with self._lock:
            return self.logic.configure(namespace, fields, registry, now_ns=time.time_ns())

    def leave(self, node_id: NodeId) -> None:
        """See `MembershipPort`."""
        with self._lock:
            self.logic.leave(node_id)

    def expire(self) -> None:
        """Remove members whose heartbeats have stopped for the timeout."""
        with self._lock:
            for node_id in self.logic.expire(now_s=time.monotonic()):
                log.warning("node %s is silent and is removed from the view", node_id)
