"""memcached, over a Unix socket or TCP. This client uses the meta protocol, and fills the caller's buffers directly."""

import subprocess
from collections.abc import Sequence
from typing import Any

from benchmarks.system import Face, MissingError, System, answers, free_port
from benchmarks.systems.wire import Connection
from benchmarks.workloads import MIB


class Memcached(Face):
    """The client, with one connection."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def key(self, name: str) -> bytes:
        return name.encode()

    def get_one(self, key: bytes, into: memoryview) -> None:
        self._connection.send(b"mg %b v\r\n" % key)
        self._connection.receive_value(b"VA %d\r\n" % len(into), into, b"\r\n")

    def get(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> None:
        self._connection.send(b"".join([b"mg %b v\r\n" % key for key in keys]))
        self._connection.receive_values([b"VA %d\r\n" % len(target) for target in into], into, b"\r\n")

    def put_one(self, key: bytes, value: memoryview) -> None:
        self._connection.send_parts([b"ms %b %d\r\n" % (key, len(value)), value, b"\r\n"])
        self._connection.expect(b"HD\r\n")

    def put(self, keys: Sequence[bytes], values: Sequence[memoryview]) -> None:
        parts: list[Any] = []
        for key, value in zip(keys, values, strict=True):
            parts += [b"ms %b %d\r\n" % (key, len(value)), value, b"\r\n"]
        self._connection.send_parts(parts)
        self._connection.expect(b"HD\r\n" * len(keys))

    def exists_one(self, key: bytes) -> None:
        self._connection.send(b"mg %b\r\n" % key)
        self._connection.expect(b"HD\r\n")

    def exists(self, keys: Sequence[bytes]) -> None:
        self._connection.send(b"".join([b"mg %b\r\n" % key for key in keys]))
        self._connection.expect(b"HD\r\n" * len(keys))

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            self._connection.send(b"md %b\r\n" % name.encode())
            self._connection.expect(b"HD\r\n")


class Store(System):
    """A server with items of up to 8 MiB. With `options["tcp"]` it listens on TCP.

    `options["small"]` sets what is fastest for very many small objects: huge pages, no LRU threads, and a hash table
    that is large from the start. So the table does not grow during the measurement.
    """

    def start(self) -> None:
        self._program = self.setting.program("memcached")
        shared, tcp = self.setting.shared, self.setting.options.get("tcp")
        if shared is None:
            path, port = self.setting.scratch / "memcached.sock", free_port()
            where = ["-l", "127.0.0.1", "-p", str(port)] if tcp else ["-s", str(path)]
            memory = ["-m", str(self.setting.store_nbytes // MIB), "-I", "8m", "-R", "200"]
            if self.setting.options.get("small"):
                memory += ["-L", "-o", "hashpower=21,no_lru_crawler,no_lru_maintainer"]
            command = [self._program, "-u", "root", "-t", "2", "-U", "0", *memory, *where]
            server = self.server("memcached", command, env=self.setting.libraries())
            server.wait_for((lambda: answers(port)) if tcp else path.exists)
            shared = {"path": str(path), "port": port}
        self.shared = shared
        self._connection = Connection(("127.0.0.1", shared["port"]) if tcp else shared["path"], MissingError)

    def faces(self) -> dict[str, Face]:
        return {"": Memcached(self._connection)}

    def about(self) -> dict[str, Any]:
        command = [self._program, "--version"]
        said = subprocess.run(command, capture_output=True, text=True, env=self.setting.libraries(), check=False)
        return {"memcached": said.stdout.strip().removeprefix("memcached ")}
