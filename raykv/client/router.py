"""Connects a client to nodes. Keeps the view, which is the list of members. Finds the holders of chunks."""

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from raykv.client.arguments import deadline_after
from raykv.client.local_connection import LocalConnection
from raykv.client.parallel import Parallel
from raykv.client.peer_loads import PeerLoads
from raykv.client.read_failures import ReadFailures
from raykv.client.writer import Writer
from raykv.config import ClientConfig, TlsConfig, nic_names, nixl_backends, rdma_devices
from raykv.errors import ConfigError, PeerUnavailable, RayKVError, TransientError, UsageError
from raykv.memory.copying import CopyThreads, default_copy_threads
from raykv.metrics import ClientMetrics
from raykv.protocol import chunk_keys, messages
from raykv.protocol.codec import array, expect, stats_in, unpack_bits
from raykv.protocol.placement import LEARN_S, Member, View
from raykv.protocol.trace_requests import TracedRequest
from raykv.transport.addresses import parse_address
from raykv.transport.data_path import PathEnvironment, open_data_paths
from raykv.transport.nics import nic_addresses
from raykv.transport.pool import ConnectionPool
from raykv.types import Bits, KeyArray, NodeId, host_identity

if TYPE_CHECKING:
    from raykv.transport.tls import Tls

Holders: TypeAlias = tuple[NodeId, ...]
"""Nodes that hold one chunk, in the order in which they are asked."""

TRACE_TIMEOUT_S: Final = 0.5


class Locations(NamedTuple):
    """The holders of chunks, according to the owners.

    Attributes:
        holders: For each key its holders, those on this host first. Empty: no holder is known.
        nbytes: u32, length of each chunk. 0: unknown.
        below_memory: For each key, whether all holders have the chunk only on SSD or file.
        answered: For each key, whether its owner has answered.
    """

    holders: list[Holders]
    nbytes: npt.NDArray[np.uint32]
    below_memory: Bits
    answered: Bits


