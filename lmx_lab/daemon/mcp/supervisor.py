"""One MCP server and the task that owns its connection: started, watched, started again, ended."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lmx_lab.daemon.mcp.failure import FINAL, McpFailure
from lmx_lab.daemon.mcp.lines import one_line
from lmx_lab.daemon.mcp.process import McpProcess
from lmx_lab.daemon.mcp.process_cleanup import RootProcess
from lmx_lab.daemon.mcp.process_registry import ProcessRegistry
from lmx_lab.daemon.mcp.redaction import SecretRedactor
from lmx_lab.daemon.mcp.stdio import StopSignal
from lmx_lab.daemon.tools.tool import ToolResult
from lmx_lab.wire.mcp import ErrorKind, McpServerConfig, ServerState

if TYPE_CHECKING:
    from lmx_lab.daemon.mcp.connection import McpConnection, OfferedTool


@dataclass(frozen=True, kw_only=True)
class RestartPolicy:
    """When a server that has died is started again."""

    delays_s: tuple[float, ...] = (1.0, 2.0, 4.0, 8.0, 16.0)
    """Before each try; after the last it has failed."""
    settled_s: float = 60.0
    """A server that was ready for so long has all its tries again."""
    relist_s: float = 1.0
    """The list of tools is read again at most so often."""


@dataclass(frozen=True, kw_only=True)
class ServerCondition:
    """How a server is."""

    state: ServerState = "starting"
    tools: tuple[OfferedTool, ...] = ()
    restarts: int = 0
    error: str | None = None
    error_kind: ErrorKind | None = None


class McpSupervisor:
    """Keeps one server running, from ``start`` to ``stop``. On one event loop."""

    def __init__(
        self,
        config: McpServerConfig,
        *,
        roster: ProcessRegistry,
        restarts: RestartPolicy,
        changed: Callable[[McpSupervisor], Awaitable[None]],
    ) -> None:
        """
        Args:
            changed: Is told of each new condition, in order; the server waits for it.
        """
        self.config = config
        self.condition = ServerCondition()
        self.settled = asyncio.Event()
        """It is no longer on its first way up."""
        self._roster = roster
        self._restarts = restarts
        self._changed = changed
        self._stopping = False
        self._wake = asyncio.Event()
        self._lost = False
        self._relist = False
        self._ready_at: float | None = None
        self._hide = SecretRedactor.of(config)
        self._patience = StopSignal()
        self._process: McpProcess | None = None
        self._connection: McpConnection | None = None
        self._tail = ""
        self._task: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    @property
    def stderr_tail(self) -> str:
        return self._process.stderr_tail if self._process is not None else self._tail

    def start(self) -> None:
        """Begin; returns at once, and ``condition`` says how it goes."""
        if self._task is None:
            self._task = asyncio.create_task(self._live(), name=f"mcp {self.config.name}")

    async def stop(self) -> None:
        """End the server and all that it has started; returns when they are gone. Idempotent."""
        if not self._stopping:
            await self._become("stopping")
            self._stopping = True
        self._patience.end()
        self._wake.set()
        if self._task is not None:
            await asyncio.wait({self._task})

    async def call(self, tool: str, arguments: dict[str, Any], note: Callable[[str], None]) -> ToolResult:
        """Call a tool by its server's name for it. Never raises but when cancelled."""
        connection = self._connection
        if connection is None:
            state = "lost" if self.condition.state == "ready" else self.condition.state
            why = f": {self.condition.error}" if self.condition.error else ""
            text = f"The MCP server {self.config.name!r} is {state}{why}. The tool was not called."
            return ToolResult(status="error", text=text)
        return await connection.call(tool, arguments, note)

    async def _live(self) -> None:
        tries = 0
        while (failure := await self._lived()) is not None:
            if self._stayed():
                tries = 0
            if failure.kind in FINAL or tries >= len(self._restarts.delays_s):
                await self._become("failed", failure=failure, restarts=tries)
                return
            tries += 1
            await self._become("restarting", failure=failure, restarts=tries, tools=self.condition.tools)
            await self._slept(self._restarts.delays_s[tries - 1])

    async def _lived(self) -> McpFailure | None:
        """One life of the server; None if it was stopped."""
        if self._stopping:
            return None
        self._ready_at, self._lost, self._relist = None, False, False
        try:
            async with connected(
                self.config,
                self._roster,
                self._patience,
                changed=self._tools_changed,
                lost=self._was_lost,
                began=self._began,
            ) as connection:
                await self._serve(connection)
                failure = None if self._stopping else await connection.ended()
        except McpFailure as exc:
            failure = exc
        except Exception as exc:
            failure = McpFailure("protocol", one_line(self._hide.hidden(f"{type(exc).__name__}: {exc}")))
        self._connection, self._lost = None, False
        if self._process is not None:
            self._tail, self._process = self._process.stderr_tail, None
        return None if self._stopping else failure

    async def _serve(self, connection: McpConnection) -> None:
        tools = tuple(await connection.tools())
        self._connection, self._ready_at = connection, time.monotonic()
        await self._become("ready", restarts=self.condition.restarts, tools=tools)
        while not (self._stopping or self._lost):
            await self._wake.wait()
            self._wake.clear()
            if self._relist and not (self._stopping or self._lost):
                self._relist = False
                await self._become("ready", restarts=self.condition.restarts, tools=tuple(await connection.tools()))
                await self._slept(self._restarts.relist_s)
        self._connection = None

    def _stayed(self) -> bool:
        return self._ready_at is not None and time.monotonic() - self._ready_at >= self._restarts.settled_s

    def _began(self, process: McpProcess) -> None:
        self._process = process

    def _tools_changed(self) -> None:
        self._relist = True
        self._wake.set()

    def _was_lost(self) -> None:
        self._lost = True
        # Calls from now on are refused at once; those that run are ended by the session.
        self._connection = None
        self._wake.set()

    async def _become(
        self,
        state: ServerState,
        *,
        failure: McpFailure | None = None,
        restarts: int = 0,
        tools: tuple[OfferedTool, ...] = (),
    ) -> None:
        if self._stopping:
            return
        self.condition = ServerCondition(
            state=state,
            tools=tools,
            restarts=restarts,
            error=failure.message if failure is not None else None,
            error_kind=failure.kind if failure is not None else None,
        )
        self.settled.set()
        await self._changed(self)

    async def _slept(self, seconds: float) -> None:
        """Until then, or until there is something that cannot wait."""
        loop = asyncio.get_running_loop()
        end_at = loop.time() + seconds
        while not (self._stopping or self._lost) and loop.time() < end_at:
            self._wake.clear()
            alarm = loop.call_at(end_at, self._wake.set)
            try:
                await self._wake.wait()
            finally:
                alarm.cancel()
        # What came meanwhile has not been looked at.
        self._wake.set()


