"""A virtual machine for tests with several hosts: a User-Mode kernel, which is a program that runs at native speed.

Its soft-RoCE driver gives each network namespace devices of its own. The kernel is built from Debian's source at the
first call, which takes 10 minutes of processor time. The guest's root is the host's root, as in `machine`.
"""

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.rdma.guest import boot, write_script
from tests.rdma.packages import CACHE, Unavailable, fetch, fetch_kernel_source

OPTIONS: Final = Path(__file__).with_name("user_mode.config")
"""What the kernel has beyond the default of User-Mode kernels."""
BUILD_S: Final = 3600.0
MEMORY: Final = "6G"
"""The size of the guest's memory, if nothing else is asked for."""

INIT: Final = """#!/bin/bash
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
mount -n -t tmpfs -o size=80% upper /mnt
mkdir /mnt/changes /mnt/work /mnt/root /mnt/tools
root=/mnt/root
mount -n -t hostfs -o ro,{tools} tools /mnt/tools
mount -n -t overlay -o lowerdir=/mnt/tools:/,upperdir=/mnt/changes,workdir=/mnt/work root $root || exit
mkdir -p $root/vm $root/dev
mount -n -t proc p $root/proc; mount -n -t sysfs s $root/sys; mount -n -t devtmpfs d $root/dev
mkdir -p $root/dev/shm $root/dev/pts
mount -n -t tmpfs -o size=80% shm $root/dev/shm
mount -n -t devpts pts $root/dev/pts
mount -n -t tmpfs run $root/run
mount -n -t hostfs -o rw,{shared} vm $root/vm
exec chroot $root /bin/bash /vm/run
"""

RUN: Final = """export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
export HOME=/root TERM=dumb {environment}
ulimit -l unlimited; ulimit -n 65536
hostname rdma; echo '127.0.0.1 localhost rdma' > /etc/hosts; ip link set lo up
cd {directory}
( {setup}; {command} ) < /dev/null 2>&1
echo $? > /vm/status
sync; busybox poweroff -f
"""


def kernel() -> Path:
    """Return the kernel's program. It is built at the first call.

    Raises:
        Unavailable: The source or a compiler cannot be had.
    """
    if missing := [tool for tool in ("gcc", "make", "bc", "xz") if shutil.which(tool) is None]:
        raise Unavailable(f"no {', '.join(missing)} here to build a kernel")
    CACHE.mkdir(parents=True, exist_ok=True)
    program = CACHE / "user-mode-linux"
    with (CACHE / "user-mode.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not program.exists():
            unfinished = CACHE / "user-mode"
            shutil.rmtree(unfinished, ignore_errors=True)
            fetch_kernel_source(unfinished)
            _build(unfinished).rename(program)
            shutil.rmtree(unfinished)
    return program


def _build(place: Path) -> Path:
    """Build the kernel. Returns its program, in `place`."""
    source, tools = place / "source", place / "tools" / "usr"
    environment = {
        **os.environ,
        "PATH": f"{tools}/bin:{os.environ['PATH']}",
        "BISON_PKGDATADIR": f"{tools}/share/bison",
        "M4": f"{tools}/bin/m4",
    }
    make = ["make", "ARCH=um", "SUBARCH=x86_64", f"-j{os.cpu_count() or 1}"]
    steps = (
        [*make, "x86_64_defconfig"],
        ["scripts/kconfig/merge_config.sh", "-m", ".config", str(OPTIONS)],
        [*make, "olddefconfig"],
        [*make, "linux"],
    )
    with (place / "log").open("wb") as log:
        for step in steps:
            done = subprocess.run(
                step, cwd=source, env=environment, stdout=log, stderr=subprocess.STDOUT, timeout=BUILD_S
            )
            if done.returncode:
                raise Unavailable(f"the kernel cannot be built ({' '.join(step)}): see {place / 'log'}")
    subprocess.run(["strip", "linux"], cwd=source, check=True)
    return source / "linux"


def run(
    command: Sequence[str],
    *,
    setup: str = ":",
    environment: dict[str, str],
    timeout_s: float,
    memory: str = MEMORY,
) -> int:
    """Boot the machine, run a command in it as root, and return the command's exit status. Its output goes to stdout.

    Args:
        command: The command.
        setup: A line of shell to run before it.
        environment: Variables for both.
        timeout_s: The machine is ended after this time.
        memory: The size of the guest's memory, such as "6G". The host gives it when the guest uses it.

    Raises:
        Unavailable: The kernel cannot be had, or the guest did not boot or not end in time.
    """
    program, packages = kernel(), fetch()
    with tempfile.TemporaryDirectory(prefix="raykv-rdma-") as name:
        shared = Path(name)
        shared.chmod(0o755)
        write_script(shared, RUN, command, setup, environment)
        init = shared / "init"
        init.write_text(INIT.format(tools=packages.tools, shared=shared))
        init.chmod(0o755)
        variables = {**os.environ, "TMPDIR": "/dev/shm"}  # where the file is that is the guest's memory
        return boot(_command(program, init, memory), shared, environment=variables, timeout_s=timeout_s)


def _command(program: Path, init: Path, memory: str) -> list[str]:
    command = [str(program), f"mem={memory}", f"ncpus={min(4, os.cpu_count() or 1)}", "seccomp=on"]
    command += ["root=/dev/root", "rootfstype=hostfs", "rootflags=/", "ro", f"init={init}"]
    return [*command, "con=null", "con0=null,fd:1", "con1=null,fd:1", "quiet", "loglevel=3", "panic=-1"]


if __name__ == "__main__":
    try:
        sys.exit(run(sys.argv[1:], environment={"PYTHONPATH": os.getcwd()}, timeout_s=600))
    except Unavailable as error:
        sys.exit(f"no virtual machine: {error}")
