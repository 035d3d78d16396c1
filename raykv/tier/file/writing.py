"""Fills and publishes the packs of one node, and writes its tombstones. See `raykv.tier.file.tier`."""

import logging
import math
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from typing import Final

import numpy as np

from raykv.tier.file.catalog import Pack
from raykv.tier.file.folder import WRITE, Folder, Name, lock, write_summary
from raykv.tier.file.scanning import Scanner
from raykv.tier.file.state import State
from raykv.tier.segments.format import BLOCK_NBYTES, Counts, Record, blocks_of, key_array
from raykv.tier.segments.log import Log
from raykv.tier.segments.requests import Item
from raykv.tier.segments.volume import encoded, write_all

log = logging.getLogger(__name__)

BATCH_CHUNKS: Final = 256
BATCH_NBYTES: Final = 32 << 20
TOMBSTONES_S: Final = 1.0
TOMBSTONE_KEYS: Final = 1 << 14
"""The writer waits TOMBSTONES_S between two tombstone files, or less if a new pack begins or the tier closes. One file
gets at most TOMBSTONE_KEYS pending keys."""
MERGE_FILES: Final = 32
"""If a node has this many tombstone files, it merges them into one."""


class Part:
    """The pack that a process is filling. Only one thread uses it.

    Attributes:
        broken: Whether a write has failed. Then no batch fits any more.
        nbytes: Length of the content so far.
    """

    def __init__(self, folder: Folder, sequence: int, *, nbytes: int) -> None:
        self.name, self.begun_s, self.broken, self.nbytes = folder.name(sequence, "part"), time.monotonic(), False, 0
        self._folder = folder
        self._log = Log(limit=1, segment_blocks=nbytes // BLOCK_NBYTES, incarnation=sequence)
        self._log.add_free(0)
        self._segment = self._log.open_next()
        with folder.operation():
            self._fd = os.open(folder.path / str(self.name), WRITE | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                lock(self._fd)
                os.ftruncate(self._fd, nbytes)
            except OSError:
                self.close()
                with suppress(OSError):
                    folder.remove(self.name)
                raise

    def fits(self, counts: Counts, *, blocks: int) -> bool:
        return not self.broken and self._log.fits(counts, blocks=blocks)

    def write(self, items: Sequence[Item]) -> Record:
        """Write chunks as one batch, for which `fits` must be True. Returns the record of the batch."""
        batch = self._log.place(items, None)
        start = batch.start * BLOCK_NBYTES
        with self._folder.operation():
            try:
                nbytes = write_all(self._fd, [encoded(batch.record), *(item.view for item in items)], start)
                # This call starts the writeback now, so that the sync in `seal` is short.
                os.posix_fadvise(self._fd, start, nbytes, os.POSIX_FADV_DONTNEED)
            except OSError:
                self.broken = True
                raise
        self._log.finish(batch)
        self.nbytes = start + nbytes
        return batch.record

    def seal(self) -> Name | None:
        """Publish the part. After an OSError the caller may try again.

        Returns the pack's name; None if the part had no chunks or was removed by another node.
        """
        assert self._segment is not None
        if not self._segment.records:
            self._folder.remove(self.name)
            self.close()
            return None
        with self._folder.operation():
            self.nbytes += write_summary(self._fd, self._log.summary(self._segment))
            try:
                self._folder.publish(self._fd, self.name, "pack")
            except FileNotFoundError:
                self.close()
                return None
        self.close()
        return self.name._replace(kind="pack")

    def close(self) -> None:
        """Close the file. A second call does nothing, because the descriptor may belong to another file by then."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class Writer:
    """Writes packs and tombstone files. Any thread may call `due_s`. All other methods belong to one thread."""

    def __init__(self, state: State, scanner: Scanner) -> None:
        self._state, self._scanner = state, scanner
        self._part: Part | None = None
        self._sequence = 0
        self._tombstones_s = 0.0

    def due_s(self) -> float:
        """Return the monotonic time at which `step` will have work. The caller holds the lock."""
        state = self._state
        if not state.writable:
            return state.retry_s
        if state.queue:
            return 0.0
        tombstones_s = self._tombstones_s if state.catalog.tombstones.pending else math.inf
        return min(tombstones_s, self._part.begun_s + state.config.seal_s if self._part else math.inf)

    def step(self) -> None:
        try:
            self._step()
        except OSError as error:
            self._state.fail(error)

    def finish(self) -> None:
        """Publish the part and all pending tombstones before the tier closes."""
        try:
            self._seal()
            while self._state.catalog.tombstones.pending and self._state.writable:
                self._write_tombstones()
        except OSError as error:
            log.warning("%s: chunks or tombstones were not published: %s", self._state.folder.path, error)
            if self._part is not None:
                self._part.close()

    def _step(self) -> None:
        state, now_s = self._state, time.monotonic()
        if not state.writable:
            state.folder.prepare()
            state.folder.probe(self._next_sequence())
            self._seal()  # publishes the part that was being filled when the tier failed
            with state.lock:
                state.writable = True
                state.recover()
            return
        if state.catalog.tombstones.pending and now_s >= self._tombstones_s:
            self._write_tombstones()
        part, pack = self._part, state.filling
        lost = part is not None and (part.broken or (pack is not None and pack.removed))
        if part is not None and (lost or now_s >= part.begun_s + state.config.seal_s):
            self._seal()
        with state.lock:
            items = self._next_batch()
        if items and self._part is not None and state.filling is not None:
            self._write(self._part, state.filling, items)
        elif state.queue:
            self._begin()

    def _next_batch(self) -> list[Item]:
        """Take the next batch's chunks from the queue. Returns [] if the queue is empty or a new part is needed."""
        state, part, tombstones = self._state, self._part, self._state.catalog.tombstones
        items, blocks, texts = list[Item](), 0, frozenset[bytes]()
        while part is not None and (item := state.next_item()) is not None and len(items) < BATCH_CHUNKS:
            blocks += blocks_of(item.chunk.nbytes)
            texts |= {item.text}
            if items and blocks * BLOCK_NBYTES > BATCH_NBYTES:
                break
            if tombstones.covers(item.chunk.key, item.text, part.name.sequence):
                break
            if not part.fits(Counts(len(items) + 1, texts=texts), blocks=blocks):
                break
            items.append(state.dequeue())
        return items

    def _write(self, part: Part, pack: Pack, items: list[Item]) -> None:
        state, catalog = self._state, self._state.catalog
        try:
            record = part.write(items)
        except OSError:
            with state.lock:
                for item in items:
                    state.finish(item, False)
            raise
        with state.lock:
            state.counts["disk_nbytes"] += part.nbytes - pack.nbytes
            pack.nbytes = part.nbytes
            if not pack.removed:
                entries = record.entries[np.array([not item.cancelled for item in items], np.bool_)]
                catalog.insert(pack, record.texts, entries)
            here = catalog.index.find_all(key_array([item.chunk.key for item in items])) >= 0
            for item, is_here in zip(items, here.tolist(), strict=True):
                state.finish(item, is_here)

    def _next_sequence(self, above: int = 0) -> int:
        """Return a number above `above` and all earlier results: the time in ns since 1970, if that is high enough."""
        with self._state.lock:
            self._sequence = max(time.time_ns(), self._sequence + 1, above + 1)
            return self._sequence

    def _begin(self) -> None:
        """Begin a part. Its sequence is higher than that of every tombstone, so no tombstone covers the new chunks."""
        state = self._state
        self._seal()
        if state.catalog.tombstones.pending:
            self._write_tombstones()
        self._scanner.make_space()
        sequence = self._next_sequence(state.catalog.tombstones.latest)
        part = Part(state.folder, sequence, nbytes=state.config.pack_nbytes)
        with state.lock:
            self._part, state.filling = part, state.catalog.add_pack(part.name, 0)

    def _seal(self) -> None:
        state, part, pack = self._state, self._part, self._state.filling
        if part is None or pack is None:
            return
        name = part.seal()
        with state.lock:
            self._part = state.filling = None
            state.counts["disk_nbytes"] += part.nbytes - pack.nbytes
            if name is None:
                state.catalog.remove_pack(pack)
            else:
                pack.name, pack.nbytes = name, part.nbytes

    def _write_tombstones(self) -> None:
        """Write pending tombstones to a new file.

        If this node has MERGE_FILES older tombstone files, the new file replaces them.
        """
        state, catalog, tombstones = self._state, self._state.catalog, self._state.catalog.tombstones
        with state.lock:
            keys, texts = list(islice(tombstones.pending_keys, TOMBSTONE_KEYS)), list(tombstones.pending_texts)
            old = [pack for pack in catalog.known.values() if pack.name.kind == "tombs" and pack.mine]
            sequence = max([tombstones.pending_sequence, *(pack.name.sequence + 1 for pack in old)])
            while state.folder.name(sequence, "tombs").stem in catalog.known:
                sequence += 1
            catalog.apply_tombstones(sequence, keys, texts)
            old = old if len(old) >= MERGE_FILES else []
            merged = self._merged(old)
        name = state.folder.name(sequence, "tombs")
        nbytes = state.folder.write_tombstones(name, [*keys, *merged[0]], [*texts, *merged[1]])
        with state.lock:
            self._tombstones_s = time.monotonic() + TOMBSTONES_S
            tombstones.remove_pending(keys, texts)
            catalog.apply_tombstones(sequence, *merged)
            catalog.add_pack(name, nbytes)
        for pack in old:
            state.folder.remove(pack.name)

    def _merged(self, old: list[Pack]) -> tuple[list[bytes], list[bytes]]:
        """Return the keys and quota groups of these tombstone files, except those with new chunks in the index."""
        catalog = self._state.catalog
        keys, texts = catalog.tombstones.of({pack.name.sequence for pack in old})
        here = catalog.index.find_all(key_array(keys)) >= 0
        keys = [key for key, is_here in zip(keys, here.tolist(), strict=True) if not is_here]
        return keys, [text for text in texts if not len(catalog.rows_of_group(text))]
