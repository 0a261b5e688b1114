"""A lab elsewhere as its panels see it: what its server tells every watcher, and what it answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

from lmx_lab.backend import ChatPiece, ChatStats, Ranked, ServerState
from lmx_lab.client import AsyncLabClient, LabEvent
from lmx_lab.errors import InvalidRequestError, LabError
from lmx_lab.notebook.arguments import chat_request, rerank_body
from lmx_lab.notebook.remote import RemoteGeneration
from lmx_lab.notebook.reply import TextPiece
from lmx_lab.wire.admin import LoadAnswer, ModelEvent, ModelRecords, RequestEvent, Sample

T = TypeVar("T")
LATE_S = 3.0
"""Samples come every second."""
REMARK_S = 0.5
GONE = "the server has ended the connection; it may be stopping"


class HandOver(Protocol):
    def __call__(self, work: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T]:
        """Run the work on the client's loop; cancelling this cancels it."""


class AttachedSource:
    """A ``Source`` over a client.

    ``state`` and ``sample`` are what ``progress`` has heard last: the workbench reads it as long as there are panels.

    Args:
        running: Whether the connection is still wanted.
    """

    can_cancel_loads = False

    def __init__(self, client: AsyncLabClient, *, running: Callable[[], bool], hand_over: HandOver) -> None:
        self._client = client
        self._running = running
        self._here = hand_over
        self._records: ModelRecords | None = None
        self._sample: Sample | None = None
        self._heard_at: float | None = None
        self._lost = ""

    def state(self) -> ServerState:
        silent_s = 0.0 if self._heard_at is None else time.monotonic() - self._heard_at
        now: dict[str, Any] = {"state": "running"}
        if not self._running():
            now = {"state": "stopped", "note": "This connection was stopped; run the cell with attach() again."}
        elif self._lost:
            now = {"state": "unreachable", "note": f"{self._lost} This is tried again all the time."}
        elif silent_s > LATE_S:
            note = (
                f"Nothing has come from the server for {silent_s:.0f} s: a cell there may keep its loop from running."
            )
            now = {"state": "lagging", "note": note}
        loaded = [it for it in self._records.models if it.loaded] if self._records else []
        return ServerState(
            place="another process or machine",
            url=self._client.url,
            model=next((it.id for it in loaded if not it.pinned), None),
            pinned=tuple(it.id for it in loaded if it.pinned),
            **now,
        )

    def sample(self) -> Sample | None:
        return self._sample if self.state().state == "running" else None

    async def models(self) -> ModelRecords:
        self._records = records = await self._here(self._client.models())
        return records

    async def load(self, model: str) -> LoadAnswer:
        return await self._here(self._client.load(model))

    async def cancel_load(self, model: str) -> None:
        raise InvalidRequestError("a load on a server elsewhere cannot be cancelled from here; wait for its end")

    async def unload(self) -> float:
        return (await self._here(self._client.unload())).freed_vram_gb

    async def progress(self) -> AsyncGenerator[ModelEvent | RequestEvent, None]:
        # Nobody closes it: cancelled it ends by itself, and dropped it is closed by its own loop.
        events = self._client.events(["models", "requests", "samples"])
        try:
            await self.models()
            while (event := await self._here(_next_event(events))) is not None:
                await self._hear(event)
                if isinstance(event, ModelEvent | RequestEvent):
                    yield event
            self._lost = f"{self._client.url}: {GONE}."
        except LabError as exc:
            self._lost = f"{exc.message.rstrip('.')}."
            raise

    async def _hear(self, event: LabEvent) -> None:
        self._lost, self._heard_at = "", time.monotonic()
        if isinstance(event, Sample):
            self._sample = event
        elif isinstance(event, ModelEvent) and event.stage in ("loaded", "unloaded", "failed"):
            await self.models()

    async def chat(self, request: Mapping[str, Any]) -> AsyncGenerator[ChatPiece, None]:
        parameters = {name: value for name, value in request.items() if name != "messages"}
        asked = chat_request(request["messages"], parameters)
        generation = await self._here(RemoteGeneration.begun(self._client, asked))
        try:
            async with aclosing(self._pieces(generation)) as pieces:
                async for piece in pieces:
                    yield piece
        finally:
            # Dropping it is not enough here: futures hold what they have brought from another loop.
            generation.close()
        yield ChatPiece(stats=_stats(generation))

    async def _pieces(self, generation: RemoteGeneration) -> AsyncGenerator[ChatPiece, None]:
        """What comes, and until it does, what it waits for."""
        begun = False
        while True:
            step = asyncio.ensure_future(self._here(_next_piece(generation)))
            try:
                while not (await asyncio.wait({step}, timeout=None if begun else REMARK_S))[0]:
                    yield ChatPiece(remark=generation.remark)
                piece = step.result()
            finally:
                step.cancel()
            if piece is None:
                return
            if piece.text or piece.reasoning:
                begun = True
                yield ChatPiece(text=piece.text, reasoning=piece.reasoning, remark="answering")

    async def rerank(self, query: str, documents: Sequence[str], *, top_n: int | None = None) -> Ranked:
        body = rerank_body(query, documents, model=None, top_n=top_n, truncate=True)
        started = time.perf_counter()
        answer = await self._here(self._client.rerank(body.model_copy(update={"return_documents": False})))
        return Ranked(
            order=tuple((item.index, item.relevance_score) for item in answer.results),
            model=answer.model,
            method=answer.method,
            took_ms=(time.perf_counter() - started) * 1e3,
        )


async def _next_event(events: AsyncGenerator[LabEvent, None]) -> LabEvent | None:
    return await anext(events, None)


async def _next_piece(generation: RemoteGeneration) -> TextPiece | None:
    return await anext(generation, None)


def _stats(generation: RemoteGeneration) -> ChatStats:
    cost = generation.finished()
    return ChatStats(
        model=cost.model,
        finish_reason=cost.finish_reason,
        prompt_tokens=cost.usage.prompt_tokens,
        output_tokens=cost.usage.completion_tokens,
        tokens_per_second=cost.timings.predicted_per_second,
        ttft_ms=cost.ttft_s * 1e3,
    )
