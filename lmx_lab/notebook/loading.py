"""Load or unload a model and show the progress. If the caller is interrupted, cancel a load, and continue an unload."""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar, Unpack

from lmx_lab.arguments import model_name
from lmx_lab.backend import Backend, Progress, load_or_cancel
from lmx_lab.blocking import Portal, on_loop
from lmx_lab.broadcast import Feed
from lmx_lab.errors import format_bytes
from lmx_lab.progress import ProgressBar, bar, status
from lmx_lab.values.models import (
    LoadOptions,
    LoadReport,
    LoadSpec,
    ModelEntry,
    ModelEvent,
    TimeToLive,
)
from lmx_lab.values.plan import LoadPlan
from lmx_lab.wire.admin import (
    KeepAnswer,
    KeepRequest,
    UnloadRequest,
    load_spec,
)
from lmx_lab.wire.errors import validated

if TYPE_CHECKING:
    from lmx_lab.notebook.local import LocalBackend


T = TypeVar("T")


class FreedMemory(float):
    """Memory that an unload has released, in GB (10^9 bytes)."""

    def __repr__(self) -> str:
        return f"{format_bytes(self * 1e9)} freed"


class RunningChange(Generic[T]):
    """A load or unload and its steps, for a caller that shows the progress. Deleting it does not end the work.

    Args:
        start: Starts the work, which reports its steps to the given function.
        shown_s: A load whose engine reports no progress is shown if it takes longer than this.
    """

    def __init__(
        self,
        start: Callable[[Progress], Coroutine[Any, Any, T]],
        name: str,
        *,
        shown_s: float = 1.0,
    ) -> None:
        self._shown_s = shown_s
        self._loop = asyncio.get_running_loop()
        steps: Feed[ModelEvent] = Feed()
        self._steps = steps.subscribe()
        self.unloading: ModelEvent | None = None
        """The last event of the stage ``unloading``, until the model is unloaded."""
        self._loading: ModelEvent | None = None
        """The event of the stage ``load``, until it is returned."""
        self._task = asyncio.create_task(start(steps.publish), name=name)
        self._task.add_done_callback(lambda _: steps.close())
        # The exception is retrieved, because the caller may have stopped waiting; asyncio would log it.
        self._task.add_done_callback(lambda work: work.cancelled() or work.exception())

    async def step(self) -> ModelEvent | None:
        """Return the next step of a load or unload; None at the end. While an unload waits for running answers, it
        returns a step with the remaining time each second. The stage ``load`` is returned only if it takes longer than
        ``shown_s``.
        """
        while True:
            limit_s = self._shown_s if self._loading is not None else 1.0 if self.unloading is not None else None
            try:
                step = await asyncio.wait_for(anext(self._steps), limit_s)
            except StopAsyncIteration:
                return None
            except TimeoutError:
                if (loading := self._loading) is not None:
                    self._loading = None
                    return loading
                assert self.unloading is not None
                step, state = self.unloading, self.unloading.unloading
                if state is not None and state.seconds_left is not None:
                    later = replace(state, seconds_left=max(0, state.seconds_left - 1))
                    step = replace(step, unloading=later)
            self._loading = None
            if step.unloading is not None or self.unloading is not None:
                self.unloading = step if step.unloading is not None else None
                return step
            if step.done_bytes is not None:
                return step
            if step.stage == "load":
                self._loading = step

    async def cancel(self) -> None:
        """Cancel the work, and wait until it has ended."""
        self._task.cancel()
        await asyncio.wait([self._task])

    def close(self) -> None:
        """Cancel the work after its caller was interrupted before it received this object. Thread-safe."""
        asyncio.run_coroutine_threadsafe(self.cancel(), self._loop)

    async def result(self) -> T:
        """Wait for the end.

        Raises:
            LabError: the load or unload has failed.
        """
        return await asyncio.shield(self._task)


async def plan(backend: Backend, model: str | os.PathLike[str], **options: Unpack[LoadOptions]) -> LoadPlan:
    """Return what a load of a model would use in memory, and whether it fits now, after models in memory were unloaded,
    or not on the server's machine. Only headers of files are read; those of a model that is not on disk are read from
    the hub. Nothing is loaded or downloaded.

    Args:
        options: ``LoadOptions``, as in ``load``; ``wait``, ``pin`` and ``ttl_s`` have no effect.

    Raises:
        AdminForbiddenError: the server allows this only to callers on its machine.
        LabError: there is no such model, or it cannot be loaded with these options; the message contains the reason.
    """
    return await on_loop(backend.portal, backend.plan(load_spec(model_name(model), options)))


async def load(backend: Backend, model: str | os.PathLike[str], **options: Unpack[LoadOptions]) -> LoadReport:
    """Load a model by its id or path, and show the progress.

    It becomes the main model, and replaces the loaded one. If ``launch(resident=...)`` keeps several models in memory,
    it replaces the one that was used least recently, if necessary.

    A model that is not on disk is downloaded if the server runs in this process. A path is a path on the server's
    machine. Interrupting this call cancels the load, unless other callers wait for it, and the previous model is loaded
    again.

    Args:
        options: ``LoadOptions``: ``engine="mlx"``, the engine that must run the model; ``wait``, whether running
            answers of the replaced model may finish, as in ``unload``; ``pin`` and ``ttl_s``, as in ``keep``.

    Raises:
        AdminForbiddenError: the server allows this only to callers on its machine.
        LabError: the load has failed; the message contains the reason, and the model that is now loaded.
    """
    return await show_load(backend.portal, backend, load_spec(model_name(model), options))


