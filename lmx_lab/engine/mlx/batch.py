"""Compute the requests of one loaded model in mlx-lm's ``BatchGenerator``, with chunked prefill and a prefix cache."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import mlx.core as mx
import numpy as np
from mlx_lm.generate import BatchGenerator, StopSequences
from mlx_lm.models.cache import make_prompt_cache

from lmx_lab.engine.answers import Generation
from lmx_lab.engine.cpu_blas import ThreadChoice
from lmx_lab.engine.distribution import drawn_scores, log_softmax
from lmx_lab.engine.mlx import memory
from lmx_lab.engine.mlx.kv_cache import Footprint, KvState
from lmx_lab.engine.mlx.prefill import PrefillPace
from lmx_lab.engine.mlx.prefix_cache import MIN_TOKENS, DiskPrefixes, PrefixCache, PrefixRead
from lmx_lab.engine.mlx.sampling import (
    ConstrainedSampler,
    MinimumLength,
    Processor,
    Sampler,
    Samplers,
    answer_token,
    as_rows,
    processors,
    prompt_token,
)
from lmx_lab.engine.mlx.speculative import Drafter, DraftModel, ModelDrafter, PromptLookup, SpeculativeBatch
from lmx_lab.engine.mlx.steering import BatchSteering, RequestSteering
from lmx_lab.engine.mlx.weights import ChatWeights
from lmx_lab.engine.prefix_files import Tokens, common_prefix
from lmx_lab.engine.requests import SHARED
from lmx_lab.values.outputs import PromptScores, TokenLogprob

NO_STOP = StopSequences()
SCORED_CHUNK_TOKENS = 64
"""Maximum number of tokens scored in one step. The logits of each are a whole row of the vocabulary."""
# On a GPU, a smaller chunk takes as long, because each step reads all weights. On an NVIDIA GPU, each new length of a
# chunk or of its prefix also costs 50 ms, in which cuDNN prepares the attention. Models with sliding windows need 16 or
# more: mlx-lm's batches compute wrong values if a prompt is computed in single tokens next to another one (measured:
# cohere2).
MIN_CHUNK_TOKENS = 1 if mx.default_device() == mx.cpu else 256 if memory.is_of_device() else 64


@dataclass(kw_only=True, eq=False)
class MlxRow:
    """The data of an answer that only the MLX engine needs."""

    tokens: list[int]
    """The tokens to compute: the prompt, and after a pause also the answer so far."""
    ends: frozenset[int]
    """The tokens that end the answer."""
    uncomputed_tokens: int = field(init=False)
    """Number of tokens that are still to be computed before the next token is generated."""
    key: Tokens = field(init=False)
    """``tokens`` as the prefix cache compares them."""
    steering: RequestSteering | None = None
    """The vectors that are added to its residual stream; None if there are none."""
    disk_read: PrefixRead | None = None
    """The state on disk for which the request waits or waited; None until that is decided."""
    is_decoding: bool = False
    """Whether all its tokens have been computed, so that each step generates a token."""
    predicted: Sequence[int] = ()
    """Tokens of a text that the answer may repeat."""
    drafter: Drafter | None = None
    """Drafts tokens of this answer; None if it must not use drafts."""
    uid: int | None = None
    """Id of the request in mlx-lm's batch."""
    waits_for: MlxGeneration | None = None
    """A request whose prompt begins with the same tokens and is being computed."""
    is_waited_for: bool = False
    """Whether another request waits for this one's prompt."""
    sampler: Sampler | None = None
    """Created when the request first gets a slot, because it may have a random state."""
    processors: list[Processor] | None = None
    """The functions that change the logits, which count the tokens of the answer. Created with the sampler."""

    def __post_init__(self) -> None:
        self.set_tokens(self.tokens)

    def set_tokens(self, tokens: list[int]) -> None:
        """Set the tokens to compute."""
        self.tokens, self.uncomputed_tokens = tokens, len(tokens)
        self.key = np.asarray(tokens, dtype=np.int32)

    @property
    def variant(self) -> str:
        """The property, in addition to the tokens, that the KV cache depends on; see ``PrefixCache``."""
        return self.steering.key if self.steering is not None else ""


MlxGeneration = Generation[MlxRow]


@dataclass(frozen=True, eq=False)
class ChunkComputed:
    """A chunk has been computed: of a prompt, or of the tokens of a request that continues after a pause."""

    generation: MlxGeneration
    tokens: int
    done: bool
    """Whether it was the last chunk."""


