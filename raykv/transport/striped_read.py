"""Reads a run from one node over several NICs at once.

A rail is a pair of addresses: one of this host, or any, and one of the node. `Rails` divides a run among them. Each
share is read over a link of its own, by a thread of its own. A rail whose share fails is left alone for a while, and
the other rails read what is missing. A NIC that is down sends no error: its share is cut when it is silent while
other shares arrive.
"""

import math
import threading
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from raykv.errors import PeerUnavailable, RayKVError, TransientError
from raykv.protocol.placement import Member
from raykv.transport.bulk_read import BulkRead, ReadRun
from raykv.transport.forking import drop_after_fork
from raykv.transport.link import Link
from raykv.transport.pool import ConnectionPool, End
from raykv.transport.rails.shared import UNKNOWN_RATE, SharedRails
from raykv.transport.rails.striping import STRIPED_NBYTES, Share
from raykv.types import NodeId

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

PAUSE_S: Final = 5.0
"""A rail that failed is left alone for this long the first time, and for up to four times as long later. A probe of a
rail that is still silent makes one read longer by up to SILENT_S."""
SILENT_S: Final = 0.5
"""A rail fails if no byte arrives over it for this long, or for a third of the time that the read has, if that is less.
A lost packet costs 0.2 s. A node may also be silent because it promotes chunks: then no rail brings bytes, and none is
blamed."""
MIN_SILENT_S: Final = 0.05
SMALL_S: Final = 1.0
"""A run below STRIPED_NBYTES, which one rail reads, is continued over another one after this time, or after half of the
time that the read has."""
CLOCK_S: Final = 0.02
"""The kernel's clock for the time since bytes arrived is right within this time."""
WATCHES: Final = 4
"""How often the shares are looked at within the time for which one may be silent."""
MAX_THREADS: Final = 32
"""Largest number of shares that one client reads at once. Further ones wait."""


class NicRails(SharedRails):
    """The rails to one node. Thread-safe.

    Attributes:
        ends: The addresses of each rail.
    """

    def __init__(self, ends: Sequence[End]) -> None:
        self.ends = tuple(ends)
        names = [f"{source} -> {address}" if source else address for address, source in ends]
        super().__init__(names, [UNKNOWN_RATE] * len(ends), pause_s=PAUSE_S)


class StripedReads:
    """The rails to all nodes, and the threads that read over them. Thread-safe. A forked child starts with none."""

    def __init__(self, pool: ConnectionPool, sources: tuple[str, ...] | None, *, verify: bool) -> None:
        """Make no rails yet. `sources`: the addresses of this host to use; empty: any. None: each node has one rail."""
        self.pool, self.verify, self._sources = pool, verify, sources
        drop_after_fork(self)
        self.after_fork()

    def after_fork(self) -> None:
        """Begin without rails and threads, because the parent's threads do not exist in the child."""
        self._lock = threading.Lock()
        self._rails: dict[NodeId, tuple[Member, NicRails | None]] = {}
        self._threads: ThreadPoolExecutor | None = None

    def rails_to(self, member: Member) -> NicRails | None:
        """Return the rails to a node. None: it is read over its only address, from any address of this host."""
        if self._sources is None or not (self._sources or "nic0" in member.endpoints):
            return None
        with self._lock:
            known = self._rails.get(member.node_id)
            if known is None or known[0].nics != member.nics or known[0].incarnation != member.incarnation:
                ends = self._ends(member)
                rails = NicRails(ends) if ends not in ([], [(member.address, "")]) else None
                known = self._rails[member.node_id] = member, rails
            return known[1]

    def _ends(self, member: Member) -> list[End]:
        sources, addresses = self._sources or ("",), member.nics
        count = max(len(sources), len(addresses))
        ends = [(addresses[n % len(addresses)], sources[n % len(sources)]) for n in range(count)]
        return list(dict.fromkeys(end for end in ends if end[0]))

    def read(self, member: Member, rails: NicRails, run: ReadRun, *, deadline_s: float) -> None:
        """Read a run over the rails to a node; see `DataPath.read`."""
        before = len(run.arrived)
        self.pool.guard(
            member.address,
            lambda: _StripedRead(self, rails, run, deadline_s).read(member.address),
            deadline_s=deadline_s,
            arrived_nbytes=lambda: run.progress.nbytes(run.arrived[before:]),
        )

    def submit(self, task: Callable[[], None]) -> "Future[None] | None":
        """Run a task in a thread. Returns None if no thread can be started."""
        with self._lock:
            if self._threads is None:
                from concurrent.futures import (
                    ThreadPoolExecutor,  # imported late, because this makes a node start faster
                )

                self._threads = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="raykv-rail")
            try:
                return self._threads.submit(task)
            except RuntimeError:
                return None

    def stats(self) -> dict[NodeId, dict[str, dict[str, Any]]]:
        """Return the rails of each node that has several; see `SharedRails.stats`."""
        return {name: rails.stats() for name, (_, rails) in list(self._rails.items()) if rails is not None}

    def retain(self, members: Collection[Member]) -> None:
        """Forget the rails to all other nodes."""
        names = {member.node_id for member in members}
        with self._lock:
            self._rails = {name: rails for name, rails in self._rails.items() if name in names}

    def close(self) -> None:
        """Wait for the reads, and end the threads."""
        if self._threads is not None:
            self._threads.shutdown()


