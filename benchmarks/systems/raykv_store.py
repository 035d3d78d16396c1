"""raykv: a node in its own process. Clients use shared memory, or TCP as if they were on another host."""

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import raykv
import raykv.protocol.chunk_keys
from benchmarks.system import Face, MissingError, Server, System
from benchmarks.workloads import GIB, MIB, Keys, Workload
from raykv.memory import native
from raykv.memory.arena import SharedMemory
from raykv.memory.layout import RowState
from raykv.memory.table import Table

NAMESPACE = raykv.Namespace(model="benchmark")
NODE = Path(__file__).with_name("raykv_node.py")
SETTLE_S = 10.0


class Raykv(Face):
    """One client. It uses the batch calls for batches, and the one-key calls for single objects."""

    def __init__(self, client: raykv.Client) -> None:
        self._client = client

    def key(self, name: str) -> Any:
        return self._client.key(name)

    def keys(self, names: Sequence[str]) -> Any:
        return self._client.keys(names)

    def key_of(self, raw: bytes) -> Any:
        return raw

    def keys_of(self, keys: Keys) -> Any:
        return keys

    def get_one(self, key: Any, into: memoryview) -> None:
        if not self._client.get_one(key, into):
            raise MissingError

    def try_get_one(self, key: Any, into: memoryview) -> bool:
        return self._client.get_one(key, into)

    def get(self, keys: Any, into: Sequence[memoryview]) -> None:
        if self._client.get(keys, into).prefix != len(into):
            raise MissingError

    def put_one(self, key: Any, value: memoryview) -> None:
        if not self._client.put_one(key, value):
            raise MissingError("not stored")

    def put(self, keys: Any, values: Sequence[memoryview]) -> None:
        done = self._client.put(keys, values, chained=False)
        if done.skipped:
            raise MissingError(done.reason)

    def exists_one(self, key: Any) -> None:
        if not self._client.exists_one(key):
            raise MissingError

    def exists(self, keys: Any) -> None:
        if not self._client.exists(keys).all():
            raise MissingError

    def delete(self, names: Sequence[str]) -> None:
        self._client.delete(self._client.keys(names))

    def settle(self) -> None:
        self._client.flush()
        until_s = time.monotonic() + SETTLE_S
        while any(node.get("unannounced") for node in self._client.stats()["nodes"].values()):
            if time.monotonic() > until_s:
                raise TimeoutError("the node does not come to rest")
            time.sleep(0.01)
        time.sleep(0.03)  # the last announcements may not have reached the owners of the keys yet


class Large(Raykv):
    """A line that measures only batches of large objects."""

    def supports(self, workload: Workload) -> bool:
        return workload.nbytes >= MIB and workload.batch > 1


class General(Raykv):
    """One client. It uses the batch calls for single objects."""

    def supports(self, workload: Workload) -> bool:
        return workload.batch == 1

    def key(self, name: str) -> Any:
        return self._client.keys([name])

    def get_one(self, key: Any, into: memoryview) -> None:
        self.get(key, [into])

    def put_one(self, key: Any, value: memoryview) -> None:
        self.put(key, [value])

    def exists_one(self, key: Any) -> None:
        self.exists(key)


class Posted(Raykv):
    """Puts that return when the bytes are in the arena and the commit is posted."""

    def supports(self, workload: Workload) -> bool:
        return workload.operation == "put"

    def put_one(self, key: Any, value: memoryview) -> None:
        if not self._client.put_one(key, value, wait=False):
            raise MissingError("not stored")

    def put(self, keys: Any, values: Sequence[memoryview]) -> None:
        done = self._client.put(keys, values, chained=False, wait=False)
        if done.skipped:
            raise MissingError(done.reason)


class Matched(Raykv):
    """Gets from known holders. The holders were looked up before, outside the measured time."""

    def supports(self, workload: Workload) -> bool:
        return workload.operation == "get"

    def key(self, name: str) -> Any:
        keys = self._client.keys([name])
        return raykv.protocol.chunk_keys.to_bytes(keys), self._client.match(keys).holders[0]

    def keys(self, names: Sequence[str]) -> Any:
        keys = self._client.keys(names)
        return keys, self._client.match(keys)

    def get_one(self, key: Any, into: memoryview) -> None:
        if not self._client.get_one(key[0], into, holder=key[1]):
            raise MissingError

    def get(self, keys: Any, into: Sequence[memoryview]) -> None:
        if self._client.get(keys[0], into, match=keys[1]).prefix != len(into):
            raise MissingError


