"""Finding and ending the processes of a server."""

import secrets
import subprocess
import sys

import psutil
import pytest

from lmx_lab.daemon.mcp.process_cleanup import MARK, RootProcess, end_processes, find_processes, is_alive, root_of_child
from tests.support.mcp import STUBBORN

START = f"subprocess.Popen([sys.executable, '-I', '-c', {STUBBORN!r}])"
PARENT = f"import subprocess, sys; print({START}.pid, flush=True); sys.stdin.read()"
LINES = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "start_new_session": True}


@pytest.fixture
def parent():
    """The leader of a session with a child that ignores SIGTERM. Neither has a mark."""
    process = subprocess.Popen([sys.executable, "-I", "-c", PARENT], **LINES)
    root = root_of_child(process.pid, "none")
    yield process
    end_processes([root], term_s=0)
    for pipe in (process.stdin, process.stdout):
        pipe.close()
    process.wait()


def child_of(parent):
    """Return the child of the process once it ignores SIGTERM."""
    # The empty line of the child can arrive before the line in which the parent writes its pid.
    lines = sorted(parent.stdout.readline() for _ in range(2))
    return psutil.Process(int(lines[1]))


def test_child_processes_that_ignore_sigterm_are_ended(parent):
    child = child_of(parent)
    root = root_of_child(parent.pid, "none")
    assert {process.pid for process in find_processes([root])} == {parent.pid, child.pid}
    assert end_processes([root], term_s=0.1) == []
    assert not is_alive(child)
    assert find_processes([root]) == []


def test_a_process_that_reuses_the_pid_is_not_affected(parent):
    child_of(parent)
    assert find_processes([RootProcess(pid=parent.pid, started=1.0, mark="none")]) == []


def test_a_server_that_was_not_started_has_no_processes():
    assert find_processes([RootProcess(pid=0, started=0.0, mark="none", is_child=True)]) == []


def test_a_session_without_its_leader_counts_only_if_the_leader_was_a_child(parent):
    child = child_of(parent)
    root = root_of_child(parent.pid, "none")
    # Not communicate(): the child keeps the output open.
    parent.stdin.close()
    parent.wait()
    assert is_alive(child)
    assert find_processes([RootProcess(pid=root.pid, started=root.started, mark="none")]) == []
    assert find_processes([root]) == [child]


def test_processes_are_found_by_their_mark(monkeypatch):
    # Unique, because other runs of the tests may be looking for their mark.
    mark = secrets.token_hex(16)
    monkeypatch.setenv(MARK, mark)
    command = [sys.executable, "-I", "-c", "print(flush=True); input()"]
    process = subprocess.Popen(command, **LINES)
    # The environment of a process cannot be read yet when Popen returns.
    process.stdout.readline()
    assert [found.pid for found in find_processes([RootProcess(pid=1, started=0.0, mark=mark)])] == [process.pid]
    process.communicate("")
    assert find_processes([RootProcess(pid=1, started=0.0, mark=mark)]) == []
