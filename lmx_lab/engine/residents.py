"""Change what is in memory: load and unload models, and decide how long they stay.

Loads and unloads happen one at a time, except the loads of pinned encoders. Nothing polls: a model reports when its
engine loses it, ``AdmissionControl`` reports when it has no requests left, and timers are set to known points in time.

The model that was loaded last is the main one: it answers requests that name none. ``Settings.resident`` models stay in
memory, besides those that are pinned. For a load beyond that, or if memory is short, the model that was used least
recently is unloaded.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from lmx_lab.engine.engines import Engines, choose_engine, share_memory
from lmx_lab.engine.find import ModelFinder, with_draft
from lmx_lab.engine.loads import (
    Change,
    Drain,
    IfBusy,
    check_loadable,
    load_progress,
    load_report,
    same_options,
    within_limit,
)
from lmx_lab.engine.lookup import (
    NONE_LOADED,
    InMemory,
    Model,
    is_beside,
    loaded_id,
)
from lmx_lab.engine.memory import Budget
from lmx_lab.engine.model import Counts
from lmx_lab.engine.plan import is_same
from lmx_lab.engine.swap import SwapQueue
from lmx_lab.errors import (
    EngineDeadError,
    InvalidRequestError,
    LabError,
    ModelBusyError,
    NotLoadedError,
    OutOfMemoryError,
    UnusableModelError,
)
from lmx_lab.settings import Settings
from lmx_lab.values.engine import EngineSnapshot, EngineState, ModelState, UnloadCause
from lmx_lab.values.models import KINDS_IN_WORDS, Kind, LoadReport, LoadSpec, ModelEntry, ModelEvent, TimeToLive
from lmx_lab.weights.files import in_thread
from lmx_lab.weights.fingerprint import is_loaded, require_unchanged, with_marks

log = logging.getLogger(__name__)
T = TypeVar("T")
RELOAD_S = 30.0
"""Minimum time between two automatic loads of a model that its engine has lost."""


class Residents:
    """Loads and unloads models. Belongs to the loop of the manager; ``now`` and ``change`` may be read on any thread.

    The public coroutines are methods of ``ModelManager``, too, which may be called from any thread.

    Args:
        report: Called with each step of a load or an unload.
    """

    def __init__(
        self,
        settings: Settings,
        finder: ModelFinder,
        engines: Engines,
        *,
        budget: Budget,
        counts: Counts,
        report: Callable[[ModelEvent], None],
    ) -> None:
        self._settings = settings
        self._finder = finder
        self._engines = engines
        self._budget = budget
        self._counts = counts
        self._report = report
        self.now = InMemory()
        self.change: Change[Any] | None = None
        """The load or unload that is in progress. Loads of pinned encoders need not wait for it."""
        self.idle_specs: dict[str, LoadSpec] = {}
        """How to load the models again that were unloaded because they were idle, by id."""
        self._closed = False
        self._missing: list[Model] = []
        """Pinned models that their engines have lost. They are loaded again at once, or before the next load."""
        self._lost_main: Model | None = None
        """The one of them that was the main model, until another one is loaded."""
        self._changing = asyncio.Lock()
        """Held by ``change``."""
        # Models are read into memory one at a time, so that the memory of the others is known, and none is there twice.
        self._entering = asyncio.Lock()
        self._changes: list[Change[Any]] = []
        """The loads and unloads that are in progress or wait for another one, in the order of their requests."""
        self._lent: Change[str | None] | None = None
        """Unloads all models, and loads them again when they are taken back; see ``make_room``."""
        self._taken_back = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._reloads: set[asyncio.Task[Any]] = set()
        """The tasks that load models again that were lost."""
        self._idle_timer: asyncio.TimerHandle | None = None
        self._reloaded_at: dict[str, float] = {}
        """When a model that was lost was last loaded again, by id."""
        self.swaps = SwapQueue(
            settings,
            loaded=lambda: self.ids,
            is_busy=self._is_full_and_busy,
            is_changing=lambda: self.change is not None,
        )

    @property
    def snapshot(self) -> EngineSnapshot:
        """The models in memory and the state of their engines. Never blocks; may be read on any thread."""
        now, change, totals = self.now, self.change, self._counts.read()
        draining = change.drain if change is not None and change.stage == "draining" else None
        states = [
            model.state(unloading=draining.state if draining is not None and draining.model is model else None)
            for model in now.models
        ]
        main = next((state for state in states if now.main is not None and state.entry is now.main.entry), None)
        unloaded = now.unloaded if main is None else None
        if now.main is not None and isinstance(now.lost, OutOfMemoryError):
            unloaded = (now.main.entry.id, "memory")
        phase: EngineState = "ready" if main is not None else "empty"
        if main is None and change is not None and change.stage == "loading":
            phase = "loading"
        elif main is None and isinstance(now.lost, EngineDeadError):
            phase = "dead"
        memory = self._engines.memory(now.models)
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
            memory_footprint_bytes=self._budget.footprint_bytes,
            memory_limit_bytes=self._budget.total_bytes,
            memory_pressure=self._budget.pressure,
            memory_freed_bytes=self._budget.freed_bytes,
            blas=self._engines.blas,
        )

    @property
    def ids(self) -> frozenset[str]:
        """The models in memory, and the one that was unloaded because it was idle."""
        idle = [self.now.idle_model] if self.now.idle_model is not None else []
        return frozenset([*idle, *(entry.id for entry in self.now.entries)])

    @property
    def in_use(self) -> dict[Path, str]:
        """The id of the model that uses each file, by path, for models in memory or being loaded and their draft
        models. May be read on any thread.
        """
        loads = [change.entry for change in list(self._changes) if change.spec is not None and change.entry is not None]
        users = [*(model.entry for model in self.now.loaded), *loads]
        return {each.path: user.id for user in users for each in filter(None, (user, user.draft))}

    def _is_full_and_busy(self) -> bool:
        """Return whether another model can be loaded only after running requests have ended."""
        removable = [model for model in self.now.models if not model.pinned]
        resident = self._settings.resident
        full = resident != "auto" and len(removable) >= resident
        return full and all(model.admission.active for model in removable)

    # End

    async def close(self, error: LabError) -> None:
        """End all loads and requests, and drop all models."""
        self._closed = True
        self.cancel_loads(error)
        for task in self._reloads:
            task.cancel()
        self._missing.clear()
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        await self._drop_all(error)
        while self._tasks:
            await asyncio.wait(list(self._tasks))
        # A model that was about to be loaded may have entered in the meantime.
        await self._drop_all(error)

    async def _drop_all(self, error: LabError) -> None:
        models, self.now = self.now.models, InMemory()
        await asyncio.gather(*(self._drop(model, error) for model in models), return_exceptions=True)

    async def _drop(self, model: Model, error: LabError) -> int:
        """Unload a model that was removed from ``now``; return the bytes that this released."""
        try:
            return await model.close(error)
        finally:
            self._counts.end(model)

    def cancel_loads(self, error: LabError | None = None) -> None:
        """Cancel all loads, and the end of ``make_room``. Their callers get the error immediately."""
        for change in [each for each in self._changes if each.kind == "load"]:
            failure = error or NotLoadedError(f"the load of {change.name} was cancelled: the server stops")
            change.cancel(failure, restores=False)
            self._fail(change, failure)

    async def quiesce(self, timeout_s: float) -> None:
        models = self.now.models
        were_open = [model for model in models if not model.admission.closed]
        change = Change[int](kind="unload", name="")
        drains = [Drain(model, "the server was stopped", change, limit_s=timeout_s) for model in models]
        await asyncio.gather(*(drain.run() for drain in drains))
        for model in were_open:
            model.admission.reopen()

    def _start_task(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Start a task that continues when its caller is cancelled."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # Retrieved, because all callers may have left.
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        return task

    # Loads

    async def load(
        self,
        spec: LoadSpec,
        files: ModelEntry | None = None,
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
            files: The model, if its files are already known.
            local: Whether the caller is on this machine, and may name paths and models to download.
            finish_queued: Whether the queued requests of models that leave are also answered, within the same time.
            if_busy: What to do while another load or unload is in progress.

        Raises:
            ModelNotFoundError: the model is not on disk, and cannot be downloaded.
            UnusableModelError, StorageFullError, OutOfMemoryError: the message contains the model that is now loaded.
            ModelBusyError: another load or unload is in progress.
            NotLoadedError: the load was cancelled.
        """
        if self._closed:
            # A request in swap mode may have got its turn because other loads have ended.
            raise EngineDeadError("the engine was stopped")
        change = next((it for it in self._loads() if it.spec == spec and it.files == files), None)
        if change is None:
            change = Change(
                kind="load", name=spec.model, spec=spec, files=files, wait=spec.wait, finish_queued=finish_queued
            )
            self._start(change, self._load(change, spec, local=local, if_busy=if_busy))
        return await change.result()

    def _loads(self, model: str | None = None) -> list[Change[LoadReport]]:
        """Return the loads of the model with this id or requested name; by default all."""
        return [it for it in self._changes if it.spec is not None and (model is None or model in it.names)]

    def _start(self, change: Change[T], work: Coroutine[Any, Any, T]) -> None:
        """Start the task that performs a change. Cancelling the callers of the change does not cancel it."""

        async def perform() -> None:
            try:
                result = await work
            except LabError as exc:
                self._fail(change, exc)
            except asyncio.CancelledError:
                self._fail(change, _cancelled(change))
                raise
            except Exception as exc:
                log.exception("%s could not be %sed", change.name, change.kind)
                self._fail(change, UnusableModelError(f"{change.name} could not be {change.kind}ed: {exc!r}"))
            else:
                if isinstance(result, LoadReport):
                    self._report(ModelEvent(model=result.model, stage="loaded"))
                change.finish(result)
            finally:
                self._changes.remove(change)

        self._changes.append(change)
        self._start_task(perform(), f"lmx-lab {change.kind} {change.name:.80}")

    def _fail(self, change: Change[T], error: LabError) -> None:
        if change.spec is not None and not change.done.done():
            self._report(ModelEvent(model=change.name, stage="failed", message=error.message))
        change.finish(error)

    async def _load(self, change: Change[LoadReport], spec: LoadSpec, *, local: bool, if_busy: IfBusy) -> LoadReport:
        entry = await change.run(self._find(spec, change.files, local=local))
        change.entry = entry
        if change.beside or self.change is None:
            model = await self._find_loaded(entry, spec)
            if model is not None and (change.beside or not (self.change or self._replaces_main(model))):
                return self._use_again(model, entry, change, spec)
        # A load joins only an earlier load, or one that has begun, so that two loads never wait for each other.
        earlier = self._changes[: self._changes.index(change)]
        begun = [self.change] if self.change is not None else []
        if (other := next((it for it in (*earlier, *begun) if change.may_join(it)), None)) is not None:
            other.set_wait(spec.wait)
            report: LoadReport = await change.run(asyncio.shield(other.done))
            if (model := await self._find_loaded(entry, spec)) is not None:
                self._use_again(model, entry, change, spec)
            return report
        if if_busy == "replace":
            for it in self._loads():
                if it.entry is not None and not it.beside and it.entry.path != entry.path:
                    error = NotLoadedError(f"the load of {it.entry.id} was cancelled: {entry.id} is loaded instead")
                    it.cancel(error, restores=False)
        if change.beside:
            if self._lent is not None:
                self.check_free()
            await self._begin(change, entry)
            # Other loads and unloads need not wait for it, because it uses free memory next to the main model.
            started = time.perf_counter()
            if await self._find_loaded(entry, spec) is None:
                same = [model for model in self.now.models if is_same(model.entry, entry)]
                await change.run(self._check_loadable(entry, spec, without=same))
            checked_s = time.perf_counter() - started
            report = await change.run(self._enter(entry, spec, as_main=False, checked_s=checked_s))
            return replace(report, context_length=None)
        if if_busy == "refuse":
            self.check_free()
        async with self._in_progress(change):
            await self._begin(change, entry)
            return await self._load_in_turn(change, entry, spec)

    async def _find(self, spec: LoadSpec, entry: ModelEntry | None, *, local: bool) -> ModelEntry:
        """Return the files to load, with those of the draft model. Their engine was created when this returns.

        Args:
            entry: The files, if they are already known.
        """
        if entry is None:
            entry = await self._finder.find(spec, local=local, loaded=self.now.entries)
        kinds: dict[str | None, Kind] = {self._settings.embedder: "embedding", self._settings.reranker: "rerank"}
        if spec.pin and (kind := kinds.get(spec.model, entry.kind)) != entry.kind:
            raise UnusableModelError(
                f"{spec.model} is {KINDS_IN_WORDS[entry.kind]}; {KINDS_IN_WORDS[kind]} is needed here: load it as the "
                "main model, or name another one"
            )

        async def find_draft(wanted: LoadSpec) -> ModelEntry:
            draft = await self._finder.find(wanted, local=local)
            await self._finder.check(draft)
            return draft

        entry = await with_draft(entry, spec, find_draft)
        await in_thread(functools.partial(self._engines.get, choose_engine(entry, spec).name))
        return entry

    async def _begin(self, change: Change[LoadReport], entry: ModelEntry) -> None:
        """Check the files of a model whose load begins, unless the caller knows them."""
        if change.files is None:
            await change.run(self._finder.check(entry))
        self._report(load_progress(entry))

    async def _find_loaded(self, entry: ModelEntry, spec: LoadSpec) -> Model | None:
        """Return the model in memory that has these files, unchanged, and these options; None if there is none."""
        for model in self.now.models:
            if same_options(model.spec, spec) and await in_thread(functools.partial(is_loaded, model.entry, entry)):
                return model if model in self.now.models else None
        return None

    def _use_again(self, model: Model, entry: ModelEntry, change: Change[LoadReport], spec: LoadSpec) -> LoadReport:
        """Return the report of a load of a model that is in memory."""
        self._keep(model, pin=spec.pin, ttl_s=spec.ttl_s)
        if change.beside:
            model.admission.touch()
            self.set_idle_timer()
        else:
            self._seat(model, as_main=True)
        return load_report(model, entry, 0.0)

    def _seat(self, model: Model, *, as_main: bool, replaced: Model | None = None) -> None:
        """See ``InMemory.with_newest``."""
        model.admission.touch()
        self.now = self.now.with_newest(model, as_main=as_main, replaced=replaced)
        if as_main:
            self._lost_main = None
        self.set_idle_timer()

    def _replaces_main(self, model: Model) -> bool:
        """Return whether a model in memory becomes the main one as if it was loaded: a pinned encoder does."""
        return is_beside(model) and model is not self.now.main

    async def _load_in_turn(self, change: Change[LoadReport], entry: ModelEntry, spec: LoadSpec) -> LoadReport:
        """Load a model, after others have left memory for it; if that fails, load those again."""
        present = await change.run(self._find_loaded(entry, spec))
        if present is not None and not self._replaces_main(present):
            return self._use_again(present, entry, change, spec)
        # A model that cannot be loaded is refused while the others still answer.
        started, main = time.perf_counter(), self.now.main
        leaving = await change.run(self._choose_leaving(entry, spec, present))
        checked_s = time.perf_counter() - started
        await change.run(self._load_missing(besides=entry))
        left: list[Model] = []
        try:
            while leaving:
                for model in leaving:
                    why = f"the model was replaced by {entry.id}"
                    if await self._unload_after_drain(model, why, change) is not None:
                        left.append(model)
                        self._report(ModelEvent(model=model.entry.id, stage="unloaded"))
                # Others leave in place of a model that was pinned in the meantime.
                stayed = any(model not in left for model in leaving)
                leaving = await change.run(self._choose_leaving(entry, spec, present)) if stayed else []
            change.stage = "loading"
            return await change.run(self._enter(entry, spec, as_main=True, like=left, checked_s=checked_s))
        except LabError as exc:
            # Not the exception, which refers to this frame, and so to the models that have left.
            kind, message, param = type(exc), exc.message, exc.param
        # They are not needed if another model is loaded instead, or if the lab stops.
        if change.restores and not left:
            message += f"; {main.entry.id} is still loaded" if main and main in self.now.models else NONE_LOADED
        for model in left if change.restores else ():
            name = model.entry.id
            try:
                await change.restore(self._reload(model, as_main=model is main))
            except LabError as exc:
                message += f"; the previous model {name} could not be loaded again either: {exc.message}"
            else:
                message += f"; the previous model {name} is loaded again"
        raise kind(message, param=param)

    async def _choose_leaving(self, entry: ModelEntry, spec: LoadSpec, present: Model | None) -> list[Model]:
        """Let the engine check a model, and return the models that leave memory for it.

        Args:
            present: The model, if it is in memory.

        Raises:
            OutOfMemoryError: the model does not fit next to those that are pinned.
        """
        resident, models = self._settings.resident, self.now.models
        same = [model for model in models if is_same(model.entry, entry) and model is not present]
        others = [model for model in models if not model.pinned and model not in same]
        others.sort(key=lambda model: (model.admission.active > 0, model.admission.used_at))
        # Pinned models do not count.
        surplus = 0 if resident == "auto" or spec.pin else max(0, len(others) + 1 - resident)
        for count in range(surplus, len(others) + 1):
            leaving = [*same, *others[:count]]
            without = leaving if present is None else [*leaving, present]
            try:
                await self._check_loadable(entry, spec, without=without)
            except OutOfMemoryError as exc:
                if count < len(others):
                    continue
                pinned = [model.entry.id for model in models if model.pinned and model not in without]
                if not pinned:
                    raise
                note = f"pinned models stay in memory: {', '.join(pinned)}; lab.keep(ID, pin=False) releases one"
                raise OutOfMemoryError(f"{exc.message}; {note}", param=exc.param) from exc
            return leaving
        raise AssertionError("unreachable")

    async def _reload(self, model: Model, *, as_main: bool) -> None:
        """Load a model again that has left memory, unless it was loaded in another way in the meantime."""
        await self._check_loadable(model.entry, model.spec_now)
        await self._enter(model.entry, model.spec_now, as_main=as_main, replaces=False)

    async def _check_loadable(
        self, entry: ModelEntry, spec: LoadSpec, *, without: Sequence[Model] = (), room_bytes: int | None = None
    ) -> None:
        """Let an engine check a model; see ``check_loadable``.

        Args:
            without: Models that leave memory first.
            room_bytes: Memory that it may use; by default what the models in memory leave.
        """
        if room_bytes is None:
            room_bytes = self._engines.room_bytes(entry, [it for it in self.now.models if it not in without])
        engine, limit_s = self._engines.of(entry), self._settings.load_timeout_s
        await check_loadable(engine, entry, spec, room_bytes=room_bytes, budget=self._budget, load_timeout_s=limit_s)

    async def check(self, spec: LoadSpec, *, beside: Sequence[ModelEntry] = ()) -> ModelEntry:
        """Check that a model can be loaded, without loading it, and return its files. They are downloaded if necessary.

        The files and the options are checked as in a load. Faults that appear only when the weights are read are not
        found.

        Args:
            beside: Models that will be loaded together with this one and are not in memory yet.

        Raises:
            ModelNotFoundError, UnusableModelError, StorageFullError, OutOfMemoryError, NotLoadedError: as ``load``.
        """
        entry = await self._find(spec, None, local=True)
        await self._finder.check(entry)
        engine, others = self._engines.of(entry), await in_thread(lambda: [(it, self._engines.of(it)) for it in beside])
        taken_bytes = sum(it.load_bytes for it, other in others if share_memory(engine, other))
        await self._check_loadable(entry, spec, room_bytes=engine.memory.limit - taken_bytes)
        return entry

    async def _enter(
        self,
        entry: ModelEntry,
        spec: LoadSpec,
        *,
        as_main: bool,
        like: Sequence[Model] = (),
        replaces: bool = True,
        checked_s: float = 0.0,
    ) -> LoadReport:
        """Read a model into memory, unless it is there; return the report of the load.

        Args:
            as_main: Whether it becomes the main model even if there is one.
            like: Models that have left memory. The same one among them says how long this one stays.
            replaces: Whether it replaces the same model with other options.
            checked_s: How long it was checked, which the report includes.
        """
        started, same = time.perf_counter(), None
        async with self._entering:
            model = await self._find_loaded(entry, spec)
            if model is None:
                same = next((other for other in self.now.models if is_same(other.entry, entry)), None)
                if same is not None and not replaces:
                    return load_report(same, entry, 0.0)
                files = await in_thread(functools.partial(with_marks, entry))
                staying = [other for other in self.now.models if other is not same]
                room_bytes = self._engines.room_bytes(entry, staying)
                load = self._engines.of(entry).load(files, spec, room_bytes=room_bytes)
                try:
                    model = await within_limit(load, entry, self._settings.load_timeout_s)
                except UnusableModelError:
                    # A file that was removed or changed meanwhile is the reason, whatever the engine has reported.
                    await in_thread(functools.partial(require_unchanged, files))
                    raise
                if (lost := model.lost) is not None:
                    raise type(lost)(lost.message)
                self._counts.begin(model)
                before = (it for it in (same, *like, *self._missing) if it is not None and is_same(it.entry, entry))
                if (known := next(before, None)) is not None:
                    model.keep_as(known, spec)
                self._missing = [it for it in self._missing if not is_same(it.entry, entry)]
                self.idle_specs.pop(entry.id, None)
            else:
                self._keep(model, pin=spec.pin, ttl_s=spec.ttl_s)
            self._seat(model, as_main=as_main, replaced=same)
        report = load_report(model, entry, checked_s + time.perf_counter() - started)
        if same is not None:
            await self._drop(same, NotLoadedError(f"{entry.id} was loaded again with other options"))
        return report

    async def cancel_load(self, model: str, *, shared: bool = True) -> None:
        """Cancel the loads of the model with this id or requested name. Downloads continue in the background.

        The callers of the loads get the error after the previous model is loaded again.

        Args:
            shared: Whether to cancel them even if several callers wait for them.

        Raises:
            InvalidRequestError: the model is not being loaded.
            ModelBusyError: several callers wait for the loads, which continue.
        """
        loads = self._loads(model)
        if not loads:
            raise InvalidRequestError(f"{model} is not being loaded; there is nothing to cancel", param="model")
        callers = sum(change.callers for change in loads)
        if callers > 1 and not shared:
            raise ModelBusyError(f"{callers} callers wait for the load of {model}, so it was not cancelled")
        for change in loads:
            change.cancel(_cancelled(change))

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
        name = self._settings.ids_by_alias.get(model, model)
        missing = self._forget_missing(name, local=local) if pin is False else None
        named = missing or self.now.find(name, local=local)
        self._keep(named, pin=pin, ttl_s=ttl_s)
        self.set_idle_timer()
        return named.state()

    def _keep(self, model: Model, *, pin: bool | None, ttl_s: TimeToLive | None) -> None:
        """Change how long a model stays in memory. If it is about to be unloaded, a pin keeps it in memory.

        Raises:
            ModelBusyError: the model is pinned while it is being unloaded by request.
        """
        drain = self.change.drain if self.change is not None else None
        if pin and drain is not None and drain.model is model:
            if self.change is not None and self.change.cause == "requested" and model.entry.kind == "chat":
                self.check_free()
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
        requested = next((it for it in self._changes if it.cause == "requested"), None)
        joined: Change[int] | Drain | None = None
        if model is None:
            if requested is not None and requested.entry in (None, self.now.main and self.now.main.entry):
                joined = requested
        # With ``wait``, a name means the model in memory, even if it is being loaded with other options.
        elif wait is not None or not self._loads(model):
            drain = self.change.drain if self.change is not None else None
            leaving = drain.model.entry if drain is not None else None
            joined = drain
            if requested is not None and requested.entry is not None:
                joined, leaving = requested, requested.entry
            if leaving is None or loaded_id(model, [leaving], local=local) != leaving.id:
                joined = None
        if joined is not None:
            joined.set_wait(wait)
            return await asyncio.shield(joined.done)
        loads = [it for it in self._loads(model) if model is not None or (it.entry is not None and not it.beside)]
        if loads:
            for load in loads:
                load.cancel(_cancelled(load))
            await asyncio.wait([load.done for load in loads])
            return 0
        if model is not None and self._forget_missing(model, local=local) is not None:
            return 0
        named = self.now.find(model, local=local) if model is not None else self.now.present_main
        if named is not None and named.pinned and not (named is self.now.main and is_beside(named)):
            name = named.entry.id
            raise InvalidRequestError(
                f"{name} is pinned: it stays in memory until the server stops, or until it is released with "
                f"lab.keep({name!r}, pin=False), lmx-lab keep {name} --no-pin or POST /admin/models/keep",
                param="model",
            )
        self.check_free()
        return await self._start_unload(named, "requested", wait=wait).result()

    def _start_unload(self, model: Model | None, cause: UnloadCause, *, wait: bool | None = None) -> Change[int]:
        entry = model.entry if model is not None else None
        change: Change[int] = Change(
            kind="unload", name=entry.id if entry is not None else "", entry=entry, wait=wait, cause=cause
        )
        self._start(change, self._unload(change, model))
        return change

    async def _unload(self, change: Change[int], model: Model | None) -> int:
        """Unload a model. If this was not requested, it stays if it has requests or one arrives in the meantime."""
        message, name, why = None, change.name, "the model was unloaded"
        async with self._in_progress(change):
            if model is None or model not in self.now.models:
                if change.cause == "requested":
                    # The model that was unloaded because it was idle is no longer loaded again for a request.
                    unloaded = self.now.unloaded
                    self.now = replace(self.now, unloaded=unloaded and (unloaded[0], "requested"), failure=None)
                return 0
            if change.is_automatic:
                idle_s = model.ttl_s if change.cause == "idle" else 0.0
                if idle_s is None or (model.pinned and not is_beside(model)) or self.swaps.has_turn:
                    return 0
                reason = "it was idle" if change.cause == "idle" else "memory was short"
                model.admission.close(NotLoadedError(f"{name} was unloaded because {reason}; load it again"))
                if model.admission.active or model.admission.used_at + idle_s > time.perf_counter():
                    model.admission.reopen()
                    return 0
                message = f"idle for {idle_s:g} s" if change.cause == "idle" else "memory is short"
                log.info("%s is unloaded: %s", name, message)
            if (freed := await self._unload_after_drain(model, why, change)) is None:
                return 0
        self._report(ModelEvent(model=name, stage="unloaded", message=message))
        return freed

    async def _unload_after_drain(
        self,
        model: Model,
        why: str,
        change: Change[Any],
        *,
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
            change,
            limit_s=self._settings.drain_s if limit_s is None else limit_s,
            on_change=report,
        )
        try:
            if not (change.kind == "unload" and is_beside(model)):
                change.stage, stays = "draining", True
                try:
                    await change.run(drain.run())
                    loaded = change.entry if change.spec is not None else None
                    makes_room = loaded is not None and not is_same(model.entry, loaded)
                    stays = model.pinned and (makes_room or change.is_automatic)
                finally:
                    if stays:
                        model.admission.reopen()
                        drain.finish(0)
                if stays:
                    return None
            change.stage = "unloading"
            # An encoder may have been pinned in the meantime.
            if stays := change.kind == "unload" and is_beside(model):
                model.admission.reopen()
            now = replace(self.now.without(model, stays=stays), failure=None)
            if change.cause == "idle":
                self.idle_specs[model.entry.id] = model.spec_now
            if change.cause is not None and now.main is None:
                # The cause is known before the memory is released. It explains why there is no main model.
                now = replace(now, unloaded=(model.entry.id, change.cause))
            self.now = now
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
                change.since, self.change = time.perf_counter(), change
                try:
                    yield
                finally:
                    self.change = None
        finally:
            self.update()

    def check_free(self) -> None:
        """Check that no load or unload is in progress.

        Loads of pinned encoders do not count. Neither do unloads because a model was idle or memory was short: they are
        short, so callers wait for them.

        Raises:
            ModelBusyError: one is in progress.
        """
        change, remedy = self.change, "try again when that is done"
        if change is None or change.is_automatic:
            return
        doing = f"{change.model} is being loaded" if change.kind == "load" else "the model is being unloaded"
        if change.drain is not None and change.stage == "draining":
            name = change.drain.model.entry.id
            doing = f"{doing} ({name}: {change.drain.state})"
            remedy += f", or stop its answers now: lmx-lab unload {name} --now, lab.unload({name!r}, wait=False)"
        raise ModelBusyError(f"{doing}; {remedy}", retry_after_s=2)

    async def until_unchanged(self) -> None:
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
        self.cancel_loads()
        if self.change is not None:
            self.change.set_wait(False)
        self._taken_back.clear()
        unloaded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        change = self._lent = Change[str | None](kind="load", name=model)
        self._start(change, self._lend(change, limit_s, unloaded))
        # Cancelling a caller does not cancel the unload; ``take_back`` waits for its end.
        parts: list[asyncio.Future[Any]] = [unloaded, change.done]
        await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
        if change.done.done():
            change.done.result()

    async def take_back(self) -> str | None:
        """Undo ``make_room``: load the models again, and return the id of the main one; None if there was none.

        Raises:
            LabError: the main model could not be loaded again.
        """
        self._taken_back.set()
        change, self._lent = self._lent, None
        return await change.result() if change is not None else None

    async def _lend(self, change: Change[str | None], limit_s: float, unloaded: asyncio.Future[None]) -> str | None:
        """Unload all models, and load them again when ``_taken_back`` is set. Return the main model.

        Args:
            change: Its name is the model that is loaded in their place.
            unloaded: Gets its result when they are unloaded.
        """
        async with self._in_progress(change):
            main, models, why = self.now.main, list(self.now.loaded), f"the server was restarted for {change.name}"
            for model in sorted(models, key=lambda model: model is not main):
                await self._unload_after_drain(model, why, change, limit_s=limit_s)
            change.stage = "loading"
            unloaded.set_result(None)
            await change.run(self._taken_back.wait())
            self._missing += [model for model in models if model is not main and model not in self._missing]
            await change.run(self._load_missing())
            self._missing = [model for model in self._missing if model.pinned]
            if main is not None:
                change.name = main.entry.id
                await change.run(self._reload(main, as_main=True))
            return main.entry.id if main is not None else None

    # Reports of models

    def update(self) -> None:
        """Start the next turn in swap mode, and set the idle timer. Called when their conditions may have changed."""
        self.swaps.update()
        self.set_idle_timer()

    def remove_lost(self, model: Model) -> None:
        """React to a model that its engine has lost; see ``EngineHost.lost``."""
        now, error = self.now, model.lost
        if error is None or model not in now.loaded:
            return
        was_main, name, out_of_memory = now.main is model, model.entry.id, isinstance(error, OutOfMemoryError)
        now = now.without(model)
        if now.main is None and was_main:
            now = replace(now, failure=error, unloaded=(name, "memory") if out_of_memory else now.unloaded)
        self.now = now
        self._counts.end(model)
        if model.pinned:
            self._missing.append(model)
            # Of several lost main models, the first one counts; the others became it only because of the loss.
            self._lost_main = self._lost_main or (model if was_main else None)
        if model.pinned or not was_main or now.main is not None:
            since_s = time.perf_counter() - self._reloaded_at.get(name, -RELOAD_S)
            reloads = model.pinned and self._lent is None and since_s > RELOAD_S
            which = "this pinned model" if model.pinned else "this model"
            message = f"the engine lost {which}; {'it is loaded again' if reloads else 'load it again'}"
            self._report(ModelEvent(model=name, stage="unloaded", message=message))
            if reloads:
                self._reloaded_at[name] = time.perf_counter()
                task = self._start_task(self._load_missing(), "lmx-lab reload")
                self._reloads.add(task)
                task.add_done_callback(self._reloads.discard)
        elif out_of_memory:
            self._report(ModelEvent(model=name, stage="unloaded", message="out of memory"))
        self.update()

    def set_idle_timer(self) -> None:
        """Set the timer to the time at which the next model has been idle for its time to live."""
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None
        # The end of the last request of a model, of the change, or of the turn calls this method again.
        if self.change is not None or self.swaps.has_turn:
            return
        now, main = self.now, self.now.main
        ends = [
            (model.admission.used_at + model.ttl_s, model)
            for model in now.models
            if model.ttl_s is not None
            and not model.admission.active
            and (not model.pinned or (model is main and is_beside(model)))
        ]
        if not ends:
            return
        end, model = min(ends, key=lambda each: each[0])
        left_s = end - time.perf_counter()
        if left_s > 0:
            self._idle_timer = asyncio.get_running_loop().call_later(left_s, self.set_idle_timer)
        else:
            self._start_unload(model, "idle")

    def evict(self, missing_bytes: int) -> None:
        """Unload the model that was used least recently, if it has no requests and is not the main one; see
        ``Budget``.
        """
        unused = [
            model
            for model in self.now.models
            if not model.pinned and model is not self.now.main and not model.admission.active
        ]
        if unused and self.change is None:
            model = min(unused, key=lambda model: model.admission.used_at)
            log.warning("%.2f GB of memory have to be freed", missing_bytes / 1e9)
            self._start_unload(model, "memory")


def _cancelled(change: Change[Any]) -> NotLoadedError:
    return NotLoadedError(f"the load of {change.name} was cancelled")