@dataclass(frozen=True, eq=False)
class PromptScored:
    """All tokens of the prompt have been scored. Generation begins with the next step, unless ``max_tokens`` is 0."""

    generation: MlxGeneration
    scores: PromptScores


@dataclass(frozen=True, eq=False)
class TokenGenerated:
    """The next token of an answer."""

    generation: MlxGeneration
    token: int
    logprobs: mx.array
    finish: Literal["stop", "length"] | None
    """Why the answer ends with this token. At ``stop``, the token is an end-of-sequence token, which has no text."""


Event = ChunkComputed | PromptScored | TokenGenerated


class PromptScoring:
    """Scores the prompt of one request in chunks. Its cache is then used for generation."""

    def __init__(self, generation: MlxGeneration, model: ChatWeights) -> None:
        self.generation = generation
        self._model = model
        self.layers: list[Any] = make_prompt_cache(model.model)
        """The caches of all tokens that were scored, except the last one."""
        self._scores = [self._unscored(0)]

    @property
    def is_done(self) -> bool:
        return len(self._scores) == len(self.generation.prompt)

    @property
    def scores(self) -> PromptScores:
        return PromptScores(tokens=tuple(self._scores))

    def skip(self, tokens: int, layers: list[Any]) -> None:
        """Leave out the scores of the first tokens, whose caches are known. Called before the first chunk.

        Args:
            tokens: Number of tokens in the caches. The first score is that of the second token after them.
            layers: The caches, which this object changes.
        """
        self.layers = layers
        self._scores = [self._unscored(at) for at in range(tokens + 1)]

    def advance(self, chunk: int) -> int:
        """Score at most ``chunk`` more tokens, and return how many."""
        prompt, at = self.generation.prompt, len(self._scores) - 1
        inputs = prompt[at : min(at + min(chunk, SCORED_CHUNK_TOKENS), len(prompt) - 1)]
        if not inputs:
            return 0
        logits = self._model.model(mx.array([inputs]), cache=self.layers)[0]
        mx.eval(logits, [layer.state for layer in self.layers])
        top = self.generation.request.top_logprobs or 0
        targets = prompt[at + 1 : at + 1 + len(inputs)]
        for row, token in zip(as_rows(logits), targets, strict=True):
            self._scores.append(prompt_token(self._model.vocabulary, row, token, top))
        return len(inputs)

    def _unscored(self, at: int) -> TokenLogprob:
        token, vocabulary = self.generation.prompt[at], self._model.vocabulary
        return TokenLogprob(token=token, text=vocabulary.text_of(token), bytes=vocabulary.bytes_of(token), logprob=None)