@contextlib.asynccontextmanager
async def connected(
    config: McpServerConfig,
    roster: ProcessRegistry,
    patience: StopSignal,
    *,
    changed: Callable[[], None],
    lost: Callable[[], None],
    began: Callable[[McpProcess], None],
) -> AsyncIterator[McpConnection]:
    """A connection to the server, which is started for it if it is a program, and has ended after the block.

    Raises:
        McpFailure: there is none; also for what goes wrong within the block.
    """
    connections = await asyncio.to_thread(importlib.import_module, "lmx_lab.daemon.mcp.connection")
    if config.transport == "http":
        async with connections.over_http(config, patience, changed=changed, lost=lost) as connection:
            yield connection
        return
    # What is left of an earlier life may hold what this one needs.
    await roster.cleared.wait()
    async with _started(config, roster) as process:
        began(process)
        async with connections.over_stdio(config, process, patience, changed=changed, lost=lost) as connection:
            yield connection


@contextlib.asynccontextmanager
async def _started(config: McpServerConfig, roster: ProcessRegistry) -> AsyncIterator[McpProcess]:
    root = RootProcess(pid=0, started=0.0, mark=secrets.token_hex(16))
    # Before it runs: if this daemon is killed while it starts, the next one finds it by its mark.
    await roster.add(root)
    try:
        process = await McpProcess.start(config, root.mark)
    except BaseException:
        await roster.remove(root)
        raise
    try:
        await roster.add(process.root)
        yield process
    finally:
        await process.stop()
        await roster.remove(root)
