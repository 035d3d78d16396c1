"""Both of vLLM's schedulers over a toy model: every slot of the KV cache must hold the hash of its prefix.

The slot of a token holds a hash of all tokens up to this token, in the key cache of each layer. Before a step computes
anything, all slots that it reads are compared with the hashes that they must hold. So the test finds every wrong load
at once: other bytes, too late, or into the wrong place. It also finds every block that was saved before the block was
full. Requests, the ends of loads, and aborts are random. There are so few blocks that requests are often preempted.
"""

import json
import os
import random
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from vllm import SamplingParams  # noqa: E402
from vllm.config import KVEventsConfig  # noqa: E402
from vllm.distributed.kv_events import BlockRemoved, BlockStored  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.base import (  # noqa: E402
    KVConnectorHandshakeMetadata,
    KVConnectorRole,
)
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.utils.hashing import get_hash_fn_by_name  # noqa: E402
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash  # noqa: E402
from vllm.v1.core.sched.async_scheduler import AsyncScheduler  # noqa: E402
from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402
from vllm.v1.kv_cache_interface import (  # noqa: E402
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput  # noqa: E402
from vllm.v1.request import Request, RequestStatus  # noqa: E402
from vllm.v1.structured_output import StructuredOutputManager  # noqa: E402

import raykv  # noqa: E402
from raykv.client.router import Router  # noqa: E402
from raykv.integrations.vllm import connector as connector_module  # noqa: E402
from raykv.integrations.vllm import costs as costs_module  # noqa: E402
from raykv.integrations.vllm import ended as ended_module  # noqa: E402
from raykv.integrations.vllm import epochs as epochs_module  # noqa: E402
from raykv.integrations.vllm import lookups as lookups_module  # noqa: E402
from raykv.integrations.vllm import removals as removals_module  # noqa: E402
from raykv.integrations.vllm import tracked as tracked_module  # noqa: E402
from raykv.integrations.vllm import worker as worker_module  # noqa: E402
from raykv.integrations.vllm.connector import RayKVConnector  # noqa: E402
from raykv.integrations.vllm.decision import LoadDecision  # noqa: E402
from raykv.integrations.vllm.epochs import Statement  # noqa: E402
from raykv.integrations.vllm.metadata import Load, Scope  # noqa: E402
from raykv.protocol import messages  # noqa: E402
from raykv.transport.link import Link  # noqa: E402
from tests.support.nodes import stop_process, wait_until  # noqa: E402

pytestmark = pytest.mark.vllm

BLOCK_TOKENS, BLOCKS, LAYERS = 4, 40, 2
WINDOW = 7  # tokens: the current token and the 6 tokens before it, which lie in 2 or 3 blocks
VOCABULARY = 100
SPECIES = 12  # number of different prefixes of prompts


def slot_values(tokens: list[int], seed: int) -> list[int]:
    """Return the KV that the toy model computes: for each token, the hash of all tokens up to it."""
    values, value = [], seed
    for token in tokens:
        value = (value * 6364136223846793005 + token * 1442695040888963407 + 1) % (1 << 62)
        values.append(value)
    return values


def next_token(tokens: list[int]) -> int:
    return slot_values(tokens, 7)[-1] % VOCABULARY


@dataclass
class Running:
    """A request in the model runner.

    Attributes:
        tables: For each group, the list of the request's blocks.
        mixed: Whether the request reads KV of old weights. Everything that it computes is then wrong.
    """

    tokens: list[int]
    salt: str
    tables: list[list[int]] = field(default_factory=list)
    mixed: bool = False


def groups_of(kinds: str, tokens: int, heads: int) -> list[KVCacheGroupSpec]:
    """Make one group for each letter: f (full attention), w (sliding window), s (a state at the end of a block)."""
    attention = {"num_kv_heads": heads, "head_size": tokens // BLOCK_TOKENS, "dtype": torch.int64}
    full = FullAttentionSpec(block_size=tokens, **{**attention, "head_size": 1})
    specs: dict[str, Any] = {
        "f": full,
        "w": SlidingWindowSpec(block_size=tokens, sliding_window=WINDOW, **{**attention, "head_size": 1}),
        "s": MambaSpec(
            block_size=tokens,
            shapes=((2,),),
            dtypes=(torch.int64,),
            mamba_cache_mode="align",
            page_size_padded=full.page_size_bytes,
        ),
    }
    return [
        KVCacheGroupSpec([f"group.{place}.layer.{layer}" for layer in range(LAYERS)], specs[kind])
        for place, kind in enumerate(kinds)
    ]


class Task(Future[Any]):
    """A call that has not run yet."""

    slow: "Slow"


class Slow:
    """An executor that runs its tasks (lookups, loads and saves) at random times.

    All tasks run on the thread of the test, so the same seed gives the same order of events.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._waiting: deque[tuple[Task, Callable[[], Any]]] = deque()

    def submit(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> Task:
        future = Task()
        future.slow = self
        self._waiting.append((future, lambda: call(*arguments, **options)))
        return future

    def run_some(self) -> None:
        while self._waiting and self._rng.random() < 0.4:
            self._waiting.rotate(self._rng.randrange(len(self._waiting)))
            self._run_first()

    def _run_first(self) -> None:
        future, task = self._waiting.popleft()
        if future.set_running_or_notify_cancel():
            future.set_result(task())

    def shutdown(self, **_: Any) -> None:
        while self._waiting:
            self._run_first()


class Engine:
    """An engine with vLLM's scheduler and the real connector. Only the model is a toy."""

    def __init__(
        self,
        model: Path,
        address: str,
        rng: random.Random,
        *,
        overlap: bool = False,
        chunk_blocks: int = 1,
        threads: bool = False,
        kinds: str = "f",
        block_tokens: int = BLOCK_TOKENS,
        publishes: bool = False,
        store_tp_size: int = 1,
        data_parallel_size: int = 1,
        **options: Any,
    ) -> None:
        """Make an engine with one group of layers for each letter in `kinds`: see `groups_of`.

        The engine has one KV head for each rank under which it stores its KV.

        With `threads`, lookups, loads and saves run on the connector's own threads. With `publishes`, the connector's
        KV events are appended to `events`.
        """
        # The timeouts are long, so that a busy machine skips nothing.
        patient = {"store_timeout_s": 5.0, "lookup_timeout_s": 5.0, "load_policy": "always"}
        config = EngineArgs(
            model=str(model),
            skip_tokenizer_init=True,
            dtype="float32",
            block_size=block_tokens,
            enable_prefix_caching=True,
            max_model_len=128,
            max_num_batched_tokens=24,
            max_num_seqs=8,
            distributed_executor_backend="uni",
            load_format="dummy",
            kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null") if publishes else None,
            kv_transfer_config={
                "kv_connector": "RayKVConnector",
                "kv_connector_module_path": "raykv.integrations.vllm",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"address": address, "chunk_blocks": chunk_blocks, **patient, **options}
                | {"store_tp_size": store_tp_size},
            },
        ).create_engine_config()
        config.scheduler_config.async_scheduling = overlap
        config.parallel_config.data_parallel_size = data_parallel_size
        if "s" in kinds:
            config.cache_config.mamba_cache_mode = "align"
        self.kinds, self.block_tokens, self.chunk_blocks = kinds, block_tokens, chunk_blocks
        self.blocks = BLOCKS * (len(kinds) + 1) // 2
        config.cache_config.num_gpu_blocks = self.blocks
        page, self.heads = block_tokens * store_tp_size * 2 * 8, store_tp_size
        groups = groups_of(kinds, block_tokens, self.heads)
        cache = KVCacheConfig(
            num_blocks=self.blocks,
            kv_cache_tensors=[
                KVCacheTensor(self.blocks * page, [group.layer_names[layer] for group in groups], 0, page)
                for layer in range(LAYERS)
            ],
            kv_cache_groups=groups,
            hash_block_size=BLOCK_TOKENS,
        )
        # Layer n of every group uses the same memory, because the groups take their blocks from one pool.
        self.slots = torch.full((LAYERS, self.blocks, self.heads, block_tokens, 2), -1, dtype=torch.int64)
        self.calls = Slow(rng)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(connector_module, "CONNECT_TIMEOUT_S", 5.0)
            if not threads:
                patch.setattr(worker_module, "ThreadPoolExecutor", lambda *_, **__: self.calls)
                patch.setattr(ended_module, "ThreadPoolExecutor", lambda *_, **__: self.calls)
                patch.setattr(lookups_module, "ThreadPoolExecutor", lambda *_, **__: self.calls)
                patch.setattr(epochs_module, "ThreadPoolExecutor", lambda *_, **__: self.calls)
            self.scheduler = (AsyncScheduler if overlap else Scheduler)(
                vllm_config=config,
                kv_cache_config=cache,
                structured_output_manager=StructuredOutputManager(config),
                block_size=block_tokens,
                hash_block_size=BLOCK_TOKENS,
                log_stats=True,
            )
            self.worker = RayKVConnector(config, KVConnectorRole.WORKER, cache)
            caches = {}
            for kind, group in zip(kinds, groups, strict=True):
                for name, slots in zip(group.layer_names, self.slots, strict=True):
                    caches[name] = [slots.view(self.blocks, -1)[:, :2]] if kind == "s" else slots
            self.worker.register_kv_caches(caches)
            handshake = {(0, 0): self.worker.get_handshake_metadata()}
            self.scheduler.connector.set_xfer_handshake_metadata_pp_aware(handshake)
        self.events: list[BlockStored | BlockRemoved] = []
        self.sources: list[tuple[int, dict[str, int]]] = []
        self.counted: Counter[str] = Counter()
        self._record(self.scheduler.connector)
        self.hasher = get_request_block_hasher(BLOCK_TOKENS, get_hash_fn_by_name("sha256"))
        self.rng, self.overlap = rng, overlap
        self.running: dict[str, Running] = {}
        self.in_flight: deque[tuple[Any, ModelRunnerOutput]] = deque()
        self.outputs: dict[str, list[int]] = {}
        self.loaded_tokens = 0
        self.loads: dict[str, Load] = {}
        self.probes = 0
        self.weights, self.has_old_blocks = 0, False

    def _record(self, connector: RayKVConnector) -> None:
        """Record the connector's KV events, and the sources of each hit."""
        take, sources_of = connector.take_events, connector.get_external_cache_hit_sources

        def take_events() -> list[BlockStored | BlockRemoved]:
            taken = list(take())
            self.events += taken
            return taken

        def get_external_cache_hit_sources(request: Request, tokens: int) -> dict[Any, int]:
            sources = sources_of(request, tokens)
            self.sources.append((tokens, {source.value: count for source, count in sources.items()}))
            return sources

        connector.take_events = take_events
        connector.get_external_cache_hit_sources = get_external_cache_hit_sources

    def run(self) -> None:
        """Make steps until the engine is idle."""
        while self.scheduler.has_requests() or self.in_flight:
            self.step()

    def add(
        self, name: str, prompt: list[int], *, max_tokens: int, salt: str, params: Any = None, **options: Any
    ) -> None:
        """Add a request. `options`: fields of vLLM's Request."""
        request = Request(
            request_id=name,
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(
                max_tokens=max_tokens, ignore_eos=True, extra_args={"kv_transfer_params": params} if params else None
            ),
            pooling_params=None,
            cache_salt=salt or None,
            block_hasher=self.hasher,
            **options,
        )
        self.outputs[name] = []
        self.scheduler.add_request(request)

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        del self.outputs[name]

    def reset(self, weights: int, *, preempt: bool) -> bool:
        """Reset the caches and change the weights. Return False if vLLM refuses because of loads in flight.

        Without `preempt`, running requests go on with KV of the old weights, and vLLM does not clear its own cache.
        """
        if preempt and self.rng.random() < 0.9:
            self.process()  # as vLLM does in a pause
        running = [request.request_id for request in self.scheduler.running] if preempt else []
        try:
            cleared = self.scheduler.reset_prefix_cache(preempt, reset_connector=True)
        except RuntimeError:
            return False
        finally:
            for name in running:  # vLLM drops the output of the last step
                self.running[name].tokens = list(self.scheduler.requests[name].all_token_ids)
        self.weights, self.has_old_blocks = weights, not cleared
        return True

    def state(self, revision: str) -> None:
        self.worker.worker_side.stated = [Statement.now(revision)]

    def step(self) -> list[Any]:
        """Run one iteration of the engine's loop. With overlap, the results of a step are processed one step later."""
        step = self.scheduler.schedule()
        self.in_flight.append((step, self.execute(step)))
        return self.process(keep=1 if self.overlap and step.total_num_scheduled_tokens else 0)

    def process(self, *, keep: int = 0) -> list[Any]:
        """Process the results of all steps but the last `keep`. Return the outputs of finished requests."""
        done = []
        while len(self.in_flight) > keep:
            for outputs in self.scheduler.update_from_output(*self.in_flight.popleft()).values():
                done += [output for output in outputs.outputs if output.finish_reason is not None]
                for output in outputs.outputs:
                    if output.request_id in self.outputs:
                        self.outputs[output.request_id] += output.new_token_ids
        return done

    def execute(self, step: Any) -> ModelRunnerOutput:
        """Run the worker's part of a step, with the connector's hooks in the same order as in vLLM."""
        orders = step.kv_connector_metadata
        self.worker.handle_preemptions(orders)
        self.update(step)
        self.worker.bind_connector_metadata(orders)
        sampled = [self.compute(name, count) for name, count in step.num_scheduled_tokens.items()]
        self.worker.start_load_kv(None)
        self.worker.wait_for_save()
        self.calls.run_some()
        output = KVConnectorOutput()
        results = self.worker.get_transfer_results(step.finished_req_ids)
        output.finished_recving, output.failed_recving = results.finished_recving, results.failed_recving
        output.invalid_block_ids = self.worker.get_block_ids_with_load_errors()
        self.loads |= {load.request_id: load for load in orders.loads}
        self.probes += sum(load.is_probe for load in orders.loads)
        for name in results.finished_recving:
            load = self.loads.pop(name)
            if name not in results.failed_recving and name in self.scheduler.connector.scheduler_side.requests:
                self.check_load(load, output.invalid_block_ids)
        output.kv_connector_stats = self.worker.get_kv_connector_stats()
        output.kv_connector_worker_meta = self.worker.build_connector_worker_meta()
        if output.kv_connector_stats is not None:
            self.counted.update(output.kv_connector_stats.data)
            self.loaded_tokens += output.kv_connector_stats.data.get("reused_tokens", 0)
        self.worker.clear_connector_metadata()
        names = list(step.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: place for place, name in enumerate(names)},
            sampled_token_ids=sampled,
            kv_connector_output=output,
        )

    def update(self, step: Any) -> None:
        for name in step.finished_req_ids:
            self.running.pop(name, None)
        for new in step.scheduled_new_reqs:
            request = self.scheduler.requests[new.req_id]
            self.running[new.req_id] = Running(
                list(new.prompt_token_ids), request.cache_salt or "", [list(ids) for ids in new.block_ids]
            )
        cached = step.scheduled_cached_reqs
        for name, new_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            known = self.running[name]
            if name in cached.resumed_req_ids:
                known.tables, known.mixed = [list(ids) for ids in new_ids], False
            elif new_ids is not None:
                for table, ids in zip(known.tables, new_ids, strict=True):
                    table += ids
        for source, target in step.kv_cache_block_copies or ():
            self.slots[:, target] = self.slots[:, source]

    def compute(self, name: str, count: int) -> list[int]:
        """Check the slots that are read, and write those that are computed. Sample a token after the last known one."""
        known, request = self.running[name], self.scheduler.requests[name]
        # The scheduler has already added the tokens of this step to its counter.
        start = request.num_computed_tokens - count
        stop = start + count
        assert stop <= len(known.tokens)
        values = self.values(known.tokens[:stop], known.salt)
        for place, kind in enumerate(self.kinds):
            for layer in range(LAYERS):
                check = self.compute_state if kind == "s" else self.compute_slots
                first = max(0, start - WINDOW + 1) if kind == "w" else 0
                here = [value + 10 * place + layer for value in values]
                known.mixed |= not check(layer, known.tables[place], here, first, start)
                assert not known.mixed or self.has_old_blocks, f"{name}: a slot does not hold its prefix"
                if known.mixed:  # overwrite the values just written with wrong ones
                    check(layer, known.tables[place], [-1 - value for value in here], first, start)
        if stop < len(known.tokens):
            return []
        known.tokens.append(next_token(known.tokens))
        return known.tokens[-1:]

    def values(self, tokens: list[int], salt: str) -> list[int]:
        return slot_values(tokens, len(salt) + 1000 * self.weights)

    def check_load(self, load: Load, invalid: set[int]) -> None:
        """Check that all blocks that arrived hold what the present weights compute."""
        request, size = self.scheduler.requests[load.request_id], self.block_tokens
        loaded = self.scheduler.connector.scheduler_side.requests[load.request_id].loaded
        values = self.values(list(request.all_token_ids), request.cache_salt or "")[:loaded]
        tables = self.scheduler.kv_cache_manager.get_block_ids(load.request_id)
        for part in load.parts:
            if self.kinds[part.group] == "s":
                continue
            for block in {block for chunk in part.blocks for block in chunk if block is not None} - invalid:
                start = tables[part.group].index(block) * size
                for head in range(self.heads):
                    wanted = [value + 10 * part.group + 100 * head for value in values[start : start + size]]
                    held = self.slots[0, block, head, : len(wanted), 0].tolist()
                    assert held == wanted, f"{load.request_id}: a load brought KV of other tokens, weights or heads"

    def compute_slots(self, layer: int, table: list[int], values: list[int], first: int, start: int) -> bool:
        """Compute the slots from `start` on. Return whether the slots `first` to `start` - 1 hold their prefix."""
        size, is_right = self.block_tokens, True
        for head in range(self.heads):
            slots, wanted = self.slots[layer, :, head, :, 0], [value + 100 * head for value in values]
            held = [int(slots[table[p // size], p % size]) for p in range(first, start)]
            for p in range(start, len(wanted)):
                slots[table[p // size], p % size] = wanted[p]
            is_right = is_right and held == wanted[first:start]
        return is_right

    def compute_state(self, layer: int, table: list[int], values: list[int], first: int, start: int) -> bool:
        """Write the value of the last token to the block of this token. Return whether the old state was right."""
        states = self.slots[layer].view(self.blocks, -1)[:, :2]
        state = int(states[table[(start - 1) // self.block_tokens], 0]) if start else None
        states[table[(len(values) - 1) // self.block_tokens]] = values[-1]
        return state is None or state == values[start - 1]

    def close(self) -> None:
        self.worker.shutdown()
        self.scheduler.connector.shutdown()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 64}
    more = {"num_hidden_layers": 2, "num_attention_heads": 1, "vocab_size": VOCABULARY, "max_position_embeddings": 512}
    (folder / "config.json").write_text(json.dumps(config | more))
    return folder


def wait_or_run(futures: list[Future[Any]], *limits: Any) -> None:
    """Wait for futures. A `Task` does not run by itself, so instead of waiting for it, run some tasks at random."""
    for future in futures:
        if isinstance(future, Task):
            future.slow.run_some()
        else:
            wait([future], *limits)


@pytest.fixture(autouse=True)
def waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "wait", wait_or_run)
    monkeypatch.setattr(lookups_module, "wait", wait_or_run)
    monkeypatch.setattr(tracked_module, "wait", wait_or_run)


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = SimpleNamespace(rank_in_group=0)
    monkeypatch.setattr(connector_module, "get_tp_group", lambda: alone)
    monkeypatch.setattr(connector_module, "get_pp_group", lambda: alone)
    init_none_hash(get_hash_fn_by_name("sha256"))


@pytest.fixture
def cluster() -> Iterator[raykv.EmbeddedCluster]:
    with raykv.embedded(nodes=2, arena_nbytes="32 MiB", extent_nbytes="1 MiB") as made:
        yield made


def draw_prompt(rng: random.Random) -> list[int]:
    """Draw a prompt. Prompts share prefixes of any length, and end anywhere in a block."""
    base = random.Random(rng.randrange(SPECIES))
    prompt = [base.randrange(VOCABULARY) for _ in range(60)][: rng.randint(1, 60)]
    return prompt + [rng.randrange(VOCABULARY) for _ in range(rng.randint(0, 8))]


def expected(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(1, 5))]
SPEC_KINDS = {"f": "full_attention", "w": "sliding_window", "s": "mamba"}
SHAPES: list[dict[str, Any]] = [
    {},
    {"chunk_blocks": 3, "store_tp_size": 2},
    {"kinds": "w"},
    {"kinds": "fww"},
    {"kinds": "fs"},
    {"kinds": "sfws"},
    {"kinds": "fs", "block_tokens": 2 * BLOCK_TOKENS},  # hits may end inside a block
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("overlap", [False, True], ids=["in step", "overlapped"])
@pytest.mark.parametrize("seed", SEEDS)
def test_every_slot_holds_its_prefix(
    model: Path,
    cluster: raykv.EmbeddedCluster,
    seed: int,
    overlap: bool,
    shape: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
):
    rng = random.Random(f"{seed} {overlap} {shape}")
    monkeypatch.setattr(LoadDecision, "is_load_sooner", lambda *_: rng.random() < 0.5)
    monkeypatch.setattr(costs_module, "PROBE_S", float("-inf"))
    engines = [Engine(model, cluster.address(node), rng, overlap=overlap, **shape) for node in range(2)]
    prompts: dict[str, tuple[list[int], int]] = {}
    vandal = cluster.client(engines[0].worker.get_handshake_metadata().namespaces[0, 0])
    aborted = 0
    for turn in range(600):
        for engine in engines:
            if turn < 500 and rng.random() < 0.25:
                name, prompt, count = f"r{len(prompts)}", draw_prompt(rng), rng.randint(1, 20)
                prompts[name] = (prompt, count)
                engine.add(name, prompt, max_tokens=count, salt=rng.choice(["", "", "s"]))
            waiting = [one for one in engine.outputs if one in engine.scheduler.requests]
            if waiting and rng.random() < 0.03:
                aborted += 1
                engine.abort(rng.choice(waiting))
            if rng.random() < 0.1:  # a chunk that the lookup found is deleted before its load
                for request in list(engine.scheduler.requests.values()):
                    if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
                        vandal.delete(vandal.keys(rng.sample(request.block_hashes, k=1)))
            engine.step()
    turns = 0
    while any(engine.scheduler.requests or engine.in_flight for engine in engines):
        turns += 1
        assert turns < 2000, "a request never ends"
        for engine in engines:
            engine.step()
    for engine in engines:
        assert engine.loaded_tokens > 0
        for name, tokens in engine.outputs.items():
            assert tokens == expected(*prompts[name]), name
        assert engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == engine.blocks - 1
        assert not engine.scheduler.connector.scheduler_side.requests
        assert all(load.is_probe for load, _ in engine.worker.worker_side.loading.values())
        engine.close()
    assert aborted
    assert any(engine.probes for engine in engines)


@pytest.mark.parametrize("shape", [{}, {"chunk_blocks": 3}, {"kinds": "fww"}, {"kinds": "fs"}], ids=str)
@pytest.mark.parametrize("overlap", [False, True], ids=["in step", "overlapped"])
@pytest.mark.parametrize("seed", SEEDS)
def test_no_slot_holds_kv_of_other_weights(
    model: Path, cluster: raykv.EmbeddedCluster, seed: int, overlap: bool, shape: dict[str, Any]
):
    """Two engines change their weights at random times and then reset their caches. Sometimes they state a revision."""
    rng = random.Random(f"{seed} {overlap} {shape}")
    engines = [Engine(model, cluster.address(node), rng, overlap=overlap, **shape) for node in range(2)]
    prompts: dict[str, tuple[list[int], int]] = {}
    resets, stated_loads = Counter[bool](), 0
    for _ in range(600):
        for engine in engines:
            if rng.random() < 0.2:
                name, prompt, count = f"r{len(prompts)}", draw_prompt(rng), rng.randint(1, 20)
                prompts[name] = (prompt, count)
                engine.add(name, prompt, max_tokens=count, salt=rng.choice(["", "", "s"]))
            if rng.random() < 0.02 and engine.reset(rng.randrange(1, 3), preempt=rng.random() < 0.7):
                resets[engine.has_old_blocks] += 1
                if rng.random() < 0.8:
                    engine.state(f"r{engine.weights}")
            before = engine.loaded_tokens
            engine.step()
            is_stated = engine.scheduler.connector.scheduler_side.requests.epochs.current.startswith("stated:")
            stated_loads += is_stated and engine.loaded_tokens > before
    while any(engine.scheduler.requests or engine.in_flight for engine in engines):
        for engine in engines:
            engine.step()
    assert min(resets[True], resets[False], stated_loads) > 0
    for engine in engines:
        for name, tokens in engine.outputs.items():
            assert tokens == expected(*prompts[name]), name
        engine.close()


def test_a_request_that_begins_with_a_part_of_an_old_block_stores_nothing(model: Path, cluster: raykv.EmbeddedCluster):
    """The lookup gets only whole blocks, so it cannot see that the request also begins with a part of an old block."""
    shape = {"kinds": "fs", "block_tokens": 2 * BLOCK_TOKENS}
    engine = Engine(model, cluster.address(0), random.Random(1), threads=True, **shape)
    start, prompt = list(range(BLOCK_TOKENS + 2)), [*range(BLOCK_TOKENS + 2), *range(50, 70)]
    engine.add("short", start, max_tokens=1, salt="")
    engine.run()
    engine.add("long", list(range(20, 43)), max_tokens=50, salt="")
    while not engine.outputs["long"]:
        engine.step()
    assert engine.reset(1, preempt=False)
    assert engine.has_old_blocks, "a request runs, so vLLM cannot clear its cache"
    requests = engine.scheduler.connector.scheduler_side.requests
    engine.add("mixed", prompt, max_tokens=2, salt="")
    while not requests["mixed"].started:
        engine.step()
    assert requests["mixed"].cached == BLOCK_TOKENS
    engine.run()
    assert engine.scheduler.reset_prefix_cache()
    engine.add("fresh", prompt, max_tokens=2, salt="")
    engine.run()
    assert engine.loaded_tokens == 0
    engine.close()


def test_finished_requests_are_reported_to_the_nodes(model: Path, cluster: raykv.EmbeddedCluster):
    """Each report names the chunks of a prompt. Requests that were aborted or handed over are not reported."""
    reports: list[tuple[int, int]] = []
    store = cluster.nodes[0].store
    store.evictor.policies.on_request_done = lambda rows, tokens, now: reports.append((len(rows), tokens))
    engine = Engine(model, cluster.address(0), random.Random(1))
    prompt = list(range(23))
    engine.add("done", prompt, max_tokens=9, salt="")
    engine.add("handed over", prompt, max_tokens=1, salt="", params={"do_remote_decode": True})
    engine.add("aborted", prompt, max_tokens=50, salt="")
    while engine.scheduler.requests or engine.in_flight:
        if len(engine.outputs.get("aborted", [])) > 20:
            engine.abort("aborted")
        engine.step()
    engine.close()  # also runs the waiting calls
    assert reports == [(len(prompt) // BLOCK_TOKENS, 9)]


def test_the_trail_of_a_request_says_what_was_found_loaded_and_computed(model: Path, cluster: raykv.EmbeddedCluster):
    prompt = list(range(23))
    for number, node in enumerate((0, 1)):
        engine = Engine(model, cluster.address(node), random.Random(1))
        engine.add(f"request-{number}", prompt, max_tokens=2, salt="")
        while engine.scheduler.requests:
            engine.step()
        engine.close()
    client = cluster.client(raykv.Namespace(model="any"))
    chunks, rest = len(prompt) // BLOCK_TOKENS, len(prompt) % BLOCK_TOKENS
    (first,), (second,) = client.trail("request-0"), client.trail("request-1")
    assert first.text == (
        "engine: 23 prompt tokens; 0 in the engine's own cache; no more found in raykv; 23 computed, 2 generated"
    )
    assert second.text.startswith(
        "engine: 23 prompt tokens; 0 in the engine's own cache; "
        f"{23 - rest} found in raykv ({chunks} chunks on node-0); {23 - rest} loaded in "
    )
    assert second.text.endswith(f"{chunks} chunks from node-0 by tcp); {rest} computed, 2 generated")


def test_the_trail_of_a_request_that_ends_while_it_waits_says_so(model: Path, cluster: raykv.EmbeddedCluster):
    engine = Engine(model, cluster.address(0), random.Random(1))
    engine.add("waits", list(range(23)), max_tokens=2, salt="")
    engine.abort("waits")
    engine.close()
    (only,) = cluster.client(raykv.Namespace(model="any")).trail("waits")
    assert only.text == "engine: 23 prompt tokens; nothing looked up; it ended before the engine began with it"


def test_orders_of_a_step_whose_block_tables_vllm_has_dropped_save_nothing(model: Path, cluster: raykv.EmbeddedCluster):
    """After the connector has built the orders of a step, vLLM drops the block tables of this step."""
    engine = Engine(model, cluster.address(0), random.Random(1))
    engine.add("one", list(range(23)), max_tokens=3, salt="")
    step = engine.scheduler.schedule()
    while not step.num_scheduled_tokens:  # the lookup has not ended
        engine.calls.run_some()
        step = engine.scheduler.schedule()
    assert step.kv_connector_metadata.saves
    assert not engine.scheduler.connector.build_connector_meta(step).saves
    engine.close()


def test_a_handshake_that_a_multi_connector_has_lost_is_refused(model: Path, cluster: raykv.EmbeddedCluster):
    """The MultiConnector of vLLM passes on only the first handshake of its connectors."""
    engine = Engine(model, cluster.address(0), random.Random(1))
    other = SimpleNamespace(get_handshake_metadata=KVConnectorHandshakeMetadata)
    multi = MultiConnector.__new__(MultiConnector)
    multi._connectors = [other, engine.worker]
    handshakes = {(0, 0): multi.get_handshake_metadata()}
    with pytest.raises(raykv.ConfigError, match=r"'connectors'.*KVConnectorHandshake.*put RayKVConnector first"):
        engine.scheduler.connector.set_xfer_handshake_metadata_pp_aware(handshakes)
    engine.close()


def test_a_lookup_never_blocks_the_scheduler(model: Path, node: tuple[str, int]):
    """While a stopped node does not answer the lookup of one request, vLLM computes other requests."""
    address, pid = node
    engine = Engine(model, address, random.Random(1), threads=True, lookup_timeout_s=60.0)
    first, second = list(range(21)), list(range(50, 71))
    engine.add("first", first, max_tokens=3, salt="")
    while not engine.outputs["first"]:
        engine.step()
    stop_process(pid)
    began_s = time.monotonic()
    engine.add("second", second, max_tokens=3, salt="")
    while "first" in engine.scheduler.requests:
        engine.step()
    for _ in range(3):
        assert not engine.scheduler.schedule().total_num_scheduled_tokens
    assert time.monotonic() - began_s < 30.0, "a step waited for the stopped node"
    assert not engine.outputs["second"]
    os.kill(pid, signal.SIGCONT)
    while engine.scheduler.requests:
        engine.step()
    engine.close()
    assert engine.outputs == {"first": expected(first, 3), "second": expected(second, 3)}


def test_chunks_in_this_hosts_memory_are_found_at_once(model: Path, node: tuple[str, int]):
    """The load is scheduled in the first step of the request, although the node is stopped."""
    address, pid = node
    engine = Engine(model, address, random.Random(1), threads=True, load_timeout_s=60.0)
    prompt = list(range(21))
    engine.add("first", prompt, max_tokens=3, salt="")
    while engine.scheduler.requests:
        engine.step()
    wait([saving.future for saving in engine.worker.worker_side.saving])
    engine.scheduler.reset_prefix_cache()
    stop_process(pid)
    engine.add("second", prompt, max_tokens=3, salt="")
    engine.step()
    assert engine.scheduler.requests["second"].status == RequestStatus.WAITING_FOR_REMOTE_KVS
    os.kill(pid, signal.SIGCONT)
    while engine.scheduler.requests:
        engine.step()
    engine.close()
    assert engine.outputs["second"] == expected(prompt, 3)


def test_a_request_is_recorded_on_a_thread(model: Path, node: tuple[str, int], monkeypatch: pytest.MonkeyPatch):
    """A call to the node records the request, even if its chunks are found in this host's memory."""
    address, _ = node
    senders: list[threading.Thread] = []
    monkeypatch.setattr(Router, "send_trace", lambda router, requests: senders.append(threading.current_thread()))
    engine = Engine(model, address, random.Random(1), threads=True)
    prompt = list(range(21))
    engine.add("first", prompt, max_tokens=3, salt="")
    while engine.scheduler.requests:
        engine.step()
    wait([saving.future for saving in engine.worker.worker_side.saving])
    engine.scheduler.reset_prefix_cache()
    link = Link.connect(address, b"", deadline_s=time.monotonic() + 10.0)
    link.call(messages.FetchTrace(True), deadline_s=time.monotonic() + 10.0)
    link.close()
    engine.add("second", prompt, max_tokens=3, salt="")
    while engine.scheduler.requests:
        engine.step()
    wait_until(lambda: senders)
    engine.close()
    assert threading.current_thread() not in senders


@pytest.mark.parametrize("overlap", [False, True], ids=["in step", "overlapped"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_an_event_goes_out_for_each_stored_chunk(
    model: Path, cluster: raykv.EmbeddedCluster, overlap: bool, shape: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    """Each event names chunks that another engine finds. The event's tokens follow the tokens of its parent block."""
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")
    rng = random.Random(f"{overlap} {shape}")
    options = {"overlap": overlap, "publishes": True, **shape}
    engines = [Engine(model, cluster.address(node), rng, **options) for node in range(2)]
    requests: list[Request] = []
    for turn in range(300):
        for engine in engines:
            if turn < 250 and rng.random() < 0.25:
                engine.add(f"r{turn}", draw_prompt(rng), max_tokens=rng.randint(1, 20), salt="")
                requests.append(engine.scheduler.requests[f"r{turn}"])
            engine.step()
    for engine in engines:
        engine.run()
    hashes = {  # hash -> all tokens that it covers
        block_hash: list(request.all_token_ids[: (place + 1) * BLOCK_TOKENS])
        for request in requests
        for place, block_hash in enumerate(request.block_hashes)
    }
    client = cluster.client(engines[1].worker.get_handshake_metadata().namespaces[0, 0])
    for engine in engines:
        assert not engine.scheduler.connector.scheduler_side.events._pending
        groups = engine.scheduler.connector.scheduler_side._groups.each
        suffixes = {group.index: group.suffix for group in groups}
        chunks = 0
        for event in engine.events:
            size = event.block_size
            assert (event.medium, event.locality) == ("CPU", "LOCAL")
            before = hashes[event.parent_block_hash] if event.parent_block_hash else []
            for block_hash in event.block_hashes:
                assert hashes[block_hash][: len(before)] == before
                before = hashes[block_hash]
            assert before[-len(event.token_ids) :] == event.token_ids
            assert len(event.token_ids) == size * len(event.block_hashes)
            names = event.block_hashes[engine.chunk_blocks - 1 :: engine.chunk_blocks]
            found = client.exists([name + suffixes[event.group_idx] for name in names])
            if not found.all():  # the owner of the key may not know yet
                cluster.settle()
                found = client.exists([name + suffixes[event.group_idx] for name in names], timeout_s=20.0)
            assert found.all()
            chunks += len(names)
            assert event.kv_cache_spec_kind == SPEC_KINDS[engine.kinds[event.group_idx]]
        stored = engine.counted["stored_chunks|stored"] + engine.counted["stored_chunks|existed"]
        if engine.counted["stored_chunks|skipped"]:  # on a busy machine a save may come too late for one head
            assert 0 < chunks <= stored / engine.heads
        else:
            assert chunks == stored / engine.heads > 0
        engine.close()


@pytest.mark.parametrize("shape", [{}, {"chunk_blocks": 3}, {"kinds": "fww"}], ids=str)
def test_parents_go_out_before_their_children(
    model: Path, cluster: raykv.EmbeddedCluster, shape: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")
    engine = Engine(model, cluster.address(0), random.Random(1), threads=True, publishes=True, **shape)
    prompt = list(range(60))
    for number, tokens in enumerate((30, 60)):
        engine.add(f"r{number}", prompt[:tokens], max_tokens=20, salt="")
        engine.run()
    whole = [event for event in engine.events if event.kv_cache_spec_kind == "full_attention"]
    published: list[bytes] = []
    for event in whole:
        assert event.parent_block_hash is None or event.parent_block_hash in published
        published += event.block_hashes
    assert [event.parent_block_hash for event in whole].count(None) == 1
    assert len(published) > 60 // BLOCK_TOKENS
    # Two chunks of several blocks may begin with the same block.
    assert len(published) == len(set(published)) or engine.chunk_blocks > 1
    engine.close()


def known_to_a_router(events: list[BlockStored | BlockRemoved]) -> set[tuple[int | None, Any]]:
    """Return (group, hash) of each block that is stored, according to these events."""
    known = set()
    for event in events:
        blocks = {(event.group_idx, each) for each in event.block_hashes}
        known = known | blocks if isinstance(event, BlockStored) else known - blocks
    return known


@pytest.mark.parametrize("shape", [{}, {"chunk_blocks": 3}, {"kinds": "fww"}, {"kinds": "fs"}], ids=str)
def test_a_router_learns_which_chunks_are_gone(
    model: Path, cluster: raykv.EmbeddedCluster, shape: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    """Chunks are deleted, and stored again, at random times."""
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")
    monkeypatch.setattr(removals_module, "CHECK_CHUNKS", 20)
    rng = random.Random(f"{shape}")
    engine = Engine(model, cluster.address(0), rng, publishes=True, **shape)
    side = engine.scheduler.connector.scheduler_side
    (client,), suffixes = side.clients(Scope()).values(), {group.index: group.suffix for group in side._groups.each}
    removals = side.events.removals
    deleted = 0
    for turn in range(300):
        if turn < 250 and rng.random() < 0.25:
            engine.add(f"r{turn}", draw_prompt(rng), max_tokens=rng.randint(1, 20), salt="")
        if rng.random() < 0.2 and engine.events:
            event = rng.choice(engine.events)
            deleted += client.delete([rng.choice(event.block_hashes) + suffixes[event.group_idx]])
        if rng.random() < 0.3:
            removals.check()
        engine.step()
    engine.run()  # afterwards, no save that is still in flight can publish a chunk that was deleted in the meantime
    cluster.settle()
    for _ in range(2 * len(removals) // 20 + 4):
        removals.check()
    engine.add("last", list(range(3)), max_tokens=1, salt="")
    engine.run()
    known = known_to_a_router(engine.events)
    ends = {(group, each) for group, each in known if client.exists([each + suffixes[group]]).all()}
    if engine.chunk_blocks == 1:
        assert known == ends
    else:  # the router knows all blocks of each chunk, but `ends` has only the last block of each
        assert len(ends) < len(known) <= engine.chunk_blocks * len(ends)
    assert deleted
    assert len(known) < len(known_to_a_router([event for event in engine.events if isinstance(event, BlockStored)]))
    engine.close()


def test_a_router_forgets_the_chunks_of_an_epoch_that_has_ended(
    model: Path, cluster: raykv.EmbeddedCluster, monkeypatch: pytest.MonkeyPatch
):
    """A reset ends the reuse of all earlier chunks. A statement then drops the chunks of the private epoch."""
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")
    engine = Engine(model, cluster.address(0), random.Random(1), publishes=True)
    known: list[set[Any]] = []
    for turn, prompt in enumerate([list(range(21)), list(range(50, 71)), list(range(20, 37))]):
        engine.add(f"r{turn}", prompt, max_tokens=1, salt="")
        engine.run()
        known.append(known_to_a_router(engine.events))
        if turn == 0:
            assert engine.reset(0, preempt=False)
        else:
            engine.state(f"step {turn}")
    assert list(map(len, known)) == [5, 5, 4]
    assert not known[0] & known[1]
    assert not known[1] & known[2]
    engine.close()


def test_no_event_goes_out_for_a_skipped_chunk(
    model: Path, cluster: raykv.EmbeddedCluster, monkeypatch: pytest.MonkeyPatch
):
    engine = Engine(model, cluster.address(0), random.Random(1), threads=True, publishes=True)
    engine.add("first", list(range(21)), max_tokens=1, salt="")
    engine.run()
    monkeypatch.setattr(worker_module, "MAX_SAVING_STEPS", 0)
    engine.add("second", list(range(50, 71)), max_tokens=1, salt="")
    engine.run()
    engine.close()
    assert engine.counted["stored_chunks|skipped"] == 21 // BLOCK_TOKENS
    assert [token for event in engine.events for token in event.token_ids] == list(range(20))


def test_events_go_out_when_a_stopped_node_answers(model: Path, node: tuple[str, int]):
    """An idle engine makes steps while it waits for the node's answer, but only for a limited time."""
    address, pid = node
    engine = Engine(model, address, random.Random(1), threads=True, publishes=True, store_timeout_s=0.5)
    engine.add("first", list(range(21)), max_tokens=3, salt="")
    engine.run()
    before = len(engine.events)
    assert before > 0
    stop_process(pid)
    engine.add("second", [50 + token % 40 for token in range(100)], max_tokens=3, salt="")
    began_s = time.monotonic()
    engine.run()
    assert time.monotonic() - began_s < 20.0, "the engine is never idle"
    assert len(engine.events) == before
    os.kill(pid, signal.SIGCONT)
    engine.add("third", list(range(30, 33)), max_tokens=20, salt="")
    engine.run()
    engine.close()
    assert len(engine.events) > before
    assert sum(len(event.block_hashes) for event in engine.events) == engine.counted["stored_chunks|stored"]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_sources_of_a_hit_are_named(model: Path, cluster: raykv.EmbeddedCluster, shape: dict[str, Any]):
    prompt = list(range(60))

    def load(node: int, tokens: int) -> dict[str, int]:
        engine = Engine(model, cluster.address(node), random.Random(1), threads=True, **shape)
        engine.add("r", prompt[:tokens], max_tokens=1, salt="")
        engine.run()
        engine.close()
        cluster.settle()
        ((hit, sources),) = engine.sources or [(0, {})]
        assert sum(sources.values()) == hit
        return sources

    assert load(0, 49) == {}
    assert load(0, 49) == {"host": 48}
    assert load(1, 49) == {"p2p": 48}
    assert load(1, 60) == {"p2p": 48}
    if shape.get("kinds", "f") == "f":  # the last 3 blocks were stored on the second node
        assert load(1, 60) == {"p2p": 48, "host": 59 // BLOCK_TOKENS * BLOCK_TOKENS - 48} or shape
