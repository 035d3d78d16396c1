"""Fetches the tests of the installed vLLM, and runs those of KV connectors: `python -m tests.vllm_conformance.run`.

vLLM's source package contains the tests. They are unpacked into `.cache/vllm-tests/VERSION`, but not built or changed.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import vllm

ROOT = Path(__file__).parents[2]
FOLDER = "tests/v1/kv_connector"


def fetch(version: str) -> Path:
    """Return the folder that contains vLLM's `tests`. If it is missing, download the source package first.

    pip unpacks a source package before it checks the build requirements. Some of these are missing on purpose, so pip
    ends with an error before any code of the package runs. The unpacked files remain because of `--no-clean`.

    Raises:
        SystemExit: The package could not be downloaded, or contains no tests. The message is pip's.
    """
    folder = ROOT / ".cache" / "vllm-tests" / version
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as place:
        pip = subprocess.run(
            [
                *(sys.executable, "-m", "pip", "download", "--quiet", "--no-clean", "--no-deps", "--dest", place),
                *("--no-binary", "vllm", "--no-build-isolation", "--check-build-dependencies", f"vllm=={version}"),
            ],
            env={**os.environ, "TMPDIR": place},
            capture_output=True,
            text=True,
            check=False,
        )
        found = list(Path(place).glob(f"pip-download-*/vllm_*/{FOLDER}"))
        if not found:
            raise SystemExit(f"no tests in the source package of vllm {version}:\n{pip.stderr}")
        unpacked = Path(place) / "unpacked"
        unpacked.mkdir()
        shutil.move(found[0].parents[1], unpacked / "tests")
        unpacked.rename(folder)
    return folder


def main() -> int:
    """Run vLLM's tests in their own folder, where `tests` is vLLM's package. Returns pytest's exit status."""
    folder = fetch(vllm.__version__.partition("+")[0])
    paths = [str(folder), str(ROOT / "tests"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    command = [sys.executable, "-m", "pytest", "-p", "vllm_conformance.plugin", "-c", os.devnull, "--rootdir", "."]
    options = ["-p", "no:cacheprovider", "--timeout", "120", "-q", FOLDER]
    return subprocess.call(
        [*command, *options, *sys.argv[1:]],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "HF_HUB_OFFLINE": "1"},
    )


if __name__ == "__main__":
    sys.exit(main())
