"""The directory sizes replicas by load, places them by rank, and lets them go when the load falls."""

import math
import random
from collections import Counter

import pytest

from raykv.membership import heat_map as module
from raykv.membership.heat_map import EPSILON, FAN_OUT, PAYS_S, REPORT_S, WARM_S, HeatMap
from raykv.protocol.heat import HeatOrders, HeatReport, HotPrefix
from raykv.protocol.placement import Member, View

HEAD = b"h" * 16


@pytest.fixture(autouse=True)
def at_once(request: pytest.FixtureRequest, monkeypatch):
    if "start" not in request.node.name:
        monkeypatch.setattr(module, "START_S", 0.0)


def view_of(names, epoch: int = 1) -> View:
    return View(epoch, tuple(Member(name, name, {}, 1.0, 1) for name in names))


class Cluster:
    """Nodes that follow the orders at once. `loads`: bytes a second of each prefix, spread evenly over its copies."""

    def __init__(self, count: int, *, hot: float = 100.0) -> None:
        self.names = [f"n{number}" for number in range(count)]
        self.heat = HeatMap(hot_nbytes_per_s=hot)
        self.copies: dict[bytes, dict[str, bool]] = {}  # head -> node -> whether its copy is a replica
        self.loads: dict[bytes, float] = {}
        self.base = 0.0
        self.now_s = 0.0
        self.ordered = 0
        self.unlisted: dict[tuple[bytes, str], int] = {}

    def round(self) -> None:
        """One heartbeat of every node."""
        self.now_s += 1.0
        view = view_of(self.names)
        before = {head: dict(copies) for head, copies in self.copies.items()}
        for name in self.names:
            orders = self.heat.beat(name, self.report(name, before), view, now_s=self.now_s)
            self.follow(name, orders)

    def report(self, name: str, copies) -> HeatReport:
        held = {head: nodes for head, nodes in copies.items() if name in nodes}
        mine = [HotPrefix(head, self.loads[head] / len(nodes), 1, nodes[name]) for head, nodes in held.items()]
        return HeatReport(self.base + sum(each.load for each in mine), tuple(mine))

    def follow(self, name: str, orders: HeatOrders) -> None:
        for order in orders.copies:
            assert name in self.copies[order.head], "only nodes with a copy are asked"
            assert len(order.targets) <= FAN_OUT
            self.ordered += len(order.targets)
            for target in order.targets:
                self.copies[order.head].setdefault(target, True)
                self.unlisted[order.head, target] = 0
        for head, held in self.copies.items():
            self.unlisted[head, name] = 0 if head in orders.keep else self.unlisted.get((head, name), 0) + 1
            if head in orders.adopt:
                held[name] = False
            elif held.get(name) and self.unlisted[head, name] > 2:
                del held[name]


@pytest.mark.parametrize(("nodes", "share"), [(4, 0.3), (16, 0.11), (64, 0.02), (256, 0.11)])
def test_the_number_of_copies_follows_the_share_of_the_load(nodes: int, share: float):
    cluster = Cluster(nodes)
    cluster.copies[HEAD] = {"n1": False}
    cluster.loads[HEAD] = 1e6
    cluster.base = 1e6 * (1 - share) / share / nodes
    rounds = 0
    wanted = min(nodes, math.ceil(share * nodes / EPSILON))
    while len(cluster.copies[HEAD]) < wanted:
        cluster.round()
        rounds += 1
        assert rounds < 12, "the number of copies grows exponentially"
    for _ in range(3):
        cluster.round()
    count = len(cluster.copies[HEAD])
    assert wanted <= count <= 1.25 * wanted, "while the copies are made, reports of different times add up to more"
    assert count == cluster.heat.copies[HEAD]
    assert not cluster.copies[HEAD]["n1"]


def test_copies_go_when_the_load_falls_and_stay_while_it_varies_a_little(rng: random.Random):
    cluster = Cluster(16)
    cluster.copies[HEAD], cluster.loads[HEAD], cluster.base = {"n1": False}, 1e6, 5e5
    for _ in range(6):
        cluster.round()
    held, ordered = set(cluster.copies[HEAD]), cluster.ordered
    assert len(held) - math.ceil(1e6 / 9e6 * 16 / EPSILON) in (0, 1)
    for _ in range(20):
        cluster.loads[HEAD] = 1e6 * rng.uniform(0.8, 1.0)
        cluster.round()
    assert (set(cluster.copies[HEAD]), cluster.ordered) == (held, ordered)
    cluster.loads[HEAD] = 3e5
    for _ in range(5):
        cluster.round()
    assert len(cluster.copies[HEAD]) - math.ceil(3e5 / 8.3e6 * 16 / EPSILON) in (0, 1)
    cluster.loads[HEAD] = 20.0
    for _ in range(5):
        cluster.round()
    assert cluster.copies[HEAD] == {"n1": False}
    assert cluster.heat.copies == {}


def test_an_idle_cluster_makes_no_replicas():
    cluster = Cluster(8, hot=1000.0)
    cluster.copies[HEAD], cluster.loads[HEAD] = {"n1": False}, 999.0
    for _ in range(4):
        cluster.round()
    assert cluster.copies[HEAD] == {"n1": False}


