"""Data paths: the ways to read chunks from a node, and to write chunks to it. `DataPaths` chooses one for each node."""

import importlib
import logging
import time
from collections.abc import Callable, Collection, Iterable
from typing import Any, Final, NamedTuple, Protocol

from raykv.errors import LostError, TransientError
from raykv.memory.copying import CopyThreads
from raykv.memory.reader import ONE_THREAD, ShmReader
from raykv.protocol import messages
from raykv.protocol.codec import expect
from raykv.protocol.placement import Member
from raykv.transport import nixl, rdma
from raykv.transport.bulk_read import BulkRead, ReadRun
from raykv.transport.bulk_write import BulkWrite
from raykv.transport.pool import ConnectionPool
from raykv.transport.striped_read import StripedReads
from raykv.types import NodeId

log = logging.getLogger(__name__)

PROMOTE_NBYTES: Final = 16 << 20
"""To promote a chunk is to copy it from an SSD or file to memory. One request asks a node to promote chunks of at most
this many bytes in total, or one larger chunk. A reader copies the chunks of one request while the node promotes the
chunks of the next request."""
PROMOTE_SLACK_S: Final = 0.05
"""A node may promote chunks until this many seconds before the deadline. The remaining time is for the copies."""


class DataPath(Protocol):
    """One way to move chunks between this process and members (nodes). Thread-safe.

    Attributes:
        name: The path's name, such as "shm" or "tcp".
        writes: Whether the path can write, too.
    """

    name: str
    writes: bool = False

    def can_reach(self, member: Member, *, deadline_s: float) -> bool:
        """Return whether this path can reach a member. Raises nothing.

        The first call for a member may connect to the member. If the member does not answer, the result is False.
        """
        ...

    def read(self, member: Member, run: ReadRun, *, deadline_s: float) -> None:
        """Read the chunks of a run, and record the outcome in the run.

        When this method has returned or raised, nothing writes to the buffers any more.

        Raises:
            RayKVError: The member does not answer, or refuses. The outcome in the run is valid in this case too.
        """
        ...

    def write(self, member: Member, write: BulkWrite, *, deadline_s: float) -> int:
        """Write chunks to a member. Only paths with `writes` are called.

        Returns:
            The number of chunks that the member has stored; see also the attributes of `write`.

        Raises:
            RayKVError: The member does not answer, or refuses.
        """
        raise NotImplementedError

    def stats(self) -> dict[str, Any]:
        """Return the path's state, for people: what has failed, and why. Empty: nothing to tell."""
        return {}

    def retain(self, members: Collection[Member]) -> None:
        """Release all resources, except those for the current processes of `members`. Reads in progress continue."""
        return

    def close(self) -> None:
        """Release all resources. The path cannot be used any more."""
        return


class DataPaths:
    """The data paths of one client or node, in order of preference."""

    def __init__(self, paths: Iterable[DataPath]) -> None:
        self._paths = tuple(paths)

    def prefer(self, path: DataPath) -> None:
        """Prefer a further path to all others."""
        self._paths = (path, *self._paths)

    def choose(self, member: Member, *, deadline_s: float, writes: bool = False) -> DataPath:
        """Return the first path that can reach a member; with `writes`, the first that can also write.

        Raises:
            TransientError: No path can.
        """
        for path in self._paths:
            if (path.writes or not writes) and path.can_reach(member, deadline_s=deadline_s):
                return path
        tried, offered = (", ".join(names) or "none" for names in ([p.name for p in self._paths], member.endpoints))
        raise TransientError(f"no data path ({tried}) leads to {member.node_id!r}; its endpoints: {offered}")

    def stats(self) -> dict[str, dict[str, Any]]:
        """Return the state of each path."""
        return {path.name: path.stats() for path in self._paths}

    def retain(self, members: Collection[Member]) -> None:
        """Release all resources, except those for `members`; see `DataPath.retain`."""
        for path in self._paths:
            path.retain(members)

    def close(self) -> None:
        """Close all paths."""
        for path in self._paths:
            path.close()


