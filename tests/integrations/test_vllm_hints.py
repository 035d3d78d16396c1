"""Hints of requests: hostile hints are ignored, valid ones change what nodes evict, and agents get more hits."""

import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from vllm import SamplingParams  # noqa: E402
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope  # noqa: E402
from vllm.v1.request import Request  # noqa: E402

import raykv  # noqa: E402
from raykv.integrations.vllm.hints import MAX_ACTIONS, MAX_FIELDS, NO_HINTS, RequestHints, parse  # noqa: E402
from raykv.integrations.vllm.sessions import Sessions, Turn  # noqa: E402
from raykv.storage.row_hints import ENDED  # noqa: E402
from tests.integrations import test_vllm_scheduling as toy  # noqa: E402
from tests.support.nodes import wait_until  # noqa: E402

pytestmark = pytest.mark.vllm
model, one_rank, waits = toy.model, toy.one_rank, toy.waits  # fixtures

DAY_S = 86_400.0


def parsed(own: Any = None, actions: Any = None, session: Any = None, version: str = "0.1", **params: Any) -> Any:
    envelope = None if actions is None else KvHintsEnvelope(version, "m", actions)
    given = params.get("params", {} if own is None else {"raykv_hints": own})
    request = SimpleNamespace(kv_transfer_params=given, kv_hints=envelope, session_id=session)
    return parse(request, DAY_S)  # type: ignore[arg-type]


def action(kind: Any, payload: Any, version: Any = "1.0") -> KvHintAction:
    return KvHintAction("a", kind, version, payload)


@pytest.mark.parametrize(
    ("own", "hints"),
    [
        ({"ttl_s": 60}, RequestHints(ttl_s=60.0, retention=(60.0, -100))),
        ({"ttl_s": 1e300}, RequestHints(ttl_s=DAY_S, retention=(DAY_S, -100))),
        ({"priority": -7}, RequestHints(priority=-7)),
        ({"priority": 7}, RequestHints(retention=(3600.0, 7))),
        ({"priority": 7, "ttl_s": 60}, RequestHints(ttl_s=60.0, priority=7, retention=(60.0, 7))),
        ({"pin_s": 300}, RequestHints(retention=(300.0, 100))),
        ({"pin_s": 1e9}, RequestHints(retention=(DAY_S, 100))),
        ({"pin_s": 300, "ttl_s": 60}, RequestHints(ttl_s=300.0, retention=(300.0, 100))),
        ({"session_end": True, "pin_s": 300}, RequestHints(ends=True)),
        ({"store_decode": False}, RequestHints(store_decode=False)),
    ],
)
def test_own_hints(own: dict[str, Any], hints: RequestHints):
    found = parsed(own)
    assert (found.hints, found.used, found.ignored) == (hints, 1, [])
    assert parsed(actions=[action("raykv.hints", own)]).hints == hints


@pytest.mark.parametrize(
    "own",
    [
        *({"ttl_s": value} for value in (0, -1, True, "60", float("nan"), float("inf"), 10**400, None.__class__)),
        *({"priority": value} for value in (101, -101, 1.5, True, "7", 10**5000)),
        *({"pin_s": value} for value in (0, -1, float("nan"), [1])),
        *({"session_end": value} for value in (1, "yes", [])),
        {"ttl": 5},
        {"\ud800": 1},
        {b"ttl_s": 1},
        {1: 1},
        {"x\n" * 10_000: 1},
        {str(number): 1 for number in range(MAX_FIELDS + 1)},
        *([], [1], "ttl_s", 5, True, object()),
    ],
    ids=lambda own: type(own).__name__,
)
def test_hostile_hints_are_ignored(own: Any):
    found = parsed(own)
    assert (found.hints, found.used, len(found.ignored)) == (NO_HINTS, 0, 1)
    assert len(found.ignored[0]) < 300
    assert "\n" not in found.ignored[0]


@pytest.mark.parametrize("params", [None, {}, [1], "raykv_hints", 5, {"raykv_hints": None}, {"raykv": {"ttl_s": 5}}])
def test_no_hints_cost_nothing(params: Any):
    assert parsed(params=params).hints is NO_HINTS
    assert NO_HINTS.of_stored is None
    assert not NO_HINTS.after_end