class _StripedRead:
    """One run that is read over rails.

    Attributes:
        reads, rails, run, deadline_s: As in `StripedReads.read`.
        silent_s: A share that is silent for this long may be cut.
    """

    def __init__(self, reads: StripedReads, rails: NicRails, run: ReadRun, deadline_s: float) -> None:
        self.reads, self.rails, self.run, self.deadline_s = reads, rails, run, deadline_s
        self.silent_s = max(MIN_SILENT_S, min(SILENT_S, (deadline_s - time.monotonic()) / 3))

    def read(self, address: str) -> None:
        """Read the run. If no rail works, read over a link to `address`. Raises RayKVError, as `DataPath.read`."""
        run = self.run
        run.begin("tcp")
        left = run.missing
        while left and (parts := self._assign(left)):
            self._read_parts(parts)
            left = self._merge(parts)
            if any(part.error is not None and not part.taken_out for part in parts):
                break  # the last rail has failed
        if left:
            rest = ReadRun(run.progress, run.holder, left, run.locate)
            read = partial(BulkRead(rest, verify=self.reads.verify).read, deadline_s=self.deadline_s)
            try:
                self.reads.pool.run(address, read, deadline_s=self.deadline_s)
            finally:
                run.merge(rest)

    def _assign(self, places: list[int]) -> list["_Part"]:
        shares = self.rails.assign([self.run.progress.sizes[place] for place in places])
        return [_Part(self, share, [places[index] for index in share.indices]) for share in shares]

    def _read_parts(self, parts: list["_Part"]) -> None:
        """Read all parts at the same time. A small run is one part, which this thread reads."""
        if len(parts) == 1 and parts[0].share.nbytes < STRIPED_NBYTES:
            left_s = self.deadline_s - time.monotonic()
            limit_s = min(SMALL_S, left_s / 2) if self._others(parts[0]) else left_s
            parts[0].read(self.deadline_s - left_s + limit_s)
            return
        from concurrent.futures import wait

        reading: dict[Future[None], _Part] = {}
        try:
            for part in parts:
                task = partial(part.read, self.deadline_s)
                if (future := self.reads.submit(task)) is not None:
                    reading[future] = part
                else:
                    task()
            left = set(reading)
            while left:
                left = wait(left, self.silent_s / WATCHES).not_done
                for future in left:
                    if self._is_dead(reading[future], parts):
                        reading[future].cut()
        finally:  # even after an interrupt, no thread may write to the caller's buffers after this call
            for future, part in reading.items():
                if future.cancel():
                    self.rails.cancel(part.share)
                else:
                    part.cut()
            wait(reading)
        for future in reading:
            future.result()  # raises only after a bug: each RayKVError is in `error`

    def _is_dead(self, part: "_Part", parts: list["_Part"]) -> bool:
        """Whether a part has been silent for `silent_s`, and all this time the node was sending over another rail.

        A part that is alone is dead if it is silent, and another rail could read it.
        """
        now_s, silent_s, limit_s = time.monotonic(), part.silent_s(), self.silent_s
        others = [each for each in parts if each is not part]
        heard = any(each.heard_within(limit_s / 2) for each in others) if others else self._others(part)
        if silent_s < limit_s / WATCHES or not heard:
            part.suspect_s = math.inf
            return False
        part.suspect_s = min(part.suspect_s, now_s)
        return silent_s >= limit_s and now_s - part.suspect_s >= limit_s

    def _others(self, part: "_Part") -> bool:
        """Whether another rail could read a part."""
        return any(self.rails.admits(rail) for rail in range(len(self.rails.ends)) if rail != part.share.rail)

    def _merge(self, parts: list["_Part"]) -> list[int]:
        """Add the outcome of the parts to that of the run. Returns the chunks to read over other rails.

        Raises:
            RayKVError: The node refuses, or the deadline has passed.
        """
        left: list[int] = []
        errors: list[RayKVError] = []
        late = time.monotonic() >= self.deadline_s
        for part in parts:
            self.run.merge(part.run, whole=late or part.error is None)
            if part.error is not None:
                left += part.run.missing
                errors.append(part.error)
        for error in errors:
            if late or not isinstance(error, TransientError):
                raise error
        return sorted(left)


