"""POST /v1/completions: plain prompts, for evaluation harnesses and older programs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager

from fastapi import APIRouter, Request, Response

from lmx_lab.engine import TextPrompt, TokenPrompt
from lmx_lab.engine.model_lookup import public_id
from lmx_lab.http.bodies import StrictRoute
from lmx_lab.http.error_bodies import request_id_of
from lmx_lab.http.event_stream import DONE, EventStream, while_connected
from lmx_lab.http.guard import is_local
from lmx_lab.http.openapi import event_stream
from lmx_lab.server.chat import WHOLE_OR_CHUNKS, until_done
from lmx_lab.server.generation import Generation, closing_all, gathered
from lmx_lab.server.inference import InferenceService
from lmx_lab.server.merge_streams import merged, together
from lmx_lab.server.openapi import INFERENCE
from lmx_lab.server.serialize import CompletionAnswer, LogprobsWriter
from lmx_lab.server.translate import completion_requests, total_timings, total_usage, usage
from lmx_lab.values.generation import Delta, GenerationReport
from lmx_lab.wire.completions import Completion, CompletionChoice, CompletionRequest
from lmx_lab.wire.errors import ErrorBody
from lmx_lab.wire.generation import Usage


def completion_routes(service: InferenceService, *, slots: int) -> APIRouter:
    router = APIRouter(tags=["inference"], route_class=StrictRoute)

    @router.post(
        "/v1/completions",
        response_model=Completion,
        responses={200: event_stream(Completion, ErrorBody, description=WHOLE_OR_CHUNKS, end=DONE), **INFERENCE},
    )
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue plain prompts, whole or with `stream: true` as server-sent events that end with `[DONE]`."""
        request_id = request_id_of(request)
        prompts = CompletionPrompts(service, body, slots=slots, request_id=request_id, local=is_local(request.scope))
        await while_connected(request, prompts.begin())
        if body.stream:
            return EventStream(until_done(prompts.lines(), request), comment=lambda: prompts.remark)
        return Response(await while_connected(request, prompts.whole()), media_type="application/json")

    return router


class CompletionPrompts:
    """The prompts of one request: submitted in order, as many at once as fill the slots, all or none.

    So a request never fills the queue by itself.
    """

    def __init__(
        self, service: InferenceService, body: CompletionRequest, *, slots: int, request_id: str | None, local: bool
    ) -> None:
        self._service = service
        self._body = body
        self._request_id = request_id
        self._local = local
        self._requests = completion_requests(body)
        self._at_once = max(1, slots // body.choices)
        self._turns = asyncio.Semaphore(self._at_once)
        self._begun: dict[int, list[Generation]] = {}
        self._latest: Generation | None = None
        self._answer = CompletionAnswer(model=body.model, fingerprint=service.fingerprint)

    @property
    def remark(self) -> str:
        return self._latest.remark if self._latest is not None else "queued"

    async def begin(self) -> None:
        """Submit the first prompts, so that their errors are known before the first byte.

        Raises:
            LabError: see ``InferenceService.submit``.
        """
        for at in range(len(self._requests))[: self._at_once]:
            self._begun[at] = await self._submit(at)
        model = public_id(self._begun[0][0].model, local=self._local)
        self._answer = CompletionAnswer(model=model, fingerprint=self._service.fingerprint)

    async def whole(self) -> str:
        """Return the body; the first prompt that fails ends all."""
        async with self._closing():
            done = await together(self._choices(at) for at in range(len(self._requests)))
        reports = [[report for _, report in choices] for choices in done]
        choices = [choice for prompt in done for choice, _ in prompt]
        return self._answer.full(choices, total_usage(usage(prompt) for prompt in reports), total_timings(reports))

    async def lines(self) -> AsyncGenerator[str, None]:
        """Yield the chunks of all prompts and choices as they are generated."""
        spent: list[Usage] = []
        sources = [self._lines(at, spent) for at in range(len(self._requests))]
        async with self._closing(), aclosing(merged(sources)) as lines:
            async for line in lines:
                yield line
        if self._body.include_usage:
            yield self._answer.usage(total_usage(spent))

    async def _submit(self, at: int, *, patient: bool = False) -> list[Generation]:
        generations = await self._service.submit(
            self._requests[at],
            choices=self._body.choices,
            first=at * self._body.choices,
            request_id=self._request_id,
            local=self._local,
            patient=patient,
        )
        self._latest = generations[0]
        return generations

    def _closing(self) -> AbstractAsyncContextManager[None]:
        """Close, after the block, the generations that were submitted and not read."""
        return closing_all([generation for generations in self._begun.values() for generation in generations])

    @asynccontextmanager
    async def _running(self, at: int) -> AsyncIterator[tuple[list[Generation], str | None]]:
        """Yield the generations of a prompt when its turn has come, and the text to put before their answers."""
        async with self._turns:
            generations = self._begun.pop(at, None) or await self._submit(at, patient=True)
            async with closing_all(generations):
                yield generations, await self._echo(at)

    async def _echo(self, at: int) -> str | None:
        prompt = self._requests[at].prompt
        if not self._body.echo:
            return None
        if isinstance(prompt, TextPrompt):
            return prompt.text
        assert isinstance(prompt, TokenPrompt)
        return await self._service.decode(prompt.tokens)

    async def _choices(self, at: int) -> list[tuple[CompletionChoice, GenerationReport]]:
        async with self._running(at) as (generations, echo):
            deltas = await together(gathered(_deltas(generation, echo)) for generation in generations)
        first = at * self._body.choices
        reports = [generation.finished() for generation in generations]
        return [
            (self._choice(first + index, delta, report), report)
            for index, (delta, report) in enumerate(zip(deltas, reports, strict=True))
        ]

    def _choice(self, index: int, delta: Delta, report: GenerationReport) -> CompletionChoice:
        logprobs = LogprobsWriter().write(delta.logprobs) if self._body.logprobs is not None else None
        return CompletionChoice(text=delta.text, index=index, logprobs=logprobs, finish_reason=report.finish_reason)

    async def _lines(self, at: int, spent: list[Usage]) -> AsyncGenerator[str, None]:
        async with self._running(at) as (generations, echo):
            first = at * self._body.choices
            choices = [self._choice_lines(first + i, _deltas(one, echo), one) for i, one in enumerate(generations)]
            async with aclosing(merged(choices)) as lines:
                async for line in lines:
                    yield line
        spent.append(usage([generation.finished() for generation in generations]))

    async def _choice_lines(
        self, index: int, deltas: AsyncGenerator[Delta, None], generation: Generation
    ) -> AsyncGenerator[str, None]:
        logprobs = LogprobsWriter() if self._body.logprobs is not None else None
        async for delta in deltas:
            if delta.text or delta.logprobs:
                yield self._answer.piece(delta.text, logprobs.write(delta.logprobs) if logprobs else None, index)
        yield self._answer.last(generation.finished(), index)


async def _deltas(generation: Generation, echo: str | None) -> AsyncGenerator[Delta, None]:
    """Yield the deltas of a generation, with an echo after the prompt, whose scores are known at the first token or the
    end.
    """
    async for delta in generation:
        if echo is not None:
            yield _prompt(generation, echo)
            echo = None
        yield delta
    if echo is not None:
        yield _prompt(generation, echo)


def _prompt(generation: Generation, echo: str) -> Delta:
    scores = generation.prompt_scores
    return Delta(text=echo, tokens=0, logprobs=scores.tokens if scores else ())
