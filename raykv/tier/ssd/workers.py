"""The threads of one drive, and what they do next. See `raykv.tier.ssd.tier`."""

import logging
import time
from collections.abc import Callable
from typing import Final

from raykv.tier.segments.io_threads import IoThreads
from raykv.tier.ssd.drive import Drive
from raykv.tier.ssd.reading import Reader
from raykv.tier.ssd.recovery import Recovery
from raykv.tier.ssd.shared import Shared
from raykv.tier.ssd.upkeep import Upkeep
from raykv.tier.ssd.writing import Writer

log = logging.getLogger(__name__)

UPKEEP, FIRST_WRITER = 0, 1
"""Numbers of threads: one makes, seals and wipes segments; one prefers writes, so that reads do not starve them."""
EXTRA_THREADS: Final = 3
"""Threads of a drive beyond its depth: for upkeep, and to compare checksums and encode records meanwhile."""


class Workers:
    """See the module."""

    def __init__(self, shared: Shared, drive: Drive) -> None:
        """Start the threads, and find what is on the drive, unless its directory could not be opened."""
        self._shared, self._drive = shared, drive
        self._upkeep, self._writer, self.reader = Upkeep(shared, drive), Writer(shared, drive), Reader(shared, drive)
        self._recovery = Recovery(shared, drive, self._upkeep.wipe)
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
                if shared.queue:  # there is no space for it yet
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
            return self.reader.next_task() or self._upkeep.next_task()
        if drive.under_way >= drive.config.depth:
            return None
        if thread == FIRST_WRITER and drive.config.depth > 1:
            return self._writer.next_task() or self.reader.next_task()
        return self.reader.next_task() or self._writer.next_task()

    # -- health: under the lock -------------------------------------------------------------------------------------

    def watch(self) -> None:
        """Find out whether the drive is slow, or may be tried again. Called regularly."""
        shared, drive = self._shared, self._drive
        slow = self.io.longest_s() > drive.config.io_timeout_s
        if slow and not drive.slow:
            log.warning("SSD path %s is slow: nothing for %s s", drive.volume.path, drive.config.io_timeout_s)
            shared.counts["timeouts"] += 1
            shared.refuse_reads(drive)
        if slow != drive.slow:
            drive.slow = slow
            shared.fail_queue_if_off()
        if drive.state == "off" and not drive.tasks and not self.io.busy():
            self._retry()
        drive.notify()

    def _retry(self) -> None:
        """Try again a drive that is off: first unlock its directory, so that it can be unmounted meanwhile."""
        drive = self._drive
        if not drive.closed:
            drive.closed = True
            drive.tasks.append(drive.volume.close)
        elif time.monotonic() >= drive.retry_at_s:
            drive.state = "starting"
            drive.tasks.append(self._recovery.open)
