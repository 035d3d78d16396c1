"""The heartbeat: a node tells the directory that it is alive, and applies the answers."""

import logging
import threading
from collections import Counter

from raykv.config import NodeConfig
from raykv.errors import RayKVError, TransientError
from raykv.membership.membership import MembershipPort
from raykv.node.announcer import Announcer
from raykv.node.namespace_reconciler import NamespaceReconciler
from raykv.protocol.placement import Member
from raykv.storage.store import Store

log = logging.getLogger(__name__)


class Heartbeat:
    """Sends a heartbeat every `heartbeat_s`, on a thread of its own.

    Attributes:
        failures: Counts of unanswered heartbeats ("beat") and of lists of namespaces that were refused ("registry").
    """

    def __init__(
        self,
        config: NodeConfig,
        store: Store,
        membership: MembershipPort,
        announcer: Announcer,
        reconciler: NamespaceReconciler,
    ) -> None:
        self._config, self._store, self._membership = config, store, membership
        self._announcer, self._reconciler = announcer, reconciler
        self.failures: Counter[str] = Counter()

    def run(self, member: Member, stopping: threading.Event) -> None:
        """Run the thread: send heartbeats until `stopping` is set."""
        while not stopping.wait(self._config.heartbeat_s):
            self.beat(member)
            self._store.table.memory.touch()  # `orphans` removes files that nobody touches

    def beat(self, member: Member) -> None:
        """Send one heartbeat. If the directory does not answer, nothing changes except `failures`."""
        view, registry = self._announcer.view, self._reconciler.registry
        version = registry.version
        try:
            answer = self._membership.beat(member, view.epoch, None, version)
            if answer.want_view or answer.want_registry:
                answer = self._membership.beat(
                    member,
                    view.epoch,
                    view if answer.want_view else None,
                    version,
                    registry.encode() if answer.want_registry else None,
                )
        except TransientError:
            self.failures["beat"] += 1
            return
        if answer.view is not None and answer.view.epoch > view.epoch:
            self._announcer.adopt(answer.view)
        if answer.registry is not None:
            try:
                self._reconciler.adopt(answer.registry)
            except RayKVError as error:  # a restart would not help
                self.failures["registry"] += 1
                log.error("this node cannot follow the list of namespaces: %s", error)
