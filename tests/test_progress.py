"""Test progress bars in terminals and files."""

import io
from types import SimpleNamespace

import nbformat
import pytest
from nbclient import NotebookClient
from rich.console import Console

from lmx_lab.progress import bar, counter
from lmx_lab.values.models import ModelEvent
from lmx_lab.weights.store import Progress


def steps():
    for done in (0, 500_000, 1_000_000):
        yield Progress(stage="download", done_bytes=done, total_bytes=1_000_000)


def test_a_terminal_shows_a_bar_during_a_download():
    console = Console(file=io.StringIO(), force_terminal=True, width=80, force_jupyter=False)
    with bar("org/[name]", console) as shown:
        for step in steps():
            shown.update(step)
    assert "org/[name]: download" in console.file.getvalue()


def test_a_step_without_a_number_of_bytes_shows_only_its_stage():
    console = Console(file=io.StringIO(), force_terminal=True, width=80, force_jupyter=False)
    with bar("smollm2", console) as shown:
        shown.update(ModelEvent(model="smollm2", stage="load", total_bytes=1_000_000))
    output = console.file.getvalue()
    assert "smollm2: load" in output
    assert "MB" not in output
    assert "bytes" not in output


def test_a_narrow_terminal_shows_the_count():
    console = Console(file=io.StringIO(), force_terminal=True, width=60, force_jupyter=False)
    with counter("bench", console=console) as shown:
        shown.show("[lab] " * 20, 3, 12)
    output = console.file.getvalue()
    assert " 3/12" in output
    assert "bench: [lab]" in output


@pytest.mark.parametrize("terminal", [False, True])
def test_nothing_is_drawn_into_a_file_or_before_the_first_step(terminal):
    console = Console(file=io.StringIO(), force_terminal=terminal, force_jupyter=False)
    with bar("model", console) as shown:
        for step in [] if terminal else steps():
            shown.update(step)
    assert console.file.getvalue() == ""


def test_a_counter_tells_a_server_what_uses_it():
    server = SimpleNamespace(job="")
    with counter("map", server) as shown:
        shown.show("2 rows/s", 3, 12)
        assert server.job == "Map, 3 of 12: 2 rows/s"
    assert server.job == ""


@pytest.mark.slow
def test_a_notebook_keeps_no_bar_after_its_end():
    cell = "from lmx_lab.progress import counter\nwith counter('map') as shown:\n    shown.show('', 1, 2)\n    {}"
    cells = [nbformat.v4.new_code_cell(cell.format(end)) for end in ("pass", "1 / 0")]
    notebook = nbformat.v4.new_notebook(cells=cells)
    NotebookClient(notebook, timeout=120, allow_errors=True).execute()
    removed = {"text/html": "", "text/plain": ""}
    first, second = ([each.get("data") for each in cell.outputs] for cell in notebook.cells)
    assert (first, second) == ([removed], [removed, None])
