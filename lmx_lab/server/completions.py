"""The route ``POST /v1/completions``: plain prompts, for evaluation harnesses and older programs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager

from fastapi import APIRouter, Request, Response

from lmx_lab.engine import TextPrompt, TokenPrompt
from lmx_lab.engine.model_lookup import public_id
from lmx_lab.http.bodies import StrictRoute
from lmx_lab.http.errors import client_of, request_id_of
from lmx_lab.http.guard import is_local
from lmx_lab.http.openapi import event_stream
from lmx_lab.http.streaming import DONE, EventStream, comment, while_connected
from lmx_lab.server.chat import RESPONSE_DESCRIPTION, ignored_header, with_terminator
from lmx_lab.server.generation import Generation, closing_all, collect
from lmx_lab.server.inference import InferenceService
from lmx_lab.server.merge_streams import gather, merge
from lmx_lab.server.openapi import GENERATION_ERRORS
from lmx_lab.server.serialize import CompletionAnswer, LogprobsWriter
from lmx_lab.server.translate import completion_requests, total_timings, total_usage, usage
from lmx_lab.values.outputs import Delta, GenerationReport
from lmx_lab.wire.completions import Completion, CompletionChoice, CompletionRequest
from lmx_lab.wire.errors import ErrorBody
from lmx_lab.wire.generation import Usage


def completion_routes(service: InferenceService, *, slots: int) -> APIRouter:
    """Return the router of ``/v1/completions``.

    Args:
        slots: Number of generations that the engine runs at the same time.
    """
    router = APIRouter(tags=["inference"], route_class=StrictRoute)

    @router.post(
        "/v1/completions",
        response_model=Completion,
        responses={
            200: event_stream(Completion, ErrorBody, description=RESPONSE_DESCRIPTION, end=DONE),
            **GENERATION_ERRORS,
        },
    )
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue plain prompts, completely or with `stream: true` as server-sent events that end with `[DONE]`."""
        own = service.recording.is_own(request)
        headers = {**ignored_header(body.ignored()), **service.recording.answer_headers(own=own)}
        prompts = CompletionPrompts(
            service,
            body,
            slots=slots,
            request_id=request_id_of(request),
            local=is_local(request.scope),
            client=client_of(request),
            own=own,
        )
        await while_connected(request, prompts.submit_first())
        if body.stream:
            return EventStream(
                with_terminator(prompts.chunks(), request),
                headers=headers,
                keep_alive=lambda: comment(prompts.status),
                blocked_limit_s=lambda: service.blocked_limit_s(prompts.running),
            )
        text = await while_connected(request, prompts.complete())
        return Response(text, media_type="application/json", headers=headers)

    return router


