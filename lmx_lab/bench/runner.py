"""Run cases against targets, blocking or as an async iterator, with progress and optional storage."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing, nullcontext
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from lmx_lab.backend import Backend, load_or_cancel
from lmx_lab.bench.case import Case, Closed, number_repeats
from lmx_lab.bench.load_generator import SILENCE_S, CaseRun, Run
from lmx_lab.bench.sample import RequestSample, frame
from lmx_lab.bench.storage import Recorder
from lmx_lab.bench.summaries import show_as_summary
from lmx_lab.bench.targets import ChatTarget, EngineSide, Target, as_target, engine_sides
from lmx_lab.blocking import Portal, on_loop, run_steps
from lmx_lab.errors import InvalidRequestError, LabError, ModelBusyError, NotLoadedError, counted
from lmx_lab.portal import LoopThread
from lmx_lab.progress import ProgressBar, counter
from lmx_lab.results.provenance import provenance
from lmx_lab.values.models import LoadSpec

if TYPE_CHECKING:
    import pandas as pd

    from lmx_lab.engine import ModelManager

log = logging.getLogger(__name__)
Measured: TypeAlias = "Target | str | ModelManager"
Plan: TypeAlias = Case | Sequence[Case]
OUTPUT_WEIGHT = 10
"""How much longer a token of an answer takes than one of a prompt, to estimate the remaining time: with SmolLM2-135M on
two cores 4 times as long on llama.cpp, and 25 times on MLX."""


@dataclass(frozen=True, kw_only=True)
class RunProgress:
    """Progress of a run in requests, warm-up requests included."""

    done: int
    total: int
    sample: RequestSample | None
    """The latest sample; None while a model is loaded before the first one."""
    line: str = ""
    """A line for logs: about a round that has ended with this sample, or a load."""


ProgressCallback: TypeAlias = Callable[[RunProgress], None]


def run(
    target: Measured | Sequence[Measured],
    plan: Plan,
    *,
    progress: bool | ProgressCallback = True,
    record: bool | Path | str = False,
    silence_s: float = SILENCE_S,
    names: str | Sequence[str] = (),
) -> pd.DataFrame:
    """Run the plan and return a table with a row for each request, failed ones included. ``summary`` summarizes it.

    The call blocks, and the requests are sent from another thread. A lab in the same kernel answers meanwhile.

    Args:
        target: An address, an engine or a ``Target``; or several of them, which are measured in turns, so that drift of
            the machine affects all of them alike.
        plan: A sweep, a case or a sequence of cases.
        progress: True for a progress bar in a terminal (on standard error) or a notebook, and elsewhere a line after
            each round, which is one repeat of a case on all targets; or a function that is called on this thread.
        record: True to store the run in ``bench`` in the lab's home, or the folder for it.
        silence_s: Time in seconds without data after which a request fails.
        names: Names of the targets in tables and plots, in order, instead of their own.

    Returns:
        A table. After the first Ctrl-C, which cancels running requests, it has the requests that have ended, and
        ``.attrs["interrupted"]`` is true; a second Ctrl-C raises immediately. ``.attrs["rounds"]`` has the numbers of
        ``finished`` and ``planned`` rounds, ``.attrs["provenance"]`` describes the software and the machine, and
        ``.attrs["path"]`` is the stored file.

    Raises:
        InvalidRequestError: a target or the plan is not valid, or the run cannot be stored.
        MissingPackageError: pandas is not installed.
    """
    measurement = Measurement(target, plan, record=record, silence_s=silence_s, names=names)
    with counter("bench") if progress is True else nullcontext() as bar:

        def show(step: RunProgress) -> None:
            if callable(progress):
                progress(step)
            elif bar is not None:
                _show(bar, step)

        return run_steps(measurement.measured(show))


async def measure(
    backend: Backend,
    plan: Sequence[Case],
    *,
    compare: Measured | Sequence[Measured],
    record: bool | Path | str,
    engines: str | Sequence[str] = (),
    names: str | Sequence[str] = (),
) -> pd.DataFrame:
    """Measure the server of a lab, show the progress, and return the table of results. Has steps.

    The requests are sent over HTTP, like those of other programs. An interrupt stops running requests, and the table
    has the results so far.

    Args:
        compare: Other targets, which are measured alternately with the lab.
        record: Whether to store the run, or the folder for it.
        engines: Engines with which the lab's model is measured in turns. At the end, its own one loads it again.
        names: As for ``run``.
    """
    _ = backend.portal.thread  # Raises HostingError if the lab was stopped.
    others: Sequence[Any] = compare if isinstance(compare, list | tuple) else [compare]
    own: Sequence[Target] = [ChatTarget(backend.url, api_key=backend.api_key, name="lab")]
    before: LoadSpec | None = None
    if engines:
        records = (await on_loop(backend.portal, backend.models())).models
        loaded = [record for record in records if record.loaded and record.kind == "chat"]
        if not loaded:
            raise NotLoadedError(f"{backend.url} has no loaded chat model; load one first")
        main = min(loaded, key=lambda record: not record.main)
        before = LoadSpec(model=main.id, engine="auto" if main.engine == "echo" else main.engine)
        own = engine_sides(own[0], backend, main.id, [engines] if isinstance(engines, str) else list(engines))
    run = Measurement(
        [*own, *others], plan, record=record, folder=backend.home / "bench", required=not engines, names=names
    )
    try:
        with counter("bench", backend, doing="Measuring") as bar:
            return await run.measured(lambda step: _show(bar, step))
    finally:
        if before is not None:
            await on_loop(backend.portal, _load_again(backend, before))


async def _load_again(backend: Backend, spec: LoadSpec) -> None:
    """Load the lab's own model. A load that an interrupt has cancelled may still be ending, for at most 30 s."""
    for attempt in range(1, 61):
        try:
            await load_or_cancel(backend, spec)
            return
        except ModelBusyError as exc:
            if attempt == 60:
                log.warning("%s was not loaded again after the measurement: %s", spec.model, exc.message)
            await asyncio.sleep(0.5)
        except LabError as exc:
            log.warning("%s could not be loaded again after the measurement: %s", spec.model, exc.message)
            return


