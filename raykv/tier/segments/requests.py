"""What the paths of one SSD tier share: the lock, the index, what waits to be written, and who waits for what."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from raykv.tier.base import GroupNames
from raykv.tier.segments.format import BLOCK_NBYTES, flat
from raykv.tier.segments.index import SEGMENTS, Index
from raykv.types import KeyArray, Rows

if TYPE_CHECKING:
    from raykv.tier.ssd.drive import Drive

log = logging.getLogger(__name__)

CHANGES: Final = 1 << 22
"""Keys that came or went, kept until somebody asks; older ones are forgotten beyond it."""


@dataclass(eq=False, slots=True)
class Request:
    """A call of `write` or `read`, until its caller has been called back."""

    done: Callable[[list[bool]], None]
    results: list[bool]
    left: int

    def call(self) -> None:
        """Call back, on a thread of the tier, without its lock."""
        try:
            self.done(self.results)
        except Exception:  # the caller's own; the thread must go on for others
            log.exception("a tier's caller failed in its callback")


@dataclass(eq=False, slots=True)
class Item:
    """A chunk on its way to a drive, as in `tier.base.Chunk`.

    Attributes:
        view: Its bytes, on to a whole block.
        text: Its quota group as JSON.
        row: Of the index, if it is there already and is moved on; else -1.
        came_from: Segment and block that it is moved from.
        waiting: Requests that it belongs to, and its place in each.
        placed: Whether it has its place in a batch.
        cancelled: It was deleted meanwhile.
    """

    key: bytes
    view: memoryview
    nbytes: int
    checksum: int
    group: int
    text: bytes
    depth: int
    parent: bytes
    reads: int
    expires_s: float
    row: int = -1
    came_from: tuple[int, int] = (-1, -1)
    waiting: list[tuple[Request, int]] = field(default_factory=list)
    placed: bool = False
    cancelled: bool = False


class Common:
    """See the module. Everything is under `lock`; `groups` must not be asked under it, since it has locks too.

    Attributes:
        queue: Chunks to be written that have no place yet.
        coming: Chunks on their way, by key.
        finished: Requests whose callers are to be called back.
        texts: Quota groups as JSON, by their numbers on this node.
        ended: The tier is being closed.
    """

    def __init__(self, index: Index, arena: memoryview, groups: GroupNames, wall: Callable[[], float]) -> None:
        self.lock = threading.Lock()
        self.told = threading.Condition(self.lock)
        self.index, self.arena, self.groups, self.wall = index, arena, groups, wall
        self.drives: list[Drive] = []
        self.queue: deque[Item] = deque()
        self.queued_nbytes = 0
        self.coming: dict[bytes, Item] = {}
        self.finished: deque[Request] = deque()
        self.texts: dict[int, bytes] = {}
        self.quotas: dict[int, int] = {}
        self.ended = False
        self._changes: list[KeyArray] = []
        self._changed = 0
        self.written_nbytes = self.disk_nbytes = self.moved_nbytes = self.read_nbytes = 0
        self.refused = self.timeouts = self.errors = self.corrupt = 0

    # -- requests ---------------------------------------------------------------------------------------------------

    def answer(self, request: Request, place: int, good: bool) -> None:
        """One chunk of a request is done."""
        request.results[place] = good
        request.left -= 1
        if not request.left:
            self.finished.append(request)
            for drive in self.drives:
                drive.wake.notify()

    def settle(self, item: Item, good: bool) -> None:
        """A chunk is on the drive, or will not be."""
        if self.coming.get(item.key) is item:
            del self.coming[item.key]
        self.written_nbytes += item.nbytes if good else 0
        for request, place in item.waiting:
            self.answer(request, place, good)

    def next_item(self) -> Item | None:
        """The first chunk that waits to be written; it stays in the queue."""
        while self.queue and self.queue[0].cancelled:
            self.queue.popleft()
        return self.queue[0] if self.queue else None

    def put_back(self, item: Item) -> None:
        """A chunk that was taken from the queue is the first one again."""
        self.queue.appendleft(item)
        self.queued_nbytes += item.nbytes

    def cancel(self, item: Item) -> None:
        """A chunk on its way was deleted."""
        item.cancelled = True
        if not item.placed:
            self.queued_nbytes -= item.nbytes
            self.settle(item, False)

    def fail_queue_if_off(self) -> None:
        """If no path takes anything, nothing waits for one."""
        if any(drive.on for drive in self.drives) and not self.ended:
            return
        for item in self.queue:
            if not item.cancelled:
                self.settle(item, False)
        self.queue.clear()
        self.queued_nbytes = 0

    def tell(self) -> None:
        """Wake who waits for what is to be told."""
        self.told.notify_all()

    # -- the index --------------------------------------------------------------------------------------------------

    def note(self, keys: Any) -> None:
        """Keys came or went."""
        self._changes.append(np.ascontiguousarray(keys).reshape(-1, 2))
        self._changed += len(keys)
        while self._changed > CHANGES and len(self._changes) > 1:
            self._changed -= len(self._changes.pop(0))

    def take_changes(self) -> KeyArray:
        """Keys that came or went, each once."""
        changes, self._changes, self._changed = self._changes, [], 0
        if not changes:
            return np.empty((0, 2), np.uint64)
        keys = np.concatenate(changes)
        return keys[np.unique(flat(keys), return_index=True)[1]]

    def lighten(self, rows: Rows) -> None:
        """Chunks leave the segments that they lie in."""
        nbytes = self.index.columns.nbytes[rows].astype(np.int64)
        nbytes = -(-nbytes // BLOCK_NBYTES) * BLOCK_NBYTES
        segments, inverse = np.unique(self.index.segment[rows], return_inverse=True)
        for identity, total in zip(segments.tolist(), np.bincount(inverse, nbytes).tolist(), strict=True):
            drive, segment = self._where(identity)
            if segment in drive.log.segments:
                drive.log.segments[segment].live_nbytes -= int(total)

    def _where(self, identity: int) -> "tuple[Drive, int]":
        number, segment = divmod(identity, SEGMENTS)
        return self.drives[number], segment

    def forget(self, rows: Rows, *, tell: bool) -> None:
        """Take chunks out of the index; all different.

        Args:
            tell: Write it down, so that no start finds them.
        """
        if not len(rows):
            return
        keys = self.index.keys(rows)
        if tell:
            for identity, key in zip(self.index.segment[rows].tolist(), flat(keys).tolist(), strict=True):
                self._where(identity)[0].gone[key] = None
        self.lighten(rows)
        self.drop_rows(rows, keys)

    def drop_rows(self, rows: Rows, keys: KeyArray | None = None) -> None:
        """The same for rows whose segments are of no interest any more."""
        if len(rows):
            self.note(self.index.keys(rows) if keys is None else keys)
            self.index.remove(rows)

    def enforce(self, groups: Iterable[int]) -> None:
        """Drop the oldest chunks of quota groups that have more than their quota."""
        for group in groups:
            quota = self.quotas.get(group)
            if quota is not None and self.index.nbytes[group] > quota:
                self._trim(group, quota)

    def _trim(self, group: int, quota: int) -> None:
        columns = self.index.columns
        segments = [(segment.sequence, drive, segment) for drive in self.drives for segment in drive.log.in_order()]
        for _, drive, segment in sorted(segments, key=lambda each: each[0]):
            over = int(self.index.nbytes[group]) - quota
            if over <= 0:
                return
            rows = drive.rows_of(segment)
            rows = rows[columns.namespace[rows] == group]
            rows = rows[np.argsort(columns.page[rows], kind="stable")]
            before = np.cumsum(columns.nbytes[rows].astype(np.int64)) - columns.nbytes[rows]
            self.forget(rows[before < over], tell=True)


def results(count: int, done: Callable[[list[bool]], None]) -> Request:
    """A request for so many chunks."""
    return Request(done, [False] * count, count)


def raw_keys(keys: KeyArray) -> list[bytes]:
    """Each as 16 bytes."""
    raw: list[bytes] = flat(keys).tolist()
    return raw
