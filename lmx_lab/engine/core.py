"""The engine's state and its steps. Everything here happens on the engine thread; only ``snapshot`` is read elsewhere.

MLX streams are thread-local: arrays made here stay here. What leaves is ints, floats and strings.
"""

from __future__ import annotations

import logging
import time
import traceback
from asyncio import AbstractEventLoop
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import mlx.core as mx

from lmx_lab.engine import loaded, memory
from lmx_lab.engine.admission import Admission
from lmx_lab.engine.batch import Batch, Computed, Event, Scored, Token
from lmx_lab.engine.generation import Generation
from lmx_lab.engine.requests import (
    Delta,
    EngineSnapshot,
    EngineState,
    GenerationReport,
    LoadReport,
    PromptProgress,
    UnloadCause,
)
from lmx_lab.engine.sampling import Samplers
from lmx_lab.engine.scheduler import Scheduler
from lmx_lab.engine.stream import Outbox
from lmx_lab.errors import (
    EngineDeadError,
    EngineError,
    GenerationTimeoutError,
    LabError,
    NotLoadedError,
    OutOfMemoryError,
)
from lmx_lab.settings import Settings
from lmx_lab.weights import ModelEntry

T = TypeVar("T")
log = logging.getLogger(__name__)
UNLOAD_ABOVE = 1.1
"""Memory in use, as a multiple of the limit, that forces the model out: a little too much is better than no answer."""


@dataclass(kw_only=True)
class Swap:
    """A load or unload that waits for running requests to end, until ``deadline`` at the latest."""

    perform: Callable[[], Any]
    why: str
    """What the requests that do not end in time are told."""
    deadline: float
    finish_queued: bool
    """Whether requests in the queue are still served before it."""
    done: Future[Any] = field(default_factory=Future)


