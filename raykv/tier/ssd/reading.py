"""Reads chunks of one drive into the arena. See `raykv.tier.ssd.tier`."""

import errno
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from raykv.tier.segments.format import BLOCK_NBYTES
from raykv.tier.segments.index import SEGMENTS
from raykv.tier.segments.requests import Piece, Request, Run, runs_of
from raykv.tier.ssd.drive import Drive
from raykv.tier.ssd.shared import Shared
from raykv.types import Bits

READ_NBYTES: Final = 4 << 20
"""Neighbours are read by one call up to this size."""
QUEUED_READS: Final = 1 << 14
"""Chunks that may wait to be read on one drive."""
BAD_READS: Final = 3
"""After this number of failed reads in a row, the drive is turned off. Before, only their chunks are dropped."""


class Reader:
    """See the module. Methods need the tier's lock, except `_read`, which runs on a thread and waits for the disk."""

    def __init__(self, shared: Shared, drive: Drive) -> None:
        self._shared, self._drive = shared, drive

    def has_room(self, count: int) -> bool:
        return self._drive.reads_queued + count <= QUEUED_READS

    def queue(self, request: Request, pieces: Sequence[Piece]) -> None:
        runs = runs_of(request, pieces, most_nbytes=READ_NBYTES)
        for run in runs:
            self._drive.log.segments[run.segment % SEGMENTS].readers += 1
        self._drive.reads.extend(runs)
        self._drive.reads_queued += len(pieces)
        self._drive.notify()

    def next_task(self) -> Callable[[], None] | None:
        drive = self._drive
        if not drive.reads or drive.state == "off":
            return None
        run, epoch = drive.reads.popleft(), drive.epoch
        drive.reads_queued -= len(run.pieces)
        drive.under_way += 1
        return lambda: self._read(run, epoch)

    def _read(self, run: Run, epoch: int) -> None:
        shared, drive = self._shared, self._drive
        views, problem, got = run.views(shared.arena), None, 0
        try:
            got = drive.volume.read(run.segment % SEGMENTS, run.block * BLOCK_NBYTES, views)
        except OSError as error:
            problem = error
        with shared.lock:
            drive.finish_operation()
        right = run.verify(views, got)
        with shared.lock:
            lengths = np.array([piece.nbytes for piece in run.pieces])
            shared.counts["read_nbytes"] += int(lengths[right].sum())
            shared.finish_read(drive, run, right.tolist(), epoch)
            drive.bad_reads = drive.bad_reads + 1 if problem is not None else 0
            if epoch == drive.epoch:
                self._update_index(run, right, problem)
            drive.notify()

    def _update_index(self, run: Run, right: Bits, problem: OSError | None) -> None:
        """Count the reads, drop wrong chunks, turn the drive off after an error that is more than a bad spot."""
        shared, drive = self._shared, self._drive
        same, rows = run.unchanged(shared.index), run.rows
        shared.index.touch(np.unique(rows[right & same]), now_s=shared.wall())
        bad_spot = problem is not None and problem.errno == errno.EIO
        if problem is None or bad_spot:
            wrong = np.unique(rows[~right & same])
            shared.counts["corrupt"] += 0 if bad_spot else len(wrong)
            shared.counts["errors"] += bad_spot
            shared.remove(wrong, tombstones=True)
        if problem is not None and (not bad_spot or drive.bad_reads >= BAD_READS):
            shared.fail(drive, problem)
