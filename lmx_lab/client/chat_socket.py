"""An answer over ``WS /v1/chat/stream``, as the chunks that a stream of server-sent events has."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from typing import Annotated

from pydantic import Field, TypeAdapter

from lmx_lab.wire.chat import (
    ChatChunk,
    ChatRequest,
    ChoiceDelta,
    ChoiceLogprobs,
    ChunkChoice,
    SocketDone,
    SocketError,
    SocketStats,
    SocketToken,
)
from lmx_lab.wire.generation import CompletionTokensDetails, FinishReason, PromptTokensDetails, Timings, Usage

SocketMessage = SocketToken | SocketDone | SocketError
SOCKET_MESSAGE: TypeAdapter[SocketMessage] = TypeAdapter(Annotated[SocketMessage, Field(union_mode="left_to_right")])


class SocketChunks:
    """Chunks out of the messages of one socket. Pure.

    What a socket does not tell is filled in: ``id`` is made here, ``model`` is the name that was asked for,
    ``system_fingerprint`` is empty. In ``timings`` the prompt's time includes that in the queue.
    """

    def __init__(self, body: ChatRequest) -> None:
        self.done = False
        self._model = body.model
        self._usage = body.include_usage
        self._id = f"chatcmpl-{secrets.token_hex(12)}"
        self._created = int(time.time())
        self._begun = False

    def read(self, message: SocketToken | SocketDone) -> Iterator[ChatChunk]:
        if not self._begun:
            self._begun = True
            yield self._chunk(ChoiceDelta(role="assistant", content=""))
        if isinstance(message, SocketToken):
            yield from self._pieces(message)
            return
        self.done = True
        stats = message.stats
        last = self._chunk(ChoiceDelta(), finish_reason=stats.finish_reason)
        yield last.model_copy(update={"timings": _timings(stats)})
        if self._usage:
            yield self._with([]).model_copy(update={"usage": _usage(stats)})

    def _pieces(self, message: SocketToken) -> Iterator[ChatChunk]:
        """Of thoughts, text and calls, one each; the log-probabilities of all go with the first."""
        logprobs = None if message.logprobs is None else ChoiceLogprobs(content=message.logprobs)
        for delta in _deltas(message):
            yield self._chunk(delta, logprobs=logprobs)
            logprobs = None

    def _chunk(
        self, delta: ChoiceDelta, *, logprobs: ChoiceLogprobs | None = None, finish_reason: FinishReason | None = None
    ) -> ChatChunk:
        return self._with([ChunkChoice(index=0, delta=delta, logprobs=logprobs, finish_reason=finish_reason)])

    def _with(self, choices: list[ChunkChoice]) -> ChatChunk:
        return ChatChunk(
            id=self._id,
            object="chat.completion.chunk",
            created=self._created,
            model=self._model,
            system_fingerprint="",
            choices=choices,
        )


def _deltas(message: SocketToken) -> list[ChoiceDelta]:
    found = [ChoiceDelta(reasoning_content=message.reasoning_content)] if message.reasoning_content else []
    if message.token:
        found.append(ChoiceDelta(content=message.token))
    found += [ChoiceDelta(tool_calls=[call]) for call in message.tool_calls or ()]
    # Tokens without text have their log-probabilities all the same.
    return found or [ChoiceDelta(content="")]


def _timings(stats: SocketStats) -> Timings:
    computed, predicted = stats.prompt_tokens - stats.cached_tokens, stats.completion_tokens
    speed = stats.tokens_per_second
    predicted_ms = predicted / speed * 1e3 if speed > 0 else 0.0
    prompt_ms = max(0.0, stats.total_ms - predicted_ms)
    return Timings(
        cache_n=stats.cached_tokens,
        prompt_n=computed,
        prompt_ms=prompt_ms,
        prompt_per_token_ms=prompt_ms / computed if computed else 0.0,
        prompt_per_second=computed / prompt_ms * 1e3 if prompt_ms > 0 else 0.0,
        predicted_n=predicted,
        predicted_ms=predicted_ms,
        predicted_per_token_ms=predicted_ms / predicted if predicted else 0.0,
        predicted_per_second=speed,
        ttft_ms=stats.ttft_ms,
    )


def _usage(stats: SocketStats) -> Usage:
    return Usage(
        prompt_tokens=stats.prompt_tokens,
        completion_tokens=stats.completion_tokens,
        total_tokens=stats.prompt_tokens + stats.completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=stats.cached_tokens),
        completion_tokens_details=CompletionTokensDetails(reasoning_tokens=stats.reasoning_tokens),
    )
