"""`Client.why` reports each reason why a chunk is missing. Most clusters here have several nodes."""

import time
from collections import Counter
from typing import Any

import numpy as np
import pytest

import raykv
from raykv.client.read_failures import FAILURE_S, MAX_FAILURES, ReadFailures
from raykv.client.why import PART_KEYS, Why
from raykv.config import SLOT_ALIGNMENT_NBYTES
from raykv.embedded import EmbeddedCluster
from raykv.errors import UsageError
from raykv.protocol import chunk_keys

SPACE = raykv.Namespace(model="m", dtype="bf16", chunk_tokens=4)
NBYTES = 60_000


def cluster(nodes: int, **options) -> EmbeddedCluster:
    return raykv.embedded(nodes, **{"arena_nbytes": "1 MiB", "extent_nbytes": "64 KiB", "heartbeat_s": 0.03, **options})


def put(client: raykv.Client, names: list[str]) -> None:
    assert client.put(names, [name.encode().ljust(NBYTES) for name in names], chained=False).stored == len(names)


def the_reason(client: raykv.Client, name: str, **options) -> Why:
    (why,) = client.why([name], **options)
    print(why.text)
    return why


def test_here_or_never_stored():
    with cluster(2) as running:
        client, other = running.client(SPACE), running.client(SPACE, node=1)
        put(client, ["a"])
        running.settle()
        why = the_reason(other, "a")
        assert (why.reason, why.node, why.tier, why.nbytes, why.announced) == ("here", "node-0", "dram", NBYTES, True)
        why = the_reason(other, "b")
        assert (why.reason, why.remembers_s) == ("never_stored", None)
        assert other.why(client.keys(["a", "b"]))[0] == other.why(["a", "b"])[0]
        assert client.why([]) == []
        with pytest.raises(UsageError, match="tokens"):
            client.why()


def test_what_went_says_how():
    with cluster(3, policy="fifo") as running:
        client, asking = running.client(SPACE), running.client(SPACE, node=2)
        put(client, ["gone"])
        client.delete(["gone"])
        names = [f"n{number}" for number in range(32)]
        for name in names:
            put(client, [name])
        why = the_reason(asking, "n0")
        assert (why.reason, why.policy, why.node, why.tier) == ("evicted", "fifo", "node-0", "dram")
        assert 0 <= why.ago_s < 10
        assert the_reason(asking, "gone").reason == "deleted"
        reasons = [why.reason for why in asking.why(names)]
        assert reasons.count("here") == running.nodes[0].stats()["chunks"]
        assert set(reasons) == {"here", "evicted"}
        put(running.client(SPACE, node=1), ["n0"])
        assert the_reason(asking, "n0").node == "node-1", "it is here again"


def test_a_corrupt_chunk():
    with cluster(2) as running:
        client, other = running.client(SPACE), running.client(SPACE, node=1)
        put(client, ["a"])
        running.settle()
        store = running.nodes[0].store
        page = int(store.table.columns.page[store.table.ready_rows()[0]])
        store.arena.view[page * SLOT_ALIGNMENT_NBYTES] ^= 1
        assert other.get(["a"], [bytearray(NBYTES)]).hits == (False,)
        assert the_reason(other, "a").reason == "corrupt", "this client saw it"
        why = the_reason(client, "a")
        assert (why.reason, why.node) == ("corrupt", "node-0"), "and the holder dropped it"


def test_an_expired_chunk():
    with cluster(1) as running:
        client, store = running.client(SPACE), running.nodes[0].store
        put(client, ["a"])
        client.flush()
        running.settle()
        row = int(store.table.find(client.keys(["a"]))[0])
        store.table.cells.expires[row] = store.table.ticks(time.monotonic())
        assert the_reason(client, "a").reason == "expired"
        put(client, ["a"])
        assert the_reason(client, "a").reason == "here"


def test_a_read_that_timed_out_is_remembered_by_its_client():
    with cluster(2) as running:
        client, other = running.client(SPACE), running.client(SPACE, node=1)
        put(client, ["a", "b"])
        running.settle()
        assert other.get(["a", "b"], [bytearray(NBYTES)] * 2, timeout_s=0.0).hits == (False, False)
        why = the_reason(other, "a")
        assert (why.reason, why.nbytes) == ("timed_out", NBYTES)
        assert the_reason(client, "a").reason == "here"
        assert other.get(["a", "b"], [bytearray(NBYTES), bytearray(NBYTES)]).hits == (True, True)
        assert the_reason(other, "a").reason == "here", "it came in the end"
        assert not other.get_one(other.key("c"), bytearray(NBYTES), timeout_s=0.0)
        assert the_reason(other, "c").reason == "timed_out"


def test_a_node_that_does_not_answer():
    with cluster(3, member_timeout_s=60.0) as running:
        client = running.client(SPACE)
        put(running.client(SPACE, node=1), ["a"])
        running.settle()
        match = client.match(["a"])
        running.kill(1)
        assert client.get(["a"], [bytearray(NBYTES)], match=match, timeout_s=1.0).hits == (False,)
        why = the_reason(client, "a", timeout_s=1.0)
        assert (why.reason, why.node) == ("no_answer", "node-1")
        assert the_reason(client, "never", timeout_s=1.0).reason == "no_answer", "it may have had it"


