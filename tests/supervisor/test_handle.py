"""Supervised nodes are restarted. Tests kill or stop a node, its supervisor, or the process that owns both."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

import raykv
from raykv.client.router import Router
from raykv.config import ClientConfig, NodeConfig
from raykv.embedded import InProcessMembership
from raykv.errors import ConfigError, PeerUnavailable, UsageError
from raykv.memory import native
from raykv.protocol import messages
from raykv.supervisor.handle import NodeHandle
from raykv.supervisor.process import CHECK_S
from raykv.transport.link import Link
from raykv.types import NodeId
from tests.support.load import Load
from tests.support.nodes import SECRET, SPACE, get, names, put, stop_process, wait_until
from tests.support.soak import soak

OWNER = """
import json, os, sys
from raykv.config import NodeConfig
from raykv.embedded import InProcessMembership
from raykv.supervisor.handle import NodeHandle

membership = InProcessMembership(member_timeout_s=60.0)
node = NodeHandle(NodeConfig.load(json.loads(sys.argv[1])), secret=b"s", membership=membership)
print(node.pid, node.supervisor.pid, flush=True)
sys.stdin.read()
os.kill(os.getpid(), 9)
"""

IMPATIENT = """
import runpy
from raykv.storage import files

files.OWN_TIMEOUT_S = 0.2
runpy.run_module("raykv.supervisor.process", run_name="__main__")
"""
"""A supervisor whose node waits only 0.2 s for another process to release the node's memory."""


class Supervised:
    """A supervised node, which a test can kill."""

    def __init__(self, shm_dir: Path, **storage: object) -> None:
        memory = {"arena_nbytes": 32 << 20, "extent_nbytes": 1 << 20, "shm_dir": str(shm_dir), **storage}
        self.fields = {"node_id": "n", "cluster": "p", "host": "elsewhere", "storage": memory, "heartbeat_s": 0.05}
        self.shm_dir = shm_dir
        self.membership = InProcessMembership(member_timeout_s=5.0)
        self.node = NodeHandle(NodeConfig.load(self.fields), secret=bytes.fromhex(SECRET), membership=self.membership)

    def client(self, *, local: bool = True, **config: object) -> raykv.Client:
        address = self.node.config.local_address if local else self.node.stats()["address"]
        fields = {"address": address, "secret": SECRET, "breaker_s": 0.05, **config}
        return raykv.Client(SPACE, Router(ClientConfig.load(fields)))

    def kill(self) -> int:
        """Kill the node, and wait until the next process runs. Returns the pid of the killed process."""
        pid, starts = self.node.pid, self.node.starts
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: self.node.starts > starts)
        assert self.node.pid != pid
        return pid


@pytest.fixture
def made(shm_dir: Path) -> Iterator[Supervised]:
    one = Supervised(shm_dir)
    supervisor = one.node.supervisor.pid
    yield one
    pid = one.node.pid
    one.node.stop(unlink=True)
    assert not list(shm_dir.iterdir()), "files stay behind"
    assert not is_there(pid)
    assert not is_there(supervisor)
    assert one.node.ended


