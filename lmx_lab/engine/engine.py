"""The engine as the rest of the program sees it: an async face over one thread.

Requests go in as commands on a queue; tokens come back through ``TokenStream``, vectors and scores as numpy arrays.
Any number of event loops may use one engine at the same time.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
import weakref
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar

from lmx_lab.engine import memory
from lmx_lab.engine.core import EngineCore
from lmx_lab.engine.generation import Generation
from lmx_lab.engine.intake import Intake
from lmx_lab.engine.loaded import check_fits
from lmx_lab.engine.requests import (
    EmbeddingRequest,
    Embeddings,
    EngineSnapshot,
    GenerationRequest,
    LoadReport,
    Ranking,
    RerankRequest,
)
from lmx_lab.engine.stream import TokenStream
from lmx_lab.engine.texts import Pending, Texts
from lmx_lab.engine.thread import EngineThread
from lmx_lab.errors import LabError, UnusableModelError
from lmx_lab.settings import Settings
from lmx_lab.weights import Kind, ModelEntry

log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")


def _frameless(verb: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """A deliberate error leaves without the frames that raised it: some hold the model, and whoever keeps the error (a
    notebook keeps the last one) would keep the weights in memory.
    """

    @functools.wraps(verb)
    async def without_frames(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return await verb(*args, **kwargs)
        except LabError as exc:
            failure = exc.with_traceback(None)
        failure.__context__ = None
        raise failure

    return without_frames


class Engine:
    """``async with Engine(settings) as engine``; or ``start()`` and ``stop()`` from anywhere, both idempotent."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._thread = EngineThread(settings, awaited=lambda: self._intake.tokenizing or self._texts.tokenizing)
        self._intake = Intake(self._thread, settings)
        self._texts = Texts(self._thread, settings)
        self._made_at = time.monotonic()
        self._pins: dict[Kind, ModelEntry] = {}

    # Lifetime

    def start(self) -> None:
        """Start the engine thread, or a new one after the old one died."""
        self._intake.start()
        self._thread.start()

    def stop(self) -> None:
        """End every request, free the memory, join the thread. Blocks until the current step is over."""
        self._thread.stop()
        self._texts.stop()
        self._intake.stop()
        self._pins.clear()

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self.start)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.stop)

    # Models

    @property
    def snapshot(self) -> EngineSnapshot:
        """The state as of the last step. Never blocks."""
        return self._thread.snapshot

    @property
    def uptime_s(self) -> float:
        return time.monotonic() - self._made_at

    @property
    def alive(self) -> bool:
        return self._thread.alive

    def check_fits(self, entry: ModelEntry) -> None:
        """Refuse what cannot be loaded, before anything is unloaded for it.

        Raises:
            UnusableModelError: this engine cannot run such a model.
            OutOfMemoryError: it is larger than what may be used.
        """
        check_fits(entry, limit_bytes=memory.limit_bytes(self.settings.memory_limit_bytes))

    async def load(self, entry: ModelEntry, *, finish_queued: bool = False) -> LoadReport:
        """Load ``entry`` in the place of what is loaded, after running requests have ended (``drain_s`` at most).

        Requests in the queue end with an error; with ``finish_queued`` they are served first, within the same time.

        Raises:
            UnusableModelError, OutOfMemoryError: see the message for what is loaded now.
        """
        self.check_fits(entry)
        await self._revive()
        why, drain_s = f"{entry.id} is loaded in the model's place", self.settings.drain_s

        def begin(core: EngineCore) -> Future[LoadReport]:
            if (already := core.already(entry)) is not None:
                return _done(already)
            return core.swap(lambda: core.load(entry), why=why, timeout_s=drain_s, finish_queued=finish_queued)

        return await asyncio.wrap_future(await self._thread.call(begin))

    async def pin(self, entry: ModelEntry) -> LoadReport:
        """Keep an embedding model or a reranker in memory beside the loaded model, until the engine stops.

        Raises:
            UnusableModelError, OutOfMemoryError: nothing has changed.
        """
        if entry.kind == "chat":
            raise UnusableModelError(f"{entry.id} is a chat model; only embedding models and rerankers stay beside one")
        self.check_fits(entry)
        await self._revive()
        report = await self._thread.call(lambda core: core.pin(entry))
        self._pins[entry.kind] = entry
        return report

    async def _revive(self) -> None:
        """Start the thread if it does not run, with what was pinned."""
        if self.alive and self._thread.dead is None:
            return
        await asyncio.to_thread(self.start)
        for entry in list(self._pins.values()):
            try:
                await self._thread.call(functools.partial(_pin, entry))
            except LabError as exc:
                log.warning("%s, which was pinned, could not be loaded again: %s", entry.id, exc.message)

    async def unload(self) -> int:
        """Unload the model after running requests have ended; returns the bytes freed, 0 when there was none."""
        if not self.alive:
            return 0
        return await self._swap(EngineCore.unload, "the model is unloaded")

    async def quiesce(self, timeout_s: float) -> None:
        """Let running requests end, for at most ``timeout_s``; the rest, and those that wait, end with an error."""
        if self.alive:
            await self._swap(lambda core: None, "the server is stopped", timeout_s, pinned_too=True)

    # Requests

    async def submit(self, request: GenerationRequest) -> TokenStream:
        """Accept a request. What is wrong with it is raised here, before its first token.

        Raises:
            NotLoadedError: no model, or not the one that ``request.model`` names.
            OutOfMemoryError: the model had to be unloaded for lack of memory.
            ContextLengthError: the prompt leaves no room in the model's context.
            InvalidRequestError: the prompt cannot be made into tokens, or a token id is not in the vocabulary.
            QueueFullError: too many requests wait.
            EngineDeadError: the engine thread is gone.
        """
        (stream,) = await self.submit_all(request, choices=1)
        return stream

    @_frameless
    async def submit_all(self, request: GenerationRequest, choices: int) -> list[TokenStream]:
        """Accept a request for several answers, all or none. Its prompt is computed once; seeds differ by choice.

        Raises: as ``submit``.
        """
        generations = await self._intake.generations(request, choices)
        streams = [self._stream(generation) for generation in generations]
        try:
            await self._thread.call(lambda core: core.submit(generations))
        except LabError as exc:
            for generation in generations:
                generation.mailbox.deliver(exc)
            raise
        # Leaving here by any other way, cancellation included, drops the streams, which cancels the generations.
        return streams

    async def embed(self, request: EmbeddingRequest) -> Embeddings:
        """The vector of each input. Cancelling the wait gives the work up.

        Raises: as ``submit_embedding``, and
            GenerationTimeoutError, EngineError: it began, and did not end well.
        """
        return await (await self.submit_embedding(request)).result()

    @_frameless
    async def submit_embedding(self, request: EmbeddingRequest) -> Pending[Embeddings]:
        """Accept inputs to be embedded; what is wrong with them is raised here.

        Raises:
            NotLoadedError: no embedding model is in memory, or not the one that ``request.model`` names.
            InvalidRequestError: that is no embedding model; a text that is none; more dimensions than a vector has.
            ContextLengthError: an input is longer than the model takes.
            QueueFullError: too many requests are under way.
        """
        return await self._texts.embed(request)

    async def rerank(self, request: RerankRequest) -> Ranking:
        """How relevant each document is to the query, by a reranker or, without one, by an embedding model.

        Raises: as ``embed``.
        """
        return await (await self.submit_rerank(request)).result()

    @_frameless
    async def submit_rerank(self, request: RerankRequest) -> Pending[Ranking]:
        """Accept documents to be ranked; raises as ``submit_embedding``."""
        return await self._texts.rerank(request)

    @_frameless
    async def decode(self, tokens: Sequence[int]) -> str:
        """The text of token ids as the loaded model's tokenizer shows it.

        Raises:
            NotLoadedError: no model is loaded.
        """
        return await self._intake.decode(tokens)

    def _stream(self, generation: Generation) -> TokenStream:
        # Weakly: a stream that somebody keeps must not keep the model in memory.
        cancel = functools.partial(_cancel, weakref.ref(generation))
        return TokenStream(generation.mailbox, lambda: self._thread.post(cancel), tuple(generation.prompt))

    async def _swap(
        self,
        perform: Callable[[EngineCore], T],
        why: str,
        timeout_s: float | None = None,
        *,
        pinned_too: bool = False,
    ) -> T:
        drain_s = self.settings.drain_s if timeout_s is None else timeout_s

        def begin(core: EngineCore) -> Future[T]:
            return core.swap(lambda: perform(core), why=why, timeout_s=drain_s, pinned_too=pinned_too)

        return await asyncio.wrap_future(await self._thread.call(begin))


def _done(result: T) -> Future[T]:
    future: Future[T] = Future()
    future.set_result(result)
    return future


def _pin(entry: ModelEntry, core: EngineCore) -> None:
    core.pin(entry)


def _cancel(ended: weakref.ref[Generation], core: EngineCore) -> None:
    if (generation := ended()) is not None:
        core.cancel(generation)
