"""The notebooks run from start to end in a kernel of their own, and are kept without outputs."""

import json
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))

KNOWN = {"your_own_states": ("[0, 1, 2]", "(4, 9)"), "reading_a_report": ("6 of 12 layers are ruled by one position",)}
"""What a notebook shows of the answers that were planted in its data."""


def test_there_are_notebooks():
    assert {path.stem for path in NOTEBOOKS} >= {"quickstart", "your_own_states", "reading_a_report"}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_cleared(path):
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert cells
    for cell in cells:
        assert cell["outputs"] == []
        assert cell["execution_count"] is None


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, tmp_path):
    nbclient = pytest.importorskip("nbclient", reason="needs the notebooks extra (nbclient)")
    pytest.importorskip("ipykernel", reason="needs the notebooks extra (ipykernel)")
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    texts = [output.get("text", "") + output.get("data", {}).get("text/plain", "") for output in outputs]
    for answer in KNOWN.get(path.stem, ()):
        assert any(answer in text for text in texts), answer
    assert any("image/png" in output.get("data", {}) for output in outputs), "a figure is shown"
