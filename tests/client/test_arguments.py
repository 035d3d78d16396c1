"""A call with wrong arguments raises UsageError. The client keeps its connection and its leases."""

import math
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import raykv
from raykv.errors import UsageError
from tests.support.clients import remote_client
from tests.support.nodes import SPACE, cluster

NBYTES = 100
KEYS = np.arange(4, dtype=np.uint64).reshape(2, 2)
TIMEOUTS = [math.nan, math.inf, -math.inf, -1, -1e-9, 1e300, "1", b"1", [], None.__class__, np.nan, {}, "nan"]
NOT_INTEGERS = [1.5, "1", b"1", math.nan, math.inf, [1], np.float64(1.0), np.ones(2, int), Decimal(1), object()]
BAD_KEYS: list[Any] = [
    None, 5, "name", b"name", bytearray(b"n"), memoryview(b"n"), object(), [1], ["a", None], [["a"]], ["\ud800"], [1.5],
    np.zeros((2, 3), np.uint64), np.zeros((2, 2), np.int64), np.zeros(4, np.uint64), np.zeros((2, 2), np.float64),
    np.zeros((1, 2, 2), np.uint64), np.array(["a", "b"]), np.zeros((2, 2), ">u8"), np.array(5), True,
]  # fmt: skip
BAD_ONES: list[Any] = [
    None, 5, "x" * 16, b"", b"short", bytes(17), bytes(32), [bytes(16)], np.zeros((1, 2), np.uint64), object(), 1.5,
]  # fmt: skip
BAD_BUFFERS: list[Any] = [
    None, 5, "text", object(), [None], [5], np.zeros((4, 4))[:, 1], np.zeros(2, "M8[s]"), np.array([object()]),
    SimpleNamespace(numpy=1), {}, 1.5, [bytearray(1), "x"],
]  # fmt: skip
PARENTS: list[Any] = [
    KEYS, KEYS[0], [KEYS[:1]], b"x" * 16, "a", 5, np.zeros((1, 2), np.int64), np.zeros((0, 2), np.uint64),
    np.zeros((1, 3), np.uint64), ["a"], True,
]  # fmt: skip
DEPTHS = [*NOT_INTEGERS, -1, 1 << 31, 1 << 70, -(1 << 70)]
PRIORITIES = [*NOT_INTEGERS, 101, -101, 1 << 70, np.int64(101)]
TTLS = [0, -1, math.nan, math.inf, 1e18, "1", [], np.float64(-1), object(), 1 << 2000]
FLAGS = [None, 1, "yes", [], np.ones(2, bool), object()]


