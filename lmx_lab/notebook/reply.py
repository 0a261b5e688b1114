"""What the notebook's verbs return: a reply, a stream of text that ends in one, a list of models."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self, TypeVar

from lmx_lab.values.generation import GenerationReport, ToolCallDelta, merge_tool_calls
from lmx_lab.wire.admin import ModelRecord, ModelRecords
from lmx_lab.wire.generation import Timings, Usage

_CODE = re.compile(
    r"^(?P<indent> *)(?P<fence>`{3,}|~{3,})[^`\n]*\n(?P<block>.*?)(?:^ *(?P=fence)[`~]* *$|\Z)"
    r"|(?P<ticks>`+)(?P<inline>[^`\n]+)(?P=ticks)(?!`)",
    re.MULTILINE | re.DOTALL,
)


def safe_markdown(text: str) -> str:
    """Markdown that shows this text and cannot become live HTML, a link or an image, whichever parser reads it.

    A model's text is untrusted, notebooks run what trusted outputs contain, and an image would fetch a foreign address.
    Nothing here depends on where a parser sees code: code too is spelled in character references only.
    """
    pieces, end = [], 0
    for match in _CODE.finditer(text):
        pieces += [_safe_prose(text[end : match.start()]), _safe_code(match)]
        end = match.end()
    return "".join([*pieces, _safe_prose(text[end:])])


def _safe_prose(text: str) -> str:
    text = text.replace("&", "&amp;").replace("<", "&lt;")
    # "](" and "]:" are what makes a link, an image or the definition of one; "][" refers to one.
    return re.sub(r"\](?=[(:\[])", "&#93;", text)


def _safe_code(match: re.Match[str]) -> str:
    if match["block"] is None:
        return f"<code>{_references(match['inline'])}</code>"
    # On one line: an HTML block in a list would end with the list's indentation.
    return f"{match['indent']}<pre><code>{_references(match['block'])}</code></pre>\n"


def _folded(title: str, text: str) -> str:
    """Text behind its title, to be opened. On one line, for the same reason as code."""
    lines = "<br>".join(map(_references, text.strip().splitlines()))
    return f"<details><summary>{_references(title)}</summary><small>{lines}</small></details>"


def _references(text: str) -> str:
    return "".join(char if char.isalnum() or char == " " else f"&#{ord(char)};" for char in text)


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """A function that the model asks for."""

    id: str
    name: str
    arguments: str
    """JSON of an object, as the model wrote it."""

    @property
    def parsed(self) -> dict[str, Any] | None:
        """The arguments; None if their text is no JSON object, which happens where an answer was cut off."""
        try:
            value = json.loads(self.arguments or "{}")
        except (ValueError, RecursionError):
            return None
        return value if isinstance(value, dict) else None

    def __str__(self) -> str:
        return f"{self.name}({self.arguments})"


def tool_calls(pieces: Iterable[ToolCallDelta]) -> tuple[ToolCall, ...]:
    """The calls whose pieces these are, in the order in which they began."""
    return tuple(
        ToolCall(id=call.id or "", name=call.name or "", arguments=call.arguments) for call in merge_tool_calls(pieces)
    )


class Piece(Protocol):
    """A piece of an answer, such as the engine's ``Delta``."""

    @property
    def text(self) -> str: ...
    @property
    def reasoning(self) -> str: ...
    @property
    def tool_calls(self) -> Sequence[ToolCallDelta]: ...


@dataclass(frozen=True, kw_only=True)
class TextPiece:
    """One that nobody has counted the tokens of."""

    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


@dataclass(frozen=True, kw_only=True, repr=False)
class Reply:
    """A whole answer and what it cost."""

    text: str
    reasoning: str = ""
    """The model's thoughts, if it shows them."""
    tool_calls: tuple[ToolCall, ...] = ()
    """What the model asks for; answer each with a message of the role ``tool``."""
    model: str
    finish_reason: str
    usage: Usage
    timings: Timings
    """The server's own measurements."""
    ttft_s: float
    """Seconds from the call to the first token; measured by whoever called, so a network's time is in it."""
    report: GenerationReport | None = None
    """The engine's own words; None where it runs elsewhere."""

    def including(self, whole: Piece) -> Reply:
        """The same with the thoughts and the calls of the answer."""
        return replace(self, reasoning=whole.reasoning, tool_calls=tool_calls(whole.tool_calls))

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message of the next prompt, which the results of its calls follow."""
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in self.tool_calls
        ]
        return {"role": "assistant", "content": self.text, **({"tool_calls": calls} if calls else {})}

    @property
    def tokens_per_second(self) -> float:
        """Decode speed."""
        return self.timings.predicted_per_second

    @property
    def reasoning_tokens(self) -> int:
        """Those of the completion's tokens that are thoughts."""
        return self.usage.completion_tokens_details.reasoning_tokens

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        thoughts = [f"[{self._thoughts()}: see .reasoning]"] if self.reasoning else []
        text = [self.text] if self.text or not self.tool_calls else []
        calls = ["\n".join(f"→ {call}" for call in self.tool_calls)] if self.tool_calls else []
        return "\n\n".join([*thoughts, *text, *calls, f"{self.model} · {self._cost()}"])

    def _repr_markdown_(self) -> str:
        thoughts = [_folded(self._thoughts(), self.reasoning)] if self.reasoning else []
        text = [safe_markdown(self.text)] if self.text or not self.tool_calls else []
        calls = [f"→ <code>{_references(str(call))}</code>" for call in self.tool_calls]
        return "\n\n".join([*thoughts, *text, *calls, f"<small>{_references(self.model)} · {self._cost()}</small>"])

    def _thoughts(self) -> str:
        return f"thoughts, {self.reasoning_tokens} tokens"

    def _cost(self) -> str:
        speed = f"{self.usage.completion_tokens} tokens, {self.tokens_per_second:.1f} tokens/s"
        return f"{speed} · first after {self.ttft_s:.2f} s"


