"""Send raw HTTP requests, because client libraries add, correct or reject headers."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

WAIT_S = 30.0
HANDSHAKE = (
    ("Connection", "Upgrade"),
    ("Upgrade", "websocket"),
    ("Sec-WebSocket-Version", "13"),
    ("Sec-WebSocket-Key", "dGhlIHNhbXBsZSBub25jZQ=="),
)


@dataclass(frozen=True)
class Answer:
    status: int
    head: str
    body: bytes

    @property
    def code(self) -> str:
        """Error code of the response; empty if it is not an error."""
        return str(json.loads(self.body)["error"]["code"]) if self.status >= 400 else ""

    def header(self, name: str) -> str | None:
        found = [line.partition(":")[2].strip() for line in self.head.split("\r\n") if line.lower().startswith(name)]
        return found[0] if found else None


def send(
    port: int, request: str, headers: Sequence[tuple[str, str]] = (), body: bytes = b"", *, host: str | None = ""
) -> Answer:
    """Send one request on a new connection, and read the response until the server closes the connection.

    Args:
        request: The method and target, as in ``GET /path``.
        host: The Host header; empty for the right one, None for no header.
    """
    hosts = [] if host is None else [("Host", host or f"127.0.0.1:{port}")]
    length = [("Content-Length", str(len(body)))] if body else []
    # A WebSocket handshake has its own Connection header. If it succeeds, only the head is read.
    is_handshake = any(name == "Upgrade" for name, _ in headers)
    lines = [f"{name}: {value}" for name, value in [*hosts, *headers, *length]] + (
        [] if is_handshake else ["Connection: close"]
    )
    with socket.create_connection(("127.0.0.1", port), WAIT_S) as sock:
        sock.sendall("\r\n".join([f"{request} HTTP/1.1", *lines, "", ""]).encode("latin-1") + body)
        return _read_response(sock)


def _read_response(sock: socket.socket) -> Answer:
    data = b""
    while b"\r\n\r\n" not in data:
        piece = sock.recv(65536)
        assert piece, data
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    status = int(head.split(b" ")[1])
    while status != 101 and (piece := sock.recv(65536)):
        body += piece
    return Answer(status, head.decode("latin-1"), _decode_body(head.lower(), body))


def _decode_body(head: bytes, body: bytes) -> bytes:
    if b"transfer-encoding: chunked" not in head:
        return body
    whole = b""
    while body:
        size, _, rest = body.partition(b"\r\n")
        whole, body = whole + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    return whole


def post(
    port: int, path: str, content: Any, headers: Sequence[tuple[str, str]] = (), *, host: str | None = ""
) -> Answer:
    """Send JSON with the JSON content type."""
    named = [("Content-Type", "application/json"), *headers]
    return send(port, f"POST {path}", named, json.dumps(content).encode(), host=host)
