"""Runs several Ray nodes on one machine, each with its own loopback address, for the demo and the tests."""

import ctypes
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 60.0
OBJECT_STORE_NBYTES = 100_000_000
PR_SET_PDEATHSIG = 1
SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",  # do not wait: the work on a node ends before the node stops
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "60",
}
"""Environment variables for Ray on a small, busy machine. `LocalRay` sets them in this process, for drivers and for the
nodes that it starts."""


class LocalRay:
    """Ray nodes as child processes. `close` leaves no process and no file of Ray behind.

    Attributes:
        address: Address of the Ray cluster, for `ray.init` and RAY_ADDRESS.
        directory: Ray's directory for sockets and logs; `close` removes it.
        log_directory: Directory for the output of each node.
    """

    def __init__(self, resources: Sequence[Mapping[str, float]], *, cpus: int = 4, log_directory: Path | None = None):
        """Start one node for each entry of `resources`, the first as head, and wait until all have joined.

        Args:
            resources: Custom Ray resources of each node. They decide which tasks and actors run on the node.
            cpus: Number of CPUs that each node reports to Ray, independent of the machine.
            log_directory: Directory for the output of each node. None: `directory`.

        Raises:
            RuntimeError: A node does not start. The message contains the end of its output.
        """
        require_token()
        self.directory = Path(tempfile.mkdtemp(prefix="raykv-ray-", dir="/tmp"))  # sockets need a short path
        self.log_directory = log_directory or self.directory
        self._processes: list[subprocess.Popen[bytes]] = []
        self._cpus = cpus
        self._environment = dict(SETTINGS)
        self._port = _free_port()
        self.address = f"127.0.0.2:{self._port}"
        self._environment["RAY_ADDRESS"] = self.address
        self._saved = {name: os.environ.get(name) for name in self._environment}
        os.environ.update(self._environment)
        try:
            for number, each in enumerate(resources):
                if number == 1:
                    self._wait_for_head()  # a node that starts before the head would retry for long
                self._launch(each)
            for number in range(len(resources)):
                self._wait_for_node(number)
        except BaseException:  # even an interrupt, because the caller gets no object to close
            self.close()
            raise

    def add_node(self, resources: Mapping[str, float]) -> int:
        """Start one more node and wait until it has joined. Returns its number."""
        number = self._launch(resources)
        self._wait_for_node(number)
        return number

    def _launch(self, resources: Mapping[str, float]) -> int:
        number = len(self._processes)
        ray = Path(sys.executable).with_name("ray")
        where = ["--head", f"--port={self._port}", f"--temp-dir={self.directory}", "--include-dashboard=false"]
        if number:
            where = [f"--address={self.address}"]
        command = [
            *(str(ray), "start", "--block", "--disable-usage-stats"),
            *where,
            f"--node-ip-address=127.0.0.{2 + number}",
            f"--num-cpus={self._cpus}",
            f"--object-store-memory={OBJECT_STORE_NBYTES}",
            "--resources=" + str(dict(resources)).replace("'", '"'),
        ]
        environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        environment["TMPDIR"] = str(self.directory)  # engines leave sockets and files there
        with self._log(number).open("wb") as output:
            process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # Ctrl-C must not reach the nodes, because `close` ends them in order
                preexec_fn=end_with_parent,
            )
        self._processes.append(process)
        return number

    def _wait_for_head(self) -> None:
        """Wait until the head's control store (GCS) listens."""
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while True:
            self._check(0, deadline_s)
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.2", self._port)) == 0:
                    return
            time.sleep(0.1)

    def _wait_for_node(self, number: int) -> None:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while b"Ray runtime started" not in self._log(number).read_bytes():
            self._check(number, deadline_s)
            time.sleep(0.1)

    def _check(self, number: int, deadline_s: float) -> None:
        if self._processes[number].poll() is not None or time.monotonic() > deadline_s:
            said = self._log(number).read_text(errors="replace")[-2000:]
            raise RuntimeError(f"Ray node {number} did not start:\n{said}")

    def _log(self, number: int) -> Path:
        return self.log_directory / f"ray-node-{number}.log"

    def stop_node(self, number: int) -> None:
        """End one node and all that runs on it."""
        process = self._processes[number]
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def close(self) -> None:
        """End all nodes, the head last."""
        for number in reversed(range(len(self._processes))):
            self.stop_node(number)
        self._processes.clear()
        for name, value in self._saved.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def end_with_parent() -> None:
    """Make the kernel end this process when its parent dies."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def require_token() -> None:
    """Make Ray require a token, so that other users of this machine cannot join. Call this before `import ray`.

    Raises:
        RuntimeError: Ray is imported already. Ray reads this setting only while it is imported.
    """
    if os.environ.get("RAY_AUTH_MODE") != "token":
        if "ray" in sys.modules:
            raise RuntimeError("set RAY_AUTH_MODE=token, or call require_token(), before importing Ray")
        os.environ["RAY_AUTH_MODE"] = "token"
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.2", 0))
        port: int = probe.getsockname()[1]
        return port
