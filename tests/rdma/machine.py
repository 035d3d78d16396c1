"""A virtual machine with Debian's kernel, whose soft-RoCE driver gives real RDMA verbs on a machine without a NIC.

qemu emulates the processor, because /dev/kvm is often not usable where tests run. The guest's root is the host's root,
read-only, with the unpacked packages and a tmpfs above it. So the guest sees this project and its virtual environments
at the same paths. The command's working directory is that of this process.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.rdma.guest import boot, write_script
from tests.rdma.packages import Packages, Unavailable, fetch

MODULES: Final = ("virtio_pci", "9pnet_virtio", "9p", "overlay")
"""The kernel modules that the first step of the boot needs, before there is a root."""
BOOT_S: Final = 60.0
"""A guest that has not run its command so long after its start is ended."""
SHARE: Final = "trans=virtio,version=9p2000.L,msize=512000"

INIT: Final = """#!/bin/sh
b=/bin/busybox
$b mount -t proc p /proc; $b mount -t sysfs s /sys; $b mount -t devtmpfs d /dev
for module in /lib/modules/*.ko; do $b insmod $module; done
$b mount -t 9p -o ro,{share},cache=loose host /host || $b poweroff -f
$b mount -t 9p -o ro,{share},cache=loose tools /tools || $b poweroff -f
$b mount -t tmpfs -o size=80% upper /upper && $b mkdir /upper/changes /upper/work
$b mount -t overlay -o lowerdir=/tools:/host,upperdir=/upper/changes,workdir=/upper/work root /root || $b poweroff -f
for each in proc sys dev; do $b mount --move /$each /root/$each; done
$b mkdir -p /root/dev/shm /root/dev/pts /root/vm /root/lib/modules
$b mount -t tmpfs -o size=80% shm /root/dev/shm
$b mount -t devpts pts /root/dev/pts
$b mount -t tmpfs run /root/run
$b mount -t 9p -o rw,{share},cache=none vm /root/vm
$b mount -t tmpfs modules /root/lib/modules
$b ln -s {modules} /root/lib/modules/$($b uname -r)
exec $b switch_root /root /bin/bash /vm/run
"""

RUN: Final = """export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
export HOME=/root TERM=dumb {environment}
ulimit -l unlimited; ulimit -n 65536
hostname rdma; echo '127.0.0.1 localhost rdma' > /etc/hosts; ip link set lo up
modprobe -a rdma_rxe veth ib_uverbs
cd {directory}
( {setup}; {command} ) < /dev/null > /dev/console 2>&1
echo $? > /vm/status
sync; echo o > /proc/sysrq-trigger; sleep 20
"""


def run(
    command: Sequence[str], *, setup: str = ":", environment: dict[str, str], timeout_s: float, memory: str = "3G"
) -> int:
    """Boot a machine, run a command in it as root, and return the command's exit status. Its output goes to stdout.

    Args:
        command: The command.
        setup: A line of shell to run before it.
        environment: Variables for both.
        timeout_s: The machine is ended after this time.
        memory: The size of the guest's memory, for qemu.

    Raises:
        Unavailable: Packages cannot be had, or the guest did not boot or not end in time.
    """
    packages = fetch()
    with tempfile.TemporaryDirectory(prefix="raykv-rdma-") as name:
        place = Path(name)
        shared = place / "shared"
        shared.mkdir()
        write_script(shared, RUN, command, setup, environment)
        _make_initrd(packages, place)
        machine = _qemu(packages, place, shared, memory)
        return boot(machine, shared, environment=packages.environment, timeout_s=timeout_s)


def _make_initrd(packages: Packages, place: Path) -> None:
    """Write the first root: busybox, the modules of MODULES, and INIT."""
    first = place / "first"
    for each in ("bin", "proc", "sys", "dev", "host", "tools", "upper", "root", "lib/modules"):
        (first / each).mkdir(parents=True)
    busybox = packages.tools / "usr/bin/busybox"
    shutil.copy(busybox, first / "bin/busybox")
    (first / "bin/sh").symlink_to("busybox")
    command = ["modprobe", "-d", str(packages.kernel), "-S", packages.version, "--show-depends", *MODULES]
    shown = "".join(
        subprocess.run(
            [*command[: -len(MODULES)], module], capture_output=True, text=True, check=True, env=packages.environment
        ).stdout
        for module in MODULES
    )
    files = list(dict.fromkeys(line.split()[1] for line in shown.splitlines() if line.startswith("insmod")))
    for number, file in enumerate(files):
        target = first / f"lib/modules/{number:03}.ko"
        if file.endswith(".xz"):
            target.write_bytes(subprocess.run(["xz", "-dc", file], capture_output=True, check=True).stdout)
        else:
            shutil.copy(file, target)
    modules = packages.kernel / "lib/modules" / packages.version
    init = first / "init"
    init.write_text(INIT.format(share=SHARE, modules=modules))
    init.chmod(0o755)
    names = "\n".join(str(each.relative_to(first)) for each in [first, *sorted(first.rglob("*"))])
    with (place / "initrd").open("wb") as initrd:
        subprocess.run(
            [busybox, "cpio", "-o", "-H", "newc"], cwd=first, input=names.encode(), stdout=initrd, check=True,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip


def _qemu(packages: Packages, place: Path, shared: Path, memory: str) -> list[str]:
    data = packages.tools / "usr/share"
    command = ["qemu-system-x86_64", "-accel", "tcg,thread=multi,tb-size=512", "-cpu", "max", "-M", "q35", "-m", memory]
    command += ["-smp", str(min(4, os.cpu_count() or 1)), "-nodefaults", "-no-user-config", "-display", "none"]
    command += ["-no-reboot", "-serial", "stdio", "-net", "none", "-L", str(data / "qemu"), "-L", str(data / "seabios")]
    command += ["-kernel", str(packages.kernel / f"boot/vmlinuz-{packages.version}"), "-initrd", str(place / "initrd")]
    command += ["-append", "console=ttyS0 quiet loglevel=3 panic=-1 mitigations=off nokaslr audit=0 tsc=reliable"]
    for tag, path, mode in (("host", "/", "on"), ("tools", packages.tools, "on"), ("vm", shared, "off")):
        command += ["-fsdev", f"local,id={tag},path={path},security_model=none,readonly={mode},multidevs=remap"]
        command += ["-device", f"virtio-9p-pci,fsdev={tag},mount_tag={tag}"]
    return [*command, "-device", "virtio-rng-pci"]


if __name__ == "__main__":
    try:
        sys.exit(run(sys.argv[1:], environment={}, timeout_s=600))
    except Unavailable as error:
        sys.exit(f"no virtual machine: {error}")
