"""Track the loads and unloads of models from their request to their end. Used on the loop of ``ModelManager``.

One load or unload of the main model is in progress at a time. Before an unload, the model's requests have time to end.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from lmx_lab.engine.engines import engine_for
from lmx_lab.errors import LabError, ModelBusyError, NotLoadedError
from lmx_lab.values.engine import EngineSnapshot, ModelChange
from lmx_lab.values.models import LoadReport, LoadSpec, ModelEntry, ModelEvent, with_reason

if TYPE_CHECKING:
    from lmx_lab.engine.model import LoadedModel

T = TypeVar("T")
IfBusy = Literal["refuse", "wait", "replace"]
"""The behaviour of a load if another load or an unload is in progress: fail, wait for it, or cancel the other load."""
LOAD_BASE_S = 60.0
"""Time limit for a small model, sufficient for a busy machine."""
SLOW_DISK_BYTES_PER_S = 20e6
"""Disk speed for which the time limit is sufficient to read the weights."""


class CurrentChange:
    """The load or unload of the main model that is in progress.

    Args:
        on_change: Called when ``value`` has changed.
        on_end: Called after a load or unload has ended.
    """

    def __init__(self, *, on_change: Callable[[], None], on_end: Callable[[], None]) -> None:
        self.value: ModelChange | None = None
        """None if no load or unload is in progress."""
        self._lock = asyncio.Lock()
        self._on_change = on_change
        self._on_end = on_end

    def in_progress(self) -> bool:
        """Return whether a load or unload is in progress."""
        return self._lock.locked()

    def check_free(self, now: EngineSnapshot) -> None:
        """Check that no load or unload is in progress.

        Raises:
            ModelBusyError: one is in progress.
        """
        if not self._lock.locked():
            return
        change = self.value
        doing = f"{change.model} is being loaded" if change and change.kind == "load" else "the model is being unloaded"
        remedy = "try again when that is done"
        if now.unloading is not None:
            doing = f"{doing} ({now.model}: {now.unloading})"
            remedy += (
                f", or stop its answers now: lmx-lab unload {now.model} --now, lab.unload({now.model!r}, wait=False)"
            )
        raise ModelBusyError(f"{doing}; {remedy}", retry_after_s=2)

    async def wait(self) -> None:
        """Wait until the loads and unloads that are in progress have ended."""
        async with self._lock:
            pass

    @asynccontextmanager
    async def begin(self, kind: Literal["load", "unload"], model: str) -> AsyncIterator[None]:
        """Wait until other loads and unloads have ended, and register this one as in progress within the block."""
        await self._lock.acquire()
        try:
            self._set(ModelChange(kind=kind, model=model, stage="checking", since=time.perf_counter()))
            yield
        finally:
            self.value = None
            self._lock.release()
            self._on_change()
            self._on_end()

    def enter_stage(
        self, stage: Literal["draining", "unloading", "loading"], *, drain_until: float | None = None
    ) -> None:
        """Set the stage, and for ``draining`` its end; see ``ModelChange``."""
        if self.value is not None:
            self._set(replace(self.value, stage=stage, drain_until=drain_until))

    def name_model(self, model: str) -> None:
        """Set the model that is unloaded, which may have changed during the wait for others."""
        if self.value is not None:
            self._set(replace(self.value, model=model))

    def _set(self, value: ModelChange) -> None:
        self.value = value
        self._on_change()


class Drain:
    """The time in which the requests of a model may end before the model is unloaded.

    Args:
        reason: Beginning of the error messages of requests that end with an error.
        limit_s: Time that running requests have to end.
        finish_queued: Whether queued requests are also answered, instead of ending immediately.
        on_change: Called with ``until`` when a request has ended, and when the time limit has changed.
    """

    def __init__(
        self,
        model: LoadedModel[Any],
        reason: str,
        *,
        limit_s: float,
        finish_queued: bool = False,
        on_change: Callable[[float | None], None] = lambda _: None,
    ) -> None:
        self._model = model
        self._reason = reason
        self._finish_queued = finish_queued
        self._on_change = on_change
        self._changed = asyncio.Event()
        self._why_ended = f"running requests had {limit_s:g} s to end"
        self.until: float | None = time.perf_counter() + limit_s
        """When the requests that are left end with an error (``time.perf_counter``); None without a time limit."""

    def set_wait(self, wait: bool | None) -> None:
        """Let the requests end without a time limit, or end them now. None changes nothing, but the state is reported
        again, for the caller.
        """
        if wait is not None:
            self.until = None if wait else time.perf_counter()
            self._why_ended = "it was requested to stop running requests immediately"
        self._changed.set()

    async def run(self) -> None:
        """Accept no more requests, wait until the accepted ones have ended, and end the rest at the time limit."""
        model, admission = self._model, self._model.admission
        queued_error = NotLoadedError(f"{self._reason} before this request started; try again when a model is loaded")
        admission.close(None if self._finish_queued else queued_error)
        reported = 0
        # Reported before queued requests end, because the engine may be in a long step.
        if admission.active:
            reported = admission.active
            self._on_change(self.until)
        if not self._finish_queued:
            await model.end(queued_error, queued_only=True)
        while admission.active:
            if self._changed.is_set() or admission.active != reported:
                self._changed.clear()
                reported = admission.active
                self._on_change(self.until)
            left_s = None if self.until is None else self.until - time.perf_counter()
            if left_s is not None and left_s <= 0:
                break
            ended, changed = admission.until_at_most(admission.active - 1), self._changed.wait()
            tasks: list[asyncio.Task[object]] = [asyncio.create_task(ended), asyncio.create_task(changed)]
            try:
                await asyncio.wait(tasks, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
        if admission.active:
            admission.close(queued_error)
            message = f"{self._reason} before this request ended, because {self._why_ended}; try again when a model is"
            await model.end(NotLoadedError(f"{message} loaded"))


@dataclass(eq=False, kw_only=True)
class UnloadOperation:
    """One unload of the main model. Any number of callers wait for ``done``."""

    done: asyncio.Future[int | None]
    """The bytes that the unload released; None if the model stays in memory, because the load that needed its room was
    cancelled."""
    requested: bool
    """Whether a caller has requested the unload. Otherwise, it is part of a load, or the model was idle."""
    wait: bool | None = None
    """See ``ModelManager.unload``."""
    entry: ModelEntry | None = None
    """The model; None if no model is loaded, and for a load until the unload begins."""
    drain: Drain | None = None

    def set_wait(self, wait: bool | None) -> None:
        """Change how long running requests may take; None changes nothing."""
        self.wait = self.wait if wait is None else wait
        if self.drain is not None:
            self.drain.set_wait(wait)

    def finish(self, outcome: int | BaseException | None) -> None:
        """Pass the result or the error to the callers. Only the first call has an effect."""
        # It refers to the model.
        self.drain = None
        _settle(self.done, outcome)


def _settle(done: asyncio.Future[T], outcome: T | BaseException) -> None:
    """Set the result or the error of a future that any number of callers wait for, unless it has one."""
    if done.done():
        return
    if isinstance(outcome, BaseException):
        done.set_exception(outcome)
        done.exception()  # retrieved, because all callers may have left
    else:
        done.set_result(outcome)


def load_limit_s(size_bytes: int, load_timeout_s: float | None) -> float:
    """Return the time limit of a load.

    Args:
        size_bytes: Size of the weights.
        load_timeout_s: Value of the setting; None for a limit in proportion to the size.
    """
    return load_timeout_s if load_timeout_s is not None else LOAD_BASE_S + size_bytes / SLOW_DISK_BYTES_PER_S


async def within_limit(work: Coroutine[Any, Any, T], entry: ModelEntry, load_timeout_s: float | None) -> T:
    """Await a coroutine that is part of a load, and return its result. Cancel it at the time limit of the load.

    Raises:
        NotLoadedError: the work did not end in time.
    """
    limit_s = load_limit_s(entry.load_bytes, load_timeout_s)
    try:
        async with asyncio.timeout(limit_s):
            return await work
    except TimeoutError:
        raise NotLoadedError(
            f"{entry.id} was not loaded within {limit_s:.0f} s, the time limit of a load of "
            f"{entry.load_bytes / 1e9:.2f} GB; check its disk and its files, or set load_timeout_s "
            "(LMX_LAB_LOAD_TIMEOUT_S) to more seconds"
        ) from None


def load_progress(entry: ModelEntry) -> ModelEvent:
    """Return the step in which an engine begins to load a model."""
    engine = with_reason(engine_for(entry.format).name, entry.engine_reason)
    return ModelEvent(model=entry.id, stage="load", total_bytes=entry.size_bytes, message=f"on {engine}")


def draft_warning(entry: ModelEntry) -> str:
    """Return a warning if the draft model of a load is not smaller than the model; empty otherwise."""
    draft = entry.draft
    if draft is None or draft.size_bytes < entry.size_bytes:
        return ""
    sizes = f"{draft.size_bytes / 1e9:.2f} GB and {entry.size_bytes / 1e9:.2f} GB"
    return f"warning: the draft model {draft.id} is not smaller than {entry.id} ({sizes}), so its drafts save no time"


def same_options(spec: LoadSpec, other: LoadSpec) -> bool:
    """Return whether two loads of the same files load them in the same way."""
    return spec == replace(other, model=spec.model, engine=spec.engine, wait=spec.wait, pin=spec.pin)


@dataclass(eq=False, kw_only=True)
class LoadOperation:
    """One load of a model. Any number of callers wait for ``done``."""

    spec: LoadSpec
    entry: ModelEntry | None
    """The model; None until its files are found."""
    done: asyncio.Future[LoadReport]
    unload: UnloadOperation
    """The unload of the previous model."""
    reached_engine: bool = False
    """Whether the files were found, and the engine is loading them or is about to."""
    restores_previous: bool = True
    """Whether the previous model is loaded again if this load fails or is cancelled."""
    requested_entry: ModelEntry | None = field(init=False)
    """The entry that the caller passed; None if the caller passed only a name."""
    _error: LabError | None = field(default=None, init=False)
    _task: asyncio.Task[Any] | None = field(default=None, init=False)
    """The current part of the load, which may take long."""

    def __post_init__(self) -> None:
        self.requested_entry = self.entry

    @property
    def model_names(self) -> set[str]:
        """The name that the caller used, and the id of the model when it is known."""
        return {self.spec.model} if self.entry is None else {self.spec.model, self.entry.id}

    @property
    def replaces_main(self) -> bool:
        """Whether its files were found, and it replaces the main model."""
        return self.reached_engine and self.spec.pin is None

    def loads_same(self, entry: ModelEntry, spec: LoadSpec) -> bool:
        """Return whether it loads these files as the main model with the same options."""
        found = self.entry
        return self.replaces_main and found is not None and found.path == entry.path and same_options(self.spec, spec)

    def check(self) -> None:
        """Check that the load was not cancelled.

        Raises:
            LabError: the load was cancelled.
        """
        if self._error is not None:
            raise self._error

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a part of the load that may take long, and return its result. Cancelling the load cancels this part and
        waits for its end.

        Raises:
            LabError: the load was cancelled.
        """
        if self._error is not None:
            work.close()
            raise self._error
        return await self.restore(work)

    async def restore(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a part of the work that restores the previous model. Cancelling the load a second time cancels it."""
        task = asyncio.create_task(work, name=f"lmx-lab load of {self.spec.model:.80}")
        self._task = task
        try:
            return await task
        except asyncio.CancelledError:
            self.check()
            raise
        finally:
            self._task = None

    def cancel(self, error: LabError, *, restores_previous: bool = True) -> None:
        """Cancel the load; its callers get this error.

        Args:
            restores_previous: Whether the previous model is loaded again.
        """
        self._error = self._error or error
        self.restores_previous = self.restores_previous and restores_previous
        if self._task is not None:
            self._task.cancel()

    def finish(self, outcome: LoadReport | BaseException) -> None:
        """Pass the report or the error to the callers. Only the first call has an effect."""
        _settle(self.done, outcome)
