"""A client of any server that speaks the chat-completions format, whatever its make: strict in what it sends, lenient
in what it reads."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import httpx2
import pydantic_core

from lmx_lab.client.chat_calls import CallPiece
from lmx_lab.client.connection import LONG_BYTES, HttpConnection
from lmx_lab.client.errors import CHAT_SERVER, chat_server_error, error_in_chat_event
from lmx_lab.client.sse import Remark
from lmx_lab.errors import ConnectionLostError, InvalidRequestError, UnreachableError

DONE = "[DONE]"
NAME = "x-lmx-lab"
END_S = 2.0
"""So long after the reason of its end, a stream that stays open is taken to be done, whatever it still says."""
TAIL_S = 0.05
"""After its last word."""
HALF = re.compile("[\ud800-\udfff]")
MOST_TOKENS = 2**53
"""A count beyond it is none."""
MODELS = 1000
"""Of a server's list; more are not looked at."""


@dataclass(frozen=True, kw_only=True)
class TokenUsage:
    prompt: int
    completion: int


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What one chunk of an answer says; most say one thing."""

    text: str = ""
    thinking: str = ""
    calls: tuple[CallPiece, ...] = ()
    finish_reason: str | None = None
    """``stop``, ``length``, ``tool_calls``, ``function_call``, ``content_filter``, or a word of the server's own."""
    usage: TokenUsage | None = None
    """Of the answer so far; the last one counts."""
    model: str | None = None
    """Who answers, by the server's word."""
    remark: str | None = None
    """Where the request stands while there is nothing to show."""


class ChatFormatClient:
    """Streamed chats with one server, on one loop; each call that is closed or cancelled closes its connection.

    Args:
        base_url: With or without ``/v1`` at its end.
        api_key: It is shown nowhere.
        transport: In the place of the network.

    Raises:
        InvalidRequestError: an address or a key that could never do.
    """

    def __init__(
        self, base_url: str, api_key: str | None = None, transport: httpx2.AsyncBaseTransport | None = None
    ) -> None:
        self._connection = HttpConnection(
            base_url, api_key=api_key, transport=transport, server=CHAT_SERVER, read_error=chat_server_error
        )
        self.url = self._connection.url
        self.is_lab: bool | None = None
        """Whether it is an LMX Lab server; None until ``models`` was answered."""

    def __repr__(self) -> str:
        return f"<ChatFormatClient of {self.url}>"

    async def aclose(self) -> None:
        """Close all connections. Idempotent."""
        await self._connection.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def models(self) -> list[str]:
        """The ids that the server lists, in its order.

        Raises:
            LabError: nobody answers, or something else than a list of models.
        """
        response, text = await self._connection.get("/v1/models", limit=LONG_BYTES)
        if not response.is_success:
            raise self._connection.refused(response, text)
        try:
            document = pydantic_core.from_json(text)
            # Ollama's list is null where it has no models.
            cards = (document["data"] if isinstance(document, Mapping) else document) or []
            ids = [str(card["id"]) for card in cards[:MODELS]]
        except (ValueError, TypeError, KeyError) as exc:
            raise self._connection.refused(response, text) from exc
        self.is_lab = NAME in response.headers
        return ids

    async def stream(self, body: Mapping[str, Any]) -> AsyncGenerator[Piece, None]:
        """Ask for a chat in a stream, with usage; gives its pieces as they come.

        Raises:
            ConnectionLostError: it broke off before its end.
            LabError: the server's own, before the first piece or after any.
        """
        content = _json({**body, "stream": True, "stream_options": {"include_usage": True}})
        reader = _Reader(self.url)
        source = self._connection.events("POST", "/v1/chat/completions", content=content, whole_bytes=LONG_BYTES)
        loop, until_s = asyncio.get_running_loop(), None
        async with aclosing(source) as events:
            while (event := await _next(events, until_s)) is not None:
                if isinstance(event, Remark):
                    yield Piece(remark=event.text)
                elif event.strip() == DONE:
                    # A connection whose answer was read to its very end is used again.
                    await _next(events, loop.time() + TAIL_S)
                    return
                elif (piece := reader.read(event)) is not None:
                    if reader.finished and until_s is None:
                        until_s = loop.time() + END_S
                    yield piece
        if not reader.finished:
            raise ConnectionLostError(f"{self.url} ended the stream before the answer's end; ask again")


async def _next(events: AsyncGenerator[str | Remark, None], until_s: float | None) -> str | Remark | None:
    """The next event; None after the last, also if an answer that has its end is not followed by a proper one.

    Args:
        until_s: By the loop's clock; None while the answer has no end.
    """
    if until_s is None:
        return await anext(events, None)
    try:
        async with asyncio.timeout_at(until_s):
            return await anext(events, None)
    except (TimeoutError, UnreachableError):
        return None


