"""Makes an environment for each peer, under .cache/bench, and makes it again when its requirements have changed."""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
CACHE: Final = ROOT / ".cache" / "bench"
PROGRAMS: Final = CACHE / "debian"
REQUIREMENTS: Final = Path(__file__).parent / "requirements"
EXCLUDES: Final = ROOT / ".ci" / "excludes.txt"
CHART: Final = "chart"
"""Name of the environment in which charts are drawn."""
MOONCAKE: Final = {"mooncake", "connectors-mooncake"}
"""Environments with Mooncake's wheel, which needs libraries of Debian packages."""
TIMEOUT_S: Final = 600


@dataclass(frozen=True, slots=True)
class Environment:
    """The environment in which the client of a store runs.

    Attributes:
        python: Path of the interpreter.
        problem: Why the environment cannot be used; empty if it can.
    """

    python: Path
    problem: str = ""


def prepare(names: set[str]) -> dict[str, Environment]:
    """Make missing environments in parallel, and return all named ones. "" names the environment of this process.

    An environment that cannot be made has a `problem`. The others can still be used.
    """
    made = {"": Environment(Path(sys.executable))}
    with ThreadPoolExecutor() as threads:
        programs = threads.submit(_guarded, _unpack) if {"debian", *MOONCAKE} & names else None
        others = {name: threads.submit(_guarded, partial(_install, name)) for name in sorted(names - {"", "debian"})}
    problem = programs.result() if programs else ""
    if programs:
        there = all(shutil.which(name) for name in ("redis-server", "memcached"))
        made["debian"] = Environment(Path(sys.executable), "" if there else problem)
    for name, done in others.items():
        made[name] = Environment(CACHE / name / "bin" / "python", done.result())
    for name in MOONCAKE & made.keys():
        if problem and not made[name].problem and not _works(made[name].python):
            made[name] = Environment(made[name].python, problem)
    return made


def draw(results: Path, chart: Path) -> str:
    """Draw the chart of a JSON file. Returns an empty text, or the reason why the chart was not drawn."""
    environment = prepare({CHART})[CHART]
    command = [str(environment.python), "-m", "benchmarks.chart", str(results.resolve()), str(chart.resolve())]
    return environment.problem or _guarded(partial(_run, command, cwd=str(ROOT)))


def _guarded(task: Callable[[], None]) -> str:
    try:
        task()
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        return str(error)
    return ""


def _works(python: Path) -> bool:
    return subprocess.run([python, "-c", "import mooncake.store"], capture_output=True, check=False).returncode == 0


def _install(name: str) -> None:
    """Make a virtual environment with the packages that requirements/NAME.txt pins."""
    requirements, folder = REQUIREMENTS / f"{name}.txt", CACHE / name
    if _is_current(folder, requirements):
        return
    print(f"== {folder.relative_to(ROOT)}: from {requirements.relative_to(ROOT)}", flush=True)
    uv = Path(sys.executable).with_name("uv")
    shutil.rmtree(folder, ignore_errors=True)
    _run([str(uv), "venv", "--quiet", "--python", sys.executable, str(folder)])
    command = [str(uv), "pip", "install", "--quiet", "--compile-bytecode", "--python", str(folder / "bin" / "python")]
    _run([*command, *_torch_source(), "--excludes", str(EXCLUDES), "-r", str(requirements)])
    _note(folder, requirements)


def _torch_source() -> list[str]:
    """Return the options for `uv pip install` that say where PyTorch's CPU wheel is. The Makefile may set them."""
    given = os.environ.get("RAYKV_TORCH_SOURCE", "").split()
    return given or ["--torch-backend", "cpu"]


def _unpack() -> None:
    """Download Debian packages with apt and unpack them. Nothing is installed, so this works without root."""
    requirements = REQUIREMENTS / "debian.txt"
    if _is_current(PROGRAMS, requirements):
        return
    print(f"== {PROGRAMS.relative_to(ROOT)}: from {requirements.relative_to(ROOT)}", flush=True)
    packages = [line for line in requirements.read_text().split("\n") if line and not line.startswith("#")]
    shutil.rmtree(PROGRAMS, ignore_errors=True)
    PROGRAMS.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as folder:
        command = ["apt-get", "download", "-q", *packages]
        try:
            _run(command, cwd=folder)
        except RuntimeError:
            if os.getuid():
                raise
            _run(["apt-get", "update", "-q"])  # a new machine may have no package lists yet
            _run(command, cwd=folder)
        for package in sorted(Path(folder).glob("*.deb")):
            _run(["dpkg-deb", "-x", str(package), str(PROGRAMS)])
    _note(PROGRAMS, requirements)


def _run(command: list[str], cwd: str | None = None) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, cwd=cwd)
    except FileNotFoundError:
        raise RuntimeError(f"{command[0]} is not on this machine") from None
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:4])} ...: {(done.stderr or done.stdout).strip()[-300:]}")


def _digest(requirements: Path) -> str:
    return hashlib.sha256(requirements.read_bytes()).hexdigest()


def _is_current(folder: Path, requirements: Path) -> bool:
    note = folder / ".installed"
    return note.exists() and note.read_text() == _digest(requirements)


def _note(folder: Path, requirements: Path) -> None:
    (folder / ".installed").write_text(_digest(requirements))
