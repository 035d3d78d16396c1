"""Helpers for clusters with tiers: they put and get chunks by name, and move chunks from memory to a tier."""

import hashlib
import time
from collections.abc import Callable
from typing import Any

import raykv
from raykv.embedded import EmbeddedCluster

SPACE = raykv.Namespace(model="m")
NBYTES = 50_000
MIB = 1 << 20


def content(name: str) -> bytes:
    return hashlib.shake_128(name.encode()).digest(NBYTES)


def names(count: int, prefix: str = "chunk") -> list[str]:
    return [f"{prefix}-{number}" for number in range(count)]


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = 20.0) -> None:
    until_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until_s, f"never: {what}"
        time.sleep(0.01)


def ssd_of(cluster: EmbeddedCluster, node: int = 0) -> dict[str, Any]:
    return cluster.nodes[node].stats()["tiers"]["ssd"]


def put(client: raykv.Client, some: list[str], **options: Any) -> int:
    return client.put(some, [content(name) for name in some], **options).stored


def get(client: raykv.Client, some: list[str]) -> int:
    """Read chunks, and check the bytes of each hit. Returns the number of hits before the first miss."""
    into = [bytearray(NBYTES) for _ in some]
    got = client.get(some, into)
    assert all(into[n] == content(some[n]) for n, hit in enumerate(got.hits) if hit)
    return got.prefix


def sink(cluster: EmbeddedCluster, client: raykv.Client, some: list[str]) -> None:
    """Store and read the chunks `some`. Then put other chunks until `some` are in a tier and not in memory."""
    for start in range(0, len(some), 5):
        put(client, some[start : start + 5])
        assert get(client, some[start : start + 5]) == len(some[start : start + 5])
    push_out(cluster, client, some)


def push_out(cluster: EmbeddedCluster, client: raykv.Client, some: list[str]) -> None:
    """Put other chunks until `some` are in a tier and not in memory. Missing chunks of `some` are stored again."""
    node, keys = cluster.nodes[0], client.keys(some)
    until_s = time.monotonic() + 30.0
    number = 0
    while True:
        client.flush()
        in_memory = node.store.table.find_ready(keys, 1)[0] >= 0
        below = node.mover.find(keys)[1] > 0
        if below.all() and not in_memory.any():
            break
        assert time.monotonic() < until_s, (in_memory, below)
        for name in (some[place] for place in range(len(some)) if not (below[place] or in_memory[place])):
            # On a busy machine, a chunk may be evicted before it is written to the tier. So it is stored again.
            put(client, [name], chained=False)
            assert get(client, [name]) == 1
        put(client, names(3, f"filler-{until_s}-{number}"), chained=False)
        number += 1
        time.sleep(0.01)
    cluster.settle()
