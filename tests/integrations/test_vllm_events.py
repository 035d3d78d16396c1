"""KV events: the reports of ranks, the published events, and what a consumer receives. Also the sources of hits."""

from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import msgspec
import numpy as np
import torch
import zmq
from vllm import SamplingParams
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.request import Request

import raykv
from raykv.integrations.vllm import events as events_module
from raykv.integrations.vllm.events import Reporter, StoredEvents
from raykv.integrations.vllm.groups import Groups, Hit
from raykv.integrations.vllm.hit_sources import hit_sources
from raykv.integrations.vllm.lookups import Found
from raykv.integrations.vllm.metadata import Save, Scope, WorkerReport
from raykv.integrations.vllm.removals import Removals
from raykv.types import Holder
from tests.support.engines import BLOCK, Engine, prompt, write_model

pytestmark = pytest.mark.vllm

TOKENS = 4
SPEC = FullAttentionSpec(block_size=TOKENS, num_kv_heads=1, head_size=1, dtype=torch.float32)
CACHE = KVCacheConfig(num_blocks=10, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], SPEC)])


def request(tokens: int = 24, *, salt: str | None = None) -> Request:
    init_none_hash(sha256)
    return Request(
        request_id="r",
        prompt_token_ids=list(range(tokens)),
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        cache_salt=salt,
        block_hasher=get_request_block_hasher(TOKENS, sha256),
    )


@pytest.fixture(autouse=True)
def byte_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")


class Bench:
    """The scheduler's side of events, for one request and some ranks."""

    def __init__(self, *, ranks: int = 1, chunk_blocks: int = 1, salt: str | None = None) -> None:
        self.groups = Groups(CACHE, chunk_blocks)
        self.events = StoredEvents(CACHE, self.groups, Removals(lambda _: {}), ranks=ranks)
        self.request, self.size = request(salt=salt), TOKENS * chunk_blocks

    def order(self, first: int, last: int) -> int:
        """Order a save of chunks `first` to `last` - 1. Returns the number of the save."""
        return self.add(first, last).number

    def add(self, first: int, last: int) -> Save:
        names = [self.groups.name(self.groups.each[0], self.request.block_hashes, end * self.size) for end in (1,)]
        save = Save(Scope(), 0, names * (last - first), [[0]] * (last - first), None, first, False)
        return self.events.add(self.request, save, last * self.size)

    def report(self, *reports: tuple[int, set[int]]) -> list[list[int]]:
        """Report stored chunks, one tuple for each save and rank. Returns the block numbers of each new event."""
        for number, stored in reports:
            self.events.receive({number: [frozenset(stored)]})
        hashes = self.request.block_hashes
        taken = []
        for event in self.events.take(is_local=True):
            places = [hashes.index(each) for each in event.block_hashes]
            assert event.parent_block_hash == (hashes[places[0] - 1] if places[0] else None)
            assert event.token_ids == list(range(places[0] * TOKENS, (places[-1] + 1) * TOKENS))
            assert event.block_size == TOKENS
            taken.append(places)
        return taken


def test_an_event_waits_for_all_ranks_and_goes_out_once():
    bench = Bench(ranks=2)
    number = bench.order(0, 3)
    assert bench.report((number, {0, 1, 2})) == []
    assert bench.report((number, {0, 1, 2})) == [[0, 1, 2]]
    assert bench.report((number, {0, 1, 2})) == []


def test_only_chunks_that_all_ranks_have_stored_are_named():
    bench = Bench(ranks=2)
    number = bench.order(0, 6)
    assert bench.report((number, {0, 1, 3, 4, 5}), (number, {0, 1, 2, 3, 5})) == [[0, 1], [3], [5]]
    number = bench.order(0, 6)
    assert bench.report((number, {0, 1, 2}), (number, {3, 4, 5})) == []


def test_events_keep_the_order_of_the_saves():
    bench = Bench()
    first, second, third = bench.order(0, 1), bench.order(1, 2), bench.order(2, 3)
    assert bench.report((second, {1})) == []
    assert bench.report((first, {0})) == [[0], [1]]
    assert bench.report((third, set())) == []
    assert not bench.events.is_waiting


def test_a_save_that_is_dropped_holds_up_no_other():
    bench = Bench()
    dropped, number = bench.add(0, 1), bench.order(1, 2)
    bench.events.drop([dropped])
    assert bench.report((number, {1})) == [[1]]


def test_a_save_of_an_epoch_that_has_ended_has_no_event():
    bench = Bench()
    first, second = bench.order(0, 1), bench.order(1, 2)
    assert bench.report((first, {0})) == [[0]]
    bench.events.end_epoch()
    assert not bench.events.is_waiting
    removed = list(bench.events.take(is_local=True))
    assert [(type(each), each.block_hashes) for each in removed] == [(BlockRemoved, bench.request.block_hashes[:1])]
    assert bench.report((second, {1})) == []


def test_a_chunk_of_several_blocks_names_each_block():
    bench = Bench(chunk_blocks=2)
    number = bench.order(0, 3)
    assert bench.report((number, {0, 2})) == [[0, 1], [4, 5]]


def test_an_event_has_the_fields_of_vllms_own_events():
    bench = Bench(salt="tenant")
    number = bench.order(0, 2)
    bench.events.receive({number: [frozenset({0, 1})]})
    (event,) = bench.events.take(is_local=False)
    assert event.extra_keys == [("tenant",), None]
    assert (event.medium, event.locality, event.group_idx) == ("CPU", "REMOTE", 0)
    assert (event.kv_cache_spec_kind, event.lora_id, event.lora_name) == ("full_attention", None, None)


