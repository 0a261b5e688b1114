"""HTTP to the process that holds a model: as little of HTTP/1.1 as its server speaks.

Not by an HTTP library: for each token that would cost more than twice as much (measured: 200 against 90 us), on the
cores that compute.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from lmx_lab.errors import EngineError

LIMIT_BYTES = 2**24
"""Of a line of headers."""
OK = 200
END = b"\n\n"
DATA = b"data: "
Take = Callable[[dict[str, Any]], bool]


class RefusedError(Exception):
    """It answered with an error."""

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        """Such as ``exceed_context_size_error``."""
        self.message = message


class LlamaConnection:
    """Asks one process; each question on a connection of its own, whose end gives the work up.

    Raises, in all methods:
        RefusedError: an answer that is an error.
        EngineError: no answer: the process has gone.
    """

    def __init__(self, socket: str, api_key: str) -> None:
        self._socket = socket
        self._head = (
            f" HTTP/1.1\r\nHost: lmx-lab\r\nAuthorization: Bearer {api_key}\r\nConnection: close\r\n"
            "Content-Type: application/json\r\nContent-Length: "
        )

    async def get(self, path: str) -> Any:
        """The JSON at that path."""
        async with self._opened("GET", path, b"") as (status, body):
            return _checked(status, b"".join([part async for part in body]))

    async def ask(self, path: str, question: Mapping[str, Any]) -> Any:
        """The JSON answer to a JSON question."""
        async with self._opened("POST", path, json.dumps(question).encode()) as (status, body):
            return _checked(status, b"".join([part async for part in body]))

    async def follow(self, path: str, question: bytes, take: Take) -> None:
        """Ask for a streamed answer, on any loop; returns at its end, or when ``take`` has enough.

        Args:
            question: As JSON.
            take: Gets each event's JSON as it comes, and says whether it was the last that matters.
        """
        request = f"POST {path}{self._head}{len(question)}\r\n\r\n".encode() + question
        loop = asyncio.get_running_loop()
        events = _Events(take, loop)
        try:
            try:
                await loop.create_unix_connection(lambda: events, self._socket)
            except OSError as exc:
                raise _gone(exc) from exc
            assert events.transport is not None
            events.transport.write(request)
            await events.done
        finally:
            # At once: what llama.cpp still computes for it is given up.
            events.close()

    @contextlib.asynccontextmanager
    async def _opened(self, method: str, path: str, body: bytes) -> AsyncIterator[tuple[int, AsyncIterator[bytes]]]:
        try:
            reader, writer = await asyncio.open_unix_connection(self._socket, limit=LIMIT_BYTES)
        except OSError as exc:
            raise _gone(exc) from exc
        try:
            writer.write(f"{method} {path}{self._head}{len(body)}\r\n\r\n".encode() + body)
            try:
                await writer.drain()
                status, chunked, length = _head(await reader.readuntil(b"\r\n\r\n"))
            except (OSError, asyncio.IncompleteReadError) as exc:
                raise _gone(exc) from exc
            yield status, _chunks(reader) if chunked else _whole(reader, length)
        finally:
            writer.close()


class _Events(asyncio.Protocol):
    """A streamed answer, read where it arrives: a task that waits for each piece would cost as much again."""

    def __init__(self, take: Take, loop: asyncio.AbstractEventLoop) -> None:
        self.done: asyncio.Future[None] = loop.create_future()
        # Whoever has left does not ask how it went.
        self.done.add_done_callback(lambda done: done.cancelled() or done.exception())
        self.transport: asyncio.Transport | None = None
        self._take = take
        self._status: int | None = None
        self._data = b""
        """As it comes, the frames of its chunks included."""
        self._body = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def close(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        if self.done.done():
            return
        try:
            self._data += data
            if self._status is None and not self._read_head():
                return
            self._read_chunks()
        # Whatever goes wrong in reading this answer is its end, not the loop's.
        except Exception as exc:
            self._end(exc)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(exc or EngineError("llama.cpp ended the answer in its middle"))

    def _read_head(self) -> bool:
        head, end, rest = self._data.partition(b"\r\n\r\n")
        if not end:
            return False
        self._status, chunked, length = _head(head + end)
        if not chunked:
            # Only errors come so, in one piece.
            rest = f"{length or len(rest):x}\r\n".encode() + rest + b"\r\n0\r\n\r\n"
        self._data = rest
        return True

    def _read_chunks(self) -> None:
        while not self.done.done():
            size_text, end, rest = self._data.partition(b"\r\n")
            if not end:
                return
            size = int(size_text, 16)
            if not size:
                self._finish()
                return
            if len(rest) < size + 2:
                return
            self._body += rest[:size]
            self._data = rest[size + 2 :]
            if self._status == OK:
                self._read_events()

    def _read_events(self) -> None:
        *events, self._body = self._body.split(END)
        for event in events:
            if not event.startswith(DATA + b"{"):
                continue
            value = json.loads(event[len(DATA) :])
            if (error := value.get("error")) is not None:
                raise _refused(int(error.get("code") or 500), error)
            if self._take(value):
                self._end(None)
                return

    def _finish(self) -> None:
        if self._status != OK:
            _checked(self._status or 500, self._body)
        self._end(EngineError("llama.cpp ended the answer without saying so"))

    def _end(self, failure: BaseException | None) -> None:
        if self.done.done():
            return
        if failure is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(_gone(failure) if isinstance(failure, OSError) else failure)


def _gone(exc: Exception) -> EngineError:
    return EngineError(f"the process of llama.cpp does not answer: {exc or type(exc).__name__}; load the model again")


def _head(head: bytes) -> tuple[int, bool, int | None]:
    """Status, whether the body comes in chunks, its length if that is told."""
    first, *lines = head.decode("latin-1").split("\r\n")
    fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    length = fields.get("content-length")
    return int(first.split()[1]), fields.get("transfer-encoding") == "chunked", int(length) if length else None


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    try:
        while size := int(await reader.readline() or b"x", 16):
            yield (await reader.readexactly(size + 2))[:-2]
    except (OSError, asyncio.IncompleteReadError, ValueError) as exc:
        raise _gone(exc) from exc


async def _whole(reader: asyncio.StreamReader, length: int | None) -> AsyncIterator[bytes]:
    try:
        yield await reader.readexactly(length) if length is not None else await reader.read(-1)
    except (OSError, asyncio.IncompleteReadError) as exc:
        raise _gone(exc) from exc


def _checked(status: int, body: bytes) -> Any:
    try:
        value = json.loads(body)
    except ValueError as exc:
        raise RefusedError(status, "", body[:300].decode(errors="replace") or f"status {status}") from exc
    if status != 200:
        raise _refused(status, value.get("error", {}) if isinstance(value, dict) else {})
    return value


def _refused(status: int, error: Mapping[str, Any]) -> RefusedError:
    return RefusedError(status, str(error.get("type", "")), str(error.get("message") or f"status {status}"))
