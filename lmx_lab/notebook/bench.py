"""Run the measurement of ``lab.bench``: send requests over HTTP from a separate thread, and collect the results."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing, nullcontext
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from lmx_lab.bench.case import Sweep
from lmx_lab.bench.load_generator import Run
from lmx_lab.bench.provenance import provenance
from lmx_lab.bench.runner import Measured, RunProgress, progress_text, samples
from lmx_lab.bench.sample import RequestSample, frame
from lmx_lab.bench.storage import Recorder
from lmx_lab.bench.targets import ChatTarget, Target, as_target
from lmx_lab.notebook.lab_server import LabServer
from lmx_lab.notebook.verbs import on_loop
from lmx_lab.panels.workbench import Workbench
from lmx_lab.portal import LoopThread
from lmx_lab.progress import counter

if TYPE_CHECKING:
    import pandas as pd


class Measurement:
    """One run, as a context manager. ``step`` waits for the next result; ``table`` returns the results so far.

    The requests are sent over HTTP, like those of other programs, and from a separate thread: a client on the event
    loop of the server would receive its answers late, and the results would depend on the lab's loop.

    Raises:
        MissingPackageError: pandas is not installed.
    """

    def __init__(self, targets: Sequence[Target], plan: Sweep, recorder: Recorder | None) -> None:
        frame(())  # Raises MissingPackageError before the measurement.
        cases = plan.cases()
        self.interrupted = False
        self._targets, self._plan, self._recorder = list(targets), plan, recorder
        self._seeds = [case.seed for case in cases]
        self._total = len(targets) * sum(case.warm_up + case.requests for case in cases)
        self._shared = Run()
        self._provenance: dict[str, Any] = {}
        self._taken: list[RequestSample] = []
        self._steps: asyncio.Queue[RunProgress | None] = asyncio.Queue()
        """At most one entry for each request of the run."""
        self._thread = LoopThread("lmx-lab-bench")

    def __enter__(self) -> Self:
        self._thread.start()
        self._work = self._thread.submit(self._measure())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.stop()

    async def step(self) -> RunProgress | None:
        """Wait until the next request has ended, and return the progress; None after the last request. Can be awaited
        on any loop.

        Raises:
            NotLoadedError: the first target has no model in memory.
            LabError: the first target does not answer, a target is invalid, or the run cannot be stored.
        """
        step = await asyncio.wrap_future(self._thread.submit(self._steps.get()))
        if step is None:
            await asyncio.wrap_future(self._work)
        return step

    def table(self) -> pd.DataFrame:
        """Return the results so far, one row for each request."""
        table = frame(self._taken, self._provenance)
        table.attrs["interrupted"] = self.interrupted
        path = None if self._recorder is None else self._recorder.path
        table.attrs["path"] = None if path is None else str(path)
        return table

    async def _measure(self) -> None:
        try:
            await self._targets[0].describe()
            self._provenance = provenance(seeds=self._seeds, run=self._shared.id)
            measured = samples(self._targets, self._plan, shared=self._shared)
            if self._recorder is not None:
                self._recorder.provenance = self._provenance
            with self._recorder or nullcontext():
                async with aclosing(measured) as ended:
                    async for sample in ended:
                        if self._recorder is not None:
                            self._recorder.add_or_log(sample)
                        self._taken.append(sample)
                        progress = RunProgress(done=len(self._taken), total=self._total, sample=sample)
                        self._steps.put_nowait(progress)
        finally:
            self._steps.put_nowait(None)


async def measure(
    server: LabServer,
    plan: Sweep,
    *,
    compare: Measured | Sequence[Measured],
    record: bool | Path | str,
    workbench: Workbench,
) -> pd.DataFrame:
    """Measure the server of a lab, show the progress, and return the table of results. Runs as a verb.

    An interrupt stops running requests, and the table has the results so far.

    Args:
        compare: Other targets, which are measured alternately with the lab.
        record: Whether to store the run, or the folder for it; by default that of the server.

    Raises:
        InvalidRequestError: a target is invalid.
    """
    others: Sequence[Any] = compare if isinstance(compare, list | tuple) else [compare]
    targets = [ChatTarget(server.url, api_key=server.api_key, name="lab"), *map(as_target, others)]
    folder = record if isinstance(record, Path | str) else server.bench_folder
    run = Measurement(targets, plan, Recorder(folder, provenance={}) if record else None)
    with run, counter("bench") as bar:
        try:
            while (step := await on_loop(run.step())) is not None:
                text = progress_text(step)
                bar.show(text, step.done, step.total)
                workbench.job = f"Measuring, {step.done} of {step.total}: {text}"
        except KeyboardInterrupt:
            run.interrupted = True
        finally:
            workbench.job = ""
    return run.table()
