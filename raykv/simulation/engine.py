"""A simulated engine on a node: finds the stored prefix of each prompt, reads it, computes and stores the rest."""

from collections.abc import Callable, Iterable
from typing import Final

from raykv.client.peer_loads import PeerLoads
from raykv.node.location_index import named_holders
from raykv.simulation.node import SimNode
from raykv.types import NodeId

TRIES: Final = 3
"""After a failed read, at most this many holders of a chunk are tried."""


class Engine:
    """The engine of one node. It does what `raykv.client` does for `match`, `get` and `put`.

    Attributes:
        loads: What this engine knows about the load of other nodes.
    """

    def __init__(self, node: SimNode) -> None:
        self.node, self.network = node, node.network
        self.loads = PeerLoads(node.network.rng)
        self.counters = node.counters

    def begin(self, chunks: tuple[int, ...]) -> None:
        """Begin a request: match its chunks, and read the prefix that is stored."""
        node, row_of = self.node, self.node.memory.row_of
        missing = [chunk for chunk in chunks if chunk not in row_of]
        holders = self._locate(missing) if missing else {}
        count = next(
            (place for place, each in enumerate(chunks) if each not in row_of and each not in holders), len(chunks)
        )
        prefix = chunks[:count]
        self.counters.reads[node.name] += len(node.memory.read(prefix, now_s=self.network.now_s))
        shares = _by_node((chunk, holders[chunk]) for chunk in prefix if chunk not in row_of)
        reading, arrived = len(shares), {chunk for chunk in prefix if chunk in row_of}

        def ended(some: Iterable[int]) -> None:
            nonlocal reading
            reading -= 1
            arrived.update(some)
            if not reading:
                self._end(chunks, count, arrived)

        if not shares:
            self._end(chunks, count, arrived)
        for holder, some in shares.items():
            self._read(holder, some, ended)

    def _locate(self, chunks: list[int]) -> dict[int, NodeId]:
        """Ask the owners for the holders of chunks. Return the chosen holder of each chunk that has one."""
        node, world = self.node, self.node.world
        found: dict[int, NodeId] = {}
        for owner, some in world.by_owner(node.view, chunks).items():
            locations = self.network.ask(node.name, owner, lambda: world.nodes[owner].locate(some))  # noqa: B023
            chosen: dict[tuple[NodeId, ...], NodeId] = {}  # an answer names the same holders for the same location
            for chunk, location in zip(some, locations or (), strict=False):
                if holders := location.holders:
                    if holders not in chosen:
                        chosen[holders] = self.loads.order(named_holders(holders, self.network.rng))[0]
                    found[chunk] = chosen[holders]
        return found

    def _read(self, holder: NodeId, chunks: list[int], ended: Callable[[list[int]], None]) -> None:
        """Read chunks from another node. The answer arrives when the link of that node has sent it."""
        nodes, nbytes, name = self.node.world.nodes, len(chunks) * self.node.chunks.nbytes, self.node.name
        if holder == name:  # the owner has not heard yet that the chunks are gone
            self.node.suspect(chunks)
            ended([])
            return
        self.loads.begin(holder, nbytes)
        answer = self.network.ask(name, holder, lambda: nodes[holder].read(chunks))
        sent = len(answer or ()) * self.node.chunks.nbytes
        took_s = nodes[holder].send_s(sent) if answer is not None else self.network.latency_s()

        def arrive() -> None:
            self.loads.end(holder, nbytes, took_s)
            if answer is not None and len(answer) < len(chunks):
                gone = [chunk for chunk in chunks if chunk not in answer]
                self.counters.misled += len(gone)
                self.network.call(name, holder, lambda: nodes[holder].suspect(gone), lambda _: None)
            ended(answer or [])

        self.network.at(self.network.now_s + took_s, arrive)

    def _find(self, chunk: int) -> bool:
        """Read a chunk by way of its owner, as `Fetcher.find` does."""
        node, nodes = self.node, self.node.world.nodes
        (owner,) = node.world.by_owner(node.view, [chunk])
        answer = self.network.ask(node.name, owner, lambda: nodes[owner].read_or_locate(chunk))
        if answer is None or answer[0]:
            return answer is not None
        for holder in self.loads.order(named_holders(answer[1].holders, self.network.rng))[:TRIES]:
            if self.network.ask(node.name, holder, lambda: nodes[holder].read([chunk])):  # noqa: B023
                return True
        return False

    def _end(self, chunks: tuple[int, ...], count: int, arrived: set[int]) -> None:
        """Look for the chunks that did not arrive, then store what follows the prefix that is there."""
        if self.node.stopped:
            return
        hits = next(
            (place for place in range(count) if chunks[place] not in arrived and not self._find(chunks[place])), count
        )
        self.counters.requests += 1
        self.counters.wanted += len(chunks)
        self.counters.hits += hits
        self.node.store(chunks[hits:])


def _by_node(pairs: Iterable[tuple[int, NodeId]]) -> dict[NodeId, list[int]]:
    found: dict[NodeId, list[int]] = {}
    for chunk, node in pairs:
        found.setdefault(node, []).append(chunk)
    return found
