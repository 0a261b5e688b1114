"""uvicorn's connections, HTTP and WebSocket, with additional limits: for untrusted and slow clients, and lost ones."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import logging
import re
import resource
import socket
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame, Opcode
from websockets.http11 import Response
from websockets.server import ServerProtocol

from lmx_lab.http.guard import CONTENT_POLICY, RESPONSE_HEADERS, is_loopback
from lmx_lab.http.paced_transport import PIECE_BYTES, READ_BYTES, PacedTransport

HEAD_S = 20.0
"""Time for the head of a request, from its first byte. Before that, a connection may be idle for uvicorn's
``timeout_keep_alive``."""
HEAD_LINES = 256
"""Largest number of header lines of a request. h11 would parse 20,000 in one step of 100 ms."""
END_OF_HEAD = re.compile(rb"\n\r?\n")
BODY_S = 30.0
BODY_BYTES = 128 * 1024
"""Number of bytes of a body that have to arrive in every ``BODY_S``, unless it ends: 4.3 KB/s, so that 8 MiB may take
half an hour."""
LATE_S = 1.0
"""If the loop handles a deadline this much too late, it was busy or suspended and has not read what arrived. The client
then gets the same time again."""
MAX_CONNECTIONS = 2000
"""Largest number of simultaneous connections of a server, including WebSockets and streams."""
RESERVED_DESCRIPTORS = 128
"""File descriptors that are kept for the rest of the process: models, databases, child processes. If the process may
have fewer than 512 (macOS: 256), it is a quarter of them."""
FULL_RETRY_S = 5
LINGER_S = 2.0
"""Time in which the data of a client that was refused while sending are read and dropped. If the connection were closed
immediately, the client could lose the response."""
FREE_LINE_ENDS = 4096
BYTES_PER_LINE_END = 8
"""A chunked body may have ``FREE_LINE_ENDS`` line ends, and one more per this number of bytes. Each chunk has two."""
FRAMING_BYTES = 64 * 1024
"""The framing of a chunked body, such as chunk extensions, may have this many bytes more than its data."""
OWN_HEADERS = {**dict(RESPONSE_HEADERS), "content-security-policy": CONTENT_POLICY}
"""Headers of responses that the application did not send."""
UNFINISHED_BYTES = 256 * 2**20
"""Memory for incomplete WebSocket messages of all connections of a server. ``http.bodies`` has as much for bodies."""
FRAMES_PER_S = 500
"""Largest number of messages, pings and pongs per second on a WebSocket. Also the number of fragments in a message, in
addition to one per 64 bytes."""
SMALL_BYTES = 64 * 1024
"""This much of each message does not count, so that large messages do not keep small ones out."""
RESTART = 1012
"""Close code that a stopping server sends to WebSockets."""
KEEPALIVE_IDLE_S = 5
"""Time without data after which the system probes whether the other machine still responds."""
KEEPALIVE_INTERVAL_S = 3
"""Time between two probes."""
KEEPALIVE_PROBES = 3
"""Number of unanswered probes after which the system closes the connection. This takes 14 s. Data that is
sent meanwhile, such as a heartbeat, has another 14 s to be acknowledged, so it can take 28 s."""
UNSENT_BYTES = 16 * 1024
"""Number of unsent bytes in the system's buffer, and again in the transport's buffer, above which the client counts as
blocked. Without this limit, the system would buffer several megabytes."""


def close_now(transport: PacedTransport) -> None:
    """Close a connection immediately, without waiting for a client that accepts no data."""
    if transport.get_write_buffer_size():
        transport.abort()
    else:
        transport.close()


def is_reserved(descriptor: int) -> bool:
    """Whether a new file descriptor is one of the reserved ones. It is the lowest free one, so all below are in use."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return limit != resource.RLIM_INFINITY and descriptor >= limit - min(RESERVED_DESCRIPTORS, limit // 4)


