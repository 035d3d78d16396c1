"""What the two kinds of virtual machines share: a shell script that runs a command, and its exit status."""

import os
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.rdma.packages import Unavailable


def write_script(shared: Path, template: str, command: Sequence[str], setup: str, variables: Mapping[str, str]) -> None:
    """Write the file `run`, which the guest executes. The command's working directory is that of this process.

    Args:
        shared: The directory that the guest sees as /vm.
        template: Shell code with the fields `environment`, `directory`, `setup` and `command`.
        command: The command.
        setup: A line of shell to run before it.
        variables: Environment variables for both.
    """
    script = template.format(
        environment=" ".join(f"{key}={shlex.quote(value)}" for key, value in variables.items()),
        directory=shlex.quote(os.getcwd()),
        setup=setup,
        command=shlex.join(command),
    )
    (shared / "run").write_text(script)


def boot(machine: Sequence[str], shared: Path, *, environment: Mapping[str, str], timeout_s: float) -> int:
    """Run a machine until it ends. Returns the exit status of its command. Its console goes to stdout.

    Raises:
        Unavailable: The guest did not run its command, or did not end in time.
    """
    try:
        subprocess.run(machine, stdin=subprocess.DEVNULL, env=environment, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"the machine did not end within {timeout_s:.0f} s") from error
    status = shared / "status"
    if not status.exists():
        raise Unavailable("the machine did not run its command; its console is above")
    return int(status.read_text())
