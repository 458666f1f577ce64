"""The notebooks run from top to bottom on the artifacts of a run, and are kept without outputs."""

from __future__ import annotations

import nbformat
import pytest
from dependencies import ROOT
from nbclient import NotebookClient

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def test_there_are_notebooks():
    assert [path.stem for path in NOTEBOOKS] == ["acceptance_by_domain", "first_look"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_kept_without_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code and not any(cell.outputs or cell.execution_count for cell in code)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run_on_the_artifacts_of_a_run(path, clone, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(clone))
    notebook = nbformat.read(clone / "notebooks" / path.name, as_version=4)
    client = NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(clone / "notebooks")}})
    client.execute()
    shown = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    tables = [output for output in shown if output.output_type == "execute_result"]
    assert len(tables) >= 3 and not any(output.output_type == "error" for output in shown)
    if path.stem == "first_look":
        page = tables[0].data["text/html"]
        assert 'title="accepted"' in page and 'title="target"' in page
