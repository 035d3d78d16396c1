"""Decides how many replicas a hot prefix gets, and on which nodes. The directory runs this code.

Nodes report their hottest prefixes with every heartbeat. The load of a prefix is the sum over all nodes that have it.
A prefix with the share s of the whole load of n nodes gets ceil(s * n / EPSILON) copies. So no copy adds more than
EPSILON of the mean load to its node. New copies go to the nodes with the lowest load. If a node's load is above the
mean by more than SLACK, its hottest prefixes get one more copy, even if their share is smaller; if they have it
already, the node's replicas move to the node with the lowest load, if it stays near the mean with them. Nodes with a
copy make further copies, so the number of copies grows exponentially.

A copy must pay: on average it is read at least once in PAYS_S. Otherwise making it would cost more than it saves. This
also tells heat from chance: a few reads by one request are not heat.

A report replaces the node's earlier report, and is forgotten after REPORT_S. A directory that restarts learns the heat
from the next heartbeats, within START_S.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from raykv.protocol.heat import CopyOrder, HeatOrders, HeatReport, HotPrefix
from raykv.protocol.placement import View
from raykv.types import NodeId

EPSILON: Final = 0.25
"""One copy of a prefix adds at most this share of a node's mean load to its node."""
SHRINK: Final = 0.7
"""The number of copies falls only when the load needs less than this share of them. Otherwise copies would come and go
with each change of the load."""
GROW: Final = 1.1
"""It rises only when the load needs more than this multiple of them."""
SLACK: Final = 0.1
"""A node whose load is above the mean by more than this share is relieved."""
MOVABLE: Final = 4
"""Replicas move only while their prefix has at most this many copies: a move is one copy too many for a while."""
PAYS_S: Final = 5.0
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
    nbytes: int = 1
    holders: dict[NodeId, HotPrefix] = field(default_factory=dict)

    @property
    def ordinary(self) -> list[NodeId]:
        """The nodes whose copy is no replica."""
        return [node_id for node_id, held in self.holders.items() if not held.replica]

    @property
    def paying(self) -> float:
        """The number of copies that pay."""
        return self.load * PAYS_S / self.nbytes


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
        self._chosen: dict[bytes, list[NodeId]] = {}  # the nodes of each prefix in the last plan
        self._relieving: set[bytes] = set()  # prefixes with one more copy, because the load of a node is high
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
        known = {member.node_id for member in view.members}
        self._reports = {
            node_id: each for node_id, each in self._reports.items() if node_id in known and now_s - each[0] < REPORT_S
        }
        loads = _Loads(
            [member.node_id for member in view.members if member.weight > 0],
            {node_id: report.load for node_id, (_, report) in self._reports.items()},
        )
        found = self._hottest()
        warming = [node_id for node_id, at in self._joined_s.items() if node_id in loads and now_s - at < WARM_S]
        copies: dict[bytes, int] = {}
        chosen: dict[bytes, list[NodeId]] = {}
        for place, (head, prefix) in enumerate(found.items()):
            count = self._count(head, prefix, loads)
            guests = warming if place < WARM_PREFIXES and prefix.load >= self._hot else []
            if count >= 2 or guests:
                copies[head], chosen[head] = count, self._choose(head, prefix, count, loads, guests)
        self._relieve(found, copies, chosen, loads)
        orders: dict[NodeId, _Orders] = {}
        for head, nodes in chosen.items():
            _give_orders(orders, head, found[head], nodes)
        self.copies, self._chosen = copies, chosen
        self._orders = {node_id: each.frozen() for node_id, each in orders.items()}

    def _hottest(self) -> dict[bytes, _Copies]:
        """Return the prefixes that may need replicas by their heads, the hottest first, at most MAX_PREFIXES.

        Nearly all reported prefixes are cold. So the first pass only adds up their loads.
        """
        reports = [(node_id, report) for node_id, (_, report) in self._reports.items()]
        loads: defaultdict[bytes, float] = defaultdict(float)
        for _, report in reports:
            for prefix in report.prefixes:
                loads[prefix.head] += prefix.load
        hot = [head for head, load in loads.items() if load >= self._hot / 2]
        hot = sorted(hot, key=loads.__getitem__, reverse=True)[:MAX_PREFIXES]
        found = {head: _Copies(loads[head]) for head in hot}
        for node_id, report in reports:
            for prefix in report.prefixes:
                if prefix.head in found:
                    copies = found[prefix.head]
                    copies.nbytes = max(copies.nbytes, prefix.nbytes)
                    copies.holders[node_id] = prefix
        return found

    def _count(self, head: bytes, prefix: _Copies, loads: "_Loads") -> int:
        """Return how many copies a prefix needs; 1 if it needs no replica."""
        further, nodes = head in self._relieving, len(loads.names)
        before = self.copies.get(head, 1) - further
        if prefix.load < (self._hot if before + further < 2 else self._hot / 2) or not loads.total:
            return 1
        wanted = min(1.0, prefix.load / loads.total) * nodes / EPSILON
        needed = max(1, min(nodes, math.ceil(wanted), int(prefix.paying)))
        if SHRINK * before <= needed and wanted <= GROW * before and before <= nodes:
            needed = before
        if further and prefix.paying < SHRINK * (needed + 1):
            self._relieving.discard(head)
            further = False
        return min(nodes, needed + further)

    def _choose(
        self, head: bytes, prefix: _Copies, count: int, loads: "_Loads", guests: Iterable[NodeId]
    ) -> list[NodeId]:
        """Return the nodes that must have a copy: those with an ordinary copy, then those chosen before, then others.

        The others are those with the lowest load.
        """
        nodes = [*prefix.ordinary]
        before = [node_id for node_id in self._chosen.get(head, prefix.holders) if node_id in loads]
        if not nodes:  # the node with the ordinary copy has gone: another copy takes its place
            nodes = [next((node_id for node_id in before if node_id in prefix.holders), next(iter(prefix.holders)))]
        nodes += [node_id for node_id in before if node_id not in nodes][: max(0, count - len(nodes))]
        loads.remove(prefix)
        nodes += loads.lowest(count - len(nodes), nodes)
        nodes = [*dict.fromkeys([*nodes, *guests])]
        loads.add(prefix, nodes)
        return nodes

    def _relieve(
        self,
        found: dict[bytes, _Copies],
        copies: dict[bytes, int],
        chosen: dict[bytes, list[NodeId]],
        loads: "_Loads",
    ) -> None:
        """Give one more copy to the hottest prefixes of nodes whose load is high, or move the replicas there.

        The copy goes to the node with the lowest load.
        """
        self._relieving &= chosen.keys()
        most = (1 + SLACK) * loads.total / max(1, len(self._reports))
        for source in loads.above(most):
            for head in [prefix.head for prefix in self._reports[source][1].prefixes]:
                prefix = found.get(head)
                if prefix is None or prefix.load < self._hot:
                    continue
                nodes = chosen.get(head) or prefix.ordinary
                stay, target = self._relief(head, prefix, nodes, source), loads.lowest(1, nodes)
                if not stay or not target:
                    continue
                bound = loads[source] if len(stay) == len(nodes) else most  # so a replica moves once
                if loads[target[0]] + prefix.load / (len(stay) + 1) >= bound:
                    continue
                loads.add(prefix, nodes, sign=-1)
                chosen[head] = stay + target
                loads.add(prefix, chosen[head])
                if len(stay) == len(nodes):
                    copies[head] = copies.get(head, 1) + 1
                    self._relieving.add(head)
                if loads[source] <= most:
                    break

    def _relief(self, head: bytes, prefix: _Copies, nodes: list[NodeId], source: NodeId) -> list[NodeId]:
        """Return which nodes keep a prefix when another node gets a copy to relieve `source`; none if it must not."""
        if source not in nodes:
            return []
        if head not in self._relieving:
            return nodes if prefix.paying >= len(nodes) + 1 else []
        held = prefix.holders.get(source)
        moved = held is not None and held.replica and len(nodes) <= MOVABLE and prefix.holders.keys() <= {*nodes}
        return [node_id for node_id in nodes if node_id != source] if moved else []


