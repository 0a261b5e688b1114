"""The running batch of one loaded model: mlx-lm's ``BatchGenerator``, fed in chunks, with a prefix cache beside it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, GenerationBatch, PromptProcessingBatch, StopSequences
from mlx_lm.models.cache import make_prompt_cache

from lmx_lab.engine.cpu_blas import ThreadChoice
from lmx_lab.engine.mlx import memory
from lmx_lab.engine.mlx.kv_cache import KvState
from lmx_lab.engine.mlx.logprobs import answer_token, as_rows
from lmx_lab.engine.mlx.memory_plan import Footprint
from lmx_lab.engine.mlx.model import LoadedModel
from lmx_lab.engine.mlx.prefill import PrefillPace
from lmx_lab.engine.mlx.prefix_cache import MIN_TOKENS, PrefixCache, common_prefix
from lmx_lab.engine.mlx.prompt_scores import Scoring
from lmx_lab.engine.mlx.request import MlxGeneration
from lmx_lab.engine.mlx.sampling import ConstrainedSampler, Sampler, Samplers, processors
from lmx_lab.values.generation import PromptScores, TokenLogprob

NO_STOP = StopSequences()
# Fewer tokens cost a GPU as much: it reads all weights for each step. For models with sliding windows 16 at least:
# mlx-lm's batches of them go wrong where one prompt is computed by single tokens beside another (measured: cohere2).
SMALLEST_CHUNK_TOKENS = 1 if mx.default_device() == mx.cpu else 64


@dataclass(frozen=True, eq=False)
class Computed:
    """A chunk of a prompt has been computed; ``done`` when it was the last."""

    generation: MlxGeneration
    tokens: int
    done: bool


@dataclass(frozen=True, eq=False)
class Scored:
    """The whole prompt has been scored; unless no token is wanted, generating begins with the next step."""

    generation: MlxGeneration
    scores: PromptScores


@dataclass(frozen=True, eq=False)
class Token:
    """The next token of an answer."""

    generation: MlxGeneration
    token: int
    logprobs: mx.array
    finish: Literal["stop", "length"] | None
    """``stop``: the model ended its text, and the token shows nothing."""


Event = Computed | Scored | Token


class Batch:
    """Takes requests in, hands out what happened to them in each step. Knows no deadlines, no readers, no text."""

    def __init__(
        self,
        model: LoadedModel,
        samplers: Samplers,
        threads: ThreadChoice,
        *,
        slots: int,
        prompts: int,
        prefix_bytes: int,
        wired: bool,
    ) -> None:
        self._model = model
        self._samplers = samplers
        self._threads = threads
        self._generations: dict[int | None, MlxGeneration] = {}
        self._scorings: list[Scoring] = []
        smallest = SMALLEST_CHUNK_TOKENS if model.traits.plain else max(SMALLEST_CHUNK_TOKENS, 16)
        self._pace = PrefillPace(minimum=smallest, maximum=memory.LARGEST_CHUNK_TOKENS)
        self.prefixes: PrefixCache[KvState] = PrefixCache(prefix_bytes)
        self._generator = BatchGenerator(
            model.model,
            stop_tokens=model.eos_tokens,
            completion_batch_size=slots,
            prefill_batch_size=prompts,
            prefill_step_size=memory.LARGEST_CHUNK_TOKENS,
        )
        if not wired:
            # The constructor raises macOS's wired limit; closing puts it back and does nothing else.
            self._generator.close()

    @property
    def footprint(self) -> Footprint:
        return self._model.traits.footprint

    @property
    def empty(self) -> bool:
        return not self._generations and not self._scorings

    def must_wait(self, generation: MlxGeneration) -> bool:
        """Whether to wait: a prompt being computed begins like this one, and further than any that is kept.

        That one's cache is kept for it as soon as it is complete.
        """
        if generation.request.score_prompt:
            return False
        if generation.waits_for is not None and self._is_prefilling(generation.waits_for):
            return True
        generation.waits_for = next(
            filter(lambda other: self._serves(other, generation), self._generations.values()), None
        )
        if generation.waits_for is not None:
            generation.waits_for.is_waited_for = True
        return generation.waits_for is not None

    def _is_prefilling(self, generation: MlxGeneration) -> bool:
        # By identity: after a failure a new batch counts its uids from 0 again.
        return self._generations.get(generation.uid) is generation and not generation.decoding_at

    def _serves(self, other: MlxGeneration, generation: MlxGeneration) -> bool:
        """Whether what is being computed for ``other`` will be kept, and will spare ``generation`` enough."""
        if not self._is_prefilling(other) or not self._can_keep(other):
            return False
        shared = min(common_prefix(other.key, generation.key), len(generation.prompt) - 1)
        if not self._model.traits.plain and shared < len(other.prompt) - 1:
            return False
        return shared >= MIN_TOKENS and shared - self.prefixes.longest(generation.key) >= MIN_TOKENS

    def _can_keep(self, generation: MlxGeneration) -> bool:
        return self.footprint.kv_bytes([len(generation.prompt)]) <= self.prefixes.limit_bytes

    def insert(self, generation: MlxGeneration) -> None:
        """Begin to compute a request, after what is kept of its prompt."""
        if generation.request.score_prompt:
            # Scores need every token of the prompt computed.
            self._scorings.append(Scoring(generation, self._model))
        elif (hit := self.prefixes.take(generation.key)) is not None:
            generation.cached_tokens = hit.tokens
            self._insert(generation, hit.tokens, hit.kept.layers)
        else:
            self._insert(generation, 0, make_prompt_cache(self._model.model))

    def _insert(self, generation: MlxGeneration, known: int, layers: Sequence[Any]) -> None:
        """Compute the prompt after its first ``known`` tokens, whose caches are ``layers``."""
        request = generation.request
        (generation.uid,) = self._generator.insert(
            [generation.prompt[known:]],
            max_tokens=[generation.max_tokens],
            caches=[list(layers)],
            all_tokens=[generation.prompt[:known]],
            samplers=[self._sampler(generation)],
            logits_processors=[processors(request.sampling)],
            stop_sequences=[NO_STOP] if request.ignore_eos else None,
        )
        self._generations[generation.uid] = generation

    def _sampler(self, generation: MlxGeneration) -> Sampler:
        sampling = generation.request.sampling
        sampler = self._samplers.get(sampling, choice=generation.choice)
        if generation.constraint is None:
            return sampler
        return ConstrainedSampler(generation.constraint, sampler, normalize=sampling.top_p < 1)

    def remove(self, generation: MlxGeneration) -> None:
        """Stop computing a request; what was computed of it is kept for requests that begin alike."""
        self._scorings = [scoring for scoring in self._scorings if scoring.generation is not generation]
        if self._generations.get(generation.uid) is not generation:
            return
        del self._generations[generation.uid]
        taken = self._generator.remove([generation.uid], return_prompt_caches=self.prefixes.limit_bytes > 0)
        for layers, tokens in taken.values():
            if len(tokens) > generation.cached_tokens:
                self._keep(layers, tokens)

    def step(self) -> list[Event]:
        """One token for every answer that decodes, one chunk of every prompt that is being computed."""
        decoding = self._decoding
        prompts = len(self._generations) - decoding + bool(self._scorings)
        chunk = self._pace.chunk(prompts=prompts, decoding=decoding)
        self._generator.prefill_step_size = chunk
        self._threads.prepare(decoding + min(prompts * chunk, self._left_of_prompts))
        started = time.perf_counter()
        events = [*self._last_tokens(), *self._score(chunk)]
        scored_tokens = sum(event.tokens for event in events if isinstance(event, Computed))
        progress, tokens = self._generator.next() if self._generations else ([], [])
        now = time.perf_counter()
        self.note_peak(memory.take_peak_bytes())
        computed = [self._computed(it, now) for it in progress]
        prompt_tokens = scored_tokens + sum(event.tokens for event in computed)
        self._pace.took(now - started, prompt_tokens=prompt_tokens, decoding=decoding)
        # Tokens first: a request that has just begun to decode has none in this step.
        return [*events, *(self._token(response) for response in tokens), *computed]

    def _last_tokens(self) -> list[Event]:
        """The tokens that reach their request's limit. They are drawn already, and left in the batch they would cost a
        forward pass for a token that nobody wants: half the time of a one-token answer.
        """
        ending = [it for it in self._generations.values() if it.decoding_at and it.output_tokens + 1 == it.max_tokens]
        # mlx-lm has no public way to see what was drawn; its version is bounded, and tests hold this against it.
        batch = self._generator._generation_batch
        events: list[Event] = []
        for generation in ending:
            row = batch.uids.index(generation.uid)
            token, logprobs = int(batch._next_tokens[row].item()), batch._next_logprobs[row]
            ended = not generation.request.ignore_eos and [token] in self._model.eos_tokens
            self.remove(generation)
            events.append(Token(generation, token, logprobs, "stop" if ended else "length"))
        return events

    def remaining_s(self, generation: MlxGeneration) -> float:
        """How long the request takes to its last token, at the pace of the last steps."""
        prompt = len(generation.prompt) - generation.cached_tokens - generation.computed_tokens
        output = generation.max_tokens - generation.output_tokens
        return self._pace.takes(prompt_tokens=prompt, output_tokens=output, decoding=self._decoding)

    @property
    def _decoding(self) -> int:
        return sum(bool(generation.decoding_at) for generation in self._generations.values())

    @property
    def _left_of_prompts(self) -> int:
        """Tokens that are still to be computed."""
        waiting = [*self._generations.values(), *(scoring.generation for scoring in self._scorings)]
        return sum(len(it.prompt) - it.cached_tokens - it.computed_tokens for it in waiting if not it.decoding_at)

    def _score(self, chunk: int) -> list[Event]:
        """A chunk of the scoring that came first."""
        if not self._scorings:
            return []
        scoring = self._scorings[0]
        generation = scoring.generation
        with mx.stream(self._generator.stream):
            generation.computed_tokens += (tokens := scoring.advance(chunk))
        if not scoring.done:
            return [Computed(generation, tokens, done=False)]
        del self._scorings[0]
        if generation.max_tokens:
            self._insert(generation, len(generation.prompt) - 1, scoring.layers)
        return [Computed(generation, tokens, done=False), Scored(generation, scoring.scores)]

    def note_peak(self, peak: int) -> None:
        """So much memory was in use at once while these requests ran."""
        for generation in self._generations.values():
            generation.peak_memory_bytes = max(generation.peak_memory_bytes, peak)

    def _computed(self, progress: PromptProcessingBatch.Response, now: float) -> Computed:
        generation = self._generations[progress.uid]
        done, total = progress.progress
        # Counted from the first token that neither the prefix cache nor a scoring has given.
        known = len(generation.prompt) - total
        tokens = known + done - generation.cached_tokens - generation.computed_tokens
        generation.computed_tokens += tokens
        if progress.end_of_prompt:
            generation.decoding_at = now
        elif done == total - 1 and (generation.is_waited_for or not self._model.traits.plain):
            # All but the last token: what the same prompt, which must have one left to compute, can take even where
            # caches cannot be cut.
            self._keep(*self._generator.extract_cache([progress.uid])[progress.uid])
        return Computed(generation, tokens, done=progress.end_of_prompt)

    def _token(self, response: GenerationBatch.Response) -> Token:
        generation = self._generations[response.uid]
        if response.finish_reason is not None:
            del self._generations[response.uid]
            self._keep(response.prompt_cache or (), response.all_tokens or ())
        finish = cast("Literal['stop', 'length'] | None", response.finish_reason)
        return Token(generation, response.token, response.logprobs, finish)

    def logprob(self, event: Token) -> TokenLogprob | None:
        """The token's entry, if its request asked for them."""
        top = event.generation.request.top_logprobs
        if top is None:
            return None
        row, ends = as_rows(event.logprobs)[0], event.finish == "stop"
        return answer_token(self._model.vocabulary, row, event.token, top, ends=ends)

    def _keep(self, layers: Sequence[Any], tokens: Sequence[int]) -> None:
        # Taking a cache out of the batch is a copy, worth its time only if it may be kept.
        if self.prefixes.limit_bytes and len(tokens) >= MIN_TOKENS:
            self.prefixes.keep(tokens, KvState.taken(layers))
