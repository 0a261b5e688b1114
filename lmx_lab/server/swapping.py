"""``--swap``: a request that names another model on disk loads it first, whoever asks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import replace

from lmx_lab.engine import Engine, EngineSnapshot, GenerationRequest, LoadReport, TokenStream
from lmx_lab.errors import (
    GenerationTimeoutError,
    ModelBusyError,
    ModelNotFoundError,
    NotLoadedError,
    QueueFullError,
)
from lmx_lab.server.loading import ModelLoader
from lmx_lab.settings import Settings
from lmx_lab.weights import Catalog

TRIES = 3
"""How often an administrator's load or unload may come between a request's load and its submission."""


class ModelSwap:
    """The entrance of the engine in swap mode: one request at a time, in arrival order, brings its model and goes in.

    So no request is lost between its load and its submission, and none starves: whoever comes later, for whichever
    model, waits behind it. Those who wait are as many as the engine's own queue would take.
    """

    def __init__(self, *, engine: Engine, catalog: Catalog, loader: ModelLoader, settings: Settings) -> None:
        self._engine = engine
        self._catalog = catalog
        self._loader = loader
        self._limit = settings.slots + settings.queue_limit
        self._timeout_s = settings.request_timeout_s
        self._turn = asyncio.Lock()
        self._waiting = 0

    async def submit(self, request: GenerationRequest, choices: int) -> list[TokenStream]:
        """``Engine.submit_all`` for the model that the request names, loaded first if it is on disk and is not loaded.

        Raises:
            ModelNotFoundError: it is not on disk; nothing is downloaded here.
            UnusableModelError, OutOfMemoryError: it could not be loaded; the message says what is loaded now.
            QueueFullError: too many wait for a model.
            GenerationTimeoutError: the request's deadline passed before its model was there.
        """
        with self._place_in_line():
            try:
                async with asyncio.timeout(request.timeout_s or self._timeout_s), self._turn:
                    return await self._enter(request, choices)
            except TimeoutError:
                raise GenerationTimeoutError(
                    f"the model was not loaded within {self._timeout_s:g} s, the request's limit", param="model"
                ) from None

    @contextlib.contextmanager
    def _place_in_line(self) -> Iterator[None]:
        if self._waiting >= self._limit:
            said = f"{self._limit} requests wait for their model; try again when some have been served"
            raise QueueFullError(said, retry_after_s=1)
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1

    async def _enter(self, request: GenerationRequest, choices: int) -> list[TokenStream]:
        for _ in range(TRIES - 1):
            brought = await self._bring(request)
            with contextlib.suppress(NotLoadedError):
                return await self._engine.submit_all(brought, choices)
        return await self._engine.submit_all(await self._bring(request), choices)

    async def _bring(self, request: GenerationRequest) -> GenerationRequest:
        """Load what the request names, if it is not loaded; the request by the loaded model's own id."""
        await self._loader.settled()
        now = self._engine.snapshot
        name = request.model or _remembered(now)
        if name is None or name == now.model:
            return request
        try:
            # Not local: ids of the catalog only, no paths.
            entry = await asyncio.to_thread(self._catalog.resolve, name, local=False)
        except ModelNotFoundError:
            if request.model is None:
                return request
            raise
        return replace(request, model=(await self._load(entry.id)).model)

    async def _load(self, name: str) -> LoadReport:
        while True:
            try:
                return await self._loader.load(name, local=False, finish_queued=True)
            except ModelBusyError:
                await self._loader.settled()


def _remembered(now: EngineSnapshot) -> str | None:
    """What "whatever is loaded" means while nothing is; not a model that did not fit, it would not fit again."""
    return now.unloaded_model if now.model is None and now.unload_cause != "memory" else None
