"""Compute traces on the engine thread, in chunks between the steps of answers, one request after the other."""

from __future__ import annotations

import time
import weakref
from dataclasses import dataclass

from lmx_lab.engine.cpu_blas import ThreadChoice
from lmx_lab.engine.mlx import memory
from lmx_lab.engine.mlx.capture.activations import Steps, TraceContext, compute_activations
from lmx_lab.engine.mlx.capture.lens import compute_attribution, compute_logit_lens
from lmx_lab.engine.mlx.capture.patching import compute_patching
from lmx_lab.engine.mlx.capture.points import HookPoints
from lmx_lab.engine.mlx.jobs import Job, JobQueue
from lmx_lab.engine.mlx.loop import Room
from lmx_lab.engine.mlx.weights import ChatWeights
from lmx_lab.errors import EngineError
from lmx_lab.values.tracing import Activations, Attribution, LogitLens, Patching, Trace, TraceWork

FIRST_TOKENS = 8
"""Number of tokens of the first step, before the speed is known."""
WEIGHT = 0.3
"""Weight of the newest step in the running mean."""
OUTLIER = 4
"""Limit of a measurement as a multiple of the mean, because another program may have used the processors briefly."""
GROWTH = 4
"""Maximum number of tokens of a step as a multiple of the largest step so far, because longer steps have not been
measured."""


@dataclass(kw_only=True, eq=False)
class TraceJob(Job[Trace]):
    """A request for a trace."""

    work: TraceWork
    tokens: list[int]
    clean: list[int]
    """Tokens of the clean text of ``Patching``."""
    chosen: list[int]
    """Ids of the tokens that ``Patching`` or ``Attribution`` names."""
    weights: weakref.ref[ChatWeights]
    """A weak reference, so that an object that refers to an ended request does not keep the weights in memory."""
    started_at: float = 0.0
    """When the computation began (``time.perf_counter``); 0 before."""


class TraceLoop(JobQueue[TraceJob, Trace]):
    """Computes the traces of all models in the order of arrival. Runs on the engine thread.

    Args:
        trace_bytes: See ``Settings``.
    """

    def __init__(self, threads: ThreadChoice, room: Room, *, trace_bytes: int) -> None:
        super().__init__()
        self._threads = threads
        self._room = room
        self._trace_bytes = trace_bytes
        self._steps: tuple[TraceJob, Steps] | None = None
        """The first job and its computation, after it has started."""
        self._token_s = 0.0
        """Running mean of the duration of a step for each of its tokens; 0 until it is known."""
        self._largest = FIRST_TOKENS

    def step(self, limit_s: float, *, busy: bool) -> None:
        """Compute for about ``limit_s``, at least one step.

        Each step may take ``limit_s``, so the last one begins before half of this time has passed.

        Args:
            busy: Whether answers are being generated. A job that does not fit in memory then waits.
        """
        started = time.perf_counter()
        while self._jobs:
            job = self._jobs[0]
            try:
                if self._steps is None and not self._begin(job, may_wait=busy):
                    break  # until the end of an answer frees memory
                self._advance(job, limit_s, busy=busy)
            except Exception as exc:
                self._fail([job], exc, work="the trace", remedy="trace a shorter text, or fewer hooks")
            if time.perf_counter() - started >= limit_s / 2:
                break

    def _begin(self, job: TraceJob, *, may_wait: bool) -> bool:
        """Start the computation of a job. Returns False if it has to wait for memory.

        Raises:
            LabError: the job cannot be computed.
        """
        model = job.weights()
        if model is None:
            raise EngineError(f"{job.model.entry.id} was unloaded before this request ended")
        needed = model.traits.footprint.running_bytes([len(job.tokens)], chunk=memory.MAX_CHUNK_TOKENS)
        needed -= model.traits.footprint.weights_bytes
        if (shortage := self._room.shortage(needed, tokens=len(job.tokens))) is not None:
            if may_wait:
                return False
            raise shortage
        job.started_at = job.started_at or time.perf_counter()
        if may_wait:
            # Its tokens may take longer than those of earlier jobs.
            self._largest = FIRST_TOKENS
        context = TraceContext(found=model.hook_points, limit_bytes=self._trace_bytes, text_of=model.vocabulary.text_of)
        match job.work:
            case Activations():
                steps = compute_activations(context, job.tokens, job.work)
            case LogitLens():
                steps = compute_logit_lens(context, job.tokens, job.work)
            case Patching():
                answer, other = job.chosen
                steps = compute_patching(context, job.tokens, job.clean, (answer, other), job.work)
            case Attribution():
                token, *others = job.chosen
                steps = compute_attribution(context, job.tokens, token, others[0] if others else None)
            case _:
                steps = _hook_names(context.found)
        next(steps)  # until it waits for the number of tokens of its first step
        self._steps = job, steps
        return True

    def _advance(self, job: TraceJob, limit_s: float, *, busy: bool) -> None:
        """Perform one step of the started computation."""
        assert self._steps is not None
        steps = self._steps[1]
        tokens = self._largest
        if self._token_s:
            tokens = max(1, min(tokens, int(limit_s / self._token_s)))
        if not busy:
            # The number of threads is not changed between steps of answers, because choosing it takes time.
            self._threads.prepare(len(job.tokens))
        started = time.perf_counter()
        try:
            computed = steps.send(tokens)
        except StopIteration as end:
            arrays, details = end.value
            model = job.weights()
            text_of = model.vocabulary.text_of if model is not None else str
            self._end(
                job,
                Trace(
                    model=job.model.entry.id,
                    tokens=tuple(job.tokens),
                    texts=tuple(text_of(token) for token in job.tokens),
                    arrays=arrays,
                    details=details,
                ),
            )
            return
        if computed:
            token_s = (time.perf_counter() - started) / computed
            self._token_s += (
                WEIGHT * (min(token_s, OUTLIER * self._token_s) - self._token_s) if self._token_s else token_s
            )
            self._largest = min(memory.MAX_CHUNK_TOKENS, max(self._largest, int(computed * GROWTH)))
        self._room.note_peak(memory.take_peak_bytes())

    def cancel(self, job: TraceJob) -> None:
        super().cancel(job)
        if self._steps is not None and self._steps[0] is job:
            self._steps[1].close()
            self._steps = None


def _hook_names(found: HookPoints) -> Steps:
    yield 0
    return {}, {"hooks": {name: list(size) for name, size in found.sizes.items()}}
