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
import time
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame, Opcode
from websockets.http11 import Response
from websockets.server import ServerProtocol

from lmx_lab.errors import counted
from lmx_lab.http import SMALL_BYTES, Limits
from lmx_lab.http.guard import CONTENT_POLICY, RESPONSE_HEADERS, is_loopback

PIECE_BYTES = 2048
"""Number of bytes read at once if chunks or frames may be short. A parser needs about 10 µs for a chunk or a frame, no
matter how short it is, so this takes about 4 ms if each of them has one byte; what asyncio reads at once by default
could take half a second."""
HEAD_LINES = 256
"""Largest number of header lines of a request. h11 would parse 20,000 in one step of 100 ms."""
END_OF_HEAD = re.compile(rb"\n\r?\n")
FULL_RETRY_S = 5
OWN_HEADERS = {**dict(RESPONSE_HEADERS), "content-security-policy": CONTENT_POLICY}
"""Headers of responses that the application did not send."""
PROBE_S = 0.25
"""Time after the end of the client's data until the server checks whether the client has closed the connection."""
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


def close_now(transport: asyncio.Transport) -> None:
    """Close a connection immediately, without waiting for a client that accepts no data."""
    if transport.get_write_buffer_size():
        transport.abort()
    else:
        transport.close()


def is_reserved(descriptor: int) -> bool:
    """Whether a new file descriptor is one of those kept for the rest of the process: models, databases, child
    processes. These are 128, or a quarter of all if the process may have fewer than 512 (macOS: 256).

    The new descriptor is the lowest free one, so all below are in use.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return limit != resource.RLIM_INFINITY and descriptor >= limit - min(128, limit // 4)


def rest_after(step_s: float, protocol: HttpProtocol | WebSocketProtocol) -> None:
    """Stop reading a connection after a step of more than 2 ms, for twice its time or longer if other connections rest.

    Connections that are sending large amounts rest too, one longer than the other, so that their long steps do not
    follow each other. Clients whose data take long to parse therefore do not occupy the event loop.
    """
    if step_s <= 0.002:
        return
    connections: Any = protocol.connections
    resting = sum(each.resting for each in connections)
    for each in (protocol, *connections):
        if not each.resting and (each is protocol or each.fills_pieces):
            resting += 1
            each.resting = True
            each.transport.pause_reading()
            each.loop.call_later(2 * step_s * resting, each.end_rest)


class HttpProtocol(H11Protocol):
    """uvicorn's HTTP protocol, with limits on the number of connections and on the time for parts of a request.

    The protocol of a WebSocket takes over the connection of this one; the time limits then no longer apply.
    """

    resting = False
    fills_pieces = False
    """Whether the client sends as much as is read at once."""
    _head_timer: asyncio.TimerHandle | None = None
    """Runs from the first byte of a head to its end."""
    _ending = False
    is_half_closed = False
    """Whether the client has ended its own side of the connection. It may still read."""
    keep_alive: Callable[[], None] | None = None
    """Adds a part to the current response that its client ignores. Does nothing if the client accepts no data."""
    _framing_bytes = 0
    """Number of bytes by which the framing of the current chunked body exceeds its data."""

    def __init__(self, *arguments: Any, limits: Limits, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._limits = limits

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        sock = transport.get_extra_info("socket")
        enable_keepalive(sock)
        transport.set_write_buffer_limits(high=UNSENT_BYTES)
        with contextlib.suppress(AttributeError, OSError):  # no such option in this system, or the connection has ended
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        if len(self.connections) > self._limits.connections or is_reserved(sock.fileno()):
            others = len(self.connections) - 1
            self._refuse(
                HTTPStatus.TOO_MANY_REQUESTS,
                f"this server has {counted(others, 'connection')} and cannot accept more; try again in "
                f"{FULL_RETRY_S} s",
                code="queue-full",
                kind="rate_limit_error",
                retry_after_s=FULL_RETRY_S,
            )
        else:
            self._adapt()

    def data_received(self, data: bytes) -> None:
        if self._ending:
            return
        began = time.thread_time()
        self.fills_pieces = len(data) >= self.transport.max_size  # type: ignore[attr-defined]
        is_chunked = self._in_body and self._is_chunked
        cycle, held = self.cycle, len(self.cycle.body) if self.cycle is not None else 0
        super().data_received(data)
        self._adapt()
        if self.transport.get_protocol() is not self:  # it is now that of a WebSocket
            return
        if not is_chunked:
            self._framing_bytes = 0
        elif self._in_body and not cycle.response_complete:
            self._framing_bytes += len(data) - 2 * (len(cycle.body) - held)
            if self._framing_bytes > 65_536:
                self._refuse(
                    HTTPStatus.BAD_REQUEST,
                    "the sizes, extensions and line ends of the chunks of the body have over 65536 bytes more than its "
                    "data; send longer chunks, without extensions",
                )
        rest_after(time.thread_time() - began, self)

    def end_rest(self) -> None:
        self.resting = False
        if not self.flow.read_paused:
            self.transport.resume_reading()

    def handle_events(self) -> None:
        if self.conn.their_state is h11.IDLE:
            head = END_OF_HEAD.split(self.conn.trailing_data[0], maxsplit=1)[0]
            if head.count(b"\n") > HEAD_LINES:
                self._refuse(
                    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
                    f"the head of the request has more than {HEAD_LINES} lines, the limit of this server",
                )
                return
        previous = self.cycle
        super().handle_events()
        if self.cycle is not previous:
            # The task of a new request has not started yet, so it will find the extensions.
            scope: Any = self.cycle.scope
            scope["extensions"] = {"lmx_lab.connection": self}
            if {b"content-length", b"transfer-encoding"} <= dict(self.headers).keys():
                # A proxy may have used the other header, and read the rest as another request (RFC 9112, 6.1 and 11.2).
                self._refuse(
                    HTTPStatus.BAD_REQUEST,
                    "the request has both Content-Length and Transfer-Encoding; send one of them",
                )

    @property
    def accepts_parts(self) -> bool:
        """Whether ``write_part`` can write a part of the current response now."""
        cycle = self.cycle
        is_open = cycle.response_started and not cycle.response_complete and not cycle.disconnected
        return is_open and not self.flow.write_paused

    def write_part(self, data: bytes) -> None:
        """Write a part of a response without ``content-length``: a chunk (RFC 9112, 7.1), or the data for HTTP/1.0.

        ``send`` of ASGI needs a task, and does the same through six functions and h11.
        """
        has_chunks = self.cycle.scope["http_version"] == "1.1"
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data) if has_chunks else data)

    @property
    def _in_body(self) -> bool:
        return self.conn.their_state is h11.SEND_BODY

    @property
    def _is_chunked(self) -> bool:
        return b"transfer-encoding" in dict(self.headers)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.is_half_closed and self.cycle.response_complete:
            self.transport.close()
        if self._in_body and self.cycle.response_complete and not self.transport.is_closing():
            self.loop.call_later(self._limits.linger_s, self._end_body, self.cycle)
        self._adapt()

    def _end_body(self, cycle: object) -> None:
        """Close the connection if the client still sends the body of a request that was answered."""
        if self.cycle is cycle and self._in_body:
            close_now(self.transport)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection open if a request is complete and its response is not.

        The client may have ended only its own side. A client that has closed the connection looks the same, until it
        rejects what is written to it.
        """
        if self._ending or self._in_body or self.cycle is None or self.cycle.response_complete:
            return False
        if not self.is_half_closed:
            self.is_half_closed = True
            self._probe(PROBE_S)
        return True

    def _probe(self, after_s: float) -> None:
        """Disconnect a client that has rejected what was written to it, or else write to it and check again later.

        During a stream, its keep-alive is written. Before a response, status 100 is written, which clients ignore
        (RFC 9110, 15.2). HTTP/1.0 has no such status, so its clients get a response only if it begins soon.
        """
        if self._ending or self.transport.is_closing():
            return
        has_left = self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0
        if has_left:
            self.transport.abort()
            return
        if self.cycle.response_started:
            if self.keep_alive is not None:
                self.keep_alive()
        elif self.cycle.scope["http_version"] == "1.1":
            self.transport.write(self.conn.send(h11.InformationalResponse(status_code=100, headers=[])) or b"")
        elif after_s >= self._limits.linger_s:
            self.transport.abort()
            return
        self.loop.call_later(after_s, self._probe, min(2 * after_s, self._limits.linger_s))

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._adapt()

    def shutdown(self) -> None:
        # If this protocol is already closing, h11 may fail, which would keep other connections from being closed.
        if self._ending or self.transport.is_closing():
            self.transport.close()
        else:
            super().shutdown()

    def _adapt(self) -> None:
        """Adapt the time limits and the size of reads to the state of the connection."""
        is_over = self._ending or self.transport.is_closing() or self.transport.get_protocol() is not self
        in_head = not is_over and self.conn.their_state is h11.IDLE and bool(self.conn.trailing_data[0])
        if self._head_timer is not None and not in_head:
            self._head_timer.cancel()
            self._head_timer = None
        elif self._head_timer is None and in_head:
            self._begin_head()
        is_idle = self.cycle is None or self.cycle.response_complete
        if not (is_over or in_head or self._in_body) and is_idle and self.timeout_keep_alive_task is None:
            # uvicorn starts this timer after a response, but not before the first request or after a refused body.
            after_s, close = self.timeout_keep_alive, self.timeout_keep_alive_handler
            self.timeout_keep_alive_task = self.loop.call_later(after_s, close)
        if self.transport.get_protocol() is self:
            # Reads are larger if the rest of the body is not chunked, or is dropped.
            is_plain = self._ending or (self._in_body and not self.cycle.response_complete and not self._is_chunked)
            # An attribute of asyncio's selector transports; with others, the amount of data is not limited.
            self.transport.max_size = 65_536 if is_plain else PIECE_BYTES  # type: ignore[attr-defined]

    def _begin_head(self) -> None:
        due = self.loop.time() + self._limits.head_s
        self._head_timer = self.loop.call_at(due, self._end_head, due)

    def _end_head(self, due: float) -> None:
        if self.loop.time() - due > self._limits.late_s:
            self._begin_head()
        else:
            message = f"the head of the request took longer than {self._limits.head_s:g} s"
            self._refuse(HTTPStatus.REQUEST_TIMEOUT, message)

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
        self._adapt()
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
            self.loop.call_later(self._limits.linger_s, close_now, self.transport)

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
        is_handshake = self.scope["method"] == "GET" and b"sec-websocket-key" in dict(self.headers)
        return is_handshake and super()._should_upgrade()

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
    accepts nothing. ``lmx_lab.close`` sends a close code first, which the client must receive within
    ``Limits.linger_s``.
    """

    resting = False
    fills_pieces = False
    """Whether the client sends as much as is read at once."""
    _pongs = b""
    _stopping = False
    _fragments = 0
    """Number of fragments of the incomplete message, after its first."""
    _frames = 0
    """Number of other frames since ``_counted_since``."""
    _counted_since = 0.0

    def __init__(self, *arguments: Any, limits: Limits, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._limits = limits
        # The same as uvicorn's own, without compression.
        self.conn = _Handshake(max_size=self.config.ws_max_size, logger=logging.getLogger("uvicorn.error"))

    @property
    def held_bytes(self) -> int:
        """Size of the incomplete message."""
        return sum(map(len, self.frames)) + len(self.conn.reader.buffer)

    def data_received(self, data: bytes) -> None:
        began = time.thread_time()
        self.fills_pieces = len(data) >= self.transport.max_size  # type: ignore[attr-defined]
        super().data_received(data)
        if self.held_bytes > SMALL_BYTES and not self.close_sent:
            held = (each.held_bytes for each in self.connections if isinstance(each, WebSocketProtocol))
            if sum(max(0, size - SMALL_BYTES) for size in held) > self._limits.memory_bytes:
                self._refuse(1013, "not enough memory for a message of this length; try again later")
        if self.conn.handshake_exc is not None and not self.handshake_initiated:
            # The request was valid as HTTP but not as a handshake; uvicorn would send nothing and keep reading.
            status, message = HTTPStatus.BAD_REQUEST, f"not a WebSocket handshake: {self.conn.handshake_exc}.\n"
            response = b"".join(self.conn.data_to_send())
            self.transport.write(response or _with_headers(self.conn.reject(status, message)).serialize())
            self.transport.close()
        # Within a long frame, the parser only waits for the end.
        is_long = self.close_sent or len(self.conn.reader.buffer) >= 8 * PIECE_BYTES
        self.transport.max_size = 8 * PIECE_BYTES if is_long else PIECE_BYTES  # type: ignore[attr-defined]
        rest_after(time.thread_time() - began, self)

    def end_rest(self) -> None:
        self.resting = False
        if not self.read_paused:
            self.transport.resume_reading()

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
        if self._fragments > self._limits.frames_per_s + len(message) // 64:
            self._refuse(1008, "a message in fragments of a few bytes; send longer ones")
        elif event.fin:
            self._fragments = 0
            self.send_receive_event_to_app()

    def handle_events(self) -> None:
        now = self.loop.time()
        if now - self._counted_since > 1.0:
            self._counted_since, self._frames = now, 0
        self._frames += sum(isinstance(event, Frame) and event.opcode is not Opcode.CONT for event in self.conn.events)
        if self._frames > self._limits.frames_per_s and not self.close_sent:
            self._refuse(1008, f"more than {self._limits.frames_per_s} messages and pings in a second")
        else:
            super().handle_events()

    def _refuse(self, code: int, why: str) -> None:
        """Close the connection with a code. Further data of the client are read and dropped for a while."""
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
            self.close_timeout = self._limits.linger_s
            disconnect: Any = {"type": "websocket.disconnect", "code": RESTART, "lmx_lab": "stopping"}
            self.queue.put_nowait(disconnect)

    def _close_and_linger(self) -> None:
        """Close the connection when the client has answered the close frame, or after ``Limits.linger_s``.

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
        self.close_timer = self.loop.call_later(self._limits.linger_s, close_now, self.transport)

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


def is_remote(host: str) -> bool:
    """Whether the address of a peer is that of another machine, as far as it is known."""
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(host)
        return not is_loopback(host)
    return False
