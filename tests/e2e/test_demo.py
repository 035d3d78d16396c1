"""The demo, as a user runs it."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray")
pytest.importorskip("vllm")

pytestmark = [pytest.mark.e2e, pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def ray_processes() -> set[int]:
    """Processes of local Ray nodes, engines and actors among them, by the directory that all of them name."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            text = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
        except OSError:
            continue
        if b"/tmp/raykv-ray-" in text:
            found.add(int(process.name))
    return found


def test_the_demo_keeps_its_promises_and_leaves_nothing():
    processes, files, temporary = ray_processes(), set(os.listdir("/dev/shm")), set(Path("/tmp").glob("raykv-ray-*"))
    command = [sys.executable, "-m", "deployments.demo", "--port", str(free_port())]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    print(run.stdout)
    assert run.returncode == 0, run.stderr
    rows = re.findall(r"^(\d+|1 again) +\d{4} .* identical$", run.stdout, re.MULTILINE)
    assert rows == ["1", "2", "3", "1 again"]
    assert run.stdout.count("  yes  ") == 4
    assert "  NO   " not in run.stdout
    assert ray_processes() <= processes
    assert {name for name in os.listdir("/dev/shm") if name.startswith(("raykv-demo", "psm_", "sem."))} <= files
    assert set(Path("/tmp").glob("raykv-ray-*")) <= temporary
