"""A client's own node, on the same host: its memory mapped, and one connection on which the leases hang.

Reads need the mapping alone and go on while the node is dead. Writes need the connection; while it is away they are
refused with a reason, and every so often the next writer tries to connect again.
"""

import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import numpy as np

from raykv import wire
from raykv.errors import LostError, PeerUnavailable, RayKVError, TransientError
from raykv.keys import to_bytes
from raykv.memory.copying import checksum_of
from raykv.namespace import Namespace
from raykv.transport.base import Link, remaining
from raykv.transport.peers import Connect
from raykv.transport.shm import ShmReader
from raykv.types import KeyArray, PutResult


class LocalNode:
    """The node of this host. Thread-safe.

    Attributes:
        attached: What the node said of itself last.
        reader: Its memory.
        epoch: The greatest epoch it told of.
    """

    def __init__(self, connect: Connect, address: str, *, deadline_s: float, retry_s: float) -> None:
        """Connect and map.

        Raises:
            TransientError: It does not answer.
            LostError: Its memory is gone.
        """
        self._connect, self._address, self._retry_s = connect, address, retry_s
        self._lock = threading.Lock()
        self._link: Link | None = None
        self._retry_at_s = 0.0
        self._life = 0
        self.attached = wire.Attached("", "", 0, "", "")
        self.reader: ShmReader
        self._opened: set[bytes] = set()
        self.epoch = 0
        self._reconnect(deadline_s)

    def _reconnect(self, deadline_s: float) -> Link:
        link = self._connect(self._address, b"", deadline_s=deadline_s)
        try:
            attached = link.call(wire.Attach(), deadline_s=deadline_s)
            assert isinstance(attached, wire.Attached)
            files = (attached.table, attached.arena)
            if self._life == 0 or files != (self.attached.table, self.attached.arena) or not self.reader.is_current():
                # The old one is not closed: somebody may be reading from it. It goes with its last user.
                self.reader = ShmReader(attached.table, attached.arena, writable=True)
        except BaseException:
            link.close()
            raise
        self.attached, self._link = attached, link
        self._opened = set()
        self._life += 1
        return link

    def call(self, request: wire.Message, *, deadline_s: float, life: int | None = None) -> wire.Answer:
        """Ask the node.

        Args:
            life: Only on the connection of that number (leases of another one are gone).

        Raises:
            PeerUnavailable: It is away.
            RayKVError: It refused.
        """
        with self._lock:
            return self._call(request, deadline_s, life)

    def _call(self, request: wire.Message, deadline_s: float, life: int | None = None) -> wire.Answer:
        remaining(deadline_s)  # a late caller must not cost the others their connection, and its leases
        had_link = self._link is not None
        if life is not None and (life != self._life or not had_link):
            raise PeerUnavailable("the connection that held the lease is gone")
        try:
            return self._call_once(request, deadline_s)
        except PeerUnavailable:
            # The node may just have been restarted; no request does harm when it is made twice, but leases are gone.
            if not had_link or life is not None:
                raise
            return self._call_once(request, deadline_s)

    def _call_once(self, request: wire.Message, deadline_s: float) -> wire.Answer:
        link = self._link or self._try_reconnect(deadline_s)
        try:
            answer = link.call(request, deadline_s=deadline_s)
        except TransientError:
            link.close()
            self._link = None
            raise
        self.epoch = max(self.epoch, link.epoch)
        return answer

    def _try_reconnect(self, deadline_s: float) -> Link:
        remaining(deadline_s)
        if time.monotonic() < self._retry_at_s:
            raise PeerUnavailable("the local node is away")
        try:
            return self._reconnect(deadline_s)
        except RayKVError as error:
            self._retry_at_s = time.monotonic() + self._retry_s
            raise PeerUnavailable(f"the local node is away: {error}") from error

    def _open(self, namespace: Namespace, deadline_s: float) -> None:
        """Make the namespace's account known to the node, once in each of its lives."""
        if self._link is None or namespace.digest not in self._opened:
            text = namespace.account.model_dump_json(exclude_defaults=True).encode()
            self._call(wire.OpenNamespace(text), deadline_s)
            self._opened.add(namespace.digest)

    def reserve(
        self,
        namespace: Namespace,
        keys: KeyArray,
        nbytes: int,
        *,
        chained: bool,
        parent: KeyArray | None,
        depth: int,
        deadline_s: float,
    ) -> "Reservation":
        """Room in the arena for those keys that the node does not hold.

        Raises:
            PeerUnavailable: The node is away.
            UsageError: The size does not fit an extent.
        """
        raw_parent = b"" if parent is None else to_bytes(parent)
        with self._lock:
            self._open(namespace, deadline_s)
            request = wire.Reserve(namespace.account.digest, to_bytes(keys), nbytes, chained, raw_parent, depth)
            try:
                answer = self._call(request, deadline_s)
            except LostError:  # the node began anew in between, with empty hands
                self._opened.clear()
                self._open(namespace, deadline_s)
                answer = self._call(request, deadline_s)
            life, reader = self._life, self.reader
        assert isinstance(answer, wire.Granted)
        return Reservation(self, life, reader, len(keys), nbytes, answer)

    def pin(self, keys: KeyArray, *, deadline_s: float) -> "Pins":
        """Hold chunks that lie here, and view them in place."""
        with self._lock:
            answer = self._call(wire.Pin(to_bytes(keys)), deadline_s)
            life, reader = self._life, self.reader
        assert isinstance(answer, wire.Held)
        return Pins(self, life, reader, answer)

    def close(self) -> None:
        """Let go; leases end."""
        with self._lock:
            if self._link is not None:
                self._link.close()
                self._link = None
            self._retry_at_s = float("inf")
        self.reader.close()


