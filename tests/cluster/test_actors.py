"""The node actor without Ray: what it does where a node cannot be had."""

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("ray")

from raykv.cluster import actors
from raykv.config import ClusterConfig, StorageConfig
from raykv.errors import ConfigError

pytestmark = pytest.mark.ray


def test_an_actor_that_found_no_room_tries_again_when_what_others_left_is_gone(monkeypatch, tmp_path: Path):
    """A Ray node that is made anew on its host finds its former arena there, which counts as in use for a while."""
    swept, ended = [], threading.Event()

    def sweep(config, alive, *, now_s) -> list[str]:
        swept.append((config.cluster, alive))
        if len(swept) == 2:
            raise RuntimeError("the head is away")
        return ["former"] if len(swept) == 4 else []

    def end(code: int) -> None:
        assert code
        actor._stopping.set()  # so that its thread ends with this test
        ended.set()

    def no_room(*_, **__) -> None:
        raise ConfigError("field 'arena_nbytes': does not fit")

    context = SimpleNamespace(get_node_id=lambda: "a" * 56)
    monkeypatch.setattr(actors.ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(actors.ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setattr(actors, "living_ray_nodes", lambda: {"a" * 56})
    monkeypatch.setattr(actors, "sweep", sweep)
    monkeypatch.setattr(actors, "NodeHandle", no_room)
    monkeypatch.setattr(actors, "SWEEP_AGAIN_S", 0.01)
    monkeypatch.setattr(actors.os, "_exit", end)
    storage = StorageConfig(arena_nbytes="64 MiB", shm_dir=tmp_path)
    actor = actors.NodeActor(ClusterConfig(name="test", storage=storage), b"")
    try:
        assert "does not fit" in actor.describe()["error"]
        assert ended.wait(10.0)
        assert swept == [("test", {"a" * actors.NODE_ID_LENGTH})] * 4
    finally:
        actor._stopping.set()
