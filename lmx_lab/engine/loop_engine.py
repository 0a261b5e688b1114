"""Provide the base class of the engines that run on an event loop in their own thread: llama.cpp and echo.

``LoopEngine`` is used by other threads and loops; it runs the methods of an ``EngineCore`` on the engine's loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from lmx_lab.engine.admission import LOAD_FIRST, AdmissionControl, Permit
from lmx_lab.engine.interface import Capabilities, EngineHost
from lmx_lab.engine.memory import total_bytes
from lmx_lab.engine.requests import (
    EmbeddingRequest,
    Embeddings,
    GenerationRequest,
    Ranking,
    RerankRequest,
    TraceRequest,
)
from lmx_lab.engine.stream import Answer, Pending
from lmx_lab.errors import (
    EngineDeadError,
    EngineError,
    GenerationTimeoutError,
    InvalidRequestError,
    LabError,
    NotLoadedError,
)
from lmx_lab.portal import LoopThread, receive
from lmx_lab.settings import Settings
from lmx_lab.values.engine import EngineSnapshot
from lmx_lab.values.models import Kind, LoadReport, LoadSpec, ModelEntry
from lmx_lab.values.tracing import Trace
from lmx_lab.weights.files import in_thread

T = TypeVar("T")


class EngineCore(Protocol):
    """The state of a ``LoopEngine``. Created and used on its loop; any thread may read ``snapshot`` and ``failure``.

    The methods have the contract of those of ``InferenceEngine``.
    """

    snapshot: EngineSnapshot
    failure: LabError | None

    async def load(self, entry: ModelEntry, spec: LoadSpec) -> LoadReport: ...

    async def unload(self) -> int: ...

    async def pin(self, entry: ModelEntry, spec: LoadSpec) -> LoadReport: ...

    async def unpin(self, kind: Kind) -> None: ...

    async def end_requests(self, admission: AdmissionControl, error: LabError, *, queued_only: bool) -> None: ...

    async def accept(
        self,
        entry: ModelEntry,
        request: GenerationRequest,
        permits: Sequence[Permit],
        reader: asyncio.AbstractEventLoop,
    ) -> list[Answer]:
        """Queue a request whose answers are read on the loop ``reader``."""

    async def accept_embedding(
        self, entry: ModelEntry, request: EmbeddingRequest, permit: Permit
    ) -> Pending[Embeddings]: ...

    async def accept_rerank(self, entry: ModelEntry, request: RerankRequest, permit: Permit) -> Pending[Ranking]: ...

    async def encode(self, entry: ModelEntry, request: GenerationRequest) -> list[int]: ...

    async def render(self, entry: ModelEntry, request: GenerationRequest) -> str: ...

    async def decode(self, entry: ModelEntry, tokens: Sequence[int]) -> str: ...

    async def token_bytes(self, entry: ModelEntry, tokens: Sequence[int]) -> list[bytes]: ...

    async def close(self, error: LabError) -> None:
        """End every request with this error and release all memory."""


Core = TypeVar("Core", bound=EngineCore)


class LoopEngine(ABC, Generic[Core]):
    """An ``InferenceEngine`` whose thread starts with its first model."""

    capabilities: ClassVar[Capabilities]
    thread_name: ClassVar[str]

    def __init__(self, settings: Settings, host: EngineHost | None = None) -> None:
        self._settings = settings
        self._host = host or EngineHost()
        self._start_lock = threading.Lock()
        self._thread: LoopThread | None = None
        self._core: Core | None = None
        self._empty_snapshot = EngineSnapshot(memory_total_bytes=total_bytes())

    @abstractmethod
    async def _make_core(self) -> Core:
        """Create the state of the engine. Called on its loop."""

    @property
    def snapshot(self) -> EngineSnapshot:
        """See ``InferenceEngine``."""
        core = self._core
        return core.snapshot if core is not None else self._empty_snapshot

    @property
    def failure(self) -> LabError | None:
        """See ``InferenceEngine``."""
        core = self._core
        return core.failure if core is not None else None

    @property
    def alive(self) -> bool:
        """See ``InferenceEngine``."""
        return self._thread is not None and self.snapshot.state != "dead"

    def start(self) -> None:
        """See ``InferenceEngine``."""
        with self._start_lock:
            if self._thread is None:
                thread = LoopThread(self.thread_name)
                thread.start()
                self._core = thread.submit(self._make_core()).result()
                self._thread = thread

    def stop(self) -> None:
        """See ``InferenceEngine``."""
        with self._start_lock:
            thread, core, self._thread = self._thread, self._core, None
        if thread is not None and core is not None:
            # Work that does not end in time is abandoned with the thread, and its processes end with it.
            with contextlib.suppress(TimeoutError):
                thread.submit(core.close(EngineDeadError("the engine was stopped"))).result(15.0)
            thread.stop()

    # Models

    async def load(self, entry: ModelEntry, spec: LoadSpec) -> LoadReport:
        """See ``InferenceEngine``."""
        await in_thread(self.start)
        return await self._cancellable(lambda core: core.load(entry, spec))

    async def unload(self) -> int:
        """See ``InferenceEngine``."""
        return await self._run(lambda core: core.unload()) if self._thread is not None else 0

    async def pin(self, entry: ModelEntry, spec: LoadSpec) -> LoadReport:
        """See ``InferenceEngine``."""
        await in_thread(self.start)
        return await self._cancellable(lambda core: core.pin(entry, spec))

    async def unpin(self, kind: Kind) -> None:
        """See ``InferenceEngine``."""
        if self._thread is not None:
            await self._run(lambda core: core.unpin(kind))

    # Requests

    async def end_requests(self, admission: AdmissionControl, error: LabError, *, queued_only: bool = False) -> None:
        """See ``InferenceEngine``."""
        if self._thread is not None:
            await self._run(lambda core: core.end_requests(admission, error, queued_only=queued_only))

    async def submit_all(
        self, entry: ModelEntry, request: GenerationRequest, permits: Sequence[Permit]
    ) -> list[Answer]:
        """See ``InferenceEngine``."""
        reader = asyncio.get_running_loop()
        return await receive(self._submit(lambda core: core.accept(entry, request, permits, reader)))

    async def submit_embedding(
        self, entry: ModelEntry, request: EmbeddingRequest, permit: Permit
    ) -> Pending[Embeddings]:
        """See ``InferenceEngine``."""
        return await self._run(lambda core: core.accept_embedding(entry, request, permit))

    async def submit_rerank(self, entry: ModelEntry, request: RerankRequest, permit: Permit) -> Pending[Ranking]:
        """See ``InferenceEngine``."""
        return await self._run(lambda core: core.accept_rerank(entry, request, permit))

    async def submit_trace(self, entry: ModelEntry, request: TraceRequest, permit: Permit) -> Pending[Trace]:
        """See ``InferenceEngine``."""
        raise InvalidRequestError(
            f"{entry.id} does not run on MLX, and only MLX returns internal values of a model; load the model "
            f'with engine="mlx", such as lab.load("{entry.id}", engine="mlx")',
            param="model",
        )

    async def encode(self, entry: ModelEntry, request: GenerationRequest) -> list[int]:
        """See ``InferenceEngine``."""
        return await self._run(lambda core: core.encode(entry, request))

    async def render(self, entry: ModelEntry, request: GenerationRequest) -> str:
        """See ``InferenceEngine``."""
        return await self._run(lambda core: core.render(entry, request))

    async def decode(self, entry: ModelEntry, tokens: Sequence[int]) -> str:
        """See ``InferenceEngine``."""
        return await self._run(lambda core: core.decode(entry, tokens))

    async def token_bytes(self, entry: ModelEntry, tokens: Sequence[int]) -> list[bytes]:
        """See ``InferenceEngine``."""
        return await self._run(lambda core: core.token_bytes(entry, tokens))

    # Running work on the engine's loop

    def _submit(self, work: Callable[[Core], Coroutine[Any, Any, T]]) -> Future[T]:
        """Start work on the engine's loop, and return its future.

        Raises:
            NotLoadedError: the engine has not started, so it has no model.
        """
        thread, core = self._thread, self._core
        if thread is None or core is None:
            raise NotLoadedError(f"no model is loaded; {LOAD_FIRST}")
        return thread.submit(work(core))

    async def _run(self, work: Callable[[Core], Coroutine[Any, Any, T]]) -> T:
        """Run work on the engine's loop. Cancelling the caller cancels the work, without waiting for its end."""
        return await asyncio.wrap_future(self._submit(work))

    async def _cancellable(self, work: Callable[[Core], Coroutine[Any, Any, T]]) -> T:
        """Run work on the engine's loop. Cancelling the caller cancels the work and waits until it has ended."""
        task: asyncio.Task[T] | None = None
        cancelled = False

        async def supervise(core: Core) -> T:
            nonlocal task
            if cancelled:
                raise asyncio.CancelledError
            task = asyncio.ensure_future(work(core))
            return await task

        def cancel() -> None:
            nonlocal cancelled
            cancelled = True
            if task is not None:
                task.cancel()

        outcome = asyncio.wrap_future(self._submit(supervise))
        # Nothing reads the outcome of cancelled work.
        outcome.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            return await asyncio.shield(outcome)
        except asyncio.CancelledError:
            if not outcome.done() and (thread := self._thread) is not None:
                thread.loop.call_soon_threadsafe(cancel)
                await asyncio.wait([outcome])
            raise


