"""Send hostile requests, and report how each was answered."""

from __future__ import annotations

import contextlib
import http.client
import json
import select
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

from soak.fuzzing.frames import CONTINUATION, HANDSHAKE, PING, TEXT, frame, handshake
from soak.fuzzing.requests import HOST

T = TypeVar("T")
CHAT, SOCKET = "/v1/chat/completions", "/v1/chat/stream"
TIMEOUT_S = 60.0
LEAVE_S = 1.0
SMALL_BUFFER_BYTES = 4096
FLOOD_S = 10.0
FRAMES = 1000
"""Frames that a flood sends with one call."""
LEFT, DISCONNECTED, STILL_OPEN = "left", "disconnected", "still open"


@dataclass(frozen=True, kw_only=True)
class Answer:
    text: str
    """Status and error code, such as ``400 invalid-request``, or how the connection ended."""
    seconds: float


Send = Callable[[str], list[Answer]]
"""Sends the requests of an attack to a server; returns when all of them have ended."""


def content_of(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body).encode()


def chat_of(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "default", "max_tokens": 4, "messages": [{"role": "user", "content": text}], **fields}


def post(path: str, make: Callable[[], Mapping[str, Any]], *, clients: int = 1, leaves: bool = False) -> Send:
    """Send one request from each of several connections.

    Args:
        make: Creates the body when it is sent, because the bodies of all attacks together are large.
        leaves: Whether the clients disconnect after ``LEAVE_S``.
    """

    def send(url: str) -> list[Answer]:
        content = content_of(make())
        return together([lambda: _post(url, path, content, leaves=leaves)] * clients)

    return send


def together(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Call functions at once, each on a thread; return their results."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(lambda call: call(), calls))


def _post(url: str, path: str, content: bytes, *, leaves: bool) -> Answer:
    place = urlsplit(url)
    began = time.monotonic()
    timeout = LEAVE_S if leaves else TIMEOUT_S
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=timeout)
    with contextlib.closing(connection):
        try:
            connection.request("POST", path, content, {"content-type": "application/json"})
            answer = connection.getresponse()
            text = describe(answer.status, answer.read())
        except TimeoutError:
            text = LEFT if leaves else f"no answer within {TIMEOUT_S:g} s"
        except (OSError, http.client.HTTPException) as exc:
            text = f"{DISCONNECTED} ({type(exc).__name__})"
    return Answer(text=text, seconds=time.monotonic() - began)


def describe(status: int, body: bytes) -> str:
    """Return the status of an answer, and the code of an error."""
    if status < 400:
        return str(status)
    try:
        return f"{status} {json.loads(body)['error']['code']}"
    except (ValueError, TypeError, KeyError):
        return f"{status} without the fields of an error: {body[:100]!r}"


# Clients that do not read, and floods of frames


def unread_sockets(body: Mapping[str, Any], *, clients: int, limit_s: float) -> Send:
    """Send a chat on each of several WebSockets, and read nothing until the server closes them, or until a limit."""

    def send(url: str) -> list[Answer]:
        def never_read() -> Answer:
            with _socket(url, buffer_bytes=SMALL_BUFFER_BYTES) as sock:
                sock.sendall(frame(TEXT, content_of(body)))
                return _wait_for_close(sock, limit_s)

        return together([never_read] * clients)

    return send


def unread_streams(body: Mapping[str, Any], *, clients: int, limit_s: float) -> Send:
    """Do the same with event streams, on connections whose buffers have the system's size, so that they fill slowly."""

    def send(url: str) -> list[Answer]:
        place, content = urlsplit(url), content_of(body)
        head = f"POST {CHAT} HTTP/1.1\r\nhost: {place.netloc}\r\ncontent-type: application/json\r\n"

        def never_read() -> Answer:
            with socket.create_connection((place.hostname, place.port), TIMEOUT_S) as sock:
                sock.sendall(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
                return _wait_for_close(sock, limit_s)

        return together([never_read] * clients)

    return send


def _wait_for_close(sock: socket.socket, limit_s: float) -> Answer:
    began = time.monotonic()
    poll = select.poll()
    poll.register(sock, select.POLLRDHUP | select.POLLHUP | select.POLLERR)
    closed = poll.poll(limit_s * 1000)
    return Answer(text=DISCONNECTED if closed else STILL_OPEN, seconds=time.monotonic() - began)


def flood_of_frames(opcode: int, *, first: bytes = b"") -> Send:
    """Send empty WebSocket frames until the server closes the connection, or for ``FLOOD_S``."""

    def send(url: str) -> list[Answer]:
        with _socket(url) as sock:
            began, sent = time.monotonic(), 0
            sock.setblocking(False)
            data = frame(opcode, b"", fin=opcode != CONTINUATION) * FRAMES
            closed = bytearray()
            sock.send(first)
            rest = data
            while time.monotonic() < began + FLOOD_S:
                readable, writable, _ = select.select([sock], [sock], [], 1.0)
                try:
                    if readable:
                        received = sock.recv(65536)
                        closed += received
                        if not received:
                            return [
                                Answer(text=f"closed{_close_code(bytes(closed))}", seconds=time.monotonic() - began)
                            ]
                    if writable:
                        count = sock.send(rest)
                        rest = rest[count:] or data
                        sent += count
                except BlockingIOError:
                    continue
                except OSError:
                    return [Answer(text=f"closed{_close_code(bytes(closed))}", seconds=time.monotonic() - began)]
            frames = sent * FRAMES // len(data)
            return [Answer(text=f"{STILL_OPEN} after {frames:,} frames", seconds=time.monotonic() - began)]

    return send


EMPTY_CONTINUATIONS = flood_of_frames(CONTINUATION, first=frame(TEXT, b"", fin=False))
PINGS = flood_of_frames(PING)


def _close_code(received: bytes) -> str:
    """Return the code of a close frame without a mask, which is near the end of what was received."""
    end = received[-127:]
    at = end.rfind(b"\x88")
    code = end[at + 2 : at + 4] if at >= 0 else b""
    return f" {int.from_bytes(code)}" if len(code) == 2 else ""


@contextlib.contextmanager
def _socket(url: str, *, buffer_bytes: int | None = None) -> Iterator[socket.socket]:
    """Open a WebSocket, and return its connection after the handshake."""
    place = urlsplit(url)
    with socket.socket() as sock:
        if buffer_bytes is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        sock.settimeout(TIMEOUT_S)
        sock.connect((place.hostname, place.port))
        sock.sendall(handshake(SOCKET, HANDSHAKE).replace(HOST.encode(), place.netloc.encode()))
        head = b""
        while b"\r\n\r\n" not in head:
            head += sock.recv(1)
        yield sock
