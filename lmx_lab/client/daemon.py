"""A typed client of the daemon, over HTTP and a WebSocket of events."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Self

import httpx2
from pydantic import JsonValue

from lmx_lab.client.credentials import Credentials
from lmx_lab.client.cursors import CursorStore
from lmx_lab.client.daemon_routes import DaemonRoutes
from lmx_lab.client.event_subscription import Subscription
from lmx_lab.client.request_bodies import shaped
from lmx_lab.client.session import AsyncSession
from lmx_lab.client.turn import FollowedTurns
from lmx_lab.wire.sessions import CreateSession, SessionMessage


class AsyncDaemonClient(DaemonRoutes):
    """A client of one daemon, on one event loop: ``async with AsyncDaemonClient.discover() as client``.

    Args:
        base_url: The address, optionally with a proxy's prefix, a trailing slash or ``/v3``.
        token: The daemon's token, from ``state.json`` in its folder. It is never displayed.
        transport: Replaces the network, for tests. It is closed with the client.

    Raises:
        InvalidRequestError: the address or the token is not valid.
    """

    def __init__(self, base_url: str, *, token: str | None, transport: httpx2.AsyncBaseTransport | None = None) -> None:
        super().__init__(Credentials(base_url, token), transport=transport)
        self._turns = FollowedTurns()

    @classmethod
    def discover(
        cls, home: str | os.PathLike[str] | None = None, *, transport: httpx2.AsyncBaseTransport | None = None
    ) -> Self:
        """Return a client of this user's daemon, and of its successors in the same folder.

        Reads the daemon's state file and sends nothing.

        Args:
            home: By default LMX_LAB_HOME, else ``~/.lmx-lab``.

        Raises:
            UnreachableError: there is no daemon; the message says how to start one.
        """
        credentials = Credentials.from_home(home)
        client = cls(credentials.url, token=credentials.token, transport=transport)
        client._connection.credentials = credentials
        return client

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.url}>"

    async def aclose(self) -> None:
        """Cancel the turns that ``run`` and ``stream`` still follow, then close all connections. Idempotent."""
        await self._turns.cancel()
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
        """Create a session, or return the existing one of this id unchanged.

        Args:
            model: By default the model that the model server has loaded.
            tools: Tools that its turns may use: names, or all of a server, ``time__*``. [] is none; by default all.
            messages: The initial history.
        """
        fields: dict[str, object] = {
            "session_id": session_id,
            "title": title,
            "model": model,
            "system_prompt": system_prompt,
            # A string is refused below instead of becoming a list of letters.
            "tools": tools if tools is None or isinstance(tools, str) else list(tools),
            "messages": tuple(messages) or None,
            "metadata": dict(metadata) if isinstance(metadata, Mapping) else metadata,
        }
        given = {name: value for name, value in fields.items() if value is not None}
        record = await self.create_session(shaped(CreateSession, **given))
        return AsyncSession(self, record.session_id, self._turns)

    def events(
        self,
        *,
        after: int | None = None,
        session_ids: Sequence[str] = (),
        types: Sequence[str] = (),
        cursor: CursorStore | None = None,
    ) -> Subscription:
        """Subscribe to events, over lost connections and restarts of the daemon.

        ``async with client.events() as events: async for event in events: …``

        Args:
            after: A cursor; events after it are returned, 0 for all that are kept. By default only new events.
            session_ids: By default all sessions, and events without a session.
            types: Such as ``turn.done``, ``tool.*``; by default all.
            cursor: Stores the last event that was read, and the next subscription continues from it.
        """
        return Subscription(self, after=after, session_ids=session_ids, types=types, cursor=cursor)
