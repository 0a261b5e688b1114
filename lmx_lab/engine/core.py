"""The engine's state and its steps. Everything here happens on the engine thread; only ``snapshot`` is read elsewhere.

MLX streams are thread-local: arrays made here stay here. What leaves is ints, floats and strings.
"""

from __future__ import annotations

import logging
import time
import traceback
from asyncio import AbstractEventLoop
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, GenerationBatch

from lmx_lab.engine import loaded, memory
from lmx_lab.engine.requests import (
    Delta,
    EngineSnapshot,
    EngineState,
    FinishReason,
    GenerationReport,
    GenerationRequest,
    LoadReport,
)
from lmx_lab.engine.sampling import Samplers
from lmx_lab.engine.scheduler import Scheduler
from lmx_lab.engine.stream import Mailbox
from lmx_lab.engine.text import TextSplitter
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
Item = Delta | GenerationReport | LabError


@dataclass(kw_only=True, eq=False)
class Generation:
    """One request on its way: what was asked, where it stands, when it got there."""

    request: GenerationRequest
    prompt: list[int]
    mailbox: Mailbox
    model: loaded.LoadedModel
    arrived_at: float
    timeout_s: float
    admitted_at: float = 0.0
    decoding_at: float = 0.0
    first_token_at: float = 0.0
    output_tokens: int = 0
    peak_memory_bytes: int = 0
    uid: int | None = None
    splitter: TextSplitter = field(init=False)

    def __post_init__(self) -> None:
        self.splitter = TextSplitter(self.model.decode, self.request.stop)

    @property
    def max_tokens(self) -> int:
        room = (self.model.context_length or 2**31) - len(self.prompt)
        return min(self.request.max_tokens, room)

    def report(self, reason: FinishReason, now: float) -> GenerationReport:
        return GenerationReport(
            model=self.model.entry.id,
            finish_reason=reason,
            prompt_tokens=len(self.prompt),
            cached_tokens=0,
            output_tokens=self.output_tokens,
            queue_s=self.admitted_at - self.arrived_at,
            prefill_s=self.decoding_at - self.admitted_at,
            ttft_s=self.first_token_at - self.arrived_at,
            decode_s=now - self.decoding_at,
            peak_memory_bytes=self.peak_memory_bytes,
        )


@dataclass(kw_only=True)
class Swap:
    """A load or unload that waits for running requests to end, until ``deadline`` at the latest."""

    perform: Callable[[], Any]
    why: str
    """What the requests that do not end in time are told."""
    deadline: float
    done: Future[Any] = field(default_factory=Future)