class Reservation:
    """Slots of the arena to write chunks into, invisible to others until `commit`. Dies with the connection.

    Attributes:
        index: Places, in the keys asked for, of the chunks to write, in order.
        views: For each of them the bytes to write.
        reason: Why there is no room for the others that are missing; empty when none is.
    """

    def __init__(
        self,
        node: LocalNode | None,
        life: int,
        reader: ShmReader | None,
        asked: int,
        nbytes: int,
        granted: wire.Granted,
    ) -> None:
        self._node, self._life, self._asked, self._full = node, life, asked, granted.full
        self._rows = granted.rows
        self.index = np.frombuffer(granted.positions, "<i4")
        starts = np.frombuffer(granted.offsets, "<u8").tolist()
        self.views: list[memoryview] = []
        if reader is not None:
            self.views = [reader.arena.view[start : start + nbytes] for start in starts]
        self.reason = "full" if granted.full else ""
        self._open = bool(starts)

    @classmethod
    def refused(cls, asked: int, reason: str) -> Self:
        """A reservation of nothing, because the node is away."""
        made = cls(None, 0, None, asked, 0, wire.Granted(b"", b"", b"", asked))
        made.reason = reason
        return made

    def commit(self, *, timeout_s: float = 5.0) -> PutResult:
        """Make the chunks visible. All views must be written by now, and are not to be touched afterwards.

        Args:
            timeout_s: Seconds to wait for the node.
        """
        stored, reason = len(self.views), self.reason
        existed = self._asked - stored - self._full
        if self._open:
            checksums = np.array([checksum_of([view]) for view in self.views], np.uint64)
            try:
                self._call(wire.Commit(self._rows, checksums.tobytes()), timeout_s)
            except TransientError as error:
                stored, reason = 0, str(error)
                self.abort()  # if it never went out, the slots are still ours to give back
        self._open = False
        return PutResult(stored, existed, self._asked - existed - stored, reason)

    def abort(self, *, timeout_s: float = 5.0) -> None:
        """Give the slots back unwritten."""
        if self._open:
            self._open = False
            try:
                self._call(wire.Abort(self._rows), timeout_s)
            except TransientError:
                pass  # the node gave them back when the connection went

    def _call(self, request: wire.Message, timeout_s: float) -> None:
        assert self._node is not None
        self._node.call(request, deadline_s=time.monotonic() + timeout_s, life=self._life)


class Pins:
    """Chunks viewed in place, held as long as this context lasts and its connection lives.

    Attributes:
        views: One entry a key: the chunk's bytes, read-only; None where it is not here.
    """

    def __init__(self, node: LocalNode, life: int, reader: ShmReader, held: wire.Held) -> None:
        self._node, self._life, self._reader = node, life, reader
        self._rows = np.frombuffer(held.rows, "<i4")
        self._generations = reader.table.columns.generation[self._rows]
        starts = np.frombuffer(held.offsets, "<u8").tolist()
        lengths = np.frombuffer(held.nbytes, "<u4").tolist()
        self.views: Sequence[memoryview | None] = [
            reader.arena.view[start : start + length].toreadonly() if row >= 0 else None
            for row, start, length in zip(self._rows.tolist(), starts, lengths, strict=True)
        ]

    def valid(self) -> bool:
        """Whether the views still show what was pinned: false once the node was restarted and reused the room.

        A pin lives as long as its connection. Who cannot bear a restart in the middle asks this after use.
        """
        held = self._rows >= 0
        columns = self._reader.table.columns
        return bool((columns.generation[self._rows[held]] == self._generations[held]).all())

    def release(self) -> None:
        """Let go. The views must not be used any more."""
        rows, self._rows = self._rows, self._rows[:0]
        if (rows >= 0).any():
            try:
                self._node.call(wire.Unpin(rows.tobytes()), deadline_s=time.monotonic() + 5.0, life=self._life)
            except TransientError:
                pass  # the pins went with the connection

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()