def test_another_namespace_says_which_field():
    tokens = list(range(22))
    with cluster(2) as running:
        client = running.client(SPACE)

        def under(**fields) -> list[Why]:
            return client.using(SPACE.with_fields(**fields)).why(tokens=tokens)

        stored = client.chain(tokens)
        client.put(stored, [bytes(1000)] * len(stored))
        running.settle()
        assert {why.reason for why in client.why(tokens=tokens)} == {"here"}
        for fields in ({"dtype": "fp8"}, {"salt": "tenant"}, {"lora": "x"}, {"salt": "tenant", "model": "n"}):
            for why in under(**fields):
                print(why.text)
                assert (why.reason, why.node) == ("other_namespace", "node-0")
                assert why.fields == tuple(sorted(fields, key=list(raykv.Namespace.model_fields).index))
        assert [why.reason for why in under(chunk_tokens=7)] == ["other_namespace"] * 2 + ["never_stored"]
        longer = [why.reason for why in under(chunk_tokens=2)]
        assert longer == ["other_namespace"] * 10 + ["never_stored"], "the last one ends in no full chunk of four"
        salted = client.using(SPACE.with_fields(salt="s"))
        salted.put(["named"], [b"x"])
        assert the_reason(salted.using(SPACE.with_fields(salt="s", dtype="fp8")), "named").fields == ("dtype",)
        assert the_reason(client, "named").reason == "never_stored", "salts of others are not known"
        client.delete(stored)
        assert {why.reason for why in client.why(tokens=tokens)} == {"deleted"}
        assert {why.reason for why in under(dtype="fp8")} == {"other_namespace"}, "it was there"


def test_raw_keys_say_nothing_of_other_namespaces():
    with cluster(1) as running:
        client = running.client(SPACE)
        put(client, ["a"])
        other = client.using(SPACE.with_fields(dtype="fp8"))
        assert other.why(["a"])[0].reason == "other_namespace"
        assert other.why(other.keys(["a"]))[0].reason == "never_stored"


def test_read_failures_are_bounded():
    read_failures = ReadFailures()
    keys = [chunk_keys.to_bytes(chunk_keys.named(b"k" * 16, [str(number)])) for number in range(MAX_FAILURES + 10)]
    read_failures.add(keys, "no_answer", "node-1", now_s=1.0)
    assert len(read_failures) == MAX_FAILURES
    assert read_failures.last(keys[9], now_s=2.0) is None
    assert read_failures.last(keys[10], now_s=2.0).node == "node-1"
    read_failures.add(keys[10:11], "corrupt", None, now_s=3.0)
    assert read_failures.last(keys[10], now_s=3.0).kind == "corrupt"
    assert read_failures.last(keys[11], now_s=1.0 + FAILURE_S) is None
    read_failures.remove(keys[:20])
    assert read_failures.last(keys[10], now_s=3.0) is None


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["names", "array", "tokens"])
def test_many_keys_do_not_overrun_the_deadline(kind: str):
    count = 1_000_000
    with cluster(2) as running:
        client = running.client(SPACE)
        put(client, ["n0"])
        running.client(SPACE.with_fields(dtype="other")).put(["n1"], [bytes(NBYTES)])
        running.settle()
        given: dict[str, Any] = {"keys": [f"n{number}" for number in range(count)]}
        if kind == "array":
            given = {"keys": np.arange(2 * count, dtype=np.uint64).reshape(-1, 2)}
        elif kind == "tokens":
            given = {"tokens": np.arange(count * SPACE.chunk_tokens)}
        began_s = time.monotonic()
        found = client.why(**given, timeout_s=0.5)
        seconds = time.monotonic() - began_s
        reasons = Counter(why.reason for why in found)
        print(f"{seconds:.2f} s, {reasons}")
        assert seconds < 1.5
        assert len(found) == count
        assert reasons["not_asked_in_time"] > 0
        assert found[-1].reason == "not_asked_in_time"
        assert reasons["never_stored"] > 0
        if kind == "names":
            assert (found[0].reason, found[1].reason) == ("here", "other_namespace")


def test_more_keys_than_one_request_has():
    with cluster(2) as running:
        client = running.client(SPACE)
        names = [f"n{number}" for number in range(3 * PART_KEYS + 7)]
        client.put(names[PART_KEYS - 1 : PART_KEYS + 1] + names[-1:], [b"x"] * 3, chained=False)
        running.settle()
        reasons = [why.reason for why in client.why(names, timeout_s=60.0)]
        assert [place for place, reason in enumerate(reasons) if reason == "here"] == [
            PART_KEYS - 1, PART_KEYS, 3 * PART_KEYS + 6,
        ]  # fmt: skip
        assert set(reasons) == {"here", "never_stored"}
        assert client.why(client.keys(names), timeout_s=60.0) == client.why(names, timeout_s=60.0)
