"""The threads of one drive, and their choice of work. See `raykv.tier.ssd.tier`."""

import errno
import logging
import time
from collections.abc import Callable
from typing import Final

from raykv.tier.segments.format import BLOCK_NBYTES
from raykv.tier.segments.index import SEGMENTS
from raykv.tier.segments.io_threads import IoThreads
from raykv.tier.segments.requests import Run
from raykv.tier.ssd.recovery import Recovery
from raykv.tier.ssd.state import Drive, Shared
from raykv.tier.ssd.upkeep import Upkeep
from raykv.tier.ssd.writing import Writer
from raykv.types import Rows

log = logging.getLogger(__name__)

UPKEEP, FIRST_WRITER = 0, 1
"""Numbers of threads. UPKEEP makes, seals and wipes segments. FIRST_WRITER prefers writes, lest reads starve them."""
EXTRA_THREADS: Final = 3
"""Threads of a drive beyond its queue depth: for upkeep, and to verify checksums and encode records during I/O."""
BAD_READS: Final = 3
"""This number of failed reads in a row turns the drive off. Fewer failures only drop the chunks."""


class Workers:
    def __init__(self, shared: Shared, drive: Drive) -> None:
        """Start the threads. They begin with recovery, unless the directory could not be opened."""
        self._shared, self._drive = shared, drive
        self._upkeep, self._writer = Upkeep(shared, drive), Writer(shared, drive)
        self._recovery = Recovery(shared, drive)
        with shared.lock:
            if drive.state == "starting":
                drive.tasks.append(self._recovery.list_segments)
        self.io = IoThreads(
            drive.config.depth + EXTRA_THREADS,
            f"raykv-ssd{drive.number}",
            self._wait_for_task,
            failed=lambda error: shared.fail_later(drive, error),
        )

    def _wait_for_task(self, thread: int) -> Callable[[], None] | None:
        shared, drive = self._shared, self._drive
        with shared.lock:
            while (task := self._next_task(thread)) is None:
                if shared.ended and not (drive.on and drive.has_pending_tombstones):
                    return None
                if thread == UPKEEP:
                    drive.wake_upkeep.wait()
                    continue
                if shared.queue:  # this thread found no space for the queue: make some
                    drive.wake_upkeep.notify()
                drive.wake.wait()
            return task

    def _next_task(self, thread: int) -> Callable[[], None] | None:
        drive = self._drive
        if drive.slow:
            return None
        if thread == UPKEEP:
            return self._upkeep.next_task()
        if drive.state == "starting":
            return self._next_read() or self._upkeep.next_task()
        if drive.under_way >= drive.config.depth:
            return None
        if thread == FIRST_WRITER and drive.config.depth > 1:
            return self._writer.next_task() or self._next_read()
        return self._next_read() or self._writer.next_task()

    def watch(self) -> None:
        """Update `drive.slow`, and retry a drive that is off. The caller holds the lock and calls this regularly."""
        shared, drive = self._shared, self._drive
        slow = self.io.longest_s() > drive.config.io_timeout_s
        if slow and not drive.slow:
            log.warning("SSD path %s is slow: nothing for %s s", drive.volume.path, drive.config.io_timeout_s)
            shared.counts["timeouts"] += 1
            shared.refuse_reads(drive)
        if slow != drive.slow:
            drive.slow = slow
            shared.refuse_writes_if_off()
        if drive.state == "off" and not drive.tasks and not self.io.busy():
            self._retry()
        drive.notify()

    def _retry(self) -> None:
        """Unlock the directory of a drive that is off, so that it can be unmounted. Open it again at `retry_at_s`."""
        drive = self._drive
        if not drive.closed:
            drive.closed = True
            drive.tasks.append(drive.volume.close)
        elif time.monotonic() >= drive.retry_at_s:
            drive.state = "starting"
            drive.tasks.append(self._recovery.open)

    def _next_read(self) -> Callable[[], None] | None:
        drive = self._drive
        if not drive.reads or drive.state == "off":
            return None
        run, epoch = drive.reads.popleft(), drive.epoch
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
            wrong = run.enter(right, shared)
            shared.finish_read(drive, run, right.tolist(), epoch)
            drive.bad_reads = drive.bad_reads + 1 if problem is not None else 0
            if epoch == drive.epoch:
                self._handle_wrong(wrong, problem)
            drive.notify()

    def _handle_wrong(self, wrong: Rows, problem: OSError | None) -> None:
        """Drop wrong chunks. Turn the drive off after BAD_READS media errors (EIO), or after any other error."""
        shared, drive = self._shared, self._drive
        bad_spot = problem is not None and problem.errno == errno.EIO
        if problem is None or bad_spot:
            shared.counts["corrupt"] += 0 if bad_spot else len(wrong)
            shared.counts["errors"] += bad_spot
            shared.remove(wrong, tombstones=True)
        if problem is not None and (not bad_spot or drive.bad_reads >= BAD_READS):
            shared.fail(drive, problem)
