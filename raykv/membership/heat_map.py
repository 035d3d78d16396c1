"""Decides how many replicas a hot prefix gets, and on which nodes. The directory runs this code.

Nodes report their hottest prefixes with every heartbeat. The load of a prefix is the sum over all nodes that have it.
A prefix with the share s of the whole load of n nodes gets ceil(s * n / EPSILON) copies. So no copy adds more than
EPSILON of the mean load to its node. The copies lie on the nodes that rank highest for the prefix's head
(`Ring.ranked`). Nodes with a copy make further copies, so the number of copies grows exponentially.

A report replaces the node's earlier report, and is forgotten after REPORT_S. A directory that restarts learns the heat
from the next heartbeats, within START_S.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from raykv.protocol.heat import CopyOrder, HeatOrders, HeatReport, HotPrefix
from raykv.protocol.placement import View
from raykv.types import NodeId

EPSILON: Final = 0.25
"""One copy of a prefix adds at most this share of a node's mean load to its node."""
SHRINK: Final = 0.7
"""The number of copies falls only when the load needs less than this share of them. Otherwise copies would come and go
with each change of the load."""
MAX_PREFIXES: Final = 4096
"""At most this many prefixes get replicas: those with the highest load."""
FAN_OUT: Final = 3
"""A node copies one prefix to at most this many nodes at a time."""
WHOLE: Final = 0.75
"""A replica with less than this share of the prefix's chunks is copied again."""
PLAN_S: Final = 0.5
START_S: Final = 3.0
"""A directory that starts waits this long for the reports of all nodes. Until then, nodes keep their replicas."""
REPORT_S: Final = 5.0
WARM_S: Final = 60.0
WARM_PREFIXES: Final = 32
"""A node that has joined gets replicas of the WARM_PREFIXES hottest prefixes for WARM_S seconds."""


@dataclass(slots=True)
class _Copies:
    """The copies of one prefix: the node of each copy, and what that node reports. `load`: bytes a second."""

    load: float = 0.0
    holders: dict[NodeId, HotPrefix] = field(default_factory=dict)


