"""The chat model's requests on the engine thread: queue, admission, batch steps, ends."""

from __future__ import annotations

import logging
import time
import traceback
from asyncio import AbstractEventLoop
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import mlx.core as mx

from lmx_lab.engine.cpu_blas import ThreadChoice
from lmx_lab.engine.mlx import memory
from lmx_lab.engine.mlx.admission import Admission
from lmx_lab.engine.mlx.batch import Batch, Computed, Event, Scored, Token
from lmx_lab.engine.mlx.model import LoadedModel
from lmx_lab.engine.mlx.request import Generation
from lmx_lab.engine.mlx.sampling import Samplers
from lmx_lab.engine.scheduler import Scheduler
from lmx_lab.engine.stream import Outbox
from lmx_lab.engine.text.splitter import SplitText
from lmx_lab.errors import EngineError, GenerationTimeoutError, LabError, OutOfMemoryError
from lmx_lab.settings import Settings
from lmx_lab.values.generation import Delta, GenerationReport, PromptProgress, TokenLogprob

log = logging.getLogger(__name__)
UNLOAD_ABOVE = 1.1
"""Memory in use, as a multiple of the limit, that forces the model out: a little too much is better than no answer."""


@dataclass(kw_only=True)
class Totals:
    """Tokens since the engine started, as the snapshot shows them."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


class Generating:
    """Runs the requests of one chat model, which ``use`` sets, in a batch. Belongs to the engine thread."""

    def __init__(self, settings: Settings, threads: ThreadChoice, *, limit_bytes: int) -> None:
        self._settings = settings
        self._threads = threads
        self._limit_bytes = limit_bytes
        self._scheduler: Scheduler[Generation] = Scheduler(
            slots=settings.slots, queue_limit=settings.queue_limit, prefills=1, lanes=1
        )
        self._admission = Admission(self._scheduler, limit_bytes=limit_bytes)
        self._samplers = Samplers()
        self._outbox = Outbox()
        self._model: LoadedModel | None = None
        self.batch: Batch | None = None
        self.totals = Totals()
        self.ended_at = time.perf_counter()
        """When the last request ended, or a model came."""

    @property
    def running(self) -> list[Generation]:
        return self._scheduler.running

    @property
    def queued(self) -> list[Generation]:
        return self._scheduler.queued

    @property
    def idle(self) -> bool:
        return self._scheduler.idle

    @property
    def prefix_cache_bytes(self) -> int:
        return self.batch.prefixes.nbytes if self.batch else 0

    @property
    def place_free_s(self) -> float:
        """In how long one of the running requests will likely end."""
        return self._admission.place_free_s(self.batch)

    def share(self, beside_bytes: int) -> None:
        """So much of the memory limit is taken by other models."""
        self._admission.beside_bytes = beside_bytes

    def use(self, model: LoadedModel | None) -> None:
        """Generate with this model from now on; requests of the one before must have ended."""
        self._model = self.batch = None
        if model is not None:
            self._model, self.batch = model, self._new_batch(model)
            self.ended_at = time.perf_counter()

    def _new_batch(self, model: LoadedModel) -> Batch:
        settings = self._settings
        # On a CPU several long prompts at once would only all end later. Short ones are better computed together than
        # in small pieces between the tokens of those that were first.
        prefills, lanes = (1, settings.slots) if mx.default_device() == mx.cpu else (settings.slots, settings.slots)
        if not model.traits.prompts_together:
            prefills = lanes = 1
        self._scheduler.prefills, self._scheduler.lanes = prefills, lanes
        kept = self._limit_bytes // 10 if settings.prefix_cache_bytes is None else settings.prefix_cache_bytes
        return Batch(
            model,
            self._samplers,
            self._threads,
            slots=settings.slots,
            prompts=min(lanes, settings.slots),
            prefix_bytes=kept,
            wired=settings.wired_memory,
        )

    def add(self, generations: Sequence[Generation]) -> None:
        """Take the answers to one request into the queue, all or none.

        Raises:
            QueueFullError: too many wait.
        """
        first = generations[0]
        deadline = first.arrived_at + first.timeout_s
        self._scheduler.add(generations, tokens=len(first.prompt), deadline=deadline, retry_after_s=self.place_free_s)

    def cancel(self, generation: Generation) -> None:
        """The reader has left: free the slot, tell nobody."""
        self._forget(generation)

    def step(self) -> None:
        """One round: deadlines, admissions, one batch step.

        Raises:
            OutOfMemoryError: there is too little for this model, which has to go; its requests have been told.
        """
        try:
            self._expire()
            self._admit()
            if self.batch is not None and not self.batch.empty:
                self._advance(self.batch)
        except Exception as exc:
            failure = self._fail_step(exc)
        else:
            return
        # Outside the handler: there the failed step's frames would hang on to it.
        if isinstance(failure, OutOfMemoryError):
            raise failure

    def _expire(self) -> None:
        for generation in self._scheduler.expired(time.perf_counter()):
            limit = f"not finished after {generation.timeout_s:g} s, the request's limit"
            self._end(generation, GenerationTimeoutError(limit))

    def _admit(self) -> None:
        while self.batch is not None and (generation := self._admission.next(self.batch)) is not None:
            generation.admitted_at = time.perf_counter()
            if not generation.max_tokens and not generation.request.score_prompt:
                self._end(generation, generation.report("length", generation.admitted_at))
                continue
            self.batch.insert(generation)
            self._outbox.post(generation.mailbox, _progress(generation))

    def _advance(self, batch: Batch) -> None:
        for event in batch.step():
            try:
                self._take(batch, event)
            except LabError as exc:
                self._end(event.generation, exc)
            except Exception as exc:
                # Of its own: its text, or its log-probabilities. The others go on.
                log.exception("a generation failed")
                self._end(event.generation, EngineError(f"the generation failed: {type(exc).__name__}: {exc}"))
        if memory.used_bytes() > self._limit_bytes:
            self._relieve(batch)

    def _take(self, batch: Batch, event: Event) -> None:
        generation = event.generation
        match event:
            case Computed():
                self.totals.prompt_tokens += event.tokens
                self._outbox.post(generation.mailbox, _progress(generation))
                if event.done:
                    self.totals.prompt_tokens += generation.cached_tokens
                    self.totals.cached_tokens += generation.cached_tokens
                    self._scheduler.prefilled(generation)
            case Scored():
                self._outbox.post(generation.mailbox, event.scores)
                if not generation.max_tokens:
                    self._end(generation, generation.report("length", time.perf_counter()))
            case Token():
                self._take_token(batch, generation, event)

    def _take_token(self, batch: Batch, generation: Generation, event: Token) -> None:
        now = time.perf_counter()
        generation.first_token_at = generation.first_token_at or now
        generation.output_tokens += 1
        self.totals.output_tokens += 1
        logprob = batch.logprob(event)
        finish = _finish(generation, event)
        # The token that ends the text shows nothing; the one that completes a grammar does.
        silent = event.finish == "stop"
        piece = generation.splitter.add(event.token, None if silent else logprob)
        self._outbox.post(generation.mailbox, _delta(piece, tokens=1))
        if finish is not None and not piece.stopped:
            piece = generation.splitter.finish()
            ends = (logprob,) if silent and logprob is not None and not piece.stopped else ()
            self._outbox.post(generation.mailbox, _delta(piece, tokens=0, ends=ends))
        reason = "stop" if piece.stopped else finish
        if reason is not None:
            called = reason == "stop" and generation.splitter.has_called
            self._end(generation, generation.report("tool_calls" if called else reason, now))

    def _relieve(self, batch: Batch) -> None:
        """More is in use than may be: estimates were wrong. Give up what is only kept; if that is not enough, all."""
        self.shrink_prefixes(memory.used_bytes() - self._limit_bytes)
        if (used := memory.used_bytes()) > UNLOAD_ABOVE * self._limit_bytes:
            raise MemoryError(f"{used / 1e9:.2f} GB are in use, {self._limit_bytes / 1e9:.2f} GB are allowed")

    def shrink_prefixes(self, excess_bytes: int) -> None:
        """Give up so many bytes of the caches of ended requests, as far as there are any."""
        if self.batch is not None and self.batch.prefixes.nbytes:
            self.batch.prefixes.shrink(max(0, self.batch.prefixes.nbytes - excess_bytes))
            memory.release()

    def note_peak(self, peak: int) -> None:
        if self.batch is not None:
            self.batch.note_peak(peak)

    def _fail_step(self, exc: Exception) -> LabError:
        """The requests of this step fail, the others go on in a new batch, or fail too if memory is short."""
        # As text: an exception's frames hold the batch, and with it the weights that may have to go.
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

    def end_all(self, generations: Sequence[Generation], error: LabError) -> None:
        # A method of its own: a loop's variable would hold the last one's model in the caller, which may unload it.
        for generation in generations:
            self._end(generation, error)

    def _end(self, generation: Generation, item: GenerationReport | LabError) -> None:
        self._forget(generation)
        if isinstance(item, GenerationReport):
            self._admission.ended(item)
        self._outbox.post(generation.mailbox, item)

    def _forget(self, generation: Generation) -> None:
        self._scheduler.remove(generation)
        self.ended_at = time.perf_counter()
        if self.batch is not None:
            self.batch.remove(generation)

    def deliver(self) -> bool:
        """Hand each reader's loop its items in one call; whether requests went because their loops are closed."""
        closed = self._outbox.send()
        for loop in closed:
            self._forget_readers_on(loop)
        return bool(closed)

    def _forget_readers_on(self, loop: AbstractEventLoop) -> None:
        """That loop is closed: nobody is left to read, and the slots are needed."""
        for generation in self.queued + self.running:
            if generation.mailbox.loop is loop:
                self._forget(generation)


def _progress(generation: Generation) -> PromptProgress:
    return PromptProgress(done=generation.cached_tokens + generation.computed_tokens, total=len(generation.prompt))


def _finish(generation: Generation, event: Token) -> Literal["stop", "length"] | None:
    """Whether and why the answer ends with this token, its stop strings aside.

    Raises:
        LabError: its grammar is not enforced any more.
    """
    constraint = generation.constraint
    if constraint is None:
        return event.finish
    if constraint.tokens < generation.output_tokens:
        # The last one that the request has room for: nothing was drawn after it.
        constraint.advance(event.token)
    if constraint.failure is not None:
        raise constraint.failure
    return "stop" if constraint.complete else event.finish


def _delta(piece: SplitText[TokenLogprob], *, tokens: int, ends: tuple[TokenLogprob, ...] = ()) -> Delta:
    return Delta(
        text=piece.text,
        tokens=tokens,
        logprobs=(*piece.entries, *ends),
        reasoning=piece.reasoning,
        tool_calls=piece.calls,
    )
