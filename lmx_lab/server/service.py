"""What the routes, the socket and the notebook's verbs share: a request becomes running generations."""

from __future__ import annotations

import asyncio
from importlib.metadata import version

from lmx_lab.engine import Engine, GenerationRequest, TokenStream
from lmx_lab.errors import LabError, ModelNotFoundError, OtherModelLoadedError, QueueFullError
from lmx_lab.feed import Feed
from lmx_lab.server.answers import Answer
from lmx_lab.server.generations import Generation, Observer, Outcome, RequestEnd
from lmx_lab.server.loading import Event
from lmx_lab.server.swapping import ModelSwap
from lmx_lab.server.translate import ANY_MODEL, generation_request
from lmx_lab.weights import Catalog
from lmx_lab.wire.chat import ChatRequest

FINGERPRINT = f"mlx-{version('mlx')}"


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

    async def start(self, request: ChatRequest, request_id: str | None = None) -> tuple[Answer, list[Generation]]:
        """Accept a chat request: its answer's shape and a generation for each of its ``n`` choices.

        Raises:
            LabError: as ``submit``.
        """
        asked = generation_request(request)
        generations = await self.submit(asked, choices=request.choices, request_id=request_id)
        answer = Answer(model=generations[0].model, fingerprint=FINGERPRINT, logprobs=bool(request.logprobs))
        return answer, generations

    async def submit(
        self, request: GenerationRequest, *, choices: int = 1, request_id: str | None = None, patient: bool = False
    ) -> list[Generation]:
        """Accept all choices of a request, or none; what is wrong with it is raised here, before the first token.

        A ``patient`` request waits where the queue is full: it is part of one that is under way.

        Raises:
            NotLoadedError, ModelNotFoundError: the model it names is not loaded, or not there at all.
            CallerError, QueueFullError: as ``Engine.submit``; in swap mode also as ``ModelSwap.submit``.
        """
        try:
            streams = await (self._in_time if patient else self._accepted)(request, choices)
        except LabError as exc:
            self._refused(request, request_id, "error", exc.code)
            raise
        except asyncio.CancelledError:
            self._refused(request, request_id, "cancelled")
            raise
        model = self._engine.snapshot.model or request.model or ANY_MODEL
        return [Generation(stream, request_id=request_id or "", model=model, observe=self._ended) for stream in streams]

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
            return await self._swap.submit(request, choices)
        try:
            return await self._engine.submit_all(request, choices)
        except OtherModelLoadedError as exc:
            await self._check_known(request.model or ANY_MODEL, exc)
            raise

    async def _check_known(self, model: str, exc: OtherModelLoadedError) -> None:
        entries = await asyncio.to_thread(self._catalog.scan)
        if all(entry.id != model for entry in entries):
            loaded = self._engine.snapshot.model
            missing = f"there is no model {model[:200]!r} on disk; {loaded} is loaded; GET /v1/models lists all"
            raise ModelNotFoundError(missing, param="model") from exc

    def _refused(
        self, request: GenerationRequest, request_id: str | None, outcome: Outcome, code: str | None = None
    ) -> None:
        # The name as it was asked for may be anything; a label of a metric must not.
        model = self._engine.snapshot.model or ""
        self._ended(RequestEnd(request_id=request_id or "", model=model, outcome=outcome, code=code))

    def _ended(self, end: RequestEnd) -> None:
        self._feed.publish(end.event())
        if self._observe is not None:
            self._observe(end)
