"""Manage the MCP servers of a daemon: keep them running, change and test them, and offer their tools.

The configurations are rows of the database. ``McpServer`` is one configured server, ``McpServers`` all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from lmx_lab.daemon.mcp.config import (
    NO_RESTART,
    SERVERS,
    McpFailure,
    SecretRedactor,
    apply_change,
    check,
    one_line,
    restore_secrets,
)
from lmx_lab.daemon.mcp.process import McpProcess
from lmx_lab.daemon.mcp.watchdog import ServerProcesses
from lmx_lab.daemon.storage.store import DatabaseView, Store, Transaction
from lmx_lab.daemon.tools import SEPARATOR, ToolResult
from lmx_lab.errors import (
    InvalidRequestError,
    LabError,
    McpServerExistsError,
    McpServerNotFoundError,
    QueueFullError,
    StoppingError,
)
from lmx_lab.wire.events import McpStatus
from lmx_lab.wire.mcp import (
    REDACTED,
    ChangeMcpServer,
    McpServerConfig,
    McpServerList,
    McpServerRecord,
    McpTestFailed,
    McpTestPassed,
    ServerState,
    ToolList,
    ToolRecord,
)

if TYPE_CHECKING:
    from lmx_lab.daemon.mcp.connection import McpConnection

TESTS = 4
"""Maximum number of tests that run at the same time."""


@dataclass(frozen=True, kw_only=True)
class RestartPolicy:
    """When a server that has failed is started again."""

    delays_s: tuple[float, ...] = (1.0, 2.0, 4.0, 8.0, 16.0)
    """Delay before each restart. If the server fails after the last one, it is not restarted any more."""
    reset_after_s: float = 60.0
    """Time for which a server must have been ready so that its restarts are counted from 0 again."""
    list_interval_s: float = 1.0
    """Minimum time between two reads of the list of tools."""


class McpServer:
    """A configured server, which runs from ``start`` to ``stop``. Used on one event loop.

    One task owns the session, because a session must be closed in the task that opened it. It is cancelled once, and
    ends when its process and all processes that this has started have ended.
    """

    def __init__(
        self,
        config: McpServerConfig,
        *,
        processes: ServerProcesses,
        restarts: RestartPolicy,
        on_status: Callable[[McpStatus], Awaitable[None]],
    ) -> None:
        """
        Args:
            on_status: Called and awaited for each new status, in order.
        """
        self.config = config
        self.lock = asyncio.Lock()
        """Held while the server is changed, restarted or removed."""
        self.tools: dict[str, ToolRecord] = {}
        """The tools that it offers, by its own names for them."""
        self.status = _first_status(config)
        self.started = asyncio.Event()
        """Cleared only during the first attempt to start the server."""
        self.started.set()
        self._processes = processes
        self._restarts = restarts
        self._on_status = on_status
        self._process: McpProcess | None = None
        """The current process, or the last one."""
        self._connection: McpConnection | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_stopping = False

    @property
    def record(self) -> McpServerRecord:
        """The configuration without secrets, and the current state."""
        config, process = self.config, self._process
        fields = {**config.model_dump(), **self.status.model_dump()}
        fields |= {name: dict.fromkeys(fields[name], REDACTED) for name in ("env", "headers")}
        return McpServerRecord(
            **fields,
            stderr_tail=process.stderr_tail if process is not None else "",
            pid=process.pid if process is not None and process.returncode is None else None,
        )

    def start(self) -> None:
        """Start the server if it is enabled, and return immediately; ``status`` shows the progress."""
        self._process, self._task, self._is_stopping = None, None, False
        self.tools, self.status = {}, _first_status(self.config)
        if self.config.enabled:
            self.started.clear()
            self._task = asyncio.create_task(self._run(), name=f"mcp {self.config.name}")

    async def stop(self) -> None:
        """Stop the server and wait until all processes that it has started have ended. Idempotent."""
        if self._task is None:
            return
        if not self._is_stopping:
            self._is_stopping, self.tools = True, {}
            try:
                await self._set_status("stopping")
            finally:
                self._task.cancel()
        await asyncio.wait({self._task})

    def configure(self, config: McpServerConfig) -> None:
        """Replace the configuration. A server that runs uses only its permission until the next start."""
        self.config = config
        for own_name, tool in self.tools.items():
            self.tools[own_name] = tool.model_copy(update={"permission": config.permission})

    async def call(self, tool: str, arguments: dict[str, Any], on_progress: Callable[[str], None]) -> ToolResult:
        """Call a tool by the server's own name for it. Errors become results; only ``CancelledError`` is raised."""
        if (connection := self._connection) is None:
            status = self.status
            state = "lost" if status.state == "ready" else status.state
            reason = f": {status.error}" if status.error else ""
            text = f"The MCP server {status.name!r} is {state}{reason}. The tool was not called."
            return ToolResult(status="error", text=text)
        return await connection.call(tool, arguments, on_progress)

    async def _run(self) -> None:
        restarts, delays_s = 0, self._restarts.delays_s
        while True:
            ready_at, failure = await self._run_once()
            if self._is_stopping:
                return
            if ready_at is not None and time.monotonic() - ready_at >= self._restarts.reset_after_s:
                restarts = 0
            if failure.is_final or restarts == len(delays_s):
                self.tools = {}
                await self._set_status("failed", failure=failure, restarts=restarts)
                return
            restarts += 1
            await self._set_status("restarting", failure=failure, restarts=restarts)
            await asyncio.sleep(delays_s[restarts - 1])

    async def _run_once(self) -> tuple[float | None, McpFailure]:
        """Start the server and run it until it ends.

        Returns:
            When it was ready, by ``time.monotonic``, and why it has ended.
        """
        ready_at: float | None = None
        lost, changed = asyncio.Event(), asyncio.Event()

        def on_process(process: McpProcess) -> None:
            self._process = process

        def on_lost() -> None:
            # New calls are refused from now on. The session ends those that are running.
            self._connection = None
            lost.set()
            changed.set()

        try:
            async with connected(
                self.config, self._processes, on_tools_changed=changed.set, on_lost=on_lost, on_process=on_process
            ) as connection:
                while not lost.is_set():
                    changed.clear()
                    self.tools = await connection.list_tools()
                    self.configure(self.config)
                    ready_at = ready_at or time.monotonic()
                    self._connection = None if lost.is_set() else connection
                    await self._set_status("ready", restarts=self.status.restarts)
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(self._restarts.list_interval_s):
                            await lost.wait()
                    await changed.wait()
                return ready_at, await connection.end_failure()
        except McpFailure as failure:
            return ready_at, failure
        except Exception as exc:
            text = SecretRedactor.of(self.config).redact(f"{type(exc).__name__}: {exc}")
            return ready_at, McpFailure("protocol", one_line(text))
        finally:
            self._connection = None

    async def _set_status(self, state: ServerState, *, failure: McpFailure | None = None, restarts: int = 0) -> None:
        if self._is_stopping and state != "stopping":
            return
        self.status = McpStatus(
            name=self.config.name,
            state=state,
            tools=len(self.tools),
            restarts=restarts,
            error=failure.message if failure is not None else None,
            error_kind=failure.kind if failure is not None else None,
        )
        self.started.set()
        await self._on_status(self.status)