@dataclass(kw_only=True)
class Totals:
    """Tokens since the engine started, as the snapshot shows them."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


class EngineCore:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._limit_bytes = memory.limit_bytes(settings.memory_limit_bytes)
        self._scheduler: Scheduler[Generation] = Scheduler(
            slots=settings.slots, queue_limit=settings.queue_limit, prefills=1, lanes=1
        )
        self._admission = Admission(self._scheduler, limit_bytes=self._limit_bytes)
        self._samplers = Samplers()
        self._model: loaded.LoadedModel | None = None
        self._batch: Batch | None = None
        self._swaps: deque[Swap] = deque()
        self._outbox = Outbox()
        self._used_at = time.perf_counter()
        self._totals = Totals()
        self.snapshot = EngineSnapshot(memory_total_bytes=memory.total_bytes(), progress_at=time.perf_counter())

    @property
    def model(self) -> loaded.LoadedModel | None:
        """The loaded model; its ``prompts`` may be used by the prompt thread."""
        return self._model

    # Commands

    @property
    def idle(self) -> bool:
        """Nothing to do until a command comes."""
        return self._scheduler.idle and not self._swaps

    @property
    def idle_left_s(self) -> float | None:
        """How long until the model has been idle for too long; None when that is no matter."""
        if self._settings.idle_unload_s is None or self._model is None or not self.idle:
            return None
        return max(0.0, self._used_at + self._settings.idle_unload_s - time.perf_counter())

    def submit(self, generations: Sequence[Generation]) -> None:
        """Take the answers to one request into the queue, all or none.

        Raises:
            NotLoadedError: its model has gone, or is about to.
            QueueFullError: too many wait.
        """
        first = generations[0]
        if self._swaps or self._model is None or first.model() is not self._model:
            raise NotLoadedError(f"{first.model_id} is being unloaded; load a model first: POST /admin/models/load")
        deadline = first.arrived_at + first.timeout_s
        self._scheduler.add(
            generations, tokens=len(first.prompt), deadline=deadline, retry_after_s=self.snapshot.place_free_s
        )
        self._publish()

    def cancel(self, generation: Generation) -> None:
        """The reader has left: free the slot, tell nobody."""
        self._forget(generation)

    def swap(self, perform: Callable[[], T], *, why: str, timeout_s: float, finish_queued: bool = False) -> Future[T]:
        """Change the model by ``perform`` once running requests have ended, at most ``timeout_s`` from now.

        Swaps happen one after the other, in the order asked for, whether or not somebody still waits for the result.
        From now until then no request is taken; those in the queue end with an error, or are served first.
        """
        if not finish_queued:
            error = NotLoadedError(f"{why} before this request began; ask again when a model is loaded")
            self._end_all(self._scheduler.queued, error)
        swap = Swap(perform=perform, why=why, deadline=time.perf_counter() + timeout_s, finish_queued=finish_queued)
        # Marked as running, it cannot be cancelled by a caller who leaves.
        swap.done.set_running_or_notify_cancel()
        self._swaps.append(swap)
        return swap.done

    def already(self, entry: ModelEntry) -> LoadReport | None:
        """The report of loading what is loaded, and stays so: nobody need be drained for it."""
        if self._swaps or self._model is None or self._model.entry.path != entry.path:
            return None
        return LoadReport(model=entry.id, load_s=0.0, memory_bytes=self._model.memory_bytes)

    def load(self, entry: ModelEntry) -> LoadReport:
        """Put ``entry`` in the place of what is loaded; on failure, load that again and say so in the error."""
        previous = self._model.entry if self._model else None
        started = time.perf_counter()
        self.unload()
        failure = self._bring_up(entry)
        if failure is not None:
            restored = self._restore(previous)
            self._publish()
            raise type(failure)(f"{failure.message}; {restored}", param=failure.param)
        self._publish()
        assert self._model is not None
        return LoadReport(model=entry.id, load_s=time.perf_counter() - started, memory_bytes=self._model.memory_bytes)

    def unload(self, cause: UnloadCause = "asked") -> int:
        """Drop the model and return the bytes that this freed, measured. Whatever still runs ends with an error."""
        error = NotLoadedError("the model was unloaded before this request ended")
        self._end_all(self._scheduler.queued + self._scheduler.running, error)
        unloaded = self._model.entry.id if self._model else self.snapshot.unloaded_model
        before = memory.used_bytes()
        self._model = self._batch = None
        memory.release()
        self.snapshot = replace(self.snapshot, unloaded_model=unloaded, unload_cause=cause if unloaded else None)
        self._publish()
        return max(0, before - memory.used_bytes())

    def unload_if_idle(self) -> None:
        """Unload a model that nobody has used for the time set."""
        if self.idle_left_s == 0:
            log.info("%s was not used for %g s", self.snapshot.model, self._settings.idle_unload_s)
            self.unload("idle")

    def close(self, error: LabError) -> None:
        """The thread ends: every request gets its end, MLX its memory."""
        self._end_all(self._scheduler.queued + self._scheduler.running, error)
        while self._swaps:
            self._swaps.popleft().done.set_exception(error)
        self._model = self._batch = None
        memory.release()
        self._publish(state="dead" if isinstance(error, EngineDeadError) else "empty")

    def _bring_up(self, entry: ModelEntry) -> LabError | None:
        """Load, or return why not: an exception would hold frames, and with them the weights, in memory."""
        self._publish(state="loading")
        try:
            self._model = loaded.load(entry, limit_bytes=self._limit_bytes)
        except LabError as exc:
            failure = type(exc)(exc.message, param=exc.param)
        else:
            self._batch = self._new_batch(self._model)
            self._used_at = time.perf_counter()
            self.snapshot = replace(self.snapshot, unloaded_model=None, unload_cause=None)
            return None
        memory.release()
        return failure

    def _restore(self, previous: ModelEntry | None) -> str:
        if previous is None:
            return "no model is loaded"
        failure = self._bring_up(previous)
        if failure is not None:
            return f"the previous model {previous.id} could not be loaded again either: {failure.message}"
        return f"the previous model {previous.id} is loaded again"

    def _new_batch(self, model: loaded.LoadedModel) -> Batch:
        settings = self._settings
        # A CPU is busy with few tokens: more prompts at once would only all end later. One beside may be short.
        prefills, lanes = (1, 2) if mx.default_device() == mx.cpu else (settings.slots, settings.slots)
        if not model.traits.prompts_together:
            prefills = lanes = 1
        self._scheduler.prefills, self._scheduler.lanes = prefills, lanes
        kept = self._limit_bytes // 10 if settings.prefix_cache_bytes is None else settings.prefix_cache_bytes
        return Batch(
            model,
            self._samplers,
            slots=settings.slots,
            prompts=min(lanes, settings.slots),
            prefix_bytes=kept,
            wired=settings.wired_memory,
        )

    # Steps

    def step(self) -> None:
        """One round: deadlines, admissions, one batch step, one delivery per reader's loop."""
        try:
            self._expire()
            self._admit()
            if self._batch is not None and not self._batch.empty:
                self._advance(self._batch)
        except Exception as exc:
            self._fail_step(exc)
        self._settle_swaps()
        self._publish()

    def _expire(self) -> None:
        for generation in self._scheduler.expired(time.perf_counter()):
            limit = f"not finished after {generation.timeout_s:g} s, the request's limit"
            self._end(generation, GenerationTimeoutError(limit))

    def _admit(self) -> None:
        while self._batch is not None and (generation := self._admission.next(self._batch)) is not None:
            generation.admitted_at = time.perf_counter()
            if not generation.max_tokens and not generation.request.score_prompt:
                self._end(generation, generation.report("length", generation.admitted_at))
                continue
            self._batch.insert(generation)
            self._outbox.post(generation.mailbox, _progress(generation))

    def _advance(self, batch: Batch) -> None:
        for event in batch.step():
            try:
                self._take(batch, event)
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
                self._totals.prompt_tokens += event.tokens
                self._outbox.post(generation.mailbox, _progress(generation))
                if event.done:
                    self._totals.prompt_tokens += generation.cached_tokens
                    self._totals.cached_tokens += generation.cached_tokens
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
        self._totals.output_tokens += 1
        ended = event.finish == "stop"
        logprob = batch.logprob(event)
        piece = generation.splitter.add(event.token, None if ended else logprob)
        text, entries, stopped = piece.text, piece.entries, piece.stopped
        if event.finish is not None and not stopped:
            rest = generation.splitter.finish()
            text, entries, stopped = text + rest.text, (*entries, *rest.entries), rest.stopped
            if ended and logprob is not None and not stopped:
                entries = (*entries, logprob)
        self._outbox.post(generation.mailbox, Delta(text=text, tokens=1, logprobs=entries))
        if stopped or event.finish is not None:
            self._end(generation, generation.report("stop" if stopped else event.finish or "stop", now))

    def _relieve(self, batch: Batch) -> None:
        """More is in use than may be: estimates were wrong. Give up what is only kept; if that is not enough, all."""
        excess = memory.used_bytes() - self._limit_bytes
        if batch.prefixes.nbytes:
            batch.prefixes.shrink(max(0, batch.prefixes.nbytes - excess))
            memory.release()
        if (used := memory.used_bytes()) > UNLOAD_ABOVE * self._limit_bytes:
            raise MemoryError(f"{used / 1e9:.2f} GB are in use, {self._limit_bytes / 1e9:.2f} GB are allowed")

    def _fail_step(self, exc: Exception) -> None:
        """The requests of this step fail, the engine goes on with a new batch, without the model if memory is short."""
        # As text: an exception's frames hold the batch, and with it the weights that may have to go.
        log.error("engine step failed:\n%s", "".join(traceback.format_exception(exc)))
        exc.__traceback__ = None
        out_of_memory = memory.is_out_of_memory(exc)
        error = (
            OutOfMemoryError(f"out of memory, the model was unloaded: {exc}; load it again, or a smaller one")
            if out_of_memory
            else EngineError(f"the generation failed inside the engine: {type(exc).__name__}: {exc}")
        )
        self._batch = None
        self._end_all(self._scheduler.running, error)
        if out_of_memory:
            self._end_all(self._scheduler.queued, error)
            self.unload("memory")
        elif self._model is not None:
            self._batch = self._new_batch(self._model)

    def _settle_swaps(self) -> None:
        while self._swaps:
            swap = self._swaps[0]
            if time.perf_counter() > swap.deadline:
                late = self._scheduler.queued + self._scheduler.running
                self._end_all(late, NotLoadedError(f"{swap.why} before this request ended"))
            if self._scheduler.running or (swap.finish_queued and self._scheduler.queued):
                return
            self._swaps.popleft()
            try:
                swap.done.set_result(swap.perform())
            except Exception as exc:
                swap.done.set_exception(exc)

    # Ends and reports

    def _end_all(self, generations: Sequence[Generation], error: LabError) -> None:
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
        self._used_at = time.perf_counter()
        if self._batch is not None:
            self._batch.remove(generation)

    def _forget_readers_on(self, loop: AbstractEventLoop) -> None:
        """That loop is closed: nobody is left to read, and the slots are needed."""
        for generation in self._scheduler.queued + self._scheduler.running:
            if generation.mailbox.loop is loop:
                self._forget(generation)

    def _publish(self, state: EngineState | None = None) -> None:
        """Renew the snapshot, then hand each reader's loop its items in one call."""
        model = self._model
        self.snapshot = replace(
            self.snapshot,
            state=state or ("ready" if model else "empty"),
            entry=model.entry if model else None,
            model_memory_bytes=model.memory_bytes if model else 0,
            context_length=model.context_length if model else None,
            active_requests=len(self._scheduler.running),
            queued_requests=len(self._scheduler.queued),
            prefix_cache_bytes=self._batch.prefixes.nbytes if self._batch else 0,
            place_free_s=self._admission.place_free_s(self._batch),
            prompt_tokens=self._totals.prompt_tokens,
            cached_tokens=self._totals.cached_tokens,
            output_tokens=self._totals.output_tokens,
            memory_used_bytes=memory.used_bytes(),
            memory_peak_bytes=max(self.snapshot.memory_peak_bytes, memory.used_bytes()),
            progress_at=time.perf_counter(),
        )
        for loop in self._outbox.send():
            self._forget_readers_on(loop)


def _progress(generation: Generation) -> PromptProgress:
    return PromptProgress(done=generation.cached_tokens + generation.computed_tokens, total=len(generation.prompt))
