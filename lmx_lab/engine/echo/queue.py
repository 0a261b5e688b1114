"""Run the accepted generations of the echo engine, from the queue to their end. Belongs to the engine's loop.

All running answers advance in rounds. A round is one callback of the loop. If a speed is set, answers with the same
speed share their rounds. While no request is running or queued, no callback is scheduled.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from lmx_lab.engine.admission import AdmissionControl, Permit
from lmx_lab.engine.echo.model import END, AnswerSampler, EchoModel
from lmx_lab.engine.echo.script import ScriptAnswer
from lmx_lab.engine.grammar.mask import Constraint
from lmx_lab.engine.requests import GenerationRequest
from lmx_lab.engine.scheduler import Scheduler, Verdict
from lmx_lab.engine.stream import Item, Mailbox, Outbox
from lmx_lab.engine.text.channels import ChannelFormat
from lmx_lab.engine.text.splitter import SplitText, TextSplitter, read_start
from lmx_lab.errors import EngineError, GenerationTimeoutError, LabError
from lmx_lab.values.engine import TokenTotals
from lmx_lab.values.outputs import Delta, FinishReason, GenerationReport, PromptProgress, PromptScores, TokenLogprob
from lmx_lab.values.timeline import StepKind

log = logging.getLogger(__name__)
PAUSE_CHECK_S = 0.05
"""Interval between two checks whether a request should be paused for a waiting one."""
KEPT_SEQUENCES = 16
"""Number of ended requests whose tokens count as cached for requests that begin with the same tokens."""


@dataclass(frozen=True, kw_only=True)
class PreparedEcho:
    """The data that all answers to one request share."""

    request: GenerationRequest
    prompt: list[int]
    """Tokens of the prompt, followed by those of ``start``."""
    start: list[int]
    """Tokens with which the answer begins."""
    text: list[int]
    """Token ids of the answer, unless sampling or an enforced format changes it."""
    named_tokens: tuple[int, ...]
    """Ids of the request's ``logprob_tokens``."""
    channel_format: ChannelFormat | None
    max_tokens: int
    interval_s: float
    """Time between two tokens."""
    timeout_s: float
    script: ScriptAnswer | None = None


@dataclass(kw_only=True, eq=False)
class EchoGeneration:
    """One answer from its acceptance to its end. Times are seconds of ``time.perf_counter``."""

    prepared: PreparedEcho
    model: EchoModel
    model_id: str
    constraint: Constraint | None
    mailbox: Mailbox
    permit: Permit
    arrived_at: float
    choice: int
    """Index of the answer among those to the same request."""
    cached_tokens: int = 0
    output_tokens: int = 0
    admitted_at: float = 0.0
    decoding_at: float = 0.0
    first_token_at: float = 0.0
    due_at: float = 0.0
    """When the next token is due."""
    tokens: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    sampler: AnswerSampler = field(init=False)
    splitter: TextSplitter[TokenLogprob] = field(init=False)

    def __post_init__(self) -> None:
        request = self.prepared.request
        self.sampler = AnswerSampler(
            self.model,
            self.prepared.text,
            request.sampling,
            choice=self.choice,
            ignore_eos=request.ignore_eos,
            min_tokens=request.min_tokens,
        )
        self.splitter = TextSplitter(
            self.model.vocabulary.decode, request.stop, self.prepared.channel_format, min_tokens=request.min_tokens
        )
        for token in self.prepared.start:
            self.sampler.record(token)
        if self.constraint is not None:
            self.constraint.begin(self.prepared.start)

    def begin(self, now: float) -> list[Item]:
        """Start the generation in a slot, and return the items for its reader. The prompt is computed immediately."""
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
        if start := prepared.start:
            is_complete = start[-1] == END and not prepared.request.ignore_eos
            delta, self.finish = read_start(
                self.splitter, start, ids=start, finish="stop" if is_complete else self.finish
            )
            items.append(delta)
        return items

    def step(self) -> list[Item]:
        """Generate the next token, and return the items for the reader. Sets ``finish`` if it was the last token."""
        request, constraint = self.prepared.request, self.constraint
        mask = None
        if constraint is not None and (mask := constraint.mask(self.model.vocabulary.size)) is None:
            if constraint.failure is not None:
                raise constraint.failure
            if constraint.complete:
                return self._end("stop")
        scores = self.sampler.scores(constrained=mask is not None) if request.top_logprobs is not None else None
        token = self.sampler.next(mask, forced=constraint.forced if constraint is not None else None)
        if constraint is not None:
            constraint.advance(token)
        self.output_tokens += 1
        self.tokens.append(token)
        self.first_token_at = self.first_token_at or time.perf_counter()
        ends = token == END and not request.ignore_eos
        entry = None
        if scores is not None:
            entry = self.sampler.logprob(scores, token, request.top_logprobs or 0, self.prepared.named_tokens)
            if token == END:
                entry = replace(entry, bytes=b"", ends=ends)
        piece = self.splitter.add(token, entry)
        items: list[Item] = [_delta(piece, (token,))]
        if piece.stopped:
            self.finish = "tool_calls" if self.splitter.has_called else "stop"
        elif ends:
            items += self._end("stop")
        elif self.output_tokens >= self.prepared.max_tokens:
            items += self._end("length")
        else:
            self.due_at = self._on_grid(self.due_at + self.prepared.interval_s)
        return items

    def report(self, now: float, peak_memory_bytes: int) -> GenerationReport:
        """Return the report of the generation, which has ended."""
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
            stop_sequence=self.splitter.stop_string,
        )

    def _end(self, reason: FinishReason) -> list[Item]:
        piece = self.splitter.finish()
        if piece.stopped:
            reason = "stop"
        self.finish = "tool_calls" if self.splitter.has_called and reason == "stop" else reason
        return [_delta(piece)]

    def _on_grid(self, due_at: float) -> float:
        """Return the time of the first round of this speed at or after a time."""
        interval = self.prepared.interval_s
        return math.ceil(due_at / interval - 1e-6) * interval if interval else due_at