def cases() -> list[tuple[str, str, Any]]:
    """List the wrong calls as (name of the method, wrong argument, function that makes the call with a client)."""
    found: list[tuple[str, str, Any]] = []

    def add(method: str, field: str, values: list[Any], call: Any) -> None:
        found.extend(
            (method, f"{field}={value!r:.40}", lambda client, value=value: call(client, value)) for value in values
        )

    into = [bytearray(NBYTES)]
    for method in ("match", "exists", "pin", "delete", "hint", "touch", "session_end", "ticket", "why"):
        bad = BAD_KEYS[1:] if method == "why" else BAD_KEYS
        add(method, "keys", bad, lambda c, v, m=method: getattr(c, m)(v))
    add("keys", "names", BAD_KEYS[:12], lambda c, v: c.keys(v))
    add("key", "name", [None, 5, ["a"], 1.5, "\ud800"], lambda c, v: c.key(v))
    for method in ("match", "exists", "pin", "delete", "hint", "touch", "session_end", "why"):
        add(method, "timeout_s", TIMEOUTS, lambda c, v, m=method: getattr(c, m)(["a"], timeout_s=v))
    for method in ("flush", "stats", "namespaces", "drop_namespace"):
        add(method, "timeout_s", TIMEOUTS, lambda c, v, m=method: getattr(c, m)(timeout_s=v))
    add("configure", "timeout_s", TIMEOUTS, lambda c, v: c.configure(ttl_s=5.0, timeout_s=v))
    add("retain", "keys", BAD_KEYS, lambda c, v: c.retain(v, ttl_s=5.0))
    add("retain", "ttl_s", [0, -1, None, math.nan, 1e12, "5"], lambda c, v: c.retain(["a"], ttl_s=v))
    add("retain", "priority", [101, -101, 1.5, None, "5"], lambda c, v: c.retain(["a"], ttl_s=5.0, priority=v))
    add("retain", "timeout_s", TIMEOUTS, lambda c, v: c.retain(["a"], ttl_s=5.0, timeout_s=v))
    add("get", "timeout_s", TIMEOUTS, lambda c, v: c.get(["a"], into, timeout_s=v))
    add("get_one", "timeout_s", TIMEOUTS, lambda c, v: c.get_one(c.key("no"), into[0], timeout_s=v))
    add("exists_one", "timeout_s", TIMEOUTS, lambda c, v: c.exists_one(c.key("no"), timeout_s=v))
    add("put", "timeout_s", TIMEOUTS, lambda c, v: c.put(["n"], [bytes(NBYTES)], timeout_s=v))
    add("put_one", "timeout_s", TIMEOUTS, lambda c, v: c.put_one(c.key("n"), bytes(NBYTES), timeout_s=v))
    add("reserve", "timeout_s", TIMEOUTS, lambda c, v: c.reserve(["n"], NBYTES, timeout_s=v))
    add("get", "keys", BAD_KEYS, lambda c, v: c.get(v, into))
    add("put", "keys", BAD_KEYS, lambda c, v: c.put(v, [bytes(NBYTES)] * 2))
    add("get_one", "key", BAD_ONES, lambda c, v: c.get_one(v, into[0]))
    add("exists_one", "key", BAD_ONES, lambda c, v: c.exists_one(v))
    add("put_one", "key", BAD_ONES, lambda c, v: c.put_one(v, bytes(NBYTES)))
    add("get", "into[0]", [*BAD_BUFFERS, b"read-only"], lambda c, v: c.get(["a"], [v]))
    add("get_one", "into", [*BAD_BUFFERS, b"read-only"], lambda c, v: c.get_one(c.key("a"), v))
    add("put", "values[0]", [*BAD_BUFFERS, b"", bytes(1 << 20)], lambda c, v: c.put(["n"], [v]))
    add("put_one", "value", [*BAD_BUFFERS, b"", bytes(1 << 20)], lambda c, v: c.put_one(c.key("n"), v))
    lists: list[Any] = [None, 5, "x", b"x", object(), [], [b"x", b"y"], iter([b"x"]), {"a": b"x"}, {b"x"}]
    add("put", "values", lists, lambda c, v: c.put(["n"], v))
    add("get", "into", lists, lambda c, v: c.get(["a"], v))
    add("put", "parent", PARENTS, lambda c, v: c.put(["n"], [bytes(NBYTES)], parent=v))
    add("put", "depth", DEPTHS, lambda c, v: c.put(["n"], [bytes(NBYTES)], depth=v))
    add("put", "priority", PRIORITIES, lambda c, v: c.put(["n"], [bytes(NBYTES)], priority=v))
    add("put", "ttl_s", TTLS, lambda c, v: c.put(["n"], [bytes(NBYTES)], ttl_s=v))
    add("put", "chained", FLAGS, lambda c, v: c.put(["n"], [bytes(NBYTES)], chained=v))
    add("put", "wait", FLAGS, lambda c, v: c.put(["n"], [bytes(NBYTES)], wait=v))
    add("put_one", "priority", PRIORITIES, lambda c, v: c.put_one(c.key("n"), bytes(NBYTES), priority=v))
    add("put_one", "ttl_s", TTLS, lambda c, v: c.put_one(c.key("n"), bytes(NBYTES), ttl_s=v))
    add("hint", "priority", PRIORITIES, lambda c, v: c.hint(["a"], priority=v))
    add("hint", "ttl_s", TTLS[1:], lambda c, v: c.hint(["a"], ttl_s=v))
    add("hint", "output_tokens", [*NOT_INTEGERS, -1, 1 << 31, 1 << 70], lambda c, v: c.hint(["a"], output_tokens=v))
    sizes = [*NOT_INTEGERS, 0, -1, 1 << 20, 1 << 40, 1 << 70]
    add("reserve", "nbytes", sizes, lambda c, v: c.reserve(["n"], v))
    add("reserve", "parent", PARENTS, lambda c, v: c.reserve(["n"], NBYTES, parent=v))
    add("reserve", "depth", DEPTHS, lambda c, v: c.reserve(["n"], NBYTES, depth=v))
    add("configure", "dram_quota_nbytes", [-1, -(1 << 70), object()], lambda c, v: c.configure(dram_quota_nbytes=v))
    tokens: list[Any] = [
        5, "text", [-1], [1 << 32], [1.5], ["a"], [None], [[1], [2]], [[1], [2, 3]], np.ones((2, 2), int), {1: 2},
        [1 << 70], np.array([1.5]), [True, False], object(),
    ]  # fmt: skip
    add("chain", "tokens", [None, *tokens], lambda c, v: c.chain(v))
    add("why", "tokens", tokens, lambda c, v: c.why(tokens=v))
    found.append(("why", "neither", lambda c: c.why()))
    found.append(("why", "both", lambda c: c.why(["a"], tokens=[1])))
    for value in (5, "node-0", ("node-0",), object(), raykv.GetResult((True,))):
        add("get", "match", [value], lambda c, v: c.get(["no"], into, match=v))
        add("get", "ticket", [value], lambda c, v: c.get(["no"], into, ticket=v))
        add("match", "ticket", [value], lambda c, v: c.match(["no"], ticket=v))
        add("ticket", "match", [value], lambda c, v: c.ticket(["no"], match=v))
        add("using", "namespace", [value], lambda c, v: c.using(v))
    add("get_one", "holder", [5, b"node-0", ["node-0"]], lambda c, v: c.get_one(c.key("no"), into[0], holder=v))
    for fields in ({"ttl_s": "soon"}, {"ttl_s": -1}, {"policy": "x"}, {"x": 1}, {"ttl_s": object()}, {"priority": 1j}):
        add("configure", "fields", [fields], lambda c, v: c.configure(**v))
    if hasattr(raykv, "Put"):
        add("put_many", "puts", [None, 5, "x", [5], [None], {}, iter([])], lambda c, v: c.put_many(v))
        put = raykv.Put
        add("put_many", "depth", DEPTHS, lambda c, v: c.put_many([put(["n"], [bytes(NBYTES)], depth=v)]))
        add("prepare", "nbytes", sizes, lambda c, v: c.prepare(v, 4))
        add("prepare", "count", [*NOT_INTEGERS, -1, 1 << 70], lambda c, v: c.prepare(NBYTES, v))
    return found


