"""All MCP servers of a daemon: their rows, their owners, and what is told of them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from lmx_lab.daemon.limits import Limits
from lmx_lab.daemon.mcp.config import KEPT_RUNNING, changed, check, kept, shown
from lmx_lab.daemon.mcp.failure import McpFailure
from lmx_lab.daemon.mcp.names import tool_names
from lmx_lab.daemon.mcp.process import McpProcess
from lmx_lab.daemon.mcp.process_registry import ProcessRegistry
from lmx_lab.daemon.mcp.stdio import StopSignal
from lmx_lab.daemon.mcp.supervisor import McpSupervisor, RestartPolicy, ServerCondition, connected
from lmx_lab.daemon.storage.store import Store, Transaction
from lmx_lab.daemon.tools.tool import DaemonTool, ToolResult
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

SERVERS = 64
TESTS = 4
"""At once."""


class _Server:
    """A configured server; the owner is there while it is enabled."""

    def __init__(self, config: McpServerConfig) -> None:
        self.config = config
        self.owner: McpSupervisor | None = None
        self.lock = asyncio.Lock()
        """Held while it is changed, restarted or removed."""

    @property
    def condition(self) -> ServerCondition:
        return self.owner.condition if self.owner is not None else ServerCondition(state="disabled")

    def names(self) -> dict[str, str]:
        """By the names that models use, the names that the server uses."""
        return tool_names(self.config.name, [tool.name for tool in self.condition.tools])


class McpServers:
    """Starts, watches and ends the servers that are configured. On one event loop."""

    def __init__(
        self, *, store: Store, limits: Limits, runtime_folder: Path | None = None, restarts: RestartPolicy | None = None
    ) -> None:
        """
        Args:
            runtime_folder: Where it is written down which processes run, so that the next daemon can end those that a
                killed one left behind.
        """
        self._store = store
        self._limits = limits
        self._roster = ProcessRegistry(runtime_folder)
        self._restarts = restarts or RestartPolicy()
        self._servers: dict[str, _Server] = {}
        self._tests: set[asyncio.Task[McpTestPassed | McpTestFailed]] = set()
        self._clearing: asyncio.Task[None] | None = None
        self._stopping = False

    async def start(self) -> None:
        """Start the enabled servers, after what an earlier daemon left running has been ended; waits for neither."""
        self._clearing = asyncio.create_task(self._roster.end_left_over())
        rows = await self._store.read(
            lambda reading: reading.rows("SELECT name, config FROM mcp_servers ORDER BY name")
        )
        for row in rows:
            # A row that cannot be read is left alone: a newer version may have written it.
            with contextlib.suppress(ValidationError):
                self._servers[row["name"]] = _Server(McpServerConfig.model_validate_json(row["config"]))
        for server in self._servers.values():
            self._own(server)

    async def stop(self) -> None:
        """End all servers and tests, and all that they have started. Idempotent."""
        self._stopping = True
        for test in self._tests:
            test.cancel()
        owners = [server.owner for server in self._servers.values() if server.owner is not None]
        clearing = [self._clearing] if self._clearing is not None else []
        tasks = [*clearing, *self._tests, *(asyncio.create_task(owner.stop()) for owner in owners)]
        if tasks:
            await asyncio.wait(tasks)

    def count(self) -> int:
        return len(self._servers)

    # What there is

    async def listed(self) -> McpServerList:
        return McpServerList(servers=[_record(self._servers[name]) for name in sorted(self._servers)])

    async def read(self, name: str) -> McpServerRecord:
        return _record(self._known(name))

    async def tools(self, name: str) -> ToolList:
        """Of one server, also those that models are not told of."""
        return ToolList(tools=[_tool_record(tool) for tool in _tools(self._known(name))])

    def offered(self) -> list[DaemonTool]:
        """The tools of all servers that are ready, or were and are started again, but for denied ones."""
        return [
            tool for _, server in sorted(self._servers.items()) for tool in _tools(server) if tool.permission != "deny"
        ]

    @property
    def starting(self) -> bool:
        """Whether one of them is on its first way up."""
        return any(server.owner is not None and not server.owner.settled.is_set() for server in self._servers.values())

    async def settled(self) -> None:
        """Return when none of them is."""
        for server in list(self._servers.values()):
            if server.owner is not None:
                await server.owner.settled.wait()

    async def call(self, name: str, arguments: dict[str, Any], note: Callable[[str], None]) -> ToolResult | None:
        """Call a tool by its name for models; None if no server has it."""
        server = self._servers.get(name.partition("__")[0])
        if server is None or server.owner is None or server.config.permission == "deny":
            return None
        if (own := server.names().get(name)) is None:
            return None
        return await server.owner.call(own, arguments, note)

    # Changes

    async def add(self, config: McpServerConfig) -> McpServerRecord:
        """Write a server down and start it; returns at once, and its state says how it goes.

        Raises:
            McpServerExistsError: the name is taken.
            InvalidRequestError: it can never start; names the field.
        """
        self._check_running()
        config = kept(config, None)
        await asyncio.to_thread(check, config)
        if config.name in self._servers:
            raise McpServerExistsError(
                f"there is an MCP server {config.name!r} already; change it, remove it, or choose another name",
                param="name",
            )
        if len(self._servers) >= SERVERS:
            raise InvalidRequestError(f"there are {SERVERS} MCP servers, which is the limit; remove one first")
        server = self._servers[config.name] = _Server(config)
        async with server.lock:
            try:
                await self._store.write(lambda tx: _insert(tx, config))
            except BaseException:
                del self._servers[config.name]
                raise
            self._own(server)
        return _record(server)

    async def change(self, name: str, change: ChangeMcpServer) -> McpServerRecord:
        """Change a server; it is started anew, except where only its permission changes.

        Raises:
            McpServerNotFoundError: no server has this name.
            InvalidRequestError: it could never start; names the field.
        """
        self._check_running()
        async with self._held(name) as server:
            config = changed(server.config, change)
            await asyncio.to_thread(check, config)
            if _differ(config, server.config) - KEPT_RUNNING:
                await self._end(server)
            try:
                await self._store.write(lambda tx: _update(tx, config, server.owner))
                server.config = config
            finally:
                # Where it could not be written it goes on as it was.
                if server.owner is None:
                    self._own(server)
            return _record(server)

    async def remove(self, name: str) -> None:
        """End a server and forget it; without effect on one that is not there."""
        with contextlib.suppress(McpServerNotFoundError):
            async with self._held(name) as server:
                await self._end(server)
                try:
                    await self._store.write(lambda tx: _delete(tx, name))
                except BaseException:
                    self._own(server)
                    raise
                del self._servers[name]

    async def restart(self, name: str) -> McpServerRecord:
        """End a server and start it again, with all its tries.

        Raises:
            McpServerNotFoundError: no server has this name.
            InvalidRequestError: it is disabled.
        """
        self._check_running()
        async with self._held(name) as server:
            if not server.config.enabled:
                raise InvalidRequestError(f"the MCP server {name!r} is disabled; enable it with PATCH", param="enabled")
            await self._end(server)
            self._own(server)
            await self._tell(server)
            return _record(server)

    # Tests

    async def test(self, config: McpServerConfig) -> McpTestPassed | McpTestFailed:
        """Start a server for itself, ask for its tools and end it. Changes nothing, also not for one of this name.

        Raises:
            InvalidRequestError: a redacted value, and no server of this name that has it.
            QueueFullError: too many tests run.
        """
        self._check_running()
        if len(self._tests) >= TESTS:
            raise QueueFullError(f"{TESTS} tests of MCP servers run already; try again in a while", retry_after_s=2.0)
        server = self._servers.get(config.name)
        config = kept(config, server.config if server is not None else None)
        task = asyncio.create_task(_tested(config, self._roster))
        self._tests.add(task)
        task.add_done_callback(self._tests.discard)
        # The test ends what it has started, also when nobody waits for its answer any more.
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise StoppingError("the daemon is about to end, and so has the test") from None
            raise

    async def test_named(self, name: str) -> McpTestPassed | McpTestFailed:
        """As ``test``, with the configuration of a server."""
        return await self.test(self._known(name).config)

    # Within

    def _known(self, name: str) -> _Server:
        if (server := self._servers.get(name)) is None:
            raise McpServerNotFoundError(f"there is no MCP server {name!r:.80}; GET /v3/mcp/servers lists them")
        return server

    @contextlib.asynccontextmanager
    async def _held(self, name: str) -> AsyncIterator[_Server]:
        server = self._known(name)
        async with server.lock:
            if self._servers.get(name) is not server:
                raise McpServerNotFoundError(f"the MCP server {name!r:.80} has just been removed")
            yield server

    def _check_running(self) -> None:
        if self._stopping:
            raise StoppingError("the daemon is about to end; MCP servers are not changed any more")

    def _own(self, server: _Server) -> None:
        if not server.config.enabled or self._stopping:
            return

        async def tell(owner: McpSupervisor) -> None:
            if server.owner is owner:
                await self._tell(server)

        server.owner = McpSupervisor(server.config, roster=self._roster, restarts=self._restarts, changed=tell)
        server.owner.start()

    async def _end(self, server: _Server) -> None:
        if server.owner is not None:
            await server.owner.stop()
            server.owner = None

    async def _tell(self, server: _Server) -> None:
        status = _status(server)
        # Where it cannot be written the server goes on; what it is now can be read.
        with contextlib.suppress(LabError):
            await self._store.write(lambda tx: tx.append("mcp.status", status))


async def _tested(config: McpServerConfig, roster: ProcessRegistry) -> McpTestPassed | McpTestFailed:
    processes: list[McpProcess] = []
    begun = time.perf_counter()
    try:
        await asyncio.to_thread(check, config)
        async with connected(
            config, roster, StopSignal(), changed=_ignored, lost=_ignored, began=processes.append
        ) as connection:
            tools = await connection.tools()
            latency_ms = 1000 * (time.perf_counter() - begun)
    except InvalidRequestError as exc:
        return McpTestFailed(error=exc.message, error_kind="invalid", stderr_tail="")
    except McpFailure as failure:
        tail = processes[0].stderr_tail if processes else ""
        return McpTestFailed(error=failure.message, error_kind=failure.kind, stderr_tail=tail)
    names = tool_names(config.name, [tool.name for tool in tools])
    by_own = {tool.name: tool for tool in tools}
    found = [_tool(config, name, by_own[own]) for name, own in names.items()]
    return McpTestPassed(latency_ms=latency_ms, tools=[_tool_record(tool) for tool in found])


def _ignored() -> None:
    pass


def _insert(tx: Transaction, config: McpServerConfig) -> None:
    row = (config.name, config.model_dump_json(), tx.now)
    tx.run("INSERT INTO mcp_servers (name, config, created_at) VALUES (?, ?, ?)", *row)
    tx.append("mcp.status", _status_of(config.name, _first(config)))


def _update(tx: Transaction, config: McpServerConfig, owner: McpSupervisor | None) -> None:
    tx.run("UPDATE mcp_servers SET config = ? WHERE name = ?", config.model_dump_json(), config.name)
    tx.append("mcp.status", _status_of(config.name, owner.condition if owner is not None else _first(config)))


def _first(config: McpServerConfig) -> ServerCondition:
    return ServerCondition(state="starting" if config.enabled else "disabled")


def _differ(one: McpServerConfig, other: McpServerConfig) -> set[str]:
    return {field for field in type(one).model_fields if getattr(one, field) != getattr(other, field)}


def _delete(tx: Transaction, name: str) -> None:
    tx.run("DELETE FROM mcp_servers WHERE name = ?", name)
    tx.append("mcp.status", McpStatus(name=name, state="removed", tools=0, restarts=0, error=None, error_kind=None))


def _status(server: _Server) -> McpStatus:
    return _status_of(server.config.name, server.condition)


def _status_of(name: str, condition: ServerCondition) -> McpStatus:
    return McpStatus(
        name=name,
        state=condition.state,
        tools=len(condition.tools),
        restarts=condition.restarts,
        error=condition.error,
        error_kind=condition.error_kind,
    )


def _record(server: _Server) -> McpServerRecord:
    config, condition, owner = server.config, server.condition, server.owner
    given = config.model_dump(exclude={"env", "headers"}, mode="json")
    return McpServerRecord(
        **given,
        env=shown(config.env),
        headers=shown(config.headers),
        state=condition.state,
        tools=len(condition.tools),
        restarts=condition.restarts,
        error=condition.error,
        error_kind=condition.error_kind,
        stderr_tail=owner.stderr_tail if owner is not None else "",
        pid=owner.pid if owner is not None else None,
    )


def _tools(server: _Server) -> list[DaemonTool]:
    by_own = {tool.name: tool for tool in server.condition.tools}
    return [_tool(server.config, name, by_own[own]) for name, own in server.names().items()]


def _tool(config: McpServerConfig, name: str, offered: Any) -> DaemonTool:
    return DaemonTool(
        name=name,
        description=offered.description,
        parameters=offered.parameters,
        read_only=offered.read_only,
        permission=config.permission,
    )


def _tool_record(tool: DaemonTool) -> ToolRecord:
    return ToolRecord(**vars(tool))
