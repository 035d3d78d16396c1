"""The node actor without Ray: what it does if its node does not fit into memory, and which files `stop` removes."""

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("ray")

from raykv.cluster import actors
from raykv.config import ClusterConfig, NodeConfig, StorageConfig
from raykv.embedded import InProcessMembership
from raykv.errors import ConfigError
from raykv.supervisor.handle import NodeHandle
from tests.support.nodes import wait_until

pytestmark = pytest.mark.ray
ALIVE, DEAD = "a" * 56, "d" * 56


@pytest.fixture
def make_actor(monkeypatch: pytest.MonkeyPatch, shm_dir: Path) -> Callable[[], actors.NodeActor]:
    """Return a function that makes an actor on the Ray node ALIVE. The actor's raykv node does not fit into memory."""

    def no_room(*_: object, **__: object) -> None:
        raise ConfigError("field 'arena_nbytes': does not fit")

    context = SimpleNamespace(get_node_id=lambda: ALIVE)
    nodes = [{"NodeID": ALIVE, "Alive": True}, {"NodeID": DEAD, "Alive": False}]
    monkeypatch.setattr(actors.ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(actors.ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setattr(actors.ray, "nodes", lambda: nodes)
    monkeypatch.setattr(actors, "NodeHandle", no_room)
    storage = StorageConfig(arena_nbytes=64 << 20, shm_dir=shm_dir)
    return lambda: actors.NodeActor(ClusterConfig(name="test", storage=storage), b"")


def test_an_actor_that_found_no_room_tries_again_when_memory_of_others_is_gone(monkeypatch, make_actor):
    """When a Ray node restarts, its former arena takes up memory until the actor removes it."""
    calls, ended = [], threading.Event()

    def remove_orphans(config: NodeConfig, alive: set[str], *, now_s: float) -> list[str]:
        calls.append((config.cluster, alive))
        if len(calls) == 2:
            raise RuntimeError("the head is away")
        return ["former"] if len(calls) == 4 else []

    def end(code: int) -> None:
        assert code
        actor.stop()  # ends the actor's thread, as `_exit` would
        ended.set()

    monkeypatch.setattr(actors, "remove_orphans", remove_orphans)
    monkeypatch.setattr(actors, "RETRY_ROOM_S", 0.01)
    monkeypatch.setattr(actors.os, "_exit", end)
    actor = make_actor()
    assert "does not fit" in actor.describe()["error"]
    assert ended.wait(10.0)
    assert calls == [("test", {ALIVE[: actors.NODE_ID_LENGTH]})] * 4


@pytest.mark.slow
def test_stop_removes_what_nodes_of_dead_ray_nodes_left(make_actor, shm_dir):
    """`raykv down` may run after some Ray nodes have ended. It must remove the arenas of these nodes."""
    dead, other = DEAD[: actors.NODE_ID_LENGTH], "stranger"
    handles = []
    for node_id in (dead, other):
        storage = StorageConfig(arena_nbytes="1 MiB", extent_nbytes="64 KiB", shm_dir=shm_dir)
        config = NodeConfig(cluster="test", node_id=node_id, storage=storage)
        handles.append(NodeHandle(config, secret=b"s", membership=InProcessMembership(member_timeout_s=60.0)))
    try:
        os.kill(handles[0].supervisor.pid, signal.SIGKILL)  # as when its Ray node ends
        wait_until(lambda: handles[0].ended)
        assert list(shm_dir.glob(f"raykv-test-{dead}.*"))
        make_actor().stop([dead, other])
        assert not list(shm_dir.glob(f"raykv-test-{dead}.*"))
        assert list(shm_dir.glob(f"raykv-test-{other}.*")), "a process serves them"
    finally:
        for handle in handles:
            handle.stop(unlink=True)
    assert not list(shm_dir.iterdir())
