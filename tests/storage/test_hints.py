"""Hints: priorities, sessions that ended, times to live; whatever the policy."""

import time

import numpy as np
import pytest

import raykv
from raykv.config import StorageConfig
from raykv.embedded import EmbeddedCluster
from raykv.errors import UsageError
from raykv.eviction import POLICIES
from raykv.protocol.chunk_keys import named
from raykv.protocol.namespace import Namespace
from raykv.storage.store import Store

SPACE = raykv.Namespace(model="m")
NBYTES = 4096
COUNT = 32


def cluster(nodes: int, **options) -> EmbeddedCluster:
    fields = {"arena_nbytes": COUNT * NBYTES, "extent_nbytes": 16_384, "heartbeat_s": 0.03, "low_water": 0.0, **options}
    return raykv.embedded(nodes, **fields)


def names(count: int, prefix: str = "n") -> list[str]:
    return [f"{prefix}{number}" for number in range(count)]


def put(client: raykv.Client, keys: list[str], **options) -> raykv.PutResult:
    done = client.put(keys, [bytes(NBYTES)] * len(keys), **{"chained": False, **options})
    client.flush()
    return done


class Bench:
    """A full store: a chunk in each slot, stored one after the other."""

    def __init__(self, policy: str, *, chained: bool = False) -> None:
        storage = StorageConfig(
            arena_nbytes=COUNT * NBYTES, extent_nbytes=16_384, max_chunks=64, policy=policy, low_water=0.0
        )
        self.store = Store.open(storage, None, now_s=0.0)
        self.group = self.store.groups.open(Namespace(model="m"))
        self.now_s = 1.0
        self.keys = named(b"k" * 16, names(COUNT))
        for place in range(COUNT):
            self.put(self.keys[place : place + 1], parent=self.keys[place - 1 : place] if chained and place else None)

    def put(self, keys: np.ndarray, *, parent: np.ndarray | None = None, **hints) -> int:
        self.now_s += 1.0
        loan = self.store.lend(len(keys), NBYTES, self.group, keys=keys, parent=parent, now_s=self.now_s)
        rows, places = loan.rows, np.arange(len(loan.rows), dtype=np.int32)
        self.store.store(
            keys,
            places,
            rows,
            np.zeros(len(rows), np.uint64),
            NBYTES,
            self.group,
            chained=parent is not None,
            parent=parent,
            depth=0,
            now_s=self.now_s,
            **hints,
        )
        return len(rows)

    def read(self, places: list[int]) -> None:
        self.now_s += 1.0
        self.store.unpin(self.store.pin(self.keys[places], now_s=self.now_s).rows)

    def hint(self, places: list[int], **fields) -> int:
        fields = {"ttl_s": None, "priority": None, "ended": False, "touch": False, **fields}
        return self.store.hint(self.keys[places], now_s=self.now_s, **fields)

    def gone(self) -> list[int]:
        return np.flatnonzero(self.store.table.find(self.keys) < 0).tolist()


@pytest.fixture(params=POLICIES)
def bench(request: pytest.FixtureRequest) -> Bench:
    return Bench(request.param)


def test_low_goes_before_all_and_high_after_all(bench: Bench):
    bench.read([*range(0, COUNT, 3)])
    assert bench.hint([5, 11, 30], priority=-1) == 3
    assert bench.hint([0, 1, 2, 3], priority=7) == 4
    assert bench.put(named(b"x" * 16, names(3))) == 3
    assert bench.gone() == [5, 11, 30]
    bench.put(named(b"y" * 16, names(25)))
    assert not {0, 1, 2, 3} & set(bench.gone())
    bench.store.close()


def test_an_ended_session_goes_first_unless_somebody_reads_it(bench: Bench):
    assert bench.hint([20, 21, 22, 23], ended=True) == 4
    bench.hint([7], priority=-100)
    bench.read([22])
    bench.put(named(b"x" * 16, names(3)))
    assert bench.gone() == [20, 21, 23]
    bench.put(named(b"y" * 16, names(1)))
    assert bench.gone() == [7, 20, 21, 23]
    bench.store.close()


def test_what_has_expired_goes_before_everything(bench: Bench):
    bench.hint([3, 4], ttl_s=5.0)
    bench.hint([9], ended=True)
    bench.hint([9], ttl_s=1000.0, ended=True)
    bench.now_s += 100.0
    bench.put(named(b"x" * 16, names(2)))
    assert bench.gone() == [3, 4]
    counters = bench.store.counters
    assert (counters.expired, counters.evicted) == (2, 0)
    bench.put(named(b"y" * 16, names(1)))
    assert bench.gone() == [3, 4, 9]
    bench.store.close()


def test_a_row_that_is_used_again_has_no_marks_of_the_chunk_before(bench: Bench):
    bench.hint([*range(COUNT)], ttl_s=50.0, priority=-5, ended=True)
    bench.put(named(b"x" * 16, names(4)))
    rows = bench.store.table.find(named(b"x" * 16, names(4)))
    assert not bench.store.room.row_hints.ranks(rows, bench.store.table.ticks(bench.now_s)).any()
    assert not bench.store.table.columns.expires[rows].any()
    bench.store.close()


