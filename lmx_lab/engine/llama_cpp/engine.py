"""``InferenceEngine`` on llama.cpp, as other threads and loops see it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from lmx_lab.engine.interface import Capabilities
from lmx_lab.engine.llama_cpp.core import GgufCore
from lmx_lab.engine.llama_cpp.memory_plan import plan
from lmx_lab.engine.llama_cpp.process import PACKAGE, installed, require_installed
from lmx_lab.engine.loads import Load
from lmx_lab.engine.machine_memory import limit_bytes, total_bytes
from lmx_lab.engine.pending import Pending
from lmx_lab.engine.requests import EmbeddingRequest, Embeddings, GenerationRequest, Ranking, RerankRequest
from lmx_lab.engine.stream import TokenStream
from lmx_lab.errors import EngineDeadError, NotLoadedError, UnusableModelError
from lmx_lab.portal import LoopThread, receive
from lmx_lab.settings import Settings
from lmx_lab.values.engine import EngineSnapshot
from lmx_lab.values.models import Kind, LoadReport, ModelEntry
from lmx_lab.weights.files import in_thread
from lmx_lab.weights.gguf.model import read_gguf

T = TypeVar("T")
STOP_S = 15.0


class GgufEngine:
    """``InferenceEngine`` for ``.gguf`` files. Its thread starts with the first of them.

    Args:
        beside_bytes: What other engines take of the memory limit.
    """

    capabilities = Capabilities(
        prompt_scores=False, thinking_budget=False, logprobs_with_own_tools=False, input_types=False
    )

    def __init__(self, settings: Settings, *, beside_bytes: Callable[[], int] = lambda: 0) -> None:
        self._settings = settings
        self._beside_bytes = beside_bytes
        self._starting = threading.Lock()
        self._thread: LoopThread | None = None
        self._core: GgufCore | None = None

    @functools.cached_property
    def fingerprint(self) -> str:
        """See ``InferenceEngine.fingerprint``."""
        return f"llama.cpp-{version(PACKAGE)}" if installed() else "llama.cpp"

    @functools.cached_property
    def _unused(self) -> EngineSnapshot:
        return EngineSnapshot(memory_total_bytes=total_bytes())

    @property
    def used(self) -> bool:
        """Whether it has ever had a model."""
        return self._core is not None

    @property
    def snapshot(self) -> EngineSnapshot:
        """The state as of the last event. Never blocks."""
        core = self._core
        return core.snapshot if core is not None else self._unused

    @property
    def alive(self) -> bool:
        return self._thread is not None and self.snapshot.state != "dead"

    def start(self) -> None:
        """Start the thread; models come by ``load``."""
        with self._starting:
            if self._thread is None:
                thread = LoopThread("lmx-lab-gguf")
                thread.start()
                self._core = thread.submit(self._made()).result()
                self._thread = thread

    async def _made(self) -> GgufCore:
        return GgufCore(self._settings, beside_bytes=self._beside_bytes)

    def stop(self) -> None:
        """End every request and every process, join the thread. Idempotent."""
        with self._starting:
            thread, core, self._thread = self._thread, self._core, None
        if thread is not None and core is not None:
            # What does not end in time ends with the thread, and with it the processes.
            with contextlib.suppress(TimeoutError):
                thread.submit(core.close(EngineDeadError("the engine was stopped"))).result(STOP_S)
            thread.stop()

    def give_up_loads(self, why: str, *, but: Path | None = None) -> None:
        """Tell the loads that have not ended to end, except those of the file at ``but``. Returns at once."""
        thread, core = self._thread, self._core
        if thread is not None and core is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and they with it
                thread.loop.call_soon_threadsafe(functools.partial(core.loads.give_up, why, but=but))

    # Models

    def check_fits(self, entry: ModelEntry) -> None:
        """See ``InferenceEngine.check_fits``."""
        require_installed(entry.path)
        limit = limit_bytes(self._settings.memory_limit_bytes)
        plan(entry, read_gguf(entry.path), slots=self._settings.slots, limit_bytes=limit)

    async def load(self, entry: ModelEntry, *, finish_queued: bool = False, part_of: Load | None = None) -> LoadReport:
        """See ``InferenceEngine.load``; ``part_of`` is the exchange that it belongs to."""
        await in_thread(functools.partial(self.check_fits, entry))
        await asyncio.to_thread(self.start)
        # Whoever asked may leave; the load goes on.
        return await asyncio.shield(
            self._on_loop(lambda core: core.load(entry, finish_queued=finish_queued, part_of=part_of))
        )

    async def pin(self, entry: ModelEntry) -> LoadReport:
        """See ``InferenceEngine.pin``."""
        if entry.kind == "chat":
            raise UnusableModelError(f"{entry.id} is a chat model; only embedding models and rerankers stay beside one")
        await in_thread(functools.partial(self.check_fits, entry))
        await asyncio.to_thread(self.start)
        return await asyncio.shield(self._on_loop(lambda core: core.pin(entry)))

    async def unpin(self, kind: Kind) -> None:
        """See ``InferenceEngine.unpin``."""
        if self._thread is not None:
            await asyncio.shield(self._on_loop(lambda core: core.unpin(kind)))

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
        """See ``InferenceEngine.submit_all``. The prompt is computed once for each choice."""
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
        return await self._on_loop(lambda core: core.decode(list(tokens)))

    def _on_loop(self, work: Callable[[GgufCore], Coroutine[Any, Any, T]]) -> asyncio.Future[T]:
        """As ``_submit``, for this loop. Cancelling the future cancels the work."""
        future = asyncio.wrap_future(self._submit(work))
        # The result of work that continues without its caller is not read.
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        return future

    def _submit(self, work: Callable[[GgufCore], Coroutine[Any, Any, T]]) -> Future[T]:
        """Start the work on the engine's loop.

        Raises:
            NotLoadedError: there is no loop, so there is no model.
        """
        thread, core = self._thread, self._core
        if thread is None or core is None:
            raise NotLoadedError("no model is loaded; load one first: POST /admin/models/load")
        return thread.submit(work(core))