def test_a_replica_is_adopted_when_the_ordinary_copy_has_gone():
    cluster = Cluster(6)
    cluster.copies[HEAD], cluster.loads[HEAD], cluster.base = {"n1": False}, 1e6, 1e5
    for _ in range(5):
        cluster.round()
    assert len(cluster.copies[HEAD]) > 2
    del cluster.copies[HEAD]["n1"]
    cluster.names.remove("n1")
    for _ in range(5):
        cluster.round()
    assert sorted(cluster.copies[HEAD].values())[:2] == [False, True], "one ordinary copy, and replicas"
    cluster.loads[HEAD] = 0.0
    for _ in range(5):
        cluster.round()
    assert list(cluster.copies[HEAD].values()) == [False]


def test_a_new_node_gets_the_hottest_prefixes_for_a_while():
    cluster = Cluster(40)
    for number in range(50):
        head = bytes([number]) * 16
        cluster.copies[head], cluster.loads[head] = {f"n{number % 40}": False}, 200.0 + number
    cluster.base = 1e5
    for _ in range(3):
        cluster.round()
    assert all(len(held) == 1 for held in cluster.copies.values())
    cluster.names.append("new")
    cluster.heat.join("new", now_s=cluster.now_s)
    for _ in range(4):
        cluster.round()
    assert not any("new" in held for held in cluster.copies.values()), "the cluster itself is new"
    cluster.now_s += WARM_S
    cluster.heat.join("new", now_s=cluster.now_s)
    for _ in range(4):
        cluster.round()
    here = sorted(head[0] for head, held in cluster.copies.items() if "new" in held)
    assert here == list(range(18, 50)), "the 32 hottest"
    cluster.now_s += WARM_S
    for _ in range(4):
        cluster.round()
    assert not any("new" in held for held in cluster.copies.values())


def test_a_replica_that_has_only_a_part_is_copied_again():
    heat, view = HeatMap(hot_nbytes_per_s=1.0), view_of("ab")
    full, part = HotPrefix(HEAD, 1e6, 8), HotPrefix(HEAD, 1e6, 5, replica=True)
    heat.beat("b", HeatReport(1e6, (part,)), view, now_s=0.0)
    orders = heat.beat("a", HeatReport(1e6, (full,)), view, now_s=1.0)
    assert [(order.head, order.targets) for order in orders.copies] == [(HEAD, ("b",))]
    assert heat.beat("b", HeatReport(1e6, (part,)), view, now_s=1.1).keep == (HEAD,)


def test_reports_of_nodes_that_have_left_or_are_silent_do_not_count():
    heat, hot = HeatMap(hot_nbytes_per_s=1.0), HotPrefix(HEAD, 1e6, 1)
    heat.beat("a", HeatReport(1e6, (hot,)), view_of("abc"), now_s=0.0)
    heat.beat("b", HeatReport(0.0), view_of("abc"), now_s=1.0)
    assert heat.copies == {HEAD: 3}
    heat.beat("b", HeatReport(0.0), view_of("bc"), now_s=2.0)
    assert (heat.copies, len(heat)) == ({}, 1)
    heat.beat("c", HeatReport(1e6, (hot,)), view_of("bc"), now_s=3.0)
    assert heat.copies == {HEAD: 2}
    heat.beat("b", HeatReport(0.0), view_of("bc"), now_s=3.0 + REPORT_S)
    assert heat.copies == {}
    assert heat.beat("c", HeatReport(0.0), view_of("bc"), now_s=3.1 + REPORT_S) == HeatOrders()


def test_a_directory_that_starts_waits_for_all_reports():
    heat, view, replica = HeatMap(hot_nbytes_per_s=1.0), view_of("abcdef"), HotPrefix(HEAD, 1e6, 1, replica=True)
    assert heat.beat("b", HeatReport(1e6, (replica,)), view, now_s=100.0) is None
    for number, name in enumerate("acdef"):
        report = HeatReport(2e5, (HotPrefix(HEAD, 0.0, 1),) if name == "a" else ())
        assert heat.beat(name, report, view, now_s=101.0 + number / 10) is None
    orders = heat.beat("b", HeatReport(1e6, (replica,)), view, now_s=100.0 + module.START_S)
    assert orders is not None
    assert orders.keep == (HEAD,)


def test_nodes_that_drain_get_no_copies():
    heat, hot = HeatMap(hot_nbytes_per_s=1.0), HotPrefix(HEAD, 1e6, 1)
    members = [Member(name, name, {}, 0.0 if name == "c" else 1.0, 1) for name in "abcd"]
    orders = heat.beat("a", HeatReport(1e6, (hot,)), View(1, tuple(members)), now_s=0.0)
    assert {target for order in orders.copies for target in order.targets} == {"b", "d"}


