"""A client's way to the nodes: this host's node, connections to the others, the view, and who owns which key."""

import math
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from raykv.client.arguments import deadline_after
from raykv.client.local_connection import LocalConnection
from raykv.client.parallel import Parallel
from raykv.client.read_failures import ReadFailures
from raykv.client.writer import Writer
from raykv.config import ClientConfig
from raykv.errors import ConfigError, PeerUnavailable, RayKVError, TransientError
from raykv.memory.copying import CopyThreads, default_copy_threads
from raykv.metrics import ClientMetrics
from raykv.protocol import chunk_keys, messages
from raykv.protocol.codec import array, expect, unpack_bits
from raykv.protocol.placement import Member, View
from raykv.transport.data_path import PathEnvironment, open_data_paths
from raykv.transport.forking import drop_after_fork
from raykv.transport.link import SocketLink
from raykv.transport.pool import Connect, ConnectionPool
from raykv.types import Bits, KeyArray, NodeId, host_identity

Holders: TypeAlias = tuple[NodeId, ...]
"""Nodes that hold one chunk; the first one is asked first."""

TRACE_TIMEOUT_S: Final = 0.5


class Locations(NamedTuple):
    """Where chunks are, as their owners know.

    Attributes:
        choices: Sets of holders, those of this host first; choices[0] is empty.
        numbers: i32, which of the choices each key has.
        nbytes: u32, length of each chunk; 0 for unknown.
        below_memory: Whether no holder has the chunk in memory.
    """

    choices: list[Holders]
    numbers: npt.NDArray[np.int32]
    nbytes: npt.NDArray[np.uint32]
    below_memory: Bits

    @classmethod
    def unknown(cls, count: int) -> "Locations":
        """No location of any key."""
        return cls([()], np.zeros(count, np.int32), np.zeros(count, np.uint32), np.zeros(count, np.bool_))

    def first(self) -> list[NodeId | None]:
        """The nearest holder of each key."""
        nearest = [holders[0] if holders else None for holders in self.choices]
        return [nearest[number] for number in self.numbers.tolist()]


