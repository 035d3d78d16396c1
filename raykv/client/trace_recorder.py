"""Tells the node of this host what requests ask for, while `raykv record` runs."""

import threading
from collections.abc import Callable
from typing import Final

import numpy as np

from raykv.protocol.trace_requests import TracedRequest, pack
from raykv.types import KeyArray

SEND_S: Final = 0.2
SEND_KEYS: Final = 1 << 14
"""A client tells its node after so long, or of so many keys at once, whichever is sooner."""


class TraceRecorder:
    """A client's part: gathers a few requests, and sends them. Thread-safe."""

    def __init__(self, send: Callable[[bytes], None], chunk_tokens: int) -> None:
        """Args: send: Tells the node; its errors are its own."""
        self._send, self._chunk_tokens = send, chunk_tokens
        self._waiting: list[TracedRequest] = []
        self._keys = 0
        self._sent_s = -SEND_S
        self._lock = threading.Lock()

    def note(self, keys: KeyArray, *, today_s: float, now_s: float) -> None:
        """A request asked for these."""
        with self._lock:
            self._waiting.append(TracedRequest(today_s, self._chunk_tokens, np.array(keys)))
            self._keys += len(keys)
            if self._keys < SEND_KEYS and now_s < self._sent_s + SEND_S:
                return
            requests, self._waiting, self._keys, self._sent_s = self._waiting, [], 0, now_s
        self._send(pack(requests))
