"""Own the models in memory: load and unload them, and pass each request to the model that answers it.

Everything runs on one event loop in a thread, except what reads the published state. Changes of the main model happen
one at a time. Nothing polls: a model reports when its engine loses it, ``AdmissionControl`` reports when it has no
requests left, and timers are set to known points in time.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import logging
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeAlias, TypeVar

from lmx_lab.engine.admission import LOAD_FIRST, Permit
from lmx_lab.engine.engines import ENGINES, Factory, choose_engine, engine_for
from lmx_lab.engine.find import ModelFinder
from lmx_lab.engine.loads import (
    CurrentChange,
    Drain,
    IfBusy,
    LoadOperation,
    UnloadOperation,
    draft_warning,
    load_progress,
    same_options,
    within_limit,
)
from lmx_lab.engine.lookup import (
    CHAT,
    EMBEDDING,
    NONE_LOADED,
    RERANK,
    Kinds,
    check_pinned_kind,
    check_unload,
    find_model,
    is_idle_path,
    loaded_id,
    refusal,
    unknown_model,
    with_models_on_disk,
    wrong_kind,
)
from lmx_lab.engine.memory import total_bytes
from lmx_lab.engine.model import Engine, EngineHost, EngineMemory
from lmx_lab.engine.plan import FitList, plan_load
from lmx_lab.engine.requests import (
    EmbeddingRequest,
    Embeddings,
    GenerationRequest,
    Ranking,
    RerankRequest,
    TraceRequest,
)
from lmx_lab.engine.scheduler import Turns
from lmx_lab.engine.stream import Answer
from lmx_lab.engine.swap import SwapQueue, SwapTurn
from lmx_lab.errors import (
    EngineDeadError,
    GenerationTimeoutError,
    HostingError,
    InvalidRequestError,
    LabError,
    ModelBusyError,
    ModelNotFoundError,
    NotLoadedError,
    OutOfMemoryError,
    UnusableModelError,
)
from lmx_lab.portal import LoopThread, receive
from lmx_lab.settings import Settings
from lmx_lab.values.engine import COUNTERS, EngineSnapshot, EngineState, ModelChange, TokenTotals, UnloadCause
from lmx_lab.values.models import EngineName, Kind, LoadReport, LoadSpec, ModelEntry, ModelEvent
from lmx_lab.values.plan import LoadPlan
from lmx_lab.values.tracing import Trace
from lmx_lab.weights import Catalog
from lmx_lab.weights.files import in_thread
from lmx_lab.weights.fingerprint import is_loaded, with_marks

if TYPE_CHECKING:
    from lmx_lab.engine.model import LoadedModel

log = logging.getLogger(__name__)
T = TypeVar("T")
Model: TypeAlias = "LoadedModel[Any]"
Request = GenerationRequest | EmbeddingRequest | RerankRequest | TraceRequest
RELOAD_S = 30.0
"""Minimum time between two automatic loads of a main model whose process was ended because of a request, or of a pinned
model that its engine has lost."""
TRIES = 3
"""Maximum number of attempts to submit a request in swap mode, in case other loads replace its model in the
meantime."""


@dataclass(frozen=True, kw_only=True)
class InMemory:
    """The models in memory at one moment. A new object replaces it after each change, so any thread may read it."""

    main: Model | None = None
    pins: Mapping[Kind, Model] = field(default_factory=dict)
    """The models that stay next to the main one, which may be one of them."""
    failure: LabError | None = None
    """Why the last main model left memory, if its engine lost it; see ``lost``."""
    change: ModelChange | None = None
    unloaded: tuple[str, UnloadCause] | None = None
    """The model that was unloaded last, and why; None after a load."""

    @property
    def lost(self) -> LabError | None:
        """Why there is no main model, if its engine has lost it."""
        return self.failure if self.main is None else self.main.lost

    @property
    def models(self) -> list[Model]:
        """The pinned models, then the main one, without those that their engines have lost."""
        models = dict.fromkeys((*self.pins.values(), self.main))
        return [model for model in models if model is not None and model.lost is None]


class ModelManager:
    """Loads and unloads models, and passes requests to them.

    Use ``async with ModelManager(settings) as manager``, or call ``start()`` and ``stop()`` from any thread; both are
    idempotent. The first load also starts the manager. All public methods may be called from any thread and any event
    loop.

    Args:
        catalog: The models on this disk; by default those that the settings name.
        turns: When a client without a slot gets a slot of another client.
        engines: How to make an engine, by name; for those that are missing, as in ``ENGINES``.
    """

    def __init__(
        self,
        settings: Settings,
        catalog: Catalog | None = None,
        *,
        turns: Turns | None = None,
        engines: Mapping[EngineName, Factory] | None = None,
    ) -> None:
        self.settings = settings
        self.catalog = catalog if catalog is not None else Catalog(settings)
        self._turns = turns or Turns()
        self._factories = {name: row.make for name, row in ENGINES.items()} | dict(engines or {})
        self._observers: list[Callable[[ModelEvent], None]] = []
        self._finder = ModelFinder(settings, self.catalog, report=self._report)
        self.fits = FitList(self.engine)
        """Which of the models on the disk fit."""
        self._engines: dict[EngineName, Engine] = {}
        """The engines that have been created."""
        self._engines_lock = threading.Lock()
        self._lifetime_lock = threading.Lock()
        self._stop_lock = threading.RLock()
        self._thread: LoopThread | None = None
        self._stopped = False
        self._machine_bytes = total_bytes()
        self._created_at = time.monotonic()
        self._now = InMemory()
        self._ended_totals = TokenTotals()
        """Counts of the models that have left memory, which are in ``_counted`` while other code refers to them."""
        self._counted: weakref.WeakSet[Model] = weakref.WeakSet()
        self._totals = TokenTotals()
        """The counts that ``snapshot`` returned last. They never decrease."""
        self._totals_lock = threading.Lock()
        self._peaks: dict[EngineName, int] = {}

    # Lifetime

    def start(self) -> None:
        """Start, or start again after ``stop``. Each engine is imported with its first model."""
        # A stop that is in progress ends first.
        with self._stop_lock, self._lifetime_lock:
            self._stopped = False
            self._register_exit()

    def _register_exit(self) -> None:
        """Register ``stop`` to be called when the interpreter exits."""
        atexit.unregister(self.stop)
        atexit.register(self.stop)

    def stop(self) -> None:
        """End all loads and requests and release all memory. Blocks until the current step of each engine is over."""
        with self._stop_lock:
            with self._lifetime_lock:
                self._stopped = True
                atexit.unregister(self.stop)
                thread, self._thread = self._thread, None
            if thread is not None:
                # Work that does not end in time is abandoned with the thread, and its processes end with it.
                with suppress(TimeoutError, HostingError):
                    closing = thread.submit(self._close(EngineDeadError("the engine was stopped")))
                    # Called by an observer, this runs on the manager's loop, which cannot wait for itself.
                    if asyncio._get_running_loop() is not thread.loop:
                        closing.result(15.0)
            for engine in reversed(list(self._engines.values())):
                engine.stop()
            if thread is not None:
                thread.stop()

    async def _close(self, error: LabError) -> None:
        """End all loads and requests, and drop all models."""
        self._cancel_all(error)
        for task in list(self._reloads):
            task.cancel()
        self._wanted.clear()
        models, self._now = self._now.models, InMemory()
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        await asyncio.gather(*(self._drop(model, error) for model in models), return_exceptions=True)
        while self._tasks:
            await asyncio.wait(list(self._tasks))
        # A model that was about to be loaded may have entered in the meantime.
        late, self._now = self._now.models, InMemory()
        await asyncio.gather(*(self._drop(model, error) for model in late), return_exceptions=True)

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.stop)

    async def _run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run work on the manager's loop, which is started first if necessary, and return its result. Cancelling the
        caller cancels the work, but no loads.

        Raises:
            EngineDeadError: this object was stopped.
        """
        try:
            with self._lifetime_lock:
                if self._stopped:
                    raise EngineDeadError("the engine was stopped")
                if self._thread is None:
                    thread = LoopThread("lmx-lab-models")
                    thread.start()
                    thread.submit(self._open()).result()
                    self._thread = thread
                    self._register_exit()
                thread = self._thread
            return await receive(thread.submit(work()))
        except HostingError as exc:
            raise EngineDeadError("the engine was stopped") from exc

    async def _open(self) -> None:
        """Create what belongs to the loop."""
        self._loop = asyncio.get_running_loop()
        self._now = InMemory()
        self._wanted: dict[Kind, Model] = {}
        """Models to keep next to the main one. They are loaded again after their engine has lost them."""
        self._idle_spec: LoadSpec | None = None
        """The spec of the model that was unloaded because it was idle (``EngineSnapshot.idle_model``)."""
        self._current = CurrentChange(on_change=self._publish_change, on_end=self._schedule_next)
        # Models are read into memory one at a time, so that the memory of the others is known.
        self._entering = asyncio.Lock()
        self._loads: list[LoadOperation] = []
        """The loads that are in progress."""
        self._last_unload: UnloadOperation | None = None
        self._lending: asyncio.Task[str | None] | None = None
        """Unloads all models, and loads them again when they are taken back; see ``make_room``."""
        self._taken_back = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._reloads: set[asyncio.Task[Any]] = set()
        """The tasks that load models again that were lost."""
        self._idle_timer: asyncio.TimerHandle | None = None
        self._reloaded_at: dict[Kind | None, float] = {}
        """When a model that was lost was last loaded again: the main one (None), or the pinned one of a kind."""
        self._swaps = SwapQueue(
            self.settings,
            loaded=lambda: self.snapshot.model or self.snapshot.idle_model,
            is_busy=lambda: self._now.main is not None and self._now.main.admission.active > 0,
            is_changing=self._current.in_progress,
        )

    def _post(self, callback: Callable[..., object], *args: object) -> None:
        """Call a function on the manager's loop. May be called from any thread."""
        with suppress(RuntimeError):  # The loop is closed, because the manager was stopped.
            self._loop.call_soon_threadsafe(callback, *args)

    def _start_task(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Start a task that continues when its caller is cancelled."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._forget_task)
        return task

    def _forget_task(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # retrieved, because all callers may have left

    async def cancel_loads(self) -> None:
        """Cancel all loads because the server stops. Their callers get an error immediately."""

        async def cancel() -> None:
            self._cancel_all()

        if self._thread is not None:
            await self._run(cancel)

    async def quiesce(self, timeout_s: float) -> None:
        """Wait up to ``timeout_s`` for running requests to end. Remaining and queued requests end with an error."""

        async def drain() -> None:
            models = self._now.models
            were_open = [model for model in models if not model.admission.closed]
            drains = [Drain(model, "the server was stopped", limit_s=timeout_s) for model in models]
            await asyncio.gather(*(drain.run() for drain in drains))
            for model in were_open:
                model.admission.reopen()

        if self._thread is not None:
            await self._run(drain)

    # State

    @property
    def models(self) -> list[Model]:
        """The models in memory: the pinned ones, then the main one."""
        return self._now.models

    @property
    def main(self) -> Model | None:
        """The main model, which was loaded last and answers requests that name no model."""
        main = self._now.main
        return main if main is not None and main.lost is None else None

    @property
    def snapshot(self) -> EngineSnapshot:
        """The models in memory and the state of their engines. Never blocks."""
        # Counts of unloaded models are read first: a model that is unloaded meanwhile is then missing, and not counted
        # twice.
        totals = replace(self._ended_totals)
        now = self._now
        states = [model.state(pinned=model in now.pins.values()) for model in now.models]
        for state in states:
            totals.add(state.totals)
        with self._totals_lock:
            for name in COUNTERS:
                setattr(totals, name, max(getattr(totals, name), getattr(self._totals, name)))
            self._totals = totals
        main = next((state for state in states if now.main is not None and state.entry is now.main.entry), None)
        change, unloaded = now.change, now.unloaded if main is None else None
        if now.main is not None and isinstance(now.lost, OutOfMemoryError):
            unloaded = (now.main.entry.id, "memory")
        phase: EngineState = "ready" if main is not None else "empty"
        if main is None and change is not None and change.stage == "loading":
            phase = "loading"
        elif main is None and isinstance(now.lost, EngineDeadError):
            phase = "dead"
        if change is not None and now.main is not None:
            change = replace(change, requests_left=now.main.admission.active)
        memory = self._memory(now.main)
        return EngineSnapshot(
            state=phase,
            models=tuple(states),
            main=main,
            change=change,
            unloaded_model=unloaded[0] if unloaded is not None else None,
            unload_cause=unloaded[1] if unloaded is not None else None,
            totals=totals,
            memory_used_bytes=memory.used or 0,
            memory_peak_bytes=memory.peak or 0,
            memory_total_bytes=memory.total,
            memory_is_of_device=memory.is_of_device,
            blas=next((engine.blas for engine in list(self._engines.values()) if engine.blas is not None), None),
        )

    def _memory(self, main: Model | None) -> EngineMemory:
        """Return the memory of all engines together; whether it is of a device is said of the main model's."""
        total, limit, used, is_of_device = self._machine_bytes, 0, 0, False
        for name, engine in list(self._engines.items()):
            memory, engine_used = engine.memory, self._used_bytes(name)
            self._peaks[name] = max(self._peaks.get(name, 0), engine_used, memory.peak or 0)
            total, limit, used = max(total, memory.total), max(limit, memory.limit), used + engine_used
            if main is None or engine_for(main.entry.format).name == name:
                is_of_device = memory.is_of_device
        peak = sum(list(self._peaks.values()))
        return EngineMemory(total=total, limit=limit, used=used, peak=peak, is_of_device=is_of_device)

    def _used_bytes(self, name: EngineName) -> int:
        """Return the memory that the models of an engine use."""
        measured = self._engines[name].memory.used
        if measured is not None:
            return measured
        return sum(model.memory_bytes for model in self._now.models if engine_for(model.entry.format).name == name)

    @property
    def alive(self) -> bool:
        """Whether the manager runs and the main model was not lost because its thread or process ended."""
        return not self._stopped and not isinstance(self._now.lost, EngineDeadError)

    @property
    def fingerprint(self) -> str:
        """Name and version of the library that computes the main model; empty without one."""
        return self.main.fingerprint if self.main is not None else ""

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

    def engine(self, name: EngineName) -> Engine:
        """Return an engine, which is imported and created first if necessary. Blocks in that case."""
        if (known := self._engines.get(name)) is not None:
            return known
        with self._engines_lock:
            if name not in self._engines:
                host = EngineHost(
                    used_by_others=functools.partial(self._used_by_others, name),
                    idle=self._post_idle,
                    lost=functools.partial(self._post, self._remove_lost),
                    turns=self._turns,
                )
                self._engines[name] = self._factories[name](self.settings, host)
            return self._engines[name]

    def _used_by_others(self, name: EngineName) -> int:
        """Return the memory that the other engines use, without the memory of a GPU."""
        others = [other for other, engine in list(self._engines.items()) if not engine.memory.is_of_device]
        return sum(self._used_bytes(other) for other in others if other != name)

    def unpinned(self) -> Sequence[LoadSpec]:
        """Return the loads of the encoders that the settings name and that are not in memory."""
        present = {pinned.entry.kind for pinned in self.snapshot.pinned}
        named: list[tuple[str | None, Kind]] = [
            (self.settings.embedder, "embedding"),
            (self.settings.reranker, "rerank"),
        ]
        return [LoadSpec(model=name, pin=kind) for name, kind in named if name is not None and kind not in present]

    # Loads

    async def load(
        self,
        spec: LoadSpec,
        entry: ModelEntry | None = None,
        *,
        local: bool = True,
        finish_queued: bool = False,
        if_busy: IfBusy = "refuse",
    ) -> LoadReport:
        """Load a model in place of the main one, or in addition to it if ``spec.pin`` is set.

        Running requests of the main model may end first (``drain_s``). If the load fails, the previous model is loaded
        again. Cancelling the caller does not cancel the load. Loads of the same spec that are in progress are joined.

        Args:
            entry: The model, if its files are already known.
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
            lambda: self._join_load(spec, entry, local=local, finish_queued=finish_queued, if_busy=if_busy)
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

        async def check() -> ModelEntry:
            entry, engine = await self._find(spec, None, local=True)
            await self._finder.check(entry)
            if spec.pin is not None:
                check_pinned_kind(spec, entry)
            others = await in_thread(lambda: [(it, self.engine(engine_for(it.format).name)) for it in beside])
            room_bytes = engine.memory.limit - sum(
                it.load_bytes for it, other in others if _share_memory(engine, other)
            )
            await self._check_loadable(entry, spec, engine, room_bytes)
            return entry

        return await self._run(check)

    async def plan(self, spec: LoadSpec, *, local: bool = True) -> LoadPlan:
        """Return what a load would use in memory, and whether there is room for it; see ``plan_load``."""
        return await plan_load(
            spec, settings=self.settings, catalog=self.catalog, engine=self.engine, now=self.snapshot, local=local
        )

    async def cancel_load(self, model: str) -> None:
        """Cancel the loads of the model with this id or requested name. Downloads continue in the background.

        The callers of the loads get the error after the previous model is loaded again.

        Raises:
            InvalidRequestError: the model is not being loaded.
        """

        async def cancel() -> None:
            operations = self._loads_of(model)
            if not operations:
                raise InvalidRequestError(f"{model} is not being loaded; there is nothing to cancel", param="model")
            _cancel(operations)

        await self._run(cancel)

    def _loads_of(self, model: str) -> list[LoadOperation]:
        """Return the loads of the model with this id or requested name."""
        return [operation for operation in self._loads if model in operation.model_names]

    async def _join_load(
        self, spec: LoadSpec, entry: ModelEntry | None, *, local: bool, finish_queued: bool, if_busy: IfBusy
    ) -> LoadReport:
        if self._stopped:
            # A request in swap mode may have got its turn because other loads have ended.
            raise EngineDeadError("the engine was stopped")
        operation = next((it for it in self._loads if it.spec == spec and it.requested_entry == entry), None)
        if operation is None:
            unload = UnloadOperation(done=self._loop.create_future(), requested=False, wait=spec.wait)
            operation = LoadOperation(spec=spec, entry=entry, done=self._loop.create_future(), unload=unload)
            self._loads.append(operation)
            work = self._load(operation, local=local, finish_queued=finish_queued, if_busy=if_busy)
            self._start_task(work, f"lmx-lab load {spec.model:.80}")
        # Cancelling a caller does not cancel the load.
        return await asyncio.shield(operation.done)

    async def _load(self, operation: LoadOperation, *, local: bool, finish_queued: bool, if_busy: IfBusy) -> None:
        try:
            report = await self._find_and_load(operation, local=local, finish_queued=finish_queued, if_busy=if_busy)
        except LabError as exc:
            self._fail(operation, exc)
        except asyncio.CancelledError:
            self._fail(operation, NotLoadedError(f"the load of {operation.spec.model} was cancelled"))
            raise
        except Exception as exc:
            log.exception("%s could not be loaded", operation.spec.model)
            self._fail(operation, UnusableModelError(f"{operation.spec.model} could not be loaded: {exc!r}"))
        else:
            self._report(ModelEvent(model=report.model, stage="loaded"))
            operation.finish(report)
        finally:
            self._loads.remove(operation)

    def _fail(self, operation: LoadOperation, error: LabError) -> None:
        if not operation.done.done():
            self._report(ModelEvent(model=operation.spec.model, stage="failed", message=error.message))
        operation.finish(error)

    async def _find_and_load(
        self, operation: LoadOperation, *, local: bool, finish_queued: bool, if_busy: IfBusy
    ) -> LoadReport:
        spec, found = operation.spec, operation.entry
        entry, engine = await operation.run(self._find(spec, found, local=local))
        operation.reached_engine, operation.entry = True, entry
        if spec.pin is not None:
            if found is None:
                await operation.run(self._finder.check(entry))
            check_pinned_kind(spec, entry)
            if self._lending is not None:
                self._current.check_free(self.snapshot)
            self._report(load_progress(entry))
            return await operation.run(self._load_pinned(entry, spec, engine, spec.pin))
        if not self._current.in_progress() and (report := await self._report_if_loaded(entry, spec)) is not None:
            return report
        others = [other for other in self._loads if other is not operation and other.loads_same(entry, spec)]
        if others:
            other = others[0]
            other.unload.set_wait(spec.wait)
            return await asyncio.shield(other.done)
        if if_busy == "replace":
            for other in self._loads:
                if other.replaces_main and other.entry is not None and other.entry.path != entry.path:
                    error = NotLoadedError(f"the load of {other.entry.id} was cancelled: {entry.id} is loaded instead")
                    other.cancel(error, restores_previous=False)
        if if_busy == "refuse":
            self._current.check_free(self.snapshot)
        async with self._current.begin("load", entry.id):
            if found is None:
                await operation.run(self._finder.check(entry))
            self._report(load_progress(entry))
            return await self._replace_main(operation, entry, engine, finish_queued=finish_queued)

    async def _find(self, spec: LoadSpec, entry: ModelEntry | None, *, local: bool) -> tuple[ModelEntry, Engine]:
        """Return the files to load, with those of the draft model, and their engine.

        Args:
            entry: The files, if they are already known.
        """
        if entry is None:
            main = self._now.main
            loaded = main.entry if main is not None and main.lost is None else None
            entry = await self._finder.find(spec, local=local, loaded=loaded)
        entry = await self._finder.with_draft(entry, spec, local=local)
        return entry, await in_thread(functools.partial(self.engine, choose_engine(entry, spec).name))

    async def _same_model(self, model: Model | None, entry: ModelEntry, spec: LoadSpec) -> Model | None:
        """Return the model if it is in memory, has these options, and its files have not changed; None otherwise."""
        if model is None or model.lost is not None or not same_options(model.spec, spec):
            return None
        unchanged = await in_thread(functools.partial(is_loaded, model.entry, entry))
        return model if unchanged and model in self._now.models else None

    async def _report_if_loaded(self, entry: ModelEntry, spec: LoadSpec) -> LoadReport | None:
        """Return a report if the main model is this one; None otherwise."""
        if (main := await self._same_model(self._now.main, entry, spec)) is None or main is not self._now.main:
            return None
        return _load_report(main, entry, 0.0)

    async def _replace_main(
        self, operation: LoadOperation, entry: ModelEntry, engine: Engine, *, finish_queued: bool
    ) -> LoadReport:
        """Load a model in place of the main one; if that fails, load the previous model again."""
        operation.check()
        spec, previous = operation.spec, self._now.main
        if (report := await self._report_if_loaded(entry, spec)) is not None:
            return report
        # A model that cannot be loaded is refused while the current model still answers.
        checked_s = await operation.run(
            self._check_loadable(entry, spec, engine, self._room_bytes(engine, instead_of=previous, besides=entry))
        )
        await operation.run(self._restore_pins())
        try:
            why = f"the model was replaced by {entry.id}"
            await self._drain_and_unload(operation.unload, why, finish_queued=finish_queued, load=operation)
            if previous is not None:
                self._report(ModelEvent(model=previous.entry.id, stage="unloaded"))
            self._current.enter_stage("loading")
            report = await operation.run(self._load_main(entry, spec, engine))
            return replace(report, load_time_ms=checked_s * 1e3 + report.load_time_ms)
        except LabError as exc:
            # Not the exception, which refers to this frame, and so to the previous model.
            kind, message, param = type(exc), exc.message, exc.param
        # The previous model is not needed if another model is loaded instead, or if the lab stops.
        outcome = await self._restore(operation, previous) if operation.restores_previous else ""
        raise kind(f"{message}{outcome}", param=param)

    async def _restore(self, operation: LoadOperation, previous: Model | None) -> str:
        """Load the previous model again after a failed load. Return the outcome as the end of an error message."""
        if previous is None:
            return NONE_LOADED
        name = previous.entry.id
        if self._now.main is previous:
            return f"; {name} is still loaded"
        try:
            await operation.restore(self._reload(previous))
        except LabError as exc:
            return f"; the previous model {name} could not be loaded again either: {exc.message}"
        return f"; the previous model {name} is loaded again"

    async def _reload(self, model: Model) -> None:
        entry, spec, engine = model.entry, model.spec, self.engine(engine_for(model.entry.format).name)
        room_bytes = self._room_bytes(engine, instead_of=self._now.main, besides=entry)
        await self._check_loadable(entry, spec, engine, room_bytes)
        await self._load_main(entry, spec, engine)

    def _room_bytes(self, engine: Engine, *, instead_of: Model | None, besides: ModelEntry | None = None) -> int:
        """Return the memory that a model may use when it is loaded in place of another one.

        Args:
            besides: A model whose memory does not count, because the load uses it if it is in memory.
        """
        staying = [
            model
            for model in self._now.models
            if _share_memory(engine, self._engines[engine_for(model.entry.format).name])
            and (besides is None or model.entry.path != besides.path)
            and (model is not instead_of or (model is self._now.main and model in self._now.pins.values()))
        ]
        return engine.memory.limit - sum(model.memory_bytes for model in staying)

    async def _check_loadable(self, entry: ModelEntry, spec: LoadSpec, engine: Engine, room_bytes: int) -> float:
        """Let an engine check a model; return the seconds that it took."""
        started = self._loop.time()
        check = engine.check(entry, spec, room_bytes=room_bytes)
        await within_limit(check, entry, self.settings.load_timeout_s)
        return self._loop.time() - started

    async def _enter(
        self, entry: ModelEntry, spec: LoadSpec, engine: Engine, *, instead_of: Model | None
    ) -> tuple[Model, LoadReport]:
        """Read a model into memory, and return it with the report of its load."""
        started = self._loop.time()
        entry = await in_thread(functools.partial(with_marks, entry))
        room_bytes = self._room_bytes(engine, instead_of=instead_of)
        load = engine.load(entry, spec, room_bytes=room_bytes)
        model = await within_limit(load, entry, self.settings.load_timeout_s)
        if (lost := model.lost) is not None:
            raise type(lost)(lost.message)
        return model, _load_report(model, entry, self._loop.time() - started)

    async def _load_main(self, entry: ModelEntry, spec: LoadSpec, engine: Engine) -> LoadReport:
        async with self._entering:
            for pinned in self._now.pins.values():
                # An encoder may be the main model and pinned.
                if (model := await self._same_model(pinned, entry, spec)) is not None:
                    report = _load_report(model, entry, 0.0)
                    break
            else:
                model, report = await self._enter(entry, spec, engine, instead_of=self._now.main)
            self._now = replace(self._now, main=model, failure=None, unloaded=None)
        return report

    async def _drop(self, model: Model, error: LabError) -> int:
        """Unload a model that was removed from ``_now``; return the bytes that this released."""
        try:
            return await model.close(error)
        finally:
            self._count_ended(model)

    def _count_ended(self, model: Model) -> None:
        """Add the counts of a model that has left memory, once."""
        if model not in self._counted:
            self._counted.add(model)
            self._ended_totals.add(model.totals)

    def _cancel_all(self, error: LabError | None = None) -> None:
        """Cancel all loads, and the end of ``make_room``. The callers of loads get the error immediately."""
        if self._lending is not None:
            self._lending.cancel()
        for operation in list(self._loads):
            failure = error or NotLoadedError(f"the load of {operation.spec.model} was cancelled: the server stops")
            operation.cancel(failure, restores_previous=False)
            self._fail(operation, failure)

    # Pinned models

    async def _load_pinned(self, entry: ModelEntry, spec: LoadSpec, engine: Engine, kind: Kind) -> LoadReport:
        async with self._entering:
            before, checked_s = self._now.pins.get(kind), 0.0
            model = None
            for present in (before, self._now.main):
                model = model or await self._same_model(present, entry, spec)
            if model is not None:
                report = _load_report(model, entry, 0.0)
            else:
                room_bytes = self._room_bytes(engine, instead_of=before)
                checked_s = await self._check_loadable(entry, spec, engine, room_bytes)
                model, report = await self._enter(entry, spec, engine, instead_of=before)
            self._wanted[kind] = model
            self._now = replace(self._now, pins={**self._now.pins, kind: model})
        if before is not None and before is not model and before is not self._now.main:
            await self._drop(before, NotLoadedError(f"{entry.id} was pinned in place of {before.entry.id}"))
        return replace(report, load_time_ms=checked_s * 1e3 + report.load_time_ms, context_length=None)

    async def _restore_pins(self) -> None:
        """Load pinned models again that were lost because their engine died."""
        for kind, pinned in list(self._wanted.items()):
            present = self._now.pins.get(kind)
            if present is None or present.lost is not None:
                await self._restore_pin(kind, pinned)

    async def _restore_pin(self, kind: Kind, pinned: Model) -> None:
        engine = self.engine(engine_for(pinned.entry.format).name)
        self._report(load_progress(pinned.entry))
        try:
            await self._load_pinned(pinned.entry, pinned.spec, engine, kind)
        except LabError as exc:
            log.warning("%s, which was pinned, could not be loaded again: %s", pinned.entry.id, exc.message)
            self._report(ModelEvent(model=pinned.entry.id, stage="failed", message=exc.message))
        else:
            self._report(ModelEvent(model=pinned.entry.id, stage="loaded"))

    # Unloads

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

        async def unload() -> int:
            if (joined := self._unload_to_join(model, wait, local=local)) is not None:
                joined.set_wait(wait)
                return await asyncio.shield(joined.done) or 0
            replacing = [operation for operation in self._loads if operation.replaces_main]
            if loads := self._loads_of(model) if model is not None else replacing:
                _cancel(loads)
                await asyncio.wait([operation.done for operation in loads])
                return 0
            now, main = self.snapshot, self._now.main
            if model is not None:
                check_unload(model, now, local=local)
            self._current.check_free(now)
            entry = main.entry if main is not None else None
            operation = UnloadOperation(done=self._loop.create_future(), requested=True, wait=wait, entry=entry)
            # Set before the unload begins, so that further requests to unload join it.
            self._last_unload = operation
            self._start_task(self._unload(operation), "lmx-lab unload")
            # Cancelling a caller does not cancel the unload.
            return await asyncio.shield(operation.done) or 0

        return await self._run(unload)

    def _unload_to_join(self, model: str | None, wait: bool | None, *, local: bool) -> UnloadOperation | None:
        """Return the unload in progress that a request to unload joins; None if there is none.

        Args:
            model, wait: The arguments of the request. With ``wait``, a name means the model in memory, even if the same
                model is being loaded with other options.
        """
        operation = self._last_unload
        if operation is None or operation.done.done():
            return None
        if model is None or operation.entry is None:
            return operation if model is None and operation.requested else None
        is_named = loaded_id(model, [operation.entry], local=local) == operation.entry.id
        return operation if is_named and (wait is not None or not self._loads_of(model)) else None

    async def _unload(self, operation: UnloadOperation) -> None:
        main = self._now.main
        try:
            async with self._current.begin("unload", main.entry.id if main else ""):
                if (main := self._now.main) is not None:
                    self._current.name_model(main.entry.id)
                    freed = await self._drain_and_unload(operation, "the model was unloaded", cause="requested")
                else:
                    # Nothing is loaded: the idle model is no longer loaded again for a request.
                    freed, unloaded = 0, self._now.unloaded
                    if unloaded is not None:
                        unloaded = (unloaded[0], "requested")
                    self._now = replace(self._now, unloaded=unloaded, failure=None)
            if main is not None:
                self._report(ModelEvent(model=main.entry.id, stage="unloaded"))
            operation.finish(freed)
        except BaseException as exc:
            operation.finish(exc)
            raise

    async def _drain_and_unload(
        self,
        operation: UnloadOperation,
        why: str,
        *,
        finish_queued: bool = False,
        cause: UnloadCause | None = None,
        load: LoadOperation | None = None,
        limit_s: float | None = None,
    ) -> int:
        """Unload the main model after its requests have ended; return the bytes that this released.

        A pinned model stays in memory, and only ceases to be the main one.

        Args:
            limit_s: Time that running requests have to end; by default ``drain_s``.
            load: The load that needs the room. If it is cancelled before the model is unloaded, the model stays.
        """
        main = self._now.main
        if main is None:
            return 0

        def report_drain(until: float | None, name: str = main.entry.id) -> None:
            self._current.enter_stage("draining", drain_until=until)
            if (state := self.snapshot.unloading) is not None:
                self._report(ModelEvent(model=name, stage="unloading", unloading=state))

        drain = Drain(
            main,
            why,
            limit_s=self.settings.drain_s if limit_s is None else limit_s,
            finish_queued=finish_queued,
            on_change=report_drain,
        )
        drain.set_wait(operation.wait)
        operation.entry, operation.drain, self._last_unload = main.entry, drain, operation
        try:
            if main not in self._now.pins.values():
                self._current.enter_stage("draining", drain_until=drain.until)
                try:
                    await (load.run(drain.run()) if load is not None else drain.run())
                except LabError:
                    main.admission.reopen()
                    raise
            self._current.enter_stage("unloading")
            # It may have been pinned in the meantime.
            if stays := main in self._now.pins.values():
                main.admission.reopen()
            unloaded = self._now.unloaded
            if cause is not None:
                unloaded, self._idle_spec = (main.entry.id, cause), replace(main.spec, pin=None)
            # The cause is known before the memory is released.
            self._now = replace(
                self._now, main=None if self._now.main is main else self._now.main, unloaded=unloaded, failure=None
            )
            error = NotLoadedError("the model was unloaded before this request ended")
            freed = 0 if stays else await self._drop(main, error)
        except BaseException as exc:
            operation.finish(None if load is not None and self._now.main is main else exc)
            raise
        operation.finish(freed)
        return freed

    # Room for the models of another manager

    async def make_room(self, model: str, *, limit_s: float) -> None:
        """Unload all models to make room for those of another manager of this process, which replaces this one.

        Loads in progress are cancelled, and an unload no longer waits for answers. Until ``take_back`` or ``stop``,
        this manager loads nothing, and its state shows a load. Cancelling the caller does not cancel the unload.

        Args:
            model: The model that is loaded next, for messages.
            limit_s: Time that running requests have to end.
        """

        async def lend() -> None:
            self._cancel_all()
            if self._last_unload is not None:
                self._last_unload.set_wait(False)
            self._taken_back.clear()
            unloaded: asyncio.Future[str | None] = self._loop.create_future()
            lending = self._lending = self._start_task(self._lend(model, limit_s, unloaded), "lmx-lab make room")
            # Cancelling a caller does not cancel the unload; ``take_back`` waits for its end.
            await asyncio.wait([unloaded, lending], return_when=asyncio.FIRST_COMPLETED)
            if lending.done():
                await _end_of(lending)

        await self._run(lend)

    async def take_back(self) -> str | None:
        """Undo ``make_room``: load the models again, and return the id of the main one; None if there was none.

        Raises:
            LabError: the main model could not be loaded again.
        """

        async def take_back() -> str | None:
            self._taken_back.set()
            lending, self._lending = self._lending, None
            return await _end_of(lending) if lending is not None else None

        return await self._run(take_back)

    async def _lend(self, model: str, limit_s: float, unloaded: asyncio.Future[str | None]) -> str | None:
        """Unload all models, and load them again when ``_taken_back`` is set. Return the main model.

        Args:
            model: The model that is loaded in their place.
            unloaded: Gets its result when they are unloaded.
        """
        async with self._current.begin("load", model):
            main, why = self._now.main, f"the server was restarted for {model}"
            operation = UnloadOperation(done=self._loop.create_future(), requested=False)
            await self._drain_and_unload(operation, why, limit_s=limit_s)
            while pins := list(self._now.pins.values()):
                pinned = pins[0]
                await Drain(pinned, why, limit_s=limit_s).run()
                self._now = replace(self._now, pins={k: it for k, it in self._now.pins.items() if it is not pinned})
                await self._drop(pinned, NotLoadedError(f"{why} before this request ended"))
            self._current.enter_stage("loading")
            unloaded.set_result(None)
            await self._taken_back.wait()
            await self._restore_pins()
            if main is not None:
                self._current.name_model(main.entry.id)
                await self._reload(main)
            return main.entry.id if main is not None else None

    # Reports of models

    def _publish_change(self) -> None:
        self._now = replace(self._now, change=self._current.value)

    def _schedule_next(self) -> None:
        """Start the next turn in swap mode, and set the idle timer. Called when their conditions may have changed."""
        self._swaps.update()
        self._set_idle_timer()

    def _remove_lost(self, model: Model, by_request: bool) -> None:
        """React to a model that its engine has lost; see ``EngineHost.lost``."""
        now, error = self._now, model.lost
        was_main, kind = now.main is model, next((kind for kind, it in now.pins.items() if it is model), None)
        if error is None or not (was_main or kind is not None):
            return
        pins = {other: pinned for other, pinned in now.pins.items() if other != kind}
        self._now = replace(now, pins=pins)
        self._count_ended(model)
        if was_main:
            unloaded = now.unloaded
            if isinstance(error, OutOfMemoryError):
                unloaded = (model.entry.id, "memory")
                self._report(ModelEvent(model=model.entry.id, stage="unloaded", message="out of memory"))
            self._now = replace(self._now, main=None, failure=error, unloaded=unloaded)
            if by_request and self._may_reload(None):
                spec = replace(model.spec, pin=None)
                load = self._join_load(spec, model.entry, local=True, finish_queued=False, if_busy="refuse")
                self._start_reload(load)
        if kind is not None:
            reloads = self._lending is None and self._may_reload(kind)
            what = "it is loaded again" if reloads else "pin it again"
            message = f"the engine lost this pinned model; {what}"
            self._report(ModelEvent(model=model.entry.id, stage="unloaded", message=message))
            if reloads:
                self._start_reload(self._restore_pin(kind, model))
        self._schedule_next()

    def _start_reload(self, work: Coroutine[Any, Any, object]) -> None:
        task = self._start_task(work, "lmx-lab reload")
        self._reloads.add(task)
        task.add_done_callback(self._reloads.discard)

    def _may_reload(self, slot: Kind | None) -> bool:
        """Return whether a lost model is loaded again, which happens once in ``RELOAD_S``."""
        now = time.perf_counter()
        if now - self._reloaded_at.get(slot, -RELOAD_S) <= RELOAD_S:
            return False
        self._reloaded_at[slot] = now
        return True

    def _post_idle(self) -> None:
        """React to a model that has no requests left. May be called from any thread."""
        # Skipped if nothing depends on it, since a client that sends one request at a time causes this call each time.
        if self.settings.idle_unload_s is not None or self.settings.swap or self._now.change is not None:
            self._post(self._schedule_next)

    def _set_idle_timer(self) -> None:
        """Set the timer to the time at which the main model has been idle for ``idle_unload_s``."""
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None
        idle_s, main = self.settings.idle_unload_s, self._now.main
        # The end of the last request, or of the change, calls this method again.
        if idle_s is None or main is None or main.admission.active or self._current.in_progress():
            return
        left_s = main.admission.used_at + idle_s - time.perf_counter()
        if left_s > 0:
            self._idle_timer = self._loop.call_later(left_s, self._set_idle_timer)
        else:
            self._start_task(self._unload_idle(main, idle_s), "lmx-lab idle unload")

    async def _unload_idle(self, main: Model, idle_s: float) -> None:
        async with self._current.begin("unload", main.entry.id):
            if self._now.main is not main:
                return
            main.admission.close(NotLoadedError(f"{main.entry.id} was unloaded because it was idle; load it again"))
            if main.admission.active or main.admission.used_at + idle_s > time.perf_counter():
                # A request has arrived in the meantime.
                main.admission.reopen()
                return
            log.info("%s was idle for %g s", main.entry.id, idle_s)
            operation = UnloadOperation(done=self._loop.create_future(), requested=False)
            await self._drain_and_unload(operation, "the model was unloaded", cause="idle")
        self._report(ModelEvent(model=main.entry.id, stage="unloaded", message=f"idle for {idle_s:g} s"))

    # Requests

    async def submit(self, request: GenerationRequest) -> Answer:
        """Accept a generation request, and return its answer. See ``generate``."""
        (answer,) = await self.generate(request)
        return answer

    async def generate(self, request: GenerationRequest, choices: int = 1) -> list[Answer]:
        """Accept a generation request for several answers, all or none. The answers belong to the calling loop.

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
        limit, reader = self.settings.slots + self.settings.queue_limit, asyncio.get_running_loop()
        if choices > limit:
            raise InvalidRequestError(f"n is {choices}; this server takes {limit} (slots and queue_limit)", param="n")

        async def use(model: Model, permits: Sequence[Permit]) -> list[Answer]:
            return await model.generate(request, permits, reader)

        return await self._run(lambda: self._use(request, CHAT, use, count=choices))

    async def embed(self, request: EmbeddingRequest) -> Embeddings:
        """Return the vector of each input of a pinned or the main model. Cancelling the caller cancels the work.

        Raises:
            NotLoadedError, ModelNotFoundError: no embedding model is in memory, or not the one that the request names.
            InvalidRequestError: the model does not embed; an input is not valid text; ``dimensions`` is too large.
            ContextLengthError: an input is longer than the model's context.
            QueueFullError: too many requests wait.
            GenerationTimeoutError, EngineError: the vectors could not be computed.
        """
        _check_texts(request.inputs)

        async def use(model: Model, permits: Sequence[Permit]) -> asyncio.Task[Embeddings]:
            return await model.embed(request, permits[0])

        return await self._result(request, EMBEDDING, use)

    async def rerank(self, request: RerankRequest) -> Ranking:
        """Return the relevance of each document to the query, from a reranker or, without one, from an embedding model.
        Raises the same as ``embed``.
        """
        _check_texts(request.documents)

        async def use(model: Model, permits: Sequence[Permit]) -> asyncio.Task[Ranking]:
            return await model.rerank(request, permits[0])

        return await self._result(request, RERANK, use)

    async def trace(self, request: TraceRequest) -> Trace:
        """Return internal values of the main model. Cancelling the caller cancels the work.

        Raises:
            NotLoadedError, ModelNotFoundError: the model that the request names is not loaded, or does not exist.
            InvalidRequestError: the engine or the model cannot do what is requested, or the result is too large.
            ContextLengthError: the text is longer than the model's context.
            QueueFullError: too many requests wait.
            GenerationTimeoutError, EngineError: the trace could not be computed.
        """

        async def use(model: Model, permits: Sequence[Permit]) -> asyncio.Task[Trace]:
            return await model.trace(request, permits[0])

        return await self._result(request, CHAT, use)

    async def encode(self, request: GenerationRequest) -> list[int]:
        """Return the token ids of a request's prompt, which may be longer than the model's context.

        Raises:
            NotLoadedError, ModelNotFoundError: the model that the request names is not loaded, or does not exist.
            ContextLengthError: the prompt is so long that it is not tokenized.
            InvalidRequestError: the prompt cannot be tokenized.
            QueueFullError: too many requests wait.
        """
        return await self.with_model(request, lambda model: model.encode(request))

    async def decode(self, answer: Answer, tokens: Sequence[int]) -> str:
        """Return the text of token ids as the tokenizer of the model that answers shows it, even if the model is being
        unloaded.

        Raises:
            NotLoadedError: the model was unloaded.
        """
        model = next((model for model in self._now.models if model.entry is answer.origin.entry), None)
        if model is None:
            raise NotLoadedError(f"{answer.model} has been unloaded; {LOAD_FIRST}")
        return await self._run(lambda: model.decode(tokens))

    async def with_model(self, request: GenerationRequest, work: Callable[[Model], Awaitable[T]]) -> T:
        """Call a function, on the manager's loop, with the chat model that a request names, and return its result. It
        counts as a request.
        """

        async def use(model: Model, permits: Sequence[Permit]) -> T:
            try:
                return await work(model)
            finally:
                permits[0].release()

        return await self._run(lambda: self._use(request, CHAT, use))

    def model_for(self, name: str | None, kinds: Kinds, *, local: bool = True) -> Model | None:
        """Return the model in memory that answers a request; None if there is none.

        Args:
            name: The model that the request names; None takes any.
            kinds: Kinds of models that can answer, the preferred ones first.
        """
        models = self._now.models
        entries = [model.entry for model in models]
        entry = find_model(entries, loaded_id(name, entries, local=local), kinds)
        return next((model for model in models if model.entry is entry), None)

    async def _result(
        self, request: Request, kinds: Kinds, use: Callable[[Model, Sequence[Permit]], Awaitable[asyncio.Task[T]]]
    ) -> T:
        """Accept a request, and wait for its result."""

        async def wait() -> T:
            # In swap mode, the turn of a request ends when it was accepted.
            return await (await self._use(request, kinds, use))

        return await self._run(wait)

    async def _use(
        self,
        request: Request,
        kinds: Kinds,
        use: Callable[[Model, Sequence[Permit]], Awaitable[T]],
        *,
        count: int = 1,
    ) -> T:
        """Pass a request to the model in memory that answers it, with a permit for each answer.

        In swap mode, the model may be loaded first. With ``Settings.any_model``, a request that names an unknown model
        is answered by the loaded one.

        Args:
            kinds: Kinds of models that can answer, the preferred ones first.
            use: Accepts the request. If it fails, the permits are released.
            count: Number of answers.

        Raises:
            LabError: see ``generate``.
        """
        name, local, swap = request.model, request.caller.local, self.settings.swap
        name = self.settings.ids_by_alias.get(name, name) if name is not None else None

        async def use_named(name: str | None) -> T:
            model = self.model_for(name, kinds, local=local)
            # In swap mode, another model may be loaded in place of the main one before this request is admitted.
            stays = not swap or model in self._now.pins.values()
            if model is not None and (stays or not (self._current.in_progress() or self._swaps)):
                try:
                    return await self._admit(model, request, use, count)
                except NotLoadedError as exc:
                    if stays:
                        raise await self._extend_refusal(exc, name, kinds, local=local) from exc
            elif not swap:
                error = self._refusal(name, kinds, local=local)
                raise await self._extend_refusal(error, name, kinds, local=local)
            return await self._use_in_turn(request, name, kinds, use, count)

        try:
            return await use_named(name)
        except ModelNotFoundError:
            if not self.settings.any_model:
                raise
        return await use_named(None)

    async def _admit(
        self, model: Model, request: Request, use: Callable[[Model, Sequence[Permit]], Awaitable[T]], count: int
    ) -> T:
        """Admit a request and pass it to a model. If that fails, its permits are released.

        Raises:
            QueueFullError: too many requests wait.
            NotLoadedError: the model is being unloaded.
        """
        if request.caller.patient:
            await model.admission.until_room(count)
        permits = model.admission.admit(count, slot_free_s=lambda: model.slot_free_s)
        try:
            return await use(model, permits)
        except BaseException:
            for permit in permits:
                permit.release()
            raise

    async def _use_in_turn(
        self,
        request: Request,
        name: str | None,
        kinds: Kinds,
        use: Callable[[Model, Sequence[Permit]], Awaitable[T]],
        count: int,
    ) -> T:
        """Wait for the turn of a request in swap mode, load its model if necessary, and pass the request to it."""
        limit_s, caller = request.timeout_s or self.settings.request_timeout_s, request.caller
        wanted = loaded_id(name, [model.entry for model in self._now.models], local=caller.local)
        try:
            async with asyncio.timeout(limit_s):
                turn = await self._take_turn(wanted, kinds, limited=not caller.patient)
                try:
                    loaded = turn.model
                    for attempt in range(TRIES):
                        model = self.model_for(loaded, kinds, local=False)
                        error = self._refusal(loaded, kinds, local=False) if model is None else None
                        if model is not None:
                            try:
                                return await self._admit(model, request, use, count)
                            except NotLoadedError as exc:
                                error = exc
                        assert error is not None
                        if attempt == TRIES - 1 or not isinstance(error, NotLoadedError):
                            raise error
                        # An administrator has unloaded or replaced the model.
                        loaded = await self._load_for_request(wanted, kinds)
                finally:
                    turn.close()
        except TimeoutError:
            message = f"the model was not loaded within the request's time limit of {limit_s:g} s; load it first"
            raise GenerationTimeoutError(message, param="model") from None
        except NotLoadedError as exc:
            if wanted is not None:
                raise
            raise await self._extend_refusal(exc, name, kinds, local=caller.local) from exc
        raise AssertionError("unreachable")

    async def _take_turn(self, name: str | None, kinds: Kinds, *, limited: bool) -> SwapTurn:
        """Wait for the turn of a request (see ``SwapQueue``), load its model, and return the turn.

        Raises:
            LabError: see ``generate``.
        """
        ticket = self._swaps.ticket(name, limited=limited)
        try:
            # Checked before the wait, so that a request for a model that does not exist does not delay others.
            if name is not None and name != self.snapshot.model:
                await self._resolve(name, kinds, local=is_idle_path(name, self.snapshot))
            await self._swaps.wait(ticket)
            model = await self._load_for_request(name, kinds)
        except BaseException:
            self._swaps.leave(ticket)
            raise
        return self._swaps.turn(ticket, model)

    async def _load_for_request(self, name: str | None, kinds: Kinds) -> str | None:
        """Load the model that a request names, or the one that was unloaded because it was idle; return its id.

        A model that cannot answer the request is not loaded.
        """
        await self._current.wait()
        now = self.snapshot
        model = name or now.idle_model
        if model is None or model == now.model:
            return model
        # Decided before the load, after which the snapshot no longer shows that this was the idle model.
        local, idle_spec = is_idle_path(model, now), self._idle_spec if model == now.idle_model else None
        try:
            entry = await self._resolve(model, kinds, local=local)
        except (ModelNotFoundError, InvalidRequestError):
            if name is None:
                return None
            raise
        while True:
            started = time.perf_counter()
            try:
                spec = idle_spec or LoadSpec(model=model if entry.has_alias(model) else entry.id)
                report = await self._join_load(spec, None, local=local, finish_queued=True, if_busy="wait")
            except ModelBusyError:
                # This request joined a load that does not wait for others.
                await self._current.wait()
                continue
            self._swaps.swap_s = time.perf_counter() - started
            return report.model

    async def _resolve(self, name: str, kinds: Kinds, *, local: bool) -> ModelEntry:
        try:
            entry = await self._finder.resolve(name, local=local)
        except ModelNotFoundError as exc:
            raise unknown_model(name, self.snapshot, kinds) from exc
        if not entry.answers(kinds):
            raise wrong_kind(entry, kinds)
        return entry

    def _refusal(self, name: str | None, kinds: Kinds, *, local: bool) -> LabError:
        """Return the error of a request that no model in memory can answer."""
        now, failure = self.snapshot, self._now.lost
        if failure is not None and now.entry is None and now.state != "loading":
            return type(failure)(failure.message)
        return refusal(now, loaded_id(name, [model.entry for model in now.models], local=local), kinds)

    async def _extend_refusal(self, error: LabError, name: str | None, kinds: Kinds, *, local: bool) -> LabError:
        """Return the error, extended by the next step that the models on disk allow."""
        if not isinstance(error, NotLoadedError) or (name is None and kinds == CHAT):
            return error
        name = loaded_id(name, [model.entry for model in self._now.models], local=local)
        return with_models_on_disk(error, name, await self._finder.on_disk(), self.snapshot, kinds)


async def _end_of(lending: asyncio.Task[T]) -> T:
    """Wait for the end of a task that continues when the caller is cancelled, and return its result.

    Raises:
        NotLoadedError: the task was cancelled.
    """
    await asyncio.wait([lending])
    if lending.cancelled():
        raise NotLoadedError("the models were not loaded again, because the server stops")
    return lending.result()


def _cancel(operations: Iterable[LoadOperation]) -> None:
    for operation in operations:
        operation.cancel(NotLoadedError(f"the load of {operation.spec.model} was cancelled"))


def _share_memory(engine: Engine, other: Engine) -> bool:
    """Return whether the models of two engines use the same memory. Models of MLX may be in the memory of a GPU."""
    return engine is other or not (engine.memory.is_of_device or other.memory.is_of_device)


def _load_report(model: Model, entry: ModelEntry, load_s: float) -> LoadReport:
    """Return the report of a load, which took this many seconds.

    Args:
        entry: The files that were to be loaded, with the reason for their engine.
    """
    return LoadReport(
        model=entry.id,
        load_time_ms=load_s * 1e3,
        vram_gb=model.memory_bytes / 1e9,
        slots=model.slots,
        context_length=model.context_length,
        engine=engine_for(entry.format).name,
        engine_reason=entry.engine_reason,
        kv_cache_dtype=model.spec.kv_cache_dtype,
        draft=entry.draft.id if entry.draft is not None else None,
        warning=draft_warning(entry),
    )


def _check_texts(texts: Sequence[object]) -> None:
    if not texts:
        raise InvalidRequestError("there are no texts; send at least one")
