"""Submit the requests of routes and notebooks, report the end of each request exactly once, and log a line about it."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any, Protocol, TypeVar

import numpy as np
from starlette.requests import HTTPConnection

from lmx_lab.broadcast import Feed
from lmx_lab.engine import (
    Answer,
    Caller,
    EmbeddingRequest,
    Embeddings,
    GenerationRequest,
    ModelManager,
    Ranking,
    RerankRequest,
    Sampling,
    TokenPrompt,
)
from lmx_lab.engine.lookup import EMBEDDING, RERANK, Kinds
from lmx_lab.engine.stream import Outcome
from lmx_lab.errors import AdminForbiddenError, EngineError, LabError
from lmx_lab.http.errors import client_of
from lmx_lab.http.guard import Scope, is_local
from lmx_lab.server.events import ServerEvent
from lmx_lab.server.recording import Recorded, Recording, continued_request, request_from_json, with_seed
from lmx_lab.server.running import Running
from lmx_lab.server.timelines import TimelineLog
from lmx_lab.values.models import Kind
from lmx_lab.values.outputs import Delta, EncodeReport, GenerationReport, TokenLogprob, Vectors
from lmx_lab.values.recording import Continuation, Record
from lmx_lab.values.steering import SteeringVector
from lmx_lab.values.timeline import StepLog
from lmx_lab.wire.admin import RequestEvent, RequestKind

log = logging.getLogger(__name__)
NOT_RECORDED = Caller(local=True, own=None)
READY_PATHS = ("/readyz", "/health")


class TextResult(Protocol):
    """The result of embedding or reranking: ``Embeddings`` or ``Ranking``."""

    @property
    def report(self) -> EncodeReport: ...


Result = TypeVar("Result", bound=TextResult)


@dataclass(frozen=True, kw_only=True)
class RequestEnd:
    """The end of a generation, an embedding or a rerank. A refused request ends with an error and without a report."""

    event: RequestEvent
    """The event for clients of ``/admin/events``. Its id is empty for requests of the notebook."""
    report: GenerationReport | EncodeReport | None = None
    """The engine's report; None if the request failed or was cancelled before its end."""
    steps: StepLog | None = None
    """The engine's steps for the generation; None if the request was refused, or is not a generation."""
    request: GenerationRequest | EmbeddingRequest | RerankRequest
    """The request to the engine. All choices of one prompt have the same one."""
    deltas: Sequence[Delta] = ()
    """The parts of the answer that were delivered; empty unless they are kept."""


Observer = Callable[[RequestEnd], None]
"""Called once at the end of a request."""


