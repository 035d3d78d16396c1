"""Announces chunks: tells the owner of each key whether this node holds the key's chunk.

The owner of a key keeps the list of the key's holders. The view is the list of the cluster's members. The hash ring of
the view assigns each key to its owner.
"""

import logging
import math
import threading
import time
from typing import Final

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from raykv.config import NodeConfig
from raykv.errors import RayKVError, TransientError
from raykv.node.location_index import LocationIndex
from raykv.protocol import chunk_keys, messages
from raykv.protocol.codec import pack_bits
from raykv.protocol.placement import LEARN_S, Member, View, is_next, owner_changed
from raykv.protocol.reasons import Place
from raykv.storage.store import Store
from raykv.tier.mover import TierMover
from raykv.transport.pool import ConnectionPool
from raykv.transport.server import LogLimit
from raykv.types import Bits, KeyArray, NodeId

log = logging.getLogger(__name__)

ANNOUNCED_KEYS: Final = 1 << 16
"""Largest number of keys in one announcement. Further keys are sent in further announcements."""
MAX_RETRIED_KEYS: Final = 1 << 20
"""If an owner does not answer, the keys of the announcement return to the queue. If the queue would have more keys than
this limit, the keys are dropped instead, and readers may miss the chunks."""
LOCKED_KEYS: Final = 4096
"""The announcer looks up at most this many keys at a time under the node's lock, because writers wait for the lock."""
ANNOUNCE_S: Final = 0.01
"""The announcer waits this long after a change, so that one message can announce several changes."""
FIRST_S: Final = 0.5
"""An owner has this long to answer while the other owners wait. If it is slower, it is left to a thread of its own."""
SLOW_S: Final = 3.0
"""How long the thread for slow owners waits for one answer."""


