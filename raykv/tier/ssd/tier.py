"""The tier of a node's SSDs: a log of segments on each path, and one index in memory for all paths.

One call writes a batch: a record and many chunks (`segments.format`). Bytes move between the arena and the drives
without a copy (`segments.volume`). Each path has a log (`segments.log`) and threads (`ssd.workers`). Idle threads take
chunks from the write queue that all paths share, so a slower drive gets fewer of them.

A chunk counts as stored when recovery would find it. Its callback reports success only then. Queued chunks are lost if
the process is killed.

A path is off after a failure, and slow if an operation takes too long. An off or slow path gets no new work, and its
queued reads fail; the other paths continue. The callback of a running operation is called only when the operation
ends, because the disk may use its buffers until then.
"""

import threading
import time
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from raykv.config import SsdConfig
from raykv.errors import ConfigError
from raykv.protocol.reasons import Place
from raykv.tier.base import Arrived, Chunk, Environment, Found, Tier, Written
from raykv.tier.segments.format import raw_keys
from raykv.tier.segments.index import SEGMENTS
from raykv.tier.segments.requests import QUEUED_READS, Request, runs_of
from raykv.tier.segments.volume import Volume
from raykv.tier.ssd.state import Drive, Shared
from raykv.tier.ssd.workers import Workers
from raykv.types import Bits, KeyArray

WATCH_S: Final = 0.25
"""At least this often, a thread looks for slow drives, and tries failed drives again."""
TIDY_S: Final = 10.0
"""Expired chunks are removed from the index at this interval."""
CLOSE_S: Final = 10.0
"""`close` waits at most this long for each drive's running operations, and then at most this long for callbacks."""


