"""Test that every notebook runs from top to bottom in a real kernel, that they form a course, and their pages."""

import contextlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
from itertools import pairwise
from urllib.request import urlopen

import nbformat
import papermill
import pytest

from lmx_lab.panels.workbench import WIDGET_VIEW
from tests.support.docs import DOCS, NOTEBOOK_FOLDER, NOTEBOOKS, ROOT
from tests.support.extras import OF_MAKE_LAB, modules_outside
from tests.support.kernels import Notebook, without_ports
from tests.support.waiting import until

pytestmark = pytest.mark.long
# Values that replace the defaults in the cells with parameters.
BENCH = {"prompt_tokens": 48, "output_tokens": 8, "concurrency": [1, 2], "repeats": 1}
SMALL = {
    "10_bench_decode": {"engine": "mlx", "prompt_tokens": [48, 96], "output_tokens": 8, "requests": 6, "repeats": 1},
    "11_bench_concurrency": {"engine": "mlx", **BENCH},
    "12_compare_servers": {"gguf": "tiny-gguf", "requests": 2, **BENCH, "repeats": 3},
}
ANSWERS = {
    "10_bench_decode": "the longer prompt: ",
    "11_bench_concurrency": "2 users together: ",
    "12_compare_servers": "2 at once: lab on MLX has ",
}
EMPTY = frozenset({"", "NaN", "NaT", "None", "&lt;NA&gt;"})
MAY_BE_EMPTY = ("error", "pinned")
"""Columns that mark exceptions, which the course does not have."""
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


@pytest.fixture(scope="session")
def course_home(starter_home, smollm2_gguf, minilm):
    """A lab's home with the starter models as ``launch`` downloads them, so that it chooses the default engine."""
    home = starter_home.with_name(f"{starter_home.name}-course")
    shutil.rmtree(home, ignore_errors=True)
    for name in ("smollm2-135m", minilm.path.name):
        shutil.copytree(starter_home / "models" / name, home / "models" / name, copy_function=os.link)
    (home / "models" / "smollm2-135m-gguf").mkdir()
    os.link(smollm2_gguf, home / "models" / "smollm2-135m-gguf" / smollm2_gguf.name)
    return home


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
def test_a_notebook_is_written_as_jupyterlab_saves_it(path):
    assert path.read_text(encoding="utf-8") == nbformat.writes(nbformat.read(path, as_version=4)) + "\n"


