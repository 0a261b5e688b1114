"""The accepted generations of the echo engine: queue, slots, pace, deadlines, ends. Belongs to the engine's loop.

All running answers advance in rounds. A round is one callback of the loop; where a pace is set, the answers of the same
pace share their rounds. While nothing runs or waits, nothing is scheduled.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from lmx_lab.engine.echo.model import EchoModel, Speaker
from lmx_lab.engine.echo.script import ScriptAnswer
from lmx_lab.engine.echo.vocabulary import END
from lmx_lab.engine.grammar.mask import Constraint
from lmx_lab.engine.requests import GenerationRequest
from lmx_lab.engine.scheduler import Scheduler, Verdict
from lmx_lab.engine.stream import Item, Mailbox, Outbox
from lmx_lab.engine.text.answer_shape import AnswerShape
from lmx_lab.engine.text.splitter import Piece, TextSplitter
from lmx_lab.errors import EngineError, GenerationTimeoutError, LabError
from lmx_lab.values.generation import Delta, FinishReason, GenerationReport, PromptProgress, PromptScores, TokenLogprob

log = logging.getLogger(__name__)
KEPT_SEQUENCES = 16
"""Ended requests whose tokens count as cached for requests that begin alike."""


@dataclass(kw_only=True)
class Totals:
    """Tokens since the engine started."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What all answers to one request have in common."""

    request: GenerationRequest
    prompt: list[int]
    text: list[int]
    """The tokens to say."""
    shape: AnswerShape | None
    max_tokens: int
    interval_s: float
    """Between two tokens."""
    timeout_s: float
    script: ScriptAnswer | None = None


@dataclass(kw_only=True, eq=False)
class Job:
    """One answer on its way."""

    prepared: Prepared
    model: EchoModel
    model_id: str
    constraint: Constraint | None
    mailbox: Mailbox
    arrived_at: float
    choice: int
    cached_tokens: int = 0
    output_tokens: int = 0
    admitted_at: float = 0.0
    decoding_at: float = 0.0
    first_token_at: float = 0.0
    due_at: float = 0.0
    """When its next token comes."""
    said: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    speaker: Speaker = field(init=False)
    splitter: TextSplitter[TokenLogprob] = field(init=False)

    def __post_init__(self) -> None:
        request = self.prepared.request
        self.speaker = Speaker(
            self.model, self.prepared.text, request.sampling, choice=self.choice, ignore_eos=request.ignore_eos
        )
        self.splitter = TextSplitter(self.model.vocabulary.decode, request.stop, self.prepared.shape)

    def begin(self, now: float) -> list[Item]:
        """It has a slot: its prompt is read at once."""
        prepared = self.prepared
        self.admitted_at = now
        total = len(prepared.prompt)
        items: list[Item] = [PromptProgress(done=total, total=total)]
        if prepared.request.score_prompt:
            top = prepared.request.top_logprobs or 0
            items.append(PromptScores(tokens=self.model.prompt_scores(prepared.prompt, top)))
        self.decoding_at = time.perf_counter()
        delay_s = prepared.script.delay_s if prepared.script is not None else 0.0
        self.due_at = self._on_grid(self.decoding_at + delay_s + prepared.interval_s)
        if not prepared.max_tokens:
            self.finish = "length"
        return items

    def step(self) -> list[Item]:
        """Say the next token; ``finish`` is set if it was the last."""
        request, constraint = self.prepared.request, self.constraint
        mask = None
        if constraint is not None and (mask := constraint.mask(self.model.vocabulary.size)) is None:
            if constraint.failure is not None:
                raise constraint.failure
            if constraint.complete:
                return self._end("stop")
        scores = self.speaker.scores(in_form=mask is not None) if request.top_logprobs is not None else None
        token = self.speaker.next(mask, forced=constraint.forced if constraint is not None else None)
        if constraint is not None:
            constraint.advance(token)
        self.output_tokens += 1
        self.said.append(token)
        self.first_token_at = self.first_token_at or time.perf_counter()
        ends = token == END and not request.ignore_eos
        entry = None
        if scores is not None:
            entry = self.speaker.logprob(scores, token, request.top_logprobs or 0)
            if token == END:
                entry = replace(entry, bytes=b"", ends=ends)
        piece = self.splitter.add(token, entry)
        items: list[Item] = [_delta(piece, 1)]
        if piece.stopped:
            self.finish = "stop"
        elif ends:
            items += self._end("stop")
        elif self.output_tokens >= self.prepared.max_tokens:
            items += self._end("length")
        else:
            self.due_at = self._on_grid(self.due_at + self.prepared.interval_s)
        return items

    def report(self, now: float, peak_memory_bytes: int) -> GenerationReport:
        assert self.finish is not None
        return GenerationReport(
            model=self.model_id,
            finish_reason=self.finish,
            prompt_tokens=len(self.prepared.prompt),
            cached_tokens=self.cached_tokens,
            output_tokens=self.output_tokens,
            reasoning_tokens=self.splitter.reasoning_tokens,
            queue_s=self.admitted_at - self.arrived_at,
            prefill_s=self.decoding_at - self.admitted_at,
            ttft_s=(self.first_token_at or now) - self.arrived_at,
            decode_s=now - self.decoding_at,
            peak_memory_bytes=peak_memory_bytes,
        )

    def _end(self, reason: FinishReason) -> list[Item]:
        piece = self.splitter.finish()
        if piece.stopped:
            reason = "stop"
        self.finish = "tool_calls" if self.splitter.called and reason == "stop" else reason
        return [_delta(piece, 0)]

    def _on_grid(self, due_at: float) -> float:
        """The round of all answers of this pace at or after a time."""
        interval = self.prepared.interval_s
        return math.ceil(due_at / interval - 1e-6) * interval if interval else due_at


