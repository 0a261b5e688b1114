"""POST /v1/chat/completions: a complete answer, or chunks as server-sent events."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

from fastapi import APIRouter, Request, Response

from lmx_lab.errors import LabError
from lmx_lab.http.bodies import StrictRoute
from lmx_lab.http.error_bodies import detail_for, request_id_of
from lmx_lab.http.event_stream import DONE, EventStream, while_connected
from lmx_lab.http.guard import is_local
from lmx_lab.http.openapi import event_stream
from lmx_lab.server.generation import Generation, closing_all
from lmx_lab.server.inference import InferenceService
from lmx_lab.server.merge_streams import merged, together
from lmx_lab.server.openapi import INFERENCE
from lmx_lab.server.serialize import ChatAnswer
from lmx_lab.server.translate import usage
from lmx_lab.wire.chat import ChatChunk, ChatCompletion, ChatRequest
from lmx_lab.wire.errors import ErrorBody

log = logging.getLogger(__name__)
WHOLE_OR_CHUNKS = (
    "A completion, or with `stream: true` its chunks as events and `[DONE]` as the last; an error after the first "
    "chunk is an event, too, and the last"
)


def chat_routes(service: InferenceService) -> APIRouter:
    router = APIRouter(tags=["inference"], route_class=StrictRoute)

    @router.post(
        "/v1/chat/completions",
        response_model=ChatCompletion,
        responses={200: event_stream(ChatChunk, ErrorBody, description=WHOLE_OR_CHUNKS, end=DONE), **INFERENCE},
    )
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation, whole or with `stream: true` as server-sent events that end with `[DONE]`."""
        request_id = request_id_of(request)
        answer, generations = await while_connected(
            request, service.start(body, request_id, local=is_local(request.scope))
        )
        if body.stream:
            lines = _lines(answer, generations, include_usage=body.include_usage)
            return EventStream(until_done(lines, request), comment=lambda: generations[0].remark)
        text = await while_connected(request, _whole(answer, generations))
        return Response(text, media_type="application/json")

    return router


async def until_done(lines: AsyncGenerator[str, None], request: Request) -> AsyncGenerator[str, None]:
    """Yield the lines of a streamed answer, then its terminator; an error ends it without ``[DONE]``."""
    async with aclosing(lines):
        try:
            async for line in lines:
                yield line
        except LabError as exc:
            log.warning("%s: stream ended by %s", request_id_of(request), exc)
            yield ErrorBody(error=detail_for(request, exc)).model_dump_json()
            return
    yield DONE


async def _whole(answer: ChatAnswer, generations: list[Generation]) -> str:
    """Return the body; the first choice that fails ends all."""
    async with closing_all(generations):
        deltas = await together(generation.whole() for generation in generations)
    reports = [generation.finished() for generation in generations]
    return answer.full(list(zip(deltas, reports, strict=True)), usage(reports))


async def _lines(
    answer: ChatAnswer, generations: list[Generation], *, include_usage: bool
) -> AsyncGenerator[str, None]:
    """Yield the chunks of all choices as they are generated."""
    choices = [_choice(answer, index, generation) for index, generation in enumerate(generations)]
    async with closing_all(generations), aclosing(merged(choices)) as lines:
        async for line in lines:
            yield line
    if include_usage:
        yield answer.usage(usage([generation.finished() for generation in generations]))


async def _choice(answer: ChatAnswer, index: int, generation: Generation) -> AsyncGenerator[str, None]:
    yield answer.first(index)
    async for delta in generation:
        for chunk in answer.pieces(delta, index):
            yield chunk
    yield answer.last(generation.finished(), index)
