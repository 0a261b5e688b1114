"""Implement the ``Backend`` of a lab whose server runs in this process.

Panels call it on their own event loop, so that their work does not delay requests. The methods of ``Lab`` call it on
the server's loop.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Mapping, Sequence
from typing import Any, Self, TypeVar

from lmx_lab.backend import AnswerCost, AnswerRecorder, DocumentRanking, Progress, ServerState
from lmx_lab.engine import GenerationRequest, TextPrompt
from lmx_lab.errors import HostingError, InvalidRequestError, NotLoadedError
from lmx_lab.notebook.arguments import Prompt, chat_request
from lmx_lab.notebook.local_server import LocalServer
from lmx_lab.qr_code import data_uri
from lmx_lab.server import InferenceServer
from lmx_lab.server.admin import model_records
from lmx_lab.server.embeddings import embedding_request
from lmx_lab.server.events import ServerEvent, sample
from lmx_lab.server.generation import Generation
from lmx_lab.server.recording import request_to_json
from lmx_lab.server.rerank import rerank_request
from lmx_lab.server.tracing import trace_request
from lmx_lab.server.translate import generation_request, timings, usage
from lmx_lab.values.encoding import Vectors
from lmx_lab.values.engine import EngineSnapshot
from lmx_lab.values.generation import Delta, TokenLogprob
from lmx_lab.values.models import LoadReport, LoadSpec, ModelEntry
from lmx_lab.values.recording import Continuation, Record
from lmx_lab.values.steering import SteeringVector
from lmx_lab.values.timeline import ServerTimeline
from lmx_lab.values.tracing import Trace
from lmx_lab.wire.admin import ModelEvent, ModelRecords, RequestEvent, Sample
from lmx_lab.wire.chat import ChatRequest
from lmx_lab.wire.embeddings import EmbeddingsBody
from lmx_lab.wire.rerank import RerankBody
from lmx_lab.wire.tracing import TraceBody

T = TypeVar("T")


class LocalAnswer:
    """An ``AnswerStream`` over a generation of this process."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation

    @property
    def status(self) -> str:
        return self._generation.status

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        return await anext(self._generation)

    def cost(self) -> AnswerCost:
        report = self._generation.final_report()
        return AnswerCost(
            model=report.model,
            finish_reason=report.finish_reason,
            usage=usage([report]),
            timings=timings(report),
            ttft_s=report.ttft_s,
            report=report,
            prompt=self._generation.prompt,
            request=request_to_json(self._generation.request),
            request_id=self._generation.request_id or None,
        )

    def close(self) -> None:
        self._generation.close()


