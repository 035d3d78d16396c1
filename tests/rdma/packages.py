"""Fetches the Debian packages that the virtual machines need, and unpacks them under .cache. Nothing is installed."""

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
KERNEL_SOURCE: Final = "linux-source-7.2"
"""Debian's package of a kernel whose User-Mode variant runs on several processors, and whose rxe knows namespaces."""
BACKPORTS: Final = "trixie-backports"
"""The suite that has KERNEL_SOURCE."""
KEYRING: Final = "/usr/share/keyrings/debian-archive-keyring.gpg"
BUILD_TOOLS: Final = ("flex", "bison", "m4")
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


def fetch_kernel_source(place: Path) -> None:
    """Unpack KERNEL_SOURCE to `place`/source, and what its build needs to `place`/tools.

    Raises:
        Unavailable: The packages cannot be had.
    """
    sources = place / "sources.list"
    flags = _apt_flags(place / "apt")
    _run("apt-get", *flags, "update")
    found = _run("apt-get", *flags, "indextargets", "--format", "$(SITE) $(RELEASE)", "Created-By: Packages")
    mirrors = [line.split() for line in found.splitlines() if line.split()[0].rstrip("/").endswith("/debian")]
    if not mirrors:
        raise Unavailable("no Debian mirror among apt's sources")
    site, release = mirrors[0]
    sources.write_text("".join(f"deb [signed-by={KEYRING}] {site} {suite} main\n" for suite in (release, BACKPORTS)))
    flags = _apt_flags(place / "apt", f"Dir::Etc::SourceList={sources}", "Dir::Etc::SourceParts=/nonexistent")
    archives = place / "apt" / "archives"
    _run("apt-get", *flags, "update")
    _run("apt-get", *flags, "download", KERNEL_SOURCE, *BUILD_TOOLS, cwd=archives)
    for archive in archives.glob("*.deb"):
        _run("dpkg", "-x", str(archive), str(place / "tools"))
    (packed,) = (place / "tools/usr/src").glob("*.tar.xz")
    (place / "source").mkdir()
    _run("tar", "-xf", str(packed), "-C", str(place / "source"), "--strip-components=1")


def _apt_flags(place: Path, *further: str) -> list[str]:
    """Return the options with which apt keeps all its files in `place`, so that it needs no root."""
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
        *further,
    ]
    return [word for option in options for word in ("-o", option)]


def _download(place: Path) -> list[Path]:
    """Download the packages that the host lacks, with apt's own choice of versions."""
    flags, archives = _apt_flags(place), place / "archives"
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
