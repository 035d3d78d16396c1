"""A node's memory, registered with the RDMA devices of its host.

Peers read it, and write to slots that were lent to them, without the node's CPU. The node itself sends from it.
"""

import logging
import threading
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from raykv.errors import CapacityError
from raykv.memory.arena import SharedMemory
from raykv.memory.table import Table
from raykv.protocol.messages import RdmaConnected
from raykv.protocol.rdma import QueuePairEnd
from raykv.transport.forking import abandon, drop_after_fork
from raykv.transport.one_sided.base import Broken
from raykv.transport.one_sided.extents import ExtentQueue
from raykv.transport.rdma.device import READABLE, WRITABLE, Device, open_devices
from raykv.transport.rdma.queue_pair import QueuePair

log = logging.getLogger(__name__)

NO_END: Final = QueuePairEnd("", 0, 0, 0, 1)
"""Stands for an end that could not be connected."""
MAX_QUEUE_PAIRS: Final = 4096
"""At most this many queue pairs of peers are open."""


class Exports(ExtentQueue):
    """The registered memory of one node. Thread-safe.

    An extent of the arena is registered in the background, after it got real memory. Until then, its chunks go over
    TCP. The records of the table are registered at the start; peers can only read them.

    Attributes:
        devices: The ports, one for each rail.
        refused: Why memory could not be registered; empty if all was.
        open_pairs: Number of open queue pairs of peers.
        received, received_nbytes: Chunks, and their bytes, that peers have written and that were intact.
    """

    def __init__(self, arena: SharedMemory, table: Table, devices: list[Device]) -> None:
        """Register the table's records.

        Raises:
            CapacityError: The records cannot be registered.
        """
        super().__init__(table.extent_nbytes)
        self.devices, self._arena = devices, arena
        self._keys: npt.NDArray[np.uint32] = np.zeros((len(devices), table.extents), np.uint32)
        self._local_keys = np.zeros_like(self._keys)
        self._lock = threading.Lock()
        self.open_pairs = self.received = self.received_nbytes = 0
        self._registrations: list[Any] = []
        drop_after_fork(self)
        offset, nbytes = table.place_of_records
        refusal = table.memory.refusal(nbytes)
        if refusal or not table.memory.populate(offset, nbytes):
            raise CapacityError(f"no memory for the records of the table: {refusal or 'the file system is full'}")
        self._records = table.memory.address + offset
        self._record_keys = []
        for device in devices:
            registration = device.register(self._records, nbytes, remote=READABLE)
            self._registrations.append(registration)
            self._record_keys.append(int(registration.rkey))

    @classmethod
    def open(cls, arena: SharedMemory, table: Table, names: tuple[str, ...]) -> "Exports | None":
        """Open the devices in `names`, or all if it is empty. Returns None if there is none that can be used."""
        devices = open_devices(names)
        try:
            return cls(arena, table, devices) if devices else None
        except CapacityError as error:
            log.warning("peers reach this node over TCP only: %s", error)
            return None

    def after_fork(self) -> None:
        """Leave the devices to the parent."""
        abandon((self.devices, self._registrations))
        self.devices, self._registrations = [], []

    def _register(self, extent: int) -> None:
        address = self._arena.address + extent * self._extent_nbytes
        for rail, device in enumerate(self.devices):
            try:
                registration = device.register(address, self._extent_nbytes, remote=WRITABLE)
            except CapacityError as error:
                self.refused = str(error)
                log.warning("peers reach the rest of this node's memory over TCP: %s", error)
                return
            with self._lock:
                self._registrations.append(registration)
            self._local_keys[rail, extent] = registration.lkey
            self._keys[rail, extent] = registration.rkey

    @property
    def registered_nbytes(self) -> int:
        """Bytes of the arena that all devices can reach."""
        return int(self._keys.all(axis=0).sum()) * self._extent_nbytes

    def remote_keys(self, offsets: npt.NDArray[np.uint64], rails: list[int]) -> bytes:
        """Return the key (u32) of the registration of each chunk, for each of the rails; 0 where there is none."""
        extents = (offsets // np.uint64(self._extent_nbytes)).astype(np.int64)
        return self._keys[rails][:, extents].tobytes()

    def local_keys(self, address: int, nbytes: int) -> tuple[int, ...]:
        """Return the local key of a chunk's registration for each device; empty if it is not registered here."""
        extent, within = divmod(address - self._arena.address, self._extent_nbytes)
        if not 0 <= extent < self._keys.shape[1] or within + nbytes > self._extent_nbytes:
            return ()
        if not self._keys[:, extent].all():
            return ()
        return tuple(self._local_keys[:, extent].tolist())

    def connect(self, ends: tuple[QueuePairEnd, ...]) -> "tuple[PeerPairs, RdmaConnected]":
        """Connect queue pairs with a peer's ends. The rails serve the ends in turn.

        An end that no rail reaches is answered with NO_END.

        Raises:
            CapacityError: Too many queue pairs are open, or a device refuses: for example a wrong address.
        """
        with self._lock:
            if self.open_pairs + len(ends) > MAX_QUEUE_PAIRS:
                raise CapacityError(f"this node has {self.open_pairs} queue pairs of peers; at most {MAX_QUEUE_PAIRS}")
            self.open_pairs += len(ends)
        rails: list[int] = []
        made: list[QueuePair] = []
        answers: list[QueuePairEnd] = []
        peer, reasons = PeerPairs(self, made, rails, len(ends)), list[str]()
        try:
            for number, end in enumerate(ends):
                try:
                    rail, pair = self._connect(number, end)
                except Broken as error:
                    reasons.append(str(error))
                    rails.append(number % len(self.devices))
                    answers.append(NO_END)
                    continue
                made.append(pair)
                rails.append(rail)
                answers.append(pair.end)
            if not made:
                raise CapacityError("; ".join(reasons) or "no queue pair was asked for")
        except BaseException:
            peer.close()
            raise
        keys = np.array([self._record_keys[rail] for rail in rails], np.uint32).tobytes()
        return peer, RdmaConnected(tuple(answers), self._arena.address, self._records, keys)

    def _connect(self, number: int, end: QueuePairEnd) -> tuple[int, QueuePair]:
        """Connect a queue pair with a peer's end of this number, over the first rail that reaches it.

        Raises:
            Broken: No rail does.
        """
        reason: Broken | None = None
        for rail in ((number + turn) % len(self.devices) for turn in range(len(self.devices))):
            pair = None
            try:
                pair = QueuePair(self.devices[rail])
                pair.connect(end, remote=WRITABLE)
                return rail, pair
            except Broken as error:
                reason = reason or error
                if pair is not None:
                    pair.close()
        assert reason is not None
        raise reason

    def count_received(self, chunks: int, nbytes: int) -> None:
        """Count chunks that a peer has written."""
        with self._lock:
            self.received += chunks
            self.received_nbytes += nbytes

    def release(self, count: int) -> None:
        """Count queue pairs that were closed."""
        with self._lock:
            self.open_pairs -= count

    def close(self) -> None:
        """End all registrations, and close the devices."""
        with self._lock:
            registrations, self._registrations = self._registrations, []
        for registration in registrations:
            registration.close()
        for device in self.devices:
            device.close()


class PeerPairs:
    """The queue pairs of one connection to a peer, which reads and writes over them."""

    def __init__(self, exports: Exports, pairs: list[QueuePair], rails: list[int], count: int) -> None:
        self._exports, self._pairs, self._rails, self._count = exports, pairs, rails, count

    @property
    def closed(self) -> bool:
        """Whether the queue pairs were destroyed."""
        return not self._count

    def remote_keys(self, offsets: npt.NDArray[np.uint64]) -> bytes:
        """Return `Exports.remote_keys` for these queue pairs."""
        return self._exports.remote_keys(offsets, self._rails)

    def count_received(self, chunks: int, nbytes: int) -> None:
        """Count chunks that the peer has written."""
        self._exports.count_received(chunks, nbytes)

    def close(self) -> None:
        """Destroy the queue pairs. After that, the peer writes to no memory any more. A second call does nothing."""
        count, self._count = self._count, 0
        self._exports.release(count)
        for pair in self._pairs if count else ():
            pair.close()
