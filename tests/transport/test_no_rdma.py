"""RDMA that cannot be used costs nothing but its speed: nodes and clients work over TCP, and say why."""

import sys
from pathlib import Path

import pytest

import raykv
from raykv.transport import rdma
from tests.support.nodes import wait_until


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host with an RDMA device. Returns the directory from which this process imports pyverbs."""
    (tmp_path / "sys/mlx5_0").mkdir(parents=True)
    monkeypatch.setattr(rdma, "DEVICES", tmp_path / "sys")
    monkeypatch.syspath_prepend(str(tmp_path / "python"))
    for name in [name for name in sys.modules if name.startswith("raykv.transport.rdma.")]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path / "python"


def check_reads(**config: str) -> str:
    """Read over TCP between two nodes. Returns why the first node is not read over RDMA."""
    with raykv.embedded(2, arena_nbytes="4 MiB", extent_nbytes="1 MiB") as cluster:
        space = raykv.Namespace(model="m")
        writer, reader = cluster.client(space, node=0), cluster.client(space, node=1)
        writer.put(["a"], [b"bytes"])
        cluster.settle()
        into = bytearray(5)
        assert reader.get(["a"], [into]).nbytes_by_path == {"tcp": 5}
        assert into == b"bytes"
        node = cluster.nodes[0]
        wait_until(lambda: "not open yet" not in node.stats()["rdma"]["reason"])
        assert node.failure is None
        return str(node.stats()["rdma"]["reason"])


def test_no_device(monkeypatch, tmp_path):
    monkeypatch.setattr(rdma, "DEVICES", tmp_path)
    assert "no RDMA device" in check_reads()


def test_no_pyverbs(device, monkeypatch):
    monkeypatch.setattr(rdma.importlib.util, "find_spec", lambda name: None)
    assert "pyverbs is not installed" in check_reads()


def test_pyverbs_of_another_libibverbs(device):
    (device / "pyverbs").mkdir(parents=True)
    (device / "pyverbs/__init__.py").write_text("raise ImportError('libibverbs.so.1: version IBVERBS_1.14 not found')")
    sys.modules.pop("pyverbs", None)
    assert "IBVERBS_1.14" in check_reads()
