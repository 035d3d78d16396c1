"""A node serves one store over sockets, and holds a part of the cluster's location index.

The location index maps a key to its holders: the nodes that have the chunk. A hash ring assigns each key to one node,
its owner, which keeps the key's entry. The view is the list of member nodes; the ring is computed from the view.

Each connection has a thread, which runs the request handlers. Six background threads run the announcer (two of them),
the heartbeat, the reclaimer, the copies of hot prefixes and the spreader. Each tier has its own threads. One lock
protects all changes of the store. No thread copies chunk bytes while it holds the lock. If a bug ends a background
thread, `failure` is set, and the node's process exits with an error.
"""

import logging
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any, Final

import msgspec

from raykv.config import GIB, NodeConfig, nic_names
from raykv.errors import ConfigError, DamagedError, RayKVError, TransientError, UsageError
from raykv.membership.membership import MembershipPort
from raykv.memory.cgroup import memory_limit
from raykv.memory.recovery import require_sound
from raykv.metrics import Histogram
from raykv.node.announcer import Announcer
from raykv.node.background import BackgroundThreads
from raykv.node.drain import Drain
from raykv.node.handlers.admin import AdminHandler
from raykv.node.handlers.locate import LocateHandler
from raykv.node.handlers.one_sided import OneSidedHandler
from raykv.node.handlers.read import ReadHandler
from raykv.node.handlers.write import WriteHandler
from raykv.node.key_store import KeyStore, keyring_path
from raykv.node.location_index import LocationIndex
from raykv.node.namespace_reconciler import NamespaceReconciler, registry_paths
from raykv.node.peers import Peers
from raykv.node.reclaimer import Reclaimer
from raykv.node.replicas import Replicas
from raykv.node.saved_view import SavedView
from raykv.node.sessions import HandlerTable, NodeSession
from raykv.node.spreading import Spreader
from raykv.protocol import codec, messages
from raykv.protocol.placement import Member, View
from raykv.storage.files import remove_all_files
from raykv.storage.store import Store
from raykv.tier.registry import open_tiers
from raykv.transport.base import Reply, Session
from raykv.transport.nics import nic_addresses
from raykv.transport.pool import ConnectionPool
from raykv.transport.server import LogLimit, SocketServer
from raykv.transport.socket_library import loaded
from raykv.types import host_identity

log = logging.getLogger(__name__)

UNIX_PATH_MAX: Final = 107
JOIN_S: Final = 5.0
FIRST_BEAT_S: Final = 0.5
"""A node serves after its first heartbeat, which drops chunks of namespaces that were dropped while it was away. If the
directory does not answer within this time, the node serves without."""
FIRST_REQUESTS_S: Final = 0.2
"""After a restart, the node serves for this long before it starts the other background threads."""


