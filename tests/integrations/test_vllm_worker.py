"""The worker's side without an engine: loads and saves when nodes, clocks and clients misbehave."""

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

import raykv  # noqa: E402
from raykv.errors import ConfigError, PeerUnavailable, ProtocolError  # noqa: E402
from raykv.gpu.pinning import ArenaPinning  # noqa: E402
from raykv.integrations.gpu_layout import GpuLayout  # noqa: E402
from raykv.integrations.kv_layout import DeviceLayout, Layout, part_of  # noqa: E402
from raykv.integrations.vllm.config import ConnectorConfig  # noqa: E402
from raykv.integrations.vllm.connection import Connection  # noqa: E402
from raykv.integrations.vllm.connector import connect_writer  # noqa: E402
from raykv.integrations.vllm.groups import Group  # noqa: E402
from raykv.integrations.vllm.metadata import Load, LoadedChunks, Save, Scope, StepOrders  # noqa: E402
from raykv.integrations.vllm.rank_store import RankCache  # noqa: E402
from raykv.integrations.vllm.saving import RECLAIMED  # noqa: E402
from raykv.integrations.vllm.stats import RayKVStats  # noqa: E402
from raykv.integrations.vllm.worker import MAX_SAVING_STEPS, WorkerCache, WorkerSide  # noqa: E402
from raykv.protocol.namespace import Namespace  # noqa: E402
from tests.support.cpu_gpu import CpuDevice  # noqa: E402
from tests.support.nodes import node_process, stop_process, wait_until  # noqa: E402

pytestmark = pytest.mark.vllm

NAMES = [f"chunk {number}".encode() for number in range(6)]
NAMESPACE = Namespace(model="toy", chunk_tokens=4)
BLOCKS = 20
GROUP = Group(0, block_tokens=4, chunk_blocks=1, whole=True, handed_over=False, suffix=b"")
WAIT_S = 20.0


class Clock:
    """A clock that stands still until a test sets `now_s` or `per_look_s`."""

    def __init__(self) -> None:
        self.now_s, self.per_look_s = 100.0, 0.0

    def __call__(self) -> float:
        self.now_s += self.per_look_s
        return self.now_s


class Bench:
    """A worker's side with a small KV cache and a real client."""

    def __init__(
        self,
        open_client: Callable[[], raykv.Client],
        kind: Callable[..., Layout] = Layout,
        *,
        ranks: int = 1,
        publishes: bool = False,
        clock: Callable[[], float] | None = None,
        **config: Any,
    ) -> None:
        """Make a worker that stores its KV under this number of ranks. `clock`: None means `Clock`."""
        self.cache = torch.arange(BLOCKS * 1024, dtype=torch.int32).view(BLOCKS, 4, 4, 64)
        self.ranks = [NAMESPACE.with_fields(tp_rank=rank, tp_size=ranks) for rank in range(ranks)]
        self.stats, self.clock = RayKVStats(), Clock()
        self.connection = Connection(open_client)
        self.worker = WorkerSide(
            ConnectorConfig(**{"store_timeout_s": 5.0, **config}),  # long, so that a busy machine skips nothing
            self.stats,
            cache=WorkerCache(
                [
                    RankCache(space, {0: kind({"layer": part_of("layer", self.cache, (rank, ranks))}, BLOCKS, 1)})
                    for rank, space in enumerate(self.ranks)
                ],
                {0: GROUP},
            ),
            connection=self.connection,
            publishes=publishes,
            clock=clock or self.clock,
        )

    def save(self, first: int = 0, last: int = 6, *, cached: bool = False) -> str:
        """Save blocks `first` to `last` - 1 as chunks, and wait. Returns why chunks were skipped, or ""."""
        return self.save_all([order(first, last, cached=cached)])

    def save_all(self, saves: list[Save]) -> str:
        self.worker.save(saves)
        wait_until(lambda: self.worker.saving[-1].future.done())
        reason = self.worker.count_saves()
        assert not self.worker.saving
        return reason

    def load(self, count: int = 6, *, holder: str = "node-0") -> set[str]:
        """Load the first `count` chunks into the blocks from 10 on, and wait. Returns the finished requests."""
        part = LoadedChunks(0, NAMES[:count], [[10 + n] for n in range(count)], self.held(holder, count))
        self.worker.start_loads(StepOrders([Load("r", Scope(), [part])]))
        finished: set[str] = set()
        while not finished:
            self.worker.await_work(0.002)
            finished, failed = self.worker.pop_finished()
            assert not failed, "one group: only blocks fail"
        return finished

    def held(self, holder: str, count: int) -> dict[tuple[int, int], list[str]]:
        return {(0, rank): [holder] * count for rank in range(len(self.ranks))}

    def arrived(self) -> list[int]:
        return [n for n in range(6) if torch.equal(self.cache[10 + n], self.cache[n])]

    def counted(self, metric: str) -> dict[str, float]:
        parts = ((key.partition("|"), amount) for key, amount in self.stats.data.items())
        return {labels: amount for (name, _, labels), amount in parts if name == metric}


