"""One line that measures: cases over targets, blocking or as they end, with progress, and kept if wanted."""

from __future__ import annotations

import asyncio
import queue
import signal
import threading
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from lmx_lab.bench.case import Case, Closed, Sweep, planned
from lmx_lab.bench.load_generator import SILENCE_S, CaseRun, Run
from lmx_lab.bench.provenance import provenance
from lmx_lab.bench.sample import Sample, frame
from lmx_lab.bench.storage import Recorder
from lmx_lab.bench.targets import Target, as_target
from lmx_lab.errors import InvalidRequestError
from lmx_lab.progress import counter

if TYPE_CHECKING:
    import pandas as pd

    from lmx_lab.engine import Engine

Measured: TypeAlias = "Target | str | Engine"
Plan: TypeAlias = Sweep | Case | Sequence[Case]
LOOK_S = 0.25
"""How often one who waits looks up: an interrupt that comes at the very moment a wait begins does not wake it."""
END_S = 5.0
"""How long requests that were cancelled may take to end."""


@dataclass(frozen=True, kw_only=True)
class RunProgress:
    """How far a run is, in requests, warm-up included."""

    done: int
    total: int
    sample: Sample
    """The latest."""


ProgressCallback: TypeAlias = Callable[[RunProgress], None]


def run(
    target: Measured | Sequence[Measured],
    plan: Plan,
    *,
    progress: bool | ProgressCallback = True,
    record: bool | Path | str = False,
    silence_s: float = SILENCE_S,
) -> pd.DataFrame:
    """Measure, and return a table with a row for each request, failed ones too; see ``summary``.

    Blocks: the requests are sent from a thread of its own. A lab that serves on the kernel's own loop cannot answer
    meanwhile; for that one, ``async for sample in samples(...)``, its engine as the target, or
    ``launch(loop="thread")``.

    Args:
        target: An address, an engine or a ``Target``; or several, which take turns, so that what drifts hits all alike.
        plan: A sweep, a case or several.
        progress: A bar, in a terminal (on standard error) or a notebook; or a function, called on this thread.
        record: Keep the run: in ``bench`` in the lab's home, or in a folder.
        silence_s: A target that says nothing for so long has failed that request.

    Returns:
        Ctrl-C ends what is under way, and what is there is returned, with ``.attrs["interrupted"]`` true; a second one
        does not wait. ``.attrs["provenance"]`` says what was measured with, ``.attrs["path"]`` where it is kept.

    Raises:
        InvalidRequestError: a target or a plan that is none, or a place where no run can be kept.
        ImportError: pandas is not installed.
    """
    frame(())
    cases, shared = _cases(plan), Run(silence_s=silence_s)
    targets = _targets(target)
    known = provenance(seeds=[case.seed for case in cases], run=shared.id)
    total = len(targets) * sum(case.warm_up + case.requests for case in cases)
    taken: list[Sample] = []
    recorder = Recorder(record if isinstance(record, Path | str) else None, provenance=known) if record else None
    worker = _Worker(lambda: _samples(targets, cases, shared))
    with recorder or nullcontext(), _watching(progress) as watch, _interruptible(worker):
        for sample in worker:
            taken.append(sample)
            if recorder is not None:
                recorder.keep(sample)
            watch(RunProgress(done=len(taken), total=total, sample=sample))
    table = frame(taken, known)
    table.attrs["interrupted"] = worker.cancelled
    table.attrs["path"] = str(recorder.path) if recorder is not None and recorder.path is not None else None
    return table


async def samples(
    target: Measured | Sequence[Measured],
    plan: Plan,
    *,
    silence_s: float = SILENCE_S,
    shared: Run | None = None,
) -> AsyncGenerator[Sample, None]:
    """What ``run`` measures, sample by sample as they end, on this loop. Closing it ends what is under way.

    Args:
        shared: For those who keep the samples: its ``id`` belongs into their provenance. ``silence_s`` is then its own.

    Raises:
        InvalidRequestError: a target or a plan that is none.
    """
    measured = _samples(_targets(target), _cases(plan), shared or Run(silence_s=silence_s))
    async with aclosing(measured) as ended:
        async for sample in ended:
            yield sample


async def _samples(targets: list[Target], cases: tuple[Case, ...], shared: Run) -> AsyncGenerator[Sample, None]:
    for repeat, case in planned(cases):
        sessions = [CaseRun(target, case, repeat=repeat, run=shared) for target in targets]
        for session in sessions:
            await session.prepare()
        for part in _parts(sessions, case, repeat):
            async with aclosing(part) as ended:
                async for sample in ended:
                    yield sample


