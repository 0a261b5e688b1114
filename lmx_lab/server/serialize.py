"""Write the bodies and chunks of an answer, in the chat format and in the completions format. Pure.

Chunks are written as text around the parts that change: building and dumping a pydantic model for every token would
cost more than everything else between the engine and the socket. Tests compare them with the dumps of the models.
"""

from __future__ import annotations

import codecs
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from pydantic_core import to_json

from lmx_lab.server.translate import chat_logprobs, timings, total_timings, wire_logprob
from lmx_lab.values.generation import Delta, GenerationReport, TokenLogprob, ToolCallDelta, merge_tool_calls
from lmx_lab.wire.chat import AnswerMessage, ChatCompletion, Choice, ChoiceLogprobs
from lmx_lab.wire.completions import Completion, CompletionChoice, CompletionLogprobs
from lmx_lab.wire.generation import Timings, Usage
from lmx_lab.wire.tools import AnswerFunction, AnswerToolCall


def _json(value: Any) -> str:
    return to_json(value).decode()


@dataclass(frozen=True, kw_only=True)
class ChatAnswer:
    """What all parts of one chat answer share: its id, its time, its model."""

    model: str
    fingerprint: str
    logprobs: bool = False
    """Whether the request wants log-probabilities."""
    id: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))

    def full(self, parts: Sequence[tuple[Delta, GenerationReport]], usage: Usage) -> str:
        """Return the complete body."""
        body = ChatCompletion(
            id=self.id,
            created=self.created,
            model=self.model,
            system_fingerprint=self.fingerprint,
            choices=[self._choice(index, delta, report) for index, (delta, report) in enumerate(parts)],
            usage=usage,
            timings=total_timings([[report for _, report in parts]]),
        )
        return body.model_dump_json()

    def _choice(self, index: int, delta: Delta, report: GenerationReport) -> Choice:
        logprobs = {"content": chat_logprobs(delta.logprobs)} if self.logprobs else None
        return Choice(
            index=index,
            message=_message(delta),
            logprobs=ChoiceLogprobs.model_validate(logprobs) if logprobs else None,
            finish_reason=report.finish_reason,
        )

    def first(self, index: int = 0) -> str:
        """Return the first chunk of a choice."""
        return self._chunk(index, '{"role":"assistant","content":""}')

    def pieces(self, delta: Delta, index: int = 0) -> Iterator[str]:
        """Yield the chunks of reasoning, of text and of tool calls, in this order; none for an empty delta.

        The first chunk has the log-probabilities of all.
        """
        logprobs = _json({"content": chat_logprobs(delta.logprobs), "refusal": None}) if self.logprobs else "null"
        for shown in _shown(delta):
            yield self._chunk(index, shown, logprobs)
            logprobs = "null"

    def last(self, report: GenerationReport, index: int = 0) -> str:
        """Return the last chunk of a choice."""
        end = f',"timings":{timings(report).model_dump_json()}'
        return self._chunk(index, "{}", reason=f'"{report.finish_reason}"', end=end)

    def usage(self, usage: Usage) -> str:
        """Return the chunk after the last one, for requests with ``stream_options.include_usage``."""
        return f'{self._head}],"usage":{usage.model_dump_json()}}}'

    def _chunk(self, index: int, delta: str, logprobs: str = "null", reason: str = "null", end: str = "") -> str:
        shown = f',"logprobs":{logprobs}' if self.logprobs else ""
        return f'{self._head}{{"index":{index},"delta":{delta}{shown},"finish_reason":{reason}}}]{end}}}'

    @cached_property
    def _head(self) -> str:
        return _head(self, "chat.completion.chunk")


def _message(delta: Delta) -> AnswerMessage:
    calls = [
        AnswerToolCall(id=call.id or "", function=AnswerFunction(name=call.name or "", arguments=call.arguments))
        for call in merge_tool_calls(delta.tool_calls)
    ]
    return AnswerMessage(
        content=None if calls and not delta.text else delta.text,
        reasoning_content=delta.reasoning or None,
        tool_calls=calls or None,
    )


def _shown(delta: Delta) -> list[str]:
    """Return the ``delta`` of each chunk."""
    found = [f'{{"reasoning_content":{_json(delta.reasoning)}}}'] if delta.reasoning else []
    if delta.text:
        found.append(f'{{"content":{_json(delta.text)}}}')
    found += [f'{{"tool_calls":[{_json(call)}]}}' for call in _call_chunks(delta.tool_calls)]
    # Tokens without text have log-probabilities, too.
    return found or (['{"content":""}'] if delta.logprobs else [])


