"""The router's decisions, without Ray and without engines: costs, bursts, bounds, dead replicas, silent nodes."""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest

import raykv
from raykv.errors import ConfigError
from raykv.integrations.routing import reader as reader_module
from raykv.integrations.routing import replicas, routes
from raykv.integrations.routing.choice import Estimate, RouterOptions
from raykv.integrations.routing.locations import MAX_PROBES, ChunkFinder, Run, Stored, leading, probes, runs_of
from raykv.integrations.routing.prompts import Naming, PrefixEnd, Prefixes, Prompt
from raykv.integrations.routing.reader import Reader
from raykv.integrations.routing.replicas import Replica
from raykv.integrations.routing.report import EngineReport, ReplicaReport, path_name
from raykv.integrations.routing.routes import Choice, Routes
from raykv.integrations.routing.segments import MIN_SEGMENT_CHARS, SEGMENT_CHARS, Cutter, cut_tokens, prefix_keys
from raykv.integrations.routing.trail import MAX_TRAIL, Routed, Trail, find
from tests.support.nodes import wait_until

CHUNK_TOKENS = 64
CHUNK_NBYTES = 1 << 20
TOKEN_S = 0.001
NAMESPACE = raykv.Namespace(model="m", chunk_tokens=CHUNK_TOKENS)
NAMING = Naming(lambda value: sha256(repr(value).encode()).digest(), b"seed", 16, CHUNK_TOKENS)
START = PrefixEnd()
NOTHING = Stored()


def report(node: str, **fields: Any) -> ReplicaReport:
    engine = {
        "namespace": NAMESPACE,
        "hash_tokens": 16,
        "chunk_nbytes": CHUNK_NBYTES,
        "near": (node,),
        "cache_tokens": 100_000,
        "seconds_per_token": TOKEN_S,
        **fields,
    }
    return ReplicaReport(engine=EngineReport(**engine))


class Deployment:
    """Replicas "a", "b", ... on nodes "na", "nb", ... and a clock that the test sets."""

    def __init__(self, count: int = 2, *, options: dict[str, Any] | None = None, **fields: Any) -> None:
        self.names = "abcdefgh"[:count]
        self.routes = Routes(RouterOptions(**(options or {})), Random(1))
        self.routes.update({name: report(f"n{name}", **fields) for name in self.names}, 0.0)
        self.now_s, self.requests = 0.0, 0

    def choose(self, prompt: Prompt, stored: Stored | None = NOTHING, *, wait_left_s: float = 2.0) -> Choice:
        return self.routes.choose(prompt, stored, self.names, wait_left_s=wait_left_s, now_s=self.now_s)

    def send(self, prompt: Prompt, stored: Stored | None = NOTHING, *, wait_left_s: float = 2.0) -> Choice:
        choice = self.choose(prompt, stored, wait_left_s=wait_left_s)
        self.requests += 1
        if not choice.wait_s:
            self.routes.begin(f"r{self.requests}", prompt, choice.order, self.now_s)
        return choice

    def end(self, request_id: str) -> None:
        self.routes.end(request_id, self.routes.chosen(request_id) or "", self.now_s)


def prompt(*segments: str, tokens: int = 1000) -> Prompt:
    """A prompt of segments with `tokens` tokens each. Equal beginnings make equal keys."""
    return Prompt(prefix_keys(b"", segments), [tokens * (place + 1) for place in range(len(segments))])