class LocalBackend:
    """A ``Backend`` over a server of this process."""

    def __init__(self, server: LocalServer) -> None:
        self._server = server
        self._last: tuple[EngineSnapshot, float] | None = None
        """The snapshot of the last measurement, and when it was taken."""

    def state(self) -> ServerState:
        server, addresses, now = self._server, self._server.addresses, self._server.engine.snapshot
        return ServerState(
            state="running" if server.running else "stopped",
            place=server.place,
            url=addresses.url,
            lan_url=(lan_url := next(iter(addresses.lan_urls), None)),
            phone_code=data_uri(lan_url) if lan_url is not None and server.settings.page else "",
            proxy_url=addresses.proxy_url,
            proxy_path=addresses.proxy_path,
            model=now.model,
            pinned=tuple(pinned.entry.id for pinned in now.pinned),
            unloading=now.unloading,
            note="" if server.running else "This server was stopped; run the launch cell again.",
        )

    def sample(self) -> Sample | None:
        if not self._server.running:
            self._last = None
            return None
        snapshot, now = self._server.engine.snapshot, time.monotonic()
        before, then = self._last or (snapshot, now - 1)
        self._last = snapshot, now
        return sample(before, snapshot, max(now - then, 1e-3))

    async def events(self) -> AsyncGenerator[ModelEvent | RequestEvent, None]:
        with self._services.feed.subscribe() as events:
            async for event in events:
                yield event

    # Models

    async def models(self) -> ModelRecords:
        return await model_records(self._server.catalog, self._server.engine)

    async def load(self, spec: LoadSpec, *, progress: Progress | None = None) -> LoadReport:
        return await self._report_progress(self._services.manager.load(spec), progress)

    async def check(
        self, spec: LoadSpec, *, beside: Sequence[ModelEntry] = (), progress: Progress | None = None
    ) -> ModelEntry:
        """Check that a model can be loaded; see ``ModelManager.check``."""
        return await self._report_progress(self._services.manager.check(spec, beside=beside), progress)

    async def cancel_load(self, model: str) -> None:
        await self._services.manager.cancel_load(model)

    async def unload(
        self, model: str | None = None, *, wait: bool | None = None, progress: Progress | None = None
    ) -> float:
        return await self._report_progress(self._services.manager.unload(model, wait=wait), progress) / 1e9

    async def _report_progress(self, work: Coroutine[Any, Any, T], progress: Progress | None) -> T:
        if progress is None:
            return await work
        with self._services.feed.subscribe() as events:
            reporting = asyncio.create_task(_report(events, progress), name="report the progress of a load or unload")
            try:
                return await work
            finally:
                reporting.cancel()

    # Requests

    async def timeline(self, last_s: float, *, most: int | None = None) -> ServerTimeline:
        return self._services.inference.timelines.read(last_s, most=most)

    async def generate(self, request: ChatRequest, *, batch: bool = False) -> LocalAnswer:
        # Requests of a batch have an id, so that the row of a table leads to its record.
        request_id = f"row_{secrets.token_hex(8)}" if batch else None
        _, (generation,) = await self._services.inference.start(request, request_id, local=True, own=True, batch=batch)
        return LocalAnswer(generation)

    async def embed(self, body: EmbeddingsBody) -> Vectors:
        vectors = (await self._services.inference.embed(embedding_request(body), local=True)).vectors
        return vectors[0] if body.is_single else vectors

    async def rerank(self, body: RerankBody) -> DocumentRanking:
        ranking = await self._services.inference.rerank(rerank_request(body), local=True)
        return DocumentRanking(
            order=tuple((index, float(ranking.scores[index])) for index in ranking.order(body.top_n)),
            model=ranking.report.model,
            method=ranking.method,
            tokens=ranking.report.tokens,
            report=ranking.report,
        )

    async def trace(self, body: TraceBody) -> Trace:
        return await self._services.inference.trace(trace_request(body), local=True)

    # Recorded tokens

    def answer_recorder(self, prompt: Prompt, parameters: Mapping[str, Any]) -> AnswerRecorder:
        request = generation_request(chat_request(prompt, parameters))
        return lambda: self._services.inference.answer(request)

    async def encode(self, prompt: str | ChatRequest, *, special: bool = True) -> list[int]:
        if isinstance(prompt, ChatRequest):
            request = generation_request(prompt)
        else:
            request = GenerationRequest(prompt=TextPrompt(text=prompt, special=special))
        return await self._services.inference.encode(request, local=True)

    async def regenerate(self, record: Record) -> Record:
        return await self._services.inference.regenerate(record)

    async def last_record(self) -> Record | None:
        return await asyncio.to_thread(self._server.recorder.store.at, -1)

    async def weights_of(self, model: str) -> str:
        entry = self._entry_of(model)
        return "" if entry is None else await asyncio.to_thread(self._server.recorder.weights_of, entry)

    def _entry_of(self, model: str) -> ModelEntry | None:
        residents = self._services.manager.residents
        return next((each.entry for each in residents if each.entry.id == model), None)

    async def require_weights(self, model: str, weights: str) -> None:
        needed = f" whose files have the SHA-256 {weights}" if weights else ""
        if self._entry_of(model) is None:
            raise NotLoadedError(f"this answer was generated by {model}, which is not loaded; load the model{needed}")
        if weights and (found := await self.weights_of(model)) != weights:
            raise InvalidRequestError(
                f"this answer was generated by {model} with other weights: the loaded files have the SHA-256 "
                f"{found}; load the model{needed}",
                param="model",
            )

    async def continue_answer(self, continuation: Continuation, *, recorded: bool = True) -> LocalAnswer:
        await self.require_weights(continuation.model, continuation.weights)
        own = True if recorded else None
        return LocalAnswer(await self._services.inference.continue_answer(continuation, own=own))

    async def score(
        self,
        tokens: Sequence[int],
        *,
        model: str | None,
        top: int,
        start: int = 0,
        distributions: bool = False,
        steer: Sequence[SteeringVector] = (),
    ) -> Sequence[TokenLogprob]:
        inference = self._services.inference
        return await inference.score(
            tokens, model=model, top=top, start=start, distributions=distributions, steer=steer
        )

    @property
    def _services(self) -> InferenceServer:
        # Before the start, the models of a lab that replaces another one are checked and loaded.
        if self._server.stopped:
            raise HostingError("this server was stopped; run the launch cell again")
        return self._server.services


async def _report(events: AsyncIterator[ServerEvent], progress: Progress) -> None:
    async for event in events:
        if isinstance(event, ModelEvent):
            progress(event)
