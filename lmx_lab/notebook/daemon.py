"""The daemon of a lab: with the client's verbs on it, so that a notebook needs no address and no token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Coroutine, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from lmx_lab.client import AsyncDaemonClient, DaemonClient
from lmx_lab.client.blocking.portal import Portal, serves
from lmx_lab.client.event_receiver import ConnectionState
from lmx_lab.client.request_bodies import build_body
from lmx_lab.daemon.daemon import Daemon
from lmx_lab.errors import HostingError, InvalidRequestError, McpServerExistsError
from lmx_lab.panels.event_source import EventSource
from lmx_lab.portal import run_nested
from lmx_lab.wire.events import DaemonEvent
from lmx_lab.wire.mcp import ChangeMcpServer, McpServerConfig, McpServerRecord
from lmx_lab.wire.sessions import CancelTurns, PermissionRecord, SessionList, SessionMessage

if TYPE_CHECKING:
    from lmx_lab.client import BlockingSubscription, Session
    from lmx_lab.panels.events import EventsPanel
    from lmx_lab.panels.workbench import Workbench

T = TypeVar("T")
SHOWN_EVENTS = 5000
"""Of the log, when the viewer is opened."""
HELD = 1000
"""Events between the connection and the viewer."""


class LabDaemon(Daemon):
    """A ``Daemon`` in this process. Its verbs block, in cells too: it has a thread of its own.

    ``client`` has all that is not here; for code on a loop there is ``lmx_lab.client.AsyncDaemonClient.discover()``.
    """

    def __init__(self, workbench: Workbench, **options: Any) -> None:
        """
        Args:
            workbench: On which its events are shown.
            options: Of ``Daemon``.
        """
        super().__init__(**options)
        self._workbench = workbench
        self._seen_as = LabEvents(self)
        self._client: DaemonClient | None = None

    @property
    def client(self) -> DaemonClient:
        """The typed client of it.

        Raises:
            HostingError: it does not run.
        """
        if not self.running:
            raise HostingError(
                "this daemon does not run: lab.daemon is the one that does, and lab.start_daemon() starts one"
            )
        if self._client is None:
            self._client = _PumpingClient(self)
        return self._client

    # Life

    def start(self) -> None:
        super().start()
        self._workbench.follow_events(self._seen_as)

    def _close(self) -> None:
        super()._close()
        if self._workbench.events is self._seen_as:
            self._workbench.follow_events(None)
        if self._client is not None:
            self._client.close()

    # Sessions

    def session(
        self,
        session_id: str | None = None,
        *,
        title: str | None = None,
        model: str | None = None,
        system_prompt: str | None = None,
        tools: Sequence[str] | None = None,
        messages: Sequence[SessionMessage] = (),
    ) -> Session:
        """A new session, or the one of this id, which is made if it is not there. ``session.run("…")`` asks."""
        return self.client.session(
            session_id, title=title, model=model, system_prompt=system_prompt, tools=tools, messages=messages
        )

    def sessions(self, *, limit: int | None = None, q: str | None = None) -> SessionList:
        """The sessions, the last used first."""
        return self.client.sessions(limit=limit, q=q)

    # What happens

    def events(
        self, *, after: int | None = None, session_ids: Sequence[str] = (), types: Sequence[str] = ()
    ) -> BlockingSubscription:
        """``with lab.daemon.events(after=0) as events: for event in events: ...``, over every break and restart."""
        return self.client.events(after=after, session_ids=session_ids, types=types)

    def permissions(self) -> list[PermissionRecord]:
        """Calls that wait for a yes."""
        return self.client.permissions()

    def decide(
        self, permission_id: str, decision: Literal["allow", "deny"], *, scope: Literal["once", "session"] = "once"
    ) -> PermissionRecord:
        """Say yes or no to one of them."""
        return self.client.decide(permission_id, decision, scope=scope)

    def panel(self) -> EventsPanel:
        """The event viewer, the same as ``lab.panel("events")``."""
        from lmx_lab.panels.events import EventsPanel
        from lmx_lab.panels.layout import composed

        panel = composed(self._workbench, ["events"])
        assert isinstance(panel, EventsPanel)
        return panel

    # MCP servers

    def add_mcp_server(self, name: str, command: Sequence[str] = (), **fields: Any) -> McpServerRecord:
        """Add an MCP server and start it: a program with its arguments, or ``url=`` for one that runs. One of this name
        is changed, as a cell that is run again means it.

        Args:
            fields: Of ``McpServerConfig``: ``env``, ``cwd``, ``headers``, ``permission``, ``tool_timeout_s`` and so on.
        """
        if isinstance(command, str):
            raise InvalidRequestError(
                f"command is {command!r:.200}; give the program and its arguments as a list: {command.split()!r:.200}",
                param="command",
            )
        if command:
            fields |= {"command": command[0], "args": tuple(command[1:])}
        config = build_body(McpServerConfig, name=name, transport="http" if "url" in fields else "stdio", **fields)
        try:
            return self.client.add_mcp_server(config)
        except McpServerExistsError:
            if self.client.mcp_server(name).transport == config.transport:
                return self.client.change_mcp_server(name, build_body(ChangeMcpServer, **fields))
            self.client.remove_mcp_server(name)
            return self.client.add_mcp_server(config)


class _PumpingPortal(Portal):
    """Waits as the lab's own verbs do: the kernel's loop, where that serves the model, goes on meanwhile."""

    def __init__(self, client: AsyncDaemonClient, upstream_url: str) -> None:
        super().__init__(lambda: client.url, client.aclose)
        self._upstream_url = upstream_url

    def check_caller(self, *, also: str | None = None) -> None:
        if self._served_here() is None:
            super().check_caller(also=also)

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        loop = self._served_here()
        if loop is None:
            return super().run(work, timeout_s)

        async def handed() -> T:
            return await asyncio.wait_for(asyncio.wrap_future(self.thread.submit(work)), timeout_s)

        try:
            return run_nested(loop, handed())
        except HostingError:
            # It was not begun, or has ended.
            work.close()
            raise

    def _served_here(self) -> asyncio.AbstractEventLoop | None:
        here = asyncio._get_running_loop()
        return here if here is not None and serves(here, self._upstream_url) else None


class _PumpingClient(DaemonClient):
    """Of the daemon before a lab in this process."""

    def __init__(self, daemon: Daemon) -> None:
        super().__init__(daemon.url, token=daemon.token)
        self._portal = _PumpingPortal(self._client, daemon.upstream_url)


class LabEvents(EventSource):
    """A daemon's events for the viewer, on the panels' loop."""

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
            subscription = client.events(after=max(state.oldest_seq - 1, state.latest_seq - SHOWN_EVENTS))
            async with subscription, aclosing(merged(subscription.states(), subscription)) as items:
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


async def merged(*sources: AsyncIterable[T]) -> AsyncGenerator[T, None]:
    """What all of them give, as it comes, until one ends or raises."""
    items: asyncio.Queue[T | None] = asyncio.Queue(HELD)
    is_left = False

    async def put(source: AsyncIterable[T]) -> None:
        try:
            async for item in source:
                await items.put(item)
        finally:
            # Once it is left nobody takes anything, and there may be no room.
            if not is_left:
                await items.put(None)

    tasks = [asyncio.create_task(put(source), name="lmx-lab merging") for source in sources]
    try:
        while (item := await items.get()) is not None:
            yield item
        for task in tasks:
            if task.done():
                task.result()
    finally:
        is_left = True
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