def test_saves_without_a_report_are_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(events_module, "MAX_PENDING_SAVES", 2)
    bench = Bench()
    first, second, _third = bench.order(0, 1), bench.order(1, 2), bench.order(2, 3)
    assert bench.report((first, {0}), (second, {1})) == [[1]]


def test_an_idle_engine_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch):
    bench = Bench()
    bench.order(0, 1)
    assert bench.events.is_waiting
    monkeypatch.setattr(events_module, "REPORT_WAIT_S", 0.0)
    assert not bench.events.is_waiting


class Held:
    """A fake client. It finds the given keys, and no others, in the memory of its host."""

    def __init__(self, *held: int) -> None:
        self.held = held

    def exists(self, keys: Any, *, timeout_s: float) -> Any:
        assert timeout_s == 0.0
        return np.isin(keys, self.held)


def saves(*numbers: int) -> list[Save]:
    return [Save(Scope(), 0, [b"name"], [[0]], None, 0, False, number=number) for number in numbers]


def test_chunks_without_an_answer_are_reported_when_it_has_arrived():
    reporter: Any = Reporter()
    reporter.add(1, np.arange(3), 10, is_stored=False)
    reporter.add(2, np.arange(5, 7), 4, is_stored=True)
    reporter.settle(Held(0, 2), saves(1, 2), is_answered=False)
    assert reporter.is_waiting
    assert reporter.pop() == {}, "the second save waits for the first"
    reporter.settle(Held(0, 2), [], is_answered=True)
    assert not reporter.is_waiting
    assert reporter.pop() == {1: [frozenset({10, 12})], 2: [frozenset({4, 5})]}
    assert reporter.pop() == {}


def test_saves_that_are_not_made_are_reported_as_not_stored():
    reporter: Any = Reporter()
    reporter.settle(Held(), saves(1), is_answered=True)
    future: Future[Any] = Future()
    reporter.watch(saves(2), future)
    future.cancel()
    reporter.skip(saves(3))
    assert reporter.pop() == {1: [frozenset()], 2: [frozenset()], 3: [frozenset()]}


def test_reports_of_ranks_are_joined():
    one = WorkerReport(1.0, {}, {1: [frozenset({0})]})
    two = WorkerReport(1.0, {}, {1: [frozenset({1})], 2: [frozenset()]})
    assert one.aggregate(two).stored == {1: [frozenset({0}), frozenset({1})], 2: [frozenset()]}


def test_a_token_counts_for_the_farthest_source_that_it_needs():
    here, there, low = Holder("here"), Holder("there"), Holder("here", below_memory=True)
    one = {(0, 4): here, (0, 8): here, (0, 12): there, (0, 16): low}
    two = {**one, (0, 8): there}
    found = Found(Hit(16, {0: [4, 8, 12, 16]}), {(0, 0): one, (0, 1): two})
    host, peer, disk = CacheHitSource.HOST, CacheHitSource.P2P, CacheHitSource.DISK
    assert hit_sources(found, range(16), {"here"}) == {host: 4, peer: 8, disk: 4}
    assert hit_sources(found, range(4, 14), {"here"}) == {peer: 8, disk: 2}
    state = {**one, (1, 16): there}  # each token of the hit also needs the state at the end of the hit
    found = Found(Hit(16, {0: [4, 8, 12, 16], 1: [16]}), {(0, 0): state})
    assert hit_sources(found, range(16), {"here"}) == {peer: 12, disk: 4}


@pytest.fixture
def consumer() -> Iterator[Any]:
    with zmq.Context.instance().socket(zmq.SUB) as socket:
        socket.subscribe("")
        yield socket


def test_a_consumer_of_vllms_events_learns_what_other_engines_find(tmp_path: Path, consumer: Any):
    """The events include the last chunks of the prompt. An idle engine stores these chunks, after the request."""
    model, document = write_model(tmp_path / "toy", seed=0), prompt(1, 500)
    endpoint = "inproc://raykv-events"
    publishing = KVEventsConfig(enable_kv_cache_events=True, publisher="zmq", endpoint=endpoint)
    with raykv.embedded(nodes=2, arena_nbytes="64 MiB", extent_nbytes="1 MiB") as cluster:
        with Engine(model, cluster.address(0), kv_events_config=publishing) as engine:
            consumer.connect(endpoint)
            engine.answer([document], count=1)
            namespace = get_kv_transfer_group().get_handshake_metadata().namespaces[0, 0]
            while engine.llm.llm_engine.engine_core.engine_core.scheduler.has_requests():
                engine.llm.llm_engine.step()
            batches = []
            while consumer.poll(2000):
                batches.append(msgspec.msgpack.decode(consumer.recv_multipart()[-1], type=KVEventBatch))
        cluster.settle()
        stored = [event for batch in batches for event in batch.events if isinstance(event, BlockStored)]
        own = [event for event in stored if event.medium == "GPU" or event.medium is None]
        ours = [event for event in stored if event.medium == "CPU"]
        hashes = [each for event in ours for each in event.block_hashes]
        assert hashes == [each for event in own for each in event.block_hashes]
        assert len(hashes) == len(document) // BLOCK
        assert [token for event in ours for token in event.token_ids] == document[: len(hashes) * BLOCK]
        assert {event.kv_cache_spec_kind for event in ours} == {event.kv_cache_spec_kind for event in own}
        assert cluster.client(namespace, node=1).match(hashes).count == len(hashes)
        with Engine(model, cluster.address(1)) as engine:
            engine.answer([document], count=1)
            assert engine.reused_tokens() == len(hashes) * BLOCK
            loaded = [one for one in engine.llm.get_metrics() if one.name == "vllm:prompt_tokens_cached_by_source"]
            sources = {one.labels["source"]: one.value for one in loaded if one.value}
            assert sources == {"p2p": len(hashes) * BLOCK}
