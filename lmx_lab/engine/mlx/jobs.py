"""Queue the jobs that the engine thread computes between the steps of answers, and end each job exactly once."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Generic, Protocol, TypeVar

from lmx_lab.engine.admission import AdmissionControl, Permit
from lmx_lab.errors import EngineError, GenerationTimeoutError, LabError


class Job(Protocol):
    """A request that is computed on the engine thread."""

    permit: Permit
    arrived_at: float
    timeout_s: float
    started_at: float
    """0 until the computation starts."""
    done: Future[Any]


J = TypeVar("J", bound=Job)
Result = TypeVar("Result")


class JobQueue(Generic[J, Result]):
    """The jobs of one kind, in the order in which they are computed. Used on the engine thread.

    Args:
        remedy: What the caller of a job that reached its time limit can do.
    """

    def __init__(self, remedy: str) -> None:
        self._remedy = remedy
        self._jobs: list[J] = []
        """The next job comes first."""
        self._ended: list[tuple[J, Result | LabError]] = []
        """Ended jobs whose results ``deliver`` has not passed to their callers yet."""

    @property
    def idle(self) -> bool:
        return not self._jobs

    @property
    def running(self) -> list[J]:
        return [job for job in self._jobs if job.started_at]

    @property
    def queued(self) -> list[J]:
        return [job for job in self._jobs if not job.started_at]

    def counts(self) -> tuple[int, int]:
        """Return the numbers of running and of queued jobs."""
        return (len(self.running), len(self.queued)) if self._jobs else (0, 0)

    def add(self, job: J) -> None:
        """Queue a job."""
        # Marked as running, so that a caller that stops waiting does not cancel the future; ``cancel`` ends the job.
        job.done.set_running_or_notify_cancel()
        self._jobs.append(job)

    def cancel(self, job: J) -> None:
        """End a job whose result is no longer needed."""
        self._fail(job, EngineError("the request was cancelled"))

    def end_requests(self, admission: AdmissionControl, error: LabError, *, queued_only: bool) -> None:
        """End the jobs that hold permits of this admission control."""
        jobs = self.queued if queued_only else self._jobs
        self.end_all([job for job in jobs if job.permit.admission is admission], error)

    def end_all(self, jobs: Sequence[J], error: LabError) -> None:
        """End these jobs with an error."""
        for job in jobs:
            self._fail(job, error)

    def deliver(self) -> None:
        """Pass the results of ended jobs to their callers. Called after the snapshot was updated, so that the snapshot
        includes the work of each result that a caller has received.
        """
        for job, end in self._ended:
            if isinstance(end, LabError):
                job.done.set_exception(end)
            else:
                job.done.set_result(end)
        self._ended.clear()

    def _expire(self) -> None:
        now = time.perf_counter()
        for job in [job for job in self._jobs if now > job.arrived_at + job.timeout_s]:
            self._fail(job, GenerationTimeoutError.after(job.timeout_s, self._remedy))

    def _fail(self, job: J, error: LabError) -> None:
        if job in self._jobs:
            self._end(job, error)

    def _end(self, job: J, end: Result | LabError) -> None:
        self._jobs.remove(job)
        job.permit.release()
        self._ended.append((job, end))