def _json(body: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(body, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace")
    except (TypeError, ValueError) as exc:
        raise InvalidRequestError(f"the request cannot be written as JSON: {exc!s:.200}; give plain values") from exc


class _Reader:
    """Pieces out of the chunks of one answer."""

    def __init__(self, url: str) -> None:
        self.finished = False
        self._url = url
        self._text, self._thinking = _Halves(), _Halves()

    def read(self, event: str) -> Piece | None:
        """
        Raises:
            LabError: the error that the chunk tells of, or that it is no chunk.
        """
        if not event.strip():
            return None
        chunk = _document(event)
        if not isinstance(chunk, Mapping):
            raise error_in_chat_event(event, self._url) or UnreachableError(
                f"{self._url} sent {event[:80]!r} in a stream, unlike {CHAT_SERVER.kind}; check the address"
            )
        choices = chunk.get("choices")
        # Some servers have "error": null in every chunk.
        if (chunk.get("error") or not choices) and (error := error_in_chat_event(event, self._url)) is not None:
            raise error
        choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], Mapping) else {}
        if choice.get("index") not in (None, 0):
            choice = {}  # Of several answers the first counts.
        return self._piece(chunk, choice)

    def _piece(self, chunk: Mapping[str, Any], choice: Mapping[str, Any]) -> Piece:
        whole = choice.get("message")
        said = whole if isinstance(whole, Mapping) else choice.get("delta")
        said = said if isinstance(said, Mapping) else {}
        reason = _name(choice.get("finish_reason"))
        self.finished = self.finished or reason is not None or isinstance(whole, Mapping)
        text, inner = _content(said.get("content"))
        return Piece(
            text=self._text.joined(text or _word(said.get("refusal")) or ""),
            thinking=self._thinking.joined(
                _word(said.get("reasoning_content")) or _word(said.get("reasoning")) or inner
            ),
            calls=tuple(_calls(said)),
            finish_reason=reason,
            usage=_usage(chunk.get("usage")),
            model=_name(chunk.get("model")),
        )


def _document(event: str) -> Any:
    try:
        return pydantic_core.from_json(event)
    except ValueError:
        pass
    try:
        # It takes half characters, too, and a few things more that are no JSON.
        return json.loads(event)
    except (ValueError, RecursionError):
        return None


def _word(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _name(value: Any) -> str | None:
    """A word that comes whole: half a character in it stays one, which nobody could write down."""
    word = _word(value)
    return None if word is None else HALF.sub("\ufffd", word)


def _content(value: Any) -> tuple[str, str]:
    """Text and thoughts of a message's content, which Mistral sends in parts."""
    if not isinstance(value, list):
        return _word(value) or "", ""
    parts = [part for part in value if isinstance(part, Mapping)]
    text = "".join(_word(part.get("text")) or "" for part in parts)
    return text, "".join(_content(part.get("thinking"))[0] for part in parts)


def _usage(value: Any) -> TokenUsage | None:
    if not isinstance(value, Mapping):
        return None
    counts = [value.get(name) for name in ("prompt_tokens", "completion_tokens")]
    numbers = [count if isinstance(count, int | float) else 0 for count in counts]
    if not all(abs(number) <= MOST_TOKENS for number in numbers):
        return None  # Infinity, or no number at all by its name.
    prompt, completion = (max(0, int(number)) for number in numbers)
    return TokenUsage(prompt=prompt, completion=completion)


def _calls(said: Mapping[str, Any]) -> list[CallPiece]:
    given = said.get("tool_calls")
    calls = [_call(item) for item in given if isinstance(item, Mapping)] if isinstance(given, list) else []
    if isinstance(older := said.get("function_call"), Mapping):
        calls.append(_call({"index": 0, "function": older}))
    return calls


def _call(item: Mapping[str, Any]) -> CallPiece:
    function = item.get("function")
    function = function if isinstance(function, Mapping) else {}
    index, arguments = item.get("index"), function.get("arguments")
    if not isinstance(arguments, str):
        arguments = "" if arguments is None else json.dumps(arguments, ensure_ascii=False)
    identifier = item.get("id")
    return CallPiece(
        index=index if isinstance(index, int) and not isinstance(index, bool) else None,
        id=str(identifier) if isinstance(identifier, str | int) and identifier != "" else None,
        name=_name(function.get("name")),
        arguments=arguments,
    )


class _Halves:
    """Puts characters together that a server has sent in two halves, as JavaScript cuts them."""

    def __init__(self) -> None:
        self._half = ""

    def joined(self, text: str) -> str:
        if not text or not (self._half or HALF.search(text)):
            return text
        text, self._half = self._half + text, ""
        if "\ud800" <= text[-1] <= "\udbff":
            text, self._half = text[:-1], text[-1]
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
