"""Manage the MCP servers of a daemon: their configurations in the database, their supervisors and their tools."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from lmx_lab.daemon.mcp.config import NO_RESTART, apply_change, check, redact_values, restore_secrets
from lmx_lab.daemon.mcp.failure import McpFailure, StopSignal
from lmx_lab.daemon.mcp.process import McpProcess
from lmx_lab.daemon.mcp.process_registry import ProcessRegistry
from lmx_lab.daemon.mcp.supervisor import McpSupervisor, RestartPolicy, ServerCondition, connected
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
    McpServerConfig,
    McpServerList,
    McpServerRecord,
    McpTestFailed,
    McpTestPassed,
    ToolList,
    ToolRecord,
)

if TYPE_CHECKING:
    from lmx_lab.daemon.mcp.connection import OfferedTool

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
            try:
                await self._store.write(lambda tx: _insert(tx, config))
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
            if _changed_fields(config, server.config) - NO_RESTART:
                await self._stop_server(server)
            try:
                await self._store.write(lambda tx: _update(tx, config, server.supervisor))
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
                try:
                    await self._store.write(lambda tx: _delete(tx, name))
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
            on_tools_changed=_do_nothing,
            on_lost=_do_nothing,
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


def _do_nothing() -> None:
    pass


# Rows


def _insert(tx: Transaction, config: McpServerConfig) -> None:
    row = (config.name, config.model_dump_json(), tx.now)
    tx.execute("INSERT INTO mcp_servers (name, config, created_at) VALUES (?, ?, ?)", *row)
    tx.append("mcp.status", _status(config.name, _initial_condition(config)))


def _update(tx: Transaction, config: McpServerConfig, supervisor: McpSupervisor | None) -> None:
    tx.execute("UPDATE mcp_servers SET config = ? WHERE name = ?", config.model_dump_json(), config.name)
    condition = supervisor.condition if supervisor is not None else _initial_condition(config)
    tx.append("mcp.status", _status(config.name, condition))


def _delete(tx: Transaction, name: str) -> None:
    tx.execute("DELETE FROM mcp_servers WHERE name = ?", name)
    tx.append("mcp.status", McpStatus(name=name, state="removed", tools=0, restarts=0, error=None, error_kind=None))


def _initial_condition(config: McpServerConfig) -> ServerCondition:
    return ServerCondition(state="starting" if config.enabled else "disabled")


def _changed_fields(one: McpServerConfig, other: McpServerConfig) -> set[str]:
    return {field for field in type(one).model_fields if getattr(one, field) != getattr(other, field)}


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
