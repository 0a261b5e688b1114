"""Reads the chunks of streamed chat answers from servers of any make. Pure.

This is the only reader of such chunks: the chat client, the daemon's model client and the benchmark use it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pydantic_core

from lmx_lab.client.errors import CHAT_SERVER, CHECK, error_in_chat_event
from lmx_lab.errors import EngineError, WrongServerError

CALLS = 128
CALL_CHARACTERS = 1_000_000
"""Maximum length of all arguments of one answer."""
HALF = re.compile("[\ud800-\udfff]")
"""Half of a surrogate pair, which is no character by itself."""
MAX_COUNT = 2**53
"""Larger counts and measurements are ignored."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CallPiece:
    """The part of a tool call that one chunk has."""

    index: int | None = None
    """Some servers omit it; others send 0 for every call."""
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenUsage:
    """Token counts as the server reports them; None if it does not."""

    prompt: int | None
    completion: int | None
    cached: int | None = None
    """Tokens of the prompt that the server had in its cache."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """The content of one chunk of an answer; most chunks have one kind of content."""

    text: str = ""
    thinking: str = ""
    calls: tuple[CallPiece, ...] = ()
    finish_reason: str | None = None
    """``stop``, ``length``, ``tool_calls``, ``function_call``, ``content_filter``, or a word of the server's own."""
    usage: TokenUsage | None = None
    """Of the answer so far; the last one counts."""
    model: str | None = None
    """The name of the model that answers, as the server reports it."""
    remark: str | None = None
    """The state of a request that has no content yet."""
    timings: Mapping[str, Any] | None = None
    """As llama.cpp and LMX Lab send them."""

    @property
    def has_output(self) -> bool:
        """Whether it has a part of the answer."""
        return bool(self.text or self.thinking or self.calls)


class ChunkReader:
    """Reads the chunks of one answer.

    Args:
        url: The server's address, for error messages.
    """

    def __init__(self, url: str) -> None:
        self.finished = False
        """Whether a chunk had the end of the answer."""
        self._url = url
        self._text, self._thinking = _SurrogateJoiner(), _SurrogateJoiner()

    def read(self, data: str) -> Piece | None:
        """Read the data of one server-sent event, or a whole answer. Returns None if it is blank.

        Raises:
            LabError: the error in the chunk, or the data is not a chunk.
        """
        chunk = _parsed(data)
        if not isinstance(chunk, dict):
            if not data.strip():
                return None
            raise error_in_chat_event(data, self._url) or WrongServerError(
                f"{self._url} sent {data[:80]!r} in a stream, unlike {CHAT_SERVER.kind}; {CHECK}"
            )
        choices = chunk.get("choices")
        # Some servers have "error": null in every chunk.
        if (chunk.get("error") or not choices) and (error := error_in_chat_event(data, self._url)) is not None:
            raise error
        choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
        # Of several answers, only the first is read.
        return self._piece(chunk, choice if choice.get("index") in (None, 0) else {})

    def _piece(self, chunk: dict[str, Any], choice: dict[str, Any]) -> Piece:
        message = choice.get("message")
        is_whole = isinstance(message, dict)
        delta = message if is_whole else choice.get("delta")
        reason = _name(choice.get("finish_reason"))
        self.finished = self.finished or reason is not None or is_whole
        usage, timings = chunk.get("usage"), chunk.get("timings")
        text, thinking, calls = self._output(delta) if isinstance(delta, dict) else ("", "", ())
        return Piece(
            text=text,
            thinking=thinking,
            calls=calls,
            finish_reason=reason,
            usage=_usage(usage) if isinstance(usage, dict) else None,
            model=_name(chunk.get("model")),
            timings=timings if isinstance(timings, dict) else None,
        )

    def _output(self, delta: dict[str, Any]) -> tuple[str, str, tuple[CallPiece, ...]]:
        """Text, thoughts and calls of a delta or a message."""
        text, inner = _content(delta.get("content"))
        text = self._text.joined(text or _string(delta.get("refusal")))
        thinking = _string(delta.get("reasoning_content")) or _string(delta.get("reasoning")) or inner
        calls = tuple(_calls(delta)) if "tool_calls" in delta or "function_call" in delta else ()
        return text, self._thinking.joined(thinking), calls


def count(value: Any) -> int | None:
    """A count in a server's answer; None if it is not a plausible one."""
    found = number(value)
    return None if found is None else int(found)


