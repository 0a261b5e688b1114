"""Below the application: uvicorn's connections, with what they lack for strangers, slow senders, vanished peers.

More than 400 lines, since HTTP and WebSocket connections share their bounds and their refusals.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import logging
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

from lmx_lab.http.guard import ANSWER_HEADERS, CONTENT_POLICY, is_loopback
from lmx_lab.http.paced_transport import PIECE_BYTES, READ_BYTES, PacedTransport

SILENT_S = 5
"""A connection on which nothing has come for so long is asked whether the other end is there,"""
AGAIN_S = 3
"""then again and again, so far apart;"""
TIMES = 3
"""so many times without an answer, and it is cut. That is 14 s; but what is sent meanwhile, such as a heartbeat, has
14 s of its own to be acknowledged, so it may be 28 s."""
HEAD_S = 20.0
"""The head of a request may take so long from its first byte; before that, a connection may be idle for uvicorn's
``timeout_keep_alive``."""
HEAD_LINES = 256
"""Headers of one request; h11 would parse 20,000 in one step of 100 ms."""
BODY_S = 30.0
BODY_BYTES = 128 * 1024
"""Every 30 s so much of a body has to come, or its end: 4.3 KB/s, so that 8 MiB may take half an hour."""
LATE_S = 1.0
"""A loop that comes so much too late to a deadline has been busy, or suspended, and has not read what came: the client
has the same time again."""
CONNECTIONS = 2000
"""Of one server at the same time, WebSockets and streams among them."""
RESERVE = 128
"""File descriptors that connections leave to the rest of the process: models, databases, processes of its own. Where it
may have fewer than 512 (macOS: 256), a quarter of them."""
FULL_RETRY_S = 5
LINGER_S = 2.0
"""Who is refused while it sends may send on for so long, unread: closing at once would lose the answer on its way."""
UNFINISHED_BYTES = 256 * 2**20
"""For unfinished WebSocket messages of all connections of a server together; ``http.bodies`` has as much for bodies."""
SHORT_BYTES = 8
"""A body in chunks may have ``SHORT_ONES`` line ends, and one more for this many bytes. Each chunk has two."""
SHORT_ONES = 4096
FRAMES_PER_S = 500
"""Messages, pings and pongs of one WebSocket; and fragments of one message, beside one for each 64 bytes."""
SMALL_BYTES = 64 * 1024
"""So much of each message does not count: large ones keep no small one out."""
RESTART = 1012
"""How a server that stops closes WebSockets."""
OWN_HEADERS = {**dict(ANSWER_HEADERS), "content-security-policy": CONTENT_POLICY}
"""Of answers that do not come from the application."""


def notice_vanishing(sock: socket.socket) -> None:
    """Let the system cut this connection within 30 s of the other machine's vanishing; what waits on it ends then.

    Who loses power or network says no goodbye, and by itself a system takes two hours to notice where nothing is sent,
    and fifteen minutes where something is. Who takes nothing for 14 s, although there is something to send, is cut
    too: the system cannot be told to bear with that one alone. Programs on this machine are therefore left as they
    are: they cannot vanish without a word, but they may be suspended, or busy.
    """
    with contextlib.suppress(OSError):  # it has ended already
        if is_elsewhere(sock.getpeername()[0]):
            _ask_again(sock)


def _ask_again(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # macOS has another name for the first; where one is missing, the system's own times go on.
    for names, value in (
        (("TCP_KEEPIDLE", "TCP_KEEPALIVE"), SILENT_S),
        (("TCP_KEEPINTVL",), AGAIN_S),
        (("TCP_KEEPCNT",), TIMES),
        # Probes are only sent where nothing is on its way; this is for what was sent and is not acknowledged.
        (("TCP_USER_TIMEOUT",), 1000 * (SILENT_S + TIMES * AGAIN_S)),
    ):
        option = next((getattr(socket, name) for name in names if hasattr(socket, name)), None)
        if option is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


def is_elsewhere(host: str) -> bool:
    """Whether the address of a connection's other end is another machine's, as far as can be told."""
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(host)
        return not is_loopback(host)
    return False


def text_frames(texts: Sequence[str]) -> bytes:
    """Whole text messages as a server sends them on a WebSocket without extensions (RFC 6455, 5.2)."""
    parts: list[bytes] = []
    for data in map(str.encode, texts):
        size = len(data)
        length = [size] if size < 126 else [126, *size.to_bytes(2)] if size < 65536 else [127, *size.to_bytes(8)]
        parts += (bytes([0x81, *length]), data)
    return b"".join(parts)


def nearly_last(descriptor: int) -> bool:
    """Whether a new file descriptor is one of the reserve. It is the lowest that was free: all below it are in use."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return limit != resource.RLIM_INFINITY and descriptor >= limit - min(RESERVE, limit // 4)