def _call_chunks(pieces: Iterable[ToolCallDelta]) -> Iterator[dict[str, Any]]:
    """Yield tool calls as ``ToolCallChunk``: the name of a call first, then its arguments."""
    for call in merge_tool_calls(pieces):
        if call.name is not None:
            named = {"name": call.name, "arguments": ""}
            yield {"index": call.index, "id": call.id or "", "type": "function", "function": named}
        if call.arguments:
            yield {"index": call.index, "function": {"arguments": call.arguments}}


@dataclass(frozen=True, kw_only=True)
class CompletionAnswer:
    """What all parts of one answer in the completions format share."""

    model: str
    fingerprint: str
    id: str = field(default_factory=lambda: f"cmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))

    def full(self, choices: list[CompletionChoice], usage: Usage, timings: Timings) -> str:
        """Return the complete body."""
        body = Completion(
            id=self.id,
            object="text_completion",
            created=self.created,
            model=self.model,
            system_fingerprint=self.fingerprint,
            choices=choices,
            usage=usage,
            timings=timings,
        )
        return body.model_dump_json(exclude_unset=True)

    def piece(self, text: str, logprobs: CompletionLogprobs | None, index: int) -> str:
        return self._chunk(index, text, logprobs.model_dump_json() if logprobs else "null")

    def last(self, report: GenerationReport, index: int) -> str:
        end = f',"timings":{timings(report).model_dump_json()}'
        return self._chunk(index, "", reason=f'"{report.finish_reason}"', end=end)

    def usage(self, usage: Usage) -> str:
        """Return the chunk after the last one, for requests with ``stream_options.include_usage``."""
        return f'{self._head}],"usage":{usage.model_dump_json()}}}'

    def _chunk(self, index: int, text: str, logprobs: str = "null", reason: str = "null", end: str = "") -> str:
        fields = f'"text":{_json(text)},"index":{index},"logprobs":{logprobs},"finish_reason":{reason}'
        return f"{self._head}{{{fields}}}]{end}}}"

    @cached_property
    def _head(self) -> str:
        return _head(self, "text_completion")


def _head(answer: ChatAnswer | CompletionAnswer, kind: str) -> str:
    """Return the part of a chunk before its choices."""
    shared = {
        "id": answer.id,
        "object": kind,
        "created": answer.created,
        "model": answer.model,
        "system_fingerprint": answer.fingerprint,
    }
    return f'{_json(shared)[:-1]},"choices":['


class LogprobsWriter:
    """Writes the log-probabilities of one choice in the completions format, piece by piece: text offsets continue."""

    def __init__(self) -> None:
        self._at = 0
        # Tokens may split a character, which begins at the offset of its first token.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def write(self, tokens: Sequence[TokenLogprob]) -> CompletionLogprobs:
        return CompletionLogprobs(
            tokens=[token.text for token in tokens],
            token_logprobs=[None if token.logprob is None else wire_logprob(token.logprob) for token in tokens],
            top_logprobs=[_alternatives(token) for token in tokens],
            text_offset=[self._offset(token) for token in tokens],
        )

    def _offset(self, token: TokenLogprob) -> int:
        offset = self._at
        self._at += len(self._decoder.decode(token.bytes))
        return offset


def _alternatives(token: TokenLogprob) -> dict[str, float] | None:
    """Return log-probabilities by text, the token itself included; of tokens with the same text, the likeliest one."""
    if token.logprob is None:
        return None
    found: dict[str, float] = {}
    for other in (*token.top, token):
        found.setdefault(other.text, wire_logprob(other.logprob))
    return found


def socket_token(delta: Delta, *, logprobs: bool) -> str | None:
    """Return a ``SocketToken``, written as text like the chunks; None for an empty delta."""
    calls = list(_call_chunks(delta.tool_calls))
    if not (delta.text or delta.reasoning or calls or delta.logprobs):
        return None
    reasoning = f',"reasoning_content":{_json(delta.reasoning)}' if delta.reasoning else ""
    tool_calls = f',"tool_calls":{_json(calls)}' if calls else ""
    entries = f',"logprobs":{_json(chat_logprobs(delta.logprobs))}' if logprobs else ""
    return f'{{"token":{_json(delta.text)}{reasoning}{tool_calls}{entries}}}'
