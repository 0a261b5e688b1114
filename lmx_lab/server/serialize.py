"""Write the bodies and chunks of answers in the chat format and in the completions format. Pure code.

Chunks are written as text around the parts that change, because building and dumping a pydantic model for every token
would cost more than everything else between the engine and the socket. Tests compare them with the dumps of the models.
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
from lmx_lab.values.outputs import Delta, GenerationReport, TokenLogprob, ToolCallDelta, merge_tool_calls
from lmx_lab.wire.chat import AnswerMessage, ChatCompletion, Choice, ChoiceLogprobs
from lmx_lab.wire.completions import Completion, CompletionChoice, CompletionLogprobs
from lmx_lab.wire.generation import Timings, Usage
from lmx_lab.wire.tools import AnswerFunction, AnswerToolCall


def json_text(value: Any) -> str:
    """Return a value as JSON."""
    return to_json(value).decode()


@dataclass(frozen=True, kw_only=True)
class ChatAnswer:
    """The fields that all parts of one chat answer share, and the functions that write these parts."""

    model: str
    fingerprint: str
    logprobs: bool = False
    """Whether the request asks for log-probabilities."""
    id: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))

    def body(self, parts: Sequence[tuple[Delta, GenerationReport]], usage: Usage) -> str:
        """Return the body of the complete answer.

        Args:
            parts: The content and the report of each choice.
        """
        choices = []
        for index, (delta, report) in enumerate(parts):
            calls = [
                AnswerToolCall(
                    id=call.id or "", function=AnswerFunction(name=call.name or "", arguments=call.arguments)
                )
                for call in merge_tool_calls(delta.tool_calls)
            ]
            message = AnswerMessage(
                content=None if calls and not delta.text else delta.text,
                reasoning_content=delta.reasoning or None,
                tool_calls=calls or None,
            )
            logprobs = {"content": chat_logprobs(delta.logprobs)} if self.logprobs else None
            choice = Choice(
                index=index,
                message=message,
                logprobs=ChoiceLogprobs.model_validate(logprobs) if logprobs else None,
                finish_reason=report.finish_reason,
            )
            choices.append(choice)
        body = ChatCompletion(
            id=self.id,
            created=self.created,
            model=self.model,
            system_fingerprint=self.fingerprint,
            choices=choices,
            usage=usage,
            timings=total_timings([[report for _, report in parts]]),
        )
        return body.model_dump_json()

    def first_chunk(self, index: int = 0) -> str:
        """Return the first chunk of a choice."""
        return self._chunk(index, '{"role":"assistant","content":""}')

    def delta_chunks(self, delta: Delta, index: int = 0) -> Iterator[str]:
        """Yield the chunks of a delta: first its reasoning, then its text and its tool calls. An empty delta has none.

        The first chunk contains the log-probabilities of the whole delta.
        """
        logprobs = json_text({"content": chat_logprobs(delta.logprobs), "refusal": None}) if self.logprobs else "null"
        # The JSON of the field ``delta`` in each chunk.
        parts = [f'{{"reasoning_content":{json_text(delta.reasoning)}}}'] if delta.reasoning else []
        if delta.text:
            parts.append(f'{{"content":{json_text(delta.text)}}}')
        parts += [f'{{"tool_calls":[{json_text(call)}]}}' for call in _call_chunks(delta.tool_calls)]
        # Tokens without text also have log-probabilities.
        for part in parts or (['{"content":""}'] if delta.logprobs else []):
            yield self._chunk(index, part, logprobs)
            logprobs = "null"

    def last_chunk(self, report: GenerationReport, index: int = 0) -> str:
        """Return the last chunk of a choice."""
        end = f',"timings":{timings(report).model_dump_json()}'
        return self._chunk(index, "{}", reason=f'"{report.finish_reason}"', end=end)

    def usage_chunk(self, usage: Usage) -> str:
        """Return the final chunk of a stream, for requests with ``stream_options.include_usage``."""
        return f'{self._head}],"usage":{usage.model_dump_json()}}}'

    def _chunk(self, index: int, delta: str, logprobs: str = "null", reason: str = "null", end: str = "") -> str:
        field = f',"logprobs":{logprobs}' if self.logprobs else ""
        return f'{self._head}{{"index":{index},"delta":{delta}{field},"finish_reason":{reason}}}]{end}}}'

    @cached_property
    def _head(self) -> str:
        return _head(self, "chat.completion.chunk")


def _call_chunks(pieces: Iterable[ToolCallDelta]) -> Iterator[dict[str, Any]]:
    """Yield the parts of tool calls in the form of ``ToolCallChunk``: the name of a call, then its arguments."""
    for call in merge_tool_calls(pieces):
        if call.name is not None:
            named = {"name": call.name, "arguments": ""}
            yield {"index": call.index, "id": call.id or "", "type": "function", "function": named}
        if call.arguments:
            yield {"index": call.index, "function": {"arguments": call.arguments}}


@dataclass(frozen=True, kw_only=True)
class CompletionAnswer:
    """The fields that all parts of one answer in the completions format share, and the functions that write them."""

    model: str
    fingerprint: str
    id: str = field(default_factory=lambda: f"cmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))

    def body(self, choices: list[CompletionChoice], usage: Usage, timings: Timings) -> str:
        """Return the body of the complete answer."""
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

    def text_chunk(self, text: str, logprobs: CompletionLogprobs | None, index: int) -> str:
        """Return a chunk with a piece of the text of a choice."""
        return self._chunk(index, text, logprobs.model_dump_json() if logprobs else "null")

    def last_chunk(self, report: GenerationReport, index: int) -> str:
        """Return the last chunk of a choice."""
        end = f',"timings":{timings(report).model_dump_json()}'
        return self._chunk(index, "", reason=f'"{report.finish_reason}"', end=end)

    def usage_chunk(self, usage: Usage) -> str:
        """Return the final chunk of a stream, for requests with ``stream_options.include_usage``."""
        return f'{self._head}],"usage":{usage.model_dump_json()}}}'

    def _chunk(self, index: int, text: str, logprobs: str = "null", reason: str = "null", end: str = "") -> str:
        fields = f'"text":{json_text(text)},"index":{index},"logprobs":{logprobs},"finish_reason":{reason}'
        return f"{self._head}{{{fields}}}]{end}}}"

    @cached_property
    def _head(self) -> str:
        return _head(self, "text_completion")


def _head(answer: ChatAnswer | CompletionAnswer, kind: str) -> str:
    """Return the part of a chunk before its choices, which is the same in all chunks of an answer."""
    shared = {
        "id": answer.id,
        "object": kind,
        "created": answer.created,
        "model": answer.model,
        "system_fingerprint": answer.fingerprint,
    }
    return f'{json_text(shared)[:-1]},"choices":['


class LogprobsWriter:
    """Writes the log-probabilities of one choice in the completions format, one piece at a time.

    The text offsets of a piece continue those of the piece before.
    """

    def __init__(self) -> None:
        self._at = 0
        # A character may consist of several tokens; its offset is that of its first token.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def write(self, tokens: Sequence[TokenLogprob]) -> CompletionLogprobs:
        """Return the log-probabilities of the next tokens."""
        offsets: list[int] = []
        alternatives: list[dict[str, float] | None] = []
        named = [{other.text: wire_logprob(other.logprob) for other in token.named} for token in tokens]
        for token in tokens:
            offsets.append(self._at)
            self._at += len(self._decoder.decode(token.bytes))
            found: dict[str, float] = {}
            for other in (*token.top, token):
                # If several tokens have the same text, that of the most likely one is kept.
                found.setdefault(other.text, wire_logprob(other.logprob))
            alternatives.append(None if token.logprob is None else found)
        return CompletionLogprobs(
            tokens=[token.text for token in tokens],
            token_logprobs=[None if token.logprob is None else wire_logprob(token.logprob) for token in tokens],
            top_logprobs=alternatives,
            text_offset=offsets,
            logprob_tokens=named if any(named) else None,
        )


def socket_token(delta: Delta, *, logprobs: bool) -> str | None:
    """Return a ``SocketToken``, written as text like the chunks; None for an empty delta."""
    calls = list(_call_chunks(delta.tool_calls))
    if not (delta.text or delta.reasoning or calls or delta.logprobs):
        return None
    reasoning = f',"reasoning_content":{json_text(delta.reasoning)}' if delta.reasoning else ""
    tool_calls = f',"tool_calls":{json_text(calls)}' if calls else ""
    entries = f',"logprobs":{json_text(chat_logprobs(delta.logprobs))}' if logprobs else ""
    return f'{{"token":{json_text(delta.text)}{reasoning}{tool_calls}{entries}}}'
