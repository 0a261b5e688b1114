"""Own the models in memory: load and unload them, and pass each request to the model that answers it.

Everything runs on one event loop in a thread, except what reads the published state. Loads and unloads happen one at a
time, except the loads of pinned encoders. Nothing polls except ``Budget.watch``: a model reports when its engine loses
it, ``AdmissionControl`` reports when it has no requests left, and timers are set to known points in time.

The model that was loaded last is the main one: it answers requests that name none. ``Settings.resident`` models stay in
memory, besides those that are pinned. For a load beyond that, or if memory is short, the model that was used least
recently is unloaded.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import logging
import threading
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias, TypeVar

from lmx_lab.engine.admission import LOAD_FIRST, Permit
from lmx_lab.engine.engines import ENGINES, Factory, choose_engine, engine_for
from lmx_lab.engine.find import ModelFinder
from lmx_lab.engine.loads import (
    Change,
    Drain,
    IfBusy,
    draft_warning,
    load_progress,
    same_options,
    within_limit,
)
from lmx_lab.engine.lookup import (
    ANY_KIND,
    CHAT,
    EMBEDDING,
    NONE_LOADED,
    RERANK,
    Kinds,
    check_loaded,
    check_pinned_kind,
    check_unload,
    find_model,
    is_idle_path,
    loaded_id,
    pinned_refusal,
    refusal,
    unknown_model,
    with_models_on_disk,
    wrong_kind,
)
from lmx_lab.engine.memory import Budget, total_bytes
from lmx_lab.engine.model import Engine, EngineHost, EngineMemory
from lmx_lab.engine.plan import FitList, is_same, plan_load, share_memory
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
from lmx_lab.values.engine import COUNTERS, EngineSnapshot, EngineState, ModelState, TokenTotals, UnloadCause
from lmx_lab.values.models import EngineName, Kind, LoadReport, LoadSpec, ModelEntry, ModelEvent, TimeToLive
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
"""Minimum time between two automatic loads of a model that its engine has lost."""
TRIES = 3
"""Maximum number of attempts to submit a request in swap mode, in case other loads replace its model in the
meantime."""


@dataclass(frozen=True, kw_only=True)
class InMemory:
    """The models in memory at one moment. A new object replaces it after each change, so any thread may read it."""

    loaded: tuple[Model, ...] = ()
    """In the order of their loads."""
    main: Model | None = None
    failure: LabError | None = None
    """Why the last main model left memory, if its engine lost it; see ``lost``."""
    unloaded: tuple[str, UnloadCause] | None = None
    """The model that was unloaded last, and why; None after a load."""

    @property
    def lost(self) -> LabError | None:
        """Why there is no main model, if its engine has lost it."""
        return self.failure if self.main is None else self.main.lost

    @property
    def models(self) -> list[Model]:
        """The models in the order in which they answer requests that name none: pinned encoders, the main model, then
        the others, the newest first. Models that their engines have lost are left out.
        """
        order = dict.fromkeys((*filter(_is_beside, self.loaded), self.main, *reversed(self.loaded)))
        return [model for model in order if model is not None and model.lost is None]

    def without(self, model: Model, *, stays: bool = False) -> InMemory:
        """Return the models after one was unloaded. If it was the main one, the newest of the others takes its place,
        but no pinned encoder.

        Args:
            stays: Whether it stays in memory, and only ceases to be the main model.
        """
        loaded = self.loaded if stays else tuple(other for other in self.loaded if other is not model)
        main = self.main
        if main is model:
            others = (it for it in reversed(loaded) if it is not model and it.lost is None and not _is_beside(it))
            main = next(others, None)
        return replace(self, loaded=loaded, main=main)


class ModelManager:
    """Loads and unloads models, and passes requests to them.

    Use ``async with ModelManager(settings) as manager``, or call ``start()`` and ``stop()`` from any thread; both are
    idempotent. The first load also starts the manager. All public methods may be called from any thread and any event
    loop.

    Args:
        catalog: The models on this disk; by default those that the settings name.
        turns: When a client without a slot gets a slot of another client.
        engines: How to make an engine, by name; for those that are missing, as in ``ENGINES``.
        budget: The memory that models may use; by default that of the settings.
    """

    def __init__(
        self,
        settings: Settings,
        catalog: Catalog | None = None,
        *,
        turns: Turns | None = None,
        engines: Mapping[EngineName, Factory] | None = None,
        budget: Budget | None = None,
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
        self._change: Change[Any] | None = None
        """The load or unload that is in progress."""
        self.budget = budget or Budget(
            settings.memory_limit_bytes,
            weights=lambda: sum(model.memory_bytes for model in self.models),
            evict=functools.partial(self._post, self._evict),
        )
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
        for task in (self._measuring, *self._reloads):
            task.cancel()
        self._missing.clear()
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
        self._missing: list[Model] = []
        """Pinned models that their engines have lost. They are loaded again at once, or before the next load."""
        self._lost_main: Model | None = None
        """The one of them that was the main model, until another one is loaded."""
        self._idle_specs: dict[str, LoadSpec] = {}
        """How to load the models again that were unloaded because they were idle, by id."""
        self._changing = asyncio.Lock()
        """Held by the change that is in progress."""
        # Models are read into memory one at a time, so that the memory of the others is known, and none is there twice.
        self._entering = asyncio.Lock()
        self._loads: list[Change[LoadReport]] = []
        """The loads that are in progress or wait for another change."""
        self._unloading: Change[int] | None = None
        """The unload that a caller has requested last."""
        self._lending: asyncio.Task[str | None] | None = None
        """Unloads all models, and loads them again when they are taken back; see ``make_room``."""
        self._taken_back = asyncio.Event()
        self._measuring = asyncio.create_task(self.budget.watch(), name="lmx-lab memory")
        self._tasks: set[asyncio.Task[Any]] = set()
        self._reloads: set[asyncio.Task[Any]] = set()
        """The tasks that load models again that were lost."""
        self._idle_timer: asyncio.TimerHandle | None = None
        self._reloaded_at: dict[str, float] = {}
        """When a model that was lost was last loaded again, by id."""
        self._swaps = SwapQueue(
            self.settings,
            loaded=self._loaded_ids,
            is_busy=self._is_full_and_busy,
            is_changing=self._changing.locked,
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
        """The models in memory: pinned encoders, the main one, then the others, the newest first."""
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
        change = self._change
        draining = change.drain if change is not None and change.stage == "draining" else None
        states = [
            model.state(unloading=draining.state if draining is not None and draining.model is model else None)
            for model in now.models
        ]
        for state in states:
            totals.add(state.totals)
        with self._totals_lock:
            for name in COUNTERS:
                setattr(totals, name, max(getattr(totals, name), getattr(self._totals, name)))
            self._totals = totals
        main = next((state for state in states if now.main is not None and state.entry is now.main.entry), None)
        unloaded = now.unloaded if main is None else None
        if now.main is not None and isinstance(now.lost, OutOfMemoryError):
            unloaded = (now.main.entry.id, "memory")
        phase: EngineState = "ready" if main is not None else "empty"
        if main is None and change is not None and change.stage == "loading":
            phase = "loading"
        elif main is None and isinstance(now.lost, EngineDeadError):
            phase = "dead"
        memory = self._memory(now.main)
        return EngineSnapshot(
            state=phase,
            models=tuple(states),
            main=main,
            change=change.state if change is not None else None,
            unloaded_model=unloaded[0] if unloaded is not None else None,
            unload_cause=unloaded[1] if unloaded is not None else None,
            totals=totals,
            memory_used_bytes=memory.used or 0,
            memory_peak_bytes=memory.peak or 0,
            memory_total_bytes=memory.total,
            memory_footprint_bytes=self.budget.footprint_bytes,
            memory_limit_bytes=self.budget.total_bytes,
            memory_pressure=self.budget.pressure,
            memory_is_of_device=memory.is_of_device,
            blas=next((engine.blas for engine in list(self._engines.values()) if engine.blas is not None), None),
        )

    def _memory(self, main: Model | None) -> EngineMemory:
        """Return the memory of all engines together. ``is_of_device`` is that of the main model's engine."""
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
                    budget=self.budget,
                    idle=self._post_idle,
                    lost=functools.partial(self._post, self._remove_lost),
                    turns=self._turns,
                )
                self._engines[name] = self._factories[name](self.settings, host)
            return self._engines[name]

    def unpinned(self) -> Sequence[LoadSpec]:
        """Return the loads of the encoders that the settings name and that are not in memory."""
        pinned = [state.entry for state in self.snapshot.pinned]
        return [
            LoadSpec(model=name, pin=True)
            for name in (self.settings.embedder, self.settings.reranker)
            if name is not None and not any(entry.id == loaded_id(name, pinned, local=True) for entry in pinned)
        ]

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
        """Load a model, which becomes the main one. A pinned encoder only stays next to it, in memory that is free.

        If more than ``Settings.resident`` models would be in memory, or too little of it is left, models that are not
        pinned leave first: those without requests, the least recently used first, then the others, whose running
        requests may end first (``drain_s``). If the load fails, they are loaded again. Cancelling the caller does not
        cancel the load. Loads of the same spec that are in progress are joined. A model that is in memory with these
        options is not loaded again, and only its ``pin`` and ``ttl_s`` change.

        Args:
            entry: The model, if its files are already known.
            local: Whether the caller is on this machine, and may name paths and models to download.
            finish_queued: Whether the queued requests of models that leave are also answered, within the same time.
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
            self._check_kind(spec, entry)
            others = await in_thread(lambda: [(it, self.engine(engine_for(it.format).name)) for it in beside])
            room_bytes = engine.memory.limit - sum(it.load_bytes for it, other in others if share_memory(engine, other))
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

    def _loads_of(self, model: str) -> list[Change[LoadReport]]:
        """Return the loads of the model with this id or requested name."""
        return [change for change in self._loads if model in change.names]

    async def _join_load(
        self,
        spec: LoadSpec,
        files: ModelEntry | None,
        *,
        local: bool,
        finish_queued: bool,
        if_busy: IfBusy,
    ) -> LoadReport:
        if self._stopped:
            # A request in swap mode may have got its turn because other loads have ended.
            raise EngineDeadError("the engine was stopped")
        change = next((it for it in self._loads if it.spec == spec and it.files == files), None)
        if change is None:
            change = Change(
                kind="load",
                name=spec.model,
                done=self._loop.create_future(),
                spec=spec,
                files=files,
                wait=spec.wait,
            )
            self._loads.append(change)
            work = self._load(change, spec, local=local, finish_queued=finish_queued, if_busy=if_busy)
            self._start_task(work, f"lmx-lab load {spec.model:.80}")
        # Cancelling a caller does not cancel the load.
        return await asyncio.shield(change.done)

    async def _load(
        self, change: Change[LoadReport], spec: LoadSpec, *, local: bool, finish_queued: bool, if_busy: IfBusy
    ) -> None:
        try:
            report = await self._find_and_load(change, spec, local=local, finish_queued=finish_queued, if_busy=if_busy)
        except LabError as exc:
            self._fail(change, exc)
        except asyncio.CancelledError:
            self._fail(change, NotLoadedError(f"the load of {spec.model} was cancelled"))
            raise
        except Exception as exc:
            log.exception("%s could not be loaded", spec.model)
            self._fail(change, UnusableModelError(f"{spec.model} could not be loaded: {exc!r}"))
        else:
            self._report(ModelEvent(model=report.model, stage="loaded"))
            change.finish(report)
        finally:
            self._loads.remove(change)

    def _fail(self, change: Change[LoadReport], error: LabError) -> None:
        if not change.done.done():
            self._report(ModelEvent(model=change.name, stage="failed", message=error.message))
        change.finish(error)

    async def _find_and_load(
        self, change: Change[LoadReport], spec: LoadSpec, *, local: bool, finish_queued: bool, if_busy: IfBusy
    ) -> LoadReport:
        entry, engine = await change.run(self._find(spec, change.files, local=local))
        change.entry = entry
        self._check_kind(spec, entry)
        if change.beside or not self._changing.locked():
            model = await self._find_loaded(entry, spec)
            if model is not None and (change.beside or not (self._changing.locked() or self._replaces_main(model))):
                return self._use_again(model, entry, change)
        # Only an earlier load is joined, so that two of them never wait for each other.
        earlier = self._loads[: self._loads.index(change)]
        other = next((it for it in earlier if change.may_join(it)), None)
        if other is not None:
            return await self._share(change, other, entry, spec)
        if if_busy == "replace":
            for it in self._loads:
                if it.entry is not None and not it.beside and it.entry.path != entry.path:
                    error = NotLoadedError(f"the load of {it.entry.id} was cancelled: {entry.id} is loaded instead")
                    it.cancel(error, restores=False)
        if change.beside:
            if change.files is None:
                await change.run(self._finder.check(entry))
            if self._lending is not None:
                self._check_free()
            self._report(load_progress(entry))
            return await change.run(self._load_beside(entry, spec, engine))
        if if_busy == "refuse":
            self._check_free()
        async with self._in_progress(change):
            if change.files is None:
                await change.run(self._finder.check(entry))
            self._report(load_progress(entry))
            return await self._load_in_turn(change, entry, spec, engine, finish_queued=finish_queued)

    async def _share(
        self, change: Change[LoadReport], other: Change[LoadReport], entry: ModelEntry, spec: LoadSpec
    ) -> LoadReport:
        """Wait for a load of the same model that has begun earlier, and return its report."""

        async def wait() -> LoadReport:
            return await asyncio.shield(other.done)

        other.set_wait(spec.wait)
        report = await change.run(wait())
        if (model := await self._find_loaded(entry, spec)) is not None:
            self._use_again(model, entry, change)
        return report

    async def _find(self, spec: LoadSpec, entry: ModelEntry | None, *, local: bool) -> tuple[ModelEntry, Engine]:
        """Return the files to load, with those of the draft model, and their engine.

        Args:
            entry: The files, if they are already known.
        """
        if entry is None:
            loaded = [model.entry for model in self._now.models]
            entry = await self._finder.find(spec, local=local, loaded=loaded)
        entry = await self._finder.with_draft(entry, spec, local=local)
        return entry, await in_thread(functools.partial(self.engine, choose_engine(entry, spec).name))

    def _check_kind(self, spec: LoadSpec, entry: ModelEntry) -> None:
        """Check that a model that the settings pin has the kind of its setting.

        Raises:
            UnusableModelError: the model has another kind.
        """
        kinds: dict[str | None, Kind] = {self.settings.embedder: "embedding", self.settings.reranker: "rerank"}
        if spec.pin and (kind := kinds.get(spec.model)) is not None:
            check_pinned_kind(spec.model, entry, kind)

    async def _find_loaded(self, entry: ModelEntry, spec: LoadSpec) -> Model | None:
        """Return the model in memory that has these files, unchanged, and these options; None if there is none."""
        for model in self._now.models:
            if same_options(model.spec, spec) and await in_thread(functools.partial(is_loaded, model.entry, entry)):
                return model if model in self._now.models else None
        return None

    def _use_again(self, model: Model, entry: ModelEntry, change: Change[LoadReport]) -> LoadReport:
        """Return the report of a load of a model that is in memory."""
        if change.spec is not None:
            self._keep(model, pin=change.spec.pin, ttl_s=change.spec.ttl_s)
        model.admission.touch()
        if not change.beside:
            # The newest one is the last.
            others = (other for other in self._now.loaded if other is not model)
            self._now = replace(self._now, loaded=(*others, model), main=model, failure=None, unloaded=None)
            self._lost_main = None
        self._set_idle_timer()
        return _load_report(model, entry, 0.0)

    async def _load_in_turn(
        self, change: Change[LoadReport], entry: ModelEntry, spec: LoadSpec, engine: Engine, *, finish_queued: bool
    ) -> LoadReport:
        """Load a model, after others have left memory for it; if that fails, load those again."""
        change.check()
        present = await self._find_loaded(entry, spec)
        if present is not None and not self._replaces_main(present):
            return self._use_again(present, entry, change)
        # A model that cannot be loaded is refused while the others still answer.
        started, main = self._loop.time(), self._now.main
        leaving = await change.run(self._choose_leaving(entry, spec, engine, present))
        checked_s = self._loop.time() - started
        await change.run(self._load_missing(besides=entry))
        left: list[Model] = []
        try:
            while leaving:
                for model in leaving:
                    why = f"the model was replaced by {entry.id}"
                    if await self._unload_after_drain(model, why, change, finish_queued=finish_queued) is not None:
                        left.append(model)
                        self._report(ModelEvent(model=model.entry.id, stage="unloaded"))
                # Others leave in place of a model that was pinned in the meantime.
                stayed = any(model not in left for model in leaving)
                leaving = await change.run(self._choose_leaving(entry, spec, engine, present)) if stayed else []
            change.stage = "loading"
            report = await change.run(self._enter(entry, spec, engine, as_main=True, like=left))
            return replace(report, load_time_ms=checked_s * 1e3 + report.load_time_ms)
        except LabError as exc:
            # Not the exception, which refers to this frame, and so to the models that have left.
            kind, message, param = type(exc), exc.message, exc.param
        # They are not needed if another model is loaded instead, or if the lab stops.
        outcome = await self._restore(change, left, main) if change.restores else ""
        raise kind(f"{message}{outcome}", param=param)

    def _replaces_main(self, model: Model) -> bool:
        """Return whether a model in memory becomes the main one as if it was loaded: a pinned encoder does."""
        return _is_beside(model) and model is not self._now.main

    async def _choose_leaving(
        self, entry: ModelEntry, spec: LoadSpec, engine: Engine, present: Model | None
    ) -> list[Model]:
        """Let the engine check a model, and return the models that leave memory for it.

        Args:
            present: The model, if it is in memory.

        Raises:
            OutOfMemoryError: the model does not fit next to those that are pinned.
        """
        resident, models = self.settings.resident, self._now.models
        same = [model for model in models if is_same(model.entry, entry) and model is not present]
        others = [model for model in models if not model.pinned and model not in same]
        others.sort(key=lambda model: (model.admission.active > 0, model.admission.used_at))
        # Pinned models do not count.
        surplus = 0 if resident == "auto" or spec.pin else max(0, len(others) + 1 - resident)
        for count in range(surplus, len(others) + 1):
            leaving = [*same, *others[:count]]
            without = leaving if present is None else [*leaving, present]
            try:
                await self._check_loadable(entry, spec, engine, self._room_bytes(engine, without=without))
            except OutOfMemoryError as exc:
                if count < len(others):
                    continue
                pinned = [model.entry.id for model in models if model.pinned and model not in without]
                if not pinned:
                    raise
                note = (
                    f"{', '.join(pinned)} stay in memory, because they are pinned; lab.keep(ID, pin=False) releases one"
                )
                raise OutOfMemoryError(f"{exc.message}; {note}", param=exc.param) from exc
            return leaving
        raise AssertionError("unreachable")

    async def _restore(self, change: Change[LoadReport], left: Sequence[Model], main: Model | None) -> str:
        """Load models again that have left memory for a load that has failed. Return the outcome as the end of an error
        message.

        Args:
            main: The main model before the load.
        """
        if not left:
            return f"; {main.entry.id} is still loaded" if main in self._now.models and main else NONE_LOADED
        outcome = ""
        for model in left:
            name = model.entry.id
            try:
                await change.restore(self._reload(model, as_main=model is main))
            except LabError as exc:
                outcome += f"; the previous model {name} could not be loaded again either: {exc.message}"
            else:
                outcome += f"; the previous model {name} is loaded again"
        return outcome

    async def _reload(self, model: Model, *, as_main: bool) -> None:
        """Load a model again that has left memory, unless it was loaded in another way in the meantime."""
        entry, spec, engine = model.entry, model.spec_now, self.engine(engine_for(model.entry.format).name)
        await self._check_loadable(entry, spec, engine, self._room_bytes(engine))
        await self._enter(entry, spec, engine, as_main=as_main, replaces=False)

    def _room_bytes(self, engine: Engine, *, without: Sequence[Model] = ()) -> int:
        """Return the memory that a model may use next to those in memory.

        Args:
            without: Models that leave memory first.
        """
        staying = [
            model
            for model in self._now.models
            if model not in without and share_memory(engine, self._engines[engine_for(model.entry.format).name])
        ]
        return engine.memory.limit - sum(model.memory_bytes for model in staying)

    async def _check_loadable(self, entry: ModelEntry, spec: LoadSpec, engine: Engine, room_bytes: int) -> None:
        """Let an engine check a model."""
        check = engine.check(entry, spec, room_bytes=room_bytes)
        await within_limit(check, entry, self.settings.load_timeout_s)

    async def _enter(
        self,
        entry: ModelEntry,
        spec: LoadSpec,
        engine: Engine,
        *,
        as_main: bool,
        like: Sequence[Model] = (),
        replaces: bool = True,
    ) -> LoadReport:
        """Read a model into memory, unless it is there; return the report of the load.

        Args:
            as_main: Whether it becomes the main model even if there is one.
            like: Models that have left memory. The same one among them says how long this one stays.
            replaces: Whether it replaces the same model with other options.
        """
        started, same = self._loop.time(), None
        async with self._entering:
            model = await self._find_loaded(entry, spec)
            if model is None:
                same = next((other for other in self._now.models if is_same(other.entry, entry)), None)
                if same is not None and not replaces:
                    return _load_report(same, entry, 0.0)
                files = await in_thread(functools.partial(with_marks, entry))
                room_bytes = self._room_bytes(engine, without=[] if same is None else [same])
                load = engine.load(files, spec, room_bytes=room_bytes)
                model = await within_limit(load, entry, self.settings.load_timeout_s)
                if (lost := model.lost) is not None:
                    raise type(lost)(lost.message)
                before = (it for it in (same, *like, *self._missing) if it is not None and is_same(it.entry, entry))
                if (known := next(before, None)) is not None:
                    model.keep_as(known, spec)
                self._missing = [it for it in self._missing if not is_same(it.entry, entry)]
                self._idle_specs.pop(entry.id, None)
            else:
                self._keep(model, pin=spec.pin, ttl_s=spec.ttl_s)
            model.admission.touch()
            now, main = self._now, self._now.main
            others = (other for other in now.loaded if other is not model and other is not same)
            self._now = replace(now, loaded=(*others, model))
            if as_main or (main is None and not _is_beside(model)) or (main is not None and main is same):
                self._now = replace(self._now, main=model, failure=None, unloaded=None)
            if as_main:
                self._lost_main = None
        self._set_idle_timer()
        report = _load_report(model, entry, self._loop.time() - started)
        if same is not None:
            await self._drop(same, NotLoadedError(f"{entry.id} was loaded again with other options"))
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
        for change in list(self._loads):
            failure = error or NotLoadedError(f"the load of {change.name} was cancelled: the server stops")
            change.cancel(failure, restores=False)
            self._fail(change, failure)

    # Models that stay

    async def keep(
        self, model: str, *, pin: bool | None = None, ttl_s: TimeToLive | None = None, local: bool = True
    ) -> ModelState:
        """Change how long a model stays in memory. Arguments that are None change nothing.

        Args:
            pin: Whether it stays until it is unloaded by request: no other load and no time without requests removes
                it, and it is loaded again if its engine loses it.
            ttl_s: Seconds without requests after which it is unloaded, or ``"never"``.

        Raises:
            InvalidRequestError: the model is not in memory.
        """

        async def keep() -> ModelState:
            name = self.settings.ids_by_alias.get(model, model)
            named = self.model_for(name, ANY_KIND, local=local)
            if named is None and pin is False:
                named = self._forget_missing(name, local=local)
            if named is None:
                check_loaded(name, self.snapshot, local=local)
                raise NotLoadedError(f"{name[:200]} has just been unloaded; {LOAD_FIRST}")
            self._keep(named, pin=pin, ttl_s=ttl_s)
            self._set_idle_timer()
            return named.state()

        return await self._run(keep)

    def _keep(self, model: Model, *, pin: bool | None, ttl_s: TimeToLive | None) -> None:
        """Change how long a model stays in memory. If it is about to be unloaded, a pin keeps it in memory.

        Raises:
            ModelBusyError: the model is pinned while it is being unloaded by request.
        """
        drain = self._change.drain if self._change is not None else None
        if pin and drain is not None and drain.model is model:
            if self._change is self._unloading and model.entry.kind == "chat":
                self._check_free()
            drain.keep()
        model.keep(pin=pin, ttl_s=ttl_s)
        if ttl_s is not None:
            model.admission.touch()

    def _forget_missing(self, name: str, *, local: bool) -> Model | None:
        """Return the pinned model of this name that its engine has lost, and do not load it again. None without one."""
        id_ = loaded_id(name, [model.entry for model in self._missing], local=local)
        found = next((model for model in self._missing if model.entry.id == id_), None)
        self._missing = [model for model in self._missing if model is not found]
        return found

    async def _load_missing(self, *, besides: ModelEntry | None = None) -> None:
        """Load pinned models again that their engines have lost.

        Args:
            besides: A model that is about to be loaded.
        """
        for model in list(self._missing):
            if besides is not None and is_same(model.entry, besides):
                continue
            self._report(load_progress(model.entry))
            try:
                await self._reload(model, as_main=model is self._lost_main)
            except LabError as exc:
                log.warning("%s, which was pinned, could not be loaded again: %s", model.entry.id, exc.message)
                self._report(ModelEvent(model=model.entry.id, stage="failed", message=exc.message))
            else:
                self._missing = [other for other in self._missing if other is not model]
                self._report(ModelEvent(model=model.entry.id, stage="loaded"))

    async def _load_beside(self, entry: ModelEntry, spec: LoadSpec, engine: Engine) -> LoadReport:
        """Load an encoder that stays next to the main model, in memory that is free. Other loads and unloads need not
        wait for it.
        """
        started = self._loop.time()
        if await self._find_loaded(entry, spec) is None:
            same = [model for model in self._now.models if is_same(model.entry, entry)]
            await self._check_loadable(entry, spec, engine, self._room_bytes(engine, without=same))
        checked_s = self._loop.time() - started
        report = await self._enter(entry, spec, engine, as_main=False)
        return replace(report, load_time_ms=checked_s * 1e3 + report.load_time_ms, context_length=None)

    # Unloads

    async def unload(self, model: str | None = None, *, local: bool = True, wait: bool | None = None) -> int:
        """Unload a model after its running requests have ended; return the bytes that this released.

        Cancelling the caller does not cancel the unload. Another call joins an unload that is in progress, and ``wait``
        then applies to the rest of it. If the model is being loaded, only this load is cancelled, even if it hangs, and
        the models that have left memory for it are loaded again; without a name, any load is cancelled. But if
        ``model`` names one that leaves memory for a load, the call joins its unload, and returns 0 if the load is then
        cancelled. Pinned models stay; without a name, a pinned encoder only ceases to be the main model.

        Args:
            model: The model to unload, or whose load is cancelled; None for the main one.
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
                return await asyncio.shield(joined.done)
            loads = [it for it in self._loads if it.entry is not None and not it.beside]
            if loads := self._loads_of(model) if model is not None else loads:
                _cancel(loads)
                await asyncio.wait([change.done for change in loads])
                return 0
            if model is not None and self._forget_missing(model, local=local) is not None:
                return 0
            if model is not None:
                check_unload(model, self.snapshot, local=local)
            elif self._now.main is not None and self._now.main.pinned and not _is_beside(self._now.main):
                raise pinned_refusal(self._now.main.entry.id)
            self._check_free()
            named = self.model_for(model, ANY_KIND, local=local) if model is not None else self.main
            change = Change(
                kind="unload",
                name=model or "",
                done=self._loop.create_future(),
                entry=named.entry if named is not None else None,
                wait=wait,
            )
            # Set before the unload begins, so that further requests to unload join it.
            self._unloading = change
            self._start_task(self._unload(change, None if model is None else named), "lmx-lab unload")
            # Cancelling a caller does not cancel the unload.
            return await asyncio.shield(change.done)

        return await self._run(unload)

    def _unload_to_join(self, model: str | None, wait: bool | None, *, local: bool) -> Change[int] | Drain | None:
        """Return the unload in progress that a request to unload joins; None if there is none.

        Args:
            model, wait: The arguments of the request. With ``wait``, a name means the model in memory, even if the same
                model is being loaded with other options.
        """
        requested = self._unloading if self._unloading is not None and not self._unloading.done.done() else None
        if model is None:
            is_of_main = requested is not None and requested.entry in (None, self._main_entry())
            return requested if is_of_main else None
        if wait is None and self._loads_of(model):
            return None
        if requested is not None and requested.entry is not None:
            entry = requested.entry
            return requested if loaded_id(model, [entry], local=local) == entry.id else None
        drain = self._change.drain if self._change is not None else None
        if drain is None:
            return None
        entry = drain.model.entry
        return drain if loaded_id(model, [entry], local=local) == entry.id else None

    def _main_entry(self) -> ModelEntry | None:
        return self._now.main.entry if self._now.main is not None else None

    async def _unload(self, change: Change[int], named: Model | None) -> None:
        """Unload a model that a caller has named, or the main one."""
        try:
            async with self._in_progress(change):
                freed = 0
                model = self._now.main if named is None else named if named in self._now.models else None
                if model is not None:
                    change.entry = model.entry
                    why = "the model was unloaded"
                    freed = await self._unload_after_drain(model, why, change, cause="requested") or 0
                elif named is None:
                    # Nothing is loaded: the idle model is no longer loaded again for a request.
                    unloaded = self._now.unloaded
                    self._now = replace(self._now, unloaded=unloaded and (unloaded[0], "requested"), failure=None)
            if model is not None:
                self._report(ModelEvent(model=model.entry.id, stage="unloaded"))
            change.finish(freed)
        except BaseException as exc:
            change.finish(exc)
            raise

    async def _unload_after_drain(
        self,
        model: Model,
        why: str,
        change: Change[Any],
        *,
        finish_queued: bool = False,
        cause: UnloadCause | None = None,
        limit_s: float | None = None,
    ) -> int | None:
        """Unload a model after its requests have ended; return the bytes that this released. None if it stays as it is,
        because it was pinned in the meantime.

        If a pinned encoder is unloaded, it only ceases to be the main model.

        Args:
            change: The load that needs the room, or the unload. If a load is cancelled before the model is unloaded,
                the model stays.
            limit_s: Time that running requests have to end; by default ``drain_s``.
        """

        def report(drain: Drain) -> None:
            self._report(ModelEvent(model=model.entry.id, stage="unloading", unloading=drain.state))

        drain = change.drain = Drain(
            model,
            why,
            limit_s=self.settings.drain_s if limit_s is None else limit_s,
            wait=change.wait,
            finish_queued=finish_queued,
            replaced_by=change.model if change.kind == "load" else None,
            on_change=report,
        )
        try:
            is_encoder = change.kind == "unload" and _is_beside(model)
            if not is_encoder:
                change.stage = "draining"
                try:
                    await change.run(drain.run())
                except LabError:
                    model.admission.reopen()
                    drain.finish(0)
                    raise
                replaces_itself = change.entry is not None and is_same(model.entry, change.entry)
                if model.pinned and not replaces_itself and change.spec is not None:
                    model.admission.reopen()
                    drain.finish(0)
                    return None
            change.stage = "unloading"
            # An encoder may have been pinned in the meantime.
            if stays := change.kind == "unload" and _is_beside(model):
                model.admission.reopen()
            now = replace(self._now.without(model, stays=stays), failure=None)
            if cause == "idle":
                self._idle_specs[model.entry.id] = model.spec_now
            # The cause is known before the memory is released. It explains why there is no main model.
            self._now = replace(now, unloaded=(model.entry.id, cause)) if cause and now.main is None else now
            error = NotLoadedError("the model was unloaded before this request ended")
            freed = 0 if stays else await self._drop(model, error)
        except BaseException as exc:
            drain.finish(exc)
            raise
        finally:
            change.drain = None
        drain.finish(freed)
        return freed

    # Changes

    @asynccontextmanager
    async def _in_progress(self, change: Change[Any]) -> AsyncIterator[None]:
        """Wait until other loads and unloads have ended, and show this one as in progress within the block."""
        try:
            async with self._changing:
                change.since, self._change = time.perf_counter(), change
                try:
                    yield
                finally:
                    self._change = None
        finally:
            self._schedule_next()

    def _check_free(self) -> None:
        """Check that no load or unload is in progress, except those of pinned encoders.

        Raises:
            ModelBusyError: one is in progress.
        """
        if not self._changing.locked():
            return
        change, remedy = self._change, "try again when that is done"
        loads = change is not None and change.kind == "load"
        doing = f"{change.model} is being loaded" if change is not None and loads else "the model is being unloaded"
        if change is not None and change.drain is not None and change.stage == "draining":
            name = change.drain.model.entry.id
            doing = f"{doing} ({name}: {change.drain.state})"
            remedy += f", or stop its answers now: lmx-lab unload {name} --now, lab.unload({name!r}, wait=False)"
        raise ModelBusyError(f"{doing}; {remedy}", retry_after_s=2)

    async def _until_unchanged(self) -> None:
        """Wait until the loads and unloads that are in progress have ended."""
        async with self._changing:
            pass

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
            if self._change is not None:
                self._change.set_wait(False)
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

    async def _lend(self, name: str, limit_s: float, unloaded: asyncio.Future[str | None]) -> str | None:
        """Unload all models, and load them again when ``_taken_back`` is set. Return the main model.

        Args:
            name: The model that is loaded in their place.
            unloaded: Gets its result when they are unloaded.
        """
        change: Change[LoadReport] = Change(kind="load", name=name, done=self._loop.create_future())
        async with self._in_progress(change):
            main, models, why = self._now.main, list(self._now.loaded), f"the server was restarted for {name}"
            for model in sorted(models, key=lambda model: model is not main):
                await self._unload_after_drain(model, why, change, limit_s=limit_s)
            change.stage = "loading"
            unloaded.set_result(None)
            await self._taken_back.wait()
            self._missing += [model for model in models if model is not main and model not in self._missing]
            await self._load_missing()
            self._missing = [model for model in self._missing if model.pinned]
            if main is not None:
                change.name = main.entry.id
                await self._reload(main, as_main=True)
            return main.entry.id if main is not None else None

    # Reports of models

    def _schedule_next(self) -> None:
        """Start the next turn in swap mode, and set the idle timer. Called when their conditions may have changed."""
        self._swaps.update()
        self._set_idle_timer()

    def _remove_lost(self, model: Model) -> None:
        """React to a model that its engine has lost; see ``EngineHost.lost``."""
        now, error = self._now, model.lost
        if error is None or model not in now.loaded:
            return
        was_main, name, out_of_memory = now.main is model, model.entry.id, isinstance(error, OutOfMemoryError)
        now = now.without(model)
        if now.main is None and was_main:
            now = replace(now, failure=error, unloaded=(name, "memory") if out_of_memory else now.unloaded)
        self._now = now
        self._count_ended(model)
        if model.pinned:
            self._missing.append(model)
            # Of several lost main models, the first one counts; the others became it only because of the loss.
            self._lost_main = self._lost_main or (model if was_main else None)
        if model.pinned or not was_main or now.main is not None:
            reloads = model.pinned and self._lending is None and self._may_reload(name)
            which = "this pinned model" if model.pinned else "this model"
            message = f"the engine lost {which}; {'it is loaded again' if reloads else 'load it again'}"
            self._report(ModelEvent(model=name, stage="unloaded", message=message))
            if reloads:
                self._start_reload(self._load_missing())
        elif out_of_memory:
            self._report(ModelEvent(model=name, stage="unloaded", message="out of memory"))
        self._schedule_next()

    def _start_reload(self, work: Coroutine[Any, Any, object]) -> None:
        task = self._start_task(work, "lmx-lab reload")
        self._reloads.add(task)
        task.add_done_callback(self._reloads.discard)

    def _may_reload(self, name: str) -> bool:
        """Return whether a lost model is loaded again, which happens once in ``RELOAD_S``."""
        now = time.perf_counter()
        if now - self._reloaded_at.get(name, -RELOAD_S) <= RELOAD_S:
            return False
        self._reloaded_at[name] = now
        return True

    def _post_idle(self) -> None:
        """React to a model that has no requests left. May be called from any thread."""
        # Skipped if nothing depends on it, since a client that sends one request at a time causes this call each time.
        has_ttl = any(model.ttl_s is not None for model in self._now.loaded)
        if has_ttl or self.settings.swap or self._change is not None:
            self._post(self._schedule_next)

    def _set_idle_timer(self) -> None:
        """Set the timer to the time at which the next model has been idle for its time to live."""
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None
        # The end of the last request of a model, of the change, or of the turn calls this method again.
        if self._changing.locked() or self._swaps.has_turn:
            return
        now, main = self._now, self._now.main
        ends = [
            (model.admission.used_at + model.ttl_s, model)
            for model in now.models
            if model.ttl_s is not None
            and not model.admission.active
            and (not model.pinned or (model is main and _is_beside(model)))
        ]
        if not ends:
            return
        end, model = min(ends, key=lambda each: each[0])
        left_s = end - time.perf_counter()
        if left_s > 0:
            self._idle_timer = self._loop.call_later(left_s, self._set_idle_timer)
        else:
            self._start_task(self._unload_unused(model, "idle"), "lmx-lab idle unload")

    def _evict(self, missing_bytes: int) -> None:
        """Unload the model that was used least recently, if it has no requests and is not the main one; see
        ``Budget``.
        """
        unused = [
            model
            for model in self._now.models
            if not model.pinned and model is not self._now.main and not model.admission.active
        ]
        if unused and not self._changing.locked():
            model = min(unused, key=lambda model: model.admission.used_at)
            log.warning("%.2f GB of memory have to be freed", missing_bytes / 1e9)
            self._start_task(self._unload_unused(model, "memory"), "lmx-lab evict")

    async def _unload_unused(self, model: Model, cause: Literal["idle", "memory"]) -> None:
        """Unload a model that has no requests, unless one arrives in the meantime."""
        change: Change[int] = Change(
            kind="unload", name=model.entry.id, done=self._loop.create_future(), entry=model.entry
        )
        async with self._in_progress(change):
            idle_s = model.ttl_s if cause == "idle" else 0.0
            stays = model.pinned and not _is_beside(model)
            if idle_s is None or stays or self._swaps.has_turn or model not in self._now.models:
                return
            why = "it was idle" if cause == "idle" else "memory was short"
            model.admission.close(NotLoadedError(f"{change.name} was unloaded because {why}; load it again"))
            if model.admission.active or model.admission.used_at + idle_s > time.perf_counter():
                # A request has arrived in the meantime.
                model.admission.reopen()
                return
            message = f"idle for {idle_s:g} s" if cause == "idle" else "memory is short"
            log.info("%s is unloaded: %s", change.name, message)
            await self._unload_after_drain(model, "the model was unloaded", change, cause=cause)
        self._report(ModelEvent(model=change.name, stage="unloaded", message=message))

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
            # In swap mode, another model may be loaded in place of this one before the request is admitted. If only one
            # model is in memory, requests for it take turns with those for others.
            stays = not swap or (model is not None and model.pinned)
            takes_turn = not stays and self.settings.resident == 1 and bool(self._changing.locked() or self._swaps)
            if model is not None and not takes_turn:
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
                    # After the turn, which ends in a callback.
                    self._loop.call_soon(self._set_idle_timer)
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
            if name is not None and name not in self._loaded_ids():
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
        await self._until_unchanged()
        now = self.snapshot
        model = name or now.idle_model
        if model is None or any(model == state.entry.id for state in now.models):
            return model
        # Decided before the load, after which the snapshot no longer shows that this was the idle model.
        local, idle_spec = is_idle_path(model, now), self._idle_specs.get(model)
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
                await self._until_unchanged()
                continue
            self._swaps.swap_s = time.perf_counter() - started
            return report.model

    async def _resolve(self, name: str, kinds: Kinds, *, local: bool) -> ModelEntry:
        try:
            entry = await self._finder.resolve(name, local=local)
        except ModelNotFoundError as exc:
            raise unknown_model(name, self.snapshot, kinds, await self._finder.on_disk()) from exc
        if not entry.answers(kinds):
            raise wrong_kind(entry, kinds)
        return entry

    def _loaded_ids(self) -> frozenset[str]:
        """Return the models in memory, and the one that was unloaded because it was idle."""
        now = self.snapshot
        idle = [now.idle_model] if now.idle_model is not None else []
        return frozenset([*idle, *(state.entry.id for state in now.models)])

    def _is_full_and_busy(self) -> bool:
        """Return whether another model can be loaded only after running requests have ended."""
        removable = [model for model in self._now.models if not model.pinned]
        resident = self.settings.resident
        full = resident != "auto" and len(removable) >= resident
        return full and all(model.admission.active for model in removable)

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


def _cancel(loads: Iterable[Change[LoadReport]]) -> None:
    for change in loads:
        change.cancel(NotLoadedError(f"the load of {change.name} was cancelled"))


def _is_beside(model: Model) -> bool:
    """Return whether a model is a pinned encoder, which stays in memory next to the main model."""
    return model.pinned and model.entry.kind != "chat"


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
        warning="; ".join(filter(None, (draft_warning(entry), model.entry.warning))),
    )


def _check_texts(texts: Sequence[object]) -> None:
    if not texts:
        raise InvalidRequestError("there are no texts; send at least one")
