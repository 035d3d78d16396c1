"""A node: one store, its sockets, its part of the cluster's index, and its pulse.

All changes of the store happen under one lock, whichever connection asks; chunk bytes never move under it. Three
background threads: the announcer tells owners what came and went, the pulse tells the directory that we live, the
forerunner evicts and takes memory ahead of need. If one dies of a bug, `failure` is set and the actor around the node
ends, visibly.
"""

import logging
import struct
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from raykv.config import GIB, NodeConfig
from raykv.errors import ConfigError, RayKVError, TransientError, UsageError
from raykv.membership.membership import DirectoryPort
from raykv.memory.copying import checksums_of
from raykv.memory.host import give_way, has_to_spare
from raykv.metrics import Histogram
from raykv.node.location_index import LocationIndex
from raykv.node.namespace_reconciler import Namespaces, register_paths
from raykv.node.trace_buffer import TraceBuffer
from raykv.protocol import chunk_keys, messages
from raykv.protocol.hints import require_hints
from raykv.protocol.namespace import Namespace
from raykv.protocol.placement import Member, View
from raykv.protocol.reasons import Place
from raykv.protocol.trace_requests import TAKEN_KEYS, TracedRequest, pack
from raykv.storage.orphans import forget
from raykv.storage.store import Store
from raykv.tier.mover import open_tiers
from raykv.transport.base import ChunkRun, Link, Reply, Session, Targets
from raykv.transport.memory import Network
from raykv.transport.pool import Peers
from raykv.transport.stream import STEP_NBYTES
from raykv.transport.tcp import SocketLink, SocketServer
from raykv.types import Bits, KeyArray, NodeId, Rows, host_identity

log = logging.getLogger(__name__)

ANNOUNCE_KEYS: Final = 1 << 16
"""Keys in one announcement."""
LOCKED_KEYS: Final = 4096
"""Keys looked up at once under the lock."""
MAX_UNANNOUNCED_KEYS: Final = 1 << 20
"""Keys kept for owners that do not answer; beyond it the oldest are forgotten (they cost a miss, no more)."""
ANNOUNCE_DEADLINE_S: Final = 5.0
QUIET_S: Final = 0.1
"""Memory further ahead of need is taken when nothing was written for so long."""
PROMOTE_TIMEOUT_S: Final = 4.0
"""A request waits so long at most for what lies below memory."""
PROMOTED_KEYS: Final = 64
UNIX_PATH_MAX: Final = 107
_PAIR: Final = struct.Struct("<QQ")
_ROW: Final = struct.Struct("<i")
_CHECKSUM: Final = struct.Struct("<Q")
_LENGTH: Final = struct.Struct("<I")


class NodeSession:
    """The leases of one connection: rows it is writing, rows lent to it that have no key yet, and pins it holds."""

    def __init__(self, node: "Node", *, local: bool) -> None:
        self._node = node
        self.local = local
        self.reserved: set[int] = set()
        self.lent: set[int] = set()
        self.pins: Counter[int] = Counter()

    def close(self) -> None:
        """Give everything back."""
        self._node.end_leases(self)


