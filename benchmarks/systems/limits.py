"""The limits of the machine: copies of the objects by one and two threads, a dict, and plain TCP sockets."""

import mmap
import os
import queue
import socket
import struct
import sys
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.system import Face, MissingError, System, answers, free_port
from benchmarks.workloads import KIB, LOOKUP_BATCH, MIB, OBJECTS, Bytes, Workload


class Memory(Face):
    """Objects in one block of memory, private or mapped. One thread copies them one after another.

    Attributes:
        memory: The block. Its first part has the stored objects. The rest is the space for puts.
        taken: Number of bytes in the first part.
    """

    def __init__(self, memory: Bytes) -> None:
        self.memory = memory
        self.taken = 0
        self._objects: dict[str, Bytes] = {}

    def store(self, name: str, value: Bytes) -> None:
        """Store a copy of an object."""
        self._objects[name] = place = self.memory[self.taken : self.taken + len(value)]
        np.copyto(place, value)
        self.taken += len(value)

    def supports(self, workload: Workload) -> bool:
        return workload.operation != "exists"

    def key(self, name: str) -> Bytes:
        """Return the memory of a stored object. For any other name, return a place for a put; puts reuse the places."""
        if name in self._objects:
            return self._objects[name]
        nbytes, number = (int(word) for word in name[1:].split("-"))
        start = self.taken + number % ((len(self.memory) - self.taken) // nbytes) * nbytes
        return self.memory[start : start + nbytes]

    def buffer(self, array: Bytes) -> Bytes:
        return array

    def get_one(self, key: Bytes, into: Bytes) -> None:
        np.copyto(into, key)

    def get(self, keys: Sequence[Bytes], into: Sequence[Bytes]) -> None:
        for target, source in zip(into, keys, strict=True):
            np.copyto(target, source)

    def put_one(self, key: Bytes, value: Bytes) -> None:
        np.copyto(key, value)

    def put(self, keys: Sequence[Bytes], values: Sequence[Bytes]) -> None:
        for target, source in zip(keys, values, strict=True):
            np.copyto(target, source)

    def delete(self, names: Sequence[str]) -> None:
        pass


class TwoThreads(Face):
    """Copies like `Memory`, by two threads: each copies half of a batch."""

    def __init__(self, one: Memory) -> None:
        self._one = one
        self._work: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[None] = queue.SimpleQueue()
        threading.Thread(target=self._help, daemon=True).start()

    def supports(self, workload: Workload) -> bool:
        return workload.operation != "exists" and workload.batch > 1 and workload.nbytes >= MIB

    def key(self, name: str) -> Any:
        return self._one.key(name)

    def buffer(self, array: Bytes) -> Bytes:
        return array

    def get_one(self, key: Any, into: Any) -> None:
        self._one.get_one(key, into)

    def get(self, keys: Sequence[Bytes], into: Sequence[Bytes]) -> None:
        self._both(self._one.get, keys, into)

    def put(self, keys: Sequence[str], values: Sequence[Bytes]) -> None:
        self._both(self._one.put, keys, values)

    def _both(self, function: Any, keys: Sequence[Any], arrays: Sequence[Bytes]) -> None:
        half = len(keys) // 2
        self._work.put((function, keys[half:], arrays[half:]))
        function(keys[:half], arrays[:half])
        self._done.get()

    def _help(self) -> None:
        while (work := self._work.get()) is not None:
            function, keys, arrays = work
            function(keys, arrays)
            self._done.put(None)

    def delete(self, names: Sequence[str]) -> None:
        pass


class Dict(Face):
    """A dict in this process. Objects are copied into slices of a memoryview: the fastest way to call memmove."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._places: dict[str, memoryview] = {}

    def supports(self, workload: Workload) -> bool:
        return workload.batch in (1, LOOKUP_BATCH)

    def key(self, name: str) -> str:
        if name not in self._places:
            self._places[name] = memoryview(self._memory.key(name))
        return name

    def get_one(self, key: str, into: memoryview) -> None:
        into[:] = self._places[key]

    def put_one(self, key: str, value: memoryview) -> None:
        self._places[key][:] = value

    def exists_one(self, key: str) -> None:
        if key not in self._places:
            raise MissingError(key)

    def exists(self, keys: Sequence[str]) -> None:
        places = self._places
        if False in [key in places for key in keys]:
            raise MissingError

    def delete(self, names: Sequence[str]) -> None:
        pass


PLACE = struct.Struct("<QQ")
"""Offset and length of one object in the file. A request is a sequence of such pairs."""
REQUEST_NBYTES = 4096
"""Maximum length of a request. One `recv` receives a whole request, because requests are so small."""
GATHERED_NBYTES = 256 * KIB
"""Objects smaller than this are transferred in batches, by one system call each. Larger ones are transferred singly."""


class Sockets(Face):
    """A client of the process that runs `send_parts`. It requests and receives parts of that process's mapped file."""

    def __init__(self, port: int, places: dict[str, tuple[int, int]]) -> None:
        self._places = places
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def supports(self, workload: Workload) -> bool:
        return workload.operation == "get"

    def key(self, name: str) -> bytes:
        return PLACE.pack(*self._places[name])

    def keys(self, names: Sequence[str]) -> bytes:
        return b"".join(map(self.key, names))

    def get_one(self, key: bytes, into: memoryview) -> None:
        self._socket.send(key)
        receive(self._socket, [into])

    def get(self, keys: bytes, into: Sequence[memoryview]) -> None:
        self._socket.send(keys)
        for targets in [[target] for target in into] if len(into[0]) >= GATHERED_NBYTES else [into]:
            receive(self._socket, targets)

    def delete(self, names: Sequence[str]) -> None:
        pass


def receive(connection: socket.socket, into: Sequence[memoryview]) -> None:
    """Fill the buffers with one system call."""
    wanted = sum(map(len, into))
    got = connection.recvmsg_into(into, 0, socket.MSG_WAITALL)[0]
    if got != wanted:
        raise ConnectionError(f"{got} of {wanted} bytes")


def send_parts(path: str, port: int) -> None:
    """Run the server process: answer each request with the requested parts of the file at `path`."""
    arena = memoryview(mmap.mmap(os.open(path, os.O_RDWR), 0))
    listener = socket.create_server(("127.0.0.1", port))
    while True:
        connection, _ = listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=_answer, args=(connection, arena), daemon=True).start()


