"""Run the requests of a chat model on the engine thread, from the queue to their end."""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import mlx.core as mx

from lmx_lab.engine.admission import AdmissionControl
from lmx_lab.engine.cpu_blas import ThreadChoice
from lmx_lab.engine.memory import prefix_cache_bytes
from lmx_lab.engine.mlx import memory
from lmx_lab.engine.mlx.batch import Batch, ChunkComputed, Event, PromptScored, TokenGenerated
from lmx_lab.engine.mlx.disk_prefixes import DiskPrefixes
from lmx_lab.engine.mlx.kv_cache import STEP_TOKENS
from lmx_lab.engine.mlx.model import LoadedModel
from lmx_lab.engine.mlx.request import MlxGeneration
from lmx_lab.engine.mlx.sampling import Samplers
from lmx_lab.engine.prefix_files import PrefixFiles
from lmx_lab.engine.scheduler import Scheduler, SlotTimes, Turns, Verdict
from lmx_lab.engine.stream import Outbox
from lmx_lab.engine.text.splitter import SplitText
from lmx_lab.errors import EngineError, GenerationTimeoutError, LabError, OutOfMemoryError
from lmx_lab.settings import Settings
from lmx_lab.values.engine import BlasReport, TokenTotals
from lmx_lab.values.outputs import Delta, GenerationReport, PromptProgress, TokenLogprob
from lmx_lab.values.timeline import StepKind

log = logging.getLogger(__name__)
UNLOAD_ABOVE = 1.1
"""Memory in use, as a multiple of the limit, above which the model is unloaded. Exceeding the limit a little is better
than not answering."""


