"""Pending `write` and `read` calls of a tier, and their chunks."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import xxhash

from raykv.tier.base import Chunk, Environment, Found, Written, is_same
from raykv.tier.segments.format import BLOCK_NBYTES, ENTRY, Array, blocks_of, key_array
from raykv.tier.segments.index import Index
from raykv.tier.segments.io_threads import Callbacks
from raykv.tier.segments.volume import IOV_MAX
from raykv.types import Bits, KeyArray, Rows

COUNTS: Final = (
    "written_nbytes", "disk_nbytes", "moved_nbytes", "read_nbytes", "refused", "timeouts", "errors", "corrupt",
)  # fmt: skip
"""Counters of every tier; see `Tier.stats`."""
QUEUED_CHUNKS: Final = 1 << 14
QUEUED_NBYTES: Final = 128 << 20
"""A write queue with this many chunks or bytes is full. It is limited because memory cannot evict queued chunks."""
QUEUED_READS: Final = 1 << 14
"""A tier with this many queued reads (`Run`) refuses further calls of `Tier.read`."""
READ_NBYTES: Final = 4 << 20
"""One call reads several adjacent chunks if they have at most this many bytes together."""


class Request:
    """A pending call of `Tier.write` or `Tier.read`. The tier's lock guards it.

    When all its chunks are finished, the thread of `callbacks` calls `done`.
    """

    def __init__(self, callbacks: Callbacks, done: Callable[[list[bool]], None], *, chunks: int = 0) -> None:
        self._callbacks, self._done = callbacks, done
        self._results = [False] * chunks
        self._left = 1  # number of unfinished chunks, and 1 more until the caller has called `submit`

    def add(self, result: bool | None = None) -> int:
        """Add a chunk and return its position. If `result` is None, the caller must call `finish` for it later."""
        self._results.append(bool(result))
        self.expect(result is None)
        return len(self._results) - 1

    def expect(self, count: int) -> None:
        self._left += count

    def finish(self, place: int, result: bool) -> None:
        self._results[place] = result
        self.submit()

    def submit(self) -> None:
        self._left -= 1
        if not self._left:
            self._callbacks.put(lambda: self._done(self._results))


@dataclass(eq=False, slots=True)
class Item:
    """A chunk that is queued to be written, or is being written.

    Attributes:
        view: Bytes of the chunk, padded to a whole block.
        text: Quota group as JSON.
        request: The call of `Tier.write`, or the move out of a segment, to which the chunk belongs.
        place: Position of the chunk in `request`.
        moved_from: Number (as in `Index.segment`) of the segment that the chunk leaves; -1 for a call of `Tier.write`.
        cancelled: Whether the chunk was deleted after it was queued.
    """

    chunk: Chunk
    view: memoryview
    text: bytes
    request: Request
    place: int
    moved_from: int = -1
    cancelled: bool = False


class WriteQueue:
    """Base class of a tier's state: arena, index, callbacks, counters, write queue. The tier's lock guards it.

    Attributes:
        largest_nbytes: Size of the largest chunk that the tier takes.
        quotas: Quota in bytes of each quota group, by the group's number on this node.
        queue: Chunks to be written that are not in a batch yet.
        coming: Chunks queued or being written, by key.
    """

    def __init__(self, name: str, index: Index, environment: Environment, *, largest_nbytes: int) -> None:
        self.index, self.arena, self.groups = index, environment.arena, environment.groups
        self.callbacks, self.largest_nbytes = Callbacks(name), largest_nbytes
        self.quotas: dict[int, int] = {}
        self.queue: deque[Item] = deque()
        self.coming: dict[bytes, Item] = {}
        self.queued_nbytes = 0
        self.counts = dict.fromkeys(COUNTS, 0)

    def offer(self, chunks: Sequence[Chunk], done: Written, *, on: bool) -> int:
        """Queue chunks; see `Tier.write`. `on`: whether the tier accepts chunks.

        `done` gets False for a chunk that is too large, or that an earlier call has queued.
        """
        request, taken = Request(self.callbacks, lambda results: done(chunks[: len(results)], results)), 0
        here = self.index.find(key_array([chunk.key for chunk in chunks]), now_s=time.time()) >= 0
        for chunk, is_here in zip(chunks, here.tolist(), strict=True):
            full = len(self.queue) >= QUEUED_CHUNKS or self.queued_nbytes >= QUEUED_NBYTES
            most_nbytes = min(self.largest_nbytes, self.quotas.get(chunk.group, self.largest_nbytes))
            if not on or full:
                break
            if is_here or chunk.key in self.coming or chunk.nbytes > most_nbytes:
                request.add(is_here)
                self.counts["refused"] += not is_here
            else:
                view = self.arena[chunk.offset : chunk.offset + blocks_of(chunk.nbytes) * BLOCK_NBYTES]
                self.enqueue(Item(chunk, view, self.groups.text(chunk.group), request, request.add()))
            taken += 1
        self.counts["refused"] += len(chunks) - taken
        if taken:
            request.submit()
        return taken

    def enqueue(self, item: Item) -> None:
        self.coming[item.chunk.key] = item
        self.queue.append(item)
        self.queued_nbytes += item.chunk.nbytes
        if item.moved_from >= 0:  # moved chunks go first, because their old segment is freed once they are written
            self.queue.rotate(1)

    def next_item(self) -> Item | None:
        """Return the first chunk of the queue, without removing it. None if the queue is empty.

        Cancelled chunks before it are removed.
        """
        while self.queue and self.queue[0].cancelled:
            self.finish(self.dequeue(), False)
        return self.queue[0] if self.queue else None

    def dequeue(self) -> Item:
        item = self.queue.popleft()
        self.queued_nbytes -= item.chunk.nbytes
        return item

    def finish(self, item: Item, result: bool) -> None:
        del self.coming[item.chunk.key]
        if result:
            self.counts["written_nbytes" if item.moved_from < 0 else "moved_nbytes"] += item.chunk.nbytes
        item.request.finish(item.place, result)

    def cancel(self, keys: Iterable[bytes]) -> None:
        """Cancel deleted chunks: those of `keys` that are queued or being written."""
        for key in self.coming.keys() & keys:
            self.coming[key].cancelled = True

    def cancel_group(self, group: int) -> None:
        self.cancel([key for key, item in self.coming.items() if item.chunk.group == group])

    def refuse_writes(self) -> None:
        """Report queued chunks as not written.

        Chunks that are being written are reported later, because the disk still uses their bytes.
        """
        while self.queue:
            self.finish(self.dequeue(), False)


def entries_of(items: Sequence[Item], texts: Sequence[bytes]) -> Array:
    """Make the entries (`format.ENTRY`) of chunks, with `block` and `batch` 0. `texts`: quota groups of the record."""
    indexes = {text: index for index, text in enumerate(texts)}
    entries = np.zeros(len(items), ENTRY)
    if items:
        entries["key"] = key_array([item.chunk.key for item in items])
        entries["parent"] = key_array([item.chunk.parent or bytes(16) for item in items])
        entries["chained"] = [bool(item.chunk.parent) for item in items]
        entries["group"] = [indexes[item.text] for item in items]
        for field in ("checksum", "expires_s", "nbytes", "depth", "reads"):
            entries[field] = [getattr(item.chunk, field) for item in items]
    return entries


class Piece(NamedTuple):
    """A chunk to be read.

    Attributes:
        row, segment, block, nbytes, checksum: Row of the chunk in the index, and the values in this row.
        offset: Where to put the chunk in the arena.
        place: Position of the chunk in its request.
    """

    row: int
    segment: int
    block: int
    nbytes: int
    checksum: int
    offset: int
    place: int


class Run:
    """One read of chunks that are adjacent on the disk."""

    def __init__(self, request: Request, pieces: list[Piece]) -> None:
        self.request, self.pieces = request, pieces
        self.segment, self.block = pieces[0].segment, pieces[0].block

    def views(self, arena: memoryview) -> list[memoryview]:
        return [arena[each.offset : each.offset + blocks_of(each.nbytes) * BLOCK_NBYTES] for each in self.pieces]

    def verify(self, views: Sequence[memoryview], got: int) -> Bits:
        """Return for each chunk whether its checksum is right. `got` is the number of bytes read."""
        right, end = np.zeros(len(views), np.bool_), 0
        for number, (piece, view) in enumerate(zip(self.pieces, views, strict=True)):
            whole = end + piece.nbytes <= got
            right[number] = whole and xxhash.xxh3_64_intdigest(view[: piece.nbytes]) == piece.checksum
            end += len(view)
        return right

    def enter(self, right: Bits, queue: WriteQueue) -> Rows:
        """Count bytes and reads of the `right` chunks. Returns the rows of wrong chunks that are still in the index."""
        index, columns = queue.index, queue.index.columns
        rows, segments, blocks, nbytes, checksums = np.array([piece[:5] for piece in self.pieces], np.uint64).T
        rows = rows.astype(np.int32)
        same = (index.segment[rows] == segments.astype(np.int64)) & (columns.page[rows] == blocks)
        same &= columns.checksum[rows] == checksums
        queue.counts["read_nbytes"] += int(nbytes[right].sum())
        index.touch(np.unique(rows[right & same]), now_s=time.time())
        return np.unique(rows[~right & same])

    def finish(self, results: Sequence[Any]) -> None:
        for piece, result in zip(self.pieces, results, strict=True):
            self.request.finish(piece.place, bool(result))


def runs_of(
    index: Index, keys: KeyArray, found: Sequence[Found | None], offsets: Sequence[int], request: Request
) -> list[Run]:
    """Make runs for the chunks that are unchanged since `found`. A run reads chunks that are adjacent on the disk."""
    rows, columns = index.find(keys, now_s=time.time()), index.columns
    fields: list[Array] = [index.segment, columns.page, columns.nbytes, columns.checksum]
    values = zip(rows.tolist(), *(field[rows].tolist() for field in fields), offsets, range(len(keys)), strict=True)
    pieces = [Piece(*each) for each in values if each[0] >= 0]
    pieces = [each for each in pieces if is_same(found[each.place], each.nbytes, each.checksum)]
    request.expect(len(pieces))
    runs: list[Run] = []
    end, nbytes = (-1, -1), 0
    for piece in sorted(pieces, key=lambda piece: (piece.segment, piece.block)):
        blocks = blocks_of(piece.nbytes)
        nbytes += blocks * BLOCK_NBYTES
        if (piece.segment, piece.block) != end or nbytes > READ_NBYTES or len(runs[-1].pieces) == IOV_MAX:
            runs.append(Run(request, [piece]))
            nbytes = blocks * BLOCK_NBYTES
        else:
            runs[-1].pieces.append(piece)
        end = (piece.segment, piece.block + blocks)
    return runs
