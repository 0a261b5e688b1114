"""A typed client of the daemon, over HTTP and a WebSocket of events."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Self

import httpx2
from pydantic import JsonValue

from lmx_lab.client.bodies import shaped
from lmx_lab.client.credentials import Credentials
from lmx_lab.client.cursors import CursorStore
from lmx_lab.client.daemon_routes import DaemonRoutes
from lmx_lab.client.event_subscription import Subscription
from lmx_lab.client.session import AsyncSession
from lmx_lab.wire.sessions import CreateSession, SessionMessage

if TYPE_CHECKING:
    from lmx_lab.client.turn import TurnFollower


class AsyncDaemonClient(DaemonRoutes):
    """The verbs of one daemon, on one loop: ``async with AsyncDaemonClient.discover() as client``.

    Args:
        base_url: With or without a proxy's prefix, a slash or ``/v3`` at its end.
        token: The daemon's, which ``state.json`` in its folder has. It is shown nowhere.
        transport: In the place of the network. It is closed with the client.

    Raises:
        InvalidRequestError: an address or a token that could never do.
    """

    def __init__(self, base_url: str, *, token: str | None, transport: httpx2.AsyncBaseTransport | None = None) -> None:
        super().__init__(Credentials(base_url, token), transport=transport)
        self.followed: set[TurnFollower] = set()
        """Turns that ``run`` and ``stream`` follow to their end."""

    @classmethod
    def discover(
        cls, home: str | os.PathLike[str] | None = None, *, transport: httpx2.AsyncBaseTransport | None = None
    ) -> Self:
        """A client of the daemon that this user runs, and of the next one in the same folder. Reads its state file and
        asks nobody.

        Args:
            home: By default LMX_LAB_HOME, else ``~/.lmx-lab``.

        Raises:
            UnreachableError: there is none; the message says how to start it.
        """
        access = Credentials.from_home(home)
        client = cls(access.url, token=access.token, transport=transport)
        client._line.access = access
        return client

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.url}>"

    async def aclose(self) -> None:
        """Cancel the turns that are still followed, then close all connections. Idempotent."""
        await asyncio.gather(*[turn.leave() for turn in list(self.followed)], return_exceptions=True)
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
        """A new session, or the one of this id, which stays as it is.

        Args:
            model: By default whatever the server of the model has.
            tools: Which its turns may use: names, or a server's with an asterisk, ``time__*``. [] is none; by default
                all.
            messages: A history to begin with.
        """
        fields: dict[str, object] = {
            "session_id": session_id,
            "title": title,
            "model": model,
            "system_prompt": system_prompt,
            # A word would become a list of its letters.
            "tools": tools if tools is None or isinstance(tools, str) else list(tools),
            "messages": tuple(messages) or None,
            "metadata": dict(metadata) if isinstance(metadata, Mapping) else metadata,
        }
        given = {name: value for name, value in fields.items() if value is not None}
        record = await self.create_session(shaped(CreateSession, **given))
        return AsyncSession(self, record.session_id)

    def events(
        self,
        *,
        after: int | None = None,
        session_ids: Sequence[str] = (),
        types: Sequence[str] = (),
        cursor: CursorStore | None = None,
    ) -> Subscription:
        """Events as they come, also over breaks and restarts: ``async with client.events() as events: async for event
        in events``.

        Args:
            after: A cursor: what came after that event, 0 for all that is kept. By default only what is new.
            session_ids: By default of all sessions, and what is of none.
            types: Such as ``turn.done``, ``tool.*``; by default all.
            cursor: Where to keep the last event that was seen, and to go on from.
        """
        return Subscription(self, after=after, session_ids=session_ids, types=types, cursor=cursor)
