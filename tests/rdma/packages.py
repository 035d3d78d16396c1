"""Fetches the Debian packages that the virtual machine needs, and unpacks them under .cache. Nothing is installed."""

import fcntl
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

CACHE: Final = Path(__file__).resolve().parents[2] / ".cache" / "rdma"
TOOLS: Final = (
    "qemu-system-x86", "busybox-static", "kmod", "rdma-core", "ibverbs-utils", "ibverbs-providers", "python3-pyverbs",
    "iproute2",
)  # fmt: skip
MERGED: Final = ("bin", "sbin", "lib", "lib64")
"""Directories that are links into /usr on the host. The packages still name some files by the old paths."""


class Unavailable(Exception):
    """This machine cannot fetch or run what is needed. The text says what lacks."""


class Packages:
    """The unpacked packages.

    Attributes:
        tools: The root of the unpacked tools. Packages that the host has are not there.
        kernel: The root of the unpacked kernel package.
        version: The kernel's version.
        python: A directory for PYTHONPATH that holds pyverbs.
    """

    def __init__(self, root: Path) -> None:
        self.tools, self.kernel, self.python = root / "tools", root / "kernel", root / "python"
        self.version = next((self.kernel / "lib/modules").iterdir()).name

    @property
    def environment(self) -> dict[str, str]:
        """The environment in which the host runs programs of `tools`."""
        libraries = ":".join(map(str, (self.tools / "usr/lib").glob("*-linux-gnu")))
        paths = f"{self.tools}/usr/sbin:{self.tools}/usr/bin:{os.environ['PATH']}"
        return {**os.environ, "LD_LIBRARY_PATH": libraries, "PATH": paths}


def fetch() -> Packages:
    """Fetch and unpack the packages, at the first call.

    Raises:
        Unavailable: There is no apt here, or the packages cannot be had.
    """
    if missing := [tool for tool in ("apt-get", "apt-cache", "dpkg") if shutil.which(tool) is None]:
        raise Unavailable(f"no {', '.join(missing)} here; the virtual machine is made of Debian packages")
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        root = CACHE / "root"
        if not root.exists():
            unfinished = CACHE / "unfinished"
            shutil.rmtree(unfinished, ignore_errors=True)
            _unpack(_download(CACHE / "apt"), unfinished)
            shutil.rmtree(CACHE / "apt")
            unfinished.rename(root)
    return Packages(root)


def _download(place: Path) -> list[Path]:
    """Download the packages that the host lacks, with apt's own choice of versions. Needs no root."""
    archives, lists = place / "archives", place / "lists"
    for each in (archives, lists):
        (each / "partial").mkdir(parents=True, exist_ok=True)
    options = [
        f"Dir::State::lists={lists}",
        f"Dir::Cache::archives={archives}",
        "Dir::Cache::pkgcache=",
        "Dir::Cache::srcpkgcache=",
        "Debug::NoLocking=1",
        "APT::Install-Recommends=0",
        f"APT::Sandbox::User={os.environ.get('USER', 'root')}",
    ]
    flags = [word for option in options for word in ("-o", option)]
    _run("apt-get", *flags, "update")
    depends = _run("apt-cache", *flags, "depends", "linux-image-amd64")
    kernels = [line.split()[-1] for line in depends.splitlines() if "Depends: linux-image-" in line]
    if not kernels:
        raise Unavailable("apt knows no linux-image-amd64")
    _run("apt-get", *flags, "install", "--download-only", "--yes", *TOOLS)
    _run("apt-get", *flags, "download", kernels[0], cwd=archives)
    return sorted(archives.glob("*.deb"))


def _unpack(archives: Sequence[Path], root: Path) -> None:
    tools, kernel = root / "tools", root / "kernel"
    root.mkdir(parents=True)
    for archive in archives:
        _run("dpkg", "-x", str(archive), str(kernel if archive.name.startswith("linux-image-") else tools))
    for name in MERGED:
        if (tools / name).is_dir():
            shutil.copytree(tools / name, tools / "usr" / name, symlinks=True, dirs_exist_ok=True)
            shutil.rmtree(tools / name)
    for link in [each for each in (tools / "usr").rglob("*") if each.is_symlink() and each.readlink().is_absolute()]:
        target = tools / "usr" / str(link.readlink()).removeprefix("/").removeprefix("usr/")
        if target.exists():  # on the host, an absolute link would lead out of `tools`
            link.unlink()
            link.symlink_to(os.path.relpath(target, link.parent))
    shutil.copytree(tools / "usr/lib/python3/dist-packages/pyverbs", root / "python/pyverbs")
    packages = Packages(root)
    _run("depmod", "-b", str(kernel), packages.version, env=packages.environment)


def _run(*command: str, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=env, timeout=300)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{command[0]}: {error}") from error
    if done.returncode:
        raise Unavailable(f"{' '.join(command[-3:])}: {done.stderr.strip()[-300:]}")
    return done.stdout
