"""Find and end all processes that MCP servers have started, even after the daemon itself was killed.

The processes of a server are found by their session, by their parent and by a mark in their environment. A process that
has left its process group, or whose parents have ended, still carries the mark. All functions block: call them in
threads.

The watchdog runs this file as a program: it imports nothing but psutil and the standard library.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import psutil

MARK = "LMX_LAB_MCP_MARK"
"""Environment variable that a server and all processes that it starts inherit."""


@dataclass(frozen=True, kw_only=True)
class RootProcess:
    """The process of a server, which is the leader of its own session."""

    pid: int
    """0 if the process was not started yet. Its processes are then found by their mark only."""
    started: float
    """Unix time of its start in seconds, as reported by psutil."""
    mark: str
    """Value of ``MARK`` in its environment."""
    is_child: bool = False
    """Whether the process is a child of this one. Its end is then noticed, so its pid cannot have been reused."""


def root_of_child(pid: int, mark: str) -> RootProcess:
    """Describe a child of this process. The start of a child that has ended already is 0."""
    try:
        started = psutil.Process(pid).create_time()
    except psutil.Error:
        started = 0.0
    return RootProcess(pid=pid, started=started, mark=mark, is_child=True)


def find_processes(roots: Collection[RootProcess], known: Iterable[psutil.Process] = ()) -> list[psutil.Process]:
    """Return the living processes of servers.

    Args:
        known: Processes that were found before; those that are alive are included.
    """
    processes = list(psutil.process_iter())
    found = {process.pid: process for process in known if is_alive(process)}
    marks = {root.mark for root in roots}
    sessions = {root.pid for root in roots if _owns_session(root)}
    for process in processes:
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and process.environ().get(MARK) in marks:
                found[process.pid] = process
        with contextlib.suppress(OSError):
            if os.getsid(process.pid) in sessions:
                found[process.pid] = process
    children: dict[int, list[psutil.Process]] = {}
    for process in processes:
        with contextlib.suppress(psutil.Error):
            children.setdefault(process.ppid(), []).append(process)
    pids = list(found)
    while pids:
        for child in children.get(pids.pop(), ()):
            if child.pid not in found:
                found[child.pid] = child
                pids.append(child.pid)
    return [process for process in found.values() if is_alive(process)]


def end_processes(
    roots: Collection[RootProcess],
    known: Iterable[psutil.Process] = (),
    *,
    term_s: float = 2.0,
    settle_s: float = 0.0,
) -> list[psutil.Process]:
    """Send SIGTERM to the processes of servers, and SIGKILL to those that are alive after ``term_s`` seconds.

    Args:
        settle_s: Time after that for which new processes of these servers are searched and killed.

    Returns:
        Processes that are still alive: those of another user, or blocked in the kernel.
    """
    processes = find_processes(roots, known)
    _signal(processes, kill=False)
    wait_ended(processes, term_s)
    settled, rounds = time.monotonic() + settle_s, 0
    while rounds < 5:
        # Searched again, because new processes may have been started since.
        processes = find_processes(roots, processes)
        if processes:
            _signal(processes, kill=True)
            wait_ended(processes, 2.0)
            rounds += 1
        elif time.monotonic() >= settled:
            break
        else:
            time.sleep(0.1)
    return [process for process in processes if is_alive(process)]


def encode_roots(roots: Iterable[RootProcess]) -> str:
    """Return the roots as JSON without line feeds, for a process that is not their parent."""
    return json.dumps([{"pid": root.pid, "started": root.started, "mark": root.mark} for root in roots])


def is_alive(process: psutil.Process) -> bool:
    """Return whether a process runs. A zombie does not: only its exit status has not been read yet."""
    try:
        return bool(process.is_running()) and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def wait_ended(processes: Iterable[psutil.Process], timeout_s: float) -> None:
    """Wait until all processes have ended, at most ``timeout_s`` seconds."""
    # Not psutil's wait: it would read the exit status of children that the event loop waits for.
    deadline = time.monotonic() + timeout_s
    alive = list(processes)
    while (alive := [process for process in alive if is_alive(process)]) and time.monotonic() < deadline:
        time.sleep(0.02)


def _owns_session(root: RootProcess) -> bool:
    """Return whether the session with the root's pid is the root's: the pid may have been reused."""
    if root.pid == 0:
        return False
    try:
        # Start times are relative to the boot time, which moves when the clock is set.
        return abs(psutil.Process(root.pid).create_time() - root.started) < 2.0
    except psutil.NoSuchProcess:
        # Unless it is a child, another process may have had the pid since then, and have left a session behind.
        return root.is_child
    except psutil.Error:
        return False


def _signal(processes: Iterable[psutil.Process], *, kill: bool) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error, OSError):
            process.kill() if kill else process.terminate()


if __name__ == "__main__":
    # Searched for one more second after the processes have ended: one that was being started when the daemon died has
    # no mark yet.
    end_processes([RootProcess(**fields) for fields in json.loads(sys.argv[1])], term_s=1.0, settle_s=1.0)