class Node:
    """One storage node. Thread-safe.

    Attributes:
        config: As given.
        store: Its storage.
        member: How others see it; known after `start`.
        view: The newest view it has heard of.
        failure: The bug that ended a background thread, if one did.
    """

    joined: frozenset[type[messages.Message]] = frozenset({messages.Store})

    def __init__(
        self, config: NodeConfig, *, secret: bytes, directory: DirectoryPort, network: Network | None = None
    ) -> None:
        """Map or make the memory; nothing listens yet.

        Args:
            secret: The cluster's secret.
            network: Use this in-memory network instead of sockets.

        Raises:
            ConfigError: No room, or a path that is too long for a socket.
        """
        self.config = config
        self._secret, self._directory, self._network = secret, directory, network
        if len(config.local_address.removeprefix("unix:")) > UNIX_PATH_MAX:
            raise ConfigError(
                f"field 'node_id': {config.local_address!r} is longer than a socket's name may be ({UNIX_PATH_MAX}); "
                "choose a shorter node_id, cluster or shm_dir"
            )
        self.store = Store.open(config.storage, config.file_prefix, now_s=time.monotonic())
        self.view = View()
        self.failure: BaseException | None = None
        self._lock = threading.Lock()
        self.tiers = open_tiers(config, self.store, self._lock, changed=self._note_change)
        self.trace_buffer = TraceBuffer()
        self.namespaces = Namespaces(self.store, self._lock, self.tiers, register_paths(config))
        self._location_index = LocationIndex(config.max_locations)
        self._requests: Counter[str] = Counter()
        self._errors: Counter[str] = Counter()
        self._times: defaultdict[str, Histogram] = defaultdict(Histogram)
        self._to_announce: list[KeyArray] = []
        self._unheard: list[KeyArray] = []  # what owners did not answer to; the others do not go for these
        self._announcing = False
        self._stopping = threading.Event()
        self._changed = threading.Event()
        self._wanted = threading.Event()
        connect = network.connect if network is not None else SocketLink.connect
        self._peers = Peers(connect, secret, breaker_s=config.heartbeat_s, max_idle=2)
        self._servers: list[SocketServer] = []
        self._threads: list[threading.Thread] = []
        self._handlers: dict[type[messages.Message], Callable[[Any, NodeSession], Reply]] = {
            messages.Attach: self._attach,
            messages.GetView: lambda request, session: Reply(messages.ViewIs(self.view)),
            messages.OpenNamespace: self._open_namespace,
            messages.Reserve: self._reserve,
            messages.Lend: self._lend,
            messages.Store: self._store,
            messages.Commit: self._commit,
            messages.Abort: self._abort,
            messages.Pin: self._pin,
            messages.Unpin: self._unpin,
            messages.Promote: self._promote,
            messages.Delete: self._delete,
            messages.Suspect: self._suspect,
            messages.Locate: self._locate,
            messages.Announce: self._announce,
            messages.Read: self._read,
            messages.Write: self._write,
            messages.Hint: self._hint,
            messages.Configure: self._configure,
            messages.Adopt: lambda request, session: Reply(
                messages.Count(self._adopt_register(request.register, request.group))
            ),
            messages.Report: self._report,
            messages.Why: self._why,
            messages.GetNamespaces: lambda request, session: Reply(
                messages.NamespacesAre(msgspec.json.encode(self.namespaces.list()))
            ),
            messages.Record: self._record,
            messages.TakeRecord: self._take_record,
            messages.GetStats: lambda request, session: Reply(messages.Stats(msgspec.json.encode(self.stats()))),
        }

    # -- life -------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Listen, and join the cluster (now, or as soon as the directory answers).

        Raises:
            ConfigError: An address is not to be had.
        """
        config = self.config
        log.info("node %s starts with %s", config.node_id, config.model_dump_json())
        if self._network is None:
            for address in (config.bind, config.local_address):
                server = SocketServer(
                    self,
                    address,
                    self._secret,
                    io_timeout_s=config.io_timeout_s,
                    max_connections=config.max_connections,
                )
                self._servers.append(server)
            address, local_address = (server.address for server in self._servers)
        else:
            address = local_address = config.node_id
        self.member = Member(
            node_id=config.node_id,
            host=config.host or host_identity(),
            address=address,
            local_address=local_address,
            weight=config.weight or config.storage.arena_nbytes / GIB,
            incarnation=time.time_ns(),
        )
        for server in self._servers:
            server.serve()
        if self._network is not None:
            self._network.services[address] = self
        self._beat()
        self._wanted.set()  # take memory before the first writer comes
        for task in (self._pulse, self._announcer, self._forerunner):
            thread = threading.Thread(target=self._guard, args=(task,), name=f"raykv{task.__name__}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def stop(self, *, unlink: bool = False, leave: bool = True) -> None:
        """Stop serving.

        Args:
            unlink: Also forget the memory.
            leave: Tell the directory; without it, the others find out by silence, as if we had died.
        """
        self._stopping.set()
        self._changed.set()
        self._wanted.set()
        if leave:
            try:
                self._directory.leave(self.config.node_id)
            except TransientError:
                pass  # it will notice the silence
        for server in self._servers:
            server.close()
        if self._network is not None:
            self._network.services.pop(self.config.node_id, None)
        for thread in self._threads:
            thread.join(timeout=5.0)
        self._peers.close()
        self.tiers.close()
        if unlink and self.config.file_prefix is not None:
            forget(self.config.file_prefix)
        self.store.close()

    def stats(self) -> dict[str, Any]:
        """What it holds and what it did, as plain values."""
        below, namespaces = self.tiers.stats(), self.namespaces.list()
        with self._lock:
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
                "memory_nodes": list(store.memory_nodes),
                "used_nbytes": store.used_nbytes,
                "lent_nbytes": store.lent_nbytes,
                "chunks": store.chunks,
                "recovered": store.recovered,
                "extents_unbacked": store.extents_unbacked,
                "located": len(self._location_index),
                "unannounced": sum(map(len, [*self._to_announce, *self._unheard])),
                "refused_connections": sum(server.refused for server in self._servers),
                "requests": dict(self._requests),
                "errors": dict(self._errors),
                "answer_times": {name: times.told() for name, times in sorted(self._times.items())},
                **asdict(store.counters),
                **below,
                "namespaces": namespaces,
            }

    def record(self, on: bool) -> tuple[list[TracedRequest], int]:
        """Have this host's clients tell of their requests, or no longer.

        Returns:
            What they told since the last call, and how many requests there was no room for.
        """
        self.store.table.recording = on
        return self.trace_buffer.take()

    @property
    def stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._stopping.is_set()

    @property
    def announced(self) -> bool:
        """Whether nothing waits to be told to owners."""
        with self._lock:
            return not (
                self._announcing
                or self._to_announce
                or self._unheard
                or self.store.has_changes
                or self.store.table.has_published
            )

    # -- Service ----------------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        return self.view.epoch

    def session(self, *, local: bool) -> NodeSession:
        return NodeSession(self, local=local)

    def answer(self, request: messages.Message, session: Session) -> Reply:
        """Serve one request; whatever goes wrong becomes a Failure."""
        assert isinstance(session, NodeSession)
        name, began_s = type(request).__name__, time.perf_counter()
        self._requests[name] += 1
        try:
            handler = self._handlers.get(type(request))
            if handler is None:
                raise UsageError(f"{name} is not a request")
            return handler(request, session)
        except RayKVError as error:
            self._errors[name] += 1
            return Reply(messages.failure(error))
        except Exception:  # a bug must not take the connection's other requests with it; it is counted and logged
            log.exception("bug while serving %s", name)
            return Reply(self._bug(name))
        finally:
            self._times[name].note(time.perf_counter() - began_s)

    def _bug(self, name: str) -> messages.Failure:
        self._errors[name] += 1
        return messages.Failure("ProtocolError", f"internal error while serving {name}; see the node's log")

    def answer_joined(self, requests: Sequence[messages.Message], session: Session) -> list[messages.Answer]:
        """Serve stores that have arrived together: as one, if that is possible."""
        assert isinstance(session, NodeSession)
        began_s = time.perf_counter()
        stores = [request for request in requests if type(request) is messages.Store]
        assert len(stores) == len(requests)
        try:
            answers = self._store_joined(stores, session)
        except Exception:  # as in `answer`
            log.exception("bug while serving Store")
            return [self._bug("Store") for _ in stores]
        if answers is None:
            return [self.answer(request, session).answer for request in stores]
        each_s = (time.perf_counter() - began_s) / len(stores)
        self._requests["Store"] += len(stores)
        for _ in stores:
            self._times["Store"].note(each_s)
        return answers

    def end_leases(self, session: NodeSession) -> None:
        """A connection is gone."""
        if self._stopping.is_set():
            return
        with self._lock:
            leased = np.array(sorted(session.reserved | session.lent), np.int32)
            self.store.abandon(leased, now_s=time.monotonic())
            self.store.unpin(np.array(list(session.pins.elements()), np.int32))
            session.reserved.clear()
            session.lent.clear()
            session.pins.clear()

    # -- requests ---------------------------------------------------------------------------------------------------

    def _attach(self, request: messages.Attach, session: NodeSession) -> Reply:
        store = self.store
        return Reply(
            messages.Attached(
                node_id=self.config.node_id,
                host=self.member.host,
                incarnation=self.member.incarnation,
                table=str(store.table.memory.path),
                arena=str(store.arena.path),
                secret=self._secret if session.local else b"",
                tiers=bool(self.tiers),
            )
        )

    def _open_namespace(self, request: messages.OpenNamespace, session: NodeSession) -> Reply:
        namespace = Namespace.load(messages.fields(request.namespace))
        with self._lock:
            self.store.groups.open(namespace, request.capacity_nbytes)
        return Reply(messages.Done())

    def _reserve(self, request: messages.Reserve, session: NodeSession) -> Reply:
        granted = self._reserve_rows(request, session)
        return Reply(granted)

    def _reserve_rows(self, request: messages.Reserve | messages.Write, session: NodeSession) -> messages.Granted:
        parent = _keys(request.parent)
        with self._lock:
            reserved = self.store.reserve(
                _keys(request.keys),
                request.nbytes,
                self.store.groups.number(request.group),
                chained=request.chained,
                parent=parent if len(parent) else None,
                depth=request.depth,
                now_s=time.monotonic(),
            )
            session.reserved.update(reserved.rows.tolist())
        return messages.Granted(
            reserved.positions.tobytes(), reserved.rows.tobytes(), reserved.offsets.tobytes(), reserved.full
        )

    def _lend(self, request: messages.Lend, session: NodeSession) -> Reply:
        if not (0 <= request.count <= messages.MAX_KEYS and 0 <= request.ahead <= messages.MAX_KEYS):
            raise UsageError(f"{request.count} and {request.ahead} slots in one request; at most {messages.MAX_KEYS:,}")
        keys, parent = _keys(request.keys), _keys(request.parent)
        with self._lock:
            loan = self.store.lend(
                request.count,
                request.nbytes,
                self.store.groups.number(request.group),
                ahead=request.ahead,
                keys=keys if len(keys) else None,
                parent=parent if len(parent) else None,
                now_s=time.monotonic(),
            )
            session.lent.update(loan.rows.tolist())
        self._stay_ahead()
        return Reply(messages.Lent(loan.rows.tobytes(), loan.offsets.tobytes()))

    def _store(self, request: messages.Store, session: NodeSession) -> Reply:
        now_s = time.monotonic()
        if request.ttl_s or request.priority:
            require_hints(request.ttl_s, request.priority)
        if len(request.keys) == chunk_keys.KEY_NBYTES and len(request.rows) == _ROW.size:
            unused = self._store_one(request, session, now_s)
        else:
            unused = self._store_run(request, session, now_s)
        answer = messages.Stored(unused)
        if request.ahead:
            self._lend_ahead(request, session, answer, now_s)
        self._stay_ahead()
        if not self._changed.is_set():
            self._changed.set()
        return Reply(answer)

    def _lend_ahead(self, request: messages.Store, session: NodeSession, answer: messages.Stored, now_s: float) -> None:
        if not 0 < request.ahead <= messages.MAX_KEYS:
            raise UsageError(f"{request.ahead} slots ahead; at most {messages.MAX_KEYS:,}")
        with self._lock:
            group = self.store.groups.number(request.group)
            loan = self.store.lend(0, request.nbytes, group, ahead=request.ahead, now_s=now_s)
            session.lent.update(loan.rows.tolist())
        answer.rows, answer.offsets = loan.rows.tobytes(), loan.offsets.tobytes()

    def _store_joined(self, requests: Sequence[messages.Store], session: NodeSession) -> list[messages.Answer] | None:
        """Stores of one chunk each that hang on no other, like one store of them all.

        Returns:
            None: they are not all that, or one of them is wrong. Nothing was stored.
        """
        first, now_s = requests[0], time.monotonic()
        sizes = chunk_keys.KEY_NBYTES, _ROW.size, _CHECKSUM.size, first.nbytes
        for each in requests:
            if (len(each.keys), len(each.rows), len(each.checksums), each.nbytes) != sizes or each.chained:
                return None
            if each.group != first.group or not 0 <= each.ahead <= messages.MAX_KEYS:
                return None
            if each.positions or each.ttl_s or each.priority:
                return None
        keys, rows, checksums = (
            b"".join([getattr(each, field) for each in requests]) for field in ("keys", "rows", "checksums")
        )
        whole = messages.Store(first.group, keys, first.nbytes, rows, checksums, chained=False)
        try:
            unused = set(np.frombuffer(self._store_run(whole, session, now_s), "<i4").tolist())
        except RayKVError:
            return None
        answers = [messages.Stored(bytes(_ROW.size) if place in unused else b"") for place in range(len(requests))]
        for each, answer in zip(requests, answers, strict=True):
            if each.ahead:
                self._lend_ahead(each, session, answer, now_s)
        self._stay_ahead()
        self._changed.set()
        return list[messages.Answer](answers)

    def _store_one(self, request: messages.Store, session: NodeSession, now_s: float) -> bytes:
        """A put of one chunk is all call and no work: no array is made for it."""
        row, store = _ROW.unpack(request.rows)[0], self.store
        if row not in session.lent or len(request.checksums) != _CHECKSUM.size or request.positions.strip(b"\0"):
            raise UsageError("a slot that is not lent to this connection, or not one checksum for it")
        with self._lock:
            used = store.store_one(
                _PAIR.unpack(request.keys),
                row,
                _CHECKSUM.unpack(request.checksums)[0],
                request.nbytes,
                store.groups.number(request.group),
                parent=_PAIR.unpack(request.parent) if len(request.parent) == _PAIR.size and request.chained else None,
                depth=request.depth if request.chained else 0,
                now_s=now_s,
                ttl_s=request.ttl_s,
                priority=request.priority,
            )
            if used:
                session.lent.discard(row)
        return b"" if used else bytes(_ROW.size)

    def _store_run(self, request: messages.Store, session: NodeSession, now_s: float) -> bytes:
        keys, rows, parent = _keys(request.keys), _array(request.rows, "<i4"), _keys(request.parent)
        if not session.lent.issuperset(rows.tolist()):
            raise UsageError("slots that are not lent to this connection (a loan ends with its connection)")
        positions = _array(request.positions, "<i4") if request.positions else np.arange(len(keys), dtype=np.int32)
        checksums = _array(request.checksums, "<u8")
        with self._lock:
            used = self.store.store(
                keys,
                positions,
                rows,
                checksums,
                request.nbytes,
                self.store.groups.number(request.group),
                chained=request.chained,
                parent=parent if len(parent) else None,
                depth=request.depth,
                now_s=now_s,
                ttl_s=request.ttl_s,
                priority=request.priority,
            )
            session.lent.difference_update(rows[used].tolist())
        return b"" if used.all() else np.flatnonzero(~used).astype(np.int32).tobytes()

    def _commit(self, request: messages.Commit, session: NodeSession) -> Reply:
        rows = _leased(request.rows, session.reserved)
        checksums = _array(request.checksums, "<u8")
        if len(rows) != len(checksums):
            raise UsageError(f"{len(rows)} rows but {len(checksums)} checksums")
        now_s = time.monotonic()
        with self._lock:
            self.store.commit(rows, checksums, now_s=now_s)
            session.reserved.difference_update(rows.tolist())
        self._stay_ahead()
        self._changed.set()
        return Reply(messages.Done())

    def _abort(self, request: messages.Abort, session: NodeSession) -> Reply:
        rows = _leased(request.rows, session.reserved | session.lent)
        with self._lock:
            self.store.abort(rows)
            session.reserved.difference_update(rows.tolist())
            session.lent.difference_update(rows.tolist())
        return Reply(messages.Done())

    def _pin(self, request: messages.Pin, session: NodeSession) -> Reply:
        keys = _keys(request.keys)
        if self.tiers:
            self.tiers.promote(keys, until_s=time.monotonic() + PROMOTE_TIMEOUT_S)
        with self._lock:
            pinned = self.store.pin(keys, now_s=time.monotonic())
            session.pins.update(pinned.rows[pinned.rows >= 0].tolist())
        return Reply(
            messages.Held(
                pinned.rows.tobytes(), pinned.offsets.tobytes(), pinned.nbytes.tobytes(), pinned.checksums.tobytes()
            )
        )

    def _unpin(self, request: messages.Unpin, session: NodeSession) -> Reply:
        rows = _array(request.rows, "<i4")
        given_back = Counter(rows[rows >= 0].tolist())
        if given_back - session.pins:
            raise UsageError("rows are not pinned by this connection")
        with self._lock:
            self.store.unpin(rows)
            session.pins -= given_back
        return Reply(messages.Done())

    def _promote(self, request: messages.Promote, session: NodeSession) -> Reply:
        until_s = time.monotonic() + min(request.timeout_s, PROMOTE_TIMEOUT_S) if request.timeout_s > 0 else 0.0
        return Reply(messages.Count(self.tiers.promote(_keys(request.keys), until_s=until_s)))

    def _delete(self, request: messages.Delete, session: NodeSession) -> Reply:
        keys = _keys(request.keys)
        with self.tiers.barring(keys):
            below = self.tiers.delete(keys)
            with self._lock:
                count = self.store.delete(keys, now_s=time.monotonic())
                self.tiers.give_up(keys)
        count = max(count, below)
        self._changed.set()
        return Reply(messages.Count(count))

    def _suspect(self, request: messages.Suspect, session: NodeSession) -> Reply:
        keys = _keys(request.keys)
        with self._lock:
            pinned = self.store.pin(keys, now_s=time.monotonic())
        wrong = self.store.spoilt(pinned)  # takes its time; the pins keep the bytes where they are meanwhile
        with self._lock:
            self.store.unpin(pinned.rows)
            count = self.store.drop_spoilt(wrong)
            self._to_announce.append(keys)
        self._changed.set()
        return Reply(messages.Count(count))

    def _locate(self, request: messages.Locate, session: NodeSession) -> Reply:
        keys = _keys(request.keys)
        found, cold = self._location_index.locate(keys), self._location_index.cold(keys)
        unknown = [place for place, holders in enumerate(found) if not holders] if self.tiers else []
        if unknown:  # what lies on a tier that all share is announced by none but its writer: the owner answers for it
            below = np.array(unknown)[self.tiers.has(keys[unknown])]
            if below.size:
                cold = np.zeros(len(keys), np.bool_) if cold is None else cold
                cold[below] = True
                for place in below.tolist():
                    found[place] = (self.config.node_id,)
        return Reply(messages.Located(*_choices(found), messages.pack_bits(cold)))

    def _located(self, keys: KeyArray) -> tuple[tuple[tuple[NodeId, ...], ...], bytes]:
        """What `messages.Located` says of keys that this node cannot send."""
        return _choices(self._location_index.locate(keys))

    def _announce(self, request: messages.Announce, session: NodeSession) -> Reply:
        self._location_index.remove(request.node_id, _keys(request.removed))
        added = _keys(request.added)
        cold = messages.unpack_bits(request.cold, len(added)) if request.cold else None
        self._location_index.add(request.node_id, added, cold)
        return Reply(messages.Done())

    def _read(self, request: messages.Read, session: NodeSession) -> Reply:
        if len(request.keys) == chunk_keys.KEY_NBYTES:
            return self._read_one(request)
        store = self.store
        if (
            0 < len(request.keys) <= LOCKED_KEYS * chunk_keys.KEY_NBYTES
            and not len(request.keys) % chunk_keys.KEY_NBYTES
        ):
            with self._lock:
                held_all = store.pin_all(request.keys, now_s=time.monotonic())
            if held_all is not None:
                all_rows, outgoing, all_lengths, all_checksums = held_all
                return Reply(
                    messages.Reading(all_lengths, all_checksums), outgoing=outgoing, finish=self._ending(all_rows)
                )
        keys = _keys(request.keys)
        rows: list[int] = []
        starts: list[int] = []
        lengths: list[int] = []
        checksums: list[int] = []
        for first in range(0, len(keys), LOCKED_KEYS):
            with self._lock:
                held = store.pin_each(keys[first : first + LOCKED_KEYS], now_s=time.monotonic())
            for into, some in zip((rows, starts, lengths, checksums), held, strict=True):
                into += some
        if self.tiers and 0 in lengths:
            self._pin_promoted(keys, rows, starts, lengths, checksums)

        answer = messages.Reading(struct.pack(f"<{len(keys)}I", *lengths), struct.pack(f"<{len(keys)}Q", *checksums))
        if request.locate and 0 in lengths:
            answer.choices, answer.places = self._located(keys[[not length for length in lengths]])
        return Reply(answer, outgoing=_runs(store.arena.view, starts, lengths), finish=self._ending(rows))

    def _ending(self, rows: Sequence[int]) -> Callable[[bool], None]:
        """Ends the holds of a read."""

        def finish(complete: bool) -> None:
            with self._lock:
                self.store.unpin_each(rows)

        return finish

    def _pin_promoted(
        self, keys: KeyArray, rows: list[int], starts: list[int], lengths: list[int], checksums: list[int]
    ) -> None:
        """Pin those too that lie below memory. They come up in steps: what has come is pinned before the rest comes."""
        lacking = [place for place, length in enumerate(lengths) if not length]
        until_s = time.monotonic() + PROMOTE_TIMEOUT_S
        for first in range(0, len(lacking), PROMOTED_KEYS):
            places = lacking[first : first + PROMOTED_KEYS]
            self.tiers.promote(keys[places], until_s=until_s)  # (What others bring up meanwhile is not counted there.)
            with self._lock:
                held = self.store.pin_each(keys[places], now_s=time.monotonic())
            for place, row, start, length, checksum in zip(places, *held, strict=True):
                rows[place], starts[place], lengths[place], checksums[place] = row, start, length, checksum

    def _read_one(self, request: messages.Read) -> Reply:
        """The same for one key, in a fraction of the time."""
        store = self.store
        hi, lo = _PAIR.unpack(request.keys)
        with self._lock:
            row, start, nbytes, checksum = store.pin_one(hi, lo, now_s=time.monotonic())
        if row < 0 and self.tiers:
            until_s = time.monotonic() + PROMOTE_TIMEOUT_S
            self.tiers.promote(_keys(request.keys), until_s=until_s)
            with self._lock:
                row, start, nbytes, checksum = store.pin_one(hi, lo, now_s=time.monotonic())
        answer = messages.Reading(_LENGTH.pack(nbytes), _CHECKSUM.pack(checksum))
        if row < 0:
            if request.locate:
                answer.choices, answer.places = self._located(_keys(request.keys))
            return Reply(answer)

        def finish(complete: bool) -> None:
            with self._lock:
                store.unpin_one(row)

        return Reply(answer, outgoing=(store.arena.view[start : start + nbytes],), finish=finish)

    def _write(self, request: messages.Write, session: NodeSession) -> Reply:
        require_hints(request.ttl_s, request.priority)
        granted = self._reserve_rows(request, session)
        rows = _array(granted.rows, "<i4")
        progress = _Writing(self.store.arena.view, _array(granted.offsets, "<u8").tolist(), request.nbytes)

        def finish(complete: bool) -> messages.Answer | None:
            checksums, intact = progress.checked(complete)
            now_s = time.monotonic()
            with self._lock:
                self.store.commit(
                    rows[intact], checksums[intact], now_s=now_s, ttl_s=request.ttl_s, priority=request.priority
                )
                self.store.abort(rows[~intact])
                session.reserved.difference_update(rows.tolist())
            self._stay_ahead()
            self._changed.set()
            return messages.Count(int(intact.sum()))

        return Reply(granted, incoming=progress.targets(), finish=finish)

    # -- about chunks and namespaces ---------------------------------------------------------------------------------

    def _why(self, request: messages.Why, session: NodeSession) -> Reply:
        keys, now_s = _keys(request.keys), time.monotonic()
        parts: list[tuple[Any, ...]] = []
        policies: list[str] = []
        for first in range(0, len(keys), LOCKED_KEYS):
            with self._lock:
                here, nbytes, went = self.store.what_of(keys[first : first + LOCKED_KEYS], now_s=now_s)
            parts.append((np.where(here, Place.DRAM, Place.NOWHERE), nbytes, *went[:3]))
            policies += went.policies
        columns = [np.concatenate(column) for column in zip(*parts, strict=True)] or [np.empty(0)] * 5
        places, sizes, reasons, tiers, when_s = columns
        self._note_below(keys, places, sizes)
        names = tuple(dict.fromkeys(policies))
        since_s = self.store.room.eviction_log.since_s
        return Reply(
            messages.Told(
                places.astype("u1").tobytes(),
                sizes.astype("<u4").tobytes(),
                reasons.astype("u1").tobytes(),
                tiers.astype("u1").tobytes(),
                np.maximum(now_s - when_s, 0.0).astype("<f4").tobytes(),
                bytes(names.index(name) for name in policies),
                bytes(map(bool, self._location_index.locate(keys))),
                names,
                None if since_s is None else now_s - since_s,
            )
        )

    def _report(self, request: messages.Report, session: NodeSession) -> Reply:
        self.namespaces.note(request.group, request.misses, request.gets, request.puts)
        return Reply(messages.Done())

    def _note_below(self, keys: KeyArray, places: npt.NDArray[Any], sizes: npt.NDArray[Any]) -> None:
        """Of what is not in memory, note what is below."""
        for tier in self.tiers.tiers:
            absent = np.flatnonzero(places == Place.NOWHERE)
            for place, found in zip(absent.tolist(), tier.find(keys[absent]), strict=True):
                if found is not None:
                    places[place], sizes[place] = Place[tier.name.upper()], found.nbytes

    def _hint(self, request: messages.Hint, session: NodeSession) -> Reply:
        require_hints(request.ttl_s, request.priority, request.output_tokens)
        with self._lock:
            count = self.store.hint(
                _keys(request.keys),
                ttl_s=request.ttl_s,
                priority=request.priority,
                ended=request.ended,
                touch=request.touch,
                output_tokens=request.output_tokens,
                now_s=time.monotonic(),
            )
        return Reply(messages.Count(count))

    def _configure(self, request: messages.Configure, session: NodeSession) -> Reply:
        namespace, fields = Namespace.load(messages.fields(request.namespace)), messages.fields(request.fields)
        if not request.drop:
            self.namespaces.require(namespace, fields)
        try:
            mine = self.namespaces.register.encode()
            register = self._directory.configure(namespace, None if request.drop else fields, mine)
        except TransientError as error:
            return Reply(messages.Configured(problem=str(error)))
        return Reply(messages.Configured(register, self._adopt_register(register, namespace.group.digest)))

    def _adopt_register(self, register: bytes, group: bytes = b"") -> int:
        """Returns how many chunks went when this quota group was dropped last, perhaps by a heartbeat just now."""
        self.namespaces.adopt(register)
        self._changed.set()
        self._stay_ahead()
        return self.namespaces.went(group)

    def _record(self, request: messages.Record, session: NodeSession) -> Reply:
        if self.store.table.recording:
            self.trace_buffer.add(request.requests)
        return Reply(messages.Done())

    def _take_record(self, request: messages.TakeRecord, session: NodeSession) -> Reply:
        if not session.local:
            raise UsageError("only processes of this host may take what its clients told")
        self.store.table.recording = request.on
        requests, left_out = self.trace_buffer.take(TAKEN_KEYS)
        return Reply(messages.Recorded(pack(requests), left_out, bool(self.trace_buffer)))

    # -- the cluster's index ------------------------------------------------------------------------------------------

    def _adopt(self, view: View) -> None:
        """Go by a newer view: forget what others own now, and announce again what has another owner."""
        me = self.config.node_id
        if me in view.ring.nodes:
            mine = view.ring.nodes.index(me)
            nodes = frozenset(view.ring.nodes)
            self._location_index.keep(nodes=nodes, owned=lambda keys: view.ring.owners(keys) == mine)
        old, self.view = self.view, view
        # What comes after this is announced by the new view anyway.
        keys = np.concatenate([self.store.ready_keys(), self.tiers.keys()])
        if view.epoch == old.epoch + 1:  # else we may have been out in between, and owners have forgotten us
            keys = keys[_owner_changed(old, view, keys)]
        with self._lock:
            self._to_announce.append(keys)
        self._changed.set()

    def _announcer(self) -> None:
        while not self._stopping.is_set():
            self._changed.wait(timeout=self.config.heartbeat_s)
            if self._changed.is_set():
                self._stopping.wait(self.config.announce_s)  # let a few more gather
            self._changed.clear()
            below = self.tiers.take_changes()
            with self._lock:
                again, self._to_announce, self._unheard = [*self._to_announce, *self._unheard], [], []
                changes = [*self.store.take_changes(), *below]
                keys = np.concatenate([chunk_keys.empty(), *changes, *again])
                self._announcing = True
            if len(keys) and not self._stopping.is_set():
                self._send_announcements(np.unique(keys, axis=0))
            self._announcing = False

    def _send_announcements(self, keys: KeyArray) -> None:
        """Tell each key's owner whether we hold it, as it is now: order and repetition do no harm."""
        view, me = self.view, self.config.node_id
        owners = view.ring.owners(keys)
        for place in np.unique(owners[owners >= 0]).tolist():
            owner = view.member(view.ring.nodes[place])
            assert owner is not None
            theirs = keys[owners == place]
            for start in range(0, len(theirs), ANNOUNCE_KEYS):
                part = theirs[start : start + ANNOUNCE_KEYS]
                here, cold = self._which_are_here(part)
                if owner.node_id == me:
                    self._location_index.remove(me, part[~here])
                    self._location_index.add(me, part[here], cold[here] if cold is not None else None)
                else:
                    self._announce_to(owner, part, here, cold)

    def _which_are_here(self, keys: KeyArray) -> tuple[Bits, Bits | None]:
        """Which are here at all, and which of these below memory only; None for none.

        Under the lock, since a reader without it may miss a key; some at a time, since writers wait for it.
        """
        parts = [np.empty(0, np.bool_)]
        for start in range(0, len(keys), LOCKED_KEYS):
            with self._lock:
                now = self.store.table.ticks(time.monotonic())
                parts.append(self.store.table.find_ready(keys[start : start + LOCKED_KEYS], now)[0] >= 0)
        here: Bits = np.concatenate(parts)
        if not self.tiers:
            return here, None
        cold = ~here & self.tiers.has(keys)
        return here | cold, cold

    def _announce_to(self, owner: Member, keys: KeyArray, here: Bits, cold: Bits | None) -> None:
        below = messages.pack_bits(cold[here]) if cold is not None else b""
        message = messages.Announce(
            self.config.node_id, chunk_keys.to_bytes(keys[here]), chunk_keys.to_bytes(keys[~here]), below
        )
        deadline_s = time.monotonic() + ANNOUNCE_DEADLINE_S

        def send(link: Link) -> None:
            link.call(message, deadline_s=deadline_s)

        try:
            self._peers.ask(owner.address, send, deadline_s=deadline_s)
        except RayKVError as error:
            self._errors["announce"] += 1
            if not isinstance(error, TransientError):  # to say it again would not help
                log.warning("%s refuses what it is told: %s", owner.node_id, str(error))
                return
            with self._lock:
                self._unheard.append(keys)
                while sum(map(len, self._unheard)) > MAX_UNANNOUNCED_KEYS:
                    self._unheard.pop(0)

    # -- pulse --------------------------------------------------------------------------------------------------------

    def _pulse(self) -> None:
        while not self._stopping.wait(self.config.heartbeat_s):
            self._beat()
            with self._lock:
                self.store.table.memory.touch()
            if self.store.sweep(self._lock, now_s=time.monotonic()):
                self._changed.set()
            self._wanted.set()

    # -- ahead of need ------------------------------------------------------------------------------------------------

    def _stay_ahead(self) -> None:
        """Wake the forerunner if there is something to do for it. Cheap: asked after every write."""
        store = self.store
        if (store.short or store.bare_extent() >= 0 or self.tiers.due) and not self._wanted.is_set():
            self._wanted.set()

    def _forerunner(self) -> None:
        """Do what writers would else have to wait for: evict, and take real memory. The long parts without the lock.

        Memory beyond what the next few puts take is taken when nothing was written for `QUIET_S`.
        """
        store, quiet = self.store, False
        written, since_s = store.written, time.monotonic()
        while not self._stopping.is_set():
            with self._lock:
                young = store.bare_extent(quiet=True) >= 0
            # What could not be had although nobody wrote is asked for again at the next pulse.
            self._wanted.wait(QUIET_S if young and not quiet else None)
            self._wanted.clear()
            if store.written != written:
                written, since_s = store.written, time.monotonic()
            quiet, busy = time.monotonic() - since_s >= QUIET_S, True
            while busy and not self._stopping.is_set():
                self.tiers.demote()
                with self._lock:
                    # What is being written down goes first; until it is there, others would have to go in its place.
                    may_wait = self.tiers.writing and not store.room.in_need
                    busy = not may_wait and store.tend(now_s=time.monotonic())
                spare = quiet and store.written == written and has_to_spare(store.config.shm_dir)
                busy = self._back_ahead(quiet=spare) or busy
                busy = busy or store.table.use_huge_pages()

    def _back_ahead(self, *, quiet: bool) -> bool:
        """Take real memory for one more extent, and for more rows, if few are left that have it. Whether there was."""
        store = self.store
        with self._lock:
            extent, rows = store.bare_extent(quiet=quiet), store.bare_rows()
        backed = extent >= 0 and store.back_extent(extent)
        more_rows = rows > 0 and store.table.back_rows(rows)
        with self._lock:
            if backed:
                store.note_backed(extent)
            if more_rows:
                store.note_rows_backed()
        return bool(backed or more_rows)  # if the file system is full, the next pulse tries again

    def _beat(self) -> None:
        try:
            view, register, version = self.view, self.namespaces.register, self.namespaces.register.version
            pulse = self._directory.beat(self.member, view.epoch, None, version)
            if pulse.tell_view or pulse.tell_register:
                pulse = self._directory.beat(
                    self.member,
                    view.epoch,
                    view if pulse.tell_view else None,
                    version,
                    register.encode() if pulse.tell_register else None,
                )
        except TransientError:
            self._errors["beat"] += 1
            return
        if pulse.view is not None and pulse.view.epoch > self.view.epoch:
            self._adopt(pulse.view)
        if pulse.register is not None:
            try:
                self._adopt_register(pulse.register)
            except RayKVError as error:  # it would be the same for the next process
                self._errors["register"] += 1
                log.error("the list of namespaces cannot be followed: %s", error)

    def _note_change(self) -> None:
        """A tier has something new to tell, or room for more."""
        self._changed.set()
        self._wanted.set()

    def _guard(self, task: Callable[[], None]) -> None:
        give_way()
        try:
            task()
        except BaseException as error:
            if not self._stopping.is_set():
                log.critical("node %s: a background task died", self.config.node_id, exc_info=True)
                self.failure = error


