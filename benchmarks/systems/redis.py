"""Redis, over a Unix socket or TCP. This client receives values directly into the caller's memory."""

import subprocess
from collections.abc import Sequence
from typing import Any

from benchmarks.system import Face, MissingError, System, answers, free_port
from benchmarks.systems.wire import Connection
from benchmarks.workloads import GIB, KIB

ONE_BY_ONE_NBYTES = 256 * KIB
"""Objects of at least this size are read by one GET each. MGET is three times slower: it first gathers all values."""


class Redis(Face):
    """The client, with one connection."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def key(self, name: str) -> bytes:
        return name.encode()

    def key_of(self, raw: bytes) -> bytes:
        return raw

    def get_one(self, key: bytes, into: memoryview) -> None:
        self._connection.send(b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(key), key))
        self._connection.receive_value(b"$%d\r\n" % len(into), into, b"\r\n")

    def get(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> None:
        if len(into[0]) >= ONE_BY_ONE_NBYTES:
            for key, target in zip(keys, into, strict=True):
                self.get_one(key, target)
            return
        self._connection.send(command([b"MGET", *keys]))
        self._connection.expect(b"*%d\r\n" % len(keys))
        self._connection.receive_values([b"$%d\r\n" % len(target) for target in into], into, b"\r\n")

    def put_one(self, key: bytes, value: memoryview) -> None:
        self._connection.send_parts(set_command(key, value))
        self._connection.expect(b"+OK\r\n")

    def put(self, keys: Sequence[bytes], values: Sequence[memoryview]) -> None:
        parts: list[Any] = []
        for key, value in zip(keys, values, strict=True):
            parts += set_command(key, value)
        self._connection.send_parts(parts)
        self._connection.expect(b"+OK\r\n" * len(keys))

    def exists_one(self, key: bytes) -> None:
        self._connection.send(b"*2\r\n$6\r\nEXISTS\r\n$%d\r\n%b\r\n" % (len(key), key))
        self._connection.expect(b":1\r\n")

    def exists(self, keys: Sequence[bytes]) -> None:
        # One command for all keys is 1.5 times as fast as one per key. The answer is the number of keys found.
        self._connection.send(command([b"EXISTS", *keys]))
        self._connection.expect(b":%d\r\n" % len(keys))

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            self._connection.send(command([b"DEL", name.encode()]))
            self._connection.expect(b":1\r\n")


def command(words: Sequence[bytes]) -> bytes:
    """Encode a request."""
    return b"".join([b"*%d\r\n" % len(words), *[b"$%d\r\n%b\r\n" % (len(word), word) for word in words]])


def set_command(key: bytes, value: memoryview) -> list[Any]:
    """Encode a SET request, in parts, so that the value is not copied."""
    return [b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(key), key, len(value)), value, b"\r\n"]


class Store(System):
    """A server without persistence. With `options["tcp"]` the client uses TCP.

    `options["small"]` turns on huge pages, which are faster for very many small objects.
    """

    def start(self) -> None:
        program = self.setting.program("redis-server")
        self._program = program
        shared = self.setting.shared
        if shared is None:
            path, port = str(self.setting.scratch / "redis.sock"), free_port()
            arguments = {
                "bind": "127.0.0.1",
                "port": str(port),
                "unixsocket": path,
                "save": "",
                "appendonly": "no",
                "maxmemory": str(self.setting.store_nbytes),
                "maxmemory-policy": "allkeys-lru",
                "dir": str(self.setting.scratch),
                "io-threads": "1",
                "protected-mode": "no",
            }
            environment = self.setting.libraries()
            if self.setting.options.get("small"):
                arguments["disable-thp"] = "no"
                environment["MALLOC_CONF"] = "thp:always"
            words = [word for name, value in arguments.items() for word in (f"--{name}", value)]
            server = self.server("redis", [program, *words], env=environment)
            server.wait_for(lambda: answers(port))
            shared = {"path": path, "port": port}
        self.shared = shared
        tcp = self.setting.options.get("tcp")
        self._connection = Connection(("127.0.0.1", shared["port"]) if tcp else shared["path"], MissingError)

    def faces(self) -> dict[str, Face]:
        return {"": Redis(self._connection)}

    def about(self) -> dict[str, Any]:
        said = subprocess.run(
            [self._program, "--version"], capture_output=True, text=True, env=self.setting.libraries(), check=False
        ).stdout
        version = next((word[2:] for word in said.split() if word.startswith("v=")), said.strip())
        return {"redis-server": version, "maxmemory_gib": self.setting.store_nbytes / GIB}
