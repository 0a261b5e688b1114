"""Chat over ``WS /v1/chat/stream``, and convert its messages to the chunks of a stream of server-sent events."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Iterator
from typing import Annotated

from httpx2.websockets import HTTPXWSException
from pydantic import Field, TypeAdapter

from lmx_lab.client.connection import HttpConnection
from lmx_lab.errors import ConnectionLostError, LabError, UnreachableError
from lmx_lab.values.outputs import FinishReason
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
from lmx_lab.wire.generation import CompletionTokensDetails, PromptTokensDetails, Timings, Usage

CLOSE_S = 2.0
"""Maximum wait for closing a connection whose other end does not respond."""


async def receive_messages(
    connection: HttpConnection, path: str, first: str, *, silence_s: float | None = None
) -> AsyncGenerator[str, None]:
    """Send a message, and yield the server's messages. Closing the generator closes the connection.

    Args:
        silence_s: Maximum time between two messages.

    Raises:
        ConnectionLostError: the connection was closed. Only the caller knows whether the answer was complete.
        LabError: the server's error, if it refuses the connection.
    """
    # In a separate task: the library requires that the same task opens and closes a connection.
    received: asyncio.Queue[str | Exception] = asyncio.Queue(1)
    task = asyncio.create_task(_read(connection, path, first, silence_s, received), name="read a WebSocket")
    try:
        while isinstance(message := await received.get(), str):
            yield message
        raise message
    finally:
        task.cancel()
        await asyncio.wait({task}, timeout=CLOSE_S)


async def _read(
    connection: HttpConnection,
    path: str,
    first: str,
    silence_s: float | None,
    received: asyncio.Queue[str | Exception],
) -> None:
    """Put all messages into the queue, followed by the error that has ended the connection."""
    end: Exception | None = None
    try:
        async with connection.websocket(path) as socket:
            try:
                await socket.send_text(first)
                while True:
                    async with asyncio.timeout(silence_s):
                        message = await socket.receive_text()
                    await received.put(message)
            except Exception as exc:
                end = exc
    except Exception as exc:
        # An error while closing must not replace the first error.
        end = end or exc
    while isinstance(end, ExceptionGroup):
        end = end.exceptions[0]
    url = connection.url
    if isinstance(end, TimeoutError):
        error: LabError = UnreachableError(f"{url} sent nothing within the time limit; try again, or raise timeout_s")
    elif isinstance(end, LabError):
        await received.put(end)
        return
    elif isinstance(end, HTTPXWSException):
        error = ConnectionLostError(f"{url} closed the connection before the answer was complete; try again")
    else:
        # Invalid frames raise exceptions of another library, on which this one depends.
        error = ConnectionLostError(f"{url} broke the connection ({type(end).__name__}: {end!s:.200}); try again")
    error.__cause__ = end
    await received.put(error)


SocketMessage = SocketToken | SocketDone | SocketError
SOCKET_MESSAGE: TypeAdapter[SocketMessage] = TypeAdapter(Annotated[SocketMessage, Field(union_mode="left_to_right")])


class SocketChunks:
    """Converts the messages of one WebSocket to chunks. Does no I/O.

    Fields that are not sent over a WebSocket are filled in: ``id`` is generated here, ``model`` is the requested name,
    ``system_fingerprint`` is empty. The prompt time in ``timings`` includes the time in the queue.
    """

    def __init__(self, body: ChatRequest) -> None:
        self.done = False
        """Whether the last message was read."""
        self._model = body.model
        self._with_usage = body.include_usage
        self._id = f"chatcmpl-{secrets.token_hex(12)}"
        self._created = int(time.time())
        self._has_begun = False

    def read(self, message: SocketToken | SocketDone) -> Iterator[ChatChunk]:
        """Yield the chunks of one message."""
        if not self._has_begun:
            self._has_begun = True
            yield self._chunk(ChoiceDelta(role="assistant", content=""))
        if isinstance(message, SocketToken):
            # A chunk each for thoughts, text and tool calls; the first one has the log-probabilities.
            thinking = message.reasoning_content
            deltas = [ChoiceDelta(reasoning_content=thinking)] if thinking else []
            if message.token:
                deltas.append(ChoiceDelta(content=message.token))
            deltas += [ChoiceDelta(tool_calls=[call]) for call in message.tool_calls or ()]
            logprobs = None if message.logprobs is None else ChoiceLogprobs(content=message.logprobs)
            # A token without text needs a chunk as well, for its log-probabilities.
            for delta in deltas or [ChoiceDelta(content="")]:
                yield self._chunk(delta, logprobs=logprobs)
                logprobs = None
            return
        self.done = True
        stats = message.stats
        last = self._chunk(ChoiceDelta(), finish_reason=stats.finish_reason)
        yield last.model_copy(update={"timings": _timings(stats)})
        if self._with_usage:
            usage = Usage(
                prompt_tokens=stats.prompt_tokens,
                completion_tokens=stats.completion_tokens,
                total_tokens=stats.prompt_tokens + stats.completion_tokens,
                prompt_tokens_details=PromptTokensDetails(cached_tokens=stats.cached_tokens),
                completion_tokens_details=CompletionTokensDetails(reasoning_tokens=stats.reasoning_tokens),
            )
            yield self._chunk_with([]).model_copy(update={"usage": usage})

    def _chunk(
        self, delta: ChoiceDelta, *, logprobs: ChoiceLogprobs | None = None, finish_reason: FinishReason | None = None
    ) -> ChatChunk:
        return self._chunk_with([ChunkChoice(index=0, delta=delta, logprobs=logprobs, finish_reason=finish_reason)])

    def _chunk_with(self, choices: list[ChunkChoice]) -> ChatChunk:
        return ChatChunk(
            id=self._id,
            object="chat.completion.chunk",
            created=self._created,
            model=self._model,
            system_fingerprint="",
            choices=choices,
        )


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
