"""Every notebook runs from top to bottom in a real kernel, and is committed without outputs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from lmx_lab.panels.standin import WIDGET_VIEW

FOLDER = Path(__file__).parent.parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_committed_without_outputs(path: Path) -> None:
    cells = nbformat.read(path, as_version=4).cells
    assert all(not cell.get("outputs") and cell.get("execution_count") is None for cell in cells)


def test_the_demo_ends_with_a_sensible_answer_its_speed_and_the_addresses(starter_home: Path) -> None:
    command = [sys.executable, FOLDER / "demo.py", FOLDER / "00_quickstart.ipynb"]
    done = subprocess.run(
        command, env={**os.environ, "LMX_LAB_HOME": str(starter_home)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The capital of France is Paris." in done.stdout
    assert "openai-python: The capital of Japan is Tokyo." in done.stdout
    assert '"object":"chat.completion"' in done.stdout
    assert "tokens/s" in done.stdout
    assert "chat format: http://127.0.0.1:" in done.stdout


@pytest.mark.parametrize(
    "path", [path for path in NOTEBOOKS if not path.stem.startswith("00")], ids=lambda path: path.stem
)
def test_a_notebook_runs_from_top_to_bottom(path: Path, starter_home: Path, tmp_path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}})
    client.execute(env={**os.environ, "LMX_LAB_HOME": str(starter_home)})
    shown = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert not [output for output in shown if output["output_type"] == "error" or output.get("name") == "stderr"]
    assert any(WIDGET_VIEW in output.get("data", ()) for output in shown)
    assert (tmp_path / "run.html").exists() == (path.stem == "02_metrics")


def test_the_demo_fails_when_a_cell_does(tmp_path: Path) -> None:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("raise ValueError('broken cell')")])
    nbformat.write(notebook, tmp_path / "broken.ipynb")
    command = [sys.executable, FOLDER / "demo.py", tmp_path / "broken.ipynb"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "ValueError: broken cell" in done.stdout
