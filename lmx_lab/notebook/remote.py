"""Answers and loads in progress on a remote server, on the event loop of their client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Self

from lmx_lab.client import AsyncLabClient, Remark
from lmx_lab.errors import UnreachableError
from lmx_lab.notebook.reply import TextPiece
from lmx_lab.values.generation import ToolCallDelta
from lmx_lab.values.models import LoadReport, LoadSpec
from lmx_lab.wire.admin import LoadAnswer, ModelEvent
from lmx_lab.wire.chat import ChatChunk, ChatRequest, ChoiceDelta
from lmx_lab.wire.generation import StreamOptions, Timings, Usage

Parts = AsyncGenerator[ChatChunk | Remark, None]


@dataclass(frozen=True, kw_only=True)
class RemoteCost:
    """The cost of an answer as the server reports it, and ``ttft_s`` as measured here."""

    model: str
    finish_reason: str
    usage: Usage
    timings: Timings
    ttft_s: float


class RemoteGeneration:
    """A streamed answer, with the time of its first token.

    Closing or deleting it closes its connection, and the server stops the generation: asyncio closes a generator
    without references on its own loop, whichever thread has deleted it.
    """

    def __init__(self, client: AsyncLabClient, request: ChatRequest) -> None:
        asked = {"stream_options": StreamOptions(include_usage=True)}
        self._url = client.url
        self.remark = "sent"
        """Before the first token: the state of the request, as the server reports it."""
        self._parts: Parts | None = client.stream_with_remarks(request.model_copy(update=asked))
        self._ahead: ChatChunk | Remark | None = None
        self._last: ChatChunk | None = None
        self._finish_reason: str | None = None
        self._timings: Timings | None = None
        self._started = perf_counter()
        self._first_at: float | None = None

    @classmethod
    async def begun(cls, client: AsyncLabClient, request: ChatRequest) -> Self:
        """Start a generation; returns when the server has accepted the request.

        Raises:
            LabError: the server has refused the request.
        """
        generation = cls(client, request)
        generation._ahead = await generation._next()
        return generation

    def close(self) -> None:
        """Stop the generation; can be called from any thread. Idempotent."""
        self._parts = None

    async def __anext__(self) -> TextPiece:
        part, self._ahead = self._ahead, None
        while not isinstance(part, ChatChunk):
            if isinstance(part, Remark):
                self.remark = part.text
            if (part := await self._next()) is None:
                raise StopAsyncIteration
        return self._read(part)

    async def _next(self) -> ChatChunk | Remark | None:
        return await anext(self._parts, None) if self._parts is not None else None

    def _read(self, chunk: ChatChunk) -> TextPiece:
        self._last = chunk
        for choice in chunk.choices:
            self._finish_reason = choice.finish_reason or self._finish_reason
        self._timings = chunk.timings or self._timings
        piece = _piece(chunk.choices[0].delta) if chunk.choices else TextPiece()
        if self._first_at is None and (piece.text or piece.reasoning or piece.tool_calls):
            self._first_at = perf_counter()
        return piece

    async def whole(self) -> TextPiece:
        """The rest of the answer as one piece; cancellation stops the generation."""
        pieces = [piece async for piece in self]
        return TextPiece(
            text="".join([piece.text for piece in pieces]),
            reasoning="".join([piece.reasoning for piece in pieces]),
            tool_calls=tuple([call for piece in pieces for call in piece.tool_calls]),
        )

    def __aiter__(self) -> Self:
        return self

    def finished(self) -> RemoteCost:
        """The cost of the complete answer.

        Raises:
            UnreachableError: the answer has no ``usage`` and ``timings``, so it is not from an LMX Lab server.
        """
        last = self._last
        if last is None or last.usage is None or self._timings is None or self._finish_reason is None:
            raise UnreachableError(f"{self._url} did not say what its answer has cost, unlike an LMX Lab server")
        return RemoteCost(
            model=last.model,
            finish_reason=self._finish_reason,
            usage=last.usage,
            timings=self._timings,
            ttft_s=(self._first_at or perf_counter()) - self._started,
        )


def _piece(delta: ChoiceDelta) -> TextPiece:
    calls = tuple(_calls(delta))
    return TextPiece(text=delta.content or "", reasoning=delta.reasoning_content or "", tool_calls=calls)


def _calls(delta: ChoiceDelta) -> Iterator[ToolCallDelta]:
    for call in delta.tool_calls or ():
        function = call.function
        yield ToolCallDelta(index=call.index, id=call.id, name=function.name, arguments=function.arguments)


class RemoteLoad:
    """A load on the server, which starts with the creation of this object."""

    def __init__(self, client: AsyncLabClient, spec: LoadSpec) -> None:
        # Holds the latest step; None is the end.
        self._steps: asyncio.Queue[ModelEvent | None] = asyncio.Queue(1)
        load = client.load(spec.model, engine=spec.engine, progress=self._show)
        self._task = asyncio.create_task(load, name=f"wait for {spec.model:.80} to be loaded")
        self._task.add_done_callback(self._ended)

    async def step(self) -> ModelEvent | None:
        """Wait for the next step; None at the end of the load."""
        return await self._steps.get()

    async def result(self) -> LoadReport:
        """Wait for the end of the load."""
        answer = await self._task
        return LoadReport(
            model=answer.model, load_s=answer.load_time_ms / 1e3, memory_bytes=round(answer.vram_gb * 1e9)
        )

    def _show(self, step: ModelEvent) -> None:
        if step.done_bytes is not None:
            self._offer(step)

    def _offer(self, step: ModelEvent | None) -> None:
        if self._steps.full():
            self._steps.get_nowait()
        self._steps.put_nowait(step)

    def _ended(self, task: asyncio.Task[LoadAnswer]) -> None:
        self._offer(None)
        if not task.cancelled():
            task.exception()  # Retrieved, because nothing may wait for it any more.
