"""Read the chunks of streamed chat answers of any chat-format server. Does no I/O.

The chat client, the daemon's model client and the benchmark share this reader, which accepts what servers of other
projects send. Answers of LMX Lab's own server have the stricter shapes of ``lmx_lab.wire.chat``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pydantic_core

from lmx_lab.client.errors import CHAT_SERVER, CHECK, parse_chat_error
from lmx_lab.errors import EngineError, WrongServerError

MAX_CALLS = 128
"""Maximum number of tool calls in one answer."""
MAX_ARGUMENT_CHARACTERS = 1_000_000
"""Maximum length of the arguments of all tool calls in one answer."""
SURROGATE = re.compile("[\ud800-\udfff]")
"""Half of a surrogate pair, which is not a character."""
MAX_NUMBER = 2**53
"""Counts and measurements above this number are ignored."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCallPiece:
    """The part of a tool call in one chunk."""

    index: int | None = None
    """Position of the call in the answer. Some servers omit it; others send 0 for every call."""
    id: str | None = None
    name: str | None = None
    arguments: str = ""
    """The next characters of the call's arguments."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenUsage:
    """Token counts as reported by the server; None if it does not report them."""

    prompt: int | None
    completion: int | None
    cached: int | None = None
    """Prompt tokens that the server found in its cache."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """The content of one chunk of an answer. Most chunks have only one kind of content."""

    text: str = ""
    thinking: str = ""
    calls: tuple[ToolCallPiece, ...] = ()
    finish_reason: str | None = None
    """``stop``, ``length``, ``tool_calls``, ``function_call``, ``content_filter``, or another word of the server."""
    usage: TokenUsage | None = None
    """Token counts of the answer so far. Those of the last chunk are final."""
    model: str | None = None
    """Name of the model, as reported by the server."""
    remark: str | None = None
    """State of a request that has no output yet."""
    timings: Mapping[str, Any] | None = None
    """Measurements in the format of llama.cpp and LMX Lab."""

    @property
    def has_output(self) -> bool:
        """Whether the chunk contains text, thoughts or a tool call."""
        return bool(self.text or self.thinking or self.calls)


class ChunkReader:
    """Reads the chunks of one answer.

    Args:
        url: The server's address, for error messages.
    """

    def __init__(self, url: str) -> None:
        self.finished = False
        """Whether the end of the answer was read."""
        self._url = url
        self._text, self._thinking = _SurrogateJoiner(), _SurrogateJoiner()

    def read(self, data: str) -> Piece | None:
        """Read the data of one server-sent event, or a complete answer that is not streamed.

        Returns:
            None if the data is blank.

        Raises:
            LabError: the data contains an error, or is not a chunk.
        """
        chunk = _parse_json(data)
        if not isinstance(chunk, dict):
            if not data.strip():
                return None
            raise parse_chat_error(data, self._url) or WrongServerError(
                f"{self._url} sent {data[:80]!r} in a stream, unlike {CHAT_SERVER.kind}; {CHECK}"
            )
        choices = chunk.get("choices")
        # Some servers have "error": null in every chunk.
        if (chunk.get("error") or not choices) and (error := parse_chat_error(data, self._url)) is not None:
            raise error
        choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
        # If the server sends several answers, only the first one is read.
        return self._read_choice(chunk, choice if choice.get("index") in (None, 0) else {})

    def _read_choice(self, chunk: dict[str, Any], choice: dict[str, Any]) -> Piece:
        message = choice.get("message")
        is_complete = isinstance(message, dict)
        delta = message if is_complete else choice.get("delta")
        reason = _name(choice.get("finish_reason"))
        self.finished = self.finished or reason is not None or is_complete
        usage, timings = chunk.get("usage"), chunk.get("timings")
        text, thinking, calls = self._read_output(delta) if isinstance(delta, dict) else ("", "", ())
        return Piece(
            text=text,
            thinking=thinking,
            calls=calls,
            finish_reason=reason,
            usage=_usage(usage) if isinstance(usage, dict) else None,
            model=_name(chunk.get("model")),
            timings=timings if isinstance(timings, dict) else None,
        )

    def _read_output(self, delta: dict[str, Any]) -> tuple[str, str, tuple[ToolCallPiece, ...]]:
        """Return text, thoughts and tool calls of a delta or a message."""
        text, inner = _content(delta.get("content"))
        text = self._text.join(text or _string(delta.get("refusal")))
        thinking = _string(delta.get("reasoning_content")) or _string(delta.get("reasoning")) or inner
        calls = tuple(_calls(delta)) if "tool_calls" in delta or "function_call" in delta else ()
        return text, self._thinking.join(thinking), calls


def count(value: Any) -> int | None:
    """Return a count that a server reports; None if it is not a plausible count."""
    plausible = number(value)
    return None if plausible is None else int(plausible)


def number(value: Any) -> float | None:
    """Return a measurement that a server reports; None if it is not a plausible number."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and 0 <= value <= MAX_NUMBER else None