def is_there(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")


def members(membership: InProcessMembership) -> set[NodeId]:
    return {member.node_id for member in membership.logic.view.members}


def test_it_serves_and_leaves_the_cluster_at_the_end(shm_dir):
    one = Supervised(shm_dir)
    try:
        assert members(one.membership) == {"n"}
        with one.client() as client:
            assert put(client, names(3)).stored == 3
            wait_until(lambda: one.node.stats()["chunks"] == 3)
        assert (one.node.starts, one.node.ended) == (1, False)
        assert one.node.pid not in (os.getpid(), one.node.supervisor.pid)
        threads = os.listdir(f"/proc/{one.node.supervisor.pid}/task")
        assert len(threads) == 1, "a process with threads must not fork"
    finally:
        one.node.stop(unlink=True)
    assert members(one.membership) == set()
    assert not list(shm_dir.iterdir())


def test_a_node_that_was_stopped_for_a_while_goes_on(made):
    """The node process waits for signals in periods of CHECK_S. A longer stop must not look like a signal."""
    pid = made.node.pid
    stop_process(pid)
    until_s = time.monotonic() + CHECK_S + 0.1
    wait_until(lambda: time.monotonic() > until_s)
    os.kill(pid, signal.SIGCONT)
    until_s = time.monotonic() + 2 * CHECK_S
    wait_until(lambda: time.monotonic() > until_s)
    assert is_there(pid)
    assert (made.node.pid, made.node.starts) == (pid, 1)


def test_a_killed_node_is_back_with_its_chunks_under_its_address(made):
    before = made.node.stats()
    with made.client() as near, made.client(local=False) as far:
        assert put(near, names(20)).stored == 20
        near.flush()
        assert all(get(far, names(20)))
        for turn in range(3):
            made.kill()
            assert all(get(near, names(20))), "local reads need no node"
            assert made.node.stats()["recovered"] == 20 + turn
            assert made.node.stats()["address"] == before["address"], "peers find it where it was"
            wait_until(lambda: all(get(far, names(20))))
            wait_until(lambda turn=turn: put(near, [f"more-{turn}"]).stored == 1)
            near.flush()
    after = made.node.stats()
    assert after["incarnation"] > before["incarnation"]
    wait_until(lambda: made.membership.logic.view.member("n").incarnation == made.node.stats()["incarnation"])
    assert made.node.starts == 4


@pytest.mark.slow
def test_a_killed_node_is_back_on_each_of_its_nics(shm_dir):
    memory = {"arena_nbytes": 32 << 20, "extent_nbytes": 1 << 20, "shm_dir": str(shm_dir)}
    fields = {"node_id": "n", "cluster": "p", "host": "elsewhere", "storage": memory, "heartbeat_s": 0.05}
    config = NodeConfig.load({**fields, "nics": "127.0.0.1,127.0.0.2"})
    membership = InProcessMembership(member_timeout_s=5.0)
    node = NodeHandle(config, secret=bytes.fromhex(SECRET), membership=membership)
    try:
        (before,) = membership.logic.view.members
        assert len(set(before.nics)) == 2
        os.kill(node.pid, signal.SIGKILL)
        wait_until(lambda: membership.logic.view.members[0].incarnation != before.incarnation)
        assert membership.logic.view.members[0].nics == before.nics
    finally:
        node.stop(unlink=True)


def test_it_is_restarted_after_a_crash_too(made):
    """Here the node ends by SIGSEGV. Other tests use SIGKILL."""
    os.kill(made.node.pid, signal.SIGSEGV)
    wait_until(lambda: made.node.starts == 2)
    assert made.node.stats()["node_id"] == "n"


@pytest.mark.slow
def test_a_node_that_dies_again_and_again_is_restarted_later_and_later(made):
    began_s = time.monotonic()
    for _ in range(5):  # restarted at once, and then after 50, 100, 200 and 400 ms
        made.kill()
    assert time.monotonic() - began_s >= 0.75
    time.sleep(1.2)
    made.kill()
    assert made.node.stats()["node_id"] == "n"


@pytest.mark.slow
@pytest.mark.parametrize("unlink", [False, True])
def test_stopping_while_no_node_runs(shm_dir, unlink):
    one = Supervised(shm_dir)
    with one.client() as client:
        assert put(client, names(3)).stored == 3
        client.flush()
    for _ in range(4):
        one.kill()
    os.kill(one.node.pid, signal.SIGKILL)  # the next process starts in 400 ms
    wait_until(lambda: not is_there(one.node.pid))
    one.node.stop(unlink=unlink)
    left = {path.suffix for path in shm_dir.iterdir()}
    assert left == (set() if unlink else {".table", ".arena", ".sock", ".view"})


@pytest.mark.slow
def test_stopping_keeps_the_memory_for_the_next(shm_dir):
    one = Supervised(shm_dir)
    with one.client() as client:
        assert put(client, names(5)).stored == 5
        client.flush()
        one.node.stop()
        assert all(get(client, names(5)))
        assert not is_there(one.node.pid)
        assert members(one.membership) == {"n"}, "it stays a member: the next process is on its way"
        two = Supervised(shm_dir)
        try:
            assert two.node.stats()["recovered"] == 5
        finally:
            two.node.stop(unlink=True)


@pytest.mark.slow
@pytest.mark.parametrize("storage", [{"arena_nbytes": 1 << 50}, {"policy": "no_such_module:at_all"}])
def test_a_config_that_cannot_be_served_is_an_error_and_not_tried_again(shm_dir, storage):
    with pytest.raises(ConfigError, match=r"arena_nbytes|no_such_module"):
        Supervised(shm_dir, **storage)


@pytest.mark.slow
def test_two_for_the_same_memory(made, tmp_path, monkeypatch):
    impatient = tmp_path / "python"
    impatient.write_text(f"#!{sys.executable}\n{IMPATIENT}")
    impatient.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(impatient))
    with pytest.raises(ConfigError, match="another process"):
        NodeHandle(made.node.config, secret=b"s", membership=made.membership)
    assert made.node.stats()["node_id"] == "n"


@pytest.mark.slow
def test_a_spec_that_is_none():
    def supervisor(spec: bytes) -> int:
        return subprocess.run(
            [sys.executable, "-m", "raykv.supervisor.process"], input=spec, capture_output=True, timeout=60
        ).returncode

    assert supervisor(b"") == 1
    assert supervisor(b"{}\n") == 1


