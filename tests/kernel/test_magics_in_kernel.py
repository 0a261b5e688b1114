"""Test ``%%offload`` and ``%%lmx`` in a real kernel whose loop serves the lab. All tests use the same kernel."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.kernels import healthz

if TYPE_CHECKING:
    from tests.support.kernels import Notebook

LAUNCH = "lab = lmx_lab.launch('tiny', port=0); print(lab.server.mode, lab.server.port)"
WAIT_S = 60


@pytest.fixture(scope="module")
def notebook(tiny_home):
    from tests.support.kernels import Notebook

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


@dataclass
class Cell:
    """The messages that the kernel has published for a cell."""

    messages: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def text(self, name: str = "stdout") -> str:
        return "".join(c["text"] for kind, c in self.messages if kind == "stream" and c["name"] == name)

    @property
    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.messages if kind not in ("status", "execute_input")]

    @property
    def value(self) -> dict[str, Any] | None:
        return next((content["data"] for kind, content in self.messages if kind == "execute_result"), None)

    @property
    def error(self) -> tuple[str, str] | None:
        """Name of the exception, and its traceback without colours."""
        for kind, content in self.messages:
            if kind == "error":
                return content["ename"], re.sub(r"\x1b\[[\d;]*m", "", "\n".join(content["traceback"]))
        return None

    @property
    def ended(self) -> bool:
        return ("status", {"execution_state": "idle"}) in self.messages


class Cells:
    """Runs cells, and separates their output."""

    def __init__(self, notebook: Notebook) -> None:
        self._client = notebook.client
        self._cells: dict[str, Cell] = {}

    def start(self, code: str) -> Cell:
        cell = self._cells[self._client.execute(code)] = Cell()
        return cell

    def until(self, done: Any) -> None:
        while not done():
            message = self._client.get_iopub_msg(timeout=WAIT_S)
            cell = self._cells.get(message["parent_header"].get("msg_id"))
            if cell is not None:
                cell.messages.append((message["msg_type"], message["content"]))

    def run(self, code: str) -> Cell:
        cell = self.start(code)
        self.until(lambda: cell.ended)
        return cell


@pytest.fixture
def cells(notebook):
    return Cells(notebook)


def test_the_stop_button_ends_the_cell_and_its_thread_still_prints_into_it(notebook, cells, gate):
    """Without a server, so that nothing else wakes the kernel's loop."""
    first = cells.start(f"%%offload\nprint('started', flush=True)\n{gate.wait}\nprint('late', flush=True)\n1 / 0")
    cells.until(lambda: "started" in first.text())
    notebook.manager.interrupt_kernel()
    cells.until(lambda: first.ended)
    assert first.error is not None
    assert first.error[0] == "KeyboardInterrupt"
    assert "its thread is still running" in first.text("stderr")
    assert "late" not in first.text()
    second = cells.run("%%offload\nprint('second', flush=True)\nthreads = __import__('threading').enumerate()")
    assert second.text() == "second\n"
    gate.open()
    cells.until(lambda: "ZeroDivisionError" in first.text("stderr"))
    assert "late" in first.text()
    assert second.text() == "second\n"
    # A kernel that is shut down does not wait for these threads.
    cell = cells.run("[thread.daemon for thread in threads if thread.name == 'lmx-lab-offload']")
    assert cell.value == {"text/plain": "[True, True]"}


@pytest.mark.long
def test_other_clients_are_answered_while_an_offloaded_cell_is_busy(port, cells, gate):
    cell = cells.start(f"%%offload\nprint('started', flush=True)\n{gate.wait}")
    cells.until(lambda: "started" in cell.text())
    assert healthz(port) == 200
    assert not cell.ended
    gate.open()
    cells.until(lambda: cell.ended)
    assert cell.value == {"text/plain": "'go'"}


def test_an_offloaded_cell_can_wait_for_its_own_server(port, cells):
    cell = cells.run(
        "%%offload\nimport urllib.request\nwith urllib.request.urlopen(lab.url + '/healthz') as a: s = a.status\ns"
    )
    assert cell.value == {"text/plain": "200"}


