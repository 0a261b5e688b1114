"""Run cases against targets, blocking or as an async iterator, with progress and optional storage."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from lmx_lab.backend import Backend
from lmx_lab.bench.case import Case, Closed, number_repeats
from lmx_lab.bench.load_generator import SILENCE_S, CaseRun, Run
from lmx_lab.bench.sample import RequestSample, frame
from lmx_lab.bench.storage import Recorder
from lmx_lab.bench.targets import ChatTarget, Target, as_target
from lmx_lab.blocking import Portal, on_loop, run_steps
from lmx_lab.errors import InvalidRequestError
from lmx_lab.portal import LoopThread
from lmx_lab.progress import counter
from lmx_lab.results.provenance import provenance

if TYPE_CHECKING:
    import pandas as pd

    from lmx_lab.engine import ModelManager

Measured: TypeAlias = "Target | str | ModelManager"
Plan: TypeAlias = Case | Sequence[Case]


@dataclass(frozen=True, kw_only=True)
class RunProgress:
    """Progress of a run in requests, warm-up requests included."""

    done: int
    total: int
    sample: RequestSample
    """The latest sample."""


ProgressCallback: TypeAlias = Callable[[RunProgress], None]


def run(
    target: Measured | Sequence[Measured],
    plan: Plan,
    *,
    progress: bool | ProgressCallback = True,
    record: bool | Path | str = False,
    silence_s: float = SILENCE_S,
) -> pd.DataFrame:
    """Run the plan and return a table with a row for each request, failed ones included. ``summary`` summarizes it.

    The call blocks, and the requests are sent from another thread. A lab in the same kernel answers meanwhile.

    Args:
        target: An address, an engine or a ``Target``; or several of them, which are measured in turns, so that drift of
            the machine affects all of them alike.
        plan: A sweep, a case or a sequence of cases.
        progress: True for a progress bar in a terminal (on standard error) or a notebook, or a function that is called
            on this thread.
        record: True to store the run in ``bench`` in the lab's home, or the folder for it.
        silence_s: Time in seconds without data after which a request fails.

    Returns:
        A table. After the first Ctrl-C, which cancels running requests, it has the requests that have ended, and
        ``.attrs["interrupted"]`` is true; a second Ctrl-C raises immediately. ``.attrs["provenance"]`` describes the
        software and the machine, ``.attrs["path"]`` is the stored file.

    Raises:
        InvalidRequestError: a target or the plan is not valid, or the run cannot be stored.
        MissingPackageError: pandas is not installed.
    """
    measurement = Measurement(target, plan, record=record, silence_s=silence_s)
    with counter("bench") if progress is True else nullcontext() as bar:

        def show(step: RunProgress) -> None:
            if callable(progress):
                progress(step)
            elif bar is not None:
                bar.show(progress_text(step), step.done, step.total)

        return run_steps(measurement.measured(show))


async def measure(
    backend: Backend,
    plan: Sequence[Case],
    *,
    compare: Measured | Sequence[Measured],
    record: bool | Path | str,
) -> pd.DataFrame:
    """Measure the server of a lab, show the progress, and return the table of results. Has steps.

    The requests are sent over HTTP, like those of other programs. An interrupt stops running requests, and the table
    has the results so far.

    Args:
        compare: Other targets, which are measured alternately with the lab.
        record: Whether to store the run, or the folder for it.
    """
    others: Sequence[Any] = compare if isinstance(compare, list | tuple) else [compare]
    targets = [ChatTarget(backend.url, api_key=backend.api_key, name="lab"), *others]
    run = Measurement(targets, plan, record=record, folder=backend.home / "bench", required=True)
    _ = backend.portal.thread  # Raises HostingError if the lab was stopped.
    with counter("bench", backend, doing="Measuring") as bar:
        return await run.measured(lambda step: bar.show(progress_text(step), step.done, step.total))


class Measurement:
    """One run: ``measured`` returns its table.

    The requests are sent from a separate thread: a client on the event loop of a server would receive its answers
    late, and the results would depend on this loop.

    Args:
        target, plan, record, silence_s: As for ``run``.
        folder: The folder to use if ``record`` is True; None selects ``bench`` in the home of the current settings.
        required: Whether the first target must have a model.

    Raises:
        InvalidRequestError: a target or the plan is not valid.
        MissingPackageError: pandas is not installed.
    """

    def __init__(
        self,
        target: Measured | Sequence[Measured],
        plan: Plan,
        *,
        record: bool | Path | str = False,
        folder: Path | None = None,
        silence_s: float = SILENCE_S,
        required: bool = False,
    ) -> None:
        frame(())  # Raises MissingPackageError before the measurement.
        self._shared = Run(silence_s=silence_s)
        self._cases = _cases(plan)
        self._targets = _targets(target)
        self._total = len(self._targets) * sum(case.warm_up + case.requests for case in self._cases)
        self._recorder: Recorder | None = None
        if record:
            self._recorder = Recorder(record if isinstance(record, Path | str) else folder, provenance={})
        self._required = required
        self._provenance: dict[str, Any] = {}
        self._taken: list[RequestSample] = []
        self._steps: asyncio.Queue[RunProgress | None] = asyncio.Queue()
        """At most one entry for each request of the run."""

    async def measured(self, show: Callable[[RunProgress], None]) -> pd.DataFrame:
        """Measure, and return the table of results. Has steps. An interrupt cancels running requests, and the table has
        the results so far.

        Args:
            show: Called after each request, in the thread of the caller.

        Raises:
            NotLoadedError: the first target is required, and has no model in memory.
            LabError: the required target does not answer, it is not clear which model is to be measured, or the run
                cannot be stored.
        """
        thread = LoopThread("lmx-lab-bench")
        thread.start()
        portal = Portal(lambda: thread)
        try:
            work = thread.submit(self._measure())
            try:
                while (step := await on_loop(portal, self._steps.get())) is not None:
                    show(step)
                work.result()
                interrupted = False
            except KeyboardInterrupt:
                interrupted = True
        finally:
            thread.stop()  # This cancels running requests.
        table = frame(self._taken, self._provenance)
        table.attrs["interrupted"] = interrupted
        path = None if self._recorder is None else self._recorder.path
        table.attrs["path"] = None if path is None else str(path)
        return table

    async def _measure(self) -> None:
        try:
            if self._required:
                await self._targets[0].describe()
            self._provenance = provenance(seeds=[case.seed for case in self._cases], run=self._shared.id)
            if self._recorder is not None:
                self._recorder.provenance = self._provenance
            measured = samples(self._targets, self._cases, shared=self._shared)
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


async def samples(
    target: Measured | Sequence[Measured],
    plan: Plan,
    *,
    silence_s: float = SILENCE_S,
    shared: Run | None = None,
) -> AsyncGenerator[RequestSample, None]:
    """Run the plan on this event loop, and yield each sample when its request ends.

    Closing the generator cancels all requests.

    Args:
        target: As in ``run``.
        plan: As in ``run``.
        silence_s: Time in seconds without data after which a request fails.
        shared: State of the run. Its ``id`` should be in the provenance of a stored run, and its ``silence_s`` replaces
            the argument.

    Raises:
        InvalidRequestError: a target or the plan is not valid.
    """
    targets, cases, run = _targets(target), _cases(plan), shared or Run(silence_s=silence_s)
    for repeat, case in number_repeats(cases):
        case_runs = [CaseRun(target, case, repeat=repeat, run=run) for target in targets]
        for case_run in case_runs:
            await case_run.prepare()
        for part in _parts(case_runs, case, repeat):
            async with aclosing(part) as ended:
                async for sample in ended:
                    yield sample


def _parts(case_runs: list[CaseRun], case: Case, repeat: int) -> Iterator[AsyncGenerator[RequestSample, None]]:
    """Yield the warm-up of each target, then the requests. The order of targets changes with each repeat and turn.

    With a single user, targets take turns after each request. With several users this would make them wait for each
    other, so each target gets all its requests at once.
    """
    for case_run in case_runs:
        yield case_run.warm_up()
    single_user = case.concurrency == 1 and isinstance(case.arrival, Closed)
    step = 1 if single_user and len(case_runs) > 1 else case.requests
    for turn, first in enumerate(range(0, case.requests, step), repeat):
        numbers = range(first, min(first + step, case.requests))
        for case_run in case_runs if turn % 2 == 0 else reversed(case_runs):
            yield case_run.measure(numbers)


def _targets(given: Measured | Sequence[Measured]) -> list[Target]:
    several: Sequence[Any] = given if isinstance(given, list | tuple) else [given]
    targets = [as_target(one) for one in several]
    names = [target.name for target in targets]
    if not targets:
        raise InvalidRequestError("there is no target; give an address such as http://127.0.0.1:8400", param="target")
    if len(set(names)) < len(names):
        raise InvalidRequestError(
            f"two targets have the same name ({', '.join(names):.200}); give names with ChatTarget(url, name='before')",
            param="target",
        )
    return targets


def _cases(plan: Plan) -> tuple[Case, ...]:
    given: Any = (plan,) if isinstance(plan, Case) else plan
    cases = tuple(given) if isinstance(given, Iterable) else ()
    if not cases or not all(isinstance(case, Case) for case in cases):
        raise InvalidRequestError(
            f"{plan!r:.80} is not a plan; give a Sweep, a Case or a list of cases, such as "
            "Case(prompt_tokens=256, output_tokens=64)",
            param="plan",
        )
    return cases


def progress_text(step: RunProgress) -> str:
    """Return the latest sample as one line. Control characters are replaced, because parts of it come from a server."""
    sample = step.sample
    rate = f"{sample.decode_tok_s:.1f} tok/s" if sample.decode_tok_s else ""
    result = f"failed: {sample.error:.40}" if sample.error else rate
    text = " · ".join(part for part in (f"{sample.target} {sample.case}", result) if part)
    return "".join(char if char.isprintable() else "?" for char in text)
