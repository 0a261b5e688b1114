"""Routes of events: a WebSocket, and polling for clients without WebSockets.

Each WebSocket reads the log from its own cursor, at its own speed. There is no queue for a connection. A connection
stores the cursor of what it has sent, the log notifies it of new events, and the socket's back-pressure determines when
it reads the next page. So a slow client delays no other client and loses no events.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response, WebSocket
from pydantic import BaseModel
from starlette.websockets import WebSocketDisconnect

from lmx_lab.daemon.encoding import encode_event, timestamp, to_json
from lmx_lab.daemon.routes.queries import (
    After,
    OfSessions,
    PageLimit,
    StreamId,
    StreamQuery,
    StrictQueryRoute,
    Types,
    Wait,
    check_limit,
    check_wait,
    event_filter,
)
from lmx_lab.daemon.routes.resources import read_failures
from lmx_lab.daemon.services import Services
from lmx_lab.daemon.storage import sessions
from lmx_lab.daemon.storage.event_log import ALL_EVENTS, EventFilter, LogPage
from lmx_lab.daemon.storage.store import DatabaseView
from lmx_lab.daemon.turns.concurrency import give_way
from lmx_lab.errors import CursorExpiredError, LabError, QueueFullError, SessionNotFoundError
from lmx_lab.http.errors import respond
from lmx_lab.http.openapi import websocket_response
from lmx_lab.wire.events import Closing, EventPage, Hello, Reset, StreamHeartbeat, Synced

log = logging.getLogger(__name__)
PATH = "/v3/events"
GOING_AWAY, POLICY_VIOLATION, INTERNAL_ERROR = 1001, 1008, 1011
"""Close codes of WebSockets."""
TURN_ENDS = ("turn.done", "turn.error")
"""Events that end a turn. No client waits for what their writer does afterwards."""
EncodedBatch = Any
"""Events in a form that only the HTTP server knows."""
Encode = Callable[[Sequence[str]], EncodedBatch]
SOCKET = """With `Upgrade: websocket` this address is an endless stream of events.

