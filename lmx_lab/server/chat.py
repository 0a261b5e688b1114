"""POST /v1/chat/completions, whole or as server-sent events."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

from fastapi import APIRouter, Request, Response

from lmx_lab.errors import LabError
from lmx_lab.http.bodies import StrictRoute
from lmx_lab.http.error_bodies import detail_for, request_id_of
from lmx_lab.http.event_stream import DONE, EventStream, while_connected
from lmx_lab.http.openapi import event_stream
from lmx_lab.server.admin import is_local
from lmx_lab.server.generation import Generation, attended
from lmx_lab.server.merge_streams import merged, together
from lmx_lab.server.openapi import INFERENCE
from lmx_lab.server.serialize import Answer
from lmx_lab.server.service import ChatService
from lmx_lab.server.translate import usage
from lmx_lab.wire.chat import ChatChunk, ChatCompletion, ChatRequest
from lmx_lab.wire.errors import ErrorBody

log = logging.getLogger(__name__)
WHOLE_OR_CHUNKS = (
    "A completion, or with `stream: true` its chunks as events and `[DONE]` as the last; an error in their midst is an "
    "event too, and the last"
)


def chat_routes(service: ChatService) -> APIRouter:
    router = APIRouter(tags=["inference"], route_class=StrictRoute)

    @router.post(
        "/v1/chat/completions",
        response_model=ChatCompletion,
        responses={200: event_stream(ChatChunk, ErrorBody, description=WHOLE_OR_CHUNKS, end=DONE), **INFERENCE},
    )
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation, whole or with `stream: true` as server-sent events that end with `[DONE]`."""
        request_id = request_id_of(request)
        answer, generations = await while_connected(request, service.start(body, request_id, local=is_local(request)))
        if body.stream:
            lines = _lines(answer, generations, include_usage=body.include_usage)
            return EventStream(until_done(lines, request), comment=lambda: generations[0].remark)
        text = await while_connected(request, _whole(answer, generations))
        return Response(text, media_type="application/json")

    return router


async def until_done(lines: AsyncGenerator[str, None], request: Request) -> AsyncGenerator[str, None]:
    """The lines of one streamed answer and its terminator; an error ends it, without ``[DONE]``."""
    async with aclosing(lines):
        try:
            async for line in lines:
                yield line
        except LabError as exc:
            log.warning("%s: stream ended by %s", request_id_of(request), exc)
            yield ErrorBody(error=detail_for(request, exc)).model_dump_json()
            return
    yield DONE


async def _whole(answer: Answer, generations: list[Generation]) -> str:
    """The body; the first choice that fails ends all."""
    async with attended(generations):
        deltas = await together(generation.whole() for generation in generations)
    reports = [generation.finished() for generation in generations]
    return answer.full(list(zip(deltas, reports, strict=True)), usage(reports))


async def _lines(answer: Answer, generations: list[Generation], *, include_usage: bool) -> AsyncGenerator[str, None]:
    """The chunks of all choices as they come."""
    choices = [_choice(answer, index, generation) for index, generation in enumerate(generations)]
    async with attended(generations), aclosing(merged(choices)) as lines:
        async for line in lines:
            yield line
    if include_usage:
        yield answer.usage(usage([generation.finished() for generation in generations]))


async def _choice(answer: Answer, index: int, generation: Generation) -> AsyncGenerator[str, None]:
    yield answer.first(index)
    async for delta in generation:
        for chunk in answer.pieces(delta, index):
            yield chunk
    yield answer.last(generation.finished(), index)
