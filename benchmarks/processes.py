"""Starts the worker processes, sends them requests, and stops them."""

import json
import os
import select
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.environments import PROGRAMS, ROOT, Environment

ANSWER_S = 180.0
END_S = 20.0


@dataclass(frozen=True, slots=True)
class Spec:
    """A worker to start.

    Attributes:
        name: Name of the worker in `Row.worker`, logs and errors.
        module: Name of the store's module in benchmarks.systems.
        environment: Name of the environment in which the worker runs; "" for the environment of this process.
        options: Options of the store; see `benchmarks.system.Setting`.
    """

    name: str
    module: str
    environment: str = ""
    options: dict[str, Any] = field(default_factory=dict)


class WorkerError(Exception):
    """A worker could not fulfil a request. The message says why."""


class Worker:
    """A process that measures one store."""

    def __init__(
        self,
        spec: Spec,
        environment: Environment,
        *,
        scratch: Path,
        shm: Path,
        store_nbytes: int,
        shared: dict[str, Any] | None = None,
        tag: str = "",
    ) -> None:
        """Start the process. This does not wait until the worker is ready, so several workers can start at once.

        Args:
            scratch, shm: Directories in which the worker's own directories are made.
            shared: `System.shared` of the worker whose servers this worker uses. None if this worker starts servers.
            tag: Text that makes the name of the worker's directories unique.
        """
        self.spec = spec
        name = f"{spec.name}{tag}".replace(" ", "-")
        folder, memory = scratch / name, shm / name
        for each in (folder, memory):
            each.mkdir()
        self._log = folder / "worker.log"
        fields = {
            "module": spec.module,
            "options": spec.options,
            "store_nbytes": store_nbytes,
            "scratch": str(folder),
            "shm": str(memory),
            "programs": str(PROGRAMS),
            "shared": shared,
        }
        libraries = os.pathsep.join(str(PROGRAMS / part / "x86_64-linux-gnu") for part in ("usr/lib", "lib"))
        known = {**os.environ, "PYTHONUNBUFFERED": "1"}
        if spec.environment == "mooncake":
            known["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, [libraries, os.environ.get("LD_LIBRARY_PATH")]))
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [str(environment.python), "-m", "benchmarks.worker", json.dumps(fields)],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=known,
                start_new_session=True,
            )
        self._answers = b""
        self.failure = ""

    def ask(self, do: str, **fields: Any) -> dict[str, Any]:
        """Send a request and return the answer.

        Raises:
            WorkerError: The request failed, or the worker has ended or takes too long. In the last two cases the worker
                is stopped.
        """
        self.tell(do, **fields)
        return self.answer()

    def tell(self, do: str, **fields: Any) -> None:
        """Send a request. Call `answer` later to get its answer."""
        if self.failure:
            raise WorkerError(self.failure)
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **fields}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self._fail("ended")

    def answer(self, timeout_s: float = ANSWER_S) -> dict[str, Any]:
        """Wait for the answer to the oldest unanswered request, and return it.

        Raises:
            WorkerError: See `ask`.
        """
        assert self._process.stdout is not None
        until_s = time.monotonic() + timeout_s
        while b"\n" not in self._answers:
            left_s = until_s - time.monotonic()
            if left_s <= 0 or not select.select([self._process.stdout], [], [], left_s)[0]:
                self._fail(f"no answer within {timeout_s:.0f} s")
            part = os.read(self._process.stdout.fileno(), 1 << 16)
            if not part:
                self._fail("ended")
            self._answers += part
        line, _, self._answers = self._answers.partition(b"\n")
        said: dict[str, Any] = json.loads(line)
        if "error" in said:
            raise WorkerError(said["error"])
        return said

    def _fail(self, what: str) -> None:
        lines = [line for line in self._log.read_text(errors="replace").strip().splitlines() if line.strip()]
        self.failure = f"{what}: {lines[-1][:300] if lines else 'it said nothing'}"
        self.stop()
        raise WorkerError(self.failure)

    def stop(self) -> None:
        """Ask the worker to stop its servers and to end. Then kill its process group."""
        if self._process.poll() is None:
            try:
                assert self._process.stdin is not None
                self._process.stdin.write(b'{"do": "stop"}\n')
                self._process.stdin.close()
            except OSError:
                pass
            try:
                self._process.wait(0.1 if self.failure else END_S)
            except subprocess.TimeoutExpired:
                self._process.terminate()
                try:
                    self._process.wait(END_S)
                except subprocess.TimeoutExpired:
                    pass
        try:
            os.killpg(self._process.pid, signal.SIGKILL)  # only the worker and its children are in this group
        except ProcessLookupError:
            pass
        self._process.wait()
