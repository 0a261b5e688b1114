"""Chat requests, and how each of them ended: by its own word, by an error, or without a word."""

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
from soak.row import Row

Body = dict[str, Any]
Way = Literal["SSE", "WebSocket", "whole"]
WAYS: tuple[Way, ...] = ("SSE", "WebSocket", "whole")
FINISHED = ("stop", "length")
CUT = "cut"
"""The connection ended without a word."""
HUNG = "hung"
GOOD_TOKENS = 12
GOOD_S = 2.0
"""A short answer, of a server that has nothing else to do, takes no longer."""
GIVE_UP_S = 30.0
"""After which an answer is not waited for any more."""


@dataclass(frozen=True, kw_only=True)
class End:
    outcome: str
    """A finish reason, an error's code, ``CUT`` or ``HUNG``."""
    text: str = ""
    seconds: float = 0.0

    @property
    def finished(self) -> bool:
        return self.outcome in FINISHED


def long_body(seed: int, tokens: int, *, words: int = 5) -> Body:
    """An answer of so many tokens, whatever the model says."""
    return prompts.chat_body(prompts.history(seed, words + 45), max_tokens=tokens, ignore_eos=True)


def good_body(seed: int = 0) -> Body:
    """Short, and the same answer every time."""
    return prompts.chat_body(prompts.brief(seed), max_tokens=GOOD_TOKENS, ignore_eos=True)


async def ask(url: str, body: Body, *, way: Way = "whole", limit_s: float = 60.0) -> End:
    """Ask, and read to the end, whatever that is."""
    began = time.perf_counter()
    texts: list[str] = []
    outcome = CUT
    try:
        async with asyncio.timeout(limit_s), aclosing(_PARTS[way](url, body)) as parts:
            async for text, end in parts:
                texts.append(text)
                outcome = end or outcome
    except TimeoutError:
        outcome = HUNG
    except (ConnectionLostError, UnreachableError, OSError, ConnectionClosed, InvalidHandshake):
        outcome = CUT
    except LabError as exc:
        outcome = exc.code
    return End(outcome=outcome, text="".join(texts), seconds=time.perf_counter() - began)


async def ask_all(url: str, bodies: list[Body], *, way: Way = "whole", limit_s: float = 60.0) -> list[End]:
    return list(await asyncio.gather(*(ask(url, body, way=way, limit_s=limit_s) for body in bodies)))


async def _whole(url: str, body: Body) -> AsyncGenerator[tuple[str, str], None]:
    document = await client.whole(url, body)
    choice = document["choices"][0]
    yield choice["message"]["content"] or "", choice["finish_reason"]


async def _streamed(url: str, body: Body) -> AsyncGenerator[tuple[str, str], None]:
    """An end counts when the stream is closed behind it, as the format has it."""
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


async def _on_socket(url: str, body: Body) -> AsyncGenerator[tuple[str, str], None]:
    sent = {name: value for name, value in body.items() if not name.startswith("stream")}
    async with connect(f"{url.replace('http', 'ws', 1)}/v1/chat/stream", max_queue=None, proxy=None) as socket:
        await socket.send(json.dumps(sent))
        async for text in socket:
            message = json.loads(text)
            if "error" in message:
                # It is closed behind that, with the status of a failure.
                yield "", message["error"]["code"]
                return
            if message.get("done"):
                yield "", message["stats"]["finish_reason"]
                return
            yield message["token"], ""


_PARTS = {"SSE": _streamed, "WebSocket": _on_socket, "whole": _whole}


class Good:
    """The request that must be answered rightly at any time: its first answer, when nothing had happened, is right."""

    def __init__(self, text: str) -> None:
        self._text = text

    @classmethod
    async def first(cls, url: str) -> Good:
        """Asked twice: caches are warm afterwards, and an answer that changes by itself would prove nothing."""
        ends = [await ask(url, good_body()) for _ in range(2)]
        assert ends[0].finished, ends[0]
        assert ends[0].text, "an answer without text"
        assert ends[0].text == ends[1].text, "the same request has two answers"
        return cls(ends[0].text)

    async def again(self, url: str, *, limit_s: float = 60.0) -> End:
        """Its outcome is ``wrong`` where its text is another than at first."""
        end = await ask(url, good_body(), limit_s=limit_s)
        if end.finished and end.text != self._text:
            return End(outcome="wrong", text=end.text, seconds=end.seconds)
        return end


def note_good(row: Row, end: End, *, bound_s: float = GOOD_S) -> None:
    """Whether the good request was answered, rightly and in time."""
    if end.finished and end.seconds <= bound_s:
        row.slowest_s = max(row.slowest_s, round(end.seconds, 2))
    elif end.finished or end.outcome == HUNG:
        row.hung += 1
        row.wrong.append(f"the good request took {end.seconds:.1f} s ({end.outcome}); at most {bound_s:g} s")
    else:
        row.lost += 1
        row.wrong.append(f"the good request was {end.outcome}: {end.text[:80]!r}")
