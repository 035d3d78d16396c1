"""A client's way to the nodes: its own node, connections to the others, and the view that says whom to ask.

Whatever goes wrong with another node here ends as a miss in `Client`.
"""

import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from raykv.client.local_connection import LocalConnection
from raykv.client.read_failures import Kind, ReadFailures
from raykv.config import ClientConfig
from raykv.errors import ConfigError, LostError, PeerUnavailable, RayKVError, TransientError
from raykv.memory.copying import CopyThreads, default_copy_threads
from raykv.memory.reader import ShmReader
from raykv.metrics import ClientMetrics
from raykv.protocol import chunk_keys, messages
from raykv.protocol.chunk_keys import halves
from raykv.protocol.placement import Member, View
from raykv.transport.base import Link
from raykv.transport.bulk_read import BulkRead, ReadProgress, load_one, located
from raykv.transport.pool import Connect, Peers
from raykv.transport.tcp import SocketLink
from raykv.types import Bits, KeyArray, NodeId, Path, Scattered, host_identity

K = TypeVar("K")
T = TypeVar("T")

Holders: TypeAlias = tuple[NodeId, ...]
"""Of one key, the one to ask first in front."""

STREAM_NBYTES: Final = 8 << 20
"""Bytes from one holder for which one more connection is worth while."""
PROMOTE_NBYTES: Final = 16 << 20
"""A node on this host is asked to bring so much into its memory at once: one part is read while the next comes."""
PROMOTE_SLACK_S: Final = 0.05
"""What is left of a call's time after a promotion, to read what has come."""
RECORD_TIMEOUT_S: Final = 0.5
MAX_STREAMS: Final = 4
PARALLEL_PEERS: Final = 16
"""Nodes asked at the same time by one client."""


