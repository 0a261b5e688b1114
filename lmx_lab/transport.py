"""What is below the application: uvicorn's connections, with what they lack for strangers and vanished peers."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

SILENT_S = 5
"""A connection on which nothing has come for so long is asked whether the other end is there,"""
AGAIN_S = 3
"""then again and again, so far apart;"""
TIMES = 3
"""so many times without an answer, and it is cut. That is 14 s; but what is sent meanwhile, such as a heartbeat, has
14 s of its own to be acknowledged, so it may be 28 s."""


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
        address = ipaddress.ip_address(host.partition("%")[0])
        mapped = getattr(address, "ipv4_mapped", None)
        return not (mapped or address).is_loopback
    return False


def text_frames(texts: Sequence[str]) -> bytes:
    """Whole text messages as a server sends them on a WebSocket without extensions (RFC 6455, 5.2)."""
    parts: list[bytes] = []
    for data in map(str.encode, texts):
        size = len(data)
        length = [size] if size < 126 else [126, *size.to_bytes(2)] if size < 65536 else [127, *size.to_bytes(8)]
        parts += (bytes([0x81, *length]), data)
    return b"".join(parts)


class HttpProtocol(H11Protocol):
    """uvicorn's; a WebSocket begins as it, and keeps the connection."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        notice_vanishing(transport.get_extra_info("socket"))

    def _should_upgrade(self) -> bool:
        # What is no handshake (RFC 6455, 4.1) is an ordinary request, whatever it would like to become.
        named = any(name == b"sec-websocket-key" for name, _ in self.headers)
        return self.scope["method"] == "GET" and named and super()._should_upgrade()

    def send_400_response(self, msg: str) -> None:
        # Where the application has begun, one of the two answers would come in the middle of the other.
        if (cycle := self.cycle) is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
            if cycle.response_started:
                self.transport.close()
                return
        try:
            super().send_400_response(msg)
        except h11.LocalProtocolError:  # to HEAD goes no body
            self.transport.close()


class WebSocketProtocol(WebSocketsSansIOProtocol):
    """uvicorn's, with functions of our own in the scope's ``extensions``.

    ``lmx_lab.frames`` encodes any number of texts, once for all connections, and ``lmx_lab.send`` sends that in one
    write when the client has taken enough of what came before. ``lmx_lab.abort`` drops a client that takes nothing.
    """

    _pongs = b""

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.handshake_exc is not None and not self.handshake_initiated:
            # The request passed as HTTP, but not as a handshake; uvicorn says nothing and goes on reading.
            status, why = HTTPStatus.BAD_REQUEST, f"not a WebSocket handshake: {self.conn.handshake_exc}.\n"
            answer = b"".join(self.conn.data_to_send()) or self.conn.reject(status, why).serialize()
            self.transport.write(answer)
            self.transport.close()

    async def run_asgi(self) -> None:
        own: Any = {"lmx_lab.frames": text_frames, "lmx_lab.send": self._send, "lmx_lab.abort": self.transport.abort}
        self.scope["extensions"] = {**(self.scope.get("extensions") or {}), **own}
        await super().run_asgi()

    async def send(self, message: Any) -> None:
        await super().send(message)
        # A refusal with a status is whole; uvicorn would log it as an error of the application.
        self.handshake_complete |= self.close_sent

    def send_receive_event_to_app(self) -> None:
        try:
            b"".join(self.frames if self.curr_msg_data_type == "text" else ()).decode()
        except UnicodeDecodeError:
            # uvicorn logs a traceback for it, and fails where the client's own close came in the same packet.
            self.frames = []
            self.conn.fail(1007, "a text that is not UTF-8")
            self.handle_parser_exception()
        else:
            super().send_receive_event_to_app()

    def handle_ping(self) -> None:
        # Who takes nothing is still read, so that its cancel, close and end are seen. But answers to a flood of pings
        # would fill the memory: there is one, to the latest, when the client takes again (RFC 6455, 5.5.3).
        self._pongs = b"".join(self.conn.data_to_send()) or self._pongs
        if self.writable.is_set():
            self.resume_writing()

    def resume_writing(self) -> None:
        super().resume_writing()
        pongs, self._pongs = self._pongs, b""
        self.transport.write(pongs)

    async def _send(self, frames: bytes) -> None:
        if not self.handshake_complete or self.close_sent or self.disconnected or self.transport.is_closing():
            raise ClientDisconnected
        self.transport.write(frames)
        await self.writable.wait()