Cost_co = TypeVar("Cost_co", covariant=True)
Cost = TypeVar("Cost")


class Deltas(Protocol[Cost_co]):
    """A generation that is under way; dropping it ends it."""

    async def __anext__(self) -> Piece:
        """The next piece of text, until ``StopAsyncIteration``."""

    def finished(self) -> Cost_co:
        """What it cost, once it was read to its end."""

    def close(self) -> None:
        """End it if it still runs; from any thread."""


class ReplyStream:
    """Text as it is generated: ``for piece in stream`` or ``async for``. Afterwards ``reply`` has the whole.

    Leaving the loop early ends the generation, as does ``close()``.
    """

    def __init__(
        self,
        stream: Deltas[Cost],
        *,
        finish: Callable[[str, Cost], Reply],
        block: Callable[[Any], Any],
        hand_over: Callable[[Any], Awaitable[Any]],
    ) -> None:
        self._stream: Deltas[Any] | None = stream
        self._finish: Callable[[str, Any], Reply] = finish
        self._block = block
        self._hand_over = hand_over
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCallDelta] = []
        self.reply: Reply | None = None
        """Set when the generation has ended; stays None when it was left early."""

    @property
    def text(self) -> str:
        """What has come so far."""
        return "".join(self._text)

    @property
    def reasoning(self) -> str:
        """The thoughts that have come so far; they come before the text, and iterating skips them."""
        return "".join(self._reasoning)

    def __repr__(self) -> str:
        state = "ended" if self._stream is None else "running: iterate it for its text, or close() it"
        return f"<ReplyStream, {state}>"

    def __iter__(self) -> Iterator[str]:
        try:
            while self._stream is not None and (delta := self._block(_next(self._stream))) is not None:
                if text := self._take(delta):
                    yield text
            self._end()
        finally:
            self.close()

    def __aiter__(self) -> _AsyncPieces:
        return _AsyncPieces(self)

    def close(self) -> None:
        """End the generation; at once, from any thread, also in a finalizer. Idempotent."""
        stream, self._stream = self._stream, None
        if stream is not None:
            # Dropping it would not be enough: the traceback of an interrupted cell refers to it.
            stream.close()

    async def aclose(self) -> None:
        self.close()

    async def _piece(self) -> str | None:
        while self._stream is not None and (delta := await self._hand_over(_next(self._stream))) is not None:
            if text := self._take(delta):
                return text
        self._end()
        return None

    def _take(self, delta: Piece) -> str:
        self._text.append(delta.text)
        self._reasoning.append(delta.reasoning)
        self._calls += delta.tool_calls
        return delta.text

    def _end(self) -> None:
        if self._stream is not None:
            whole = TextPiece(text=self.text, reasoning=self.reasoning, tool_calls=tuple(self._calls))
            self.reply = self._finish(whole.text, self._stream.finished()).including(whole)
        self.close()


class _AsyncPieces:
    """One ``async for`` over a stream; dropping it ends the generation.

    Not an async generator: what those do when they are dropped is a task that nobody waits for.
    """

    def __init__(self, stream: ReplyStream) -> None:
        self._stream = stream

    def __aiter__(self) -> _AsyncPieces:
        return self

    async def __anext__(self) -> str:
        try:
            piece = await self._stream._piece()
        except BaseException:
            self._stream.close()
            raise
        if piece is None:
            raise StopAsyncIteration
        return piece

    def __del__(self) -> None:
        self._stream.close()


async def _next(stream: Deltas[Any]) -> Piece | None:
    return await anext(stream, None)


SHOWN = ("id", "loaded", "pinned", "kind", "format", "engine", "quantization", "size_gb", "context_length")


class ModelList(list[ModelRecord]):
    """Model records, shown as a table."""

    notes: tuple[str, ...] = ()
    """What there is to say below the table: the faster engine, and why some models cannot be loaded."""

    @classmethod
    def of(cls, found: ModelRecords) -> Self:
        made = cls(found.models)
        problems = dict.fromkeys(record.problem for record in found.models if record.problem)
        made.notes = (*([found.preference.detail] if found.preference else []), *problems)
        return made

    def __repr__(self) -> str:
        rows = [SHOWN, *(_cells(record) for record in self)]
        widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return "\n".join([*lines, *self.notes])

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{name}</th>" for name in SHOWN)
        rows = "".join(f"<tr>{_table_cells(record)}</tr>" for record in self)
        notes = "".join(f"<div>{html.escape(note)}</div>" for note in self.notes)
        return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>{notes}"


def _table_cells(record: ModelRecord) -> str:
    return "".join(f"<td>{html.escape(cell)}</td>" for cell in _cells(record))


def _cells(record: ModelRecord) -> tuple[str, ...]:
    return tuple(_cell(getattr(record, name)) for name in SHOWN)


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else ""
    return f"{value:.3f}" if isinstance(value, float) else "" if value is None else str(value)