class NodeProcess:
    """A node in its own process, and its local address."""

    def __init__(self, store: System, name: str, storage: dict[str, Any], *, host: str | None = None) -> None:
        setting = store.setting
        storage = {"shm_dir": str(setting.shm), **storage}
        fields = {"node_id": name, "cluster": "bench", "storage": storage, **({"host": host} if host else {})}
        self.secret = secrets.token_hex(32)
        command = [sys.executable, "-P", str(NODE), json.dumps(fields), self.secret]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._server: Server = store.server(f"raykv-{name}", command, **pipes)
        self.process = self._server.process
        self.local_address = f"unix:{setting.shm}/raykv-bench-{name}.sock"

    def wait(self) -> dict[str, Any]:
        """Wait until the node is ready. Return its output: address, path of its table, and times of its start."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("the node did not start")
        said: dict[str, Any] = json.loads(line)
        return said

    def stop(self) -> None:
        """Stop the node by closing its input."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            assert self.process.stdin is not None
            self.process.stdin.close()
            try:
                self.process.wait(10.0)
            except subprocess.TimeoutExpired:
                self._server.stop()


class Store(System):
    """A node and its clients. With `options["remote"]` the clients act as if on another host: they map no memory."""

    def start(self) -> None:
        self._nodes: list[NodeProcess] = []
        self._clients: list[raykv.Client] = []
        remote = bool(self.setting.options.get("remote"))
        if self.setting.options.get("idle"):  # `special` or `fill` starts a node later
            self._faces: dict[str, Face] = {}
            return
        if self.setting.shared is None:
            storage = {"arena_nbytes": self.setting.store_nbytes}
            node = NodeProcess(self, "n", storage, host="elsewhere" if remote else None)
            self._nodes.append(node)
            address = node.wait()["address"]
            self.shared = {
                "address": address if remote else node.local_address,
                "secret": node.secret,
                "pid": node.process.pid,
            }
        else:
            self.shared = self.setting.shared
        one = self._client(copy_threads=1)
        self._faces = {"": Raykv(one), "general": General(one)}
        if remote:
            self._faces["matched"] = Matched(one)
        else:
            self._faces["posted"] = Posted(one)
            self._faces["two"] = Large(self._client(copy_threads=2))

    def _client(self, *, copy_threads: int) -> raykv.Client:
        address, secret = self.shared["address"], self.shared["secret"]
        made = raykv.connect(NAMESPACE, address=address, secret=secret, copy_threads=copy_threads)
        self._clients.append(made)
        return made

    def faces(self) -> dict[str, Face]:
        return self._faces

    def about(self) -> dict[str, Any]:
        return {"raykv": raykv.__version__, "raykv compiled part": native.loops is not None}

    # -- measurements of raykv only ---------------------------------------------------------------------------------

    def special(self, name: str, fields: dict[str, Any]) -> dict[str, Any]:
        if name == "startup":
            return self._startup(int(fields["arena_nbytes"]))
        assert name in ("freeze", "thaw")
        os.kill(self.shared["pid"], signal.SIGSTOP if name == "freeze" else signal.SIGCONT)
        return {}

    def _startup(self, arena_nbytes: int) -> dict[str, Any]:
        """Measure how long a new node takes to answer: from its first line of code, and from the end of its imports.

        A new client repeats the request until it gets an answer, as an engine that starts with the node would.
        """
        node = NodeProcess(self, "start", {"arena_nbytes": arena_nbytes})
        path = Path(node.local_address.removeprefix("unix:"))
        until_s = time.monotonic() + 30.0
        while True:
            try:
                if path.exists():
                    with raykv.connect(NAMESPACE, address=node.local_address) as client:
                        client.stats()
                        answered_s = time.monotonic()
                        break
            except raykv.RayKVError:
                pass
            if time.monotonic() > until_s:
                raise TimeoutError("the node does not answer")
            time.sleep(0.0005)
        said = node.wait()
        node.stop()
        return {
            "arena_gib": arena_nbytes / GIB,
            "first_line_s": answered_s - said["first_s"],
            "without_imports_s": answered_s - said["imported_s"],
        }

    def fill(self, keys: Keys, seconds: float) -> tuple[Face, int]:
        """Start a node, and enter the keys into its table from this process. The chunks have no bytes."""
        self._let_go()
        rows = len(keys)
        node = NodeProcess(self, f"rows{rows}", {"arena_nbytes": GIB, "max_chunks": rows})
        self._nodes = [node]
        table = Table(SharedMemory.attach(Path(node.wait()["table"]), writable=True, huge_pages="try"))
        if not table.populate_rows(rows):
            raise MemoryError("no room for the table")
        columns = table.columns
        columns.key_hi[:], columns.key_lo[:] = keys[:, 0], keys[:, 1]
        columns.nbytes[:] = 1
        columns.expires[:] = 0
        columns.state[:] = RowState.READY
        columns.generation[:] = 2
        table.rebuild_index(np.arange(rows, dtype=np.int32))
        client = raykv.connect(NAMESPACE, address=node.local_address)
        self._clients = [client]
        return Raykv(client), rows

    def stop(self) -> None:
        self._let_go()
        super().stop()

    def _let_go(self) -> None:
        for client in getattr(self, "_clients", []):
            client.close()
        for node in getattr(self, "_nodes", []):
            node.stop()