class GenerationLoop:
    """Runs the requests of one chat model, which ``use`` sets, in a batch. Belongs to the engine thread.

    Args:
        used_bytes: Returns how much of the memory limit all models and requests use now, on all engines.
        other_bytes: The same for the models and requests of other loops and engines.
    """

    def __init__(
        self,
        settings: Settings,
        threads: ThreadChoice,
        *,
        turns: Turns,
        blas: BlasReport,
        limit_bytes: int,
        used_bytes: Callable[[], int],
        other_bytes: Callable[[], int],
    ) -> None:
        self._settings = settings
        self._blas = blas
        self._threads = threads
        self._limit_bytes = limit_bytes
        self._used_bytes = used_bytes
        self._other_bytes = other_bytes
        self._scheduler: Scheduler[MlxGeneration] = Scheduler(slots=settings.slots, prefills=1, lanes=1, turns=turns)
        self._slot_times = SlotTimes()
        self._samplers = Samplers()
        self._outbox = Outbox()
        self._model: LoadedModel | None = None
        self._disk: DiskPrefixes | None = None
        self._written_bytes_before = 0
        self._prompt_lookup = False
        self._step = 0
        """Number of the current step, which requests that are computed together have in common."""
        self._step_started_at = 0.0
        self._step_requests = 0
        """Number of requests that had a slot when the current step began."""
        self._kv_key, self._kv_bytes = (0, 0), 0
        """Number of running requests and length of the longest KV cache in ``STEP_TOKENS``; size of all caches."""
        self.batch: Batch | None = None
        self.totals = TokenTotals()

    @property
    def running(self) -> list[MlxGeneration]:
        return self._scheduler.running

    @property
    def queued(self) -> list[MlxGeneration]:
        return self._scheduler.queued

    @property
    def idle(self) -> bool:
        return self._scheduler.idle

    @property
    def is_saving(self) -> bool:
        """Whether states of ended requests are still to be written to disk."""
        return self._disk is not None and self._disk.is_busy

    @property
    def prefix_cache_bytes(self) -> int:
        return self.batch.prefixes.nbytes if self.batch else 0

    @property
    def slot_free_s(self) -> float:
        """Estimated time until one of the running requests ends, based on earlier requests and on its last token."""
        running = self.running
        if self.batch is None or len(running) < self._scheduler.slots:
            return 1.0
        return self._slot_times.free_in_s(
            running=len(running),
            oldest_s=time.perf_counter() - min(generation.admitted_at for generation in running),
            at_most_s=min(self.batch.remaining_s(generation) for generation in running),
        )

    @property
    def decode_s(self) -> float:
        """Estimated duration of a step that computes only the next token of each answer; 0 if it is not known."""
        return self.batch.decode_s if self.batch is not None else 0.0

    def use(self, model: LoadedModel | None, *, prompt_lookup: bool = False) -> None:
        """Generate with this model from now on; the requests of the previous one must have ended."""
        if self._disk is not None:
            self._disk.close(self.batch.prefixes if self.batch is not None else None)
            self._count_written_bytes(self._disk)
        self._model = self.batch = self._disk = None
        self._kv_key, self._kv_bytes = (0, 0), 0
        self._prompt_lookup = prompt_lookup
        if model is not None:
            if (files := PrefixFiles.of(self._settings)) is not None:
                self._written_bytes_before = self.totals.prefix_disk_written_bytes
                self._disk = DiskPrefixes(files, model.entry, [*model.arithmetic(), self._blas.name, self._blas.detail])
            self._model, self.batch = model, self._new_batch(model)

    def _new_batch(self, model: LoadedModel) -> Batch:
        settings = self._settings
        # On a CPU, several long prompts that are computed together would all end later. Short prompts are faster
        # together than in small chunks between the tokens of running answers.
        prefills, lanes = (1, settings.slots) if mx.default_device() == mx.cpu else (settings.slots, settings.slots)
        if not model.traits.prompts_together:
            prefills = lanes = 1
        self._scheduler.prefills, self._scheduler.lanes = prefills, lanes
        return Batch(
            model,
            self._samplers,
            self._threads,
            slots=settings.slots,
            prompts=min(lanes, settings.slots),
            prefix_bytes=prefix_cache_bytes(settings.prefix_cache_bytes, self._limit_bytes),
            disk=self._disk,
            wired=settings.wired_memory,
            prompt_lookup=self._prompt_lookup,
        )

    def add(self, generations: Sequence[MlxGeneration]) -> None:
        """Queue the answers to one request."""
        first = generations[0]
        deadline, now = first.arrived_at + first.timeout_s, time.perf_counter()
        tokens, client = len(first.prompt), first.request.caller.client
        if self.batch is not None and not first.request.score_prompt:
            # A prompt whose beginning is cached takes as little time as a short one.
            tokens -= self.batch.prefixes.longest(first.key, first.variant)
        self._scheduler.add(generations, tokens=tokens, deadline=deadline, now=now, client=client)

    def step(self) -> None:
        """Perform one step: check deadlines, start queued requests, compute one step of the batch.

        Raises:
            OutOfMemoryError: there is too little memory for this model, which must be unloaded. Its requests have
                ended with this error.
        """
        try:
            self._advance()
        except Exception as exc:
            failure = self._fail_step(exc)
        else:
            return
        # Raised outside the handler, in which it would refer to the frames of the failed step. For the same reason,
        # this method has no variables that refer to the model.
        if isinstance(failure, OutOfMemoryError):
            raise failure

    def _advance(self) -> None:
        for generation in self._scheduler.expired(time.perf_counter()):
            self._end(generation, GenerationTimeoutError.after(generation.timeout_s))
        # If a client without a slot waits, a request of another client is paused.
        if (batch := self.batch) is not None and (
            paused := self._scheduler.pause(batch.can_pause, time.perf_counter())
        ) is not None:
            self._process(batch, batch.pause(paused))
        self._start_queued()
        if (batch := self.batch) is None:
            return
        if not batch.is_empty:
            self._step += 1
            self._step_requests, self._step_started_at = len(self.running), time.perf_counter()
            events = batch.step()
            lengths = [generation.cached_length for generation in self.running]
            key = (len(lengths), -(-max(lengths, default=0) // STEP_TOKENS))
            # Not at each step: the caches grow by ``STEP_TOKENS``, and the sum over the layers takes tens of
            # microseconds.
            if key != self._kv_key:
                self._kv_key, self._kv_bytes = key, batch.footprint.kv_bytes(lengths)
            for event in events:
                # A request may have ended with one of several tokens of this step.
                if event.generation in self._scheduler.running:
                    self._process(batch, event)
            if (used_bytes := self._used_bytes()) > self._limit_bytes:
                # The estimates were too low, or other engines use more than at the start of these requests.
                self.shrink_prefixes(used_bytes - self._limit_bytes)
                if (used_bytes := self._used_bytes()) > UNLOAD_ABOVE * self._limit_bytes:
                    raise MemoryError(
                        f"{used_bytes / 1e9:.2f} GB are in use, {self._limit_bytes / 1e9:.2f} GB are allowed"
                    )
        if self._disk is not None:
            self._disk.advance(batch.prefixes, idle=batch.is_empty)
            self._count_written_bytes(self._disk)

    def _start_queued(self) -> None:
        while (batch := self.batch) is not None:
            now = time.perf_counter()
            generation = self._scheduler.admit(partial(self._judge, batch), now)
            if generation is None:
                return
            generation.mailbox.steps.start(now)
            if generation.output_tokens:
                batch.insert(generation)
                continue
            generation.admitted_at = now
            if generation.start_delta is not None:
                self._outbox.post(generation.mailbox, generation.start_delta)
            if generation.start_finish is not None:
                self._end(generation, generation.report(generation.start_finish, now))
                continue
            if not generation.max_tokens and not generation.request.score_prompt:
                self._end(generation, generation.report("length", now))
                continue
            batch.insert(generation)
            self._outbox.post(generation.mailbox, _progress(generation))

    def _judge(self, batch: Batch, generation: MlxGeneration) -> Verdict:
        """Decide whether a request starts now. May drop cached prefixes to make room for it."""
        if batch.must_wait(generation):
            return Verdict.LATER
        running = self.running
        lengths = [each.length for each in (*running, generation)]
        needed = self._other_bytes() + batch.footprint.running_bytes(lengths, chunk=memory.MAX_CHUNK_TOKENS)
        # A request always fits alone, because the context length is limited by memory.
        if needed > self._limit_bytes and running:
            return Verdict.BLOCKED
        batch.prefixes.shrink(max(0, self._limit_bytes - needed))
        return Verdict.TAKE

    def _process(self, batch: Batch, event: Event) -> None:
        """Handle an event. An error ends only the request of the event."""
        generation = event.generation
        try:
            match event:
                case ChunkComputed() if generation.output_tokens:
                    self._log_step(generation, "prefill", event.tokens, time.perf_counter())
                    if event.done:
                        self._scheduler.prefilled(generation)
                case ChunkComputed():
                    self._log_step(generation, "prefill", event.tokens, time.perf_counter())
                    self.totals.prompt_tokens += event.tokens
                    self._outbox.post(generation.mailbox, _progress(generation))
                    if event.done:
                        self._count_cached_tokens(generation)
                        self._scheduler.prefilled(generation)
                case PromptScored():
                    if generation.steering is not None:
                        generation.steering.check([each.logprob for each in event.scores.tokens])
                    self._outbox.post(generation.mailbox, event.scores)
                    if not generation.max_tokens:
                        self._count_cached_tokens(generation)
                        self._end(generation, generation.report("length", time.perf_counter()))
                case TokenGenerated():
                    self._handle_token(batch, generation, event)
        except LabError as exc:
            self._end(generation, exc)
        except Exception as exc:
            # The error concerns only the text or the log-probabilities of this answer. Other answers continue.
            log.exception("a generation failed")
            self._end(generation, EngineError(f"the generation failed: {type(exc).__name__}: {exc}"))

    def _count_written_bytes(self, disk: DiskPrefixes) -> None:
        self.totals.prefix_disk_written_bytes = self._written_bytes_before + disk.written_bytes

    def _count_cached_tokens(self, generation: MlxGeneration) -> None:
        self.totals.prompt_tokens += generation.cached_tokens
        self.totals.cached_tokens += generation.cached_tokens
        self.totals.disk_cached_tokens += generation.disk_cached_tokens

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

    def _handle_token(self, batch: Batch, generation: MlxGeneration, event: TokenGenerated) -> None:
        if generation.steering is not None:
            generation.steering.check(event.logprobs)
        now = time.perf_counter()
        self._log_step(generation, "decode", 1, now)
        generation.first_token_at = generation.first_token_at or now
        generation.output_tokens += 1
        self.totals.output_tokens += 1
        logprob = batch.logprob(event)
        finish = _finish(generation, event)
        # The token that ends the text has no text; a token that completes a grammar has.
        hidden = event.finish == "stop"
        piece = generation.splitter.add(event.token, None if hidden else logprob)
        self._outbox.post(generation.mailbox, _delta(piece, ids=(event.token,)))
        if finish is not None and not piece.stopped:
            piece = generation.splitter.finish()
            ends = (logprob,) if hidden and logprob is not None and not piece.stopped else ()
            self._outbox.post(generation.mailbox, _delta(piece, ends=ends))
        reason = "stop" if piece.stopped else finish
        if reason is not None:
            called = reason == "stop" and generation.splitter.has_called
            self._end(generation, generation.report("tool_calls" if called else reason, now))

    def shrink_prefixes(self, excess_bytes: int) -> None:
        """Drop caches of ended requests until ``excess_bytes`` are released, or no cache is left."""
        if self.batch is not None and self.batch.prefixes.nbytes:
            self.batch.prefixes.shrink(max(0, self.batch.prefixes.nbytes - excess_bytes))
            memory.release()

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
            self.end_all(self.running + self.queued, failure)
            return failure
        failure = EngineError(f"the generation failed inside the engine: {type(exc).__name__}: {exc}")
        self.end_all(self.running, failure)
        if self._model is not None:
            self.batch = self._new_batch(self._model)
        return failure

    # Ends

    def end_requests(self, admission: AdmissionControl, error: LabError, *, queued_only: bool) -> None:
        """End the generations that hold permits of this admission control."""
        generations = self._scheduler.not_started if queued_only else self.queued + self.running
        self.end_all([generation for generation in generations if generation.permit.admission is admission], error)

    def end_all(self, generations: Sequence[MlxGeneration], error: LabError) -> None:
        """End these generations with an error."""
        # A separate method, because a loop variable in the caller would keep a reference to a model that it may unload.
        for generation in generations:
            self._end(generation, error)

    def _end(self, generation: MlxGeneration, item: GenerationReport | LabError) -> None:
        self.cancel(generation)
        if generation.drafter is not None:
            self.totals.drafted_tokens += generation.drafter.drafted
            self.totals.accepted_tokens += generation.drafter.accepted
        if isinstance(item, GenerationReport):
            self._slot_times.add(item.prefill_s + item.decode_s)
        self._outbox.post(generation.mailbox, item)

    def cancel(self, generation: MlxGeneration) -> None:
        """Stop a generation and free its slot. The reader does not receive an end."""
        self._scheduler.remove(generation)
        if self.batch is not None:
            self.batch.remove(generation)
        generation.permit.release()

    def deliver(self) -> bool:
        """Pass the items to each reader's loop in one call; return whether requests of closed loops were dropped."""
        closed = self._outbox.send()
        for generation in self.queued + self.running if closed else ():
            if generation.mailbox.loop in closed:
                self.cancel(generation)
        return bool(closed)


def _progress(generation: MlxGeneration) -> PromptProgress:
    return PromptProgress(done=generation.cached_tokens + generation.computed_tokens, total=len(generation.prompt))


def _finish(generation: MlxGeneration, event: TokenGenerated) -> Literal["stop", "length"] | None:
    """Return why the answer ends with this token, apart from stop strings; None if it continues.

    Raises:
        LabError: the grammar can no longer be enforced.
    """
    constraint = generation.constraint
    if constraint is None:
        return event.finish
    if constraint.tokens < generation.output_tokens:
        # The last of ``max_tokens`` tokens: no token was sampled after it, so the constraint was not advanced.
        constraint.advance(event.token)
    if constraint.tokens > generation.output_tokens:
        # One of several tokens of a pass. The constraint has already recorded the last one of them.
        return event.finish
    if constraint.failure is not None:
        raise constraint.failure
    return "stop" if constraint.complete else event.finish


def _delta(piece: SplitText[TokenLogprob], *, ids: tuple[int, ...] = (), ends: tuple[TokenLogprob, ...] = ()) -> Delta:
    return Delta(
        text=piece.text,
        tokens=len(ids),
        ids=ids,
        logprobs=(*piece.entries, *ends),
        reasoning=piece.reasoning,
        tool_calls=piece.calls,
    )