class InferenceService:
    """Submits requests to the models in memory. It can be used on any event loop.

    Args:
        feed: Receives a ``RequestEvent`` at the end of each request.
        recording: Receives the generations that are recorded.
        observers: Called at the end of each request, on the loop that reads the answer.
        keep_answers: Whether the end of a request contains its answer.
    """

    def __init__(
        self,
        *,
        manager: ModelManager,
        feed: Feed[ServerEvent],
        recording: Recording,
        observers: Sequence[Observer] = (),
        keep_answers: bool = False,
    ) -> None:
        self.manager = manager
        self._feed = feed
        self.recording = recording
        self._observers = observers
        self._keep_answers = keep_answers
        self.timelines = TimelineLog()
        """The engines' steps for the last requests."""
        self.running = Running()
        """The requests that wait or run."""

    def blocked_limit_s(self, generations: Iterable[Answer]) -> float:
        """Return how long the client of these generations may accept no data before they are cancelled.

        There is no limit after its generations have ended, because it no longer has a slot.
        """
        if all(generation.ended for generation in generations):
            return math.inf
        limit_s = self.manager.settings.slow_client_s
        # While other requests wait for a slot, a client with a slot has at most a second. A request that has just
        # arrived is queued until the next step, even if a slot is free.
        models = self.manager.snapshot.models
        waiting = any(model.queued_requests and model.active_requests >= (model.slots or 1) for model in models)
        return min(limit_s, 1.0) if waiting else limit_s

    # Generations

    def caller_of(self, connection: HTTPConnection) -> Caller:
        """Return the caller that sent a request over a connection."""
        return Caller(
            local=is_local(connection.scope),
            client=client_of(connection),
            request_id=connection.scope.get("lmx_lab.request_id"),
            own=self.recording.is_own(connection),
        )

    async def submit(self, request: GenerationRequest, *, choices: int = 1, first: int = 0) -> list[Answer]:
        """Submit all choices of a request, or none, and return their answers.

        Args:
            first: Index of the first choice in the answer.

        Raises:
            LabError: see ``ModelManager.generate``.
        """
        caller = request.caller
        mode = self.recording.mode
        if is_recorded := caller.own is not None and (mode == "all" or (mode == "own" and caller.own)):
            request = with_seed(request)
        try:
            for name in ("steer", "share_prefix"):
                if caller.local or not getattr(request, name):
                    continue
                raise AdminForbiddenError(
                    f"only callers on the server's machine may send {name}: programs that call http://127.0.0.1 or "
                    f"http://localhost directly or send the API key; leave {name} out"
                )
            answers = await self.running.wait(
                self.manager.generate(request, choices),
                caller=caller,
                kind=caller.kind,
                model=request.model or self.manager.main_id,
                is_queued=True,
            )
        except (LabError, asyncio.CancelledError) as exc:
            # The name in the request is not used: a caller can choose it freely, and it is a label of a metric.
            self._end_without_report(caller.kind, self.manager.main_id, exc, request=request, index=first)
            raise
        for at, answer in enumerate(answers):
            answer.index = first + at
            recorded = Recorded(own=bool(caller.own), choice=at) if is_recorded else None
            if recorded is not None or self._keep_answers:
                answer.deltas = []
            answer.on_end = functools.partial(self._answered, recorded)
            self.timelines.add(
                answer.steps,
                caller=caller,
                index=answer.index,
                model=answer.model,
                prompt_tokens=len(answer.prompt),
            )
        self.running.add(answers)
        return answers

    async def regenerate(self, record: Record) -> Record:
        """Generate the answer of a record again, with the same model, prompt, settings and seed.

        Returns the record of the new answer, which is not stored.

        Raises:
            LabError: see ``ModelManager.generate``.
        """
        request = request_from_json(record.request, model=record.provenance.model)
        return await self.answer(request, choice=record.choice)

    async def answer(self, request: GenerationRequest, *, choice: int = 0) -> Record:
        """Generate an answer, and return its record, which is not stored.

        Args:
            choice: Index of the answer among those to the same request.

        Raises:
            LabError: see ``ModelManager.generate``.
        """
        request = replace(with_seed(request), caller=NOT_RECORDED)
        # The seed of an answer depends on its index among the answers to the request.
        answers = await self.submit(request, choices=choice + 1)
        try:
            answer = answers[-1]
            answer.deltas = []
            await answer.read()
        finally:
            for each in answers:
                await each.aclose()
        report = answer.final_report()
        return self.recording.record(Recorded(own=True, choice=choice), answer, report.finish_reason)

    async def continue_answer(self, continuation: Continuation, *, own: bool | None = True) -> Answer:
        """Generate an answer again from a given position. The stream begins with the tokens before it.

        Args:
            own: See ``Caller``.

        Raises:
            LabError: see ``ModelManager.generate``.
        """
        caller = Caller(local=True, own=own, internal=own is None, patient=True)
        (answer,) = await self.submit(replace(continued_request(continuation), caller=caller))
        return answer

    async def score(
        self,
        tokens: Sequence[int],
        *,
        model: str | None,
        top: int,
        start: int = 0,
        steer: Sequence[SteeringVector] = (),
    ) -> tuple[TokenLogprob, ...]:
        """Return the log-probability of each token after those before it, with ``top`` alternatives.

        Args:
            start: Position of the first token that is needed. The returned tokens begin there.
            steer: Vectors that are added to the residual stream.

        Raises:
            LabError: see ``ModelManager.generate``.
        """
        request = GenerationRequest(
            prompt=TokenPrompt(tokens=tuple(tokens)),
            model=model,
            sampling=Sampling(temperature=0),
            max_tokens=0,
            top_logprobs=top,
            score_prompt=True,
            score_from=start,
            steer=tuple(steer),
            caller=replace(NOT_RECORDED, internal=True),
        )
        (answer,) = await self.submit(request)
        await answer.read()
        assert answer.prompt_scores is not None
        return answer.prompt_scores.tokens[start:]

    # Vectors and scores

    async def embed(self, request: EmbeddingRequest) -> Embeddings:
        """Return a vector for each input. Cancelling the wait cancels the work.

        Raises:
            LabError: see ``ModelManager.embed``.
            EngineError: the model computed values that are not finite.
        """
        return await self._encode(request, EMBEDDING, self.manager.embed(request), lambda it: it.vectors)

    async def rerank(self, request: RerankRequest) -> Ranking:
        """Return a score for each document. Cancelling the wait cancels the work.

        Raises:
            LabError: see ``embed``.
        """
        return await self._encode(request, RERANK, self.manager.rerank(request), lambda it: it.scores)

    async def _encode(
        self,
        request: EmbeddingRequest | RerankRequest,
        kinds: Kinds,
        computing: Coroutine[Any, Any, Result],
        values: Callable[[Result], Vectors],
    ) -> Result:
        """Wait for the result, and report the end.

        Raises:
            EngineError: a value is NaN or infinite.
        """
        kind: Kind = "embedding" if isinstance(request, EmbeddingRequest) else "rerank"
        resident = self.manager.model_for(request.model, kinds, local=request.caller.local)
        model = resident.entry.id if resident is not None else ""
        try:
            result = await self.running.wait(computing, caller=request.caller, kind=kind, model=model)
            # JSON cannot represent other values.
            if not np.isfinite(values(result)).all():
                raise EngineError(
                    f"{result.report.model} computed values that are not finite (NaN or infinity): its weights are "
                    "damaged, or too large for their data type; fetch it again, or start the server with dtype float32"
                )
        except (Exception, asyncio.CancelledError) as exc:
            self._end_without_report(kind, model, exc, request=request)
            raise
        report = result.report
        event = RequestEvent(
            kind=kind,
            scope=request.caller.scope,
            request_id=request.caller.request_id or "",
            model=report.model,
            finish_reason="stop",
            prompt_tokens=report.tokens,
            completion_tokens=0,
            tokens_per_second=report.tokens / report.compute_s if report.compute_s > 0 else 0.0,
            ttft_ms=report.total_s * 1e3,
        )
        self._end(RequestEnd(event=event, report=report, request=request))
        return result

    # Ends

    def _answered(self, recorded: Recorded | None, answer: Answer, outcome: Outcome, code: str | None) -> None:
        """Report the end of an answer. It is recorded first, so that the reader of an event finds the record."""
        report = answer.report
        self.running.end(answer)
        self.timelines.end(answer.steps, outcome, code, report)
        if recorded is not None:
            self.recording.end(recorded, answer, outcome, code)
        event = RequestEvent(
            kind=answer.request.caller.kind,
            scope=answer.request.caller.scope,
            request_id=answer.request.caller.request_id or "",
            index=answer.index,
            model=answer.model,
            finish_reason=outcome,
            code=code,
            prompt_tokens=len(answer.prompt),
            # Without a report, the tokens that were delivered count.
            completion_tokens=answer.tokens if report is None else report.output_tokens,
            tokens_per_second=0.0 if report is None else report.tokens_per_second,
            ttft_ms=0.0 if report is None else report.ttft_s * 1e3,
        )
        self._end(
            RequestEnd(
                event=event, report=report, steps=answer.steps, request=answer.request, deltas=answer.deltas or ()
            )
        )

    def _end_without_report(
        self,
        kind: RequestKind,
        model: str,
        exc: BaseException,
        *,
        request: GenerationRequest | EmbeddingRequest | RerankRequest,
        index: int = 0,
    ) -> None:
        """Report the end of a request that was refused or cancelled, or that failed."""
        code = None if isinstance(exc, asyncio.CancelledError) else getattr(exc, "code", LabError.code)
        event = RequestEvent(
            kind=kind,
            scope=request.caller.scope,
            request_id=request.caller.request_id or "",
            index=index,
            model=model,
            finish_reason="cancelled" if code is None else "error",
            code=code,
            prompt_tokens=0,
            completion_tokens=0,
            tokens_per_second=0.0,
            ttft_ms=0.0,
        )
        self._end(RequestEnd(event=event, request=request))

    def _end(self, end: RequestEnd) -> None:
        self._feed.publish(end.event)
        for observe in self._observers:
            observe(end)


