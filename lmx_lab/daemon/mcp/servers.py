"""Manage the MCP servers of a daemon: their configurations in the database, their supervisors and their tools."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from lmx_lab.daemon.mcp.config import (
    NO_RESTART,
    SecretRedactor,
    apply_change,
    check,
    one_line,
    redact_values,
    restore_secrets,
)
from lmx_lab.daemon.mcp.failure import FINAL_KINDS, McpFailure, StopSignal
from lmx_lab.daemon.mcp.process import McpProcess
from lmx_lab.daemon.mcp.process_cleanup import RootProcess
from lmx_lab.daemon.mcp.watchdog import ProcessRegistry
from lmx_lab.daemon.storage.store import Store, Transaction
from lmx_lab.daemon.tools.tool import SEPARATOR, DaemonTool, ToolResult, mcp_tool_names
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
    ChangeMcpServer,
    ErrorKind,
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
    from lmx_lab.daemon.mcp.connection import McpConnection, OfferedTool

SERVERS = 64
"""Maximum number of configured servers."""
TESTS = 4
"""Maximum number of tests that run at the same time."""
TEST_RETRY_S = 2.0


class _Server:
    """A configured server. It has a supervisor while it is enabled."""

    def __init__(self, config: McpServerConfig) -> None:
        self.config = config
        self.supervisor: McpSupervisor | None = None
        self.lock = asyncio.Lock()
        """Held while the server is changed, restarted or removed."""

    @property
    def condition(self) -> ServerCondition:
        return self.supervisor.condition if self.supervisor is not None else ServerCondition(state="disabled")

    @property
    def names(self) -> dict[str, str]:
        """The server's own names of its tools, by the names that models use."""
        return mcp_tool_names(self.config.name, [tool.name for tool in self.condition.tools])

    def list_tools(self) -> list[DaemonTool]:
        return _daemon_tools(self.config, self.condition.tools)


