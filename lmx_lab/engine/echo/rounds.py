"""Compute the answers of the echo engine in rounds. Belongs to the engine's loop.

A round is one callback of the loop. If a speed is set, answers with the same speed share their rounds. While no request
is running or queued, no callback is scheduled.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from lmx_lab.engine.answers import Answers, Generation
from lmx_lab.engine.echo.model import END, AnswerSampler, EchoModel
from lmx_lab.engine.scheduler import Turns, Verdict
from lmx_lab.errors import EngineError, LabError
from lmx_lab.values.engine import TokenTotals
from lmx_lab.values.outputs import PromptProgress, PromptScores

log = logging.getLogger(__name__)
KEPT_SEQUENCES = 16
"""Number of ended requests whose tokens count as cached for requests that begin with the same tokens."""


@dataclass(kw_only=True, eq=False)
class EchoRow:
    """What only the echo engine needs for an answer."""

    sampler: AnswerSampler
    interval_s: float
    """Time between two tokens."""
    delay_s: float
    """Additional time before the first token."""
    due_at: float = 0.0
    """When the next token is due (``time.perf_counter``)."""
    tokens: list[int] = field(default_factory=list)
    """The tokens that were generated."""


class EchoRounds:
    """The ``Computation`` of the echo engine.

    Args:
        on_change: Called after each round, before its results are passed on.
    """

    def __init__(
        self, model: EchoModel, totals: TokenTotals, *, slots: int, turns: Turns, on_change: Callable[[], None]
    ) -> None:
        self._model = model
        self._on_change = on_change
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.Handle | None = None
        self._rounds = 0
        """Number of rounds so far, which answers that advance together have in common."""
        self._sequences: list[list[int]] = []
        self.answers: Answers[EchoRow] = Answers(self, totals, slots=slots, turns=turns, post=self._post)

    def _post(self, work: Callable[[], object]) -> None:
        # If the loop is closed, all generations have ended.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(work)

    def schedule(self, delay_s: float = 0.0) -> None:
        """Perform the next round after this time."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(delay_s, self._round) if delay_s > 0 else self._loop.call_soon(self._round)

    def deliver(self) -> None:
        """Pass the results to their readers."""
        self._on_change()
        if self.answers.deliver():
            self._on_change()

    def _round(self) -> None:
        """Start queued generations, generate the tokens that are due, and schedule the next round."""
        answers, now = self.answers, time.perf_counter()
        self._rounds += 1
        answers.update(now)
        for generation in answers.scheduler.running:
            if generation.row.due_at <= now:
                self._step(generation)
        self.deliver()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now = time.perf_counter()
        if (next_at := answers.next_at(now)) is not None:
            due = [generation.row.due_at for generation in answers.scheduler.running]
            self.schedule(min([next_at, *due]) - now)

    # Computation

    def judge(self, generation: Generation[EchoRow]) -> Verdict:
        """See ``Computation``."""
        return Verdict.TAKE

    def begin(self, generation: Generation[EchoRow]) -> None:
        """See ``Computation``. The prompt is computed immediately."""
        answers, prompt, row = self.answers, generation.prompt, generation.row
        answers.scheduler.prefilled(generation)
        # The tokens that the prompt shares with the beginning of an ended request; never the last one.
        shared = max((_shared(prompt, other) for other in self._sequences), default=0)
        generation.cached_tokens = min(shared, len(prompt) - 1)
        generation.computed_tokens = len(prompt) - generation.cached_tokens
        answers.post(generation, PromptProgress(done=len(prompt), total=len(prompt)))
        if generation.request.score_prompt:
            scores = self._model.prompt_scores(prompt, generation.request.top_logprobs or 0)
        now = generation.decoding_at = time.perf_counter()
        row.due_at = _on_grid(now + row.delay_s + row.interval_s, row.interval_s)
        generation.mailbox.steps.add(
            "prefill",
            generation.admitted_at,
            now,
            tokens=generation.computed_tokens,
            step=self._rounds,
            requests=len(answers.scheduler.running),
        )
        if generation.request.score_prompt:
            answers.scored(generation, PromptScores(tokens=scores), now)

    def can_pause(self, generation: Generation[EchoRow]) -> bool:
        """See ``Computation``."""
        return True

    def pause(self, generation: Generation[EchoRow]) -> None:
        """See ``Computation``."""

    def resume(self, generation: Generation[EchoRow]) -> None:
        """See ``Computation``. The next token is due."""
        self.answers.scheduler.prefilled(generation)
        now = time.perf_counter()
        generation.mailbox.steps.start(now)
        generation.row.due_at = max(generation.row.due_at, now)

    def remove(self, generation: Generation[EchoRow]) -> None:
        """See ``Computation``."""
        ended = [*generation.prompt, *generation.row.tokens]
        self._sequences = [ended, *self._sequences[: KEPT_SEQUENCES - 1]]
        self.schedule()

    def remaining_s(self, generation: Generation[EchoRow]) -> float:
        """See ``Computation``."""
        return (generation.max_tokens - generation.output_tokens) * generation.row.interval_s

    def _step(self, generation: Generation[EchoRow]) -> None:
        """Generate the next token. An error ends only this generation."""
        try:
            self._generate(generation)
        except LabError as exc:
            self.answers.end(generation, exc)
        except Exception as exc:
            log.exception("a generation failed")
            self.answers.end(generation, EngineError(f"the generation failed: {type(exc).__name__}: {exc}"))
        else:
            if generation.finish is not None:
                self.answers.finish(generation, time.perf_counter())

    def _generate(self, generation: Generation[EchoRow]) -> None:
        started, answers, row = time.perf_counter(), self.answers, generation.row
        request, constraint, vocabulary = generation.request, generation.constraint, self._model.vocabulary
        mask = None
        if constraint is not None and (mask := constraint.mask(vocabulary.size)) is None:
            if constraint.failure is not None:
                raise constraint.failure
            if constraint.complete:
                answers.post(generation, generation.complete("stop"))
                return
        scores = row.sampler.scores(constrained=mask is not None) if request.top_logprobs is not None else None
        token = row.sampler.next(mask, forced=constraint.forced if constraint is not None else None)
        if constraint is not None:
            constraint.advance(token)
        row.tokens.append(token)
        ends, entry = token == END and not request.ignore_eos, None
        if scores is not None:
            entry = row.sampler.logprob(scores, token, request.top_logprobs or 0, generation.named_tokens)
            if token == END:
                entry = replace(entry, bytes=b"", ends=ends)
        now = time.perf_counter()
        answers.post(generation, generation.add(token, now, ids=(token,), entry=None if ends else entry))
        if generation.finish is None:
            if ends:
                answers.post(generation, generation.complete("stop", entry))
            elif generation.output_tokens >= generation.max_tokens:
                answers.post(generation, generation.complete("length"))
            else:
                row.due_at = _on_grid(row.due_at + row.interval_s, row.interval_s)
        generation.mailbox.steps.add(
            "decode", started, now, tokens=1, step=self._rounds, requests=len(answers.scheduler.running)
        )


def _on_grid(due_at: float, interval_s: float) -> float:
    """Return the time of the first round of this speed at or after a time."""
    return math.ceil(due_at / interval_s - 1e-6) * interval_s if interval_s else due_at


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