class HeatMap:
    """The heat of a cluster, and the replicas that it needs. It has no clock and no lock, like `Membership`.

    Attributes:
        copies: Maps the head of each prefix that has replicas to its number of copies.
    """

    def __init__(self, *, hot_nbytes_per_s: float) -> None:
        """A prefix gets replicas only if at least `hot_nbytes_per_s` bytes of it are read per second."""
        self._hot = hot_nbytes_per_s
        self._reports: dict[NodeId, tuple[float, HeatReport]] = {}
        self._joined_s: dict[NodeId, float] = {}
        self._orders: dict[NodeId, HeatOrders] = {}
        self._began_s, self._planned_s = math.inf, -math.inf
        self.copies: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._reports)

    def join(self, node_id: NodeId, *, now_s: float) -> None:
        """Record that a node has joined, so that it gets replicas of the hottest prefixes.

        Does nothing while the cluster starts, when most nodes are new.
        """
        if now_s - self._began_s < WARM_S:
            return
        self._joined_s = {known: at for known, at in self._joined_s.items() if now_s - at < WARM_S}
        self._joined_s[node_id] = now_s

    def beat(self, node_id: NodeId, report: HeatReport, view: View, *, now_s: float) -> HeatOrders | None:
        """Record a node's report, and return what the node must do; None while reports of other nodes are missing."""
        self._reports[node_id] = now_s, report
        self._began_s = min(self._began_s, now_s)
        if now_s - self._began_s < START_S:
            return None
        if now_s - self._planned_s >= PLAN_S:
            self._planned_s = now_s
            self._plan(view, now_s)
        return self._orders.get(node_id, HeatOrders())

    def _plan(self, view: View, now_s: float) -> None:
        members = {member.node_id for member in view.members if member.weight > 0}
        known = {member.node_id for member in view.members}
        self._reports = {
            node_id: each for node_id, each in self._reports.items() if node_id in known and now_s - each[0] < REPORT_S
        }
        total = sum(report.load for _, report in self._reports.values())
        found = self._hottest(members)
        warming = [node_id for node_id, at in self._joined_s.items() if node_id in members and now_s - at < WARM_S]
        copies: dict[bytes, int] = {}
        orders: dict[NodeId, _Orders] = {}
        for place, (head, prefix) in enumerate(found):
            count = self._count(head, prefix.load, total, len(members))
            guests = warming if place < WARM_PREFIXES and prefix.load >= self._hot else []
            if count < 2 and not guests:
                continue
            copies[head] = count
            _give_orders(orders, head, prefix, _nodes_for(head, prefix, count, view, guests))
        self.copies = copies
        self._orders = {node_id: each.frozen() for node_id, each in orders.items()}

    def _hottest(self, members: set[NodeId]) -> list[tuple[bytes, _Copies]]:
        """Return the reported prefixes, the hottest first, at most MAX_PREFIXES."""
        found: dict[bytes, _Copies] = {}
        for node_id, (_, report) in self._reports.items():
            for prefix in report.prefixes:
                copies = found.setdefault(prefix.head, _Copies())
                copies.load += prefix.load
                copies.holders[node_id] = prefix
        return sorted(found.items(), key=lambda each: -each[1].load)[:MAX_PREFIXES]

    def _count(self, head: bytes, load: float, total: float, nodes: int) -> int:
        """Return how many copies a prefix needs; 1 if it needs no replica."""
        before = self.copies.get(head, 1)
        if load < (self._hot if before < 2 else self._hot / 2) or not total:
            return 1
        needed = min(nodes, math.ceil(min(1.0, load / total) * nodes / EPSILON))
        return before if SHRINK * before <= needed < before <= nodes else needed


class _Orders:
    """The orders for one node, while they are collected."""

    def __init__(self) -> None:
        self.copies: list[CopyOrder] = []
        self.keep: list[bytes] = []
        self.adopt: list[bytes] = []

    def frozen(self) -> HeatOrders:
        return HeatOrders(tuple(self.copies), tuple(self.keep), tuple(self.adopt))


def _nodes_for(head: bytes, prefix: _Copies, count: int, view: View, guests: Iterable[NodeId]) -> list[NodeId]:
    """Return the nodes that must have a copy: those with an ordinary copy, then by rank until there are `count`."""
    chosen = [node_id for node_id, held in prefix.holders.items() if not held.replica]
    ranked = view.ring.ranked(int.from_bytes(head[:8], "little"))
    if not chosen:  # the node with the ordinary copy has gone: another copy takes its place
        chosen = [next((node_id for node_id in ranked if node_id in prefix.holders), next(iter(prefix.holders)))]
    chosen += [node_id for node_id in ranked if node_id not in chosen][: max(0, count - len(chosen))]
    return [*dict.fromkeys([*chosen, *guests])]


def _give_orders(orders: dict[NodeId, _Orders], head: bytes, prefix: _Copies, wanted: list[NodeId]) -> None:
    """Order the missing copies of a prefix, and say which copies stay."""
    most = max(held.chunks for held in prefix.holders.values())
    whole = [node_id for node_id, held in prefix.holders.items() if held.chunks >= WHOLE * most]
    missing = [node_id for node_id in wanted if node_id not in whole]
    for number, source in enumerate(whole):
        if some := missing[number * FAN_OUT : (number + 1) * FAN_OUT]:
            orders.setdefault(source, _Orders()).copies.append(CopyOrder(head, tuple(some)))
    ordinary = any(not held.replica for held in prefix.holders.values())
    for node_id in wanted:
        if held := prefix.holders.get(node_id):
            mine = orders.setdefault(node_id, _Orders())
            (mine.adopt if held.replica and not ordinary else mine.keep).append(head)
            ordinary = True
