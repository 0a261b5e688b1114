"""The WebSocket of events: each connection reads the log at its own pace, from its own cursor.

There is no queue for a connection. It holds the cursor of what it has sent; the log's wake-up says that there is more,
and the socket's own back-pressure when the next page is read. Who is slow delays nobody and loses nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from fastapi import APIRouter, WebSocket
from pydantic import BaseModel
from starlette.websockets import WebSocketDisconnect

from lmx_lab.daemon import sessions
from lmx_lab.daemon.clock import iso
from lmx_lab.daemon.routes.queries import StreamQuery, event_filter
from lmx_lab.daemon.services import Services
from lmx_lab.daemon.storage.event_log import EVERYTHING, LogPage
from lmx_lab.daemon.storage.store import DatabaseView, as_json
from lmx_lab.errors import CursorExpiredError, LabError, SessionNotFoundError
from lmx_lab.http.error_bodies import request_id_of, respond
from lmx_lab.wire.event_stream import Closing, Hello, Reset, StreamHeartbeat, Synced

log = logging.getLogger(__name__)
PATH = "/v3/events"
GOING_AWAY, TOO_CHATTY, FAILED = 1001, 1008, 1011
BATCH_CHARACTERS = 262_144
"""Of events handed to a connection at once; one event may be longer."""
MESSAGES, WITHIN_S = 64, 60.0
"""So many messages a client may send in that time, although none of them means anything."""
Encoded = Any
"""Texts as the server sends them; what that is, only the server knows."""
Encode = Callable[[Sequence[str]], Encoded]


def stream_routes(services: Services) -> APIRouter:
    router, newest = APIRouter(), _Newest()

    async def events(socket: WebSocket) -> None:
        try:
            query = StreamQuery.parse(socket.scope["query_string"])
            with services.subscribers.entered():
                await _Stream(socket, query, services, newest).run()
        except LabError as exc:
            # Nothing is accepted yet: what fails later ends in the stream itself.
            await socket.send_denial_response(respond(exc, request_id=request_id_of(socket)))

    # Not by FastAPI's decorator, whose stacks of contexts each connection would keep in memory.
    router.add_websocket_route(PATH, events)
    return router


class _Gone(Exception):
    """The client has left, or takes nothing any more."""


class _Stream:
    """One connection."""

    def __init__(self, socket: WebSocket, query: StreamQuery, services: Services, newest: _Newest) -> None:
        self._socket = socket
        self._services = services
        self._query = query
        self._newest = newest
        self._log = services.log
        self._only = event_filter(query.session_id, query.types)
        self._cursor = self._log.latest_seq if query.after is None else query.after
        self._now = asyncio.get_running_loop().time
        self._sent_at = self._now()
        extensions: dict[str, Any] = socket.scope.get("extensions") or {}
        self._encode: Encode = extensions.get("lmx_lab.frames", list)
        self._write: Callable[[Encoded], Awaitable[None]] = extensions.get("lmx_lab.send", self._send_one_by_one)
        self._abort: Callable[[], None] = extensions.get("lmx_lab.abort", lambda: None)

    async def run(self) -> None:
        """Until the client leaves, or the daemon ends."""
        await self._socket.accept()
        gone = asyncio.create_task(self._listen(), name="lmx-lab listening to a subscriber")
        try:
            with suppress(_Gone):
                await self._tell(gone)
        finally:
            gone.cancel()
            await asyncio.gather(gone, return_exceptions=True)

    async def _tell(self, gone: asyncio.Future[None]) -> None:
        try:
            await self._begin(gone)
            await self._follow(gone)
        except LabError as exc:
            log.warning("a stream of events ended: %s", exc)
            await self._close(FAILED)

    # What is sent

    async def _begin(self, gone: asyncio.Future[None]) -> None:
        """The greeting and, where the cursor cannot be resumed, how everything is now."""
        expired = self._expired()
        if expired is not None:
            self._cursor = self._log.latest_seq
        await self._control(
            "stream.hello",
            Hello(
                daemon_id=self._services.daemon_id,
                cursor=self._cursor,
                latest_seq=self._log.latest_seq,
                heartbeat_s=self._services.limits.heartbeat_s,
            ),
        )
        if expired is not None:
            await self._reset(expired, gone)

    def _expired(self) -> CursorExpiredError | None:
        try:
            self._log.check(self._cursor, self._query.stream_id)
        except CursorExpiredError as exc:
            return exc
        return None

    async def _reset(self, expired: CursorExpiredError, gone: asyncio.Future[None]) -> None:
        """Everything as it is, in the place of events that cannot be had."""
        store, events = self._services.store, self._log
        self._cursor = events.latest_seq
        await self._control(
            "stream.reset",
            Reset(
                reason=expired.reason, cursor=self._cursor, oldest_seq=events.oldest_seq, latest_seq=events.latest_seq
            ),
        )
        for session_id in await store.read(lambda reading: sessions.ids(reading, self._only.session_ids)):
            if gone.done():
                raise _Gone
            # A session that is deleted by now has its own event after the cursor.
            with suppress(SessionNotFoundError):
                text = await store.read(_snapshot_of(session_id))
                await self._send(self._encode([self._frame("stream.snapshot", text, session_id)]))

    async def _follow(self, gone: asyncio.Future[None]) -> None:
        """Events, as long as the client is there."""
        synced = False
        while not gone.done():
            # Before looking what there is, so that nothing can come in between unseen.
            grown = self._log.grown()
            await self._send_page(gone)
            if self._cursor < self._log.latest_seq:
                # Others have their turn, also while this one has much to catch up with.
                await asyncio.sleep(0)
                continue
            if not synced:
                await self._control("stream.synced", Synced(cursor=self._cursor))
                synced = True
            if self._services.subscribers.closing.done():
                await self._control("stream.closing", Closing(reason="stopping", cursor=self._cursor))
                await self._close(GOING_AWAY)
                return
            await self._rest(grown, gone)

    async def _send_page(self, gone: asyncio.Future[None]) -> None:
        try:
            page = await self._log.page(self._cursor, self._only)
        except CursorExpiredError as exc:
            # It was good at the beginning, but the log was cut faster than this client reads.
            await self._reset(exc, gone)
            return
        whole = self._only is EVERYTHING
        for batch in self._newest.batches(page, self._encode) if whole else _batches(page, self._encode):
            await self._send(batch)
        self._cursor = page.through

    async def _rest(self, grown: asyncio.Future[None], gone: asyncio.Future[None]) -> None:
        """Until there is something to do; a heartbeat if nothing was sent for long."""
        rest_s = self._sent_at + self._services.limits.heartbeat_s - self._now()
        waiting = {grown, gone, self._services.subscribers.closing}
        done, _ = await asyncio.wait(waiting, timeout=max(0.0, rest_s), return_when=asyncio.FIRST_COMPLETED)
        if not done:
            await self._control("stream.heartbeat", StreamHeartbeat(cursor=self._cursor))

    async def _control(self, event: str, data: BaseModel) -> None:
        await self._send(self._encode([self._frame(event, as_json(data))]))

    def _frame(self, event: str, data: str, session_id: str | None = None) -> str:
        session = f'"{session_id}"' if session_id else "null"
        return (
            f'{{"event":"{event}","seq":null,"at":"{iso()}","stream_id":"{self._log.stream_id}",'
            f'"session_id":{session},"turn_id":null,"data":{data}}}'
        )

    # The socket

    async def _send(self, encoded: Encoded) -> None:
        try:
            async with asyncio.timeout(self._services.limits.blocked_send_s):
                await self._write(encoded)
        except TimeoutError:
            # A close would have to wait behind what the client does not take.
            self._abort()
            raise _Gone from None
        except (OSError, WebSocketDisconnect) as exc:
            raise _Gone from exc
        self._sent_at = self._now()

    async def _send_one_by_one(self, texts: Sequence[str]) -> None:
        """On another server than ours."""
        for text in texts:
            await self._socket.send_text(text)

    async def _listen(self) -> None:
        """Returns when the client leaves. What it says means nothing, and is bounded: the server lets through messages
        up to its limit, and one with broken UTF-8 ends the connection there."""
        heard: list[float] = []
        while (await self._socket.receive())["type"] != "websocket.disconnect":
            heard = [*(at for at in heard if at > self._now() - WITHIN_S), self._now()]
            if len(heard) > MESSAGES:
                await self._close(TOO_CHATTY, "this stream takes no messages")
                return

    async def _close(self, code: int, reason: str | None = None) -> None:
        # RuntimeError: Starlette's word for a close after the other side's.
        with suppress(OSError, RuntimeError, WebSocketDisconnect):
            await asyncio.wait_for(self._socket.close(code, reason), self._services.limits.blocked_send_s)


def _snapshot_of(session_id: str) -> Callable[[DatabaseView], str]:
    return lambda reading: f'{{"session":{as_json(sessions.snapshot(reading, session_id))}}}'


class _Newest:
    """The last page that anybody got who wants everything: it is encoded once for all who are up to date."""

    def __init__(self) -> None:
        self._of: tuple[Encode, int, int] | None = None
        self._batches: list[Encoded] = []

    def batches(self, page: LogPage, encode: Encode) -> list[Encoded]:
        if not page.events:
            return []
        of = (encode, page.events[0].seq, page.events[-1].seq)
        if self._of != of:
            self._of, self._batches = of, list(_batches(page, encode))
        return self._batches


def _batches(page: LogPage, encode: Encode) -> Iterator[Encoded]:
    batch: list[str] = []
    size = 0
    for event in page.events:
        if batch and size + len(event.text) > BATCH_CHARACTERS:
            yield encode(batch)
            batch, size = [], 0
        batch.append(event.text)
        size += len(event.text)
    if batch:
        yield encode(batch)
