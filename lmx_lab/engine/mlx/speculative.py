"""Speculative decoding: compute several drafted tokens of an answer in one pass, and keep those that are drawn.

A pass over several tokens takes less time than one pass for each. Every token is drawn as it would be without a draft,
with the random key of its position, and a drafted token is accepted if it equals the drawn one, so a draft never
changes the answer. Runs on the engine thread.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from itertools import cycle, islice
from statistics import median
from typing import Any, ClassVar, cast

import mlx.core as mx
import numpy as np
from mlx_lm.generate import GenerationBatch
from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache

from lmx_lab.engine.mlx.sampling import ConstrainedSampler, SeededSampler
from lmx_lab.engine.mlx.steering import SteerableAnswers
from lmx_lab.engine.prefix_files import common_prefix

NGRAM = 3
"""Number of last tokens that must have occurred before in the same order, for a draft from the text itself."""
LONGEST_DRAFT = 16
MEASURED, FEWEST_MEASURED = 9, 3
"""Maximum and minimum number of recent durations whose median is used, because other programs delay single passes."""
MEASURE_EVERY = 32
"""Number of passes with drafts after which a decode step is measured again, if a drafter drafts in every pass."""
MARGIN = 1.1
"""Minimum speed-up at which drafts are used."""
FIRST_PAUSE = 16
ASSUMED_TOKENS_PER_PASS = 5.0
"""Assumed before the first pass, so that a few passes are tried."""
WEIGHT = 0.25
"""Weight of the newest pass in the running mean of tokens per pass. With 0.4, two rejected drafts ended those of a text
that was copied with small changes."""
CHUNK_TOKENS = 256
"""Maximum number of tokens of a prompt that are computed between two decode steps, which delays requests and
cancellations."""


class Drafter(ABC):
    """Drafts the tokens of one answer, and pauses while drafts save no time."""

    drafts_always: ClassVar[bool]
    """Whether there is a draft for every pass."""
    first_draft: ClassVar[int]
    """Number of tokens of the first draft, and the minimum length of a draft after rejections."""

    def __init__(self) -> None:
        self.drafted = 0
        self.accepted = 0
        self.draft_s = 0.0
        """Duration of the last call of ``propose``, without the wait for the sampled token."""
        self._length = self.first_draft
        self._tokens_per_pass = ASSUMED_TOKENS_PER_PASS
        self._pause = FIRST_PAUSE
        self._resume_at = 0

    @abstractmethod
    def propose(self, tokens: Sequence[int], sampled: Callable[[], int], *, limit: int) -> list[int]:
        """Return tokens that may follow the sampled one, at most ``limit``.

        Args:
            tokens: All tokens of the prompt and the answer. They may only grow between calls.
            sampled: Returns the token after them. Calling it waits for the computation of this token.
        """

    def record(self, *, at: int, drafted: int, accepted: int, cost: float) -> None:
        """Record the result of a pass.

        Args:
            at: Number of tokens of the prompt and the answer after the pass.
            cost: Duration of a pass with a draft, in decode steps.
        """
        self.drafted += drafted
        self.accepted += accepted
        self._tokens_per_pass += WEIGHT * (1 + accepted - self._tokens_per_pass)
        if accepted == drafted:
            self._length = min(2 * self._length, LONGEST_DRAFT)
        elif accepted < drafted / 2:
            self._length = max(self._length // 2, self.first_draft)
        if self._tokens_per_pass >= MARGIN * cost:
            self._pause = FIRST_PAUSE
            return
        # The first pass after the pause decides whether drafts continue.
        self._tokens_per_pass = MARGIN * cost
        self._resume_at = at + self._pause
        self._pause = min(2 * self._pause, 256)


class PromptLookup(Drafter):
    """Drafts the tokens that followed the last tokens of the text where these occurred before.

    Edited text, code and summaries with quotes repeat parts of their prompt (the idea is from
    https://github.com/apoorvumang/prompt-lookup-decoding).

    Args:
        predicted: Tokens of another text that the answer may repeat.
    """

    drafts_always = False
    # On a CPU a pass over 5, 9 or 17 tokens takes about 2.7, 3.1 or 3.9 times as long as a decode step, so more tokens
    # cost little.
    first_draft = 12

    def __init__(self, predicted: Sequence[int] = ()) -> None:
        super().__init__()
        self._indexed = NGRAM
        self._next: dict[tuple[int, ...], int] = {}
        """For each n-gram, the position of the token after its last occurrence."""
        self._predicted = predicted
        self._next_predicted = {tuple(predicted[at - NGRAM : at]): at for at in range(NGRAM, len(predicted))}
        """The same for the predicted tokens."""

    def propose(self, tokens: Sequence[int], sampled: Callable[[], int], *, limit: int) -> list[int]:
        """See ``Drafter``. Returns none if the sampled token is not the expected one."""
        expected = self.expect(tokens, limit=limit + 1)
        # Reading the sampled token waits for its computation, so this is done only if there is a draft.
        if len(expected) < 2 or expected[0] != sampled():
            return []
        return expected[1:]

    def expect(self, tokens: Sequence[int], *, limit: int) -> list[int]:
        """Return tokens that may follow, at most ``limit``; none if there is no earlier occurrence."""
        for at in range(self._indexed, len(tokens)):
            self._next[tuple(tokens[at - NGRAM : at])] = at
        self._indexed = max(self._indexed, len(tokens))
        if len(tokens) < self._resume_at:
            return []
        length = min(self._length + 1, max(0, limit))
        last = tuple(tokens[-NGRAM:])
        if (following := self._next_predicted.get(last)) is not None:
            return list(self._predicted[following : following + length])
        if (start := self._next.get(last)) is None:
            return []
        # If the repetition reaches the end of the text, it is expected to continue in a cycle.
        return list(islice(cycle(tokens[start:]), length))


class SpeculativeBatch(SteerableAnswers):
    """A batch that uses drafts while it has one row.

    Attributes:
        drafters: By uid, the drafters of the answers that may use drafts.
    """

    drafters: dict[int, Drafter]
    _steps_s: deque[float]
    """Recent durations of decode steps of one row."""
    _passes_s: deque[float]
    """Recent durations of passes with a draft."""
    _passes: int
    """Number of passes with a draft since a decode step was measured."""
    _was_plain: bool

    @classmethod
    def empty(cls, model: Any, fallback_sampler: Callable[[mx.array], mx.array]) -> SpeculativeBatch:
        batch: SpeculativeBatch = super().empty(model, fallback_sampler)
        batch.drafters, batch._was_plain, batch._passes = {}, False, 0
        batch._steps_s, batch._passes_s = deque(maxlen=MEASURED), deque(maxlen=MEASURED)
        return batch

    @property
    def cost(self) -> float:
        """Duration of a pass with a draft, in decode steps."""
        if min(len(self._steps_s), len(self._passes_s)) < FEWEST_MEASURED:
            # Assumed until it is measured.
            return 1.8
        return median(self._passes_s) / median(self._steps_s)

    def _advance(self) -> list[GenerationBatch.Response]:
        if len(self.uids) != 1 or (drafter := self.drafters.get(self.uids[0])) is None:
            self._was_plain = False
            return super()._advance()
        started = time.perf_counter()
        drafter.draft_s = 0.0
        # The duration of a decode step is unknown or old.
        needs_step = len(self._steps_s) < FEWEST_MEASURED or self._passes >= MEASURE_EVERY
        # The last token of ``max_tokens`` is never computed, only sampled.
        limit = self.max_tokens[0] - self._num_tokens[0] - 2
        draft: list[int] = []
        if limit > 0 and not (drafter.drafts_always and needs_step):
            draft = drafter.propose(self.tokens[0], self._sampled, limit=limit)
        if draft:
            self._was_plain = False
            return self._verify(drafter, draft)
        responses = super()._advance()
        # After another kind of step, the first step only starts a computation that the second one waits for.
        if self._was_plain and not drafter.draft_s:
            self._steps_s.append(time.perf_counter() - started)
            self._passes = 0
        self._was_plain = not drafter.draft_s
        return responses

    def _sampled(self) -> int:
        return cast("int", self._next_tokens.item())

    def _verify(self, drafter: Drafter, draft: list[int]) -> list[GenerationBatch.Response]:
        """Compute the sampled token and the draft in one pass. Keep the tokens that equal the drawn ones."""
        started = time.perf_counter()
        inputs = [self._sampled(), *draft]
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
        self._passes_s.append(drafter.draft_s + time.perf_counter() - started)
        self._passes += 1
        drafter.record(at=len(self.tokens[0]), drafted=len(draft), accepted=accepted, cost=self.cost)
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
        if not changes and not isinstance(sampler, SeededSampler | ConstrainedSampler):
            logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
            drawn = sampler(logprobs)
            mx.eval(drawn, logprobs)
            all_drawn, draft = cast("list[int]", drawn.tolist()), inputs[1:]
            equal = next((at for at, token in enumerate(draft) if all_drawn[at] != token), len(draft))
            return all_drawn[: equal + 1], logprobs
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
            if isinstance(sampler, ConstrainedSampler) and sampler.has_ended:
                break
        logprobs = mx.concatenate(rows)
        mx.eval(logprobs)
        return tokens, logprobs


class DraftModel:
    """Continues one text at a time. Its KV cache remains for the next answer with the same prefix.

    Args:
        tokens: Number of tokens that both models know.
    """

    def __init__(self, model: Any, tokens: int) -> None:
        self._model = model
        self._largest = tokens - 1
        self._cache: list[Any] = []
        self._computed: list[int] = []
        """The tokens whose keys and values are in the cache."""

    def continue_text(self, tokens: Sequence[int], count: int) -> list[int]:
        """Return the ``count`` most likely next tokens, each after the ones before it; none if the cache lacks so many
        tokens that only a part of them was computed.
        """
        text, computed = (np.asarray(each, dtype=np.int32) for each in (tokens, self._computed))
        # At least one token must be computed, to have logits.
        shared = min(common_prefix(text, computed), len(tokens) - 1)
        if not shared:
            self._cache = make_prompt_cache(self._model)
        elif shared < len(computed):
            trim_prompt_cache(self._cache, len(computed) - shared)
        del self._computed[shared:]
        missing = tokens[shared:]
        if len(missing) > CHUNK_TOKENS:
            self._forward(missing[:CHUNK_TOKENS])
            mx.eval([layer.state for layer in self._cache])
            return []
        drafted = [self._forward(missing)]
        while len(drafted) < count:
            drafted.append(self._next(drafted[-1]))
        known = cast("list[int]", mx.concatenate(drafted).tolist())
        # The last token was drafted but not computed.
        self._computed += known[:-1]
        return known

    def _forward(self, tokens: Sequence[int]) -> mx.array:
        """Compute tokens of the text, and return the most likely next one."""
        self._computed += tokens
        return self._next(mx.array(list(tokens)))

    def _next(self, tokens: mx.array) -> mx.array:
        # Vocabularies may be padded to different sizes. An index outside of the embeddings would not be checked.
        known = mx.minimum(tokens, self._largest)
        logits = self._model(known[None], cache=self._cache)
        return mx.argmax(logits[:, -1, : self._largest + 1], axis=-1)


class ModelDrafter(Drafter):
    """Drafts the tokens of one answer with a draft model."""

    drafts_always = True
    first_draft = 4

    def __init__(self, model: DraftModel) -> None:
        super().__init__()
        self._model = model

    def propose(self, tokens: Sequence[int], sampled: Callable[[], int], *, limit: int) -> list[int]:
        if len(tokens) < self._resume_at:
            return []
        text = [*tokens, sampled()]
        started = time.perf_counter()
        draft = self._model.continue_text(text, min(self._length, limit))
        self.draft_s = time.perf_counter() - started
        return draft