class Measurement:
    """One run: ``measured`` returns its table.

    The requests are sent from a separate thread: a client on the event loop of a server would receive its answers
    late, and the results would depend on this loop.

    Args:
        target, plan, record, silence_s: As for ``run``.
        folder: The folder to use if ``record`` is True; None selects ``bench`` in the home of the current settings.
        required: Whether the first target must have a model.
        names: As for ``run``.

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
        names: str | Sequence[str] = (),
    ) -> None:
        frame(())  # Raises MissingPackageError before the measurement.
        self._shared = Run(silence_s=silence_s)
        self._cases = _cases(plan)
        self._targets = _targets(target, names)
        self._total = len(self._targets) * sum(case.warm_up + case.requests for case in self._cases)
        self._recorder: Recorder | None = None
        if record:
            self._recorder = Recorder(record if isinstance(record, Path | str) else folder, provenance={})
        self._required = required
        self._provenance: dict[str, Any] = {}
        self._taken: list[RequestSample] = []
        self._missing = {
            (case.name, case.seed, repeat): len(self._targets) * (case.warm_up + case.requests)
            for repeat, case in number_repeats(self._cases)
        }
        """Number of missing samples of each round."""
        self._steps: asyncio.Queue[RunProgress | None] = asyncio.Queue()
        """At most one entry for each request of the run."""

    async def measured(self, show: Callable[[RunProgress], None]) -> pd.DataFrame:
        """Measure, and return the table of results. Has steps. An interrupt cancels running requests, and the table has
        the results so far.

        Args:
            show: Called after each request, in the thread of the caller.

        Raises:
            NotLoadedError: the first target is required, and has no model in memory.
            UnusableModelError: an engine that is to be measured cannot run the model.
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
        table.attrs["rounds"] = {"finished": self._finished, "planned": len(self._missing)}
        path = None if self._recorder is None else self._recorder.path
        table.attrs["path"] = None if path is None else str(path)
        show_as_summary(table)
        return table

    async def _measure(self) -> None:
        try:
            if self._required:
                await self._targets[0].describe()
            # Each engine loads the model once before the measurement, so that an engine that cannot run it is an error,
            # and downloads and conversions take no time later. The first one is measured first, so it is the last here.
            for side in reversed(self._targets):
                if isinstance(side, EngineSide):
                    line = f"loading {side.spec.model} on {side.spec.engine}"
                    self._steps.put_nowait(RunProgress(done=0, total=self._total, sample=None, line=line))
                    await side.load()
                    if side.failure is not None:
                        raise side.failure
            self._provenance = provenance(seeds=[case.seed for case in self._cases], run=self._shared.id)
            if self._recorder is not None:
                self._recorder.provenance = self._provenance
            measured = samples(self._targets, self._cases, shared=self._shared)
            began_s = time.perf_counter()
            with self._recorder or nullcontext():
                async with aclosing(measured) as ended:
                    async for sample in ended:
                        if self._recorder is not None:
                            self._recorder.add_or_log(sample)
                        self._taken.append(sample)
                        line = self._count(sample, time.perf_counter() - began_s)
                        done = len(self._taken)
                        self._steps.put_nowait(RunProgress(done=done, total=self._total, sample=sample, line=line))
        finally:
            self._steps.put_nowait(None)

    @property
    def _finished(self) -> int:
        """Number of finished rounds."""
        return sum(missing == 0 for missing in self._missing.values())

    def _count(self, sample: RequestSample, elapsed_s: float) -> str:
        """Count a sample. If it was the last one of its round, return a line about the round."""
        self._missing[sample.case, sample.seed, sample.repeat] -= 1
        if self._missing[sample.case, sample.seed, sample.repeat]:
            return ""
        work = {case.name: case.prompt_tokens + OUTPUT_WEIGHT * case.output_tokens for case in self._cases}
        done = sum(work[each.case] for each in self._taken)
        left = sum(work[name] * missing for (name, _, _), missing in self._missing.items())
        remaining = f", about {elapsed_s * left / done:.0f} s left" if left else ""
        return (
            f"round {self._finished} of {len(self._missing)} ({sample.case}, repeat {sample.repeat + 1}): "
            f"{len(self._taken)} of {counted(self._total, 'request')} in {elapsed_s:.0f} s{remaining}"
        )


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
    run = shared or Run(silence_s=silence_s)
    for targets, cases in _blocks(_targets(target), _cases(plan)):
        for side in targets:
            if isinstance(side, EngineSide):
                await side.load()
        for repeat, case in cases:
            case_runs = [CaseRun(target, case, repeat=repeat, run=run) for target in targets]
            for case_run in case_runs:
                await case_run.prepare()
            for part in _parts(case_runs, case, repeat):
                async with aclosing(part) as ended:
                    async for sample in ended:
                        yield sample


