"""``--swap``: a request that names another model on disk loads it first, whoever asks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import TypeVar

from lmx_lab.engine import EmbeddingRequest, Engine, GenerationRequest, RerankRequest
from lmx_lab.engine.swap_order import Line, Ticket
from lmx_lab.errors import (
    GenerationTimeoutError,
    InvalidRequestError,
    ModelBusyError,
    ModelNotFoundError,
    NotLoadedError,
    QueueFullError,
)
from lmx_lab.server.loading import ModelLoader
from lmx_lab.server.naming import CHAT, Kinds, rests_by_path, unknown_model, wrong_kind
from lmx_lab.settings import Settings
from lmx_lab.values.models import LoadReport, LoadSpec, ModelEntry
from lmx_lab.weights import Catalog
from lmx_lab.weights.threads import in_thread

R = TypeVar("R", GenerationRequest, EmbeddingRequest, RerankRequest)
T = TypeVar("T")
TRIES = 3
"""How often an administrator's load or unload may come between a request's load and its submission."""
LOOK_AGAIN_S = 0.02


class ModelSwap:
    """The entrance of the engine in swap mode: one request at a time brings its model, if need be, and goes in.

    So no request is lost between its load and its submission. Whose turn it is, ``Line`` says. Those who wait are as
    many as the engine's own queue would take.
    """

    def __init__(self, *, engine: Engine, catalog: Catalog, loader: ModelLoader, settings: Settings) -> None:
        self._engine = engine
        self._catalog = catalog
        self._loader = loader
        self._settings = settings
        self._line = Line(share=settings.slots)
        self._called: dict[Ticket, asyncio.Event] = {}
        """Everybody who is in line or inside."""
        self._inside: Ticket | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._load_s: float | None = None
        """How long the last exchange of models took, the end of running requests included."""

    async def submit(self, request: R, enter: Callable[[R], Awaitable[T]], *, kinds: Kinds = CHAT) -> T:
        """``enter`` for the model that the request names, loaded first if it is on disk and is not loaded.

        Args:
            enter: Given the request with the loaded model's own id; until it returns, nobody else goes in.
            kinds: Of models that could answer the request; others are not loaded for it.

        Raises:
            ModelNotFoundError: it is not on disk; nothing is downloaded here.
            InvalidRequestError: it is of another kind.
            UnusableModelError, OutOfMemoryError: it could not be loaded; the message says what is loaded now.
            QueueFullError: too many wait for a model.
            GenerationTimeoutError: the request's deadline passed before its model was there.
        """
        limit_s = request.timeout_s or self._settings.request_timeout_s
        try:
            async with asyncio.timeout(limit_s), self._turn(request.model, kinds):
                return await self._enter(request, enter, kinds)
        except TimeoutError:
            raise GenerationTimeoutError(
                f"the model was not loaded within {limit_s:g} s, the request's limit", param="model"
            ) from None

    @contextlib.asynccontextmanager
    async def _turn(self, model: str | None, kinds: Kinds) -> AsyncIterator[None]:
        """The block runs alone, when its turn has come."""
        self._check_room()
        ticket = self._line.ticket(model, self._now())
        called = self._called[ticket] = asyncio.Event()
        try:
            # Before it waits: nobody should wait for a model that is not there, nor hold up others for it.
            await self._check_name(model, kinds)
            self._line.add(ticket)
            self._call_next()
            await called.wait()
            yield
        finally:
            del self._called[ticket]
            self._leave(ticket)

    def _leave(self, ticket: Ticket) -> None:
        if self._inside is ticket:
            self._inside = None
        self._line.discard(ticket)
        self._call_next()

    def _check_room(self) -> None:
        slots, queue_limit = self._settings.slots, self._settings.queue_limit
        if len(self._called) < slots + queue_limit:
            return
        said = f"{len(self._called)} requests wait for their model, at most {slots + queue_limit} may (slots {slots} + "
        said += f"queue_limit {queue_limit}); try again when some have been served"
        if self._load_s is not None:
            said += f"; the last exchange of models took {self._load_s:.1f} s"
        raise QueueFullError(said, retry_after_s=self._load_s or 1.0)

    async def _check_name(self, model: str | None, kinds: Kinds) -> None:
        if model is not None and model != self._engine.snapshot.model:
            await self._resolve(model, kinds, local=rests_by_path(model, self._engine.snapshot))

    def _call_next(self) -> None:
        """Let the next one in, if nobody is inside; look again soon if the line says that it is too early."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._inside is not None or not self._line:
            return
        ticket = None if self._loader.changing else self._take()
        if ticket is None:
            self._timer = asyncio.get_running_loop().call_later(LOOK_AGAIN_S, self._call_next)
            return
        self._inside = ticket
        self._called[ticket].set()

    def _take(self) -> Ticket | None:
        now = self._engine.snapshot
        busy = now.active_requests + now.queued_requests > 0
        return self._line.take(now.model or now.resting_model, now=self._now(), busy=busy)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    async def _enter(self, request: R, enter: Callable[[R], Awaitable[T]], kinds: Kinds) -> T:
        for _ in range(TRIES - 1):
            brought = await self._bring(request, kinds)
            with contextlib.suppress(NotLoadedError):
                return await enter(brought)
        return await enter(await self._bring(request, kinds))

    async def _bring(self, request: R, kinds: Kinds) -> R:
        """Load what the request names, if it is not loaded; the request by the loaded model's own id."""
        await self._loader.settled()
        now = self._engine.snapshot
        name = request.model or now.resting_model
        if name is None or name == now.model:
            return request
        # Now: when another model has come between, nothing says any more that the path was one that rested.
        local = rests_by_path(name, now)
        try:
            entry = await self._resolve(name, kinds, local=local)
        except (ModelNotFoundError, InvalidRequestError):
            if request.model is None:
                return request
            raise
        return replace(request, model=(await self._load(entry.id, local=local)).model)

    async def _resolve(self, name: str, kinds: Kinds, *, local: bool) -> ModelEntry:
        try:
            entry = await in_thread(lambda: self._catalog.resolve(name, local=local))
        except ModelNotFoundError as exc:
            raise unknown_model(name, self._engine.snapshot, kinds) from exc
        if not entry.answers(kinds):
            raise wrong_kind(entry, kinds)
        return entry

    async def _load(self, name: str, *, local: bool) -> LoadReport:
        while True:
            began = self._now()
            try:
                report = await self._loader.load(LoadSpec(model=name), local=local, finish_queued=True)
            except ModelBusyError:
                await self._loader.settled()
            else:
                self._load_s = self._now() - began
                return report
