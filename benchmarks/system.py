"""The interface of a store to the benchmarks. Needs only the standard library and numpy, to run in any environment."""

import base64
import ctypes
import gc
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.workloads import LOOKUP_BATCH, LOOKUP_NBYTES, Bytes, Keys, Workload

PR_SET_PDEATHSIG = 1
STOP_S = 10.0


@dataclass(frozen=True, slots=True)
class Setting:
    """What a worker gets when it starts.

    Attributes:
        options: Options of the store, such as its transport.
        store_nbytes: Memory that the store may use.
        scratch: A directory for sockets and logs. It is removed afterwards.
        shm: A directory in a tmpfs. It is removed afterwards.
        programs: The directory of unpacked Debian packages. It may be missing.
        shared: None in the worker that starts the servers. A second worker, which only connects to them, gets
            `System.shared` of the first.
    """

    options: dict[str, Any]
    store_nbytes: int
    scratch: Path
    shm: Path
    programs: Path
    shared: dict[str, Any] | None = None

    def program(self, name: str) -> str:
        """Return the path of the unpacked program. If there is none, return `name`, so that PATH is searched."""
        for folder in ("usr/bin", "usr/sbin"):
            found = self.programs / folder / name
            if found.exists():
                return str(found)
        return name

    def libraries(self) -> dict[str, str]:
        """Return environment variables with which a program finds the unpacked libraries."""
        folders = [self.programs / folder / "x86_64-linux-gnu" for folder in ("usr/lib", "lib")]
        known = os.environ.get("LD_LIBRARY_PATH")
        return {**os.environ, "LD_LIBRARY_PATH": ":".join([*map(str, folders), *([known] if known else [])])}


class Face:
    """One way to call a store. Each way is one line of the printed tables.

    The methods from `key` to `buffers` convert arguments. Their time is not measured. A read or a lookup raises an
    exception if an object is missing. Only `try_get_one` returns False instead.
    """

    def supports(self, workload: Workload) -> bool:
        """Return whether this line measures the workload."""
        return True

    def key(self, name: str) -> Any:
        """Convert a name to the argument of `get_one`, `put_one` and `exists_one`."""
        return name

    def keys(self, names: Sequence[str]) -> Any:
        """Convert names to the argument of the batch calls."""
        return [self.key(name) for name in names]

    def key_of(self, raw: bytes) -> Any:
        """Convert a key of 16 bytes to the argument of `exists_one`. By default it becomes a text of 22 characters."""
        return self.key(base64.urlsafe_b64encode(raw)[:22].decode())

    def keys_of(self, keys: Keys) -> Any:
        """Convert keys of 16 bytes to the argument of `put` and `exists`."""
        return [self.key_of(key.tobytes()) for key in keys]

    def buffer(self, array: Bytes) -> Any:
        """Convert an object's memory to the argument of `get_one` and `put_one`."""
        return memoryview(array)

    def buffers(self, arrays: Sequence[Bytes]) -> Any:
        """Convert the memory of objects to the argument of the batch calls."""
        return [self.buffer(array) for array in arrays]

    def get_one(self, key: Any, into: Any) -> None:
        """Read an object into memory."""
        raise NotImplementedError

    def get(self, keys: Any, into: Any) -> None:
        """Read a batch of objects into memory."""
        raise NotImplementedError

    def put_one(self, key: Any, value: Any) -> None:
        """Store an object."""
        raise NotImplementedError

    def put(self, keys: Any, values: Any) -> None:
        """Store a batch of objects."""
        raise NotImplementedError

    def exists_one(self, key: Any) -> None:
        """Look up a key."""
        raise NotImplementedError

    def exists(self, keys: Any) -> None:
        """Look up a batch of keys."""
        raise NotImplementedError

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects to free their space, outside the measured time."""
        raise NotImplementedError

    def try_get_one(self, key: Any, into: Any) -> bool:
        """Call `get_one`. Return False if the object is missing: the mixed run evicts objects."""
        try:
            self.get_one(key, into)
        except MissingError:
            return False
        return True

    def settle(self) -> None:
        """Wait until all clients can read all objects that were put."""


class MissingError(Exception):
    """The store does not have an object, or has no space for it."""


class System:
    """A store: its servers, and the ways to call it.

    Attributes:
        shared: The addresses and secrets with which a second worker connects to the same servers.
    """

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.shared: dict[str, Any] = {}
        self._servers: list[Server] = []

    def start(self) -> None:
        """Start the servers, or use those of `setting.shared`, and connect."""
        raise NotImplementedError

    def faces(self) -> Mapping[str, Face]:
        """Return the ways to call the store, by name (`Row.face`)."""
        raise NotImplementedError

    def allocate(self, nbytes: int) -> Bytes:
        """Allocate the kind of memory from which the client transfers objects best. All pages are populated."""
        memory = np.empty(nbytes, np.uint8)
        memory[:] = 0
        return memory

    def fill(self, keys: Keys, seconds: float) -> tuple[Face, int]:
        """Store small objects under these keys, in order, for at most about `seconds`.

        Returns:
            The `Face` for the lookups, and the number of keys stored.
        """
        face, until_s = next(iter(self.faces().values())), time.monotonic() + seconds
        memory = self.allocate(LOOKUP_BATCH * LOOKUP_NBYTES)
        values = face.buffers(np.split(memory, LOOKUP_BATCH))
        filled = 0
        gc.disable()  # a collection would visit all objects of a store that is in this process
        while filled < len(keys) and time.monotonic() < until_s:
            face.put(face.keys_of(keys[filled : filled + LOOKUP_BATCH]), values)
            filled += LOOKUP_BATCH
        gc.enable()
        face.settle()
        return face, filled

    def about(self) -> dict[str, Any]:
        """Return the versions of the store's software, by name."""
        return {}

    def special(self, name: str, fields: dict[str, Any]) -> dict[str, Any]:
        """Run a measurement or an action that only this store has."""
        raise NotImplementedError

    def server(self, name: str, command: Sequence[str], **options: Any) -> "Server":
        """Start a server process. It ends when this process ends."""
        made = Server(command, self.setting.scratch / f"{name}.log", **options)
        self._servers.append(made)
        return made

    def stop(self) -> None:
        """Stop the servers."""
        for each in reversed(self._servers):
            each.stop()


class Server:
    """A server process. The kernel kills it when this process dies."""

    def __init__(self, command: Sequence[str], log: Path, **options: Any) -> None:
        self._log = log
        with log.open("ab") as output:
            options = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output, **options}
            self.process = subprocess.Popen(command, preexec_fn=die_with_parent, **options)

    def wait_for(self, ready: Callable[[], bool], timeout_s: float = 30.0) -> None:
        """Wait until `ready` returns True.

        Raises:
            RuntimeError: The server has ended, or is not ready in time.
        """
        until_s = time.monotonic() + timeout_s
        while not ready():
            if self.process.poll() is not None or time.monotonic() > until_s:
                raise RuntimeError(f"{self.process.args} does not answer: {self._log.read_text()[-500:]}")
            time.sleep(0.02)

    def stop(self) -> None:
        """Terminate the server. Kill it if it has not ended after STOP_S."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def free_port() -> int:
    """Return a TCP port on which no process listens now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def answers(port: int) -> bool:
    """Return whether a process listens on this TCP port."""
    try:
        socket.create_connection(("127.0.0.1", port), 0.2).close()
    except OSError:
        return False
    return True