def _delta(piece: SplitText[TokenLogprob], ids: tuple[int, ...] = ()) -> Delta:
    return Delta(
        text=piece.text,
        tokens=len(ids),
        logprobs=piece.entries,
        reasoning=piece.reasoning,
        tool_calls=piece.calls,
        ids=ids,
    )


class EchoQueue:
    """Runs the accepted generations.

    Args:
        totals: Counts the tokens of all generations.
        on_change: Called after each round and after each change of the queue.
    """

    def __init__(self, totals: TokenTotals, *, slots: int, memory_bytes: int, on_change: Callable[[], None]) -> None:
        self._totals = totals
        self._scheduler: Scheduler[EchoGeneration] = Scheduler(slots=slots, prefills=slots, lanes=slots)
        self._memory_bytes = memory_bytes
        self._on_change = on_change
        self._loop = asyncio.get_running_loop()
        self._outbox = Outbox()
        self._timer: asyncio.Handle | None = None
        self._rounds = 0
        """Number of rounds so far, which answers that advance together have in common."""
        self._sequences: list[list[int]] = []

    @property
    def running(self) -> int:
        return len(self._scheduler.running)

    @property
    def queued(self) -> int:
        return len(self._scheduler.queued)

    @property
    def slot_free_s(self) -> float:
        """Upper bound of the time until one of the running answers has ended, at least 1 s."""
        running = self._scheduler.running
        if len(running) < self._scheduler.slots:
            return 1.0
        return max(
            1.0,
            min(
                (generation.prepared.max_tokens - generation.output_tokens) * generation.prepared.interval_s
                for generation in running
            ),
        )

    def add(self, generations: Sequence[EchoGeneration]) -> None:
        """Queue the answers to one request."""
        first = generations[0]
        deadline = first.arrived_at + first.prepared.timeout_s
        tokens, now = len(first.prepared.prompt), time.perf_counter()
        self._scheduler.add(
            generations, tokens=tokens, deadline=deadline, now=now, client=first.prepared.request.caller.client
        )
        self._schedule(0.0)

    def cancel(self, generation: EchoGeneration) -> None:
        """Cancel a generation that is no longer read. May be called from any thread."""
        # If the loop is closed, all generations have ended.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._cancel, generation)

    def _cancel(self, generation: EchoGeneration) -> None:
        if generation in self._scheduler.running or generation in self._scheduler.queued:
            self._remove(generation)
            self._schedule(0.0)

    def end(self, admission: AdmissionControl, error: LabError, *, queued_only: bool = False) -> None:
        """End the generations that hold permits of this admission control with an error."""
        scheduler = self._scheduler
        for generation in scheduler.not_started if queued_only else scheduler.queued + scheduler.running:
            if generation.permit.admission is admission:
                self._end(generation, error)
        self._deliver()

    def end_all(self, error: LabError) -> None:
        """End all generations with an error."""
        for generation in self._scheduler.queued + self._scheduler.running:
            self._end(generation, error)
        self._deliver()

    def _schedule(self, delay_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(delay_s, self._round) if delay_s > 0 else self._loop.call_soon(self._round)

    def _round(self) -> None:
        """Start queued generations, generate the tokens that are due, and schedule the next round."""
        self._timer = None
        self._rounds += 1
        now = time.perf_counter()
        for late in self._scheduler.expired(now):
            self._end(late, GenerationTimeoutError.after(late.prepared.timeout_s))
        self._scheduler.pause(lambda _: True, now)
        while (admitted := self._scheduler.admit(lambda _: Verdict.TAKE, now)) is not None:
            self._begin(admitted, now)
        for generation in self._scheduler.running:
            if generation.due_at <= now:
                self._step(generation)
        self._deliver()
        if self._scheduler.running or self._scheduler.queued:
            self._schedule(self._next_at() - time.perf_counter())

    def _next_at(self) -> float:
        if self._scheduler.queued and self.running < self._scheduler.slots:
            return 0.0
        due = [generation.due_at for generation in self._scheduler.running]
        both = self._scheduler.running + self._scheduler.queued
        if (pause_at := self._scheduler.next_pause_at()) is not None:
            # There is no need to wake up before the next check, because running requests keep their slot for a while.
            due.append(max(pause_at, time.perf_counter() + PAUSE_CHECK_S))
        return min([*due, *(generation.arrived_at + generation.prepared.timeout_s for generation in both)])

    def _begin(self, generation: EchoGeneration, now: float) -> None:
        self._scheduler.prefilled(generation)
        generation.mailbox.steps.start(now)
        if generation.admitted_at:
            # It was paused, and continues with its next token.
            generation.due_at = max(generation.due_at, now)
            return
        prompt = generation.prepared.prompt
        # The tokens that the prompt shares with the beginning of an ended request; never the last one.
        shared = max((_shared(prompt, other) for other in self._sequences), default=0)
        generation.cached_tokens = min(shared, len(prompt) - 1)
        self._totals.prompt_tokens += len(generation.prepared.prompt)
        self._totals.cached_tokens += generation.cached_tokens
        items = generation.begin(now)
        tokens = len(generation.prepared.prompt) - generation.cached_tokens
        self._log_step(generation, "prefill", now, generation.decoding_at, tokens)
        for item in items:
            self._outbox.post(generation.mailbox, item)
        if generation.finish is not None:
            self._finish(generation)

    def _log_step(self, generation: EchoGeneration, kind: StepKind, start: float, end: float, tokens: int) -> None:
        """Record what the current round has computed for a request."""
        steps = generation.mailbox.steps
        steps.add(kind, start, end, tokens=tokens, step=self._rounds, requests=self.running)

    def _step(self, generation: EchoGeneration) -> None:
        started, before = time.perf_counter(), generation.output_tokens
        try:
            items = generation.step()
        except LabError as exc:
            self._end(generation, exc)
            return
        except Exception as exc:
            log.exception("a generation failed")
            self._end(generation, EngineError(f"the generation failed: {type(exc).__name__}: {exc}"))
            return
        if tokens := generation.output_tokens - before:
            self._log_step(generation, "decode", started, time.perf_counter(), tokens)
        self._totals.output_tokens += sum(item.tokens for item in items if isinstance(item, Delta))
        for item in items:
            self._outbox.post(generation.mailbox, item)
        if generation.finish is not None:
            self._finish(generation)

    def _finish(self, generation: EchoGeneration) -> None:
        script = generation.prepared.script
        if script is not None and script.error is not None:
            self._end(generation, script.failure())
            return
        self._end(generation, generation.report(time.perf_counter(), self._memory_bytes))

    def _end(self, generation: EchoGeneration, end: GenerationReport | LabError) -> None:
        """End a generation, and post its end. No other method does so."""
        self._remove(generation)
        self._outbox.post(generation.mailbox, end)

    def _remove(self, generation: EchoGeneration) -> None:
        self._scheduler.remove(generation)
        generation.permit.release()
        ended = [*generation.prepared.prompt, *generation.tokens]
        self._sequences = [ended, *self._sequences[: KEPT_SEQUENCES - 1]]

    def _deliver(self) -> None:
        self._on_change()
        for closed in self._outbox.send():
            for generation in self._scheduler.queued + self._scheduler.running:
                if generation.mailbox.loop is closed:
                    self._remove(generation)
            self._on_change()


def _shared(one: list[int], other: list[int]) -> int:
    """Return the length of the common prefix, found by bisection."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
