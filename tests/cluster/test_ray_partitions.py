"""Ray nodes on hosts of their own, cut from each other under load: both ways, one way, and from the head of Ray."""

from collections.abc import Iterator

import pytest

pytest.importorskip("ray")

from tests.chaos.cluster import DIRECTORY
from tests.chaos.hosts import missing
from tests.chaos.rounds import Event, Rounds
from tests.cluster.ray_hosts import RayCluster
from tests.support.nodes import wait_until

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(180),
    pytest.mark.skipif(bool(missing()), reason=missing()),
]

LASTS_S = 2.5
"""How long a partition lasts: longer than raykv's `member_timeout_s`."""
LONG_S = 15.0
"""Nearly as long as Ray waits for a silent node. Ray's own connections are silent for as long once more."""


def events(lasts_s: float) -> list[Event]:
    return [
        Event("partition", "h2", lasts_s, "h3"),
        Event("one_way", "h2", lasts_s, "h3"),
        Event("one_way", DIRECTORY, lasts_s, "h3"),
        Event("partition", "h3", lasts_s, DIRECTORY),
    ]


class RayRounds(Rounds):
    """Also checks that a partition cuts: otherwise a round shows nothing."""

    def _use_others(self, event: Event) -> None:
        super()._use_others(event)
        cluster = self._cluster
        if event.other == DIRECTORY:
            wait_until(lambda: event.host not in cluster.directory.ask("view")["members"], 10.0)
            return
        third = next(host for host in cluster.owners if host not in (event.host, event.other))
        names = [f"cut-{len(self.converged_s)}-{number}" for number in range(20)]
        wait_until(lambda: cluster.clients[event.host].ask("write", names=names))
        wait_until(lambda: any(cluster.clients[third].ask("read", names=names)))
        assert not any(cluster.clients[event.other].ask("read", names=names)), "the partition does not cut"


@pytest.fixture
def cluster(seed: int) -> Iterator[RayCluster]:
    made = RayCluster(["h2", "h3"], seed=seed)
    try:
        made.start_on_ray(prompts=20, fresh=0.15)
        made.converge(30.0)
        made.start_load()
        yield made
        assert made.stop() == []
    finally:
        made.close()


@pytest.mark.parametrize("lasts_s", [LASTS_S, pytest.param(LONG_S, marks=pytest.mark.soak)])
def test_partitions_of_ray_nodes(cluster: RayCluster, lasts_s: float):
    assert cluster.directory is not None
    processes = cluster.directory.ask("view")["members"]
    rounds = RayRounds(cluster)
    for number, event in enumerate(events(lasts_s)):
        rounds.run(number, event)
    print(rounds.summary())
    assert rounds.failures == []
    assert cluster.directory.ask("view")["members"] == processes, "no node was restarted"
