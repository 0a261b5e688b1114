"""A model in memory and all that is asked of it. Belongs to the engine's loop."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from lmx_lab.engine.llama_cpp.connection import RefusedError
from lmx_lab.engine.llama_cpp.model import Hosted
from lmx_lab.engine.llama_cpp.queue import Jobs
from lmx_lab.errors import EngineError, GenerationTimeoutError, LabError, NotLoadedError
from lmx_lab.values.models import ModelEntry

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(kw_only=True, eq=False)
class Place:
    hosted: Hosted
    jobs: Jobs
    texts: set[asyncio.Task[Any]] = field(default_factory=set)
    """Requests for embeddings and scores."""
    reading: int = 0
    """Requests on their way to being accepted."""
    watch: asyncio.Task[None] | None = None

    @property
    def entry(self) -> ModelEntry:
        return self.hosted.entry

    @property
    def busy(self) -> int:
        """Requests that have not ended."""
        return len(self.jobs.running) + len(self.jobs.queued) + len(self.texts) + self.reading

    def check_stays(self) -> None:
        """
        Raises:
            NotLoadedError: it is about to go.
        """
        if self.hosted.leaving is not None:
            raise NotLoadedError(f"{self.entry.id} is being unloaded; load a model first: POST /admin/models/load")

    async def read(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Prepare a request; the model may go meanwhile.

        Raises:
            NotLoadedError: it does.
            GenerationTimeoutError: it takes longer than the request may.
        """
        self.reading += 1
        self.hosted.progress_at = time.perf_counter()
        try:
            async with asyncio.timeout(timeout_s):
                result = await work
        except TimeoutError:
            raise GenerationTimeoutError(f"not begun after {timeout_s:g} s, the request's limit") from None
        except EngineError:
            self.check_stays()
            raise
        except RefusedError as exc:
            raise EngineError(f"llama.cpp did not read this request: {exc.message}") from exc
        except LabError:
            raise
        except Exception as exc:
            log.exception("a request for %s could not be begun", self.entry.id)
            raise EngineError(f"the request could not be begun: {type(exc).__name__}: {exc}") from exc
        finally:
            self.reading -= 1
        self.check_stays()
        return result

    def compute(self, work: Coroutine[Any, Any, T], ended: Callable[[], None]) -> Future[T]:
        """Begin what was accepted. Cancelling the future gives it up."""
        future: Future[T] = Future()
        task = asyncio.create_task(work, name=f"lmx-lab texts on {self.entry.id}")
        loop = asyncio.get_running_loop()
        self.texts.add(task)

        def hand_over(_: asyncio.Task[T]) -> None:
            self.texts.discard(task)
            self.hosted.progress_at = time.perf_counter()
            ended()
            if future.set_running_or_notify_cancel():
                _hand_over(task, future)

        def given_up(cancelled: Future[T]) -> None:
            if cancelled.cancelled() and not loop.is_closed():
                loop.call_soon_threadsafe(task.cancel)

        task.add_done_callback(hand_over)
        future.add_done_callback(given_up)
        return future

    async def drain(self, why: str, timeout_s: float, *, finish_queued: bool) -> None:
        """From now on it takes nothing; returns when what runs has ended, by itself or after the time."""
        self.hosted.leaving = why
        until = time.perf_counter() + timeout_s
        if not finish_queued:
            error = NotLoadedError(f"{why} before this request began; ask again when a model is loaded")
            self.jobs.end_all(self.jobs.queued, error)
        await self.jobs.wait(until=until)
        if self.texts:
            await asyncio.wait(list(self.texts), timeout=max(0.0, until - time.perf_counter()))
        await self.end_all(NotLoadedError(f"{why} before this request ended"))

    async def end_all(self, error: LabError) -> None:
        """Whatever waits or runs ends with this error."""
        jobs = self.jobs.queued + self.jobs.running
        self.jobs.end_all(jobs, error)
        for text in self.texts:
            text.cancel(error)
        if tasks := [*(job.task for job in jobs if job.task is not None), *self.texts]:
            await asyncio.wait(tasks)


def _hand_over(task: asyncio.Task[T], future: Future[T]) -> None:
    """The end of a task, as the future's."""
    try:
        future.set_result(task.result())
    except asyncio.CancelledError as exc:
        given = exc.args[0] if exc.args else None
        future.set_exception(given if isinstance(given, LabError) else EngineError("the work was given up"))
    except Exception as exc:
        future.set_exception(exc if isinstance(exc, LabError) else EngineError(f"{type(exc).__name__}: {exc}"))
