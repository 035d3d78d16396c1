"""The client: put, match, get and pin, for batches of chunks.

A client lives in an engine, a script or a notebook. If its host has a node, the client reads and writes that node's
memory directly. For other chunks, the client asks the owners of the keys. An owner knows the holders of a chunk: the
nodes that have the chunk. The client reads the chunk from a holder.
"""

import math
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Final, Unpack

import numpy as np
import numpy.typing as npt

from raykv.client.admin import AdminCalls, report
from raykv.client.arguments import Keys, buffers, depth_of, flag, instance, integer_in, one_key, parent_key
from raykv.client.fetcher import Fetcher
from raykv.client.leases import Pins, Reservation
from raykv.client.puts import Put, PutOptions, batches_of, put_spread, stores_remotely
from raykv.client.root_copies import COPY_HINTS, COPY_S, RootCopies
from raykv.client.router import Router
from raykv.client.slot_pool import LentBatch
from raykv.client.trace_recorder import TraceRecorder
from raykv.client.why import split
from raykv.client.writer import Values
from raykv.errors import PeerUnavailable
from raykv.protocol import chunk_keys
from raykv.protocol.namespace import Namespace
from raykv.protocol.ticket import Ticket
from raykv.transport.bulk_read import ReadProgress
from raykv.types import Batch, Bits, GetResult, Holder, KeyArray, Match, NodeId, PutResult, Scattered

LATE_S: Final = 0.002
"""The misses of a `get` count as timed out if it ends after its deadline, or less than LATE_S before. This margin is
needed because a wait for an answer may end one millisecond before the deadline."""
_NO_NODE: Final = "no node of the cluster runs on this host"


