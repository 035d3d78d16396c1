"""The how-tos of CONTRIBUTING.md work. The test writes the files of each into a folder, and runs `use.py`."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"```python file=(\S+)\n(.*?)```", re.S)


def how_tos() -> dict[str, dict[str, str]]:
    """Return the files of each how-to: folder -> file name -> text."""
    found: dict[str, dict[str, str]] = {}
    for path, text in BLOCK.findall((ROOT / "CONTRIBUTING.md").read_text()):
        folder, _, name = path.partition("/")
        found.setdefault(folder, {})[name] = text
    return found


def test_there_are_four():
    assert set(how_tos()) == {"policy", "tier", "transport", "adapter"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["policy", "tier", "transport", "adapter"])
def test_a_how_to_works_as_written(name: str, tmp_path: Path):
    for file, text in how_tos()[name].items():
        (tmp_path / file).write_text(text)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "use.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
