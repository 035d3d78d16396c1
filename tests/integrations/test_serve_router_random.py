"""Random operations on a router's routes: replicas that come and go, requests that end, move, or are forgotten."""

from math import isfinite
from random import Random

import pytest

import raykv
from raykv.integrations.routing import routes as routes_module
from raykv.integrations.routing.choice import RouterOptions
from raykv.integrations.routing.locations import Run, Stored
from raykv.integrations.routing.prompts import Prompt
from raykv.integrations.routing.replicas import Replica
from raykv.integrations.routing.report import EngineReport, ReplicaReport
from raykv.integrations.routing.routes import MAX_SHARE, MIN_SHARE, Choice, Routes
from raykv.integrations.routing.segments import prefix_keys

CHUNK_TOKENS = 64
NAMESPACE = raykv.Namespace(model="m", chunk_tokens=CHUNK_TOKENS)
NAMES = [f"replica-{number}" for number in range(6)]
TINY_S = 1e-6
STEPS = 2000


class RandomLoad:
    """Plays one random operation after the other. The clock stands still at times, as a coarse clock does."""

    def __init__(self, rng: Random) -> None:
        role = rng.choice(["both", "prefill", "decode"])
        self.rng, self.routes = rng, Routes(RouterOptions(role=role), Random(rng.random()))
        self.now_s, self.requests, self.settled = 1000.0, 0, 0
        self.sent: dict[str, str] = {}
        """The replica of each request that may still be open."""

    def step(self) -> None:
        operations = [self.wait, self.report, self.die, self.ask, self.ask, self.ask, self.move, self.take_back]
        self.rng.choice([*operations, self.end, self.end, self.end_again])()

    def wait(self) -> None:
        self.now_s += self.rng.choice([0.0, 0.001, 0.1, 5.0, 300.0])

    def report(self) -> None:
        alive = self.rng.sample(NAMES, self.rng.randint(1, len(NAMES)))
        self.routes.update({name: self.random_report(name) for name in alive}, self.now_s)

    def random_report(self, name: str) -> ReplicaReport | None:
        rng = self.rng
        if rng.random() < 0.2:
            return None
        engine = EngineReport(
            namespace=NAMESPACE if rng.random() < 0.9 else NAMESPACE.model_copy(update={"revision": "2"}),
            hash_tokens=16,
            chunk_nbytes=rng.choice([0, 1 << 20]),
            near=rng.choice([(), (f"node-{name}",), ("node-all",)]),
            cache_tokens=rng.choice([0, 500, 100_000]),
            filled_tokens=rng.choice([0, 1000, 10**9]),
            queued_tokens=rng.choice([0, 0, 5000]),
            seconds_per_token=rng.choice([0.0, 0.001, 0.1]),
            seconds_per_byte=rng.choice([{}, {"node-all": 1e-9, "node-all/disk": 1e-7, f"node-{name}": 1e-10}]),
        )
        return ReplicaReport(engine=rng.choice([None, engine, engine]), age_s=rng.choice([0.0, 0.5, 60.0]))

    def die(self) -> None:
        self.routes.drop(self.rng.choice(NAMES))

    def ask(self) -> None:
        prompt, candidates = self.random_prompt(), self.rng.sample(NAMES, self.rng.randint(1, len(NAMES)))
        wait_left_s = self.rng.choice([0.0, 0.1, 2.0])
        choice = self.routes.choose(
            prompt, self.random_stored(prompt), candidates, wait_left_s=wait_left_s, now_s=self.now_s
        )
        check_choice(choice, prompt, candidates, wait_left_s)
        self.check_settled(prompt, candidates)
        if not choice.wait_s:
            self.requests += 1
            request_id = f"request-{self.requests}"
            self.routes.begin(request_id, prompt, choice.order, self.now_s)
            self.sent[request_id] = choice.order[0].replica_id

    def check_settled(self, prompt: Prompt, candidates: list[str]) -> None:
        """If no answer of raykv is needed, the chosen replica is the best one with any answer."""
        at_best = Stored((Run(prompt.tokens // CHUNK_TOKENS, ()),), NAMESPACE.digest)
        settled = self.routes.settled(prompt, at_best, candidates, now_s=self.now_s)
        if settled is None:
            return
        self.settled += 1
        for _ in range(5):
            choice = self.routes.choose(
                prompt, self.random_stored(prompt), candidates, wait_left_s=2.0, now_s=self.now_s
            )
            assert (choice.order[0].cost_s, choice.wait_s) == (pytest.approx(settled.order[0].cost_s), 0.0)

    def random_prompt(self) -> Prompt:
        rng = self.rng
        segments = [str(rng.randrange(2)) for _ in range(rng.randint(0, 5))]
        return Prompt(prefix_keys(b"", segments), [rng.choice([200, 400]) * (at + 1) for at in range(len(segments))])

    def random_stored(self, prompt: Prompt) -> Stored | None:
        rng, chunks = self.rng, prompt.tokens // CHUNK_TOKENS
        holders = tuple(f"node-{name}" for name in rng.sample([*NAMES, "all"], rng.randint(1, 2)))
        found = (
            Stored((Run(rng.randint(1, chunks), holders, rng.random() < 0.3),), NAMESPACE.digest) if chunks else None
        )
        return rng.choice([None, Stored(), found])

    def move(self) -> None:
        """Ray Serve sends a request to another replica, or one for which nothing was chosen."""
        request_id, replica_id = self.any_request(), self.rng.choice(NAMES)
        known = replica_id in self.routes.replicas
        moved = self.routes.sent(request_id, replica_id, self.now_s)
        assert moved is None or known
        if moved is not None:
            self.sent[request_id] = replica_id
            assert moved[1].replica_id == replica_id

    def take_back(self) -> None:
        self.routes.withdraw(self.any_request())

    def end(self) -> None:
        request_id = self.any_request()
        self.routes.end(request_id, self.sent.pop(request_id, ""), self.now_s)

    def end_again(self) -> None:
        self.routes.end(self.any_request(), self.rng.choice(NAMES), self.now_s)

    def any_request(self) -> str:
        unknown = f"unknown-{self.rng.randrange(3)}"
        return self.rng.choice([*self.sent, unknown])

    def open_by_replica(self) -> dict[str, set[str]]:
        return {name: set(replica.ongoing) for name, replica in self.routes.replicas.items()}

    def check(self) -> None:
        for name, replica in self.routes.replicas.items():
            check_replica(replica, self.now_s)
            for request_id in replica.ongoing:
                assert self.routes.chosen(request_id) == name
        for reservation in self.routes._reserved.values():
            assert self.routes.chosen(reservation.request_id) == reservation.replica_id


def check_replica(replica: Replica, now_s: float) -> None:
    assert isfinite(replica.queue_s(now_s))
    assert replica.recent_work_s(now_s) > -TINY_S
    assert replica.recent_work_s(now_s) < float("inf")
    assert 0 <= replica.answering(now_s) <= len(replica.ongoing)


def check_choice(choice: Choice, prompt: Prompt, candidates: list[str], wait_left_s: float) -> None:
    assert sorted(each.replica_id for each in choice.order) == sorted(candidates)
    assert 0.0 <= choice.wait_s <= wait_left_s
    for each in choice.order:
        assert isfinite(each.cost_s)
        assert each.cost_s >= each.ttft_s >= 0
        assert MIN_SHARE <= each.share <= MAX_SHARE
        assert 0 <= each.cached_tokens <= prompt.tokens
        assert each.compute_tokens >= 1
    if choice.reason != "power of two choices":
        costs = [each.cost_s for each in choice.order]
        assert costs == sorted(costs)


@pytest.mark.parametrize("most", [3, 16_384])
def test_random_operations_leave_no_trace_of_requests_that_ended(
    rng: Random, monkeypatch: pytest.MonkeyPatch, most: int
):
    monkeypatch.setattr(routes_module, "MAX_OPEN", most)
    monkeypatch.setattr(routes_module, "MAX_RESERVED", 2 * most)
    load = RandomLoad(rng)
    for _ in range(STEPS):
        load.step()
        load.check()
        assert sum(map(len, load.open_by_replica().values())) <= most
    assert load.requests > STEPS / 10
    assert load.settled > 10
    for request_id, replica_id in load.sent.items():
        load.routes.end(request_id, replica_id, load.now_s)
    assert not any(load.open_by_replica().values())
    assert not load.routes._open
    assert not load.routes._reserved
