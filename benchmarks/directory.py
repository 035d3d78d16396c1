"""Measures what heartbeats and heat cost the directory.

Run by hand: `python -m benchmarks.directory`

Nodes send real heartbeats with full heat reports once per virtual second to `Membership.beat`. The load is a root that
is in every request, prefixes with a Zipf distribution that are spread over the nodes, and noise. The nodes follow the
orders: a copy is there one second later. Encoding and decoding of the messages are measured, too, as the directory does
both. A share of 1.0 is one core.
"""

import argparse
import statistics
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from raykv.membership.membership import Membership
from raykv.protocol import codec
from raykv.protocol.heat import MAX_REPORTED, HeatReport, HotPrefix
from raykv.protocol.messages import Heartbeat
from raykv.protocol.placement import Member, View

ROOT_SHARE = 0.11
NODE_NBYTES_PER_S = 200e6
PREFIX_NBYTES = 8 << 20
TIMEOUT_S = 5.0
JOIN_S = 10
LOOK_S = 0.1


@dataclass
class Node:
    """A node: its member, its view's epoch, and its replicas by the prefix's number."""

    member: Member
    epoch: int = 0
    view: View | None = None


class Cluster:
    """Nodes that beat, and the directory that answers."""

    def __init__(self, nodes: int, *, heat: bool, seed: int) -> None:
        self.directory = Membership(member_timeout_s=TIMEOUT_S)
        self.nodes = [
            Node(Member(f"{number:016x}", f"host-{number}", _endpoints(number), 1.0, (17 << 56) + number))
            for number in range(nodes)
        ]
        self.rng, self.heat = np.random.default_rng(seed), heat
        self.heads = [number.to_bytes(16, "little") for number in range(1 + nodes * MAX_REPORTED)]
        total = nodes * NODE_NBYTES_PER_S
        weights = np.arange(1, len(self.heads)) ** -0.8
        self.loads = np.array([ROOT_SHARE * total, *(0.5 * total * weights / weights.sum())])
        places = self.rng.permutation(len(self.heads)) % nodes
        self.copies: list[dict[int, bool]] = [{place: False} for place in places.tolist()]
        self.held: list[list[int]] = [[] for _ in range(nodes)]
        for number, place in enumerate(places.tolist()):
            self.held[place].append(number)
        self.place_of = {node.member.node_id: place for place, node in enumerate(self.nodes)}
        self.cpu_s = 0.0
        self.answered_nbytes = 0

    def report(self, place: int) -> HeatReport | None:
        if not self.heat:
            return None
        found = []
        for number in self.held[place]:
            load = float(self.loads[number] / len(self.copies[number]) * self.rng.gamma(8, 1 / 8))
            found.append(HotPrefix(self.heads[number], load, 4, self.copies[number][place], PREFIX_NBYTES))
        found.sort(key=lambda prefix: -prefix.load)
        load = 0.39 * NODE_NBYTES_PER_S + sum(prefix.load for prefix in found)
        return HeatReport(load, tuple(found[:MAX_REPORTED]))

    def beat(self, place: int, now_s: float) -> None:
        """Send one heartbeat, and again with the view if the directory asks for it. Measure the directory's part."""
        node = self.nodes[place]
        heartbeat = Heartbeat(node.member, node.epoch, heat=self.report(place))
        body = codec.encode(heartbeat, node.epoch, 1)[codec.HEADER.size :]
        answer = self._serve(body, now_s)
        if answer.want_view:
            heartbeat.view = node.view
            answer = self._serve(codec.encode(heartbeat, node.epoch, 1)[codec.HEADER.size :], now_s)
        if answer.view is not None:
            node.epoch, node.view = answer.view.epoch, answer.view
        if answer.heat is not None:
            for order in answer.heat.copies:
                number = int.from_bytes(order.head, "little")
                for target in order.targets:
                    if (target_place := self.place_of[target]) not in self.copies[number]:
                        self.copies[number][target_place] = True
                        self.held[target_place].append(number)

    def _serve(self, body: bytes, now_s: float):
        began_s = time.process_time()
        heartbeat = codec.decode(body)
        assert isinstance(heartbeat, Heartbeat)
        self.directory.expire(now_s=now_s)
        answer = self.directory.beat(heartbeat, now_s=now_s)
        self.answered_nbytes += len(codec.encode(answer, self.directory.view.epoch, 1))
        self.cpu_s += time.process_time() - began_s
        return answer

    def second(self, now_s: float, places: list[int]) -> None:
        """Let some nodes beat, evenly over one second."""
        for turn, place in enumerate(places):
            self.beat(place, now_s + turn / len(places))


