"""Send requests as bytes, and parse the answers as strictly as the standards define them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
import time
from dataclasses import dataclass, field
from typing import Any, Literal

import h11
from websockets.exceptions import ProtocolError
from websockets.frames import Frame, Opcode
from websockets.streams import StreamReader

from soak.fuzzing.frames import SocketCase
from soak.fuzzing.requests import HOST, Case

READ_BYTES = 65_536
STREAM_BYTES = 2**24
RESET = struct.pack("ii", 1, 0)
"""Value of SO_LINGER with which closing a socket sends RST."""
Ended = Literal["answered", "closed", "hung", "broken", "refused"]


@dataclass(kw_only=True)
class Outcome:
    """The result of a request or a WebSocket."""

    ended: Ended = "closed"
    """``closed``: the server has closed the connection before the end of the answer. ``broken``: the answer violates
    the protocol. ``refused``: the server does not accept connections."""
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    messages: list[Any] = field(default_factory=list)
    """Messages of a WebSocket, parsed as JSON."""
    close_code: int | None = None
    seconds: float = 0.0
    detail: str = ""


class Endpoint:
    """The address of a server, and the values that the heads of its requests need."""

    def __init__(self, host: str, port: int, *, token: str = "", limit_s: float = 30.0) -> None:
        self.host = host
        self.port = port
        self.limit_s = limit_s
        self._names = ((f"host: {HOST}\r\n", f"host: {host}:{port}\r\n"), ("Bearer TOKEN\r\n", f"Bearer {token}\r\n"))

    def fill_in(self, wire: bytes) -> bytes:
        """Replace the placeholders for the address and the token."""
        for name, value in self._names:
            wire = wire.replace(name.encode(), value.encode(), 1)
        return wire

    async def open(self) -> Connection:
        return Connection(*await asyncio.open_connection(self.host, self.port, limit=STREAM_BYTES))


class Connection:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def read(self) -> bytes:
        """Read available data; return nothing at the end, also after an error."""
        try:
            return await self.reader.read(READ_BYTES)
        except OSError:
            return b""

    async def send(self, data: bytes) -> None:
        # A server may refuse and close while the request is still being sent; its answer can be read nevertheless.
        with contextlib.suppress(OSError):
            self.writer.write(data)
            await self.writer.drain()

    def shut_down(self) -> None:
        with contextlib.suppress(OSError):
            self.writer.write_eof()

    async def close(self, *, reset: bool = False) -> None:
        if reset:
            own: socket.socket = self.writer.get_extra_info("socket")
            with contextlib.suppress(OSError):
                own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            self.writer.transport.abort()
        self.writer.close()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()


class HttpClient:
    """A client that reuses its connection if the last request and its answer allow it."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._connection: Connection | None = None

    async def exchange(self, case: Case) -> Outcome:
        """Send one request and read its answer."""
        started = time.perf_counter()
        outcome = Outcome()
        try:
            async with asyncio.timeout(self._endpoint.limit_s):
                kept = self._connection is not None
                await self._try_exchange(case, outcome)
                if kept and outcome.ended == "closed" and outcome.status is None and case.whole:
                    # The server may close an idle connection at the moment when it is used again.
                    outcome = Outcome()
                    await self._try_exchange(case, outcome)
        except TimeoutError:
            outcome.ended = "hung"
        except OSError as exc:
            outcome.ended, outcome.detail = "refused", str(exc)
        if outcome.ended != "answered" or case.last:
            await self.close(reset=outcome.ended == "hung")
        outcome.seconds = time.perf_counter() - started
        return outcome

    async def _try_exchange(self, case: Case, outcome: Outcome) -> None:
        self._connection = connection = self._connection or await self._endpoint.open()
        sending = asyncio.create_task(connection.send(self._endpoint.fill_in(case.wire)))
        try:
            if case.end != "stay":
                await sending
                if case.end == "reset":
                    await self.close(reset=True)
                    return
                connection.shut_down()
            keeps = await _read_answer(connection, case.method, outcome)
            await sending
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
        if not keeps:
            await self.close()

    async def close(self, *, reset: bool = False) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close(reset=reset)


def _parser(method: str, *, upgrade: bool = False) -> h11.Connection:
    parser = h11.Connection(h11.CLIENT, max_incomplete_event_size=2**20)
    headers = [("host", "x"), *([("upgrade", "websocket"), ("connection", "upgrade")] if upgrade else [])]
    known = method if method in ("GET", "HEAD") else "POST"
    parser.send(h11.Request(method=known, target="/", headers=headers))
    parser.send(h11.EndOfMessage())
    return parser


async def _read_answer(connection: Connection, method: str, outcome: Outcome) -> bool:
    """Read one answer; return whether the connection can be used again."""
    parser, body = _parser(method), bytearray()
    try:
        while True:
            event = parser.next_event()
            if event is h11.NEED_DATA:
                data = await connection.read()
                if not data and outcome.status is None:
                    return False
                parser.receive_data(data)
            elif isinstance(event, h11.Response):
                outcome.status = event.status_code
                outcome.headers = {name.decode(): value.decode("latin-1") for name, value in event.headers}
            elif isinstance(event, h11.Data):
                body += event.data
            elif isinstance(event, h11.EndOfMessage):
                outcome.ended = "answered"
                return parser.our_state is h11.DONE and parser.their_state is h11.DONE and not parser.trailing_data[0]
            elif not isinstance(event, h11.InformationalResponse):
                return False
    except h11.RemoteProtocolError as exc:
        # An incomplete answer was cut off by the end of the connection; any other error is invalid HTTP.
        outcome.ended, outcome.detail = "closed" if connection.reader.at_eof() else "broken", str(exc)
        return False
    finally:
        outcome.body = bytes(body)