class Router:
    """Connections of one process, shared by all its clients. Thread-safe. A forked child connects by itself.

    Attributes:
        config: As given.
        local, writer: The node of this host; None if there is none.
        pool: Connections to the other nodes.
        paths: The ways to read chunk bytes.
        parallel: Worker threads.
        read_failures: Failures of reads lately.
    """

    def __init__(self, config: ClientConfig, connect: Connect | None = None, *, local: bool | None = None) -> None:
        """Join through the node at `config.address`.

        Args:
            connect: How links are made. None: over sockets.
            local: Whether that node's memory can be mapped. None: when the address is a Unix socket.

        Raises:
            ConfigError: No address, or a "host:port" without a secret.
            TransientError: No node answers there.
        """
        address = config.address
        if address is None:
            raise ConfigError("field 'address': give a node's address, or set RAYKV_ADDRESS")
        is_local = address.startswith("unix:") if local is None else local
        if not is_local and config.secret is None:
            raise ConfigError("field 'secret': needed for an address of the form host:port, or set RAYKV_SECRET")
        self.config, self._address = config, address
        self._connect = connect or partial(SocketLink.connect, spin_s=config.spin_s)
        self.copy_threads = CopyThreads(config.copy_threads or default_copy_threads())
        self.parallel, self.read_failures = Parallel(), ReadFailures()
        self._metrics: dict[bytes, ClientMetrics] = {}
        self._lock = threading.Lock()
        self._view = View()
        self._failures, self._doubt_s = 0, -math.inf
        self.local: LocalConnection | None = None
        self.writer: Writer | None = None
        secret, host = _secret(config), host_identity()
        deadline_s = self.deadline(None)
        if is_local:
            attached = self._use_local(address, deadline_s)
            host, secret = attached.host, attached.secret
        self._host = host
        self.pool = ConnectionPool(
            self._connect, secret, breaker_s=config.breaker_s, max_idle=config.connections_per_peer
        )
        self.paths = open_data_paths(PathEnvironment(self.pool, host, config.verify, self.copy_threads))
        drop_after_fork(self)
        try:
            self.refresh(deadline_s)
        except BaseException:
            self.close()
            raise
        if self.local is None:
            self._find_local(deadline_s)

    def after_fork(self) -> None:
        """Other threads of the parent may hold the lock. Each connection discards its own inherited state."""
        self._lock = threading.Lock()
        for each in self._metrics.values():
            each.after_fork()

    def _use_local(self, address: str, deadline_s: float) -> messages.Attached:
        retry_s = self.config.breaker_s
        self.local = LocalConnection(self._connect, address, deadline_s=deadline_s, retry_s=retry_s)
        self.writer = Writer(self.local, self.copy_threads, retry_s=retry_s)
        return self.local.attached

    def _find_local(self, deadline_s: float) -> None:
        """A client that connected by TCP may still have a node on its host."""
        for member in self._view.members:
            if self.local is None and self.is_near(member):
                try:
                    self._use_local(member.local_address, deadline_s)
                except TransientError:
                    continue  # another user's node, or down: it is treated like a remote one

    def is_near(self, member: Member) -> bool:
        """Whether a member is on this host."""
        return member.host == self._host

    def deadline(self, timeout_s: float | None) -> float:
        """When a call that begins now has to end.

        Raises:
            UsageError: The time-out is not a number of seconds.
        """
        return deadline_after(self.config.timeout_s if timeout_s is None else timeout_s)

    # -- view -------------------------------------------------------------------------------------------------------

    def view(self, deadline_s: float) -> View:
        """The newest view. It is fetched when an answer had a greater epoch, or a node failed."""
        local = self.local
        if local is not None and local.attached.secret and local.attached.secret != self.pool.secret:
            self._join_again(local)
        epochs = (self.pool.epoch, local.epoch if local else 0, self.writer.epoch if self.writer else 0)
        if max(epochs) > self._view.epoch or self._in_doubt():
            try:
                self.refresh(deadline_s)
            except RayKVError:
                pass  # the old view serves; what is stale in it costs misses
            self._failures = self.pool.failures  # failures of the refresh itself are no reason for another one
        return self._view

    def _join_again(self, local: LocalConnection) -> None:
        """This host's node belongs to a new cluster, with another secret, and epochs that begin again."""
        with self._lock:
            self.pool.retain(())
            self.pool.secret, self.pool.epoch = local.attached.secret, 0
            local.epoch, self._view = 0, View()
            if self.writer is not None:
                self.writer.epoch = 0
            self._doubt_s, self._failures = -math.inf, self.pool.failures - 1  # so that the view is fetched

    def _in_doubt(self) -> bool:
        """Whether a node failed since the last fetch for that reason. At most once in `breaker_s`."""
        if self.pool.failures == self._failures or time.monotonic() < self._doubt_s:
            return False
        self._failures, self._doubt_s = self.pool.failures, time.monotonic() + self.config.breaker_s
        return True

    def refresh(self, deadline_s: float) -> View:
        """Fetch the view.

        Raises:
            TransientError: No node answers.
        """
        request = messages.GetView()
        try:
            if self.local is None:
                raise PeerUnavailable("there is no node on this host")
            answer = self.local.call(request, deadline_s=deadline_s)
        except RayKVError:
            answer = self._ask_any(request, deadline_s)
        view = expect(messages.ViewIs, answer).view
        if view.epoch > self._view.epoch:
            self._view = view
            self.pool.retain({self._address, *(address for m in view.members for address in m.endpoints.values())})
            self.paths.retain(view.members)
        return self._view

    def _ask_any(self, request: messages.Message, deadline_s: float) -> messages.Answer:
        # The given address comes last: its node may have left long ago.
        given = [] if self._address.startswith("unix:") else [self._address]
        addresses = [*dict.fromkeys([*(member.address for member in self._view.members), *given])]
        problem = TransientError("no address to ask")
        for number, address in enumerate(addresses):
            left_s = deadline_s - time.monotonic()
            until_s = deadline_s - left_s / 2 if number + 1 < len(addresses) else deadline_s
            try:
                return self.ask(address, request, until_s)
            except RayKVError as error:
                problem = error if isinstance(error, TransientError) else TransientError(f"{address}: {error}")
        try:
            raise problem
        finally:
            del problem  # an error that its own frame names keeps that frame, and the caller's buffers, for a while

    # -- asking -----------------------------------------------------------------------------------------------------

    def ask(self, address: str, request: messages.Message, deadline_s: float) -> messages.Answer:
        """Ask the node at an address.

        Raises:
            RayKVError: It does not answer, or refuses.
        """
        return self.pool.ask(address, lambda link: link.call(request, deadline_s=deadline_s), deadline_s=deadline_s)

    def call(self, node_id: NodeId, request: messages.Message, deadline_s: float) -> messages.Answer:
        """Ask a member.

        Raises:
            RayKVError: It does not answer, or refuses.
        """
        if node_id == self.local_id:
            assert self.local is not None
            return self.local.call(request, deadline_s=deadline_s)
        return self.ask(self.member(node_id, deadline_s).address, request, deadline_s)

    @property
    def local_id(self) -> NodeId | None:
        """Name of this host's node."""
        return None if self.local is None else self.local.attached.node_id

    def member(self, node_id: NodeId, deadline_s: float) -> Member:
        """The member of that name.

        Raises:
            TransientError: There is none.
        """
        member = self.view(deadline_s).member(node_id)
        if member is None:
            member = self.refresh(deadline_s).member(node_id)
        if member is None:
            raise TransientError(f"{node_id!r} is no member of the cluster")
        return member

    def node_ids(self, deadline_s: float) -> list[NodeId]:
        """All members and this host's node, which comes first."""
        names = [member.node_id for member in self.view(deadline_s).members]
        return [*dict.fromkeys([*([] if self.local_id is None else [self.local_id]), *names])]

    def ask_all(self, request: messages.Message, deadline_s: float) -> dict[NodeId, messages.Answer | RayKVError]:
        """Ask every member, and this host's node, in parallel."""
        nodes = self.node_ids(deadline_s)
        return self.parallel.run({name: partial(self.call, name, request, deadline_s) for name in nodes}, deadline_s)

    # -- locations --------------------------------------------------------------------------------------------------

    def locate(self, keys: KeyArray, deadline_s: float, *, group: bytes = b"") -> Locations:
        """Ask the owners where chunks are. An owner that does not answer knows nothing."""
        whole, unknown, view = Locations.unknown(len(keys)), np.arange(len(keys)), View()
        while len(unknown) and self.view(deadline_s).epoch > view.epoch:  # an answer may show that the view was stale
            view = self._view
            some = keys if len(unknown) == len(keys) else keys[unknown]
            shares = view.ring.shares(some)
            work = {
                owner: partial(self.ask_owner, owner, some[share] if len(shares) > 1 else some, group, deadline_s)
                for owner, share in shares.items()
            }
            for owner, part in self.parallel.run(work, deadline_s).items():
                if isinstance(part, Locations):
                    mine = unknown[shares[owner]]
                    whole.numbers[mine] = np.where(part.numbers > 0, part.numbers + len(whole.choices) - 1, 0)
                    whole.nbytes[mine], whole.below_memory[mine] = part.nbytes, part.below_memory
                    whole.choices.extend(part.choices[1:])
            unknown = np.flatnonzero(whole.numbers == 0)
        return whole

    def ask_owner(self, owner: NodeId, keys: KeyArray, group: bytes, deadline_s: float) -> Locations:
        """Where chunks are, as the one owner of all of them knows."""
        request = messages.Locate(chunk_keys.to_bytes(keys), group=group)
        answer = expect(messages.Located, self.call(owner, request, deadline_s))
        count = len(keys)
        numbers = array(answer.places, "<i4", count) + np.int32(1)
        numbers = np.where((numbers > 0) & (numbers <= len(answer.choices)), numbers, np.int32(0))
        nbytes = array(answer.nbytes, "<u4", count) if answer.nbytes else np.zeros(count, np.uint32)
        choices = [(), *map(self.nearest_first, answer.choices)]
        return Locations(choices, numbers, nbytes, unpack_bits(answer.below_memory, count))

    def nearest_first(self, holders: Sequence[NodeId]) -> Holders:
        """The holders, those on this host first."""
        if len(holders) < 2:
            return tuple(holders)
        near = {member.node_id for member in self._view.members if self.is_near(member)}
        return tuple(sorted(holders, key=lambda name: name not in near))

    # -- in passing -------------------------------------------------------------------------------------------------

    def metrics(self, group: bytes) -> ClientMetrics:
        """Counters of one quota group, by its digest."""
        return self._metrics.setdefault(group, ClientMetrics())

    def send_trace(self, requests: bytes) -> None:
        """Send recorded requests to this host's node. Never raises: see `raykv.client.trace_recorder`."""
        member = self._view.member(self.local_id) if self.local_id is not None else None
        try:
            if member is not None:
                request = messages.RecordTrace(requests)
                self.ask(member.local_address, request, time.monotonic() + TRACE_TIMEOUT_S)
        except RayKVError:
            pass  # a gap in a trace

    def close(self) -> None:
        """Close everything."""
        self.parallel.close()
        self.copy_threads.close()
        if self.writer is not None:
            self.writer.close()
        self.paths.close()
        self.pool.close()
        if self.local is not None:
            self.local.close()


def _secret(config: ClientConfig) -> bytes:
    if config.secret is None:
        return b""
    try:
        return bytes.fromhex(config.secret.get_secret_value())
    except ValueError:
        raise ConfigError("field 'secret': not hexadecimal text; take it from 'raykv status --secret'") from None