def _answer(connection: socket.socket, arena: memoryview) -> None:
    while request := connection.recv(REQUEST_NBYTES):
        parts = [arena[start : start + nbytes] for start, nbytes in PLACE.iter_unpack(request)]
        if len(parts) > 1 and len(parts[0]) < GATHERED_NBYTES:
            sent = connection.sendmsg(parts)
            assert sent == sum(map(len, parts)), "a blocking socket sends all of it"
        else:
            for part in parts:
                connection.sendall(part)


class Store(System):
    """The limits: with `options["remote"]` the sockets, otherwise the copies."""

    def start(self) -> None:
        nbytes = sum(size * count for size, count in OBJECTS.items()) + 512 * MIB
        self._path = self.setting.shm / "limits-arena"
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        os.posix_fallocate(fd, 0, nbytes)
        self._mapped = Memory(np.frombuffer(mmap.mmap(fd, nbytes), np.uint8))
        self._mapped.memory[::4096] = 0
        self._places: dict[str, tuple[int, int]] = {}
        self._private: Memory | None = None
        if self.setting.options.get("remote"):
            port = free_port()
            command = [sys.executable, "-m", "benchmarks.systems.limits", str(self._path), str(port)]
            self.server("sockets", command).wait_for(lambda: answers(port))
            self._faces: dict[str, Face] = {"sockets": Sockets(port, self._places)}
        else:
            private = self._private = Memory(self.allocate(nbytes))
            self._faces = {
                "memcpy": private,
                "memcpy 2": TwoThreads(private),
                "mapped memcpy": self._mapped,
                "dict": Dict(private),
                "mapped dict": Dict(self._mapped),
            }

    def faces(self) -> dict[str, Face]:
        return {"loader": Loader(self), **self._faces}

    def keep(self, name: str, value: Bytes) -> None:
        """Store an object so that all lines can read it."""
        if self._private is None:
            self._places[name] = (self._mapped.taken, len(value))
        else:
            self._private.store(name, value)
        self._mapped.store(name, value)


class Loader(Face):
    """Stores the objects at the start, for all lines. It is not a line itself."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def supports(self, workload: Workload) -> bool:
        return False

    def buffer(self, array: Bytes) -> Bytes:
        return array

    def put(self, keys: Sequence[str], values: Sequence[Bytes]) -> None:
        for name, value in zip(keys, values, strict=True):
            self._store.keep(name, value)

    def put_one(self, key: str, value: Bytes) -> None:
        self._store.keep(key, value)


if __name__ == "__main__":
    send_parts(sys.argv[1], int(sys.argv[2]))
