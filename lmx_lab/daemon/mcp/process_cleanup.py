"""Find and end all processes that an MCP server has started, also after the daemon itself was killed.

The processes of a server are found by their session, by their parent and by a mark in their environment. A process that
has left its process group, or whose parents have ended, still carries the mark. All functions block: call them in
threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil
from pydantic import BaseModel, TypeAdapter, ValidationError

MARK = "LMX_LAB_MCP_MARK"
"""Environment variable that a server and all processes that it starts inherit."""
START_TOLERANCE_S = 2.0
"""Tolerance when start times are compared. They are relative to the boot time, which moves when the clock is set."""
REGISTRY_FILE = "mcp-processes.json"
REGISTRY_ENTRIES = 1024
REGISTRY_BYTES = 2**20
_POLL_S = 0.02
_KILL_S = 2.0
_KILL_ROUNDS = 5


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


def find_processes(root: RootProcess, known: Iterable[psutil.Process] = ()) -> list[psutil.Process]:
    """Return the living processes of a server.

    Args:
        known: Processes that were found before; those that are alive are included.
    """
    processes = list(psutil.process_iter())
    found = {process.pid: process for process in known if is_alive(process)}
    session = root.pid if _owns_session(root) else None
    for process in processes:
        if _has_mark(process, root.mark) or (session is not None and _session_id(process.pid) == session):
            found[process.pid] = process
    return [process for process in _with_descendants(found, processes) if is_alive(process)]


def end_processes(
    root: RootProcess, known: Iterable[psutil.Process] = (), *, term_s: float = 2.0
) -> list[psutil.Process]:
    """Send SIGTERM to the processes of a server, and SIGKILL to those that are alive after ``term_s`` seconds.

    Returns:
        Processes that are still alive: those of another user, or blocked in the kernel.
    """
    processes = find_processes(root, known)
    _signal(processes, kill=False)
    wait_ended(processes, term_s)
    for _ in range(_KILL_ROUNDS):
        # Searched again, because new processes may have been started since.
        processes = find_processes(root, processes)
        if not processes:
            break
        _signal(processes, kill=True)
        wait_ended(processes, _KILL_S)
    return [process for process in processes if is_alive(process)]


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
        time.sleep(_POLL_S)


def _owns_session(root: RootProcess) -> bool:
    """Return whether the session with the root's pid is the root's: the pid may have been reused."""
    if root.pid == 0:
        return False
    try:
        return abs(psutil.Process(root.pid).create_time() - root.started) < START_TOLERANCE_S
    except psutil.NoSuchProcess:
        # Unless it is a child, another process may have had the pid since then, and have left a session behind.
        return root.is_child
    except psutil.Error:
        return False


def _has_mark(process: psutil.Process, mark: str) -> bool:
    try:
        return process.pid != os.getpid() and process.environ().get(MARK) == mark
    except (psutil.Error, OSError):
        return False


def _session_id(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:
        return None


def _with_descendants(found: dict[int, psutil.Process], processes: list[psutil.Process]) -> list[psutil.Process]:
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
    return list(found.values())


def _signal(processes: Iterable[psutil.Process], *, kill: bool) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error, OSError):
            process.kill() if kill else process.terminate()


# Processes that survive the daemon


class _Entry(BaseModel):
    pid: int
    started: float
    mark: str


_ENTRIES = TypeAdapter(list[_Entry])


class ProcessRegistry:
    """A file that lists the running servers, so that the next daemon can end those that a killed daemon has left.

    Most servers exit when their stdin is closed; this is for the others. Used on one event loop; files are read and
    written in threads.
    """

    def __init__(self, folder: Path | None) -> None:
        """
        Args:
            folder: Folder of the file. If None, nothing is read or written.
        """
        self._path = folder / REGISTRY_FILE if folder is not None else None
        self._roots: dict[str, RootProcess] = {}
        self._lock = asyncio.Lock()
        self.cleaned = asyncio.Event()
        """Set when the processes of an earlier daemon have ended. No server may be started before."""

    async def end_leftovers(self) -> None:
        """End the processes that an earlier daemon has left. Sets ``cleaned`` afterwards, even after an error."""
        try:
            if self._path is not None:
                roots = await asyncio.to_thread(_read_registry, self._path)
                await asyncio.gather(*(asyncio.to_thread(end_processes, root) for root in roots))
                await self._save()
        finally:
            self.cleaned.set()

    async def add(self, root: RootProcess) -> None:
        """Add a server, or replace the entry with the same mark."""
        self._roots[root.mark] = root
        await self._save()

    async def remove(self, root: RootProcess) -> None:
        """Remove a server whose processes have ended."""
        self._roots.pop(root.mark, None)
        await self._save()

    async def _save(self) -> None:
        if self._path is None:
            return
        async with self._lock:
            await asyncio.to_thread(_write_registry, self._path, list(self._roots.values()))


def _read_registry(path: Path) -> list[RootProcess]:
    try:
        with path.open("rb") as file:
            entries = _ENTRIES.validate_json(file.read(REGISTRY_BYTES))
    except (OSError, ValidationError):
        return []
    return [
        RootProcess(pid=entry.pid, started=entry.started, mark=entry.mark)
        for entry in entries[:REGISTRY_ENTRIES]
        if entry.mark
    ]


def _write_registry(path: Path, roots: list[RootProcess]) -> None:
    text = json.dumps([{"pid": root.pid, "started": root.started, "mark": root.mark} for root in roots])
    new = path.with_suffix(".new")
    # Errors are ignored, since a full disk must not keep a server from being started or stopped.
    with contextlib.suppress(OSError):
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(text)
        new.replace(path)
