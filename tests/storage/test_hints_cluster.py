"""Hints in a cluster: every kind of put sends them, `hint` reaches all copies, wrong hints are refused."""

import time

import pytest

import raykv
from raykv.embedded import EmbeddedCluster
from raykv.errors import UsageError

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
        assert client.hint(names(4), ttl_s=1.0) == 6, "of every copy"
        assert writer.hint(names(4), ttl_s=100.0) == 6
        time.sleep(1.1)
        assert writer.exists(names(4)).all()
        writer.hint(names(1), ttl_s=0.02)
        until_s = time.monotonic() + 5.0
        while writer.exists(names(1)).any():
            assert time.monotonic() < until_s
            time.sleep(0.01)


def test_a_client_keeps_what_others_hold():
    with cluster(3) as running:
        writer, client = running.client(SPACE), running.client(SPACE, node=2)
        put(writer, names(4), ttl_s=100.0)
        running.settle()
        assert client.retain(names(2), ttl_s=500.0) == 2
        assert client.retain(["nowhere"], ttl_s=500.0) == 0
        store = running.nodes[0].store
        rows, now = store.table.find(client.keys(names(4))), store.table.ticks(time.monotonic())
        assert store.row_hints.ranks(rows, now).tolist() == [100, 100, 0, 0]
        assert (store.table.columns.expires[rows] > now + 200 * 64).tolist() == [True, True, False, False]


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
            assert (store.row_hints.ranks(rows, store.table.ticks(time.monotonic())) == 3).all()
        assert marked == 7
        outside.close()


def test_policies_hear_what_a_request_made():
    with cluster(2, policy="density") as running:
        client, reported = running.client(SPACE), []
        put(client, names(5))
        running.settle()
        density = running.nodes[0].store.evictor.policies.default
        density.on_request_done = lambda columns, rows, tokens, now: reported.append((len(rows), tokens))
        other = running.client(SPACE, node=1)
        assert other.hint(names(4), output_tokens=300) == 4
        assert other.hint(names(4), priority=1) == 4
        assert other.hint(["nowhere"], output_tokens=300) == 0
        assert reported == [(4, 300)]
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