@pytest.mark.parametrize(
    ("actions", "hints"),
    [
        ([action("kv.retain", {"priority": 50, "ttl_seconds": 60, "block_hashes": [1]})], {"retention": (60.0, 50)}),
        ([action("kv.retain", {"priority": 10**30, "ttl_seconds": 1e9})], {"retention": (DAY_S, 100)}),
        ([action("kv.demote", {"session_id": "s"})], {"ends": True}),
        ([action("kv.demote", {"session_id": "other"})], {"ended": frozenset({"other"})}),
        ([action("kv.evict", {"execute_at": "request_completion"})], {"ends": True}),
        ([action("kv.evict", {"include_current_request": False})], {}),
        ([action("kv.fetch", {"block_hashes": [1]}), action("kv.demote", {})], {"ends": True}),
        ([action("kv.fetch", None), action("anything", 5, "9")], {}),
    ],
)
def test_actions_of_vllms_envelope(actions: list[Any], hints: dict[str, Any]):
    found = parsed(actions=actions, session="s")
    assert (found.hints, found.ignored) == (RequestHints(session="s", **hints), [])


@pytest.mark.parametrize(
    "actions",
    [
        None.__class__,
        "abc",
        [None],
        [action(5, {})],
        [action("kv.retain", {"priority": 5, "ttl_seconds": 5}, "2.0")],
        [action("kv.retain", None)],
        [action("kv.retain", {"priority": 5})],
        [action("kv.retain", {"priority": -5, "ttl_seconds": 5})],
        [action("kv.retain", {"priority": True, "ttl_seconds": 5})],
        [action("kv.retain", {"priority": 5, "ttl_seconds": float("nan")})],
        [action("kv.demote", {"session_id": "s" * 300})],
        [action("raykv.hints", {"unknown": 1})],
        [action("kv.fetch", {})] * (MAX_ACTIONS + 1),
    ],
    ids=lambda actions: type(actions).__name__,
)
def test_hostile_actions_are_ignored(actions: Any):
    found = parsed(actions=actions)
    assert (found.hints, len(found.ignored)) == (RequestHints(), 1)
    assert parsed(actions=[], version="7").ignored


def test_a_wrong_session_id_is_ignored():
    assert [parsed(session=wrong).used for wrong in (5, b"s", "s" * 300, ["s"])] == [0] * 4
    assert parsed(session="s").hints == RequestHints(session="s")


def test_hints_can_be_switched_off():
    request = SimpleNamespace(kv_transfer_params={"raykv_hints": {"ttl_s": 5}}, kv_hints=None, session_id="s")
    assert parse(request, 0.0).hints is NO_HINTS  # type: ignore[arg-type]


def turn(prompt: str = "", generated: str = "") -> Turn:
    """Make a turn with one hash for each letter. The hash is the text up to and including this letter."""
    text = prompt + generated
    hashes = [text[: end + 1].encode() for end in range(len(text))]
    return Turn(hashes[: len(prompt)], hashes[len(prompt) :])


def names(text: str) -> list[bytes]:
    return [text[: end + 1].encode() for end in range(len(text))]


def test_a_session_leaves_out_what_others_use():
    sessions = Sessions(most_chunks=6)
    sessions.add("a", [b"system", b"a1"], turn())
    sessions.add("b", [b"system", b"b1"], turn())
    sessions.add("a", [b"system", b"a1", b"a2"], turn())
    assert sessions.pop("a") == [b"a1", b"a2"]
    assert sessions.pop("a") == sessions.pop("never") == []
    sessions.add("c", [b"system", b"c1"], turn())
    assert sessions.pop("c") == [b"c1"], "two sessions used it, although one has ended"


def test_sessions_are_bounded():
    sessions = Sessions(most_chunks=6)
    for number in range(100):
        sessions.add(number, [f"{number} {chunk}".encode() for chunk in range(4)], turn())
    assert sessions.pop(98) == []
    assert len(sessions.pop(99)) == 4
    sessions.add("long", [b"%d" % number for number in range(10)], turn())
    assert sessions.pop("long") == []


