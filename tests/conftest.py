"""Fixtures for all tests: printed seeds, directories in shared memory, faults, a check that no thread still runs."""

import gc
import os
import random
import shutil
import tempfile
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from xdist.scheduler import LoadFileScheduling

from deployments.local_ray import require_token
from raykv.memory import native
from raykv.transport.tls import Tls
from tests.support.certificates import Authority
from tests.support.faults import Faults

ROOT = Path(__file__).parents[1]

require_token()  # Ray reads its authentication mode only once: when the first test module imports Ray


class RayTogether(LoadFileScheduling):
    """Gives all tests of a file to one worker of pytest-xdist, and all files that start Ray to the same worker."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return "ray" if "pytest.mark.ray" in (ROOT / file).read_text() else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> RayTogether | None:
    return RayTogether(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_collection_finish() -> None:
    """Exclude what the imports made from garbage collections, as vLLM's engines do.

    With vLLM imported, a full collection reads 800 000 objects, and no other thread of the process runs for 0.5 to 2 s.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """Return RAYKV_TEST_SEED, or else a number derived from the test's name. The seed is shown if the test fails."""
    chosen = int(os.environ.get("RAYKV_TEST_SEED", zlib.crc32(request.node.nodeid.encode())))
    print(f"seed: RAYKV_TEST_SEED={chosen}")
    return chosen


@pytest.fixture
def rng(seed: int) -> random.Random:
    return random.Random(seed)


@pytest.fixture
def np_rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.fixture
def shm_dir() -> Iterator[Path]:
    """A directory in /dev/shm for one test. Its path is short enough for Unix sockets."""
    path = Path(tempfile.mkdtemp(prefix="raykv-test-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """The CA of a cluster."""
    return Authority(tmp_path_factory.mktemp("tls") / "cluster")


@pytest.fixture(scope="session")
def tls(authority: Authority) -> Tls:
    """The certificates of a process of that cluster."""
    return Tls(authority.issue("node"))


@pytest.fixture(autouse=True)
def no_thread_stays() -> Iterator[None]:
    """Check that no thread of a test's nodes and clients still runs when the test has ended."""
    before = set(threading.enumerate())
    yield
    ours = [thread for thread in threading.enumerate() if thread not in before and thread.name.startswith("raykv")]
    for thread in ours:
        thread.join(timeout=5.0)
    assert not [thread.name for thread in ours if thread.is_alive()]


@pytest.fixture
def faults(rng: random.Random) -> Iterator[Faults]:
    """Faults that a test can cause: lost messages, delays, and silent nodes. At first there are none."""
    with pytest.MonkeyPatch.context() as patch:
        yield Faults(patch, rng)


@pytest.fixture(
    params=["compiled", pytest.param("plain", marks=[pytest.mark.slow] if native.loops is not None else [])],
)
def loops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a test with the compiled loops, and again without them."""
    if request.param == "plain":
        monkeypatch.setattr(native, "loops", None)
    elif native.loops is None:
        pytest.skip("the compiled loops were not built, or RAYKV_NATIVE is 0")
    return str(request.param)