class _Part:
    """The chunks of one share.

    Attributes:
        share: The share. `read` ends it.
        run: The chunks, and their outcome.
        error: Why not all chunks were asked for; None if they were.
        taken_out: Whether the rail has failed, and is taken out.
        suspect_s: Since when the part is silent while others are not; see `_StripedRead`.
    """

    def __init__(self, whole: _StripedRead, share: Share, places: list[int]) -> None:
        self._whole, self.share = whole, share
        self.run = ReadRun(whole.run.progress, whole.run.holder, places, whole.run.locate)
        self.error: RayKVError | None = None
        self.taken_out = False
        self.suspect_s = math.inf
        self._bulk = BulkRead(self.run, verify=whole.reads.verify)
        self._lock = threading.Lock()  # guards what follows
        self._link: Link | None = None
        self._since_s = 0.0  # since when the link is in use
        self._complete = self._is_cut = False

    def read(self, deadline_s: float) -> None:
        """Read the chunks. A RayKVError is not raised: see `error`."""
        rails, silent_s = self._whole.rails, self._whole.silent_s
        address, source = rails.ends[self.share.rail]
        fill: Callable[[Link], None] = partial(self._fill, deadline_s=deadline_s)
        end: Callable[[], None] = partial(rails.cancel, self.share)
        try:
            self._whole.reads.pool.run(address, fill, deadline_s=deadline_s, source=source, connect_s=silent_s)
            if not self._complete:
                raise PeerUnavailable(f"{address} was silent for {silent_s:.2f} s")
            end = partial(rails.done, self.share, nbytes=self.run.progress.nbytes(self.run.arrived))
        except RayKVError as error:
            error.__cause__ = error.__context__ = None
            self.error = error.with_traceback(None)  # the traceback would keep the caller's buffers in memory
            if isinstance(error, TransientError) and time.monotonic() < self._whole.deadline_s:
                end = self._fail
        finally:
            end()

    def _fail(self) -> None:
        self.taken_out = self._whole.rails.fail_unless_last(self.share)

    def _fill(self, link: Link, *, deadline_s: float) -> None:
        """Read over a link. After `cut` this returns without an error, so that the pool tries no other link."""
        with self._lock:
            if self._is_cut:
                return
            self._link, self._since_s = link, time.monotonic()
        try:
            self._bulk.read(link, deadline_s=deadline_s)
            self._complete = True
        except PeerUnavailable:
            if not self._is_cut:
                raise
        finally:
            with self._lock:
                self._link = None

    def silent_s(self) -> float:
        """Return how long the part has been waiting for bytes; 0 if it is not reading."""
        with self._lock:
            if self._link is None:
                return 0.0
            return min(time.monotonic() - self._since_s, self._link.silent_s())

    def heard_within(self, seconds: float) -> bool:
        """Whether the part is complete, or some of its bytes have arrived within this time."""
        with self._lock:
            if self._complete or self._link is None:
                return self._complete
            reading_s = time.monotonic() - self._since_s - CLOCK_S  # what arrived before says nothing of this read
            return self._link.silent_s() < min(seconds, reading_s)

    def cut(self) -> None:
        """Let `read` end now."""
        with self._lock:
            self._is_cut = True
            if self._link is not None:
                self._link.cut()
