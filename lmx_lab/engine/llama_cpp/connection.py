"""Send HTTP requests to the process of a model. Implements the part of HTTP/1.1 that its server uses.

No HTTP library is used: it would more than double the cost of each token (measured: 200 us instead of 90 us), on the
cores that compute the model.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Callable, Mapping
from typing import Any

from pydantic_core import from_json

from lmx_lab.errors import EngineError

LIMIT_BYTES = 2**24
"""Maximum size of the headers of a response."""
OK = 200
RECEIVED_BYTES = 2**15
"""Maximum number of bytes of a stream that are read at once."""
END_S = 5.0
"""Maximum time to wait until llama.cpp has stopped a request. It finishes the running step first."""
END = b"\n\n"
DATA = b"data: "
OnEvent = Callable[[dict[str, Any]], bool]


class RefusedError(Exception):
    """llama.cpp's server answered with an error."""

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        """Type of the error, such as ``exceed_context_size_error``."""
        self.message = message


class LlamaConnection:
    """Sends requests to one process. Each request has its own connection.

    Raises, in all methods:
        RefusedError: the response is an error.
        EngineError: there is no response, because the process has ended.
    """

    def __init__(self, path: str, api_key: str) -> None:
        self._path = path
        self._request_head = (
            f" HTTP/1.1\r\nHost: lmx-lab\r\nAuthorization: Bearer {api_key}\r\nConnection: close\r\n"
            "Content-Type: application/json\r\nContent-Length: "
        )

    async def get(self, path: str) -> Any:
        """Return the JSON at a path."""
        return await self._request("GET", path, b"")

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Post a JSON body, and return the JSON response."""
        return await self._request("POST", path, json.dumps(body).encode())

    async def open(self) -> socket.socket:
        """Return a connection for ``stream``, which ``end`` closes."""
        sock = socket.socket(socket.AF_UNIX)
        sock.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(sock, self._path)
        except BaseException as exc:
            sock.close()
            if isinstance(exc, OSError):
                raise _unavailable_error(exc) from exc
            raise
        return sock

    async def end(self, sock: socket.socket) -> None:
        """Cancel what llama.cpp still computes for a request, and return when it has stopped, or after ``END_S``.

        llama.cpp closes a connection whose other side was closed as soon as the slot is free (measured: within 56 ms
        alone and 87 ms beside four answers, at most 350 ms). Until then, a request for the slot would be computed
        elsewhere, without the tokens in the slot.
        """
        loop = asyncio.get_running_loop()
        with sock, contextlib.suppress(OSError, TimeoutError):
            sock.shutdown(socket.SHUT_WR)
            async with asyncio.timeout(END_S):
                while await loop.sock_recv(sock, 2**16):
                    pass

    async def stream(self, sock: socket.socket, path: str, body: bytes, on_event: OnEvent) -> None:
        """Post a body, and read the streamed response. Returns at its end, or when ``on_event`` returns True.

        May be called on any event loop.

        Args:
            sock: The connection, from ``open``.
            body: The body as JSON.
            on_event: Called with the JSON of each event; returns True if it needs no more events.
        """
        request = f"POST {path}{self._request_head}{len(body)}\r\n\r\n".encode() + body
        loop = asyncio.get_running_loop()
        events = _Events(on_event, loop)
        try:
            try:
                await loop.create_unix_connection(lambda: events, sock=sock.dup())
            except OSError as exc:
                raise _unavailable_error(exc) from exc
            assert events.transport is not None
            events.transport.write(request)
            await events.done
        finally:
            events.close()

    async def _request(self, method: str, path: str, body: bytes) -> Any:
        try:
            reader, writer = await asyncio.open_unix_connection(self._path, limit=LIMIT_BYTES)
        except OSError as exc:
            raise _unavailable_error(exc) from exc
        parts = []
        try:
            writer.write(f"{method} {path}{self._request_head}{len(body)}\r\n\r\n".encode() + body)
            await writer.drain()
            status, chunked, length = _parse_head(await reader.readuntil(b"\r\n\r\n"))
            if chunked:
                while size := int(await reader.readline() or b"x", 16):
                    parts.append((await reader.readexactly(size + 2))[:-2])
            else:
                parts.append(await reader.readexactly(length) if length is not None else await reader.read(-1))
        except (OSError, asyncio.IncompleteReadError, ValueError) as exc:
            raise _unavailable_error(exc) from exc
        finally:
            writer.close()
        return _parse_response(status, b"".join(parts))


class _Events(asyncio.Protocol):
    """Reads a streamed response in the socket's callback. A task that waits for each chunk would double the cost."""

    def __init__(self, on_event: OnEvent, loop: asyncio.AbstractEventLoop) -> None:
        self.done: asyncio.Future[None] = loop.create_future()
        # The exception is retrieved here, because the reader may have been cancelled.
        self.done.add_done_callback(lambda done: done.cancelled() or done.exception())
        self.transport: asyncio.Transport | None = None
        self._on_event = on_event
        self._status: int | None = None
        self._data = b""
        """Received bytes, including the frames of HTTP chunks."""
        self._body = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        # An attribute of asyncio's selector transports. Receiving 200 bytes takes 2 µs with this buffer, and 9 to 17 µs
        # with the default of 256 KiB, whose memory the C library returns to the system each time.
        transport.max_size = RECEIVED_BYTES  # type: ignore[attr-defined]

    def close(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        if self.done.done():
            return
        try:
            self._data += data
            if self._status is None:
                head, end, rest = self._data.partition(b"\r\n\r\n")
                if not end:
                    return
                self._status, chunked, length = _parse_head(head + end)
                if not chunked:
                    # Only errors are sent without chunks; their body is handled as a single chunk.
                    rest = f"{length or len(rest):x}\r\n".encode() + rest + b"\r\n0\r\n\r\n"
                self._data = rest
            self._read_chunks()
        # An error in this response must not reach the event loop.
        except Exception as exc:
            self._end(exc)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(exc or EngineError("llama.cpp closed the connection before the end of the answer"))

    def _read_chunks(self) -> None:
        while not self.done.done():
            size_text, end, rest = self._data.partition(b"\r\n")
            if not end:
                return
            size = int(size_text, 16)
            if not size:
                if self._status != OK:
                    _parse_response(self._status or 500, self._body)
                self._end(EngineError("llama.cpp ended the answer without its last event"))
                return
            if len(rest) < size + 2:
                return
            self._body += rest[:size]
            self._data = rest[size + 2 :]
            if self._status != OK:
                continue
            *events, self._body = self._body.split(END)
            for event in events:
                if not event.startswith(DATA + b"{"):
                    continue
                value = from_json(event[len(DATA) :])
                if (error := value.get("error")) is not None:
                    raise _refused_error(int(error.get("code") or 500), error)
                if self._on_event(value):
                    self._end(None)
                    return

    def _end(self, failure: BaseException | None) -> None:
        if self.done.done():
            return
        if failure is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(_unavailable_error(failure) if isinstance(failure, OSError) else failure)


def _unavailable_error(exc: Exception) -> EngineError:
    reason = str(exc) or type(exc).__name__
    return EngineError(f"the process of llama.cpp does not answer: {reason}; load the model again")


def _parse_head(head: bytes) -> tuple[int, bool, int | None]:
    """Return the status of a response, whether its body is chunked, and the length of the body if it is known."""
    first, *lines = head.decode("latin-1").split("\r\n")
    fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    length = fields.get("content-length")
    return int(first.split()[1]), fields.get("transfer-encoding") == "chunked", int(length) if length else None


def _parse_response(status: int, body: bytes) -> Any:
    try:
        value = json.loads(body)
    except ValueError as exc:
        raise RefusedError(status, "", body[:300].decode(errors="replace") or f"status {status}") from exc
    if status != OK:
        raise _refused_error(status, value.get("error", {}) if isinstance(value, dict) else {})
    return value


def _refused_error(status: int, error: Mapping[str, Any]) -> RefusedError:
    return RefusedError(status, str(error.get("type", "")), str(error.get("message") or f"status {status}"))