class _Loads:
    """The load of each node, in bytes a second, as it will be when all copies are made.

    Attributes:
        names: The nodes that may get copies.
        total: The load of all nodes, also of those that may get none.
    """

    def __init__(self, names: list[NodeId], loads: dict[NodeId, float]) -> None:
        self.names, self.total = names, sum(loads.values())
        self._place_of = {name: place for place, name in enumerate(names)}
        self._loads = np.array([loads.get(name, 0.0) for name in names])

    def __contains__(self, name: NodeId) -> bool:
        return name in self._place_of

    def __getitem__(self, name: NodeId) -> float:
        return float(self._loads[self._place_of[name]])

    def remove(self, prefix: _Copies) -> None:
        """Subtract the reported load of a prefix."""
        for name, held in prefix.holders.items():
            if name in self._place_of:
                self._loads[self._place_of[name]] -= held.load

    def add(self, prefix: _Copies, nodes: Sequence[NodeId], *, sign: int = 1) -> None:
        """Add the load of a prefix in equal shares to the nodes with a copy. A `sign` of -1: subtract it."""
        places = [self._place_of[name] for name in nodes if name in self._place_of]
        self._loads[places] += sign * prefix.load / len(nodes)

    def lowest(self, count: int, without: Sequence[NodeId]) -> list[NodeId]:
        """Return the nodes with the lowest load, at most `count`, none of them in `without`."""
        if count <= 0 or not self.names:
            return []
        loads = self._loads.copy()
        loads[[self._place_of[name] for name in without if name in self._place_of]] = np.inf
        order = loads.argsort(kind="stable")[:count].tolist() if count > 1 else [int(loads.argmin())]
        return [self.names[place] for place in order if loads[place] < np.inf]

    def above(self, load: float) -> list[NodeId]:
        """Return the nodes with a higher load, the highest first."""
        return [
            self.names[place] for place in (-self._loads).argsort(kind="stable").tolist() if self._loads[place] > load
        ]


class _Orders:
    """The orders for one node, while they are collected."""

    def __init__(self) -> None:
        self.copies: list[CopyOrder] = []
        self.keep: list[bytes] = []
        self.adopt: list[bytes] = []

    def frozen(self) -> HeatOrders:
        return HeatOrders(tuple(self.copies), tuple(self.keep), tuple(self.adopt))


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
