"""uvicorn's HTTP connections with additional limits: for untrusted and slow clients, and for clients that disappear."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import resource
from http import HTTPStatus

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from lmx_lab.http.guard import CONTENT_POLICY, RESPONSE_HEADERS
from lmx_lab.http.paced_transport import PIECE_BYTES, READ_BYTES, PacedTransport
from lmx_lab.http.socket_options import enable_keepalive, limit_unsent

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
            self._parse(data)
            if self.flow.read_paused:
                self.loop.call_later(LATE_S, self._record_pause)
            self._update_deadline()

    def _parse(self, data: bytes) -> None:
        cycle, before = self.cycle, len(self.cycle.body) if self.cycle is not None else 0
        super().data_received(data)
        if cycle is not None:
            # Data after a complete response is discarded, but counted.
            self._data_bytes += len(data) if cycle.response_complete else len(cycle.body) - before

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
            self._close_after_lingering()

    def _send_response(self, status: HTTPStatus, body: bytes, headers: dict[str, str]) -> None:
        """Send a whole response without the application."""
        all_headers = {**headers, **OWN_HEADERS, "content-length": str(len(body)), "connection": "close"}
        response = h11.Response(status_code=status, headers=list(all_headers.items()), reason=status.phrase.encode())
        with contextlib.suppress(h11.LocalProtocolError):  # a response to HEAD has no body
            for event in (response, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")

    def _close_after_lingering(self) -> None:
        if is_reserved(self.transport.get_extra_info("socket").fileno()):
            self.transport.close()
        else:
            with contextlib.suppress(OSError):  # the connection has already ended
                self.transport.write_eof()
            self.loop.call_later(LINGER_S, close_now, self.transport)

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
