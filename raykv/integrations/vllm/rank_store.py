"""Reads and stores the chunks of one rank of a worker.

A worker may have the KV heads of several ranks: see `tensor_ranks`. Each rank has its own namespace, so chunks of two
ranks never share a key.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from raykv import Put
from raykv.client.pipeline import NO_ANSWER
from raykv.client.puts import stores_remotely
from raykv.errors import PeerUnavailable
from raykv.integrations.gpu_layout import GpuLayout, load_here
from raykv.integrations.kv_layout import Layout, Values
from raykv.integrations.vllm.connection import Connection
from raykv.integrations.vllm.events import Reporter
from raykv.integrations.vllm.metadata import LoadedChunks, Rank, Save, Scope
from raykv.integrations.vllm.saving import RECLAIMED, Patience, Saving
from raykv.protocol.namespace import Namespace
from raykv.types import NO_HINTS, GetResult, Hints, KeyArray, Match, NodeId, PutResult

if TYPE_CHECKING:
    from raykv import Client

MESSAGE_NBYTES: Final = 16 << 20
"""Chunks for other nodes are sent in messages of about this size. A message that is late is lost as a whole."""


@dataclass(frozen=True, slots=True)
class RankCache:
    """The part of a worker's KV cache that belongs to one rank.

    Attributes:
        namespace: The namespace of the rank's chunks.
        layouts: The layout of each KV cache group, by index.
    """

    namespace: Namespace
    layouts: Mapping[int, Layout]

    @property
    def rank(self) -> Rank:
        return self.namespace.pp_rank, self.namespace.tp_rank


class _Run(NamedTuple):
    """The chunks to store for save `number`. `depth` chunks precede them. `parent` is the key of the last of these."""

    keys: KeyArray
    blocks: Sequence[Sequence[int]]
    parent: KeyArray | None
    depth: int
    hints: Hints
    number: int

    def part(self, start: int, stop: int) -> "_Run":
        parent = self.keys[start - 1 : start] if start else self.parent
        part = self._replace(keys=self.keys[start:stop], blocks=self.blocks[start:stop])
        return part._replace(parent=parent, depth=self.depth + start)

    def put(self, values: Values) -> Put:
        ttl_s, priority = self.hints
        return Put(self.keys, values, self.parent, self.depth, ttl_s=ttl_s or None, priority=priority)


class RankStore:
    """Copies the chunks of one rank between the KV cache and raykv.

    Attributes:
        cache: The part of the KV cache that belongs to the rank.
        reporter: Reports which chunks are stored. None: the engine publishes no KV events.
    """

    def __init__(
        self,
        cache: RankCache,
        connection: Connection,
        *,
        reporter: Reporter | None = None,
        clock: Callable[[], float],
    ) -> None:
        self.cache, self.reporter = cache, reporter
        self._connection, self._clock = connection, clock

    def client(self, scope: Scope) -> "Client | None":
        """Return the client for the rank's chunks. None means that no node is connected yet."""
        return self._connection.client(self.cache.namespace, scope)

    def batch_chunks(self, group: int) -> int:
        """Return the largest number of chunks of a KV cache group for one call of `load`."""
        return self.cache.layouts[group].batch_chunks

    def load(self, client: "Client", part: LoadedChunks, batch: slice, timeout_s: float) -> GetResult:
        """Load one batch of chunks into their blocks, up to the first missing chunk."""
        layout, blocks = self.cache.layouts[part.group], part.blocks[batch]
        holders, keys = part.holders[self.cache.rank][batch], client.keys(part.names[batch])
        if isinstance(layout, GpuLayout):
            began_s = self._clock()
            here = load_here(client, layout, keys, blocks, holders, timeout_s)
            start, left_s = len(here.hits), max(0.0, timeout_s - (self._clock() - began_s))
            if start == len(keys):
                return here
            return here + _load(client, layout, keys[start:], blocks[start:], holders[start:], left_s)
        return _load(client, layout, keys, blocks, holders, timeout_s)

    def fence(self) -> Any:
        """Mark the end of the kernels that compute this step's chunks: see `Layout.fence`."""
        return next(iter(self.cache.layouts.values())).fence()

    def prepare(self, chunks: Mapping[int, int], scope: Scope, timeout_s: float) -> None:
        """Request slots unless the client has enough. `chunks`: number of chunks, by index of the KV cache group."""
        client = self.client(scope)
        for group, count in chunks.items():
            if client is not None:
                # An error of this call is not reported. The later `save` fails for the same reason and reports it.
                client.prepare(self.cache.layouts[group].chunk_nbytes, count, timeout_s=timeout_s)

    def skip(self, saves: Sequence[Save]) -> None:
        """Report that no chunk of these saves is stored."""
        if self.reporter is not None:
            self.reporter.skip(saves)

    def sends(self, saves: Sequence[Save]) -> bool:
        """Whether the chunks go to other nodes: there is no node on this host, or the namespace is spread."""
        client = self._client_of(saves)
        return client is not None and stores_remotely(client.router, client.namespace.group)

    def save(self, saves: Sequence[Save], fence: Any, *, patience: Patience, flush_s: float) -> list[PutResult]:
        """Store chunks in this host's node, and collect late answers to earlier saves.

        Args:
            saves: The saves of one step. They all have the same epoch.
            patience: How long to wait for slots. After that, only slots that the client already has are used.
            flush_s: Wait at most this long for late answers.
        """
        client = self._client_of(saves)
        if client is None:
            self.skip(saves)
            return [PutResult(0, 0, chunks_of(saves), "the node is not there yet")]
        is_answered = False
        try:
            results = self._put(client, saves, fence, patience)
            late = client.flush(timeout_s=flush_s)
            is_answered = not late.posted
        finally:
            if self.reporter is not None:
                self.reporter.settle(client, saves, is_answered=is_answered)
        return [*results, late]

    def send(self, saves: Sequence[Save], fence: Any, saving: Saving, *, patience: Patience) -> list[PutResult]:
        """Store chunks on other nodes.

        Chunks are first copied into memory of this process, so that the engine can reuse their blocks while the network
        is slow. Chunks whose blocks it has reused before are skipped.

        Args:
            saves: The saves of one step. They all have the same epoch.
            saving: What the engine knows of them.
            patience: How long a message may take, and whether to send no more.
        """
        client = self._client_of(saves)
        assert client is not None, "`sends` found one"
        results: list[PutResult] = []
        try:
            batches = [
                (layout, batch)
                for index, layout in self.cache.layouts.items()
                for batch in _batches(
                    [self._run(save, patience, results) for save in saves if save.group == index], layout.staged_chunks
                )
            ]
            for number, (layout, batch) in enumerate(batches, start=1):
                results += self._send_batch(
                    client, layout, batch, fence, saving, is_last=number == len(batches), patience=patience
                )
            if not batches:
                saving.end_reading()
        finally:
            if self.reporter is not None:
                self.reporter.settle(client, saves, is_answered=True)
        return results

    def _send_batch(
        self,
        client: "Client",
        layout: Layout,
        batch: Sequence[_Run],
        fence: Any,
        saving: Saving,
        *,
        is_last: bool,
        patience: Patience,
    ) -> list[PutResult]:
        """Copy a batch of chunks out of their blocks, and send them. `is_last`: no batch of this rank follows."""
        with saving.reading() as may_read:
            copies = layout.copied([run.blocks for run in batch], fence) if may_read else None
        if is_last:
            saving.end_reading()
        results, step = [], max(1, MESSAGE_NBYTES // layout.chunk_nbytes)
        for place, run in enumerate(batch):
            for start in range(0, len(run.blocks), step):
                part = run.part(start, min(start + step, len(run.blocks)))
                if copies is None or patience.ended():
                    result = PutResult(0, 0, len(part.blocks), RECLAIMED if copies is None else "the engine stops")
                else:
                    put = part.put(copies[place][start : start + step])
                    result = client.put_many([put], wait=True, timeout_s=patience.try_s)
                results.append(result)
                if self.reporter is not None:
                    is_stored = not result.skipped and not result.posted
                    self.reporter.add(run.number, part.keys, part.depth, is_stored=is_stored)
        return results

    def _client_of(self, saves: Sequence[Save]) -> "Client | None":
        # All saves of a step have one epoch, and therefore one quota group.
        return self.client(Scope(epoch=saves[0].scope.epoch if saves else ""))

    def _put(self, client: "Client", saves: Sequence[Save], fence: Any, patience: Patience) -> list[PutResult]:
        """Copy chunks in batches into the node's memory. Commit each batch with one message."""
        results: list[PutResult] = []
        for index, layout in self.cache.layouts.items():
            if isinstance(layout, GpuLayout):
                layout.use_arena(client)
            runs = [self._run(save, patience, results) for save in saves if save.group == index]
            for batch in _batches(runs, layout.batch_chunks):
                values = layout.values([run.blocks for run in batch], fence)
                puts = [run.put(each) for run, each in zip(batch, values, strict=True)]
                result = _put_patiently(client, puts, patience)
                results.append(result)
                if self.reporter is not None:
                    is_stored = not result.skipped and not result.posted
                    for run in batch:
                        self.reporter.add(run.number, run.keys, run.depth, is_stored=is_stored)
        return results

    def _run(self, save: Save, patience: Patience, results: list[PutResult]) -> _Run:
        """Return the chunks to store.

        A `cached` save is looked up first. The leading chunks that nodes hold already are left out. If the lookup does
        not end in time, all chunks are left out.
        """
        client = self.client(save.scope)
        assert client is not None, "clients of all scopes are made from one"
        above = [] if save.parent is None else [save.parent]
        keys, start = client.keys([*above, *save.names]), len(above)
        above_key, hints = keys[:start] if above else None, save.hints or NO_HINTS
        run = _Run(keys[start:], save.blocks, above_key, save.depth, hints, save.number)
        if not save.cached:
            return run
        held, deadline_s = 0, patience.deadline_s()
        while True:
            held = client.match(run.keys, timeout_s=patience.left_s(deadline_s), record=False).count
            if held == len(run.keys) or not patience.ran_out(deadline_s) or patience.is_over():
                break
            deadline_s = patience.deadline_s()
        if self._clock() >= deadline_s and held < len(run.keys):
            results.append(PutResult(0, 0, len(run.keys)))  # no answer in time
            held = len(run.keys)
        return run.part(held, len(run.keys))


def _put_patiently(client: "Client", puts: Sequence[Put], patience: Patience) -> PutResult:
    """Store chunks, and try again with those for which the node did not answer in time.

    Raises:
        PeerUnavailable: The node does not answer.
        RayKVError: The node refused a field.
    """
    done: PutResult | None = None
    while True:
        deadline_s = patience.deadline_s()
        try:
            result = client.put_many(puts, wait=True, timeout_s=patience.left_s(deadline_s))
        except PeerUnavailable:
            if not patience.ran_out(deadline_s) or patience.is_over():
                raise
            continue
        if done is not None:  # chunks of the tries before count as existing now
            result = replace(result + replace(done, skipped=0, reason=""), existed=done.existed)
        if not result.skipped or result.reason != NO_ANSWER:
            return result
        while result.posted and not patience.is_over():  # a chunk without an answer would be written again
            late = client.flush(timeout_s=patience.try_s)
            result = replace(result, stored=result.stored + late.stored, posted=late.posted)
        if patience.is_over():
            return result
        done = result


def _load(
    client: "Client",
    layout: Layout,
    keys: KeyArray,
    blocks: Sequence[Sequence[int | None]],
    holders: Sequence[NodeId],
    timeout_s: float,
) -> GetResult:
    """Load chunks through the layout's buffers, up to the first missing chunk."""
    targets = [layout.targets(each) for each in blocks]
    got = client.get(keys, targets, match=Match(len(holders), tuple(holders)), timeout_s=timeout_s)
    layout.load(list(zip(blocks, targets, strict=True))[: got.prefix])
    return got


def _batches(runs: Sequence[_Run], size: int) -> Iterator[list[_Run]]:
    """Split the chunks into batches of at most `size` chunks."""
    chunks = [(number, place) for number, run in enumerate(runs) for place in range(len(run.blocks))]
    for start in range(0, len(chunks), size):
        batch = []
        for number, group in groupby(chunks[start : start + size], itemgetter(0)):
            places = [place for _, place in group]
            batch.append(runs[number].part(places[0], places[-1] + 1))
        yield batch


def chunks_of(saves: Sequence[Save]) -> int:
    return sum(len(save.names) for save in saves)