class Router:
    """Connections that several clients share: see `Client.using`. Thread-safe. A forked child opens new connections.

    Attributes:
        local, writer: Connections to this host's node. None: this host has no node.
        pool: Connections to the other nodes.
        paths: The data paths for reading chunks.
        read_failures: Recent failures of reads.
        loads: The load of the other nodes.
    """

    def __init__(self, config: ClientConfig) -> None:
        """Join through the node at `config.address`.

        Raises:
            ConfigError: There is no address, it is wrong, it is "host:port" and there is no secret, or a file for TLS
                is missing or wrong.
            TransientError: No node answers at the address.
        """
        address = config.address
        if address is None:
            raise ConfigError("field 'address': give a node's address, or set RAYKV_ADDRESS")
        parse_address(address)
        is_local = address.startswith("unix:")
        if not is_local and config.secret is None:
            raise ConfigError("field 'secret': needed for an address of the form host:port, or set RAYKV_SECRET")
        sources = None if config.nics == "off" else tuple(nic_addresses(nic_names(config.nics)))
        self.config, self._address = config, address
        self.copy_threads = CopyThreads(config.copy_threads or default_copy_threads())
        self.parallel, self.read_failures = Parallel(), ReadFailures()
        self.loads = PeerLoads(Random())
        self._metrics: dict[bytes, ClientMetrics] = {}
        self._view = self._view_before = View()
        self._view_changed_s = 0.0
        self._failures, self._retry_at_s, self._local_failed = 0, 0.0, False
        self._cluster = b""
        self.local: LocalConnection | None = None
        self.writer: Writer | None = None
        secret, host, tls = _secret(config), host_identity(), _open_tls(config.tls)
        deadline_s = self.deadline(None)
        if is_local:
            attached = self._use_local(address, deadline_s)
            host, secret = attached.host, attached.secret
            if tls is None and attached.tls:
                tls = self._tls_of_node(attached)
        self._host = host
        self.pool = ConnectionPool(secret, breaker_s=config.breaker_s, max_idle=config.connections_per_peer, tls=tls)
        self.pool.learn_secret = self._learn_secret
        devices = rdma_devices(config.rdma, tls=tls is not None)
        backends = nixl_backends(config.nixl, tls=tls is not None)
        self.paths = open_data_paths(
            PathEnvironment(self.pool, host, config.verify, self.copy_threads, devices, sources, backends)
        )
        deadline_s = self.deadline(None)  # opening RDMA devices may take seconds, which no node is to blame for
        try:
            self.refresh(deadline_s)
        except BaseException:  # the caller gets no object that it could close
            self.close()
            raise
        if self.local is None:
            self._find_local(deadline_s)

    def _use_local(self, address: str, deadline_s: float) -> messages.Attached:
        retry_s = self.config.breaker_s
        self.local = LocalConnection(address, deadline_s=deadline_s, retry_s=retry_s)
        self.writer = Writer(self.local, self.copy_threads, retry_s=retry_s)
        self._cluster = self.local.attached.cluster
        return self.local.attached

    def _tls_of_node(self, attached: messages.Attached) -> "Tls | None":
        """Use the certificates of this host's node. Raises ConfigError if this process cannot read them."""
        try:
            return _open_tls(TlsConfig.load(attached.tls))
        except BaseException:  # the caller gets no object that it could close
            assert self.local is not None
            assert self.writer is not None
            self.writer.close()
            self.local.close()
            raise

    def _find_local(self, deadline_s: float) -> None:
        """Connect to a node of this host if there is one. Called if the client has joined by TCP."""
        for member in self._view.members:
            if self.local is None and self.is_near(member):
                try:
                    self._use_local(member.local_address, deadline_s)
                except TransientError:
                    continue  # the node is down or belongs to another user: treat it as a remote node

    def _learn_secret(self, deadline_s: float) -> bytes:
        """Ask this host's node for the secret that the cluster uses now. If nobody answers, return the known one."""
        if self.local is None:
            return self.pool.secret
        try:
            return self.local.learn_secret(deadline_s)
        except RayKVError:
            return self.pool.secret

    def is_near(self, member: Member) -> bool:
        return member.host == self._host

    def deadline(self, timeout_s: float | None) -> float:
        """Return the deadline of a call that begins now. `timeout_s` None: the config decides.

        Raises:
            UsageError: The time-out is not a number of seconds.
        """
        return deadline_after(self.config.timeout_s if timeout_s is None else timeout_s)

    # -- view -------------------------------------------------------------------------------------------------------

    def view(self, deadline_s: float) -> View:
        """Return the view. Fetch a new view first if an answer had a greater epoch, or if a node did not answer."""
        pool, local = self.pool, self.local
        pipelines = [each.pipeline for each in (local, self.writer) if each is not None]
        attached = None if local is None else local.attached
        if attached is not None and attached.secret not in (b"", pool.secret):
            pool.secret = attached.secret
        if attached is not None and attached.cluster != self._cluster:
            # The node has joined another cluster. Epochs of two clusters cannot be compared, so all epochs are reset.
            pool.retain(())
            self._cluster, pool.epoch, self._view = attached.cluster, 0, View()
            for pipeline in pipelines:
                pipeline.epoch = 0
        stale = self._newest_epoch > self._view.epoch
        failures = self._local_failed or pool.failures != self._failures
        failed = failures and time.monotonic() >= self._retry_at_s
        if stale or failed or not self._view.members:
            if failed:  # the node may stay down, so refresh at most once per `breaker_s`
                self._retry_at_s = time.monotonic() + self.config.breaker_s
            try:
                self.refresh(deadline_s, here=not self._local_failed)
            except RayKVError:
                pass  # use the old view: stale entries cost misses, not errors
            # Failures of the refresh itself cause no further refresh.
            self._failures, self._local_failed = pool.failures, False
        return self._view

    @property
    def is_alone(self) -> bool:
        """Whether this host's node is the only member and has no tiers. False if there is a newer view.

        If so, `Client.locate` finds all chunks with a `timeout_s` of 0.
        """
        if self.local is None or self._newest_epoch > self._view.epoch:
            return False
        attached = self.local.attached
        return not attached.tiers and [member.node_id for member in self._view.members] == [attached.node_id]

    @property
    def _newest_epoch(self) -> int:
        """The greatest epoch in any answer so far."""
        pipelines = [each.pipeline for each in (self.local, self.writer) if each is not None]
        return max([self.pool.epoch, *(pipeline.epoch for pipeline in pipelines)])

    def refresh(self, deadline_s: float, *, here: bool = True) -> View:
        """Fetch the view from the first node that answers: see `ask_any`, also for `here`.

        If this host's node has an older view than other nodes, because it does not reach the directory, ask these.

        Raises:
            TransientError: No node answers.
        """
        view = expect(messages.ViewIs, self.ask_any(messages.GetView(), deadline_s, here=here)).view
        if view.epoch < self.pool.epoch:
            try:
                other = expect(messages.ViewIs, self.ask_any(messages.GetView(), deadline_s, here=False)).view
                view = max(view, other, key=lambda each: each.epoch)
            except TransientError:
                pass
        if view.epoch > self._view.epoch:
            self._view_before, self._view_changed_s, self._view = self._view, time.monotonic(), view
            self.pool.retain({self._address, *(address for m in view.members for address in m.endpoints.values())})
            self.paths.retain(view.members)
            self.loads.retain(frozenset(member.node_id for member in view.members))
        return self._view

    def views(self, deadline_s: float) -> Iterator[View]:
        """Yield the views whose owners to ask for chunks, one after the other, until the caller has found all chunks.

        The newest view is the first. Another one follows if an answer shows that there is a newer one. For
        LEARN_S after a change of the view, the view before the change is the last.
        """
        epoch = 0
        while (view := self.view(deadline_s)).epoch > epoch:
            epoch = view.epoch
            yield view
        if time.monotonic() < self._view_changed_s + LEARN_S:
            yield self._view_before

    def shares(self, view: View, keys: KeyArray) -> dict[NodeId, list[int]]:
        """Return the indices of the keys by owner. In an older view, leave out keys that have the same owner now."""
        shares, now = view.ring.shares(keys), self._view
        if view is now:
            return shares
        if not now.members:
            return {}
        owners = np.array(now.ring.nodes)[now.ring.owners(keys)].tolist()
        return {
            name: changed
            for name, places in shares.items()
            if now.member(name) and (changed := [place for place in places if owners[place] != name])
        }

    # -- asking -----------------------------------------------------------------------------------------------------

    def ask_any(self, request: messages.Message, deadline_s: float, *, here: bool = True) -> messages.Answer:
        """Ask this host's node, if `here`, then other nodes one after the other, until one answers.

        Raises:
            UsageError: A node refuses the request.
            PeerUnavailable: No node answers.
        """
        # The configured address is tried last, because the node at this address may have left long ago.
        given = [] if self._address.startswith("unix:") else [self._address]
        others = [member for member in self._view.members if here or member.node_id != self.local_id]
        addresses = dict.fromkeys([*(member.address for member in others), *given])
        calls = [partial(self.ask, address, request) for address in addresses]
        if here and self.local is not None:
            calls.insert(0, partial(self.local.call, request))
        problem = "no address to ask"
        for number, call in enumerate(calls, start=1):
            left_s = deadline_s - time.monotonic()
            try:
                return call(deadline_s - left_s / 2 if number < len(calls) else deadline_s)
            except UsageError:
                raise
            except RayKVError as error:
                problem = str(error)
        raise PeerUnavailable(problem)

    def ask(self, address: str, request: messages.Message, deadline_s: float) -> messages.Answer:
        """Send a request to the node at an address, and return the answer.

        Raises:
            RayKVError: The node does not answer, or refuses.
        """
        return self.pool.ask(address, lambda link: link.call(request, deadline_s=deadline_s), deadline_s=deadline_s)

    def call(self, node_id: NodeId, request: messages.Message, deadline_s: float) -> messages.Answer:
        """Send a request to a member, and return the answer.

        Raises:
            RayKVError: The member does not answer, or refuses.
        """
        if node_id == self.local_id:
            assert self.local is not None
            try:
                return self.local.call(request, deadline_s)
            except TransientError:
                self._local_failed = True  # the node may have left: `view` asks the others for a new view
                raise
        return self.ask(self.member(node_id, deadline_s).address, request, deadline_s)

    @property
    def is_recording(self) -> bool:
        """Whether this host's node records requests, for `raykv record`."""
        return self.local is not None and bool(self.local.reader.table.header["recording"])

    @property
    def local_id(self) -> NodeId | None:
        """Name of this host's node. None: this host has no node."""
        return None if self.local is None else self.local.attached.node_id

    def member(self, node_id: NodeId, deadline_s: float) -> Member:
        """Return a member by its name.

        Raises:
            TransientError: The cluster has no such member.
        """
        member = self.view(deadline_s).member(node_id)
        if member is None:
            member = self.refresh(deadline_s).member(node_id)
        if member is None:
            raise TransientError(f"{node_id!r} is no member of the cluster")
        return member

    def node_ids(self, deadline_s: float) -> list[NodeId]:
        """Return the names of this host's node and of all members. This host's node comes first."""
        names = [member.node_id for member in self.view(deadline_s).members]
        return [*dict.fromkeys([*([] if self.local_id is None else [self.local_id]), *names])]

    def ask_all(self, request: messages.Message, deadline_s: float) -> dict[NodeId, messages.Answer | RayKVError]:
        """Send a request to all members and this host's node, in parallel. Return each node's answer or error."""
        return self.call_each(dict.fromkeys(self.node_ids(deadline_s), request), deadline_s)

    def call_each(
        self, requests: Mapping[NodeId, messages.Message], deadline_s: float
    ) -> dict[NodeId, messages.Answer | RayKVError]:
        """Send each member its request, in parallel. Return each member's answer or error."""
        work = {name: partial(self.call, name, request, deadline_s) for name, request in requests.items()}
        return self.parallel.run(work)

    def stats(self, deadline_s: float) -> dict[NodeId, dict[str, Any]]:
        """Return the counters of all members and of this host's node, or {"error": ...} without an answer."""
        found: dict[NodeId, dict[str, Any]] = {}
        for name, answer in self.ask_all(messages.GetStats(), deadline_s).items():
            try:
                found[name] = {"error": str(answer)} if isinstance(answer, RayKVError) else stats_in(answer)
            except RayKVError as error:
                found[name] = {"error": str(error)}
        return found

    # -- locations --------------------------------------------------------------------------------------------------

    def locate(self, keys: KeyArray, deadline_s: float, *, group: bytes = b"") -> Locations:
        """Ask the owners for the holders of chunks. Keys whose owner does not answer have no holders in the result.

        After the deadline no owner is asked.
        """
        count = len(keys)
        whole = Locations(
            [()] * count, np.zeros(count, np.uint32), np.zeros(count, np.bool_), np.zeros(count, np.bool_)
        )
        unknown = np.arange(count)
        for view in self.views(deadline_s):
            if not len(unknown) or time.monotonic() >= deadline_s:
                break
            shares = {owner: unknown[share] for owner, share in self.shares(view, keys[unknown]).items()}
            work = {
                owner: partial(self.ask_owner, owner, keys[share], group, deadline_s) for owner, share in shares.items()
            }
            for owner, part in self.parallel.run(work).items():
                mine = shares[owner]
                whole.answered[mine] = isinstance(part, Locations)
                if isinstance(part, Locations):
                    whole.nbytes[mine], whole.below_memory[mine] = part.nbytes, part.below_memory
                    for place, holders in zip(mine.tolist(), part.holders, strict=True):
                        whole.holders[place] = holders
            unknown = np.array([place for place, holders in enumerate(whole.holders) if not holders], np.int64)
        return whole

    def ask_owner(self, owner: NodeId, keys: KeyArray, group: bytes, deadline_s: float) -> Locations:
        """Ask one owner for the holders of keys that it owns."""
        request = messages.Locate(chunk_keys.to_bytes(keys), group=group)
        answer = expect(messages.Located, self.call(owner, request, deadline_s))
        count, choices = len(keys), [*map(self.nearest_first, answer.choices)]
        places = array(answer.places, "<i4", count).tolist()
        holders = [choices[place] if 0 <= place < len(choices) else () for place in places]
        nbytes = array(answer.nbytes, "<u4", count) if answer.nbytes else np.zeros(count, np.uint32)
        return Locations(holders, nbytes, unpack_bits(answer.below_memory, count), np.ones(count, np.bool_))

    def nearest_first(self, holders: Sequence[NodeId]) -> Holders:
        """Sort the holders of a chunk: nodes on this host first, the others by `PeerLoads.order`."""
        if len(holders) < 2:
            return tuple(holders)
        near = self.near_ids()
        return tuple(sorted(self.loads.order(holders), key=lambda name: name not in near))

    def near_ids(self) -> frozenset[NodeId]:
        """Return the names of the nodes on this host, according to the last view."""
        local = () if self.local_id is None else (self.local_id,)
        return frozenset((*local, *(member.node_id for member in self._view.members if self.is_near(member))))

    # -- metrics ----------------------------------------------------------------------------------------------------

    def metrics(self, group: bytes) -> ClientMetrics:
        """Return the counters of the quota group with this digest."""
        return self._metrics.setdefault(group, ClientMetrics())

    def send_trace(self, requests: list[TracedRequest]) -> None:
        """Send recorded requests to this host's node. Never raises: see `raykv.client.trace_recorder`."""
        try:
            if self.local is not None:
                self.ask(self.local.address, messages.RecordTrace(requests), time.monotonic() + TRACE_TIMEOUT_S)
        except RayKVError:
            pass  # the trace then lacks these requests

    def close(self) -> None:
        self.parallel.close()
        self.copy_threads.close()
        if self.writer is not None:
            self.writer.close()
        self.paths.close()
        self.pool.close()
        if self.local is not None:
            self.local.close()


def _open_tls(config: TlsConfig | None) -> "Tls | None":
    if config is None:
        return None
    from raykv.transport.tls import Tls  # imported late: most clients have no TLS

    return Tls(config)


def _secret(config: ClientConfig) -> bytes:
    if config.secret is None:
        return b""
    try:
        return bytes.fromhex(config.secret.get_secret_value())
    except ValueError:
        raise ConfigError("field 'secret': not hexadecimal text; take it from 'raykv status --secret'") from None