def _first_status(config: McpServerConfig) -> McpStatus:
    state: ServerState = "starting" if config.enabled else "disabled"
    return McpStatus(name=config.name, state=state, tools=0, restarts=0, error=None, error_kind=None)


class McpServers:
    """Starts, supervises and stops the configured servers. Used on one event loop."""

    def __init__(self, *, store: Store, processes: ServerProcesses, restarts: RestartPolicy | None = None) -> None:
        self._store = store
        self._processes = processes
        self._restarts = restarts or RestartPolicy()
        self._servers: dict[str, McpServer] = {}
        self._tests: set[asyncio.Task[McpTestPassed | McpTestFailed]] = set()
        self._cleanup: asyncio.Task[None] | None = None
        self._is_stopping = False

    async def start(self) -> None:
        """Start the enabled servers, once the processes of an earlier daemon have ended. Waits for neither."""
        self._cleanup = asyncio.create_task(self._processes.end_leftovers())
        for config in await self._store.read(_read_all):
            self._servers[config.name] = self._new_server(config)
        for server in self._servers.values():
            self._start_server(server)

    async def stop(self) -> None:
        """Stop all servers and tests, and wait until all their processes have ended. Idempotent."""
        self._is_stopping = True
        for test in self._tests:
            test.cancel()
        cleanup = [self._cleanup] if self._cleanup is not None else []
        stops = [asyncio.create_task(server.stop()) for server in self._servers.values()]
        try:
            if tasks := [*cleanup, *self._tests, *stops]:
                await asyncio.wait(tasks)
        finally:
            await self._processes.stop()

    # Reading

    async def list_servers(self) -> McpServerList:
        """Return all servers, sorted by name."""
        return McpServerList(servers=[self._servers[name].record for name in sorted(self._servers)])

    async def read(self, name: str) -> McpServerRecord:
        """Return one server.

        Raises:
            McpServerNotFoundError: No server has this name.
        """
        return self._get(name).record

    async def list_tools(self, name: str) -> ToolList:
        """Return the tools of one server, including denied ones.

        Raises:
            McpServerNotFoundError: No server has this name.
        """
        return ToolList(tools=list(self._get(name).tools.values()))

    def offered_tools(self) -> list[ToolRecord]:
        """Return the tools of all servers that are ready, or restarting after they were ready, except denied ones."""
        return [
            tool
            for _, server in sorted(self._servers.items())
            for tool in server.tools.values()
            if tool.permission != "deny"
        ]

    @property
    def is_starting(self) -> bool:
        """Whether a server is being started for the first time."""
        return not all(server.started.is_set() for server in self._servers.values())

    async def wait_started(self, name: str | None = None) -> None:
        """Wait until the first start of all servers, or of the one with this name, has ended."""
        for server in list(self._servers.values()) if name is None else [self._get(name)]:
            await server.started.wait()

    async def call(self, name: str, arguments: dict[str, Any], on_progress: Callable[[str], None]) -> ToolResult | None:
        """Call a tool by its name for models. Returns None if no server has such a tool, or it is denied."""
        if (server := self._servers.get(name.partition(SEPARATOR)[0])) is None:
            return None
        for own_name, tool in server.tools.items():
            if tool.name == name and tool.permission != "deny":
                return await server.call(own_name, arguments, on_progress)
        return None

    # Changes

    async def add(self, config: McpServerConfig) -> McpServerRecord:
        """Add a server and start it. Returns immediately; the state of the server shows the progress.

        Raises:
            McpServerExistsError: The name is used already.
            InvalidRequestError: The configuration can never start. The message names the field.
        """
        self._check_running()
        config = restore_secrets(config, None)
        await asyncio.to_thread(check, config)
        if config.name in self._servers:
            raise McpServerExistsError(
                f"the MCP server {config.name!r} exists already; change or remove it, or use another name", param="name"
            )
        if len(self._servers) >= SERVERS:
            raise InvalidRequestError(f"there are {SERVERS} MCP servers already, which is the limit; remove one first")
        server = self._servers[config.name] = self._new_server(config)
        async with server.lock:
            status = _first_status(config)
            try:
                await self._store.write(lambda tx: _save(tx, config, status))
            except BaseException:
                del self._servers[config.name]
                raise
            self._start_server(server)
        return server.record

    async def change(self, name: str, change: ChangeMcpServer) -> McpServerRecord:
        """Change a server. It is restarted, unless only its permission changes.

        Raises:
            McpServerNotFoundError: No server has this name.
            InvalidRequestError: The new configuration can never start. The message names the field.
        """
        self._check_running()
        async with self._locked(name) as server:
            config = apply_change(server.config, change)
            await asyncio.to_thread(check, config)
            fields = set(McpServerConfig.model_fields) - NO_RESTART
            must_restart = any(getattr(config, name) != getattr(server.config, name) for name in fields)
            if must_restart:
                await server.stop()
            status = _first_status(config) if must_restart else server.status
            try:
                await self._store.write(lambda tx: _save(tx, config, status))
                server.configure(config)
            finally:
                # If the change could not be written, the server is started with the previous configuration.
                if must_restart:
                    self._start_server(server)
            return server.record

    async def remove(self, name: str) -> None:
        """Stop a server and remove it. Does nothing if there is no such server."""
        with contextlib.suppress(McpServerNotFoundError):
            async with self._locked(name) as server:
                await server.stop()
                removed = McpStatus(name=name, state="removed", tools=0, restarts=0, error=None, error_kind=None)
                try:
                    await self._store.write(lambda tx: _save(tx, None, removed))
                except BaseException:
                    self._start_server(server)
                    raise
                del self._servers[name]

    async def restart(self, name: str) -> McpServerRecord:
        """Stop a server and start it again. Its restarts are counted from 0.

        Raises:
            McpServerNotFoundError: No server has this name.
            InvalidRequestError: The server is disabled.
        """
        self._check_running()
        async with self._locked(name) as server:
            if not server.config.enabled:
                raise InvalidRequestError(f"the MCP server {name!r} is disabled; enable it with PATCH", param="enabled")
            await server.stop()
            self._start_server(server)
            await self._append_status(server.status)
            return server.record

    # Tests

    async def test(self, config: McpServerConfig) -> McpTestPassed | McpTestFailed:
        """Start a separate process of a server, list its tools and stop it. Changes nothing.

        Redacted values are those of the configured server of the same name.

        Raises:
            InvalidRequestError: A value is redacted, and no server of this name has it.
            QueueFullError: Too many tests are running.
        """
        self._check_running()
        if len(self._tests) >= TESTS:
            raise QueueFullError(
                f"{TESTS} tests of MCP servers are running already, which is the limit; try again later",
                retry_after_s=2.0,
            )
        server = self._servers.get(config.name)
        config = restore_secrets(config, server.config if server is not None else None)
        task = asyncio.create_task(_run_test(config, self._processes))
        self._tests.add(task)
        task.add_done_callback(self._tests.discard)
        # Shielded, so that the test stops what it has started even if the client has disconnected.
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise StoppingError("the daemon is stopping, so the test was cancelled") from None
            raise

    async def test_named(self, name: str) -> McpTestPassed | McpTestFailed:
        """Test the configuration of an existing server, as ``test`` does.

        Raises:
            McpServerNotFoundError: No server has this name.
        """
        return await self.test(self._get(name).config)

    # Internal

    def _get(self, name: str) -> McpServer:
        if (server := self._servers.get(name)) is None:
            raise McpServerNotFoundError(f"no MCP server {name!r:.80}; GET /v3/mcp/servers lists the servers")
        return server

    @contextlib.asynccontextmanager
    async def _locked(self, name: str) -> AsyncIterator[McpServer]:
        server = self._get(name)
        async with server.lock:
            if self._servers.get(name) is not server:
                raise McpServerNotFoundError(f"the MCP server {name!r:.80} was removed in the meantime")
            yield server

    def _check_running(self) -> None:
        if self._is_stopping:
            raise StoppingError("the daemon is stopping; MCP servers can no longer be changed")

    def _new_server(self, config: McpServerConfig) -> McpServer:
        return McpServer(config, processes=self._processes, restarts=self._restarts, on_status=self._append_status)

    def _start_server(self, server: McpServer) -> None:
        if not self._is_stopping:
            server.start()

    async def _append_status(self, status: McpStatus) -> None:
        # If the event cannot be written, the server still runs, and clients can read its state.
        with contextlib.suppress(LabError):
            await self._store.write(lambda tx: tx.append("mcp.status", status))


