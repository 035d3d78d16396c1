"""Writes chunks over RDMA into the slots that a peer has lent for them.

Bytes in registered memory leave straight from there: a node sends from its arena. Other bytes are copied to a stage
first, and hashed in the same pass, while the chunks before them are on the network.

The completion of a write says that the peer's device has the bytes, but not that the peer's CPU sees them already. So
the peer compares checksums before it commits a chunk.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

import numpy as np

from raykv.errors import CapacityError
from raykv.memory.copying import CopyThreads, checksums_of
from raykv.protocol import messages
from raykv.protocol.codec import array
from raykv.transport.bulk_write import Pieces, Placement
from raykv.transport.one_sided.base import Broken, Item, Late
from raykv.transport.one_sided.staging import STAGE_NBYTES, Stage, Stages, aligned
from raykv.transport.rdma.transfer import Connection, LocalRails, Transfer

WINDOW_NBYTES: Final = 8 << 20
"""Chunks of at most this many bytes, or one chunk, are posted together. Two such windows are under way at once."""
PLACE_S: Final = 2.0
"""After this time the rest of a Write goes over TCP. The peer waits at most `io_timeout_s` for the next message."""


class RegisteredMemory(Protocol):
    """Memory of this process that is registered already."""

    def local_keys(self, address: int, nbytes: int) -> tuple[int, ...]:
        """Return the local key for each device; empty if the memory is not registered."""
        ...


class Slot(NamedTuple):
    """A chunk's place at the peer. `place`: the chunk's index. `rkeys`: key of the registration for each queue pair."""

    place: int
    address: int
    rkeys: Sequence[int]


@dataclass
class Window:
    """Chunks that are written at once. `lent`: the stage of some of them. `checksums`: by the chunk's index."""

    transfer: Transfer | None = None
    lent: Stage | None = None
    checksums: dict[int, int] = field(default_factory=dict)