class TextTasks:
    """The tasks that compute the texts of accepted embedding and rerank requests. Belongs to the engine's loop."""

    def __init__(self) -> None:
        self._tasks: dict[asyncio.Task[Any], Permit] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, work: Coroutine[Any, Any, T], permit: Permit, on_end: Callable[[], None]) -> Pending[T]:
        """Start a task that computes an accepted request, and return its pending result.

        Args:
            on_end: Called when the task has ended, before its caller gets the result.
        """
        future: Future[T] = Future()
        task = asyncio.create_task(work, name=f"lmx-lab texts on {permit.admission.model}")
        loop = asyncio.get_running_loop()
        self._tasks[task] = permit

        def finish(_: asyncio.Task[T]) -> None:
            del self._tasks[task]
            permit.release()
            on_end()
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(task.result())
            except asyncio.CancelledError as exc:
                error = exc.args[0] if exc.args else None
                future.set_exception(error if isinstance(error, LabError) else EngineError("the request was cancelled"))
            except Exception as exc:
                future.set_exception(exc if isinstance(exc, LabError) else EngineError(f"{type(exc).__name__}: {exc}"))

        def cancel(cancelled: Future[T]) -> None:
            if cancelled.cancelled() and not loop.is_closed():
                loop.call_soon_threadsafe(task.cancel)

        task.add_done_callback(finish)
        future.add_done_callback(cancel)
        return Pending(future, lambda result: result, future.cancel)

    async def end(self, admission: AdmissionControl, error: LabError) -> None:
        """End the tasks that hold permits of this admission control with an error; returns when they have ended."""
        await self._end([task for task, permit in self._tasks.items() if permit.admission is admission], error)

    async def end_all(self, error: LabError) -> None:
        """End all tasks with an error; returns when they have ended."""
        await self._end(list(self._tasks), error)

    async def _end(self, tasks: Sequence[asyncio.Task[Any]], error: LabError) -> None:
        for task in tasks:
            task.cancel(error)
        if tasks:
            await asyncio.wait(tasks)


@contextlib.asynccontextmanager
async def deadline(arrived_at: float, timeout_s: float) -> AsyncIterator[None]:
    """Cancel the block ``timeout_s`` after ``arrived_at`` (``time.perf_counter``).

    Raises:
        GenerationTimeoutError: the block did not end in time.
    """
    until = asyncio.get_running_loop().time() + arrived_at + timeout_s - time.perf_counter()
    try:
        async with asyncio.timeout_at(until):
            yield
    except TimeoutError:
        raise GenerationTimeoutError.after(timeout_s) from None
