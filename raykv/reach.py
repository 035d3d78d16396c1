"""A client's way to the nodes: its own node, connections to the others, and the view that says whom to ask.

Whatever goes wrong with another node here ends as a miss in `Client`.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from raykv import keys as keys_
from raykv import wire
from raykv.config import ClientConfig
from raykv.errors import ConfigError, LostError, PeerUnavailable, ProtocolError, RayKVError, TransientError
from raykv.local import LocalNode
from raykv.memory.copying import checksum_of
from raykv.ring import Member, View
from raykv.transport.base import Link
from raykv.transport.peers import Connect, Peers
from raykv.transport.shm import ShmReader
from raykv.transport.tcp import SocketLink
from raykv.types import Bits, GetResult, KeyArray, NodeId, Path, host_identity

T = TypeVar("T")

SCRAP_NBYTES: Final = 1 << 20
PARALLEL_PEERS: Final = 16
"""Nodes asked at the same time by one client."""


class Arrivals:
    """Which chunks of one `get` have arrived so far."""

    def __init__(self, keys: KeyArray, targets: Sequence[Sequence[memoryview]]) -> None:
        self.keys, self.targets = keys, targets
        self.hits: Bits = np.zeros(len(keys), np.bool_)
        self._sizes = [sum(map(len, target)) for target in targets]
        self._nbytes: dict[Path, int] = {}
        self._chunks: dict[tuple[NodeId, Path], int] = {}

    def missing(self) -> npt.NDArray[np.int64]:
        return np.flatnonzero(~self.hits)

    def note(self, places: npt.NDArray[np.int64], hits: Bits, node_id: NodeId, path: Path) -> None:
        """Of the chunks at `places`, those in `hits` came from that node by that path."""
        came = places[hits]
        self.hits[came] = True
        if came.size:
            self._nbytes[path] = self._nbytes.get(path, 0) + sum(self._sizes[place] for place in came.tolist())
            self._chunks[node_id, path] = self._chunks.get((node_id, path), 0) + len(came)

    def result(self) -> GetResult:
        return GetResult(tuple(self.hits.tolist()), self._nbytes, self._chunks)


class Reach:
    """A client's way to the nodes: its own node, connections to the others, and the view.

    Attributes:
        config: As given.
        local: The node of this host; None if there is none.
        peers: Connections.
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
        self._neighbours: dict[tuple[NodeId, int], ShmReader | None] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._view = View()
        self.local: LocalNode | None = None
        secret = _secret(config)
        self.host = host_identity()
        deadline_s = self.deadline(None)
        if is_local:
            self.local = LocalNode(connect, address, deadline_s=deadline_s, retry_s=config.breaker_s)
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
                    self.local = LocalNode(
                        connect, member.local_address, deadline_s=deadline_s, retry_s=self.config.breaker_s
                    )
                except (TransientError, LostError):
                    continue  # another user's, or down: it is read over TCP like any other

    def deadline(self, timeout_s: float | None) -> float:
        """When a call that begins now is given up."""
        return time.monotonic() + (self.config.timeout_s if timeout_s is None else timeout_s)

    def view(self, deadline_s: float) -> View:
        """The newest view, fetched again if any answer told of a newer one."""
        heard = max(self.peers.epoch, self.local.epoch if self.local else 0)
        if heard > self._view.epoch:
            try:
                self.refresh(deadline_s)
            except TransientError:
                pass  # the old one serves; what is stale in it costs misses
        return self._view

    def refresh(self, deadline_s: float) -> View:
        """Ask for the view.

        Raises:
            TransientError: Nobody answers.
        """
        request = wire.GetView()
        try:
            if self.local is None:
                raise PeerUnavailable("there is no node on this host")
            answer = self.local.call(request, deadline_s=deadline_s)
        except TransientError:
            answer = self._ask_any(request, deadline_s)
        view = expect(wire.ViewIs, answer).view
        if view.epoch > self._view.epoch:
            self._view = view
        return self._view

    def _ask_any(self, request: wire.Message, deadline_s: float) -> wire.Answer:
        first = [] if self._address.startswith("unix:") else [self._address]
        addresses = dict.fromkeys([*first, *(member.address for member in self._view.members)])
        problem: TransientError = TransientError("no address to ask")
        for address in addresses:
            try:
                return self.peers.ask(
                    address, lambda link: link.call(request, deadline_s=deadline_s), deadline_s=deadline_s
                )
            except TransientError as error:
                problem = error
        raise problem

    def call(self, node_id: NodeId, request: wire.Message, deadline_s: float) -> wire.Answer:
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

    def _member(self, node_id: NodeId, deadline_s: float) -> Member:
        member = self.view(deadline_s).member(node_id)
        if member is None:
            self.refresh(deadline_s)
            member = self._view.member(node_id)
        if member is None:
            raise TransientError(f"{node_id!r} is no member of the cluster")
        return member

    def locate(self, keys: KeyArray, deadline_s: float) -> list[NodeId | None]:
        """Ask owners who holds each key. Owners that do not answer know nothing."""
        holders: list[NodeId | None] = [None] * len(keys)
        unknown, view = np.arange(len(keys)), View()
        # The answers tell whether the view was stale: then those who own the rest now are asked, once.
        while unknown.size and self.view(deadline_s).epoch > view.epoch:
            view = self._view
            for place, holder in zip(unknown.tolist(), self._locate(keys[unknown], view, deadline_s), strict=True):
                holders[place] = holder
            unknown = np.flatnonzero([holder is None for holder in holders])
        return holders

    def _locate(self, keys: KeyArray, view: View, deadline_s: float) -> list[NodeId | None]:
        owners = view.ring.owners(keys)
        places_of = {
            view.ring.nodes[owner]: np.flatnonzero(owners == owner) for owner in np.unique(owners[owners >= 0]).tolist()
        }
        answers = self.in_parallel(
            {name: partial(self._ask_owner, name, keys[places], deadline_s) for name, places in places_of.items()}
        )
        holders: list[NodeId | None] = [None] * len(keys)
        for name, answer in answers.items():
            if isinstance(answer, RayKVError):
                continue
            for place, holder in zip(places_of[name].tolist(), answer, strict=True):
                holders[place] = holder
        return holders

    def _ask_owner(self, owner: NodeId, keys: KeyArray, deadline_s: float) -> list[NodeId | None]:
        answer = expect(wire.Located, self.call(owner, wire.Locate(keys_.to_bytes(keys)), deadline_s))
        numbers = wire.array(answer.places, "<i2", len(keys)).tolist()
        return [answer.holders[number] if 0 <= number < len(answer.holders) else None for number in numbers]

    def fetch(self, arrivals: Arrivals, holders: Sequence[NodeId | None], deadline_s: float) -> None:
        """Read what is missing from its holders, all of them in parallel."""
        by_holder: dict[NodeId, list[int]] = {}
        for place in arrivals.missing().tolist():
            holder = holders[place]
            if holder is not None:
                by_holder.setdefault(holder, []).append(place)
        work = {
            holder: partial(self._fetch_from, arrivals, holder, np.array(places), deadline_s)
            for holder, places in by_holder.items()
        }
        for holder, done in self.in_parallel(work).items():
            if isinstance(done, RayKVError):
                continue
            places, (hits, gone, path) = np.array(by_holder[holder]), done
            arrivals.note(places, hits, holder, path)
            if gone.any():
                self._report_stale(holder, arrivals.keys[places[gone]], deadline_s)

    def _fetch_from(
        self, arrivals: Arrivals, holder: NodeId, places: npt.NDArray[np.int64], deadline_s: float
    ) -> tuple[Bits, Bits, Path]:
        """Which chunks arrived, which the holder does not have (any more), and by which path they came."""
        keys, targets = arrivals.keys[places], [arrivals.targets[place] for place in places.tolist()]
        member = self._member(holder, deadline_s)
        neighbour = self._neighbour(member, deadline_s)
        if neighbour is not None:
            hits = self.read_shm(neighbour, keys, targets)
            return hits, ~hits & ~neighbour.ready(keys, now_s=time.monotonic()), "shm"
        request = wire.Read(keys_.to_bytes(keys))

        def place(answer: wire.Answer) -> list[memoryview]:
            reading = expect(wire.Reading, answer)
            lengths = wire.array(reading.nbytes, "<u4", len(keys)).tolist()
            wire.array(reading.checksums, "<u8", len(keys))
            buffers: list[memoryview] = []
            for target, length in zip(targets, lengths, strict=True):
                buffers.extend(target if sum(map(len, target)) == length else _drain(length))
            return buffers

        def read(link: Link) -> tuple[Bits, Bits, Path]:
            answer = expect(wire.Reading, link.fetch(request, place, deadline_s=deadline_s))
            hits = self._arrived(answer, targets)
            lengths = np.frombuffer(answer.nbytes, "<u4")
            spoilt = (lengths == [sum(map(len, target)) for target in targets]) & (lengths > 0) & ~hits
            if spoilt.any():
                link.call(wire.Suspect(keys_.to_bytes(keys[spoilt])), deadline_s=deadline_s)
            return hits, lengths == 0, link.path

        return self.peers.ask(member.address, read, deadline_s=deadline_s)

    def _arrived(self, answer: wire.Reading, targets: Sequence[Sequence[memoryview]]) -> Bits:
        """Which targets hold what the holder said it sent."""
        lengths = np.frombuffer(answer.nbytes, "<u4").tolist()
        checksums = np.frombuffer(answer.checksums, "<u8").tolist()
        verify = self.config.verify != "never"
        return np.array(
            [
                length > 0 and length == sum(map(len, target)) and (not verify or checksum_of(target) == checksum)
                for target, length, checksum in zip(targets, lengths, checksums, strict=True)
            ],
            np.bool_,
        )

    def read_shm(self, reader: ShmReader, keys: KeyArray, targets: Sequence[Sequence[memoryview]]) -> Bits:
        """Copy chunks of a node on this host."""
        return reader.read(keys, targets, verify=self.config.verify == "always", now_s=time.monotonic())

    def _neighbour(self, member: Member, deadline_s: float) -> ShmReader | None:
        """The memory of another node on this host; None when it must be read over a socket."""
        if member.host != self.host:
            return None
        life = (member.node_id, member.incarnation)
        if life not in self._neighbours:
            try:
                answer = self.peers.ask(
                    member.local_address,
                    lambda link: link.call(wire.Attach(), deadline_s=deadline_s),
                    deadline_s=deadline_s,
                )
                attached = expect(wire.Attached, answer)
                reader = ShmReader(attached.table, attached.arena, writable=False)
            except TransientError:
                return None  # for now
            except LostError:
                reader = None  # its files are not to be had in this container
            # Readers of its earlier lives are not closed: somebody may be in them. They go with their last user.
            self._neighbours = {known: old for known, old in self._neighbours.items() if known[0] != life[0]}
            self._neighbours[life] = reader
        return self._neighbours[life]

    def _report_stale(self, holder: NodeId, keys: KeyArray, deadline_s: float) -> None:
        """Let the holder tell the owners that it has not got these: it alone knows if that is still so by then.

        Nobody waits for it.
        """
        self._submit(partial(self.call, holder, wire.Suspect(keys_.to_bytes(keys)), deadline_s))

    def in_parallel(self, work: Mapping[NodeId, Callable[[], T]]) -> dict[NodeId, T | RayKVError]:
        """Run each, and wait for all; each keeps its own deadline. A RayKVError is a result."""
        if len(work) == 1:
            ((name, only),) = work.items()
            return {name: _caught(only)}
        futures = {name: self._submit(partial(_caught, each)) for name, each in work.items()}
        return {name: future.result() for name, future in futures.items()}

    def _submit(self, task: Callable[[], T]) -> "Future[T]":
        if self._pool is None:
            self._pool = ThreadPoolExecutor(PARALLEL_PEERS, thread_name_prefix="raykv-client")
        return self._pool.submit(task)

    def close(self) -> None:
        """Close everything."""
        if self._pool is not None:
            self._pool.shutdown()
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
        return error


def _drain(nbytes: int) -> list[memoryview]:
    """Views to receive bytes into that nobody wants: the same memory again and again."""
    scrap = memoryview(bytearray(min(nbytes, SCRAP_NBYTES)))
    whole, rest = divmod(nbytes, SCRAP_NBYTES)
    return [scrap] * whole + [scrap[:rest]]


def expect(kind: type[T], answer: wire.Answer) -> T:
    if not isinstance(answer, kind):
        raise ProtocolError(f"{type(answer).__name__} where {kind.__name__} was due")
    return answer


def _secret(config: ClientConfig) -> bytes:
    if config.secret is None:
        return b""
    try:
        return bytes.fromhex(config.secret.get_secret_value())
    except ValueError:
        raise ConfigError("field 'secret': not hexadecimal text; take it from 'raykv status --secret'") from None