def skewed(*, nbytes: int, nodes: int = 10) -> tuple[HeatMap, Counter[str]]:
    """Let node n0 have twice the load of the others, from 50 prefixes with 1 % of it each.

    Returns:
        The directory, and the number of copies that it orders to each node.
    """
    heat, view, ordered = HeatMap(hot_nbytes_per_s=1.0), view_of([f"n{number}" for number in range(nodes)]), Counter()
    hot = tuple(HotPrefix(bytes([number]) * 16, 2e4, 4, nbytes=nbytes) for number in range(50))
    for second in (0.0, 1.0):
        for number in range(nodes):
            report = HeatReport(2e6, hot) if number == 0 else HeatReport(1e6)
            orders = heat.beat(f"n{number}", report, view, now_s=second)
    orders = heat.beat("n0", HeatReport(2e6, hot), view, now_s=2.0)
    assert orders is not None
    ordered.update(target for order in orders.copies for target in order.targets)
    return heat, ordered


def test_a_node_above_the_mean_is_relieved_by_the_nodes_with_the_lowest_load():
    heat, ordered = skewed(nbytes=4)
    assert set(heat.copies.values()) == {2}
    assert len(heat.copies) == 50, "half of 50 * 2e4 is not enough to get from 2e6 to 1.21e6"
    assert set(ordered) == {f"n{number}" for number in range(1, 10)}
    assert max(ordered.values()) - min(ordered.values()) <= 1


def test_a_replica_moves_from_a_node_above_the_mean_if_its_prefix_has_one_more_copy_already():
    heat, names, hot, ordinary = HeatMap(hot_nbytes_per_s=1.0), "abcdef", b"h" * 16, {"a": False}

    def plan(now_s: float, holders: dict[str, bool], loads: dict[str, float]) -> dict[str, HeatOrders]:
        orders = {}
        for again in (0.0, 0.6):  # the first round brings the reports, the second one a plan of all of them
            for name in names:
                here = [HotPrefix(hot, 2.4e5 / len(holders), 1, holders[name])] if name in holders else []
                got = heat.beat(
                    name, HeatReport(loads.get(name, 1e6), tuple(here)), view_of(names), now_s=now_s + again
                )
                orders[name] = got or HeatOrders()
        return orders

    plan(0.0, ordinary, {"a": 1.5e6, "b": 9e5})
    both = {"a": False, "b": True}
    assert heat.copies == {hot: 2}, "the one that relieves a"
    orders = plan(2.0, both, {"b": 1.5e6, "c": 9e5})
    assert [order.targets for each in orders.values() for order in each.copies] == [("c",)]
    assert hot in orders["a"].keep
    assert hot not in orders["b"].keep
    assert heat.copies == {hot: 2}
    three = {"a": False, "b": True, "c": True}
    orders = plan(4.0, three, {"a": 1.5e6, "c": 1.5e6})
    assert hot in orders["c"].keep, "the replica on b has not gone yet"
    assert not any(each.copies for each in orders.values())


def test_a_replica_does_not_wander_if_every_node_would_be_above_the_mean_with_it():
    """The whole load is one prefix, with one more copy than its share asks for. So any holder is above the mean."""
    heat, view, rng = HeatMap(hot_nbytes_per_s=1.0), view_of("abcd"), random.Random(1)
    holders, ordered = {"a": False}, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "EPSILON", 4.0)
        for now_s in range(20):
            for name in view.ring.nodes:
                load = rng.uniform(0.8e6, 1.2e6) / len(holders)
                hot = (HotPrefix(HEAD, load, 1, holders[name]),) if name in holders else ()
                orders = heat.beat(name, HeatReport(1.01 * load if hot else 0.0, hot), view, now_s=float(now_s))
                for order in (orders or HeatOrders()).copies:
                    ordered += order.targets
            holders |= dict.fromkeys(ordered, True)
    assert len(set(ordered)) == 1
    assert heat.copies == {HEAD: 2}


def test_a_copy_must_pay():
    _, ordered = skewed(nbytes=int(2e4 * PAYS_S / 2) + 1)
    assert ordered == {}, "a replica of a prefix that is read twice in PAYS_S"
    heat, hot = HeatMap(hot_nbytes_per_s=1.0), HotPrefix(HEAD, 1e6, 1, nbytes=int(1e6 * PAYS_S / 3))
    heat.beat("a", HeatReport(1e6, (hot,)), view_of("abcdef"), now_s=0.0)
    assert heat.copies == {HEAD: 3}, "its load is enough for 6"


def test_new_copies_go_to_the_nodes_with_the_lowest_load():
    heat, view = HeatMap(hot_nbytes_per_s=1.0), view_of("abcdef")
    loads = {"b": 3e6, "c": 1e6, "d": 4e6, "e": 2e6, "f": 5e6}
    for name, load in loads.items():
        heat.beat(name, HeatReport(load), view, now_s=0.0)
    orders = heat.beat("a", HeatReport(4e5, (HotPrefix(HEAD, 1.6e6, 1),)), view, now_s=1.0)
    assert orders is not None
    assert [order.targets for order in orders.copies] == [("c", "e")]
    assert heat.copies[HEAD] == 3 == math.ceil(1.6e6 / 15.4e6 * 6 / EPSILON)
