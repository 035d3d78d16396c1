"""Every notebook runs from top to bottom. Only `make soak` replays the whole trace."""

import gzip
import itertools
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
TRACE = "../tests/data/mooncake_synthetic_trace.jsonl.gz"
REQUESTS = 400
"""A tenth of the trace's requests."""

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning:jupyter_client")]


def run(name: str, *, trace: Path | None = None) -> None:
    """Run a notebook. If `trace` is given, it replaces the trace that the notebook names."""
    notebook = nbformat.read(NOTEBOOKS / name, as_version=4)
    if trace is not None:
        (cell,) = [cell for cell in notebook.cells if TRACE in cell.source]
        cell.source = cell.source.replace(TRACE, str(trace))
    client = nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(NOTEBOOKS)}})
    client.execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in outputs), "it draws something"


def test_the_quickstart_runs() -> None:
    run("01_quickstart.ipynb")


def test_policies_and_capacity_runs_on_a_trace_of_the_readers(tmp_path: Path) -> None:
    with gzip.open(NOTEBOOKS / TRACE, "rt") as whole:
        (tmp_path / "trace.jsonl").write_text("".join(itertools.islice(whole, REQUESTS)))
    run("02_policies_and_capacity.ipynb", trace=tmp_path / "trace.jsonl")


@pytest.mark.soak
def test_policies_and_capacity_runs_as_it_is() -> None:
    run("02_policies_and_capacity.ipynb")


def test_ring_and_heat_runs() -> None:
    run("03_ring_and_heat.ipynb")


def test_every_notebook_is_run() -> None:
    assert {path.name for path in NOTEBOOKS.glob("*.ipynb")} == {
        "01_quickstart.ipynb",
        "02_policies_and_capacity.ipynb",
        "03_ring_and_heat.ipynb",
    }
