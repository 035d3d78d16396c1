"""Run the tests of RDMA between Ray nodes in a User-Mode kernel: `python -m tests.rdma.run_hosts`. Needs Ray."""

import sys
from pathlib import Path
from typing import Final

from tests.rdma import packages, user_mode

HERE: Final = "RAYKV_USER_MODE"
"""This variable is set in the machine."""
TIMEOUT_S: Final = 3600.0


def main(arguments: list[str]) -> int:
    """Run pytest in the machine. Returns its exit status, or 2 where there can be no machine."""
    try:
        python = packages.fetch().python
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/rdma/hosts", *arguments]
        environment = {"PYTHONPATH": f"{Path.cwd()}:{python}", HERE: "1", "RAY_raylet_start_wait_time_s": "120"}
        return user_mode.run(command, environment=environment, timeout_s=TIMEOUT_S)
    except packages.Unavailable as error:
        print(f"tests of RDMA between hosts: not run, {error}")
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
