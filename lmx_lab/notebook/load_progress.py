"""Load or unload a model and show the progress. If the caller is interrupted, cancel a load, and continue an unload."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lmx_lab.backend import Backend, RunningChange, start_load, start_unload
from lmx_lab.notebook.verbs import on_loop
from lmx_lab.progress import ProgressBar, bar, status
from lmx_lab.values.models import LoadReport, LoadSpec, ModelEntry
from lmx_lab.wire.admin import ModelEvent

if TYPE_CHECKING:
    from lmx_lab.notebook.local import LocalBackend


class FreedMemory(float):
    """Memory that an unload has released, in GB (10^9 bytes)."""

    def __repr__(self) -> str:
        return f"{self:.2f} GB freed"


async def show_load(backend: Backend, spec: LoadSpec) -> LoadReport:
    """Load a model as a part of a verb (see ``notebook.verbs``).

    Raises:
        LabError: the load has failed.
    """
    load = await on_loop(start_load(backend, spec))
    try:
        # The bar is drawn in the caller's thread, because the output of another thread could appear in another cell.
        with bar(spec.model) as shown:
            before = None
            while (step := await on_loop(load.step())) is not None:
                if step.unloading is not None:
                    _show_unloading(shown, f"{step.model} is {step.unloading}", step, before)
                else:
                    # The load begins when the previous model is unloaded.
                    shown.update(step.model_copy(update={"stage": "load"}) if step.stage == "unloaded" else step)
                before = step
            report = await on_loop(load.result())
            if before is not None:  # In notebooks, the last text stays.
                shown.show("loaded", before.total_bytes or 0, before.total_bytes)
        return report
    except (KeyboardInterrupt, asyncio.CancelledError):
        await on_loop(load.cancel())
        raise


async def show_check(backend: LocalBackend, spec: LoadSpec, *, beside: Sequence[ModelEntry]) -> ModelEntry:
    """Check as a part of a verb that a model can be loaded, and show the progress of its download.

    Args:
        beside: See ``ModelManager.check``.

    Raises:
        LabError: it cannot be loaded.
    """

    async def start() -> RunningChange[ModelEntry]:
        work = functools.partial(backend.check, spec, beside=beside)
        return RunningChange(lambda report: work(progress=report), f"check {spec.model:.80}")

    check = await on_loop(start())
    try:
        with bar(spec.model) as shown:
            while (step := await on_loop(check.step())) is not None:
                shown.update(step)
            return await on_loop(check.result())
    except (KeyboardInterrupt, asyncio.CancelledError):
        await on_loop(check.cancel())
        raise


async def show_unload(backend: Backend, model: str | None, *, wait: bool | None) -> float:
    """Unload a model as a part of a verb, and show how many answers are left. Returns the freed memory in GB.

    Raises:
        LabError: the unload has failed.
    """
    unload: RunningChange[float] | None = None
    try:
        unload = await on_loop(start_unload(backend, model, wait=wait))
        with status() as shown:
            before = None
            while (step := await on_loop(unload.step())) is not None:
                if step.unloading is not None:
                    _show_unloading(shown, f"{step.model}: {step.unloading}", step, before)
                    before = step
            freed = FreedMemory(await on_loop(unload.result()))
            if before is not None:
                shown.show(f"{before.model}: unloaded, {freed:.2f} GB freed", 0, None)
        return freed
    except KeyboardInterrupt:
        step = unload.unloading if unload is not None else None
        state = f"{step.model} is still {step.unloading}" if step is not None else "the unload continues"
        raise KeyboardInterrupt(
            f"{state}: lab.unload(wait=False) stops the answers, lab.unload(wait=True) lets them finish"
        ) from None


def _show_unloading(shown: ProgressBar, text: str, step: ModelEvent, before: ModelEvent | None) -> None:
    shown.show(text, 0, None)
    state, last = step.unloading, before.unloading if before is not None else None
    # Not each second: only when the number of answers, or the kind of the time limit, has changed.
    if state is not None and (
        last is None
        or (state.answers_left, state.seconds_left is None) != (last.answers_left, last.seconds_left is None)
    ):
        shown.print_line(text)
