"""The engine on MLX: an async face over one thread.

Requests go in as commands on a queue; tokens come back through ``TokenStream``, vectors and scores as numpy arrays.
Any number of event loops may use one engine at the same time.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import weakref
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from importlib.metadata import version
from typing import Any, ParamSpec, TypeVar

from lmx_lab.engine.interface import Capabilities
from lmx_lab.engine.mlx import memory
from lmx_lab.engine.mlx.model import check_fits
from lmx_lab.engine.mlx.prepare import Intake
from lmx_lab.engine.mlx.prepare_texts import Texts
from lmx_lab.engine.mlx.request import Generation
from lmx_lab.engine.mlx.state import EngineCore
from lmx_lab.engine.mlx.thread import EngineThread
from lmx_lab.engine.pending import Pending
from lmx_lab.engine.requests import EmbeddingRequest, Embeddings, GenerationRequest, Ranking, RerankRequest
from lmx_lab.engine.stream import TokenStream
from lmx_lab.errors import EngineError, LabError, UnusableModelError
from lmx_lab.settings import Settings
from lmx_lab.values.engine import EngineSnapshot
from lmx_lab.values.models import Kind, LoadReport, ModelEntry

log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")


def _frameless(verb: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """A deliberate error leaves without the frames that raised it: some hold the model, and whoever keeps the error (a
    notebook keeps the last one) would keep the weights in memory. Any other error becomes a deliberate one.
    """

    @functools.wraps(verb)
    async def without_frames(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return await verb(*args, **kwargs)
        except LabError as exc:
            failure = exc.with_traceback(None)
        except Exception as exc:
            log.exception("a request could not be begun")
            failure = EngineError(f"the request could not be begun: {type(exc).__name__}: {exc}")
        failure.__context__ = None
        raise failure

    return without_frames


class MlxEngine:
    """``InferenceEngine`` for models in MLX's format; ``start`` and ``stop`` are idempotent."""

    capabilities = Capabilities(
        prompt_scores=True,
        thinking_budget=True,
        logprobs_with_own_tools=True,
        input_types=True,
    )

    fingerprint = f"mlx-{version('mlx')}"

    def __init__(self, settings: Settings, *, beside_bytes: Callable[[], int] = lambda: 0) -> None:
        """
        Args:
            beside_bytes: What other engines take of the memory limit.
        """
        self.settings = settings
        self._thread = EngineThread(
            settings, awaited=lambda: self._intake.tokenizing or self._texts.tokenizing, beside_bytes=beside_bytes
        )
        self._intake = Intake(self._thread, settings)
        self._texts = Texts(self._thread, settings)
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

    # Models

    @property
    def snapshot(self) -> EngineSnapshot:
        """The state as of the last step. Never blocks."""
        return self._thread.snapshot

    @property
    def used(self) -> bool:
        """See ``InferenceEngine.used``."""
        return self._thread.core is not None

    @property
    def alive(self) -> bool:
        return self._thread.alive

    def check_fits(self, entry: ModelEntry) -> None:
        """See ``InferenceEngine.check_fits``."""
        check_fits(entry, limit_bytes=memory.limit_bytes(self.settings.memory_limit_bytes))

    async def load(self, entry: ModelEntry, *, finish_queued: bool = False) -> LoadReport:
        """See ``InferenceEngine.load``."""
        self.check_fits(entry)
        await self._revive()
        why, drain_s = f"{entry.id} is loaded in the model's place", self.settings.drain_s

        def begin(core: EngineCore) -> Future[LoadReport]:
            if (already := core.already(entry)) is not None:
                return _done(already)
            return core.swap(lambda: core.load(entry), why=why, timeout_s=drain_s, finish_queued=finish_queued)

        return await asyncio.wrap_future(await self._thread.call(begin))

    async def pin(self, entry: ModelEntry) -> LoadReport:
        """See ``InferenceEngine.pin``."""
        if entry.kind == "chat":
            raise UnusableModelError(f"{entry.id} is a chat model; only embedding models and rerankers stay beside one")
        self.check_fits(entry)
        await self._revive()
        report = await self._thread.call(lambda core: core.pin(entry))
        self._pins[entry.kind] = entry
        return report

    async def unpin(self, kind: Kind) -> None:
        """See ``InferenceEngine.unpin``."""
        self._pins.pop(kind, None)
        if self.alive:
            await self._thread.call(lambda core: core.unpin(kind))

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

    async def unload(self, *, why: str = "the model is unloaded", finish_queued: bool = False) -> int:
        """See ``InferenceEngine.unload``; ``why`` is what requests are told that do not end in time."""
        if not self.alive:
            return 0
        return await self._swap(EngineCore.unload, why, finish_queued=finish_queued)

    async def quiesce(self, timeout_s: float) -> None:
        """See ``InferenceEngine.quiesce``."""
        if self.alive:
            await self._swap(lambda core: None, "the server is stopped", timeout_s, pinned_too=True)

    # Requests

    @_frameless
    async def submit_all(self, request: GenerationRequest, choices: int) -> list[TokenStream]:
        """See ``InferenceEngine.submit_all``. The prompt is computed once for all choices."""
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

    @_frameless
    async def submit_embedding(self, request: EmbeddingRequest) -> Pending[Embeddings]:
        """See ``InferenceEngine.submit_embedding``."""
        return await self._texts.embed(request)

    @_frameless
    async def submit_rerank(self, request: RerankRequest) -> Pending[Ranking]:
        """See ``InferenceEngine.submit_rerank``."""
        return await self._texts.rerank(request)

    @_frameless
    async def decode(self, tokens: Sequence[int]) -> str:
        """See ``InferenceEngine.decode``."""
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
        finish_queued: bool = False,
    ) -> T:
        drain_s = self.settings.drain_s if timeout_s is None else timeout_s

        def begin(core: EngineCore) -> Future[T]:
            return core.swap(
                lambda: perform(core), why=why, timeout_s=drain_s, pinned_too=pinned_too, finish_queued=finish_queued
            )

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