def test_the_verbs_work_in_an_offloaded_cell(port, cells):
    cell = cells.run("%%offload\nlab.load('tiny')\nlab.chat('hi', max_tokens=4).usage.completion_tokens")
    assert cell.error is None
    assert cell.value == {"text/plain": "4"}


def test_an_offloaded_cell_behaves_like_other_cells(cells):
    cells.run("before = [1]")
    cell = cells.run("%%offload\nprint('words')\ndisplay('shown')\nbefore.append(2)\nafter = before\nlen(after)")
    assert (cell.text(), cell.value) == ("words\n", {"text/plain": "2"})
    assert sorted(cell.kinds) == ["display_data", "execute_result", "stream"]
    assert cells.run("after, _").value == {"text/plain": "([1, 2], 2)"}
    assert cells.run("%%offload\nafter;").kinds == []
    cell = cells.run("%%offload\n!echo shell\n%time 3")
    assert "shell" in cell.text()
    assert "Wall time" in cell.text()
    assert cell.value == {"text/plain": "3"}


def test_an_error_is_raised_in_the_cell_with_its_own_lines(cells):
    cell = cells.run("%%offload\n\ndef divide(number):\n    return number / 0\n\ndivide(1)")
    assert cell.error is not None
    name, trace = cell.error
    assert name == "ZeroDivisionError"
    assert "----> 6 divide(1)" in trace
    assert "----> 4     return number / 0" in trace
    assert len(set(re.findall(r"Cell (In\[\d+\])", trace))) == 1
    assert "magics.py" not in trace
    stopped = cells.run("%%offload\nnext(iter(()))").error
    assert stopped is not None
    assert stopped[0] == "StopIteration"
    assert "----> 2 next(iter(()))" in stopped[1]
    assert cells.run("%%offload\nx = = 1").error[0] == "SyntaxError"
    assert "await is not possible" in cells.run("%%offload\nawait nothing").text("stderr")
    assert "first line of its cell" in cells.run("%%time\n%%offload\n1").text("stderr")
    assert "first line of its cell" in cells.run("%%offload\n%%offload\n1").text("stderr")


def test_loading_again_reloading_and_unloading_are_harmless(cells):
    cells.run("%load_ext lmx_lab\n%reload_ext lmx_lab\n%reload_ext lmx_lab")
    assert cells.run("%%offload\n5").value == {"text/plain": "5"}
    cells.run("%unload_ext lmx_lab")
    assert "not found" in cells.run("%%offload\n5").text("stderr")
    cells.run("%load_ext lmx_lab")
    assert cells.run("%%offload\n5").value == {"text/plain": "5"}


def test_an_answer_is_streamed_and_then_replaced_by_the_reply(port, cells):
    cell = cells.run("%%lmx --max-tokens 12 --temperature 0\nTell me {1 + 1} things.")
    reply = cells.run("print(type(_).__name__, repr(_.text))").text()
    assert cell.value is not None
    assert "text/markdown" in cell.value
    assert reply.startswith("Reply ")
    streamed = cell.kinds.index("clear_output")
    assert cell.kinds[0] == "display_data"
    assert set(cell.kinds[1:streamed]) == {"update_display_data"}
    assert cell.kinds[streamed:] == ["clear_output", "execute_result"]


@pytest.mark.long
def test_an_error_of_the_lab_is_one_line(port, cells):
    assert "GB freed" in cells.run("%lmx unload").text()
    cell = cells.run("%lmx ask What's up?")
    assert cell.text("stderr").startswith("UsageError: ")
    assert "load" in cell.text("stderr")
    assert cell.error is None
    assert cells.run("%lmx load tiny").error is None
    assert cells.run("%lmx ask What's up?").value is not None


def test_the_stop_button_ends_an_answer_and_its_text_stays(notebook, port, cells):
    cells.run("%lmx load tiny")
    cell = cells.start("%%lmx --max-tokens 4000\nTell me everything.")
    cells.until(lambda: "display_data" in cell.kinds)
    notebook.manager.interrupt_kernel()
    cells.until(lambda: cell.ended)
    assert cell.error is not None
    assert cell.error[0] == "KeyboardInterrupt"
    assert "clear_output" not in cell.kinds
    assert healthz(port) == 200
