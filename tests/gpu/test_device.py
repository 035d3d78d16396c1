"""What is missing for a GPU is said, and all else works without it."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from raykv.errors import UsageError
from raykv.gpu import device


def test_only_a_gpu_makes_raykv_import_cupy():
    program = """
import sys
class Refuse:
    def find_spec(self, name, *_):
        if name.split(".")[0] == "cupy":
            raise AssertionError("cupy is imported")
sys.meta_path.insert(0, Refuse())
import raykv, raykv.gpu.device, raykv.gpu.pinning, raykv.gpu.paged
from raykv.tools import doctor
from pathlib import Path
assert raykv.gpu.device.missing(Path("/proc/self/nothing")) == "no NVIDIA GPU"
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    ("files", "found"),
    [([], []), (["nvidiactl", "nvidia-uvm"], []), (["nvidia10", "nvidia0"], ["nvidia0", "nvidia10"])],
)
def test_gpus_are_found_by_their_device_files(tmp_path, files, found):
    (tmp_path / "dev").mkdir()
    for name in files:
        (tmp_path / "dev" / name).touch()
    assert device.gpus_of(tmp_path) == found


@pytest.mark.parametrize(
    ("module", "lack"),
    [
        (None, "cupy is not installed"),
        ("raise ImportError('libcudart.so.12 is missing')", "no usable CUDA: libcudart.so.12 is missing"),
        ("count = 0", "cupy sees no GPU"),
        ("count = 1", ""),
    ],
)
def test_what_is_missing_where_there_is_a_gpu(tmp_path, monkeypatch, module, lack):
    """A file cupy.py takes the place of cupy."""
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    monkeypatch.setitem(sys.modules, "cupy", None)  # so that pytest restores it
    monkeypatch.delitem(sys.modules, "cupy")
    if module is None:
        monkeypatch.setattr(device.importlib.util, "find_spec", lambda name: None)
    else:
        (tmp_path / "cupy.py").write_text(
            f"{module}\nclass cuda:\n    class runtime:\n        getDeviceCount = staticmethod(lambda: count)\n"
        )
        monkeypatch.syspath_prepend(tmp_path)
    found = device.missing(tmp_path)
    assert lack in found
    assert bool(found) == bool(lack)


def test_the_kernels_are_part_of_the_package():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["package-data"]["raykv.gpu"] == [device.KERNELS.name]
    assert device.KERNELS.exists()


def test_a_gpu_that_is_not_there_cannot_be_opened(monkeypatch):
    monkeypatch.setattr(device, "missing", lambda: "no NVIDIA GPU")
    with pytest.raises(UsageError, match="no NVIDIA GPU; raykv works without one"):
        device.open_device()
