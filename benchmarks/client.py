"""A client that records what a server sends and when, based on the bench package's HTTP reader.

Client and server share two cores, so times are recorded first and the data is parsed afterwards.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self

from benchmarks.bench import BenchError
from lmx_lab.bench.http_stream import ChatEndpoint, TimedRequest

DONE = "[DONE]"


class SentRequest(TimedRequest):
    """A request on its own connection, as a context manager: entering sends it, leaving closes the connection.

    Raises:
        LabError: The server cannot be reached.
    """

    def __init__(self, url: str, body: dict[str, Any]) -> None:
        super().__init__(ChatEndpoint(url), json.dumps(body).encode())
        self.sent_at = 0.0

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        self.sent_at = self.send()
        return self

    def abort(self) -> None:
        """Close the connection immediately."""
        self.connection.transport.abort()

    async def data(self) -> AsyncGenerator[tuple[float, str], None]:
        """Yield the ``data:`` lines of an event stream with their times, or a JSON document as a single line.

        Raises:
            LabError: The server returned an error, or the connection was lost.
        """
        async with aclosing(self.events()) as events:
            async for event in events:
                if event.data is not None:
                    yield event.at_s, event.data


@dataclass(kw_only=True)
class Answer:
    """A streamed answer with times. The lines are parsed lazily."""

    sent_at: float
    lines: list[tuple[float, str]] = field(default_factory=list)

    @cached_property
    def chunks(self) -> list[tuple[float, dict[str, Any]]]:
        return [(at, json.loads(line)) for at, line in self.lines if line != DONE]

    @cached_property
    def pieces(self) -> list[tuple[float, str]]:
        """The pieces of text with their times."""
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
                raise BenchError(f"the stream ended with an error: {chunk['error']}")
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


def has_text(line: str) -> bool:
    return line != DONE and any(_texts(json.loads(line)))


async def stream(url: str, body: dict[str, Any]) -> Answer:
    """Send a request and read the streamed answer to its end.

    Raises:
        LabError: The server returned an error, or the connection was lost.
    """
    async with SentRequest(url, body) as request, aclosing(request.data()) as lines:
        answer = Answer(sent_at=request.sent_at)
        async for line in lines:
            answer.lines.append(line)
    if not answer.pieces:
        raise BenchError(f"the answer has no text: {answer.lines[:3]}")
    return answer


async def streams(url: str, bodies: list[dict[str, Any]]) -> list[Answer]:
    """Send several requests at the same time, and read the streamed answers."""
    return list(await asyncio.gather(*(stream(url, body) for body in bodies)))


async def whole(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """Send a request without streaming and return the JSON document.

    Raises:
        LabError: See ``stream``.
    """
    async with SentRequest(url, body | {"stream": False, "stream_options": None}) as request:
        document: dict[str, Any] = json.loads("".join([data async for _, data in request.data()]))
    return document
