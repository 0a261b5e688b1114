"""Routes that poll events, for clients without WebSockets."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from fastapi import APIRouter, Request, Response

from lmx_lab.daemon import sessions
from lmx_lab.daemon.routes.queries import (
    After,
    OfSessions,
    PageLimit,
    StreamId,
    StrictQueryRoute,
    Types,
    Wait,
    check_limit,
    check_wait,
    event_filter,
)
from lmx_lab.daemon.routes.responses import read_failures
from lmx_lab.daemon.services import Services
from lmx_lab.daemon.storage.event_log import EventFilter, LogPage
from lmx_lab.errors import CursorExpiredError, QueueFullError, SessionNotFoundError
from lmx_lab.http.openapi import websocket_response
from lmx_lab.wire.events import EventPage

SOCKET = """With `Upgrade: websocket` this address is an endless stream of events.

The stream accepts `after`, `stream_id`, `session_id` and `types`, and the token also as `?token=`, because browsers
cannot set headers of WebSockets. Each text message of the server is an `Envelope`. The first is `stream.hello`. If the
cursor cannot be resumed, `stream.reset` and a `stream.snapshot` of each session follow. Then come the stored events
after the cursor, `stream.synced`, and live events. The client does not need to send anything. When the daemon stops, it
sends `stream.closing` and closes the connection with code 1001. A refused handshake has one of the error answers
below."""


def event_routes(services: Services) -> APIRouter:
    """Return the routes that poll events."""
    router = APIRouter(prefix="/v3", tags=["events"], route_class=StrictQueryRoute)

    @router.get(
        "/events",
        response_model=EventPage,
        responses={**websocket_response(SOCKET), **read_failures(CursorExpiredError, QueueFullError)},
    )
    async def events(
        *,
        request: Request,
        after: After = None,
        limit: PageLimit = None,
        wait: Wait = 0.0,
        types: Types = None,
        session_id: OfSessions = None,
        stream_id: StreamId = None,
    ) -> Response:
        """The events after a cursor, oldest first; 410 if they are no longer kept. With `wait` the answer is delayed
        until there is an event."""
        poll = _Poll(services, event_filter(session_id, types), limit)
        return await poll.answer(request, after=after, stream_id=stream_id, wait=wait)

    @router.get(
        "/sessions/{session_id}/events",
        response_model=EventPage,
        responses=read_failures(SessionNotFoundError, CursorExpiredError, in_path=True),
    )
    async def events_of_session(
        *,
        session_id: str,
        request: Request,
        after: After = None,
        limit: PageLimit = None,
        wait: Wait = 0.0,
        types: Types = None,
        stream_id: StreamId = None,
    ) -> Response:
        """The events of one session after a cursor, oldest first."""
        await services.store.read(lambda view: sessions.read(view, session_id))
        poll = _Poll(services, event_filter([session_id], types), limit)
        return await poll.answer(request, after=after, stream_id=stream_id, wait=wait)

    return router


class _Poll:
    """One request for events."""

    def __init__(self, services: Services, only: EventFilter, limit: int | None) -> None:
        max_events = services.limits.page_events
        self._services = services
        self._log = services.log
        self._filter = only
        self._limit = check_limit(limit, default=max_events, maximum=max_events)

    async def answer(self, request: Request, *, after: int | None, stream_id: str | None, wait: float) -> Response:
        """Return a page of events, at the latest after ``wait`` seconds."""
        wait_s = check_wait(wait, self._services.limits.wait_s)
        after = self._log.latest_seq if after is None else after
        self._log.check_cursor(after, stream_id)
        page = await self._read_page(after)
        if not page.events and wait_s:
            next_page = self._wait_for_page(page.through, wait_s)
            page = await self._services.subscribers.run_while_connected(request, next_page) or page
        more = page.through < self._log.latest_seq
        text = _encode_page(page.through, (event.text for event in page.events), more=more)
        return Response(text, media_type="application/json")

    async def _read_page(self, after: int) -> LogPage:
        """Return the next page with events, or an empty page if there are none."""
        page = await self._log.read_page(after, self._filter, self._limit)
        while not page.events and page.through < self._log.latest_seq:
            page = await self._log.read_page(page.through, self._filter, self._limit)
        return page

    async def _wait_for_page(self, after: int, wait_s: float) -> LogPage:
        """Return the next page once there are events, or an empty page after ``wait_s`` seconds."""
        now = asyncio.get_running_loop().time
        deadline = now() + wait_s
        page = LogPage(events=(), through=after)
        while not page.events and (timeout_s := deadline - now()) > 0:
            await self._log.wait(page.through, timeout_s)
            page = await self._read_page(page.through)
        return page


def _encode_page(cursor: int, events: Iterable[str], *, more: bool) -> str:
    """Build an ``EventPage`` from events that are JSON already."""
    return f'{{"events":[{",".join(events)}],"cursor":{cursor},"more":{"true" if more else "false"}}}'
