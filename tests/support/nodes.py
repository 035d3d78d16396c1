"""Nodes for tests: embedded nodes, and a node process that can be killed."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
import xxhash

import raykv
from raykv.client.slot_pool import TRUST_S
from raykv.config import ClientConfig, NodeConfig, StorageConfig
from raykv.embedded import EmbeddedCluster, InProcessMembership
from raykv.node.node import Node
from raykv.node.sessions import NodeSession
from raykv.protocol import chunk_keys, codec, messages
from raykv.transport.base import Reply

SPACE = raykv.Namespace(model="m")
SECRET = "5e" * 32
NBYTES = 50_000

NODE = """
import json, sys
from raykv.config import NodeConfig
from raykv.embedded import InProcessMembership
from raykv.node.node import Node
from raykv.storage import allocator

if len(sys.argv) > 3:
    allocator.QUARANTINE_S = float(sys.argv[3])
membership = InProcessMembership(member_timeout_s=5.0)
node = Node(NodeConfig.load(json.loads(sys.argv[1])), secret=bytes.fromhex(sys.argv[2]), membership=membership)
node.start()
print(node.member.address, flush=True)
sys.stdin.read()
node.stop(unlink=True)
"""


def wait_until(condition: Callable[[], object], timeout_s: float = 20.0) -> None:
    until_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until_s, "it never became true"
        time.sleep(0.01)


def stop_process(pid: int) -> None:
    """Send SIGSTOP, and wait until every thread of the process has stopped."""
    os.kill(pid, signal.SIGSTOP)
    stats = list(Path(f"/proc/{pid}/task").glob("*/stat"))

    def is_stopped(stat: Path) -> bool:
        try:
            return stat.read_text().rpartition(")")[2].split()[0] == "T"
        except (FileNotFoundError, ProcessLookupError):
            return True  # the thread has ended meanwhile

    wait_until(lambda: all(map(is_stopped, stats)))


def names(count: int, prefix: str = "chunk") -> list[str]:
    return [f"{prefix}-{number}" for number in range(count)]


def content(name: str, nbytes: int = NBYTES) -> bytes:
    return hashlib.shake_128(name.encode()).digest(nbytes)


def put(client: "raykv.Client", keys: list[str], **options: Any) -> raykv.PutResult:
    return client.put(keys, [content(key) for key in keys], **options)


def get(client: "raykv.Client", keys: list[str], **options: Any) -> tuple[bool, ...]:
    into = [bytearray(NBYTES) for _ in keys]
    hits = client.get(keys, into, **options).hits
    assert all(not hit or into[place] == content(keys[place]) for place, hit in enumerate(hits)), "wrong bytes"
    return hits


def make_node(*, secret: bytes = bytes(32), membership: InProcessMembership | None = None, **fields: Any) -> Node:
    """A node that is not started. `fields` are fields of NodeConfig; `storage` is a dict of fields of StorageConfig."""
    given = {"arena_nbytes": "4 MiB", "extent_nbytes": "64 KiB", "shm_dir": None, **fields.pop("storage", {})}
    storage = StorageConfig.load(given)
    config = NodeConfig.load({"node_id": "n", "storage": storage, "heartbeat_s": 0.05, **fields})
    directory = membership or InProcessMembership(member_timeout_s=5.0)
    return Node(config, secret=secret, membership=directory)


@contextmanager
def running_node(**fields: Any) -> Iterator[Node]:
    """A running node. It is stopped at the end."""
    node = make_node(**fields)
    try:
        node.start()
        yield node
    finally:
        node.stop(unlink=True)


class Peer:
    """A connection to a node, but without a transport. Requests go straight to the node's handlers."""

    def __init__(self, node: Node, *, local: bool = True) -> None:
        self.node = node
        self.session: NodeSession = node.session(local=local)

    def open(self, namespace: raykv.Namespace = SPACE) -> "Peer":
        self.ask(messages.OpenNamespace(namespace.model_dump_json().encode()))
        return self

    def reply(self, request: messages.Message) -> Reply:
        """Send a request. The caller must call `finish` of the returned reply."""
        raw = codec.encode(request, 0, 0)
        reply = self.node.answer(codec.decode(raw[codec.HEADER.size :]), self.session)
        if isinstance(reply.answer, messages.Failure):
            codec.raise_failure(reply.answer)
        return reply

    def ask(self, request: messages.Message) -> Any:
        """Send a request, and finish its reply. Returns the second answer, or the first if there is only one."""
        reply = self.reply(request)
        second = reply.finish(True)
        if isinstance(second, messages.Failure):
            codec.raise_failure(second)
        return second or reply.answer

    def lend(self, count: int, nbytes: int, **fields: Any) -> messages.Lent:
        return self.ask(messages.Lend(nbytes, count, group=SPACE.group.digest, **fields))

    def filled(self, names: Sequence[str], nbytes: int, **fields: Any) -> messages.Run:
        """Get slots for these chunks, and write the chunks into the slots. Returns the run to commit."""
        lent = self.lend(len(names), nbytes)
        checksums = []
        for start, name in zip(np.frombuffer(lent.offsets, "<u8").tolist(), names, strict=False):
            self.node.store.arena.view[start : start + nbytes] = content(name, nbytes)
            checksums.append(xxhash.xxh3_64_intdigest(content(name, nbytes)))
        return messages.Run(keys_of(names), nbytes, lent.rows, np.array(checksums, "<u8").tobytes(), **fields)

    def commit(self, *runs: messages.Run) -> list[messages.CommittedRun]:
        return list(self.ask(messages.Commit(runs, group=SPACE.group.digest)).runs)

    def close(self) -> None:
        self.session.close()


