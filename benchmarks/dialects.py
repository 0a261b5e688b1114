"""Measure the CPU time of a token at eight streams in each request format, against the chat format."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any
from urllib.parse import urlsplit

from benchmarks import prompts
from benchmarks.bench import Bench, BenchError
from benchmarks.prompts import Message
from benchmarks.report import Limit, Row
from benchmarks.servers import LabServer, lab_server

FIGURE = "CPU time of a token, request format ÷ chat format"
STREAMS = 8
PAIRS, QUICK_PAIRS = 20, 5
LIMIT = Limit(sign="≤", bound=1.03)
PIECE_BYTES = 65_536
CHAT = "chat"


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """A format of requests and streams."""

    path: str
    body: Callable[[list[Message], int], dict[str, Any]]
    """Returns a greedy streaming request with this maximum number of tokens."""
    tokens: Callable[[Mapping[str, Any]], int | None]
    """Returns the number of tokens from the object of the stream that has it, and None from the others."""


def _messages_body(messages: list[Message], max_tokens: int) -> dict[str, Any]:
    return {
        "model": "default",
        "messages": messages,
        "temperature": 0,
        "max_tokens": max_tokens,
        "stream": True,
    }


def _responses_body(messages: list[Message], max_tokens: int) -> dict[str, Any]:
    return {
        "model": "default",
        "input": messages,
        "temperature": 0,
        "max_output_tokens": max_tokens,
        "store": False,
        "stream": True,
    }


def _responses_tokens(event: Mapping[str, Any]) -> int | None:
    response = event.get("response") or {}
    return response["usage"]["output_tokens"] if response.get("usage") else None


def _ollama_body(messages: list[Message], max_tokens: int) -> dict[str, Any]:
    return {"model": "default", "messages": messages, "options": {"temperature": 0, "num_predict": max_tokens}}


DIALECTS: Mapping[str, Dialect] = {
    CHAT: Dialect(
        path="/v1/chat/completions",
        body=lambda messages, max_tokens: prompts.chat_body(messages, max_tokens=max_tokens),
        tokens=lambda chunk: (chunk.get("usage") or {}).get("completion_tokens"),
    ),
    "Messages": Dialect(
        path="/v1/messages",
        body=_messages_body,
        tokens=lambda event: event["usage"]["output_tokens"] if event.get("type") == "message_delta" else None,
    ),
    "Responses": Dialect(path="/v1/responses", body=_responses_body, tokens=_responses_tokens),
    "Ollama": Dialect(path="/api/chat", body=_ollama_body, tokens=lambda line: line.get("eval_count")),
}
"""The measured formats. To measure another format, add a row."""


def measure(bench: Bench) -> list[Row]:
    with lab_server(bench.folder) as server:
        return [_compare(bench, server, name) for name in DIALECTS if name != CHAT]


def _compare(bench: Bench, server: LabServer, name: str) -> Row:
    """Run the chat format and another one on the same prompts, in alternating order."""
    samples: list[dict[str, float]] = []
    for number in range(QUICK_PAIRS if bench.quick else PAIRS):
        order = [CHAT, name] if number % 2 == 0 else [name, CHAT]
        samples.append({each: _token_ms(bench, server, DIALECTS[each], number) for each in order})
    times = {each: median(sample[each] for sample in samples) for each in (CHAT, name)}
    return Row(
        figure=FIGURE,
        case=f"{name}, {STREAMS} greedy streams",
        model=bench.model,
        value=median(sample[name] / sample[CHAT] for sample in samples),
        limit=LIMIT,
        summary=f"{times[name]:.3f} against {times[CHAT]:.3f} ms",
        detail={"samples": samples},
    )


def _token_ms(bench: Bench, server: LabServer, dialect: Dialect, number: int) -> float:
    """Return the CPU time of the server for each token, in milliseconds."""
    chats = [prompts.story(100 * number + stream) for stream in range(STREAMS)]
    bodies = [dialect.body(chat, bench.sizes.together_tokens) for chat in chats]
    before = server.cpu_s()
    answers = asyncio.run(_read_all(server.url, dialect.path, bodies))
    return (server.cpu_s() - before) * 1e3 / sum(_count(dialect, answer) for answer in answers)


async def _read_all(url: str, path: str, bodies: list[dict[str, Any]]) -> list[bytes]:
    return list(await asyncio.gather(*(_read(url, path, body) for body in bodies)))


async def _read(url: str, path: str, body: dict[str, Any]) -> bytes:
    """Send a request, and return the whole response. It is parsed later, because the client uses the same cores."""
    to = urlsplit(url)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {to.netloc}\r\nContent-Type: application/json\r\nConnection: close\r\n"
    reader, writer = await asyncio.open_connection(to.hostname, to.port)
    try:
        writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        pieces = []
        while piece := await reader.read(PIECE_BYTES):
            pieces.append(piece)
    finally:
        writer.close()
    return b"".join(pieces)


def _count(dialect: Dialect, response: bytes) -> int:
    """Return the number of tokens of a streamed answer."""
    for line in reversed(response.decode().splitlines()):
        text = line.removeprefix("data: ")
        if text.startswith("{") and (tokens := dialect.tokens(json.loads(text))) is not None:
            return tokens
    raise BenchError(f"{dialect.path} has not answered with a number of tokens: {response[:300]!r}")
