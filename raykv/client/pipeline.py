"""A connection to this host's node, with pipelining: requests are sent before earlier answers have arrived.

A call that reaches its deadline ends, but its connection stays open, and a later call collects the answer. So a slow
node does not end the leases of the connection.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, TypeAlias

from raykv.client.slot_pool import TRUST_S
from raykv.errors import PeerUnavailable, ProtocolError, RayKVError, TransientError
from raykv.memory.reader import ShmReader
from raykv.protocol import messages
from raykv.transport.base import MAX_POSTED
from raykv.transport.forking import drop_after_fork
from raykv.transport.link import Link

NO_ANSWER: Final = "the local node did not answer by the deadline"
CONNECT_S: Final = 1.0
"""An attempt to connect takes at least this long before it fails for lack of time. A call with an earlier deadline
leaves the attempt running, and a later call uses its result. So a busy host connects also for calls of milliseconds."""
MAX_POSTED_KEYS: Final = 2048
"""Largest number of keys of all unanswered requests together. A request with more keys is sent only if no other request
is unanswered. Requests and answers with this many keys fit into the socket's buffers, so that no send blocks."""
POST_S: Final = 1.0
"""Time limit to send one request, and to receive the rest of an answer that has begun to arrive."""
SLICE_S: Final = 0.001
"""A thread waits at most this long for an answer while it holds the lock. Then it lets other threads use the
connection."""
YIELD_S: Final = 50e-6

Outcome: TypeAlias = messages.Answer | RayKVError
"""The node's answer, the error that the node sent, or the error that ended the connection."""
Finish: TypeAlias = Callable[[Outcome], None]
"""A function that the pipeline calls with the outcome of a request, while the pipeline's lock is held. The function
may call the pipeline's `post_locked` once. It must not call other methods of the pipeline."""


@dataclass(slots=True, eq=False)
class Posted:
    """A request that was sent.

    Attributes:
        finish: Called with the outcome while the pipeline's lock is held: see `Finish`. None: nothing is called.
        life: Number of the connection on which the request was sent.
        keys: Number of keys in the request.
        asked_at_s: When the request was sent.
        outcome: None until the answer is collected, or until the connection ends.
    """

    finish: Finish | None
    life: int
    keys: int
    asked_at_s: float
    outcome: Outcome | None = None


