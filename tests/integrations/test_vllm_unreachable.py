"""A real engine, and a far node that stops answering. The far node holds the chunks and owns their keys.

The far node is a separate process. It is either killed, or stopped: a stopped node accepts connections and answers
nothing. No request may fail, all answers must be those of an engine without raykv, and no hook may wait for the far
node. The limit for a hook is far above the hook's usual time, and below the timeouts of lookups and loads.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import raykv
from raykv.config import NodeConfig
from raykv.integrations.vllm.connector import RayKVConnector
from raykv.supervisor.handle import NodeHandle
from raykv.transport.link import Link
from raykv.transport.pool import ConnectionPool
from tests.support.engines import Engine, prompt, write_model
from tests.support.nodes import stop_process, wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("no_full_collections")]

TIMEOUT_S = 2.0
HOOK_S = 1.0
TIMEOUTS = {"lookup_timeout_s": TIMEOUT_S, "load_timeout_s": TIMEOUT_S, "store_timeout_s": 0.2}
MOMENTS = ("before the lookup", "between lookup and load", "during the load", "before a hand-off")
PROMPTS = {moment: [prompt(10 * n, 600), prompt(10 * n + 1, 500)] for n, moment in enumerate(MOMENTS)}
HAND_OFF = {"do_remote_decode": True, "do_remote_prefill": False}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("a") / "toy", seed=0)


@pytest.fixture(scope="module")
def answers(model: Path) -> dict[str, list[list[int]]]:
    """Return the answers of an engine without a cache."""
    with Engine(model, None) as engine:
        return {moment: engine.answer(prompts) for moment, prompts in PROMPTS.items()}


@pytest.fixture
def cluster() -> Iterator[raykv.EmbeddedCluster]:
    with raykv.embedded(nodes=1, arena_nbytes="64 MiB", extent_nbytes="1 MiB", member_timeout_s=600.0) as made:
        yield made


@pytest.fixture
def far(cluster: raykv.EmbeddedCluster, shm_dir: Path) -> Iterator[NodeHandle]:
    """Run a second node of the cluster in another process, as if on another host."""
    storage = {"arena_nbytes": "64 MiB", "extent_nbytes": "1 MiB", "shm_dir": str(shm_dir)}
    fields = {"cluster": "embedded", "node_id": "far", "host": "far", "storage": storage, "heartbeat_s": 0.1}
    handle = NodeHandle(NodeConfig.load(fields), secret=bytes.fromhex(cluster.secret), membership=cluster.membership)
    wait_until(lambda: len(cluster.nodes[0].view.members) == 2)
    yield handle
    if not handle.ended:
        os.kill(handle.pid, signal.SIGCONT)
    handle.stop(unlink=True)


@pytest.fixture(autouse=True)
def no_breaker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let clients call a node again right after a timeout, so that each request calls the stopped node."""
    monkeypatch.setattr(
        "raykv.client.router.ConnectionPool",
        lambda secret, breaker_s, max_idle, tls: ConnectionPool(secret, breaker_s=0.0, max_idle=max_idle, tls=tls),
    )


