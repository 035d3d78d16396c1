"""Sends entries of requests' trails to a node, and reads the trail of a request from all nodes."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from raykv.client.router import Router
from raykv.client.why import Why, departures
from raykv.errors import RayKVError
from raykv.protocol import messages
from raykv.protocol.chunk_keys import KEY_NBYTES
from raykv.protocol.namespace import Namespace
from raykv.protocol.request_trail import MAX_ENTRIES, MAX_TEXT, TrailEntry
from raykv.types import NodeId

MAX_WAITING: Final = 4 * MAX_ENTRIES
"""At most this many entries wait to be sent. The oldest are dropped first."""


@dataclass(frozen=True, slots=True)
class TrailLine:
    """One sentence about a request.

    Attributes:
        at_s: When it was made, in seconds since 1970.
        text: The sentence.
        node: The node that keeps it.
        absent: What had become of the first chunk that was not found, before the request; None if all were found, or if
            no node remembers.
    """

    at_s: float
    text: str
    node: NodeId
    absent: Why | None = None


class TrailSender:
    """Sends entries on a thread. Entries that are added meanwhile go with the next message. Thread-safe.

    An entry that cannot be sent is dropped.
    """

    def __init__(self, send: Callable[[list[TrailEntry]], object]) -> None:
        """`send` sends at most MAX_ENTRIES entries. It may raise RayKVError."""
        self._send = send
        self._lock = threading.Lock()
        self._waiting: deque[TrailEntry] = deque(maxlen=MAX_WAITING)
        self._is_sending = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="raykv-trail")

    def add(self, request_id: str, text: str, *, absent: bytes = b"") -> None:
        """Send an entry. `absent`: see `TrailEntry`."""
        entry = TrailEntry(request_id[:256] or "-", time.time(), text[:MAX_TEXT], absent)
        with self._lock:
            self._waiting.append(entry)
            if self._is_sending:
                return
            self._is_sending = True
        with suppress(RuntimeError):  # it is closed
            self._thread.submit(self._run)

    def close(self) -> None:
        """Send what waits, and end the thread."""
        self._thread.shutdown(wait=True)

    def _run(self) -> None:
        while True:
            with self._lock:
                entries = [self._waiting.popleft() for _ in range(min(len(self._waiting), MAX_ENTRIES))]
                self._is_sending = bool(entries)
            if not entries:
                return
            with suppress(RayKVError):
                self._send(entries)


def read(router: Router, namespace: Namespace, request_id: str, deadline_s: float) -> list[TrailLine]:
    """Read the trail of a request from all members, in the order of time."""
    answers = router.ask_all(messages.GetTrail(request_id), deadline_s)
    found = [
        (node, each)
        for node, answer in answers.items()
        if isinstance(answer, messages.Trail)
        for each in answer.entries
    ]
    found.sort(key=lambda each: each[1].at_s)
    lost = _lost(router, namespace, [entry for _, entry in found], deadline_s)
    return [TrailLine(entry.at_s, entry.text, node, absent) for (node, entry), absent in zip(found, lost, strict=True)]


def _lost(router: Router, namespace: Namespace, entries: Sequence[TrailEntry], deadline_s: float) -> list[Why | None]:
    """Say for each entry how its missing chunk had left before."""
    keys = list(dict.fromkeys(each.absent for each in entries if len(each.absent) == KEY_NBYTES))
    known = dict(zip(keys, departures(router, namespace, keys, deadline_s), strict=True)) if keys else {}
    now_s, found = time.time(), []
    for entry in entries:
        before = [
            Why(each.reason, each.node, each.tier, each.ago_s - (now_s - entry.at_s), each.policy)
            for each in known.get(entry.absent, ())
            if each.ago_s is not None and each.ago_s >= now_s - entry.at_s
        ]
        found.append(min(before, key=lambda each: each.ago_s or 0.0, default=None))
    return found