def test_hints_of_the_writer(bench: Bench):
    new = named(b"x" * 16, names(4))
    bench.put(new[1:4], priority=3)
    bench.put(new[:1], ttl_s=10.0, priority=-3)
    columns, rows = bench.store.table.columns, bench.store.table.find(new)
    now = bench.store.table.ticks(bench.now_s)
    assert bench.store.room.row_hints.ranks(rows, now).tolist() == [-3, 3, 3, 3]
    assert (columns.expires[rows] > 0).tolist() == [True, False, False, False]
    assert abs(int(columns.expires[rows[0]]) - int(columns.inserted[rows[0]]) - 640) <= 1
    bench.store.close()


@pytest.mark.parametrize("policy", ["leaf_lru", "density", "ttl"])
def test_a_chain_still_goes_from_its_end(policy: str):
    bench = Bench(policy, chained=True)
    bench.hint([*range(COUNT // 2)], ended=True)  # the beginning, which others hang on
    bench.put(named(b"x" * 16, names(5)))
    assert bench.gone() == [*range(COUNT - 5, COUNT)]
    bench.store.close()


def test_after_a_restart_only_the_expiry_is_left(shm_dir):
    storage = StorageConfig(arena_nbytes=COUNT * NBYTES, extent_nbytes=16_384, max_chunks=64, shm_dir=shm_dir)
    first = Store.open(storage, shm_dir / "n", now_s=0.0)
    bench = Bench.__new__(Bench)
    bench.store, bench.now_s, bench.keys = first, 1.0, named(b"k" * 16, names(4))
    bench.group = first.groups.open(Namespace(model="m"))
    bench.put(bench.keys, ttl_s=5.0, priority=9)
    first.close()
    again = Store.open(storage, shm_dir / "n", now_s=3.0)
    assert again.room.row_hints.expiring
    assert again.chunks == 4
    rows = again.table.find(bench.keys)
    assert not again.room.row_hints.ranks(rows, again.table.ticks(3.0)).any()
    assert again.room.drop_expired(rows, again.table.ticks(20.0)) == 4
    again.close()


# -- through a cluster ------------------------------------------------------------------------------------------------


def test_a_client_hints_at_what_others_hold():
    with cluster(3) as running:
        writer, client = running.client(SPACE), running.client(SPACE, node=2)
        put(writer, names(COUNT // 2))
        running.settle()
        assert client.hint(names(4), priority=-2) == 4
        assert client.session_end(names(8)[4:]) == 4
        assert client.touch(names(8)[6:]) == 2
        assert client.hint(["nowhere"], priority=3) == 0
        assert client.hint([]) == 0
        put(client, names(2))
        running.settle()
        assert client.hint(names(4), ttl_s=0.05) == 6, "of every copy"
        assert writer.hint(names(4), ttl_s=100.0) == 6
        assert writer.exists(names(4)).all()
        writer.hint(names(1), ttl_s=0.02)
        until_s = time.monotonic() + 5.0
        while writer.exists(names(1)).any():
            assert time.monotonic() < until_s
            time.sleep(0.01)


def test_puts_with_hints_through_every_path():
    with cluster(2) as running:
        client = running.client(SPACE)
        put(client, ["a", "b"], ttl_s=50, priority=3)
        put(client, ["c"], ttl_s=50, priority=3)
        put(client, ["d", "e"], ttl_s=50, priority=3, wait=False)
        assert client.put_one(client.key("f"), bytes(NBYTES), ttl_s=50, priority=3)
        client.flush()
        outside = raykv.Client(
            SPACE,
            raykv.client.router.Router(
                raykv.ClientConfig(address=running.nodes[0].member.address, secret=running.secret)
            ),
        )
        put(outside, ["g"], ttl_s=50, priority=3)
        running.settle()
        marked = 0
        for node in running.nodes:
            store = node.store
            rows = store.table.ready_rows()
            marked += len(rows)
            assert (store.table.columns.expires[rows] > 0).all()
            assert (store.room.row_hints.ranks(rows, store.table.ticks(time.monotonic())) == 3).all()
        assert marked == 7
        outside.close()


def test_policies_hear_what_a_request_made():
    with cluster(2, policy="density") as running:
        client, told = running.client(SPACE), []
        put(client, names(5))
        running.settle()
        density = running.nodes[0].store.room.policies.default
        density.told = lambda columns, rows, tokens, now: told.append((len(rows), tokens))
        other = running.client(SPACE, node=1)
        assert other.hint(names(4), output_tokens=300) == 4
        assert other.hint(names(4), priority=1) == 4
        assert other.hint(["nowhere"], output_tokens=300) == 0
        assert told == [(4, 300)]
        for wrong in (-1, 1 << 31):
            with pytest.raises(UsageError, match="output_tokens"):
                client.hint(names(1), output_tokens=wrong)


@pytest.mark.parametrize("fields", [{"ttl_s": -1}, {"ttl_s": 1e12}, {"priority": 101}, {"ttl_s": float("nan")}])
def test_a_hint_that_is_none_is_named(fields):
    with cluster(1) as running:
        client = running.client(SPACE)
        for call in (client.put, client.put_one):
            keys, values = (["a"], [b"x"]) if call == client.put else (client.key("a"), b"x")
            with pytest.raises(UsageError, match=next(iter(fields))):
                call(keys, values, **fields)
        with pytest.raises(UsageError, match=next(iter(fields))):
            client.hint(["a"], **fields)
        with pytest.raises(UsageError, match="at once"):
            client.put(["a"], [b"x"], ttl_s=0)
        assert not client.exists(["a"]).any()
