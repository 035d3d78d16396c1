"""Accelerated socket libraries: they replace the socket calls of a process, if ld.so loads them first (LD_PRELOAD)."""

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from raykv.config import environment_of_child
from raykv.errors import ConfigError

KNOWN: Final = ("libvma.so", "libxlio.so", "libonload.so", "libvcl_ldpreload.so")
"""NVIDIA VMA and XLIO, Onload, and VPP's library."""
FOLDERS: Final = ("usr/lib", "usr/lib64", "usr/lib/*-linux-gnu", "usr/local/lib", "usr/local/lib64", "lib64")
TRY_S: Final = 30.0
REMEDY: Final = "install it, or name the file with its path, or leave the field out"


def environment_with(library: str | None) -> dict[str, str]:
    """Return the environment of a child process that is to run with `library`, if it is not None.

    Raises:
        ConfigError: ld.so cannot load the library, or a process with it does not start. ld.so by itself only prints a
            warning, and goes on without it.
    """
    environment = environment_of_child(preload=library)
    if library is None:
        return environment
    if "/" in library and not os.path.isfile(library):
        raise ConfigError(f"field 'socket_library': there is no file {library!r} on this host; {REMEDY}")
    try:
        tried = subprocess.run(
            [sys.executable, "-I", "-S", "-c", ""], env=environment, capture_output=True, timeout=TRY_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"field 'socket_library': a process with {library!r} does not end; {REMEDY}") from error
    says = tried.stderr.decode(errors="replace")
    failed = [line for line in says.splitlines() if "cannot be preloaded" in line and f"'{library}'" in line]
    if failed or tried.returncode:
        reason = failed[0] if failed else f"a process with it ends with status {tried.returncode}: {says[-500:]}"
        raise ConfigError(f"field 'socket_library': {library!r} cannot be used: {reason.strip()}; {REMEDY}")
    return environment


def loaded(library: str | None, process: Path = Path("/proc/self")) -> str | None:
    """Return the file of `library` that a process has mapped, or None. `process`: its folder in /proc."""
    if library is None:
        return None
    name = os.path.basename(library)
    wanted = (name, os.path.basename(os.path.realpath(library))) if "/" in library else (name,)
    return next((path for path in _mapped(process) if os.path.basename(path).startswith(wanted)), None)


def loaded_libraries(process: Path = Path("/proc/self")) -> list[str]:
    """Return the files of the libraries in KNOWN that a process has mapped."""
    return [path for name in KNOWN if (path := loaded(name, process)) is not None]


def installed_libraries(root: Path = Path("/")) -> list[str]:
    """Return the paths of the libraries in KNOWN below the usual folders, without those in other places."""
    found = (path for folder in FOLDERS for name in KNOWN for path in root.glob(f"{folder}/{name}"))
    return sorted({f"/{path.relative_to(root)}" for path in found})


def supervisors(root: Path = Path("/")) -> list[tuple[int, str]]:
    """Return the supervisors of nodes on this host, with the LD_PRELOAD of each ("" for none).

    A process of another user is left out, if its environment cannot be read.
    """
    found = []
    for process in (root / "proc").glob("[0-9]*"):
        try:
            if b"raykv.supervisor.process" in (process / "cmdline").read_bytes().split(b"\0"):
                found.append((int(process.name), _preload((process / "environ").read_bytes().split(b"\0"))))
        except OSError:
            continue
    return sorted(found)


def _preload(variables: Iterable[bytes]) -> str:
    name = b"LD_PRELOAD="
    return next((each[len(name) :].decode(errors="replace") for each in variables if each.startswith(name)), "")


def _mapped(process: Path) -> list[str]:
    try:
        lines = (process / "maps").read_text(errors="replace").splitlines()
    except OSError:
        return []
    return list(dict.fromkeys(fields[5] for line in lines if len(fields := line.split(maxsplit=5)) == 6))
