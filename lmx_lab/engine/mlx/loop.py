"""Run the requests of one chat model on the engine thread, from the queue to their end."""

from __future__ import annotations

import logging
import math
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import mlx.core as mx

from lmx_lab.engine.answers import Answers
from lmx_lab.engine.cpu_blas import ThreadChoice
from lmx_lab.engine.encoders.loading import LoadedEncoder
from lmx_lab.engine.memory import Budget, prefix_cache_bytes
from lmx_lab.engine.mlx import memory
from lmx_lab.engine.mlx.batch import Batch, ChunkComputed, Event, MlxGeneration, MlxRow, PromptScored, TokenGenerated
from lmx_lab.engine.mlx.prefix_cache import DiskPrefixes
from lmx_lab.engine.mlx.sampling import Samplers
from lmx_lab.engine.mlx.weights import ChatWeights
from lmx_lab.engine.prefix_files import PrefixFiles
from lmx_lab.engine.scheduler import Turns, Verdict
from lmx_lab.errors import ContextLengthError, EngineError, LabError, OutOfMemoryError
from lmx_lab.settings import Settings
from lmx_lab.values.engine import BlasReport
from lmx_lab.values.outputs import PromptProgress
from lmx_lab.values.plan import STEP_TOKENS
from lmx_lab.values.timeline import StepKind

log = logging.getLogger(__name__)
UNLOAD_ABOVE = 1.1
"""Memory in use, as a multiple of what is allowed, above which the model is unloaded. Exceeding the limit a little is
better than not answering. Memory that other programs or a notebook take does not unload a model."""


class Room:
    """The memory that all models and requests share. Belongs to the engine thread.

    Args:
        device_bytes: How much all models and requests may use on a GPU with memory of its own; None if they use that of
            the machine, whose limit is ``budget``.
        models: The models in memory.
    """

    return_s = 1.0
    """Minimum time between two returns of freed memory, which take 10 ms, and between two calls of ``Budget.evict``."""

    def __init__(
        self, budget: Budget, device_bytes: int | None, models: Mapping[Any, GenerationLoop | LoadedEncoder]
    ) -> None:
        self._budget = budget
        self._device_bytes = device_bytes
        self._models = models
        self._returned_at = self._evicted_at = -math.inf
        """When freed memory was last returned, and when ``Budget.evict`` was last called (``time.perf_counter``)."""
        self.loading_bytes = 0
        """Weights of the model that is being loaded."""

    @property
    def loops(self) -> list[GenerationLoop]:
        """Those of the chat models."""
        return [each for each in self._models.values() if isinstance(each, GenerationLoop)]

    @property
    def allowed_bytes(self) -> int:
        """How much all models and requests may use, on all engines, if nothing else needs memory."""
        return self._budget.allowed_bytes if self._device_bytes is None else self._device_bytes

    @property
    def limit_bytes(self) -> int:
        """How much they may use now. Read at each decision."""
        return self._budget.limit_bytes if self._device_bytes is None else self._device_bytes

    @property
    def used_bytes(self) -> int:
        """How much they use now."""
        return self._budget.used_bytes if self._device_bytes is None else memory.used_bytes()

    def needed_by_others(self, loop: GenerationLoop) -> int:
        """Return what all models and requests but those of this loop need, without cached prefixes."""
        needed = self.used_bytes - memory.used_bytes() + self.loading_bytes
        for each in self._models.values():
            if each is not loop:
                needed += each.running_bytes if isinstance(each, GenerationLoop) else each.memory_bytes
        return needed

    def is_busy_beside(self, loop: GenerationLoop) -> bool:
        """Return whether the requests of other loops will release memory when they end."""
        return any(each is not loop and each.answers.scheduler.running for each in self.loops)

    def keep_prefixes(self, limit_bytes: int) -> None:
        """Drop caches of ended requests, of all loops, until at most ``limit_bytes`` are left. The cache that was not
        used for the longest time is dropped first.
        """
        caches = [loop.batch.prefixes for loop in self.loops if loop.batch is not None]
        while sum(cache.nbytes for cache in caches) > limit_bytes:
            min((cache for cache in caches if len(cache)), key=lambda cache: cache.oldest_at).drop_oldest()

    def free(self, excess_bytes: int) -> None:
        """Return freed memory, then drop caches of ended requests, until ``excess_bytes`` are released; call
        ``evict`` if that is not enough.
        """
        excess_bytes -= self.return_freed()
        kept = sum(loop.prefix_cache_bytes for loop in self.loops)
        if excess_bytes > 0 and kept:
            self.keep_prefixes(max(0, kept - excess_bytes))
            excess_bytes -= kept - sum(loop.prefix_cache_bytes for loop in self.loops)
            memory.release()
        if excess_bytes > 0:
            self.evict(excess_bytes)

    def shortage(self, needed_bytes: int, *, tokens: int) -> ContextLengthError | None:
        """Free memory for a text beside the running answers if needed. Return an error if there is still too little,
        and None otherwise.
        """
        if (excess := self.used_bytes + needed_bytes - self.limit_bytes) > 0:
            self.free(excess)
        if (used := self.used_bytes) + needed_bytes <= (limit := self.limit_bytes):
            return None
        return ContextLengthError(
            f"a text of {tokens} tokens needs {needed_bytes / 1e9:.2f} GB in addition to the {used / 1e9:.2f} GB in "
            f"use, and {limit / 1e9:.2f} GB are allowed; shorten it, or raise memory_limit_bytes"
        )

    def return_freed(self) -> int:
        """Clear MLX's cache, and at most once a second also return memory that the C library keeps for reuse.

        Returns how much this was.
        """
        if self._device_bytes is not None:
            return 0
        before, now = self._budget.unlowered_bytes, time.perf_counter()
        if now < self._returned_at + self.return_s:
            mx.clear_cache()
        else:
            memory.return_freed()
            self._returned_at = now
        return max(0, self._budget.unlowered_bytes - before)

    def evict(self, missing_bytes: int) -> None:
        """Request that idle models are unloaded; see ``Budget.evict``."""
        now = time.perf_counter()
        if self._device_bytes is None and now >= self._evicted_at + self.return_s:
            self._evicted_at = now
            self._budget.evict(missing_bytes)

    def note_peak(self, peak: int) -> None:
        """Record the peak memory of texts or traces for the running requests."""
        for loop in self.loops:
            loop.note_peak(peak)