def _delta(piece: Piece[TokenLogprob], tokens: int) -> Delta:
    return Delta(
        text=piece.text, tokens=tokens, logprobs=piece.entries, reasoning=piece.reasoning, tool_calls=piece.calls
    )


class Jobs:
    """
    Args:
        changed: Called after each round and each change of the queue.
    """

    def __init__(
        self, totals: Totals, *, slots: int, queue_limit: int, memory_bytes: int, changed: Callable[[], None]
    ) -> None:
        self._totals = totals
        self._scheduler: Scheduler[Job] = Scheduler(slots=slots, queue_limit=queue_limit, prefills=slots, lanes=slots)
        self._memory_bytes = memory_bytes
        self._changed = changed
        self._loop = asyncio.get_running_loop()
        self._outbox = Outbox()
        self._timer: asyncio.Handle | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self._sequences: list[list[int]] = []
        self.progress_at = time.perf_counter()

    @property
    def running(self) -> int:
        return len(self._scheduler.running)

    @property
    def queued(self) -> int:
        return len(self._scheduler.queued)

    @property
    def place_free_s(self) -> float:
        """In how long one of the running answers will have ended, at the latest."""
        running = self._scheduler.running
        if len(running) < self._scheduler.slots:
            return 1.0
        return max(1.0, min((it.prepared.max_tokens - it.output_tokens) * it.prepared.interval_s for it in running))

    def add(self, jobs: Sequence[Job]) -> None:
        """Take the answers to one request into the queue, all or none.

        Raises:
            QueueFullError: too many wait.
        """
        first = jobs[0]
        self._scheduler.add(
            jobs,
            tokens=len(first.prepared.prompt),
            deadline=first.arrived_at + first.prepared.timeout_s,
            retry_after_s=self.place_free_s,
        )
        self._idle.clear()
        self._schedule(0.0)

    def cancel(self, job: Job) -> None:
        """The reader has left."""
        if job in self._scheduler.running or job in self._scheduler.queued:
            self._remove(job)
            self._schedule(0.0)

    def end_all(self, error: LabError, *, queued_only: bool = False) -> None:
        for job in self._scheduler.queued if queued_only else self._scheduler.queued + self._scheduler.running:
            self._end(job, error)
        self._deliver()

    async def idle(self, timeout_s: float) -> None:
        """Return when all have ended, or after the time."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout_s)

    def _schedule(self, delay_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(delay_s, self._round) if delay_s > 0 else self._loop.call_soon(self._round)

    def _round(self) -> None:
        """Admit, say what is due, end what is over; then wait for the next time that something is due."""
        self._timer = None
        now = time.perf_counter()
        for job in self._scheduler.expired(now):
            self._end(
                job, GenerationTimeoutError(f"not finished after {job.prepared.timeout_s:g} s, the request's limit")
            )
        while (admitted := self._scheduler.admit(lambda _: Verdict.TAKE)) is not None:
            self._begin(admitted, now)
        for job in self._scheduler.running:
            if job.due_at <= now:
                self._step(job)
        self._deliver()
        if self._scheduler.running or self._scheduler.queued:
            self._schedule(self._next_at() - time.perf_counter())

    def _next_at(self) -> float:
        if self._scheduler.queued and self.running < self._scheduler.slots:
            return 0.0
        due = [job.due_at for job in self._scheduler.running]
        both = self._scheduler.running + self._scheduler.queued
        return min([*due, *(job.arrived_at + job.prepared.timeout_s for job in both)])

    def _begin(self, job: Job, now: float) -> None:
        self._scheduler.prefilled(job)
        job.cached_tokens = self._common(job.prepared.prompt)
        self._totals.prompt_tokens += len(job.prepared.prompt)
        self._totals.cached_tokens += job.cached_tokens
        for item in job.begin(now):
            self._outbox.post(job.mailbox, item)
        if job.finish is not None:
            self._finish(job)

    def _step(self, job: Job) -> None:
        try:
            items = job.step()
        except LabError as exc:
            self._end(job, exc)
            return
        except Exception as exc:
            log.exception("a generation failed")
            self._end(job, EngineError(f"the generation failed: {type(exc).__name__}: {exc}"))
            return
        self._totals.output_tokens += sum(item.tokens for item in items if isinstance(item, Delta))
        for item in items:
            self._outbox.post(job.mailbox, item)
        if job.finish is not None:
            self._finish(job)

    def _finish(self, job: Job) -> None:
        script = job.prepared.script
        if script is not None and script.error is not None:
            self._end(job, script.failure())
            return
        self._end(job, job.report(time.perf_counter(), self._memory_bytes))

    def _end(self, job: Job, end: GenerationReport | LabError) -> None:
        """The one place where a generation gets its end."""
        self._remove(job)
        self._outbox.post(job.mailbox, end)

    def _remove(self, job: Job) -> None:
        self._scheduler.remove(job)
        self._sequences = [[*job.prepared.prompt, *job.said], *self._sequences[: KEPT_SEQUENCES - 1]]
        if self._scheduler.idle:
            self._idle.set()

    def _deliver(self) -> None:
        self.progress_at = time.perf_counter()
        self._changed()
        for closed in self._outbox.send():
            for job in self._scheduler.queued + self._scheduler.running:
                if job.mailbox.loop is closed:
                    self._remove(job)
            self._changed()

    def _common(self, prompt: list[int]) -> int:
        """Tokens at the beginning that an ended request had too; the last one is always computed."""
        return min(max((_shared(prompt, other) for other in self._sequences), default=0), len(prompt) - 1)


def _shared(one: list[int], other: list[int]) -> int:
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
