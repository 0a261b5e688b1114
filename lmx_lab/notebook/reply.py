"""Define the replies and model lists that the methods of ``Lab`` return, and their display in a notebook."""

from __future__ import annotations

import html
import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, Self
from uuid import uuid4

from pydantic import BaseModel

from lmx_lab.backend import AnswerCost, AnswerStream, Backend, LabAccess, next_or_none, read_answer
from lmx_lab.instrument.answer import TokenAnswer
from lmx_lab.instrument.branches import HasTokens
from lmx_lab.instrument.lens import TokenTable
from lmx_lab.results.tables import align_columns, html_table
from lmx_lab.values.outputs import (
    Delta,
    GenerationReport,
    ToolCallDelta,
    merge_deltas,
    merge_tool_calls,
    whole_characters,
)
from lmx_lab.wire.admin import ModelRecord, ModelRecords
from lmx_lab.wire.chat import ChatRequest
from lmx_lab.wire.generation import Timings, Usage

UPDATE_S = 0.1
"""Minimum time between two updates. Each one contains the whole text."""
CHARACTERS_PER_S = 500_000
"""Maximum amount of text that is sent to the browser."""
STYLE = "white-space: pre-wrap; word-break: normal; overflow-wrap: anywhere"
"""Style that breaks lines between words. Notebooks also break lines of printed text within words."""
_CODE = re.compile(
    r"^(?P<indent> *)(?P<fence>`{3,}|~{3,})[^`\n]*\n(?P<block>.*?)(?:^ *(?P=fence)[`~]* *$|\Z)"
    r"|(?P<ticks>`+)(?P<inline>[^`\n]+)(?P=ticks)(?!`)",
    re.MULTILINE | re.DOTALL,
)


def safe_markdown(text: str) -> str:
    """Return Markdown that displays this text, and that no parser converts to HTML, a link or an image.

    A model's text is untrusted, notebooks run scripts in trusted outputs, and an image would be fetched from another
    host. Parsers differ in what they treat as code, so the characters of code are also escaped.
    """
    pieces, end = [], 0
    for match in _CODE.finditer(text):
        if match["block"] is None:
            code = f"<code>{_references(match['inline'])}</code>"
        else:
            # On one line, because an HTML block in a list ends where the indentation of the list ends.
            code = f"{match['indent']}<pre><code>{_references(match['block'])}</code></pre>\n"
        pieces += [_safe_prose(text[end : match.start()]), code]
        end = match.end()
    return "".join([*pieces, _safe_prose(text[end:])])


def _safe_prose(text: str) -> str:
    text = text.replace("&", "&amp;").replace("<", "&lt;")
    # "](" and "]:" belong to links, images and link definitions, "][" to references.
    return re.sub(r"\](?=[(:\[])", "&#93;", text)


def _references(text: str) -> str:
    """Replace all characters except letters, digits and spaces by character references."""
    return "".join(char if char.isalnum() or char == " " else f"&#{ord(char)};" for char in text)


JsonShape = type[BaseModel] | Literal["json"] | None
"""The expected content of an answer: JSON for a class, any JSON, or other text (None)."""


def json_shape(response_format: Any) -> JsonShape:
    """Return the expected content of an answer with this ``response_format``."""
    if isinstance(response_format, type):
        return response_format if issubclass(response_format, BaseModel) else None
    kind = response_format.get("type") if isinstance(response_format, Mapping) else None
    return "json" if kind in ("json_object", "json_schema") else None


@dataclass(frozen=True, kw_only=True, repr=False)
class ReplyToolCall:
    """A function call that the model requests."""

    id: str
    name: str
    arguments: str
    """A JSON object, as the model wrote it."""

    @property
    def parsed(self) -> dict[str, Any] | None:
        """The arguments; None if their text is not a JSON object, for example because the answer was cut off."""
        try:
            value = json.loads(self.arguments or "{}")
        except (ValueError, RecursionError):
            return None
        return value if isinstance(value, dict) else None

    def __str__(self) -> str:
        return f"{self.name}({self.arguments})"

    def __repr__(self) -> str:
        return f"<call {self}, id {self.id}>"


def tool_calls(pieces: Iterable[ToolCallDelta]) -> tuple[ReplyToolCall, ...]:
    """Assemble complete calls from their pieces, in the order in which they started."""
    return tuple(
        ReplyToolCall(id=call.id or "", name=call.name or "", arguments=call.arguments)
        for call in merge_tool_calls(pieces)
    )


