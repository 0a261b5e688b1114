"""uvicorn's WebSocket connections with limits on messages, and for clients that accept no data."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame, Opcode
from websockets.http11 import Response
from websockets.server import ServerProtocol

from lmx_lab.http.paced_transport import PIECE_BYTES, READ_BYTES, PacedTransport
from lmx_lab.http.protocol import LINGER_S, OWN_HEADERS, close_now

UNFINISHED_BYTES = 256 * 2**20
"""Memory for incomplete WebSocket messages of all connections of a server. ``http.bodies`` has as much for bodies."""
FRAMES_PER_S = 500
"""Largest number of messages, pings and pongs per second on a WebSocket. Also the number of fragments in a message, in
addition to one per 64 bytes."""
SMALL_BYTES = 64 * 1024
"""This much of each message does not count, so that large messages do not keep small ones out."""
RESTART = 1012
"""Close code that a stopping server sends to WebSockets."""


def encode_text_frames(texts: Sequence[str]) -> bytes:
    """Encode text messages as a server sends them on a WebSocket without extensions (RFC 6455, 5.2)."""
    parts: list[bytes] = []
    for data in map(str.encode, texts):
        size = len(data)
        length = [size] if size < 126 else [126, *size.to_bytes(2)] if size < 65536 else [127, *size.to_bytes(8)]
        parts += (bytes([0x81, *length]), data)
    return b"".join(parts)


class _Handshake(ServerProtocol):
    """The handshake of websockets, which adds our headers to its own refusals and to those of uvicorn."""

    def send_response(self, response: Response) -> None:
        super().send_response(_with_headers(response))


def _with_headers(response: Response) -> Response:
    for name, value in OWN_HEADERS.items():
        # Responses of the application already have them.
        response.headers.setdefault(name, value)
    return response


class WebSocketProtocol(WebSocketsSansIOProtocol):
    """uvicorn's WebSocket protocol, with limits, and with functions in the scope's ``extensions``.

    ``lmx_lab.frames`` encodes any number of texts, once for all connections. ``lmx_lab.send`` sends the result in one
    write, as soon as the client has accepted enough of the data before. ``lmx_lab.abort`` disconnects a client that
    accepts nothing. ``lmx_lab.close`` sends a close code first, which the client must receive within ``LINGER_S``.
    """

    _pongs = b""
    _stopping = False
    _fragments = 0
    """Number of fragments of the incomplete message, after its first."""
    _frames = 0
    """Number of other frames since ``_counted_since``."""
    _counted_since = 0.0

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        # The same as uvicorn's own, without compression.
        self.conn = _Handshake(max_size=self.config.ws_max_size, logger=logging.getLogger("uvicorn.error"))

    @property
    def held_bytes(self) -> int:
        """Size of the incomplete message."""
        return sum(map(len, self.frames)) + len(self.conn.reader.buffer)

    transport: PacedTransport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self.transport.take(data, self)

    @property
    def piece_bytes(self) -> int:
        if self.close_sent:
            return READ_BYTES
        # Within a long frame, the parser only waits for the end.
        return 8 * PIECE_BYTES if len(self.conn.reader.buffer) >= 8 * PIECE_BYTES else PIECE_BYTES

    def feed(self, data: bytes) -> None:
        """Parse a piece of the received data."""
        super().data_received(data)
        self._limit_messages()
        if self.conn.handshake_exc is not None and not self.handshake_initiated:
            # The request was valid as HTTP but not as a handshake; uvicorn would send nothing and keep reading.
            status, message = HTTPStatus.BAD_REQUEST, f"not a WebSocket handshake: {self.conn.handshake_exc}.\n"
            response = b"".join(self.conn.data_to_send())
            self.transport.write(response or _with_headers(self.conn.reject(status, message)).serialize())
            self.transport.close()

    def handle_text(self, event: Any) -> None:
        # The parser keeps the last frame until the next one, even after a disconnect, until garbage is collected.
        super().handle_text(event)
        event.data = b""

    def handle_bytes(self, event: Any) -> None:
        super().handle_bytes(event)
        event.data = b""

    def handle_cont(self, event: Any) -> None:
        data, event.data = event.data, b""
        if self.close_sent:
            return
        # A single buffer: separate objects for fragments of one byte would take many times their size.
        message = self.frames[0] if isinstance(self.frames[0], bytearray) else bytearray(self.frames[0])
        message += data
        self.frames = [message]  # type: ignore[list-item]
        self._fragments += 1
        if self._fragments > FRAMES_PER_S + len(message) // 64:
            self._refuse(1008, "a message in fragments of a few bytes; send longer ones")
        elif event.fin:
            self._fragments = 0
            self.send_receive_event_to_app()

    def handle_events(self) -> None:
        now = self.loop.time()
        if now - self._counted_since > 1.0:
            self._counted_since, self._frames = now, 0
        self._frames += sum(isinstance(event, Frame) and event.opcode is not Opcode.CONT for event in self.conn.events)
        if self._frames > FRAMES_PER_S and not self.close_sent:
            self._refuse(1008, f"more than {FRAMES_PER_S} messages and pings in a second")
        else:
            super().handle_events()

    def _refuse(self, code: int, why: str) -> None:
        """Close the connection with a code. Further data of the client are read and dropped for ``LINGER_S``."""
        self.frames = []
        self.conn.fail(code, why)
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.close_sent = True
        disconnect: Any = {"type": "websocket.disconnect", "code": code, "reason": why}
        self.queue.put_nowait(disconnect)
        self._close_and_linger()

    def keepalive_timeout(self) -> None:
        if not self.close_sent and not self.transport.is_closing():
            # uvicorn would wait until the client accepts the data that was sent before.
            self.stop_keepalive()
            self.logger.warning(
                "%s: closed, because it has not answered a ping for %g s", self.client, self.ping_timeout
            )
            self._refuse(1011, "keepalive ping timeout")

    def handle_parser_exception(self) -> None:
        if self.conn.close_sent is None:  # no response to the handshake was sent, and a close is not possible before
            self.transport.abort()
        else:
            super().handle_parser_exception()

    def _limit_messages(self) -> None:
        if self.held_bytes <= SMALL_BYTES or self.close_sent:
            return
        held = (each.held_bytes for each in self.connections if isinstance(each, WebSocketProtocol))
        if sum(max(0, size - SMALL_BYTES) for size in held) > UNFINISHED_BYTES:
            self._refuse(1013, "not enough memory for a message of this length; try again later")

    async def run_asgi(self) -> None:
        own: Any = {
            "lmx_lab.frames": encode_text_frames,
            "lmx_lab.send": self._send,
            "lmx_lab.abort": self.transport.abort,
            "lmx_lab.close": self._refuse,
        }
        self.scope["extensions"] = {**(self.scope.get("extensions") or {}), **own}
        application = self.app

        async def run_and_close(*asgi: Any) -> None:
            try:
                await application(*asgi)
            finally:
                if self._stopping:
                    self._close_and_linger()

        self.app = run_and_close
        await super().run_asgi()

    def shutdown(self) -> None:
        self.stop_keepalive()
        if self.transport.is_closing():
            return
        if not self.handshake_complete:
            super().shutdown()
        elif self.close_sent:
            self._close_and_linger()
        else:
            # As over HTTP, the application may finish what it is sending. uvicorn would close immediately, before a
            # slow client has received the last data.
            self._stopping = True
            self.close_timeout = LINGER_S
            disconnect: Any = {"type": "websocket.disconnect", "code": RESTART, "lmx_lab": "stopping"}
            self.queue.put_nowait(disconnect)

    def _close_and_linger(self) -> None:
        """Close the connection when the client has answered the close frame, or after ``LINGER_S``.

        If data arrive on a closed connection, the system drops everything that is still in transit to the client.
        """
        if self.transport.is_closing():
            return
        if not self.close_sent:
            self.conn.send_close(RESTART)
            self.transport.write(b"".join(self.conn.data_to_send()))
            self.close_sent = True
        if self.read_paused:
            self.read_paused = False
            self.transport.resume_reading()
        if self.close_timer is not None:
            self.close_timer.cancel()
        self.close_timer = self.loop.call_later(LINGER_S, close_now, self.transport)

    async def send(self, message: Any) -> None:
        await super().send(message)
        # A refusal with a status completes the handshake; uvicorn would log it as an error of the application.
        self.handshake_complete |= self.close_sent

    def send_receive_event_to_app(self) -> None:
        # Like uvicorn's, but with one copy less of a large message, and no traceback for a text that is not UTF-8.
        data, self.frames = self.frames[0], []
        if self.close_sent:
            return
        try:
            text = {"text": data.decode()} if self.curr_msg_data_type == "text" else {"bytes": bytes(data)}
        except UnicodeDecodeError:
            self.conn.fail(1007, "a text message is not UTF-8")
            self.handle_parser_exception()
            return
        message: Any = {"type": "websocket.receive", **text}
        self.queue.put_nowait(message)
        if not self.read_paused:
            self.read_paused = True
            self.transport.pause_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        # This object is part of a reference cycle, so an incomplete message would remain until garbage is collected.
        self.frames = []
        self.conn.reader.buffer.clear()

    def handle_ping(self) -> None:
        # A client that accepts no data is still read, so that its cancel, close and disconnect are noticed. Answers to
        # a flood of pings would fill the memory, so only the latest is answered, when the client accepts data again
        # (RFC 6455, 5.5.3).
        self._pongs = b"".join(self.conn.data_to_send()) or self._pongs
        if self.writable.is_set():
            self.resume_writing()

    def resume_writing(self) -> None:
        super().resume_writing()
        pongs, self._pongs = self._pongs, b""
        if self.conn.close_sent is None:
            self.transport.write(pongs)

    async def _send(self, frames: bytes) -> None:
        if not self.handshake_complete or self.close_sent or self.disconnected or self.transport.is_closing():
            raise ClientDisconnected
        self.transport.write(frames)
        await self.writable.wait()
