"""Provide servers that misbehave: they send given bytes on a socket."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

Answer = bytes | Iterable[bytes]
# The connection is closed. Without the header, a client could reuse it at the moment in which it is closed.
HEAD = "HTTP/1.1 {status}\r\nconnection: close\r\ncontent-type: {kind}\r\nx-lmx-lab: 0\r\n"


@dataclass
class RawServer:
    url: str
    requests: list[str] = field(default_factory=list)
    """Heads and bodies of the requests."""


@contextmanager
def answering(*answers: Answer | Callable[[str], Answer]) -> Iterator[RawServer]:
    """Serve each connection with the next answer, and close it. After the last answer, all get the last one.

    An answer in pieces may be endless: it is sent until the client closes the connection. A function returns the answer
    for a request; then the client closes the connection first.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = RawServer(url=f"http://127.0.0.1:{listener.getsockname()[1]}")
        thread = threading.Thread(target=_serve, args=(listener, server, answers))
        thread.start()
        try:
            yield server
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def _serve(listener: socket.socket, server: RawServer, answers: tuple[Answer | Callable[[str], Answer], ...]) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        # A client may close the connection at any time, even before its request.
        with connection, suppress(OSError):
            answer = answers[min(len(server.requests), len(answers) - 1)]
            server.requests.append(_request(connection))
            pieces = answer(server.requests[-1]) if callable(answer) else answer
            for piece in [pieces] if isinstance(pieces, bytes) else pieces:
                connection.sendall(piece)
            if callable(answer):
                _close_last(connection)


def _close_last(connection: socket.socket) -> None:
    """Wait until the client has closed the connection, so that everything that was sent arrives."""
    connection.shutdown(socket.SHUT_WR)
    while connection.recv(65536):
        pass


def _request(connection: socket.socket) -> str:
    data = b""
    while b"\r\n\r\n" not in data:
        data += _receive(connection)
    head, _, body = data.partition(b"\r\n\r\n")
    sizes = [line.partition(b":")[2] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    while len(body) < int(sizes[0] if sizes else 0):
        body += _receive(connection)
    return f"{head.decode()}\r\n\r\n{body.decode()}"


def _receive(connection: socket.socket) -> bytes:
    piece = connection.recv(65536)
    if not piece:
        raise ConnectionError("the client closed the connection during its request")
    return piece


def whole(text: str, *, status: str = "200 OK", kind: str = "application/json", extra: str = "") -> bytes:
    """A complete response."""
    head = HEAD.format(status=status, kind=kind)
    return f"{head}{extra}content-length: {len(text.encode())}\r\n\r\n{text}".encode()


def streamed(*chunks: str, end: bool = True) -> bytes:
    """Server-sent events in HTTP chunks. Without ``end``, the connection is closed before the last chunk."""
    head = HEAD.format(status="200 OK", kind="text/event-stream; charset=utf-8")
    body = "".join(f"{len(chunk.encode()):x}\r\n{chunk}\r\n" for chunk in chunks)
    tail = "0\r\n\r\n" if end else ""
    return f"{head}transfer-encoding: chunked\r\n\r\n{body}{tail}".encode()


class Endless:
    """An endless response: its head, then the same piece again and again.

    Args:
        every_s: Time between two pieces.
    """

    def __init__(
        self, piece: bytes, *, status: str = "200 OK", head: bytes | None = None, every_s: float = 0.0
    ) -> None:
        self._head = f"{HEAD.format(status=status, kind='application/json')}\r\n".encode() if head is None else head
        self._piece = piece
        self._every_s = every_s

    def __iter__(self) -> Iterator[bytes]:
        yield self._head
        while True:
            time.sleep(self._every_s)
            yield self._piece
