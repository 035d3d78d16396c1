"""The ways by which chunk bytes get from a node to a reader, and the one place that chooses between them.

A data path knows which members it leads to, and reads a run of chunks from one of them. `DataPaths` holds the paths in
order of preference; the first one that leads to a member is used.
"""

import threading
import time
from collections.abc import Callable, Collection, Iterable
from typing import Final, NamedTuple, Protocol

from raykv.errors import LostError, TransientError
from raykv.memory.copying import CopyThreads
from raykv.memory.reader import ONE_THREAD, ShmReader
from raykv.protocol import messages
from raykv.protocol.codec import expect
from raykv.protocol.placement import Member
from raykv.transport.bulk_read import BulkRead, ReadRun
from raykv.transport.forking import drop_after_fork
from raykv.transport.pool import ConnectionPool
from raykv.types import NodeId

PROMOTE_NBYTES: Final = 16 << 20
"""A node on this host is asked to bring this much into its memory at once: one part is read while the next comes."""
PROMOTE_SLACK_S: Final = 0.05
"""Time of a call that is left, after a promotion, to read what was promoted."""


class DataPath(Protocol):
    """One way to read chunks from members. Thread-safe.

    Attributes:
        name: Its name among the paths, such as "shm" or "tcp".
    """

    name: str

    def can_reach(self, member: Member, *, deadline_s: float) -> bool:
        """Whether this path leads to a member. The first call for a member may connect to it.

        Raises nothing: a member that does not answer cannot be reached.
        """
        ...

    def read(self, member: Member, run: ReadRun, *, deadline_s: float) -> None:
        """Read the chunks of a run, and fill in its outcome. When this returns, nobody writes to the buffers any more.

        Raises:
            RayKVError: The member does not answer, or refuses. What the run says is right all the same.
        """
        ...

    def retain(self, members: Collection[Member]) -> None:
        """Release what belongs to other members, or to earlier lives of these. Reads in progress go on."""
        ...

    def close(self) -> None:
        """Release everything. Nothing may be read any more."""
        ...


class DataPaths:
    """The paths of one reader, in order of preference."""

    def __init__(self, paths: Iterable[DataPath]) -> None:
        """Hold these paths; of two with the same name the later one counts."""
        self._by_name = {path.name: path for path in paths}

    def __getitem__(self, name: str) -> DataPath:
        return self._by_name[name]

    def choose(self, member: Member, *, deadline_s: float) -> DataPath:
        """Return the first path that leads to a member.

        Raises:
            TransientError: None does.
        """
        for path in self._by_name.values():
            if path.can_reach(member, deadline_s=deadline_s):
                return path
        raise TransientError(
            f"no data path ({', '.join(self._by_name)}) leads to {member.node_id!r}, "
            f"which listens on {', '.join(member.endpoints) or 'nothing'}"
        )

    def retain(self, members: Collection[Member]) -> None:
        """See `DataPath.retain`."""
        for path in self._by_name.values():
            path.retain(members)

    def close(self) -> None:
        """Close all paths."""
        for path in self._by_name.values():
            path.close()


class LinkPath(DataPath):
    """Reads over the links of a pool: TCP, or the in-process network."""

    def __init__(self, pool: ConnectionPool, *, verify: bool = True, name: str = "tcp") -> None:
        """Use the links of a pool, which stays the caller's.

        Args:
            verify: Compare checksums.
            name: Also the key of the member's endpoint.
        """
        self.name = name
        self._pool, self._verify = pool, verify

    def can_reach(self, member: Member, *, deadline_s: float) -> bool:
        return self.name in member.endpoints

    def read(self, member: Member, run: ReadRun, *, deadline_s: float) -> None:
        bulk = BulkRead(run, verify=self._verify)
        address = member.endpoints[self.name]
        self._pool.ask(address, lambda link: bulk.read(link, deadline_s=deadline_s), deadline_s=deadline_s)

    def retain(self, members: Collection[Member]) -> None:
        pass

    def close(self) -> None:
        pass


class _Mapped(NamedTuple):
    """The memory of one life of a node on this host; no reader where its files cannot be mapped."""

    reader: ShmReader | None
    tiers: bool = False


