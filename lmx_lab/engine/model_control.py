"""Decide which models are in memory: loads, unloads, pins, and unloading of idle models.

Everything here runs on the control loop of ``ModelManager``, except ``residents``, which any thread may read. Changes
of the main model happen one at a time. Nothing polls: an engine reports when it loses a model, ``AdmissionControl``
reports when a model has no requests left, and timers are set to known points in time.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

from lmx_lab.engine.admission import AdmissionControl
from lmx_lab.engine.find import ModelFinder
from lmx_lab.engine.interface import InferenceEngine
from lmx_lab.engine.loads import (
    ActiveLoads,
    CurrentChange,
    Drain,
    IfBusy,
    LoadOperation,
    UnloadOperation,
    load_progress,
    same_options,
    within_limit,
)
from lmx_lab.engine.model_lookup import NONE_LOADED, check_pinned_kind, check_unload, loaded_id
from lmx_lab.engine.registry import choose_engine, engine_for
from lmx_lab.engine.residents import MAIN, Resident, Residents, share_memory, staying_bytes
from lmx_lab.engine.swap import SwapQueue
from lmx_lab.errors import InvalidRequestError, LabError, NotLoadedError, UnusableModelError
from lmx_lab.settings import Settings
from lmx_lab.values.engine import EngineSnapshot, UnloadCause
from lmx_lab.values.models import EngineName, Kind, LoadReport, LoadSpec, ModelEntry, ModelEvent
from lmx_lab.weights.files import in_thread
from lmx_lab.weights.fingerprint import is_loaded, with_marks

log = logging.getLogger(__name__)
T = TypeVar("T")
RELOAD_S = 30.0
"""Minimum time between two automatic loads of a main model whose process was ended because of a request, or of a pinned
model that its engine has lost."""


class ModelControl:
    """Performs loads and unloads for ``ModelManager``.

    Args:
        engine_of: Returns an engine by name, importing it first if necessary; blocks.
        report: Called with each step of a load, and when a model leaves memory.
        snapshot: Returns the state of all engines.
    """

    def __init__(
        self,
        settings: Settings,
        finder: ModelFinder,
        *,
        engine_of: Callable[[EngineName], InferenceEngine],
        report: Callable[[ModelEvent], None],
        snapshot: Callable[[], EngineSnapshot],
    ) -> None:
        self.settings = settings
        self.residents = Residents()
        self._finder = finder
        self._engine_of = engine_of
        self._report = report
        self._snapshot = snapshot
        self._loop = asyncio.get_running_loop()
        self._slots: dict[str, Resident] = {}
        self._pins: dict[Kind, Resident] = {}
        """Models to keep in addition to the main one. They are loaded again after their engine has died."""
        self._engine: InferenceEngine | None = None
        self._unloaded: tuple[str, UnloadCause] | None = None
        self.idle_spec: LoadSpec | None = None
        """The spec of the model that was unloaded because it was idle (``EngineSnapshot.idle_model``)."""
        self._current = CurrentChange(on_change=self._publish, on_end=self._schedule_next)
        # Models are read into memory one at a time, so that the memory of the others is known.
        self._entering = asyncio.Lock()
        self._loads = ActiveLoads()
        self._last_unload: UnloadOperation | None = None
        self._lending: asyncio.Task[str | None] | None = None
        """Unloads all models, and loads them again when they are taken back; see ``make_room``."""
        self._taken_back = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._idle_timer: asyncio.TimerHandle | None = None
        self._reloaded_at: dict[str, float] = {}
        """When a model that was lost was last loaded again, by its slot."""
        self.swaps = SwapQueue(
            settings,
            loaded=lambda: self._snapshot().model or self._snapshot().idle_model,
            is_busy=lambda: self._main is not None and self._main.admission.active > 0,
            is_changing=self._current.in_progress,
            on_change=self._publish,
        )

    @property
    def _main(self) -> Resident | None:
        return self._slots.get(MAIN)

    def _publish(self) -> None:
        self.residents = Residents(
            main=self._main,
            pinned=tuple(resident for slot, resident in self._slots.items() if slot != MAIN),
            stable=not self._current.in_progress() and not self.swaps,
            engine=self._engine,
            change=self._current.value,
            unloaded=self._unloaded,
        )

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

    def _post(self, callback: Callable[..., object], *args: object) -> None:
        """Call a function on the control loop. May be called from any thread."""
        with suppress(RuntimeError):  # The loop is closed, because the manager was stopped.
            self._loop.call_soon_threadsafe(callback, *args)

    async def wait_for_change(self) -> None:
        """Wait until the loads and unloads of the main model that are in progress have ended."""
        await self._current.wait()

    # Loads

    async def load(
        self, spec: LoadSpec, entry: ModelEntry | None, *, local: bool, finish_queued: bool, if_busy: IfBusy
    ) -> LoadReport:
        """See ``ModelManager.load``.

        Args:
            entry: The model, if its files are already known.
        """
        operation = self._loads.find(spec, entry)
        if operation is None:
            unload = UnloadOperation(done=self._loop.create_future(), requested=False, wait=spec.wait)
            operation = LoadOperation(spec=spec, entry=entry, done=self._loop.create_future(), unload=unload)
            self._loads.add(operation)
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
            operation.finish(operation.with_engine(report))
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
            self._report(load_progress(entry))
            return await operation.run(self._load_pinned(entry, spec, engine, spec.pin))
        if not self._current.in_progress() and (report := await self._report_if_loaded(entry, spec)) is not None:
            return report
        if (other := self._loads.find_same(operation, entry)) is not None:
            other.unload.set_wait(spec.wait)
            return await asyncio.shield(other.done)
        if if_busy == "replace":
            self._loads.cancel_other_models(entry)
        if if_busy == "refuse":
            self._current.check_free(self._snapshot())
        async with self._current.begin("load", entry.id):
            if found is None:
                await operation.run(self._finder.check(entry))
            self._report(load_progress(entry))
            return await self._replace_main(operation, entry, engine, finish_queued=finish_queued)

    async def _find(
        self, spec: LoadSpec, entry: ModelEntry | None, *, local: bool
    ) -> tuple[ModelEntry, InferenceEngine]:
        """Return the files to load, with those of the draft model, and their engine.

        Args:
            entry: The files, if they are already known.
        """
        if entry is None:
            loaded = self._main.entry if self._main is not None and self._main.in_memory else None
            entry = await self._finder.find(spec, local=local, loaded=loaded)
        entry = await self._finder.with_draft(entry, spec, local=local)
        return entry, await in_thread(functools.partial(self._engine_of, choose_engine(entry, spec).name))

    async def check(self, spec: LoadSpec, beside: Sequence[ModelEntry]) -> ModelEntry:
        """See ``ModelManager.check``."""
        entry, engine = await self._find(spec, None, local=True)
        await self._finder.check(entry)
        if spec.pin is not None:
            check_pinned_kind(spec, entry)
        others = [(it, self._engine_of(engine_for(it.format).name)) for it in beside]
        other_bytes = sum(it.load_bytes for it, other in others if share_memory(engine, other))
        await self._check_loadable(entry, spec, engine, other_bytes=other_bytes)
        return entry

    async def _report_if_loaded(self, entry: ModelEntry, spec: LoadSpec) -> LoadReport | None:
        """Return a report if the model is loaded with these options and its files have not changed; None otherwise."""
        main = self._main
        if main is None or not main.in_memory or not same_options(main.spec, spec):
            return None
        unchanged = await in_thread(functools.partial(is_loaded, main.entry, entry))
        if not unchanged or self._main is not main:
            return None
        return replace(main.engine.snapshot.load_report(0.0), model=entry.id)

    def _schedule_next(self) -> None:
        """Start the next turn in swap mode, and set the idle timer. Called when their conditions may have changed."""
        self.swaps.update()
        self._set_idle_timer()

    async def _replace_main(
        self, operation: LoadOperation, entry: ModelEntry, engine: InferenceEngine, *, finish_queued: bool
    ) -> LoadReport:
        """Load a model in place of the main one; if that fails, load the previous model again."""
        operation.check()
        spec, previous = operation.spec, self._main
        if (report := await self._report_if_loaded(entry, spec)) is not None:
            return report
        # A model that cannot be loaded is refused while the current model still answers.
        checked_s = await operation.run(self._check_loadable(entry, spec, engine))
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
            failure = exc
        # The previous model is not needed if another model is loaded instead, or if the lab stops.
        if not operation.restores_previous:
            raise failure
        outcome = await self._restore(operation, previous)
        raise type(failure)(f"{failure.message}{outcome}", param=failure.param)

    async def _restore(self, operation: LoadOperation, previous: Resident | None) -> str:
        """Load the previous model again after a failed load. Return the outcome as the end of an error message."""
        if previous is None:
            return NONE_LOADED
        name = previous.entry.id
        if self._main is previous:
            return f"; {name} is still loaded"
        try:
            await operation.restore(self._reload(previous))
        except LabError as exc:
            return f"; the previous model {name} could not be loaded again either: {exc.message}"
        return f"; the previous model {name} is loaded again"

    async def _reload(self, resident: Resident) -> None:
        await self._check_loadable(resident.entry, resident.spec, resident.engine)
        await self._load_main(resident.entry, resident.spec, resident.engine)

    async def _check_loadable(
        self, entry: ModelEntry, spec: LoadSpec, engine: InferenceEngine, *, other_bytes: int | None = None
    ) -> float:
        """Let an engine check a model; return the seconds that it took.

        Args:
            other_bytes: Memory of the models beside this one; by default of those that stay when it is loaded.
        """
        started = self._loop.time()
        other_bytes = staying_bytes(self._slots, entry, spec, engine) if other_bytes is None else other_bytes
        await within_limit(engine.check(entry, spec, other_bytes=other_bytes), entry, self.settings.load_timeout_s)
        return self._loop.time() - started

    async def _load_main(self, entry: ModelEntry, spec: LoadSpec, engine: InferenceEngine) -> LoadReport:
        async with self._entering:
            entry = await in_thread(functools.partial(with_marks, entry))
            try:
                report = await within_limit(engine.load(entry, spec), entry, self.settings.load_timeout_s)
            except (asyncio.CancelledError, NotLoadedError):
                # The load may have been completed at the moment of the cancellation.
                with suppress(LabError):
                    await engine.unload()
                raise
        self._slots[MAIN] = self._resident(entry, spec, engine)
        self._engine, self._unloaded = engine, None
        self._publish()
        return report

    def _resident(self, entry: ModelEntry, spec: LoadSpec, engine: InferenceEngine) -> Resident:
        limit = self.settings.slots + self.settings.queue_limit
        return Resident(
            entry=entry,
            spec=spec,
            engine=engine,
            admission=AdmissionControl(entry.id, limit=limit, on_idle=self._post_idle),
        )

    async def cancel(self, model: str) -> None:
        """See ``ModelManager.cancel_load``."""
        operations = self._loads.find_by_model(model)
        if not operations:
            raise InvalidRequestError(f"{model} is not being loaded; there is nothing to cancel", param="model")
        self._cancel(operations)

    def _cancel(self, operations: Iterable[LoadOperation]) -> None:
        for operation in operations:
            operation.cancel(NotLoadedError(f"the load of {operation.spec.model} was cancelled"))

    def cancel_all(self, error: LabError | None = None) -> None:
        """Cancel all loads, and the end of ``make_room``. The callers of loads get the error immediately."""
        if self._lending is not None:
            self._lending.cancel()
        for operation in self._loads:
            failure = error or NotLoadedError(f"the load of {operation.spec.model} was cancelled: the server stops")
            operation.cancel(failure, restores_previous=False)
            self._fail(operation, failure)

    async def settled(self) -> None:
        """Wait until all loads and unloads have ended."""
        while self._tasks:
            await asyncio.wait(list(self._tasks))

    # Pinned models

    async def _load_pinned(self, entry: ModelEntry, spec: LoadSpec, engine: InferenceEngine, kind: Kind) -> LoadReport:
        async with self._entering:
            before = self._slots.get(kind)
            is_same = before is not None and before.in_memory and before.spec == spec
            if before is not None and is_same and await in_thread(functools.partial(is_loaded, before.entry, entry)):
                return LoadReport(model=entry.id, load_time_ms=0.0, vram_gb=before.memory_bytes / 1e9)
            checked_s = await self._check_loadable(entry, spec, engine)
            entry = await in_thread(functools.partial(with_marks, entry))
            report = await within_limit(engine.pin(entry, spec), entry, self.settings.load_timeout_s)
            self._slots[kind] = self._pins[kind] = self._resident(entry, spec, engine)
            self._publish()
        if before is not None and before.engine is not engine:
            await before.engine.unpin(kind)
        return replace(report, load_time_ms=checked_s * 1e3 + report.load_time_ms)

    async def _restore_pins(self) -> None:
        """Load pinned models again that were lost because their engine died."""
        for kind, pinned in list(self._pins.items()):
            if not pinned.in_memory:
                await self._restore_pin(kind, pinned)

    async def _restore_pin(self, kind: Kind, pinned: Resident) -> None:
        self._report(load_progress(pinned.entry))
        try:
            await self._load_pinned(pinned.entry, pinned.spec, pinned.engine, kind)
        except LabError as exc:
            log.warning("%s, which was pinned, could not be loaded again: %s", pinned.entry.id, exc.message)
            self._report(ModelEvent(model=pinned.entry.id, stage="failed", message=exc.message))
        else:
            self._report(ModelEvent(model=pinned.entry.id, stage="loaded"))

    # Unloads

    async def unload(self, model: str | None, *, local: bool, wait: bool | None) -> int:
        """See ``ModelManager.unload``."""
        if (joined := self._unload_to_join(model, wait, local=local)) is not None:
            joined.set_wait(wait)
            return await asyncio.shield(joined.done) or 0
        if loads := self._loads.find_by_model(model) if model is not None else self._loads.of_main():
            self._cancel(loads)
            await asyncio.wait([operation.done for operation in loads])
            return 0
        if model is not None:
            check_unload(model, self._snapshot(), local=local)
        self._current.check_free(self._snapshot())
        entry = self._main.entry if self._main is not None else None
        operation = UnloadOperation(done=self._loop.create_future(), requested=True, wait=wait, entry=entry)
        # Set before the unload begins, so that further requests to unload join it.
        self._last_unload = operation
        self._start_task(self._unload(operation), "lmx-lab unload")
        # Cancelling a caller does not cancel the unload.
        return await asyncio.shield(operation.done) or 0

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
        return operation if is_named and (wait is not None or not self._loads.find_by_model(model)) else None

    async def _unload(self, operation: UnloadOperation) -> None:
        main = self._main
        try:
            async with self._current.begin("unload", main.entry.id if main else ""):
                if (main := self._main) is not None:
                    self._current.name_model(main.entry.id)
                    freed = await self._drain_and_unload(operation, "the model was unloaded", cause="requested")
                else:
                    # Nothing is loaded: the idle model is no longer loaded again for a request.
                    freed = 0
                    if self._unloaded is not None:
                        self._unloaded = (self._unloaded[0], "requested")
                    if self._engine is not None:
                        await self._engine.unload()
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

        Args:
            limit_s: Time that running requests have to end; by default ``drain_s``.
            load: The load that needs the room. If it is cancelled before the model is unloaded, the model stays.
        """
        main = self._main
        if main is None:
            return 0

        def report_drain() -> None:
            self._current.enter_stage("draining", drain_until=drain.until)
            if (state := self._snapshot().unloading) is not None:
                self._report(ModelEvent(model=main.entry.id, stage="unloading", unloading=state))

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
            self._current.enter_stage("draining", drain_until=drain.until)
            try:
                await (load.run(drain.run()) if load is not None else drain.run())
            except LabError:
                main.admission.reopen()
                raise
            self._current.enter_stage("unloading")
            if cause is not None:
                self._unloaded, self.idle_spec = (main.entry.id, cause), main.spec
            if self._main is main:
                del self._slots[MAIN]
            # Published before the model disappears from the engine's snapshot, so that the cause is known by then.
            self._publish()
            freed = await main.engine.unload()
        except BaseException as exc:
            operation.finish(None if load is not None and self._main is main else exc)
            raise
        operation.finish(freed)
        return freed

    async def make_room(self, model: str, limit_s: float) -> None:
        """See ``ModelManager.make_room``."""
        self.cancel_all()
        if self._last_unload is not None:
            self._last_unload.set_wait(False)
        self._taken_back.clear()
        unloaded: asyncio.Future[str | None] = self._loop.create_future()
        lending = self._lending = self._start_task(self._lend(model, limit_s, unloaded), "lmx-lab make room")
        # Cancelling a caller does not cancel the unload; ``take_back`` waits for its end.
        await asyncio.wait([unloaded, lending], return_when=asyncio.FIRST_COMPLETED)
        if lending.done():
            lending.result()

    async def take_back(self) -> str | None:
        """See ``ModelManager.take_back``."""
        self._taken_back.set()
        lending, self._lending = self._lending, None
        return await asyncio.shield(lending) if lending is not None else None

    async def _lend(self, model: str, limit_s: float, unloaded: asyncio.Future[str | None]) -> str | None:
        """Unload all models, and load them again when ``_taken_back`` is set. Return the main model.

        Args:
            model: The model that is loaded in their place.
            unloaded: Gets its result when they are unloaded.
        """
        async with self._current.begin("load", model):
            main, why = self._main, f"the server was restarted for {model}"
            operation = UnloadOperation(done=self._loop.create_future(), requested=False)
            await self._drain_and_unload(operation, why, limit_s=limit_s)
            for kind, pinned in self._pins.items():
                await Drain(pinned, why, limit_s=limit_s).run()
                self._slots.pop(kind, None)
                await pinned.engine.unpin(kind)
            self._current.enter_stage("loading")
            unloaded.set_result(None)
            await self._taken_back.wait()
            await self._restore_pins()
            if main is not None:
                self._current.name_model(main.entry.id)
                await self._reload(main)
            return main.entry.id if main is not None else None

    async def quiesce(self, timeout_s: float) -> None:
        """See ``ModelManager.quiesce``."""
        residents = list(self.residents)
        were_open = [resident for resident in residents if not resident.admission.closed]
        drains = [Drain(resident, "the server was stopped", limit_s=timeout_s) for resident in residents]
        await asyncio.gather(*(drain.run() for drain in drains))
        for resident in were_open:
            resident.admission.reopen()

    # Reports of engines and admission controls

    def post_lost(self, engine: InferenceEngine, by_request: bool) -> None:
        """React to an engine that has lost a model (see ``EngineHost.lost_model``). May be called from any thread."""
        self._post(self._remove_lost, engine, by_request)

    def _remove_lost(self, engine: InferenceEngine, by_request: bool) -> None:
        for slot, resident in list(self._slots.items()):
            if resident.engine is not engine or resident.in_memory:
                continue
            del self._slots[slot]
            if slot == MAIN and engine.snapshot.unload_cause == "memory":
                self._unloaded = (resident.entry.id, "memory")
                self._report(ModelEvent(model=resident.entry.id, stage="unloaded", message="out of memory"))
            now = time.perf_counter()
            is_wanted = by_request if slot == MAIN else self._lending is None
            reloads = is_wanted and now - self._reloaded_at.get(slot, -RELOAD_S) > RELOAD_S
            if slot != MAIN:
                what = "it is loaded again" if reloads else "pin it again"
                message = f"the engine lost this pinned model; {what}"
                self._report(ModelEvent(model=resident.entry.id, stage="unloaded", message=message))
            if reloads:
                self._reloaded_at[slot] = now
                if slot == MAIN:
                    load = self.load(resident.spec, resident.entry, local=True, finish_queued=False, if_busy="refuse")
                    self._start_task(load, "lmx-lab reload")
                else:
                    restore = self._restore_pin(resident.entry.kind, resident)
                    self._start_task(restore, "lmx-lab pinned reload")
        self._publish()
        self._schedule_next()

    def _post_idle(self) -> None:
        """React to a model that has no requests left. May be called from any thread."""
        # Skipped if nothing depends on it, since a client that sends one request at a time causes this call each time.
        if self.settings.idle_unload_s is not None or not self.residents.stable:
            self._post(self._schedule_next)

    def _set_idle_timer(self) -> None:
        """Set the timer to the time at which the main model has been idle for ``idle_unload_s``."""
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None
        idle_s, main = self.settings.idle_unload_s, self._main
        # The end of the last request, or of the change, calls this method again.
        if idle_s is None or main is None or main.admission.active or self._current.in_progress():
            return
        left_s = main.admission.used_at + idle_s - time.perf_counter()
        if left_s > 0:
            self._idle_timer = self._loop.call_later(left_s, self._set_idle_timer)
        else:
            self._start_task(self._unload_idle(main, idle_s), "lmx-lab idle unload")

    async def _unload_idle(self, main: Resident, idle_s: float) -> None:
        async with self._current.begin("unload", main.entry.id):
            if self._main is not main:
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
