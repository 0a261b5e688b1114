"""Test ``%%offload`` and ``%%lmx`` in a real kernel whose loop serves the lab. All tests use the same kernel."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.kernels import Notebook, healthz

LAUNCH = "lab = lmx_lab.launch('tiny', port=0); print(lab.server.mode, lab.server.port)"


@pytest.fixture(scope="module")
def notebook(tiny_home):
    notebook = Notebook(tiny_home)
    notebook.run("%load_ext lmx_lab")
    yield notebook
    stderr = notebook.stderr
    notebook.close()
    assert "Traceback" not in stderr
    assert "never retrieved" not in stderr


@pytest.fixture(scope="module")
def port(notebook):
    """The port of a lab on the kernel's loop; the first test that uses it launches the lab."""
    notebook.run("import lmx_lab.notebook")
    mode, port = notebook.run(LAUNCH).split()
    assert mode == "kernel"
    return int(port)


@dataclass
class Gate:
    """A file for which a cell waits until the test opens it; ``wait`` is the code of the cell."""

    path: Path

    @property
    def wait(self) -> str:
        return f"open({str(self.path)!r}).read()"

    def open(self) -> None:
        self.path.write_text("go")


@pytest.fixture
def gate(tmp_path):
    os.mkfifo(tmp_path / "gate")
    return Gate(tmp_path / "gate")


@pytest.fixture
def run(notebook):
    """A function that runs a cell, and returns its output."""

    def run(code):
        notebook.start(code)
        return notebook.read()

    return run


def test_the_stop_button_ends_the_cell_and_its_thread_still_prints_into_it(notebook, run, gate):
    """Without a server, so that nothing else wakes the kernel's loop."""
    first = notebook.start(f"%%offload\nprint('started', flush=True)\n{gate.wait}\nprint('late', flush=True)\n1 / 0")
    notebook.until(lambda: "started" in first.text)
    notebook.manager.interrupt_kernel()
    notebook.until(lambda: first.ended)
    assert first.error == "KeyboardInterrupt"
    assert "its thread is still running" in first.stderr
    assert "late" not in first.text
    second = run("%%offload\nprint('second', flush=True)\nthreads = __import__('threading').enumerate()")
    assert second.text == "second\n"
    gate.open()
    notebook.until(lambda: "ZeroDivisionError" in first.stderr)
    assert "late" in first.text
    assert second.text == "second\n"
    # A kernel that is shut down does not wait for these threads.
    cell = run("[thread.daemon for thread in threads if thread.name == 'lmx-lab-offload']")
    assert cell.value == {"text/plain": "[True, True]"}


@pytest.mark.long
def test_other_clients_are_answered_while_an_offloaded_cell_is_busy(port, notebook, gate):
    cell = notebook.start(f"%%offload\nprint('started', flush=True)\n{gate.wait}")
    notebook.until(lambda: "started" in cell.text)
    assert healthz(port) == 200
    assert not cell.ended
    gate.open()
    notebook.until(lambda: cell.ended)
    assert cell.value == {"text/plain": "'go'"}


def test_the_verbs_work_in_an_offloaded_cell(port, run):
    cell = run("%%offload\nlab.load('tiny')\nlab.chat('hi', max_tokens=4).usage.completion_tokens")
    assert cell.error is None
    assert cell.value == {"text/plain": "4"}


def test_an_offloaded_cell_behaves_like_other_cells(run):
    run("before = [1]")
    cell = run("%%offload\nprint('words')\ndisplay('shown')\nbefore.append(2)\nafter = before\nlen(after)")
    assert (cell.text, cell.value) == ("words\n", {"text/plain": "2"})
    assert sorted(cell.kinds) == ["display_data", "execute_result", "stream"]
    assert run("after, _").value == {"text/plain": "([1, 2], 2)"}
    assert run("%%offload\nafter;").kinds == []
    cell = run("%%offload\n!echo shell\n%time 3")
    assert "shell" in cell.text
    assert "Wall time" in cell.text
    assert cell.value == {"text/plain": "3"}


def test_an_error_is_raised_in_the_cell_with_its_own_lines(run):
    cell = run("%%offload\n\ndef divide(number):\n    return number / 0\n\ndivide(1)")
    trace = "\n".join(cell.traceback)
    assert cell.error == "ZeroDivisionError"
    assert "----> 6 divide(1)" in trace
    assert "----> 4     return number / 0" in trace
    assert len(set(re.findall(r"Cell (In\[\d+\])", trace))) == 1
    assert "magics.py" not in trace
    stopped = run("%%offload\nnext(iter(()))")
    assert stopped.error == "StopIteration"
    assert "----> 2 next(iter(()))" in stopped.traceback
    assert run("%%offload\nx = = 1").error == "SyntaxError"
    assert "await is not possible" in run("%%offload\nawait nothing").stderr
    assert "first line of its cell" in run("%%time\n%%offload\n1").stderr
    assert "first line of its cell" in run("%%offload\n%%offload\n1").stderr


def test_an_answer_is_streamed_and_then_replaced_by_the_reply(port, run):
    cell = run("%%lmx --max-tokens 12 --temperature 0\nTell me {1 + 1} things.")
    reply = run("print(type(_).__name__, repr(_.text))").text
    assert cell.value is not None
    assert "text/markdown" in cell.value
    assert reply.startswith("Reply ")
    streamed = cell.kinds.index("clear_output")
    assert cell.kinds[0] == "display_data"
    assert set(cell.kinds[1:streamed]) == {"update_display_data"}
    assert cell.kinds[streamed:] == ["clear_output", "execute_result"]


def test_the_stop_button_ends_an_answer_and_its_text_stays(notebook, port, run):
    run("%lmx load tiny")
    cell = notebook.start("%%lmx --max-tokens 4000\nTell me everything.")
    notebook.until(lambda: "display_data" in cell.kinds)
    notebook.manager.interrupt_kernel()
    notebook.until(lambda: cell.ended)
    assert cell.error == "KeyboardInterrupt"
    assert "clear_output" not in cell.kinds
    assert healthz(port) == 200
