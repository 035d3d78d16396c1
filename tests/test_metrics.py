"""Counters of namespaces: reads, misses by reason, and the duration of calls."""

import time

import raykv
from raykv.embedded import EmbeddedCluster
from raykv.metrics import (
    BUCKETS,
    MAX_ABSENT,
    MAX_GROUPS,
    MAX_REASONS,
    REPORT_S,
    ClientMetrics,
    Histogram,
    NamespaceMetrics,
)

MINE, OTHER = raykv.Namespace(model="mine"), raykv.Namespace(model="other")
NBYTES = 60_000


def cluster(nodes: int, **options) -> EmbeddedCluster:
    return raykv.embedded(nodes, **{"arena_nbytes": "1 MiB", "extent_nbytes": "64 KiB", "heartbeat_s": 0.03, **options})


def put(client: raykv.Client, names: list[str]) -> None:
    client.put(names, [bytes(NBYTES)] * len(names), chained=False)
    client.flush()


def get(client: raykv.Client, names: list[str], **options) -> int:
    return sum(client.get(names, [bytearray(NBYTES) for _ in names], **options).hits)


def listed(client: raykv.Client, namespace: raykv.Namespace) -> dict:
    (found,) = [each for each in client.namespaces() if each["namespace"] == namespace]
    return found


def test_times_by_powers_of_two():
    times = Histogram()
    for seconds in [0.0, 1e-6, 3e-6, 3e-6, 900e-6, 1e9]:
        times.add_time(seconds)
    assert [(bucket, count) for bucket, count in enumerate(times.counts) if count] == [
        (0, 1), (1, 1), (2, 2), (10, 1), (BUCKETS - 1, 1),
    ]  # fmt: skip
    assert times.summary() == {"count": 6.0, "p50_us": 4.0, "p99_us": float(1 << BUCKETS - 1)}
    assert times.reset() != times.counts == [0] * BUCKETS
    assert times.summary() == {"count": 0.0}


def test_a_clients_counters_are_bounded_and_reported_now_and_then():
    metrics = ClientMetrics()
    assert not metrics.add_misses({"timed_out": 1}, [b"k"] * (MAX_ABSENT + 4), now_s=100.0), "some gather first"
    assert not metrics.add_misses({"timed_out": 1}, [], now_s=100.0 + REPORT_S - 1)
    assert metrics.add_misses({}, [b"k"], now_s=100.0 + REPORT_S)
    assert not metrics.add_misses({}, [], now_s=100.0 + REPORT_S)
    misses, absent, _, _ = metrics.reset()
    assert (misses, len(absent)) == ({"timed_out": 2, "unknown": 5}, MAX_ABSENT)
    assert not metrics.add_misses({}, [], now_s=100.0 + 2 * REPORT_S - 1), "the time begins again"


def test_a_nodes_counters_are_bounded():
    metrics = NamespaceMetrics()
    for number in range(2 * MAX_REASONS):
        metrics.add_report(b"d", {f"reason {number}": 1, "reason 0": 1}, [1] * (BUCKETS + 9), [])
    found = metrics.summary(b"d")
    assert len(found["misses"]) == MAX_REASONS
    assert found["misses"]["reason 0"] == 2 * MAX_REASONS
    assert found["get_counts"] == [2 * MAX_REASONS] * BUCKETS
    assert metrics.summary(b"e") == {"misses": {}, "get_counts": [0] * BUCKETS, "put_counts": [0] * BUCKETS}


def test_the_groups_of_a_nodes_counters_are_bounded():
    """Group numbers are used again, so a client can open ever new groups."""
    metrics = NamespaceMetrics()
    metrics.add_report(b"old", {"evicted": 1}, [], [])
    for number in range(MAX_GROUPS):
        metrics.add_report(b"used", {"evicted": 1}, [], [])
        metrics.add_report(b"%d" % number, {"evicted": 1}, [], [])
    assert metrics.summary(b"old")["misses"] == {}
    assert metrics.summary(b"used")["misses"] == {"evicted": MAX_GROUPS}
    assert metrics.summary(b"%d" % (MAX_GROUPS - 1))["misses"] == {"evicted": 1}


def test_reads_of_every_kind_are_counted():
    with cluster(2) as running:
        client, there = running.client(MINE), running.client(MINE, node=1)
        put(client, ["a", "b", "c"])
        put(running.client(OTHER), ["a"])
        running.settle()
        assert get(client, ["a", "b"]) == 2
        assert get(there, ["a", "c"]) == 2
        assert client.get_one(client.key("a"), bytearray(NBYTES))
        assert there.get_one(there.key("a"), bytearray(NBYTES))
        assert get(client.using(MINE.with_fields(salt="s")), ["a"]) == 0
        assert (listed(client, MINE)["reads"], listed(client, OTHER)["reads"]) == (6, 0)
        client.delete(["a"])
        assert listed(client, MINE)["reads"] == 6, "also of what went since"


def test_misses_by_reason():
    with cluster(2, policy="fifo") as running:
        client, there = running.client(MINE), running.client(MINE, node=1)
        put(there, ["far"])
        put(client, ["deleted", "evicted"])
        client.delete(["deleted"])
        for number in range(30):
            put(client, [f"n{number}"])
        running.settle()
        assert get(client, ["deleted", "evicted", "never", "evicted"]) == 0
        assert not client.get_one(client.key("never"), bytearray(NBYTES))
        assert get(client, ["far"], timeout_s=0.0) == 0
        assert client.match(["evicted", "never"]).count == 0
        misses = listed(client, MINE)["misses"]
        assert misses == {"deleted": 1, "evicted": 3, "never_stored": 3, "timed_out": 1}
        assert listed(client, MINE)["misses"] == misses, "counted once"
        shown = client.stats()["nodes"]["node-0"]["namespaces"]
        assert [each["misses"] for each in shown.values() if each["misses"]] == [misses]
        found = listed(client, MINE)
        assert found["departures"]["deleted"] == 1
        assert found["get_times"]["count"] >= 2
        assert found["put_times"]["count"] >= 1
        assert found["put_times"]["p50_us"] <= found["put_times"]["p99_us"]


def test_a_client_with_misses_reports_in_the_background():
    with cluster(1) as running:
        client, node = running.client(MINE), running.nodes[0]
        put(client, ["a"])
        for _ in range(3):
            get(client, ["b"])
        client.router.metrics(MINE.group.digest)._report_at_s = 0.0
        get(client, ["b"])
        until_s = time.monotonic() + 5
        while not (misses := next(iter(node.reconciler.list().values()))["misses"]):
            assert time.monotonic() < until_s
            time.sleep(0.01)
        assert misses == {"never_stored": 4}


def test_a_node_reports_how_long_its_answers_took():
    with cluster(1) as running:
        client = running.client(MINE)
        put(client, ["a"])
        times = client.stats()["nodes"]["node-0"]["answer_times"]
        assert times["Lend"]["count"] >= 1
        assert 0 < times["Lend"]["p50_us"] <= times["Lend"]["p99_us"]
