"""Requests about where chunks are: Locate, Announce, Why."""

import threading
import time
from random import Random

import numpy as np

from raykv.errors import UsageError
from raykv.node.announcer import Announcer
from raykv.node.location_index import UNKNOWN, Location, LocationIndex, located
from raykv.node.sessions import HandlerTable, NodeSession
from raykv.protocol import codec, messages
from raykv.protocol.reasons import Place
from raykv.storage.store import Store
from raykv.tier.mover import TierMover
from raykv.transport.base import Reply
from raykv.types import NodeId


class LocateHandler:
    """Answers two questions: which nodes hold a key that this node owns, and what became of a chunk on this node."""

    def __init__(
        self,
        node_id: NodeId,
        store: Store,
        lock: threading.Lock,
        mover: TierMover,
        location_index: LocationIndex,
        announcer: Announcer,
    ) -> None:
        self._node_id, self._store, self._lock, self._mover = node_id, store, lock, mover
        self._location_index, self._announcer = location_index, announcer
        self._rng = Random()
        self.table: HandlerTable = {
            messages.Locate: self._locate,
            messages.Announce: self._announce,
            messages.Why: self._why,
        }

    def _locate(self, request: messages.Locate, session: NodeSession) -> Reply:
        keys = codec.keys_in(request.keys)
        locations = self._location_index.locate(keys)
        unknown = [position for position, each in enumerate(locations) if each is UNKNOWN] if self._mover else []
        if unknown:
            # Only the node that wrote a chunk to a shared tier announces the chunk. If that node has left, or belongs
            # to another cluster, the owner finds the chunk only by a search of the tier.
            places, nbytes = self._mover.find(keys[unknown])
            here = (self._node_id,)
            for position, place, length in zip(unknown, places.tolist(), nbytes.tolist(), strict=True):
                if place != Place.NOWHERE:
                    locations[position] = Location(here, here, length)
        return Reply(located(locations, self._rng))

    def _announce(self, request: messages.Announce, session: NodeSession) -> Reply:
        added, nbytes = codec.keys_in(request.added), codec.numbers_in(request.nbytes, "<u4")
        if len(nbytes) != len(added):
            raise UsageError(f"field 'nbytes': {len(nbytes)} lengths for {len(added)} keys")
        below = codec.unpack_bits(request.below_memory, len(added)) if request.below_memory else None
        self._location_index.remove(request.node_id, codec.keys_in(request.removed))
        self._location_index.add(request.node_id, added, nbytes, below)
        self._announcer.learn_restart(request.node_id, request.incarnation)
        return Reply(messages.Done())

    def _why(self, request: messages.Why, session: NodeSession) -> Reply:
        keys, now_s = codec.keys_in(request.keys), time.monotonic()
        with self._lock:
            here, nbytes, departures = self._store.history(keys, now_s=now_s)
        places = np.full(len(keys), Place.DRAM, np.uint8)
        places[~here], nbytes[~here] = self._mover.find(keys[~here])
        names, since_s = tuple(dict.fromkeys(departures.policies)), self._store.eviction_log.since_s
        return Reply(
            messages.Histories(
                places.tobytes(),
                nbytes.astype("<u4").tobytes(),
                departures.reasons.tobytes(),
                departures.tiers.tobytes(),
                np.maximum(now_s - departures.when_s, 0.0).astype("<f4").tobytes(),
                bytes(map(names.index, departures.policies)),
                bytes(bool(each.holders) for each in self._location_index.locate(keys)),
                names,
                None if since_s is None else now_s - since_s,
            )
        )