class SsdTier(Tier):
    name, place = "ssd", Place.SSD

    def __init__(self, config: SsdConfig, environment: Environment) -> None:
        """Lock the directories and start recovery.

        Raises:
            ConfigError: Another process uses a directory; or O_DIRECT is required and a file system refuses it; or the
                memory does not suffice for the index.
        """
        self.config, self.write_nbytes_per_day = config, config.write_nbytes_per_day
        self._shared = shared = Shared(config, environment)
        for number, path in enumerate(config.paths):
            volume = Volume(path / environment.node, segment_nbytes=config.segment_nbytes, direct=config.direct)
            shared.drives.append(Drive(number, volume, config, shared.lock))
        try:
            for drive in shared.drives:
                try:
                    drive.volume.open()
                except OSError as error:
                    shared.fail_later(drive, error)
        except ConfigError:
            for drive in shared.drives:
                drive.volume.close()
            shared.callbacks.close([], CLOSE_S)
            raise
        self._workers = [Workers(shared, drive) for drive in shared.drives]
        self._stop = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="raykv-ssd-watch", daemon=True)
        self._watcher.start()

    def has(self, keys: KeyArray) -> Bits:
        with self._shared.lock:
            here: Bits = self._shared.index.find(keys, now_s=time.time()) >= 0
        return here

    def find(self, keys: KeyArray) -> list[Found | None]:
        with self._shared.lock:
            index = self._shared.index
            rows = index.find(keys, now_s=time.time())
            return [index.found(row) if row >= 0 else None for row in rows.tolist()]

    def keys(self) -> KeyArray:
        with self._shared.lock:
            return self._shared.index.keys(self._shared.index.ready())

    def take_changes(self) -> tuple[KeyArray, KeyArray]:
        """See `Tier`. A key that was added and then removed is returned as removed."""
        with self._shared.lock:
            keys = self._shared.changes.take()
            here = self._shared.index.find_all(keys) >= 0
        return keys[here], keys[~here]

    def used_nbytes(self, group: int | None = None) -> int:
        with self._shared.lock:
            nbytes = self._shared.index.nbytes
            return int(nbytes.sum() if group is None else nbytes[group])

    def spare_chunks(self, group: int, nbytes: int) -> int:
        shared = self._shared
        with shared.lock:
            return shared.spare_chunks(group, nbytes)

    def write(self, chunks: Sequence[Chunk], done: Written) -> int:
        shared = self._shared
        with shared.lock:
            taken = shared.offer(chunks, done, on=shared.on)
            for drive in shared.drives:
                drive.wake.notify()
        return taken

    def read(self, keys: KeyArray, found: Sequence[Found | None], offsets: Sequence[int], done: Arrived) -> bool:
        shared = self._shared
        with shared.lock:
            off = shared.ended or not any(drive.readable for drive in shared.drives)
            if off or sum(len(drive.reads) for drive in shared.drives) >= QUEUED_READS:
                shared.counts["refused"] += len(keys)
                return False
            request = Request(shared.callbacks, done, chunks=len(keys))
            for run in runs_of(shared.index, keys, found, offsets, request):
                drive = shared.drives[run.segment // SEGMENTS]
                if drive.readable:
                    drive.log.segments[run.segment % SEGMENTS].readers += 1
                    drive.reads.append(run)
                else:
                    run.finish([False] * len(run.pieces))
            request.submit()
            shared.notify()
        return True

    def delete(self, keys: KeyArray) -> int:
        """See `Tier`. If the process is killed before the tombstones are written, a restart finds the chunks again."""
        shared = self._shared
        with shared.lock:
            here = int((shared.index.find(keys, now_s=time.time()) >= 0).sum())
            rows = np.unique(shared.index.find_all(keys))
            shared.remove(rows[rows >= 0], tombstones=True)
            raw = raw_keys(keys)
            shared.cancel(raw)
            for drive in shared.drives:
                if drive.state != "on":
                    drive.remember_deleted(raw)
            shared.notify()
        return here

    def drop(self, group: int) -> int:
        shared, text = self._shared, self._shared.groups.text(group)
        with shared.lock:
            rows = shared.index.rows_of_group(group)
            shared.remove(rows, tombstones=False)
            shared.cancel_group(group)
            for drive in shared.drives:
                drive.dropped.update({text: None} if text else {})
            shared.quotas.pop(group, None)
            shared.notify()
        return len(rows)

    def set_quota(self, group: int, nbytes: int | None) -> None:
        with self._shared.lock:
            self._shared.quotas.pop(group, None)
            if nbytes is not None:
                self._shared.quotas[group] = nbytes
                self._shared.enforce_quotas([group])
                self._shared.notify()

    def _watch(self) -> None:
        tidied_s = time.monotonic()
        while not self._stop.wait(min(WATCH_S, self.config.io_timeout_s / 4)):
            with self._shared.lock:
                for workers in self._workers:
                    workers.watch()
                if time.monotonic() - tidied_s >= TIDY_S:
                    tidied_s = time.monotonic()
                    self._shared.remove_expired()

    def stats(self) -> dict[str, Any]:
        """See `Tier`. Adds `paths`: `Drive.stats` of each path."""
        shared = self._shared
        with shared.lock:
            paths = [drive.stats() for drive in shared.drives]
            states = [path["state"] for path in paths]
            worst = min(paths, key=lambda path: ("off", "slow", "starting", "on").index(path["state"]))
            return {
                "state": next(state for state in ("slow", "starting", "on", "off") if state in states),
                "reason": f"{worst['path']}: {worst['reason']}" if worst["reason"] else "",
                "chunks": len(shared.index),
                "used_nbytes": int(shared.index.nbytes.sum()),
                "capacity_nbytes": self.config.capacity_nbytes * len(paths),
                "spare_nbytes": sum(drive.spare_segments() for drive in shared.drives) * self.config.segment_nbytes,
                **shared.counts,
                "paths": paths,
            }

    def close(self) -> None:
        """See `Tier`. Batches being written and pending tombstones are finished first."""
        shared = self._shared
        self._stop.set()
        self._watcher.join()
        with shared.lock:
            if shared.ended:
                return
            shared.ended = True
            shared.refuse_writes()
            for drive in shared.drives:
                shared.refuse_reads(drive)
            shared.notify()
        for drive, workers in zip(shared.drives, self._workers, strict=True):
            if workers.io.join(CLOSE_S):
                drive.volume.close()
        shared.callbacks.close([thread for workers in self._workers for thread in workers.io.threads], CLOSE_S)
