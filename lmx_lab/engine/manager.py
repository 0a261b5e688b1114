"""Manage the models in memory for all threads and event loops.

``ModelManager`` has one control loop in a separate thread, on which ``ModelControl`` decides which models are loaded. A
request whose model is loaded does not use that loop: it reads the published ``Residents`` and is submitted directly to
the engine.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import Any, Self, TypeVar

from lmx_lab.engine.admission import LOAD_FIRST, Permit
from lmx_lab.engine.find import ModelFinder
from lmx_lab.engine.interface import EngineHost, InferenceEngine
from lmx_lab.engine.loads import IfBusy
from lmx_lab.engine.memory import total_bytes
from lmx_lab.engine.model_control import ModelControl
from lmx_lab.engine.model_lookup import CHAT, EMBEDDING, RERANK, Kinds
from lmx_lab.engine.registry import ENGINES
from lmx_lab.engine.requests import (
    EmbeddingRequest,
    Embeddings,
    GenerationRequest,
    Ranking,
    RerankRequest,
    TraceRequest,
)
from lmx_lab.engine.residents import Resident, Residents
from lmx_lab.engine.scheduler import Turns
from lmx_lab.engine.stream import Answer, Pending
from lmx_lab.engine.submission import Submission, Submitter
from lmx_lab.errors import EngineDeadError, HostingError, InvalidRequestError, NotLoadedError
from lmx_lab.portal import LoopThread, receive
from lmx_lab.settings import Settings
from lmx_lab.values.engine import EngineSnapshot, EngineState, merged
from lmx_lab.values.models import EngineName, Kind, LoadReport, LoadSpec, ModelEntry, ModelEvent
from lmx_lab.values.tracing import Trace
from lmx_lab.weights import Catalog

T = TypeVar("T")


class ModelManager:
    """Loads and unloads models, and submits requests to them.

    Use ``async with ModelManager(settings) as manager``, or call ``start()`` and ``stop()`` from any thread; both are
    idempotent. The first load also starts the manager. All methods may be called from any thread and any event loop.

    Args:
        catalog: The models on this disk; by default those that the settings name.
        turns: When a client without a slot gets a slot of another client.
    """

    def __init__(self, settings: Settings, catalog: Catalog | None = None, *, turns: Turns | None = None) -> None:
        self.settings = settings
        self._turns = turns or Turns()
        self._observers: list[Callable[[ModelEvent], None]] = []
        self.catalog = catalog if catalog is not None else Catalog(settings)
        self._finder = ModelFinder(settings, self.catalog, report=self._report)
        self._engines: dict[EngineName, InferenceEngine] = {}
        """The engines that have been created."""
        self._engines_lock = threading.Lock()
        self._lifetime_lock = threading.Lock()
        self._thread: LoopThread | None = None
        self._control: ModelControl | None = None
        self._stopped = False
        self._machine_bytes = total_bytes()
        self._submitter = Submitter(
            settings, self._finder, residents=lambda: self.residents, snapshot=lambda: self.snapshot, run=self._run
        )
        self._created_at = time.monotonic()

    # Lifetime

    def start(self) -> None:
        """Start, or start again after ``stop``. Each engine starts with its first model."""
        with self._lifetime_lock:
            self._stopped = False
            self._register_exit()

    def _register_exit(self) -> None:
        """Register ``stop`` to be called when the interpreter exits."""
        atexit.unregister(self.stop)
        atexit.register(self.stop)

    def stop(self) -> None:
        """End all loads and requests and release all memory. Blocks until the current step of each engine is over."""
        with self._lifetime_lock:
            self._stopped = True
            atexit.unregister(self.stop)
            thread, control = self._thread, self._control
            self._thread = self._control = None
        error = EngineDeadError("the engine was stopped")
        if thread is not None and control is not None:
            thread.loop.call_soon_threadsafe(control.cancel_all, error)
        for engine in reversed(list(self._engines.values())):
            engine.stop()
        if thread is not None and control is not None:
            with suppress(TimeoutError):
                # Loads end after the engines have stopped.
                thread.submit(control.settled()).result(5.0)
            thread.stop()

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.stop)

    async def cancel_loads(self) -> None:
        """Cancel all loads because the server stops. Their callers get an error immediately."""

        async def cancel(control: ModelControl) -> None:
            control.cancel_all()

        if self._control is not None:
            await self._run(cancel)

    async def quiesce(self, timeout_s: float) -> None:
        """Wait up to ``timeout_s`` for running requests to end. Remaining and queued requests end with an error."""
        if self._control is not None:
            await self._run(lambda control: control.quiesce(timeout_s))

    # State

    @property
    def residents(self) -> Residents:
        """The models in memory."""
        control = self._control
        return control.residents if control is not None else Residents()

    @property
    def snapshot(self) -> EngineSnapshot:
        """The state of all engines as of their last step. Never blocks."""
        now = self.residents
        engine = now.engine or next(iter(self._engines.values()), None)
        others = [other.snapshot for other in list(self._engines.values()) if other is not engine]
        first = engine.snapshot if engine is not None else EngineSnapshot(memory_total_bytes=self._machine_bytes)
        snapshot = merged([first, *others])
        main = now.main
        is_loaded = main is not None and snapshot.entry is main.entry
        state: EngineState = "ready" if is_loaded else "dead" if first.state == "dead" else "empty"
        if not is_loaded:
            snapshot = replace(snapshot, entry=None, model_memory_bytes=0, context_length=None, slots=None)
            if now.change is not None and now.change.stage == "loading":
                state = "loading"
        if now.unloaded is not None and snapshot.entry is None and snapshot.unload_cause is None:
            snapshot = replace(snapshot, unloaded_model=now.unloaded[0], unload_cause=now.unloaded[1])
        change = now.change
        if change is not None and main is not None:
            change = replace(change, requests_left=main.admission.active)
        return replace(snapshot, state=state, change=change)

    @property
    def alive(self) -> bool:
        """Whether the engine of the main model is running; true before the first model."""
        engine = self.residents.engine
        return not self._stopped and (engine is None or engine.alive)

    @property
    def fingerprint(self) -> str:
        """Name and version of the library that computes the main model; empty before the first model."""
        engine = self.residents.engine
        return engine.fingerprint if engine is not None else ""

    @property
    def uptime_s(self) -> float:
        """Seconds since this object was created."""
        return time.monotonic() - self._created_at

    def add_observer(self, observer: Callable[[ModelEvent], None]) -> None:
        """Register a function that is called with each step of a load, and when a model leaves memory. It may be called
        on any thread.
        """
        self._observers.append(observer)

    def remove_observer(self, observer: Callable[[ModelEvent], None]) -> None:
        """Undo ``add_observer``."""
        self._observers.remove(observer)

    def _report(self, progress: ModelEvent) -> None:
        for observer in list(self._observers):
            observer(progress)

    def engine(self, name: EngineName) -> InferenceEngine:
        """Return an engine, which is imported and created first if necessary. Blocks."""
        with self._engines_lock:
            if name not in self._engines:
                host = EngineHost(
                    used_by_others=functools.partial(self._used_bytes, excluding=name),
                    lost_model=functools.partial(self._post_lost, name),
                    turns=self._turns,
                )
                self._engines[name] = ENGINES[name].make(self.settings, host)
            return self._engines[name]

    def _used_bytes(self, *, excluding: EngineName) -> int:
        """Return the memory that the other engines use, without the memory of a GPU."""
        others = [engine.snapshot for name, engine in list(self._engines.items()) if name != excluding]
        return sum(other.memory_used_bytes for other in others if not other.memory_is_of_device)

    def unpinned(self) -> Sequence[LoadSpec]:
        """Return the loads of the encoders that the settings name and that are not in memory."""
        present = {pinned.entry.kind for pinned in self.snapshot.pinned}
        named: list[tuple[str | None, Kind]] = [
            (self.settings.embedder, "embedding"),
            (self.settings.reranker, "rerank"),
        ]
        return [LoadSpec(model=name, pin=kind) for name, kind in named if name is not None and kind not in present]

    def _post_lost(self, name: EngineName, by_request: bool) -> None:
        if (control := self._control) is not None:
            control.post_lost(self._engines[name], by_request)

    # Models

    async def load(
        self,
        spec: LoadSpec,
        *,
        local: bool = True,
        finish_queued: bool = False,
        if_busy: IfBusy = "refuse",
    ) -> LoadReport:
        """Load a model in place of the main one, or in addition to it if ``spec.pin`` is set.

        Running requests of the main model may end first (``drain_s``). If the load fails, the previous model is loaded
        again. Cancelling the caller does not cancel the load. Loads of the same spec that are in progress are joined.

        Args:
            local: Whether the caller is on this machine, and may name paths and models to download.
            finish_queued: Whether the queued requests of the main model are also answered, within the same time.
            if_busy: What to do while another load or unload is in progress.

        Raises:
            ModelNotFoundError: the model is not on disk, and cannot be downloaded.
            UnusableModelError, StorageFullError, OutOfMemoryError: the message contains the model that is now loaded.
            ModelBusyError: another load or unload is in progress.
            NotLoadedError: the load was cancelled.
        """
        return await self._run(
            lambda control: control.load(spec, None, local=local, finish_queued=finish_queued, if_busy=if_busy)
        )

    async def check(self, spec: LoadSpec, *, beside: Sequence[ModelEntry] = ()) -> ModelEntry:
        """Check that a model can be loaded, without loading it, and return its files. They are downloaded if necessary.

        The files and the options are checked as in a load. Faults that appear only when the weights are read are not
        found.

        Args:
            beside: Models that will be loaded together with this one and are not in memory yet.

        Raises:
            ModelNotFoundError, UnusableModelError, StorageFullError, OutOfMemoryError, NotLoadedError: as ``load``.
        """
        return await self._run(lambda control: control.check(spec, beside))

    async def load_entry(
        self,
        entry: ModelEntry,
        spec: LoadSpec | None = None,
        *,
        finish_queued: bool = False,
        if_busy: IfBusy = "refuse",
    ) -> LoadReport:
        """Load a model whose files are already known. Otherwise the same as ``load``."""
        spec = spec or LoadSpec(model=entry.id)
        return await self._run(
            lambda control: control.load(spec, entry, local=True, finish_queued=finish_queued, if_busy=if_busy)
        )

    async def cancel_load(self, model: str) -> None:
        """Cancel the loads of the model with this id or requested name. Downloads continue in the background.

        The callers of the loads get the error after the previous model is loaded again.

        Raises:
            InvalidRequestError: the model is not being loaded.
        """
        await self._run(lambda control: control.cancel(model))

    async def unload(self, model: str | None = None, *, local: bool = True, wait: bool | None = None) -> int:
        """Unload the main model after its running requests have ended; return the bytes that this released.

        Cancelling the caller does not cancel the unload. Another call joins an unload that is in progress, and ``wait``
        then applies to the rest of it. If a main model is being loaded, only this load is cancelled, even if it hangs,
        and the previous model is loaded again; but if ``model`` names the previous model, whose requests the load waits
        for, the call joins its unload, and returns 0 if the load is then cancelled. Pinned models stay.

        Args:
            model: The model to unload, or whose load is cancelled; None for any.
            local: Whether the caller is on this machine, and may name the model by its path.
            wait: Whether running requests may finish: True without a time limit, False not at all, None within
                ``drain_s``. Requests that have not ended by then, and queued ones, end with ``NotLoadedError``.

        Raises:
            InvalidRequestError: the model of this name is pinned, or not in memory.
            ModelBusyError: a model is being loaded in place of the named one, which still answers.
        """
        return await self._run(lambda control: control.unload(model, local=local, wait=wait))

    async def make_room(self, model: str, *, limit_s: float) -> None:
        """Unload all models to make room for those of another manager of this process, which replaces this one.

        Loads in progress are cancelled, and an unload no longer waits for answers. Until ``take_back`` or ``stop``,
        this manager loads nothing, and its state shows a load. Cancelling the caller does not cancel the unload.

        Args:
            model: The model that is loaded next, for messages.
            limit_s: Time that running requests have to end.
        """
        await self._run(lambda control: control.make_room(model, limit_s))

    async def take_back(self) -> str | None:
        """Undo ``make_room``: load the models again, and return the id of the main one; None if there was none.

        Raises:
            LabError: the main model could not be loaded again.
        """
        return await self._run(lambda control: control.take_back())

    # Requests

    async def submit(self, request: GenerationRequest) -> Answer:
        """Accept a generation request, and return its token stream. See ``submit_all``."""
        (stream,) = await self.submit_all(request)
        return stream

    async def submit_all(self, request: GenerationRequest, choices: int = 1) -> list[Answer]:
        """Accept a generation request for several answers, all or none, and return a token stream for each answer.

        Each answer has its own seed. In swap mode, the model that the request names is loaded first if it is on disk.

        Raises:
            NotLoadedError, ModelNotFoundError: the model that the request names is not loaded, or does not exist.
            OutOfMemoryError: the model was unloaded because memory ran out.
            ContextLengthError: the prompt leaves no room in the model's context.
            InvalidRequestError: the prompt cannot be tokenized, a token id is not in the vocabulary, or the
                engine of the model cannot do what is requested.
            QueueFullError: too many requests wait.
            GenerationTimeoutError: the model was not loaded within the time limit of the request.
            EngineDeadError: the engine has died.
        """
        limit = self.settings.slots + self.settings.queue_limit
        if choices > limit:
            raise InvalidRequestError(f"n is {choices}; this server takes {limit} (slots and queue_limit)", param="n")

        async def submit(resident: Resident, permits: Sequence[Permit]) -> list[Answer]:
            return await resident.engine.submit_all(resident.entry, request, permits)

        return await self._submitter.submit(Submission(request=request, kinds=CHAT, submit=submit, count=choices))

    async def embed(self, request: EmbeddingRequest) -> Embeddings:
        """Return the vector of each input. Cancelling the caller cancels the work.

        Raises:
            GenerationTimeoutError, EngineError: the vectors could not be computed.
            LabError: see ``submit_embedding``.
        """
        return await (await self.submit_embedding(request)).result()

    async def submit_embedding(self, request: EmbeddingRequest) -> Pending[Embeddings]:
        """Accept inputs to be embedded by a pinned or the main model.

        Raises:
            NotLoadedError, ModelNotFoundError: no embedding model is in memory, or not the one that the request names.
            InvalidRequestError: the model does not embed; an input is not valid text; ``dimensions`` is too large.
            ContextLengthError: an input is longer than the model's context.
            QueueFullError: too many requests wait.
        """
        _check_texts(request.inputs)

        async def submit(resident: Resident, permits: Sequence[Permit]) -> Pending[Embeddings]:
            return await resident.engine.submit_embedding(resident.entry, request, permits[0])

        return await self._submitter.submit(Submission(request=request, kinds=EMBEDDING, submit=submit))

    async def rerank(self, request: RerankRequest) -> Ranking:
        """Return the relevance of each document to the query. Raises the same as ``embed``."""
        return await (await self.submit_rerank(request)).result()

    async def submit_rerank(self, request: RerankRequest) -> Pending[Ranking]:
        """Accept documents to be ranked by a reranker or, without one, by an embedding model. Raises the same as
        ``submit_embedding``.
        """
        _check_texts(request.documents)

        async def submit(resident: Resident, permits: Sequence[Permit]) -> Pending[Ranking]:
            return await resident.engine.submit_rerank(resident.entry, request, permits[0])

        return await self._submitter.submit(Submission(request=request, kinds=RERANK, submit=submit))

    async def trace(self, request: TraceRequest) -> Trace:
        """Return internal values of the main model. Cancelling the caller cancels the work.

        Raises:
            NotLoadedError, ModelNotFoundError: the model that the request names is not loaded, or does not exist.
            InvalidRequestError: the engine or the model cannot do what is requested, or the result is too large.
            ContextLengthError: the text is longer than the model's context.
            QueueFullError: too many requests wait.
            GenerationTimeoutError, EngineError: the trace could not be computed.
        """

        async def submit(resident: Resident, permits: Sequence[Permit]) -> Pending[Trace]:
            return await resident.engine.submit_trace(resident.entry, request, permits[0])

        pending = await self._submitter.submit(Submission(request=request, kinds=CHAT, submit=submit))
        return await pending.result()

    async def encode(self, request: GenerationRequest) -> list[int]:
        """Return the token ids of a request's prompt, which may be longer than the model's context.

        Raises:
            NotLoadedError, ModelNotFoundError: the model that the request names is not loaded, or does not exist.
            ContextLengthError: the prompt is so long that it is not tokenized.
            InvalidRequestError: the prompt cannot be tokenized.
            QueueFullError: too many requests wait.
        """

        return await self.with_model(request, lambda it: it.engine.encode(it.entry, request))

    async def with_model(self, request: GenerationRequest, work: Callable[[Resident], Awaitable[T]]) -> T:
        """Call a function with the chat model that a request names, and return its result. It counts as a request."""

        async def run(resident: Resident, permits: Sequence[Permit]) -> T:
            try:
                return await work(resident)
            finally:
                permits[0].release()

        return await self._submitter.submit(Submission(request=request, kinds=CHAT, submit=run))

    async def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids as the main model's tokenizer shows it. See ``InferenceEngine.decode``."""
        main = self.residents.main
        if main is None:
            raise NotLoadedError(f"no model is loaded; {LOAD_FIRST}")
        return await main.engine.decode(main.entry, tokens)

    def model_for(self, name: str | None, kinds: Kinds, *, local: bool = True) -> Resident | None:
        """Return the model in memory that answers a request; None if there is none.

        Args:
            name: The model that the request names; None takes any.
            kinds: Kinds of models that can answer, the preferred ones first.
        """
        return self.residents.find(name, kinds, local=local)

    # Running work on the control loop

    async def _run(self, work: Callable[[ModelControl], Coroutine[Any, Any, T]]) -> T:
        """Run work on the control loop, which is started first if necessary, and return its result. Cancelling the
        caller cancels the work, but no loads.

        Raises:
            EngineDeadError: this object was stopped.
        """

        async def make_control() -> ModelControl:
            return ModelControl(
                self.settings,
                self._finder,
                engine_of=self.engine,
                report=self._report,
                snapshot=lambda: self.snapshot,
            )

        try:
            with self._lifetime_lock:
                if self._stopped:
                    raise EngineDeadError("the engine was stopped")
                if self._thread is None or self._control is None:
                    thread = LoopThread("lmx-lab-models")
                    thread.start()
                    self._control = thread.submit(make_control()).result()
                    self._thread = thread
                    self._register_exit()
                thread, control = self._thread, self._control
            return await receive(thread.submit(work(control)))
        except HostingError as exc:
            raise EngineDeadError("the engine was stopped") from exc


def _check_texts(texts: Sequence[object]) -> None:
    if not texts:
        raise InvalidRequestError("there are no texts; send at least one")
