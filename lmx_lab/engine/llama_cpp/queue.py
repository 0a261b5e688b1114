"""The accepted generations of one hosted model: queue, slots, deadlines, ends. Belongs to the engine's loop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from lmx_lab.engine.llama_cpp.answer import Answer
from lmx_lab.engine.llama_cpp.connection import RefusedError
from lmx_lab.engine.llama_cpp.model import Hosted
from lmx_lab.engine.llama_cpp.prepare import Prepared
from lmx_lab.engine.scheduler import Scheduler, Verdict
from lmx_lab.engine.stream import Item, Mailbox
from lmx_lab.errors import ContextLengthError, EngineError, GenerationTimeoutError, InvalidRequestError, LabError
from lmx_lab.values.generation import GenerationReport

log = logging.getLogger(__name__)
Post = Callable[[Mailbox, Item], None]
DIED_S = 1.0
"""From the end of a connection to that of its process, if that is why."""
WEIGHT = 0.2
"""Of the newest request in the mean time that a slot is held."""


@dataclass(kw_only=True)
class Totals:
    """Tokens since the engine started, as the snapshot shows them."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    def add(self, answer: Answer) -> None:
        self.prompt_tokens += answer.computed_tokens + answer.cached_tokens
        self.cached_tokens += answer.cached_tokens
        self.output_tokens += answer.output_tokens


@dataclass(kw_only=True, eq=False)
class Job:
    """One answer on its way."""

    prepared: Prepared
    choice: int
    answer: Answer
    mailbox: Mailbox
    arrived_at: float
    timeout_s: float
    admitted: asyncio.Event = field(default_factory=asyncio.Event)
    admitted_at: float = 0.0
    task: asyncio.Task[GenerationReport] | None = None
    error: LabError | None = None
    """What its end is, if it is cancelled from here; None where its reader has left."""

    def leave(self) -> None:
        """From any thread: nobody reads any more."""
        if self.task is not None and not (loop := self.task.get_loop()).is_closed():
            loop.call_soon_threadsafe(self.task.cancel)


class Jobs:
    def __init__(self, hosted: Hosted, totals: Totals, post: Post, *, queue_limit: int) -> None:
        self._hosted = hosted
        self._ended_totals = totals
        self._post = post
        slots = hosted.plan.slots
        self._scheduler: Scheduler[Job] = Scheduler(slots=slots, queue_limit=queue_limit, prefills=slots, lanes=slots)
        self._held_s: float | None = None
        """How long requests that have ended held their slot."""

    @property
    def running(self) -> list[Job]:
        return self._scheduler.running

    @property
    def queued(self) -> list[Job]:
        return self._scheduler.queued

    @property
    def place_free_s(self) -> float:
        """In how long one of the running requests will likely end: as those before it did."""
        running = self._scheduler.running
        if len(running) < self._scheduler.slots or self._held_s is None:
            return 1.0
        oldest_s = time.perf_counter() - min(job.admitted_at for job in running)
        return max(1.0, max(self._held_s, oldest_s) / len(running))

    def add(self, jobs: Sequence[Job]) -> None:
        """Take the answers to one request into the queue, all or none.

        Raises:
            QueueFullError: too many wait.
        """
        self._scheduler.add(jobs, tokens=len(jobs[0].prepared.tokens), deadline=0.0, retry_after_s=self.place_free_s)
        for job in jobs:
            job.task = asyncio.create_task(self._run(job), name=f"lmx-lab generation on {self._hosted.entry.id}")
            job.task.add_done_callback(partial(self._ended, job))
        self._admit()

    def end_all(self, jobs: Sequence[Job], error: LabError) -> None:
        for job in jobs:
            job.error = job.error or error
            if job.task is not None:
                job.task.cancel()

    async def wait(self, *, until: float) -> None:
        """Until all have ended, or it is ``until`` (of ``perf_counter``)."""
        tasks = [job.task for job in self.running + self.queued if job.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=max(0.0, until - time.perf_counter()))

    def _admit(self) -> None:
        while (job := self._scheduler.admit(self._judge)) is not None:
            job.admitted.set()

    def _judge(self, job: Job) -> Verdict:
        """Whether there is room in the cache that they share."""
        taken = sum(running.prepared.length for running in self._scheduler.running)
        fits = taken + job.prepared.length <= self._hosted.plan.total_tokens
        return Verdict.TAKE if fits or not self._hosted.plan.unified else Verdict.BLOCKED

    async def _run(self, job: Job) -> GenerationReport:
        limit = asyncio.get_running_loop().time() + job.arrived_at + job.timeout_s - time.perf_counter()
        try:
            async with asyncio.timeout_at(limit):
                await job.admitted.wait()
                job.admitted_at = time.perf_counter()
                self._post(job.mailbox, job.answer.begin(job.admitted_at))
                if not job.prepared.max_tokens:
                    job.answer.finish = "length"
                else:
                    await self._follow(job)
        except TimeoutError:
            raise GenerationTimeoutError(f"not finished after {job.timeout_s:g} s, the request's limit") from None
        return job.answer.report(time.perf_counter(), peak_memory_bytes=self._hosted.memory_bytes)

    async def _follow(self, job: Job) -> None:
        """Have it computed. What comes is read on the reader's own loop: a hop between threads for each token would
        cost as much as all else that is done for it.
        """
        body = json.dumps(job.prepared.body(job.choice, self._hosted)).encode()
        following = self._hosted.connection.follow(job.prepared.route, body, partial(self._take, job))
        try:
            future = asyncio.run_coroutine_threadsafe(following, job.mailbox.loop)
        except RuntimeError:
            following.close()
            raise EngineError("nobody is left to read this answer: its event loop is closed") from None
        try:
            await asyncio.wrap_future(future)
        except EngineError:
            # The end of a connection is noticed before that of its process, which is the reason.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._hosted.process.died.wait(), DIED_S)
                raise self._hosted.death() from None
            raise

    def _take(self, job: Job, event: dict[str, Any]) -> bool:
        """On the reader's loop; whether that was the last."""
        now = time.perf_counter()
        self._hosted.progress_at = now
        for item in job.answer.take(event, now):
            job.mailbox.deliver(item)
        return job.answer.finish is not None

    def _ended(self, job: Job, task: asyncio.Task[GenerationReport]) -> None:
        """The one place where a generation gets its end, however it came."""
        self._scheduler.remove(job)
        self._ended_totals.add(job.answer)
        now = self._hosted.progress_at = time.perf_counter()
        end: Item | None
        if task.cancelled():
            end = job.error
        elif (failure := task.exception()) is not None:
            end = job.error or _as_lab_error(failure, self._hosted)
        else:
            end = task.result()
            held_s = now - job.admitted_at
            self._held_s = held_s if self._held_s is None else (1 - WEIGHT) * self._held_s + WEIGHT * held_s
        if end is not None:
            self._post(job.mailbox, end)
        self._admit()


def _as_lab_error(failure: BaseException, hosted: Hosted) -> LabError:
    match failure:
        case LabError():
            return failure
        case RefusedError(kind="exceed_context_size_error"):
            return ContextLengthError(f"the prompt does not fit: {failure.message}; shorten it")
        case RefusedError(status=400):
            return InvalidRequestError(f"llama.cpp refuses this request: {failure.message}")
        case RefusedError():
            return EngineError(f"the generation failed inside llama.cpp: {failure.message}")
    log.error("a generation of %s failed", hosted.entry.id, exc_info=failure)
    return EngineError(f"the generation failed: {type(failure).__name__}: {failure}")
