"""Run cases against targets, blocking or as an async iterator, with progress and optional storage."""

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

from lmx_lab.bench.case import Case, Closed, Sweep, number_repeats
from lmx_lab.bench.load_generator import SILENCE_S, CaseRun, Run
from lmx_lab.bench.sample import RequestSample, frame
from lmx_lab.bench.storage import Recorder
from lmx_lab.bench.targets import Target, as_target
from lmx_lab.errors import InvalidRequestError
from lmx_lab.progress import counter
from lmx_lab.results.provenance import provenance

if TYPE_CHECKING:
    import pandas as pd

    from lmx_lab.engine import ModelManager

Measured: TypeAlias = "Target | str | ModelManager"
Plan: TypeAlias = Sweep | Case | Sequence[Case]
POLL_S = 0.25
"""Maximum duration of one wait. A signal that arrives just before a wait starts does not interrupt it."""
END_S = 5.0
"""Maximum time to wait until cancelled requests have ended."""


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
    frame(())
    cases, shared = _cases(plan), Run(silence_s=silence_s)
    targets = _targets(target)
    known = provenance(seeds=[case.seed for case in cases], run=shared.id)
    total = len(targets) * sum(case.warm_up + case.requests for case in cases)
    taken: list[RequestSample] = []
    recorder = Recorder(record if isinstance(record, Path | str) else None, provenance=known) if record else None
    worker = _Worker(lambda: _samples(targets, cases, shared))
    with recorder or nullcontext(), _progress_callback(progress) as report, _interruptible(worker):
        for sample in worker:
            taken.append(sample)
            if recorder is not None:
                recorder.add_or_log(sample)
            report(RunProgress(done=len(taken), total=total, sample=sample))
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
    measured = _samples(_targets(target), _cases(plan), shared or Run(silence_s=silence_s))
    async with aclosing(measured) as ended:
        async for sample in ended:
            yield sample


async def _samples(targets: list[Target], cases: tuple[Case, ...], shared: Run) -> AsyncGenerator[RequestSample, None]:
    for repeat, case in number_repeats(cases):
        case_runs = [CaseRun(target, case, repeat=repeat, run=shared) for target in targets]
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
    given: Any = plan.cases() if isinstance(plan, Sweep) else (plan,) if isinstance(plan, Case) else plan
    cases = tuple(given) if isinstance(given, Iterable) else ()
    if not cases or not all(isinstance(case, Case) for case in cases):
        raise InvalidRequestError(
            f"{plan!r:.80} is not a plan; give a Sweep, a Case or a list of cases, such as "
            "Case(prompt_tokens=256, output_tokens=64)",
            param="plan",
        )
    return cases


class _Worker:
    """A thread that measures on a separate event loop. Iterating starts it and yields the samples.

    The length of its queue is limited by the number of samples of the run.
    """

    def __init__(self, measure: Callable[[], AsyncGenerator[RequestSample, None]]) -> None:
        self.cancelled = False
        self._measure = measure
        self._ended: queue.SimpleQueue[RequestSample | BaseException | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._main, name="lmx-lab-bench", daemon=True)
        self._task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        # Reentrant, because a signal handler may run while its own thread holds the lock.
        self._lock = threading.RLock()

    def __iter__(self) -> Iterator[RequestSample]:
        self._thread.start()
        try:
            while (item := self._next()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            self.cancel(requested=False)
            self._thread.join(END_S)

    def cancel(self, *, requested: bool = True) -> None:
        """Cancel all requests. Idempotent; can be called on any thread and in signal handlers.

        Args:
            requested: Whether the user has requested it, so that the results are incomplete.
        """
        self.cancelled = self.cancelled or requested
        with self._lock:
            if self._loop is not None and self._task is not None:
                self._loop.call_soon_threadsafe(self._task.cancel)

    def _next(self) -> RequestSample | BaseException | None:
        while True:
            try:
                return self._ended.get(timeout=POLL_S)
            except queue.Empty:
                continue

    def _main(self) -> None:
        failure: BaseException | None = None
        try:
            asyncio.run(self._work())
        except asyncio.CancelledError:
            pass
        except BaseException as exc:  # Raised on the caller's thread.
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
    """Let the first Ctrl-C in the block cancel the worker, and the second one raise ``KeyboardInterrupt``.

    An exception of the default handler could be raised after a request has ended but before its sample is stored. In
    cells with ``await``, the handler of ipykernel raises no exception at all.
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
def _progress_callback(progress: bool | ProgressCallback) -> Iterator[ProgressCallback]:
    if callable(progress):
        yield progress
    elif progress:
        with counter("bench") as shown:
            yield lambda step: shown.show(progress_text(step), step.done, step.total)
    else:
        yield lambda step: None


def progress_text(step: RunProgress) -> str:
    """Return the latest sample as one line. Control characters are replaced, because parts of it come from a server."""
    sample = step.sample
    rate = f"{sample.decode_tok_s:.1f} tok/s" if sample.decode_tok_s else ""
    result = f"failed: {sample.error:.40}" if sample.error else rate
    text = " · ".join(part for part in (f"{sample.target} {sample.case}", result) if part)
    return "".join(char if char.isprintable() else "?" for char in text)