# The log of requests, whose lines ``lmx-lab serve`` prints


class RequestLog:
    """Combines the end of each request with the ends of its generations.

    ``GET`` requests, such as those of panels, are logged only if they fail, and those of ``/readyz`` and ``/health``
    never: 503 is their answer while no model is loaded. The methods are called on the server's event loop.
    """

    def __init__(self) -> None:
        self._ends: dict[str, list[RequestEnd]] = {}
        """For each running request, the ends of its generations up to now."""

    def begin(self, scope: Scope) -> None:
        """Called at the start of a request."""
        if log.isEnabledFor(logging.INFO):
            self._ends[scope["lmx_lab.request_id"]] = []

    def observe(self, end: RequestEnd) -> None:
        """Called at the end of each generation, embedding and rerank."""
        if (ends := self._ends.get(end.event.request_id)) is not None:
            ends.append(end)

    def end(self, scope: Scope, status: int | None) -> None:
        """Called at the end of a request.

        Args:
            status: The HTTP status; None if the client disconnected before the response.
        """
        ends = self._ends.pop(scope["lmx_lab.request_id"], None)
        if ends is None:
            return
        is_read = scope.get("method") in ("GET", "HEAD", "OPTIONS")
        if not ends and is_read and (status is None or status < 400 or scope["path"] in READY_PATHS):
            return
        client = scope["client"][0] if scope.get("client") else "unknown client"
        route = f"{scope.get('method', 'WebSocket')} {scope['path'][:80]}"
        for text in [_describe_end(end, status) for end in ends] or [_describe_status(status)]:
            log.info("%s  %s  %s", client, route, text)


def _describe_end(end: RequestEnd, status: int | None) -> str:
    event = end.event
    if event.finish_reason == "error":
        return "  ".join(part for part in (event.model, _describe_status(status), event.code) if part)
    parts = [event.model, f"{event.prompt_tokens} tokens in"]
    if event.kind == "chat":
        parts[1] += f", {event.completion_tokens} out"
    if isinstance(end.report, GenerationReport):
        parts += [f"first token in {event.ttft_ms / 1e3:.2f} s", f"{event.tokens_per_second:.1f} tok/s"]
    elif end.report is not None:
        parts.append(f"{end.report.total_s:.2f} s")
    return "  ".join([*parts, event.finish_reason])


def _describe_status(status: int | None) -> str:
    if status is None:
        return "the client disconnected"
    return f"{status} {HTTPStatus(status).phrase}" if status in HTTPStatus._value2member_map_ else str(status)