async def socket_exchange(endpoint: Endpoint, case: SocketCase) -> Outcome:
    """Open a WebSocket, send the frames of a case, and read to the end of the connection."""
    started, outcome = time.perf_counter(), Outcome()
    try:
        connection = await endpoint.open()
    except OSError as exc:
        return Outcome(ended="refused", detail=str(exc))
    try:
        async with asyncio.timeout(endpoint.limit_s):
            await connection.send(endpoint.fill_in(case.handshake))
            rest = await _read_handshake_answer(connection, outcome)
            if rest is not None:
                await _SocketExchange(connection, case, outcome, rest).run()
    except TimeoutError:
        outcome.ended = "hung"
    finally:
        await connection.close(reset=outcome.ended == "hung")
    outcome.seconds = time.perf_counter() - started
    return outcome


async def _read_handshake_answer(connection: Connection, outcome: Outcome) -> bytes | None:
    """Read the answer to a handshake; return the first bytes after it, or None if it was refused."""
    parser, body = _parser("GET", upgrade=True), bytearray()
    try:
        while True:
            event = parser.next_event()
            if event is h11.NEED_DATA:
                data = await connection.read()
                if not data and outcome.status is None:
                    return None
                parser.receive_data(data)
            elif isinstance(event, h11.InformationalResponse | h11.Response):
                outcome.status = event.status_code
                outcome.headers = {name.decode(): value.decode("latin-1") for name, value in event.headers}
                if event.status_code == 101:
                    return parser.trailing_data[0]
            elif isinstance(event, h11.Data):
                body += event.data
            else:
                outcome.ended = "answered"
                return None
    except h11.RemoteProtocolError as exc:
        outcome.ended, outcome.detail = "broken", str(exc)
        return None
    finally:
        outcome.body = bytes(body)


class _SocketExchange:
    """A WebSocket after its handshake."""

    def __init__(self, connection: Connection, case: SocketCase, outcome: Outcome, rest: bytes) -> None:
        self._connection = connection
        self._case = case
        self._outcome = outcome
        self._received = StreamReader()
        self._received.feed_data(rest)
        self._parsing = Frame.parse(self._received.read_exact, mask=False)
        """The frame that is being read, also if reading it was cancelled."""

    async def run(self) -> None:
        sending = asyncio.create_task(self._connection.send(self._case.frames))
        try:
            if self._case.answered:
                while not any(map(_is_last, self._outcome.messages)):
                    if await self._read_frame() is None:
                        break
            await self._close(sending)
            await self._read_to_end()
            if self._outcome.ended != "broken":
                self._outcome.ended = "answered"
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)

    async def _close(self, sending: asyncio.Task[None]) -> None:
        if self._case.end == "wait":
            return
        # A server that has closed reads no more, so that sending the rest would never end.
        receiving = asyncio.create_task(self._read_to_end())
        await asyncio.wait({sending, receiving}, return_when=asyncio.FIRST_COMPLETED)
        receiving.cancel()
        await asyncio.gather(receiving, return_exceptions=True)
        if self._case.end == "close":
            await self._connection.send(self._case.closing)
            if not self._case.frames_are_whole:
                self._connection.shut_down()
        elif self._case.end == "shut":
            self._connection.shut_down()
        else:
            await self._connection.close(reset=True)

    async def _read_to_end(self) -> None:
        while await self._read_frame() is not None:
            pass

    async def _read_frame(self) -> Opcode | None:
        """Read one frame and return its opcode, or None at the end."""
        while True:
            try:
                next(self._parsing)
            except StopIteration as end:
                frame: Frame = end.value
                self._parsing = Frame.parse(self._received.read_exact, mask=False)
                self._handle_frame(frame)
                return frame.opcode
            except ProtocolError as exc:
                self._record_violation(f"an invalid frame: {exc}")
                return None
            data = await self._connection.read()
            if not data:
                return None
            self._received.feed_data(data)

    def _handle_frame(self, frame: Frame) -> None:
        if not frame.fin or frame.opcode not in (Opcode.TEXT, Opcode.CLOSE, Opcode.PING, Opcode.PONG):
            self._record_violation(f"an unexpected frame: {frame}")
        elif frame.opcode is Opcode.TEXT:
            try:
                self._outcome.messages.append(json.loads(bytes(frame.data)))
            except ValueError as exc:
                self._record_violation(f"a message is not JSON: {exc}")
        elif frame.opcode is Opcode.CLOSE:
            self._outcome.close_code = int.from_bytes(frame.data[:2]) if frame.data else 1005

    def _record_violation(self, why: str) -> None:
        self._outcome.ended, self._outcome.detail = "broken", why


def _is_last(message: Any) -> bool:
    return isinstance(message, dict) and ("done" in message or "error" in message or "event" in message)