class Batch:
    """Computes requests and returns the events of each step. Deadlines, readers and text are handled by the caller."""

    def __init__(
        self,
        model: ChatWeights,
        samplers: Samplers,
        threads: ThreadChoice,
        *,
        slots: int,
        prompts: int,
        prefix_bytes: int,
        disk: DiskPrefixes | None = None,
        wired: bool,
        prompt_lookup: bool,
    ) -> None:
        self._model = model
        self._samplers = samplers
        self._threads = threads
        self._generations: dict[int | None, MlxGeneration] = {}
        self._scorings: list[PromptScoring] = []
        smallest = MIN_CHUNK_TOKENS if model.traits.plain else max(MIN_CHUNK_TOKENS, 16)
        self._pace = PrefillPace(minimum=smallest, maximum=memory.MAX_CHUNK_TOKENS)
        self.prefixes = PrefixCache(prefix_bytes)
        self._disk = disk
        self._generator = BatchGenerator(
            model.model,
            stop_tokens=[[token] for token in sorted(model.ends)],
            completion_batch_size=slots,
            prefill_batch_size=prompts,
            prefill_step_size=memory.MAX_CHUNK_TOKENS,
        )
        # Each step returns while the next one is being computed.
        threads.stream = self._generator.stream
        # Caches of other models cannot be trimmed after a rejected draft.
        can_draft = (prompt_lookup or model.draft is not None) and model.traits.plain
        self._draft_model = DraftModel(*model.draft) if model.draft is not None else None
        self._drafts = SpeculativeBatch.empty(model.model, self._generator.sampler) if can_draft else None
        self._steering = BatchSteering(model)
        self._steering.use_in(self._generator, answers=self._drafts)
        if not wired:
            # The constructor raises the limit of wired memory of macOS; closing restores it, and does nothing else.
            self._generator.close()

    @property
    def footprint(self) -> Footprint:
        """Sizes from which the memory of requests is estimated."""
        return self._model.traits.footprint

    @property
    def is_empty(self) -> bool:
        return not self._generations and not self._scorings

    def must_wait(self, generation: MlxGeneration) -> bool:
        """Return whether a request should wait for a longer prefix than any cached one: because another prompt that is
        being computed has this prefix and will be stored, or because the prefix is being read from disk.
        """
        row = generation.row
        if generation.request.score_prompt:
            return False
        if row.waits_for is not None and self._is_prefilling(row.waits_for):
            return True
        row.waits_for = next(filter(lambda other: self._serves(other, generation), self._generations.values()), None)
        if row.waits_for is not None:
            row.waits_for.row.is_waited_for = True
            return True
        if self._disk is not None and row.disk_read is None and not row.variant:
            row.disk_read = self._disk.find(row.key, self.prefixes, scope=generation.request.scope)
            return row.disk_read is None or not row.disk_read.done
        return row.disk_read is not None and not row.disk_read.done

    def _is_prefilling(self, generation: MlxGeneration) -> bool:
        # Compared by identity, because after a failure the uids of a new batch start at 0 again.
        return self._generations.get(generation.row.uid) is generation and not generation.row.is_decoding

    def _serves(self, other: MlxGeneration, generation: MlxGeneration) -> bool:
        """Return whether the cache of ``other`` will be stored, and will save ``generation`` enough tokens."""
        row = generation.row
        if not self._is_prefilling(other) or other.row.variant != row.variant:
            return False
        if other.request.scope not in (generation.request.scope, SHARED):
            return False
        if self.footprint.kv_bytes([len(other.row.tokens)]) > self.prefixes.limit_bytes:
            return False
        shared = min(common_prefix(other.row.key, row.key), len(row.tokens) - 1)
        if not self._model.traits.plain and shared < len(other.row.tokens) - 1:
            return False
        longest = self.prefixes.longest(row.key, row.variant, scope=generation.request.scope)
        return shared >= MIN_TOKENS and shared - longest >= MIN_TOKENS

    def insert(self, generation: MlxGeneration) -> None:
        """Start to compute a request, or continue a paused one, after the cached prefix of its tokens."""
        row = generation.row
        if generation.request.score_prompt and not generation.output_tokens:
            self._scorings.append(PromptScoring(generation, self._model))
        elif (hit := self.prefixes.find(row.key, row.variant, scope=generation.request.scope)) is not None:
            if not generation.output_tokens:
                generation.cached_tokens = hit.tokens
                if row.disk_read is not None:
                    generation.disk_cached_tokens = min(hit.tokens, row.disk_read.tokens)
            self._insert(generation, hit.tokens, hit.state.layers)
        else:
            self._insert(generation, 0, make_prompt_cache(self._model.model))

    def _insert(self, generation: MlxGeneration, known: int, layers: Sequence[Any]) -> None:
        """Start to compute the tokens of a request after the first ``known`` of them.

        Args:
            layers: The key-value caches of these tokens.
        """
        request, row = generation.request, generation.row
        if row.sampler is None:
            row.sampler = self._samplers.get(request.sampling, choice=generation.choice)
            row.processors = processors(request.sampling, generation.start)
            if request.min_tokens and not request.ignore_eos:
                row.processors.append(MinimumLength(request.min_tokens - len(generation.start), sorted(row.ends)))
        sampler = row.sampler
        if generation.constraint is not None:
            sampler = ConstrainedSampler(generation.constraint, sampler, normalize=request.sampling.top_p < 1)
        stop_sequences = None  # None selects those of the model.
        if request.ignore_eos:
            stop_sequences = [NO_STOP]
        elif row.ends != self._model.ends:
            stop_sequences = [StopSequences([[token] for token in sorted(row.ends)])]
        (row.uid,) = self._generator.insert(
            [row.tokens[known:]],
            max_tokens=[generation.max_tokens - generation.output_tokens],
            caches=[list(layers)],
            all_tokens=[row.tokens[:known]],
            samplers=[sampler],
            logits_processors=[row.processors or []],
            stop_sequences=stop_sequences,
        )
        row.uncomputed_tokens = len(row.tokens) - known
        self._generations[row.uid] = generation
        self._steering.add(row.uid, row.steering)
        if self._drafts is not None:
            model = self._draft_model
            row.drafter = row.drafter or (PromptLookup(row.predicted) if model is None else ModelDrafter(model))
            self._drafts.drafters[row.uid] = row.drafter

    def remove(self, generation: MlxGeneration) -> None:
        """Stop computing a request. The cache of its tokens is stored for requests with the same prefix."""
        row = generation.row
        self._scorings = [scoring for scoring in self._scorings if scoring.generation is not generation]
        if self._generations.get(row.uid) is not generation:
            return
        self._forget(row.uid)
        taken = self._generator.remove([row.uid], return_prompt_caches=self.prefixes.limit_bytes > 0)
        for layers, tokens in taken.values():
            if len(tokens) > generation.cached_tokens:
                self._store_prefix(layers, tokens, generation)

    def _forget(self, uid: int | None) -> None:
        del self._generations[uid]
        self._steering.remove(uid)
        if self._drafts is not None and uid is not None:
            self._drafts.drafters.pop(uid, None)

    def can_pause(self, generation: MlxGeneration) -> bool:
        """Return whether a request decodes, and the cache of its tokens can be stored until it continues."""
        row = generation.row
        if self._generations.get(row.uid) is not generation or not row.is_decoding:
            return False
        length = len(generation.prompt) + generation.output_tokens
        return self.footprint.kv_bytes([length]) <= self.prefixes.limit_bytes

    def pause(self, generation: MlxGeneration) -> TokenGenerated:
        """Stop computing a request that decodes, and return its next token, which is already sampled. ``insert``
        continues the request with this token.

        Its cache is stored as a prefix. If it is dropped there, its tokens are computed again.
        """
        batch = self._generator._generation_batch
        tokens = list(batch.tokens[batch.uids.index(generation.row.uid)])
        event = self._take_next(generation)
        generation.row.is_decoding = False
        generation.row.set_tokens([*tokens, event.token])
        return event

    def step(self) -> list[Event]:
        """Compute one token of each answer that decodes, or several of a single one, and one chunk of each prompt."""
        decoding = self._decoding
        prompts = len(self._generations) - decoding + bool(self._scorings)
        chunk = self._pace.chunk(prompts=prompts, decoding=decoding)
        self._generator.prefill_step_size = chunk
        waiting = [*self._generations.values(), *(scoring.generation for scoring in self._scorings)]
        uncomputed_tokens = sum(generation.row.uncomputed_tokens for generation in waiting)
        self._threads.prepare(decoding + min(prompts * chunk, uncomputed_tokens))
        started = time.perf_counter()
        # Tokens that reach ``max_tokens`` of their requests are sampled already. Left in the batch, these requests
        # would cost one more forward pass, whose token is not needed: half the time of a one-token answer.
        ending = [
            generation
            for generation in self._generations.values()
            if generation.row.is_decoding and generation.output_tokens + 1 == generation.max_tokens
        ]
        events: list[Event] = [self._take_next(generation) for generation in ending]
        events += self._score(chunk)
        scored_tokens = sum(event.tokens for event in events if isinstance(event, ChunkComputed))
        progress, tokens = self._generator.next() if self._generations else ([], [])
        now = time.perf_counter()
        self.note_peak(memory.take_peak_bytes())
        computed = []
        for response in progress:
            generation = self._generations[response.uid]
            row, (done, total) = generation.row, response.progress
            chunk_tokens = row.uncomputed_tokens - (total - done)
            row.uncomputed_tokens -= chunk_tokens
            if not generation.output_tokens:
                generation.computed_tokens += chunk_tokens
            if response.end_of_prompt:
                row.is_decoding = True
                generation.decoding_at = generation.decoding_at or now
            elif done == total - 1 and (row.is_waited_for or not self._model.traits.plain):
                # All tokens but the last one: an equal prompt, which needs one token to compute, can use this cache
                # even if caches of the model cannot be trimmed.
                layers, tokens_of_layers = self._generator.extract_cache([response.uid])[response.uid]
                self._store_prefix(layers, tokens_of_layers, generation)
            computed.append(ChunkComputed(generation, chunk_tokens, done=response.end_of_prompt))
        prompt_tokens = scored_tokens + sum(event.tokens for event in computed)
        self._pace.record(now - started, prompt_tokens=prompt_tokens, decoding=decoding)
        for response in tokens:
            generation = self._generations[response.uid]
            if response.finish_reason is not None:
                self._forget(response.uid)
                self._store_prefix(response.prompt_cache or (), response.all_tokens or (), generation)
            finish = cast("Literal['stop', 'length'] | None", response.finish_reason)
            events.append(TokenGenerated(generation, response.token, response.logprobs, finish))
        # Tokens first: a request that starts to decode with this step has none yet.
        return [*events, *computed]

    def _take_next(self, generation: MlxGeneration) -> TokenGenerated:
        """Remove a request that decodes, and return its next token, which is already sampled."""
        # mlx-lm has no public way to read the sampled tokens. Its version is bounded, and tests check this attribute.
        batch = self._generator._generation_batch
        row = batch.uids.index(generation.row.uid)
        token, logprobs = int(batch._next_tokens[row].item()), batch._next_logprobs[row]
        ended = not generation.request.ignore_eos and token in generation.row.ends
        is_last = generation.output_tokens + 1 == generation.max_tokens
        self.remove(generation)
        return TokenGenerated(generation, token, logprobs, "stop" if ended else "length" if is_last else None)

    def remaining_s(self, generation: MlxGeneration) -> float:
        """Return the estimated time until the last token of a request, from the durations of previous steps."""
        output = generation.max_tokens - generation.output_tokens
        return self._pace.estimate_s(
            prompt_tokens=generation.row.uncomputed_tokens, output_tokens=output, decoding=self._decoding
        )

    @property
    def decode_s(self) -> float:
        """Estimated duration of a step that computes only the next token of each answer; 0 if it is not known."""
        return self._pace.estimate_s(prompt_tokens=0, output_tokens=1, decoding=self._decoding)

    @property
    def _decoding(self) -> int:
        # A copy, because other threads estimate when a slot is free.
        return sum(generation.row.is_decoding for generation in list(self._generations.values()))

    def _score(self, chunk: int) -> list[Event]:
        """Score one chunk of the prompt that arrived first."""
        if not self._scorings:
            return []
        scoring = self._scorings[0]
        generation = scoring.generation
        row = generation.row
        if not generation.computed_tokens and self._model.traits.plain:
            # Tokens before the first one whose score is needed are taken from the prefix cache only when the scoring
            # begins, because requests before it may have the same beginning.
            before = row.key[: generation.request.score_from]
            if (hit := self.prefixes.find(before, row.variant, scope=generation.request.scope)) is not None:
                scoring.skip(hit.tokens, hit.state.copied_layers())
                generation.cached_tokens = hit.tokens
                row.uncomputed_tokens -= hit.tokens
        with mx.stream(self._generator.stream), self._steering.alone(row.steering):
            generation.computed_tokens += (tokens := scoring.advance(chunk))
        row.uncomputed_tokens -= tokens
        if not scoring.is_done:
            return [ChunkComputed(generation, tokens, done=False)]
        del self._scorings[0]
        if generation.max_tokens:
            self._insert(generation, len(generation.prompt) - 1, scoring.layers)
        elif self._model.traits.plain:
            # The tokens before the first one whose score is needed may be a question that several choices follow.
            length = len(generation.prompt) - 1
            unscored = min(generation.request.score_from, length)
            if unscored - generation.cached_tokens >= MIN_TOKENS:
                state = KvState(scoring.layers).trimmed(length - unscored)
                self._store_prefix(state.layers, generation.prompt[:unscored], generation)
        return [ChunkComputed(generation, tokens, done=False), PromptScored(generation, scoring.scores)]

    def note_peak(self, peak: int) -> None:
        """Record the peak memory of a step for the requests that ran in it."""
        for generation in self._generations.values():
            generation.peak_memory_bytes = max(generation.peak_memory_bytes, peak)

    def logprob(self, event: TokenGenerated) -> TokenLogprob | None:
        """Return the log-probability of a token; None if its request does not need it."""
        request = event.generation.request
        top = request.top_logprobs
        if top is None:
            return None
        row, ends = as_rows(event.logprobs)[0], event.finish == "stop"
        if request.after_sampling:
            row = log_softmax(drawn_scores(row, request.sampling))
        named = event.generation.named_tokens
        return answer_token(self._model.vocabulary, row, event.token, top, named=named, ends=ends)

    def _store_prefix(self, layers: Sequence[Any], tokens: Sequence[int], generation: MlxGeneration) -> None:
        variant, scope = generation.row.variant, generation.request.scope
        # Evaluating the cache of a batch is a copy, which is made only if it may be stored.
        # The size is known before the copy is made.
        if len(tokens) >= MIN_TOKENS and 0 < KvState(layers).nbytes <= self.prefixes.limit_bytes:
            state = KvState.evaluated(layers)
            # The files have no variants.
            is_new = self.prefixes.store(tokens, state, variant, scope=scope)
            if is_new and self._disk is not None and not variant:
                self._disk.store(tokens, state, scope=scope)