class McpServers:
    """Starts, supervises and stops the configured servers. Used on one event loop."""

    def __init__(
        self, *, store: Store, runtime_folder: Path | None = None, restarts: RestartPolicy | None = None
    ) -> None:
        """
        Args:
            runtime_folder: Folder of the file that lists the running processes, so that the next daemon can end those
                that a killed daemon has left. If None, there is no such file.
        """
        self._store = store
        self._registry = ProcessRegistry(runtime_folder)
        self._restarts = restarts or RestartPolicy()
        self._servers: dict[str, _Server] = {}
        self._tests: set[asyncio.Task[McpTestPassed | McpTestFailed]] = set()
        self._cleanup: asyncio.Task[None] | None = None
        self._is_stopping = False

    async def start(self) -> None:
        """Start the enabled servers, once the processes of an earlier daemon have ended. Waits for neither."""
        self._cleanup = asyncio.create_task(self._registry.end_leftovers())
        rows = await self._store.read(lambda view: view.fetch_all("SELECT name, config FROM mcp_servers ORDER BY name"))
        for row in rows:
            # A row that is not valid is ignored, since a newer version may have written it.
            with contextlib.suppress(ValidationError):
                self._servers[row["name"]] = _Server(McpServerConfig.model_validate_json(row["config"]))
        for server in self._servers.values():
            self._start_server(server)

    async def stop(self) -> None:
        """Stop all servers and tests, and wait until all their processes have ended. Idempotent."""
        self._is_stopping = True
        for test in self._tests:
            test.cancel()
        supervisors = [server.supervisor for server in self._servers.values() if server.supervisor is not None]
        cleanup = [self._cleanup] if self._cleanup is not None else []
        tasks = [*cleanup, *self._tests, *(asyncio.create_task(supervisor.stop()) for supervisor in supervisors)]
        try:
            if tasks:
                await asyncio.wait(tasks)
        finally:
            await self._registry.watchdog.stop()

    # Reading

    async def list_servers(self) -> McpServerList:
        """Return all servers, sorted by name."""
        return McpServerList(servers=[_record(self._servers[name]) for name in sorted(self._servers)])

    async def read(self, name: str) -> McpServerRecord:
        """Return one server.

        Raises:
            McpServerNotFoundError: No server has this name.
        """
        return _record(self._get(name))

    async def list_tools(self, name: str) -> ToolList:
        """Return the tools of one server, including denied ones.

        Raises:
            McpServerNotFoundError: No server has this name.
        """
        return ToolList(tools=[_tool_record(tool) for tool in self._get(name).list_tools()])

    def offered_tools(self) -> list[DaemonTool]:
        """Return the tools of all servers that are ready, or restarting after they were ready, except denied ones."""
        return [
            tool
            for _, server in sorted(self._servers.items())
            for tool in server.list_tools()
            if tool.permission != "deny"
        ]

    @property
    def is_starting(self) -> bool:
        """Whether a server is being started for the first time."""
        supervisors = [server.supervisor for server in self._servers.values()]
        return any(supervisor is not None and not supervisor.started.is_set() for supervisor in supervisors)

    async def wait_started(self) -> None:
        """Wait until no server is being started for the first time."""
        for server in list(self._servers.values()):
            if server.supervisor is not None:
                await server.supervisor.started.wait()

    async def call(self, name: str, arguments: dict[str, Any], on_progress: Callable[[str], None]) -> ToolResult | None:
        """Call a tool by its name for models. Returns None if no server has such a tool."""
        server = self._servers.get(name.partition(SEPARATOR)[0])
        if server is None or server.supervisor is None or server.config.permission == "deny":
            return None
        if (own_name := server.names.get(name)) is None:
            return None
        return await server.supervisor.call(own_name, arguments, on_progress)

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
        server = self._servers[config.name] = _Server(config)
        async with server.lock:

            def insert(tx: Transaction) -> None:
                row = (config.name, config.model_dump_json(), tx.now)
                tx.execute("INSERT INTO mcp_servers (name, config, created_at) VALUES (?, ?, ?)", *row)
                tx.append("mcp.status", _status(config.name, _initial_condition(config)))

            try:
                await self._store.write(insert)
            except BaseException:
                del self._servers[config.name]
                raise
            self._start_server(server)
        return _record(server)

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
            changed = {
                name for name in McpServerConfig.model_fields if getattr(config, name) != getattr(server.config, name)
            }
            if changed - NO_RESTART:
                await self._stop_server(server)
            condition = server.condition if server.supervisor is not None else _initial_condition(config)

            def update(tx: Transaction) -> None:
                tx.execute("UPDATE mcp_servers SET config = ? WHERE name = ?", config.model_dump_json(), config.name)
                tx.append("mcp.status", _status(config.name, condition))

            try:
                await self._store.write(update)
                server.config = config
            finally:
                # If the change could not be written, the server is started with the previous configuration.
                if server.supervisor is None:
                    self._start_server(server)
            return _record(server)

    async def remove(self, name: str) -> None:
        """Stop a server and remove it. Does nothing if there is no such server."""
        with contextlib.suppress(McpServerNotFoundError):
            async with self._locked(name) as server:
                await self._stop_server(server)
                removed = McpStatus(name=name, state="removed", tools=0, restarts=0, error=None, error_kind=None)

                def delete(tx: Transaction) -> None:
                    tx.execute("DELETE FROM mcp_servers WHERE name = ?", name)
                    tx.append("mcp.status", removed)

                try:
                    await self._store.write(delete)
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
            await self._stop_server(server)
            self._start_server(server)
            await self._append_status(server)
            return _record(server)

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
                retry_after_s=TEST_RETRY_S,
            )
        server = self._servers.get(config.name)
        config = restore_secrets(config, server.config if server is not None else None)
        task = asyncio.create_task(_run_test(config, self._registry))
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

    def _get(self, name: str) -> _Server:
        if (server := self._servers.get(name)) is None:
            raise McpServerNotFoundError(f"no MCP server {name!r:.80}; GET /v3/mcp/servers lists the servers")
        return server

    @contextlib.asynccontextmanager
    async def _locked(self, name: str) -> AsyncIterator[_Server]:
        server = self._get(name)
        async with server.lock:
            if self._servers.get(name) is not server:
                raise McpServerNotFoundError(f"the MCP server {name!r:.80} was removed in the meantime")
            yield server

    def _check_running(self) -> None:
        if self._is_stopping:
            raise StoppingError("the daemon is stopping; MCP servers can no longer be changed")

    def _start_server(self, server: _Server) -> None:
        if not server.config.enabled or self._is_stopping:
            return

        async def on_change(supervisor: McpSupervisor) -> None:
            if server.supervisor is supervisor:
                await self._append_status(server)

        server.supervisor = McpSupervisor(
            server.config, registry=self._registry, restarts=self._restarts, on_change=on_change
        )
        server.supervisor.start()

    async def _stop_server(self, server: _Server) -> None:
        if server.supervisor is not None:
            await server.supervisor.stop()
            server.supervisor = None

    async def _append_status(self, server: _Server) -> None:
        status = _status(server.config.name, server.condition)
        # If the event cannot be written, the server still runs, and clients can read its state.
        with contextlib.suppress(LabError):
            await self._store.write(lambda tx: tx.append("mcp.status", status))