async def show_load(portal: Portal, backend: Backend, spec: LoadSpec) -> LoadReport:
    """Load a model and show the progress. Has steps on the portal, as those of ``lmx_lab.blocking``.

    Raises:
        LabError: the load has failed.
    """

    async def start() -> RunningChange[LoadReport]:
        work = functools.partial(load_or_cancel, backend, spec)
        return RunningChange(lambda report: work(progress=report), f"load {spec.model:.80}")

    return await _show(portal, start, spec.model, end="loaded")


async def show_check(
    portal: Portal, backend: LocalBackend, spec: LoadSpec, *, beside: Sequence[ModelEntry]
) -> ModelEntry:
    """Check that a model can be loaded, and show the progress of its download. Has steps, as ``show_load``.

    Args:
        beside: See ``ModelManager.check``.

    Raises:
        LabError: it cannot be loaded.
    """

    async def start() -> RunningChange[ModelEntry]:
        work = functools.partial(backend.check, spec, beside=beside)
        return RunningChange(lambda report: work(progress=report), f"check {spec.model:.80}")

    return await _show(portal, start, spec.model)


async def _show(
    portal: Portal, start: Callable[[], Coroutine[Any, Any, RunningChange[T]]], model: str, *, end: str = ""
) -> T:
    """Show the progress of a load or a check, and return its result. Has steps.

    Args:
        end: The text that stays in notebooks.
    """
    running = await on_loop(portal, start())
    try:
        # The bar is drawn in the caller's thread, because the output of another thread could appear in another cell.
        with bar(model) as shown:
            before = None
            while (step := await on_loop(portal, running.step())) is not None:
                if step.unloading is not None:
                    _show_unloading(shown, f"{step.model} is {step.unloading}", step, before)
                else:
                    # The load begins when the previous model is unloaded.
                    shown.update(replace(step, stage="load") if step.stage == "unloaded" else step)
                before = step
            result = await on_loop(portal, running.result())
            if before is not None and end:
                shown.show(end, before.total_bytes or 0, before.total_bytes)
        return result
    except (KeyboardInterrupt, asyncio.CancelledError):
        await on_loop(portal, running.cancel())
        raise


async def unload(backend: Backend, model: str | os.PathLike[str] | None = None, *, wait: bool | None = None) -> float:
    """Unload a model, and show how many running answers are left; returns the freed memory in GB (10^9 bytes).

    Interrupting this call does not cancel the unload. Another call joins it, and can change ``wait``. While a model
    is being loaded, its load is cancelled instead, and the previous model is loaded again; but with the name of the
    previous model, ``wait`` changes only how long the load waits for the answers of that model.

    Args:
        model: The model to unload, or whose load is cancelled; None for the main model, or any load.
        wait: Whether running answers may finish: True without a time limit, False not at all, None within the
            setting ``drain_s``, 30 s by default. Answers that have not ended by then raise ``NotLoadedError``.

    Raises:
        InvalidRequestError: the model of this name is pinned, or not loaded.
        ModelBusyError: a model is being loaded in place of the named one.
    """
    name, portal = None if model is None else model_name(model), backend.portal
    request = validated(UnloadRequest, {"model": name, "wait": wait})

    async def start() -> RunningChange[float]:
        work = functools.partial(backend.unload, request.model, wait=request.wait)
        return RunningChange(lambda report: work(progress=report), "unload")

    running: RunningChange[float] | None = None
    try:
        running = await on_loop(portal, start())
        with status() as shown:
            before = None
            while (step := await on_loop(portal, running.step())) is not None:
                if step.unloading is not None:
                    _show_unloading(shown, f"{step.model}: {step.unloading}", step, before)
                    before = step
            freed = FreedMemory(await on_loop(portal, running.result()))
            if before is not None:
                shown.show(f"{before.model}: unloaded, {freed!r}", 0, None)
        return freed
    except KeyboardInterrupt:
        step = running.unloading if running is not None else None
        state = f"{step.model} is still {step.unloading}" if step is not None else "the unload continues"
        raise KeyboardInterrupt(
            f"{state}: lab.unload(wait=False) stops the answers, lab.unload(wait=True) lets them finish"
        ) from None


async def keep(
    backend: Backend,
    model: str | os.PathLike[str],
    *,
    pin: bool | None = None,
    ttl_s: TimeToLive | None = None,
) -> KeepAnswer:
    """Change how long a model stays in memory. Arguments that are None change nothing.

    Args:
        model: A model in memory.
        pin: Whether it stays until it is unloaded by request: no other load replaces it, and it is loaded again if its
            engine loses it.
        ttl_s: Seconds without requests after which it is unloaded, or ``"never"``.

    Raises:
        InvalidRequestError: the model is not in memory, or a value is invalid.
    """
    request = validated(KeepRequest, {"model": model_name(model), "pin": pin, "ttl_s": ttl_s})
    return await on_loop(backend.portal, backend.keep(request.model, pin=request.pin, ttl_s=request.ttl_s))


def _show_unloading(shown: ProgressBar, text: str, step: ModelEvent, before: ModelEvent | None) -> None:
    shown.show(text, 0, None)
    state, last = step.unloading, before.unloading if before is not None else None
    # Not each second: only when the number of answers, or the kind of the time limit, has changed.
    if state is not None and (
        last is None
        or (state.answers_left, state.seconds_left is None) != (last.answers_left, last.seconds_left is None)
    ):
        shown.print_line(text)