@pytest.fixture
def longest(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Return a dictionary that maps each hook to the seconds of its longest call so far."""
    found: dict[str, float] = {}

    def timed(name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(hook)
        def call(*arguments: Any, **options: Any) -> Any:
            began_s = time.monotonic()
            try:
                return hook(*arguments, **options)
            finally:
                found[name] = max(found.get(name, 0.0), time.monotonic() - began_s)

        return call

    hooks = {name: hook for name, hook in vars(RayKVConnector).items() if callable(hook) and not name.startswith("_")}
    for name in hooks.keys() - {"register_kv_caches", "set_xfer_handshake_metadata_pp_aware", "shutdown"}:
        if not isinstance(vars(RayKVConnector)[name], classmethod):
            monkeypatch.setattr(RayKVConnector, name, timed(name, hooks[name]))
    return found


class Moment:
    """Calls the functions in `at_load` when loads start, and those in `at_part` when a part of a load has arrived.

    Several threads load at the same time, but each function is called once, by the thread that pops it.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at_load: list[Callable[[], None]] = []
        self.at_part: list[Callable[[], None]] = []
        get, collect = raykv.Client.get, Link.collect

        def call(due: list[Callable[[], None]]) -> None:
            with suppress(IndexError):
                due.pop()()

        def watched_get(client: raykv.Client, *arguments: Any, **options: Any) -> raykv.GetResult:
            call(self.at_load)
            return get(client, *arguments, **options)

        def watched_collect(link: Link, place: Any = None, **options: Any) -> Any:
            answer = collect(link, place, **options)
            if place is not None:
                call(self.at_part)
            return answer

        monkeypatch.setattr(raykv.Client, "get", watched_get)
        monkeypatch.setattr(Link, "collect", watched_collect)
        monkeypatch.setattr("raykv.transport.bulk_read.PART_KEYS", 2)


def fill(model: Path, cluster: raykv.EmbeddedCluster, far: NodeHandle) -> None:
    """Let an engine on the far node's host store all prompts."""
    with Engine(model, far.config.local_address) as engine:
        engine.answer([one for prompts in PROMPTS.values() for one in prompts])
        assert engine.counted("stored_chunks", "skipped") == 0
        assert engine.counted("stored_chunks", "stored") > 0
    wait_until(lambda: far.stats()["located"] + len(cluster.nodes[0].location_index) >= far.stats()["chunks"])
    assert far.stats()["located"], "the far node owns keys, too"


def test_a_far_node_that_is_stopped(
    model: Path,
    cluster: raykv.EmbeddedCluster,
    far: NodeHandle,
    answers: dict[str, list[list[int]]],
    longest: dict[str, float],
    monkeypatch: pytest.MonkeyPatch,
):
    fill(model, cluster, far)
    moment = Moment(monkeypatch)
    with Engine(model, cluster.address(0), extra=TIMEOUTS) as engine:
        for name, prompts in PROMPTS.items():
            longest.clear()
            lost = engine.counted("lost_tokens")
            params = None
            if name == "before the lookup":
                stop_process(far.pid)
            elif name == "between lookup and load":
                moment.at_load.append(lambda: stop_process(far.pid))
            elif name == "during the load":
                moment.at_part.append(lambda: stop_process(far.pid))
            else:  # the engine first loads the prompts, which only the far node stores, into its own cache
                loaded = engine.counted("loaded_tokens", "far")
                assert engine.answer(prompts) == answers[name]
                assert engine.counted("loaded_tokens", "far") - loaded > 1000
                stop_process(far.pid)
                params = HAND_OFF
            count = 8 if params is None else 1
            got = engine.answer(prompts, params=params, count=count)
            assert got == [one[:count] for one in answers[name]]
            assert not moment.at_load, "the far node was not stopped"
            assert not moment.at_part, "the far node was not stopped"
            print(name, {hook: round(took_s, 4) for hook, took_s in longest.items() if took_s > 0.005})
            assert max(longest.values()) < HOOK_S, longest
            if params is None:
                # If the far node is stopped before the lookup, the lookup may find nothing. Then nothing is lost.
                assert name == "before the lookup" or engine.counted("lost_tokens") > lost
            os.kill(far.pid, signal.SIGCONT)
            far.stats()  # waits until it answers again
        assert far.starts == 1
        assert engine.counted("loads", "partial") > 0, "nothing had arrived when the far node was stopped"
        assert engine.counted("errors") == 0


def test_a_far_node_that_is_killed_during_a_load(
    model: Path,
    cluster: raykv.EmbeddedCluster,
    far: NodeHandle,
    answers: dict[str, list[list[int]]],
    longest: dict[str, float],
    monkeypatch: pytest.MonkeyPatch,
):
    fill(model, cluster, far)
    moment = Moment(monkeypatch)
    with Engine(model, cluster.address(0), extra=TIMEOUTS) as engine:
        moment.at_part.append(far.supervisor.kill)  # the node dies with its supervisor
        for name, prompts in PROMPTS.items():
            assert engine.answer(prompts) == answers[name]
        assert not moment.at_part
        assert engine.counted("lost_tokens") > 0
        assert engine.counted("errors") == 0
        assert max(longest.values()) < HOOK_S, longest
