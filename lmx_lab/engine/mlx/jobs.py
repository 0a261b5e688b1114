"""Queue the jobs that the engine thread computes between the steps of answers.

Permits, deadlines and the end of each request are those of ``texts.Jobs`` on the manager's loop.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from lmx_lab.engine.mlx import memory
from lmx_lab.engine.model import LoadedModel
from lmx_lab.errors import EngineError, LabError

log = logging.getLogger(__name__)

Result = TypeVar("Result")


@dataclass(kw_only=True, eq=False)
class Job(Generic[Result]):
    """A request that is computed on the engine thread."""

    model: LoadedModel[Any]
    done: Future[Result] = field(default_factory=Future)


J = TypeVar("J", bound=Job[Any])


class JobQueue(Generic[J, Result]):
    """The jobs of one kind, in the order in which they are computed. Used on the engine thread."""

    def __init__(self) -> None:
        self._jobs: list[J] = []
        """The next job comes first."""

    @property
    def idle(self) -> bool:
        return not self._jobs

    @property
    def jobs(self) -> Sequence[J]:
        return tuple(self._jobs)

    def add(self, job: J) -> None:
        """Queue a job, unless its caller has left already."""
        # Marked as running, so that a caller that leaves later does not cancel the future; ``cancel`` ends the job.
        if job.done.set_running_or_notify_cancel():
            self._jobs.append(job)

    def cancel(self, job: J) -> None:
        """Stop computing a job, whose result is not read. Ignored if it has ended."""
        if job in self._jobs:
            self._jobs.remove(job)

    def end_all(self, jobs: Sequence[J], error: LabError) -> None:
        """End these jobs with an error."""
        for job in jobs:
            self._end(job, error)

    def _end(self, job: J, end: Result | LabError) -> None:
        """End a job with its result or an error. Ignored if it has ended."""
        if job not in self._jobs:
            return
        self.cancel(job)
        if isinstance(end, LabError):
            # Without its traceback, whose frames may refer to weights.
            job.done.set_exception(end.with_traceback(None))
        else:
            job.done.set_result(end)

    def _fail(self, jobs: Sequence[J], exc: Exception, *, work: str, remedy: str) -> None:
        """End jobs with the error of a step. The model stays loaded.

        Args:
            work: What was computed, for messages.
            remedy: What to do if memory was short.
        """
        if isinstance(exc, LabError):
            # An error for the caller, for example because of values that are not finite.
            self.end_all(jobs, type(exc)(exc.message, param=exc.param))
            return
        # Logged as text, because the frames of an exception may refer to weights.
        log.error("%s could not be computed:\n%s", work, "".join(traceback.format_exception(exc)))
        exc.__traceback__ = None
        is_short = memory.is_out_of_memory(exc)
        reason = f"out of memory ({exc}); {remedy}" if is_short else f"{type(exc).__name__}: {exc}"
        self.end_all(jobs, EngineError(f"{work} could not be computed: {reason}"))
        memory.release()