@pytest.mark.slow
def test_when_the_supervisor_is_killed_the_node_ends_and_the_owner_notices(shm_dir):
    one = Supervised(shm_dir)
    pid = one.node.pid
    os.kill(one.node.supervisor.pid, signal.SIGKILL)
    wait_until(lambda: one.node.ended)
    wait_until(lambda: not is_there(pid))
    with pytest.raises(PeerUnavailable):
        one.node.stats()
    one.node.stop()
    assert {path.suffix for path in shm_dir.iterdir()} == {".table", ".arena", ".sock", ".view"}
    two = Supervised(shm_dir)
    one.node.stop(unlink=True)
    assert two.node.stats()["node_id"] == "n", "memory that another process serves is not removed"
    assert {path.suffix for path in shm_dir.iterdir()} == {".table", ".arena", ".sock", ".view"}
    os.kill(two.node.supervisor.pid, signal.SIGKILL)
    two.node.stop(unlink=True)
    assert not list(shm_dir.iterdir())


@pytest.mark.slow
def test_stopping_again_and_by_several_at_once(shm_dir):
    one = Supervised(shm_dir)
    problems: list[threading.ExceptHookArgs] = []
    old, threading.excepthook = threading.excepthook, problems.append
    try:
        threads = [threading.Thread(target=one.node.stop, kwargs={"unlink": number % 2 == 0}) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        threading.excepthook = old
    assert not problems
    one.node.stop()
    assert not list(shm_dir.iterdir())


@pytest.mark.slow
def test_memory_without_files_ends_with_each_node():
    config = NodeConfig.load({"node_id": "n", "storage": {"arena_nbytes": 1 << 20, "extent_nbytes": 1 << 16}})
    config = config.model_copy(update={"storage": config.storage.model_copy(update={"shm_dir": None})})
    node = NodeHandle(config, secret=b"s", membership=InProcessMembership(member_timeout_s=60.0))
    try:
        assert node.stats()["node_id"] == "n"
        os.kill(node.pid, signal.SIGKILL)
        wait_until(lambda: node.starts == 2)
        assert node.stats()["recovered"] == 0
    finally:
        node.stop(unlink=True)


@pytest.mark.slow
def test_when_the_owner_is_killed_node_and_supervisor_end(shm_dir):
    storage = {"arena_nbytes": 32 << 20, "extent_nbytes": 1 << 20, "shm_dir": str(shm_dir)}
    fields = {"node_id": "n", "cluster": "p", "storage": storage}
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, json.dumps(fields)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        pids = [int(word) for word in owner.stdout.readline().split()]
        assert all(map(is_there, pids))
        owner.stdin.close()
    assert owner.returncode == -signal.SIGKILL
    wait_until(lambda: not any(map(is_there, pids)))


@pytest.mark.slow
def test_a_node_that_hangs_is_killed_when_it_must_stop(shm_dir, monkeypatch):
    monkeypatch.setattr("raykv.supervisor.handle.STOP_S", 0.5)
    one = Supervised(shm_dir)
    os.kill(one.node.pid, signal.SIGSTOP)
    one.node.stop(unlink=True)
    assert not is_there(one.node.pid)
    assert members(one.membership) == set()
    assert not list(shm_dir.iterdir())


def test_requests_are_recorded_over_it(made):
    assert made.node.record_trace(True) == []
    with made.client() as client:
        prompts = [[f"{number}-{chunk}" for chunk in range(200)] for number in range(30)]
        for prompt in prompts:
            client.match(prompt)
        wait_until(
            lambda: (time.sleep(0.25), client.match(["more"]), made.node.stats()["requests"].get("RecordTrace", 0))[2]
        )
    requests = made.node.record_trace(True)
    assert [len(each.keys) for each in requests[:3]] == [200 * 16] * 3
    deadline_s = time.monotonic() + 5.0
    far = Link.connect(made.node.stats()["address"], bytes.fromhex(SECRET), deadline_s=deadline_s)
    with closing(far), pytest.raises(UsageError, match="this host"):
        far.call(messages.FetchTrace(True), deadline_s=deadline_s)
    made.node.record_trace(False)
    with made.client() as client:
        client.match(["not recorded"])
    assert made.node.record_trace(False) == []


def kill_under_load(shm_dir: Path, kills: int, seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    one = Supervised(shm_dir, arena_nbytes=8 << 20, extent_nbytes=256 << 10, low_water=0.0, high_water=0.001)
    try:
        with Load(one, seed) as load:
            for _ in range(kills):
                time.sleep(1.0 + rng.random() * 0.3)  # a node that ran for a second is restarted at once
                one.kill()
        load.assert_no_gaps()
        assert load.names
        print(f"{one.node.starts} nodes, {load.reads} reads without a gap, {load.hits} others, {len(load.names)} puts")
    finally:
        one.node.stop(unlink=True)


@pytest.mark.slow
@pytest.mark.skipif(native.loops is None, reason="readers without compiled loops are slower than this test's patience")
def test_killed_at_random_moments_under_load_reads_never_stop(shm_dir, seed):
    kill_under_load(shm_dir, 2, seed)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.skipif(native.loops is None, reason="readers without compiled loops are slower than this test's patience")
def test_killed_many_times_under_load_reads_never_stop(shm_dir):
    kill_under_load(shm_dir, soak("kills", 200) // 8, soak("seed", random.randrange(1 << 30)))
