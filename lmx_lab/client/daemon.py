"""Provide a typed client of the daemon, over HTTP and a WebSocket of events."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import Self

import httpx2
from pydantic import JsonValue

from lmx_lab.blocking import BlockingStream, documented_as, twin
from lmx_lab.client.blocking import BlockingClient
from lmx_lab.client.credentials import Credentials
from lmx_lab.client.cursors import Cursor, CursorStore
from lmx_lab.client.daemon_routes import DaemonRoutes
from lmx_lab.client.request_bodies import build_body
from lmx_lab.client.session import AsyncSession, Session
from lmx_lab.client.subscription import ConnectionState, Subscription
from lmx_lab.client.turn import TurnFollower
from lmx_lab.wire.events import DaemonEvent
from lmx_lab.wire.sessions import CreateSession, SessionMessage


class AsyncDaemonClient(DaemonRoutes):
    """A client of one daemon, on one event loop: ``async with AsyncDaemonClient.discover() as client``.

    Args:
        base_url: The address, optionally with a proxy's prefix, a trailing slash or ``/v3``.
        token: The daemon's token, which is in ``state.json`` in its folder. It is never displayed.
        transport: Replaces the network, for tests. Closing the client closes it.

    Raises:
        InvalidRequestError: the address or the token is not valid.
    """

    def __init__(self, base_url: str, *, token: str | None, transport: httpx2.AsyncBaseTransport | None = None) -> None:
        super().__init__(Credentials(base_url, token), transport=transport)
        self._turns: set[TurnFollower] = set()
        """The turns of ``run`` and ``stream`` that have not ended."""

    @classmethod
    def discover(
        cls, home: str | os.PathLike[str] | None = None, *, transport: httpx2.AsyncBaseTransport | None = None
    ) -> Self:
        """Return a client of this user's daemon, even after the daemon has been restarted.

        Reads the daemon's state file and sends nothing.

        Args:
            home: The lab's home folder; by default LMX_LAB_HOME, or ``~/.lmx-lab`` if that is not set.

        Raises:
            UnreachableError: no daemon is running; the message contains the command that starts one.
        """
        credentials = Credentials.from_home(home)
        client = cls(credentials.url, token=credentials.endpoint.token, transport=transport)
        client._connection.credentials = credentials
        return client

    async def aclose(self) -> None:
        """Cancel the turns of ``run`` and ``stream`` that have not ended, then close all connections. Idempotent."""
        await asyncio.gather(*[turn.cancel() for turn in self._turns], return_exceptions=True)
        await super().aclose()

    async def session(
        self,
        session_id: str | None = None,
        *,
        title: str | None = None,
        model: str | None = None,
        system_prompt: str | None = None,
        tools: Sequence[str] | None = None,
        messages: Sequence[SessionMessage] = (),
        metadata: Mapping[str, JsonValue] | None = None,
    ) -> AsyncSession:
        """Create a session. A session of this id that exists is returned unchanged.

        Args:
            model: The model of its turns; by default the one that the model server has loaded.
            tools: Names of the tools that its turns may use, or ``time__*`` for all tools of the MCP server ``time``.
                By default all tools; [] for none.
            messages: The initial history.
        """
        fields: dict[str, object] = {
            "session_id": session_id,
            "title": title,
            "model": model,
            "system_prompt": system_prompt,
            # A string is passed on unchanged and refused below; list() would convert it to a list of letters.
            "tools": tools if tools is None or isinstance(tools, str) else list(tools),
            "messages": tuple(messages) or None,
            "metadata": dict(metadata) if isinstance(metadata, Mapping) else metadata,
        }
        given = {name: value for name, value in fields.items() if value is not None}
        record = await self.create_session(build_body(CreateSession, **given))
        return AsyncSession(self, record.session_id, self._turns)

    def events(
        self,
        *,
        after: int | None = None,
        session_ids: Sequence[str] = (),
        types: Sequence[str] = (),
        cursor: CursorStore | None = None,
    ) -> Subscription:
        """Subscribe to events. The subscription continues after lost connections and restarts of the daemon.

        ``async with client.events() as events: async for event in events: …``

        Args:
            after: Return events after this cursor; 0 for all events in the log. By default only new events.
            session_ids: Return events of these sessions only; by default all events, including those without a session.
            types: Return events of these types only, such as ``turn.done`` or ``tool.*``; by default all types.
            cursor: Stores the last event that was read; the next subscription with it continues there.
        """
        return Subscription(self, after=after, session_ids=session_ids, types=types, cursor=cursor)


class BlockingSubscription(BlockingStream[DaemonEvent]):
    """Events of the daemon for a ``for`` loop: ``with client.events() as events: for event in events: …``

    It has the properties and methods of ``Subscription``, and starts when the ``with`` block is entered.
    """

    def __init__(self, client: DaemonClient, subscription: Subscription) -> None:
        super().__init__(client._portal, lambda _: subscription)
        self._url = client.url
        self._async = subscription

    @property
    def state(self) -> ConnectionState:
        """The current state of the connection."""
        return self._async.state

    @property
    def cursor(self) -> Cursor | None:
        """The cursor after the last event that was read; None before the daemon has answered for the first time."""
        return self._async.cursor

    @property
    def reconnects(self) -> int:
        """Number of reconnects so far."""
        return self._async.reconnects

    def __repr__(self) -> str:
        return f"<{type(self).__name__} to {self._url}: {self.state.state}>"

    def __enter__(self) -> Self:
        self._started()
        return self

    @documented_as(Subscription.opened)
    def opened(self) -> Cursor | None:
        self._started()
        return self._portal.run(self._async.opened())

    def states(self) -> BlockingStream[ConnectionState]:
        """Yield the current state, then each change until the subscription is closed. Any number of readers."""
        return BlockingStream(self._portal, lambda _: aclosing(self._async.states()))


class DaemonClient(BlockingClient[AsyncDaemonClient]):
    """A blocking client of a daemon, for any thread: ``with DaemonClient.discover() as client``.

    It has the methods of ``AsyncDaemonClient``. Every method waits, and an interrupt (Ctrl-C) cancels the request.

    Raises:
        InvalidRequestError: the address or the key is not valid.
    """

    def __init__(self, base_url: str, *, token: str | None, transport: httpx2.AsyncBaseTransport | None = None) -> None:
        super().__init__(AsyncDaemonClient(base_url, token=token, transport=transport))

    @classmethod
    @documented_as(AsyncDaemonClient.discover)
    def discover(
        cls, home: str | os.PathLike[str] | None = None, *, transport: httpx2.AsyncBaseTransport | None = None
    ) -> Self:
        client = cls.__new__(cls)
        BlockingClient.__init__(client, AsyncDaemonClient.discover(home, transport=transport))
        return client

    @documented_as(AsyncDaemonClient.events)
    def events(
        self,
        *,
        after: int | None = None,
        session_ids: Sequence[str] = (),
        types: Sequence[str] = (),
        cursor: CursorStore | None = None,
    ) -> BlockingSubscription:
        return BlockingSubscription(
            self, self._async.events(after=after, session_ids=session_ids, types=types, cursor=cursor)
        )

    session = twin(AsyncDaemonClient.session, Session)
    health = twin(AsyncDaemonClient.health)
    state = twin(AsyncDaemonClient.state)
    shut_down = twin(AsyncDaemonClient.shut_down)
    create_session = twin(AsyncDaemonClient.create_session)
    sessions = twin(AsyncDaemonClient.sessions)
    read_session = twin(AsyncDaemonClient.read_session)
    change_session = twin(AsyncDaemonClient.change_session)
    delete_session = twin(AsyncDaemonClient.delete_session)
    fork_session = twin(AsyncDaemonClient.fork_session)
    submit_turn = twin(AsyncDaemonClient.submit_turn)
    read_turn = twin(AsyncDaemonClient.read_turn)
    cancel_turns = twin(AsyncDaemonClient.cancel_turns)
    permissions = twin(AsyncDaemonClient.permissions)
    decide = twin(AsyncDaemonClient.decide)
    mcp_servers = twin(AsyncDaemonClient.mcp_servers)
    add_mcp_server = twin(AsyncDaemonClient.add_mcp_server)
    mcp_server = twin(AsyncDaemonClient.mcp_server)
    change_mcp_server = twin(AsyncDaemonClient.change_mcp_server)
    remove_mcp_server = twin(AsyncDaemonClient.remove_mcp_server)
    restart_mcp_server = twin(AsyncDaemonClient.restart_mcp_server)
    test_mcp_server = twin(AsyncDaemonClient.test_mcp_server)
    mcp_tools = twin(AsyncDaemonClient.mcp_tools)
    page = twin(AsyncDaemonClient.page)
