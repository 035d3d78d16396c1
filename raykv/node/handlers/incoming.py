"""The chunks of a Write: they arrive in lent slots, and are compared with the sender's checksums.

They come over the link, or the sender writes them to the slots over RDMA. A slot is committed or given back only when
no RDMA write to it can arrive any more: the sender has reported that its writes are done, or the queue pairs are gone.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from raykv.errors import ProtocolError, RayKVError
from raykv.memory.copying import checksums_of
from raykv.protocol import codec, messages
from raykv.protocol.codec import array, unpack_bits
from raykv.storage.batches import Written
from raykv.storage.store import LentSlots
from raykv.transport.base import ChunkRun, Reply

if TYPE_CHECKING:
    from raykv.transport.rdma.exports import PeerPairs

Checksums: TypeAlias = npt.NDArray[np.uint64]


class Incoming:
    """Receives chunks into lent slots."""

    def __init__(
        self,
        arena: memoryview,
        nbytes: int,
        slots: LentSlots,
        positions: npt.NDArray[np.int32],
        pairs: "PeerPairs | None",
    ) -> None:
        """Prepare to receive chunks of `nbytes` bytes.

        Args:
            arena: The node's memory.
            nbytes: Length of each chunk.
            slots: A slot for each chunk.
            positions: The index of each chunk in the Write.
            pairs: The queue pairs over which the sender writes to the slots; None: all bytes come over the link.
        """
        self._slots, self._positions, self._nbytes, self._pairs = slots, positions, nbytes, pairs
        self._placed = np.zeros(len(positions), np.bool_)
        self._runs = [ChunkRun([[arena[start : start + nbytes]]], [nbytes]) for start in slots.offsets.tolist()]
        self._over_link = list(self._runs)
        self._sent: list[Checksums] = []

    def reply(self, full: int, store: Callable[[Written], int], release: Callable[[], None]) -> Reply:
        """Return the reply to the Write.

        Args:
            full: Number of wanted chunks without a slot.
            store: Stores the chunks that arrived intact, and returns how many it stored. Not called after a failure.
            release: Called at the end in any case. It gives back the slots that `store` has not used.
        """

        def finish(complete: bool) -> messages.Answer:
            try:
                return messages.Count(store(self._intact()) if complete else 0)
            except RayKVError as error:
                return codec.failure(error)
            finally:
                if not complete and self._pairs is not None:
                    self._pairs.close()
                release()

        accepted, opening = messages.Accepted(self._positions.astype("<i4").tobytes(), full), None
        if self._pairs is not None:
            opening = self._open
            accepted.offsets = self._slots.offsets.astype("<u8").tobytes()
            accepted.remote_keys = self._pairs.remote_keys(self._slots.offsets)
        return Reply(accepted, opening=opening, incoming=self._over_link, closing=self._close, finish=finish)

    def _open(self, message: messages.Message) -> None:
        """Learn which chunks the sender has written over RDMA."""
        assert self._pairs is not None
        if not isinstance(message, messages.Placed):
            raise ProtocolError(f"{type(message).__name__} where Placed was due")
        self._placed = unpack_bits(message.places, len(self._positions))
        if message.broken:
            self._pairs.close()
        self._over_link[:] = [run for run, placed in zip(self._runs, self._placed, strict=True) if not placed]

    def _close(self, message: messages.Message) -> None:
        if not isinstance(message, messages.Checksums):
            raise ProtocolError(f"{type(message).__name__} where Checksums was due")
        self._sent.append(array(message.checksums, "<u8", len(self._positions)))

    def _intact(self) -> Written:
        """Return the chunks whose bytes have the sender's checksums."""
        received = np.frombuffer(b"".join(run.checksums or checksums_of(run.chunks) for run in self._runs), "<u8")
        intact = received == self._sent[0]
        if self._pairs is not None:
            good = int((intact & self._placed).sum())
            self._pairs.count_received(good, good * self._nbytes)
            if good < self._placed.sum():
                self._pairs.close()  # the missing bytes may be on their way
        return Written(self._positions[intact], self._slots.rows[intact], received[intact])
