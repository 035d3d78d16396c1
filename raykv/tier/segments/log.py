"""The log of one path: state of its segments, place of the next batch, order of reclaiming. No I/O; not thread-safe.

A segment goes through these states:

    absent -> free -> open -> closed -> sealing -> sealed -> reclaiming -> free

An open segment gets new batches. A closed segment gets no more batches. A sealed segment also has its summary.

Segments are reclaimed in the order of their sequence numbers. So a tombstone outlives everything that it covers. Only
a segment without live chunks and without tombstones may be reclaimed out of order.

Source: log-structured file systems (Rosenblum and Ousterhout, 1992). They choose a segment by its free space and age.
This log takes the oldest one, because a cache may drop unread chunks instead of moving them.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from raykv.tier.segments.format import BATCH, Counts, Record, blocks_of, joined, tombstones_of
from raykv.tier.segments.requests import Item, entries_of

SPARE_SEGMENTS: Final = 2
"""If fewer segments than this are free, another one is made or reclaimed. New chunks and moved chunks each need one."""


@dataclass(eq=False)
class Batch:
    """A batch in a segment.

    Attributes:
        start: First block of the batch in the segment.
        content: What the caller of `Log.place` passed.
        finished: Whether the batch is written.
    """

    segment: "Segment"
    start: int
    record: Record
    content: Any
    finished: bool = False


@dataclass(eq=False)
class Segment:
    """A segment and its state.

    Attributes:
        sequence: Position in the order in which segments were opened; 0 while free.
        live_nbytes: Total size of those of its chunks that are in the index.
        readers: Number of reads of this segment that are queued or running.
        end: First block of the next batch.
        placed: Number of batches so far.
        records: Records of the written batches; empty once the segment is sealed.
        in_flight: Batches that are not in `records` yet, in order.
        counts: Numbers of entries and tombstones in all batches together.
    """

    number: int
    sequence: int = 0
    state: Literal["free", "open", "closed", "sealing", "sealed", "reclaiming"] = "free"
    live_nbytes: int = 0
    readers: int = 0
    has_tombstones: bool = False
    end: int = 0
    placed: int = 0
    records: list[Record] = field(default_factory=list)
    in_flight: deque[Batch] = field(default_factory=deque)
    counts: Counts = field(default_factory=Counts)


class Log:
    """The segments of one path, at most `limit`.

    Attributes:
        open: The segment that is being filled; None if there is none.
        reclaiming: The segment that is being reclaimed; None if there is none.
    """

    def __init__(self, *, limit: int, segment_blocks: int, incarnation: int) -> None:
        self.limit, self.segment_blocks, self.incarnation = limit, segment_blocks, incarnation
        self.segments: dict[int, Segment] = {}
        self.open: Segment | None = None
        self.reclaiming: Segment | None = None
        self._sequence = 0
        self._free: set[int] = set()
        self._closed: list[Segment] = []

    def free(self) -> list[int]:
        """Return the numbers of the segments that may be opened: free ones without readers."""
        return [number for number in self._free if not self.segments[number].readers]

    def absent(self) -> int | None:
        """Return a number for a new segment; None if the log has `limit` segments."""
        if len(self.segments) >= self.limit:
            return None
        return next(number for number in range(self.limit) if number not in self.segments)

    def add_free(self, number: int) -> None:
        self.segments[number] = Segment(number)
        self._free.add(number)

    def remove_free(self, number: int) -> None:
        del self.segments[number]
        self._free.discard(number)

    def add_found(self, number: int, *, sealed: bool, record: Record) -> Segment:
        segment = Segment(number, record.sequence, "sealed" if sealed else "closed")
        segment.has_tombstones = bool(len(record.deleted) or len(record.dropped))
        if not sealed:
            segment.records = [record]
            self._closed.append(segment)
        self.segments[number] = segment
        self._sequence = max(self._sequence, record.sequence)
        return segment

    def in_use(self) -> list[Segment]:
        return [segment for segment in self.segments.values() if segment.state != "free"]

    def open_next(self, *, spare: int = 0) -> Segment | None:
        """Close the open segment and open a free one. Returns None, and does nothing, if at most `spare` are free."""
        free = self.free()
        if len(free) <= spare:
            return None
        if self.open is not None:
            self.open.state = "closed"
            self._closed.append(self.open)
        self._sequence += 1
        self.open = Segment(min(free), self._sequence, "open")
        self._free.discard(self.open.number)
        self.segments[self.open.number] = self.open
        return self.open

    def fits(self, counts: Counts, *, blocks: int) -> bool:
        """Whether a batch fits into the open segment, and leaves room for the summary.

        Args:
            counts: Numbers of entries and tombstones in the record of the batch.
            blocks: Length of the chunks of the batch, in blocks.
        """
        segment = self.open
        if segment is None:
            return False
        summary = segment.counts.plus(counts).blocks()
        return segment.end + counts.blocks() + blocks + summary <= self.segment_blocks

    def place(
        self, items: Sequence[Item], content: Any, *, keys: Sequence[bytes] = (), groups: Sequence[bytes] = ()
    ) -> Batch:
        """Add a batch to the open segment. `fits` must be True for it.

        Args:
            items: Chunks of the batch.
            content: Becomes `Batch.content`.
            keys: Deleted keys, which get tombstones.
            groups: Dropped quota groups as JSON, which get tombstones.
        """
        segment = self.open
        assert segment is not None
        start, number = segment.end, segment.placed
        texts = tuple(dict.fromkeys([*(item.text for item in items), *groups]))
        counts = Counts(len(items), len(keys), len(groups), frozenset(texts))
        block = start + counts.blocks()
        entries = entries_of(items, texts)
        for place, item in enumerate(items):
            entries["block"][place] = block
            block += blocks_of(item.chunk.nbytes)
        deleted, dropped = tombstones_of(keys, [texts.index(text) for text in groups])
        for part in (entries, deleted, dropped):
            part["batch"] = number
        record = Record(
            kind=BATCH,
            incarnation=self.incarnation,
            sequence=segment.sequence,
            number=number,
            next_block=block,
            segment_blocks=self.segment_blocks,
            texts=texts,
            entries=entries,
            deleted=deleted,
            dropped=dropped,
        )
        segment.end, segment.placed = block, number + 1
        segment.counts = segment.counts.plus(counts)
        segment.has_tombstones = segment.has_tombstones or bool(keys or groups)
        batch = Batch(segment, start, record, content)
        segment.in_flight.append(batch)
        return batch

    def finish(self, batch: Batch) -> list[Batch]:
        """Mark a batch as written. Returns the batches that recovery can find from now on.

        Recovery cannot read past an unwritten batch. So a batch is returned once all batches before it are written.
        """
        batch.finished, ready = True, []
        in_flight = batch.segment.in_flight
        while in_flight and in_flight[0].finished:
            ready.append(in_flight.popleft())
            batch.segment.records.append(ready[-1].record)
        return ready

    def next_to_seal(self) -> Segment | None:
        """Choose a closed segment whose batches are all written, and mark it "sealing". None if there is none."""
        for segment in self._closed:
            if not segment.in_flight:
                self._closed.remove(segment)
                segment.state = "sealing"
                return segment
        return None

    def summary(self, segment: Segment) -> Record:
        return joined(segment.records)

    def mark_sealed(self, segment: Segment) -> None:
        segment.state, segment.records = "sealed", []

    def wants_space(self) -> bool:
        return self.reclaiming is None and len(self.free()) < SPARE_SEGMENTS

    def choose_victim(self) -> Segment | None:
        """Choose the next segment to reclaim, and mark it "reclaiming".

        Returns None if another segment is being reclaimed, or if the oldest segment is not sealed yet.
        """
        if self.reclaiming is not None:
            return None
        in_use = self.in_use()
        empty = (each for each in in_use if not each.live_nbytes and not each.has_tombstones)
        oldest = min(in_use, key=lambda each: each.sequence, default=None)
        chosen = next((each for each in empty if each.state == "sealed"), oldest)
        if chosen is not None and chosen.state != "sealed":
            return None
        if chosen is not None:
            chosen.state, self.reclaiming = "reclaiming", chosen
        return chosen

    def mark_wiped(self, segment: Segment) -> None:
        """Mark a reclaimed segment as free. It may be opened once it has no readers."""
        self.segments[segment.number] = Segment(segment.number, readers=segment.readers)
        self._free.add(segment.number)
        self.reclaiming = None