class PathEnvironment(NamedTuple):
    """The parameters that a client or a node passes to each data path that it opens.

    Attributes:
        pool: Links for requests to nodes. The caller closes the pool.
        host: Identity of the caller's host.
        verify: "always": compare all checksums. "remote": compare only checksums of reads over links. "never": compare
            no checksums.
        threads: Threads for large copies.
        rdma: Names of the RDMA devices to use; empty for all. None: no RDMA.
        sources: The reader's IPv4 addresses for large reads over TCP; empty: the routing table chooses. None: each node
            is read over one of its NICs.
        nixl: Names of the backends of NIXL; empty: no NIXL.
    """

    pool: ConnectionPool
    host: str
    verify: str = "remote"
    threads: CopyThreads = ONE_THREAD
    rdma: tuple[str, ...] | None = ()
    sources: tuple[str, ...] | None = ()
    nixl: tuple[str, ...] = ()


class LinkPath(DataPath):
    """Reads and writes over the TCP links of a pool. Large reads use all NICs that are named."""

    name, writes = "tcp", True

    def __init__(self, environment: PathEnvironment) -> None:
        self._pool, self._verify = environment.pool, environment.verify != "never"
        self._striped = StripedReads(self._pool, environment.sources, verify=self._verify)

    def can_reach(self, member: Member, *, deadline_s: float) -> bool:
        return bool(member.address)

    def read(self, member: Member, run: ReadRun, *, deadline_s: float) -> None:
        if (rails := self._striped.rails_to(member)) is not None:
            self._striped.read(member, rails, run, deadline_s=deadline_s)
            return
        bulk, before = BulkRead(run, verify=self._verify), len(run.arrived)
        self._pool.ask(
            member.address,
            lambda link: bulk.read(link, deadline_s=deadline_s),
            deadline_s=deadline_s,
            arrived_nbytes=lambda: run.progress.nbytes(run.arrived[before:]),
        )

    def write(self, member: Member, write: BulkWrite, *, deadline_s: float) -> int:
        return self._pool.ask(
            member.address, lambda link: write.send(link, deadline_s=deadline_s), deadline_s=deadline_s
        )

    def stats(self) -> dict[str, Any]:
        rails = self._striped.stats()
        return {"rails": rails} if rails else {}

    def retain(self, members: Collection[Member]) -> None:
        self._striped.retain(members)

    def close(self) -> None:
        self._striped.close()


