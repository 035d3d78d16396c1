"""The chunks of a Write: they arrive in lent slots, and are compared with the sender's checksums."""

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from raykv.errors import ProtocolError, RayKVError
from raykv.memory.copying import checksums_of
from raykv.protocol import codec, messages
from raykv.protocol.codec import array
from raykv.storage.batches import Written
from raykv.storage.store import LentSlots
from raykv.transport.base import ChunkRun, Reply

Checksums: TypeAlias = npt.NDArray[np.uint64]


class Incoming:
    """Receives chunks of `nbytes` bytes into lent slots. `positions`: the index of each chunk in the Write."""

    def __init__(self, arena: memoryview, nbytes: int, slots: LentSlots, positions: npt.NDArray[np.int32]) -> None:
        self._slots, self._positions = slots, positions
        self._runs = [ChunkRun([[arena[start : start + nbytes]]], [nbytes]) for start in slots.offsets.tolist()]
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
                release()

        accepted = messages.Accepted(self._positions.astype("<i4").tobytes(), full)
        return Reply(accepted, incoming=self._runs, closing=self._close, finish=finish)

    def _close(self, message: messages.Message) -> None:
        if not isinstance(message, messages.Checksums):
            raise ProtocolError(f"{type(message).__name__} where Checksums was due")
        self._sent.append(array(message.checksums, "<u8", len(self._positions)))

    def _intact(self) -> Written:
        """Return the chunks whose bytes have the sender's checksums."""
        received = np.frombuffer(b"".join(run.checksums or checksums_of(run.chunks) for run in self._runs), "<u8")
        intact = received == self._sent[0]
        return Written(self._positions[intact], self._slots.rows[intact], received[intact])