@dataclass(frozen=True, kw_only=True, repr=False)
class Reply(HasTokens):
    """A complete answer and its cost."""

    text: str
    reasoning: str = ""
    """The model's thoughts, if its chat template separates them from the answer."""
    tool_calls: tuple[ReplyToolCall, ...] = ()
    """The calls that the model requests; answer each with a message of the role ``tool``."""
    model: str
    finish_reason: str
    usage: Usage
    timings: Timings
    """The server's measurements."""
    ttft_s: float
    """Seconds from the call to the first token, measured by the caller. Includes the time of the network."""
    report: GenerationReport | None = None
    """The engine's report; None if the engine runs in another process."""
    logprobs: TokenTable | None = None
    """The tokens with their log-probabilities, if the request has ``logprobs``."""
    shape: JsonShape = None
    """The expected content of the text."""
    prompt_ids: tuple[int, ...] = field(default=(), repr=False)
    """Token ids of the rendered prompt; empty if the engine runs in another process."""
    ids: tuple[int, ...] = field(default=(), repr=False)
    """Token ids of the answer; empty if the engine runs in another process, or did not report all of them."""
    _request: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """The request as in a ``Record``; empty if the engine runs in another process."""
    _lab: LabAccess | None = field(default=None, repr=False, compare=False)

    @classmethod
    def of(cls, answer: Delta, cost: AnswerCost, shape: JsonShape = None, *, lab: LabAccess | None = None) -> Self:
        """Return the reply for a complete answer, given as one delta.

        Args:
            lab: The lab that can score the answer.
        """
        return cls(
            text=answer.text,
            reasoning=answer.reasoning,
            tool_calls=tool_calls(answer.tool_calls),
            model=cost.model,
            finish_reason=cost.finish_reason,
            usage=cost.usage,
            timings=cost.timings,
            ttft_s=cost.ttft_s,
            report=cost.report,
            logprobs=TokenTable(answer.logprobs) if answer.logprobs else None,
            shape=shape,
            prompt_ids=cost.prompt,
            ids=answer.ids if len(answer.ids) == answer.tokens else (),
            _request=cost.request,
            _lab=lab,
        )

    def __getstate__(self) -> dict[str, Any]:
        # A copy in another process cannot use the lab.
        return {name: value for name, value in self.__dict__.items() if name != "_tree"} | {"_lab": None}

    @property
    def _tokens(self) -> TokenAnswer:
        return TokenAnswer(
            request=self._request,
            model=self.model,
            prompt=self.prompt_ids,
            ids=self.ids,
            text=self.text,
            reasoning=self.reasoning,
            calls=bool(self.tool_calls),
            finish_reason=self.finish_reason,
            logprobs=tuple(self.logprobs or ()),
        )

    @property
    def parsed(self) -> Any:
        """The value of a JSON answer: an instance of the class that was passed as ``response_format``, or a value of
        built-in types. None if the request did not ask for JSON, or if the answer was cut off.

        Raises:
            pydantic.ValidationError: the value violates a check of the class that its JSON schema does not contain.
        """
        if (value := self._json()) is None:
            return None
        return self.shape.model_validate_json(self.text) if isinstance(self.shape, type) else value[0]

    def _json(self) -> tuple[Any] | None:
        """Return a tuple with the value of a complete JSON answer, which may be ``null``; None if there is none."""
        try:
            return (json.loads(self.text),) if self.shape is not None else None
        except (ValueError, RecursionError):
            return None

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message for the next prompt; the results of its calls follow it."""
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in self.tool_calls
        ]
        return {"role": "assistant", "content": self.text, **({"tool_calls": calls} if calls else {})}

    @property
    def tokens_per_second(self) -> float:
        """The decode speed."""
        return self.timings.predicted_per_second

    @property
    def reasoning_tokens(self) -> int:
        """Number of the completion's tokens that are thoughts."""
        return self.usage.completion_tokens_details.reasoning_tokens

    def __str__(self) -> str:
        return whole_characters(self.text) if self.finish_reason == "length" else self.text

    def __repr__(self) -> str:
        thoughts = [f"[{self._thoughts()}: see .reasoning]"] if self.reasoning else []
        text = [self._indented() or str(self)] if self.text or not self.tool_calls else []
        calls = ["\n".join(f"→ {call}" for call in self.tool_calls)] if self.tool_calls else []
        return "\n\n".join([*thoughts, *text, *self._notes(), *calls, f"{self.model} · {self._cost()}"])

    def _indented(self) -> str | None:
        """Return a JSON answer with indentation; None if the text is not JSON."""
        value = self._json()
        return None if value is None else json.dumps(value[0], indent=2, ensure_ascii=False)

    def _notes(self) -> list[str]:
        if self.shape is None or not self.text or self._json() is not None:
            return []
        return ["[The JSON is not complete, and .parsed is None; raise max_tokens.]"]

    def _repr_markdown_(self) -> str:
        thoughts = []
        if self.reasoning:
            # On one line, because an HTML block in a list ends where the indentation of the list ends.
            lines = "<br>".join(map(_references, self.reasoning.strip().splitlines()))
            title = _references(self._thoughts())
            thoughts = [f"<details><summary>{title}</summary><small>{lines}</small></details>"]
        indented = self._indented()
        shown = safe_markdown(str(self)) if indented is None else f"<pre><code>{_references(indented)}</code></pre>"
        text = [shown] if self.text or not self.tool_calls else []
        text += self._notes()
        calls = [f"→ <code>{_references(str(call))}</code>" for call in self.tool_calls]
        return "\n\n".join([*thoughts, *text, *calls, f"<small>{_references(self.model)} · {self._cost()}</small>"])

    def _thoughts(self) -> str:
        return f"thoughts, {self.reasoning_tokens} tokens"

    def _cost(self) -> str:
        speed = f"{self.usage.completion_tokens} tokens, {self.tokens_per_second:.1f} tok/s"
        return f"{speed} · first token in {self.ttft_s:.2f} s"