class ShmPath(DataPath):
    """Copies from the shared memory of nodes on this host. The memory of a node is mapped at the first use.

    The path sends requests to a node only to attach to it, to promote chunks, and to report corrupt chunks.
    """

    name = "shm"

    def __init__(self, environment: PathEnvironment) -> None:
        self._pool, self._host, self._threads = environment.pool, environment.host, environment.threads
        self._verify = environment.verify == "always"
        self._readers: dict[tuple[NodeId, int], ShmReader | None] = {}  # None: the memory cannot be mapped
        self._tiered: set[tuple[NodeId, int]] = set()  # nodes (with their incarnations) that have tiers below memory

    def can_reach(self, member: Member, *, deadline_s: float) -> bool:
        return member.host == self._host and self._reader(member, deadline_s) is not None

    def read(self, member: Member, run: ReadRun, *, deadline_s: float) -> None:
        reader = self._reader(member, deadline_s)
        if reader is None:
            raise LostError(f"the memory of {member.node_id!r} cannot be mapped here")
        run.begin("shm")
        absent = self._copy(reader, run, run.missing)
        if not run.locate:  # with `locate`, nothing is promoted: the caller looks up the holders
            if absent and (member.node_id, member.incarnation) in self._tiered:
                absent = self._promote(member, reader, run, absent, deadline_s)
            run.gone = absent
        if run.corrupt:
            self._call(member, messages.Suspect(run.progress.raw_keys(sorted(run.corrupt))), deadline_s)

    def _copy(self, reader: ShmReader, run: ReadRun, places: list[int]) -> list[int]:
        """Copy the chunks at `places` into their buffers. Returns the indices of the chunks that are not in memory."""
        progress, now_s = run.progress, time.monotonic()
        keys, targets = progress.keys[places], progress.targets_at(places)
        hits, _ = reader.read(keys, targets, verify=self._verify, now_s=now_s, threads=self._threads)
        if hits.all():
            run.arrived += places
            return []
        absent: list[int] = []
        lengths = reader.lengths(keys, now_s=now_s)
        for place, hit, length in zip(places, hits.tolist(), lengths.tolist(), strict=True):
            if hit:
                run.arrived.append(place)
            elif not length:
                absent.append(place)
            elif length != progress.sizes[place]:
                run.other_size.append(place)
            elif self._verify:  # the chunk is corrupt, or was replaced during the copy; the node checks which is true
                run.corrupt.append(place)
        return absent

    def _promote(
        self, member: Member, reader: ShmReader, run: ReadRun, places: list[int], deadline_s: float
    ) -> list[int]:
        """Ask a node to promote chunks, part by part. Copy each part while the node promotes the next one.

        Returns:
            Indices of the chunks that were not promoted.
        """
        progress = run.progress
        parts = progress.cut(places, nbytes=PROMOTE_NBYTES, keys=messages.MAX_KEYS)
        absent: list[int] = []

        def promote(part: list[int], timeout_s: float) -> None:
            request = messages.Promote(progress.raw_keys(part), timeout_s, group=progress.group)
            self._call(member, request, deadline_s)

        if len(parts) > 1:
            promote(parts[0], 0.0)
        for number, part in enumerate(parts, start=1):
            if number < len(parts):
                promote(parts[number], 0.0)
            promote(part, max(1e-3, deadline_s - time.monotonic() - PROMOTE_SLACK_S))
            absent += self._copy(reader, run, part)
        return absent

    def _call(self, member: Member, request: messages.Message, deadline_s: float) -> messages.Answer:
        """Send a request over a pooled link to a node's Unix socket.

        Writers do not wait for this request, because they use other links.
        """
        address = member.endpoints["unix"]
        return self._pool.ask(address, lambda link: link.call(request, deadline_s=deadline_s), deadline_s=deadline_s)

    def _reader(self, member: Member, deadline_s: float) -> ShmReader | None:
        """Return a reader of a member's memory, or None if the memory cannot be mapped.

        The memory is mapped at the first call for each incarnation of the member.
        """
        life = member.node_id, member.incarnation
        if life not in self._readers:
            reader = None
            try:
                attached = expect(messages.Attached, self._call(member, messages.Attach(), deadline_s))
                if attached.tiers:
                    self._tiered.add(life)
                reader = ShmReader(attached.table, attached.arena, writable=False)
            except (TransientError, KeyError):
                return None  # the next call tries again
            except LostError:
                pass  # the node's files are not visible in this container
            self._readers[life] = reader
            return reader
        return self._readers.get(life)

    def retain(self, members: Collection[Member]) -> None:
        """Drop the readers of all nodes that are not in `members`.

        These readers are not closed, because a thread may still copy. Garbage collection unmaps their memory.
        """
        lives = {(member.node_id, member.incarnation) for member in members}
        self._readers = {life: reader for life, reader in list(self._readers.items()) if life in lives}
        self._tiered &= lives

    def close(self) -> None:
        for reader in self._readers.values():
            if reader is not None:
                reader.close()
        self._readers = {}


def _open_rdma(environment: PathEnvironment) -> DataPath | None:
    if environment.rdma is None or rdma.missing():
        return None
    try:
        module = importlib.import_module("raykv.transport.rdma.path")
    except ImportError as error:  # pyverbs does not match the host's libibverbs
        log.warning("other hosts are read over TCP, because pyverbs cannot be imported: %s", error)
        return None
    path: DataPath = module.RdmaPath(environment)
    return path


def _open_nixl(environment: PathEnvironment) -> DataPath | None:
    if not environment.nixl:
        return None
    if reason := nixl.missing():
        log.warning("other hosts are not read over NIXL: %s", reason)
        return None
    module = importlib.import_module("raykv.transport.nixl.path")
    path: DataPath | None = module.open_path(environment)
    return path


_openers: Final[dict[str, Callable[[PathEnvironment], DataPath | None]]] = {}


def register_data_path(name: str, opener: Callable[[PathEnvironment], DataPath | None]) -> None:
    """Make a data path available to readers that are opened later.

    A path with a new name is preferred to all earlier paths. If the name is registered already, its opener is replaced.
    An opener returns None if the path cannot be used on this host.
    """
    _openers[name] = opener


def open_data_paths(environment: PathEnvironment) -> DataPaths:
    """Open all registered paths. The path that was registered last is preferred."""
    opened = (opener(environment) for opener in reversed(_openers.values()))
    return DataPaths(path for path in opened if path is not None)


register_data_path("tcp", LinkPath)
register_data_path("rdma", _open_rdma)
register_data_path("nixl", _open_nixl)
register_data_path("shm", ShmPath)
