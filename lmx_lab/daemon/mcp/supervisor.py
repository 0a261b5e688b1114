"""Supervise one MCP server: start it, watch its connection, restart it after a failure, and stop it."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lmx_lab.daemon.mcp.failure import FINAL_KINDS, McpFailure, StopSignal
from lmx_lab.daemon.mcp.process import McpProcess
from lmx_lab.daemon.mcp.process_cleanup import RootProcess
from lmx_lab.daemon.mcp.process_registry import ProcessRegistry
from lmx_lab.daemon.mcp.redaction import SecretRedactor, one_line
from lmx_lab.daemon.tools.tool import ToolResult
from lmx_lab.wire.mcp import ErrorKind, McpServerConfig, ServerState

if TYPE_CHECKING:
    from lmx_lab.daemon.mcp.connection import McpConnection, OfferedTool


@dataclass(frozen=True, kw_only=True)
class RestartPolicy:
    """When a server that has failed is started again."""

    delays_s: tuple[float, ...] = (1.0, 2.0, 4.0, 8.0, 16.0)
    """Delay before each restart. If the server fails after the last one, it is not restarted any more."""
    reset_after_s: float = 60.0
    """Time for which a server must have been ready so that its restarts are counted from 0 again."""
    list_interval_s: float = 1.0
    """Minimum time between two reads of the list of tools."""


@dataclass(frozen=True, kw_only=True)
class ServerCondition:
    """The state of a server at one moment."""

    state: ServerState = "starting"
    tools: tuple[OfferedTool, ...] = ()
    restarts: int = 0
    error: str | None = None
    error_kind: ErrorKind | None = None


class McpSupervisor:
    """Keeps one server running from ``start`` to ``stop``. Used on one event loop.

    One task owns the connection. It is stopped by a signal and never cancelled, because the cancel scopes of the
    package ``mcp`` are bound to it.
    """

    def __init__(
        self,
        config: McpServerConfig,
        *,
        registry: ProcessRegistry,
        restarts: RestartPolicy,
        on_change: Callable[[McpSupervisor], Awaitable[None]],
    ) -> None:
        """
        Args:
            on_change: Called and awaited for each new condition, in order.
        """
        self.config = config
        self.condition = ServerCondition()
        self.started = asyncio.Event()
        """Set when the first attempt to start the server has succeeded or failed."""
        self._registry = registry
        self._restarts = restarts
        self._on_change = on_change
        self._is_stopping = False
        self._wake = asyncio.Event()
        self._is_lost = False
        self._tools_changed = False
        self._ready_at: float | None = None
        self._redactor = SecretRedactor.of(config)
        self._stop_signal = StopSignal()
        self._process: McpProcess | None = None
        self._connection: McpConnection | None = None
        self._last_stderr_tail = ""
        self._task: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """Id of the server's process; None if there is no running process."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    @property
    def stderr_tail(self) -> str:
        """The last lines of stderr of the current process, or of the last one."""
        return self._process.stderr_tail if self._process is not None else self._last_stderr_tail

    def start(self) -> None:
        """Start the server and return immediately; ``condition`` shows the progress."""
        if self._task is None:
            self._task = asyncio.create_task(self._supervise(), name=f"mcp {self.config.name}")

    async def stop(self) -> None:
        """Stop the server and wait until all processes that it has started have ended. Idempotent."""
        if not self._is_stopping:
            await self._set_condition("stopping")
            self._is_stopping = True
        self._stop_signal.set()
        self._wake.set()
        if self._task is not None:
            await asyncio.wait({self._task})

    async def call(self, tool: str, arguments: dict[str, Any], on_progress: Callable[[str], None]) -> ToolResult:
        """Call a tool by the server's own name for it. Errors become results; only ``CancelledError`` is raised."""
        connection = self._connection
        if connection is None:
            state = "lost" if self.condition.state == "ready" else self.condition.state
            reason = f": {self.condition.error}" if self.condition.error else ""
            text = f"The MCP server {self.config.name!r} is {state}{reason}. The tool was not called."
            return ToolResult(status="error", text=text)
        return await connection.call(tool, arguments, on_progress)

    async def _supervise(self) -> None:
        restarts = 0
        while (failure := await self._run_once()) is not None:
            if self._was_stable():
                restarts = 0
            if failure.kind in FINAL_KINDS or restarts >= len(self._restarts.delays_s):
                await self._set_condition("failed", failure=failure, restarts=restarts)
                return
            restarts += 1
            await self._set_condition("restarting", failure=failure, restarts=restarts, tools=self.condition.tools)
            await self._sleep(self._restarts.delays_s[restarts - 1])

    async def _run_once(self) -> McpFailure | None:
        """Start the server and run it until it ends. Returns why it has ended, or None if it was stopped."""
        if self._is_stopping:
            return None
        self._ready_at, self._is_lost, self._tools_changed = None, False, False
        try:
            async with connected(
                self.config,
                self._registry,
                self._stop_signal,
                on_tools_changed=self._handle_tools_changed,
                on_lost=self._handle_lost,
                on_process=self._set_process,
            ) as connection:
                await self._serve(connection)
                failure = None if self._is_stopping else await connection.end_failure()
        except McpFailure as exc:
            failure = exc
        except Exception as exc:
            failure = McpFailure("protocol", one_line(self._redactor.redact(f"{type(exc).__name__}: {exc}")))
        self._connection, self._is_lost = None, False
        if self._process is not None:
            self._last_stderr_tail, self._process = self._process.stderr_tail, None
        return None if self._is_stopping else failure

    async def _serve(self, connection: McpConnection) -> None:
        tools = tuple(await connection.list_tools())
        self._connection, self._ready_at = connection, time.monotonic()
        await self._set_condition("ready", restarts=self.condition.restarts, tools=tools)
        while not (self._is_stopping or self._is_lost):
            await self._wake.wait()
            self._wake.clear()
            if self._tools_changed and not (self._is_stopping or self._is_lost):
                self._tools_changed = False
                tools = tuple(await connection.list_tools())
                await self._set_condition("ready", restarts=self.condition.restarts, tools=tools)
                await self._sleep(self._restarts.list_interval_s)
        self._connection = None

    def _was_stable(self) -> bool:
        return self._ready_at is not None and time.monotonic() - self._ready_at >= self._restarts.reset_after_s

    def _set_process(self, process: McpProcess) -> None:
        self._process = process

    def _handle_tools_changed(self) -> None:
        self._tools_changed = True
        self._wake.set()

    def _handle_lost(self) -> None:
        self._is_lost = True
        # New calls are refused from now on. The session ends those that are running.
        self._connection = None
        self._wake.set()

    async def _set_condition(
        self,
        state: ServerState,
        *,
        failure: McpFailure | None = None,
        restarts: int = 0,
        tools: tuple[OfferedTool, ...] = (),
    ) -> None:
        if self._is_stopping:
            return
        self.condition = ServerCondition(
            state=state,
            tools=tools,
            restarts=restarts,
            error=failure.message if failure is not None else None,
            error_kind=failure.kind if failure is not None else None,
        )
        self.started.set()
        await self._on_change(self)

    async def _sleep(self, seconds: float) -> None:
        """Sleep until the time has passed, the connection is lost or the server is to be stopped."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while not (self._is_stopping or self._is_lost) and loop.time() < deadline:
            self._wake.clear()
            alarm = loop.call_at(deadline, self._wake.set)
            try:
                await self._wake.wait()
            finally:
                alarm.cancel()
        # Other changes that woke the task in the meantime still have to be handled.
        self._wake.set()


@contextlib.asynccontextmanager
async def connected(
    config: McpServerConfig,
    registry: ProcessRegistry,
    stop_signal: StopSignal,
    *,
    on_tools_changed: Callable[[], None],
    on_lost: Callable[[], None],
    on_process: Callable[[McpProcess], None],
) -> AsyncIterator[McpConnection]:
    """Connect to a server. A stdio server is started before the block, and stopped after it.

    Args:
        on_tools_changed: Called when the server's list of tools has changed.
        on_lost: Called once, when the server will not answer any more.
        on_process: Called with the process that was started.

    Raises:
        McpFailure: The connection could not be opened, or failed within the block.
    """
    connections = await asyncio.to_thread(importlib.import_module, "lmx_lab.daemon.mcp.connection")
    if config.transport == "http":
        async with connections.connect_http(
            config, stop_signal, on_tools_changed=on_tools_changed, on_lost=on_lost
        ) as connection:
            yield connection
        return
    # Processes of an earlier daemon may still use a resource, such as a port, that this server needs.
    await registry.cleaned.wait()
    async with _running_process(config, registry) as process:
        on_process(process)
        async with connections.connect_stdio(
            config, process, stop_signal, on_tools_changed=on_tools_changed, on_lost=on_lost
        ) as connection:
            yield connection


@contextlib.asynccontextmanager
async def _running_process(config: McpServerConfig, registry: ProcessRegistry) -> AsyncIterator[McpProcess]:
    root = RootProcess(pid=0, started=0.0, mark=secrets.token_hex(16))
    # Added before the process starts: if this daemon is killed meanwhile, the process is found by its mark.
    await registry.add(root)
    try:
        process = await McpProcess.start(config, root.mark)
    except BaseException:
        await registry.remove(root)
        raise
    try:
        await registry.add(process.root)
        yield process
    finally:
        await process.stop()
        await registry.remove(root)
