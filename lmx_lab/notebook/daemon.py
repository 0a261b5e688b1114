"""Run the daemon of a lab, with methods of its client, so that a notebook needs neither an address nor a token."""

from __future__ import annotations

import asyncio
import functools
import sys
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, TypeVar

from lmx_lab.client import AsyncDaemonClient, DaemonClient
from lmx_lab.client.subscription import ConnectionState
from lmx_lab.daemon.daemon import Daemon
from lmx_lab.errors import HostingError, InvalidRequestError, McpServerExistsError
from lmx_lab.panels.workbench import EventSource
from lmx_lab.results.tables import RecordList
from lmx_lab.wire.errors import validated
from lmx_lab.wire.events import DaemonEvent
from lmx_lab.wire.mcp import ChangeMcpServer, McpServerConfig, McpServerRecord, ToolRecord
from lmx_lab.wire.sessions import CancelTurns, SessionRecord

if TYPE_CHECKING:
    from lmx_lab.panels.events import EventsPanel
    from lmx_lab.panels.workbench import Workbench

P = ParamSpec("P")
T = TypeVar("T")


def _of_client(method: Callable[Concatenate[DaemonClient, P], T]) -> Callable[Concatenate[LabDaemon, P], T]:
    """Return the method that calls a method of the daemon's client."""

    @functools.wraps(method)
    def call(self: LabDaemon, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return method(self.client, *args, **kwargs)

    return call


class SessionTable(RecordList[SessionRecord]):
    """A page of sessions, displayed as a table."""

    next_cursor: str | None
    """Value of ``cursor`` for the next page; None on the last page."""

    @property
    def sessions(self) -> list[SessionRecord]:
        """The records, under the name that ``client.sessions()`` uses."""
        return list(self)


class LabDaemon(Daemon):
    """A ``Daemon`` in this process. Its methods block and can be called in cells, because it runs in its own thread.

    The methods here are the most used ones of the daemon's client; ``client`` has all of them. Code on an event loop
    uses ``lmx_lab.client.AsyncDaemonClient.discover()``.
    """

    def __init__(self, workbench: Workbench, show: Callable[[], EventsPanel], **options: Any) -> None:
        """
        Args:
            workbench: Its panels show the daemon's events.
            show: Returns the event viewer.
            options: Arguments of ``Daemon``.
        """
        super().__init__(**options)
        self._workbench = workbench
        self._show = show
        self._events = LabEvents(self)
        self._client: DaemonClient | None = None

    @property
    def client(self) -> DaemonClient:
        """The typed client of this daemon.

        Raises:
            HostingError: the daemon is not running.
        """
        if not self.running:
            raise HostingError(
                "this daemon is not running: lab.daemon is the running one, and lab.start_daemon() starts one"
            )
        if self._client is None:
            self._client = DaemonClient(self.url, token=self.token)
        return self._client

    # Lifetime

    def start(self) -> None:
        super().start()
        self._workbench.follow_events(self._events)

    def _close(self) -> None:
        super()._close()
        if self._workbench.events is self._events:
            self._workbench.follow_events(None)
        if self._client is not None:
            self._client.close()

    # Sessions and events

    session = _of_client(DaemonClient.session)
    events = _of_client(DaemonClient.events)
    permissions = _of_client(DaemonClient.permissions)
    decide = _of_client(DaemonClient.decide)

    def sessions(self, **options: Any) -> SessionTable:
        """List the sessions, the last used ones first, in pages.

        Args:
            options: Those of ``client.sessions``: ``limit``, ``cursor``, ``archived`` and ``q``, a text that the title
                or the id contains.
        """
        page = self.client.sessions(**options)
        table = SessionTable(
            page.sessions, SessionRecord, ("session_id", "title", "model", "status", "created_at", "updated_at")
        )
        table.next_cursor = page.next_cursor
        if page.next_cursor is not None:
            table.notes = [f"more sessions: lab.daemon.sessions(cursor={page.next_cursor!r})"]
        return table

    def panel(self) -> EventsPanel:
        """Return the event viewer, the same as ``lab.panel("events")``."""
        return self._show()

    @property
    def tools(self) -> RecordList[ToolRecord]:
        """The tools that turns can call now: Python functions, and those of the MCP servers that are ready."""

        async def listed() -> list[ToolRecord]:
            return self.services.toolbox.list_tools()

        return RecordList(self.run(listed()), ToolRecord, ("name", "description", "permission", "read_only"))

    # MCP servers

    def mcp_servers(self) -> RecordList[McpServerRecord]:
        """List the MCP servers with their states."""
        columns = ("name", "state", "tools", "permission", "command", "args", "url", "error")
        return RecordList(self.client.mcp_servers(), McpServerRecord, columns)

    def add_mcp_server(
        self, name: str, command: Sequence[str] = (), *, wait: bool = False, **fields: Any
    ) -> McpServerRecord:
        """Add an MCP server and start it: a program with its arguments, or ``url=`` for a running server.

        If a server with this name exists, it gets this configuration, so that a cell can be run again; if it has
        failed, it is started again. The daemon keeps the server and starts it in later runs, until
        ``remove_mcp_server``.

        Args:
            command: The program and its arguments. ``python`` is the Python of this process, unless ``env`` contains a
                ``PATH``.
            wait: Whether to wait until the server has started, instead of returning at once.
            fields: Fields of ``McpServerConfig``: ``env``, ``cwd``, ``headers``, ``permission``, ``tool_timeout_s`` and
                so on. Omitted fields have their defaults, also if the server existed with other values.

        Raises:
            InvalidRequestError: the command is a single text, or a field is invalid.
            HostingError: with ``wait``, the server did not start; the message contains the reason.
        """
        if isinstance(command, str):
            raise InvalidRequestError(
                f"command is {command!r:.200}; pass the program and its arguments as a list: {command.split()!r:.200}",
                param="command",
            )
        if command:
            is_own = command[0] in ("python", "python3") and "PATH" not in (fields.get("env") or {})
            fields |= {"command": sys.executable if is_own else command[0], "args": tuple(command[1:])}
        config = validated(
            McpServerConfig, {"name": name, "transport": "http" if "url" in fields else "stdio", **fields}
        )
        try:
            record = self.client.add_mcp_server(config)
        except McpServerExistsError:
            if self.client.mcp_server(name).transport == config.transport:
                changed = {field: getattr(config, field) for field in ChangeMcpServer.model_fields}
                record = self.client.change_mcp_server(name, changed)
                if record.state in ("failed", "restarting"):
                    # Its configuration is unchanged, but a missing package may have been installed.
                    record = self.client.restart_mcp_server(name)
            else:
                self.client.remove_mcp_server(name)
                record = self.client.add_mcp_server(config)
        if wait:
            self.run(self.services.servers.wait_started(name))
            record = self.client.mcp_server(name)
            if record.error is not None:
                raise HostingError(
                    f"the MCP server {name} did not start: {record.error}; correct it and call this again, or remove "
                    f"it with lab.daemon.remove_mcp_server({name!r})"
                )
        return record

    remove_mcp_server = _of_client(DaemonClient.remove_mcp_server)


class LabEvents(EventSource):
    """An ``EventSource`` over a daemon of this process."""

    def __init__(self, daemon: LabDaemon) -> None:
        self._daemon = daemon

    @property
    def place(self) -> str:
        return self._daemon.url

    def _client(self) -> AsyncDaemonClient:
        return AsyncDaemonClient(self._daemon.url, token=self._daemon.token)

    async def events(self) -> AsyncGenerator[DaemonEvent | ConnectionState, None]:
        async with self._client() as client:
            state = await client.state()
            subscription = client.events(after=max(state.oldest_seq - 1, state.latest_seq - 5000))
            async with subscription, aclosing(merge_events(subscription.states(), subscription)) as items:
                async for item in items:
                    yield item

    async def decide(
        self, permission_id: str, decision: Literal["allow", "deny"], scope: Literal["once", "session"]
    ) -> None:
        async with self._client() as client:
            await client.decide(permission_id, decision, scope=scope)

    async def cancel(self, session_id: str) -> None:
        async with self._client() as client:
            await client.cancel_turns(session_id, CancelTurns())


async def merge_events(*sources: AsyncIterable[T], buffered: int = 1000) -> AsyncGenerator[T, None]:
    """Yield the items of all sources as they arrive, until one source ends or raises.

    Args:
        buffered: Maximum number of items that wait to be read.
    """
    items: asyncio.Queue[T | None] = asyncio.Queue(buffered)
    is_closed = False

    async def put(source: AsyncIterable[T]) -> None:
        try:
            async for item in source:
                await items.put(item)
        finally:
            # After the end no item is read, so putting one into a full queue would wait forever.
            if not is_closed:
                await items.put(None)

    tasks = [asyncio.create_task(put(source), name="lmx-lab merging") for source in sources]
    try:
        while (item := await items.get()) is not None:
            yield item
        for task in tasks:
            if task.done():
                task.result()
    finally:
        is_closed = True
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