async def _run_test(config: McpServerConfig, processes: ServerProcesses) -> McpTestPassed | McpTestFailed:
    started: list[McpProcess] = []
    started_s = time.perf_counter()
    try:
        await asyncio.to_thread(check, config)
        async with connected(
            config, processes, on_tools_changed=lambda: None, on_lost=lambda: None, on_process=started.append
        ) as connection:
            tools = await connection.list_tools()
            latency_ms = 1000 * (time.perf_counter() - started_s)
    except InvalidRequestError as exc:
        return McpTestFailed(error=exc.message, error_kind="invalid", stderr_tail="")
    except McpFailure as failure:
        tail = started[0].stderr_tail if started else ""
        return McpTestFailed(error=failure.message, error_kind=failure.kind, stderr_tail=tail)
    return McpTestPassed(latency_ms=latency_ms, tools=list(tools.values()))


@contextlib.asynccontextmanager
async def connected(
    config: McpServerConfig,
    processes: ServerProcesses,
    *,
    on_tools_changed: Callable[[], None],
    on_lost: Callable[[], None],
    on_process: Callable[[McpProcess], None],
) -> AsyncIterator[McpConnection]:
    """Connect to a server. A stdio server is started before the block, and stopped after it.

    Args:
        on_tools_changed: Called when the server's list of tools has changed.
        on_lost: Called when the server can no longer answer.
        on_process: Called with the process that was started.

    Raises:
        McpFailure: The connection could not be opened, or failed within the block.
    """
    # The import takes most of a second. Meanwhile, the process of a server can start.
    importing = asyncio.ensure_future(asyncio.to_thread(importlib.import_module, "lmx_lab.daemon.mcp.connection"))
    async with contextlib.AsyncExitStack() as stack:
        if config.transport == "http":
            connections = await importing
            opening = connections.connect_http(config, on_tools_changed=on_tools_changed, on_lost=on_lost)
        else:
            process = await stack.enter_async_context(processes.running(config))
            on_process(process)
            connections = await importing
            opening = connections.connect_stdio(config, process, on_tools_changed=on_tools_changed, on_lost=on_lost)
        yield await stack.enter_async_context(opening)


# The configurations in the database


def _read_all(view: DatabaseView) -> list[McpServerConfig]:
    """Return all configurations, sorted by name."""
    configs = []
    for row in view.fetch_all("SELECT config FROM mcp_servers ORDER BY name"):
        # A row that is not valid is ignored, since a newer version may have written it.
        with contextlib.suppress(ValidationError):
            configs.append(McpServerConfig.model_validate_json(row["config"]))
    return configs


def _save(tx: Transaction, config: McpServerConfig | None, status: McpStatus) -> None:
    """Add a server or replace its configuration; None removes it."""
    if config is None:
        tx.execute("DELETE FROM mcp_servers WHERE name = ?", status.name)
    else:
        tx.execute(
            "INSERT INTO mcp_servers (name, config, created_at) VALUES (?, ?, ?)"
            " ON CONFLICT (name) DO UPDATE SET config = excluded.config",
            *(config.name, config.model_dump_json(), tx.now),
        )
    tx.append("mcp.status", status)
