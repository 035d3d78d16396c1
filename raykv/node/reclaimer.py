"""The reclaimer: frees and populates memory in the background, so that writers do not wait for it."""

import threading
import time
from typing import Final

from raykv.config import NodeConfig
from raykv.memory.host import has_to_spare
from raykv.node.announcer import Announcer
from raykv.storage.store import Store
from raykv.tier.mover import TierMover

QUIET_S: Final = 0.1
"""If nobody writes for this long and the host has memory to spare, the reclaimer populates the whole arena."""


class Reclaimer:
    """Demotes, evicts and expires chunks, and populates memory, on its own thread.

    Demoting copies a chunk to a tier below memory. Populating makes the kernel allocate pages before their first use.
    """

    def __init__(
        self,
        config: NodeConfig,
        store: Store,
        lock: threading.Lock,
        mover: TierMover,
        announcer: Announcer,
        due: threading.Event,
        draining: threading.Event,
    ) -> None:
        """Take the node's parts. `draining`: once set, chunks leave memory only when they expire."""
        self._config, self._store, self._lock, self._mover = config, store, lock, mover
        self._announcer, self._due, self._draining = announcer, due, draining
        self._written = store.written
        self._written_s = self._expired_s = time.monotonic()

    def wake_if_due(self) -> None:
        """Wake the thread if there is work. Every write calls this method, so it must be fast."""
        store = self._store
        if not self._due.is_set() and (store.evictor.needs_eviction or self._mover.demotion.due or store.populator.due):
            self._due.set()

    def run(self, stopping: threading.Event) -> None:
        """Work until `stopping` is set. The reclaimer's thread runs this method."""
        while not stopping.is_set():
            while self._step() and not stopping.is_set():
                pass
            self._due.wait(self._config.heartbeat_s if self._quiet() else QUIET_S)
            self._due.clear()

    def _quiet(self) -> bool:
        if self._store.written != self._written:
            self._written, self._written_s = self._store.written, time.monotonic()
        return time.monotonic() - self._written_s >= QUIET_S

    def _step(self) -> bool:
        """Do one step of each task. Returns whether there is more work."""
        store, quiet = self._store, self._quiet()
        retry = time.monotonic() >= self._expired_s + self._config.heartbeat_s
        if retry:
            self._expired_s = time.monotonic()
            if store.expire(self._lock, now_s=self._expired_s):
                self._announcer.wake()
        if self._draining.is_set():  # a chunk that is evicted, in memory or in a tier, could not be moved any more
            return False
        self._mover.demote()
        with self._lock:
            # The chunks to evict next are pinned while a tier copies them. Eviction waits until the copy is done,
            # because eviction would otherwise take other chunks.
            wait = self._mover.demotion.writing and not store.evictor.nearly_full
            more = not wait and store.evict_ahead(now_s=time.monotonic())
        all_of_it = quiet and not self._due.is_set() and has_to_spare(store.config.shm_dir)
        return store.populator.step(self._lock, quiet=all_of_it, retry=retry) or more
