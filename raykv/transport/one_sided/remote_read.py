"""Reads a run of chunks one-sidedly. The holder is asked where the chunks are; then it has no part in the transfer.

A transfer is valid if the row's record is the same after it as the holder has said before it, with an even generation:
the rule for reads of shared memory (see `raykv.memory.table`). The records are read only when all bytes are here,
because a device may fetch the memory of several reads in any order. Nothing is pinned at the holder.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from raykv.memory.copying import CopyThreads, checksum_of, scatter
from raykv.memory.layout import RECORD
from raykv.protocol import messages
from raykv.protocol.codec import array, expect
from raykv.transport.bulk_read import PART_KEYS, ReadRun
from raykv.transport.link import Link
from raykv.transport.one_sided.base import Item, Late, Moving, Reading
from raykv.transport.one_sided.staging import STAGE_NBYTES, Stage, Stages, aligned

PART_NBYTES: Final = STAGE_NBYTES
"""One request asks for chunks of at most this many bytes, or for one chunk."""


class Source(NamedTuple):
    """Where a chunk lies at the holder. `keys`: the key of its registration, for each queue pair."""

    place: int
    row: int
    offset: int
    nbytes: int
    checksum: int
    generation: int
    keys: tuple[int, ...]


@dataclass
class Window:
    """Chunks that are read into one stage, and where each lies in it. `transfer`: their bytes, then their records."""

    sources: list[Source] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    used: int = 0
    stage: Stage | None = None
    transfer: Moving | None = None

    def fits(self, source: Source) -> bool:
        """Whether there is room for a further chunk, and for the records of all chunks behind them."""
        records = (len(self.sources) + 1) * RECORD.itemsize
        return self.used + aligned(source.nbytes) + records <= STAGE_NBYTES

    def add(self, source: Source) -> None:
        self.sources.append(source)
        self.starts.append(self.used)
        self.used += aligned(source.nbytes)


class RemoteRead:
    """Reads one run. One window of chunks is copied to the caller's buffers while the next one is on the network."""

    def __init__(
        self,
        run: ReadRun,
        connection: Reading,
        stages: Stages,
        *,
        verify: bool,
        threads: CopyThreads,
    ) -> None:
        """`verify`: whether to compare checksums, in addition to the records."""
        self._run, self._connection, self._stages = run, connection, stages
        self._verify, self._threads = verify, threads
        self._named_any = False
        self.left: list[int] = []

    def read(self, link: Link, *, deadline_s: float) -> list[int]:
        """Read the chunks that have not arrived.

        Returns:
            Indices of the chunks that the holder has, but that cannot be read one-sidedly: they are too large, or their
            memory is not registered yet.

        Raises:
            Broken: The connection failed. What arrived before is valid.
            RayKVError: An error of `Link.call`.
        """
        self._run.begin(self._connection.path)
        ahead: Window | None = None
        held: list[Window] = []
        try:
            for window in self._windows(link, deadline_s):
                ahead = self._take_stage(window, ahead, held, deadline_s)
                if ahead is not None:
                    self._begin_end(ahead, deadline_s)
                self._start(window, deadline_s)
                if ahead is not None:
                    self._end(ahead, held, deadline_s)
                ahead = window
            if ahead is not None:
                self._begin_end(ahead, deadline_s)
                self._end(ahead, held, deadline_s)
        except BaseException:
            self._connection.close()  # so that nothing writes to the stages, which are given back now
            link.close()
            raise
        finally:
            for window in held:
                self._give_up(window)
        if self._run.corrupt:
            link.call(messages.Suspect(self._run.progress.raw_keys(self._run.corrupt)), deadline_s=deadline_s)
        return self.left

    def _take_stage(self, window: Window, ahead: Window | None, held: list[Window], deadline_s: float) -> Window | None:
        """Give a window a stage. Without a free one, end the window `ahead` first: readers wait for no other reader.

        Returns:
            `ahead`, or None if it was ended.
        """
        window.stage = self._stages.take(deadline_s=deadline_s if ahead is None else 0.0)
        if window.stage is None and ahead is not None:
            self._begin_end(ahead, deadline_s)
            self._end(ahead, held, deadline_s)
            ahead, window.stage = None, self._stages.take(deadline_s=deadline_s)
        if window.stage is None:
            raise Late("no registered memory became free by the deadline")
        held.append(window)
        return ahead

    def _give_up(self, window: Window) -> None:
        """End a window after an error. The connection is closed already."""
        if window.transfer is not None:
            window.transfer.cancel()
        if window.stage is not None:
            self._stages.give(window.stage, None if window.transfer is None else window.transfer.idle)

    # -- where the chunks are ---------------------------------------------------------------------------------------

    def _windows(self, link: Link, deadline_s: float) -> Iterator[Window]:
        """Yield windows of chunks, without stages."""
        window = Window()
        for source in self._sources(link, deadline_s):
            if not window.fits(source):
                yield window
                window = Window()
            window.add(source)
        if window.sources:
            yield window

    def _sources(self, link: Link, deadline_s: float) -> Iterator[Source]:
        """Ask where the chunks are, part by part, and yield those that can be read."""
        progress = self._run.progress
        parts = deque(progress.cut(self._run.missing, nbytes=PART_NBYTES, keys=PART_KEYS))
        while parts and not self._named_any:
            part = parts.popleft()
            nixl = self._connection.path == "nixl"
            request = messages.Find(progress.raw_keys(part), self._run.locate, nixl, group=progress.group)
            found = expect(messages.Found, link.call(request, deadline_s=deadline_s))
            yield from self._sources_in(found, part)

    def _sources_in(self, found: messages.Found, part: list[int]) -> Iterator[Source]:
        count, run = len(part), self._run
        keys = array(found.remote_keys, "<u4", count * self._connection.ends).reshape(-1, count)
        columns = zip(
            part,
            array(found.rows, "<i4", count).tolist(),
            array(found.offsets, "<u8", count).tolist(),
            array(found.nbytes, "<u4", count).tolist(),
            array(found.checksums, "<u8", count).tolist(),
            array(found.generations, "<u4", count).tolist(),
            map(tuple, keys.T.tolist()),
            strict=True,
        )
        sources = [Source(*each) for each in columns]
        absent = [source.place for source in sources if source.row < 0]
        if absent:
            self._named_any |= run.add_absent(absent, found.choices, found.places)
        for source in sources:
            if source.row < 0:
                continue
            if source.nbytes != run.progress.sizes[source.place]:
                run.other_size.append(source.place)
            elif not self._connection.readable(source.keys) or source.nbytes + RECORD.itemsize > STAGE_NBYTES:
                self.left.append(source.place)
            else:
                yield source

    # -- one window -------------------------------------------------------------------------------------------------

    def _start(self, window: Window, deadline_s: float) -> None:
        """Post the reads of all chunks."""
        arena, stage = self._connection.arena, window.stage
        assert stage is not None
        items = [
            Item(stage.address + start, stage.keys, arena + source.offset, source.keys, source.nbytes)
            for source, start in zip(window.sources, window.starts, strict=True)
        ]
        window.transfer = self._connection.moving(items)
        window.transfer.start(deadline_s)

    def _begin_end(self, window: Window, deadline_s: float) -> None:
        """Wait for all chunks. Then post the reads of the records, which lie behind the chunks in the stage."""
        stage = window.stage
        assert window.transfer is not None
        assert stage is not None
        window.transfer.wait(deadline_s)
        records, keys, size = self._connection.records, self._connection.record_keys, RECORD.itemsize
        behind = stage.address + window.used
        items = [
            Item(behind + number * size, stage.keys, records + source.row * size, keys, size)
            for number, source in enumerate(window.sources)
        ]
        window.transfer = self._connection.moving(items)
        window.transfer.start(deadline_s)

    def _end(self, window: Window, held: list[Window], deadline_s: float) -> None:
        """Wait for the records. Copy the chunks that did not change to the caller's buffers. Give the stage back."""
        run, progress, stage = self._run, self._run.progress, window.stage
        assert window.transfer is not None
        assert stage is not None
        window.transfer.wait(deadline_s)
        records = np.frombuffer(stage.view, RECORD, len(window.sources), window.used)
        for source, start, record in zip(window.sources, window.starts, records, strict=True):
            key_hi, key_lo = progress.keys[source.place].tolist()
            unchanged = record["generation"] == source.generation and record["nbytes"] == source.nbytes
            if not unchanged or record["key_hi"] != key_hi or record["key_lo"] != key_lo:
                run.gone.append(source.place)  # it was evicted meanwhile
            elif self._copy(stage.view[start : start + source.nbytes], progress.targets[source.place], source):
                run.arrived.append(source.place)
            else:
                run.corrupt.append(source.place)
        held.remove(window)
        self._stages.give(stage)

    def _copy(self, chunk: memoryview, targets: list[memoryview], source: Source) -> bool:
        """Copy a chunk to the caller's buffers. Returns whether its checksum is right."""
        if len(targets) == 1:
            checksum = int(self._threads.fill(targets, [[chunk]])[0])
        else:
            scatter(chunk, targets)
            checksum = checksum_of([chunk]) if self._verify else source.checksum
        return not self._verify or checksum == source.checksum