class GenerationLoop:
    """Runs the requests of one chat model in a batch: the ``Computation`` of the MLX engine.

    Belongs to the engine thread. Other threads may read ``answers``, ``written_bytes`` and ``prefix_cache_bytes``.

    Args:
        weights: The model. This object does not refer to it after ``close``.
        post: See ``Answers``.
        room: The memory that all models and requests share.
    """

    def __init__(
        self,
        weights: ChatWeights,
        settings: Settings,
        *,
        prompt_lookup: bool,
        turns: Turns,
        post: Callable[[Callable[[], object]], object],
        room: Room,
    ) -> None:
        self._weights: ChatWeights | None = weights
        self._settings = settings
        self._prompt_lookup = prompt_lookup
        self._room = room
        self.batch: Batch | None = None
        self.disk: DiskPrefixes | None = None
        self.written_bytes = 0
        """Number of bytes that were written to disk."""
        self.used_s = 0.0
        """Time of its steps. Of several models with work, the one with the least time is next."""
        self._step = 0
        """Number of the current step, which requests that are computed together have in common."""
        self._step_started_at = 0.0
        self._step_requests = 0
        """Number of requests that had a slot when the current step began."""
        self._kv_key, self._kv_bytes = (0, 0), 0
        """Number of running requests and length of the longest KV cache in ``STEP_TOKENS``; size of all caches."""
        self.answers: Answers[MlxRow] = Answers(self, slots=settings.slots, turns=turns, post=post)

    @property
    def weights(self) -> ChatWeights | None:
        """The model; None after ``close``."""
        return self._weights

    @property
    def idle(self) -> bool:
        return self.answers.scheduler.idle

    @property
    def is_saving(self) -> bool:
        """Whether states of ended requests are still to be written to disk."""
        return self.disk is not None and self.disk.is_busy

    @property
    def prefix_cache_bytes(self) -> int:
        batch = self.batch
        return batch.prefixes.nbytes if batch is not None else 0

    @property
    def running_bytes(self) -> int:
        """Estimated memory of the model and of its running requests when they end."""
        if self._weights is None:
            return 0
        lengths = [len(each.prompt) + each.max_tokens for each in self.answers.scheduler.running]
        chunk = memory.MAX_CHUNK_TOKENS if lengths else 0
        return self._weights.traits.footprint.running_bytes(lengths, chunk=chunk)

    @property
    def decode_s(self) -> float:
        """Estimated duration of a step that computes only the next token of each answer; 0 if it is not known."""
        return self.batch.decode_s if self.batch is not None else 0.0

    def start(self, threads: ThreadChoice, samplers: Samplers, blas: BlasReport) -> None:
        """Prepare to compute requests. Called once, on the engine thread."""
        assert self._weights is not None
        self._threads, self._samplers = threads, samplers
        if (files := PrefixFiles.of(self._settings)) is not None:
            arithmetic = [*self._weights.arithmetic(), blas.name, blas.detail]
            self.disk = DiskPrefixes(files, self._weights.entry, arithmetic)
        self.batch = self._new_batch(self._weights)

    def close(self, error: LabError) -> None:
        """End the requests, and release the model. ``Answers.deliver`` passes the errors on."""
        try:
            self.answers.end_all(error)
        finally:
            if self.disk is not None:
                self.disk.close(self.batch.prefixes if self.batch is not None else None)
                self.written_bytes = self.disk.written_bytes
            self._weights = self.batch = self.disk = None

    def _new_batch(self, model: ChatWeights) -> Batch:
        settings = self._settings
        # On a CPU, several long prompts that are computed together would all end later. Short prompts are faster
        # together than in small chunks between the tokens of running answers.
        prefills, lanes = (1, settings.slots) if mx.default_device() == mx.cpu else (settings.slots, settings.slots)
        if not model.traits.prompts_together:
            prefills = lanes = 1
        self.answers.scheduler.prefills, self.answers.scheduler.lanes = prefills, lanes
        return Batch(
            model,
            self._samplers,
            self._threads,
            slots=settings.slots,
            prompts=min(lanes, settings.slots),
            prefix_bytes=prefix_cache_bytes(settings.prefix_cache_bytes, self._room.allowed_bytes),
            disk=self.disk,
            wired=settings.wired_memory,
            prompt_lookup=self._prompt_lookup,
        )

    def add(self, generations: Sequence[MlxGeneration]) -> None:
        """Queue the answers to one request."""
        first, uncached = generations[0], None
        if self.batch is not None and not first.request.score_prompt:
            # A prompt whose beginning is cached takes as little time as a short one.
            longest = self.batch.prefixes.longest(first.row.key, first.row.variant, scope=first.request.scope)
            uncached = len(first.prompt) - longest
        self.answers.add(generations, uncached=uncached)

    def step(self, *, computes: bool, idle: bool) -> None:
        """Perform one step: check deadlines, start queued requests, compute one step of the batch.

        Args:
            computes: Whether it is the turn of this model to compute.
            idle: Whether no model computes answers, so that this may wait a few milliseconds for a disk.

        Raises:
            OutOfMemoryError: there is too little memory for this model, which must be unloaded. Its requests have
                ended with this error.
        """
        started = time.perf_counter()
        try:
            self._advance(computes=computes, idle=idle)
        except Exception as exc:
            failure = self._fail_step(exc)
        else:
            return
        finally:
            self.used_s += time.perf_counter() - started
        # Raised outside the handler, in which it would refer to the frames of the failed step. For the same reason,
        # this method has no variables that refer to the model.
        if isinstance(failure, OutOfMemoryError):
            raise failure

    def _advance(self, *, computes: bool, idle: bool) -> None:
        self.answers.update(time.perf_counter())
        if (batch := self.batch) is None:
            return
        if computes and not batch.is_empty:
            self._compute(batch)
        if self.disk is not None:
            self.disk.advance(batch.prefixes, idle=idle and batch.is_empty)
            self.written_bytes = self.disk.written_bytes

    def _compute(self, batch: Batch) -> None:
        """Compute one step of the batch."""
        self._step += 1
        running = self.answers.scheduler.running
        self._step_requests, self._step_started_at = len(running), time.perf_counter()
        events = batch.step()
        lengths = [
            len(each.prompt) + each.output_tokens
            if each.row.is_decoding
            else len(each.row.tokens) - each.row.uncomputed_tokens
            for each in running
        ]
        key = (len(lengths), -(-max(lengths, default=0) // STEP_TOKENS))
        # Not at each step: the caches grow by ``STEP_TOKENS``, and the sum over the layers takes tens of microseconds.
        if key != self._kv_key:
            self._kv_key, self._kv_bytes = key, batch.footprint.kv_bytes(lengths)
        for event in events:
            # A request may have ended with one of several tokens of this step.
            if event.generation in self.answers.scheduler:
                self._process(batch, event)
        room = self._room
        if (excess_bytes := room.used_bytes - room.limit_bytes) > 0:
            # The estimates were too low, or other engines or programs use more than at the start of these requests.
            room.free(excess_bytes)
            if (used_bytes := room.used_bytes) > UNLOAD_ABOVE * (allowed := room.allowed_bytes):
                raise MemoryError(f"{used_bytes / 1e9:.2f} GB are in use, {allowed / 1e9:.2f} GB are allowed")

    # Computation

    def judge(self, generation: MlxGeneration) -> Verdict:
        """See ``Computation``. May drop cached prefixes to make room for it."""
        if (batch := self.batch) is None:
            return Verdict.BLOCKED
        if batch.must_wait(generation):
            return Verdict.LATER
        running = self.answers.scheduler.running
        # The prompt, and an answer of maximum length.
        lengths = [len(each.prompt) + each.max_tokens for each in (*running, generation)]
        needed = self._room.needed_by_others(self)
        needed += batch.footprint.running_bytes(lengths, chunk=memory.MAX_CHUNK_TOKENS)
        room = self._room
        if needed > room.limit_bytes:
            room.return_freed()
        if (missing := needed - room.limit_bytes) > 0:
            room.evict(missing)
            # A request always fits alone, because the context length is limited by memory.
            if running or room.is_busy_beside(self):
                return Verdict.BLOCKED
        room.keep_prefixes(max(0, -missing))
        return Verdict.TAKE

    def begin(self, generation: MlxGeneration) -> None:
        if self.batch is not None:
            self.batch.insert(generation)
            self.answers.post(generation, _progress(generation))

    def can_pause(self, generation: MlxGeneration) -> bool:
        return self.batch is not None and self.batch.can_pause(generation)

    def pause(self, generation: MlxGeneration) -> None:
        """See ``Computation``. The next token is already sampled."""
        if self.batch is not None:
            self._process(self.batch, self.batch.pause(generation))

    def resume(self, generation: MlxGeneration) -> None:
        if self.batch is not None:
            generation.mailbox.steps.start(time.perf_counter())
            self.batch.insert(generation)

    def remove(self, generation: MlxGeneration) -> None:
        _count_drafts(generation)
        if self.batch is not None:
            self.batch.remove(generation)

    def remaining_s(self, generation: MlxGeneration) -> float:
        """See ``Computation``. Estimated from the durations of previous steps."""
        batch = self.batch
        return batch.remaining_s(generation) if batch is not None else math.inf

    # Events of the batch

    def _process(self, batch: Batch, event: Event) -> None:
        """Handle an event. An error ends only the request of the event."""
        generation = event.generation
        try:
            match event:
                case ChunkComputed():
                    self._log_step(generation, "prefill", event.tokens, time.perf_counter())
                    if not generation.output_tokens:
                        self.answers.post(generation, _progress(generation))
                    if event.done:
                        self.answers.scheduler.prefilled(generation)
                case PromptScored():
                    if (steering := generation.row.steering) is not None:
                        steering.check([each.logprob for each in event.scores.tokens])
                    self.answers.scored(generation, event.scores, time.perf_counter())
                case TokenGenerated():
                    if (steering := generation.row.steering) is not None:
                        steering.check(event.logprobs)
                    now = time.perf_counter()
                    self._log_step(generation, "decode", 1, now)
                    _count_drafts(generation)
                    logprob, reason = batch.logprob(event), _finish(generation, event)
                    # The token that ends the text has no text; a token that completes a grammar has.
                    hidden = event.finish == "stop"
                    delta = generation.add(event.token, now, ids=(event.token,), entry=None if hidden else logprob)
                    self.answers.post(generation, delta)
                    if generation.finish is None and reason is not None:
                        self.answers.post(generation, generation.complete(reason, logprob if hidden else None))
                    if generation.finish is not None:
                        self.answers.end(generation, generation.report(now))
        except LabError as exc:
            self.answers.end(generation, exc)
        except Exception as exc:
            # The error concerns only the text or the log-probabilities of this answer. Other answers continue.
            log.exception("a generation failed")
            self.answers.end(generation, EngineError(f"the generation failed: {type(exc).__name__}: {exc}"))

    def _log_step(self, generation: MlxGeneration, kind: StepKind, tokens: int, now: float) -> None:
        """Record what the current step has computed for a request."""
        steps = generation.mailbox.steps
        steps.add(
            kind,
            self._step_started_at,
            now,
            tokens=tokens,
            step=self._step,
            requests=self._step_requests,
            kv_bytes=self._kv_bytes,
        )

    def note_peak(self, peak: int) -> None:
        """Record the peak memory of other work for the running requests."""
        if self.batch is not None:
            self.batch.note_peak(peak)

    def _fail_step(self, exc: Exception) -> LabError:
        """End the running requests, and return their error. Queued requests also end if memory is short, and run in a
        new batch otherwise.
        """
        # Logged as text, because the frames of an exception refer to the batch, and so to weights that may be released.
        log.error("engine step failed:\n%s", "".join(traceback.format_exception(exc)))
        exc.__traceback__ = None
        self.batch = None
        if memory.is_out_of_memory(exc):
            what = f"out of memory, the model was unloaded: {exc}; load it again, or a smaller one"
            failure: LabError = OutOfMemoryError(what)
            self.answers.end_all(failure)
            return failure
        failure = EngineError(f"the generation failed inside the engine: {type(exc).__name__}: {exc}")
        self.answers.end_all(failure, running_only=True)
        if self._weights is not None:
            self.batch = self._new_batch(self._weights)
        return failure


def _progress(generation: MlxGeneration) -> PromptProgress:
    return PromptProgress(done=generation.cached_tokens + generation.computed_tokens, total=len(generation.prompt))


def _count_drafts(generation: MlxGeneration) -> None:
    if (drafter := generation.row.drafter) is not None:
        generation.drafted_tokens, generation.accepted_tokens = drafter.drafted, drafter.accepted


def _finish(generation: MlxGeneration, event: TokenGenerated) -> Literal["stop", "length"] | None:
    """Return why the answer ends with this token, apart from stop strings; None if it continues.

    Raises:
        LabError: the grammar can no longer be enforced.
    """
    constraint, tokens = generation.constraint, generation.output_tokens + 1
    if constraint is None:
        return event.finish
    if constraint.tokens < tokens:
        # The last of ``max_tokens`` tokens: no token was sampled after it, so the constraint was not advanced.
        constraint.advance(event.token)
    if constraint.tokens > tokens:
        # One of several tokens of a pass. The constraint has already recorded the last one of them.
        return event.finish
    if constraint.failure is not None:
        raise constraint.failure
    return "stop" if constraint.complete else event.finish
