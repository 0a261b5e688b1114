"""A light HTTP client on bare asyncio streams: it notes when bytes come and looks at them afterwards.

Light, because it shares two cores with the server that it measures.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

from benchmarks.bench import BenchError

CHAT = "/v1/chat/completions"


class Dechunker:
    """HTTP/1.1 chunked transfer coding, undone piece by piece (RFC 9112, 7.1)."""

    def __init__(self) -> None:
        self._buffer = b""
        self._data_left = 0
        self._end_left = 0
        """Bytes of the chunk's closing CRLF still to come."""

    def feed(self, data: bytes) -> bytes:
        self._buffer += data
        out: list[bytes] = []
        while self._buffer:
            if self._data_left:
                piece = self._take(self._data_left)
                self._data_left -= len(piece)
                out.append(piece)
            elif self._end_left:
                self._end_left -= len(self._take(self._end_left))
            else:
                size, found, rest = self._buffer.partition(b"\r\n")
                if not found:
                    break
                self._data_left, self._end_left, self._buffer = int(size.partition(b";")[0], 16), 2, rest
        return b"".join(out)

    def _take(self, count: int) -> bytes:
        piece, self._buffer = self._buffer[:count], self._buffer[count:]
        return piece


class Exchange:
    """One request on a connection of its own, as a context: leaving it closes the connection."""

    def __init__(self, url: str, body: dict[str, Any], path: str = CHAT) -> None:
        parts = urlsplit(url)
        self._host, self._port, self._path = parts.hostname or "", parts.port or 80, path
        self._body = json.dumps(body).encode()
        self.status = 0
        self.sent_at = 0.0

    async def __aenter__(self) -> Self:
        self._reader, self._writer = await asyncio.open_connection(self._host, self._port)
        self.sent_at = time.perf_counter()
        self._writer.write(
            f"POST {self._path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(self._body)}\r\n\r\n".encode()
            + self._body
        )
        await self._writer.drain()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abandon()

    def abandon(self) -> None:
        """Close the connection now, whatever is on its way."""
        self._writer.transport.abort()

    async def pieces(self) -> AsyncIterator[tuple[float, bytes]]:
        """The body's bytes and when they came, until the server closes."""
        head = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        self.status = int(head.split(b" ", 2)[1])
        dechunker = Dechunker() if b"\r\ntransfer-encoding: chunked" in head else None
        while data := await self._reader.read(2**16):
            now = time.perf_counter()
            yield now, dechunker.feed(data) if dechunker else data

    async def events(self) -> AsyncIterator[tuple[float, bytes]]:
        """The ``data:`` lines of an event stream and when each was complete.

        Raises:
            BenchError: it was answered by an error.
        """
        rest = b""
        async for at, piece in self.pieces():
            *lines, rest = (rest + piece).split(b"\n")
            if self.status != 200:
                raise BenchError(f"HTTP {self.status}: {piece.decode(errors='replace')[:300]}")
            for line in lines:
                if line.startswith(b"data:"):
                    yield at, line[5:].strip()


@dataclass(kw_only=True)
class Answer:
    """What came of a streamed chat request, and when. Read from the lines only when asked."""

    sent_at: float
    lines: list[tuple[float, bytes]] = field(default_factory=list)

    @cached_property
    def chunks(self) -> list[tuple[float, dict[str, Any]]]:
        return [(at, json.loads(line)) for at, line in self.lines if line != b"[DONE]"]

    @cached_property
    def pieces(self) -> list[tuple[float, str]]:
        """The pieces of text."""
        return [(at, text) for at, chunk in self.chunks for text in _texts(chunk)]

    @property
    def text(self) -> str:
        return "".join(text for _, text in self.pieces)

    @property
    def times(self) -> list[float]:
        return [at for at, _ in self.pieces]

    @property
    def ended_at(self) -> float:
        return self.lines[-1][0]

    @property
    def ttft_s(self) -> float:
        return self.times[0] - self.sent_at

    @cached_property
    def usage(self) -> dict[str, Any]:
        for _, chunk in self.chunks:
            if "error" in chunk:
                raise BenchError(f"the stream ended by an error: {chunk['error']}")
            if chunk.get("usage"):
                usage: dict[str, Any] = chunk["usage"]
                return usage
        raise BenchError("the stream ended without usage")

    @property
    def tokens(self) -> int:
        return int(self.usage["completion_tokens"])


def _texts(chunk: dict[str, Any]) -> Iterator[str]:
    for choice in chunk.get("choices", ()):
        if text := choice.get("delta", {}).get("content"):
            yield text


def has_text(line: bytes) -> bool:
    return line != b"[DONE]" and any(_texts(json.loads(line)))


async def stream(url: str, body: dict[str, Any]) -> Answer:
    """A streamed answer, to its end."""
    async with Exchange(url, body) as exchange:
        answer = Answer(sent_at=exchange.sent_at)
        async for event in exchange.events():
            answer.lines.append(event)
    if not answer.pieces:
        raise BenchError(f"an answer without text: {answer.lines[:3]}")
    return answer


async def streams(url: str, bodies: list[dict[str, Any]]) -> list[Answer]:
    """Several at once."""
    return list(await asyncio.gather(*(stream(url, body) for body in bodies)))


async def whole(url: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Status and JSON of an answer that is not streamed."""
    async with Exchange(url, body | {"stream": False, "stream_options": None}) as exchange:
        data = b"".join([piece async for _, piece in exchange.pieces()])
    return exchange.status, json.loads(data)
