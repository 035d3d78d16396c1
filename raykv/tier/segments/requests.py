"""Pending `write` and `read` calls of a tier, and their chunks."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import xxhash

from raykv.tier.base import Chunk, Found, GroupNames, is_same
from raykv.tier.segments.format import BLOCK_NBYTES, ENTRY, Array, blocks_of, key_array
from raykv.tier.segments.index import Index
from raykv.tier.segments.io_threads import Callbacks
from raykv.tier.segments.volume import IOV_MAX
from raykv.types import Bits, KeyArray, Rows

NBYTES_COUNTS: Final = ("written_nbytes", "disk_nbytes", "moved_nbytes", "read_nbytes")
COUNTS: Final = (*NBYTES_COUNTS, "refused", "timeouts", "errors", "corrupt")
"""Counters of every tier; see `Tier.stats`."""


class WriteQueue:
    """Base of a tier's state: arena, callbacks, counters, and the queue of chunks to be written."""

    def __init__(self, name: str, arena: memoryview, groups: GroupNames) -> None:
        self.arena, self.groups, self.callbacks = arena, groups, Callbacks(name)
        self.queue: deque[Item] = deque()
        self.queued_nbytes = 0
        self.counts = dict.fromkeys(COUNTS, 0)

    def enqueue(self, item: "Item") -> None:
        self.queue.append(item)
        self.queued_nbytes += item.chunk.nbytes

    def dequeue(self) -> "Item":
        item = self.queue.popleft()
        self.queued_nbytes -= item.chunk.nbytes
        return item


class Request:
    """A call of `write` or `read`. Calls `done` once, when all chunks are finished. Guarded by the tier's lock."""

    def __init__(self, callbacks: Callbacks, done: Callable[[list[bool]], None], *, chunks: int = 0) -> None:
        self._callbacks, self._done = callbacks, done
        self._results = [False] * chunks
        self._left = 1  # counts unfinished chunks, and 1 for the call of `submit`

    def add(self, result: bool | None = None) -> int:
        """Add a chunk and return its position. With result None, `finish` must follow."""
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
    """A chunk on its way to a disk.

    Attributes:
        view: Bytes of the chunk, padded to a whole block.
        text: Quota group as JSON.
        request, place: The request and the position in it.
        moved_from: Segment that the chunk is moved out of, as in `Index.segment`; -1 for a chunk of a caller.
        cancelled: Whether the chunk was deleted after it was queued.
    """

    chunk: Chunk
    view: memoryview
    text: bytes
    request: Request
    place: int
    moved_from: int = -1
    cancelled: bool = False

    def finish(self, result: bool) -> None:
        self.request.finish(self.place, result)


def item_of(chunk: Chunk, arena: memoryview, text: bytes, request: Request) -> Item:
    view = arena[chunk.offset : chunk.offset + blocks_of(chunk.nbytes) * BLOCK_NBYTES]
    return Item(chunk, view, text, request, request.add())


def entries_of(items: Sequence[Item], indexes: dict[bytes, int]) -> Array:
    """Entries (`format.ENTRY`) of chunks, without their places. `indexes`: index of each text in the record."""
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
    """A chunk to be read to `offset` in the arena. `place`: position in the request. Other fields: from the index."""

    row: int
    segment: int
    block: int
    nbytes: int
    checksum: int
    offset: int
    place: int


class Run:
    def __init__(self, request: Request, pieces: list[Piece]) -> None:
        self.request, self.pieces = request, pieces
        self.segment, self.block = pieces[0].segment, pieces[0].block

    @property
    def rows(self) -> Rows:
        return np.array([piece.row for piece in self.pieces], np.int32)

    def views(self, arena: memoryview) -> list[memoryview]:
        return [arena[each.offset : each.offset + blocks_of(each.nbytes) * BLOCK_NBYTES] for each in self.pieces]

    def verify(self, views: Sequence[memoryview], got: int) -> Bits:
        """Which chunks have the right checksum. `got` is the number of bytes read."""
        right, end = np.zeros(len(views), np.bool_), 0
        for number, (piece, view) in enumerate(zip(self.pieces, views, strict=True)):
            whole = end + piece.nbytes <= got
            right[number] = whole and xxhash.xxh3_64_intdigest(view[: piece.nbytes]) == piece.checksum
            end += len(view)
        return right

    def unchanged(self, index: Index) -> Bits:
        """Which rows still hold the requested chunk."""
        rows, pieces = self.rows, np.array([piece[1:5] for piece in self.pieces], np.uint64).reshape(-1, 4)
        same: Bits = index.segment[rows] == pieces[:, 0].astype(np.int64)
        same &= (index.columns.page[rows] == pieces[:, 1]) & (index.columns.checksum[rows] == pieces[:, 3])
        return same

    def enter(self, right: Bits, index: Index, counts: dict[str, int], *, now_s: float) -> Rows:
        """Count bytes and touch rows of the `right` chunks. Returns rows that still hold one of the wrong chunks."""
        rows, same = self.rows, self.unchanged(index)
        counts["read_nbytes"] += int(np.array([piece.nbytes for piece in self.pieces])[right].sum())
        index.touch(np.unique(rows[right & same]), now_s=now_s)
        return np.unique(rows[~right & same])

    def finish(self, results: Sequence[Any]) -> None:
        for piece, result in zip(self.pieces, results, strict=True):
            self.request.finish(piece.place, bool(result))


def pieces_of(
    index: Index, keys: KeyArray, found: Sequence[Found | None], offsets: Sequence[int], *, now_s: float
) -> list[Piece]:
    """Pieces for the chunks of a `read` that are still the same as in `found`, in disk order."""
    rows, columns = index.find(keys, now_s=now_s), index.columns
    fields: list[Array] = [index.segment, columns.page, columns.nbytes, columns.checksum]
    values = zip(rows.tolist(), *(field[rows].tolist() for field in fields), offsets, range(len(keys)), strict=True)
    pieces = [Piece(*each) for each in values if each[0] >= 0]
    same = [each for each in pieces if is_same(found[each.place], each.nbytes, each.checksum)]
    return sorted(same, key=lambda piece: (piece.segment, piece.block))


def runs_of(request: Request, pieces: Sequence[Piece], *, most_nbytes: int) -> list[Run]:
    """Join pieces that are adjacent on the disk to runs of at most `most_nbytes`. Calls `request.expect` for them."""
    request.expect(len(pieces))
    runs: list[Run] = []
    end, nbytes = (-1, -1), 0
    for piece in pieces:
        size = blocks_of(piece.nbytes) * BLOCK_NBYTES
        if (piece.segment, piece.block) != end or nbytes + size > most_nbytes or len(runs[-1].pieces) == IOV_MAX:
            runs.append(Run(request, [piece]))
            nbytes = 0
        else:
            runs[-1].pieces.append(piece)
        nbytes += size
        end = (piece.segment, piece.block + blocks_of(piece.nbytes))
    return runs
