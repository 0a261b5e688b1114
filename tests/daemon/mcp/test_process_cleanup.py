"""Who belongs to a process, and who does not."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from lmx_lab.daemon.mcp.process_cleanup import MARK, RootProcess, alive, end, family, root_of

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
START = f"subprocess.Popen([sys.executable, '-I', '-c', {STUBBORN!r}])"
PARENT = f"import subprocess, sys; print({START}.pid, flush=True); sys.stdin.read()"
LINES = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "start_new_session": True}


@pytest.fixture
def parent() -> Iterator[subprocess.Popen[str]]:
    """The leader of a session with a child that ignores TERM; neither has a mark."""
    process = subprocess.Popen([sys.executable, "-I", "-c", PARENT], **LINES)  # type: ignore[call-overload]
    root = root_of(process.pid, "none")
    yield process
    end(root, term_s=0)
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        pipe.close()
    process.wait()


def child_of(parent: subprocess.Popen[str]) -> psutil.Process:
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    parent.stdout.readline()
    return child


def test_the_family_is_ended_also_where_it_ignores_term(parent: subprocess.Popen[str]) -> None:
    child = child_of(parent)
    root = root_of(parent.pid, "none")
    assert {process.pid for process in family(root)} == {parent.pid, child.pid}
    assert end(root, term_s=0.1) == []
    assert not alive(child)
    assert family(root) == []


def test_a_number_that_is_another_process_now_is_left_alone(parent: subprocess.Popen[str]) -> None:
    child_of(parent)
    assert family(RootProcess(pid=parent.pid, started=1.0, mark="none")) == []


def test_what_has_not_been_started_yet_has_no_family() -> None:
    assert family(RootProcess(pid=0, started=0.0, mark="none", watched=True)) == []


def test_what_is_left_of_a_session_counts_only_where_its_end_was_seen(parent: subprocess.Popen[str]) -> None:
    child = child_of(parent)
    root = root_of(parent.pid, "none")
    # The child holds its output open.
    assert parent.stdin is not None
    parent.stdin.close()
    parent.wait()
    assert alive(child)
    assert family(RootProcess(pid=root.pid, started=root.started, mark="none")) == []
    assert family(root) == [child]


def test_a_mark_is_inherited_and_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MARK, "the-mark")
    process = subprocess.Popen([sys.executable, "-I", "-c", "input()"], **LINES)  # type: ignore[call-overload]
    assert [found.pid for found in family(RootProcess(pid=1, started=0.0, mark="the-mark"))] == [process.pid]
    process.communicate("")
    assert family(RootProcess(pid=1, started=0.0, mark="the-mark")) == []
