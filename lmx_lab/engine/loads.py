"""One load or unload of a model, from its request to its end, and the time in which requests of a model that leaves
memory may end. Used on the loop of ``ModelManager``.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from lmx_lab.engine.engines import engine_for
from lmx_lab.errors import LabError, NotLoadedError, OutOfMemoryError
from lmx_lab.values.engine import ModelChange, UnloadCause
from lmx_lab.values.models import OPTIONS_OF_STAY, LoadReport, LoadSpec, ModelEntry, ModelEvent, Unloading, with_reason

if TYPE_CHECKING:
    from lmx_lab.engine.memory import Budget
    from lmx_lab.engine.model import Engine, LoadedModel

T = TypeVar("T")
Result = TypeVar("Result")
IfBusy = Literal["refuse", "wait", "replace"]
"""The behaviour of a load if another load or an unload is in progress: fail, wait for it, or cancel the other load."""
LOAD_BASE_S = 60.0
"""Time limit for a small model, sufficient for a busy machine."""
SLOW_DISK_BYTES_PER_S = 20e6
"""Disk speed for which the time limit is sufficient to read the weights."""


class Drain:
    """The time in which the requests of a model may end before the model is unloaded.

    Args:
        reason: Beginning of the error messages of requests that end with an error.
        change: The load that needs the room, or the unload.
        limit_s: Time that running requests have to end.
        on_change: Called when a request has ended, and when the time limit has changed.
    """

    def __init__(
        self,
        model: LoadedModel[Any],
        reason: str,
        change: Change[Any],
        *,
        limit_s: float,
        on_change: Callable[[Drain], None] = lambda _: None,
    ) -> None:
        self.model = model
        self.done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        """The bytes that the unload released; 0 if the model stays in memory, because the load that needed its room was
        cancelled."""
        self._reason = reason
        self._finish_queued = change.finish_queued
        self._replaced_by = change.model if change.kind == "load" else None
        self._on_change = on_change
        self._changed = asyncio.Event()
        self._kept = False
        self._why_ended = f"running requests had {limit_s:g} s to end"
        self._until: float | None = time.perf_counter() + limit_s
        """When the requests that are left end with an error (``time.perf_counter``); None without a time limit."""
        self._limit(change.wait)

    @property
    def state(self) -> Unloading:
        """How many requests are left, and how long they may take. May be read on any thread."""
        until = self._until
        return Unloading(
            answers_left=self.model.admission.active,
            seconds_left=None if until is None else max(0, math.ceil(until - time.perf_counter())),
            replaced_by=self._replaced_by,
        )

    def set_wait(self, wait: bool | None) -> None:
        """Let the requests end without a time limit, or end them now. None changes nothing, but the state is reported
        again, for the caller.
        """
        self._limit(wait)
        self._changed.set()
        if self.model.admission.active:
            self._on_change(self)

    def _limit(self, wait: bool | None) -> None:
        if wait is not None:
            self._until = None if wait else time.perf_counter()
            self._why_ended = "it was requested to stop running requests immediately"

    def keep(self) -> None:
        """Let the model stay in memory: it accepts requests again, and its running ones continue."""
        self._kept = True
        self._changed.set()

    async def run(self) -> None:
        """Accept no more requests, wait until the accepted ones have ended, and end the rest at the time limit."""
        model, admission = self.model, self.model.admission
        queued_error = NotLoadedError(f"{self._reason} before this request started; try again when a model is loaded")
        admission.close(None if self._finish_queued else queued_error)
        reported = 0
        # Reported before queued requests end, because the engine may be in a long step.
        if admission.active:
            reported = admission.active
            self._on_change(self)
        if not self._finish_queued:
            await model.end(queued_error, queued_only=True)
        while admission.active and not self._kept:
            self._changed.clear()
            if admission.active != reported:
                reported = admission.active
                self._on_change(self)
            left_s = None if self._until is None else self._until - time.perf_counter()
            if left_s is not None and left_s <= 0:
                break
            ended, changed = admission.until_at_most(admission.active - 1), self._changed.wait()
            tasks: list[asyncio.Task[object]] = [asyncio.create_task(ended), asyncio.create_task(changed)]
            try:
                await asyncio.wait(tasks, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
        if self._kept:
            admission.reopen()
        elif admission.active:
            admission.close(queued_error)
            message = f"{self._reason} before this request ended, because {self._why_ended}; try again when a model is"
            await model.end(NotLoadedError(f"{message} loaded"))

    def finish(self, outcome: int | BaseException) -> None:
        """Pass the result or the error to the callers. Only the first call has an effect."""
        _settle(self.done, outcome)


@dataclass(eq=False, kw_only=True)
class Change(Generic[Result]):
    """A load or an unload of a model. Any number of callers wait for ``done``."""

    kind: Literal["load", "unload"]
    name: str
    """The model as the caller names it."""
    done: asyncio.Future[Result] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    spec: LoadSpec | None = None
    """How the model is loaded; None for an unload."""
    files: ModelEntry | None = None
    """The files of the model, if the caller of the load knows them."""
    entry: ModelEntry | None = None
    """The model; None until it is found."""
    wait: bool | None = None
    """How long requests of the models that leave memory may take; see ``ModelManager.unload``."""
    finish_queued: bool = False
    """Whether their queued requests are also answered, instead of ending immediately."""
    stage: Literal["checking", "draining", "unloading", "loading"] = "checking"
    since: float = field(default_factory=time.perf_counter)
    drain: Drain | None = None
    """The model that leaves memory now."""
    cause: UnloadCause | None = None
    """Why a model is unloaded; None for a load."""
    callers: int = field(default=0, init=False)
    """Number of callers that wait for the result."""
    restores: bool = True
    """Whether models that have left memory are loaded again if this load fails or is cancelled."""
    _error: LabError | None = field(default=None, init=False)
    _part: asyncio.Future[Any] | None = field(default=None, init=False)
    """The current part of the work, which may take long."""

    @property
    def model(self) -> str:
        """Id of the model; its name until it is found."""
        return self.entry.id if self.entry is not None else self.name

    @property
    def names(self) -> set[str]:
        """The name that the caller used, and the id of the model when it is known."""
        return {self.name} | {entry.id for entry in (self.files, self.entry) if entry is not None}

    @property
    def beside(self) -> bool:
        """Whether it loads an encoder that stays in memory next to the main model, which it does not replace."""
        is_chat = self.entry is not None and self.entry.kind == "chat"
        return self.spec is not None and self.spec.pin is True and not is_chat

    @property
    def is_automatic(self) -> bool:
        """Whether it unloads a model that has no requests, because the model was idle or memory was short."""
        return self.cause in ("idle", "memory")

    @property
    def state(self) -> ModelChange:
        """May be read on any thread."""
        return ModelChange(kind=self.kind, model=self.model, stage=self.stage, since=self.since)

    def may_join(self, other: Change[Result]) -> bool:
        """Return whether this load can wait for another one, which loads the same files in the same way."""
        if self.entry is None or other.entry is None or self.spec is None or other.spec is None:
            return False
        same = self.entry.path == other.entry.path and same_options(self.spec, other.spec)
        # A pinned encoder takes the place of the main model only if it is loaded as such.
        return same and (self.beside or not other.beside)

    def set_wait(self, wait: bool | None) -> None:
        """Change how long running requests may take; None changes nothing."""
        self.wait = self.wait if wait is None else wait
        if self.drain is not None:
            self.drain.set_wait(wait)

    async def run(self, work: Awaitable[T]) -> T:
        """Run a part that may take long, and return its result. ``cancel`` cancels this part and waits for its end.

        Raises:
            LabError: the work was cancelled.
        """
        if self._error is not None:
            if asyncio.iscoroutine(work):
                work.close()
            raise self._error
        return await self.restore(work)

    async def restore(self, work: Awaitable[T]) -> T:
        """Run a part that loads a model again. It is cancelled only by a second ``cancel``."""
        self._part = part = asyncio.ensure_future(work)
        try:
            return await part
        except asyncio.CancelledError as exc:
            raise self._error or exc from None
        finally:
            self._part = None

    def cancel(self, error: LabError, *, restores: bool = True) -> None:
        """Cancel the load; its callers get this error.

        Args:
            restores: Whether models that have left memory are loaded again.
        """
        self._error = self._error or error
        self.restores = self.restores and restores
        if self._part is not None:
            self._part.cancel()

    async def result(self) -> Result:
        """Wait for the end, and return the result. Cancelling a caller does not cancel the work.

        Raises:
            LabError: the work has failed or was cancelled.
        """
        self.callers += 1
        try:
            return await asyncio.shield(self.done)
        finally:
            self.callers -= 1

    def finish(self, outcome: Result | BaseException) -> None:
        """Pass the result or the error to the callers. Only the first call has an effect."""
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


async def check_loadable(
    engine: Engine,
    entry: ModelEntry,
    spec: LoadSpec,
    *,
    room_bytes: int,
    budget: Budget,
    load_timeout_s: float | None,
) -> None:
    """Let an engine check a model before its load.

    Args:
        room_bytes: Memory that the model and its requests may use.

    Raises:
        UnusableModelError: see ``Engine.check``.
        OutOfMemoryError: the model does not fit. If it would fit without the memory pressure of other programs, the
            message names the pressure.
        NotLoadedError: the check did not end in time.
    """
    pressure, limit_bytes, usual_bytes = budget.pressure, budget.limit_bytes, budget.unlowered_bytes
    try:
        await within_limit(engine.check(entry, spec, room_bytes=room_bytes), entry, load_timeout_s)
    except OutOfMemoryError as exc:
        if pressure is None or engine.memory.is_of_device:
            raise
        room_bytes += usual_bytes - limit_bytes
        await within_limit(engine.check(entry, spec, room_bytes=room_bytes), entry, load_timeout_s)
        raise OutOfMemoryError(
            f"{entry.id} cannot be loaded while memory is short: {pressure}, so models may use "
            f"{limit_bytes / 1e9:.2f} GB instead of {usual_bytes / 1e9:.2f} GB; end other programs and load it again, "
            "or choose a smaller or more quantized model",
            param=exc.param,
        ) from exc


def load_progress(entry: ModelEntry) -> ModelEvent:
    """Return the step in which an engine begins to load a model."""
    engine = with_reason(engine_for(entry.format).name, entry.engine_reason)
    return ModelEvent(model=entry.id, stage="load", total_bytes=entry.size_bytes, message=f"on {engine}")


def load_report(model: LoadedModel[Any], entry: ModelEntry, load_s: float) -> LoadReport:
    """Return the report of a load, which took this many seconds. It warns of a draft model that is not smaller.

    Args:
        entry: The files that were to be loaded, with the reason for their engine.
    """
    draft, warnings = entry.draft, [model.entry.warning]
    if draft is not None and draft.size_bytes >= entry.size_bytes:
        sizes = f"{draft.size_bytes / 1e9:.2f} GB and {entry.size_bytes / 1e9:.2f} GB"
        text = f"the draft model {draft.id} is not smaller than {entry.id} ({sizes}), so its drafts save no time"
        warnings.insert(0, f"warning: {text}")
    return LoadReport(
        model=entry.id,
        load_time_ms=load_s * 1e3,
        vram_gb=model.memory_bytes / 1e9,
        slots=model.slots,
        context_length=model.context_length,
        engine=engine_for(entry.format).name,
        engine_reason=entry.engine_reason,
        kv_cache_dtype=model.spec.kv_cache_dtype,
        draft=draft.id if draft is not None else None,
        warning="; ".join(filter(None, warnings)),
    )


def same_options(spec: LoadSpec, other: LoadSpec) -> bool:
    """Return whether two loads of the same files load them in the same way."""
    ignored = {name: getattr(spec, name) for name in ("model", "engine", *OPTIONS_OF_STAY)}
    return spec == replace(other, **ignored)
