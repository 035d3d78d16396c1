"""A node's memory, registered with its agent of NIXL. Peers read it without the node's Python."""

import logging
import threading

import numpy as np
import numpy.typing as npt

from raykv.errors import CapacityError
from raykv.memory.arena import SharedMemory
from raykv.memory.table import Table
from raykv.protocol.messages import NixlConnected
from raykv.transport.nixl.agent import Agent, Registered
from raykv.transport.one_sided.extents import ExtentQueue

log = logging.getLogger(__name__)


class NixlExports(ExtentQueue):
    """The registered memory of one node, in parts: the table's records, then extents in the order of registration.

    An extent is registered in the background, after it got real memory. Until then, its chunks go over TCP.
    """

    def __init__(self, arena: SharedMemory, table: Table, agent: Agent) -> None:
        """Register the table's records. Raises CapacityError if they cannot be registered."""
        super().__init__(table.extent_nbytes)
        self.agent, self._arena = agent, arena
        self._numbers: npt.NDArray[np.uint32] = np.zeros(table.extents, np.uint32)  # the part of each extent; 0: none
        self._lock = threading.Lock()
        offset, nbytes = table.place_of_records
        refusal = table.memory.refusal(nbytes)
        if refusal or not table.memory.populate(offset, nbytes):
            raise CapacityError(f"no memory for the records of the table: {refusal or 'the file system is full'}")
        self._records = table.memory.address + offset
        self._parts: list[Registered] = [agent.register(self._records, nbytes)]

    def _register(self, extent: int) -> None:
        try:
            part = self.agent.register(self._arena.address + extent * self._extent_nbytes, self._extent_nbytes)
        except CapacityError as error:
            self.refused = str(error)
            log.warning("peers reach the rest of this node's memory over TCP: %s", error)
            return
        with self._lock:
            self._parts.append(part)
            self._numbers[extent] = len(self._parts)

    @property
    def registered_nbytes(self) -> int:
        """Bytes of the arena that peers can read."""
        return int(np.count_nonzero(self._numbers)) * self._extent_nbytes

    def remote_keys(self, offsets: npt.NDArray[np.uint64]) -> bytes:
        """Return the number (u32) of the part that has each chunk; 0 where there is none."""
        return self._numbers[(offsets // np.uint64(self._extent_nbytes)).astype(np.int64)].tobytes()

    def connect(self, known: int) -> NixlConnected:
        """Return the metadata of the parts after the first `known`. Raises CapacityError."""
        with self._lock:
            parts, count = self._parts[known:], len(self._parts)
        return NixlConnected(self.agent.metadata_of(parts) if parts else b"", count, self._arena.address, self._records)

    def close(self) -> None:
        """End all registrations."""
        with self._lock:
            parts, self._parts = self._parts, []
        for part in parts:
            part.close()
