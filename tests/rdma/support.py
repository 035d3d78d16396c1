"""A cluster of two nodes that reach each other over RDMA, and chunks with known bytes."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

import raykv
from tests.support.nodes import wait_until

START_S = 60.0
"""An emulated processor takes long to import pyverbs and to register memory."""
TIMEOUT_S = 20.0


def content(number: int, nbytes: int) -> bytes:
    return np.random.default_rng(number).bytes(nbytes)


class Pair:
    """Two nodes in this process, taken for two hosts, with a client of each.

    Attributes:
        cluster: The nodes.
        writer, reader: Clients of the first and of the second node.
    """

    def __init__(self, cluster: Any, **client: Any) -> None:
        self.cluster = cluster
        space = raykv.Namespace(model="m")
        self.writer = cluster.client(space, node=0, timeout_s=TIMEOUT_S)
        self.reader = cluster.client(space, node=1, timeout_s=TIMEOUT_S, **client)

    def put(self, sizes: list[int], *, first: int = 0) -> list[str]:
        """Store chunks of these sizes on the first node. Returns their names."""
        names = [f"chunk-{number}" for number in range(first, first + len(sizes))]
        for name, nbytes, number in zip(names, sizes, range(first, first + len(sizes)), strict=True):
            self.writer.put([name], [content(number, nbytes)])
        self.cluster.settle(timeout_s=START_S)
        return names

    def get(self, names: list[str], sizes: list[int], **options: Any) -> tuple[raykv.GetResult, list[bytearray]]:
        into = [bytearray(size) for size in sizes]
        return self.reader.get(names, into, **options), into

    def requests(self) -> Counter[str]:
        """Return how many requests of each kind the first node has served."""
        return Counter(self.cluster.nodes[0].stats()["requests"])

    def wait_registered(self) -> None:
        """Wait until the first node has registered all memory that it has populated."""
        node = self.cluster.nodes[0]
        wait_until(
            lambda: node.stats()["rdma"].get("registered_nbytes", 0) >= node.config.storage.arena_nbytes, START_S
        )


@contextmanager
def pair(*, client: dict[str, Any] | None = None, **cluster: Any) -> Iterator[Pair]:
    """Start two nodes, and wait until both are known to be read over RDMA."""
    options = {"arena_nbytes": "32 MiB", "extent_nbytes": "4 MiB", **cluster}
    with raykv.embedded(2, **options) as made:
        logic = made.membership.logic
        wait_until(lambda: sum("rdma" in member.endpoints for member in logic.view.members) == 2, START_S)
        made.settle(timeout_s=START_S)
        yield Pair(made, **(client or {}))
