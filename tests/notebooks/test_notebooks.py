"""Test that every notebook runs from top to bottom in a real kernel, that they form a course, and their pages."""

import os
import re
import subprocess
import sys
from itertools import pairwise

import nbformat
import pytest
from nbclient import NotebookClient

from lmx_lab.panels.static_views import WIDGET_VIEW
from tests.support.docs import NOTEBOOK_FOLDER, NOTEBOOKS, ROOT
from tests.support.extras import OF_MAKE_LAB, modules_outside
from tests.support.kernels import without_ports

pytestmark = pytest.mark.long
# Values that replace the parameters cells, as with papermill.
BENCH = {"prompt_tokens": 48, "output_tokens": 8, "concurrency": [1, 2], "repeats": 1}
SMALL = {
    "10_bench_decode": {"engine": "mlx", "prompt_tokens": [48, 96], "output_tokens": 8, "requests": 2, "repeats": 1},
    "11_bench_concurrency": {"engine": "mlx", **BENCH},
    "12_compare_servers": {"gguf": "tiny-gguf", "requests": 2, **BENCH},
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


def cells(path):
    return nbformat.read(path, as_version=4).cells


def write(path, *cells):
    """Write a notebook whose first cell is Markdown if it is a heading, and whose other cells are code."""
    kinds = (nbformat.v4.new_markdown_cell if text.startswith("# ") else nbformat.v4.new_code_cell for text in cells)
    made = [kind(text) for kind, text in zip(kinds, cells, strict=True)]
    nbformat.write(nbformat.v4.new_notebook(cells=made), path)


def run_tool(name, *arguments, status=0, **environ):
    """Run a program of ``tools`` and return its output."""
    command = [sys.executable, ROOT / "tools" / name, *arguments]
    done = subprocess.run(command, env={**os.environ, **environ}, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_committed_without_outputs_and_its_cells_have_ten_lines_at_most(path):
    assert all(not cell.get("outputs") and cell.get("execution_count") is None for cell in cells(path))
    assert max(len(cell.source.splitlines()) for cell in cells(path)) <= 10


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_begins_with_a_question_and_ends_with_the_answer(path):
    first, *_, printed, last = cells(path)
    title, blank, question = first.source.splitlines()[:3]
    assert re.fullmatch(rf"# {path.stem[:2]} · \w.*", title)
    assert blank == ""
    assert re.fullmatch(r"\*[A-Z].+\?\*", question)
    assert (printed.cell_type, last.cell_type) == ("code", "markdown")
    assert "print(" in printed.source
    assert last.source.startswith("**Answer:** ")


@pytest.mark.parametrize(("path", "following"), list(pairwise(NOTEBOOKS)), ids=lambda path: path.stem)
def test_a_notebook_names_the_next_one_by_its_title(path, following):
    title = cells(following)[0].source.splitlines()[0].removeprefix("# ")
    assert f"\n\nNext: [{title}]({following.name})" in cells(path)[-1].source


def test_links_between_notebooks_lead_somewhere():
    texts = [cell.source for path in NOTEBOOKS for cell in cells(path)]
    assert set(re.findall(r"\]\((\S+\.ipynb)\)", "\n".join(texts))) == {path.name for path in NOTEBOOKS}


def test_the_demo_ends_with_a_sensible_answer_its_speed_and_the_addresses(starter_home):
    printed = run_tool("demo.py", NOTEBOOK_FOLDER / "00_quickstart.ipynb", LMX_LAB_HOME=str(starter_home))
    assert "The capital of France is Paris." in printed
    assert "openai-python: The capital of Japan is Tokyo." in printed
    assert '"object":"chat.completion"' in printed
    assert "tok/s" in printed
    assert "chat format: http://127.0.0.1:" in printed


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
    # The model has called a function, which was permitted.
    assert any("weather: ok: " in output.get("text", "") for output in shown) == (path.stem == "04_daemon")


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
    check = "print(rows.groupby('target')['engine'].first().to_dict(), rows['error'].count())"
    notebook.cells.append(nbformat.v4.new_code_cell(check))
    shown = outputs_of(notebook, tiny_home, tmp_path)
    answer, targets = [output["text"] for output in shown if output["output_type"] == "stream"][-2:]
    assert "2 at once: lab on llama.cpp has " in answer
    assert "of llama.cpp's server (" in answer
    assert "nan" not in answer
    for target in ("'lab on MLX': 'lmx-lab ", "'mlx_lm.server': 'mlx-lm ", "\"llama.cpp's server\": 'xllamacpp "):
        assert target in targets
    assert re.search(r"'lab on llama\.cpp': 'lmx-lab [\d.]+, llama\.cpp-[\d.]+'", targets)
    assert targets.endswith(" 0\n")


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
    write(tmp_path / "broken.ipynb", "raise ValueError('broken cell')")
    assert "ValueError: broken cell" in run_tool("demo.py", tmp_path / "broken.ipynb", status=1)


def test_the_demo_prints_an_output_while_its_cell_still_runs(tmp_path):
    os.mkfifo(tmp_path / "go")
    write(tmp_path / "waiting.ipynb", f"print('begun')\nopen({str(tmp_path / 'go')!r}).read()")
    command = [sys.executable, ROOT / "tools" / "demo.py", tmp_path / "waiting.ipynb"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as demo:
        assert "begun\n" in demo.stdout
        (tmp_path / "go").write_text("go")
        assert "'go'" in demo.stdout.read()
    assert demo.returncode == 0


# --- the notebooks as pages


def test_a_notebook_becomes_a_page_that_needs_no_other_host(starter_home, minilm, tmp_path):
    run_tool("gallery.py", tmp_path, NOTEBOOK_FOLDER / "03_rerank.ipynb", LMX_LAB_HOME=str(starter_home))
    page, index = ((tmp_path / name).read_text() for name in ("03_rerank.html", "index.html"))
    assert "Desalination plants press sea water" in re.sub(r"<(script|style).*?</\1>", "", page, flags=re.DOTALL)
    # The panel at its end is a static snapshot.
    assert "lmx-snapshot" in page
    assert 'href="04_daemon.html"' in page
    assert not re.findall(r"<(?:script|link|img|iframe)[^>]+(?:src|href)=[\"']?(?:https?:)?//", page)
    assert "<em>Which of these texts answers my question?</em>" in index
    assert "How do I get salt out of sea water?\n0." in index


def test_pieces_of_text_are_one_text_on_the_page(tmp_path):
    source = "for piece in ('sea ', 'and ', 'salt'):\n    print(piece, end='', flush=True)"
    write(tmp_path / "98_stream.ipynb", "# 98 · Stream\n\n*What?*", source)
    run_tool("gallery.py", tmp_path / "pages", tmp_path / "98_stream.ipynb")
    assert "sea and salt" in (tmp_path / "pages" / "98_stream.html").read_text()


def test_a_failing_notebook_has_its_error_on_the_page_and_in_the_exit_status(tmp_path):
    write(tmp_path / "99_broken.ipynb", "# 99 · Broken\n\n*Why?*", "1 / 0")
    run_tool("gallery.py", tmp_path / "pages", tmp_path / "99_broken.ipynb", status=1)
    assert "ZeroDivisionError" in (tmp_path / "pages" / "99_broken.html").read_text()
    assert "ended with an error" in (tmp_path / "pages" / "index.html").read_text()
