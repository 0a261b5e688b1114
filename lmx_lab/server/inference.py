"""Submit the requests of routes and notebooks, and report the end of each request exactly once."""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
from starlette.requests import HTTPConnection

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
from lmx_lab.http.guard import is_local
from lmx_lab.server.recording import Recorded, Recording, continued_request, request_from_json, with_seed
from lmx_lab.server.requests import Part, Requests
from lmx_lab.server.timelines import TimelineLog
from lmx_lab.values.models import Kind
from lmx_lab.values.outputs import TokenLogprob, Vectors
from lmx_lab.values.recording import Continuation, Record
from lmx_lab.values.steering import SteeringVector
from lmx_lab.wire.admin import RequestKind

NOT_RECORDED = Caller(local=True, own=None)


Result = TypeVar("Result", Embeddings, Ranking)


class InferenceService:
    """Submits requests to the models in memory. It can be used on any event loop.

    Args:
        requests: Receives the start and the end of each request. The end is reported on the loop that reads the answer.
        recording: Receives the generations that are recorded.
        keep_answers: Whether the end of a request contains its answer.
    """

    def __init__(
        self,
        *,
        manager: ModelManager,
        requests: Requests,
        recording: Recording,
        keep_answers: bool = False,
    ) -> None:
        self.manager = manager
        self.requests = requests
        self.recording = recording
        self._keep_answers = keep_answers
        self.timelines = TimelineLog(requests)

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
        model = request.model or self.manager.main_id
        kind: RequestKind = "internal" if caller.internal else "chat"
        waiting = self.requests.begin(caller, kind=kind, model=model, index=first)
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
            answers = await self.requests.wait(waiting, self.manager.generate(request, choices))
        except (LabError, asyncio.CancelledError) as exc:
            # The name in the request is not used: a caller can choose it freely, and it is a label of a metric.
            waiting.model = self.manager.main_id
            self.requests.fail(waiting, request, exc)
            raise
        for at, (answer, part) in enumerate(zip(answers, self.requests.accept(waiting, answers), strict=True)):
            answer.index = part.index
            recorded = Recorded(own=bool(caller.own), choice=at) if is_recorded else None
            if recorded is not None or self._keep_answers:
                answer.deltas = []
            answer.on_end = functools.partial(self._answered, part, recorded)
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
        part = self.requests.begin(request.caller, kind=kind, model=resident.entry.id if resident is not None else "")
        try:
            result = await self.requests.wait(part, computing)
            # JSON cannot represent other values.
            if not np.isfinite(values(result)).all():
                raise EngineError(
                    f"{result.report.model} computed values that are not finite (NaN or infinity): its weights are "
                    "damaged, or too large for their data type; fetch it again, or start the server with dtype float32"
                )
        except (Exception, asyncio.CancelledError) as exc:
            self.requests.fail(part, request, exc)
            raise
        part.model = result.report.model
        self.requests.end(part, request, "stop", report=result.report)
        return result

    def _answered(
        self, part: Part, recorded: Recorded | None, answer: Answer, outcome: Outcome, code: str | None
    ) -> None:
        """Report the end of an answer. It is recorded first, so that the reader of an event finds the record."""
        try:
            if recorded is not None:
                self.recording.end(recorded, answer, outcome, code)
        finally:
            self.requests.end(
                part,
                answer.request,
                outcome,
                code,
                report=answer.report,
                tokens=answer.tokens,
                deltas=answer.deltas or (),
            )
