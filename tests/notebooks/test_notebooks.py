"""Test that every notebook runs from top to bottom in a real kernel, and is committed without outputs."""

import os
import re
import subprocess
import sys

import nbformat
import pytest
from nbclient import NotebookClient

from lmx_lab.panels.static_views import WIDGET_VIEW
from tests.support.docs import NOTEBOOK_FOLDER, NOTEBOOKS, ROOT
from tests.support.extras import OF_MAKE_LAB, modules_outside
from tests.support.kernels import without_ports

pytestmark = pytest.mark.long
# Values that replace the parameters cells, as with papermill.
SMALL = {
    "10_bench_decode": {"engine": "mlx", "prompt_tokens": [48, 96], "output_tokens": 8, "requests": 2, "repeats": 1},
    "11_bench_concurrency": {
        "engine": "mlx",
        "prompt_tokens": 48,
        "output_tokens": 8,
        "concurrency": [1, 2],
        "repeats": 1,
    },
    "12_compare_servers": {
        "gguf": "tiny-gguf",
        "prompt_tokens": 48,
        "output_tokens": 8,
        "concurrency": [1, 2],
        "requests": 2,
        "repeats": 1,
    },
}
ANSWERS = {
    "10_bench_decode": "the longer prompt: ",
    "11_bench_concurrency": "2 users together: ",
    "12_compare_servers": "2 at once: lab on MLX has ",
}
# A module that is None in sys.modules would count as imported: scikit-learn looks there for polars.
BLOCK = """
import sys
from importlib.machinery import PathFinder

class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, *others):
        return None if name in {} else super().find_spec(name, *others)

sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
"""


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_committed_without_outputs(path):
    cells = nbformat.read(path, as_version=4).cells
    assert all(not cell.get("outputs") and cell.get("execution_count") is None for cell in cells)


def test_the_demo_ends_with_a_sensible_answer_its_speed_and_the_addresses(starter_home):
    command = [sys.executable, ROOT / "tools" / "demo.py", NOTEBOOK_FOLDER / "00_quickstart.ipynb"]
    done = subprocess.run(
        command, env={**os.environ, "LMX_LAB_HOME": str(starter_home)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The capital of France is Paris." in done.stdout
    assert "openai-python: The capital of Japan is Tokyo." in done.stdout
    assert '"object":"chat.completion"' in done.stdout
    assert "tok/s" in done.stdout
    assert "chat format: http://127.0.0.1:" in done.stdout


@pytest.mark.parametrize(
    "path", [path for path in NOTEBOOKS if path.stem[:2] != "00" and path.stem not in SMALL], ids=lambda path: path.stem
)
def test_a_notebook_runs_from_top_to_bottom(path, starter_home, smollm2_gguf, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    if path.stem == "22_compare":
        replace_parameters(notebook, {"model": "smollm2-135m", "gguf": str(smollm2_gguf), "max_tokens": 12})
    shown = outputs_of(notebook, starter_home, tmp_path)
    assert any(WIDGET_VIEW in output.get("data", ()) for output in shown)
    assert (tmp_path / "run.html").exists() == (path.stem == "02_metrics")


@pytest.mark.parametrize("stem", SMALL)
def test_a_notebook_that_measures_takes_parameters_and_ends_with_its_answer(stem, tiny_home, tmp_path):
    notebook = nbformat.read(NOTEBOOK_FOLDER / f"{stem}.ipynb", as_version=4)
    replace_parameters(notebook, {"model": "tiny", **SMALL[stem]})
    # Simulate that the extra is not installed.
    notebook.cells.insert(0, nbformat.v4.new_code_cell("import sys\nsys.modules['xllamacpp'] = None"))
    shown = outputs_of(notebook, tiny_home, tmp_path)
    assert any("image/png" in output.get("data", ()) for output in shown)
    last = [output["text"] for output in shown if output["output_type"] == "stream"][-1]
    assert ANSWERS[stem] in last
    assert "nan" not in last
    notes = [output["text"] for output in shown if "pip install 'lmx-lab[gguf]'" in output.get("text", "")]
    assert len(notes) == (stem == "12_compare_servers")


def test_both_engines_and_both_other_servers_are_compared_in_one_table(tiny_home, tiny_gguf, tmp_path):
    notebook = nbformat.read(NOTEBOOK_FOLDER / "12_compare_servers.ipynb", as_version=4)
    replace_parameters(notebook, {"model": "tiny", **SMALL["12_compare_servers"], "gguf": str(tiny_gguf)})
    check = nbformat.v4.new_code_cell(
        "print(rows.groupby('target')['engine'].first().to_dict(), rows['error'].count())"
    )
    notebook.cells.append(check)
    shown = outputs_of(notebook, tiny_home, tmp_path)
    answer, targets = [output["text"] for output in shown if output["output_type"] == "stream"][-2:]
    assert "2 at once: lab on llama.cpp has " in answer
    assert "of llama.cpp's server (" in answer
    assert "nan" not in answer
    for target in ("'lab on MLX': 'lmx-lab ", "'mlx_lm.server': 'mlx-lm ", "\"llama.cpp's server\": 'xllamacpp "):
        assert target in targets
    assert re.search(r"'lab on llama\.cpp': 'lmx-lab [\d.]+, llama\.cpp-[\d.]+'", targets)
    assert targets.endswith(" 0\n")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_cell_of_a_notebook_has_ten_lines_at_most(path):
    cells = nbformat.read(path, as_version=4).cells
    assert max(len(cell.source.splitlines()) for cell in cells) <= 10


def replace_parameters(notebook, values):
    """Set all parameters of a notebook."""
    (cell,) = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ())]
    named = {line.partition(" = ")[0] for line in cell.source.splitlines()}
    assert named == set(values)
    cell.source = "\n".join(f"{name} = {value!r}" for name, value in values.items())


def outputs_of(notebook, home, folder):
    """Run a notebook that must not fail or write to standard error, and return its outputs.

    Only the packages that ``make lab`` installs can be imported, although the tests need others.
    """
    blocked = sorted(modules_outside(*OF_MAKE_LAB))
    notebook.cells.insert(0, nbformat.v4.new_code_cell(BLOCK.format(blocked)))
    client = NotebookClient(
        notebook, timeout=120, config=without_ports(), resources={"metadata": {"path": str(folder)}}
    )
    client.execute(env={**os.environ, "LMX_LAB_HOME": str(home)})
    shown = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert not [output for output in shown if output["output_type"] == "error" or output.get("name") == "stderr"]
    return shown


def test_the_demo_fails_when_a_cell_fails(tmp_path):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("raise ValueError('broken cell')")])
    nbformat.write(notebook, tmp_path / "broken.ipynb")
    command = [sys.executable, ROOT / "tools" / "demo.py", tmp_path / "broken.ipynb"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "ValueError: broken cell" in done.stdout


def test_the_demo_prints_an_output_while_its_cell_still_runs(tmp_path):
    os.mkfifo(tmp_path / "go")
    source = f"print('begun')\nopen({str(tmp_path / 'go')!r}).read()"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)])
    nbformat.write(notebook, tmp_path / "waiting.ipynb")
    command = [sys.executable, ROOT / "tools" / "demo.py", tmp_path / "waiting.ipynb"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as demo:
        assert "begun\n" in demo.stdout
        (tmp_path / "go").write_text("go")
        assert "'go'" in demo.stdout.read()
    assert demo.returncode == 0