class ShmPath(DataPath):
    """Copies out of the shared memory of nodes on this host. No request, unless a chunk has to be promoted first."""

    name = "shm"

    def __init__(
        self,
        pool: ConnectionPool,
        host: str,
        *,
        verify: bool = False,
        threads: CopyThreads = ONE_THREAD,
        open_reader: Callable[[messages.Attached], ShmReader] | None = None,
    ) -> None:
        """Map nothing yet.

        Args:
            pool: For requests to the nodes; it stays the caller's.
            host: Identity of this host.
            verify: Compare checksums.
            threads: Share large copies.
            open_reader: Maps a node's files; raises LostError if it cannot. None: all of them, read-only.
        """
        self._pool, self._host, self._verify, self._threads = pool, host, verify, threads
        self._open_reader = open_reader or _open_reader
        self._lives: dict[tuple[NodeId, int], _Mapped] = {}
        self._lock = threading.Lock()
        drop_after_fork(self)

    def after_fork(self) -> None:
        """The mappings are good in a child too; the lock may be held by a thread that the child does not have."""
        self._lock = threading.Lock()

    def can_reach(self, member: Member, *, deadline_s: float) -> bool:
        return member.host == self._host and self._mapped(member, deadline_s).reader is not None

    def read(self, member: Member, run: ReadRun, *, deadline_s: float) -> None:
        mapped = self._mapped(member, deadline_s)
        if mapped.reader is None:
            raise LostError(f"the memory of {member.node_id!r} cannot be mapped here")
        run.path = "shm"
        run.gone, run.corrupt, run.other_size = [], [], []
        absent = self._copy(mapped.reader, run, run.missing)
        if not run.locate:  # an owner may hold none of them: the caller looks up who does
            if absent and mapped.tiers:
                absent = self._promote(member, mapped.reader, run, absent, deadline_s)
            run.gone = absent
        if run.corrupt:
            self._call(member, messages.Suspect(run.progress.raw_keys(sorted(run.corrupt))), deadline_s)

    def _copy(self, reader: ShmReader, run: ReadRun, places: list[int]) -> list[int]:
        """Copy chunks into their buffers. Returns the places of those that are not in memory."""
        progress, now_s = run.progress, time.monotonic()
        keys = progress.keys[places]
        hits, _ = reader.read(
            keys, progress.targets_at(places), verify=self._verify, now_s=now_s, threads=self._threads
        )
        if hits.all():
            run.arrived += places
            return []
        lengths = reader.lengths(keys, now_s=now_s)
        absent: list[int] = []
        for place, hit, length in zip(places, hits.tolist(), lengths.tolist(), strict=True):
            if hit:
                run.arrived.append(place)
            elif not length:
                absent.append(place)
            elif length != progress.sizes[place]:
                run.other_size.append(place)
            elif self._verify:  # or it was replaced while it was copied: the node finds out
                run.corrupt.append(place)
        return absent

    def _promote(
        self, member: Member, reader: ShmReader, run: ReadRun, places: list[int], deadline_s: float
    ) -> list[int]:
        """Have a node bring chunks into its memory, and read them there: one part while the next is on its way.

        Returns:
            Places of those that did not get there.
        """
        progress = run.progress
        parts = progress.cut(places, nbytes=PROMOTE_NBYTES, keys=messages.MAX_KEYS)
        absent: list[int] = []

        def promote(part: list[int], timeout_s: float) -> None:
            request = messages.Promote(progress.raw_keys(part), timeout_s, group=progress.group)
            self._call(member, request, deadline_s)

        for part in parts[:2]:
            if len(parts) > 1:
                promote(part, 0.0)
        for number, part in enumerate(parts):
            if 0 < number < len(parts) - 1:
                promote(parts[number + 1], 0.0)
            promote(part, max(1e-3, deadline_s - time.monotonic() - PROMOTE_SLACK_S))
            absent += self._copy(reader, run, part)
        return absent

    def _call(self, member: Member, request: messages.Message, deadline_s: float) -> messages.Answer:
        """Ask a node over its Unix socket, by the pool: writers of this host never wait for it."""
        return self._pool.ask(
            member.endpoints["unix"], lambda link: link.call(request, deadline_s=deadline_s), deadline_s=deadline_s
        )

    def _mapped(self, member: Member, deadline_s: float) -> _Mapped:
        """The memory of a member, mapped at the first call for this life of it."""
        life = member.node_id, member.incarnation
        found = self._lives.get(life)
        if found is not None:
            return found
        try:
            attached = expect(messages.Attached, self._call(member, messages.Attach(), deadline_s))
            found = _Mapped(self._open_reader(attached), attached.tiers)
        except (TransientError, KeyError):
            return _Mapped(None)  # for now
        except LostError:
            found = _Mapped(None)  # its files are not visible in this container
        with self._lock:
            self._lives = {**self._lives, life: found}
        return found

    def retain(self, members: Collection[Member]) -> None:
        lives = {(member.node_id, member.incarnation) for member in members}
        with self._lock:  # readers are not closed: another thread may copy; they are unmapped with their last user
            self._lives = {life: mapped for life, mapped in self._lives.items() if life in lives}

    def close(self) -> None:
        for mapped in self._lives.values():
            if mapped.reader is not None:
                mapped.reader.close()
        self._lives = {}


def _open_reader(attached: messages.Attached) -> ShmReader:
    return ShmReader(attached.table, attached.arena, writable=False)