def order(first: int = 0, last: int = 6, *, salt: str = "", cached: bool = False) -> Save:
    parent = NAMES[first - 1] if first else None
    return Save(Scope(salt=salt), 0, NAMES[first:last], [[n] for n in range(first, last)], parent, first, cached)


@pytest.fixture
def gpu(rng: random.Random) -> CpuDevice:
    """A GPU for KV caches whose layout is "gpu"."""
    return CpuDevice(rng)


@pytest.fixture
def kind(request: pytest.FixtureRequest) -> Callable[..., Layout]:
    """Return a layout, or, for "gpu", a function that makes a layout whose kernels and streams run on the CPU."""
    if request.param != "gpu":
        return request.param
    gpu: CpuDevice = request.getfixturevalue("gpu")
    pinning = ArenaPinning(gpu)

    def make(caches: dict[str, torch.Tensor], num_blocks: int, chunk_blocks: int) -> Layout:
        for cache in caches.values():
            storage = cache.untyped_storage()
            gpu.adopt(storage.data_ptr(), storage.nbytes())
        staged = Layout(caches, num_blocks, chunk_blocks)
        return GpuLayout(staged, gpu, pinning, chunk_blocks=chunk_blocks)

    return make


@pytest.fixture
def cluster() -> Iterator[raykv.EmbeddedCluster]:
    with raykv.embedded(nodes=2, arena_nbytes="32 MiB", extent_nbytes="1 MiB") as made:
        yield made


@pytest.fixture
def benches() -> Iterator[list[Bench]]:
    made: list[Bench] = []
    yield made
    for bench in made:
        bench.worker.close()


@pytest.mark.parametrize("kind", [Layout, DeviceLayout, "gpu"], indirect=True)
@pytest.mark.parametrize("node", [0, 1])
def test_what_is_saved_here_is_loaded_there(cluster: raykv.EmbeddedCluster, benches: list[Bench], kind: Any, node: int):
    benches += [
        Bench(lambda: cluster.client(NAMESPACE), kind),
        Bench(lambda: cluster.client(NAMESPACE, node=node), kind),
    ]
    here, there = benches
    assert here.save() == ""
    cluster.settle()
    assert there.load() == {"r"}
    assert there.arrived() == list(range(6))
    assert there.worker.pop_failed_blocks() == set()
    assert there.counted("reused_tokens") == {"": 24}
    assert there.counted("loaded_tokens") == {f"node-0|{'tcp' if node else 'shm'}": 24}


def test_chunks_of_a_spread_namespace_are_stored_at_their_owners(cluster: raykv.EmbeddedCluster, benches: list[Bench]):
    client = cluster.client(NAMESPACE)
    client.configure(placement="spread")
    wait_until(lambda: all(node.store.table.spread.any() for node in cluster.nodes))
    keys, ring = client.keys(NAMES), cluster.nodes[0].view.ring
    bench = Bench(lambda: cluster.client(NAMESPACE, node=0))
    benches.append(bench)
    for place in range(6):  # each is a run of its own
        assert bench.save(place, place + 1) == ""
    for place in range(6):
        owner = cluster.nodes[ring.owners(keys[place : place + 1])[0]]
        holders = [node for node in cluster.nodes if node.store.table.find(keys[place : place + 1])[0] >= 0]
        assert holders == [owner]
    cluster.settle()
    assert bench.load() == {"r"}
    assert bench.arrived() == list(range(6))


