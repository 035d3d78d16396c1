"""The client: put, match, get, pin, delete, stats, for batches of chunks.

A client sits in an engine, a script or a notebook. On a host with a node it reads that node's memory directly and
writes into it; what is not there it finds through the owners of the keys and reads from the holders.
"""

import math
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property, partial
from itertools import groupby
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from raykv.client.admin import configure, hint, list_namespaces, report
from raykv.client.leases import Pins, Reservation
from raykv.client.local_connection import LocalConnection
from raykv.client.router import Router
from raykv.client.slot_pool import QuotaGroup
from raykv.client.trace_recorder import TraceRecorder
from raykv.client.why import KeysUnder, Why, explain, keys_under_names, keys_under_tokens, split
from raykv.errors import CapacityError, LostError, PeerUnavailable, ProtocolError, TransientError, UsageError
from raykv.memory.copying import all_byte_views, byte_views
from raykv.metrics import ClientMetrics
from raykv.protocol import chunk_keys, messages
from raykv.protocol.hints import require_hints
from raykv.protocol.namespace import Namespace
from raykv.protocol.placement import View
from raykv.protocol.ticket import Ticket
from raykv.transport.base import Link, Runs
from raykv.transport.bulk_read import ReadProgress, with_checksums
from raykv.types import NO_HINTS, Bits, GetResult, Hints, KeyArray, Match, NodeId, PutResult, Scattered

T = TypeVar("T")

LATE_S: Final = 0.002
"""A call that ends within this time of its deadline was given up: waiting ends a little early now and then."""
_ONE_HIT: Final = np.ones(1, np.bool_)

Keys = KeyArray | Sequence[bytes | str]