class CompletionPrompts:
    """The prompts of one request, which are submitted in order.

    At most as many run at the same time as fill the engine's slots, so that a request does not fill the queue by
    itself. If a prompt fails, the others are cancelled.
    """

    def __init__(
        self,
        service: InferenceService,
        body: CompletionRequest,
        *,
        slots: int,
        request_id: str | None,
        local: bool,
        client: str | None,
        own: bool,
    ) -> None:
        self._service = service
        self._body = body
        self._request_id = request_id
        self._local = local
        self._client = client
        self._own = own
        self._requests = completion_requests(body)
        self._concurrency = max(1, slots // body.choices)
        self._running_prompts = asyncio.Semaphore(self._concurrency)
        self._unread: dict[int, list[Generation]] = {}
        """Generations that were submitted in advance, by the number of their prompt."""
        self._running: dict[int, list[Generation]] = {}
        """Generations that were submitted but not closed, by the index of their prompt."""
        self._latest: Generation | None = None
        self._answer = CompletionAnswer(model=body.model, fingerprint=service.fingerprint)

    @property
    def status(self) -> str:
        """The state of the prompt that was submitted last, for a client that waits for the first token."""
        return self._latest.status if self._latest is not None else "queued"

    @property
    def running(self) -> list[Generation]:
        """The generations that were submitted but not closed."""
        return [generation for generations in self._running.values() for generation in generations]

    async def submit_first(self) -> None:
        """Submit the first prompts, so that their errors are known before the response begins.

        Raises:
            LabError: see ``InferenceService.submit``.
        """
        for number in range(len(self._requests))[: self._concurrency]:
            self._unread[number] = await self._submit(number)
        model = public_id(self._unread[0][0].model, local=self._local)
        self._answer = CompletionAnswer(model=model, fingerprint=self._service.fingerprint)

    async def complete(self) -> str:
        """Return the body of the complete answer.

        Raises:
            LabError: a prompt failed.
        """
        async with self._closing_unread():
            answers = await gather(self._choices(number) for number in range(len(self._requests)))
        reports = [[report for _, report in choices] for choices in answers]
        choices = [choice for answer in answers for choice, _ in answer]
        return self._answer.body(choices, total_usage(usage(prompt) for prompt in reports), total_timings(reports))

    async def chunks(self) -> AsyncGenerator[str, None]:
        """Yield the chunks of all prompts and choices as they are generated.

        Raises:
            LabError: a prompt failed.
        """
        usages: list[Usage] = []
        sources = [self._prompt_chunks(number, usages) for number in range(len(self._requests))]
        async with self._closing_unread(), aclosing(merge(sources)) as chunks:
            async for chunk in chunks:
                yield chunk
        if self._body.include_usage:
            yield self._answer.usage_chunk(total_usage(usages))

    async def _submit(self, number: int, *, patient: bool = False) -> list[Generation]:
        generations = await self._service.submit(
            self._requests[number],
            choices=self._body.choices,
            first=number * self._body.choices,
            request_id=self._request_id,
            local=self._local,
            client=self._client,
            own=self._own,
            patient=patient,
        )
        self._running[number] = generations
        self._latest = generations[0]
        return generations

    def _closing_unread(self) -> AbstractAsyncContextManager[None]:
        """Close the generations that were submitted in advance after the block, in case they were not read."""
        return closing_all([generation for generations in self._unread.values() for generation in generations])

    @asynccontextmanager
    async def _run(self, number: int) -> AsyncIterator[tuple[list[Generation], str | None]]:
        """Yield the generations of a prompt once it may run, and the text to put before their answers."""
        async with self._running_prompts:
            generations = self._unread.pop(number, None) or await self._submit(number, patient=True)
            async with closing_all(generations):
                yield generations, await self._echo(number)
            del self._running[number]

    async def _echo(self, number: int) -> str | None:
        """Return the text of a prompt if the request wants it before the answer."""
        prompt = self._requests[number].prompt
        if not self._body.echo:
            return None
        if isinstance(prompt, TextPrompt):
            return prompt.text
        assert isinstance(prompt, TokenPrompt)
        return await self._service.decode(prompt.tokens)

    async def _choices(self, number: int) -> list[tuple[CompletionChoice, GenerationReport]]:
        async with self._run(number) as (generations, echo):
            deltas = await gather(collect(_deltas(generation, echo)) for generation in generations)
        first = number * self._body.choices
        reports = [generation.final_report() for generation in generations]
        return [
            (self._choice(first + index, delta, report), report)
            for index, (delta, report) in enumerate(zip(deltas, reports, strict=True))
        ]

    def _choice(self, index: int, delta: Delta, report: GenerationReport) -> CompletionChoice:
        logprobs = LogprobsWriter().write(delta.logprobs) if self._body.logprobs is not None else None
        return CompletionChoice(text=delta.text, index=index, logprobs=logprobs, finish_reason=report.finish_reason)

    async def _prompt_chunks(self, number: int, usages: list[Usage]) -> AsyncGenerator[str, None]:
        """Yield the chunks of one prompt, and append its usage at the end."""
        async with self._run(number) as (generations, echo):
            first = number * self._body.choices
            choices = [
                self._choice_chunks(first + index, _deltas(generation, echo), generation)
                for index, generation in enumerate(generations)
            ]
            async with aclosing(merge(choices)) as chunks:
                async for chunk in chunks:
                    yield chunk
        usages.append(usage([generation.final_report() for generation in generations]))

    async def _choice_chunks(
        self, index: int, deltas: AsyncGenerator[Delta, None], generation: Generation
    ) -> AsyncGenerator[str, None]:
        logprobs = LogprobsWriter() if self._body.logprobs is not None else None
        async for delta in deltas:
            if delta.text or delta.logprobs:
                yield self._answer.text_chunk(delta.text, logprobs.write(delta.logprobs) if logprobs else None, index)
        yield self._answer.last_chunk(generation.final_report(), index)


async def _deltas(generation: Generation, echo: str | None) -> AsyncGenerator[Delta, None]:
    """Yield the deltas of a generation, after the echo of its prompt if there is one.

    The scores of the prompt are known at the first token or, without tokens, at the end.
    """
    async for delta in generation:
        if echo is not None:
            yield _echo_delta(generation, echo)
            echo = None
        yield delta
    if echo is not None:
        yield _echo_delta(generation, echo)


def _echo_delta(generation: Generation, echo: str) -> Delta:
    scores = generation.prompt_scores
    return Delta(text=echo, tokens=0, logprobs=scores.tokens if scores else ())