@pytest.mark.parametrize("kind", [Layout, DeviceLayout, "gpu"], indirect=True)
def test_a_worker_stores_and_loads_for_several_ranks(cluster: raykv.EmbeddedCluster, benches: list[Bench], kind: Any):
    benches += [Bench(lambda: cluster.client(NAMESPACE), kind, ranks=4, publishes=True) for _ in range(2)]
    here, there = benches
    assert here.save_all([replace(order(), number=7)]) == ""
    assert here.counted("stored_chunks") == {"stored": 24}
    for rank, space in enumerate(here.ranks):
        chunk = bytearray(1024)
        assert cluster.client(space).get([NAMES[3]], [chunk]).prefix == 1
        assert bytes(chunk) == here.cache[3, rank].numpy().tobytes(), "what a worker with this rank's head stores"
    report = here.worker.pop_report()
    assert report is not None
    assert report.stored == {7: [frozenset(range(6))] * 4}
    assert there.load() == {"r"}
    assert there.arrived() == list(range(6))
    assert there.counted("reused_tokens") == {"": 24}
    assert there.counted("loaded_tokens") == {"node-0|shm": 24}
    assert there.counted("loaded_bytes") == {"shm": 24 * 1024}


def test_a_chunk_without_all_its_ranks_is_recomputed(cluster: raykv.EmbeddedCluster, benches: list[Bench]):
    bench = Bench(lambda: cluster.client(NAMESPACE), ranks=2)
    benches.append(bench)
    bench.save(0, 3)
    for space, first in zip(bench.ranks, (3, 4), strict=True):  # only one rank has the fourth chunk
        assert cluster.client(space).put(NAMES[first:], [bytes(2048)] * (6 - first)).stored == 6 - first
    assert bench.load() == {"r"}
    assert bench.worker.pop_failed_blocks() == {13, 14, 15}
    assert bench.arrived()[:3] == [0, 1, 2]
    assert (bench.counted("reused_tokens"), bench.counted("lost_tokens")) == ({"": 12}, {"": 12})


def test_if_one_rank_fails_to_store_every_rank_reports_the_save(
    cluster: raykv.EmbeddedCluster, benches: list[Bench], monkeypatch: pytest.MonkeyPatch
):
    def put_many(*_: Any, **__: Any) -> None:
        raise ProtocolError("odd")

    bench = Bench(lambda: cluster.client(NAMESPACE), ranks=2, publishes=True)
    benches.append(bench)
    monkeypatch.setattr(raykv.Client, "put_many", put_many)
    assert bench.save_all([replace(order(), number=7)]) == "odd"
    report = bench.worker.pop_report()
    assert report is not None
    assert report.stored == {7: [frozenset()] * 2}


def test_an_idle_step_waits_less_than_a_hook_may_take_for_a_load(
    cluster: raykv.EmbeddedCluster, benches: list[Bench], monkeypatch: pytest.MonkeyPatch
):
    """A hook may take 5 ms on the engine's thread. The wait is shorter, because a sleeping thread wakes up late."""
    bench = Bench(lambda: cluster.client(NAMESPACE))
    benches.append(bench)
    bench.save()
    waits: list[float] = []

    def noted(futures: Any, timeout_s: float, *until: Any) -> Any:
        waits.append(timeout_s)
        return wait(futures, WAIT_S)

    monkeypatch.setattr("raykv.integrations.vllm.worker.wait", noted)
    bench.load()
    assert waits
    assert 0 < max(waits) <= 0.003


