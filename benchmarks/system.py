"""What a store looks like to the measurements. Standard library and numpy only: this runs in any environment."""

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
    """What a worker knows when it starts.

    Attributes:
        options: Of the system: which transport, how many threads.
        store_nbytes: Memory the store may use.
        scratch: A directory for sockets and logs, removed afterwards.
        shm: The same in a tmpfs.
        programs: Where unpacked system packages lie; empty when there are none.
        shared: From the worker that started the servers, for a second one that only connects; None in the first.
    """

    options: dict[str, Any]
    store_nbytes: int
    scratch: Path
    shm: Path
    programs: Path
    shared: dict[str, Any] | None = None

    def program(self, name: str) -> str:
        """A server's program: the unpacked one, else whatever the machine has by that name."""
        for folder in ("usr/bin", "usr/sbin"):
            found = self.programs / folder / name
            if found.exists():
                return str(found)
        return name

    def libraries(self) -> dict[str, str]:
        """An environment in which the unpacked libraries are found."""
        folders = [self.programs / folder / "x86_64-linux-gnu" for folder in ("usr/lib", "lib")]
        known = os.environ.get("LD_LIBRARY_PATH")
        return {**os.environ, "LD_LIBRARY_PATH": ":".join([*map(str, folders), *([known] if known else [])])}


class Face:
    """One way to call a store: a line of the tables.

    What a call needs is packed beforehand, outside the clock. Every call raises when it finds an object missing.
    """

    def supports(self, workload: Workload) -> bool:
        """Whether this line has that figure."""
        return True

    def key(self, name: str) -> Any:
        """A name as `get_one`, `put_one` and `exists_one` want it."""
        return name

    def keys(self, names: Sequence[str]) -> Any:
        """Names as the batch calls want them."""
        return [self.key(name) for name in names]

    def key_of(self, raw: bytes) -> Any:
        """A key of 16 bytes as `exists_one` wants it: as text of 22 characters, if it must be text."""
        return self.key(base64.urlsafe_b64encode(raw)[:22].decode())

    def keys_of(self, keys: Keys) -> Any:
        """Such keys as `put` and `exists` want them."""
        return [self.key_of(key.tobytes()) for key in keys]

    def buffer(self, array: Bytes) -> Any:
        """An object's bytes as `get_one` and `put_one` want them."""
        return memoryview(array)

    def buffers(self, arrays: Sequence[Bytes]) -> Any:
        """Objects' bytes as the batch calls want them."""
        return [self.buffer(array) for array in arrays]

    def get_one(self, key: Any, into: Any) -> None:
        """Read an object into memory."""
        raise NotImplementedError

    def get(self, keys: Any, into: Any) -> None:
        """Read a batch."""
        raise NotImplementedError

    def put_one(self, key: Any, value: Any) -> None:
        """Store an object."""
        raise NotImplementedError

    def put(self, keys: Any, values: Any) -> None:
        """Store a batch."""
        raise NotImplementedError

    def exists_one(self, key: Any) -> None:
        """Look a key up."""
        raise NotImplementedError

    def exists(self, keys: Any) -> None:
        """Look a batch up."""
        raise NotImplementedError

    def delete(self, names: Sequence[str]) -> None:
        """Make room again, outside the clock."""
        raise NotImplementedError

    def try_get_one(self, key: Any, into: Any) -> bool:
        """As `get_one`, for the mixed run, where objects get evicted."""
        try:
            self.get_one(key, into)
        except MissingError:
            return False
        return True

    def settle(self) -> None:
        """Wait until all that was put is there for everybody."""


class MissingError(Exception):
    """An object is not there."""


class System:
    """A store: its servers and its lines.

    Attributes:
        shared: What a second worker needs to connect to the same servers.
    """

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.shared: dict[str, Any] = {}
        self._servers: list[Server] = []

    def start(self) -> None:
        """Start servers (unless `setting.shared` leads to some), and connect."""
        raise NotImplementedError

    def faces(self) -> Mapping[str, Face]:
        """Its lines by name."""
        raise NotImplementedError

    def allocate(self, nbytes: int) -> Bytes:
        """Memory for objects, touched, as the client likes it best."""
        memory = np.empty(nbytes, np.uint8)
        memory[:] = 0
        return memory

    def fill(self, keys: Keys, seconds: float) -> tuple[Face, int]:
        """Store small objects under these keys, or under the first ones, as many as `seconds` allow for.

        Returns:
            The line to ask, and how many there are.
        """
        face, until_s = next(iter(self.faces().values())), time.monotonic() + seconds
        memory = self.allocate(LOOKUP_BATCH * LOOKUP_NBYTES)
        values = face.buffers(np.split(memory, LOOKUP_BATCH))
        filled = 0
        gc.disable()  # it would look at every object of a store in this process again and again
        while filled < len(keys) and time.monotonic() < until_s:
            face.put(face.keys_of(keys[filled : filled + LOOKUP_BATCH]), values)
            filled += LOOKUP_BATCH
        gc.enable()
        face.settle()
        return face, filled

    def about(self) -> dict[str, Any]:
        """Versions."""
        return {}

    def special(self, name: str, fields: dict[str, Any]) -> dict[str, Any]:
        """Measurements that only this system has."""
        raise NotImplementedError

    def server(self, name: str, command: Sequence[str], **options: Any) -> "Server":
        """Start a process that ends with this one."""
        made = Server(command, self.setting.scratch / f"{name}.log", **options)
        self._servers.append(made)
        return made

    def stop(self) -> None:
        """End the servers."""
        for each in reversed(self._servers):
            each.stop()


class Server:
    """A process of ours. It dies when we do."""

    def __init__(self, command: Sequence[str], log: Path, **options: Any) -> None:
        self._log = log
        with log.open("ab") as output:
            options = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output, **options}
            self.process = subprocess.Popen(command, preexec_fn=die_with_parent, **options)

    def wait_for(self, ready: Callable[[], bool], timeout_s: float = 30.0) -> None:
        """Wait until it answers.

        Raises:
            RuntimeError: It ended, or does not.
        """
        until_s = time.monotonic() + timeout_s
        while not ready():
            if self.process.poll() is not None or time.monotonic() > until_s:
                raise RuntimeError(f"{self.process.args} does not answer: {self._log.read_text()[-500:]}")
            time.sleep(0.02)

    def stop(self) -> None:
        """Ask it to end, and see to it."""
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
    """A TCP port that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def answers(port: int) -> bool:
    """Whether somebody listens there."""
    try:
        socket.create_connection(("127.0.0.1", port), 0.2).close()
    except OSError:
        return False
    return True