def _choices(found: list[tuple[NodeId, ...]]) -> tuple[tuple[tuple[NodeId, ...], ...], bytes]:
    """Holders of each key, as `messages.Located` says it."""
    choices = tuple(holders for holders in dict.fromkeys(found) if holders)
    numbers = {(): -1, **{holders: number for number, holders in enumerate(choices)}}
    places = struct.pack(f"<{len(found)}i", *map(numbers.__getitem__, found))
    return tuple([holders[-messages.MAX_HOLDERS :] for holders in choices]), places


def _owner_changed(old: View, new: View, keys: KeyArray) -> Bits:
    """Which keys have another owner in the new view, or the same node in another life: it knows nothing of them."""
    if not old.members or not new.members:
        return np.full(len(keys), bool(new.members))
    before, after = (_owner_lives(view, keys) for view in (old, new))
    changed: Bits = before != after
    return changed


def _owner_lives(view: View, keys: KeyArray) -> npt.NDArray[np.int64]:
    """Incarnation of each key's owner. No two nodes have the same: it is the time of their start in nanoseconds."""
    lives = {member.node_id: member.incarnation for member in view.members}
    return np.array([lives[name] for name in view.ring.nodes], np.int64)[view.ring.owners(keys)]


def _keys(raw: bytes) -> KeyArray:
    if len(raw) > messages.MAX_KEYS * chunk_keys.KEY_NBYTES:
        raise UsageError(f"{len(raw) // chunk_keys.KEY_NBYTES:,} keys in one request; at most {messages.MAX_KEYS:,}")
    return chunk_keys.from_bytes(raw)