def test_make_lab_copies_the_notebooks_keeps_changed_copies_and_adds_what_jupyterlab_would_add(tmp_path):
    folder = tmp_path / "course"
    run_tool("course.py", folder)
    (folder / "00_quickstart.ipynb").write_text("changed")
    run_tool("course.py", folder)
    copies = sorted(folder.iterdir())
    assert [copy.name for copy in copies] == [path.name for path in NOTEBOOKS]
    assert copies.pop(0).read_text() == "changed"
    for copy, path in zip(copies, NOTEBOOKS[1:], strict=True):
        copied, original = (nbformat.read(each, as_version=4) for each in (copy, path))
        assert copied.cells == original.cells
        assert copied.metadata.language_info.version == platform.python_version()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_begins_with_a_question_and_ends_with_the_answer(path):
    first, *_, printed, last = cells(path)
    title, blank, question = first.source.splitlines()[:3]
    assert re.fullmatch(rf"# {path.stem[:2]} · \w.*", title)
    assert blank == ""
    assert re.fullmatch(r"\*[A-Z].+\?\*", question)
    page, anchor = re.search(r"\n\nDocumentation: \[.+\]\(\.\./docs/([\w-]+\.md)#?([\w-]*)\)$", first.source).groups()
    headings = re.findall(r"^#+ (.+)$", (DOCS / page).read_text(encoding="utf-8"), re.MULTILINE)
    assert anchor in {"", *(heading.lower().replace(" ", "-") for heading in headings)}
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
def test_a_notebook_runs_from_top_to_bottom(path, course_home, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    shown = outputs_of(notebook, course_home, tmp_path)
    assert any(WIDGET_VIEW in output.get("data", ()) for output in shown)
    assert (tmp_path / "run.html").exists() == (path.stem == "02_metrics")
    # The model has called a function, which was permitted.
    assert any("weather: ok: " in output.get("text", "") for output in shown) == (path.stem == "04_daemon")


@pytest.mark.parametrize("stem", SMALL)
def test_a_notebook_that_measures_takes_parameters_and_ends_with_its_answer(stem, tiny_home, tmp_path):
    notebook = nbformat.read(NOTEBOOK_FOLDER / f"{stem}.ipynb", as_version=4)
    # Simulate that the extra is not installed.
    notebook.cells.insert(0, nbformat.v4.new_code_cell("import sys\nsys.modules['xllamacpp'] = None"))
    shown = outputs_of(notebook, tiny_home, tmp_path, model="tiny", **SMALL[stem])
    assert any("image/png" in output.get("data", ()) for output in shown)
    last = [output["text"] for output in shown if output["output_type"] == "stream"][-1]
    assert ANSWERS[stem] in last
    assert "nan" not in last
    notes = [output["text"] for output in shown if "pip install 'lmx-lab[gguf]'" in output.get("text", "")]
    assert len(notes) == (stem == "12_compare_servers")


def test_both_engines_and_both_other_servers_are_compared_in_one_table(tiny_home, tiny_gguf, tmp_path):
    notebook = nbformat.read(NOTEBOOK_FOLDER / "12_compare_servers.ipynb", as_version=4)
    values = {"model": "tiny", **SMALL["12_compare_servers"], "gguf": str(tiny_gguf)}
    check = "print(rows.groupby('target')['engine'].first().to_dict(), rows['error'].count())"
    notebook.cells.append(nbformat.v4.new_code_cell(check))
    shown = outputs_of(notebook, tiny_home, tmp_path, **values)
    answer, targets = [output["text"] for output in shown if output["output_type"] == "stream"][-2:]
    assert "2 at once: lab on llama.cpp has " in answer
    assert "of llama.cpp's server (" in answer
    assert "nan" not in answer
    for target in ("'lab on MLX': 'lmx-lab ", "'mlx_lm.server': 'mlx-lm ", "\"llama.cpp's server\": 'xllamacpp "):
        assert target in targets
    assert re.search(r"'lab on llama\.cpp': 'lmx-lab [\d.]+, llama\.cpp-[\d.]+'", targets)
    assert targets.endswith(" 0\n")


def test_the_servers_of_a_notebook_end_with_its_kernel_even_if_it_is_killed(tmp_path):
    course = {cell.id: cell.source for cell in cells(NOTEBOOK_FOLDER / "12_compare_servers.ipynb")}
    with contextlib.closing(Notebook(tmp_path)) as notebook:
        for id_ in ("12-06", "12-07", "12-25"):
            notebook.run(course[id_])
        started = (
            "port = free_port()\nserver = start('-m', 'http.server', str(port), '--bind', '127.0.0.1')\nprint(port)"
        )
        url = f"http://127.0.0.1:{int(notebook.run(started))}"
        until(lambda: answers(url))
        notebook.process.send_signal(signal.SIGKILL)
        until(lambda: not answers(url))


def answers(url):
    try:
        return urlopen(url, timeout=5).status == 200
    except OSError:
        return False


def outputs_of(notebook, home, folder, **parameters):
    """Run a notebook with papermill, in another folder and in a kernel of another name, and return its outputs. It must
    not fail, write to standard error, or show a table with an empty column.

    Only the packages that ``make lab`` installs can be imported, although the tests need others.

    Args:
        parameters: New values of parameters; the notebook's cell of parameters must define each of them.
    """
    blocked = sorted(modules_outside(*OF_MAKE_LAB))
    notebook.cells.insert(0, nbformat.v4.new_code_cell(BLOCK.format(blocked)))
    kernel = folder / "kernels" / "other" / "kernel.json"
    kernel.parent.mkdir(parents=True)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    kernel.write_text(json.dumps({"argv": command, "display_name": "Other", "language": "python"}))
    saved = folder / "saved.ipynb"
    with pytest.MonkeyPatch.context() as environ:
        environ.setenv("JUPYTER_PATH", str(folder))
        environ.setenv("LMX_LAB_HOME", str(home))
        papermill.execute_notebook(
            notebook,
            saved,
            parameters,
            kernel_name="other",
            cwd=folder,
            progress_bar=False,
            request_save_on_cell_execute=False,
            execution_timeout=120,
            config=without_ports(),
        )
    assert set(parameters) <= set(papermill.inspect_notebook(str(saved)))
    shown = [output for cell in cells(saved) for output in cell.get("outputs", ())]
    assert not [output for output in shown if output["output_type"] == "error" or output.get("name") == "stderr"]
    for output in shown:
        check_tables(output)
    return shown


def check_tables(output):
    """Check that a displayed table has rows, and that each of its columns has values."""
    data = output.get("data", {})
    for table in re.findall(r"<table.*?</table>", data.get("text/html", ""), re.DOTALL):
        rows = [
            [re.sub(r"<[^>]+>", "", cell).strip() for cell in re.findall(r"<t[hd]\b.*?</t[hd]>", row, re.DOTALL)]
            for row in re.findall(r"<tr.*?</tr>", table, re.DOTALL)
        ]
        if "<th" in table:
            assert len(rows) > 1, table
            for name, values in zip(rows[0], zip(*rows[1:], strict=False), strict=False):
                assert name in MAY_BE_EMPTY or not EMPTY.issuperset(values), (name, rows)
    if "text/html" not in data:
        assert not re.search(r"\bnan\b", data.get("text/plain", "") + output.get("text", ""), re.IGNORECASE), output


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
