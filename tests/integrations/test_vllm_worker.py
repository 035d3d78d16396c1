"""The worker's side without an engine: what becomes of orders when nodes, clocks and clients misbehave."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

import raykv  # noqa: E402
from raykv.errors import ConfigError, PeerUnavailable, ProtocolError  # noqa: E402
from raykv.integrations.kv_layout import DeviceLayout, HostLayout, Layout  # noqa: E402
from raykv.integrations.vllm.config import ConnectorConfig  # noqa: E402
from raykv.integrations.vllm.connection import Connection  # noqa: E402
from raykv.integrations.vllm.metadata import Load, Save, Scope, StepOrders  # noqa: E402
from raykv.integrations.vllm.stats import RayKVStats  # noqa: E402
from raykv.integrations.vllm.worker import REST_PER_HANG, WorkerSide  # noqa: E402
from raykv.protocol.namespace import Namespace  # noqa: E402
from raykv.types import Match  # noqa: E402

pytestmark = pytest.mark.vllm

NAMES = [f"chunk {number}".encode() for number in range(6)]
NAMESPACE = Namespace(model="toy", chunk_tokens=4)
BLOCKS = 20


class Clock:
    """Stands still unless told otherwise."""

    def __init__(self) -> None:
        self.now_s, self.per_look_s = 100.0, 0.0

    def __call__(self) -> float:
        self.now_s += self.per_look_s
        return self.now_s


class Bench:
    """A worker's side over a small KV cache and a real client."""

    def __init__(self, open_client: Callable[[], raykv.Client], kind: type[Layout] = HostLayout, **config: Any) -> None:
        self.cache = torch.arange(BLOCKS * 1024, dtype=torch.int32).view(BLOCKS, 1, 4, 256)
        self.stats, self.clock = RayKVStats(), Clock()
        self.connection = Connection(open_client)
        self.worker = WorkerSide(
            ConnectorConfig(**config),
            self.stats,
            layout=kind({"layer": self.cache}, BLOCKS, 1),
            namespace=NAMESPACE,
            rank=(0, 0),
            connection=self.connection,
            clock=self.clock,
        )

    def save(self, first: int = 0, last: int = 6, *, cached: bool = False) -> str:
        parent = NAMES[first - 1] if first else None
        blocks = [[number] for number in range(first, last)]
        return self.worker.save([Save(Scope(), NAMES[first:last], blocks, parent, first, cached)])

    def load(self, count: int = 6, *, holder: str = "node-0") -> set[str]:
        """Load the first chunks into the blocks from 10 on, and wait for it."""
        match = Match(count, (holder,) * count)
        orders = StepOrders([Load("r", Scope(), NAMES[:count], [[10 + n] for n in range(count)], {(0, 0): match})])
        self.worker.start_loads(orders)
        self.worker.start_loads(orders)  # vLLM has two hooks for it
        finished: set[str] = set()
        while not finished:
            self.worker.await_load()
            finished = self.worker.take_finished()
        return finished

    def arrived(self) -> list[int]:
        return [n for n in range(6) if torch.equal(self.cache[10 + n], self.cache[n])]

    def counted(self, metric: str) -> dict[str, float]:
        return self.stats.data.get(metric, {})


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


@pytest.mark.parametrize("kind", [HostLayout, DeviceLayout])
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
    assert there.worker.take_failed_blocks() == set()
    assert there.counted("reused_tokens") == {"": 24}
    assert there.counted("loaded_tokens") == {f"node-0|{'tcp' if node else 'shm'}": 24}


def test_a_load_is_done_batch_by_batch_up_to_the_first_that_is_missing(
    cluster: raykv.EmbeddedCluster, benches: list[Bench], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(DeviceLayout, "batch_chunks", 2)
    bench = Bench(lambda: cluster.client(NAMESPACE), DeviceLayout)
    benches.append(bench)
    bench.save(0, 3)
    bench.save(4, 6)  # the fourth chunk is missing, so the last two are of no use
    assert bench.load() == {"r"}
    assert bench.arrived() == [0, 1, 2]
    assert bench.worker.take_failed_blocks() == {13, 14, 15}
    assert bench.worker.take_failed_blocks() == set()
    assert bench.counted("loads") == {"partial": 1}
    assert bench.counted("reused_tokens") == {"": 12}
    assert bench.counted("lost_tokens") == {"": 12}


def test_a_load_that_waited_too_long_in_line_is_lost(cluster: raykv.EmbeddedCluster, benches: list[Bench]):
    bench = Bench(lambda: cluster.client(NAMESPACE), load_timeout_s=1.0)
    benches.append(bench)
    bench.save()
    bench.clock.per_look_s = 2.0
    assert bench.load() == {"r"}
    assert bench.worker.take_failed_blocks() == set(range(10, 16))
    assert bench.counted("loads") == {"lost": 1}


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
    assert bench.worker.take_finished() == set()
    assert bench.worker.take_failed_blocks() == set(range(10, 16))
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
        with other.pin(["large"]):  # takes the only extent for chunks of another size
            bench = Bench(lambda: small.client(NAMESPACE))
            benches.append(bench)
            assert bench.save() == "full"
            assert bench.counted("stored_chunks") == {"skipped": 6}


def test_a_node_that_hangs_is_left_alone_for_a_while(cluster: raykv.EmbeddedCluster, benches: list[Bench]):
    bench = Bench(lambda: cluster.client(NAMESPACE), store_timeout_s=1.0)
    benches.append(bench)
    cluster.kill(0)
    bench.clock.per_look_s = 1.0  # as if it took as long as it may
    assert "away" in bench.save() or bench.counted("stored_chunks")["skipped"] == 6
    bench.clock.per_look_s = 0.0
    assert bench.save() == "the node hung a moment ago"
    bench.clock.now_s += REST_PER_HANG * 1.0
    assert bench.save() not in ("", "the node hung a moment ago")


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
    assert bench.worker.take_failed_blocks() == set(range(10, 16))
    bench.connection._retrying.join(timeout=10)
    assert bench.save() == ""
    assert tries == 4


def test_a_wrong_configuration_is_not_tried_again():
    def open_client() -> raykv.Client:
        raise ConfigError("field 'secret'")

    with pytest.raises(ConfigError, match="secret"):
        Connection(open_client)


def test_clients_kept_for_salts_are_bounded(cluster: raykv.EmbeddedCluster, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("raykv.integrations.vllm.connection.MAX_SCOPED_CLIENTS", 3)
    connection = Connection(lambda: cluster.client(NAMESPACE))
    clients = [connection.client(NAMESPACE, Scope(salt=str(number))) for number in range(9)]
    assert len({client.namespace.digest for client in clients}) == 9
    assert len(connection._scoped) == 3
    connection.close()