def wrong(client: Any, given: list[tuple[str, str, Any]]) -> list[str]:
    """Make the calls in `given`, which should raise UsageError with a text. Returns a line for each other exception."""
    found = []
    for method, what, call in given:
        try:
            call(client)
        except UsageError as error:
            if not str(error):
                found.append(f"{method}({what}): says nothing")
        except Exception as error:  # noqa: BLE001
            found.append(f"{method}({what}): {type(error).__name__}: {error}")
    return found


def test_wrong_calls_are_usage_errors_and_cost_the_client_nothing():
    with cluster(2) as running:
        client = running.client(SPACE)
        assert client.put(["a", "start"], [bytes(NBYTES)] * 2).stored == 2
        room, pins = client.reserve(["held"], NBYTES), client.pin(["start"])
        given = cases()
        found = wrong(client, given)
        print(f"{len(given)} calls, {len(found)} wrong:", *found[:40], sep="\n")
        assert len(given) >= 250
        assert not found
        room.views[0][:] = bytes(NBYTES)
        assert room.commit().stored == 1, "the connection and its leases are the same"
        assert pins.valid()
        pins.release()
        assert client.get(["held"], [bytearray(NBYTES)]).hits == (True,)
        assert not any(node.stats()["errors"].get("bug") for node in running.nodes)


def test_the_same_calls_of_a_client_on_another_host():
    with cluster(2) as running, remote_client(running) as client:
        assert client.put(["a"], [bytes(NBYTES)]).stored == 1
        running.settle()
        assert not wrong(client, cases())
        assert client.get(["a"], [bytearray(NBYTES)]).hits == (True,)
        assert not any(node.stats()["errors"].get("bug") for node in running.nodes)


NUMBERS: list[Any] = [np.int64(3), np.uint8(3), np.int32(3), 3]


def test_numpy_scalars_are_numbers():
    with cluster(1) as running:
        client = running.client(SPACE)
        room = client.reserve(["held"], np.int64(NBYTES))
        for number in NUMBERS:
            name = f"n-{type(number).__name__}"
            fields = {"depth": number, "priority": number, "ttl_s": np.float32(50), "timeout_s": np.float64(2)}
            assert client.put([name], [bytes(NBYTES)], chained=np.bool_(True), **fields).stored == 1
            assert client.reserve([f"{name}-r"], np.uint32(NBYTES), depth=number).views
            assert client.hint([name], priority=number, ttl_s=np.int64(9), output_tokens=number) == 1
            assert client.put_one(client.key(f"{name}-1"), bytes(NBYTES), priority=number, ttl_s=number)
            client.prepare(np.int64(NBYTES), number)
            assert client.configure(priority=number, dram_quota_nbytes=np.int64(1 << 20), timeout_s=number) == 1
        assert room.commit().stored == 1
        assert client.match(["held"], timeout_s=np.float32(1)).nbytes == (NBYTES,)


def test_a_put_names_the_entry_that_is_wrong():
    with cluster(1) as running:
        client = running.client(SPACE)
        for call, field in (
            (lambda: client.put(["a", "b"], [b"x", "y"]), r"values\[1\]"),
            (lambda: client.get(["a", "b"], [bytearray(1), b"read-only"]), r"into\[1\]"),
            (lambda: client.match(["a", 5]), r"keys\[1\]"),
            (lambda: client.put(["a"], [b"x"], parent=client.keys(["b", "c"])), "parent"),
            (lambda: client.put(["a"], [b"x"], timeout_s=math.nan), "timeout_s"),
        ):
            with pytest.raises(UsageError, match=field):
                call()
