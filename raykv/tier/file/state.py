"""The state that the threads of a file tier share: queues, catalog, health. One lock guards all of it."""

import logging
import threading
import time
from collections import deque
from typing import Final, Literal

from raykv.config import FileTierConfig
from raykv.tier.base import Environment
from raykv.tier.file.catalog import Catalog, Pack
from raykv.tier.file.folder import VANISHED, Folder
from raykv.tier.segments.format import BLOCK_NBYTES
from raykv.tier.segments.requests import Run, WriteQueue

log = logging.getLogger(__name__)

RETRY_S: Final = 5.0
"""Time between an error and the next attempt to use the directory."""


class State(WriteQueue):
    """Queues, catalog and health of one file tier.

    Attributes:
        lock: Guards this object. It is notified when a thread may have work.
        runs: Queued reads.
        filling: The pack that this node is writing; None if there is none.
    """

    def __init__(self, config: FileTierConfig, environment: Environment) -> None:
        largest_nbytes = config.pack_nbytes - 4 * BLOCK_NBYTES  # 4 blocks are for the record and the summary
        self.catalog = Catalog(environment.node, rows=config.rows)
        super().__init__("raykv-file-callbacks", self.catalog.index, environment, largest_nbytes=largest_nbytes)
        self.config = config
        self.folder = Folder(config.path, environment.node)
        self.lock = threading.Condition()
        self.runs: deque[Run] = deque()
        self.filling: Pack | None = None
        self.closed = self.readable = self.writable = self._slow = False
        self.reason, self.retry_s, self.next_scan_s = "", 0.0, 0.0
        self.packs_removed = 0

    def refuse_reads(self) -> None:
        for run in self.runs:
            run.finish([False] * len(run.pieces))
        self.runs.clear()

    def status(self) -> Literal["starting", "on", "slow", "off"]:
        if self.folder.longest_s() > self.config.io_timeout_s and not self.closed:
            if not self._slow:
                self._slow = True
                self.counts["timeouts"] += 1
                log.warning("%s is slow", self.folder.path)
            return "slow"
        self._slow = False
        if self.readable and self.writable and not self.closed:
            return "on"
        return "off" if self.reason or self.closed else "starting"

    def fail(self, error: Exception, *, reading: bool = False) -> None:
        """Stop writes for RETRY_S. With `reading`, stop reads too. Acquires the lock."""
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        with self.lock:
            if reason != self.reason:
                log.warning("%s: the file tier is off: %s", self.folder.path, reason)
            self.counts["errors"] += 1
            self.reason, self.writable = reason, False
            self.retry_s = time.monotonic() + RETRY_S
            self.refuse_writes()
            if reading:
                self.readable, self.next_scan_s = False, self.retry_s
                self.refuse_reads()
            self.lock.notify_all()

    def count_error(self, action: str, error: OSError) -> None:
        """Count an error after which the tier stays on. A vanished file is no error. Acquires the lock."""
        if error.errno not in VANISHED:
            with self.lock:
                self.counts["errors"] += 1
            log.debug("%s: %s: %s", self.folder.path, action, error)

    def recover(self) -> None:
        """Clear the reason for being off if the tier is readable and writable again. The caller holds the lock."""
        if self.readable and self.writable and self.reason:
            log.warning("%s: the file tier is on again", self.folder.path)
            self.reason = ""
