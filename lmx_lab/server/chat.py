"""POST /v1/chat/completions, whole or as server-sent events."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from importlib.metadata import version

from fastapi import APIRouter, Request, Response

from lmx_lab.engine import Engine, GenerationReport, TokenStream
from lmx_lab.errors import EngineError, LabError, ModelNotFoundError, OtherModelLoadedError
from lmx_lab.feed import Feed
from lmx_lab.server.bodies import StrictRoute
from lmx_lab.server.connections import DONE, EventStream, while_connected
from lmx_lab.server.errors import detail, request_id_of
from lmx_lab.server.loading import Event
from lmx_lab.server.translate import Answer, generation_request
from lmx_lab.weights import Catalog
from lmx_lab.wire.admin import RequestEvent
from lmx_lab.wire.chat import ChatChunk, ChatCompletion, ChatRequest
from lmx_lab.wire.errors import ErrorBody

log = logging.getLogger(__name__)
FINGERPRINT = f"mlx-{version('mlx')}"


class ChatService:
    """A chat request becomes a running generation. The notebook's verbs use the same entry as the routes."""

    def __init__(self, *, engine: Engine, catalog: Catalog, feed: Feed[Event]) -> None:
        self._engine = engine
        self._catalog = catalog
        self._feed = feed

    async def start(self, request: ChatRequest) -> tuple[Answer, TokenStream]:
        """Accept the request; everything that is wrong with it is raised here, before the first token.

        Raises:
            NotLoadedError, ModelNotFoundError: the model it names is not loaded, or not there at all.
            CallerError, QueueFullError: as ``Engine.submit``.
        """
        try:
            stream = await self._engine.submit(generation_request(request))
        except OtherModelLoadedError as exc:
            await self._check_known(request.model, exc)
            raise
        return Answer(model=self._engine.snapshot.model or request.model, fingerprint=FINGERPRINT), stream

    async def _check_known(self, model: str, exc: OtherModelLoadedError) -> None:
        entries = await asyncio.to_thread(self._catalog.scan)
        if all(entry.id != model for entry in entries):
            loaded = self._engine.snapshot.model
            missing = f"there is no model {model[:200]!r} on disk; {loaded} is loaded; GET /v1/models lists all"
            raise ModelNotFoundError(missing, param="model") from exc

    def ended(self, report: GenerationReport | None, request_id: str | None) -> GenerationReport:
        """Tell the watchers of requests that one has ended well."""
        if report is None:
            raise EngineError("the generation ended without a report")
        self._feed.publish(
            RequestEvent(
                request_id=request_id or "",
                model=report.model,
                finish_reason=report.finish_reason,
                prompt_tokens=report.prompt_tokens,
                completion_tokens=report.output_tokens,
                tokens_per_second=report.tokens_per_second,
                ttft_ms=report.ttft_s * 1e3,
            )
        )
        return report


def chat_routes(service: ChatService) -> APIRouter:
    router = APIRouter(tags=["inference"], route_class=StrictRoute)
    chunk = ChatChunk.model_json_schema()

    @router.post(
        "/v1/chat/completions",
        response_model=ChatCompletion,
        responses={
            200: {
                "content": {"text/event-stream": {"schema": chunk}},
                "description": "A completion, or with stream: true its chunks",
            }
        },
    )
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        answer, stream = await while_connected(request, service.start(body))
        if body.stream:
            include_usage = body.stream_options is not None and body.stream_options.include_usage
            return EventStream(_chunks(service, answer, stream, request_id_of(request), include_usage=include_usage))
        text = await while_connected(request, collect(stream))
        report = service.ended(stream.report, request_id_of(request))
        return Response(answer.full(text, report).model_dump_json(), media_type="application/json")

    return router


async def collect(stream: TokenStream) -> str:
    """The whole text; frees the slot however it ends."""
    async with stream:
        return "".join([delta.text async for delta in stream])


async def _chunks(
    service: ChatService, answer: Answer, stream: TokenStream, request_id: str | None, *, include_usage: bool
) -> AsyncIterator[str]:
    """The lines of one streamed answer; an error ends it, without ``[DONE]``."""
    async with stream:
        yield answer.first()
        try:
            async for delta in stream:
                if delta.text:
                    yield answer.piece(delta.text)
            report = service.ended(stream.report, request_id)
        except LabError as exc:
            log.warning("%s: stream ended by %s", request_id, exc)
            yield ErrorBody(error=detail(exc, request_id)).model_dump_json()
            return
        yield answer.last(report)
        if include_usage:
            yield answer.usage(report)
        yield DONE