@pytest.mark.parametrize(
    ("prompt", "generated", "superseded"),
    [
        ("systemQ1answer1Q2", "more", ["systemQ1<th", "systemQ1<thi"]),  # the template dropped the reasoning
        ("systemQ*answer1Q2", "more", ["systemQ1<th", "systemQ1<thi"]),  # the template also changed the prompt's end
        ("systemQ1<thi>answer1Q2", "more", []),  # the next turn reads the reasoning
        ("systemQ1", "other", []),  # another answer to the same prompt: both may be continued
        ("systemX1answer1Q2", "more", []),  # another conversation of the session
    ],
)
def test_the_next_turn_supersedes_what_its_prompt_drops(prompt: str, generated: str, superseded: list[str]):
    sessions = Sessions()
    first = turn("systemQ1", "<thi")._replace(generated=[b"systemQ1<th", b"systemQ1<thi"])
    assert sessions.add("s", names("systemQ1<thi"), first) == []
    assert sessions.add("t", names(prompt + generated), turn(prompt, generated)) == [], "another session"
    assert [*map(bytes.decode, sessions.add("s", names(prompt + generated), turn(prompt, generated)))] == superseded


# -- with a scheduler and a node ----------------------------------------------------------------------------------


class Agent:
    """Runs requests through vLLM's scheduler, one by one. Before each request, the engine's own cache is empty."""

    def __init__(self, model: Path, cluster: raykv.EmbeddedCluster) -> None:
        self.engine = toy.Engine(model, cluster.address(0), random.Random(1), threads=True, load_policy="always")
        self.side = self.engine.scheduler.connector.scheduler_side
        self.store = cluster.nodes[0].store
        self.client = cluster.client(self.engine.worker.get_handshake_metadata().namespaces[0, 0])
        self.count = 0

    def run(self, prompt: list[int], *, session: str | None = None, envelope: Any = None, **own: Any) -> int:
        """Run a request. Return how many of its tokens were loaded."""
        name, loaded = f"r{self.count}", self.engine.loaded_tokens
        self.count += 1
        params = {"raykv_hints": own} if own else None
        self.engine.add(name, prompt, max_tokens=2, salt="", params=params, session_id=session, kv_hints=envelope)
        while name in self.engine.scheduler.requests:
            self.engine.step()
        wait([saving.future for saving in self.engine.worker.worker_side.saving])
        self.side._ended._thread.submit(lambda: None).result()
        self.engine.scheduler.reset_prefix_cache()
        assert self.engine.outputs[name] == toy.expected(prompt, 2)
        return self.engine.loaded_tokens - loaded

    def rows(self, prompt: list[int]) -> Any:
        """Return the rows of a prompt's chunks; -1 for chunks that are not stored."""
        hashes = Request("h", prompt, SamplingParams(max_tokens=1), None, block_hasher=self.engine.hasher).block_hashes
        return self.store.table.find(self.client.keys([bytes(each) for each in hashes]))

    def ranks(self, prompt: list[int]) -> list[int]:
        rows = self.rows(prompt)
        assert (rows >= 0).all()
        return self.store.row_hints.ranks(rows, self.store.table.ticks(time.monotonic())).tolist()


SLOTS = 64


@pytest.fixture
def agents(model: Path) -> Iterator[Callable[[], Agent]]:
    """Return a function that makes an agent with its own engine and its own node, which has room for 64 chunks."""
    made: list[Agent] = []
    with ExitStack() as stack:

        def make() -> Agent:
            fields = {"arena_nbytes": SLOTS * 4096, "extent_nbytes": 16_384, "low_water": 0.0}
            name = f"agents-{len(made)}"
            agent = Agent(model, stack.enter_context(raykv.embedded(1, name=name, **fields)))
            made.append(agent)
            stack.callback(agent.engine.close)
            return agent

        yield make


def prompt_of(seed: object, tokens: int = 8 * toy.BLOCK_TOKENS) -> list[int]:
    rng = random.Random(f"{seed}")
    return [rng.randrange(toy.VOCABULARY) for _ in range(tokens)]


