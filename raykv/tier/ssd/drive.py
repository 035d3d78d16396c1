"""The state of one drive of an SSD tier: log, queues, health. The tier's lock guards all of it."""

import secrets
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from raykv.config import SsdConfig
from raykv.tier.segments.format import BLOCK_NBYTES, Counts
from raykv.tier.segments.index import SEGMENTS
from raykv.tier.segments.log import Batch, Log, Segment
from raykv.tier.segments.requests import Item, Run
from raykv.tier.segments.volume import Volume

PENDING_DELETED: Final = 1 << 20
"""Most deleted keys remembered for a drive that is off. If there are more, the drive is emptied when it is on again."""


@dataclass(eq=False, slots=True)
class Content:
    """The content of a batch: chunks and tombstones.

    Attributes:
        epoch: Epoch of the drive when the batch was begun.
        blocks, texts: Total blocks, and quota groups, of all chunks.
    """

    epoch: int
    deleted: list[bytes]
    dropped: list[bytes]
    items: list[Item] = field(default_factory=list)
    blocks: int = 0
    texts: frozenset[bytes] = frozenset()

    def counts(self, item: Item | None = None) -> Counts:
        """Counts for the batch's record; includes `item` if given."""
        texts = self.texts.union(self.dropped, [item.text] if item else [])
        return Counts(len(self.items) + (item is not None), len(self.deleted), len(self.dropped), texts)


class Drive:
    """The state of one directory of segments.

    Attributes:
        slow: An operation takes too long. The drive gets no new work.
        reason: Why the drive is off or does not grow; empty if nothing is wrong.
        epoch: Number of failures. Results of work begun in an earlier epoch are ignored.
        deleted, dropped: Tombstones not yet written to the drive: keys, and quota groups as text.
        drop_everything: There were too many tombstones to remember. All content of the drive is discarded.
        tasks: Tasks of the upkeep thread.
        reads: Queue of runs to be read.
        under_way: Number of running reads and writes.
    """

    def __init__(self, number: int, volume: Volume, config: SsdConfig, lock: threading.Lock) -> None:
        self.number, self.volume, self.config = number, volume, config
        self.segment_blocks = config.segment_nbytes // BLOCK_NBYTES
        self._incarnation = secrets.randbits(64)
        self.state: Literal["starting", "on", "off"] = "starting"
        self.slow, self.reason, self.logged_reason, self.epoch = False, "", "", 0
        self.wake = threading.Condition(lock)  # for the threads that read and write chunks
        self.wake_upkeep = threading.Condition(lock)
        self.deleted: dict[bytes, None] = {}
        self.dropped: dict[bytes, None] = {}
        self.drop_everything = False
        self.retry_at_s = self.grow_at_s = 0.0
        self.reads_queued = self.under_way = self.bad_reads = 0
        self.reset()

    def reset(self) -> None:
        limit = min(SEGMENTS - 1, self.config.capacity_nbytes // self.config.segment_nbytes)
        self.log = Log(limit=limit, segment_blocks=self.segment_blocks, incarnation=self._incarnation)
        self.tasks: deque[Callable[[], None]] = deque()
        self.reads: deque[Run] = deque()
        self.making = self.closed = False
        self.in_flight: set[Batch] = set()

    @property
    def on(self) -> bool:
        return self.state == "on" and not self.slow

    @property
    def readable(self) -> bool:
        return self.state != "off" and not self.slow

    @property
    def has_pending_tombstones(self) -> bool:
        """Whether recovery could find a deleted chunk, because its tombstone is not written yet."""
        contents = [self, *(batch.content for batch in self.in_flight)]
        cancelled = (item.cancelled for content in contents[1:] for item in content.items)
        return any(content.deleted or content.dropped for content in contents) or any(cancelled)

    def identity(self, segment: Segment) -> int:
        """The value of `Index.segment` for a segment."""
        return self.number * SEGMENTS + segment.number

    def notify(self) -> None:
        self.wake.notify_all()
        self.wake_upkeep.notify()

    def finish_operation(self) -> None:
        self.under_way -= 1
        self.wake.notify()

    def remember_deleted(self, keys: Sequence[bytes]) -> None:
        """Keep tombstones for keys that were deleted while the content of the drive was unknown."""
        self.deleted.update(dict.fromkeys(keys))
        if len(self.deleted) > PENDING_DELETED:
            self.drop_everything = True
            self.deleted.clear()

    def stats(self) -> dict[str, Any]:
        states = [segment.state for segment in self.log.segments.values()]
        return {
            "path": str(self.volume.path),
            "state": "slow" if self.slow else self.state,
            "reason": self.reason,
            "direct": self.volume.direct,
            "segments": len(states),
            "free_segments": states.count("free"),
            "queued_reads": self.reads_queued,
        }
