"""The scheduler's side: decides in each step which chunks the workers load and save. It moves no bytes itself.

While a lookup runs on a thread, vLLM's scheduler skips the request and asks again in the next step.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.request import RequestStatus

from raykv.integrations.vllm.config import ConnectorConfig
from raykv.integrations.vllm.connection import Connection
from raykv.integrations.vllm.decision import LoadDecision
from raykv.integrations.vllm.ended import EndedRequests
from raykv.integrations.vllm.events import StoredEvents
from raykv.integrations.vllm.groups import Group, Groups
from raykv.integrations.vllm.hand_off import Notes, PrefillWaiter, id_of
from raykv.integrations.vllm.hints import PARAMETER, parse
from raykv.integrations.vllm.hit_sources import hit_sources
from raykv.integrations.vllm.lookups import NOTHING, Found, Lookups, Prompt, hand_off_deadline
from raykv.integrations.vllm.metadata import Load, LoadedChunks, Rank, Save, Scope, StepOrders, WorkerReport
from raykv.integrations.vllm.namespace import Scopes
from raykv.integrations.vllm.request_trail import EngineTrail
from raykv.integrations.vllm.stats import RayKVStats
from raykv.integrations.vllm.tracked import Asking, Lookup, Tracked, TrackedRequests, hands_over
from raykv.protocol.namespace import Namespace

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

LOOKUP_AGE_S: Final = 1.0
"""The result of a lookup is reused for this long, because vLLM asks for it in every step while the request waits."""

_COMPLETED: Final = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)


class SchedulerSide:
    """Decides what one engine loads and saves.

    Attributes:
        requests: Every request between `add` and `finish`, by its id.
        clients: Returns the clients of a scope: one for each set of ranks that store the same bytes.
        costs: The measured times of loads and computations.
        events: The KV events of the saves. None: the engine publishes no KV events.
    """

    def __init__(
        self,
        config: ConnectorConfig,
        stats: RayKVStats,
        *,
        transfer: "KVTransferConfig",
        groups: Groups,
        connection: Connection,
        namespaces: Mapping[Rank, Namespace],
        chunk_nbytes: Mapping[int, int],
    ) -> None:
        """Start the threads. `namespaces` and `chunk_nbytes` come from the handshakes of the workers."""
        self._config, self._stats, self._connection, self._groups = config, stats, connection, groups
        self._may_load, self._may_store = transfer.is_kv_consumer, transfer.is_kv_producer
        self._lookups = Lookups(config, groups, connection, namespaces)
        self.clients = self._lookups.clients
        self._decision = LoadDecision(config.load_policy, groups, chunk_nbytes)
        self.costs = self._decision.costs
        self._scopes = Scopes()
        self._has_old_blocks = False
        self._pool: BlockPool | None = None
        self._reused: set[int] = set()
        self.requests = TrackedRequests()
        self.events: StoredEvents | None = None
        self._ordered_loads: list[Load] = []
        self._last_saves: list[Save] = []
        notes = Notes(connection)
        self._ended = EndedRequests(self._lookups, groups, notes)
        self._prefills = PrefillWaiter(config, self._lookups, notes)
        self._trail = EngineTrail(self._lookups, groups, is_on=config.request_trail)

    def bind(self, manager: "KVCacheManager") -> None:
        """Use vLLM's rules for hits and vLLM's block pool. The pool reports the blocks that are reused."""
        self._groups.bind(manager.coordinator)
        self._pool = manager.block_pool

    def close(self) -> None:
        """Close the connection. No other method may be called during or after this call."""
        if self.events is not None:
            self.events.close()
        self._trail.close()
        self._prefills.close()
        self._lookups.close()
        self._ended.close()
        self._connection.close()

    # -- a request's life, in vLLM's order ------------------------------------------------------------------------

    def add(self, request: "Request") -> str:
        """Begin to track a request. Return why its first wrong hint is ignored, or "" if no hint is wrong."""
        parsed = parse(request, self._config.max_hint_s)
        for outcome, hints in (("used", parsed.used), ("ignored", len(parsed.ignored))):
            if hints:
                self._stats.count("hints", hints, outcome)
        self.requests.add(request, self._scopes.of(request), parsed.hints)
        return parsed.ignored[0] if parsed.ignored else ""

    def match(self, request: "Request", computed: int) -> int | None:
        """Return how many tokens beyond `computed` to load. vLLM may call this again for the same request.

        None means that the owners of the chunks have not answered yet, so the scheduler must ask again. The last token
        is never loaded, because the engine must compute it to sample the next one.
        """
        tracked, limit = self.requests.current(request), request.num_tokens - 1
        tracked.mixed |= self._has_old_blocks and computed > 0
        if computed and self._may_store and hands_over(request) and tracked.cached_lookup is None:
            cached = Prompt(request.block_hashes, 0, computed)
            tracked.cached_lookup = self._lookups.begin(tracked.scope, cached, record=False)
        if not self._may_load or tracked.mixed or tracked.ordered or request.skip_reading_prefix_cache:
            return 0
        if not any(self._groups.has_chunk(group, request.block_hashes, computed) for group in self._groups.each):
            return 0
        lookup = tracked.lookup
        if lookup is None or lookup.computed != computed or time.monotonic() - lookup.at_s > LOOKUP_AGE_S:
            found = self._look_up(tracked, Prompt(request.block_hashes, computed, limit))
            if found is None:
                return None
            tracked.lookup = lookup = Lookup(computed, found, time.monotonic())
            queued_tokens = self.requests.tokens_before(tracked)
            is_found = found.hit.tokens > computed and not found.is_expected
            if is_found and not self._decision.is_load_sooner(lookup, queued_tokens):
                tracked.ordered = True
                self._ordered_loads += self._decision.probe(tracked, lookup)
                self._stats.count("lookups", 1, "declined")
                return 0
        return max(0, lookup.found.hit.tokens - computed)

    def order_load(self, request: "Request", blocks: "KVCacheBlocks", tokens: int) -> None:
        """Order a load of `tokens` tokens. `blocks`: all blocks of the request, including the filled ones."""
        tracked = self.requests.current(request)
        if not tokens:
            return
        lookup = tracked.lookup
        assert lookup is not None, "the engine loads only what a lookup found"
        ids, stop = blocks.get_block_ids(), lookup.computed + tokens
        parts = [
            self._loaded(group, ids[group.index], request, lookup, stop)
            for group in self._groups.each
            if lookup.found.hit.ends[group.index]
        ]
        hand_off = self._hand_off(request) if lookup.found.is_expected else ""
        load = Load(request.request_id, tracked.scope, parts, hand_off)
        self._ordered_loads.append(load)
        if not hand_off:  # its time would tell how fast the prefill engine is, not the path
            self._decision.begin(load, lookup)
        tracked.ordered, tracked.loaded = True, stop

    def add_report(self, report: WorkerReport) -> None:
        """Learn how long loads took, which chunks are stored, and which revision the weights have."""
        self._decision.add_report(report)
        lag_s = time.monotonic() - report.now_s
        self.requests.add_loads({name: times.shifted(lag_s) for name, times in report.loads.items()})
        if self.events is not None:
            self.events.receive(report.stored)
        if report.stated and self.requests.accept(report.stated):
            self._drop_last_saves()

    def _loaded(self, group: Group, ids: Sequence[int], request: "Request", lookup: Lookup, stop: int) -> LoadedChunks:
        """Return the chunks to load for one group. `stop`: the token before which the load ends."""
        size, ends = group.block_tokens, lookup.found.hit.ends[group.index]
        missing = range(lookup.computed // size, -(-stop // size))

        def target(place: int) -> int | None:
            return ids[place] if place in missing and ids[place] != self._groups.null_block else None

        return LoadedChunks(
            group=group.index,
            names=[self._groups.name(group, request.block_hashes, end) for end in ends],
            blocks=[[target(place) for place in group.blocks_of(end)] for end in ends],
            holders={
                rank: [held[group.index, each].node_id for each in ends] for rank, held in lookup.found.held.items()
            },
        )

    def sources(self, request: "Request", tokens: int) -> dict[CacheHitSource, int]:
        """Count the `tokens` tokens of an ordered load by source."""
        tracked = self.requests[request.request_id]
        clients, lookup = self._lookups.clients(tracked.scope), tracked.lookup
        if lookup is None or not clients:
            return {CacheHitSource.EXTERNAL_UNSPECIFIED: tokens}
        near = next(iter(clients.values())).nodes_on_this_host()
        return hit_sources(lookup.found, range(lookup.computed, lookup.computed + tokens), near)

    def orders(self, step: "SchedulerOutput", idle_s: float = 0.0) -> StepOrders:
        """Return the orders of the step that vLLM has just scheduled. `idle_s`: see `StepOrders`."""
        loads, self._ordered_loads = self._ordered_loads, []
        self._decision.add_step(step.total_num_scheduled_tokens)
        lost = [save for save in self._last_saves if self._is_reused(save)]
        saves, self._last_saves = [save for save in self._last_saves if save not in lost], []
        if self.events is not None:
            self.events.drop(lost)
        reused, self._reused = self._reused, set()
        state = step.kv_connector_block_state
        for request_id in step.num_scheduled_tokens:
            self._start(self.requests[request_id])
        if self._may_store and state is not None:
            for request_id, tokens in step.num_scheduled_tokens.items():
                saves += self._saves(self.requests[request_id], tokens, state.resolve_block_ids)
            for request_id, states in state.boundary_state_offloads.items():
                if request_id in step.num_scheduled_tokens:
                    tables = state.resolve_block_ids(request_id)
                    saves += self._states(self.requests[request_id], states, tables)
            self._watch(saves)
        return StepOrders(loads, saves, reused, idle_s, self.requests.epochs.current)

    def finish(self, request: "Request") -> dict[str, Any] | None:
        """Stop tracking a request.

        Returns:
            If a decode engine continues the request: the parameters for that engine, with a ticket for each rank.
            Otherwise None.
        """
        tracked = self.requests.pop(request.request_id, None)
        if tracked is None:
            return None
        self._trail.add(tracked)
        if tracked.asking is not None:
            tracked.asking.future.cancel()
        is_completed = request.status in _COMPLETED
        if not (is_completed and hands_over(request)):
            self._ended.send_hints(tracked)
        if not hands_over(request):
            if is_completed:
                self._ended.report(tracked)
            return None
        handed = self._hand_over(tracked) if is_completed else None
        if hand_off := self._hand_off(request):
            self._ended.leave_note(hand_off, (handed or {}).get("raykv", []))
        return handed

    def _hand_over(self, tracked: Tracked) -> dict[str, Any]:
        """Return the parameters for the decode engine that continues a request."""
        request, params = tracked.request, tracked.request.kv_transfer_params or {}
        handed: dict[str, Any] = {"do_remote_prefill": True}
        if PARAMETER in params:
            handed[PARAMETER] = params[PARAMETER]
        if self._may_store and not tracked.mixed:
            deadline_s = hand_off_deadline()
            handed["raykv"] = self._lookups.tickets(
                tracked.scope,
                request.block_hashes,
                request.num_prompt_tokens,
                found=tracked.found(deadline_s),
                computed=max(tracked.cached, tracked.loaded),
                deadline_s=deadline_s,
            )
        return handed

    def take_events(self) -> list[BlockStored | BlockRemoved]:
        """Return the events of the chunks that were stored, or found to be gone, since the last call."""
        if self.events is None:
            return []
        clients = self._lookups.clients(Scope())
        return list(self.events.take(is_local=any(client.router.local_id for client in clients.values())))

    # -- epochs ---------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Begin a private epoch: nothing stored before is loaded, and no other engine loads what is stored from now on.

        vLLM resets its own cache first. If that has failed, vLLM's cache still has old blocks, and running requests
        continue with old KV. Until the next reset, requests that use old blocks neither load nor store.
        """
        pool = self._pool  # one of its blocks, the null block, is never free
        self._has_old_blocks = pool is None or pool.get_num_free_blocks() < pool.num_gpu_blocks - 1
        self._drop_last_saves()
        self.requests.reset()

    def _drop_last_saves(self) -> None:
        """Drop the waiting saves and events of the last epoch, because all saves of a step must have one epoch."""
        if self.events is not None:
            self.events.end_epoch()
        self._last_saves = []

    # -- lookups --------------------------------------------------------------------------------------------------

    def _look_up(self, tracked: Tracked, prompt: Prompt) -> Found | None:
        """Look up chunks. None means that the owners have not answered yet."""
        # A ticket names only chunks of the prompt. After a preemption, the request may also need chunks with generated
        # tokens, so the owners are asked.
        tickets = None if tracked.admission else _tickets_of(tracked.request)
        named = self._lookups.redeem(tracked.scope, prompt, tickets) if tickets else NOTHING
        if tickets and self._lookups.is_longest(named, prompt):
            self._stats.count("lookups", 1, "ticket")
            return named
        if tracked.asking is None or tracked.asking.computed != prompt.computed:
            tracked.asking = self._begin_lookup(tracked, prompt)
        if not tracked.asking.future.done():
            return None
        asking, tracked.asking = tracked.asking, None
        found = max(named, asking.future.result(), key=lambda each: each.hit.tokens)
        outcome = "ticket" if found is named else "expected" if found.is_expected else "hit"
        self._stats.count("lookups", 1, outcome if found.hit.tokens else "miss")
        return found

    def _begin_lookup(self, tracked: Tracked, prompt: Prompt) -> Asking:
        hand_off = self._hand_off(tracked.request)
        if hand_off and not tracked.admission and not hands_over(tracked.request):
            future = self._prefills.begin(tracked.scope, prompt, hand_off)
            return Asking(prompt.computed, future, follows_s=time.monotonic())
        return Asking(prompt.computed, self._lookups.begin(tracked.scope, prompt, record=tracked.lookup is None))

    def _hand_off(self, request: "Request") -> str:
        return id_of(request, self._groups.hash_tokens)

    # -- saves ----------------------------------------------------------------------------------------------------

    def _start(self, tracked: Tracked) -> None:
        """Note what a request begins with, when it is first scheduled."""
        if not tracked.started:
            tracked.start(tracked.request.num_computed_tokens)
            # vLLM called `match` for whole blocks only. The request may also begin with a part of an old block.
            tracked.mixed |= self._has_old_blocks and tracked.cached > 0

    def _saves(self, tracked: Tracked, tokens: int, resolve: Callable[[str], Sequence[Sequence[int]]]) -> list[Save]:
        """Order saves of chunks that are complete after the step's `tokens` tokens, and were not considered before.

        With asynchronous scheduling or speculative decoding, vLLM schedules tokens before their content is known. A
        chunk with such tokens is saved in a later step.

        Args:
            resolve: Returns the block ids of a request, by KV cache group. It is slow, and most steps do not need it.
        """
        request, groups = tracked.request, self._groups
        if tracked.mixed:
            return []
        known = min(request.num_computed_tokens + tokens, request.num_tokens)
        stores_decode = tracked.hints.store_decode
        if not (self._config.store_decode if stores_decode is None else stores_decode):
            known = min(known, request.num_prompt_tokens)
        known = min(known, len(request.block_hashes) * groups.hash_tokens)
        saves: list[Save] = []
        tables: Sequence[Sequence[int]] = ()
        for group in groups.each:
            offered, full = tracked.offered.get(group.index, 0), known // group.chunk_tokens
            if full <= offered:
                continue
            tracked.offered[group.index] = full
            # A request that was handed over saves no cached chunks, because the prefill engine has just looked them up.
            is_handed = _tickets_of(request) or (self._hand_off(request) and not hands_over(request))
            cached = range(offered, 0 if is_handed else min(full, tracked.cached // group.chunk_tokens))
            first = max(offered, max(tracked.cached, tracked.loaded) // group.chunk_tokens)
            computed = range(first, 0 if group.handed_over else full)
            for chunks in (cached, computed):
                if chunks:
                    tables = tables or resolve(request.request_id)
                    saves += self._runs(tracked, group, chunks, tables[group.index], cached=chunks is cached)
        return saves

    def _runs(
        self, tracked: Tracked, group: Group, chunks: range, ids: Sequence[int], *, cached: bool
    ) -> Iterable[Save]:
        """Divide chunks into runs of storable chunks. In a `whole` group every chunk is storable."""
        hashes, size, run = tracked.request.block_hashes, group.chunk_tokens, []
        for chunk in [*chunks, None]:
            blocks = [] if chunk is None else [ids[place] for place in group.blocks_of((chunk + 1) * size)]
            if chunk is not None and all(self._is_storable(group, block) for block in blocks):
                run.append((chunk, blocks))
            elif run:
                names = [self._groups.name(group, hashes, (each + 1) * size) for each, _ in run]
                depth = run[0][0]
                parent = self._groups.name(group, hashes, depth * size) if depth and group.whole else None
                tables, hints = [each for _, each in run], tracked.hints.of_stored
                save = Save(tracked.scope, group.index, names, tables, parent, depth, cached, hints)
                yield self._announced(tracked, save, (depth + len(run)) * size)
                run = []

    def _announced(self, tracked: Tracked, save: Save, end: int) -> Save:
        """Make the KV event of a save whose last chunk ends at token `end`, if the engine publishes KV events."""
        return save if self.events is None else self.events.add(tracked.request, save, end)

    def _is_storable(self, group: Group, block: int) -> bool:
        """Return whether a later hit can need this block. vLLM hashes only such blocks, unless the group is `whole`."""
        if group.whole:
            return True
        return block != self._groups.null_block and self._pool is not None and bool(self._pool.blocks[block].block_hash)

    def _states(
        self, tracked: Tracked, states: Iterable[tuple[int, int, int]], tables: Sequence[Sequence[int]]
    ) -> list[Save]:
        """Order saves of states that vLLM hands over, and of the blocks that a hit at the same token needs.

        Args:
            states: For each state, (index of its group, id of its block, number of tokens that it covers).
        """
        hashes, saves = tracked.request.block_hashes, []
        for index, block, tokens in () if tracked.mixed else states:
            if tokens > len(hashes) * self._groups.hash_tokens:
                continue
            for group in self._groups.each:
                if group.index == index:
                    blocks = [block]
                elif group.whole and tokens % group.block_tokens:
                    blocks = [tables[group.index][tokens // group.block_tokens]]
                else:
                    continue
                name, depth = self._groups.name(group, hashes, tokens), tokens // group.chunk_tokens
                hints = tracked.hints.of_stored
                save = Save(tracked.scope, group.index, [name], [blocks], None, depth, False, hints)
                saves.append(self._announced(tracked, save, tokens))
        return saves

    def save_last_states(
        self, request: "Request", tables: Sequence[Sequence[int]], states: Iterable[tuple[int, int, int]]
    ) -> None:
        """Order saves of the states at the end of a finished request. These saves begin in the next step."""
        tracked = self.requests.get(request.request_id)
        if tracked is not None and self._may_store:
            saves = self._states(tracked, states, tables)
            self._watch(saves)
            self._last_saves += saves

    def _watch(self, saves: Iterable[Save]) -> None:
        """Ask vLLM to call `_add_reused` when vLLM reuses a block of these saves. vLLM may do so at any time."""
        if self._pool is not None:
            blocks = [self._pool.blocks[block] for save in saves for chunk in save.blocks for block in chunk]
            self._pool.touch(blocks)
            self._pool.unpin_blocks(blocks, self._add_reused)

    def _add_reused(self, block: "KVCacheBlock") -> None:
        self._reused.add(block.block_id)

    def _is_reused(self, save: Save) -> bool:
        return any(block in self._reused for blocks in save.blocks for block in blocks)


def _tickets_of(request: "Request") -> Any:
    """Return the prefill engine's tickets. They are unchecked input from an HTTP request, so their type is unknown."""
    return (request.kv_transfer_params or {}).get("raykv")
