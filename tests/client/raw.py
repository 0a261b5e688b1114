"""Servers that misbehave: bytes on a socket."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

Answer = bytes | Iterable[bytes]
# It does close: a client that was not told could ask again on a connection that is just going.
HEAD = "HTTP/1.1 {status}\r\nconnection: close\r\ncontent-type: {kind}\r\nx-lmx-lab: 0\r\n"


@dataclass
class RawServer:
    url: str
    requests: list[str] = field(default_factory=list)
    """Heads and bodies, as they came."""


@contextmanager
def answering(*answers: Answer | Callable[[str], Answer]) -> Iterator[RawServer]:
    """Each connection gets the next answer after its request, and is closed; later ones get the last.

    An answer in pieces may be without an end: it is sent until the client has gone. A function makes one of
    the request; afterwards the client is the first to close.
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
        # A client may leave at any moment, also before it has asked for anything.
        with connection, suppress(OSError):
            answer = answers[min(len(server.requests), len(answers) - 1)]
            server.requests.append(_request(connection))
            made = answer(server.requests[-1]) if callable(answer) else answer
            for piece in [made] if isinstance(made, bytes) else made:
                connection.sendall(piece)
            if callable(answer):
                _part(connection)


def _part(connection: socket.socket) -> None:
    """Close it so that all that was sent arrives, whatever the client has sent meanwhile."""
    connection.shutdown(socket.SHUT_WR)
    while connection.recv(65536):
        pass


def _request(connection: socket.socket) -> str:
    data = b""
    while b"\r\n\r\n" not in data:
        data += _piece(connection)
    head, _, body = data.partition(b"\r\n\r\n")
    sizes = [line.partition(b":")[2] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    while len(body) < int(sizes[0] if sizes else 0):
        body += _piece(connection)
    return f"{head.decode()}\r\n\r\n{body.decode()}"


def _piece(connection: socket.socket) -> bytes:
    piece = connection.recv(65536)
    if not piece:
        raise ConnectionError("the client left in the middle of its request")
    return piece


def whole(text: str, *, status: str = "200 OK", kind: str = "application/json", extra: str = "") -> bytes:
    """A complete answer."""
    head = HEAD.format(status=status, kind=kind)
    return f"{head}{extra}content-length: {len(text.encode())}\r\n\r\n{text}".encode()


def streamed(*chunks: str, end: bool = True) -> bytes:
    """Server-sent events in HTTP chunks; without ``end`` the connection is cut off after them."""
    head = HEAD.format(status="200 OK", kind="text/event-stream; charset=utf-8")
    body = "".join(f"{len(chunk.encode()):x}\r\n{chunk}\r\n" for chunk in chunks)
    tail = "0\r\n\r\n" if end else ""
    return f"{head}transfer-encoding: chunked\r\n\r\n{body}{tail}".encode()


class Endless:
    """The head of an answer, and then the same for ever, to each who asks.

    Args:
        every_s: The pace of a server that is never silent, and never done.
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
