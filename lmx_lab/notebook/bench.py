"""Run the measurement of ``lab.bench``, and show its progress."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmx_lab.bench.case import Case
from lmx_lab.bench.runner import Measured, Measurement, progress_text
from lmx_lab.bench.targets import ChatTarget
from lmx_lab.blocking import on_loop
from lmx_lab.notebook.lab_server import LabServer
from lmx_lab.panels.workbench import Workbench
from lmx_lab.progress import counter

if TYPE_CHECKING:
    import pandas as pd


async def measure(
    server: LabServer,
    plan: Sequence[Case],
    *,
    compare: Measured | Sequence[Measured],
    record: bool | Path | str,
    workbench: Workbench,
) -> pd.DataFrame:
    """Measure the server of a lab, show the progress, and return the table of results. Has steps.

    The requests are sent over HTTP, like those of other programs. An interrupt stops running requests, and the table
    has the results so far.

    Args:
        compare: Other targets, which are measured alternately with the lab.
        record: Whether to store the run, or the folder for it.
    """
    others: Sequence[Any] = compare if isinstance(compare, list | tuple) else [compare]
    targets = [ChatTarget(server.url, api_key=server.api_key, name="lab"), *others]
    run = Measurement(targets, plan, record=record, folder=server.bench_folder, required=True)
    with run, counter("bench") as bar:
        try:
            while (step := await on_loop(server.portal, run.step())) is not None:
                text = progress_text(step)
                bar.show(text, step.done, step.total)
                workbench.job = f"Measuring, {step.done} of {step.total}: {text}"
        except KeyboardInterrupt:
            run.cancel()
        finally:
            workbench.job = ""
    return run.table()