async def read_reply(
    backend: Backend, request: ChatRequest, shape: JsonShape = None, *, lab: LabAccess | None = None
) -> Reply:
    """Generate a complete answer and return it. Cancelling this stops the generation."""
    answer, cost = await read_answer(backend, request)
    return Reply.of(answer, cost, shape, lab=lab)


class ReplyStream:
    """A stream of text as it is generated: ``for piece in stream`` or ``async for``.

    After the last piece, ``reply`` is the complete reply. Leaving the loop early stops the generation, as does
    ``close()``. ``show()``, or the stream as the last line of a cell, displays the text while it is generated.
    """

    def __init__(self, stream: AnswerStream, lab: LabAccess, shape: JsonShape = None) -> None:
        self._stream: AnswerStream | None = stream
        self._lab = lab
        self._shape: JsonShape = shape
        self._deltas: list[Delta] = []
        self.reply: Reply | None = None
        """The reply, once the generation has ended; stays None if it was stopped."""

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join([delta.text for delta in self._deltas])

    @property
    def reasoning(self) -> str:
        """The thoughts so far; they precede the text, and iterating skips them."""
        return "".join([delta.reasoning for delta in self._deltas])

    def __repr__(self) -> str:
        state = "ended" if self._stream is None else "running: iterate it for its text, or close() it"
        return f"<ReplyStream, {state}>"

    def __iter__(self) -> Iterator[str]:
        for delta in self._read():
            if delta.text:
                yield delta.text

    def _read(self) -> Iterator[Delta]:
        try:
            while self._stream is not None and (delta := self._lab.portal.run(next_or_none(self._stream))) is not None:
                self._deltas.append(delta)
                yield delta
            self._end()
        finally:
            self.close()

    def show(self) -> Reply | None:
        """Display the text while it is generated, with line breaks between words. Then display and return the reply.

        In a terminal, the text is printed. Returns None if the stream was stopped before its end.
        """
        with LiveText() as view:
            for _ in self._read():
                view.update(self.reasoning, self.text)
            view.end(self.reply or self.text)
        return self.reply

    def _ipython_display_(self) -> None:
        self.show()

    def __aiter__(self) -> _AsyncPieces:
        return _AsyncPieces(self)

    def close(self) -> None:
        """Stop the generation. Returns immediately; can be called from any thread and in a finalizer. Idempotent."""
        stream, self._stream = self._stream, None
        if stream is not None:
            # Deleting the stream is not enough, because the traceback of an interrupted cell refers to it.
            stream.close()

    async def aclose(self) -> None:
        self.close()

    async def _piece(self) -> str | None:
        while (
            self._stream is not None and (delta := await self._lab.portal.call(next_or_none(self._stream))) is not None
        ):
            self._deltas.append(delta)
            if delta.text:
                return delta.text
        self._end()
        return None

    def _end(self) -> None:
        if self._stream is not None:
            cost = self._lab.backend.cost(self._stream)
            self.reply = Reply.of(merge_deltas(self._deltas), cost, self._shape, lab=self._lab)
        self.close()