class RemoteWrite:
    """Places the chunks of one Write. One window of chunks is copied while the one before it is on the network.

    Attributes:
        placed: Number of chunks that the last call of `place` has placed.
        failure: Why the chunks cannot be placed; empty if nothing has failed.
    """

    def __init__(
        self,
        connection: Connection,
        stages: Stages,
        rails: LocalRails,
        memory: RegisteredMemory | None,
        *,
        threads: CopyThreads,
    ) -> None:
        """`memory`: where chunks may be that need no stage."""
        self._connection, self._stages, self._rails = connection, stages, rails
        self._memory, self._threads = memory, threads
        self._values: Pieces = ()
        self._nbytes = 0
        self._held: list[Window] = []
        self.placed, self.failure = 0, ""

    def place(self, accepted: messages.Accepted, values: Pieces, *, deadline_s: float) -> Placement:
        """Write chunks into their slots: see `Placer`.

        Chunks are left out if a slot is not registered at the peer, if they need a stage and none is free, or if the
        queue pairs fail. After that, or if one of several queue pairs has failed, all of them are destroyed.
        """
        connection = self._connection
        working, checksums = connection.working, dict[int, int]()
        self._values, self._nbytes = values, sum(map(len, values[0])) if values else 0
        self.placed, self.failure = 0, ""
        try:
            self._place(self._slots(accepted), checksums, deadline_s)
        except Late as error:
            connection.close()
            self.failure = str(error)
            raise
        except Broken as error:
            connection.close()
            self.failure = str(error)
        except BaseException:
            connection.close()
            raise
        finally:
            for window in list(self._held):
                self._give_up(window)
        broken = connection.working < working
        if broken:
            connection.close()  # the peer destroys its ends
        self.placed = len(checksums)
        return Placement(checksums, broken)

    def _slots(self, accepted: messages.Accepted) -> list[Slot]:
        """Return the slots that are registered at the peer."""
        count, connection = len(self._values), self._connection
        offsets = array(accepted.offsets, "<u8", count).tolist()
        keys = array(accepted.remote_keys, "<u4", count * connection.ends).reshape(connection.ends, count).T.tolist()
        places = zip(offsets, keys, strict=True)
        return [Slot(index, connection.arena + offset, key) for index, (offset, key) in enumerate(places) if all(key)]

    def _place(self, slots: list[Slot], checksums: dict[int, int], deadline_s: float) -> None:
        ahead, until_s = None, time.monotonic() + PLACE_S
        for some in self._cut(slots):
            if time.monotonic() >= until_s:
                break
            direct = self._direct(some)
            staged = [slot for slot in some if slot.place not in direct] if self._nbytes <= STAGE_NBYTES else []
            stage = self._take_stage() if staged else None
            if staged and stage is None and ahead is not None:
                self._end(ahead, checksums, deadline_s)
                ahead, stage = None, self._take_stage()
            window = self._start(direct, staged, stage, deadline_s)
            if ahead is not None:
                self._end(ahead, checksums, deadline_s)
            ahead = window
        if ahead is not None:
            self._end(ahead, checksums, deadline_s)

    def _cut(self, slots: list[Slot]) -> Iterator[list[Slot]]:
        """Divide the slots into windows."""
        step = max(1, WINDOW_NBYTES // max(1, aligned(self._nbytes)))
        for first in range(0, len(slots), step):
            yield slots[first : first + step]

    def _direct(self, slots: list[Slot]) -> dict[int, Item]:
        """Return the chunks that leave straight from registered memory, by their index."""
        found: dict[int, Item] = {}
        for slot in slots if self._memory is not None else ():
            pieces = self._values[slot.place]
            if len(pieces) == 1 and self._memory is not None:
                address = int(np.frombuffer(pieces[0], np.uint8).ctypes.data)
                if lkeys := self._memory.local_keys(address, self._nbytes):
                    found[slot.place] = Item(address, lkeys, slot.address, slot.rkeys, self._nbytes)
        return found

    def _take_stage(self) -> Stage | None:
        """Return a free stage, if there is one. A write waits for no other transfer: its bytes can go over TCP."""
        try:
            return self._stages.take(deadline_s=0.0)
        except CapacityError:
            return None

    def _start(self, direct: dict[int, Item], staged: list[Slot], stage: Stage | None, deadline_s: float) -> Window:
        """Post the writes of a window. Without a stage, the chunks in `staged` are left out."""
        window, items, nbytes = Window(lent=stage), list(direct.values()), self._nbytes
        self._held.append(window)
        if stage is not None:
            starts = [number * aligned(nbytes) for number in range(len(staged))]
            targets = [stage.view[start : start + nbytes] for start in starts]
            sums = self._threads.fill(targets, [self._values[slot.place] for slot in staged]).tolist()
            window.checksums.update(zip((slot.place for slot in staged), sums, strict=True))
            items += [
                Item(stage.address + start, stage.keys, slot.address, slot.rkeys, nbytes)
                for start, slot in zip(starts, staged, strict=True)
            ]
        if items:
            window.transfer = Transfer(self._connection, self._rails, items, writes=True)
            window.transfer.start(deadline_s)
        sums = np.frombuffer(checksums_of([self._values[index] for index in direct]), "<u8").tolist()
        window.checksums.update(zip(direct, sums, strict=True))
        return window

    def _end(self, window: Window, checksums: dict[int, int], deadline_s: float) -> None:
        """Wait until the peer's device has all bytes of a window. Give its stage back."""
        if window.transfer is not None:
            window.transfer.wait(deadline_s)
        checksums.update(window.checksums)
        self._give_up(window)

    def _give_up(self, window: Window) -> None:
        """End a window. Its writes are done, or the queue pairs are destroyed."""
        if window.transfer is not None:
            window.transfer.cancel()
        if window.lent is not None:
            self._stages.give(window.lent)
        self._held.remove(window)
