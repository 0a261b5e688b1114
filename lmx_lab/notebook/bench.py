"""``lab.bench``: the lab's speed as a table, blocking and to await."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from lmx_lab.bench.case import Arrival, Cache, Closed, Sweep
from lmx_lab.bench.load_generator import Run
from lmx_lab.bench.provenance import provenance
from lmx_lab.bench.runner import Measured, RunProgress, progress_text, samples
from lmx_lab.bench.sample import RequestSample, frame
from lmx_lab.bench.storage import Recorder
from lmx_lab.bench.targets import ChatTarget, Target, as_target
from lmx_lab.notebook.display import Showing
from lmx_lab.notebook.verbs import Verbs
from lmx_lab.portal import Interrupts, LoopThread
from lmx_lab.progress import counter

if TYPE_CHECKING:
    import pandas as pd

PROMPT_TOKENS, OUTPUT_TOKENS = 512, 128
"""What llama-bench measures by default."""
CLOSED = Closed()


class Measurement:
    """One run, as a context; ``step`` waits for what comes, ``table`` is what there is.

    The requests go over HTTP, as those of other programs, and from a thread of their own: a client on the loop that
    serves would note late what came in time, and figures would depend on the lab's mode. Whoever blocks for it keeps
    that loop going.
    """

    def __init__(self, targets: Sequence[Target], plan: Sweep, recorder: Recorder | None) -> None:
        frame(())  # Whether pandas is there, before anything is measured.
        cases = plan.cases()
        self.interrupted = False
        self._targets, self._plan, self._recorder = list(targets), plan, recorder
        self._seeds = [case.seed for case in cases]
        self._total = len(targets) * sum(case.warm_up + case.requests for case in cases)
        self._shared = Run()
        self._provenance: dict[str, Any] = {}
        self._taken: list[RequestSample] = []
        self._steps: asyncio.Queue[RunProgress | None] = asyncio.Queue()
        """At most one for each request of the run."""
        self._thread = LoopThread("lmx-lab-bench")

    def __enter__(self) -> Self:
        self._thread.start()
        self._work = self._thread.submit(self._measure())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.stop()

    def interrupt(self) -> None:
        """No further step is waited for."""
        self.interrupted = True

    async def step(self) -> RunProgress | None:
        """The next request that has ended; None after the last. On any loop.

        Raises:
            NotLoadedError: the first target has no model in memory.
            LabError: it does not answer, a target is none, or the run cannot be kept.
        """
        step = await asyncio.wrap_future(self._thread.submit(self._steps.get()))
        if step is None:
            await asyncio.wrap_future(self._work)
        return step

    def table(self) -> pd.DataFrame:
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
                        self._take(sample)
        finally:
            self._steps.put_nowait(None)

    def _take(self, sample: RequestSample) -> None:
        if self._recorder is not None:
            self._recorder.add_or_log(sample)
        self._taken.append(sample)
        self._steps.put_nowait(RunProgress(done=len(self._taken), total=self._total, sample=sample))


class Measuring(Verbs, Showing):
    """Verbs that measure, which the metrics panel shows."""

    @abstractmethod
    def _as_target(self) -> ChatTarget:
        """This lab, over HTTP."""

    @abstractmethod
    def _bench_folder(self) -> Path | None:
        """Where its runs are kept; None is the place of this user's."""

    def bench(
        self,
        *,
        prompt_tokens: int | Sequence[int] = PROMPT_TOKENS,
        output_tokens: int | Sequence[int] = OUTPUT_TOKENS,
        concurrency: int | Sequence[int] = 1,
        requests: int | None = None,
        warm_up: int = 1,
        arrival: Arrival | Sequence[Arrival] = CLOSED,
        cache: Cache | Sequence[Cache] = "cold",
        seed: int | Sequence[int] = 0,
        repeats: int = 1,
        compare: Measured | Sequence[Measured] = (),
        record: bool | Path | str = True,
    ) -> pd.DataFrame:
        """Measure the loaded model over HTTP, and return a table with a row for each request, failed ones too.

        ``lmx_lab.bench.summary`` makes medians with intervals of it, ``lmx_lab.bench.by_concurrency`` a plot. Beside
        what was seen here there is the server's own word: ``queue_ms``, ``server_ttft_ms`` and so on.

        Interrupting ends what is under way and returns what is there, with ``.attrs["interrupted"]`` true.

        Args:
            prompt_tokens, output_tokens, concurrency, requests, warm_up, arrival, cache, seed, repeats: as those of
                ``lmx_lab.bench.Sweep``.
            compare: Addresses of other chat-format servers, or targets of ``lmx_lab.bench``, which take turns with
                this lab.
            record: Keep the run, in ``bench`` in the lab's home or in a folder; ``.attrs["path"]`` says where.

        Raises:
            NotLoadedError: load a model first.
            InvalidRequestError: an argument that is none.
            ImportError: pandas is not installed.
        """
        plan = Sweep(
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            concurrency=concurrency,
            requests=requests,
            warm_up=warm_up,
            arrival=arrival,
            cache=cache,
            seed=seed,
            repeats=repeats,
        )
        with self._measurement(plan, compare, record) as run, self._progress() as show:
            try:
                # Around all steps: between two of them, in a cell with await, an interrupt would otherwise be lost.
                with Interrupts() as interrupts:
                    interrupts.aim(run.interrupt)
                    while not run.interrupted and (step := self._block(run.step())) is not None:
                        show(step)
            except KeyboardInterrupt:
                run.interrupt()
        return run.table()

    async def abench(
        self,
        *,
        prompt_tokens: int | Sequence[int] = PROMPT_TOKENS,
        output_tokens: int | Sequence[int] = OUTPUT_TOKENS,
        concurrency: int | Sequence[int] = 1,
        requests: int | None = None,
        warm_up: int = 1,
        arrival: Arrival | Sequence[Arrival] = CLOSED,
        cache: Cache | Sequence[Cache] = "cold",
        seed: int | Sequence[int] = 0,
        repeats: int = 1,
        compare: Measured | Sequence[Measured] = (),
        record: bool | Path | str = True,
    ) -> pd.DataFrame:
        """The same to await. Cancelling it ends what is under way; of a recorded run what is there can be loaded."""
        plan = Sweep(
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            concurrency=concurrency,
            requests=requests,
            warm_up=warm_up,
            arrival=arrival,
            cache=cache,
            seed=seed,
            repeats=repeats,
        )
        with self._measurement(plan, compare, record) as run, self._progress() as show:
            while (step := await self._hand_over(run.step())) is not None:
                show(step)
        return run.table()

    def _measurement(
        self, plan: Sweep, compare: Measured | Sequence[Measured], record: bool | Path | str
    ) -> Measurement:
        others: Sequence[Any] = compare if isinstance(compare, list | tuple) else [compare]
        targets = [self._as_target(), *map(as_target, others)]
        folder = record if isinstance(record, Path | str) else self._bench_folder()
        return Measurement(targets, plan, Recorder(folder, provenance={}) if record else None)

    @contextmanager
    def _progress(self) -> Iterator[Callable[[RunProgress], None]]:
        """Shows each step in a bar and in the metrics panel."""
        workbench = self.workbench
        with counter("bench") as bar:

            def show(step: RunProgress) -> None:
                text = progress_text(step)
                bar.show(text, step.done, step.total)
                workbench.job = f"Measuring, {step.done} of {step.total}: {text}"

            try:
                yield show
            finally:
                workbench.job = ""