class Client:
    """One namespace of the cache, as one process sees it. Thread-safe.

    Every method takes a batch. `keys` are an array from `keys` or `chain`, or a list of names. Trouble with other
    nodes is a miss, never an exception; a call that is wrong in itself raises UsageError.

    Attributes:
        namespace: What the chunks were computed under.
    """

    def __init__(self, namespace: Namespace, router: Router) -> None:
        """Use `raykv.connect` or `using` instead."""
        self.namespace = namespace
        self._digest = namespace.digest
        self._router = router
        self._always_verify = router.config.verify == "always"
        self._recorder = TraceRecorder(router.tell_record, namespace.chunk_tokens)

    def using(self, namespace: Namespace) -> "Client":
        """A client for another namespace over the same connections."""
        return Client(namespace, self._router)

    # -- keys -------------------------------------------------------------------------------------------------------

    def keys(self, names: Iterable[bytes | str]) -> KeyArray:
        """Keys, shape [n, 2], of objects with names of any length (an engine's block hashes, say)."""
        return chunk_keys.named(self._digest, names)

    def chain(self, tokens: Sequence[int] | npt.NDArray[np.integer[Any]]) -> KeyArray:
        """Keys, shape [n, 2], of the full chunks of a prompt, `namespace.chunk_tokens` tokens each."""
        return chunk_keys.chain(self._digest, tokens, self.namespace.chunk_tokens)

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
        """How many leading chunks are stored, and where. Changes nothing.

        Args:
            ticket: Believe its holders, and ask nobody, for chunks that are not on this host.
            timeout_s: Owners that take longer are taken to know nothing.
            promote: Of the chunks that match, have those below memory brought up, without waiting for them: a `get`
                that follows finds them on their way.
            record: This is a request of its own, to be told of while `raykv record` runs.

        Raises:
            NamespaceMismatch: The ticket was made under another namespace.
        """
        keys = self._as_keys(keys)
        router = self._router
        if record and router.local is not None and router.local.reader.table.recording and len(keys):
            self._recorder.note(keys, today_s=time.time(), now_s=time.monotonic())
        deadline_s = router.deadline(timeout_s)
        here = self._here(keys, deadline_s)
        if router.local is not None and here.all():
            return Match(len(keys), (router.local.attached.node_id,) * len(keys))
        promised = ticket.match(self.namespace, len(keys)).holders if ticket else ()
        holders: list[NodeId | None] = [*promised, *[None] * (len(keys) - len(promised))]
        if router.local is not None:
            for place in np.flatnonzero(here).tolist():
                holders[place] = router.local.attached.node_id
        cold: list[int] = []
        if None in holders and ticket is None:
            unknown = [place for place, holder in enumerate(holders) if holder is None]
            found, below = router.locate(keys[unknown], deadline_s)
            for place, holder in zip(unknown, found, strict=True):
                holders[place] = holder
            cold = [place for place, is_below in zip(unknown, below.tolist(), strict=True) if is_below]
            if None in holders:
                missed = [place for place, holder in enumerate(holders) if holder is None]
                self._note_misses(split(keys[missed]), math.inf)
        count = holders.index(None) if None in holders else len(holders)
        cold = [place for place in cold if place < count]
        if cold and promote:
            router.promote(keys[cold], [holders[place] for place in cold], deadline_s)
        return Match(count, tuple(holder for holder in holders[:count] if holder is not None), len(cold))

    def exists(self, keys: Keys, *, timeout_s: float | None = None) -> Bits:
        """Which chunks somebody holds, shape [n]. Changes nothing.

        Args:
            timeout_s: Owners that take longer are taken to know nothing.
        """
        keys = self._as_keys(keys)
        deadline_s = self._router.deadline(timeout_s)
        here = self._here(keys, deadline_s)
        if not here.all():
            unknown = np.flatnonzero(~here)
            some = keys if len(unknown) == len(keys) else keys[unknown]
            here[unknown] = self._router.held(some, deadline_s)
        return here

    def get(
        self,
        keys: Keys,
        into: Sequence[Scattered],
        *,
        match: Match | None = None,
        ticket: Ticket | None = None,
        timeout_s: float | None = None,
    ) -> GetResult:
        """Read chunks into the caller's buffers.

        Args:
            into: For each key a writable, contiguous buffer, or several that are filled in order. Their total length
                must be the chunk's: a chunk of another length is a miss.
            match: From `match`: its holders are asked without another lookup.
            ticket: The same from a hand-off ticket.
            timeout_s: What has not arrived by then is a miss. When this returns, nobody writes to the buffers any more.

        Returns:
            Which arrived. The buffers of a miss may hold anything.

        Raises:
            UsageError: `into` has not one entry a key, or a buffer is read-only or not contiguous.
            NamespaceMismatch: The ticket was made under another namespace.
        """
        keys = self._as_keys(keys)
        if len(into) != len(keys):
            raise UsageError(f"field 'into': {len(into)} buffers for {len(keys)} keys; give one entry a key")
        router = self._router
        deadline_s = router.deadline(timeout_s)
        hits = None
        if router.local is not None:
            hits, nbytes = self._read_here(router.local, keys, into, deadline_s)
            if len(keys) and hits.all():
                node_id = router.local.attached.node_id
                if len(keys) > 1:
                    self._tally.gets.note(time.monotonic() - router.begun(deadline_s, timeout_s))
                return GetResult((True,) * len(keys), {"shm": nbytes}, {(node_id, "shm"): len(keys)})
        progress = ReadProgress(keys, *all_byte_views(into, "into", writable=True))
        if router.local is not None and hits is not None:
            progress.note(np.arange(len(keys)), hits, router.local.attached.node_id, "shm")
        if ticket is not None:
            match = ticket.match(self.namespace, len(keys))
        if match is not None:
            router.fetch(progress, [*match.holders, *[None] * (len(keys) - len(match.holders))], deadline_s)
        router.find(progress, deadline_s)
        now_s, began_s = time.monotonic(), router.begun(deadline_s, timeout_s)
        self._tally.gets.note(now_s - began_s)
        if len(router.read_failures) or now_s >= deadline_s - LATE_S:
            router.note_end(progress, late=now_s >= deadline_s - LATE_S)
        if False in progress.hits:
            self._note_misses(list(map(progress.raw_key, progress.missing())), began_s)
        return progress.result()

    def pin(self, keys: Keys, *, timeout_s: float | None = None) -> Pins:
        """View chunks of this host's node in place, without a copy, for as long as the returned context lasts.

        Raises:
            PeerUnavailable: There is no node on this host, or it is away.
        """
        return self._local().pin(self._as_keys(keys), deadline_s=self._router.deadline(timeout_s))

    # -- one chunk -------------------------------------------------------------------------------------------------

    def key(self, name: bytes | str) -> bytes:
        """The key of one object: 16 bytes, a row of what `keys` gives."""
        return chunk_keys.to_bytes(self.keys([name]))

    def exists_one(self, key: bytes, *, timeout_s: float | None = None) -> bool:
        """Whether somebody holds the chunk of one 16-byte key. A microsecond when this host does."""
        local = self._router.local
        try:
            if local is not None and local.reader.ready_one(key):
                return True
        except ValueError:
            raise _no_key(key) from None
        if local is not None and local.posted:
            return bool(self.exists(chunk_keys.from_bytes(key), timeout_s=timeout_s)[0])
        if len(key) != chunk_keys.KEY_NBYTES:
            raise _no_key(key)
        return self._router.held_one(key, self._router.deadline(timeout_s))

    def get_one(
        self, key: bytes, into: Scattered, *, holder: NodeId | None = None, timeout_s: float | None = None
    ) -> bool:
        """Read the chunk of one 16-byte key: `get` without what a batch costs.

        Args:
            into: As an entry of `get`'s. A memoryview of bytes is quickest.
            holder: The node to ask if it is not on this host; None: whoever its owner names.

        Returns:
            Whether the buffer now holds the chunk; if not, it may hold anything.

        Raises:
            UsageError: The key has not 16 bytes, or `into` is no such buffer.
        """
        router = self._router
        local = router.local
        if local is not None and not self._always_verify:
            try:
                if local.reader.read_one(key, into):
                    return True
            except (BufferError, TypeError, ValueError):
                pass  # several buffers; or the wrong ones, and `get` says which
        if len(key) != chunk_keys.KEY_NBYTES:
            raise _no_key(key)
        if local is None or not (local.posted or self._always_verify):
            target = byte_views(into, "into", writable=True)
            if len(target) == 1:
                began_s, deadline_s = time.monotonic(), router.deadline(timeout_s)
                if holder is not None and router.fetch_one(holder, key, target[0], deadline_s):
                    return True
                if router.find_one(key, target[0], deadline_s) is not None:
                    return True
                if time.monotonic() >= deadline_s - LATE_S:
                    router.read_failures.note((key,), "timed_out", None, now_s=time.monotonic())
                self._note_misses([key], began_s)
                return False
        return self.get(chunk_keys.from_bytes(key), [into], timeout_s=timeout_s).hits[0]

    # -- writing ----------------------------------------------------------------------------------------------------

    def put(
        self,
        keys: Keys,
        values: Sequence[Scattered],
        *,
        parent: KeyArray | None = None,
        depth: int = 0,
        chained: bool = True,
        wait: bool = True,
        ttl_s: float | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> PutResult:
        """Store chunks, on this host's node if there is one. What is already there is not written again.

        Args:
            values: For each key a contiguous buffer, or several that are taken in order.
            parent: Key, shape [1, 2], of the chunk that keys[0] follows; None at the start of a prompt.
            depth: Chunks before keys[0] in its chain.
            chained: Whether each key follows the one before it. False: independent objects.
            wait: Until every reader on this host sees the chunks; the others find them when their owners have heard of
                them. False: only until their bytes are in the arena; this client's own reads see them all the same, and
                `flush` tells what became of them. Without a node on this host every put waits for one that takes them.
                At most MAX_POSTED puts, of whichever kind, are under way to the node: one more waits for the oldest.
            ttl_s: They expire so long from now. None: as the namespace's config says.
            priority: -100 to 100; the higher go last when room is needed. 0: as the config says. What is there already
                takes neither from this call; see `hint`.

        Returns:
            What became of them. A full arena or an absent node is a result, not an exception.

        Raises:
            UsageError: `values` has not one entry a key, a value is empty or larger than an extent, or a hint is none.
        """
        keys, hints, began_s = self._as_keys(keys), _hints(ttl_s, priority), time.monotonic()
        deadline_s = self._router.deadline(timeout_s)
        if len(values) != len(keys):
            raise UsageError(f"field 'values': {len(values)} values for {len(keys)} keys; give one entry a key")
        pieces, sizes = all_byte_views(values, "values", writable=False)
        total, start = PutResult(0, 0, 0), 0
        for size, run in groupby(sizes):  # one reservation has one size; chunks of a prompt are one run
            stop = start + len(list(run))
            above = keys[start - 1 : start] if start else parent
            part = partial(self._put_equal, keys[start:stop], pieces[start:stop], size, wait=wait, hints=hints)
            done = part(
                parent=above if chained else None,
                depth=depth + start if chained else 0,
                chained=chained,
                deadline_s=deadline_s,
            )
            total = PutResult(
                total.stored + done.stored,
                total.existed + done.existed,
                total.skipped + done.skipped,
                total.reason or done.reason,
                total.posted + done.posted,
            )
            start = stop
        if len(keys) > 1:
            self._tally.puts.note(time.monotonic() - began_s)
        return total

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
        """Store one chunk that is part of no chain: what `put` does, in a fraction of the time.

        Args:
            key: 16 bytes, as `keys.to_bytes` writes one key.
            value: A contiguous buffer, or several that are taken in order.
            wait, ttl_s, priority: As for `put`.

        Returns:
            Whether the chunk is there now, or with `wait=False` on its way. False: there is no room, or no node.

        Raises:
            UsageError: The key is not of 16 bytes, or the value is empty or larger than an extent.
        """
        if len(key) != chunk_keys.KEY_NBYTES:
            raise _no_key(key)
        pieces = byte_views(value, "value", writable=False)
        local, deadline_s = self._router.local, self._router.deadline(timeout_s)
        hints = _hints(ttl_s, priority) if ttl_s is not None or priority else NO_HINTS
        try:
            if local is not None:
                return local.put_one(self._group, key, pieces, wait=wait, deadline_s=deadline_s, hints=hints)
            nbytes, one = sum(map(len, pieces)), chunk_keys.from_bytes(key)
            done = self._put_remote(
                one, [pieces], nbytes, parent=None, depth=0, chained=False, hints=hints, deadline_s=deadline_s
            )
            return not done.skipped
        except (TransientError, CapacityError, LostError):
            return False

    def flush(self, *, timeout_s: float | None = None) -> PutResult:
        """Wait for the puts of this client (and those made by `using`) that were made with `wait=False`.

        Returns:
            What became of their chunks since the last call. `posted`: chunks of which nothing is known by the deadline.
        """
        local = self._router.local
        return PutResult(0, 0, 0) if local is None else local.flush(self._router.deadline(timeout_s))

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
        """Room in this host's arena for chunks that the caller then writes in place and commits.

        Arguments as for `put`; `nbytes` is the size of each chunk.

        Returns:
            Views for those chunks that are not there yet. None of them, with a reason, when the arena is full or the
            node is away. Who writes for more than a moment asks `Reservation.valid` before each piece.

        Raises:
            UsageError: The size is 0 or larger than an extent.
        """
        keys = self._as_keys(keys)
        try:
            return self._local().reserve(
                self._group,
                keys,
                nbytes,
                chained=chained,
                parent=parent,
                depth=depth,
                deadline_s=self._router.deadline(timeout_s),
            )
        except (TransientError, CapacityError, LostError) as error:
            return Reservation.refused(len(keys), str(error))

    def delete(self, keys: Keys, *, timeout_s: float | None = None) -> int:
        """Drop chunks on every node. Returns how many copies went; pinned ones, and those of absent nodes, stay."""
        request = messages.Delete(chunk_keys.to_bytes(self._as_keys(keys)))
        router, deadline_s = self._router, self._router.deadline(timeout_s)
        nodes = {member.node_id for member in router.view(deadline_s).members}
        if router.local is not None:
            nodes.add(router.local.attached.node_id)
        answers = router.in_parallel(
            {name: partial(router.call, name, request, deadline_s) for name in nodes}, deadline_s
        )
        return sum(answer.count for answer in answers.values() if isinstance(answer, messages.Count))

    def ticket(self, keys: Keys, *, match: Match | None = None) -> Ticket:
        """A hand-off ticket for the leading chunks that are stored now (or that `match` found)."""
        match = match or self.match(keys)
        return Ticket.of(self.namespace, match.holders)

    def limit(self, capacity_nbytes: int, *, timeout_s: float | None = None) -> int:
        """Bound what this namespace, with all its salts and adapters, may take on each node.

        Args:
            capacity_nbytes: Bytes of slots on one node; 0 for no bound but the arena. What is above it goes with the
                next chunks that are stored.

        Returns:
            How many nodes have taken note by now; the others hear of it with their next heartbeat.
        """
        if capacity_nbytes < 0:
            raise UsageError(f"field 'capacity_nbytes': {capacity_nbytes} is no size; 0 means no bound but the arena")
        fields = {"dram_quota_nbytes": capacity_nbytes or None}
        return len(configure(self._router, self.namespace, fields, self._router.deadline(timeout_s))[0])

    def configure(self, *, timeout_s: float | None = None, **fields: Any) -> int:
        """Change fields of the config of this namespace, with all its salts and adapters, while the cluster runs.

        Args:
            fields: Those of `NamespaceConfig`; what is not named stays as it is. A policy goes on with what is there;
                a time to live holds for what is stored from now on; what is above a quota goes at once.

        Returns:
            How many nodes have taken note by now; the others hear of it with their next heartbeat, and so do nodes that
            join later.

        Raises:
            ConfigError: A field is wrong or unknown. Names it.
            PeerUnavailable: The directory is away. Nothing was changed.
        """
        return len(configure(self._router, self.namespace, fields, self._router.deadline(timeout_s))[0])

    def drop_namespace(self, *, timeout_s: float | None = None) -> int:
        """Drop all chunks of this namespace, with all its salts and adapters, on every node and tier; and its config.

        Pinned chunks go when they are unpinned. Whoever writes to it goes on: it opens anew, and empty.

        Returns:
            How many chunks went by now. Nodes that are away drop theirs when they are back.

        Raises:
            PeerUnavailable: The directory is away. Nothing was dropped.
        """
        return configure(self._router, self.namespace, None, self._router.deadline(timeout_s))[1]

    def namespaces(self, *, timeout_s: float | None = None) -> list[dict[str, Any]]:
        """Every namespace that some node knows (without salt and adapter), configured or merely in use.

        Returns:
            Of each {"namespace": Namespace, "config": NamespaceConfig, "chunks", "used_nbytes", "below_nbytes" (by
            tier), "reads" (of its chunks, by anybody), "departures" (by reason), "misses" (by reason) and "get_times",
            "put_times" (as clients tell now and then), "nodes": the same of each node, "silent": nodes that did not
            answer, and why}.
        """
        deadline_s = self._router.deadline(timeout_s)
        report(self._router, self._group.digest, deadline_s)
        return list_namespaces(self._router, deadline_s)

    # -- hints ------------------------------------------------------------------------------------------------------

    def hint(
        self,
        keys: Keys,
        *,
        ttl_s: float | None = None,
        priority: int | None = None,
        output_tokens: int | None = None,
        timeout_s: float | None = None,
    ) -> int:
        """Tell the holders of chunks what is to become of them, or what is known of their use.

        Args:
            ttl_s: They expire so long from now; 0: never. None: as before.
            priority: -100 to 100; the higher go last when room is needed. None: as before.
            output_tokens: The request that read or stored them is done, and made so many tokens. The policy `density`
                learns from it which chunks come again; engines with the vLLM connector tell it by themselves.

        Returns:
            How many copies of them were there. Whoever does not answer is not counted.
        """
        require_hints(ttl_s, priority, output_tokens)
        deadline_s = self._router.deadline(timeout_s)
        return hint(
            self._router,
            self._as_keys(keys),
            deadline_s,
            ttl_s=ttl_s,
            priority=priority,
            output_tokens=output_tokens,
        )

    def touch(self, keys: Keys, *, timeout_s: float | None = None) -> int:
        """Make chunks count as read now. Returns how many copies of them were there."""
        return hint(self._router, self._as_keys(keys), self._router.deadline(timeout_s), touch=True)

    def session_end(self, keys: Keys, *, timeout_s: float | None = None) -> int:
        """Nobody is likely to read these soon: they are the first to leave memory, for an SSD if there is one.

        Nothing is dropped for it, and the next read of a chunk (by another session, say) makes it like the others.

        Returns:
            How many copies of them were there.
        """
        return hint(self._router, self._as_keys(keys), self._router.deadline(timeout_s), ended=True)

    # -- why --------------------------------------------------------------------------------------------------------

    def why(
        self,
        keys: Keys | None = None,
        *,
        tokens: Sequence[int] | npt.NDArray[np.integer[Any]] | None = None,
        timeout_s: float | None = None,
    ) -> list[Why]:
        """What became of chunks, one entry each: where they are, or why they are not here. Asks all members.

        Args:
            keys: A list of names, or an array from `keys` or `chain`. Only for names, or tokens, can it be told that
                the chunk was stored under another namespace: an array says nothing of what it was made from.
            tokens: In place of keys: a prompt, for its full chunks.
            timeout_s: Members that take longer do not answer.

        Raises:
            UsageError: Neither keys nor tokens, or both.
        """
        if (keys is None) == (tokens is None):
            raise UsageError("fields 'keys' and 'tokens': give one of them")
        under: KeysUnder | None = None
        if tokens is not None:
            keys, under = self.chain(tokens), keys_under_tokens(self.namespace, tokens)
        elif keys is not None and not isinstance(keys, np.ndarray):
            under = keys_under_names(keys)
        assert keys is not None
        return explain(self._router, self.namespace, self._as_keys(keys), under, self._router.deadline(timeout_s))

    # -- about ------------------------------------------------------------------------------------------------------

    def stats(self, *, timeout_s: float | None = None) -> dict[str, Any]:
        """What every member says of itself, and the view: {"epoch", "nodes": {node_id: {...} or {"error": ...}}}."""
        router, deadline_s = self._router, self._router.deadline(timeout_s)
        report(router, self._group.digest, deadline_s)
        view = router.view(deadline_s)
        work = {
            member.node_id: partial(router.call, member.node_id, messages.GetStats(), deadline_s)
            for member in view.members
        }
        answers = router.in_parallel(work, deadline_s)
        nodes = {
            name: msgspec.json.decode(answer.stats) if isinstance(answer, messages.Stats) else {"error": str(answer)}
            for name, answer in answers.items()
        }
        return {"epoch": view.epoch, "nodes": nodes}

    def view(self) -> View:
        """The members of the cluster, and its ring, as the nearest node knows them now."""
        return self._router.refresh(self._router.deadline(None))

    def close(self) -> None:
        """Close all connections, also of the clients made by `using`; leases end."""
        self._router.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # -- inside -----------------------------------------------------------------------------------------------------

    def _as_keys(self, keys: Keys) -> KeyArray:
        if not isinstance(keys, np.ndarray):
            return self.keys(keys)
        if keys.ndim != 2 or keys.shape[1] != 2 or keys.dtype != np.uint64:
            raise UsageError(
                f"field 'keys': an array of shape {list(keys.shape)} and type {keys.dtype}; "
                "use the arrays that keys() and chain() make, of shape [n, 2] and type uint64, or a list of names"
            )
        return keys

    @cached_property
    def _tally(self) -> ClientMetrics:
        return self._router.tally(self._group.digest)

    def _note_misses(self, keys: Sequence[bytes], began_s: float) -> None:
        """These did not come by a call that began then. Now and then a node is told, and nobody waits for that."""
        router, now_s = self._router, time.monotonic()
        reasons: Counter[str] = Counter()
        absent = []
        for key in keys:
            trouble = router.read_failures.of(key, now_s=now_s) if len(router.read_failures) else None
            if trouble is not None and trouble.when_s >= began_s:
                reasons[trouble.kind] += 1
            else:
                absent.append(key)
        self._tally.missed(reasons, absent)
        if self._tally.due(now_s):
            router.in_background(partial(report, router, self._group.digest, router.deadline(None)))

    @cached_property
    def _group(self) -> QuotaGroup:
        return QuotaGroup.of(self.namespace)

    def _local(self) -> LocalConnection:
        local = self._router.local
        if local is None:
            raise PeerUnavailable("no node of the cluster runs on this host")
        return local

    def _here(self, keys: KeyArray, deadline_s: float) -> Bits:
        """Which chunks this host's node holds."""
        local = self._router.local
        if local is None:
            return np.zeros(len(keys), np.bool_)
        here = local.reader.ready(keys, now_s=time.monotonic())
        if local.posted and not here.all() and local.settle(deadline_s):
            here = local.reader.ready(keys, now_s=time.monotonic())
        return here

    def _read_here(
        self, local: LocalConnection, keys: KeyArray, into: Sequence[Scattered], deadline_s: float
    ) -> tuple[Bits, int]:
        """Which chunks came from this host's node, and their bytes in all."""
        router = self._router
        if len(keys) == 1 and isinstance(into[0], np.ndarray | memoryview) and not self._always_verify:
            try:
                if local.reader.read_one(keys.tobytes(), into[0]):
                    return _ONE_HIT, into[0].nbytes
            except (BufferError, TypeError, ValueError):
                pass  # below it is told what is wrong with it
        hits, nbytes = router.read_local(local.reader, keys, into)
        if local.posted and not hits.all() and local.settle(deadline_s):
            hits, nbytes = router.read_local(local.reader, keys, into)
        return hits, nbytes

    def _put_equal(
        self,
        keys: KeyArray,
        values: Sequence[Sequence[memoryview]],
        nbytes: int,
        *,
        parent: KeyArray | None,
        depth: int,
        chained: bool,
        wait: bool,
        hints: Hints,
        deadline_s: float,
    ) -> PutResult:
        local = self._router.local
        if local is None:
            return self._put_remote(
                keys, values, nbytes, parent=parent, depth=depth, chained=chained, hints=hints, deadline_s=deadline_s
            )
        try:
            return local.put(
                self._group,
                keys,
                values,
                nbytes,
                chained=chained,
                parent=parent,
                depth=depth,
                wait=wait,
                deadline_s=deadline_s,
                threads=self._router.copy_threads,
                hints=hints,
            )
        except (TransientError, CapacityError, LostError) as error:
            return PutResult(0, 0, len(keys), str(error))

    def _put_remote(
        self,
        keys: KeyArray,
        values: Sequence[Sequence[memoryview]],
        nbytes: int,
        *,
        parent: KeyArray | None,
        depth: int,
        chained: bool,
        hints: Hints,
        deadline_s: float,
    ) -> PutResult:
        """Store on the owner of the first key: a chain stays together."""
        router, group = self._router, self._group
        raw_parent = b"" if parent is None else chunk_keys.to_bytes(parent)
        request = messages.Write(group.digest, chunk_keys.to_bytes(keys), nbytes, chained, raw_parent, depth, *hints)
        granted = messages.Granted(b"", b"", b"")

        def pick(answer: messages.Answer) -> Runs:
            nonlocal granted
            granted = messages.expect(messages.Granted, answer)
            places = messages.array(granted.positions, "<i4", len(granted.positions) // 4).tolist()
            if not all(0 <= place < len(values) for place in places):
                raise ProtocolError("a place that is none of the keys'")
            return with_checksums(values, places)

        def push(link: Link) -> int:
            try:
                answer = link.push(request, pick, deadline_s=deadline_s)
            except LostError:  # the owner does not know this namespace (any more)
                link.call(messages.OpenNamespace(group.text), deadline_s=deadline_s)
                answer = link.push(request, pick, deadline_s=deadline_s)
            return messages.expect(messages.Count, answer).count

        try:
            view = router.view(deadline_s)
            if not view.members:
                return PutResult(0, 0, len(keys), "the cluster has no nodes")
            owner = view.member(view.ring.nodes[int(view.ring.owners(keys[:1])[0])])
            assert owner is not None
            stored = router.peers.ask(owner.address, push, deadline_s=deadline_s)
        except (TransientError, CapacityError, LostError) as error:
            return PutResult(0, 0, len(keys), str(error))
        existed = len(keys) - len(granted.positions) // 4 - granted.full
        return PutResult(stored, existed, len(keys) - existed - stored, "full" if granted.full else "")


def _hints(ttl_s: float | None, priority: int) -> Hints:
    require_hints(ttl_s, priority)
    if ttl_s == 0:
        raise UsageError("field 'ttl_s': 0 would expire at once; leave it out for no expiry")
    return Hints(ttl_s or 0.0, priority)


def _no_key(key: bytes) -> UsageError:
    return UsageError(f"field 'key': {len(key)} bytes; a key has {chunk_keys.KEY_NBYTES}: use what key() gives")
