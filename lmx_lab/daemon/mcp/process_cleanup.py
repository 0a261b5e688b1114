"""All processes that come from one: found by session, by parent and by a mark in their environment, then ended.

Blocking; for threads. A process that has left its group, or whose parents are gone, still carries the mark.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass

import psutil

MARK = "LMX_LAB_MCP_MARK"
"""The environment variable that a server and all that it starts inherit."""
START_SLACK_S = 2.0
"""Start times are counted from the boot, whose time moves when the clock is set."""
_POLL_S = 0.02
_KILL_S = 2.0
_ROUNDS = 5


@dataclass(frozen=True, kw_only=True)
class RootProcess:
    """The first process of a family: the leader of its own session."""

    pid: int
    """0 where it has not been started yet: only the mark finds it then."""
    started: float
    """In seconds since the epoch, as psutil has it."""
    mark: str
    watched: bool = False
    """Whether its end was, or would be, seen at once: then its number cannot be another session's yet."""


def root_of(pid: int, mark: str) -> RootProcess:
    """The root that a child of this process is; one that has ended already has 0 as its start."""
    try:
        started = psutil.Process(pid).create_time()
    except psutil.Error:
        started = 0.0
    return RootProcess(pid=pid, started=started, mark=mark, watched=True)


def family(root: RootProcess, known: Iterable[psutil.Process] = ()) -> list[psutil.Process]:
    """Who is alive of the family, and of those ``known`` from before."""
    processes = list(psutil.process_iter())
    found = {process.pid: process for process in known if alive(process)}
    session = root.pid if _is_ours(root) else None
    for process in processes:
        if _carries(process, root.mark) or (session is not None and _session(process.pid) == session):
            found[process.pid] = process
    return [process for process in _with_children(found, processes) if alive(process)]


def end(root: RootProcess, known: Iterable[psutil.Process] = (), *, term_s: float = 2.0) -> list[psutil.Process]:
    """Send TERM to the family, after ``term_s`` KILL to who is left and to who has come since.

    Returns:
        Who lives even so: processes of another user, or stuck in the kernel.
    """
    members = family(root, known)
    _signal(members, kill=False)
    wait_gone(members, term_s)
    for _ in range(_ROUNDS):
        members = family(root, members)
        if not members:
            break
        _signal(members, kill=True)
        wait_gone(members, _KILL_S)
    return [process for process in members if alive(process)]


def alive(process: psutil.Process) -> bool:
    """Whether it runs; a zombie does not, it only waits to be noticed."""
    try:
        return bool(process.is_running()) and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def wait_gone(processes: Iterable[psutil.Process], timeout_s: float) -> None:
    """Until all have ended, at most so long."""
    # Not psutil's own wait: it would take the exit status away from the event loop, whose children some of them are.
    end_at = time.monotonic() + timeout_s
    left = list(processes)
    while (left := [process for process in left if alive(process)]) and time.monotonic() < end_at:
        time.sleep(_POLL_S)


def _is_ours(root: RootProcess) -> bool:
    """Whether the session with the root's number is the root's: the number may have been given again."""
    if root.pid == 0:
        return False
    try:
        return abs(psutil.Process(root.pid).create_time() - root.started) < START_SLACK_S
    except psutil.NoSuchProcess:
        # Somebody else may have had the number since, and have left processes with it.
        return root.watched
    except psutil.Error:
        return False


def _carries(process: psutil.Process, mark: str) -> bool:
    try:
        return process.pid != os.getpid() and process.environ().get(MARK) == mark
    except (psutil.Error, OSError):
        return False


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:
        return None


def _with_children(found: dict[int, psutil.Process], processes: list[psutil.Process]) -> list[psutil.Process]:
    children: dict[int, list[psutil.Process]] = {}
    for process in processes:
        with contextlib.suppress(psutil.Error):
            children.setdefault(process.ppid(), []).append(process)
    ahead = list(found)
    while ahead:
        for child in children.get(ahead.pop(), ()):
            if child.pid not in found:
                found[child.pid] = child
                ahead.append(child.pid)
    return list(found.values())


def _signal(members: Iterable[psutil.Process], *, kill: bool) -> None:
    for process in members:
        with contextlib.suppress(psutil.Error, OSError):
            process.kill() if kill else process.terminate()
