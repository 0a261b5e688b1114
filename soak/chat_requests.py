"""Send chat requests, and classify how each ended: with an answer, with an error, or without either."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Literal

from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake

from benchmarks import client, prompts
from lmx_lab.errors import ConnectionLostError, LabError, UnreachableError
from soak.report import Row

Body = dict[str, Any]
Mode = Literal["SSE", "WebSocket", "whole"]
MODES: tuple[Mode, ...] = ("SSE", "WebSocket", "whole")
FINISHED = ("stop", "length")
CUT = "cut"
"""Outcome of a request whose connection was closed without an end of the answer."""
HUNG = "hung"
REFERENCE_TOKENS = 12
REFERENCE_S = 2.0
"""Limit for a short answer of an idle server."""
TIMEOUT_S = 30.0
"""Time after which a request counts as hung."""


@dataclass(frozen=True, kw_only=True)
class ChatResult:
    """How a chat request ended."""

    outcome: str
    """A finish reason, an error code, ``CUT`` or ``HUNG``."""
    text: str = ""
    seconds: float = 0.0

    @property
    def finished(self) -> bool:
        return self.outcome in FINISHED


def long_body(seed: int, tokens: int, *, words: int = 5) -> Body:
    """Return a request whose answer has exactly ``tokens`` tokens."""
    return prompts.chat_body(prompts.history(seed, words + 45), max_tokens=tokens, ignore_eos=True)


def reference_body(seed: int = 0) -> Body:
    """Return a short request with the same answer every time."""
    return prompts.chat_body(prompts.brief(seed), max_tokens=REFERENCE_TOKENS, ignore_eos=True)


async def send_chat(url: str, body: Body, *, mode: Mode = "whole", limit_s: float = 60.0) -> ChatResult:
    """Send a chat request and read the answer to its end."""
    began = time.perf_counter()
    texts: list[str] = []
    outcome = CUT
    try:
        async with asyncio.timeout(limit_s), aclosing(_PARTS[mode](url, body)) as parts:
            async for text, result in parts:
                texts.append(text)
                outcome = result or outcome
    except TimeoutError:
        outcome = HUNG
    except (ConnectionLostError, UnreachableError, OSError, ConnectionClosed, InvalidHandshake):
        outcome = CUT
    except LabError as exc:
        outcome = exc.code
    return ChatResult(outcome=outcome, text="".join(texts), seconds=time.perf_counter() - began)


async def send_chats(url: str, bodies: list[Body], *, mode: Mode = "whole", limit_s: float = 60.0) -> list[ChatResult]:
    return list(await asyncio.gather(*(send_chat(url, body, mode=mode, limit_s=limit_s) for body in bodies)))


async def _read_whole(url: str, body: Body) -> AsyncGenerator[tuple[str, str], None]:
    document = await client.whole(url, body)
    choice = document["choices"][0]
    yield choice["message"]["content"] or "", choice["finish_reason"]


async def _read_stream(url: str, body: Body) -> AsyncGenerator[tuple[str, str], None]:
    """Yield pieces of text, and the finish reason once the stream has ended with ``[DONE]``."""
    reason = ""
    async with client.SentRequest(url, body) as request, aclosing(request.data()) as lines:
        async for _, line in lines:
            if line == client.DONE:
                yield "", reason
                continue
            chunk = json.loads(line)
            if "error" in chunk:
                reason = chunk["error"]["code"]
                yield "", reason
            for choice in chunk.get("choices", ()):
                reason = choice.get("finish_reason") or reason
                yield choice.get("delta", {}).get("content") or "", ""


async def _read_socket(url: str, body: Body) -> AsyncGenerator[tuple[str, str], None]:
    sent = {name: value for name, value in body.items() if not name.startswith("stream")}
    async with connect(f"{url.replace('http', 'ws', 1)}/v1/chat/stream", max_queue=None, proxy=None) as socket:
        await socket.send(json.dumps(sent))
        async for text in socket:
            message = json.loads(text)
            if "error" in message:
                # The server then closes the socket with an error code.
                yield "", message["error"]["code"]
                return
            if message.get("done"):
                yield "", message["stats"]["finish_reason"]
                return
            yield message["token"], ""


_PARTS = {"SSE": _read_stream, "WebSocket": _read_socket, "whole": _read_whole}


class ReferenceChat:
    """A request that must always get the same answer as the first time, before any fault."""

    def __init__(self, text: str) -> None:
        self._text = text

    @classmethod
    async def record(cls, url: str) -> ReferenceChat:
        """Send the request twice: this warms the caches, and checks that the answer does not change by itself."""
        results = [await send_chat(url, reference_body()) for _ in range(2)]
        assert results[0].finished, results[0]
        assert results[0].text, "the answer has no text"
        assert results[0].text == results[1].text, "the same request got two different answers"
        return cls(results[0].text)

    async def repeat(self, url: str, *, limit_s: float = 60.0) -> ChatResult:
        """Send the request again; the outcome is ``wrong`` if the text is not that of the first answer."""
        result = await send_chat(url, reference_body(), limit_s=limit_s)
        if result.finished and result.text != self._text:
            return ChatResult(outcome="wrong", text=result.text, seconds=result.seconds)
        return result


def record_reference(row: Row, result: ChatResult, *, bound_s: float = REFERENCE_S) -> None:
    """Record whether the reference request was answered correctly and in time."""
    if result.finished and result.seconds <= bound_s:
        row.slowest_s = max(row.slowest_s, round(result.seconds, 2))
    elif result.finished or result.outcome == HUNG:
        row.hung += 1
        row.wrong.append(f"the reference request took {result.seconds:.1f} s ({result.outcome}); at most {bound_s:g} s")
    else:
        row.lost += 1
        row.wrong.append(f"the reference request ended with {result.outcome}: {result.text[:80]!r}")
