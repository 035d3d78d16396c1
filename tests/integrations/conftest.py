"""Fixtures for the tests of integrations."""

import gc
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.nodes import NODE, SECRET, run

WAIT_S = 20.0


@pytest.fixture
def no_full_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip full garbage collections: each vLLM engine does seven, which take two thirds of the time of a small test."""
    monkeypatch.setattr(gc, "collect", lambda generation=2: 0)


@pytest.fixture
def node(shm_dir: Path) -> Iterator[tuple[str, int]]:
    """Address and process id of a node in another process."""
    fields = {"node_id": "n", "cluster": "t", "storage": {"arena_nbytes": "64 MiB", "shm_dir": str(shm_dir)}}
    with run(NODE, json.dumps(fields), SECRET) as process:
        assert process.stdout is not None
        assert process.stdout.readline(), "the node did not start"
        yield f"unix:{shm_dir}/raykv-t-n.sock", process.pid
        os.kill(process.pid, signal.SIGCONT)
        process.communicate(timeout=WAIT_S)