class _Writing:
    """Chunks of one size that arrive in slots of the arena, with their checksums behind them.

    Each is hashed as it arrives. What did not arrive in full fails its checksum; nobody but this connection writes to
    these slots.
    """

    def __init__(self, view: memoryview, starts: list[int], nbytes: int) -> None:
        self._told = bytearray(8 * len(starts))
        several = max(1, STEP_NBYTES // nbytes)
        self._runs = [
            ChunkRun([[view[start : start + nbytes]] for start in some], [nbytes] * len(some))
            for some in (starts[first : first + several] for first in range(0, len(starts), several))
        ]

    def targets(self) -> Targets:
        """Where the bytes go."""
        return [*self._runs, (memoryview(self._told),)]

    def checked(self, complete: bool) -> tuple[npt.NDArray[np.uint64], Bits]:
        """Checksums of the chunks, and which of them are what was sent, if it was all of it."""
        told = np.frombuffer(self._told, "<u8")
        if not complete:
            return told, np.zeros(len(told), np.bool_)
        found = b"".join(run.checksums + checksums_of(run.chunks[len(run.checksums) // 8 :]) for run in self._runs)
        checksums = np.frombuffer(found, "<u8")
        return checksums, checksums == told


def _runs(view: memoryview, starts: Sequence[int], lengths: Sequence[int]) -> list[memoryview]:
    """The chunks of the arena that begin and are so long, in order; neighbours become one run."""
    runs: list[memoryview] = []
    first = end = -1
    for start, length in zip(starts, lengths, strict=True):
        if length:
            if start != end:
                if end > first:
                    runs.append(view[first:end])
                first = start
            end = start + length
    if end > first:
        runs.append(view[first:end])
    return runs


def _array(raw: bytes, kind: str) -> npt.NDArray[Any]:
    if len(raw) % np.dtype(kind).itemsize:
        raise UsageError(f"{len(raw)} bytes are not a whole number of {kind}")
    return np.frombuffer(raw, kind)


def _leased(raw: bytes, leases: set[int]) -> Rows:
    rows = _array(raw, "<i4")
    values = set(rows.tolist())
    if len(values) != len(rows) or not values <= leases:
        raise UsageError("rows are not reserved by this connection (a reservation ends with its connection)")
    return rows
