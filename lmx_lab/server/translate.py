"""Between the chat format and the engine's values. Pure."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lmx_lab.engine import ChatPrompt, GenerationReport, GenerationRequest, Sampling
from lmx_lab.wire.chat import (
    AnswerMessage,
    ChatChunk,
    ChatCompletion,
    ChatMessage,
    ChatRequest,
    Choice,
    ChoiceDelta,
    ChunkChoice,
    FinishReason,
    PromptTokensDetails,
    SocketStats,
    Timings,
    Usage,
)

COLDEST = 1e-6
"""Temperatures below are greedy: nothing but the likeliest token has a chance."""
ANY_MODEL = "default"
"""The model name that stands for whatever is loaded."""


def generation_request(request: ChatRequest) -> GenerationRequest:
    stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
    temperature = 0.7 if request.temperature is None else request.temperature
    top_p = 1.0 if request.top_p is None else request.top_p
    # A nucleus of nothing still holds the likeliest token; float32 cannot divide by less than about 1e-38.
    greedy = temperature < COLDEST or top_p == 0
    return GenerationRequest(
        prompt=ChatPrompt(messages=tuple(_message(message) for message in request.messages)),
        model=None if request.model == ANY_MODEL else request.model,
        sampling=Sampling(temperature=0) if greedy else Sampling(temperature=temperature, top_p=top_p),
        max_tokens=request.max_completion_tokens or request.max_tokens or 4096,
        stop=tuple(stop),
    )


def _message(message: ChatMessage) -> Mapping[str, Any]:
    content = message.content
    text = "".join(part.text for part in content) if isinstance(content, list) else content or ""
    shown = message.model_dump(include={"name", "tool_call_id", "tool_calls"}, exclude_none=True)
    # Chat templates know "system"; "developer" is its newer name.
    return {"role": "system" if message.role == "developer" else message.role, "content": text, **shown}


def usage(report: GenerationReport) -> Usage:
    return Usage(
        prompt_tokens=report.prompt_tokens,
        completion_tokens=report.output_tokens,
        total_tokens=report.prompt_tokens + report.output_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=report.cached_tokens),
    )


def timings(report: GenerationReport) -> Timings:
    computed = report.prompt_tokens - report.cached_tokens
    prompt_ms, predicted_ms = report.prefill_s * 1e3, report.decode_s * 1e3
    return Timings(
        cache_n=report.cached_tokens,
        prompt_n=computed,
        prompt_ms=prompt_ms,
        prompt_per_token_ms=prompt_ms / computed if computed else 0.0,
        prompt_per_second=report.prompt_tokens_per_second,
        predicted_n=report.output_tokens,
        predicted_ms=predicted_ms,
        predicted_per_token_ms=predicted_ms / report.output_tokens if report.output_tokens else 0.0,
        predicted_per_second=report.tokens_per_second,
    )


def socket_stats(report: GenerationReport) -> SocketStats:
    return SocketStats(
        tokens_per_second=report.tokens_per_second,
        prompt_tokens=report.prompt_tokens,
        completion_tokens=report.output_tokens,
        cached_tokens=report.cached_tokens,
        ttft_ms=report.ttft_s * 1e3,
        total_ms=report.total_s * 1e3,
        finish_reason=report.finish_reason,
    )


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What all parts of one answer share: its id, its time, its model."""

    model: str
    fingerprint: str
    id: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))

    def full(self, text: str, report: GenerationReport) -> ChatCompletion:
        return ChatCompletion(
            id=self.id,
            created=self.created,
            model=self.model,
            system_fingerprint=self.fingerprint,
            choices=[Choice(index=0, message=AnswerMessage(content=text), finish_reason=report.finish_reason)],
            usage=usage(report),
            timings=timings(report),
        )

    def first(self) -> str:
        return self._chunk([_choice(ChoiceDelta(role="assistant", content=""))])

    def piece(self, text: str) -> str:
        return self._chunk([_choice(ChoiceDelta(content=text))])

    def last(self, report: GenerationReport) -> str:
        return self._chunk([_choice(ChoiceDelta(), report.finish_reason)], timings=timings(report))

    def usage(self, report: GenerationReport) -> str:
        """The chunk after the last one, for those who asked with ``stream_options.include_usage``."""
        return self._chunk([], usage=usage(report))

    def _chunk(self, choices: list[ChunkChoice], **extra: Any) -> str:
        chunk = ChatChunk(
            id=self.id,
            object="chat.completion.chunk",
            created=self.created,
            model=self.model,
            system_fingerprint=self.fingerprint,
            choices=choices,
            **extra,
        )
        return chunk.model_dump_json(exclude_unset=True)


def _choice(delta: ChoiceDelta, finish_reason: FinishReason | None = None) -> ChunkChoice:
    return ChunkChoice(index=0, delta=delta, finish_reason=finish_reason)
