"""``InferenceEngine`` without a model, as other threads and loops see it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from importlib.metadata import version
from typing import Any, TypeVar

from lmx_lab.engine.echo.core import EchoCore, check
from lmx_lab.engine.interface import Capabilities
from lmx_lab.engine.model_lookup import LOAD_FIRST
from lmx_lab.engine.pending import Pending
from lmx_lab.engine.requests import EmbeddingRequest, Embeddings, GenerationRequest, Ranking, RerankRequest
from lmx_lab.engine.stream import TokenStream
from lmx_lab.errors import EngineDeadError, NotLoadedError, UnusableModelError
from lmx_lab.portal import LoopThread, receive
from lmx_lab.settings import Settings
from lmx_lab.values.engine import EngineSnapshot
from lmx_lab.values.models import Kind, LoadReport, ModelEntry

T = TypeVar("T")
STOP_S = 15.0


class EchoEngine:
    """``InferenceEngine`` for the built-in entry ``echo``. Its thread starts with the first load."""

    capabilities = Capabilities(
        prompt_scores=True, thinking_budget=True, logprobs_with_own_tools=True, input_types=True
    )

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._starting = threading.Lock()
        self._thread: LoopThread | None = None
        self._core: EchoCore | None = None

    @functools.cached_property
    def fingerprint(self) -> str:
        """See ``InferenceEngine.fingerprint``."""
        return f"echo-{version('lmx-lab')}"

    @property
    def snapshot(self) -> EngineSnapshot:
        """The state as of the last event. Never blocks."""
        core = self._core
        return core.snapshot if core is not None else EngineSnapshot()

    @property
    def used(self) -> bool:
        """Whether it has ever had a model."""
        return self._core is not None

    @property
    def alive(self) -> bool:
        return self._thread is not None

    def start(self) -> None:
        """Start the thread; ``load`` does it too."""
        with self._starting:
            if self._thread is None:
                thread = LoopThread("lmx-lab-echo")
                thread.start()
                self._core = thread.submit(self._made()).result()
                self._thread = thread

    async def _made(self) -> EchoCore:
        return EchoCore(self._settings)

    def stop(self) -> None:
        """End every request, join the thread. Idempotent."""
        with self._starting:
            thread, core, self._thread = self._thread, self._core, None
        if thread is not None and core is not None:
            with contextlib.suppress(TimeoutError):
                thread.submit(core.close(EngineDeadError("the engine was stopped"))).result(STOP_S)
            thread.stop()

    # Models

    def check_fits(self, entry: ModelEntry) -> None:
        """See ``InferenceEngine.check_fits``."""
        check(entry, self._settings)

    async def load(self, entry: ModelEntry, *, finish_queued: bool = False) -> LoadReport:
        """See ``InferenceEngine.load``."""
        self.check_fits(entry)
        await asyncio.to_thread(self.start)
        return await asyncio.shield(self._on_loop(lambda core: core.load(entry, finish_queued=finish_queued)))

    async def pin(self, entry: ModelEntry) -> LoadReport:
        """See ``InferenceEngine.pin``."""
        raise UnusableModelError(f"{entry.id} is a chat model; only embedding models and rerankers stay beside one")

    async def unpin(self, kind: Kind) -> None:
        """See ``InferenceEngine.unpin``; nothing is pinned here."""

    async def unload(self, *, why: str = "the model is unloaded", finish_queued: bool = False) -> int:
        """See ``InferenceEngine.unload``."""
        if self._thread is None:
            return 0
        return await asyncio.shield(self._on_loop(lambda core: core.unload(why=why, finish_queued=finish_queued)))

    async def quiesce(self, timeout_s: float) -> None:
        """See ``InferenceEngine.quiesce``."""
        if self._thread is not None:
            await self._on_loop(lambda core: core.quiesce(timeout_s))

    # Requests

    async def submit_all(self, request: GenerationRequest, choices: int) -> list[TokenStream]:
        """See ``InferenceEngine.submit_all``."""
        reader = asyncio.get_running_loop()
        return await receive(self._submit(lambda core: core.accept(request, choices, reader)))

    async def submit_embedding(self, request: EmbeddingRequest) -> Pending[Embeddings]:
        """See ``InferenceEngine.submit_embedding``."""
        return await self._on_loop(lambda core: core.accept_embedding(request))

    async def submit_rerank(self, request: RerankRequest) -> Pending[Ranking]:
        """See ``InferenceEngine.submit_rerank``."""
        return await self._on_loop(lambda core: core.accept_rerank(request))

    async def decode(self, tokens: Sequence[int]) -> str:
        """See ``InferenceEngine.decode``."""
        return await self._on_loop(lambda core: core.decode(tokens))

    def _on_loop(self, work: Callable[[EchoCore], Coroutine[Any, Any, T]]) -> asyncio.Future[T]:
        """As ``_submit``, for this loop. Cancelling the future cancels the work."""
        future = asyncio.wrap_future(self._submit(work))
        # The result of work that continues without its caller is not read.
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        return future

    def _submit(self, work: Callable[[EchoCore], Coroutine[Any, Any, T]]) -> Future[T]:
        """Start the work on the engine's loop.

        Raises:
            NotLoadedError: there is no loop, so there is no model.
        """
        thread, core = self._thread, self._core
        if thread is None or core is None:
            raise NotLoadedError(f"no model is loaded; {LOAD_FIRST}")
        return thread.submit(work(core))
