"""Load a model with a progress bar. If the caller is interrupted, cancel the load."""

from __future__ import annotations

import asyncio

from lmx_lab.backend import Backend, start_load
from lmx_lab.notebook.verbs import on_loop
from lmx_lab.progress import bar
from lmx_lab.values.models import LoadReport, LoadSpec


async def show_load(backend: Backend, spec: LoadSpec) -> LoadReport:
    """Load a model as a part of a verb (see ``notebook.verbs``).

    Raises:
        LabError: the load has failed.
    """
    load = await on_loop(start_load(backend, spec))
    try:
        # The bar is drawn in the caller's thread, because the output of another thread could appear in another cell.
        with bar(spec.model) as shown:
            while (step := await on_loop(load.step())) is not None:
                shown.update(step)
        return await on_loop(load.result())
    except (KeyboardInterrupt, asyncio.CancelledError):
        await on_loop(load.cancel())
        raise
