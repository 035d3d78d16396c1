"""Requests that read chunks: Read, Pin, Unpin, Promote, Suspect."""

import threading
import time
from collections import Counter
from random import Random
from typing import Final, TypeAlias

import numpy as np

from raykv.errors import CapacityError
from raykv.node.announcer import Announcer
from raykv.node.heat import HeatMeter
from raykv.node.location_index import Location, LocationIndex, left_to_others, located
from raykv.node.sessions import HandlerTable, NodeSession
from raykv.protocol import messages
from raykv.protocol.codec import keys_in, numbers_in
from raykv.storage.store import Pinned, Store
from raykv.tier.mover import TierMover
from raykv.transport.base import Reply
from raykv.types import KeyArray, NodeId, Rows

Holders: TypeAlias = tuple[NodeId, ...]

PROMOTE_TIMEOUT_S: Final = 4.0
"""One request waits at most this long for the promotion of chunks. Promotion copies a chunk from a tier below memory
into memory."""
PROMOTED_KEYS: Final = 64
"""A request promotes at most this many chunks at a time, and pins them before it promotes the next ones. Otherwise the
next promotion could evict the chunks before they are read."""


class ReadHandler:
    """Serves reads. A read pins the chunks, sends their bytes from the arena, and unpins the chunks."""

    def __init__(
        self,
        node_id: NodeId,
        store: Store,
        lock: threading.Lock,
        mover: TierMover,
        location_index: LocationIndex,
        announcer: Announcer,
        meter: HeatMeter,
    ) -> None:
        self._node_id = node_id
        self._store, self._lock, self._mover = store, lock, mover
        self._location_index, self._announcer, self._meter = location_index, announcer, meter
        self._rng = Random()
        self.table: HandlerTable = {
            messages.Read: self._read,
            messages.Pin: self._pin,
            messages.Unpin: self._unpin,
            messages.Promote: self._promote,
            messages.Suspect: self._suspect,
        }

    def _read(self, request: messages.Read, session: NodeSession) -> Reply:
        pinned, choices, numbers = self.look(request)
        answer = messages.Reading(pinned.nbytes.tobytes(), pinned.checksums.tobytes(), choices=choices, places=numbers)

        def finish(complete: bool) -> None:
            self.end_pins(pinned.rows)

        places = zip(pinned.offsets.tolist(), pinned.nbytes.tolist(), strict=True)
        outgoing = [self._store.arena.view[start : start + nbytes] for start, nbytes in places if nbytes]
        return Reply(answer, outgoing=outgoing, finish=finish)

    def look(self, request: messages.Read | messages.Find) -> tuple[Pinned, tuple[Holders, ...], bytes]:
        """Pin the chunks that are here, and count the reads. The caller calls `end_pins`.

        Returns:
            The pinned chunks, and `choices` and `places` of the answer: the holders of the other chunks, if asked for.
        """
        keys = keys_in(request.keys)
        pinned = self._pin_all(keys)
        locations = self._location_index.locate(keys) if request.locate else []
        self._leave_to_others(pinned, locations)
        self._meter.count(self._store.table.columns, pinned.rows)
        if request.locate and (absent := np.flatnonzero(pinned.rows < 0)).size:
            elsewhere = located([locations[place] for place in absent.tolist()], self._rng)
            return pinned, elsewhere.choices, elsewhere.places
        return pinned, (), b""

    def _leave_to_others(self, pinned: Pinned, locations: list[Location]) -> None:
        """Leave chunks with SPREAD_HOLDERS or more holders to the other holders, so that each gets an equal share.

        Changes `pinned` and `locations`: the other holders are named in place of this node.
        """
        fates: dict[int, Location | None] = {}
        for place, location in enumerate(locations):
            if pinned.rows[place] < 0:
                continue
            if id(location) not in fates:
                fates[id(location)] = left_to_others(location, self._node_id, self._rng)
            if (elsewhere := fates[id(location)]) is not None:
                self.end_pins(pinned.rows[place : place + 1])
                pinned.rows[place], pinned.nbytes[place], locations[place] = -1, 0, elsewhere

    def _pin(self, request: messages.Pin, session: NodeSession) -> Reply:
        pinned = self._pin_all(keys_in(request.keys))
        try:
            with self._lock:
                session.add_pins(pinned)
        except CapacityError:
            self.end_pins(pinned.rows)
            raise
        return Reply(messages.Held(*(column.tobytes() for column in pinned)))

    def _unpin(self, request: messages.Unpin, session: NodeSession) -> Reply:
        rows = numbers_in(request.rows, "<i4")
        rows = rows[rows >= 0]
        counts = Counter(rows.tolist())
        session.require_pinned(counts)
        with self._lock:
            session.end_pins(rows)
            self._store.unpin(rows)
        return Reply(messages.Done())

    def _promote(self, request: messages.Promote, session: NodeSession) -> Reply:
        until_s = time.monotonic() + min(request.timeout_s, PROMOTE_TIMEOUT_S) if request.timeout_s > 0 else 0.0
        return Reply(messages.Count(self._mover.promote(keys_in(request.keys), until_s=until_s)))

    def _suspect(self, request: messages.Suspect, session: NodeSession) -> Reply:
        keys = keys_in(request.keys)
        with self._lock:
            pinned = self._store.pin(keys, now_s=time.monotonic(), touch=False)
        try:
            corrupt = self._store.corrupt(pinned)  # without the lock, because this hashes all bytes
            with self._lock:
                count = self._store.drop_corrupt(corrupt, now_s=time.monotonic())
        finally:
            self.end_pins(pinned.rows)
        self._announcer.announce(keys)
        return Reply(messages.Count(count))

    def _pin_all(self, keys: KeyArray) -> Pinned:
        """Pin chunks. Chunks below memory are promoted first. A missing chunk gets row -1 and length 0."""
        pinned = self._pin_ready(keys)
        absent = np.flatnonzero(pinned.rows < 0) if self._mover else np.empty(0, np.intp)
        until_s = time.monotonic() + PROMOTE_TIMEOUT_S
        try:
            for first in range(0, len(absent), PROMOTED_KEYS):
                some = absent[first : first + PROMOTED_KEYS]
                self._mover.promote(keys[some], until_s=until_s)
                found = self._pin_ready(keys[some])
                pinned.rows[some], pinned.offsets[some] = found.rows, found.offsets
                pinned.nbytes[some], pinned.checksums[some] = found.nbytes, found.checksums
        except BaseException:
            self.end_pins(pinned.rows)
            raise
        return pinned

    def _pin_ready(self, keys: KeyArray) -> Pinned:
        with self._lock:
            pinned = self._store.pin(keys, now_s=time.monotonic())
        pinned.nbytes[pinned.rows < 0] = 0
        return pinned

    def end_pins(self, rows: Rows) -> None:
        """Unpin rows. Numbers of -1 are left out."""
        with self._lock:
            self._store.unpin(rows)