def test_a_load_is_done_batch_by_batch_up_to_the_first_that_is_missing(
    cluster: raykv.EmbeddedCluster, benches: list[Bench], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("raykv.integrations.kv_layout.MAX_STAGED_CHUNKS", 2)
    bench = Bench(lambda: cluster.client(NAMESPACE), DeviceLayout)
    benches.append(bench)
    bench.save(0, 3)
    bench.save(4, 6)  # without the fourth chunk, the last two are useless
    assert bench.load() == {"r"}
    assert bench.arrived() == [0, 1, 2]
    assert bench.worker.pop_failed_blocks() == {13, 14, 15}
    assert bench.worker.pop_failed_blocks() == set()
    assert bench.counted("loads") == {"partial": 1}
    assert bench.counted("reused_tokens") == {"": 12}
    assert bench.counted("lost_tokens") == {"": 12}


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_private_epoch_is_dropped_after_its_last_save(
    cluster: raykv.EmbeddedCluster, benches: list[Bench], ranks: int
):
    bench = Bench(lambda: cluster.client(NAMESPACE), ranks=ranks)
    benches.append(bench)
    private = Scope(epoch="private:1")

    def stored(epoch: str) -> int:
        with cluster.client(NAMESPACE) as client:
            return sum(each["chunks"] for each in client.namespaces() if each["namespace"].revision == epoch)

    bench.save()
    bench.worker.enter(private.epoch)
    bench.save_all([replace(order(), scope=private)])
    assert (stored(""), stored(private.epoch)) == (6 * ranks, 6 * ranks)
    bench.worker.save([replace(order(), scope=replace(private, salt="s"))])
    bench.worker.enter("stated:1")
    wait_until(lambda: stored(private.epoch) == 0)
    assert stored("") == 6 * ranks


def test_a_load_that_ends_in_another_epoch_is_lost(cluster: raykv.EmbeddedCluster, benches: list[Bench]):
    bench = Bench(lambda: cluster.client(NAMESPACE))
    benches.append(bench)
    bench.save()
    bench.worker.enter("private:1")
    assert bench.load() == {"r"}
    assert bench.worker.pop_failed_blocks() == set(range(10, 16))
    assert bench.counted("loads") == {"lost": 1}


def test_a_load_that_waited_too_long_in_line_is_lost(cluster: raykv.EmbeddedCluster, benches: list[Bench]):
    bench = Bench(lambda: cluster.client(NAMESPACE), load_timeout_s=1.0)
    benches.append(bench)
    bench.save()
    bench.clock.per_look_s = 2.0
    assert bench.load() == {"r"}
    assert bench.worker.pop_failed_blocks() == set(range(10, 16))
    assert bench.counted("loads") == {"lost": 1}


def test_a_probe_is_measured_and_touches_no_block(cluster: raykv.EmbeddedCluster, benches: list[Bench]):
    bench = Bench(lambda: cluster.client(NAMESPACE))
    benches.append(bench)
    bench.save()
    before = bench.cache.clone()
    parts = {name: LoadedChunks(0, [name], [[None]], {(0, 0): ["node-0"]}) for name in (NAMES[0], b"lost")}
    probes = [Load(f"probe {name!r}", Scope(), [part], is_probe=True) for name, part in parts.items()]
    bench.worker.start_loads(StepOrders(probes))
    wait_until(lambda: all(future.done() for _, future in bench.worker.loading.values()))
    assert bench.worker.pop_finished() == (set(), set()), "no request waits for a probe"
    assert bench.worker.pop_failed_blocks() == set()
    report = bench.worker.pop_report()
    assert report is not None
    assert [report.loads[probe.request_id].nbytes for probe in probes] == [4096, 0]
    assert not bench.counted("loads")
    assert torch.equal(bench.cache, before)


@pytest.mark.parametrize("error", [ProtocolError("odd"), ZeroDivisionError("a defect")])
def test_a_load_that_raises_is_reported_once_like_any_other(
    cluster: raykv.EmbeddedCluster, benches: list[Bench], monkeypatch: pytest.MonkeyPatch, error: Exception
):
    def get(*_: Any, **__: Any) -> None:
        raise error

    bench = Bench(lambda: cluster.client(NAMESPACE))
    benches.append(bench)
    monkeypatch.setattr(raykv.Client, "get", get)
    assert bench.load() == {"r"}
    assert bench.worker.pop_finished() == (set(), set())
    assert bench.worker.pop_failed_blocks() == set(range(10, 16))
    assert bench.counted("errors") == {f"load|{type(error).__name__}": 1}


def test_what_the_engine_had_cached_is_stored_only_if_nobody_holds_it(
    cluster: raykv.EmbeddedCluster, benches: list[Bench]
):
    benches += [Bench(lambda: cluster.client(NAMESPACE)), Bench(lambda: cluster.client(NAMESPACE, node=1))]
    here, there = benches
    here.save(0, 4)
    cluster.settle()
    there.save(cached=True)
    assert there.counted("stored_chunks") == {"stored": 2}
    assert there.load() == {"r"}
    assert there.arrived() == list(range(6))


def test_a_full_arena_skips_and_says_why(benches: list[Bench]):
    with raykv.embedded(nodes=1, arena_nbytes="1 MiB", extent_nbytes="1 MiB") as small:
        other = small.client(NAMESPACE)
        other.put(["large"], [bytes(1 << 16)])
        with other.pin(["large"]):  # chunks of another size occupy the only extent
            bench = Bench(lambda: small.client(NAMESPACE))
            benches.append(bench)
            assert bench.save() == "full"
            assert bench.counted("stored_chunks") == {"skipped": 6}


def test_a_dead_node_skips_chunks_and_says_why(cluster: raykv.EmbeddedCluster, benches: list[Bench]):
    bench = Bench(lambda: cluster.client(NAMESPACE))
    benches.append(bench)
    cluster.kill(0)
    assert bench.save() != ""
    assert bench.counted("stored_chunks") == {"skipped": 6}


def test_a_stopped_node_holds_no_step_up_and_is_used_again(node: tuple[str, int], benches: list[Bench]):
    address, pid = node
    bench = Bench(lambda: raykv.connect(NAMESPACE, address=address), store_timeout_s=0.02)
    benches.append(bench)
    steps = 50
    names = [[f"{step} {place}".encode() for place in range(6)] for step in range(2 * steps)]
    saves = [Save(Scope(), 0, each, [[n] for n in range(6)], None, 0, cached=False) for each in names]
    stop_process(pid)
    began_s, reasons = time.monotonic(), []
    for save in saves[:steps]:
        bench.worker.save([save])
        bench.worker.release(set(range(6)))
        reasons.append(bench.worker.count_saves())
    took_s = time.monotonic() - began_s
    assert took_s < steps * 0.02 + 5.0, "a step waited for a node that is stopped"
    assert any(reasons)
    os.kill(pid, signal.SIGCONT)
    wait_until(lambda: not bench.save_all([saves[steps]]))
    assert bench.save() == ""
    assert bench.load(holder="n") == {"r"}
    assert bench.arrived() == list(range(6))
    counts = bench.counted("stored_chunks")
    assert counts["skipped"] % 6 == 0
    assert counts["stored"] % 6 == 0


def test_a_save_waits_for_a_slow_node_while_no_step_needs_its_blocks(node: tuple[str, int], benches: list[Bench]):
    """A busy host answers later than a step may wait. Nothing is lost, because the engine goes on meanwhile."""
    address, pid = node
    times = {"clock": time.monotonic, "store_timeout_s": 0.003, "save_timeout_s": WAIT_S}
    bench = Bench(lambda: raykv.connect(NAMESPACE, address=address), **times)
    benches.append(bench)
    wait_until(lambda: not bench.save(0, 1))  # the first save connects, and may be too late
    skipped = bench.counted("stored_chunks").get("skipped")
    names = [[f"{step} {place}".encode() for place in range(40)] for step in range(4)]
    blocks = [[place % 6] for place in range(40)]
    saves = [Save(Scope(), 0, each, blocks, None, 0, cached=step == 3) for step, each in enumerate(names)]
    stop_process(pid)
    for save in saves:
        bench.worker.save([save])
    time.sleep(0.2)
    bench.worker.release({7})  # no save reads this block
    os.kill(pid, signal.SIGCONT)
    wait_until(lambda: bench.worker.saving[-1].future.done())
    bench.worker.count_saves()
    wait_until(lambda: not bench.save_all([]) and bench.counted("stored_chunks")["stored"] == 161)
    assert bench.counted("stored_chunks").get("skipped") == skipped


def test_a_save_that_waits_ends_when_a_step_needs_its_blocks(node: tuple[str, int], benches: list[Bench]):
    address, pid = node
    times = {"clock": time.monotonic, "store_timeout_s": 0.003, "save_timeout_s": 60.0}
    bench = Bench(lambda: raykv.connect(NAMESPACE, address=address), **times)
    benches.append(bench)
    wait_until(lambda: not bench.save(0, 1))
    stop_process(pid)
    for step in range(3):
        names = [f"{step} {place}".encode() for place in range(40)]
        bench.worker.save([Save(Scope(), 0, names, [[step]] * 40, None, 0, cached=False)])
    began_s = time.monotonic()
    bench.worker.release({2})
    assert time.monotonic() - began_s < 5.0
    wait_until(lambda: all(saving.future.done() for saving in bench.worker.saving))
    assert bench.worker.count_saves() != ""
    bench.worker.save([order()])
    os.kill(pid, signal.SIGCONT)
    wait_until(lambda: bench.worker.saving[-1].future.done())
    bench.worker.count_saves()
    wait_until(lambda: not bench.save_all([]) and bench.save() == "")
    assert bench.counted("stored_chunks")["existed"] >= 6


@pytest.mark.parametrize("kind", [Layout, DeviceLayout, "gpu"], indirect=True)
def test_blocks_are_free_while_their_chunks_are_sent_to_another_node(
    shm_dir: Path, benches: list[Bench], kind: Any, monkeypatch: pytest.MonkeyPatch
):
    """A network is slower than memory. The engine waits until the blocks are copied, and no copied chunk is lost."""
    with node_process(shm_dir) as far:
        times = {"clock": time.monotonic, "store_timeout_s": 60.0, "save_timeout_s": 60.0}
        bench = Bench(lambda: far.client(local=False), kind, publishes=True, **times)
        benches.append(bench)
        before = bench.cache.clone()
        sent = recorded_puts(monkeypatch)
        stop_process(far.process.pid)
        bench.worker.save([replace(order(0, 3), number=1)])
        bench.worker.save([replace(order(3, 5), number=2)])  # its blocks are copied when the first save is sent
        wait_until(lambda: sent)
        waiting = threading.Thread(target=bench.worker.release, args=({0},))
        waiting.start()
        waiting.join(WAIT_S)
        assert not waiting.is_alive(), "the engine waits for the network"
        bench.worker.saving[1].reclaim()
        assert not bench.worker.saving[0].future.done()
        bench.cache[:6] = 0
        os.kill(far.process.pid, signal.SIGCONT)
        wait_until(lambda: all(saving.future.done() for saving in bench.worker.saving))
        assert bench.worker.count_saves() == RECLAIMED
        assert bench.counted("stored_chunks") == {"stored": 3, "skipped": 2}
        report = bench.worker.pop_report()
        assert report is not None
        assert report.stored == {1: [frozenset({0, 1, 2})], 2: [frozenset()]}
        bench.cache.copy_(before)
        assert bench.load(3, holder="n") == {"r"}
        assert bench.arrived() == [0, 1, 2]


def test_slots_for_the_saves_of_a_step_are_at_hand_when_it_ends(node: tuple[str, int], benches: list[Bench]):
    """With slots at hand, no chunk is lost if the node stops during the forward pass."""
    address, pid = node
    client = raykv.connect(NAMESPACE, address=address)
    client.prepare(4096, 1)
    bench = Bench(lambda: client, store_timeout_s=0.001)
    benches.append(bench)
    with raykv.connect(NAMESPACE, address=address) as other:

        def prepared() -> bool:
            bench.worker.prepare([order()])  # as every step does, because a new node lends no slots by itself
            return other.stats()["nodes"]["n"]["lent_nbytes"] >= 6 * 4096

        wait_until(prepared)
        other.stats()  # the node answers this call after the call for slots
    stop_process(pid)
    bench.save()
    assert bench.counted("stored_chunks") == {}, "the node has not answered"
    os.kill(pid, signal.SIGCONT)
    wait_until(lambda: bench.save() == "" and bench.counted("stored_chunks").get("stored"))
    assert bench.counted("stored_chunks")["stored"] == 6


class Gated(Layout):
    """Reads blocks only while the gate is open."""

    gate = threading.Event()

    def read(self, chunks: Sequence[Sequence[int]], fence: Any = None) -> list[list[memoryview]]:
        assert self.gate.wait(WAIT_S)
        return super().read(chunks, fence)


def test_blocks_are_released_when_no_save_reads_them(cluster: raykv.EmbeddedCluster, benches: list[Bench]):
    bench = Bench(lambda: cluster.client(NAMESPACE), Gated, store_timeout_s=0.5)
    benches.append(bench)
    Gated.gate.clear()
    for first in (0, 2, 4):
        bench.worker.save([order(first, first + 2)])
    wait_until(lambda: bench.worker.saving[0].future.running())
    bench.worker.release({7, 8})  # no save reads these blocks
    bench.worker.release({5, 9})  # the save of block 5 does not begin in time and is skipped
    waiting = threading.Thread(target=bench.worker.release, args=({0},))
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive(), "the blocks were released while a save reads them"
    Gated.gate.set()
    waiting.join(WAIT_S)
    assert bench.worker.saving[0].future.done()
    wait_until(lambda: bench.worker.saving[1].future.done())
    assert bench.worker.count_saves() == RECLAIMED
    assert bench.counted("stored_chunks") == {"stored": 4, "skipped": 2}


def test_saves_of_too_many_steps_are_skipped(cluster: raykv.EmbeddedCluster, benches: list[Bench]):
    bench = Bench(lambda: cluster.client(NAMESPACE), Gated, store_timeout_s=60.0)
    benches.append(bench)
    Gated.gate.clear()
    for _ in range(MAX_SAVING_STEPS + 3):
        bench.worker.save([order()])
    Gated.gate.set()
    wait_until(lambda: bench.worker.saving[-1].future.done())
    bench.worker.count_saves()
    assert bench.counted("stored_chunks") == {"stored": 6, "existed": 6 * (MAX_SAVING_STEPS - 1), "skipped": 18}


def test_one_message_stores_all_saves_of_a_step(
    cluster: raykv.EmbeddedCluster, benches: list[Bench], monkeypatch: pytest.MonkeyPatch
):
    bench = Bench(lambda: cluster.client(NAMESPACE))
    benches.append(bench)
    calls = recorded_puts(monkeypatch)
    assert bench.save_all([order(0, 2), order(2, 5), order(0, 3, salt="tenant")]) == ""
    plain, salted = (cluster.client(space).keys(NAMES) for space in (NAMESPACE, NAMESPACE.with_fields(salt="tenant")))
    (call,) = calls
    assert [put.keys.tolist() for put in call] == [plain[:2].tolist(), plain[2:5].tolist(), salted[:3].tolist()]
    assert [None if put.parent is None else put.parent.tolist() for put in call] == [None, plain[1:2].tolist(), None]
    assert [put.depth for put in call] == [0, 2, 0]
    assert bench.counted("stored_chunks") == {"stored": 8}


def test_a_device_stores_in_batches_that_continue_a_chain(
    cluster: raykv.EmbeddedCluster, benches: list[Bench], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("raykv.integrations.kv_layout.MAX_STAGED_CHUNKS", 2)
    bench = Bench(lambda: cluster.client(NAMESPACE), DeviceLayout)
    benches.append(bench)
    calls = recorded_puts(monkeypatch)
    assert bench.save_all([order(0, 3), order(3, 6)]) == ""
    keys = cluster.client(NAMESPACE).keys(NAMES).tolist()
    assert [[put.keys.tolist() for put in call] for call in calls] == [[keys[:2]], [keys[2:3], keys[3:4]], [keys[4:]]]
    above = [put.parent.tolist() if put.parent is not None else None for call in calls for put in call]
    assert above == [None, keys[1:2], keys[2:3], keys[3:4]]
    assert [put.depth for call in calls for put in call] == [0, 2, 3, 4]
    assert bench.load() == {"r"}
    assert bench.arrived() == list(range(6))


def test_cached_chunks_are_not_stored_when_nobody_says_in_time_who_holds_them(
    cluster: raykv.EmbeddedCluster, benches: list[Bench], monkeypatch: pytest.MonkeyPatch
):
    bench = Bench(lambda: cluster.client(NAMESPACE), store_timeout_s=1.0)
    benches.append(bench)
    calls = recorded_puts(monkeypatch)
    bench.clock.per_look_s = 1.0
    assert bench.save(cached=True) == ""
    assert not calls
    assert bench.counted("stored_chunks") == {"skipped": 6}


def recorded_puts(monkeypatch: pytest.MonkeyPatch) -> list[list[Any]]:
    """From now on, record the puts of each call of `put_many`."""
    calls: list[list[Any]] = []
    put_many = raykv.Client.put_many

    def recorded(client: raykv.Client, puts: list[Any], **options: Any) -> Any:
        calls.append(puts)
        return put_many(client, puts, **options)

    monkeypatch.setattr(raykv.Client, "put_many", recorded)
    return calls


def test_a_connection_tries_on_until_the_node_is_there(
    cluster: raykv.EmbeddedCluster, benches: list[Bench], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("raykv.integrations.vllm.connection.FIRST_RETRY_S", 0.01)
    tries = 0

    def open_client() -> raykv.Client:
        nonlocal tries
        tries += 1
        if tries < 4:
            raise PeerUnavailable("not yet")
        return cluster.client(NAMESPACE)

    bench = Bench(open_client)
    benches.append(bench)
    assert bench.save() == "the node is not there yet"
    assert bench.load() == {"r"}
    assert bench.worker.pop_failed_blocks() == set(range(10, 16))
    wait_until(lambda: bench.connection.client(NAMESPACE, Scope()))
    assert bench.save() == ""
    assert tries == 4


def test_a_client_whose_first_slots_cannot_be_requested_is_closed(
    cluster: raykv.EmbeddedCluster, benches: list[Bench], monkeypatch: pytest.MonkeyPatch
):
    """The connector connects again, so nobody has the first client."""
    bench = Bench(lambda: cluster.client(NAMESPACE))
    benches.append(bench)
    asked: list[raykv.Client] = []

    def prepare(client: raykv.Client, nbytes: int, count: int) -> None:
        asked.append(client)
        raise PeerUnavailable("too late")

    monkeypatch.setattr(raykv.Client, "prepare", prepare)
    with pytest.raises(PeerUnavailable, match="too late"):
        connect_writer(ConnectorConfig(address=cluster.address(0)), bench.worker._cache.ranks)
    assert len(asked) == 1
    local = asked[0].router.local
    assert local is not None
    assert not local.pipeline.connected


def test_a_wrong_configuration_is_not_tried_again():
    def open_client() -> raykv.Client:
        raise ConfigError("field 'secret'")

    with pytest.raises(ConfigError, match="secret"):
        Connection(open_client)


def test_clients_for_salts_are_bounded(cluster: raykv.EmbeddedCluster, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("raykv.integrations.vllm.connection.MAX_SCOPED_CLIENTS", 3)
    connection = Connection(lambda: cluster.client(NAMESPACE))
    clients = [connection.client(NAMESPACE, Scope(salt=str(number))) for number in range(9)]
    assert len({client.namespace.digest for client in clients}) == 9
    assert len(connection._scoped) == 3
    connection.close()
