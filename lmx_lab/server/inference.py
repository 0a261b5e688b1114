"""Submit the requests of routes and notebooks, and report the end of each request exactly once."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import numpy as np

from lmx_lab.broadcast import Feed
from lmx_lab.engine import (
    EmbeddingRequest,
    Embeddings,
    GenerationRequest,
    ModelManager,
    Pending,
    Ranking,
    RerankRequest,
    Sampling,
    TokenPrompt,
    TokenStream,
)
from lmx_lab.engine.model_lookup import EMBEDDING, RERANK, Kinds, public_id
from lmx_lab.errors import AdminForbiddenError, EngineError, LabError, NotLoadedError
from lmx_lab.server.events import ServerEvent
from lmx_lab.server.generation import Generation, Observer, Outcome, RequestEnd, closing_all
from lmx_lab.server.recording import RecordedGeneration, Recording, continued_request, request_from_json, with_seed
from lmx_lab.server.serialize import ChatAnswer
from lmx_lab.server.timelines import TimelineLog
from lmx_lab.server.translate import generation_request
from lmx_lab.values.models import Kind
from lmx_lab.values.outputs import EncodeReport, GenerationReport, TokenLogprob, Vectors
from lmx_lab.values.recording import Continuation, Record
from lmx_lab.values.steering import SteeringVector
from lmx_lab.wire.chat import ChatRequest

CONTENDED_CLIENT_S = 1.0
"""Time for which a client with a slot may accept no data while other requests wait for a slot."""


class TextResult(Protocol):
    """The result of embedding or reranking: ``Embeddings`` or ``Ranking``."""

    @property
    def report(self) -> EncodeReport: ...


Result = TypeVar("Result", bound=TextResult)


class InferenceService:
    """Submits requests to the models in memory. It can be used on any event loop.

    Args:
        feed: Receives a ``RequestEvent`` at the end of each request.
        recording: Receives the generations that are recorded.
        slow_client_s: See ``Settings``.
        observers: Called at the end of each request, on the loop that reads the answer.
        keep_answers: Whether the end of a request contains its answer.
    """

    def __init__(
        self,
        *,
        manager: ModelManager,
        feed: Feed[ServerEvent],
        recording: Recording,
        slow_client_s: float,
        observers: Sequence[Observer] = (),
        keep_answers: bool = False,
    ) -> None:
        self._manager = manager
        self._feed = feed
        self.recording = recording
        self._slow_client_s = slow_client_s
        self._observers = observers
        self._keep_answers = keep_answers
        self.timelines = TimelineLog()
        """The engines' steps for the last requests."""

    @property
    def fingerprint(self) -> str:
        """Name and version of the library that runs the model."""
        return self._manager.fingerprint

    def blocked_limit_s(self, generations: Iterable[Generation]) -> float:
        """Return how long the client of these generations may accept no data before they are cancelled.

        There is no limit after its generations have ended, because it no longer has a slot.
        """
        if all(generation.ended for generation in generations):
            return math.inf
        is_contended = self._manager.snapshot.queued_requests > 0
        return min(self._slow_client_s, CONTENDED_CLIENT_S) if is_contended else self._slow_client_s

    # Generations

    async def start(
        self,
        request: ChatRequest,
        request_id: str | None = None,
        *,
        local: bool = False,
        client: str | None = None,
        own: bool = False,
        batch: bool = False,
    ) -> tuple[ChatAnswer, list[Generation]]:
        """Submit a chat request. Return the common fields of its answer, and a generation for each of its choices.

        See ``submit`` for the arguments.

        Raises:
            LabError: see ``ModelManager.submit_all``.
        """
        generations = await self.submit(
            generation_request(request),
            choices=request.choices,
            request_id=request_id,
            local=local,
            client=client,
            own=own,
            batch=batch,
        )
        model = public_id(generations[0].model, local=local)
        answer = ChatAnswer(model=model, fingerprint=self.fingerprint, logprobs=bool(request.logprobs))
        return answer, generations

    async def submit(
        self,
        request: GenerationRequest,
        *,
        choices: int = 1,
        first: int = 0,
        request_id: str | None = None,
        local: bool = False,
        client: str | None = None,
        own: bool | None = False,
        batch: bool = False,
        patient: bool = False,
    ) -> list[Generation]:
        """Submit all choices of a request, or none, and return their generations.

        Args:
            first: Index of the first choice in the answer.
            local: Whether the caller is on this machine, so that it may name the loaded model by its path.
            client: Address of the client.
            own: Whether the request is one of the lab's own notebook; None if it must not be recorded.
            batch: See ``Record.batch``.
            patient: Whether to wait if the queue is full, because the request is part of one that was accepted.

        Raises:
            LabError: see ``ModelManager.submit_all``.
        """
        request = replace(request, request_id=request_id, client=client)
        if is_recorded := own is not None and self.recording.includes(own=own):
            request = replace(with_seed(request), needs_ids=True)
        try:
            if request.steer and not local:
                raise AdminForbiddenError(
                    "only callers on the server's machine may send steer: programs that call http://127.0.0.1 or "
                    "http://localhost directly or send the API key; leave steer out"
                )
            streams = await self._manager.submit_all(request, choices, local=local, patient=patient)
        except (LabError, asyncio.CancelledError) as exc:
            # Not the model in the request: a caller can choose it freely, and it is a label of a metric.
            model = self._manager.snapshot.model or ""
            self._end_without_report("chat", request_id, model, exc, request=request, index=first)
            raise
        for at, stream in enumerate(streams):
            self.timelines.add(
                stream.steps,
                request_id=request_id or "",
                index=first + at,
                model=stream.model,
                prompt_tokens=len(stream.prompt),
            )
        return [
            Generation(
                stream,
                request=request,
                request_id=request_id or "",
                index=first + at,
                observe=self._end,
                recorded=self._recorded(request, stream, at, own=bool(own), batch=batch) if is_recorded else None,
                keep=self._keep_answers,
            )
            for at, stream in enumerate(streams)
        ]

    def _recorded(
        self,
        request: GenerationRequest,
        stream: TokenStream | Generation,
        choice: int,
        *,
        own: bool,
        batch: bool = False,
    ) -> RecordedGeneration | None:
        """Return the beginning of a record; None if the model was unloaded since."""
        model = next((each for each in self._manager.residents if each.entry.id == stream.model), None)
        if model is None:
            return None
        return RecordedGeneration(
            request=request,
            own=own,
            batch=batch,
            choice=choice,
            model=model,
            prompt=stream.prompt,
            steps=stream.steps,
        )

    async def regenerate(self, record: Record) -> Record:
        """Generate the answer of a record again, with the same model, prompt, settings and seed.

        Returns the record of the new answer, which is not stored.

        Raises:
            LabError: see ``ModelManager.submit_all``.
        """
        request = request_from_json(record.request, model=record.provenance.model)
        return await self.answer(request, choice=record.choice)

    async def answer(self, request: GenerationRequest, *, choice: int = 0) -> Record:
        """Generate an answer, and return its record, which is not stored.

        Args:
            choice: Index of the answer among those to the same request.

        Raises:
            LabError: see ``ModelManager.submit_all``.
        """
        request = replace(with_seed(request), needs_ids=True)
        # The seed of an answer depends on its index among the answers to the request.
        generations = await self.submit(request, choices=choice + 1, local=True, own=None)
        async with closing_all(generations):
            generation = generations[-1]
            recorded = self._recorded(request, generation, choice, own=True)
            if recorded is None:
                raise NotLoadedError(f"{generation.model} has just been unloaded; load it again")
            recorded.deltas.append(await generation.read_all())
        report = generation.final_report()
        return self.recording.record(recorded, report.finish_reason, report)

    async def continue_answer(self, continuation: Continuation, *, own: bool | None = True) -> Generation:
        """Generate an answer again from a given position. The stream begins with the tokens before it.

        Args:
            own: See ``submit``.

        Raises:
            LabError: see ``ModelManager.submit_all``.
        """
        request = continued_request(continuation)
        (generation,) = await self.submit(request, local=True, own=own, patient=True)
        return generation

    async def score(
        self,
        tokens: Sequence[int],
        *,
        model: str | None,
        top: int,
        start: int = 0,
        distributions: bool = False,
        steer: Sequence[SteeringVector] = (),
    ) -> tuple[TokenLogprob, ...]:
        """Return the log-probability of each token after those before it, with ``top`` alternatives.

        Args:
            start: Position of the first token that is needed. The returned tokens begin there.
            distributions: Whether entropies and high ranks are needed, even if the engine takes long to compute them.
            steer: Vectors that are added to the residual stream.

        Raises:
            LabError: see ``ModelManager.submit_all``.
        """
        request = GenerationRequest(
            prompt=TokenPrompt(tokens=tuple(tokens)),
            model=model,
            sampling=Sampling(temperature=0),
            max_tokens=0,
            top_logprobs=top,
            score_prompt=True,
            score_from=start,
            score_distributions=distributions,
            steer=tuple(steer),
        )
        (generation,) = await self.submit(request, local=True, own=None)
        await generation.read_all()
        assert generation.prompt_scores is not None
        return generation.prompt_scores.tokens[start:]

    async def decode(self, tokens: tuple[int, ...]) -> str:
        """Convert token ids to text with the tokenizer of the main model."""
        return await self._manager.decode(tokens)

    # Vectors and scores

    async def embed(
        self, request: EmbeddingRequest, request_id: str | None = None, *, local: bool = False
    ) -> Embeddings:
        """Return a vector for each input. Cancelling the wait cancels the work.

        Raises:
            LabError: see ``ModelManager.submit_embedding``.
            EngineError: the model computed values that are not finite.
        """
        model = self._id_of(request.model, EMBEDDING, local=local)
        submitting = self._manager.submit_embedding(request, local=local)
        return await self._encode(request, request_id, model, submitting, lambda it: it.vectors)

    async def rerank(self, request: RerankRequest, request_id: str | None = None, *, local: bool = False) -> Ranking:
        """Return a score for each document. Cancelling the wait cancels the work.

        Raises:
            LabError: see ``embed``.
        """
        model = self._id_of(request.model, RERANK, local=local)
        submitting = self._manager.submit_rerank(request, local=local)
        return await self._encode(request, request_id, model, submitting, lambda it: it.scores)

    def _id_of(self, name: str | None, kinds: Kinds, *, local: bool) -> str:
        """Return the id of the model in memory that will answer a request; empty if there is none."""
        resident = self._manager.model_for(name, kinds, local=local)
        return resident.entry.id if resident is not None else ""

    async def _encode(
        self,
        request: EmbeddingRequest | RerankRequest,
        request_id: str | None,
        model: str,
        submitting: Coroutine[Any, Any, Pending[Result]],
        values: Callable[[Result], Vectors],
    ) -> Result:
        """Wait for the result, and report the end.

        Raises:
            EngineError: a value is NaN or infinite.
        """
        kind: Kind = "embedding" if isinstance(request, EmbeddingRequest) else "rerank"
        try:
            result = await (await submitting).result()
            # JSON cannot represent other values.
            if not np.isfinite(values(result)).all():
                raise EngineError(
                    f"{result.report.model} computed values that are not finite (NaN or infinity): its weights are "
                    "damaged, or too large for their data type; fetch it again, or start the server with dtype float32"
                )
        except (Exception, asyncio.CancelledError) as exc:
            self._end_without_report(kind, request_id, model, exc, request=request)
            raise
        self._end(
            RequestEnd(
                kind=kind,
                request_id=request_id or "",
                model=result.report.model,
                outcome="stop",
                report=result.report,
                request=request,
            )
        )
        return result

    # Ends

    def _end_without_report(
        self,
        kind: Kind,
        request_id: str | None,
        model: str,
        exc: BaseException,
        *,
        request: GenerationRequest | EmbeddingRequest | RerankRequest,
        index: int = 0,
    ) -> None:
        """Report the end of a request that was refused or cancelled, or that failed."""
        code = None if isinstance(exc, asyncio.CancelledError) else getattr(exc, "code", LabError.code)
        outcome: Outcome = "cancelled" if code is None else "error"
        self._end(
            RequestEnd(
                kind=kind,
                request_id=request_id or "",
                index=index,
                model=model,
                outcome=outcome,
                code=code,
                request=request,
            )
        )

    def _end(self, end: RequestEnd) -> None:
        if end.steps is not None:
            report = end.report if isinstance(end.report, GenerationReport) else None
            self.timelines.end(end.steps, end.outcome, end.code, report)
        # Recorded first, so that the reader of an event finds the record.
        if end.recorded is not None:
            report = end.report if isinstance(end.report, GenerationReport) else None
            self.recording.end(end.recorded, end.outcome, end.code, report)
        self._feed.publish(end.event())
        for observe in self._observers:
            observe(end)