async def _run_test(config: McpServerConfig, registry: ProcessRegistry) -> McpTestPassed | McpTestFailed:
    processes: list[McpProcess] = []
    started = time.perf_counter()
    try:
        await asyncio.to_thread(check, config)
        async with connected(
            config,
            registry,
            StopSignal(),
            on_tools_changed=lambda: None,
            on_lost=lambda: None,
            on_process=processes.append,
        ) as connection:
            tools = await connection.list_tools()
            latency_ms = 1000 * (time.perf_counter() - started)
    except InvalidRequestError as exc:
        return McpTestFailed(error=exc.message, error_kind="invalid", stderr_tail="")
    except McpFailure as failure:
        tail = processes[0].stderr_tail if processes else ""
        return McpTestFailed(error=failure.message, error_kind=failure.kind, stderr_tail=tail)
    found = [_tool_record(tool) for tool in _daemon_tools(config, tools)]
    return McpTestPassed(latency_ms=latency_ms, tools=found)


def _initial_condition(config: McpServerConfig) -> ServerCondition:
    return ServerCondition(state="starting" if config.enabled else "disabled")


# Shapes of the API


def _status(name: str, condition: ServerCondition) -> McpStatus:
    return McpStatus(
        name=name,
        state=condition.state,
        tools=len(condition.tools),
        restarts=condition.restarts,
        error=condition.error,
        error_kind=condition.error_kind,
    )


def _record(server: _Server) -> McpServerRecord:
    config, condition, supervisor = server.config, server.condition, server.supervisor
    fields = config.model_dump(exclude={"env", "headers"}, mode="json")
    return McpServerRecord(
        **fields,
        env=redact_values(config.env),
        headers=redact_values(config.headers),
        state=condition.state,
        tools=len(condition.tools),
        restarts=condition.restarts,
        error=condition.error,
        error_kind=condition.error_kind,
        stderr_tail=supervisor.stderr_tail if supervisor is not None else "",
        pid=supervisor.pid if supervisor is not None else None,
    )


def _daemon_tools(config: McpServerConfig, offered: Sequence[OfferedTool]) -> list[DaemonTool]:
    by_own_name = {tool.name: tool for tool in offered}
    names = mcp_tool_names(config.name, [tool.name for tool in offered])
    return [
        DaemonTool(
            name=name,
            description=tool.description,
            parameters=tool.parameters,
            read_only=tool.read_only,
            permission=config.permission,
        )
        for name, tool in ((name, by_own_name[own_name]) for name, own_name in names.items())
    ]


def _tool_record(tool: DaemonTool) -> ToolRecord:
    return ToolRecord(**vars(tool))


# One running server


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

    One task owns the connection, because a session must be closed in the task that opened it. It is stopped by a signal
    and not cancelled, so that the stop of a process, which may be in progress, is not cancelled too.
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
            if self._ready_at is not None and time.monotonic() - self._ready_at >= self._restarts.reset_after_s:
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

        def on_process(process: McpProcess) -> None:
            self._process = process

        def on_tools_changed() -> None:
            self._tools_changed = True
            self._wake.set()

        def on_lost() -> None:
            self._is_lost = True
            # New calls are refused from now on. The session ends those that are running.
            self._connection = None
            self._wake.set()

        try:
            async with connected(
                self.config,
                self._registry,
                self._stop_signal,
                on_tools_changed=on_tools_changed,
                on_lost=on_lost,
                on_process=on_process,
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