class Announcer:
    """Announces changes of the store and of the tiers in batches, on its own thread.

    An announcement describes the state at the time of sending. So the order of changes does not matter, and
    announcements are idempotent.

    A second thread serves the slow owners: those that did not answer in time. So an owner that hangs, or that only this
    node does not reach, does not delay the announcements to other owners.

    Attributes:
        view: The newest view. Announcements are sent to the owners in this view.
        announced: Number of keys in all announcements so far, including those to this node itself.
        failures: Number of announcements that failed, because the owner did not answer or refused them.
    """

    def __init__(
        self,
        config: NodeConfig,
        store: Store,
        lock: threading.Lock,
        mover: TierMover,
        location_index: LocationIndex,
        pool: ConnectionPool,
        changed: threading.Event,
    ) -> None:
        self._config, self._store, self._lock, self._mover = config, store, lock, mover
        self._location_index, self._pool, self._changed = location_index, pool, changed
        self._queue: list[KeyArray] = []
        self._slow: dict[NodeId, list[KeyArray]] = {}  # keys for each slow owner
        self._slow_waiting = threading.Event()
        self._sending = self._adopting = self._restarted = False
        self._view_lock = threading.Lock()
        self.view = View()
        self.announced = self.failures = 0
        self._log = LogLimit(log)
        self._forget_s = math.inf

    def wake(self) -> None:
        """Wake the announcer's thread. Call this method after every change of the store or of a tier."""
        if not self._changed.is_set():
            self._changed.set()

    def announce(self, keys: KeyArray) -> None:
        """Put keys into the queue for the next announcement, even if their chunks have not changed."""
        with self._lock:
            self._queue.append(keys)
        self._changed.set()

    @property
    def waiting_keys(self) -> int:
        """Number of keys in the queues. Changes that are still in the store or in the tiers are not counted."""
        return sum(map(len, self._queue)) + sum(len(keys) for waiting in [*self._slow.values()] for keys in waiting)

    @property
    def done(self) -> bool:
        """Whether the store has no changes to announce, the queues are empty, and no announcement is being sent."""
        with self._lock:
            return not (self._sending or self._adopting or self._queue or self._slow or self._store.has_changes)

    def adopt(self, view: View) -> None:
        """Use a newer view, and announce keys whose owner changed.

        Locations of keys that other nodes own from now on are dropped LEARN_S later.
        """
        with self._view_lock:
            if view.epoch > self.view.epoch:
                self._adopt(view)

    def resume(self, view: View) -> None:
        """Use the view of this node's previous process until the directory answers.

        All chunks are announced to the owners in this view. All members get an empty announcement. From it they learn
        that this node has restarted: see `learn_restart`.
        """
        self._restarted = bool(view.members)
        self.adopt(view)

    def learn_restart(self, node_id: NodeId, incarnation: int) -> None:
        """Announce a member's keys to it again if `incarnation` is newer than in the view.

        Usually the directory's next view says the same. But the directory may be away.
        """
        with self._view_lock:
            view, known = self.view, self.view.member(node_id)
            if known is None or incarnation <= known.incarnation:
                return
            again = replace(known, incarnation=incarnation)
            self._adopt(View(view.epoch, tuple(again if each is known else each for each in view.members)))

    def _adopt(self, view: View) -> None:
        me = self._config.node_id
        if me in view.ring.nodes:
            mine = view.ring.nodes.index(me)
            nodes = frozenset(view.ring.nodes)
            self._location_index.follow_view(nodes=nodes, owned=lambda keys: view.ring.owners(keys) == mine)
            self._forget_s = time.monotonic() + LEARN_S
        # Idle links to former addresses of members would stay open for ever.
        self._pool.retain({address for member in view.members for address in member.endpoints.values()})
        self._adopting = True
        old, self.view = self.view, view
        # The new view is already set, so chunks that are stored after this line are announced to their new owners.
        keys = np.concatenate([self._store.ready_keys(), self._mover.keys()])
        if is_next(old, view):  # otherwise a view was missed, so announce all keys
            keys = keys[owner_changed(old, view, keys)]
        self.announce(keys)
        self._adopting = False

    def run(self, stopping: threading.Event) -> None:
        """Announce changes until `stopping` is set. The announcer's thread runs this method."""
        while not stopping.is_set():
            self._changed.wait(timeout=self._config.heartbeat_s)
            if self._changed.is_set():
                stopping.wait(ANNOUNCE_S)
            self._changed.clear()
            if time.monotonic() >= self._forget_s:
                self._forget_s = math.inf
                self._location_index.forget_former()
            below = self._mover.take_changes()
            with self._lock:
                queued, self._queue = self._queue, []
                added, removed = self._store.take_changes()
                self._sending = True
            self._mover.drop_outdated(added)
            keys = np.concatenate([added, removed, *below, *queued])
            if self._restarted:
                self._restarted = False
                for member in self.view.members:
                    self._send_to(member, keys[:0], FIRST_S)
            if len(keys) and not stopping.is_set():
                self._send(chunk_keys.unique(keys))
            self._sending = False

    def _send(self, keys: KeyArray) -> None:
        view = self.view
        owners = view.ring.owners(keys)
        for place in np.unique(owners[owners >= 0]).tolist():
            owner = view.member(view.ring.nodes[place])
            assert owner is not None
            theirs = keys[owners == place]
            with self._lock:
                is_slow = owner.node_id in self._slow
                if is_slow:
                    self._add_slow_locked(owner.node_id, theirs)
            if not is_slow and not self._send_parts(owner, theirs, FIRST_S):
                with self._lock:
                    self._slow[owner.node_id] = []
                    self._add_slow_locked(owner.node_id, theirs)
                self._slow_waiting.set()

    def _add_slow_locked(self, owner: NodeId, keys: KeyArray) -> None:
        if self.waiting_keys + len(keys) <= MAX_RETRIED_KEYS:
            self._slow[owner].append(keys)

    def run_slow(self, stopping: threading.Event) -> None:
        """Send announcements to the slow owners until `stopping` is set. The second thread runs this method."""
        while not stopping.is_set():
            self._slow_waiting.wait(timeout=self._config.heartbeat_s)
            self._slow_waiting.clear()
            for name in [*self._slow]:
                if not stopping.is_set():
                    self._send_slow(name)

    def _send_slow(self, name: NodeId) -> None:
        """Send a slow owner what waits for it. If nothing waits, the owner is not slow any more."""
        with self._lock:
            count = len(self._slow[name])  # more may be added meanwhile
            if not count:
                del self._slow[name]
                return
            keys = chunk_keys.unique(np.concatenate(self._slow[name]))
        view = self.view
        owner, theirs = view.member(name), view.ring.shares(keys).get(name, [])
        left: list[KeyArray] = []
        if owner is not None and not self._send_parts(owner, keys[theirs], SLOW_S):
            left = [keys]
        elif len(theirs) < len(keys):  # the view has changed, and other nodes own these keys now
            self.announce(np.delete(keys, theirs, axis=0))
        with self._lock:
            self._slow[name][:count] = left
        if not left:
            self._slow_waiting.set()

    def _send_parts(self, owner: Member, keys: KeyArray, timeout_s: float) -> bool:
        """Send an announcement of at most ANNOUNCED_KEYS keys at a time. Returns whether all were answered."""
        parts = range(0, len(keys), ANNOUNCED_KEYS)
        return all(self._send_to(owner, keys[start : start + ANNOUNCED_KEYS], timeout_s) for start in parts)

    def _send_to(self, owner: Member, keys: KeyArray, timeout_s: float) -> bool:
        """Send one announcement. Returns False if the owner does not answer in time. A refusal counts as an answer."""
        me = self._config.node_id
        self.announced += len(keys)
        nbytes, below = self._look_up(keys)
        here = nbytes > 0
        nbytes, below = nbytes[here], below[here]
        if owner.node_id == me:
            self._location_index.remove(me, keys[~here])
            self._location_index.add(me, keys[here], nbytes, below if below.any() else None)
            return True
        message = messages.Announce(
            me,
            added=chunk_keys.to_bytes(keys[here]),
            removed=chunk_keys.to_bytes(keys[~here]),
            nbytes=nbytes.astype("<u4").tobytes(),
            below_memory=pack_bits(below),
            incarnation=0 if (mine := self.view.member(me)) is None else mine.incarnation,
        )
        deadline_s = time.monotonic() + timeout_s
        try:
            self._pool.ask(owner.address, lambda link: link.call(message, deadline_s=deadline_s), deadline_s=deadline_s)
        except TransientError:
            self.failures += 1
            return False
        except RayKVError as error:  # no retry, because the owner would refuse again
            self.failures += 1
            self._log.write(logging.WARNING, "%s refuses an announcement: %.300s", owner.node_id, error)
        return True

    def _look_up(self, keys: KeyArray) -> tuple[npt.NDArray[np.uint32], Bits]:
        """Return the length of each chunk on this node, and whether the chunk is only in a tier below memory.

        A length of 0 means that this node lacks the chunk. The lookup in the chunk table holds the node's lock, because
        a lookup without the lock could miss a key.
        """
        nbytes = np.zeros(len(keys), np.uint32)
        for start in range(0, len(keys), LOCKED_KEYS):
            some = slice(start, start + LOCKED_KEYS)
            with self._lock:
                table = self._store.table
                rows, _ = table.find_ready(keys[some], table.ticks(time.monotonic()))
                nbytes[some] = np.where(rows >= 0, table.columns.nbytes[np.maximum(rows, 0)], 0)
        below = np.zeros(len(keys), np.bool_)
        if self._mover:
            absent = np.flatnonzero(nbytes == 0)
            places, nbytes[absent] = self._mover.find(keys[absent])
            below[absent] = places != Place.NOWHERE
        return nbytes, below