def _parts(sessions: list[CaseRun], case: Case, repeat: int) -> Iterator[AsyncGenerator[Sample, None]]:
    """All warm-ups, then the requests, target by target; who begins changes with each repeat and turn.

    A single user's targets take turns request by request. Several users would wait for each other at each turn.
    """
    for session in sessions:
        yield session.warm_up()
    alone = case.concurrency == 1 and isinstance(case.arrival, Closed)
    step = 1 if alone and len(sessions) > 1 else case.requests
    for turn, first in enumerate(range(0, case.requests, step), repeat):
        numbers = range(first, min(first + step, case.requests))
        for session in sessions if turn % 2 == 0 else reversed(sessions):
            yield session.measure(numbers)


def _targets(given: Measured | Sequence[Measured]) -> list[Target]:
    several: Sequence[Any] = given if isinstance(given, list | tuple) else [given]
    targets = [as_target(one) for one in several]
    names = [target.name for target in targets]
    if not targets:
        raise InvalidRequestError("there is no target; give an address such as http://127.0.0.1:8400", param="target")
    if len(set(names)) < len(names):
        raise InvalidRequestError(
            f"two targets have one name ({', '.join(names):.200}); give names, as in ChatTarget(url, name='before')",
            param="target",
        )
    return targets


def _cases(plan: Plan) -> tuple[Case, ...]:
    given: Any = plan.cases() if isinstance(plan, Sweep) else (plan,) if isinstance(plan, Case) else plan
    cases = tuple(given) if isinstance(given, Iterable) else ()
    if not cases or not all(isinstance(case, Case) for case in cases):
        raise InvalidRequestError(
            f"{plan!r:.80} is no plan; give a Sweep, a Case or a list of cases, such as "
            "Case(prompt_tokens=256, output_tokens=64)",
            param="plan",
        )
    return cases


class _Worker:
    """A thread whose event loop measures, and hands over what has ended. Iterating starts it.

    At most the samples of the run wait to be taken.
    """

    def __init__(self, measure: Callable[[], AsyncGenerator[Sample, None]]) -> None:
        self.cancelled = False
        self._measure = measure
        self._ended: queue.SimpleQueue[Sample | BaseException | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._main, name="lmx-lab-bench", daemon=True)
        self._task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        # A signal handler may come while this very thread holds it.
        self._lock = threading.RLock()

    def __iter__(self) -> Iterator[Sample]:
        self._thread.start()
        try:
            while (item := self._next()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            self.cancel(asked=False)
            self._thread.join(END_S)

    def cancel(self, *, asked: bool = True) -> None:
        """End what is under way; from any thread and from signal handlers. Idempotent."""
        self.cancelled = self.cancelled or asked
        with self._lock:
            if self._loop is not None and self._task is not None:
                self._loop.call_soon_threadsafe(self._task.cancel)

    def _next(self) -> Sample | BaseException | None:
        while True:
            try:
                return self._ended.get(timeout=LOOK_S)
            except queue.Empty:
                continue

    def _main(self) -> None:
        failure: BaseException | None = None
        try:
            asyncio.run(self._work())
        except asyncio.CancelledError:
            pass
        except BaseException as exc:  # The caller's thread raises it.
            failure = exc
        self._ended.put(failure)

    async def _work(self) -> None:
        with self._lock:
            self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        try:
            if self.cancelled:
                return
            async with aclosing(self._measure()) as ended:
                async for sample in ended:
                    self._ended.put(sample)
        finally:
            with self._lock:
                self._loop = self._task = None


@contextmanager
def _interruptible(worker: _Worker) -> Iterator[None]:
    """Within the block the first Ctrl-C ends the work, and a second one is raised.

    A raised interrupt could land between a sample's end and its row; and in cells with ``await`` ipykernel's own
    handler raises nothing at all.
    """
    previous: Any = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(previous):
        yield
        return

    def interrupted(number: int, frame: object) -> None:
        if worker.cancelled:
            raise KeyboardInterrupt
        worker.cancel()

    signal.signal(signal.SIGINT, interrupted)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


@contextmanager
def _watching(progress: bool | ProgressCallback) -> Iterator[ProgressCallback]:
    if callable(progress):
        yield progress
    elif progress:
        with counter("bench") as shown:
            yield lambda step: shown.show(progress_text(step), step.done, step.total)
    else:
        yield lambda step: None


def progress_text(step: RunProgress) -> str:
    """What was measured last, on one line and without control characters: some of it is a server's."""
    sample = step.sample
    rate = f"{sample.decode_tok_s:.1f} tok/s" if sample.decode_tok_s else ""
    said = f"failed: {sample.error:.40}" if sample.error else rate
    text = " · ".join(part for part in (f"{sample.target} {sample.case}", said) if part)
    return "".join(char if char.isprintable() else "?" for char in text)
