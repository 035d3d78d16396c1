"""Sends the keys of lookups to this host's node while `raykv record` runs."""

import threading
from collections.abc import Callable
from typing import Final

from raykv.protocol.chunk_keys import to_bytes
from raykv.protocol.trace_requests import TracedRequest
from raykv.transport.forking import drop_after_fork
from raykv.types import KeyArray

SEND_S: Final = 0.2
SEND_KEYS: Final = 1 << 14
"""`record` sends all collected requests if the last send was SEND_S ago, or if SEND_KEYS keys are collected."""


class TraceRecorder:
    """Collects requests, and sends them together. Thread-safe."""

    def __init__(self, send: Callable[[list[TracedRequest]], None], chunk_tokens: int) -> None:
        """`send` sends requests to the node. It must not raise."""
        self._send, self._chunk_tokens = send, chunk_tokens
        self._sent_s = -SEND_S
        self.after_fork()
        drop_after_fork(self)

    def after_fork(self) -> None:
        """Start empty, because the parent sends the requests collected so far."""
        self._lock = threading.Lock()
        self._waiting: list[TracedRequest] = []
        self._keys = 0

    def record(self, keys: KeyArray, *, today_s: float, now_s: float) -> None:
        """Record one request for these keys. `today_s`: seconds since 1970. `now_s`: monotonic clock."""
        with self._lock:
            self._waiting.append(TracedRequest(today_s, self._chunk_tokens, to_bytes(keys)))
            self._keys += len(keys)
            if self._keys < SEND_KEYS and now_s < self._sent_s + SEND_S:
                return
            requests, self._waiting, self._keys, self._sent_s = self._waiting, [], 0, now_s
        self._send(requests)