def _usage(value: dict[str, Any]) -> TokenUsage:
    details = value.get("prompt_tokens_details")
    return TokenUsage(
        prompt=count(value.get("prompt_tokens")),
        completion=count(value.get("completion_tokens")),
        cached=count(details.get("cached_tokens")) if isinstance(details, dict) else None,
    )


def _parse_json(data: str) -> Any:
    try:
        return pydantic_core.from_json(data)
    except ValueError:
        pass
    try:
        # Unlike pydantic, this parser accepts halves of surrogate pairs.
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def _string(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _name(value: Any) -> str | None:
    """Return a string that is never split between chunks; halves of surrogate pairs in it are replaced."""
    return SURROGATE.sub("\ufffd", value) if isinstance(value, str) and value else None


def _content(value: Any) -> tuple[str, str]:
    """Return text and thoughts of a message's content, which Mistral sends as a list of parts."""
    if not isinstance(value, list):
        return _string(value), ""
    parts = [part for part in value if isinstance(part, dict)]
    text = "".join(_string(part.get("text")) for part in parts)
    return text, "".join(_content(part.get("thinking"))[0] for part in parts)


def _calls(delta: dict[str, Any]) -> Iterator[ToolCallPiece]:
    if isinstance(given := delta.get("tool_calls"), list):
        yield from (_call(item) for item in given if isinstance(item, dict))
    if isinstance(older := delta.get("function_call"), dict):
        yield _call({"index": 0, "function": older})


def _call(item: dict[str, Any]) -> ToolCallPiece:
    function = item.get("function")
    function = function if isinstance(function, dict) else {}
    index, arguments = item.get("index"), function.get("arguments")
    if not isinstance(arguments, str):
        arguments = "" if arguments is None else json.dumps(arguments, ensure_ascii=False)
    identifier = item.get("id")
    return ToolCallPiece(
        index=index if isinstance(index, int) and not isinstance(index, bool) else None,
        id=str(identifier) if isinstance(identifier, str | int) and identifier != "" else None,
        name=_name(function.get("name")),
        arguments=arguments,
    )


class _SurrogateJoiner:
    """Joins surrogate pairs that a server has split between two chunks, as servers written in JavaScript do."""

    def __init__(self) -> None:
        self._half = ""

    def join(self, text: str) -> str:
        if not text or not (self._half or SURROGATE.search(text)):
            return text
        text, self._half = self._half + text, ""
        if "\ud800" <= text[-1] <= "\udbff":
            text, self._half = text[:-1], text[-1]
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


# Tool calls


@dataclass(frozen=True, kw_only=True)
class CompleteToolCall:
    """A complete tool call."""

    id: str | None
    name: str
    arguments: str
    """The text that the model wrote, usually JSON."""


@dataclass(kw_only=True)
class _PartialCall:
    id: str | None
    name: str
    arguments: list[str] = field(default_factory=list)


class ToolCallAssembler:
    """Assembles the tool calls of one answer from their pieces."""

    def __init__(self) -> None:
        self._calls: list[_PartialCall] = []
        self._by_index: dict[int, _PartialCall] = {}
        self._characters = 0

    def add(self, piece: ToolCallPiece) -> None:
        """Add a piece.

        Raises:
            EngineError: the answer has too many tool calls, or too long arguments.
        """
        call = self._find_continued(piece) or self._start(piece)
        call.id = call.id or piece.id
        call.name = call.name or piece.name or ""
        self._characters += len(piece.arguments)
        if self._characters > MAX_ARGUMENT_CHARACTERS:
            raise EngineError(
                f"the arguments of the model's tool calls have more than {MAX_ARGUMENT_CHARACTERS:,} characters, the "
                "limit for one answer; change the prompt so that the model writes less at once"
            )
        if piece.arguments:
            call.arguments.append(piece.arguments)

    def _find_continued(self, piece: ToolCallPiece) -> _PartialCall | None:
        """Return the call that the piece continues; None if the piece starts a call."""
        if piece.index is None:
            # Without an index, a piece with a name or a new id starts another call.
            known = next((call for call in self._calls if piece.id and call.id == piece.id), None)
            latest = self._calls[-1] if self._calls and not piece.name and not piece.id else None
            return known or latest
        call = self._by_index.get(piece.index)
        # Some versions of Ollama send every call with the index 0.
        is_another = call is not None and piece.id and call.id and piece.id != call.id and piece.name
        return None if is_another else call

    def _start(self, piece: ToolCallPiece) -> _PartialCall:
        if len(self._calls) == MAX_CALLS:
            raise EngineError(
                f"the model requested more than {MAX_CALLS} tool calls at once, the limit for one answer; change the "
                "prompt so that the model calls fewer tools at once"
            )
        call = _PartialCall(id=piece.id, name=piece.name or "")
        self._calls.append(call)
        if piece.index is not None:
            self._by_index[piece.index] = call
        return call

    def calls(self) -> tuple[CompleteToolCall, ...]:
        """Return the complete calls, in the order in which they started."""
        return tuple(
            CompleteToolCall(id=call.id, name=call.name, arguments="".join(call.arguments)) for call in self._calls
        )
