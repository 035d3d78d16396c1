"""Run the tests of RDMA in a virtual machine with two soft-RoCE devices: `python -m tests.rdma.run`.

With `--user-mode` first, in a User-Mode kernel, which has to be built first: code runs on the real processor there.
"""

import sys
from pathlib import Path
from typing import Final

from tests.rdma import machine, packages, user_mode

TIMEOUT_S: Final = 3600.0
"""The machine is ended after this time. pytest ends a single test much earlier."""
TESTS: Final = ("tests/rdma", "--ignore=tests/rdma/hosts")


def main(arguments: list[str]) -> int:
    """Run pytest in the machine. Returns its exit status, or 0 where there can be no machine."""
    run = machine.run
    if arguments[:1] == ["--user-mode"]:
        run, arguments = user_mode.run, arguments[1:]
    try:
        python = packages.fetch().python
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *TESTS, *arguments]
        environment = {"PYTHONPATH": f"{Path.cwd()}:{python}"}
        setup = f". {Path(__file__).with_name('network.sh')}"
        return run(command, setup=setup, environment=environment, timeout_s=TIMEOUT_S)
    except packages.Unavailable as error:
        print(f"tests of RDMA: skipped, {error}")
        return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
