"""A node: one shard, its sockets, its part of the cluster's index, and its pulse.

All changes of the shard happen under one lock, whichever connection asks; chunk bytes never move under it. Two
background threads: the announcer tells owners what came and went, the pulse tells the directory that we live. If
either dies of a bug, `failure` is set and the actor around the node ends, visibly.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from raykv import keys as keys_
from raykv import wire
from raykv.config import GIB, NodeConfig
from raykv.directory import DirectoryPort
from raykv.errors import ConfigError, RayKVError, TransientError, UsageError
from raykv.locator import Locator
from raykv.memory.copying import checksum_of
from raykv.namespace import Namespace
from raykv.ring import Member, View
from raykv.shard import Shard, remove_files
from raykv.transport.base import Link, Reply, Session
from raykv.transport.memory import Network
from raykv.transport.peers import Peers
from raykv.transport.tcp import SocketLink, SocketServer
from raykv.types import Bits, KeyArray, Rows, host_identity

log = logging.getLogger(__name__)

ANNOUNCE_KEYS: Final = 1 << 16
"""Keys in one announcement."""
MAX_UNANNOUNCED_KEYS: Final = 1 << 20
"""Keys kept for owners that do not answer; beyond it the oldest are forgotten (they cost a miss, no more)."""
ANNOUNCE_DEADLINE_S: Final = 5.0
UNIX_PATH_MAX: Final = 107


class NodeSession:
    """The leases of one connection: rows it is writing, and pins it holds."""

    def __init__(self, node: "Node", *, local: bool) -> None:
        self._node = node
        self.local = local
        self.reserved: set[int] = set()
        self.pins: Counter[int] = Counter()

    def close(self) -> None:
        """Give everything back."""
        self._node.end_leases(self)


class Node:
    """One storage node. Thread-safe.

    Attributes:
        config: As given.
        shard: Its storage.
        member: How others see it; known after `start`.
        view: The newest view it has heard of.
        failure: The bug that ended a background thread, if one did.
    """

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
        self.shard = Shard.open(config.storage, config.file_prefix, now_s=time.monotonic())
        self.view = View()
        self.failure: BaseException | None = None
        self._lock = threading.Lock()
        self._locator = Locator(config.max_locations)
        self._requests: Counter[str] = Counter()
        self._errors: Counter[str] = Counter()
        self._to_announce: list[KeyArray] = []
        self._announcing = False
        self._stopping = threading.Event()
        self._changed = threading.Event()
        connect = network.connect if network is not None else SocketLink.connect
        self._peers = Peers(connect, secret, breaker_s=config.heartbeat_s, max_idle=2)
        self._servers: list[SocketServer] = []
        self._threads: list[threading.Thread] = []
        self._handlers: dict[type[wire.Message], Callable[[Any, NodeSession], Reply]] = {
            wire.Attach: self._attach,
            wire.GetView: lambda request, session: Reply(wire.ViewIs(self.view)),
            wire.OpenNamespace: self._open_namespace,
            wire.Reserve: self._reserve,
            wire.Commit: self._commit,
            wire.Abort: self._abort,
            wire.Pin: self._pin,
            wire.Unpin: self._unpin,
            wire.Delete: self._delete,
            wire.Suspect: self._suspect,
            wire.Locate: self._locate,
            wire.Announce: self._announce,
            wire.Read: self._read,
            wire.Write: self._write,
            wire.GetStats: lambda request, session: Reply(wire.Stats(msgspec.json.encode(self.stats()))),
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
            self._network.services[address] = self
        self.member = Member(
            node_id=config.node_id,
            host=config.host or host_identity(),
            address=address,
            local_address=local_address,
            weight=config.weight or config.storage.arena_nbytes / GIB,
            incarnation=time.time_ns(),
        )
        self._beat()
        for task in (self._pulse, self._announcer):
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
        prefix = self.config.file_prefix
        if unlink and prefix is not None:
            remove_files(prefix)
            prefix.with_name(prefix.name + ".sock").unlink(missing_ok=True)
        self.shard.close()

    def stats(self) -> dict[str, Any]:
        """What it holds and what it did, as plain values."""
        with self._lock:
            shard = self.shard
            return {
                "node_id": self.config.node_id,
                "host": self.member.host,
                "address": self.member.address,
                "local_address": self.member.local_address,
                "incarnation": self.member.incarnation,
                "epoch": self.view.epoch,
                "arena_nbytes": shard.arena.nbytes,
                "used_nbytes": shard.used_nbytes,
                "chunks": shard.chunks,
                "recovered": shard.recovered,
                "extents_unbacked": shard.extents_unbacked,
                "located": len(self._locator),
                "unannounced": sum(map(len, self._to_announce)),
                "refused_connections": sum(server.refused for server in self._servers),
                "requests": dict(self._requests),
                "errors": dict(self._errors),
                **asdict(shard.counters),
            }

    @property
    def stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._stopping.is_set()

    @property
    def announced(self) -> bool:
        """Whether nothing waits to be told to owners."""
        with self._lock:
            return not (self._announcing or self._to_announce or self.shard.has_changes)

    # -- Service ----------------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        return self.view.epoch

    def session(self, *, local: bool) -> NodeSession:
        return NodeSession(self, local=local)

    def answer(self, request: wire.Message, session: Session) -> Reply:
        """Serve one request; whatever goes wrong becomes a Failure."""
        assert isinstance(session, NodeSession)
        name = type(request).__name__
        self._requests[name] += 1
        try:
            handler = self._handlers.get(type(request))
            if handler is None:
                raise UsageError(f"{name} is not a request")
            return handler(request, session)
        except RayKVError as error:
            self._errors[name] += 1
            return Reply(wire.failure(error))
        except Exception:  # a bug must not take the connection's other requests with it; it is counted and logged
            self._errors[name] += 1
            log.exception("bug while serving %s", name)
            return Reply(wire.Failure("ProtocolError", f"internal error while serving {name}; see the node's log"))

    def end_leases(self, session: NodeSession) -> None:
        """A connection is gone."""
        if self._stopping.is_set():
            return
        with self._lock:
            self.shard.abandon(np.array(sorted(session.reserved), np.int32), now_s=time.monotonic())
            self.shard.unpin(np.array(list(session.pins.elements()), np.int32))
            session.reserved.clear()
            session.pins.clear()

    # -- requests ---------------------------------------------------------------------------------------------------

    def _attach(self, request: wire.Attach, session: NodeSession) -> Reply:
        shard = self.shard
        return Reply(
            wire.Attached(
                node_id=self.config.node_id,
                host=self.member.host,
                incarnation=self.member.incarnation,
                table=str(shard.table.memory.path),
                arena=str(shard.arena.path),
                secret=self._secret if session.local else b"",
            )
        )

    def _open_namespace(self, request: wire.OpenNamespace, session: NodeSession) -> Reply:
        try:
            fields = msgspec.json.decode(request.namespace, type=dict[str, Any])
        except msgspec.MsgspecError as error:
            raise UsageError(f"namespace: {error}") from error
        with self._lock:
            self.shard.open_account(Namespace.load(fields), request.capacity_nbytes)
        return Reply(wire.Done())

    def _reserve(self, request: wire.Reserve, session: NodeSession) -> Reply:
        granted = self._reserve_rows(request, session)
        return Reply(granted)

    def _reserve_rows(self, request: wire.Reserve | wire.Write, session: NodeSession) -> wire.Granted:
        parent = _keys(request.parent)
        with self._lock:
            reserved = self.shard.reserve(
                _keys(request.keys),
                request.nbytes,
                self.shard.account(request.account),
                chained=request.chained,
                parent=parent if len(parent) else None,
                depth=request.depth,
                now_s=time.monotonic(),
            )
            session.reserved.update(reserved.rows.tolist())
        return wire.Granted(
            reserved.positions.tobytes(), reserved.rows.tobytes(), reserved.offsets.tobytes(), reserved.full
        )

    def _commit(self, request: wire.Commit, session: NodeSession) -> Reply:
        rows = _leased(request.rows, session)
        checksums = _array(request.checksums, "<u8")
        if len(rows) != len(checksums):
            raise UsageError(f"{len(rows)} rows but {len(checksums)} checksums")
        now_s = time.monotonic()
        with self._lock:
            self.shard.commit(rows, checksums, now_s=now_s)
            session.reserved.difference_update(rows.tolist())
            self.shard.tend(now_s=now_s)
        self._changed.set()
        return Reply(wire.Done())

    def _abort(self, request: wire.Abort, session: NodeSession) -> Reply:
        rows = _leased(request.rows, session)
        with self._lock:
            self.shard.abort(rows)
            session.reserved.difference_update(rows.tolist())
        return Reply(wire.Done())

    def _pin(self, request: wire.Pin, session: NodeSession) -> Reply:
        with self._lock:
            pinned = self.shard.pin(_keys(request.keys), now_s=time.monotonic())
            session.pins.update(pinned.rows[pinned.rows >= 0].tolist())
        return Reply(
            wire.Held(
                pinned.rows.tobytes(), pinned.offsets.tobytes(), pinned.nbytes.tobytes(), pinned.checksums.tobytes()
            )
        )

    def _unpin(self, request: wire.Unpin, session: NodeSession) -> Reply:
        rows = _array(request.rows, "<i4")
        given_back = Counter(rows[rows >= 0].tolist())
        if given_back - session.pins:
            raise UsageError("rows are not pinned by this connection")
        with self._lock:
            self.shard.unpin(rows)
            session.pins -= given_back
        return Reply(wire.Done())

    def _delete(self, request: wire.Delete, session: NodeSession) -> Reply:
        with self._lock:
            count = self.shard.delete(_keys(request.keys))
        self._changed.set()
        return Reply(wire.Count(count))

    def _suspect(self, request: wire.Suspect, session: NodeSession) -> Reply:
        keys = _keys(request.keys)
        with self._lock:
            count = self.shard.verify(keys, now_s=time.monotonic())
            self._to_announce.append(keys)
        self._changed.set()
        return Reply(wire.Count(count))

    def _locate(self, request: wire.Locate, session: NodeSession) -> Reply:
        keys = _keys(request.keys)
        found = self._locator.locate(keys)
        names = tuple({holders[0]: None for holders in found if holders})
        number = {name: place for place, name in enumerate(names)}
        places = np.array([number[holders[0]] if holders else -1 for holders in found], np.int16)
        return Reply(wire.Located(names, places.tobytes()))

    def _announce(self, request: wire.Announce, session: NodeSession) -> Reply:
        self._locator.remove(request.node_id, _keys(request.removed))
        self._locator.add(request.node_id, _keys(request.added))
        return Reply(wire.Done())

    def _read(self, request: wire.Read, session: NodeSession) -> Reply:
        keys = _keys(request.keys)
        with self._lock:
            pinned = self.shard.pin(keys, now_s=time.monotonic())
        rows = pinned.rows[pinned.rows >= 0]
        here = pinned.rows >= 0
        nbytes = np.where(here, pinned.nbytes, 0).astype(np.uint32)
        view = self.shard.arena.view
        pieces = [
            view[start : start + length]
            for start, length in zip(pinned.offsets[here].tolist(), pinned.nbytes[here].tolist(), strict=True)
        ]

        def finish(complete: bool) -> None:
            with self._lock:
                self.shard.unpin(rows)

        return Reply(wire.Reading(nbytes.tobytes(), pinned.checksums.tobytes()), outgoing=pieces, finish=finish)

    def _write(self, request: wire.Write, session: NodeSession) -> Reply:
        checksums = _array(request.checksums, "<u8")
        if len(checksums) != len(_keys(request.keys)):
            raise UsageError(f"{len(_keys(request.keys))} keys but {len(checksums)} checksums")
        granted = self._reserve_rows(request, session)
        rows = _array(granted.rows, "<i4")
        wanted = checksums[_array(granted.positions, "<i4")]
        view = self.shard.arena.view
        pieces = [view[start : start + request.nbytes] for start in _array(granted.offsets, "<u8").tolist()]

        def finish(complete: bool) -> wire.Answer | None:
            # What did not arrive in full fails its checksum; nobody but this connection was writing to these slots.
            intact = np.array([checksum_of([piece]) for piece in pieces], np.uint64) == wanted
            intact &= complete
            now_s = time.monotonic()
            with self._lock:
                self.shard.commit(rows[intact], wanted[intact], now_s=now_s)
                self.shard.abort(rows[~intact])
                session.reserved.difference_update(rows.tolist())
                self.shard.tend(now_s=now_s)
            self._changed.set()
            return wire.Count(int(intact.sum()))

        return Reply(granted, incoming=pieces, finish=finish)

    # -- the cluster's index ------------------------------------------------------------------------------------------

    def _adopt(self, view: View) -> None:
        """Go by a newer view: forget what others own now, and announce again what has another owner."""
        me = self.config.node_id
        if me in view.ring.nodes:
            mine = view.ring.nodes.index(me)
            nodes = frozenset(view.ring.nodes)
            self._locator.keep(nodes=nodes, owned=lambda keys: view.ring.owners(keys) == mine)
        with self._lock:
            old, self.view = self.view, view
            keys = self.shard.ready_keys()
            self._to_announce.append(keys[_owner_changed(old, view, keys)])
        self._changed.set()

    def _announcer(self) -> None:
        while not self._stopping.is_set():
            self._changed.wait(timeout=self.config.heartbeat_s)
            if self._changed.is_set():
                self._stopping.wait(self.config.announce_s)  # let a few more gather
            self._changed.clear()
            with self._lock:
                again, self._to_announce = self._to_announce, []
                keys = np.concatenate([keys_.empty(), *self.shard.take_changes(), *again])
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
                with self._lock:
                    here = self.shard.table.find_ready(part, self.shard.table.ticks(time.monotonic()))[0] >= 0
                if owner.node_id == me:
                    self._locator.remove(me, part[~here])
                    self._locator.add(me, part[here])
                else:
                    self._announce_to(owner, part, here)

    def _announce_to(self, owner: Member, keys: KeyArray, here: Bits) -> None:
        message = wire.Announce(self.config.node_id, keys_.to_bytes(keys[here]), keys_.to_bytes(keys[~here]))
        deadline_s = time.monotonic() + ANNOUNCE_DEADLINE_S

        def send(link: Link) -> None:
            link.call(message, deadline_s=deadline_s)

        try:
            self._peers.ask(owner.address, send, deadline_s=deadline_s)
        except TransientError:
            self._errors["announce"] += 1
            with self._lock:
                self._to_announce.append(keys)
                while sum(map(len, self._to_announce)) > MAX_UNANNOUNCED_KEYS:
                    self._to_announce.pop(0)

    # -- pulse --------------------------------------------------------------------------------------------------------

    def _pulse(self) -> None:
        while not self._stopping.wait(self.config.heartbeat_s):
            self._beat()
            with self._lock:
                self.shard.table.memory.touch()
                self.shard.tend(now_s=time.monotonic())

    def _beat(self) -> None:
        try:
            pulse = self._directory.beat(self.member, self.view.epoch)
            if pulse.tell_view:
                pulse = self._directory.beat(self.member, self.view.epoch, self.view)
        except TransientError:
            self._errors["beat"] += 1
            return
        if pulse.view is not None and pulse.view.epoch > self.view.epoch:
            self._adopt(pulse.view)

    def _guard(self, task: Callable[[], None]) -> None:
        try:
            task()
        except BaseException as error:
            if not self._stopping.is_set():
                log.critical("node %s: a background task died", self.config.node_id, exc_info=True)
                self.failure = error


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
    if len(raw) > wire.MAX_KEYS * keys_.KEY_NBYTES:
        raise UsageError(f"{len(raw) // keys_.KEY_NBYTES:,} keys in one request; at most {wire.MAX_KEYS:,}")
    return keys_.from_bytes(raw)


def _array(raw: bytes, kind: str) -> npt.NDArray[Any]:
    if len(raw) % np.dtype(kind).itemsize:
        raise UsageError(f"{len(raw)} bytes are not a whole number of {kind}")
    return np.frombuffer(raw, kind)


def _leased(raw: bytes, session: NodeSession) -> Rows:
    rows = _array(raw, "<i4")
    values = set(rows.tolist())
    if len(values) != len(rows) or not values <= session.reserved:
        raise UsageError("rows are not reserved by this connection (a reservation ends with its connection)")
    return rows