class EngineCore:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        # A step is what a cancel has to wait for, and a CPU is busy with few tokens. Two prompts: a short one shall not
        # have to wait for a long one before it.
        on_cpu = mx.default_device() == mx.cpu
        self._prefills, self._prefill_chunk_tokens = (2, 64) if on_cpu else (settings.slots, 2048)
        self._scheduler: Scheduler[Generation] = Scheduler(
            slots=settings.slots, queue_limit=settings.queue_limit, prefills=self._prefills
        )
        self._samplers = Samplers()
        self._model: loaded.LoadedModel | None = None
        self._batch: BatchGenerator | None = None
        self._by_uid: dict[int, Generation] = {}
        self._swaps: deque[Swap] = deque()
        self._outbox: dict[AbstractEventLoop, list[tuple[Mailbox, Item]]] = defaultdict(list)
        self.snapshot = EngineSnapshot(memory_total_bytes=memory.total_bytes(), progress_at=time.perf_counter())

    @property
    def model(self) -> loaded.LoadedModel | None:
        """The loaded model; its ``prompts`` may be used by the prompt thread."""
        return self._model

    @property
    def idle(self) -> bool:
        """Nothing to do until a command comes."""
        return self._scheduler.idle and not self._swaps

    # Commands

    def submit(self, generation: Generation) -> None:
        """Take a request into the queue.

        Raises:
            NotLoadedError: its model has gone, or is about to.
            QueueFullError: too many wait.
        """
        if self._swaps or generation.model is not self._model:
            raise NotLoadedError(
                f"{generation.model.entry.id} is being unloaded; load a model first: POST /admin/models/load"
            )
        self._scheduler.add(generation, deadline=generation.arrived_at + generation.timeout_s)
        self._publish()

    def cancel(self, generation: Generation) -> None:
        """The reader has left: free the slot, tell nobody."""
        self._forget(generation)

    def swap(self, perform: Callable[[], T], *, why: str, timeout_s: float) -> Future[T]:
        """Change the model by ``perform`` once running requests have ended, at most ``timeout_s`` from now.

        Swaps happen one after the other, in the order asked for, whether or not somebody still waits for the result.
        From now until then no request is taken.
        """
        error = NotLoadedError(f"{why} before this request began; ask again when a model is loaded")
        self._end_all(self._scheduler.queued, error)
        swap = Swap(perform=perform, why=why, deadline=time.perf_counter() + timeout_s)
        # Marked as running, it cannot be cancelled by a caller who leaves.
        swap.done.set_running_or_notify_cancel()
        self._swaps.append(swap)
        return swap.done

    def load(self, entry: ModelEntry) -> LoadReport:
        """Put ``entry`` in the place of what is loaded; on failure, load that again and say so in the error."""
        previous = self._model.entry if self._model else None
        started = time.perf_counter()
        if self._model is not None and self._model.entry.path == entry.path:
            return LoadReport(model=entry.id, load_s=0.0, memory_bytes=self._model.memory_bytes)
        self.unload()
        failure = self._bring_up(entry)
        if failure is not None:
            restored = self._restore(previous)
            self._publish()
            raise type(failure)(f"{failure.message}; {restored}", param=failure.param)
        self._publish()
        assert self._model is not None
        return LoadReport(model=entry.id, load_s=time.perf_counter() - started, memory_bytes=self._model.memory_bytes)

    def unload(self) -> int:
        """Drop the model and return the bytes that this freed, measured. Whatever still runs ends with an error."""
        error = NotLoadedError("the model was unloaded before this request ended")
        self._end_all(self._scheduler.queued + self._scheduler.running, error)
        before = memory.used_bytes()
        self._model = self._batch = None
        memory.release()
        self._publish()
        return max(0, before - memory.used_bytes())

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
            self._model = loaded.load(entry, limit_bytes=memory.limit_bytes(self._settings.memory_limit_bytes))
        except LabError as exc:
            failure = type(exc)(exc.message, param=exc.param)
        else:
            self._batch = self._new_batch(self._model)
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

    def _new_batch(self, model: loaded.LoadedModel) -> BatchGenerator:
        batch = BatchGenerator(
            model.model,
            stop_tokens=model.eos_tokens,
            completion_batch_size=self._settings.slots,
            prefill_batch_size=self._prefills,
            prefill_step_size=self._prefill_chunk_tokens,
        )
        if not self._settings.wired_memory:
            # The constructor raises macOS's wired limit; closing puts it back and does nothing else.
            batch.close()
        return batch

    # Steps

    def step(self) -> None:
        """One round: deadlines, admissions, one batch step, one delivery per reader's loop."""
        self._expire()
        try:
            self._admit()
            if self._by_uid:
                self._advance()
        except Exception as exc:
            self._fail_step(exc)
        self._settle_swaps()
        self._publish()

    def _expire(self) -> None:
        for generation in self._scheduler.expired(time.perf_counter()):
            limit = f"not finished after {generation.timeout_s:g} s, the request's limit"
            self._end(generation, GenerationTimeoutError(limit))

    def _admit(self) -> None:
        for generation in self._scheduler.admit():
            self._insert(generation)

    def _insert(self, generation: Generation) -> None:
        assert self._batch is not None
        generation.admitted_at = time.perf_counter()
        (uid,) = self._batch.insert(
            [generation.prompt],
            max_tokens=[generation.max_tokens],
            samplers=[self._samplers.get(generation.request.sampling)],
        )
        generation.uid = uid
        self._by_uid[uid] = generation

    def _advance(self) -> None:
        assert self._batch is not None
        prefills, tokens = self._batch.next()
        now = time.perf_counter()
        peak = memory.take_peak_bytes()
        for generation in self._by_uid.values():
            generation.peak_memory_bytes = max(generation.peak_memory_bytes, peak)
        for prefill in prefills:
            if prefill.end_of_prompt:
                generation = self._by_uid[prefill.uid]
                self._count(prompt_tokens=len(generation.prompt))
                self._scheduler.prefilled(generation)
                generation.decoding_at = now
        for token in tokens:
            self._take_token(self._by_uid[token.uid], token, now)

    def _take_token(self, generation: Generation, response: GenerationBatch.Response, now: float) -> None:
        generation.first_token_at = generation.first_token_at or now
        generation.output_tokens += 1
        self._count(output_tokens=1)
        text, stopped = generation.splitter.add(response.token)
        reason = cast("FinishReason | None", response.finish_reason)
        if reason is not None and not stopped:
            rest, stopped = generation.splitter.finish()
            text += rest
        self._post(generation.mailbox, Delta(text=text, tokens=1))
        if stopped or reason is not None:
            self._end(generation, generation.report("stop" if stopped else reason or "stop", now))

    def _fail_step(self, exc: Exception) -> None:
        """The requests of this step fail, the engine goes on with a new batch, without the model if memory is short."""
        # As text: an exception's frames hold the batch, and with it the weights that may have to go.
        log.error("engine step failed:\n%s", "".join(traceback.format_exception(exc)))
        exc.__traceback__ = None
        out_of_memory = memory.is_out_of_memory(exc)
        error = (
            OutOfMemoryError(
                f"out of memory while generating, the model was unloaded: {exc}; load it again, or a smaller one"
            )
            if out_of_memory
            else EngineError(f"the generation failed inside the engine: {type(exc).__name__}: {exc}")
        )
        self._batch = None
        self._end_all(self._scheduler.running, error)
        if out_of_memory:
            self.unload()
        elif self._model is not None:
            self._batch = self._new_batch(self._model)

    def _settle_swaps(self) -> None:
        while self._swaps:
            swap = self._swaps[0]
            if time.perf_counter() > swap.deadline:
                self._end_all(self._scheduler.running, NotLoadedError(f"{swap.why} before this request ended"))
            if self._scheduler.running:
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
        self._post(generation.mailbox, item)

    def _forget(self, generation: Generation) -> None:
        self._scheduler.remove(generation)
        if generation.uid is not None and generation.uid in self._by_uid:
            del self._by_uid[generation.uid]
            if self._batch is not None:
                self._batch.remove([generation.uid])

    def _forget_readers_on(self, loop: AbstractEventLoop) -> None:
        """That loop is closed: nobody is left to read, and the slots are needed."""
        for generation in self._scheduler.queued + self._scheduler.running:
            if generation.mailbox.loop is loop:
                self._forget(generation)

    def _post(self, mailbox: Mailbox, item: Item) -> None:
        self._outbox[mailbox.loop].append((mailbox, item))

    def _count(self, *, prompt_tokens: int = 0, output_tokens: int = 0) -> None:
        self.snapshot = replace(
            self.snapshot,
            prompt_tokens=self.snapshot.prompt_tokens + prompt_tokens,
            output_tokens=self.snapshot.output_tokens + output_tokens,
        )

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
            memory_used_bytes=memory.used_bytes(),
            memory_peak_bytes=max(self.snapshot.memory_peak_bytes, memory.used_bytes()),
            progress_at=time.perf_counter(),
        )
        outbox, self._outbox = self._outbox, defaultdict(list)
        for loop, items in outbox.items():
            try:
                loop.call_soon_threadsafe(_deliver, items)
            except RuntimeError:
                self._forget_readers_on(loop)


def _deliver(items: list[tuple[Mailbox, Item]]) -> None:
    for mailbox, item in items:
        mailbox.deliver(item)
