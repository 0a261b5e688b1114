"""Prompt lookup: compute several tokens of one answer in one pass where it repeats earlier text.

Edits, code and summaries with quotes repeat their prompt. The tokens that followed the same words earlier are drafted,
and the model computes all of them in one pass, which takes less time than one pass each. Every token is drawn as
without a draft, and a drafted token is accepted if it equals the draw, so a draft never changes the answer (the idea
is from https://github.com/apoorvumang/prompt-lookup-decoding). Runs on the engine thread.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import cycle, islice
from statistics import median
from typing import Any, cast

import mlx.core as mx
from mlx_lm.generate import GenerationBatch
from mlx_lm.models.cache import trim_prompt_cache

from lmx_lab.engine.mlx.sampling import SeededSampler

NGRAM = 3
"""Number of tokens that must have occurred before in this order."""
FIRST_DRAFT = 4
LONGEST_DRAFT = 16
FIRST_COST = 1.8
"""Assumed duration of a pass that verifies a draft, in decode steps, until it is measured."""
MEASURED, FEWEST_MEASURED = 9, 3
"""Numbers of recent durations whose median is used, at most and at least. Other programs delay single ones."""
MARGIN = 1.1
"""Minimum speed-up for which drafts are used."""
FIRST_PAUSE = 16
LONGEST_PAUSE = 256
WEIGHT = 0.4
"""Weight of the newest pass in the running mean of tokens per pass."""


class PromptLookup:
    """Drafts the tokens of one answer, and stops to while that does not pay."""

    def __init__(self) -> None:
        self.drafted = 0
        self.accepted = 0
        self._length = FIRST_DRAFT
        self._tokens_per_pass = 1.0 + FIRST_DRAFT
        self._pause = FIRST_PAUSE
        self._resume_at = 0
        self._indexed = NGRAM
        self._next: dict[tuple[int, ...], int] = {}
        """Where the token after the last occurrence of an n-gram is."""

    def draft(self, tokens: Sequence[int], *, limit: int) -> Sequence[int]:
        """Return tokens that may follow, at most ``limit``; none if there is no earlier occurrence.

        Args:
            tokens: All tokens of the prompt and the answer. They may only grow between calls.
        """
        for at in range(self._indexed, len(tokens)):
            self._next[tuple(tokens[at - NGRAM : at])] = at
        self._indexed = max(self._indexed, len(tokens))
        start = self._next.get(tuple(tokens[-NGRAM:])) if len(tokens) >= self._resume_at else None
        if start is None:
            return ()
        # At the end of the text, what was repeated last is expected to repeat again.
        return list(islice(cycle(tokens[start:]), min(self._length + 1, max(0, limit))))

    def record(self, *, at: int, drafted: int, accepted: int, cost: float) -> None:
        """Record the result of a pass.

        Args:
            at: Number of tokens of the prompt and the answer after it.
            cost: Duration of such a pass, in decode steps.
        """
        self.drafted += drafted
        self.accepted += accepted
        self._tokens_per_pass += WEIGHT * (1 + accepted - self._tokens_per_pass)
        if accepted == drafted:
            self._length = min(2 * self._length, LONGEST_DRAFT)
        elif accepted < drafted / 2:
            self._length = max(self._length // 2, FIRST_DRAFT)
        if self._tokens_per_pass >= MARGIN * cost:
            self._pause = FIRST_PAUSE
            return
        # One more pass after the pause decides.
        self._tokens_per_pass = MARGIN * cost
        self._resume_at = at + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE)


class LookupBatch(GenerationBatch):
    """A batch that uses drafts while it has one row.

    Attributes:
        lookups: By uid, the lookups of the answers that may use drafts.
    """

    lookups: dict[int, PromptLookup]
    _steps_s: deque[float]
    """Recent durations of decode steps of one row."""
    _passes_s: deque[float]
    """Recent durations of passes with a draft."""
    _was_plain: bool

    @classmethod
    def empty(cls, model: Any, fallback_sampler: Callable[[mx.array], mx.array]) -> LookupBatch:
        batch: LookupBatch = super().empty(model, fallback_sampler)
        batch.lookups, batch._was_plain = {}, False
        batch._steps_s, batch._passes_s = deque(maxlen=MEASURED), deque(maxlen=MEASURED)
        return batch

    @property
    def _cost(self) -> float:
        """Duration of a pass with a draft, in decode steps."""
        if min(len(self._steps_s), len(self._passes_s)) < FEWEST_MEASURED:
            return FIRST_COST
        return median(self._passes_s) / median(self._steps_s)

    def next(self) -> list[GenerationBatch.Response]:
        if len(self.uids) != 1 or (lookup := self.lookups.get(self.uids[0])) is None:
            self._was_plain = False
            return super().next()
        started = time.perf_counter()
        if draft := self._draft(lookup):
            self._was_plain = False
            return self._verify(lookup, draft)
        responses = super().next()
        # The first step after another kind of step only starts a computation, for which the second one waits.
        if self._was_plain:
            self._steps_s.append(time.perf_counter() - started)
        self._was_plain = True
        return responses

    def _draft(self, lookup: PromptLookup) -> list[int]:
        """Return tokens that may follow the sampled one; none if this token is not the expected one."""
        # The last token of ``max_tokens`` is never computed, only sampled.
        limit = self.max_tokens[0] - self._num_tokens[0] - 1
        expected = lookup.draft(self.tokens[0], limit=limit)
        # Reading the sampled token waits for its computation, so this is done only if there is a draft.
        if len(expected) < 2 or expected[0] != self._next_tokens.item():
            return []
        return list(expected[1:])

    def _verify(self, lookup: PromptLookup, draft: list[int]) -> list[GenerationBatch.Response]:
        """Compute the sampled token and the draft in one pass. Keep what equals the tokens that are drawn."""
        started = time.perf_counter()
        inputs = [cast("int", self._next_tokens.item()), *draft]
        logits = self.model(mx.array([inputs]), cache=self.prompt_cache)[0]
        drawn, logprobs = self._draw(inputs, logits)
        accepted = len(drawn) - 1
        kept = inputs[: accepted + 1]
        responses: list[GenerationBatch.Response] = []
        finish = None
        for token, row in zip(kept, [*self._next_logprobs, *logprobs], strict=False):
            self.tokens[0].append(token)
            self._num_tokens[0] += 1
            if self._matchers[0].advance(token):
                finish = "stop"
            responses.append(self.Response(self.uids[0], token, row, finish, None, None))
            if finish is not None:
                break
        trim_prompt_cache(self.prompt_cache, len(inputs) - len(responses))
        self._passes_s.append(time.perf_counter() - started)
        lookup.record(at=len(self.tokens[0]), drafted=len(draft), accepted=accepted, cost=self._cost)
        if finish is not None:
            responses[-1].prompt_cache, responses[-1].all_tokens = self.extract_cache(0), self.tokens[0]
            self.filter([])
            return responses
        self._next_tokens = mx.array(drawn[-1:], dtype=self._next_tokens.dtype)
        self._next_logprobs = [logprobs[accepted]]
        return responses

    def _draw(self, inputs: list[int], logits: mx.array) -> tuple[list[int], mx.array]:
        """Draw the token after each input until it differs from the next input, and return the log-probabilities."""
        assert self.samplers
        assert self.logits_processors
        sampler, changes = self.samplers[0], self.logits_processors[0]
        if not changes and not isinstance(sampler, SeededSampler):
            logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
            drawn = sampler(logprobs)
            mx.eval(drawn, logprobs)
            all_drawn = cast("list[int]", drawn.tolist())
            return all_drawn[: _equal(all_drawn, inputs[1:]) + 1], logprobs
        # These have a state, which must not advance beyond the tokens that are kept.
        tokens: list[int] = []
        rows: list[mx.array] = []
        for at, token in enumerate(inputs):
            row = logits[at : at + 1]
            if changes:
                context = self._token_context[0].update_and_fetch(mx.array([token]))
                for change in changes:
                    row = change(context, row)
            rows.append(row - mx.logsumexp(row, axis=-1, keepdims=True))
            tokens.append(cast("int", sampler(rows[-1]).item()))
            if tokens[-1:] != inputs[at + 1 : at + 2]:
                break
        logprobs = mx.concatenate(rows)
        mx.eval(logprobs)
        return tokens, logprobs


def _equal(drawn: Sequence[int], draft: Sequence[int]) -> int:
    """Return the number of equal tokens at the beginning."""
    return next((at for at, token in enumerate(draft) if drawn[at] != token), len(draft))
