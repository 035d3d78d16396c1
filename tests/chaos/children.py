"""Child processes that answer commands: one line of JSON each way."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

ANSWER_S = 30.0


class Gone(Exception):
    """The child has ended, or did not answer in time."""


class Child:
    """A child process that runs `serve`."""

    def __init__(self, command: Sequence[str], module: str, **fields: Any) -> None:
        """Start `module` with `fields`. `command` comes before the interpreter."""
        self.name = f"{module} {fields.get('name', '')}"
        arguments = [*command, sys.executable, "-m", module, json.dumps(fields)]
        self._process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        self._buffer = b""

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def send(self, command: str, **fields: Any) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps([command, fields]).encode() + b"\n")
        except OSError as error:
            raise Gone(f"{self.name} has ended") from error

    def receive(self, timeout_s: float = ANSWER_S) -> Any:
        assert self._process.stdout is not None
        until_s = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            left_s = max(0.0, until_s - time.monotonic())
            if not select.select([self._process.stdout], [], [], left_s)[0]:
                raise Gone(f"{self.name} does not answer within {timeout_s} s")
            some = os.read(self._process.stdout.fileno(), 1 << 16)
            if not some:
                raise Gone(f"{self.name} has ended ({self._process.poll()})")
            self._buffer += some
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)

    def has_answer(self) -> bool:
        """Return whether `receive` would not wait."""
        return bool(self._buffer) or bool(select.select([self._process.stdout], [], [], 0.0)[0])

    def ask(self, command: str, **fields: Any) -> Any:
        self.send(command, **fields)
        return self.receive()

    def wait(self) -> None:
        """Wait until the process ends by itself."""
        self._process.wait(ANSWER_S)

    def kill(self) -> None:
        """Kill the process, and wait for its end."""
        self._process.send_signal(signal.SIGCONT)
        self._process.kill()
        self.close()

    def close(self) -> None:
        """End the process by closing its input, and wait for its end."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(ANSWER_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


def ask_all(children: Mapping[str, Child], command: str, **fields: Any) -> dict[str, Any]:
    """Ask several children at the same time."""
    for child in children.values():
        child.send(command, **fields)
    return {name: child.receive() for name, child in children.items()}


def fields_of_child() -> dict[str, Any]:
    """Return the fields that the parent gave to this process."""
    fields: dict[str, Any] = json.loads(sys.argv[1])
    return fields


def tell(answer: Any) -> None:
    """Send a line to the parent."""
    os.write(1, json.dumps(answer).encode() + b"\n")


def serve(commands: Mapping[str, Callable[..., Any]], lines: Iterable[str] = sys.stdin) -> None:
    """Answer the parent's commands until the parent closes the input."""
    tell("ready")
    for line in lines:
        command, fields = json.loads(line)
        tell(commands[command](**fields))
