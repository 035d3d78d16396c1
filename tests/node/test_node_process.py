"""Nodes and clients as processes of their own, killed without warning."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import raykv
from raykv.client.router import Router
from raykv.config import ClientConfig
from raykv.memory import native

SPACE = raykv.Namespace(model="m")
SECRET = "5e" * 32
NBYTES = 50_000

NODE = """
import json, sys
from raykv.config import NodeConfig
from raykv.embedded import InProcessDirectory
from raykv.node.node import Node

directory = InProcessDirectory(member_timeout_s=5.0)
node = Node(NodeConfig.load(json.loads(sys.argv[1])), secret=bytes.fromhex(sys.argv[2]), directory=directory)
node.start()
print(node.member.address, flush=True)
sys.stdin.read()
node.stop(unlink=True)
"""

WRITER = """
import sys
import raykv

client = raykv.connect(raykv.Namespace(model="m"), address=sys.argv[1])
room = client.reserve([f"half-{n}" for n in range(5)], 1 << 20)
for view in room.views:
    view[: 1 << 19] = bytes(1 << 19)
print(len(room.views), flush=True)
sys.stdin.read()
"""


def content(name: str) -> bytes:
    return hashlib.shake_128(name.encode()).digest(NBYTES)


def names(count: int, prefix: str = "chunk") -> list[str]:
    return [f"{prefix}-{number}" for number in range(count)]


def put(client: raykv.Client, keys: list[str]) -> raykv.PutResult:
    return client.put(keys, [content(key) for key in keys])


def get(client: raykv.Client, keys: list[str], **options) -> tuple[bool, ...]:
    into = [bytearray(NBYTES) for _ in keys]
    hits = client.get(keys, into, **options).hits
    assert all(not hit or into[place] == content(keys[place]) for place, hit in enumerate(hits)), "wrong bytes"
    return hits


def run(program: str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "error", "-c", program, *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


class NodeProcess:
    """A node that can be killed and started again."""

    def __init__(self, shm_dir: Path) -> None:
        storage = {"arena_nbytes": 32 << 20, "extent_nbytes": 1 << 20, "shm_dir": str(shm_dir)}
        self.fields = {"node_id": "n", "cluster": "p", "host": "elsewhere", "storage": storage, "heartbeat_s": 0.05}
        self.local_address = f"unix:{shm_dir}/raykv-p-n.sock"
        self.start()

    def start(self) -> None:
        self.process = run(NODE, json.dumps(self.fields), SECRET)
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()
        assert self.address, "the node did not start"

    def kill(self) -> None:
        kill(self.process)

    def client(self, *, local: bool = True, **config) -> raykv.Client:
        address = self.local_address if local else self.address
        fields = {"address": address, "secret": SECRET, "breaker_s": 0.05, **config}
        return raykv.Client(SPACE, Router(ClientConfig.load(fields)))

    def stats(self) -> dict:
        with self.client() as client:
            return client.stats()["nodes"]["n"]


@pytest.fixture
def node(shm_dir) -> Iterator[NodeProcess]:
    made = NodeProcess(shm_dir)
    yield made
    if made.process.poll() is None:
        made.process.send_signal(signal.SIGCONT)
        made.process.communicate(timeout=30)  # the end of its input is its sign to stop
        assert made.process.returncode == 0
        assert not list(shm_dir.iterdir()), "files stay behind"


def wait_until(condition, timeout_s: float = 20.0) -> None:
    until_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until_s, "it never came true"
        time.sleep(0.02)


def test_a_killed_node_is_read_on_and_comes_back_with_everything(node):
    with node.client() as client, node.client() as other:
        assert put(client, names(40)).stored == 40
        room = client.reserve(["unfinished"], NBYTES)
        pins = client.pin(names(3))
        node.kill()

        assert all(get(client, names(40)))
        assert client.match(names(40)).count == 40
        result = put(client, ["new"])  # with the compiled loops slots lent ahead serve without the node
        assert (result.stored, result.skipped) == ((1, 0) if native.available else (0, 1))
        assert bool(result.reason) is bool(result.skipped)
        assert all(get(other, ["new"])) is bool(result.stored)
        assert room.commit().skipped == 1
        assert pins.valid()
        pins.release()

        node.start()
        assert node.stats()["recovered"] == 40 + result.stored
        for each in (client, other):
            wait_until(lambda each=each: put(each, ["new"]).skipped == 0)
            assert all(get(each, [*names(40), "new"]))
            assert get(each, ["unfinished"]) == (False,)
        client.flush(), other.flush()
        assert node.stats()["committed"] == 1 - result.stored
        with node.client(local=False) as remote:
            wait_until(lambda: all(get(remote, names(40))))


@pytest.mark.slow
def test_a_killed_writer_gives_its_slots_back(node):
    writer = run(WRITER, node.local_address)
    assert writer.stdout is not None
    assert writer.stdout.readline() == "5\n"
    with node.client() as client:
        assert node.stats()["used_nbytes"] == 5 << 20
        assert client.put(["half-0"], [bytes(1 << 20)]).existed == 1
        kill(writer)
        wait_until(lambda: node.stats()["used_nbytes"] == 0)
        assert node.stats()["aborted"] == 5
        assert client.put(["half-0"], [bytes(1 << 20)]).stored == 1


@pytest.mark.slow
def test_a_killed_writers_slots_serve_others_in_the_end(node):
    """They rest a while: from here nobody can tell a killed writer from one that still writes."""
    writer = run(WRITER, node.local_address)
    assert writer.stdout is not None
    writer.stdout.readline()
    kill(writer)
    with node.client() as client:
        wait_until(lambda: node.stats()["aborted"] == 5)
        room = client.reserve(names(32), 1 << 20)
        assert len(room.views) == 27
        room.abort()

        def all_slots_are_back() -> bool:
            again = client.reserve(names(32), 1 << 20)
            count = len(again.views)
            again.abort()
            return count == 32

        wait_until(all_slots_are_back)


@pytest.mark.slow
def test_a_stopped_node_costs_the_deadline_and_local_reads_nothing(node):
    with node.client(timeout_s=0.5) as client, node.client(local=False, timeout_s=0.5) as remote:
        assert put(client, names(5)).stored == 5
        wait_until(lambda: all(get(remote, names(5))))  # once its owner has heard of it
        node.process.send_signal(signal.SIGSTOP)
        os.waitpid(node.process.pid, os.WUNTRACED)  # until it has stopped
        began_s = time.monotonic()
        assert not any(get(remote, names(5)))
        new = names(600, "new")
        written = [put(client, [name]).stored for name in new[: 3 if native.available else 1]]
        assert written[0] == native.available  # slots lent ahead serve without the node, as far as they go
        assert put(client, new).skipped > 0
        assert all(get(client, names(5)))
        assert time.monotonic() - began_s < 5.0
        node.process.send_signal(signal.SIGCONT)
        wait_until(lambda: put(client, ["new-0"]).skipped == 0)
        wait_until(lambda: all(get(remote, [*names(5), "new-0"])))


@pytest.mark.slow
def test_nodes_killed_under_load_lose_nothing_that_was_committed(node, rng):
    stored: set[str] = set()
    stop = threading.Event()
    skipped = 0

    def write() -> None:
        nonlocal skipped
        step = 0
        with node.client() as client:
            while not stop.is_set():
                step += 1
                keys = names(4, f"load-{step % 100}")  # 400 chunks: they all fit
                result = put(client, keys)
                skipped += result.skipped
                if not result.skipped:
                    stored.update(keys)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(3):
            goal = len(stored) + 20
            wait_until(lambda goal=goal: len(stored) >= min(goal, 400))
            time.sleep(rng.random() * 0.05)  # where in its work it is killed is up to chance
            node.kill()
            with_certainty = sorted(stored)
            node.start()
            with node.client() as reader:
                assert all(get(reader, with_certainty))
    finally:
        stop.set()
        writer.join()
    assert skipped > 0 or native.available  # slots lent ahead may bridge the gap
    stats = node.stats()
    assert stats["chunks"] >= len(stored)
    assert stats["used_nbytes"] == stats["chunks"] * 53_248  # 13 pages each


@pytest.mark.slow
def test_a_clean_stop_leaves_nothing(node, shm_dir):
    with node.client() as client:
        put(client, names(3))
        assert len(list(shm_dir.iterdir())) == 3  # table, arena, socket
        assert all(path.stat().st_mode & 0o077 == 0 for path in shm_dir.iterdir())
        node.process.communicate(timeout=30)
        assert not list(shm_dir.iterdir())
        assert all(get(client, names(3)))  # whoever has it mapped reads on
    node.start()
    assert node.stats()["chunks"] == 0