class Router:
    """A client's way to the nodes: its own node, connections to the others, and the view.

    Attributes:
        config: As given.
        local: The node of this host; None if there is none.
        peers: Connections.
        copy_threads: Share the copies of large batches.
        troubles: What went wrong lately.
    """

    def __init__(
        self, config: ClientConfig, connect: Connect = SocketLink.connect, *, local: bool | None = None
    ) -> None:
        """Join through the node at `config.address`.

        Args:
            connect: How links are made.
            local: Whether that node's memory can be mapped; None: when the address is a Unix socket.

        Raises:
            ConfigError: No address, or a "host:port" without a secret.
            TransientError: Nobody answers there.
        """
        address = config.address
        if address is None:
            raise ConfigError("field 'address': give a node's address, or set RAYKV_ADDRESS")
        over_unix = address.startswith("unix:")
        is_local = over_unix if local is None else local
        if not is_local and config.secret is None:
            raise ConfigError("field 'secret': needed for an address of the form host:port, or set RAYKV_SECRET")
        self.config = config
        self._address = address
        self.copy_threads = CopyThreads(config.copy_threads or default_copy_threads())
        self._verify = config.verify != "never"
        self._streams_per_peer = config.streams_per_peer or default_streams()
        self._neighbours: dict[tuple[NodeId, int], ShmReader | None] = {}
        self._tiered: set[tuple[NodeId, int]] = set()  # neighbours that have chunks below memory
        self._lock = threading.Lock()  # of the making of these two
        self._pool: ThreadPoolExecutor | None = None
        self._behind: ThreadPoolExecutor | None = None  # not the same: what it does asks others in parallel, and waits
        self._closed = False
        self._view = View()
        self._failures, self._doubt_s = 0, -math.inf
        self.read_failures = ReadFailures()
        self._tallies: dict[bytes, ClientMetrics] = {}
        self.local: LocalConnection | None = None
        secret = _secret(config)
        self.host = host_identity()
        deadline_s = self.deadline(None)
        if is_local:
            self.local = LocalConnection(connect, address, deadline_s=deadline_s, retry_s=config.breaker_s)
            self.host, secret = self.local.attached.host, self.local.attached.secret
        self.peers = Peers(connect, secret, breaker_s=config.breaker_s, max_idle=config.connections_per_peer)
        try:
            self.refresh(deadline_s)
        except BaseException:
            self.close()
            raise
        if self.local is None:
            self._find_local(connect, deadline_s)

    def _find_local(self, connect: Connect, deadline_s: float) -> None:
        """A client that came in by TCP may still have a node on its host."""
        for member in self._view.members:
            if member.host == self.host and self.local is None:
                try:
                    self.local = LocalConnection(
                        connect, member.local_address, deadline_s=deadline_s, retry_s=self.config.breaker_s
                    )
                except (TransientError, LostError):
                    continue  # another user's, or down: it is read over TCP like any other

    def deadline(self, timeout_s: float | None) -> float:
        """When a call that begins now is given up."""
        return time.monotonic() + (self.config.timeout_s if timeout_s is None else timeout_s)

    def begun(self, deadline_s: float, timeout_s: float | None) -> float:
        """When the call with this deadline began."""
        return deadline_s - (self.config.timeout_s if timeout_s is None else timeout_s)

    def view(self, deadline_s: float) -> View:
        """The newest view, fetched again if an answer told of a newer one, or somebody did not answer."""
        if self.local is not None and self.local.attached.secret != self.peers.secret and self.local.attached.secret:
            self._begin_anew(self.local)
        heard = max(self.peers.epoch, self.local.epoch if self.local else 0)
        if heard > self._view.epoch or self._in_doubt():
            try:
                self.refresh(deadline_s)
            except RayKVError:
                pass  # the old one serves; what is stale in it costs misses
            self._failures = self.peers.failures  # those of the asking are no reason to ask again
        return self._view

    def _begin_anew(self, local: LocalConnection) -> None:
        """Our node is one of a new cluster now, which has another secret, and begins its views anew."""
        with self._lock:
            self.peers.retain(())
            self.peers.secret, self.peers.epoch = local.attached.secret, 0
            local.epoch, self._view = 0, View()
            self._doubt_s, self._failures = -math.inf, self.peers.failures - 1  # so that the view is fetched

    def _in_doubt(self) -> bool:
        """Whether a member failed since the view was fetched for such a reason; that is done once in a while."""
        if self.peers.failures == self._failures or time.monotonic() < self._doubt_s:
            return False
        self._failures, self._doubt_s = self.peers.failures, time.monotonic() + self.config.breaker_s
        return True

    def refresh(self, deadline_s: float) -> View:
        """Ask for the view.

        Raises:
            TransientError: Nobody answers.
        """
        request = messages.GetView()
        try:
            if self.local is None:
                raise PeerUnavailable("there is no node on this host")
            answer = self.local.call(request, deadline_s=deadline_s)
        except RayKVError:
            answer = self._ask_any(request, deadline_s)
        view = messages.expect(messages.ViewIs, answer).view
        if view.epoch > self._view.epoch:
            self._view = view
            self._forget_all_but(view)
        return self._view

    def _forget_all_but(self, view: View) -> None:
        """Who has left, or was restarted, keeps no connection and no mapping of ours, but for those in use."""
        self.peers.retain({self._address, *(a for m in view.members for a in (m.address, m.local_address))})
        lives = {(member.node_id, member.incarnation) for member in view.members}
        with self._lock:
            self._neighbours = {life: reader for life, reader in self._neighbours.items() if life in lives}
            self._tiered = self._tiered & lives

    def _ask_any(self, request: messages.Message, deadline_s: float) -> messages.Answer:
        # The one that we were given last: it may have left long ago, without anybody who would say so.
        given = [] if self._address.startswith("unix:") else [self._address]
        addresses = [*dict.fromkeys([*(member.address for member in self._view.members), *given])]
        problem = TransientError("no address to ask")
        for number, address in enumerate(addresses):
            left_s = deadline_s - time.monotonic()
            until_s = deadline_s - left_s / 2 if number + 1 < len(addresses) else deadline_s
            try:
                return self.peers.ask(address, partial(_call, request=request, deadline_s=until_s), deadline_s=until_s)
            except RayKVError as error:
                problem = error if isinstance(error, TransientError) else TransientError(f"{address}: {error}")
        try:
            raise problem
        finally:
            del problem  # an error that its own frame names keeps that frame, and the caller's buffers, for a while

    def call(self, node_id: NodeId, request: messages.Message, deadline_s: float) -> messages.Answer:
        """Ask a member.

        Raises:
            RayKVError: It does not answer, or refuses.
        """
        if self.local is not None and node_id == self.local.attached.node_id:
            return self.local.call(request, deadline_s=deadline_s)
        member = self._member(node_id, deadline_s)
        return self.peers.ask(
            member.address, lambda link: link.call(request, deadline_s=deadline_s), deadline_s=deadline_s
        )

    def ask_all(self, request: messages.Message, deadline_s: float) -> dict[NodeId, messages.Answer | RayKVError]:
        """Ask every member, and this host's node, in parallel."""
        nodes = {member.node_id for member in self.view(deadline_s).members}
        if self.local is not None:
            nodes.add(self.local.attached.node_id)
        return self.in_parallel({name: partial(self.call, name, request, deadline_s) for name in nodes}, deadline_s)

    def _member(self, node_id: NodeId, deadline_s: float) -> Member:
        member = self.view(deadline_s).member(node_id)
        if member is None:
            self.refresh(deadline_s)
            member = self._view.member(node_id)
        if member is None:
            raise TransientError(f"{node_id!r} is no member of the cluster")
        return member

    def locate(self, keys: KeyArray, deadline_s: float) -> tuple[list[NodeId | None], Bits]:
        """Ask owners who holds each key: of several holders the nearest. Owners that do not answer know nothing.

        Returns:
            The holders, and which keys none of them has in memory.
        """
        choices, numbers, cold = self.located(keys, deadline_s)
        first = [holders[0] if holders else None for holders in choices]
        return [first[number] for number in numbers.tolist()], cold

    def promote(self, keys: KeyArray, holders: Sequence[NodeId | None], deadline_s: float) -> None:
        """Have the holders bring chunks into their memory. Nobody waits until they are there."""
        by_holder: dict[NodeId, list[int]] = {}
        for place, holder in enumerate(holders):
            if holder is not None:
                by_holder.setdefault(holder, []).append(place)

        def ask(holder: NodeId, places: list[int]) -> None:
            member = self._member(holder, deadline_s)
            request = messages.Promote(chunk_keys.to_bytes(keys[places]))
            address = member.local_address if member.host == self.host else member.address
            self.peers.ask(address, lambda link: link.call(request, deadline_s=deadline_s), deadline_s=deadline_s)

        self.in_parallel({holder: partial(ask, holder, places) for holder, places in by_holder.items()}, deadline_s)

    def held(self, keys: KeyArray, deadline_s: float) -> Bits:
        """Which keys somebody holds, as their owners know."""
        return self.located(keys, deadline_s)[1] > 0

    def held_one(self, key: bytes, deadline_s: float) -> bool:
        """The same for one 16-byte key, in a fraction of the time."""
        view = self.view(deadline_s)
        owner = view.ring.owner(halves(key)[0])
        if owner is not None:
            try:
                answer = messages.expect(messages.Located, self.call(owner, messages.Locate(key), deadline_s))
                if located(answer, 1)[0]:
                    return True
            except RayKVError:
                pass
        return self.view(deadline_s).epoch > view.epoch and bool(self.held(chunk_keys.from_bytes(key), deadline_s)[0])

    def find(self, progress: ReadProgress, deadline_s: float) -> None:
        """Read what is missing from its owners, or from whoever they say holds it: where one has not got it, the next.

        Owners are asked to read at once, which saves a lookup of what they hold themselves.
        """
        if progress.all_came():
            return
        told: dict[int, Holders] = {}
        view = View()
        unknown = progress.missing()
        if len(unknown) == 1 and len(progress.targets[unknown[0]]) == 1:
            place = unknown[0]
            came = self.find_one(progress.raw_key(place), progress.targets[place][0], deadline_s)
            if came is not None:
                progress.came([place], *came)
            return
        # The answers tell whether the view was stale: then those who own the rest now are asked, once.
        while unknown and self.view(deadline_s).epoch > view.epoch:
            view = self._view
            told |= self._ask_owners_for(progress, unknown, view, deadline_s)
            if progress.all_came():
                return
            unknown = [place for place in progress.missing() if not told.get(place)]
        for choice in range(messages.MAX_HOLDERS):
            holders: list[NodeId | None] = [None] * len(progress.keys)
            for place in progress.missing():
                names = told.get(place, ())
                if choice < len(names):
                    holders[place] = names[choice]
            if not any(holders):
                return
            self.fetch(progress, holders, deadline_s)

    def find_one(self, key: bytes, target: memoryview, deadline_s: float) -> tuple[NodeId, Path] | None:
        """The same for one chunk with one buffer, in a fraction of the time.

        Args:
            key, target: As for `fetch_one`.

        Returns:
            The node that it came from, and the path; None if it did not come.
        """
        told: Holders = ()
        view = View()
        while not told and self.view(deadline_s).epoch > view.epoch:
            view = self._view
            owner = view.ring.owner(halves(key)[0])
            if owner is None:
                return None
            try:
                told, path = self._ask_owner_for_one(owner, key, target, deadline_s)
            except RayKVError:
                continue
            if path is not None:
                return owner, path
        for holder in told:
            path = self._fetch_one(holder, key, target, deadline_s)
            if path is not None:
                return holder, path
        return None

    def _ask_owner_for_one(
        self, owner: NodeId, key: bytes, target: memoryview, deadline_s: float
    ) -> tuple[Holders, Path | None]:
        """Who holds a chunk, or by which path its owner sent it."""
        member = self._member(owner, deadline_s)
        near = member.host == self.host
        if not near:
            one = self.peers.ask(
                member.address,
                lambda link: load_one(link, key, target, self._verify, deadline_s, owner=True),
                deadline_s=deadline_s,
            )
            if one.path is not None:
                return (), one.path
            if one.spoilt:
                self._note_trouble((key,), "corrupt", owner)
            if one.gone:
                if owner in one.told:
                    self._report_stale(owner, chunk_keys.from_bytes(key), deadline_s)
                return self._nearest_first([name for name in one.told if name != owner]), None
        choices, numbers, _ = self._ask_owner(owner, chunk_keys.from_bytes(key), deadline_s)
        return tuple([name for name in choices[int(numbers[0])] if near or name != owner]), None

    def _ask_owners_for(
        self, progress: ReadProgress, places: list[int], view: View, deadline_s: float
    ) -> dict[int, Holders]:
        """Read what owners hold themselves. Returns who holds the rest."""
        keys = progress.keys if len(places) == len(progress.keys) else progress.keys[places]
        loads = {
            (owner, number): BulkRead(progress, some, verify=self._verify, owner=True)
            for owner, share in view.ring.shares(keys).items()
            for number, some in enumerate(self._streams(progress, [places[place] for place in share]))
        }
        self._run(loads, self._ask_owner_for, progress, deadline_s)
        return {place: holders for load in loads.values() for place, holders in load.told.items()}

    def _ask_owner_for(self, owner: NodeId, progress: ReadProgress, load: BulkRead, deadline_s: float) -> None:
        """Read what an owner holds, and have it tell who holds the rest."""
        member = self._member(owner, deadline_s)
        if member.host != self.host:  # whose memory we do not read anyway
            self.peers.ask(member.address, lambda link: load.run(link, deadline_s), deadline_s=deadline_s)
        if len(load.arrived) == len(load.places):
            return
        for place, holders in load.told.items():
            if owner in holders:
                load.gone.append(place)
            load.told[place] = self._nearest_first([name for name in holders if name != owner])
        arrived = set(load.arrived)
        rest = [place for place in load.places if place not in arrived and place not in load.told]
        if not rest:
            return
        choices, numbers, _ = self._ask_owner(owner, progress.keys[rest], deadline_s)
        asked = set(load.asked)
        for place, number in zip(rest, numbers.tolist(), strict=True):
            wrong = owner if place in asked else None  # what it sent was
            load.told[place] = tuple([name for name in choices[number] if name != wrong])

    def located(self, keys: KeyArray, deadline_s: float) -> tuple[list[Holders], npt.NDArray[np.int32], Bits]:
        """Choices of holders, the nearest first; the number of each key's, 0 for nobody; and which lie below memory."""
        choices: list[Holders] = [()]
        numbers, cold = np.zeros(len(keys), np.int32), np.zeros(len(keys), np.bool_)
        unknown, view = list(range(len(keys))), View()
        while unknown and self.view(deadline_s).epoch > view.epoch:  # as in `find`
            view = self._view
            some = keys if len(unknown) == len(keys) else keys[unknown]
            shares = view.ring.shares(some)
            answers = self.in_parallel(
                {
                    owner: partial(self._ask_owner, owner, some[share] if len(shares) > 1 else some, deadline_s)
                    for owner, share in shares.items()
                },
                deadline_s,
            )
            for owner, answer in answers.items():
                if not isinstance(answer, RayKVError):
                    theirs, places, below = answer
                    mine = np.array(unknown)[shares[owner]]
                    numbers[mine] = np.where(places > 0, places + len(choices) - 1, 0)
                    cold[mine] = below
                    choices += theirs[1:]
            unknown = np.flatnonzero(numbers == 0).tolist()
        return choices, numbers, cold

    def _ask_owner(
        self, owner: NodeId, keys: KeyArray, deadline_s: float
    ) -> tuple[list[Holders], npt.NDArray[np.int32], Bits]:
        """What `located` says, of keys of one owner."""
        answer = messages.expect(
            messages.Located, self.call(owner, messages.Locate(chunk_keys.to_bytes(keys)), deadline_s)
        )
        choices = [(), *map(self._nearest_first, answer.choices)]
        numbers = messages.array(answer.places, "<i4", len(keys)) + np.int32(1)
        numbers = np.where((numbers > 0) & (numbers < len(choices)), numbers, np.int32(0))
        return choices, numbers, messages.unpack_bits(answer.cold, len(keys))

    def tally(self, group: bytes) -> ClientMetrics:
        """Counters of one quota group, by its digest."""
        return self._tallies.setdefault(group, ClientMetrics())

    def in_background(self, task: Callable[[], object]) -> None:
        """Do something that nobody waits for, unless this is closed."""
        with self._lock:
            if self._behind is None:
                self._behind = ThreadPoolExecutor(1, thread_name_prefix="raykv-behind")
        try:
            self._behind.submit(_caught, task)
        except RuntimeError:
            pass

    def tell_record(self, requests: bytes) -> None:
        """Tell the node of this host what was looked up, if it answers. See `raykv.client.trace_recorder`."""
        if self.local is None:
            return
        deadline_s = time.monotonic() + RECORD_TIMEOUT_S
        try:
            member = self._view.member(self.local.attached.node_id)
            if member is not None:
                self.peers.ask(
                    member.local_address,
                    lambda link: link.call(messages.Record(requests), deadline_s=deadline_s),
                    deadline_s=deadline_s,
                )
        except RayKVError:
            pass  # a gap in a trace

    def _nearest_first(self, holders: Sequence[NodeId]) -> Holders:
        if len(holders) < 2:
            return tuple(holders)
        near = {member.node_id for member in self._view.members if member.host == self.host}
        return tuple(sorted(holders, key=lambda name: name not in near))

    def fetch(self, progress: ReadProgress, holders: Sequence[NodeId | None], deadline_s: float) -> None:
        """Read what is missing from its holders, all of them in parallel."""
        missing = progress.missing()
        if not missing:
            return
        if len(missing) == 1 and len(progress.targets[missing[0]]) == 1:
            self._fetch_single(progress, missing[0], holders[missing[0]], deadline_s)
            return
        by_holder: dict[NodeId, list[int]] = {}
        first = holders[0] if holders else None
        if first is not None and holders.count(first) == len(holders):  # as is usual for a prompt
            by_holder[first] = missing
        else:
            for place in missing:
                holder = holders[place]
                if holder is not None:
                    by_holder.setdefault(holder, []).append(place)
        loads = {
            (holder, number): BulkRead(progress, places, verify=self._verify)
            for holder, all_places in by_holder.items()
            for number, places in enumerate(self._streams(progress, all_places))
        }
        self._run(loads, self._fetch_from, progress, deadline_s)

    def _run(
        self,
        loads: Mapping[tuple[NodeId, int], BulkRead],
        ask: Callable[[NodeId, ReadProgress, BulkRead, float], None],
        progress: ReadProgress,
        deadline_s: float,
    ) -> None:
        """Ask each holder for its load, all of them in parallel, and note what came."""
        done = self.in_parallel(
            {name: partial(ask, name[0], progress, load, deadline_s) for name, load in loads.items()}, deadline_s
        )
        for (holder, number), load in loads.items():  # also of those that were broken off
            progress.came(load.arrived, holder, load.path)
            if load.spoilt:
                self._note_trouble(map(progress.raw_key, load.spoilt), "corrupt", holder)
            if isinstance(done[holder, number], RayKVError):
                self._note_trouble(map(progress.raw_key, set(load.places) - set(load.arrived)), "no_answer", holder)
            if load.gone:
                self._report_stale(holder, progress.keys[load.gone], deadline_s)

    def _streams(self, progress: ReadProgress, places: list[int]) -> list[list[int]]:
        """What one holder is asked for, cut for several connections if it is much."""
        count = max(1, min(self._streams_per_peer, progress.nbytes(places) // STREAM_NBYTES, len(places)))
        return [places[len(places) * n // count : len(places) * (n + 1) // count] for n in range(count)]

    def _fetch_from(self, holder: NodeId, progress: ReadProgress, load: BulkRead, deadline_s: float) -> None:
        member = self._member(holder, deadline_s)
        neighbour = self._neighbour(member, deadline_s)
        if neighbour is None:
            self.peers.ask(member.address, lambda link: load.run(link, deadline_s), deadline_s=deadline_s)
            return
        places = np.array(load.places, np.int64)
        keys = progress.keys[places]
        hits, _ = self.read_local(neighbour, keys, [progress.targets[place] for place in load.places])
        load.path = "shm"
        load.arrived = places[hits].tolist()
        absent = ~hits & ~neighbour.ready(keys, now_s=time.monotonic())
        if absent.any() and (member.node_id, member.incarnation) in self._tiered:
            self._promote(member, neighbour, progress, load, places[absent].tolist(), deadline_s)
            absent[np.isin(places, load.arrived)] = False
        load.gone = places[absent].tolist()

    def _promote(
        self,
        member: Member,
        neighbour: ShmReader,
        progress: ReadProgress,
        load: BulkRead,
        places: list[int],
        deadline_s: float,
    ) -> None:
        """Have a node of this host bring chunks into its memory, and read them there, a part while the next comes up.

        Those that arrived are noted in `load`, also when this raises.
        """
        parts: list[list[int]] = []
        room = 0
        for place in places:
            if not parts or room < progress.sizes[place]:
                parts.append([])
                room = PROMOTE_NBYTES
            parts[-1].append(place)
            room -= progress.sizes[place]

        def ask(part: list[int], timeout_s: float) -> None:
            self._ask_to_promote(member, progress.raw_keys(part), timeout_s, deadline_s)

        for number, part in enumerate(parts):
            if number + 1 < len(parts):
                if number == 0:
                    ask(part, 0.0)
                ask(parts[number + 1], 0.0)
            ask(part, max(1e-3, deadline_s - time.monotonic() - PROMOTE_SLACK_S))
            targets = [progress.targets[place] for place in part]
            hits, _ = self.read_local(neighbour, progress.keys[part], targets)
            load.arrived += [place for place, hit in zip(part, hits.tolist(), strict=True) if hit]

    def _ask_to_promote(self, member: Member, keys: bytes, timeout_s: float, deadline_s: float) -> None:
        """Over a connection of its own: puts to the node on this host must not wait for its disk."""
        request = messages.Promote(keys, timeout_s)
        self.peers.ask(
            member.local_address, lambda link: link.call(request, deadline_s=deadline_s), deadline_s=deadline_s
        )

    def _fetch_single(self, progress: ReadProgress, place: int, holder: NodeId | None, deadline_s: float) -> None:
        """The same for one chunk with one buffer, in a fraction of the time."""
        if holder is not None:
            path = self._fetch_one(holder, progress.raw_key(place), progress.targets[place][0], deadline_s)
            if path is not None:
                progress.came([place], holder, path)

    def fetch_one(self, node_id: NodeId, key: bytes, target: memoryview, deadline_s: float) -> bool:
        """Read one chunk from a member.

        Args:
            key: 16 bytes, as `keys.to_bytes` gives them.
            target: Bytes, writable, of the chunk's length.

        Returns:
            Whether it arrived. Trouble with the member is a miss.
        """
        return self._fetch_one(node_id, key, target, deadline_s) is not None

    def _fetch_one(self, node_id: NodeId, key: bytes, target: memoryview, deadline_s: float) -> Path | None:
        """By which path it came; None when it did not."""
        try:
            member = self._view.member(node_id) or self._member(node_id, deadline_s)
            if member.host == self.host:
                neighbour = self._neighbour(member, deadline_s)
                if neighbour is not None:
                    arrived = self._read_one(neighbour, key, target)
                    if not arrived and (member.node_id, member.incarnation) in self._tiered:
                        left_s = deadline_s - time.monotonic() - PROMOTE_SLACK_S
                        self._ask_to_promote(member, key, max(1e-3, left_s), deadline_s)
                        arrived = self._read_one(neighbour, key, target)
                    if not arrived and not neighbour.ready_one(key):
                        self._report_stale(node_id, chunk_keys.from_bytes(key), deadline_s)
                    return "shm" if arrived else None
            one = self.peers.ask(
                member.address,
                lambda link: load_one(link, key, target, self._verify, deadline_s),
                deadline_s=deadline_s,
            )
        except RayKVError:
            self._note_trouble((key,), "no_answer", node_id)
            return None
        if one.spoilt:
            self._note_trouble((key,), "corrupt", node_id)
        if one.gone:
            self._report_stale(node_id, chunk_keys.from_bytes(key), deadline_s)
        return one.path

    def _read_one(self, neighbour: ShmReader, key: bytes, target: memoryview) -> bool:
        if self.config.verify == "always":
            return bool(self.read_local(neighbour, chunk_keys.from_bytes(key), [target])[0][0])
        return neighbour.read_one(key, target)

    def read_local(self, reader: ShmReader, keys: KeyArray, into: Sequence[Scattered]) -> tuple[Bits, int]:
        """Copy chunks of a node on this host: see `ShmReader.read`."""
        return reader.read(
            keys, into, verify=self.config.verify == "always", now_s=time.monotonic(), threads=self.copy_threads
        )

    def _neighbour(self, member: Member, deadline_s: float) -> ShmReader | None:
        """The memory of another node on this host; None when it must be read over a socket."""
        if member.host != self.host:
            return None
        life = (member.node_id, member.incarnation)
        if life not in self._neighbours:
            tiered = False
            try:
                answer = self.peers.ask(
                    member.local_address,
                    lambda link: link.call(messages.Attach(), deadline_s=deadline_s),
                    deadline_s=deadline_s,
                )
                attached = messages.expect(messages.Attached, answer)
                reader, tiered = ShmReader(attached.table, attached.arena, writable=False), attached.tiers
            except TransientError:
                return None  # for now
            except LostError:
                reader = None  # its files are not to be had in this container
            # Readers of its earlier lives are not closed: somebody may be in them. They go with their last user.
            with self._lock:
                others = {known: old for known, old in self._neighbours.items() if known[0] != life[0]}
                self._neighbours = {**others, life: reader}
                self._tiered = {known for known in self._tiered if known in others} | ({life} if tiered else set())
            return reader
        return self._neighbours.get(life)

    def note_end(self, progress: ReadProgress, *, late: bool) -> None:
        """A `get` is over.

        Args:
            late: What did not arrive was not here by its deadline.
        """
        missing = progress.missing()
        if late:
            self.read_failures.note(map(progress.raw_key, missing), "timed_out", None, now_s=time.monotonic())
        self.read_failures.forget(progress.raw_key(place) for place, hit in enumerate(progress.hits) if hit)

    def _note_trouble(self, keys: Iterable[bytes], kind: Kind, node: NodeId) -> None:
        self.read_failures.note(keys, kind, node, now_s=time.monotonic())

    def _report_stale(self, holder: NodeId, keys: KeyArray, deadline_s: float) -> None:
        """Let the holder tell the owners that it has not got these: it alone knows if that is still so by then.

        Nobody waits for it.
        """
        try:
            self._submit(partial(self.call, holder, messages.Suspect(chunk_keys.to_bytes(keys)), deadline_s))
        except RuntimeError:
            pass  # this process may have no more threads, or this is closed

    def in_parallel(self, work: Mapping[K, Callable[[], T]], deadline_s: float) -> dict[K, T | RayKVError]:
        """Run each, and wait for all; each keeps its own deadline. A RayKVError is a result.

        Args:
            deadline_s: What has not begun by then, since all threads wait for others, is not begun any more.
        """
        if len(work) == 1:
            ((name, only),) = work.items()
            return {name: _caught(only)}
        boxes: dict[K, list[Callable[[], T]]] = {name: [each] for name, each in work.items()}
        futures: dict[K, Future[T | RayKVError]] = {}
        done: dict[K, T | RayKVError] = {}
        try:
            for name, box in boxes.items():
                try:
                    futures[name] = self._submit(partial(_unpacked, box))
                except RuntimeError:  # this process may have no more threads
                    if self._closed:
                        raise
                    done[name] = _caught(box.pop())  # who finds it in the queue later on finds nothing to do
            return done | {name: _result(future, boxes[name], deadline_s) for name, future in futures.items()}
        except BaseException:  # a bug, or an interrupt: nobody may write to the caller's buffers after this
            for box in boxes.values():
                box.clear()
            wait([future for future in futures.values() if not future.cancel()])
            raise

    def _submit(self, task: Callable[[], T]) -> "Future[T]":
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(PARALLEL_PEERS, thread_name_prefix="raykv-client")
        return self._pool.submit(task)

    def close(self) -> None:
        """Close everything."""
        self._closed = True
        for pool in (self._behind, self._pool):
            if pool is not None:
                pool.shutdown()
        self.copy_threads.close()
        self.peers.close()
        if self.local is not None:
            self.local.close()
        for reader in self._neighbours.values():
            if reader is not None:
                reader.close()


def _caught(task: Callable[[], T]) -> T | RayKVError:
    try:
        return task()
    except RayKVError as error:
        error.__cause__ = error.__context__ = None
        return error.with_traceback(None)  # a value from here on: its stack would keep the caller's buffers in use


def _unpacked(box: list[Callable[[], T]]) -> T | RayKVError:
    return _caught(box.pop()) if box else PeerUnavailable("not asked any more")


def _call(link: Link, request: messages.Message, deadline_s: float) -> messages.Answer:
    return link.call(request, deadline_s=deadline_s)


def _result(future: "Future[T | RayKVError]", box: list[Any], deadline_s: float) -> T | RayKVError:
    try:
        return future.result(max(0.0, deadline_s - time.monotonic()))
    except TimeoutError:
        if not future.cancel():
            return future.result()  # it has begun, and may be writing to the caller's buffers
        box.clear()  # else it would hold on to them until a thread finds it
        return PeerUnavailable(f"not asked in time: calls to {PARALLEL_PEERS} others were waiting")


def default_streams() -> int:
    """Connections that one large read from one holder is worth: each keeps a core busy here, and one there."""
    return max(1, min(MAX_STREAMS, len(os.sched_getaffinity(0)) // 4))


def _secret(config: ClientConfig) -> bytes:
    if config.secret is None:
        return b""
    try:
        return bytes.fromhex(config.secret.get_secret_value())
    except ValueError:
        raise ConfigError("field 'secret': not hexadecimal text; take it from 'raykv status --secret'") from None