class LiveText:
    """The display of one answer, as a context manager. The last text is always displayed when the block ends."""

    def __init__(self) -> None:
        # Imported here, because IPython is optional, and not needed in a script.
        from IPython.core.getipython import get_ipython

        self._shell: Any = get_ipython()
        self._in_kernel = getattr(self._shell, "kernel", None) is not None
        self._display_id: str | None = None
        self._latest = ("", "")
        self._shown = ("", "")
        self._next_at = 0.0

    def update(self, reasoning: str, text: str) -> None:
        """Show the current text. Updates within a short time are combined."""
        self._latest = reasoning, text
        if time.monotonic() >= self._next_at:
            self._show()

    def end(self, result: Any) -> None:
        """Replace the text with the complete reply, or with the incomplete text if the stream was stopped."""
        if not self._in_kernel:
            self._show()
            print("" if isinstance(result, str) else f"\n\n{repr(result).rsplit(chr(10), 1)[-1]}")
        elif isinstance(result, str):
            self._send(_bundle("", result))
        else:
            self._send(*self._shell.display_formatter.format(result))
        self._shown = self._latest

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._shown != self._latest:
            self._show()

    def _show(self) -> None:
        reasoning, text = self._latest
        if self._in_kernel:
            self._send(_bundle(reasoning, text))
        else:
            print(text[len(self._shown[1]) :], end="", flush=True)
        self._shown = self._latest
        self._next_at = time.monotonic() + max(UPDATE_S, (len(reasoning) + len(text)) / CHARACTERS_PER_S)

    def _send(self, data: dict[str, Any], metadata: dict[str, Any] | None = None) -> None:
        from IPython.display import publish_display_data  # IPython is optional.

        is_update = self._display_id is not None
        self._display_id = self._display_id or uuid4().hex
        publish_display_data(data, metadata, transient={"display_id": self._display_id}, update=is_update)  # type: ignore[no-untyped-call]


def _bundle(reasoning: str, text: str) -> dict[str, str]:
    thoughts = f"<small>{html.escape(reasoning)}</small>\n" if reasoning and not text else ""
    return {"text/plain": text, "text/html": f'<div style="{STYLE}">{thoughts}{html.escape(text)}</div>'}


class _AsyncPieces:
    """The iterator of one ``async for`` over a stream; deleting it stops the generation.

    It is not an async generator, because deleting one starts a task that nothing awaits.
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


SHOWN_FIELDS = ("id", "loaded", "pinned", "kind", "format", "engine", "quantization", "size_gb", "context_length")


class ModelList(list[ModelRecord]):
    """Model records, displayed as a table."""

    notes: tuple[str, ...] = ()
    """Lines below the table, which state the faster engine and why some models cannot be loaded."""

    @classmethod
    def of(cls, found: ModelRecords) -> Self:
        """Return a list of the records, with its notes."""
        made = cls(found.models)
        problems = dict.fromkeys(record.problem for record in found.models if record.problem)
        made.notes = (*([found.preference.detail] if found.preference else []), *problems)
        return made

    def __repr__(self) -> str:
        rows = [SHOWN_FIELDS, *(_cells(record) for record in self)]
        return "\n".join([*align_columns(rows), *self.notes])

    def _repr_html_(self) -> str:
        notes = "".join(f"<div>{html.escape(note)}</div>" for note in self.notes)
        return f"{html_table(SHOWN_FIELDS, map(_cells, self))}{notes}"


def _cells(record: ModelRecord) -> tuple[str, ...]:
    loaded = record.loaded if record.unloading is None else str(record.unloading)
    return tuple(_cell(loaded if name == "loaded" else getattr(record, name)) for name in SHOWN_FIELDS)


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else ""
    return f"{value:.3f}" if isinstance(value, float) else "" if value is None else str(value)
