"""This host's node: its mapped memory, and a connection for requests and pins.

Reads need only the mapped memory, so reads work while the node is down. Puts use a separate connection: see
`raykv.client.writer`.
"""

import threading
import time
from typing import Final

import msgspec
import numpy as np

from raykv.client.pipeline import NO_ANSWER, Finish, Outcome, Pipeline, Posted
from raykv.errors import PeerUnavailable, RayKVError
from raykv.memory.reader import ShmReader
from raykv.protocol import messages
from raykv.protocol.chunk_keys import KEY_NBYTES, to_bytes
from raykv.protocol.codec import array, expect
from raykv.protocol.namespace import Namespace
from raykv.transport.forking import drop_after_fork
from raykv.transport.link import Link
from raykv.types import KeyArray

CHECK_S: Final = 1.0
"""Minimum time between two checks of whether the node still uses the mapped files."""


class LocalConnection:
    """The node of this host. Thread-safe.

    Attributes:
        address: Address at which the node listens.
        attached: The last answer to Attach, with the node's name, host, memory files and secret.
        reader: Reads the node's memory.
        pipeline: The connection for requests and pins.
    """

    reader: ShmReader

    def __init__(self, address: str, *, deadline_s: float, retry_s: float) -> None:
        """Connect to the node and map its memory.

        Raises:
            PeerUnavailable: The node does not answer, or its memory cannot be mapped.
        """
        self.address, self._lock = address, threading.Lock()
        self._check_at_s = 0.0
        self.attached = messages.Attached("", "", "", "")
        self.pipeline = Pipeline(self.open_link, retry_s=retry_s)
        try:
            with self.pipeline.lock:
                self.pipeline.connect_locked(deadline_s)
        except BaseException:  # the caller gets no object that it could close, and the attempt may still succeed
            self.pipeline.close()
            raise
        drop_after_fork(self)

    def after_fork(self) -> None:
        """Replace the lock. The child continues to use the mapped memory."""
        self._lock = threading.Lock()

    def open_link(self, deadline_s: float) -> tuple[Link, ShmReader]:
        """Open a connection to the node. Returns the connection, and a reader of the memory that the node uses now.

        Raises:
            TransientError: The node does not answer.
            LostError: The node's memory files no longer exist.
        """
        link = Link.connect(self.address, b"", deadline_s=deadline_s)
        try:
            attached = expect(messages.Attached, link.call(messages.Attach(), deadline_s=deadline_s))
            files = attached.table, attached.arena
            with self._lock:
                mapped = self.attached.table, self.attached.arena
                if files != mapped or not self.reader.is_current():
                    # The old reader is not closed here, because another thread may still use it.
                    self.reader = ShmReader(*files, writable=True)
                self.attached = attached
                return link, self.reader
        except BaseException:  # an interrupt too: no other code would close the link
            link.close()
            raise

    def learn_secret(self, deadline_s: float) -> bytes:
        """Ask the node for the secret that the cluster uses now, which may have been rotated. Updates `attached`.

        Raises RayKVError if the node does not answer.
        """
        answer = expect(messages.Attached, self.call(messages.Attach(), deadline_s))
        with self._lock:
            if answer.cluster == self.attached.cluster:
                self.attached = msgspec.structs.replace(self.attached, secret=answer.secret)
            return self.attached.secret

    def is_current(self) -> bool:
        """Return whether the node still uses the mapped memory. If not, the next request maps the node's new memory.

        This method checks the files at most once per CHECK_S. Between two checks it returns True.
        """
        now_s = time.monotonic()
        if now_s >= self._check_at_s:
            self._check_at_s = now_s + CHECK_S
            if not self.reader.is_current():
                self._check_at_s = 0.0
                with self.pipeline.lock:
                    self.pipeline.drop_locked("the node's memory was replaced")
                return False
        return True

    def call(self, request: messages.Message, deadline_s: float, *, life: int | None = None) -> messages.Answer:
        """Send a request to the node, and return the node's answer.

        If the connection is broken and `life` is None, the request is sent again on a new connection, because the node
        may have been restarted.

        Args:
            life: For a request about a lease, the number of the connection that owns the lease. The request is sent on
                no other connection.

        Raises:
            PeerUnavailable: The node is down, or does not answer by the deadline, or connection `life` has ended.
            RayKVError: The node refused the request.
        """
        return _answer_of(self._ask(request, deadline_s=deadline_s, life=life))

    def is_spread(self, group: Namespace) -> bool:
        """Whether the chunks of a quota group are spread over the nodes. Reads this host's table, without a call."""
        table = self.reader.table
        numbers = np.flatnonzero(table.spread).tolist()
        if not numbers:
            return False
        text = group.model_dump_json(exclude_defaults=True).encode()
        return any(bytes(table.namespaces["text"][number]) == text for number in numbers)

    def pin(self, keys: KeyArray, *, group: bytes, deadline_s: float) -> tuple[messages.Held, int, ShmReader]:
        """Pin chunks in this host's memory. Returns the answer, the connection's number, and a reader of the memory.

        Raises:
            ProtocolError: The answer has another number of rows than keys.
            PeerUnavailable: The connection broke, or the deadline passed. If the node's answer arrives after the
                deadline, the chunks are unpinned at once.
        """

        def unpin(outcome: Outcome) -> None:
            if isinstance(outcome, messages.Held):
                self.pipeline.post_locked(messages.Unpin(outcome.rows))

        posted = self._ask(messages.Pin(to_bytes(keys), group=group), unpin, deadline_s=deadline_s)
        held = expect(messages.Held, _answer_of(posted))
        array(held.rows, "<i4", len(keys))
        with self.pipeline.lock:
            if posted.life != self.pipeline.life:
                raise PeerUnavailable("the connection with the pins broke")
            return held, posted.life, self.pipeline.reader

    def _ask(
        self, request: messages.Message, late: Finish | None = None, *, deadline_s: float, life: int | None = None
    ) -> Posted:
        """Send a request, and wait for its outcome. An outcome that comes after the deadline is passed to `late`."""
        pipeline, keys = self.pipeline, len(getattr(request, "keys", b"")) // KEY_NBYTES
        while True:
            may_be_broken = pipeline.connected and life is None  # if True, the loop may retry on a new connection
            try:
                posted = pipeline.post(request, deadline_s=deadline_s, life=life, keys=keys)
            except PeerUnavailable:
                if not may_be_broken or pipeline.connected:
                    raise
                continue
            if not pipeline.wait(posted, deadline_s):
                with pipeline.lock:
                    if posted.outcome is None:
                        posted.finish = late
                        raise PeerUnavailable(NO_ANSWER)
            if not (may_be_broken and isinstance(posted.outcome, PeerUnavailable)):
                return posted

    def close(self) -> None:
        self.pipeline.close()
        self.reader.close()


def _answer_of(posted: Posted) -> messages.Answer:
    outcome = posted.outcome
    assert outcome is not None
    if isinstance(outcome, RayKVError):
        raise type(outcome)(str(outcome))  # a copy, because raising `outcome` itself would make a reference cycle
    return outcome