class Node:
    """One storage node. Thread-safe.

    Attributes:
        config: The node's configuration.
        store: The node's chunks in memory.
        mover: The tiers below memory.
        lock: Guards the store.
        location_index: The holders of the keys that this node owns.
        drain: Moves the chunks to other nodes when a `Drain` request asks for it.
        replicas: The hot prefixes and the replicas of this node.
        handlers: Maps the type of a request to the function that serves it.
        reconciler: Applies the cluster's list of namespaces to this node.
        member: The node's entry in the view. `start` sets it.
    """

    def __init__(self, config: NodeConfig, *, secret: bytes, membership: MembershipPort) -> None:
        """Create the node's memory, or map the memory of the node's previous process. `start` opens the sockets.

        Args:
            config: The node's configuration.
            secret: The secret that the cluster began with: see `KeyStore`.
            membership: The directory.

        Raises:
            ConfigError: There is no room for the memory, a path is too long for a Unix socket, or a file for TLS is
                missing or wrong.
        """
        if len(config.local_address.removeprefix("unix:")) > UNIX_PATH_MAX:
            raise ConfigError(
                f"field 'node_id': {config.local_address!r} is longer than a socket's name may be ({UNIX_PATH_MAX}); "
                "choose a shorter node_id, cluster or shm_dir"
            )
        tls = None
        if config.tls is not None:
            from raykv.transport.tls import Tls  # imported late: most nodes have no TLS

            tls = Tls(config.tls)
        self.config, self._tls = config, tls
        self._keys = KeyStore(secret, keyring_path(config.file_prefix))
        self._membership = membership
        self.lock, self._stopping = threading.Lock(), threading.Event()
        self._background = BackgroundThreads(config.node_id, self._stopping)
        changed, due = threading.Event(), threading.Event()
        self._events, self._suspicious = (changed, due), threading.Event()
        store = self.store = Store.open(config.storage, config.file_prefix, now_s=time.monotonic())
        mover = self.mover = open_tiers(config, store, self.lock, changed=self._wake_all)
        self.reconciler = NamespaceReconciler(store, self.lock, mover, registry_paths(config), self._wake_all)
        self._saved_view = SavedView(config.file_prefix)
        self._pool = ConnectionPool(self._keys.keyring.current, breaker_s=config.heartbeat_s, max_idle=2, tls=tls)
        self._peers = peers = Peers(self._pool, lambda: self.view, host=config.host or host_identity())
        self.location_index = index = LocationIndex()
        announcer = self._announcer = Announcer(config, store, self.lock, mover, index, self._pool, changed)
        self.replicas = Replicas(config, store, self.lock, peers)
        self.drain = Drain(config, store, self.lock, mover, peers, self.replicas.copied_keys)
        self._reclaimer = Reclaimer(config, store, self.lock, mover, announcer, due, self.drain.started)
        self._spreader = Spreader(config, store, self.lock, peers, announcer.wake, self.drain.started)
        reads = ReadHandler(config.node_id, store, self.lock, mover, index, announcer, self.replicas.meter)
        self._one_sided = OneSidedHandler(config, store, self.lock, reads, peers, tls=tls is not None)
        self.handlers = self._handlers(reads)
        self._requests: Counter[str] = Counter()
        self._errors: Counter[str] = Counter()
        self._times: defaultdict[str, Histogram] = defaultdict(Histogram)
        self._bug_log = LogLimit(log)
        self._servers: list[SocketServer] = []
        self._asked = threading.Event()  # set after the first heartbeat

    def _handlers(self, reads: ReadHandler) -> HandlerTable:
        store, mover, announcer = self.store, self.mover, self._announcer
        writes = WriteHandler(store, self.lock, mover, announcer, self._reclaimer, self.replicas, self.drain.started)
        return {
            messages.Attach: self._attach,
            messages.Drain: self._start_drain,
            messages.GetView: lambda request, session: Reply(messages.ViewIs(self.view)),
            messages.GetStats: lambda request, session: Reply(messages.Stats(msgspec.json.encode(self.stats()))),
            **reads.table,
            **self._one_sided.table,
            **writes.table,
            **LocateHandler(self.config.node_id, store, self.lock, mover, self.location_index, announcer).table,
            **AdminHandler(store, self.lock, self.reconciler, self._membership).table,
        }

    # -- start and stop ---------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Open the sockets, join the cluster and serve. If the directory does not answer, the heartbeat thread retries.

        Raises:
            ConfigError: The node cannot listen on an address.
        """
        config = self.config
        log.info("node %s starts with %s", config.node_id, config.model_dump_json())
        endpoints = {}
        for name, address in (("tcp", config.bind), ("unix", config.local_address)):
            endpoints[name] = self._listen(address)
        endpoints |= self._listen_on_nics(*endpoints["tcp"].split(":"))
        self.member = Member(
            node_id=config.node_id,
            host=config.host or host_identity(),
            endpoints=endpoints,
            weight=config.storage.arena_nbytes / GIB,
            incarnation=time.time_ns(),
        )
        self._announcer.resume(self._last_view())
        self._background.start("heartbeat", self._beat_until_stopped)
        if not self.store.recovered:
            self._start_others()
        self._asked.wait(FIRST_BEAT_S)
        for server in self._servers:
            server.serve()
        if self.store.recovered:
            self._background.start("starter", self._start_others)

    def _start_others(self) -> None:
        """Start the other background threads. After a restart, the first requests have the processor before them."""
        if self.store.recovered and self._stopping.wait(FIRST_REQUESTS_S):
            return
        tasks: dict[str, Callable[[], None]] = {
            "announcer": partial(self._announcer.run, self._stopping),
            "announcer-slow": partial(self._announcer.run_slow, self._stopping),
            "reclaimer": partial(self._reclaimer.run, self._stopping),
            "replicas": partial(self.replicas.run, self._stopping),
            "spreader": partial(self._spreader.run, self._stopping),
            **self._one_sided.tasks(self._stopping, self._add_endpoint),
        }
        for name, task in tasks.items():
            self._background.start(name, task)

    def _listen(self, address: str) -> str:
        """Open a socket. Returns its address with the actual port. Raises ConfigError if that is impossible."""
        server = SocketServer(
            self,
            address,
            self._keys.keyring.current,
            io_timeout_s=self.config.io_timeout_s,
            max_connections=self.config.max_connections,
            tls=self._tls,
        )
        server.accept_secrets(self._keys.keyring.accepted)
        self._servers.append(server)
        return server.address

    def _listen_on_nics(self, host: str, port: str) -> dict[str, str]:
        """Listen on each NIC of the config. Returns their endpoints, empty for a NIC on which this is impossible.

        A supervisor keeps `port`, so that the node finds it free again after a restart.
        """
        endpoints = {}
        for number, nic in enumerate(nic_addresses(nic_names(self.config.nics))):
            name = f"nic{number}"
            endpoints[name] = f"{host}:{port}" if nic == host else ""
            for each in (port, "0") if nic not in ("", host) else ():
                try:
                    endpoints[name] = self._listen(f"{nic}:{each}")
                    break
                except ConfigError as error:
                    log.warning("node %s: %s", self.config.node_id, error)
        return endpoints

    def _add_endpoint(self, name: str, addresses: str) -> None:
        """Let peers know that this node is reached over a further path. The next heartbeat sends it."""
        with self.lock:
            endpoints = {**self.member.endpoints, name: addresses}
            self.member = msgspec.structs.replace(self.member, endpoints=endpoints)

    def _last_view(self) -> View:
        """Return the view of this node's previous process, with the new entry of this node."""
        view = self._saved_view.load()
        me = self.member
        return View(view.epoch, tuple(me if known.node_id == me.node_id else known for known in view.members))

    def stop(self, *, unlink: bool = False, leave: bool = True) -> None:
        """Stop serving. With `unlink`, remove the memory's files. With `leave`, leave the cluster at once."""
        self._stopping.set()
        self._wake_all()
        for server in self._servers:
            server.close()
        self._background.join(JOIN_S)
        if leave:  # after the last heartbeat, which would make the node a member again
            try:
                self._membership.leave(self.config.node_id)
            except TransientError:
                pass  # the directory removes the node when its heartbeats stop
        self._pool.close()
        self._peers.close()
        self._one_sided.close()
        self.mover.close()
        if unlink and self.config.file_prefix is not None:
            remove_all_files(self.config.file_prefix)
        self.store.close()

    def _beat_until_stopped(self) -> None:
        self._beat()
        self._asked.set()
        while not self._stopping.wait(self.config.heartbeat_s):
            self._check_table()
            self._beat()
            self.store.table.memory.touch()  # because `remove_orphans` removes files that were not touched lately

    def _check_table(self) -> None:
        """Restore the header. After an error that damage may have caused, check the table and rebuild its index.

        A damaged table sets `failure`, so the process ends. The next process recovers the table, or starts empty.
        """
        table = self.store.table
        if lost := table.restore_header():
            log.error("another process has overwritten the header of %s: %s", table.memory.path, ", ".join(lost))
        if not self._suspicious.is_set():
            return
        self._suspicious.clear()
        try:
            with self.lock:
                require_sound(table)
                table.rebuild_index(table.ready_rows())
        except DamagedError as error:
            log.critical("%s", error)
            self._background.failure = error

    def _beat(self) -> None:
        """Send a heartbeat to the directory. Apply the secrets, the view and the list of namespaces in the answer."""
        view, registry, keyring = self.view, self.reconciler.registry, self._keys.keyring
        heat = self.replicas.report(now_s=time.monotonic())
        heartbeat = messages.Heartbeat(
            self.member, view.epoch, version=registry.version, heat=heat, keyring_version=keyring.version
        )
        try:
            answer = self._membership.beat(heartbeat)
            if answer.want_view or answer.want_registry or answer.want_keyring:
                heartbeat.view = view if answer.want_view else None
                heartbeat.registry = registry.encode() if answer.want_registry else None
                heartbeat.keyring = keyring if answer.want_keyring else None
                answer = self._membership.beat(heartbeat)
        except TransientError:
            self._errors["beat"] += 1
            return
        if answer.keyring is not None and self._keys.adopt(answer.keyring):
            self._pool.secret = answer.keyring.current
            for server in self._servers:
                server.accept_secrets(answer.keyring.accepted)
        if answer.view is not None and answer.view.epoch > view.epoch:
            self._announcer.adopt(answer.view)
            self._saved_view.save(answer.view)
        if answer.heat is not None:
            self.replicas.follow(answer.heat, now_s=time.monotonic())
        if answer.registry is not None:
            try:
                self.reconciler.adopt(answer.registry)
            except RayKVError as error:  # the node continues, because a restart would not help
                self._errors["registry"] += 1
                log.error("this node cannot follow the list of namespaces: %s", error)

    def _wake_all(self) -> None:
        for event in self._events:
            event.set()
        self.replicas.wake()
        self._one_sided.wake()

    # -- state of the node --------------------------------------------------------------------------------------------

    @property
    def view(self) -> View:
        """The newest view (list of members) that the node knows."""
        return self._announcer.view

    @property
    def failure(self) -> BaseException | None:
        """The exception that ended a background thread; None if all threads run."""
        return self._background.failure

    @property
    def stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._stopping.is_set()

    @property
    def announced(self) -> bool:
        """Whether all changes of the store have been announced to the owners of the changed keys."""
        return self._announcer.done

    def stats(self) -> dict[str, Any]:
        """Return the node's state and counters, as values that JSON can encode."""
        tiers, namespaces, announcer = self.mover.stats(), self.reconciler.list(), self._announcer
        heat = self.replicas.stats()
        limit = memory_limit()
        with self.lock:
            store = self.store
            return {
                "node_id": self.config.node_id,
                "host": self.member.host,
                "address": self.member.address,
                "local_address": self.member.local_address,
                "incarnation": self.member.incarnation,
                "epoch": self.view.epoch,
                "arena_nbytes": store.arena.nbytes,
                "huge_nbytes": store.arena.huge_nbytes,
                "used_nbytes": store.used_nbytes,
                "lent_nbytes": store.lent_nbytes,
                "chunks": store.chunks,
                "recovered": store.recovered,
                "extents_failed": store.allocator.slots.extents_failed,
                "memory_limit_nbytes": limit.nbytes if limit else None,
                "memory_refused": store.populator.refused,
                "located": len(self.location_index),
                "announced": announcer.announced,
                "unannounced": announcer.waiting_keys,
                "tripped_peers": self._pool.tripped(),
                "refused_connections": sum(server.refused for server in self._servers),
                "requests": dict(self._requests),
                "errors": dict(self._errors + Counter(announce=announcer.failures)),
                "answer_times": {name: times.summary() for name, times in sorted(self._times.items())},
                **asdict(store.counters),
                **tiers,
                "namespaces": namespaces,
                "drain": self.drain.stats(),
                "heat": heat,
                "spread": self._spreader.stats(),
                "socket_library": loaded(self.config.socket_library),
                **self._one_sided.stats(),
            }

    # -- methods for the socket servers -----------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        return self.view.epoch

    def session(self, *, local: bool) -> NodeSession:
        return NodeSession(self.store, self.lock, self._stopping, local=local)

    def answer(self, request: messages.Message, session: Session) -> Reply:
        """Serve one request. If its handler raises an exception, the reply is a `Failure` message."""
        assert isinstance(session, NodeSession)
        name, began_s = type(request).__name__, time.perf_counter()
        self._requests[name] += 1
        try:
            handler = self.handlers.get(type(request))
            if handler is None:
                raise UsageError(f"{name} is not a request to a node")
            reply = handler(request, session)
            if request.group:
                self.reconciler.count_request(request.group, sum(map(len, reply.outgoing)))
            return reply
        except RayKVError as error:
            self._errors[name] += 1
            if isinstance(error, DamagedError):
                self._suspicious.set()
            return Reply(codec.failure(error))
        except Exception:  # noqa: BLE001 - a bug must not end the connection: its leases would end too
            self._errors[name] += 1
            self._suspicious.set()
            self._bug_log.write(logging.ERROR, "bug while serving %s", name, trace=True)
            return Reply(messages.Failure("ProtocolError", f"internal error while serving {name}; see the node's log"))
        finally:
            self._times[name].add_time(time.perf_counter() - began_s)

    def _start_drain(self, request: messages.Drain, session: NodeSession) -> Reply:
        if not session.local:
            raise UsageError("only a process of this host and user may drain a node")
        if not request.nbytes_per_s >= 1:
            raise UsageError(f"field 'nbytes_per_s': {request.nbytes_per_s} must be at least 1")
        with self.lock:
            first = not self.drain.started.is_set()
            self.drain.started.set()
        if first:
            self.member = msgspec.structs.replace(self.member, weight=0.0)  # the next heartbeat sends it
            self._background.start("drain", partial(self.drain.run, request.nbytes_per_s, self._stopping))
        return Reply(messages.Done())

    def _attach(self, request: messages.Attach, session: NodeSession) -> Reply:
        tls = self.config.tls
        return Reply(
            messages.Attached(
                node_id=self.config.node_id,
                host=self.member.host,
                table=str(self.store.table.memory.path),
                arena=str(self.store.arena.path),
                secret=self._keys.keyring.current if session.local else b"",
                cluster=self._keys.keyring.cluster,
                tiers=bool(self.mover),
                tls=tls.model_dump(mode="json") if tls is not None and session.local else {},
            )
        )