def keys_of(names: Sequence[str]) -> bytes:
    return chunk_keys.to_bytes(chunk_keys.named(SPACE.digest, names))


def cluster(nodes: int, **options: Any) -> EmbeddedCluster:
    return raykv.embedded(nodes, **{"arena_nbytes": "4 MiB", "extent_nbytes": "64 KiB", "heartbeat_s": 0.03, **options})


def run(program: str, *arguments: str, stderr: IO[str] | None = None) -> "subprocess.Popen[str]":
    command = [sys.executable, "-W", "error", "-c", program, *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True)


def kill(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.communicate()


class NodeProcess:
    """A node that can be killed and started again."""

    quarantine_s = 1.25 * TRUST_S
    """The quarantine. It is shorter than QUARANTINE_S, so that tests are quick, but it must be longer than TRUST_S."""

    def __init__(self, shm_dir: Path, stderr: IO[str] | None = None) -> None:
        self._stderr = stderr
        storage = {"arena_nbytes": 32 << 20, "extent_nbytes": 1 << 20, "shm_dir": str(shm_dir)}
        self.fields = {"node_id": "n", "cluster": "p", "host": "elsewhere", "storage": storage, "heartbeat_s": 0.05}
        self.local_address = f"unix:{shm_dir}/raykv-p-n.sock"
        self.start()

    def start(self) -> None:
        self.process = run(NODE, json.dumps(self.fields), SECRET, str(self.quarantine_s), stderr=self._stderr)
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()
        assert self.address, "the node did not start"

    def kill(self) -> None:
        kill(self.process)

    def client(self, *, local: bool = True, **config: Any) -> "raykv.Client":
        address = self.local_address if local else self.address
        from raykv.client.router import Router

        fields = {"address": address, "secret": SECRET, "breaker_s": 0.05, **config}
        return raykv.Client(SPACE, Router(ClientConfig.load(fields)))

    def stats(self) -> dict[str, Any]:
        with self.client() as client:
            return client.stats()["nodes"]["n"]


@contextmanager
def node_process(shm_dir: Path, stderr: IO[str] | None = None) -> Iterator[NodeProcess]:
    """A node in a process of its own, with files in `shm_dir`. At the end, the node must stop cleanly."""
    made = NodeProcess(shm_dir, stderr)
    yield made
    if made.process.poll() is None:
        made.process.send_signal(signal.SIGCONT)
        made.process.communicate(timeout=30)  # the node stops when its standard input ends
        assert made.process.returncode == 0
        assert not list(shm_dir.iterdir()), "files stay behind"
