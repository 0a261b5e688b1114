"""What the routes, the socket and the notebook's verbs share: a request becomes running generations."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from lmx_lab.broadcast import Feed
from lmx_lab.engine import Engine, GenerationRequest, TokenStream
from lmx_lab.errors import LabError, NotLoadedError, QueueFullError
from lmx_lab.server.generation import Generation, Observer, Outcome, RequestEnd
from lmx_lab.server.loading import Event
from lmx_lab.server.naming import loaded_id, not_loaded, shown_id
from lmx_lab.server.serialize import Answer
from lmx_lab.server.swap import ModelSwap
from lmx_lab.server.translate import generation_request
from lmx_lab.weights import Catalog
from lmx_lab.wire.chat import ChatRequest
from lmx_lab.wire.generation import ANY_MODEL


class ChatService:
    """Submits requests and tells, exactly once each, how what they started has ended.

    Args:
        swap: Loads what a request names; None refuses what is not loaded.
        observe: Called on the loop with every end, beside the ``RequestEvent`` in ``feed``.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        catalog: Catalog,
        feed: Feed[Event],
        swap: ModelSwap | None = None,
        observe: Observer | None = None,
    ) -> None:
        self._engine = engine
        self._catalog = catalog
        self._feed = feed
        self._swap = swap
        self._observe = observe

    @property
    def fingerprint(self) -> str:
        """What computes, and its version."""
        return self._engine.fingerprint

    async def start(
        self, request: ChatRequest, request_id: str | None = None, *, local: bool = False
    ) -> tuple[Answer, list[Generation]]:
        """Accept a chat request: its answer's shape and a generation for each of its ``n`` choices.

        Raises:
            LabError: as ``submit``.
        """
        asked = generation_request(request)
        generations = await self.submit(asked, choices=request.choices, request_id=request_id, local=local)
        model = shown_id(generations[0].model, local=local)
        answer = Answer(model=model, fingerprint=self.fingerprint, logprobs=bool(request.logprobs))
        return answer, generations

    async def submit(
        self,
        request: GenerationRequest,
        *,
        choices: int = 1,
        first: int = 0,
        request_id: str | None = None,
        local: bool = False,
        patient: bool = False,
    ) -> list[Generation]:
        """Accept all choices of a request, or none; what is wrong with it is raised here, before the first token.

        Args:
            first: The number of the first choice in the answer.
            local: Asked by a program on this machine, which may name the loaded model by its path.
            patient: Wait where the queue is full: the request is part of one that is under way.

        Raises:
            NotLoadedError, ModelNotFoundError: the model it names is not loaded, or not there at all.
            CallerError, QueueFullError: as ``Engine.submit``; in swap mode also as ``ModelSwap.submit``.
        """
        request = replace(request, model=loaded_id(request.model, self._engine.snapshot, local=local))
        try:
            streams = await (self._in_time if patient else self._accepted)(request, choices)
        except LabError as exc:
            self._refused(request_id, first, "error", exc.code)
            raise
        except asyncio.CancelledError:
            self._refused(request_id, first, "cancelled")
            raise
        model = self._engine.snapshot.model or request.model or ANY_MODEL
        return [
            Generation(stream, request_id=request_id or "", index=first + at, model=model, observe=self._ended)
            for at, stream in enumerate(streams)
        ]

    async def decode(self, tokens: tuple[int, ...]) -> str:
        """The text of token ids, by the loaded model."""
        return await self._engine.decode(tokens)

    async def _in_time(self, request: GenerationRequest, choices: int) -> list[TokenStream]:
        while True:
            try:
                return await self._accepted(request, choices)
            except QueueFullError as exc:
                await asyncio.sleep(exc.retry_after_s or 1)

    async def _accepted(self, request: GenerationRequest, choices: int) -> list[TokenStream]:
        if self._swap is not None:
            return await self._swap.submit(request, lambda brought: self._engine.submit_all(brought, choices))
        try:
            return await self._engine.submit_all(request, choices)
        except NotLoadedError as exc:
            if request.model is None:
                raise
            found = await self._catalog.alisting()
            raise not_loaded(exc, request.model, found.entries, self._engine.snapshot) from exc

    def _refused(self, request_id: str | None, first: int, outcome: Outcome, code: str | None = None) -> None:
        # The name as it was asked for may be anything; a label of a metric must not.
        model = self._engine.snapshot.model or ""
        self._ended(RequestEnd(request_id=request_id or "", index=first, model=model, outcome=outcome, code=code))

    def _ended(self, end: RequestEnd) -> None:
        self._feed.publish(end.event())
        if self._observe is not None:
            self._observe(end)
