"""The client that sends them: bytes out, and what comes back read as strictly as the standards have it."""

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

from soak.fuzzing.frames import CLOSE, FIN, PING, TEXT, SocketCase
from soak.fuzzing.requests import HOST, Case

READ_BYTES = 65_536
STREAM_BYTES = 2**24
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER at 0: closing sends RST."""
Ended = Literal["answered", "closed", "hung", "broken", "refused"]


@dataclass(kw_only=True)
class Outcome:
    """What came of a request or a socket."""

    ended: Ended = "closed"
    """``closed``: the server has closed without a whole answer. ``broken``: what it said is against the protocol.
    ``refused``: it takes no connections."""
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    messages: list[Any] = field(default_factory=list)
    """Of a WebSocket, as JSON."""
    close_code: int | None = None
    seconds: float = 0.0
    remark: str = ""


class Endpoint:
    """Where requests go, and what their heads have to name there."""

    def __init__(self, host: str, port: int, *, token: str = "", limit_s: float = 30.0) -> None:
        self.host = host
        self.port = port
        self.limit_s = limit_s
        self._names = ((f"host: {HOST}\r\n", f"host: {host}:{port}\r\n"), ("Bearer TOKEN\r\n", f"Bearer {token}\r\n"))

    def filled(self, wire: bytes) -> bytes:
        """With the address and the token in their places."""
        for name, value in self._names:
            wire = wire.replace(name.encode(), value.encode(), 1)
        return wire

    async def open(self) -> Line:
        return Line(*await asyncio.open_connection(self.host, self.port, limit=STREAM_BYTES))


class Line:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def read(self) -> bytes:
        """What has come; nothing at the end, however it came about."""
        try:
            return await self.reader.read(READ_BYTES)
        except OSError:
            return b""

    async def send(self, data: bytes) -> None:
        # A server that refuses a request in the middle of it closes, and its answer can still be read.
        with contextlib.suppress(OSError):
            self.writer.write(data)
            await self.writer.drain()

    def shut(self) -> None:
        with contextlib.suppress(OSError):
            self.writer.write_eof()

    async def leave(self, *, reset: bool = False) -> None:
        if reset:
            own: socket.socket = self.writer.get_extra_info("socket")
            with contextlib.suppress(OSError):
                own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            self.writer.transport.abort()
        self.writer.close()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()


class HttpClient:
    """Keeps its connection for the next request, where the last answer and the last request allow it."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._line: Line | None = None

    async def exchange(self, case: Case) -> Outcome:
        """Sends one request, and waits for its end."""
        started = time.perf_counter()
        outcome = Outcome()
        try:
            async with asyncio.timeout(self._endpoint.limit_s):
                kept = self._line is not None
                await self._tried(case, outcome)
                if kept and outcome.ended == "closed" and outcome.status is None and case.whole:
                    # The server may close a connection that rests, at the very moment when it is used again.
                    outcome = Outcome()
                    await self._tried(case, outcome)
        except TimeoutError:
            outcome.ended = "hung"
        except OSError as exc:
            outcome.ended, outcome.remark = "refused", str(exc)
        if outcome.ended != "answered" or case.last:
            await self.close(reset=outcome.ended == "hung")
        outcome.seconds = time.perf_counter() - started
        return outcome

    async def _tried(self, case: Case, outcome: Outcome) -> None:
        self._line = line = self._line or await self._endpoint.open()
        sending = asyncio.create_task(line.send(self._endpoint.filled(case.wire)))
        try:
            if case.end != "stay":
                await sending
                if case.end == "reset":
                    await self.close(reset=True)
                    return
                line.shut()
            keeps = await _answer(line, case.method, outcome)
            await sending
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
        if not keeps:
            await self.close()

    async def close(self, *, reset: bool = False) -> None:
        line, self._line = self._line, None
        if line is not None:
            await line.leave(reset=reset)


def _parser(method: str, *, upgrade: bool = False) -> h11.Connection:
    parser = h11.Connection(h11.CLIENT, max_incomplete_event_size=2**20)
    headers = [("host", "x"), *([("upgrade", "websocket"), ("connection", "upgrade")] if upgrade else [])]
    known = method if method in ("GET", "HEAD") else "POST"
    parser.send(h11.Request(method=known, target="/", headers=headers))
    parser.send(h11.EndOfMessage())
    return parser