class HttpProtocol(H11Protocol):
    """uvicorn's, within bounds: of connections, and of the time that a client may take for what it owes, the rest of a
    head or of a body. A WebSocket begins as it, keeps the connection, and owes nothing any more."""

    _owed: tuple[str, object] | None = None
    """What, and after which request: of each the time begins anew."""
    _deadline: asyncio.TimerHandle | None = None
    _came_bytes = 0
    """Since the deadline was set."""
    _held_up = False
    """Since then too: more of the body could not come for a time, as what had come was not read."""
    _ending = False
    _body_bytes = _line_ends = 0
    """Of a body in chunks, as it came."""
    transport: PacedTransport  # type: ignore[assignment]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(PacedTransport(transport))  # type: ignore[arg-type]
        sock = transport.get_extra_info("socket")
        notice_vanishing(sock)
        if len(self.connections) > CONNECTIONS or nearly_last(sock.fileno()):
            open_ones = len(self.connections) - 1
            self._end(
                HTTPStatus.TOO_MANY_REQUESTS,
                f"this server has {open_ones} connections, and room for no more; try again in {FULL_RETRY_S} s",
                code="queue-full",
                kind="rate_limit_error",
                retry_after_s=FULL_RETRY_S,
            )
        else:
            self._watch()

    def data_received(self, data: bytes) -> None:
        self._came_bytes += len(data)
        self.transport.take(data, self)

    @property
    def piece_bytes(self) -> int:
        return READ_BYTES if self._ending or (self._in_body and not self._is_chunked) else PIECE_BYTES

    def feed(self, data: bytes) -> None:
        """Parse a piece of what came."""
        if not self._ending and self._has_few_headers() and self._has_long_chunks(data):
            super().data_received(data)
            if self.flow.read_paused:
                self.loop.call_later(LATE_S, self._note_pause)
            self._watch()

    def _has_few_headers(self) -> bool:
        """Whether the head that is being received has no more lines than it may; if it has, the request is refused."""
        if self.conn.their_state is h11.IDLE and self.conn.trailing_data[0].count(b"\n") > HEAD_LINES:
            too_many = f"the head of the request has more than {HEAD_LINES} lines, the limit of this server"
            self._end(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, too_many)
        return not self._ending

    def _has_long_chunks(self, data: bytes) -> bool:
        """Whether the body that is being received does not consist of chunks of a few bytes; else it is refused."""
        if not (self._in_body and self._is_chunked):
            self._body_bytes = self._line_ends = 0
            return True
        self._body_bytes += len(data)
        self._line_ends += data.count(b"\r\n")
        if self._line_ends > SHORT_ONES + self._body_bytes // SHORT_BYTES:
            self._end(HTTPStatus.BAD_REQUEST, "the body comes in chunks of a few bytes; send longer ones")
        return not self._ending

    @property
    def _in_body(self) -> bool:
        return self.conn.their_state is h11.SEND_BODY

    @property
    def _is_chunked(self) -> bool:
        return any(name == b"transfer-encoding" for name, _ in self.headers)

    def _note_pause(self) -> None:
        # Shorter ones hold nobody up: each has let 64 KiB through.
        self._held_up |= self.flow.read_paused

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._watch()

    def shutdown(self) -> None:
        # Where this closes already, h11 may not know how to: one connection must not break off the others' end.
        if self._ending or self.transport.is_closing():
            self.transport.close()
        else:
            super().shutdown()

    def _watch(self) -> None:
        """Set a deadline where the client owes something else than before."""
        over = self._ending or self.transport.is_closing() or self.transport.get_protocol() is not self
        owed = None if over else self._owes()
        if owed != self._owed:
            self._owed = owed
            self._set_deadline()
        idle = self.cycle is None or self.cycle.response_complete
        if not over and owed is None and idle and self.timeout_keep_alive_task is None:
            # uvicorn has it after an answer, but not before the first request, nor after the rest of a refused body.
            after_s, close = self.timeout_keep_alive, self.timeout_keep_alive_handler
            self.timeout_keep_alive_task = self.loop.call_later(after_s, close)

    def _owes(self) -> tuple[str, object] | None:
        if self.conn.their_state is h11.SEND_BODY:
            return "body", self.cycle
        if self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            return "head", self.cycle
        return None

    def _set_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        self._came_bytes = 0
        if self._owed is not None:
            what = self._owed[0]
            self._held_up = what == "body" and not self._reads_body()
            due = self.loop.time() + (HEAD_S if what == "head" else BODY_S)
            self._deadline = self.loop.call_at(due, self._on_deadline, what, due)

    def _on_deadline(self, what: str, due: float) -> None:
        late = self.loop.time() - due > LATE_S
        if late or (what == "body" and self._sends_as_it_may()):
            self._set_deadline()
        elif what == "head":
            self._end(HTTPStatus.REQUEST_TIMEOUT, f"the head of the request took longer than {HEAD_S:g} s")
        else:
            slow = f"of the body less than {BODY_BYTES} bytes came in {BODY_S:g} s, and not its end; send it faster"
            self._end(HTTPStatus.REQUEST_TIMEOUT, slow)

    def _sends_as_it_may(self) -> bool:
        return (
            self._held_up
            or self.transport.waiting_bytes > 0
            or self._came_bytes >= BODY_BYTES
            or not self._reads_body()
        )

    def _reads_body(self) -> bool:
        """Whether more of the body is waited for. While an answer is being sent it may come as it likes."""
        answering = self.cycle.response_started and not self.cycle.response_complete
        return not (answering or self.flow.read_paused or self.cycle.waiting_for_100_continue)

    def _end(
        self,
        status: HTTPStatus,
        message: str,
        *,
        code: str = "invalid-request",
        kind: str = "invalid_request_error",
        retry_after_s: int | None = None,
    ) -> None:
        """Answer for the application, in its form for errors, where nothing was answered yet, and close."""
        self._abandon_cycle()
        self._ending = True
        self._watch()
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()
        else:
            error = {"code": code, "message": message, "type": kind, "param": None, "request_id": None}
            body = json.dumps({"error": {**error, "retryable": retry_after_s is not None}}).encode()
            retry = {} if retry_after_s is None else {"retry-after": str(retry_after_s)}
            self._write(status, body, {"content-type": "application/json", **retry})
            self._part()

    def _write(self, status: HTTPStatus, body: bytes, headers: dict[str, str]) -> None:
        """A whole answer without the application."""
        named = {**headers, **OWN_HEADERS, "content-length": str(len(body)), "connection": "close"}
        response = h11.Response(status_code=status, headers=list(named.items()), reason=status.phrase.encode())
        with contextlib.suppress(h11.LocalProtocolError):  # to HEAD goes no body
            for event in (response, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")

    def _part(self) -> None:
        if nearly_last(self.transport.get_extra_info("socket").fileno()):
            self.transport.close()
        else:
            with contextlib.suppress(OSError):  # it has ended already
                self.transport.write_eof()
            self.loop.call_later(LINGER_S, self.transport.close)

    def _abandon_cycle(self) -> None:
        """What the application still says goes nowhere; it is told that the client has gone."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def _should_upgrade(self) -> bool:
        # What is no handshake (RFC 6455, 4.1) is an ordinary request, whatever it would like to become.
        named = any(name == b"sec-websocket-key" for name, _ in self.headers)
        return self.scope["method"] == "GET" and named and super()._should_upgrade()

    def send_400_response(self, msg: str) -> None:
        # Where the application has begun, one of the two answers would come in the middle of the other.
        self._abandon_cycle()
        if self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete:
            self.transport.close()
            return
        self._write(HTTPStatus.BAD_REQUEST, msg.encode("ascii"), {"content-type": "text/plain; charset=utf-8"})
        self.transport.close()


class _Handshake(ServerProtocol):
    """websockets', whose own answers have headers, too: its refusals, and those of uvicorn."""

    def send_response(self, response: Response) -> None:
        super().send_response(_with_headers(response))


def _with_headers(response: Response) -> Response:
    for name, value in OWN_HEADERS.items():
        # The application's answers have them already.
        response.headers.setdefault(name, value)
    return response


class WebSocketProtocol(WebSocketsSansIOProtocol):
    """uvicorn's, with functions of our own in the scope's ``extensions``.

    ``lmx_lab.frames`` encodes any number of texts, once for all connections, and ``lmx_lab.send`` sends that in one
    write when the client has taken enough of what came before. ``lmx_lab.abort`` drops a client that takes nothing.
    """

    _pongs = b""
    _stopping = False
    _fragments = 0
    """Of the message that has not ended, after its first."""
    _frames = 0
    """Other frames since ``_counted_since``."""
    _counted_since = 0.0

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        # As uvicorn makes it without compression.
        self.conn = _Handshake(max_size=self.config.ws_max_size, logger=logging.getLogger("uvicorn.error"))

    @property
    def held_bytes(self) -> int:
        """Of a message that has not ended."""
        return sum(map(len, self.frames)) + len(self.conn.reader.buffer)

    transport: PacedTransport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self.transport.take(data, self)

    @property
    def piece_bytes(self) -> int:
        if self.close_sent:
            return READ_BYTES
        # Within a long frame, the parser only waits for its end.
        return 8 * PIECE_BYTES if len(self.conn.reader.buffer) >= 8 * PIECE_BYTES else PIECE_BYTES

    def feed(self, data: bytes) -> None:
        """Parse a piece of what came."""
        super().data_received(data)
        self._bound_messages()
        if self.conn.handshake_exc is not None and not self.handshake_initiated:
            # The request passed as HTTP, but not as a handshake; uvicorn says nothing and goes on reading.
            status, why = HTTPStatus.BAD_REQUEST, f"not a WebSocket handshake: {self.conn.handshake_exc}.\n"
            answer = b"".join(self.conn.data_to_send()) or _with_headers(self.conn.reject(status, why)).serialize()
            self.transport.write(answer)
            self.transport.close()

    def handle_cont(self, event: Any) -> None:
        if self.close_sent:
            return
        # One buffer: objects for fragments of a byte each would take many times what came.
        message = self.frames[0] if isinstance(self.frames[0], bytearray) else bytearray(self.frames[0])
        message += event.data
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
        """Close with this code. What the client still sends is read and dropped for ``LINGER_S``."""
        self.frames = []
        self.conn.fail(code, why)
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.close_sent = True
        gone: Any = {"type": "websocket.disconnect", "code": code, "reason": why}
        self.queue.put_nowait(gone)
        self._close_and_linger()

    def handle_parser_exception(self) -> None:
        if self.conn.close_sent is None:  # the handshake is not answered yet, and there are no closes before that
            self.transport.abort()
        else:
            super().handle_parser_exception()

    def _bound_messages(self) -> None:
        if self.held_bytes <= SMALL_BYTES or self.close_sent:
            return
        held = (each.held_bytes for each in self.connections if isinstance(each, WebSocketProtocol))
        if sum(max(0, size - SMALL_BYTES) for size in held) > UNFINISHED_BYTES:
            self._refuse(1013, "no room for so long a message beside those of others; try again in a while")

    async def run_asgi(self) -> None:
        own: Any = {"lmx_lab.frames": text_frames, "lmx_lab.send": self._send, "lmx_lab.abort": self.transport.abort}
        self.scope["extensions"] = {**(self.scope.get("extensions") or {}), **own}
        application = self.app

        async def and_close(*asgi: Any) -> None:
            try:
                await application(*asgi)
            finally:
                if self._stopping:
                    self._close_and_linger()

        self.app = and_close
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
            # As over HTTP: what is being sent may end. uvicorn would close at once, before the last of a client that
            # is slow to take it.
            self._stopping = True
            self.close_timeout = LINGER_S
            told: Any = {"type": "websocket.disconnect", "code": RESTART, "lmx_lab": "stopping"}
            self.queue.put_nowait(told)

    def _close_and_linger(self) -> None:
        """Close when the client has answered, or after a moment: to what comes after that, the system answers by
        throwing away all that is still on its way to the client.
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
        self.close_timer = self.loop.call_later(LINGER_S, self.transport.close)

    async def send(self, message: Any) -> None:
        await super().send(message)
        # A refusal with a status is whole; uvicorn would log it as an error of the application.
        self.handshake_complete |= self.close_sent

    def send_receive_event_to_app(self) -> None:
        # As uvicorn's, with one copy less of a message of megabytes, and without a traceback for one that is not UTF-8.
        data, self.frames = self.frames[0], []
        if self.close_sent:
            return
        try:
            text = {"text": data.decode()} if self.curr_msg_data_type == "text" else {"bytes": bytes(data)}
        except UnicodeDecodeError:
            self.conn.fail(1007, "a text that is not UTF-8")
            self.handle_parser_exception()
            return
        message: Any = {"type": "websocket.receive", **text}
        self.queue.put_nowait(message)
        if not self.read_paused:
            self.read_paused = True
            self.transport.pause_reading()

    def handle_ping(self) -> None:
        # Who takes nothing is still read, so that its cancel, close and end are seen. But answers to a flood of pings
        # would fill the memory: there is one, to the latest, when the client takes again (RFC 6455, 5.5.3).
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
