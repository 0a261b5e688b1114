"""Record the running MCP servers, so that their processes end even if the daemon is killed.

A watchdog process ends them within seconds. They are also recorded in a file, in case the watchdog was killed too: the
next daemon reads it when it starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path

from pydantic import BaseModel, TypeAdapter, ValidationError

from lmx_lab.daemon.mcp import process_cleanup
from lmx_lab.daemon.mcp.process_cleanup import RootProcess, encode_roots, end_processes

log = logging.getLogger(__name__)
PROGRAM = Path(__file__).with_name("watchdog_process.py")
RESTART_S, LONGEST_RESTART_S = 1.0, 60.0
"""Delay before a watchdog that has ended is started again, and the limit up to which the delay is doubled."""
STABLE_S = 60.0
"""Time after which the delay is reset."""
STOP_S = 4.0
"""Time in which the watchdog must end after ``stop``. It ends immediately unless there are still servers."""
REGISTRY_FILE = "mcp-processes.json"
REGISTRY_ENTRIES = 1024
REGISTRY_BYTES = 2**20


class Watchdog:
    """Starts the watchdog process with the first server, and again if it has ended. Used on one event loop.

    The process notices the end of this one by the end of a pipe, which also carries the list of servers.
    """

    def __init__(self) -> None:
        self._servers = encode_roots(())
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: int | None = None
        self._ended = asyncio.Event()
        """Set when the process has ended, or could not be started."""
        self._task: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """Id of the watchdog process; None if it does not run."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    def watch(self, roots: Iterable[RootProcess]) -> None:
        """Replace the list of servers that end with this process."""
        servers, self._servers = self._servers, encode_roots(roots)
        if servers == self._servers:
            return
        if self._task is None:
            # Not in the task, because the process must run before the first server is started.
            self._start_process()
            self._task = asyncio.create_task(self._restart_when_ended(), name="lmx-lab MCP watchdog")
            # Not at the end of the task, which does not run if it is cancelled before its first step.
            self._task.add_done_callback(lambda _: self._close_pipe())
        else:
            self._send()

    async def stop(self) -> None:
        """Stop the watchdog process. It first ends the servers that are still on the list. Idempotent."""
        if self._task is None or self._task.done():
            return
        self._task.cancel()
        await asyncio.wait({self._task})
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), STOP_S)
        if self._process is not None and self.pid is not None:
            self._process.kill()

    async def _restart_when_ended(self) -> None:
        delay_s, started = RESTART_S, time.monotonic()
        while True:
            await self._ended.wait()
            self._close_pipe()
            delay_s = RESTART_S if time.monotonic() - started > STABLE_S else min(2 * delay_s, LONGEST_RESTART_S)
            log.warning("the watchdog of the MCP servers has ended; it is started again in %g s", delay_s)
            await asyncio.sleep(delay_s)
            started = time.monotonic()
            self._start_process()

    def _start_process(self) -> None:
        self._ended.clear()
        command = [sys.executable, "-P", "-S", str(PROGRAM), str(os.getpid()), process_cleanup.__file__]
        null = subprocess.DEVNULL
        try:
            reader, self._pipe = os.pipe()
            try:
                os.set_blocking(self._pipe, False)
                self._process = subprocess.Popen(
                    command, stdin=reader, stdout=null, stderr=null, cwd="/", start_new_session=True
                )
            finally:
                os.close(reader)
        except OSError as exc:
            log.warning("the watchdog of the MCP servers could not be started: %s", exc)
            self._ended.set()
            return
        self._send()
        # A thread, because a blocking wait in an executor would delay the exit of the daemon.
        wait = (self._process, asyncio.get_running_loop())
        threading.Thread(target=self._wait, args=wait, name="lmx-lab MCP watchdog", daemon=True).start()

    def _wait(self, process: subprocess.Popen[bytes], loop: asyncio.AbstractEventLoop) -> None:
        process.wait()
        with contextlib.suppress(RuntimeError):  # The loop is closed.
            loop.call_soon_threadsafe(self._ended.set)

    def _send(self) -> None:
        if self._pipe is None or self._process is None:
            return
        line = f"{self._servers}\n".encode()
        try:
            is_complete = os.write(self._pipe, line) == len(line)
        except OSError:
            is_complete = False
        if not is_complete:
            # It has ended, or does not read. The next one receives the list at its start.
            self._process.kill()

    def _close_pipe(self) -> None:
        if self._pipe is not None:
            os.close(self._pipe)
            self._pipe = None


# The running servers


class _Entry(BaseModel):
    pid: int
    started: float
    mark: str


_ENTRIES = TypeAdapter(list[_Entry])


class ProcessRegistry:
    """The running servers of this daemon, listed in a file and for the watchdog.

    Most servers exit when their stdin is closed; this is for the others. Used on one event loop; files are read and
    written in threads.
    """

    def __init__(self, folder: Path | None) -> None:
        """
        Args:
            folder: Folder of the file. If None, nothing is read or written.
        """
        self.watchdog = Watchdog()
        self._path = folder / REGISTRY_FILE if folder is not None else None
        self._roots: dict[str, RootProcess] = {}
        self._lock = asyncio.Lock()
        self.cleaned = asyncio.Event()
        """Set when the processes of an earlier daemon have ended. No server may be started before."""

    async def end_leftovers(self) -> None:
        """End the processes that an earlier daemon has left. Sets ``cleaned`` afterwards, even after an error."""
        try:
            if self._path is not None:
                if roots := await asyncio.to_thread(_read_registry, self._path):
                    await asyncio.to_thread(end_processes, roots)
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
        self.watchdog.watch(self._roots.values())
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


def _write_registry(path: Path, roots: Iterable[RootProcess]) -> None:
    new = path.with_suffix(".new")
    # Errors are ignored, since a full disk must not keep a server from being started or stopped.
    with contextlib.suppress(OSError):
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(encode_roots(roots))
        new.replace(path)