def _endpoints(number: int) -> dict[str, str]:
    return {
        "tcp": f"10.0.{number >> 8}.{number & 255}:41234",
        "unix": f"unix:/dev/shm/raykv-default-{number:016x}.sock",
    }


def steady(nodes: int, *, heat: bool, seconds: int, seed: int) -> tuple[float, int]:
    """Return the share of a core while the members stay the same, and the number of copies of the root."""
    cluster = _complete(nodes, heat=heat, seed=seed)
    for second in range(15):  # the copies are made
        cluster.second(float(second), [*range(nodes)])
    cluster.cpu_s = 0.0
    for second in range(15, 15 + seconds):
        cluster.second(float(second), [*range(nodes)])
    return cluster.cpu_s / seconds, len(cluster.copies[0])


def storm(nodes: int, *, seed: int) -> tuple[float, float]:
    """Return the share of a core, and the answers' bytes a second, while all nodes join within JOIN_S seconds."""
    cluster = Cluster(nodes, heat=True, seed=seed)
    for second in range(JOIN_S):
        cluster.second(float(second), [*range(nodes * (second + 1) // JOIN_S)])
    return cluster.cpu_s / JOIN_S, cluster.answered_nbytes / JOIN_S


def cold_start(nodes: int, *, seed: int) -> float:
    """Return the virtual seconds until a directory that starts empty has the view of nodes that beat."""
    cluster = _complete(nodes, heat=True, seed=seed)
    for turn in range(3 * nodes):
        cluster.beat(turn % nodes, turn / nodes)
        if len(cluster.directory.view.members) == nodes:
            return turn / nodes
    return float("inf")


def state_nbytes(nodes: int, *, heat: bool, seed: int) -> float:
    """Return the bytes of state per node, after the answers were sent."""
    cluster = _complete(nodes, heat=heat, seed=seed)
    cluster.nodes[0].view = None
    bodies = [
        [
            codec.encode(Heartbeat(node.member, 0 if number == 0 else 1, heat=cluster.report(number)), 1, 1)
            for number, node in enumerate(cluster.nodes)
        ]
        for _ in range(6)
    ]
    tracemalloc.start()
    directory = Membership(member_timeout_s=TIMEOUT_S)
    for second, some in enumerate(bodies):
        for body in some:
            heartbeat = codec.decode(body[codec.HEADER.size :])
            assert isinstance(heartbeat, Heartbeat)
            heartbeat.epoch = min(heartbeat.epoch, directory.view.epoch)
            directory.beat(heartbeat, now_s=float(second))
            del heartbeat
    nbytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return nbytes / nodes


def _complete(nodes: int, *, heat: bool, seed: int) -> Cluster:
    """Return a cluster whose nodes have the view of all, and whose directory is empty."""
    cluster = Cluster(nodes, heat=heat, seed=seed)
    view = View(1, tuple(sorted((node.member for node in cluster.nodes), key=lambda member: member.node_id)))
    for node in cluster.nodes:
        node.epoch, node.view = 1, view
    return cluster


def _rows(nodes: int, seconds: int, runs: int) -> Iterator[tuple[str, str]]:
    for heat in (False, True):
        found = [steady(nodes, heat=heat, seconds=seconds, seed=run) for run in range(runs)]
        share, copies = statistics.median(share for share, _ in found), found[0][1]
        yield f"heartbeats{' and heat' if heat else ''}, share of a core", f"{share:.3f}"
    yield "copies of the root", str(copies)
    found_storm = [storm(nodes, seed=run) for run in range(runs)]
    yield f"all join within {JOIN_S} s, share of a core", f"{statistics.median(share for share, _ in found_storm):.3f}"
    yield "the same, answers in MB a second", f"{statistics.median(rate for _, rate in found_storm) / 1e6:.1f}"
    yield (
        "cold start until the view is whole, virtual s",
        f"{max(cold_start(nodes, seed=run) for run in range(runs)):.3f}",
    )
    for heat in (False, True):
        yield f"state per node{' with heat' if heat else ''}, bytes", f"{state_nbytes(nodes, heat=heat, seed=0):,.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nodes", type=int, default=1024)
    parser.add_argument("--seconds", type=int, default=5)
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    print(f"{arguments.nodes} nodes, {MAX_REPORTED} prefixes in a report; medians of {arguments.runs} runs")
    for what, figure in _rows(arguments.nodes, arguments.seconds, arguments.runs):
        print(f"{what:50} {figure:>12}", flush=True)


if __name__ == "__main__":
    main()
