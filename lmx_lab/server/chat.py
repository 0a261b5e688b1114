"""The route ``POST /v1/chat/completions``: a complete answer, or chunks as server-sent events."""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing

from fastapi import APIRouter, Request, Response

from lmx_lab.errors import LabError
from lmx_lab.http.bodies import StrictRoute
from lmx_lab.http.errors import client_of, detail_for, request_id_of
from lmx_lab.http.guard import is_local
from lmx_lab.http.openapi import event_stream
from lmx_lab.http.streaming import DONE, EventStream, comment, while_connected
from lmx_lab.server.generation import Generation, closing_all
from lmx_lab.server.inference import InferenceService
from lmx_lab.server.merge_streams import gather, merge
from lmx_lab.server.openapi import GENERATION_ERRORS
from lmx_lab.server.serialize import ChatAnswer
from lmx_lab.server.translate import usage
from lmx_lab.wire.chat import ChatChunk, ChatCompletion, ChatRequest
from lmx_lab.wire.errors import ErrorBody

log = logging.getLogger(__name__)
RESPONSE_DESCRIPTION = (
    "A completion or, with `stream: true`, its chunks as events, followed by `[DONE]`. An error after the first chunk "
    "is sent as the last event, instead of `[DONE]`"
)
"""Description of the response in the OpenAPI document, also for plain completions."""
IGNORED_NAME = re.compile(r"[A-Za-z0-9_.-]{1,80}")
IGNORED_LIMIT = 32
"""Largest number of names in the header ``x-lmx-ignored``."""


def chat_routes(service: InferenceService) -> APIRouter:
    """Return the router of ``/v1/chat/completions``."""
    router = APIRouter(tags=["inference"], route_class=StrictRoute)

    @router.post(
        "/v1/chat/completions",
        response_model=ChatCompletion,
        responses={
            200: event_stream(ChatChunk, ErrorBody, description=RESPONSE_DESCRIPTION, end=DONE),
            **GENERATION_ERRORS,
        },
    )
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation, completely or with `stream: true` as server-sent events that end with `[DONE]`."""
        request_id, own = request_id_of(request), service.recording.is_own(request)
        headers = {**ignored_header(body.ignored()), **service.recording.answer_headers(own=own)}
        local, client = is_local(request.scope), client_of(request)
        answer, generations = await while_connected(
            request, service.start(body, request_id, local=local, client=client, own=own)
        )
        if body.stream:
            chunks = _chunks(answer, generations, include_usage=body.include_usage)
            return EventStream(
                with_terminator(chunks, request),
                headers=headers,
                keep_alive=lambda: comment(generations[0].status),
                blocked_limit_s=lambda: service.blocked_limit_s(generations),
            )
        text = await while_connected(request, _complete(answer, generations))
        return Response(text, media_type="application/json", headers=headers)

    return router


def ignored_header(names: Iterable[str]) -> dict[str, str]:
    """Return the header with the names of ignored fields. Names that a header cannot contain are left out."""
    shown = [name for name in names if IGNORED_NAME.fullmatch(name)][:IGNORED_LIMIT]
    return {"x-lmx-ignored": ", ".join(shown)} if shown else {}


async def with_terminator(chunks: AsyncGenerator[str, None], request: Request) -> AsyncGenerator[str, None]:
    """Yield the chunks of a streamed answer, then ``[DONE]`` or, if the answer failed, the error."""
    async with aclosing(chunks):
        try:
            async for chunk in chunks:
                yield chunk
        except LabError as exc:
            log.warning("%s: the stream failed: %s", request_id_of(request), exc)
            yield ErrorBody(error=detail_for(request, exc)).model_dump_json()
            return
    yield DONE


async def _complete(answer: ChatAnswer, generations: list[Generation]) -> str:
    """Return the body of a complete answer. If a choice fails, the others are cancelled.

    Raises:
        LabError: a generation failed.
    """
    async with closing_all(generations):
        deltas = await gather(generation.read_all() for generation in generations)
    reports = [generation.final_report() for generation in generations]
    return answer.body(list(zip(deltas, reports, strict=True)), usage(reports))


async def _chunks(
    answer: ChatAnswer, generations: list[Generation], *, include_usage: bool
) -> AsyncGenerator[str, None]:
    """Yield the chunks of all choices as they are generated."""
    choices = [_choice_chunks(answer, index, generation) for index, generation in enumerate(generations)]
    async with closing_all(generations), aclosing(merge(choices)) as chunks:
        async for chunk in chunks:
            yield chunk
    if include_usage:
        yield answer.usage_chunk(usage([generation.final_report() for generation in generations]))


async def _choice_chunks(answer: ChatAnswer, index: int, generation: Generation) -> AsyncGenerator[str, None]:
    yield answer.first_chunk(index)
    async for delta in generation:
        for chunk in answer.delta_chunks(delta, index):
            yield chunk
    yield answer.last_chunk(generation.final_report(), index)
