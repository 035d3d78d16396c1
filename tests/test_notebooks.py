"""Every notebook runs from top to bottom, as a reader would run it."""

from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"

pytestmark = pytest.mark.slow


@pytest.mark.filterwarnings("ignore::DeprecationWarning:jupyter_client")
@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebook_runs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(NOTEBOOKS)}})
    client.execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in outputs), "it draws something"


def test_there_are_notebooks() -> None:
    assert (NOTEBOOKS / "01_quickstart.ipynb").exists()