class Pipeline:
    """One connection, opened at first use and again after it broke. Thread-safe.

    Attributes:
        lock: Guards this object, and the state that `finish` functions change. Callers of `*_locked` methods hold it.
        life: Number of the current connection. Leases of any other connection have ended.
        reader: Reads the memory that contains the slots and the pinned chunks of the current connection.
        epoch: The greatest epoch of a view in any answer so far.
        trusted_until_s: Until this time a writer may start to write to the connection's slots: see TRUST_S.
    """

    reader: ShmReader

    def __init__(self, open_link: Callable[[float], tuple[Link, ShmReader]], *, retry_s: float) -> None:
        """Connect at first use.

        Args:
            open_link: Opens a link by a deadline, and maps the node's memory.
            retry_s: After a failed attempt to connect, the next attempt is made after this time at the earliest.
        """
        self._open_link, self._retry_s = open_link, retry_s
        self.life = self.epoch = 0
        self._retry_at_s = 0.0
        self.after_fork()
        drop_after_fork(self)

    def after_fork(self) -> None:
        """Drop the connection, its leases and its answers, because these belong to the parent."""
        self.lock = threading.Lock()
        self.life += 1
        self._link: Link | None = None
        self._opening: Future[tuple[Link, ShmReader]] | None = None
        self._posted: deque[Posted] = deque()
        self._posted_keys = 0
        self.trusted_until_s = 0.0

    @property
    def connected(self) -> bool:
        return self._link is not None

    @contextmanager
    def locked(self, deadline_s: float) -> Iterator[None]:
        """Hold the lock. A KeyboardInterrupt drops the connection, because a message may be half sent.

        Raises:
            PeerUnavailable: Other threads hold the lock until the deadline.
        """
        if not self.lock.acquire(timeout=max(0.0, deadline_s - time.monotonic())):
            raise PeerUnavailable("the connection to the local node is busy with other calls")
        try:
            yield
        except BaseException as error:
            self.drop_if_interrupted_locked(error)
            raise
        finally:
            self.lock.release()

    def drop_if_interrupted_locked(self, error: BaseException) -> None:
        """Drop the connection if `error` is an interrupt, that is, not an `Exception`."""
        if not isinstance(error, Exception):
            self.drop_locked("a call was interrupted")

    def connect_locked(self, deadline_s: float) -> None:
        """Connect if there is no connection.

        Raises:
            PeerUnavailable: The node does not answer, or the last attempt failed less than `retry_s` ago.
        """
        if self._link is not None:
            return
        if self._opening is None:
            now_s = time.monotonic()
            if now_s < self._retry_at_s:
                raise PeerUnavailable("the local node is away")
            self._opening = self._open(max(deadline_s, now_s + CONNECT_S))
        opening = self._opening
        wait([opening], max(0.0, deadline_s - time.monotonic()))
        if not opening.done():
            raise PeerUnavailable(NO_ANSWER)
        self._opening = None
        try:
            self._link, self.reader = opening.result()
        except RayKVError as error:
            self._retry_at_s = time.monotonic() + self._retry_s
            raise PeerUnavailable(f"the local node is away: {error}") from error
        self.life += 1

    def _open(self, deadline_s: float) -> "Future[tuple[Link, ShmReader]]":
        """Open a link in a thread of its own."""
        thread = ThreadPoolExecutor(1, "raykv-local")
        opening = thread.submit(self._open_link, deadline_s)
        thread.shutdown(wait=False)
        return opening

    def post(
        self,
        request: messages.Message,
        finish: Finish | None = None,
        *,
        deadline_s: float,
        life: int | None = None,
        keys: int = 0,
    ) -> Posted:
        """Send a request as soon as `has_room_locked` permits it.

        Args:
            life: Number of the connection to use. None: the current connection; if there is none, a new connection.

        Raises:
            PeerUnavailable: The node does not answer, or connection `life` has ended. The request was not sent.
        """
        while True:
            with self.locked(deadline_s):
                self.collect_arrived_locked()
                if life is not None and life != self.life:
                    raise PeerUnavailable("the connection that held the lease is gone")
                self.connect_locked(deadline_s)
                if self.has_room_locked(keys):
                    return self.post_locked(request, finish, keys=keys)
                oldest = self._posted[0]
            if not self.wait(oldest, deadline_s):
                raise PeerUnavailable(f"the local node left {len(self._posted)} requests unanswered")

    def has_room_locked(self, keys: int) -> bool:
        """Return whether MAX_POSTED and MAX_POSTED_KEYS allow a request with this many keys to be sent now."""
        few = not self._posted or self._posted_keys + keys <= MAX_POSTED_KEYS
        return few and len(self._posted) < MAX_POSTED

    def post_locked(self, request: messages.Message, finish: Finish | None = None, *, keys: int = 0) -> Posted:
        """Send a request on the open connection at once. This does not check `has_room_locked`.

        Raises:
            PeerUnavailable: There is no connection, or it broke. The request was not sent.
        """
        if self._link is None:
            raise PeerUnavailable("the local node is away")
        posted = Posted(finish, self.life, keys, time.monotonic())
        try:
            self._link.post(request, deadline_s=posted.asked_at_s + POST_S)
        except RayKVError as error:
            if self._link.closed:  # an open link means that only the request is wrong
                self.drop_locked(str(error))
            raise
        self._posted.append(posted)
        self._posted_keys += keys
        return posted

    def wait(self, posted: Posted, deadline_s: float) -> bool:
        """Wait for the outcome of a request. Return False if the deadline comes first; a later call gets the answer."""
        while posted.outcome is None:
            left_s = deadline_s - time.monotonic()
            try:
                with self.locked(deadline_s):
                    if self._link is None or posted.life != self.life:
                        break
                    # `wait_ready` rounds its time-out up to whole milliseconds, so near the deadline it must not wait.
                    if self._link.wait_ready(SLICE_S if left_s > SLICE_S else 0.0):
                        self._collect_locked()
                        continue
            except PeerUnavailable:
                break  # other threads held the lock until the deadline
            if left_s <= SLICE_S:
                break
            time.sleep(YIELD_S)  # lets a waiting thread get the lock
        return posted.outcome is not None

    def wait_all(self, deadline_s: float) -> bool:
        """Wait until every request sent so far has an outcome. Returns False if the deadline comes first."""
        with self.lock:
            newest = self._posted[-1] if self._posted else None
        return newest is None or self.wait(newest, deadline_s)

    def collect_arrived_locked(self) -> None:
        """Collect the answers that have arrived."""
        while self._posted and self._link is not None and self._link.wait_ready(0.0):
            self._collect_locked()

    def _collect_locked(self) -> None:
        assert self._link is not None
        posted, link = self._posted[0], self._link
        outcome: Outcome
        try:
            outcome = link.collect(deadline_s=time.monotonic() + POST_S)
        except TransientError as error:
            self.drop_locked(str(error))
            return
        except RayKVError as error:
            outcome = error.with_traceback(None)
        self._posted.popleft()
        self._posted_keys -= posted.keys
        self.trusted_until_s = posted.asked_at_s + TRUST_S
        self.epoch = max(self.epoch, link.epoch)
        self._finish_locked(posted, outcome)

    def _finish_locked(self, posted: Posted, outcome: Outcome) -> None:
        posted.outcome = outcome
        try:
            if posted.finish is not None:
                posted.finish(outcome)
        except ProtocolError as error:
            posted.outcome = error
            self.drop_locked(str(error))

    def drop_locked(self, reason: str) -> None:
        """Close the connection, which ends its leases. Each unanswered request gets a PeerUnavailable as outcome."""
        if self._link is None:
            return
        self._link.close()
        self._link, self.trusted_until_s = None, 0.0
        self.life += 1
        lost, self._posted, self._posted_keys = self._posted, deque(), 0
        for posted in lost:
            self._finish_locked(posted, PeerUnavailable(reason))

    def close(self) -> None:
        """Close the connection, and never open another."""
        with self.lock:
            self.drop_locked("the client was closed")
            self._retry_at_s = float("inf")
            if self._opening is not None:
                self._opening.add_done_callback(_close_unused)
                self._opening = None


def _close_unused(opening: "Future[tuple[Link, ShmReader]]") -> None:
    if opening.exception() is None:
        opening.result()[0].close()
