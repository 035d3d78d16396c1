"""The tier in a directory that all nodes share, on a parallel or network file system, or on one host's disk.

Chunks are collected into packs: large files in the format of `segments.format`. Each file has one writer:

    <sequence>-<writer>-<process>.part    being filled; only its writer reads it
    <sequence>-<writer>-<process>.pack    sealed: it has its summary, and never changes again
    <sequence>-<writer>-<process>.tombs   tombstones: keys and groups deleted in all packs with lower sequences

A part is synced to the disk and then renamed to a pack, so no node sees an incomplete pack. Nodes send each other no
messages about packs. Each node scans the directory for new packs and reads their summaries. So nodes that start later,
or belong to another cluster, find the same chunks.

Space is made by removing the least recently read packs. Readers set a pack's modification time to the time of the read,
so all nodes remove packs in the same order. A tombstone file stays while an older pack exists.

One thread scans, one writes, the others read. Only these threads wait for the file system; callers never do.
"""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, cast

import numpy as np

from raykv.config import FileTierConfig
from raykv.protocol.reasons import Place
from raykv.tier.base import Arrived, Chunk, Environment, Found, Tier, Written
from raykv.tier.file.catalog import Pack
from raykv.tier.file.folder import VANISHED
from raykv.tier.file.scanning import Scanner
from raykv.tier.file.state import State
from raykv.tier.file.writing import Writer
from raykv.tier.segments.format import BLOCK_NBYTES, raw_keys
from raykv.tier.segments.io_threads import IoThreads
from raykv.tier.segments.requests import QUEUED_READS, Request, Run, runs_of
from raykv.types import Bits, KeyArray, Rows

TOUCH_S: Final = 60.0
"""A node that reads a pack sets the pack's modification time, at most once per TOUCH_S."""
SCANNER, WRITER = 0, 1
"""Numbers of the threads that scan and write. All other threads read."""
CLOSE_S: Final = 5.0
"""`close` waits at most this long for running operations, and then at most this long for callbacks."""


