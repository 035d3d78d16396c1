"""A bound on what peers can make the log say."""

import logging
import threading
import time
from typing import Final

MAX_LINES: Final = 5
EVERY_S: Final = 60.0


class LogLimit:
    """Writes at most `max_lines` lines in `every_s` seconds; the next line says how many were left out. Thread-safe."""

    def __init__(self, log: logging.Logger, *, max_lines: int = MAX_LINES, every_s: float = EVERY_S) -> None:
        self._log, self._max_lines, self._every_s = log, max_lines, every_s
        self._lock = threading.Lock()
        self._began_s = -every_s
        self._lines = self._left_out = 0

    def write(self, level: int, text: str, *arguments: object, trace: bool = False) -> None:
        """Write a line, or count it. `trace`: with the stack of the error that is being handled."""
        if not self._log.isEnabledFor(level):
            return
        now_s = time.monotonic()
        with self._lock:
            if now_s - self._began_s >= self._every_s:
                self._began_s, self._lines = now_s, 0
            if self._lines >= self._max_lines:
                self._left_out += 1
                return
            self._lines += 1
            left_out, self._left_out = self._left_out, 0
        if left_out:
            text += f" ({left_out} similar lines were left out)"
        self._log.log(level, text, *arguments, exc_info=trace)