def stored(tokens: int, *holders: str, below: bool = False) -> Stored:
    return Stored((Run(tokens // CHUNK_TOKENS, holders, below),), NAMESPACE.digest)


# -- costs ------------------------------------------------------------------------------------------------------------


def test_a_prompt_goes_where_its_kv_is_in_memory():
    for holder, wanted in (("na", "a"), ("nb", "b")):
        choice = Deployment().choose(prompt("s" * 9, tokens=6400), stored(6400, holder))
        assert (choice.order[0].replica_id, choice.reason) == (wanted, "stored")
        assert choice.order[0].compute_tokens == 1
        assert choice.order[0].load_nbytes == 100 * CHUNK_NBYTES


def test_raykv_is_asked_only_if_its_answer_may_change_the_choice():
    made = Deployment()
    first, turn = prompt("begin", tokens=6400), Prompt(prefix_keys(b"", ["begin", "turn"]), [6400, 6464])

    def settled(asked: Prompt, chunks: int = 100) -> Choice | None:
        at_best = Stored((Run(chunks, ()),), NAMESPACE.digest)
        return made.routes.settled(asked, at_best, made.names, now_s=made.now_s)

    assert settled(first) is None, "nobody has it"
    sent = made.send(first).order[0].replica_id
    assert settled(turn) is None, "it is being computed"
    made.now_s += 60.0
    made.end("r1")
    choice = settled(turn)
    assert choice is not None
    assert (choice.order[0].replica_id, choice.reason) == (sent, "cached")
    assert settled(turn, chunks=101) is None, "more of the prompt may be stored"
    made.routes.begin("long", prompt("another", tokens=50_000), choice.order, made.now_s)
    assert settled(turn) is None, "the other replica may load it sooner"


def test_the_measured_rate_of_a_path_counts():
    slow_near = {"na": 1.0 / 1e7}  # 10 MB/s to its own node
    routes = Routes(RouterOptions(), Random(1))
    routes.update({"a": report("na", seconds_per_byte=slow_near), "b": report("nb")}, 0.0)
    choice = routes.choose(prompt("s", tokens=6400), stored(6400, "na"), ["a", "b"], wait_left_s=0, now_s=0.0)
    assert choice.order[0].replica_id == "b"
    assert choice.order[0].load_s == pytest.approx(100 * CHUNK_NBYTES / 1e9)


def test_a_path_that_was_not_measured_counts_like_those_of_other_engines():
    routes = Routes(RouterOptions(), Random(1))
    measured = {"nb": 1.0 / 1e8, path_name("nb", below=True): 1.0 / 1e7}
    routes.update({"a": report("na", seconds_per_byte=measured), "b": report("nb")}, 0.0)
    b = routes.replicas["b"]
    assert b.seconds_per_byte(["na"], below=False) == pytest.approx(1e-8)
    assert b.seconds_per_byte(["na"], below=True) == pytest.approx(1e-7)
    assert b.seconds_per_byte(["nb"], below=False) == pytest.approx(1 / 4e9)


def test_the_hosts_memory_is_as_fast_for_all_engines_unless_one_is_far_off():
    """By chance the first load of an engine is slow. Without more loads its rate would stay so."""
    routes = Routes(RouterOptions(), Random(1))
    for own_s, counted_s in ((2.0e-9, 1.25e-9), (1.0e-7, 1.0e-7)):
        rates = dict.fromkeys("abc", 1e-09) | {"d": own_s}
        routes.update({name: report("n", seconds_per_byte={"n": rate}) for name, rate in rates.items()}, 0.0)
        assert routes.replicas["d"].seconds_per_byte(["n"], below=False) == pytest.approx(counted_s)
        disk = {name: report("n", seconds_per_byte={path_name("n", below=True): rate}) for name, rate in rates.items()}
        routes.update(disk, 0.0)
        assert routes.replicas["d"].seconds_per_byte(["n"], below=True) == pytest.approx(own_s)


def test_an_engine_computes_what_would_load_more_slowly():
    rate = {path_name("na", below=True): 1.0 / 1e6}
    routes = Routes(RouterOptions(), Random(1))
    routes.update({"a": report("na", seconds_per_byte=rate)}, 0.0)
    (only,) = routes.choose(
        prompt("s", tokens=640), stored(640, "na", below=True), ["a"], wait_left_s=0, now_s=0.0
    ).order
    assert (only.load_nbytes, only.compute_tokens) == (0, 640)


def test_a_long_queue_sends_a_request_to_another_replica():
    deployment = Deployment()
    first = deployment.send(prompt("own", tokens=1000)).order[0].replica_id
    queued = deployment.choose(prompt("own", "next", tokens=1000))
    assert queued.order[0].replica_id == first, "one second of queue is less than computing the first segment again"
    busy = deployment.routes.replicas[first]
    busy.begin("more", [b"x"], fills=60_000, work_s=60.0, now_s=0.0)
    assert deployment.choose(prompt("own", "next", tokens=1000), wait_left_s=0.0).order[0].replica_id != first


def test_the_queue_that_an_engine_reports_counts_and_gets_shorter():
    routes = Routes(RouterOptions(), Random(1))
    routes.update({"a": report("na", queued_tokens=5000), "b": report("nb")}, 10.0)
    assert routes.replicas["a"].queue_s(10.0) == pytest.approx(5.0)
    assert routes.replicas["a"].queue_s(13.0) == pytest.approx(2.0)
    assert routes.choose(prompt("s"), Stored(), ["a", "b"], wait_left_s=0, now_s=10.0).order[0].replica_id == "b"


def test_slower_engines_cost_more_but_chance_does_not_count():
    def cheapest(*token_s: float) -> set[str]:
        routes = Routes(RouterOptions(), Random(1))
        routes.update(
            {name: report(f"n{name}", seconds_per_token=s) for name, s in zip("abc", token_s, strict=False)}, 0
        )
        names = list(routes.replicas)
        return {
            routes.choose(prompt("s"), NOTHING, names, wait_left_s=0, now_s=0.0).order[0].replica_id for _ in range(50)
        }

    assert cheapest(0.001, 0.01) == {"a"}
    assert cheapest(0.001, 0.002) == {"a", "b"}
    assert cheapest(0.02, 0.001, 0.0015) == {"b", "c"}
    assert cheapest(0.0, 0.0) == {"a", "b"}


def test_the_end_of_a_request_takes_its_own_work_from_the_queue_and_not_that_of_other_routers():
    for others_s in (0, 5):
        routes = Routes(RouterOptions(), Random(1))
        routes.update({"a": report("na")}, 0.0)
        routes.begin("r", prompt("s", tokens=5000), [_only(routes, prompt("s", tokens=5000))], 0.0)
        assert routes.replicas["a"].queue_s(0.0) == pytest.approx(5.0)
        routes.update({"a": report("na", queued_tokens=4000 + 1000 * others_s)}, 2.0)
        assert routes.replicas["a"].queue_s(2.0) == pytest.approx(4.0 + others_s)
        routes.end("r", "a", 3.0)
        assert routes.replicas["a"].queue_s(3.0) == pytest.approx(others_s)


def test_reports_end_a_queue_that_is_not_there_although_the_replica_is_never_idle():
    """A decode replica always has open streams, and each request loads sooner than expected."""
    deployment = Deployment(1, options={"role": "decode"}, seconds_per_byte={"na": 1e-12})
    for second in range(100):
        deployment.now_s = float(second)
        for n in range(3):
            deployment.send(prompt(f"{second} {n}", tokens=64_000))
        deployment.end(f"r{3 * second - 30}")
        deployment.routes.update({"a": report("na", filled_tokens=second)}, second + 0.5)
    replica = deployment.routes.replicas["a"]
    assert len(replica.ongoing) > 100
    assert replica.queue_s(100.0) < 4 * 1.1, "at most what was sent within the last seconds"


def test_a_report_does_not_hide_what_was_sent_just_before_it():
    deployment = Deployment(1)
    deployment.now_s = 10.0
    deployment.send(prompt("on its way", tokens=5000))
    deployment.routes.update({"a": report("na", queued_tokens=0)}, 10.2)
    assert deployment.routes.replicas["a"].queue_s(10.2) == pytest.approx(4.8)
    deployment.now_s = 10.5
    deployment.send(prompt("after it", tokens=1000))
    deployment.routes.update({"a": report("na", queued_tokens=3000)}, 12.0)
    assert deployment.routes.replicas["a"].queue_s(12.0) == pytest.approx(3.0)


def test_an_attempt_that_was_not_sent_leaves_nothing():
    """While all replicas are full, Ray Serve asks again and again for the same request."""
    deployment, text = Deployment(), prompt("prefix", "question")
    before = {name: vars(each).copy() for name, each in deployment.routes.replicas.items()}
    for attempt in range(50):
        deployment.now_s = 0.1 * attempt
        deployment.routes.withdraw("r")
        choice = deployment.choose(text)
        deployment.routes.begin("r", text, choice.order, deployment.now_s)
    ((name, only),) = [each for each in deployment.routes.replicas.items() if each[1].ongoing]
    assert only.queue_s(deployment.now_s) == pytest.approx(2.0)
    assert only.recent_work_s(deployment.now_s) == pytest.approx(2.0)
    assert only._filled == 2000
    assert deployment.routes.chosen("r") == name
    deployment.routes.end("r", "b" if name == "a" else "a", deployment.now_s)
    assert deployment.routes.chosen("r") == name, "another replica had rejected it; this one still has it"
    deployment.routes.withdraw("r")
    assert deployment.routes.chosen("r") is None
    assert not deployment.routes._reserved
    for each in deployment.routes.replicas.values():
        assert each.queue_s(deployment.now_s) == 0.0
        assert (each._filled, each.cached(text.keys), each.ongoing) == (before[name]["_filled"], 0, {})
        assert each.recent_work_s(deployment.now_s) == pytest.approx(0.0)


def _only(routes: Routes, asked: Prompt) -> Estimate:
    return routes.choose(asked, NOTHING, ["a"], wait_left_s=0, now_s=0.0).order[0]


def test_other_weights_share_nothing():
    routes = Routes(RouterOptions(), Random(1))
    other = NAMESPACE.with_fields(revision="2")
    routes.update({"a": report("na", namespace=other), "b": report("nb")}, 0.0)
    choice = routes.choose(prompt("s", tokens=6400), stored(6400, "na"), ["a", "b"], wait_left_s=0, now_s=0.0)
    assert choice.order[0].replica_id == "b", "b loads it from the other host; a has other weights"


def test_a_decode_engine_loads_what_prefill_computes():
    deployment = Deployment(options={"role": "decode"})
    first = deployment.send(prompt("turn one"))
    assert first.order[0].compute_tokens == 1
    assert first.order[0].load_nbytes == 1000 * CHUNK_NBYTES // CHUNK_TOKENS
    deployment.now_s = 1.0
    deployment.end("r1")
    second = deployment.choose(prompt("turn one", "turn two"))
    assert second.order[0].replica_id == first.order[0].replica_id
    assert second.order[0].cached_tokens == 992, "whole blocks"


# -- the engine's cache -----------------------------------------------------------------------------------------------


def test_new_prompts_with_a_short_common_beginning_use_all_replicas_alike():
    made, beginning = Deployment(4), stored(400, "na", "nb", "nc", "nd")
    work = Counter[str]()
    for number in range(40):  # each replica is idle again before the next request
        made.now_s += 10.0
        each = Prompt(prefix_keys(b"", ["beginning", f"question {number}"]), [400, 1000])
        best = made.send(each, beginning).order[0]
        work[best.replica_id] += best.compute_tokens
        made.end(f"r{made.requests}")
    assert max(work.values()) <= 1.2 * sum(work.values()) / 4, work


def test_after_equal_work_a_new_prompt_takes_the_idle_replica():
    """A replica that still writes an answer computes a new prompt more slowly."""
    made = Deployment(2)
    busy = made.send(prompt("one", tokens=5000)).order[0].replica_id
    idle = made.send(prompt("other", tokens=5000)).order[0].replica_id
    assert idle != busy
    made.now_s = 20.0
    made.end("r2")
    choice = made.choose(prompt("new", tokens=20_000))
    assert [each.replica_id for each in choice.order] == [idle, busy]
    assert [each.ongoing_s for each in choice.order] == pytest.approx([0.0, 64 * TOKEN_S])


def test_a_conversation_leaves_a_replica_that_writes_answers_if_its_kv_loads_quickly_elsewhere():
    for byte_s, stays in ((3e-8, True), (1e-10, False)):
        made = Deployment(2, seconds_per_byte={"na": byte_s, "nb": byte_s})
        home = made.send(prompt("beginning", tokens=640)).order[0].replica_id
        made.now_s = 10.0
        choice = made.choose(prompt("beginning", "turn", tokens=640), stored(640, "na", "nb"))
        assert choice.order[0].ongoing_s == pytest.approx(64 * TOKEN_S if stays else 0.0)
        assert (choice.order[0].replica_id == home) is stays


@pytest.mark.parametrize(("step_s", "stays"), [(0.0, True), (0.02, True), (0.2, False)])
def test_a_conversation_leaves_a_replica_whose_steps_take_longer_than_a_load_elsewhere(step_s: float, stays: bool):
    """A new request waits for the steps that are scheduled already. Two of 200 ms take longer than a load of 0.3 s."""
    rates = {"na": 3e-8, "nb": 3e-8}
    made = Deployment(2, seconds_per_byte=rates, seconds_per_step=step_s)
    home = made.send(prompt("beginning", tokens=640)).order[0].replica_id
    made.now_s = 10.0
    choice = made.choose(prompt("beginning", "turn", tokens=640), stored(640, "na", "nb"))
    assert (choice.order[0].replica_id == home) is stays
    at_home = next(each for each in choice.order if each.replica_id == home)
    assert at_home.ongoing_s == pytest.approx(64 * TOKEN_S + 2 * step_s)
    assert (at_home.compute_s, at_home.step_s) == pytest.approx((640 * TOKEN_S, step_s))
    assert [each.ongoing_s for each in choice.order if each is not at_home] == [0.0]


def test_a_request_behind_another_one_waits_for_the_first_steps_of_its_answer_too():
    made = Deployment(2, seconds_per_step=0.1)
    home = made.send(prompt("beginning", tokens=640)).order[0].replica_id
    costs = {each.replica_id: each for each in made.choose(prompt("other", tokens=640)).order}
    assert costs[home].queue_s == pytest.approx(640 * TOKEN_S)
    assert costs[home].ongoing_s == pytest.approx(0.2), "and not for an answer yet"
    assert costs["ab".replace(home, "")].ongoing_s == 0.0


def test_requests_in_the_queue_do_not_count_as_answers_too():
    made, prefix = Deployment(2), prompt("prefix", tokens=2000)
    homes = {made.send(prefix, wait_left_s=0.0).order[0].replica_id for _ in range(100)}
    assert len(homes) == 1, "the burst computed its prefix twice"


@pytest.mark.parametrize(("byte_s", "stays"), [(4e-9, True), (1e-13, False)])
def test_a_conversation_leaves_a_replica_with_more_work_if_its_kv_loads_almost_at_once(byte_s: float, stays: bool):
    """A turn computes 0.1 s, and a load takes 0.07 s or nothing. Its replica has computed 20 s more than the others."""
    made = Deployment(4, seconds_per_byte={f"n{name}": byte_s for name in "abcd"})
    home = made.send(prompt("beginning", tokens=1024)).order[0].replica_id
    made.routes.replicas[home].begin("other work", [b"x"], fills=20_000, work_s=20.0, now_s=0.0)
    made.now_s = 25.0
    for request in ("r1", "other work"):
        made.routes.replicas[home].end(request, made.now_s)
    turn = Prompt(prefix_keys(b"", ["beginning", "turn"]), [1024, 1124])
    chosen = made.choose(turn, stored(1024, "na", "nb", "nc", "nd")).order[0]
    assert (chosen.replica_id == home) is stays


@pytest.mark.parametrize("seed", range(20))
def test_few_conversations_are_spread_by_what_they_compute(seed: int):
    """Eight sessions on four replicas. Chance sends three beginnings to one replica, so later turns go elsewhere."""
    made, rng = Deployment(4, seconds_per_byte={f"n{n}": 1e-11 for n in "abcd"}, seconds_per_token=0.01), Random(seed)
    work, seen = Counter[str](), set[int]()
    for turn in range(5):
        for session in sorted(range(8), key=lambda _: rng.random()):
            made.now_s += rng.expovariate(0.8)
            keys = prefix_keys(b"", [f"system {session % 2}", *(f"{session}: {number}" for number in range(turn + 1))])
            asked = Prompt(keys, [384, *(700 + 90 * number for number in range(turn + 1))])
            known = asked.ends[-2] if turn or session % 2 in seen else 0
            seen.add(session % 2)
            chosen = made.send(asked, stored(known, "na", "nb", "nc", "nd"), wait_left_s=0.0).order[0]
            work[chosen.replica_id] += chosen.compute_tokens
            made.end(f"r{made.requests - 4}")
    assert max(work.values()) <= 1.2 * sum(work.values()) / 4, work


def test_conversations_stay_where_the_work_is_even_although_others_could_load_them():
    made = Deployment(2, seconds_per_byte={"na": 1e-9, "nb": 1e-9})
    homes = [made.send(prompt(f"beginning {n}", tokens=6400)).order[0].replica_id for n in range(2)]
    assert len(set(homes)) == 2
    for number in range(20):
        made.now_s += 10.0
        turn = Prompt(prefix_keys(b"", [f"beginning {number % 2}", f"turn {number}"]), [6400, 7400])
        chosen = made.send(turn, stored(6400, "na", "nb")).order[0]
        assert chosen.replica_id == homes[number % 2]
        made.end(f"r{made.requests}")


def test_turns_of_a_conversation_stay_on_one_replica():
    deployment, rng = Deployment(4), Random(3)
    home: dict[int, str] = {}
    turns: Counter[int] = Counter()
    for _ in range(200):
        session = rng.randrange(20)
        turns[session] += 1
        words = [f"{session}:{turn}" for turn in range(turns[session])]
        chosen = deployment.send(prompt(*words, tokens=50)).order[0]
        assert chosen.replica_id == home.setdefault(session, chosen.replica_id)
        deployment.now_s += 1.0
        deployment.end(f"r{deployment.requests}")
    assert len(set(home.values())) == 4


def test_a_prefix_is_forgotten_when_the_engine_has_filled_its_cache():
    replica, keys = Replica(), prefix_keys(b"", ["one", "two"])
    replica.update(report("na", filled_tokens=500), 0.0)
    replica.begin("r", keys, fills=2000, work_s=1.0, now_s=0.0)
    assert replica.cached(keys) == 2
    replica.update(report("na", filled_tokens=100_000), 1.0)
    assert replica.cached(keys) == 2
    replica.update(report("na", filled_tokens=102_501), 1.0)
    assert replica.cached(keys) == 0


def test_a_reset_engine_has_nothing():
    replica, keys = Replica(), prefix_keys(b"", ["one"])
    replica.update(report("na"), 0.0)
    replica.begin("r", keys, fills=100, work_s=1.0, now_s=0.0)
    replica.update(report("na", namespace=NAMESPACE.with_fields(revision="private:1")), 1.0)
    assert replica.cached(keys) == 0


# -- bursts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("answers", [True, False])
def test_a_burst_computes_its_prefix_once(answers: bool):
    deployment, answer = Deployment(4), NOTHING if answers else None
    questions = [Prompt(prefix_keys(b"", ["prefix", str(n)]), [2000, 2020]) for n in range(16)]
    chosen = [deployment.send(question, answer) for question in questions]
    assert len({each.order[0].replica_id for each in chosen}) == 1
    computed = sum(each.order[0].compute_tokens for each in chosen)
    assert computed == 2020 + 15 * 20
    assert {each.reason for each in chosen[1:]} == {"computing"}


def test_followers_wait_for_the_commit_when_the_queue_would_cost_more():
    deployment = Deployment()
    first = deployment.send(prompt("prefix", tokens=1000)).order[0]
    home = deployment.routes.replicas[first.replica_id]
    home.begin("other work", [b"x"], fills=20_000, work_s=20.0, now_s=0.0)
    follower = prompt("prefix", "question", tokens=1000)
    waiting = deployment.choose(follower)
    assert waiting.reason == "waits"
    assert waiting.wait_s == pytest.approx(1.0)
    assert not deployment.choose(follower, wait_left_s=0.5).wait_s, "it may not wait for so long"
    deployment.now_s = 1.05
    late = deployment.choose(follower)
    assert late.wait_s == pytest.approx(routes.POLL_S), "the prefix should be stored by now"
    there = deployment.choose(follower, stored(960, f"n{first.replica_id}"))
    assert not there.wait_s
    assert there.order[0].replica_id != first.replica_id
    assert there.order[0].load_nbytes == 15 * CHUNK_NBYTES
    deployment.now_s = 3.0
    assert not deployment.choose(follower).wait_s, "the reservation has ended"


@pytest.mark.parametrize(("other_s", "reason"), [(0.0, "computing"), (0.05, "computing"), (0.5, "waits")])
def test_no_request_waits_for_a_gain_that_is_smaller_than_the_errors_of_estimates(other_s: float, reason: str):
    """Nor to even out the work: all of it was on one of two replicas."""
    deployment = Deployment(chunk_nbytes=1 << 10)
    first = deployment.send(prompt("prefix", tokens=1024)).order[0]
    home = deployment.routes.replicas[first.replica_id]
    home.begin("other work", [b"x"], fills=int(1000 * other_s), work_s=other_s, now_s=0.0)
    deployment.now_s = 0.5
    follower = deployment.choose(prompt("prefix", "question", tokens=1024))
    assert (follower.reason, follower.order[0].replica_id) == (reason, first.replica_id)


def test_no_request_waits_long_beside_an_idle_replica_for_a_short_prefix():
    """The first request computes 500 + 300 tokens, so its prefix is stored after 0.8 s.

    A second one would be answered after 1.1 s if it waited for that, and after 0.8 s if the idle replica computed all.
    """
    deployment = Deployment(cache_tokens=0)
    first, second = (Prompt(prefix_keys(b"", ["system", name]), [500, 800]) for name in ("one", "two"))
    busy = deployment.send(first).order[0].replica_id
    choice = deployment.choose(second)
    assert not choice.wait_s
    assert choice.order[0].replica_id != busy


def test_engines_without_a_cache_of_their_own_wait_for_the_commit():
    deployment = Deployment(cache_tokens=0)
    deployment.send(prompt("prefix", tokens=1000))
    assert deployment.choose(prompt("prefix", "question", tokens=1000)).wait_s == pytest.approx(1.0)


def test_a_request_that_ends_early_ends_its_reservation():
    deployment = Deployment(cache_tokens=0)
    deployment.send(prompt("prefix", tokens=1000))
    deployment.now_s = 0.1
    deployment.end("r1")
    assert not deployment.choose(prompt("prefix", "question", tokens=1000)).wait_s


# -- when something is away -------------------------------------------------------------------------------------------


def test_without_raykv_new_prompts_are_spread_and_known_ones_return():
    deployment = Deployment(4)
    chosen = {}
    for n in range(40):
        choice = deployment.send(prompt(f"prompt {n}", tokens=1000), None)
        assert choice.reason == "power of two choices"
        assert sorted(each.replica_id for each in choice.order) == list("abcd")
        chosen[n] = choice.order[0].replica_id
        deployment.now_s += 0.1
        deployment.end(f"r{n + 1}")
    assert set(chosen.values()) == set("abcd")
    for n, replica in chosen.items():
        again = deployment.choose(prompt(f"prompt {n}", "more", tokens=1000), None)
        assert (again.order[0].replica_id, again.reason) == (replica, "cached")


def test_a_replica_without_a_report_is_used():
    routes = Routes(RouterOptions(), Random(1))
    routes.update({"a": None, "b": None}, 0.0)
    choice = routes.choose(prompt("s"), Stored(), ["a", "b"], wait_left_s=2.0, now_s=0.0)
    assert len(choice.order) == 2


def test_a_dead_replica_takes_its_reservations_with_it():
    deployment = Deployment(cache_tokens=0)
    first = deployment.send(prompt("prefix", tokens=1000)).order[0].replica_id
    deployment.routes.drop(first)
    deployment.names = deployment.names.replace(first, "")
    choice = deployment.send(prompt("prefix", "question", tokens=1000))
    assert not choice.wait_s
    assert choice.order[0].replica_id != first
    deployment.routes.end("r1", first, 1.0)  # the end of the dead replica's request


def test_a_request_that_ray_sends_elsewhere_moves():
    deployment = Deployment()
    text = prompt("prefix", "question")
    first = deployment.send(text).order[0].replica_id
    other = "b" if first == "a" else "a"
    assert deployment.routes.sent("r1", first, 0.0) is None
    reason, moved = deployment.routes.sent("r1", other, 0.0) or ("", None)
    assert (reason, moved and moved.replica_id) == ("full", other)
    assert (deployment.routes.sent("unread", other, 0.0) or ("",))[0] == "power of two choices"
    deployment.end("unread")
    assert deployment.routes.replicas[first].cached(text.keys) == 0
    assert deployment.routes.replicas[first].queue_s(0.0) == 0.0
    assert deployment.choose(text, wait_left_s=0.0).order[0].replica_id == other


def test_a_request_that_ray_sends_elsewhere_loads_what_is_stored():
    deployment = Deployment()
    best, other = deployment.send(prompt("s", tokens=6400), stored(6400, "na", "nb")).order
    sent = deployment.routes.sent("r1", other.replica_id, 0.0)
    assert sent == ("full", other)
    assert deployment.routes.replicas[other.replica_id].queue_s(0.0) == pytest.approx(other.load_s + other.compute_s)
    assert deployment.routes.replicas[best.replica_id].queue_s(0.0) == 0.0


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(routes, "MAX_OPEN", 10)
    monkeypatch.setattr(routes, "MAX_RESERVED", 30)
    monkeypatch.setattr(replicas, "MAX_CACHED_PREFIXES", 20)
    deployment = Deployment()
    for n in range(200):
        deployment.send(prompt(*(f"{n} {part}" for part in range(5))), wait_left_s=0.0)
    assert len(deployment.routes._open) == 10
    assert len(deployment.routes._reserved) <= 30
    for replica in deployment.routes.replicas.values():
        assert len(replica._cached) <= 20
        assert len(replica.ongoing) <= 10
    prefixes = Prefixes(max_prefixes=50, max_names=40)
    for n in range(100):
        read = prefixes.read(b"", [f"{n} {part}" for part in range(4)])
        prefixes.add(read, [range(n, n + 80)] * 4, NAMING, START)
    assert len(prefixes) <= 50
    assert prefixes._names <= 40
    trail = Trail()
    for n in range(MAX_TRAIL + 10):
        trail.add(Routed(f"request {n}", "d", "a", "queue"))
    assert len(list(trail)) == MAX_TRAIL


def test_wrong_options_are_refused_by_name():
    with pytest.raises(ConfigError, match="work_wait"):
        RouterOptions.load({"work_wait": 1})
    with pytest.raises(ConfigError, match="role"):
        RouterOptions.load({"role": "encode"})


# -- prompts ----------------------------------------------------------------------------------------------------------


def random_text(rng: Random, length: int) -> str:
    pieces = ["word ", "a b", "\n\n", "<end>", "<start>user\n", "1234", "  ", "Ü", "你好", ". "]
    return "".join(rng.choice(pieces) for _ in range(length))


def test_texts_with_the_same_beginning_have_the_same_segments_there():
    cutter = Cutter(["<end>", "<start>"])
    for seed in range(50):
        rng = Random(seed)
        head = random_text(rng, rng.randrange(4000))
        one, two = (cutter.cut(head + random_text(rng, rng.randrange(3000))) for _ in range(2))
        assert "".join(one).startswith(head), seed
        covered = shared = 0
        for first, second in zip(one, two, strict=False):
            if first != second:
                break
            covered, shared = covered + len(first), shared + 1
        # What is not shared is less than one segment and the gap until the next place to cut.
        rest = head[covered:]
        assert len(cutter.cut(rest)) <= 2, (seed, shared, len(rest))


def test_a_text_that_cannot_be_cut_is_one_segment():
    text = "x" * 10 * SEGMENT_CHARS
    assert Cutter([]).cut(text) == [text]
    assert Cutter(["<end>"], cuts=False).cut("one<end>two three") == ["one<end>two three"]
    assert Cutter([]).cut("") == []
    assert [len(part) for part in cut_tokens(range(1200))] == [512, 512, 176]


def test_special_tokens_that_follow_each_other_begin_one_segment():
    cutter = Cutter(["<end>", "<start>"])
    first, second = "x" * MIN_SEGMENT_CHARS, "y" * (MIN_SEGMENT_CHARS - 1)
    assert cutter.cut(f"{first}<end><start>{first}<end>") == [first, f"<end><start>{first}", "<end>"]
    assert cutter.cut(f"{second}<end><start>{first}") == [f"{second}<end>", f"<start>{first}"]


def test_names_follow_the_tokens_however_they_are_cut():
    tokens = list(range(1000))
    whole = Prefixes()
    expected = whole.read(b"", ["all"])
    whole.add(expected, [tokens], NAMING, START)
    assert len(expected.names) == 1000 // CHUNK_TOKENS
    for seed in range(20):
        rng = Random(seed)
        cuts = sorted(rng.sample(range(1, 1000), 6))
        parts = [tokens[start:stop] for start, stop in zip([0, *cuts], [*cuts, 1000], strict=True)]
        prefixes = Prefixes()
        read = prefixes.read(b"", [*map(str, cuts), "end"])
        known = rng.randrange(7)
        prefixes.add(read, parts[:known], NAMING, START)
        again = prefixes.read(b"", [*map(str, cuts), "end"])
        assert again.known == known
        prefixes.add(again, parts[known:], NAMING, START)
        assert again.names == expected.names, seed
        assert again.ends == [*cuts, 1000]


class SlowTokenizer:
    """One token for each character. Waits until the test lets it go on."""

    def __init__(self) -> None:
        self.go, self.texts = threading.Event(), list[str]()

    def __call__(self, texts: Sequence[str]) -> list[list[int]]:
        assert self.go.wait(20)
        self.texts += texts
        return [list(map(ord, text)) for text in texts]


def test_tokens_that_are_late_are_there_for_the_next_request(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reader_module, "LATER_CHARS", 0)
    tokenizer = SlowTokenizer()
    segments = ["a" * 2000, "b" * 2000]

    async def run() -> None:
        reader = Reader(tokenizer, timeout_s=0.01)
        burst = [await reader.read(b"", [*segments, f"question {n}"], NAMING, START) for n in range(3)]
        assert all(not each.names and each.known == 0 for each in burst)
        assert burst[0].ends == [500, 1000, 1002]  # four characters a token
        assert burst[0].keys[:2] == burst[1].keys[:2]
        tokenizer.go.set()
        for _ in range(1000):
            known = await reader.read(b"", segments, NAMING, START)
            if known.known:
                break
            await asyncio.sleep(0.01)
        assert known.ends == [2000, 4000]
        assert len(known.names) == 4000 // CHUNK_TOKENS
        reader.close()

    asyncio.run(run())
    assert Counter(tokenizer.texts)[segments[0]] == 1, "the prompts of a burst share the tokens of their prefix"


def test_short_new_text_is_tokenized_after_the_choice(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reader_module, "LATER_S", 0.001)
    monkeypatch.setattr(reader_module, "MAX_LATER", 2)
    tokenizer, long = SlowTokenizer(), "a" * (reader_module.LATER_CHARS + 4)
    tokenizer.go.set()

    async def run() -> None:
        reader = Reader(tokenizer, timeout_s=5.0)
        first = await reader.read(b"", [long], NAMING, START)
        assert (first.known, first.tokens) == (1, len(long)), "long text counts for the choice"
        turns = [await reader.read(b"", [long, f"question {n}"], NAMING, START) for n in range(3)]
        assert all(each.known == 1 and each.ends == [len(long), len(long) + 10] for each in turns), "as many per token"
        other = await reader.read(b"", ["b" * 8000], NAMING, START)
        assert (other.known, other.ends) == (0, [8000]), "as many characters per token as in the prompts before"
        assert tokenizer.texts == [long]
        await until(lambda: len(reader.prefixes) == 3)
        known = [await reader.read(b"", [long, f"question {n}"], NAMING, START) for n in range(3)]
        assert [each.known for each in known] == [2, 2, 1], "at most MAX_LATER wait"
        assert known[0].ends == [len(long), len(long) + 10]
        reader.close()

    asyncio.run(run())


def test_many_short_messages_are_long_text():
    tokenizer = SlowTokenizer()
    tokenizer.go.set()

    async def run() -> None:
        reader = Reader(tokenizer, timeout_s=5.0)
        messages = [f"message {number:4} of a long conversation" for number in range(300)]
        assert (await reader.read(b"", messages, NAMING, START)).known == reader_module.MAX_NEW_SEGMENTS
        reader.close()

    asyncio.run(run())


async def until(is_so: Callable[[], bool]) -> None:
    for _ in range(1000):
        if is_so():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not happen within 10 s")


def test_a_text_that_the_tokenizer_refuses_stays_estimated(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(reader_module, "LATER_S", 0.0)
    asked: list[str] = []

    def refuse(texts: Sequence[str]) -> list[list[int]]:
        asked.extend(texts)
        raise UnicodeEncodeError("utf-8", texts[0], 0, 1, "surrogates not allowed")

    async def run() -> None:
        reader = Reader(refuse, timeout_s=5.0)
        assert (await reader.read(b"", ["\ud800 is refused"], NAMING, START)).tokens == 3
        await until(lambda: bool(asked))
        assert (await reader.read(b"", ["\ud800 is refused"], NAMING, START)).known == 0
        reader.close()

    asyncio.run(run())
    assert not caplog.records


def test_a_reader_that_is_closed_meanwhile_ends_its_waits_without_tokens(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reader_module, "LATER_CHARS", 10)
    tokenizer = SlowTokenizer()

    async def run() -> None:
        reader = Reader(tokenizer, timeout_s=5.0)
        waits = [asyncio.create_task(reader.read(b"", [f"{n} is a long new text"], NAMING, START)) for n in range(3)]
        await asyncio.sleep(0.05)
        reader.close()
        tokenizer.go.set()
        read = await asyncio.wait_for(asyncio.gather(*waits), 10)
        assert [each.known for each in read] == [1, 0, 0], "the first was in work already"

    asyncio.run(run())


def test_more_prompts_than_the_thread_can_read_are_not_queued(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reader_module, "MAX_JOBS", 2)
    tokenizer = SlowTokenizer()

    async def run() -> None:
        reader = Reader(tokenizer, timeout_s=0.005)
        for n in range(5):
            await reader.read(b"", [f"{n}" * (reader_module.LATER_CHARS + 1)], NAMING, START)
        assert reader._jobs == 2
        tokenizer.go.set()
        reader.close()

    asyncio.run(run())


# -- raykv ------------------------------------------------------------------------------------------------------------


def test_long_prompts_are_probed_at_equal_distances():
    assert probes(5) == [0, 1, 2, 3, 4]
    asked = probes(10_000)
    assert len(asked) == MAX_PROBES
    assert asked[-1] == 9999
    assert max(b - a for a, b in pairwise(asked)) <= 157
    assert probes(0) == []
    assert runs_of([0, 1, 2, 3], [("x",), ("x",), ("y", "x"), ()], [False] * 4) == (Run(2, ("x",)), Run(3, ("y", "x")))
    assert runs_of([0, 1], [("x",), ("x",)], [True, False]) == (Run(1, ("x",), True), Run(2, ("x",)))


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 64, 1000, 10_000])
def test_the_end_of_a_stored_prefix_is_found_by_few_questions(count: int):
    for stored in {0, 1, 2, count // 8, count // 8 + 1, count // 2, count - 1, count} & set(range(count + 1)):
        asked: list[int] = []

        def has(place: int, asked: list[int] = asked, stored: int = stored) -> bool:
            asked.append(place)
            return place < stored

        assert leading(count, has) == stored
        assert all(0 <= place < count for place in asked)
        assert len(asked) == len(set(asked)) <= 8 + (count // 8).bit_length()


def test_the_owners_name_the_holders():
    names = [b"%d" % n for n in range(6)]
    with raykv.embedded(2, separate_hosts=True, arena_nbytes="4 MiB", extent_nbytes="1 MiB") as cluster:
        here, there = (cluster.client(NAMESPACE, node=node) for node in (0, 1))
        there.put(names[:4], [b"x" * 100] * 4)
        here.put(names[:2], [b"x" * 100] * 2)
        cluster.settle()
        mine, theirs = here.router.local_id, there.router.local_id

        async def run() -> None:
            finder = ChunkFinder(5.0)
            found = await finder.ask(here, names)
            assert found is not None
            assert [(run.stop, set(run.holders)) for run in found] == [(2, {mine, theirs}), (4, {theirs})]
            assert await finder.ask(here, [b"unknown"]) == ()
            assert finder.here(here, names, all_near=False) is None
            assert finder.here(here, names[:2], all_near=False) is None
            assert finder.here(here, names[:2], all_near=True) == (Run(2, (mine,)),), "all are here"
            assert finder.here(there, names[:5], all_near=True) == (Run(4, (theirs,)),), "most are here"
            assert finder.here(there, names, all_near=True) is None
            assert finder.here(here, [], all_near=False) == ()
            finder.close()
            hurried = ChunkFinder(1e-9)
            assert await hurried.ask(here, names) is None
            hurried.close()

        asyncio.run(run())


def test_nobody_is_asked_when_the_pool_is_the_memory_of_this_host():
    names = [b"%d" % n for n in range(6)]
    with raykv.embedded(1, arena_nbytes="4 MiB", extent_nbytes="1 MiB", heartbeat_s=0.05) as cluster:
        client = cluster.client(NAMESPACE, node=0)
        client.put(names[:4], [b"x" * 100] * 4)
        cluster.settle()
        client.locate(names)  # now the client knows the view

        finder = ChunkFinder(5.0)
        assert client.router.is_alone
        assert finder.here(client, names, all_near=False) == (Run(4, (client.router.local_id,)),)
        cluster.add()
        cluster.settle()

        def is_not_alone() -> bool:
            client.add_to_trail([])  # any answer tells that the view is old
            return not client.router.is_alone

        wait_until(is_not_alone)
        assert finder.here(client, names, all_near=False) is None, "the other node must be asked"
        finder.close()


@pytest.mark.parametrize("with_tier", [False, True])
def test_a_tier_may_have_what_memory_has_not(tmp_path: Path, with_tier: bool):
    ssd = {"paths": [str(tmp_path)], "capacity_nbytes": "64 MiB", "segment_nbytes": "4 MiB"} if with_tier else None
    with raykv.embedded(1, arena_nbytes="4 MiB", extent_nbytes="1 MiB", ssd=ssd) as cluster:
        client = cluster.client(NAMESPACE, node=0)
        client.locate(["a"])
        assert client.router.is_alone != with_tier


def test_the_trail_of_a_request_can_be_found():
    trail, other = Trail(), Trail()
    trail.add(Routed("x-1", "prefill", "a", "stored", load_nbytes=10, compute_tokens=3, queue_s=0.5, at_s=2.0))
    other.add(Routed("x-1", "decode", "b", "cached", at_s=1.0))
    assert [each.deployment for each in find("x-1")] == ["decode", "prefill"]
    assert (
        str(find("x-1")[1])
        == "routed x-1 to a of prefill because stored (compute 3 tokens, load 10 bytes, queue 0.500 s)"
    )
    assert find("unknown") == []
