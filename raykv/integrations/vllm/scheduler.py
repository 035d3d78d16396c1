"""The scheduler's side: decides in each step which chunks the workers load and save. It moves no bytes itself.

A lookup first reads the shared memory of this host. If chunks are missing there, a separate thread asks their owners:
the nodes that know the holders. Until they answer, vLLM's scheduler skips the request in each step and asks again.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from threading import BoundedSemaphore
from typing import TYPE_CHECKING, Any, Final

from vllm.v1.request import RequestStatus

from raykv.integrations.vllm.config import ConnectorConfig
from raykv.integrations.vllm.connection import Connection
from raykv.integrations.vllm.metadata import Load, Rank, Save, Scope, StepOrders
from raykv.integrations.vllm.namespace import Scopes
from raykv.integrations.vllm.stats import RayKVStats
from raykv.protocol.namespace import Namespace
from raykv.protocol.ticket import Ticket
from raykv.types import Match

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from raykv import Client

LOOKUP_AGE_S: Final = 1.0
"""The result of a lookup is used for this long, because vLLM asks for it in every step while the request waits."""
LOOKUP_THREADS: Final = 4
IDLE_WAIT_S: Final = 0.001
"""A step without computation waits at most this long for a lookup. Without this wait the engine's thread would spin and
hold the GIL, which the lookup needs."""
HAND_OFF_WAIT_S: Final = 0.02
"""For each rank, `finish` waits at most this long until the node has committed the last chunks of a prompt."""
MAX_REPORTS: Final = 1024
"""At most this many reports of finished requests wait to be sent. Further reports are dropped. Then the eviction
policies know less, and predict worse which chunks will be read again."""

_COMPLETED: Final = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)


@dataclass(slots=True)
class Lookup:
    """The result of a lookup when the engine had `computed` tokens: `count` chunks from chunk `first` on are stored."""

    computed: int
    first: int
    count: int
    matches: dict[Rank, Match]
    at_s: float


@dataclass(slots=True)
class Tracked:
    """The state of a request since its start or its last preemption.

    Attributes:
        admission: Number of preemptions so far. A preemption resets all fields except the scope.
        asking: The running lookup: (number of tokens that the engine had computed when it began, future result).
        ordered: Whether a load was ordered. There is no second load, since a failing load could repeat for ever.
        started: Whether the request was scheduled. From then on `cached` and `loaded` are known.
        cached: Number of leading chunks that the engine found in its own cache.
        loaded: Range of the chunks that were loaded. They follow the cached chunks.
        offered: Number of leading chunks that were considered for a save. They need no further save.
    """

    request: "Request"
    scope: Scope
    admission: int = 0
    lookup: Lookup | None = None
    asking: tuple[int, Future[dict[Rank, Match]]] | None = None
    ordered: bool = False
    started: bool = False
    cached: int = 0
    loaded: range = range(0)
    offered: int = 0

    def start(self, computed: int) -> None:
        """Set `cached` and `loaded` when the request is first scheduled.

        `computed` is the number of leading chunks that the engine need not compute: cached and loaded chunks together.
        If a load has failed, this number is lower than planned.
        """
        self.started = True
        self.loaded = range(self.loaded.start, max(self.loaded.start, min(self.loaded.stop, computed)))
        self.cached = self.loaded.start if self.loaded else computed


class SchedulerSide:
    """Decides what one engine loads and saves.

    Attributes:
        requests: Every request between `add` and `finish`, by its id.
    """

    def __init__(
        self,
        config: ConnectorConfig,
        stats: RayKVStats,
        *,
        transfer: "KVTransferConfig",
        block_tokens: int,
        hash_tokens: int,
        connection: Connection,
        namespaces: Mapping[Rank, Namespace],
    ) -> None:
        """Start the threads. The workers have sent `namespaces`. One block hash covers `hash_tokens` tokens."""
        self._config, self._stats, self._connection = config, stats, connection
        self._namespaces = dict(sorted(namespaces.items()))
        self._chunk_blocks = config.chunk_blocks
        self._chunk_tokens = block_tokens * config.chunk_blocks
        self._block_tokens = block_tokens
        self._hashes_per_chunk = self._chunk_tokens // hash_tokens
        self._may_load, self._may_store = transfer.is_kv_consumer, transfer.is_kv_producer
        self._scopes = Scopes()
        self.requests: dict[str, Tracked] = {}
        self._ordered_loads: list[Load] = []
        self._threads = ThreadPoolExecutor(LOOKUP_THREADS, thread_name_prefix="raykv-lookup")
        self._reporter = ThreadPoolExecutor(1, thread_name_prefix="raykv-report")
        self._report_places = BoundedSemaphore(MAX_REPORTS)

    def close(self) -> None:
        """Close the connection. The caller makes no other call during or after this one."""
        self._threads.shutdown(cancel_futures=True)
        self._reporter.shutdown(cancel_futures=True)
        self._connection.close()

    # -- a request's life, in vLLM's order ------------------------------------------------------------------------

    def add(self, request: "Request") -> None:
        self.requests[request.request_id] = Tracked(request, self._scopes.of(request))

    def match(self, request: "Request", computed: int) -> int | None:
        """Return how many tokens beyond `computed` can be loaded. vLLM may call this again for the same request.

        None means that the owners of the chunks have not answered yet, so the scheduler must ask again. The engine
        always computes the last token, because it samples the next token from the output of the last one.
        """
        tracked = self._current(request)
        first, last = computed // self._chunk_tokens, (request.num_tokens - 1) // self._chunk_tokens
        if not self._may_load or tracked.ordered or request.skip_reading_prefix_cache or last <= first:
            return 0
        lookup = tracked.lookup
        if lookup is None or lookup.computed != computed or time.monotonic() - lookup.at_s > LOOKUP_AGE_S:
            lookup = self._look_up(tracked, computed, first, last)
            if lookup is None:
                return None
            tracked.lookup = lookup
        return (first + lookup.count) * self._chunk_tokens - computed if lookup.count else 0

    def order_load(self, request: "Request", blocks: "KVCacheBlocks", tokens: int) -> None:
        """Order a load of `tokens` tokens. `blocks`: all blocks of the request. The first ones are already filled."""
        tracked = self._current(request)
        if not tokens:
            return
        lookup = tracked.lookup
        assert lookup is not None, "the engine loads only what a lookup found"
        (ids,) = blocks.get_block_ids()
        present = lookup.computed // self._block_tokens
        end = (lookup.computed + tokens) // self._block_tokens
        chunks = range(lookup.first, -(-end // self._chunk_blocks))
        self._ordered_loads.append(
            Load(
                request_id=request.request_id,
                scope=tracked.scope,
                names=self._names(request, chunks),
                blocks=[
                    [ids[block] if present <= block < end else None for block in self._blocks_of(chunk)]
                    for chunk in chunks
                ],
                matches=lookup.matches,
            )
        )
        tracked.ordered, tracked.loaded = True, chunks

    def orders(self, step: "SchedulerOutput") -> StepOrders:
        """Return the orders of the step that vLLM has just scheduled."""
        loads, self._ordered_loads = self._ordered_loads, []
        if not step.total_num_scheduled_tokens:
            self._await_lookup()
        saves = []
        if self._may_store:
            resolve = step.kv_connector_block_state.resolve_block_ids
            for request_id, tokens in step.num_scheduled_tokens.items():
                saves += self._saves(self.requests[request_id], tokens, resolve)
        released = step.finished_req_ids | (step.preempted_req_ids or set())
        return StepOrders(loads, saves, released, computes=step.total_num_scheduled_tokens > 0)

    def finish(self, request: "Request") -> dict[str, Any] | None:
        """Stop tracking a request.

        Returns:
            If a decode engine continues the request: the parameters for that engine, with a ticket for each rank.
            Otherwise None.
        """
        tracked = self.requests.pop(request.request_id, None)
        if tracked is None or request.status not in _COMPLETED:
            return None
        if not (request.kv_transfer_params or {}).get("do_remote_decode"):
            self._report(tracked)
            return None
        handed: dict[str, Any] = {"do_remote_prefill": True}
        if self._may_store:
            handed["raykv"] = self._tickets(tracked)
        return handed

    # -- lookups --------------------------------------------------------------------------------------------------

    def _current(self, request: "Request") -> Tracked:
        tracked = self.requests[request.request_id]
        if tracked.admission != request.num_preemptions:
            tracked = Tracked(request, tracked.scope, admission=request.num_preemptions)
            self.requests[request.request_id] = tracked
        return tracked

    def _clients(self, scope: Scope) -> dict[Rank, "Client"]:
        """Return one client per rank; empty while no node is connected."""
        found = {rank: self._connection.client(namespace, scope) for rank, namespace in self._namespaces.items()}
        return {rank: client for rank, client in found.items() if client is not None}

    def _look_up(self, tracked: Tracked, computed: int, first: int, last: int) -> Lookup | None:
        """Look up the chunks `first` to `last` - 1. None means that the owners have not answered yet."""
        request = tracked.request
        clients = self._clients(tracked.scope)
        # A ticket names only chunks of the prompt. After a preemption, the request may also need chunks with generated
        # tokens, so the owners are asked.
        tickets = None if tracked.admission else _tickets_of(request)
        if tickets:
            matches = self._redeem(clients, tickets, self._names(request, range(last)), first)
        else:
            if tracked.asking is None or tracked.asking[0] != computed:
                names = self._names(request, range(first, last))
                tracked.asking = computed, self._begin(clients, names, record=tracked.lookup is None)
            if not tracked.asking[1].done():
                return None
            asking, tracked.asking = tracked.asking[1], None
            matches = asking.result()
        count = min((match.count for match in matches.values()), default=0)
        self._stats.count("lookups", 1, ("ticket" if tickets else "hit") if count else "miss")
        return Lookup(computed, first, count, matches, time.monotonic())

    def _begin(
        self, clients: Mapping[Rank, "Client"], names: list[bytes], *, record: bool
    ) -> Future[dict[Rank, Match]]:
        """Begin a lookup. If all chunks are in this host's memory, the returned future is done already."""
        if all(client.exists(client.keys(names), timeout_s=0.0).all() for client in clients.values()):
            done = Future[dict[Rank, Match]]()
            done.set_result(self._ask(clients, names, record=record))
            return done
        return self._threads.submit(self._ask, clients, names, record=record)

    def _await_lookup(self) -> None:
        """Wait up to IDLE_WAIT_S for the next lookup to end, if any is running."""
        running = [tracked.asking[1] for tracked in self.requests.values() if tracked.asking]
        if running:
            wait(running, IDLE_WAIT_S, FIRST_COMPLETED)

    def _ask(self, clients: Mapping[Rank, "Client"], names: list[bytes], *, record: bool) -> dict[Rank, Match]:
        """Look up these chunks, rank by rank. Each lookup covers only the prefix found for the previous rank."""
        matches: dict[Rank, Match] = {}
        deadline_s = time.monotonic() + self._config.lookup_timeout_s
        for rank, client in clients.items():
            left_s = deadline_s - time.monotonic()
            if not names or left_s <= 0:
                return {}
            is_new = record and not matches  # the trace has each request once, for the first rank
            matches[rank] = client.match(client.keys(names), timeout_s=left_s, promote=True, record=is_new)
            names = names[: matches[rank].count]
        return matches

    def _redeem(
        self, clients: Mapping[Rank, "Client"], tickets: Any, names: list[bytes], first: int
    ) -> dict[Rank, Match]:
        """Read the holders of the chunks from the prefill engine's tickets, one per rank. Skip chunks before `first`.

        Args:
            names: Names of the chunks from the start of the prompt, as in the tickets.
        """
        if not isinstance(tickets, list) or len(tickets) != len(clients):
            return {}
        matches = {}
        for (rank, client), fields in zip(clients.items(), tickets, strict=True):
            found = client.match(client.keys(names), ticket=Ticket.from_json(fields), record=False)
            matches[rank] = Match(max(0, found.count - first), found.holders[first:])
        return matches

    def _tickets(self, tracked: Tracked) -> list[dict[str, Any]]:
        """Make a ticket per rank for all full chunks of the prompt."""
        names = self._names(tracked.request, range(tracked.request.num_prompt_tokens // self._chunk_tokens))
        clients = self._clients(tracked.scope)
        tickets = []
        for client in clients.values():
            keys, deadline_s = client.keys(names), time.monotonic() + HAND_OFF_WAIT_S
            match = client.match(keys, timeout_s=self._config.lookup_timeout_s, record=False)
            while match.count < len(keys) and time.monotonic() < deadline_s:
                match = client.match(keys, timeout_s=self._config.lookup_timeout_s, record=False)
            tickets.append(client.ticket(keys, match=match).to_json())
        return tickets

    def _report(self, tracked: Tracked) -> None:
        """Report a finished request to the nodes, on a thread. After a hand-off only the decode engine reports.

        From the request's number of output tokens, eviction policies predict which chunks will be read again. A failed
        report is dropped.
        """
        request = tracked.request
        names = self._names(request, range(request.num_prompt_tokens // self._chunk_tokens))
        if names and request.num_output_tokens:
            for client in self._clients(tracked.scope).values():
                if self._report_places.acquire(blocking=False):
                    keys, tokens = client.keys(names), request.num_output_tokens
                    report = self._reporter.submit(client.hint, keys, output_tokens=tokens)
                    report.add_done_callback(lambda _: self._report_places.release())

    # -- chunks ---------------------------------------------------------------------------------------------------

    def _names(self, request: "Request", chunks: range) -> list[bytes]:
        """Return the names of chunks. A name is the engine's hash of all tokens up to the chunk's end."""
        return [bytes(request.block_hashes[(chunk + 1) * self._hashes_per_chunk - 1]) for chunk in chunks]

    def _blocks_of(self, chunk: int) -> range:
        return range(chunk * self._chunk_blocks, (chunk + 1) * self._chunk_blocks)

    def _saves(self, tracked: Tracked, tokens: int, resolve: Callable[[str], Sequence[Sequence[int]]]) -> list[Save]:
        """Order saves of the chunks that the step's `tokens` tokens complete, and that were not considered before.

        With asynchronous scheduling or speculative decoding, vLLM schedules tokens before their content is known. A
        chunk with such tokens is saved in a later step.

        Args:
            resolve: Returns the block ids of a request, by KV cache group. It is slow, and most steps do not need it.
        """
        request = tracked.request
        if not tracked.started:
            tracked.start(request.num_computed_tokens // self._chunk_tokens)
        known = min(request.num_computed_tokens + tokens, request.num_tokens)
        if not self._config.store_decode:
            known = min(known, request.num_prompt_tokens)
        full = min(known // self._chunk_tokens, len(request.block_hashes) // self._hashes_per_chunk)
        if full <= tracked.offered:
            return []
        # The prefill engine has just looked up the chunks of its ticket, so this engine need not save them.
        cached = range(tracked.offered, 0 if _tickets_of(request) else min(full, tracked.cached))
        computed = range(max(tracked.offered, tracked.cached, tracked.loaded.stop), full)
        tracked.offered = full
        ids = resolve(request.request_id)[0] if cached or computed else ()
        return [self._save(tracked, chunks, ids, cached=chunks is cached) for chunks in (cached, computed) if chunks]

    def _save(self, tracked: Tracked, chunks: range, block_ids: Sequence[int], *, cached: bool) -> Save:
        names = self._names(tracked.request, range(max(0, chunks.start - 1), chunks.stop))
        parent = names.pop(0) if chunks.start else None
        blocks = [[block_ids[block] for block in self._blocks_of(chunk)] for chunk in chunks]
        return Save(tracked.request.request_id, tracked.scope, names, blocks, parent, chunks.start, cached)


def _tickets_of(request: "Request") -> Any:
    """Return the prefill engine's tickets. They are unchecked input from an HTTP request, so their type is unknown."""
    return (request.kv_transfer_params or {}).get("raykv")