async def _answer(line: Line, method: str, outcome: Outcome) -> bool:
    """Reads one answer; whether the connection can be used again."""
    parser, body = _parser(method), bytearray()
    try:
        while True:
            event = parser.next_event()
            if event is h11.NEED_DATA:
                data = await line.read()
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
        # What ends in the middle was cut off; all else is no HTTP.
        outcome.ended, outcome.remark = "closed" if line.reader.at_eof() else "broken", str(exc)
        return False
    finally:
        outcome.body = bytes(body)


async def socket_exchange(endpoint: Endpoint, case: SocketCase) -> Outcome:
    """One WebSocket from its handshake to the end of its connection."""
    started, outcome = time.perf_counter(), Outcome()
    try:
        line = await endpoint.open()
    except OSError as exc:
        return Outcome(ended="refused", remark=str(exc))
    try:
        async with asyncio.timeout(endpoint.limit_s):
            await line.send(endpoint.filled(case.handshake))
            rest = await _upgraded(line, outcome)
            if rest is not None:
                await _Conversation(line, case, outcome, rest).run()
    except TimeoutError:
        outcome.ended = "hung"
    finally:
        await line.leave(reset=outcome.ended == "hung")
    outcome.seconds = time.perf_counter() - started
    return outcome


async def _upgraded(line: Line, outcome: Outcome) -> bytes | None:
    """Reads the answer to a handshake; the first bytes behind it, or None if it was refused."""
    parser, body = _parser("GET", upgrade=True), bytearray()
    try:
        while True:
            event = parser.next_event()
            if event is h11.NEED_DATA:
                data = await line.read()
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
        outcome.ended, outcome.remark = "broken", str(exc)
        return None
    finally:
        outcome.body = bytes(body)


class _Conversation:
    """A WebSocket after its handshake."""

    def __init__(self, line: Line, case: SocketCase, outcome: Outcome, rest: bytes) -> None:
        self._line = line
        self._case = case
        self._outcome = outcome
        self._data = bytearray(rest)

    async def run(self) -> None:
        sending = asyncio.create_task(self._line.send(self._case.frames))
        try:
            if self._case.answered:
                await self._until_answered()
            await self._leave(sending)
            while await self._frame() is not None:
                pass
            if self._outcome.ended != "broken":
                self._outcome.ended = "answered"
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)

    async def _until_answered(self) -> None:
        def is_last(message: Any) -> bool:
            return isinstance(message, dict) and ("done" in message or "error" in message or "event" in message)

        while not any(is_last(message) for message in self._outcome.messages):
            if await self._frame() is None:
                return

    async def _leave(self, sending: asyncio.Task[None]) -> None:
        if self._case.end == "wait":
            return
        # A server that has had enough reads no more, and what is left to send would never go.
        receiving = asyncio.create_task(self._until_answer_ends())
        await asyncio.wait({sending, receiving}, return_when=asyncio.FIRST_COMPLETED)
        receiving.cancel()
        await asyncio.gather(receiving, return_exceptions=True)
        if self._case.end == "close":
            await self._line.send(self._case.closing)
            if not self._case.sound:
                self._line.shut()
        elif self._case.end == "shut":
            self._line.shut()
        else:
            await self._line.leave(reset=True)

    async def _until_answer_ends(self) -> None:
        while await self._frame() is not None:
            pass

    async def _frame(self) -> int | None:
        """Reads one frame; None at the end."""
        while True:
            taken = self._taken()
            if taken is not None:
                return taken
            data = await self._line.read()
            if not data:
                return None
            self._data += data

    def _taken(self) -> int | None:
        """One frame out of what was read, if there is a whole one."""
        data = self._data
        if len(data) < 2:
            return None
        opcode, size, start = data[0] & 0x0F, data[1], 2
        if not data[0] & FIN or data[0] & 0x70 or size & 0x80 or opcode not in (TEXT, CLOSE, PING, 10):
            self._broken(f"a frame that begins with {bytes(data[:2]).hex()}")
        if size in (126, 127):
            start = 4 if size == 126 else 10
            if len(data) < start:
                return None
            size = int.from_bytes(data[2:start])
        if len(data) < start + size:
            return None
        payload = bytes(data[start : start + size])
        del data[: start + size]
        self._take(opcode, payload)
        return opcode

    def _take(self, opcode: int, payload: bytes) -> None:
        if opcode == TEXT:
            try:
                self._outcome.messages.append(json.loads(payload))
            except ValueError as exc:
                self._broken(f"a message that is no JSON: {exc}")
        elif opcode == CLOSE:
            self._outcome.close_code = int.from_bytes(payload[:2]) if payload else 1005

    def _broken(self, why: str) -> None:
        self._outcome.ended, self._outcome.remark = "broken", why