class FileTier(Tier):
    """A tier in a shared directory. If the file system is full or read-only, writes stop and reads continue."""

    name, place, shared = "file", Place.FILE, True

    def __init__(self, config: FileTierConfig, environment: Environment) -> None:
        """Start the threads. Chunks of existing packs are found once a scan has read the packs' summaries.

        Raises ConfigError if there is not enough memory for the index.
        """
        self._config, self.write_nbytes_per_day = config, config.write_nbytes_per_day
        self._state = state = State(config, environment)
        self._catalog, self._index = state.catalog, state.catalog.index
        self._scanner = Scanner(state)
        self._writer, self._writer_ended = Writer(state, self._scanner), False
        self._threads = IoThreads(
            2 + config.depth, "raykv-file", self._wait_for_task, failed=lambda error: state.fail(error, reading=True)
        )

    def _wait_for_task(self, thread: int) -> Callable[[], None] | None:
        state = self._state
        with state.lock:
            while not state.closed:
                task, due_s = self._next_task(thread)
                now_s = time.monotonic()
                if due_s <= now_s:
                    return task
                state.lock.wait(None if due_s == math.inf else due_s - now_s)
            if thread == WRITER and not self._writer_ended:
                self._writer_ended = True
                return self._writer.finish
        return None

    def _next_task(self, thread: int) -> tuple[Callable[[], None], float]:
        if thread == SCANNER:
            return self._scanner.scan, self._state.next_scan_s
        if thread == WRITER:
            return self._writer.step, self._writer.due_s()
        if not self._state.runs:
            return self.close, math.inf
        run = self._state.runs.popleft()
        return lambda: self._read(run), 0.0

    def has(self, keys: KeyArray) -> Bits:
        """See `Tier`. All False while the directory cannot be read."""
        with self._state.lock:
            here: Bits = (self._index.find(keys, now_s=time.time()) >= 0) & self._state.readable
        return here

    def find(self, keys: KeyArray) -> list[Found | None]:
        """See `Tier`. A quota group that this node does not know yet gets a number."""
        with self._state.lock:
            if not self._state.readable:
                return [None] * len(keys)
            rows = self._index.find(keys, now_s=time.time()).tolist()
            found = [self._index.found(row) if row >= 0 else None for row in rows]
            texts = {each.group: self._catalog.texts[each.group] for each in found if each is not None}
        numbers = {group: self._state.groups.number(text) for group, text in texts.items()}
        known = [None if each is None or numbers[each.group] is None else each for each in found]
        return [each and each._replace(group=cast(int, numbers[each.group])) for each in known]

    def keys(self) -> KeyArray:
        with self._state.lock:
            return self._index.keys(self._catalog.own(self._index.ready()))

    def take_changes(self) -> tuple[KeyArray, KeyArray]:
        with self._state.lock:
            return self._catalog.take_changes()

    def used_nbytes(self, group: int | None = None) -> int:
        text = None if group is None else self._state.groups.text(group)
        with self._state.lock:
            if text is None:
                return int(self._index.nbytes.sum())
            number = self._catalog.groups.get(text)
            return 0 if number is None else int(self._index.nbytes[number])

    def stats(self) -> dict[str, Any]:
        """See `Tier`. Also returns three fields of this tier.

        * `packs`, `pack_nbytes`: number of packs in the directory, and the space that they take.
        * `packs_removed`: number of packs that this node has removed to make space.
        """
        state = self._state
        with state.lock:
            packs = [pack for pack in self._catalog.known.values() if pack.name.kind != "tombs"]
            status = state.status()
            slow = f"an operation takes longer than {self._config.io_timeout_s} s" if status == "slow" else ""
            return {
                "state": status,
                "reason": slow or state.reason,
                "chunks": len(self._index),
                "used_nbytes": int(self._index.nbytes.sum()),
                "capacity_nbytes": self._config.capacity_nbytes,
                "packs": len(packs),
                "pack_nbytes": sum(pack.nbytes for pack in packs),
                "packs_removed": state.packs_removed,
                **state.counts,
            }

    def write(self, chunks: Sequence[Chunk], done: Written) -> int:
        state = self._state
        with state.lock:
            taken = state.offer(chunks, done, on=state.status() == "on")
            state.lock.notify_all()
        return taken

    def read(self, keys: KeyArray, found: Sequence[Found | None], offsets: Sequence[int], done: Arrived) -> bool:
        state = self._state
        with state.lock:
            ready = state.readable and not state.closed and state.status() != "slow"
            if not ready or len(state.runs) >= QUEUED_READS:
                state.counts["refused"] += len(keys)
                return False
            request = Request(state.callbacks, done, chunks=len(keys))
            state.runs.extend(runs_of(self._index, keys, found, offsets, request))
            request.submit()
            state.lock.notify_all()
        return True

    def _read(self, run: Run) -> None:
        state, problem, got = self._state, None, 0
        with state.lock:
            pack, views = state.catalog.packs.get(run.segment), run.views(state.arena)
        try:
            if pack is not None:
                got = state.folder.read(pack.name, run.block * BLOCK_NBYTES, views)
        except OSError as error:
            problem = error
        right = run.verify(views, got)
        if problem is not None and problem.errno not in VANISHED:
            state.fail(problem, reading=True)
        with state.lock:
            wrong = run.enter(right, state)
            if problem is not None and problem.errno in VANISHED and pack is not None:
                state.catalog.remove_pack(pack)
            else:
                state.counts["corrupt"] += len(wrong) if problem is None else 0
                state.catalog.remove(wrong)
            run.finish(right.tolist())
        if pack is not None:
            self._mark_used(pack)

    def _mark_used(self, pack: Pack) -> None:
        now_s = time.monotonic()
        if pack.name.kind == "pack" and now_s - pack.touched_s > TOUCH_S:
            pack.touched_s = now_s
            with suppress(OSError):  # the pack was removed, or the directory is read-only
                self._state.folder.touch(pack.name)

    def delete(self, keys: KeyArray) -> int:
        """See `Tier`.

        Until the tombstones are written, other nodes still find the chunks, and this node finds them after a restart.
        Keys that are not in the index get tombstones too: they may be in packs that this node has not scanned yet.
        """
        state, names = self._state, raw_keys(keys)
        with state.lock:
            rows = self._index.find_all(keys)
            rows = np.unique(rows[rows >= 0])
            state.cancel(names)
            self._bury(rows, keys=names)
        return len(rows)

    def drop(self, group: int) -> int:
        state, text = self._state, self._state.groups.text(group)
        with state.lock:
            rows = self._catalog.rows_of_group(text)
            state.cancel_group(group)
            self._bury(rows, texts=[text])
        return len(rows)

    def _bury(self, rows: Rows, *, keys: Sequence[bytes] = (), texts: Sequence[bytes] = ()) -> None:
        """Queue tombstones and apply them. `rows`: rows of the chunks that these tombstones delete.

        The tombstones get a higher sequence than the packs of these chunks, and than the pack that is being filled.
        """
        state, catalog = self._state, self._catalog
        packs = [*catalog.sequences(rows).tolist(), 0 if state.filling is None else state.filling.name.sequence]
        sequence = max(time.time_ns(), 1 + max(packs))
        catalog.tombstones.add_pending(sequence, keys, texts)
        catalog.apply_tombstones(sequence, keys, texts)
        state.lock.notify_all()

    def close(self) -> None:
        """See `Tier`. Publishes pending tombstones and the part that is being filled, if that takes at most CLOSE_S."""
        state = self._state
        with state.lock:
            state.closed, state.readable = True, False
            state.refuse_writes()
            state.refuse_reads()
            state.lock.notify_all()
        ended = self._threads.join(CLOSE_S)
        state.callbacks.close(self._threads.threads, CLOSE_S if ended else 0.0)
        if ended:
            self._index.close()
