"""The demo, as a user runs it. Only a soak test: in `make test`, `test_conversation_survives` runs the demo."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray")
pytest.importorskip("vllm")

from tests.support.deployed import free_port, traces

pytestmark = [pytest.mark.e2e, pytest.mark.ray, pytest.mark.vllm, pytest.mark.soak, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]


def test_the_demo_keeps_its_promises_and_leaves_nothing():
    before = traces()
    command = [sys.executable, "-m", "deployments.demo", "--port", str(free_port())]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    print(run.stdout)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("  yes  ") == 4
    assert traces() <= before
