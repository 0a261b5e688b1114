"""Convert texts to vectors and scores on any engine: the jobs of a model, and what is computed from rows of numbers.

Traces are jobs as well. A job runs beside the answers, and ends exactly once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from lmx_lab.engine.scheduler import Permit
from lmx_lab.errors import EngineError, LabError
from lmx_lab.values.outputs import EncodeReport

if TYPE_CHECKING:
    from lmx_lab.values.outputs import Vectors

T = TypeVar("T")


@dataclass(frozen=True)
class TextTokens:
    """The tokens of one text, or of a query with a document."""

    tokens: tuple[int, ...]
    second_start: int | None = None
    """Index where the second segment of a pair begins; None if the model has no segments."""
    skipped_tokens: int = 0
    """Number of leading tokens that are left out of pooling: the prompt, if the model's files specify this."""
    pair: tuple[str, str] | None = None
    """The query and the document, cut to the model's context; only for an engine that takes texts instead of tokens."""


@dataclass(kw_only=True, eq=False)
class TextJob:
    """The texts of one request. Times are seconds of ``time.perf_counter``."""

    texts: Sequence[TextTokens]
    raw: bool = False
    """Whether a reranker's scores are returned without its activation."""
    arrived_at: float
    started_at: float = 0.0
    """When the computation of the first text began; 0 before."""
    peak_memory_bytes: int = 0

    def start(self) -> None:
        """Record that the computation begins. Later calls have no effect."""
        self.started_at = self.started_at or time.perf_counter()

    def report(self, model: str) -> EncodeReport:
        """Return the report of the job, whose last text has just been computed."""
        return EncodeReport(
            model=model,
            texts=len(self.texts),
            tokens=sum(len(text.tokens) for text in self.texts),
            queue_s=self.started_at - self.arrived_at,
            compute_s=time.perf_counter() - self.started_at,
            peak_memory_bytes=self.peak_memory_bytes,
        )


@dataclass(frozen=True, kw_only=True)
class _Running:
    work: Coroutine[Any, Any, Any]
    permit: Permit
    is_started: Callable[[], bool]


class Jobs:
    """The jobs of one model that were accepted and have not ended. Belongs to the manager's loop."""

    def __init__(self) -> None:
        self._jobs: dict[asyncio.Task[Any], _Running] = {}
        self._errors: dict[asyncio.Task[Any], LabError] = {}
        """The errors of jobs that ``end`` has cancelled."""

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def running(self) -> int:
        """Number of jobs whose computation has begun."""
        return sum(job.is_started() for job in list(self._jobs.values()))

    def start(self, work: Coroutine[Any, Any, T], permit: Permit, *, is_started: Callable[[], bool]) -> asyncio.Task[T]:
        """Start the task of an accepted request. Cancelling the task ends the job.

        Args:
            is_started: Returns whether the computation has begun.
        """
        task = asyncio.create_task(self._run(work), name=f"lmx-lab job on {permit.admission.model}")
        self._jobs[task] = _Running(work=work, permit=permit, is_started=is_started)
        # Runs before the caller gets the result, and also if the task is cancelled before its first step.
        task.add_done_callback(self._forget)
        # Retrieved, because the caller may have left.
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        return task

    async def _run(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return await work
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or (error := self._errors.get(task)) is None:
                raise
            raise error from None
        except LabError:
            raise
        except Exception as exc:
            raise EngineError(f"{type(exc).__name__}: {exc}") from exc
        finally:
            if (task := asyncio.current_task()) is not None:
                self._forget(task)

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._errors.pop(task, None)
        if (job := self._jobs.pop(task, None)) is not None:
            job.work.close()  # It has ended, or was cancelled before its first step.
            job.permit.release()

    async def end(self, error: LabError, *, queued_only: bool = False) -> None:
        """End the jobs with an error, and wait until they have ended.

        Args:
            queued_only: Whether only jobs end whose computation has not begun.
        """
        # A task that is cancelled before its first step would not raise the error.
        await asyncio.sleep(0)
        tasks = [task for task, job in self._jobs.items() if not (queued_only and job.is_started())]
        for task in tasks:
            self._errors[task] = error
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


def shorten(vectors: Vectors, dimensions: int | None) -> Vectors:
    """Return the first components of each vector, normalized to length 1 (arXiv 2205.13147)."""
    if dimensions is None or dimensions == vectors.shape[1]:
        return vectors
    return _normalized(vectors[:, :dimensions])


def cosines(rows: Vectors) -> Vectors:
    """Return the cosine similarity of the first row and each of the other rows."""
    rows = _normalized(rows)
    # Computed row by row, because the rounding of a BLAS depends on the position of a row, and equal documents must
    # get equal scores.
    scores: Vectors = (rows[1:] * rows[0]).sum(axis=1)
    return scores


def _normalized(rows: Vectors) -> Vectors:
    # Imported here, because numpy takes 30 ms to import, and chat models need no vectors.
    import numpy as np

    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    normalized: Vectors = rows / np.maximum(lengths, np.finfo(np.float32).tiny)
    return normalized
