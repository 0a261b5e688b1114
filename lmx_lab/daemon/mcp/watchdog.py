"""Run the processes of MCP servers, and record them so that they end even if the daemon is killed.

A watchdog process ends them within seconds. They are also recorded in a file, in case the watchdog was killed too: the
next daemon reads it when it starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from lmx_lab.daemon.mcp import process_cleanup
from lmx_lab.daemon.mcp.process import McpProcess
from lmx_lab.daemon.mcp.process_cleanup import RootProcess, encode_roots, end_processes
from lmx_lab.wire.mcp import McpServerConfig

log = logging.getLogger(__name__)
PROGRAM = Path(__file__).with_name("watchdog_process.py")
_ROOTS = TypeAdapter(list[RootProcess])


class Watchdog:
    """Starts the watchdog process with the first server, and again if it has ended. Used on one event loop.

    The process notices the end of this one by the end of a pipe, which also carries the list of servers.
    """

    def __init__(self, *, restart_s: float = 1.0) -> None:
        """
        Args:
            restart_s: Delay before a process that has ended is started again. It is doubled, up to 60 times, while the
                process ends within a minute.
        """
        self._restart_s = restart_s
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
        # The process ends immediately unless there are still servers.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), 4.0)
        if self._process is not None and self.pid is not None:
            self._process.kill()

    async def _restart_when_ended(self) -> None:
        delay_s, started = self._restart_s, time.monotonic()
        while True:
            await self._ended.wait()
            self._close_pipe()
            is_stable = time.monotonic() - started > 60.0
            delay_s = self._restart_s if is_stable else min(2 * delay_s, 60 * self._restart_s)
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
        process, loop = self._process, asyncio.get_running_loop()

        def wait() -> None:
            process.wait()
            with contextlib.suppress(RuntimeError):  # The loop is closed.
                loop.call_soon_threadsafe(self._ended.set)

        # A thread, because a blocking wait in an executor would delay the exit of the daemon.
        threading.Thread(target=wait, name="lmx-lab MCP watchdog", daemon=True).start()

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


class ServerProcesses:
    """The running processes of this daemon's servers, listed in a file and for the watchdog.

    Most servers exit when their stdin is closed; the lists are for the others. Used on one event loop; files are read
    and written in threads.
    """

    def __init__(self, folder: Path, *, stdin_grace_s: float = 1.0, term_grace_s: float = 2.0) -> None:
        """
        Args:
            folder: Folder of the file.
            stdin_grace_s: Time in which a server may exit after its stdin was closed, before it receives SIGTERM.
            term_grace_s: Time in which it may exit after that, before it receives SIGKILL.
        """
        self._path = folder / "mcp-processes.json"
        self._stdin_grace_s = stdin_grace_s
        self._term_grace_s = term_grace_s
        self._watchdog = Watchdog()
        self._roots: dict[str, RootProcess] = {}
        self._lock = asyncio.Lock()
        self._cleaned = asyncio.Event()

    @property
    def watchdog_pid(self) -> int | None:
        """Id of the watchdog process; None if it does not run."""
        return self._watchdog.pid

    async def end_leftovers(self) -> None:
        """End the processes that an earlier daemon has left. No server is started before, even after an error."""

        def end() -> None:
            try:
                with self._path.open("rb") as file:
                    roots = _ROOTS.validate_json(file.read(2**20))
            except (OSError, ValidationError):
                return
            if roots := [root for root in roots[:1024] if root.mark]:
                end_processes(roots)

        try:
            await asyncio.to_thread(end)
            await self._save()
        finally:
            self._cleaned.set()

    @contextlib.asynccontextmanager
    async def running(self, config: McpServerConfig) -> AsyncIterator[McpProcess]:
        """Start a server, and stop it after the block with all processes that it has started.

        A task that is cancelled leaves only when these processes have ended, whatever it was waiting for.

        Raises:
            McpFailure: The process could not be started.
        """
        # Processes of an earlier daemon may still use a resource, such as a port, that this server needs.
        await self._cleaned.wait()
        root = RootProcess(pid=0, started=0.0, mark=secrets.token_hex(16))

        async def start_process() -> McpProcess:
            # Added before the process starts: if this daemon is killed meanwhile, the process is found by its mark.
            await self.add(root)
            return await McpProcess.start(config, root.mark)

        # A separate task: a start that is cancelled could leave children of a process whose pid is not known.
        start = asyncio.create_task(start_process())
        try:
            await asyncio.wait({start})
            process = start.result()
            await self.add(process.root)
            yield process
        finally:
            cancelled: asyncio.CancelledError | None = None
            end = asyncio.create_task(self._end(root, start))
            while not end.done():
                try:
                    await asyncio.wait({end})
                except asyncio.CancelledError as exc:
                    cancelled = exc
            if cancelled is not None:
                raise cancelled
            end.result()

    async def _end(self, root: RootProcess, start: asyncio.Task[McpProcess]) -> None:
        try:
            await asyncio.wait({start})
            if not start.cancelled() and start.exception() is None:
                await start.result().stop(stdin_grace_s=self._stdin_grace_s, term_grace_s=self._term_grace_s)
        finally:
            self._roots.pop(root.mark, None)
            await self._save()

    async def add(self, root: RootProcess) -> None:
        """Add a server to the lists, or replace the entry with the same mark."""
        self._roots[root.mark] = root
        await self._save()

    async def stop(self) -> None:
        """Stop the watchdog, which ends the servers that still run. Idempotent."""
        await self._watchdog.stop()

    async def _save(self) -> None:
        self._watchdog.watch(self._roots.values())

        def write(text: str) -> None:
            new = self._path.with_suffix(".new")
            # Errors are ignored, since a full disk must not keep a server from being started or stopped.
            with contextlib.suppress(OSError):
                with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
                    file.write(text)
                new.replace(self._path)

        async with self._lock:
            await asyncio.to_thread(write, encode_roots(self._roots.values()))