def fill(agent: Agent) -> None:
    """Store chunks of other prompts, enough to fill the node's memory twice."""
    for number in range(2 * SLOTS // 8):
        agent.run(prompt_of(f"filler {number}"))


def test_chunks_with_a_time_to_live_expire(agents: Callable[[], Agent]):
    agent, brief, long = agents(), prompt_of("brief"), prompt_of("long")
    agent.run(long)
    agent.run(brief, ttl_s=1.0)
    assert agent.run(long, ttl_s=0.05) > 0, "stored by another request, which asked for no end"
    assert (agent.rows(brief) >= 0).all()
    wait_until(lambda: (agent.rows(brief) < 0).all())
    assert agent.run(brief) == 0
    assert agent.run(long) > 0


def test_a_later_request_renews_the_time_to_live(agents: Callable[[], Agent]):
    agent, prompt = agents(), prompt_of("renewed")
    agent.run(prompt, ttl_s=100.0)
    agent.run(prompt, ttl_s=1000.0)
    agent.run(prompt, ttl_s=10.0)
    left = agent.store.table.columns.expires[agent.rows(prompt)] - agent.store.table.ticks(time.monotonic())
    assert (left > 900 * 64).all()


def test_priorities_and_pins_outlive_pressure(agents: Callable[[], Agent]):
    agent = agents()
    prompts = {name: prompt_of(name) for name in ("plain", "priority", "pin", "retain")}
    for prompt in prompts.values():
        agent.run(prompt)
    agent.run(prompts["priority"], priority=5, ttl_s=500.0)
    agent.run(prompts["pin"], pin_s=500.0)
    retain = KvHintAction("a", "kv.retain", "1.0", {"priority": 50, "ttl_seconds": 500})
    agent.run(prompts["retain"], envelope=KvHintsEnvelope("0.1", "m", [retain]))
    assert [agent.ranks(prompt)[0] for prompt in prompts.values()] == [0, 5, 100, 50]
    fill(agent)
    assert [agent.run(prompt) > 0 for prompt in prompts.values()] == [False, True, True, True]


def test_the_end_of_a_session_frees_its_chunks_first(agents: Callable[[], Agent]):
    agent, system = agents(), prompt_of("system")
    first, second = system + prompt_of("first"), system + prompt_of("second")
    old = prompt_of("old")
    agent.run(old)
    agent.run(second, session="2")
    agent.run(first + prompt_of("branch", 4), session="1")
    agent.run(first, session="1", session_end=True)
    assert agent.ranks(second) == [0] * 16
    assert agent.ranks(first + prompt_of("branch", 4)) == [0] * 8 + [ENDED] * 9, "also what another request stored"
    demote = KvHintAction("a", "kv.demote", "1.0", {"session_id": "2"})
    agent.run(old, envelope=KvHintsEnvelope("0.1", "m", [demote]))
    assert agent.ranks(second) == [0] * 8 + [ENDED] * 8, "the system prompt was used by both"
    assert agent.ranks(old) == [0] * 8
    marked = agent.store.table.ticks(time.monotonic())
    wait_until(lambda: agent.store.table.ticks(time.monotonic()) > marked)
    assert agent.run(second) > 0
    assert agent.ranks(second)[:15] == [0] * 15, "a read takes the mark away"


def test_reasoning_that_the_next_turn_drops_goes_first(agents: Callable[[], Agent]):
    agent, first = agents(), prompt_of("first", 8 * toy.BLOCK_TOKENS + 3)
    agent.run(first, session="s")
    whole = toy.expected(first, 2)
    assert agent.ranks(first + whole) == [0] * 9, "the last chunk has a generated token"
    agent.run(first + prompt_of("answer"), session="s")
    assert agent.ranks(first + whole) == [0] * 8 + [ENDED]


@pytest.mark.parametrize("stored", [False, True])
def test_a_hint_decides_whether_generated_tokens_are_stored(agents: Callable[[], Agent], stored: bool):
    agent, prompt = agents(), prompt_of("prompt", 8 * toy.BLOCK_TOKENS + 3)
    agent.run(prompt, store_decode=stored)
    rows = agent.rows(prompt + toy.expected(prompt, 2))
    assert (rows[:8] >= 0).all()
    assert (rows[8] >= 0) == stored


def test_an_engine_without_hints_marks_nothing(agents: Callable[[], Agent]):
    agent = agents()
    agent.run(prompt_of("plain"))
    agent.run(prompt_of("plain"))
    rows, columns = agent.rows(prompt_of("plain")), agent.store.table.columns
    assert agent.ranks(prompt_of("plain")) == [0] * 8
    assert not columns.expires[rows].any()


def test_wrong_hints_are_counted_and_logged_rarely(agents: Callable[[], Agent], caplog: pytest.LogCaptureFixture):
    agent, stats = agents(), Counter[str]()
    count = agent.side._stats.count
    agent.side._stats.count = lambda metric, amount=1, *labels: (
        stats.update({f"{metric} {labels}": amount}) if metric == "hints" else count(metric, amount, *labels)
    )
    logging.getLogger("vllm").addHandler(caplog.handler)  # vLLM's loggers do not propagate to the root
    for _ in range(3):
        agent.run(prompt_of("wrong"), ttl_s=-1.0)
    logging.getLogger("vllm").removeHandler(caplog.handler)
    assert agent.run(prompt_of("wrong"), ttl_s=60.0) > 0
    assert stats == {"hints ('ignored',)": 3, "hints ('used',)": 1}
    assert sum("'ttl_s': Input should be greater than 0" in line for line in caplog.messages) == 1


def test_a_prefill_engine_hands_hints_to_the_decode_engine(agents: Callable[[], Agent]):
    agent, prompt = agents(), prompt_of("handed")
    params = {"do_remote_decode": True, "raykv_hints": {"session_end": True}}
    agent.engine.add("r", prompt, max_tokens=1, salt="", params=params)
    handed: list[Any] = []
    while not handed:
        handed = agent.engine.step()
    assert handed[0].kv_transfer_params["raykv_hints"] == {"session_end": True}
    wait([saving.future for saving in agent.engine.worker.worker_side.saving])
    agent.side._ended._thread.submit(lambda: None).result()
    assert agent.ranks(prompt) == [0] * 8, "the session has not ended yet"


# -- what hints are worth ------------------------------------------------------------------------------------------


def turns(seed: object) -> Iterator[tuple[str, list[int], bool]]:
    """Yield the requests of 40 agents in random order: (session, prompt, whether it is the session's last request).

    At most 12 agents run at a time. All share a system prompt. Each request of an agent adds to its prompt.
    """
    rng = random.Random(f"{seed}")
    system, waiting = prompt_of("system", 16), [f"{seed} {number}" for number in range(40)]
    running: dict[str, list[int]] = {}
    while waiting or running:
        while waiting and len(running) < 12:
            running[waiting.pop()] = list(system)
        session = rng.choice(sorted(running))
        running[session] += prompt_of(f"{session} {len(running[session])}", rng.randint(8, 16))
        is_last = len(running[session]) > 70 or rng.random() < 0.1
        yield session, list(running[session]), is_last
        if is_last:
            del running[session]


@pytest.mark.parametrize("number", range(3))
def test_agents_hit_more_with_hints(agents: Callable[[], Agent], seed: int, number: int):
    """Run the same requests with and without `session_end`, on nodes that are too small for all chunks."""
    loaded, asked = {True: 0, False: 0}, 0
    for hinted in (False, True):
        agent = agents()
        for session, prompt, is_last in turns(f"{seed} {number}"):
            own = {"session_end": True} if hinted and is_last else {}
            loaded[hinted] += agent.run(prompt, session=session if hinted else None, **own)
            asked += len(prompt) * hinted
    ratios = {hinted: round(tokens / asked, 3) for hinted, tokens in loaded.items()}
    print(f"tokens loaded of {asked} asked for: {ratios[False]} without hints, {ratios[True]} with them")
    assert loaded[True] > loaded[False]