The stream accepts `after`, `stream_id`, `session_id` and `types`, and the token also as `?token=`, because browsers
cannot set headers of WebSockets. Each text message of the server is an `Envelope`. The first is `stream.hello`. If the
cursor cannot be resumed, `stream.reset` and a `stream.snapshot` of each session follow. Then come the stored events
after the cursor, `stream.synced`, and live events. The client does not need to send anything. When the daemon stops, it
sends `stream.closing` and closes the connection with code 1001. A refused handshake has one of the error answers
below."""


def event_routes(services: Services) -> APIRouter:
    """Return the routes that poll events, and the WebSocket route."""
    router, latest_page = APIRouter(prefix="/v3", tags=["events"], route_class=StrictQueryRoute), _LatestPage()

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
        only = event_filter(session_id, types)
        return await _poll(services, request, only, limit=limit, after=after, stream_id=stream_id, wait=wait)

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
        only = event_filter([session_id], types)
        return await _poll(services, request, only, limit=limit, after=after, stream_id=stream_id, wait=wait)

    async def stream(socket: WebSocket) -> None:
        try:
            query = StreamQuery.parse(socket.scope["query_string"])
            with services.subscribers.connected():
                await _Stream(socket, query, services, latest_page).run()
        except LabError as exc:
            # The socket was not accepted yet: later errors are handled within the stream.
            await socket.send_denial_response(respond(socket.scope, exc))

    # Not FastAPI's decorator, because its stacks of contexts would stay in memory for each connection.
    router.add_websocket_route(PATH, stream)
    return router


async def _poll(
    services: Services,
    request: Request,
    only: EventFilter,
    *,
    limit: int | None,
    after: int | None,
    stream_id: str | None,
    wait: float,
) -> Response:
    """Return a page of events, at the latest after ``wait`` seconds."""
    events, max_events = services.log, services.limits.page_events
    limit = check_limit(limit, default=max_events, maximum=max_events)
    wait_s = check_wait(wait, services.limits.wait_s)
    after = events.latest_seq if after is None else after
    events.check_cursor(after, stream_id)

    async def read_page(after: int) -> LogPage:
        """Return the next page with events, or an empty page if there are none."""
        page = await events.read_page(after, only, limit)
        while not page.events and page.through < events.latest_seq:
            page = await events.read_page(page.through, only, limit)
        return page

    async def wait_for_page(page: LogPage) -> LogPage:
        """Return the next page once there are events, or an empty page after ``wait_s`` seconds."""
        now = asyncio.get_running_loop().time
        deadline = now() + wait_s
        while not page.events and (timeout_s := deadline - now()) > 0:
            await events.wait(page.through, timeout_s)
            page = await read_page(page.through)
        return page

    page = await read_page(after)
    if not page.events and wait_s:
        page = await services.subscribers.run_while_connected(request, wait_for_page(page)) or page
    more = "true" if page.through < events.latest_seq else "false"
    # This is the JSON of an ``EventPage``, whose events are stored as JSON.
    texts = ",".join(event.text for event in page.events)
    text = f'{{"events":[{texts}],"cursor":{page.through},"more":{more}}}'
    return Response(text, media_type="application/json")


class _ClientGone(Exception):
    """The client has disconnected or does not receive."""


class _Stream:
    """One connection."""

    def __init__(self, socket: WebSocket, query: StreamQuery, services: Services, latest_page: _LatestPage) -> None:
        self._socket = socket
        self._services = services
        self._query = query
        self._latest_page = latest_page
        self._log = services.log
        self._filter = event_filter(query.session_id, query.types)
        self._cursor = self._log.latest_seq if query.after is None else query.after
        self._now = asyncio.get_running_loop().time
        self._sent_at = self._now()
        extensions: dict[str, Any] = socket.scope.get("extensions") or {}
        self._encode: Encode = extensions.get("lmx_lab.frames", list)
        self._write: Callable[[EncodedBatch], Awaitable[None]] = extensions.get("lmx_lab.send", self._send_one_by_one)
        self._abort: Callable[[], None] = extensions.get("lmx_lab.abort", lambda: None)

    async def run(self) -> None:
        """Send events until the client disconnects or the daemon stops."""
        await self._socket.accept()
        disconnected = asyncio.create_task(self._wait_disconnected(), name="lmx-lab waiting for a subscriber to leave")
        try:
            with suppress(_ClientGone):
                try:
                    expired: CursorExpiredError | None = None
                    try:
                        self._log.check_cursor(self._cursor, self._query.stream_id)
                    except CursorExpiredError as exc:
                        expired, self._cursor = exc, self._log.latest_seq
                    hello = Hello(
                        daemon_id=self._services.daemon_id,
                        cursor=self._cursor,
                        latest_seq=self._log.latest_seq,
                        heartbeat_s=self._services.limits.heartbeat_s,
                    )
                    await self._send_control_frame("stream.hello", hello)
                    if expired is not None:
                        await self._reset(expired, disconnected)
                    await self._follow(disconnected)
                except LabError as exc:
                    log.warning("a stream of events has ended with an error: %s", exc)
                    await self._close(INTERNAL_ERROR)
        finally:
            disconnected.cancel()
            await asyncio.gather(disconnected, return_exceptions=True)

    # Sending

    async def _reset(self, expired: CursorExpiredError, disconnected: asyncio.Future[None]) -> None:
        """Send ``stream.reset`` and snapshots of the sessions instead of events that are not available."""
        store, events = self._services.store, self._log
        self._cursor = events.latest_seq
        await self._send_control_frame(
            "stream.reset",
            Reset(
                reason=expired.reason, cursor=self._cursor, oldest_seq=events.oldest_seq, latest_seq=events.latest_seq
            ),
        )
        for session_id in await store.read(lambda view: sessions.list_ids(view, self._filter.session_ids)):
            if disconnected.done():
                raise _ClientGone
            # A session that was deleted in the meantime has its event after the cursor.
            with suppress(SessionNotFoundError):
                snapshot = await store.read(partial(_read_snapshot, session_id=session_id))
                frame = self._control_frame("stream.snapshot", f'{{"session":{snapshot}}}', session_id=session_id)
                await self._send(self._encode([frame]))

    async def _follow(self, disconnected: asyncio.Future[None]) -> None:
        """Send the events after the cursor, stored ones first, until the client disconnects or the daemon stops."""
        is_synced = False
        while not disconnected.done():
            # Before a page is read, so that no event is missed in between.
            growth = self._log.watch()
            try:
                page = await self._log.read_page(self._cursor, self._filter)
            except CursorExpiredError as exc:
                # The cursor was valid at first, but events are deleted faster than this client receives them.
                await self._reset(exc, disconnected)
            else:
                shares = self._filter is ALL_EVENTS
                for batch in self._latest_page.batches(page, self._encode) if shares else _batches(page, self._encode):
                    await self._send(batch)
                self._cursor = page.through
            if self._cursor < self._log.latest_seq:
                # Other connections are served in between, even while this one sends many stored events.
                await asyncio.sleep(0)
                continue
            if not is_synced:
                await self._send_control_frame("stream.synced", Synced(cursor=self._cursor))
                is_synced = True
            if self._services.subscribers.closing.done():
                await self._send_control_frame("stream.closing", Closing(reason="stopping", cursor=self._cursor))
                await self._close(GOING_AWAY)
                return
            # Wait until there is something to do, or a heartbeat is due because nothing was sent for some time.
            timeout_s = self._sent_at + self._services.limits.heartbeat_s - self._now()
            futures = {growth, disconnected, self._services.subscribers.closing}
            done, _ = await asyncio.wait(futures, timeout=max(0.0, timeout_s), return_when=asyncio.FIRST_COMPLETED)
            if not done:
                await self._send_control_frame("stream.heartbeat", StreamHeartbeat(cursor=self._cursor))
            if self._log.latest_event not in TURN_ENDS:
                # The turn that has written the events continues first: sending them would delay its request to the
                # model.
                await give_way(4)

    async def _send_control_frame(self, event: str, data: BaseModel) -> None:
        await self._send(self._encode([self._control_frame(event, to_json(data))]))

    def _control_frame(self, event: str, data: str, *, session_id: str | None = None) -> str:
        return encode_event(
            event=event, data=data, seq=None, at=timestamp(), stream_id=self._log.stream_id, session_id=session_id
        )

    # The socket

    async def _send(self, batch: EncodedBatch) -> None:
        try:
            async with asyncio.timeout(self._services.limits.blocked_send_s):
                await self._write(batch)
        except TimeoutError:
            # Aborted, because a close frame would wait behind the data that the client does not receive.
            self._abort()
            raise _ClientGone from None
        except (OSError, WebSocketDisconnect) as exc:
            raise _ClientGone from exc
        self._sent_at = self._now()

    async def _send_one_by_one(self, texts: Sequence[str]) -> None:
        """Send events through ASGI, on a server without the extension of ``lmx_lab.http``."""
        for text in texts:
            await self._socket.send_text(text)

    async def _wait_disconnected(self) -> None:
        """Wait until the client disconnects, and ignore its messages.

        Up to 64 in a minute are accepted. The server limits their size, and ends a connection that sends invalid UTF-8.
        """
        received_at: list[float] = []
        while (await self._socket.receive())["type"] != "websocket.disconnect":
            received_at = [*(at for at in received_at if at > self._now() - 60.0), self._now()]
            if len(received_at) > 64:
                await self._close(POLICY_VIOLATION, "this stream accepts no messages")
                return

    async def _close(self, code: int, reason: str | None = None) -> None:
        # Starlette raises RuntimeError if the client has closed the connection before.
        with suppress(OSError, RuntimeError, WebSocketDisconnect):
            await asyncio.wait_for(self._socket.close(code, reason), self._services.limits.blocked_send_s)


def _read_snapshot(view: DatabaseView, session_id: str) -> str:
    return to_json(sessions.read_snapshot(view, session_id))


class _LatestPage:
    """The last page that a connection without a filter has read, encoded once for all connections that are live."""

    def __init__(self) -> None:
        self._key: tuple[Encode, int, int] | None = None
        self._batches: list[EncodedBatch] = []

    def batches(self, page: LogPage, encode: Encode) -> list[EncodedBatch]:
        """Return the encoded batches of a page."""
        if not page.events:
            return []
        key = (encode, page.events[0].seq, page.events[-1].seq)
        if self._key != key:
            self._key, self._batches = key, list(_batches(page, encode))
        return self._batches


def _batches(page: LogPage, encode: Encode) -> Iterator[EncodedBatch]:
    """Return the events of a page in pieces of up to 256 Ki characters. A single event may be larger."""
    batch: list[str] = []
    size = 0
    for event in page.events:
        if batch and size + len(event.text) > 262_144:
            yield encode(batch)
            batch, size = [], 0
        batch.append(event.text)
        size += len(event.text)
    if batch:
        yield encode(batch)