def number(value: Any) -> float | None:
    """A measurement in a server's answer; None if it is not a plausible one."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and 0 <= value <= MAX_COUNT else None


def _usage(value: dict[str, Any]) -> TokenUsage:
    details = value.get("prompt_tokens_details")
    return TokenUsage(
        prompt=count(value.get("prompt_tokens")),
        completion=count(value.get("completion_tokens")),
        cached=count(details.get("cached_tokens")) if isinstance(details, dict) else None,
    )


def _parsed(data: str) -> Any:
    try:
        return pydantic_core.from_json(data)
    except ValueError:
        pass
    try:
        # It also accepts half surrogate pairs.
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def _string(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _name(value: Any) -> str | None:
    """A string that comes in one chunk; half surrogate pairs in it are replaced."""
    return HALF.sub("\ufffd", value) if isinstance(value, str) and value else None


def _content(value: Any) -> tuple[str, str]:
    """Text and thoughts of a message's content, which Mistral sends as a list of parts."""
    if not isinstance(value, list):
        return _string(value), ""
    parts = [part for part in value if isinstance(part, dict)]
    text = "".join(_string(part.get("text")) for part in parts)
    return text, "".join(_content(part.get("thinking"))[0] for part in parts)


def _calls(delta: dict[str, Any]) -> Iterator[CallPiece]:
    if isinstance(given := delta.get("tool_calls"), list):
        yield from (_call(item) for item in given if isinstance(item, dict))
    if isinstance(older := delta.get("function_call"), dict):
        yield _call({"index": 0, "function": older})


def _call(item: dict[str, Any]) -> CallPiece:
    function = item.get("function")
    function = function if isinstance(function, dict) else {}
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


class _SurrogateJoiner:
    """Joins surrogate pairs that a server has split between two chunks, as JavaScript does."""

    def __init__(self) -> None:
        self._half = ""

    def joined(self, text: str) -> str:
        if not text or not (self._half or HALF.search(text)):
            return text
        text, self._half = self._half + text, ""
        if "\ud800" <= text[-1] <= "\udbff":
            text, self._half = text[:-1], text[-1]
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


# Tool calls


@dataclass(frozen=True, kw_only=True)
class WholeCall:
    """A complete tool call."""

    id: str | None
    name: str
    arguments: str
    """As the model wrote them, usually JSON."""


@dataclass(kw_only=True)
class _Growing:
    id: str | None
    name: str
    arguments: list[str] = field(default_factory=list)


class CallAssembly:
    """Assembles the tool calls of one answer from their parts."""

    def __init__(self) -> None:
        self._calls: list[_Growing] = []
        self._by_index: dict[int, _Growing] = {}
        self._characters = 0

    def add(self, piece: CallPiece) -> None:
        """Add a part.

        Raises:
            EngineError: more calls, or longer ones, than any answer may have.
        """
        call = self._continued(piece) or self._started(piece)
        call.id = call.id or piece.id
        call.name = call.name or piece.name or ""
        self._characters += len(piece.arguments)
        if self._characters > CALL_CHARACTERS:
            raise EngineError(f"the model's tool calls have more than {CALL_CHARACTERS:,} characters; ask for less")
        if piece.arguments:
            call.arguments.append(piece.arguments)

    def _continued(self, piece: CallPiece) -> _Growing | None:
        """The call that the part continues; None if it starts one."""
        if piece.index is None:
            # Without an index, a part with a name or a new id starts another call.
            known = next((call for call in self._calls if piece.id and call.id == piece.id), None)
            latest = self._calls[-1] if self._calls and not piece.name and not piece.id else None
            return known or latest
        call = self._by_index.get(piece.index)
        # Ollama has sent every call under the index 0.
        is_another = call is not None and piece.id and call.id and piece.id != call.id and piece.name
        return None if is_another else call

    def _started(self, piece: CallPiece) -> _Growing:
        if len(self._calls) == CALLS:
            raise EngineError(f"the model asked for more than {CALLS} tool calls at once; ask for less")
        call = _Growing(id=piece.id, name=piece.name or "")
        self._calls.append(call)
        if piece.index is not None:
            self._by_index[piece.index] = call
        return call

    def calls(self) -> tuple[WholeCall, ...]:
        """The complete calls, in the order in which they started."""
        return tuple(WholeCall(id=call.id, name=call.name, arguments="".join(call.arguments)) for call in self._calls)