def _blocks(targets: list[Target], cases: Sequence[Case]) -> Iterator[tuple[list[Target], list[tuple[int, Case]]]]:
    """Yield targets that are measured together, with the cases and their repeats.

    A lab has a model in memory on one engine only. If a model is loaded with several engines, each repeat has a block
    for each target, with all cases. Every other repeat has the blocks in reverse, and so begins without a load.
    """
    numbered = list(number_repeats(cases))
    if not any(isinstance(target, EngineSide) for target in targets):
        yield targets, numbered
        return
    for repeat, part in itertools.groupby(sorted(numbered, key=itemgetter(0)), itemgetter(0)):
        of_repeat = list(part)
        for target in targets if repeat % 2 == 0 else reversed(targets):
            yield [target], of_repeat


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


def _targets(given: Measured | Sequence[Measured], names: str | Sequence[str] = ()) -> list[Target]:
    several: Sequence[Any] = given if isinstance(given, list | tuple) else [given]
    own_names: list[Any] = [names] if isinstance(names, str) else list(names)
    if wrong := [name for name in own_names if not (isinstance(name, str) and name.strip())]:
        raise InvalidRequestError(f"the name {wrong[0]!r:.80} of a side is not a text with letters", param="names")
    if len(own_names) > len(several):
        raise InvalidRequestError(
            f"there are more names ({', '.join(own_names):.200}) than sides to measure ({len(several)}); give at most "
            "one name for each side",
            param="names",
        )
    targets = [as_target(one, name) for one, name in itertools.zip_longest(several, own_names)]
    names = [target.name for target in targets]
    if not targets:
        raise InvalidRequestError("there is no target; give an address such as http://127.0.0.1:8400", param="target")
    if len(set(names)) < len(names):
        raise InvalidRequestError(
            f"two targets have the same name ({', '.join(names):.200}); give each its own with names= or --name",
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


def _show(bar: ProgressBar, step: RunProgress) -> None:
    bar.show(progress_text(step), step.done, step.total)
    if step.line:
        bar.print_line(step.line)


def progress_text(step: RunProgress) -> str:
    """Return the latest sample as one line. Control characters are replaced, because parts of it come from a server."""
    sample = step.sample
    if sample is None:
        return step.line
    rate = f"{sample.decode_tok_s:.1f} tok/s" if sample.decode_tok_s else ""
    result = f"failed: {sample.error:.40}" if sample.error else rate
    text = " · ".join(part for part in (f"{sample.target} {sample.case}", result) if part)
    return "".join(char if char.isprintable() else "?" for char in text)