class HttpProtocol(H11Protocol):
    """uvicorn's HTTP protocol, with limits on the number of connections and on the time for the rest of a request.

    The protocol of a WebSocket takes over the connection of this one; the time limits then no longer apply.
    """

    _expected: tuple[str, object] | None = None
    """The part that the client has to send, ``head`` or ``body``, and after which request. Each starts the time."""
    _deadline: asyncio.TimerHandle | None = None
    _received_bytes = 0
    """Number of bytes received since the deadline was set."""
    _was_paused = False
    """Whether the client could not send more of the body since then, because received data were not read."""
    _ending = False
    _body_bytes = _line_ends = 0
    """Number of bytes and line ends in a chunked body, as received."""
    _data_bytes = 0
    """Number of bytes of data in the chunked body."""
    transport: PacedTransport  # type: ignore[assignment]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(PacedTransport(transport))  # type: ignore[arg-type]
        sock = transport.get_extra_info("socket")
        enable_keepalive(sock)
        limit_unsent(transport)
        if len(self.connections) > MAX_CONNECTIONS or is_reserved(sock.fileno()):
            others = len(self.connections) - 1
            self._refuse(
                HTTPStatus.TOO_MANY_REQUESTS,
                f"this server has {others} connections and cannot accept more; try again in {FULL_RETRY_S} s",
                code="queue-full",
                kind="rate_limit_error",
                retry_after_s=FULL_RETRY_S,
            )
        else:
            self._update_deadline()

    def data_received(self, data: bytes) -> None:
        self._received_bytes += len(data)
        self.transport.take(data, self)

    @property
    def piece_bytes(self) -> int:
        return READ_BYTES if self._ending or (self._in_body and not self._is_chunked) else PIECE_BYTES

    def feed(self, data: bytes) -> None:
        """Parse a piece of the received data."""
        if not self._ending and self._check_head_lines(data) and self._check_chunk_sizes(data):
            cycle, before = self.cycle, len(self.cycle.body) if self.cycle is not None else 0
            super().data_received(data)
            if cycle is not None:
                # Data after a complete response is discarded, but counted.
                self._data_bytes += len(data) if cycle.response_complete else len(cycle.body) - before
            if self.flow.read_paused:
                self.loop.call_later(LATE_S, self._record_pause)
            self._update_deadline()

    def handle_events(self) -> None:
        super().handle_events()
        if self.cycle is not None:
            # The task of a new request has not started yet, so it will find the extension.
            self.cycle.scope["extensions"] = {"lmx_lab.abort": self.transport.abort}

    def _check_head_lines(self, data: bytes) -> bool:
        """Refuse a request whose head has too many lines. Return whether the connection continues."""
        if self.conn.their_state is not h11.IDLE:
            return True
        received = self.conn.trailing_data[0]
        # The end of the head may be split between the pieces.
        overlap = received[-3:]
        head = END_OF_HEAD.split(overlap + data, maxsplit=1)[0]
        if received.count(b"\n") + head.count(b"\n") - overlap.count(b"\n") > HEAD_LINES:
            message = f"the head of the request has more than {HEAD_LINES} lines, the limit of this server"
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, message)
        return not self._ending

    def _check_chunk_sizes(self, data: bytes) -> bool:
        """Refuse a body with very short chunks or long chunk extensions. Return whether the connection continues."""
        if not (self._in_body and self._is_chunked):
            self._body_bytes = self._line_ends = self._data_bytes = 0
            return True
        self._body_bytes += len(data)
        self._line_ends += data.count(b"\r\n")
        if self._line_ends > FREE_LINE_ENDS + self._body_bytes // BYTES_PER_LINE_END:
            self._refuse(HTTPStatus.BAD_REQUEST, "the chunks of the body have only a few bytes; send larger chunks")
        elif self._body_bytes - self._data_bytes > len(data) + FRAMING_BYTES + self._data_bytes:
            self._refuse(HTTPStatus.BAD_REQUEST, "the chunks of the body have long extensions; send them without")
        return not self._ending

    @property
    def _in_body(self) -> bool:
        return self.conn.their_state is h11.SEND_BODY

    @property
    def _is_chunked(self) -> bool:
        return any(name == b"transfer-encoding" for name, _ in self.headers)

    def _record_pause(self) -> None:
        # Shorter pauses do not delay a client: after each of them, 64 KiB were read.
        self._was_paused |= self.flow.read_paused

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._update_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._update_deadline()

    def shutdown(self) -> None:
        # If this protocol is already closing, h11 may fail, which would keep other connections from being closed.
        if self._ending or self.transport.is_closing():
            self.transport.close()
        else:
            super().shutdown()

    def _update_deadline(self) -> None:
        """Set a new deadline if the part that the client has to send next has changed."""
        is_over = self._ending or self.transport.is_closing() or self.transport.get_protocol() is not self
        expected = None if is_over else self._find_expected()
        if expected != self._expected:
            self._expected = expected
            self._set_deadline()
        is_idle = self.cycle is None or self.cycle.response_complete
        if not is_over and expected is None and is_idle and self.timeout_keep_alive_task is None:
            # uvicorn starts this timer after a response, but not before the first request or after a refused body.
            after_s, close = self.timeout_keep_alive, self.timeout_keep_alive_handler
            self.timeout_keep_alive_task = self.loop.call_later(after_s, close)

    def _find_expected(self) -> tuple[str, object] | None:
        if self.conn.their_state is h11.SEND_BODY:
            return "body", self.cycle
        if self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            return "head", self.cycle
        return None

    def _set_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        self._received_bytes = 0
        if self._expected is not None:
            what = self._expected[0]
            self._was_paused = what == "body" and not self._is_reading_body()
            due = self.loop.time() + (HEAD_S if what == "head" else BODY_S)
            self._deadline = self.loop.call_at(due, self._on_deadline, what, due)

    def _on_deadline(self, what: str, due: float) -> None:
        is_late = self.loop.time() - due > LATE_S
        if is_late or (what == "body" and self._is_body_on_time()):
            self._set_deadline()
        elif what == "head":
            self._refuse(HTTPStatus.REQUEST_TIMEOUT, f"the head of the request took longer than {HEAD_S:g} s")
        else:
            message = f"less than {BODY_BYTES} bytes of the body arrived in {BODY_S:g} s; send it faster"
            self._refuse(HTTPStatus.REQUEST_TIMEOUT, message)

    def _is_body_on_time(self) -> bool:
        return (
            self._was_paused
            or self.transport.waiting_bytes > 0
            or self._received_bytes >= BODY_BYTES
            or not self._is_reading_body()
        )

    def _is_reading_body(self) -> bool:
        """Whether the server waits for more of the body. While a response is being sent, there is no time limit."""
        is_responding = self.cycle.response_started and not self.cycle.response_complete
        return not (is_responding or self.flow.read_paused or self.cycle.waiting_for_100_continue)

    def _refuse(
        self,
        status: HTTPStatus,
        message: str,
        *,
        code: str = "invalid-request",
        kind: str = "invalid_request_error",
        retry_after_s: int | None = None,
    ) -> None:
        """Send an error response instead of the application, unless a response has begun, and close the connection."""
        self._abandon_cycle()
        self._ending = True
        self._update_deadline()
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()
        else:
            error = {"code": code, "message": message, "type": kind, "param": None, "request_id": None}
            body = json.dumps({"error": {**error, "retryable": retry_after_s is not None}}).encode()
            retry = {} if retry_after_s is None else {"retry-after": str(retry_after_s)}
            self._send_response(status, body, {"content-type": "application/json", **retry})
            if is_reserved(self.transport.get_extra_info("socket").fileno()):
                self.transport.close()
                return
            with contextlib.suppress(OSError):  # the connection has already ended
                self.transport.write_eof()
            self.loop.call_later(LINGER_S, close_now, self.transport)

    def _send_response(self, status: HTTPStatus, body: bytes, headers: dict[str, str]) -> None:
        """Send a whole response without the application."""
        all_headers = {**headers, **OWN_HEADERS, "content-length": str(len(body)), "connection": "close"}
        response = h11.Response(status_code=status, headers=list(all_headers.items()), reason=status.phrase.encode())
        with contextlib.suppress(h11.LocalProtocolError):  # a response to HEAD has no body
            for event in (response, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")

    def _abandon_cycle(self) -> None:
        """Tell the application that the client has disconnected, and drop the rest of its response."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def _should_upgrade(self) -> bool:
        # A request that is not a handshake (RFC 6455, 4.1) is an ordinary request, even if it asks for an upgrade.
        has_key = any(name == b"sec-websocket-key" for name, _ in self.headers)
        return self.scope["method"] == "GET" and has_key and super()._should_upgrade()

    def send_400_response(self, msg: str) -> None:
        # If the application has begun its response, this one would be in the middle of it.
        self._abandon_cycle()
        if self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete:
            self.transport.close()
            return
        self._send_response(HTTPStatus.BAD_REQUEST, msg.encode("ascii"), {"content-type": "text/plain; charset=utf-8"})
        self.transport.close()


# WebSockets


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
        if self.held_bytes > SMALL_BYTES and not self.close_sent:
            held = (each.held_bytes for each in self.connections if isinstance(each, WebSocketProtocol))
            if sum(max(0, size - SMALL_BYTES) for size in held) > UNFINISHED_BYTES:
                self._refuse(1013, "not enough memory for a message of this length; try again later")
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


# Options of sockets


def enable_keepalive(sock: socket.socket) -> None:
    """Make the system close this connection within 30 s after the other machine has disappeared.

    A machine that loses power or network does not close its connections. With the system's default settings, that is
    detected after two hours if nothing is sent, and after fifteen minutes otherwise. A client that accepts none of the
    data sent to it for 14 s is disconnected too, because the system cannot distinguish the two cases. Connections
    within this machine are therefore left unchanged: their peers cannot disappear undetected, but may be suspended or
    busy.
    """
    with contextlib.suppress(OSError):  # the connection has already ended
        if not is_remote(sock.getpeername()[0]):
            return
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        # macOS has another name for the first option. If an option is missing, the system's default applies.
        for names, value in (
            (("TCP_KEEPIDLE", "TCP_KEEPALIVE"), KEEPALIVE_IDLE_S),
            (("TCP_KEEPINTVL",), KEEPALIVE_INTERVAL_S),
            (("TCP_KEEPCNT",), KEEPALIVE_PROBES),
            # Probes are sent only if no data is in transit. This option is the limit for data that is not acknowledged.
            (("TCP_USER_TIMEOUT",), 1000 * (KEEPALIVE_IDLE_S + KEEPALIVE_PROBES * KEEPALIVE_INTERVAL_S)),
        ):
            option = next((getattr(socket, name) for name in names if hasattr(socket, name)), None)
            if option is not None:
                sock.setsockopt(socket.IPPROTO_TCP, option, value)


def limit_unsent(transport: asyncio.Transport) -> None:
    """Limit the unsent data in the buffer of the system and in that of the transport."""
    transport.set_write_buffer_limits(high=UNSENT_BYTES)
    with contextlib.suppress(AttributeError, OSError):  # the system has no such option, or the connection has ended
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)


def is_remote(host: str) -> bool:
    """Whether the address of a peer is that of another machine, as far as it is known."""
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(host)
        return not is_loopback(host)
    return False