class Client(AdminCalls):
    """One process's access to one namespace. Thread-safe. A forked child can use it, and opens new connections.

    The argument `keys` is a list of names, or an array that the method `keys` or `chain` returned. If a read from
    another node fails, the chunks of that read are misses, and no exception is raised. A wrong argument raises a
    UsageError that names the argument.
    """

    def __init__(self, namespace: Namespace, router: Router) -> None:
        """Use `raykv.connect` or `using` instead."""
        super().__init__(namespace, router)
        self._fetcher = Fetcher(router, self._group.digest)
        self._root_copies = RootCopies()
        self._recorder = TraceRecorder(router.send_trace, namespace.chunk_tokens)

    def using(self, namespace: Namespace) -> "Client":
        """Make a client for another namespace. The new client shares this client's connections."""
        return Client(instance("namespace", namespace, Namespace, "make one with raykv.Namespace(...)"), self.router)

    # -- reading ----------------------------------------------------------------------------------------------------

    def match(
        self,
        keys: Keys,
        *,
        ticket: Ticket | None = None,
        timeout_s: float | None = None,
        promote: bool = False,
        record: bool = True,
    ) -> Match:
        """Find how many leading chunks are stored, and on which nodes. This does not count as a read of the chunks.

        Args:
            ticket: A hand-off ticket, which names holders of chunks. With a ticket this call asks no other node.
            timeout_s: A chunk whose owner does not answer within this time counts as not stored.
            promote: Whether to ask the holders to load matching chunks from SSD or file into memory. This call does not
                wait until they are loaded. With a ticket, `promote` has no effect.
            record: Whether `raykv record`, if it runs, records this call as a request.

        Raises:
            NamespaceMismatch: The ticket was made under another namespace.
        """
        found, router = self._as_keys(keys), self.router
        if record and router.is_recording and len(found):
            self._recorder.record(found, today_s=time.time(), now_s=time.monotonic())
        deadline_s = router.deadline(timeout_s)
        nbytes = self._fetcher.lengths(found, deadline_s)
        me = router.local_id
        if me is not None and nbytes.all():
            return Match(len(found), (me,) * len(found), 0, tuple(nbytes.tolist()))
        holders, below = self._holders(found, nbytes, ticket, deadline_s)
        missed = [place for place, holder in enumerate(holders) if holder is None]
        if missed and ticket is None:
            self._add_misses(split(found[missed]), math.inf)
        count = missed[0] if missed else len(holders)
        low = np.flatnonzero(below[:count]).tolist()
        if low and flag("promote", promote):
            self._fetcher.promote(found[low], [holders[place] for place in low], deadline_s)
        named = tuple(holder for holder in holders[:count] if holder is not None)
        lengths = tuple(nbytes[:count].tolist()) if nbytes[:count].any() else ()
        return Match(count, named, len(low), lengths, tuple(low))

    def locate(
        self, keys: Keys, *, ticket: Ticket | None = None, timeout_s: float | None = None, promote: bool = False
    ) -> list[Holder | None]:
        """Return for each chunk a node that holds it; None if no node is known to hold it.

        Unlike `match`, this call looks beyond the first missing chunk, and does not count missing chunks as misses. The
        arguments are those of `match`. With a `timeout_s` of 0, this call searches only this host's memory.
        """
        found, deadline_s = self._as_keys(keys), self.router.deadline(timeout_s)
        holders, below = self._holders(found, self._fetcher.lengths(found, deadline_s), ticket, deadline_s)
        low = np.flatnonzero(below).tolist()
        if low and flag("promote", promote):
            self._fetcher.promote(found[low], [holders[place] for place in low], deadline_s)
        pairs = zip(holders, below.tolist(), strict=True)
        return [None if name is None else Holder(name, is_below) for name, is_below in pairs]

    def nodes_on_this_host(self) -> frozenset[NodeId]:
        """Return the names of the nodes on this host, according to the last view. This call asks no node."""
        return self.router.near_ids()

    def _holders(
        self, keys: KeyArray, nbytes: npt.NDArray[np.uint32], ticket: Ticket | None, deadline_s: float
    ) -> tuple[list[NodeId | None], Bits]:
        """Return for each chunk a holder, and whether all its holders have the chunk only on SSD or file.

        Args:
            nbytes: Length of each chunk in this host's memory, 0 for other chunks. This method replaces each 0 by the
                chunk's length on other nodes, if known.
        """
        me = self.router.local_id
        holders: list[NodeId | None] = [me if length else None for length in nbytes.tolist()]
        below: Bits = np.zeros(len(keys), np.bool_)
        if ticket is not None:
            promised = instance("ticket", ticket, Ticket, "read it with Ticket.from_json")
            pairs = zip(holders, promised.holders(self.namespace, len(keys)), strict=True)
            return [here or there for here, there in pairs], below
        unknown = np.flatnonzero(nbytes == 0)
        located = self.router.locate(keys[unknown], deadline_s, group=self._group.digest)
        for place, known in zip(unknown.tolist(), located.holders, strict=True):
            holders[place] = known[0] if known else None
        nbytes[unknown], below[unknown] = located.nbytes, located.below_memory
        return holders, below

    def exists(self, keys: Keys, *, timeout_s: float | None = None) -> Bits:
        """Return for each chunk whether some node holds it, shape [n].

        This call does not load chunks into memory, and does not count as a read of the chunks.

        Args:
            timeout_s: A chunk whose owner does not answer within this time counts as not stored. With 0, this call
                searches only this host's memory.
        """
        found, deadline_s = self._as_keys(keys), self.router.deadline(timeout_s)
        here = self._fetcher.ready(found, deadline_s)
        if not here.all() and time.monotonic() < deadline_s:
            unknown = np.flatnonzero(~here)
            located = self.router.locate(found[unknown], deadline_s, group=self._group.digest)
            here[unknown] = [bool(holders) for holders in located.holders]
        return here

    def absent(self, keys: Keys, *, timeout_s: float | None = None) -> Bits:
        """Return an array of shape [n]. True: the chunk's owner answers that no node holds the chunk.

        If the owner does not answer, the result is False. This call does not count as a read of the chunks.
        """
        found, deadline_s = self._as_keys(keys), self.router.deadline(timeout_s)
        gone = ~self._fetcher.ready(found, deadline_s)
        unknown = np.flatnonzero(gone)
        if len(unknown):
            located = self.router.locate(found[unknown], deadline_s, group=self._group.digest)
            held: Bits = np.array([bool(holders) for holders in located.holders])
            gone[unknown] = located.answered & ~held
        return gone

    def get(
        self,
        keys: Keys,
        into: Sequence[Scattered],
        *,
        match: Match | None = None,
        ticket: Ticket | None = None,
        timeout_s: float | None = None,
    ) -> GetResult:
        """Read chunks into the caller's buffers. After this call has returned, no thread writes to the buffers.

        Args:
            into: For each key a writable, contiguous buffer, or several buffers that are filled in order. Their total
                length must equal the chunk's length; otherwise the chunk is a miss.
            match: A result of `match` for the same keys. Chunks that are not in this host's memory are first read from
                the holders in `match`. This call asks the owners only about chunks that are still missing then.
            ticket: A hand-off ticket. It names holders, like `match`. If `match` is given, `ticket` is ignored.
            timeout_s: Chunks that do not arrive within this time are misses.

        Returns:
            Which chunks arrived. The buffers of a miss have undefined content.

        Raises:
            UsageError: The length of `into` differs from that of `keys`, or a buffer is read-only or not contiguous.
            NamespaceMismatch: The ticket was made under another namespace.
        """
        found, router, began_s = self._as_keys(keys), self.router, time.monotonic()
        deadline_s = router.deadline(timeout_s)
        if match is not None:
            instance("match", match, Match, "give what match() returned")
        elif ticket is not None:
            instance("ticket", ticket, Ticket, "read it with Ticket.from_json")
            match = ticket.match(self.namespace, len(found))
        if not isinstance(into, list | tuple) or len(into) != len(found):
            buffers("into", into, len(found), writable=True)
        hits, nbytes = self._read_here(found, into, deadline_s)
        if len(found) and hits.all():
            self._metrics.gets.add_time(time.monotonic() - began_s)
            return GetResult((True,) * len(found), {"shm": nbytes}, {(str(router.local_id), "shm"): len(found)})
        targets, sizes = buffers("into", into, len(found), writable=True)
        progress = ReadProgress(found, targets, sizes, group=self._group.digest)
        if router.local_id is not None:
            progress.record(np.flatnonzero(hits).tolist(), router.local_id, "shm")
        if match is not None:
            self._fetcher.fetch(progress, dict(enumerate(match.holders)), deadline_s)
        self._fetcher.find(progress, deadline_s)
        if progress.hits and progress.hits[0] and not hits[0]:
            self._copy_root(progress, targets[0], deadline_s)
        now_s = time.monotonic()
        self._metrics.gets.add_time(now_s - began_s)
        late = now_s >= deadline_s - LATE_S
        if late or len(router.read_failures):
            self._fetcher.record_end(progress, late=late)
        if missing := progress.missing():
            self._add_misses(list(map(progress.raw_key, missing)), began_s)
        return progress.result()

    def _copy_root(self, progress: ReadProgress, content: Sequence[memoryview], deadline_s: float) -> None:
        """Store the first chunk of a `get` in this host's memory if it was often read from other hosts."""
        local, writer, nbytes = self.router.local, self.router.writer, progress.sizes[0]
        remote = any(path != "shm" for path in progress.result().nbytes_by_path)
        if local is None or writer is None or not remote or local.is_spread(self._group):
            return
        if not self._root_copies.count(progress.raw_key(0), now_s=time.monotonic()):
            return
        batch = Batch(progress.keys[:1], nbytes, chained=True, hints=COPY_HINTS)
        writer.put(self._group, [(batch, [content])], wait=True, deadline_s=min(deadline_s, time.monotonic() + COPY_S))

    def _read_here(self, keys: KeyArray, into: Sequence[Scattered], deadline_s: float) -> tuple[Bits, int]:
        try:
            return self._fetcher.read_here(keys, into, deadline_s)
        except (BufferError, TypeError, ValueError):
            buffers("into", into, len(keys), writable=True)  # raises an error that says which buffer is wrong
            raise

    def pin(self, keys: Keys, *, timeout_s: float | None = None) -> Pins:
        """Pin chunks in this host's memory, to view them without a copy. Use the result in a `with` statement.

        Raises:
            PeerUnavailable: This host has no node, or the node does not answer.
        """
        found, deadline_s = self._as_keys(keys), self.router.deadline(timeout_s)
        local, writer = self.router.local, self.router.writer
        if local is None or writer is None:
            raise PeerUnavailable(_NO_NODE)
        writer.drain(deadline_s)
        return Pins(local, *local.pin(found, group=self._group.digest, deadline_s=deadline_s))

    def ticket(self, keys: Keys, *, match: Match | None = None) -> Ticket:
        """Make a hand-off ticket for the chunks that `match` found. Without `match`, this calls `match(keys)` first."""
        if match is not None:
            instance("match", match, Match, "give what match() returned")
        return Ticket.of(self.namespace, (match or self.match(keys)).holders)

    def exists_one(self, key: bytes, *, timeout_s: float | None = None) -> bool:
        """Return whether some node holds the chunk of one 16-byte key. Fastest for chunks in this host's memory."""
        local = self.router.local
        try:
            if local is not None and local.reader.ready_one(key):
                return True
        except (TypeError, ValueError):
            pass  # `one_key` below checks the key, and raises a UsageError for a wrong one
        return bool(self.exists(chunk_keys.from_bytes(one_key(key)), timeout_s=timeout_s)[0])

    def get_one(
        self, key: bytes, into: Scattered, *, holder: NodeId | None = None, timeout_s: float | None = None
    ) -> bool:
        """Read the chunk of one 16-byte key. Much faster than `get` if the chunk is in this host's memory.

        Args:
            into: Like one entry of `into` in `get`.
            holder: The node to ask first if the chunk is not in this host's memory. None: the owner of the key.

        Returns:
            Whether the chunk arrived. If not, the buffer's content is undefined.

        Raises:
            UsageError: The key does not have 16 bytes, or the buffer is read-only or not contiguous.
        """
        router = self.router
        if router.local is not None and router.config.verify != "always":
            try:
                if router.local.reader.read_one(key, into):
                    return True
            except (BufferError, TypeError, ValueError):
                pass  # `get` accepts several buffers, and raises an error for a wrong argument
        match = None if holder is None else Match(1, (instance("holder", holder, str, "give a node's name"),))
        return self.get(chunk_keys.from_bytes(one_key(key)), [into], match=match, timeout_s=timeout_s).hits[0]

    # -- writing ----------------------------------------------------------------------------------------------------

    def put(
        self,
        keys: Keys,
        values: Sequence[Scattered],
        *,
        wait: bool = True,
        timeout_s: float | None = None,
        **options: Unpack[PutOptions],
    ) -> PutResult:
        """Store chunks on this host's node.

        If this host has no node, or the namespace is spread, consecutive chunks of equal size go to the owner of the
        first of their keys.

        Args:
            values: For each key a contiguous buffer, or several buffers that are joined in order.
            wait: True: wait until all readers on this host see the chunks. Readers on other hosts find a chunk shortly
                afterwards, when its owner is informed. False: wait only until the bytes are in the arena. This client
                can read the chunks at once, and a later `flush` returns the results. Writes to other nodes always wait.
            timeout_s: Chunks for which the node lends no slot within this time are skipped.
            options: `parent`, `depth`, `chained`, `ttl_s`, `priority`: see `Put`. If a chunk is stored already, its
                expiry and priority stay unchanged; use `hint` to change them.

        Returns:
            Four counts of chunks: stored, existed already, skipped, and posted (sent, but not answered yet). A full
            arena or a node that is down raises no exception.

        Raises:
            UsageError: The length of `values` differs from that of `keys`, a value is empty or larger than an extent,
                or an option is wrong.
        """
        return self.put_many([Put(keys, values, **options)], wait=wait, timeout_s=timeout_s)

    def put_many(self, puts: Sequence[Put], *, wait: bool = False, timeout_s: float | None = None) -> PutResult:
        """Store several `Put`s with one message to this host's node. Arguments, result and errors as for `put`."""
        began_s, wait, deadline_s = time.monotonic(), flag("wait", wait), self.router.deadline(timeout_s)
        batches: list[tuple[Batch, Values]] = []
        for put in instance("puts", puts, (list, tuple), "give a list of raykv.Put"):
            instance("puts", put, Put, "give a list of raykv.Put")
            batches += batches_of(put, self._as_keys(put.keys))
        writer = self.router.writer
        if writer is None or stores_remotely(self.router, self._group):
            result = put_spread(self.router, self._group, batches, wait=wait, deadline_s=deadline_s)
        else:
            result = writer.put(self._group, batches, wait=wait, deadline_s=deadline_s)
        self._metrics.puts.add_time(time.monotonic() - began_s)
        return result

    def put_one(
        self,
        key: bytes,
        value: Scattered,
        *,
        wait: bool = True,
        ttl_s: float | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> bool:
        """Store one chunk under a 16-byte key. The chunk belongs to no chain. Arguments and errors as for `put`.

        Returns:
            Whether the chunk is stored. With `wait=False`, the result is True also if the chunk's commit was sent and
            is not answered yet. The result is False, for example, if the arena is full or no node answers.
        """
        put = Put(chunk_keys.from_bytes(one_key(key)), [value], chained=False, ttl_s=ttl_s, priority=priority)
        done = self.put_many([put], wait=wait, timeout_s=timeout_s)
        return not done.skipped and not (wait and done.posted)

    def flush(self, *, timeout_s: float | None = None) -> PutResult:
        """Wait for the answers to all earlier puts with `wait=False`. This includes puts of clients made by `using`.

        Returns:
            The sum of the results since the last `flush`. `posted` counts the chunks that are still without an answer.
        """
        writer, deadline_s = self.router.writer, self.router.deadline(timeout_s)
        return PutResult() if writer is None else writer.flush(deadline_s)

    def prepare(self, nbytes: int, count: int, *, timeout_s: float | None = None) -> None:
        """Request slots for `count` chunks of `nbytes` bytes, so that the next puts need not wait for slots.

        This call does not wait for the slots. It does nothing if this host has no node.

        Raises:
            UsageError: The size is 0 or larger than an extent, or the count is not an integer.
            PeerUnavailable: This host's node does not answer.
        """
        nbytes, count = integer_in("nbytes", nbytes, 1, 1 << 32), integer_in("count", count, 0, 1 << 32)
        writer, deadline_s = self.router.writer, self.router.deadline(timeout_s)
        if writer is not None:
            writer.prepare(self._group, nbytes, count, deadline_s=deadline_s)

    def reserve(
        self,
        keys: Keys,
        nbytes: int,
        *,
        parent: KeyArray | None = None,
        depth: int = 0,
        chained: bool = True,
        timeout_s: float | None = None,
    ) -> Reservation:
        """Get slots of this host's arena. The caller writes chunks into the slots, and then commits the slots.

        Arguments as for `put`. `nbytes` is the size of each chunk.

        Returns:
            A reservation with a view for each chunk that is not stored yet. If the arena is full or the node does not
            answer, some chunks have no view, and `reason` says why. A caller that writes for seconds must check
            `Reservation.valid` before it writes each part.

        Raises:
            UsageError: The size is 0 or larger than an extent.
        """
        chained, size = flag("chained", chained), integer_in("nbytes", nbytes, 0, 1 << 62)
        batch = Batch(self._as_keys(keys), size, parent_key(parent), depth_of(depth), chained)
        writer, deadline_s = self.router.writer, self.router.deadline(timeout_s)
        if writer is None:
            return Reservation(None, LentBatch(self._group, batch, reason=_NO_NODE))
        return Reservation(writer, writer.lend(self._group, batch, deadline_s=deadline_s))

    # -- internal ---------------------------------------------------------------------------------------------------

    def _add_misses(self, keys: Sequence[bytes], began_s: float) -> None:
        """Count misses by reason.

        If a read of a key failed after `began_s`, this failure is the reason. `report` finds the other keys' reasons.
        """
        router, now_s = self.router, time.monotonic()
        reasons: Counter[str] = Counter()
        absent = []
        for key in keys:
            failure = router.read_failures.last(key, now_s=now_s) if len(router.read_failures) else None
            if failure is not None and failure.when_s >= began_s:
                reasons[failure.kind] += 1
            else:
                absent.append(key)
        if self._metrics.add_misses(reasons, absent, now_s=now_s):
            router.parallel.in_background(partial(report, router, self.namespace, router.deadline(None)))
