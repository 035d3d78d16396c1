"""Announcements: a node tells the owner of each key whether it holds the chunk."""

import logging
import threading
import time
from typing import Final

import numpy as np
import numpy.typing as npt

from raykv.config import NodeConfig
from raykv.errors import RayKVError, TransientError
from raykv.node.below_memory import find_below
from raykv.node.handlers.fields import LOCKED_KEYS
from raykv.node.location_index import LocationIndex
from raykv.protocol import chunk_keys, messages
from raykv.protocol.codec import pack_bits
from raykv.protocol.placement import Member, View
from raykv.protocol.reasons import Place
from raykv.storage.store import Store
from raykv.tier.mover import TierMover
from raykv.transport.pool import ConnectionPool
from raykv.types import Bits, KeyArray

log = logging.getLogger(__name__)

ANNOUNCED_KEYS: Final = 1 << 16
"""Most keys in one announcement."""
MAX_RETRIED_KEYS: Final = 1 << 20
"""Most keys that wait for owners that do not answer. Beyond it the oldest are dropped: they cost a miss each."""
ANNOUNCE_DEADLINE_S: Final = 5.0


class Announcer:
    """Announces changes of the store and of the tiers in batches, on a thread of its own.

    An announcement says what is true when it is sent. So the order of changes does not matter, and repeating one does
    no harm.

    Attributes:
        view: The newest view; announcements go to its owners.
        failures: Announcements that an owner did not take.
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
        self._retried: list[KeyArray] = []  # their owners did not answer
        self._sending = self._adopting = False
        self.view = View()
        self.failures = 0

    def wake(self) -> None:
        """The store or a tier has changed."""
        if not self._changed.is_set():
            self._changed.set()

    def announce(self, keys: KeyArray) -> None:
        """Announce these keys, changed or not."""
        with self._lock:
            self._queue.append(keys)
        self._changed.set()

    @property
    def waiting_keys(self) -> int:
        """Keys in the queues, without changes of the store that were not looked at yet."""
        return sum(map(len, [*self._queue, *self._retried]))

    @property
    def done(self) -> bool:
        """Whether everything is announced."""
        with self._lock:
            return not (self._sending or self._adopting or self._queue or self._retried or self._store.has_changes)

    def adopt(self, view: View) -> None:
        """Follow a newer view: drop locations that others own now, and announce the keys that have another owner."""
        me = self._config.node_id
        if me in view.ring.nodes:
            mine = view.ring.nodes.index(me)
            nodes = frozenset(view.ring.nodes)
            self._location_index.follow_view(nodes=nodes, owned=lambda keys: view.ring.owners(keys) == mine)
        self._adopting = True
        old, self.view = self.view, view
        keys = np.concatenate([self._store.ready_keys(), self._mover.keys()])  # later ones go by the new view anyway
        if view.epoch == old.epoch + 1:  # after a gap this node may have been out of the view, and owners dropped it
            keys = keys[_owner_changed(old, view, keys)]
        self.announce(keys)
        self._adopting = False

    def run(self, stopping: threading.Event) -> None:
        """The thread: announce until `stopping`."""
        while not stopping.is_set():
            self._changed.wait(timeout=self._config.heartbeat_s)
            if self._changed.is_set():
                stopping.wait(self._config.announce_s)  # let more changes gather
            self._changed.clear()
            below = self._mover.take_changes()
            with self._lock:
                queued, self._queue, self._retried = [*self._queue, *self._retried], [], []
                added, removed = self._store.take_changes()
                self._sending = True
            self._mover.drop_outdated(added)
            keys = np.concatenate([added, removed, *below, *queued])
            if len(keys) and not stopping.is_set():
                self._send(np.unique(keys, axis=0))
            self._sending = False

    def _send(self, keys: KeyArray) -> None:
        view = self.view
        owners = view.ring.owners(keys)
        for place in np.unique(owners[owners >= 0]).tolist():
            owner = view.member(view.ring.nodes[place])
            assert owner is not None
            theirs = keys[owners == place]
            for start in range(0, len(theirs), ANNOUNCED_KEYS):
                self._send_to(owner, theirs[start : start + ANNOUNCED_KEYS])

    def _send_to(self, owner: Member, keys: KeyArray) -> None:
        me = self._config.node_id
        nbytes, below = self._look_up(keys)
        here = nbytes > 0
        nbytes, below = nbytes[here], below[here]
        if owner.node_id == me:
            self._location_index.remove(me, keys[~here])
            self._location_index.add(me, keys[here], nbytes, below if below.any() else None)
            return
        message = messages.Announce(
            me,
            added=chunk_keys.to_bytes(keys[here]),
            removed=chunk_keys.to_bytes(keys[~here]),
            nbytes=nbytes.astype("<u4").tobytes(),
            below_memory=pack_bits(below),
        )
        deadline_s = time.monotonic() + ANNOUNCE_DEADLINE_S
        try:
            self._pool.ask(owner.address, lambda link: link.call(message, deadline_s=deadline_s), deadline_s=deadline_s)
        except RayKVError as error:
            self.failures += 1
            if not isinstance(error, TransientError):  # it would be refused again
                log.warning("%s refuses an announcement: %s", owner.node_id, error)
                return
            with self._lock:
                self._retried.append(keys)
                while sum(map(len, self._retried)) > MAX_RETRIED_KEYS:
                    self._retried.pop(0)

    def _look_up(self, keys: KeyArray) -> tuple[npt.NDArray[np.uint32], Bits]:
        """Lengths of these chunks here, 0 for none, and which are below memory only.

        Under the lock, since a lookup without it may miss a key; in parts, since writers wait for the lock.
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
            places, nbytes[absent] = find_below(self._mover, keys[absent])
            below[absent] = places != Place.NOWHERE
        return nbytes, below


def _owner_changed(old: View, new: View, keys: KeyArray) -> Bits:
    """Which keys have another owner in the new view, or the same node after a restart, which made it forget them."""
    if not old.members or not new.members:
        return np.full(len(keys), bool(new.members))
    return np.not_equal(_incarnations(old, keys), _incarnations(new, keys))


def _incarnations(view: View, keys: KeyArray) -> npt.NDArray[np.int64]:
    """Incarnation of each key's owner. No two nodes have the same: it is the time of their start in nanoseconds."""
    incarnations = {member.node_id: member.incarnation for member in view.members}
    return np.array([incarnations[name] for name in view.ring.nodes], np.int64)[view.ring.owners(keys)]
