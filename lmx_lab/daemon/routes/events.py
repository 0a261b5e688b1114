"""Events by polling, for clients without WebSockets."""

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
    event_filter,
    limited,
    waiting_s,
)
from lmx_lab.daemon.routes.responses import reading
from lmx_lab.daemon.services import Services
from lmx_lab.daemon.storage.log import EventFilter, Page
from lmx_lab.errors import CursorExpiredError, QueueFullError, SessionNotFoundError
from lmx_lab.http.openapi import websocket_response
from lmx_lab.wire.event_stream import EventPage

SOCKET = """With `Upgrade: websocket` the address is a stream of events without an end.

It takes `after`, `stream_id`, `session_id` and `types`, and the token also as `?token=`, since browsers give no headers
to WebSockets. Each text message of the server is an `Envelope`: first `stream.hello`; where the cursor cannot be
resumed `stream.reset` and a `stream.snapshot` of each session; then what is kept after the cursor, `stream.synced`, and
what happens from there on. Nothing is expected from the client. A daemon that ends sends `stream.closing` and closes
with 1001. A handshake is refused with the failures below."""


def event_routes(services: Services) -> APIRouter:
    router = APIRouter(prefix="/v3", tags=["events"], route_class=StrictQueryRoute)

    @router.get(
        "/events",
        response_model=EventPage,
        responses={**websocket_response(SOCKET), **reading(CursorExpiredError, QueueFullError)},
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
        """The events after a cursor, the oldest first; 410 if they are not kept any more. `wait` holds the answer back
        until there is one."""
        poll = _Poll(services, event_filter(session_id, types), limit)
        return await poll.answer(request, after=after, stream_id=stream_id, wait=wait)

    @router.get(
        "/sessions/{session_id}/events",
        response_model=EventPage,
        responses=reading(SessionNotFoundError, CursorExpiredError, in_path=True),
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
        """The same of one session."""
        await services.store.read(lambda reading: sessions.record(reading, session_id))
        poll = _Poll(services, event_filter([session_id], types), limit)
        return await poll.answer(request, after=after, stream_id=stream_id, wait=wait)

    return router


class _Poll:
    """What one request asks for."""

    def __init__(self, services: Services, only: EventFilter, limit: int | None) -> None:
        most = services.limits.page_events
        self._services = services
        self._log = services.log
        self._only = only
        self._limit = limited(limit, default=most, most=most)

    async def answer(self, request: Request, *, after: int | None, stream_id: str | None, wait: float) -> Response:
        wait_s = waiting_s(wait, self._services.limits.wait_s)
        after = self._log.latest_seq if after is None else after
        self._log.check(after, stream_id)
        page = await self.page(after)
        if not page.events and wait_s:
            waiting = self.next_page(page.through, wait_s)
            page = await self._services.subscribers.unless_left(request, waiting) or page
        more = page.through < self._log.latest_seq
        text = _json(page.through, (event.text for event in page.events), more=more)
        return Response(text, media_type="application/json")

    async def page(self, after: int) -> Page:
        """The next page with something in it, or what there is."""
        page = await self._log.page(after, self._only, self._limit)
        while not page.events and page.through < self._log.latest_seq:
            page = await self._log.page(page.through, self._only, self._limit)
        return page

    async def next_page(self, after: int, wait_s: float) -> Page:
        """The same, once there is something, or after the time."""
        now = asyncio.get_running_loop().time
        deadline = now() + wait_s
        page = Page(events=(), through=after)
        while not page.events and (left_s := deadline - now()) > 0:
            await self._log.wait(page.through, left_s)
            page = await self.page(page.through)
        return page


def _json(cursor: int, events: Iterable[str], *, more: bool) -> str:
    """An ``EventPage`` out of events that are JSON already."""
    return f'{{"events":[{",".join(events)}],"cursor":{cursor},"more":{"true" if more else "false"}}}'
