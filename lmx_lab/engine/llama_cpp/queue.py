"""Run the accepted generations of one hosted model, from the queue to their end. Belongs to the engine's loop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from lmx_lab.engine.admission import AdmissionControl, Permit
from lmx_lab.engine.llama_cpp.answer import AnswerReader, choose
from lmx_lab.engine.llama_cpp.connection import RefusedError
from lmx_lab.engine.llama_cpp.model import HostedModel
from lmx_lab.engine.llama_cpp.prepare import PreparedRequest
from lmx_lab.engine.llama_cpp.request import sampling
from lmx_lab.engine.llama_cpp.scoring import score_prompt
from lmx_lab.engine.loop_engine import deadline
from lmx_lab.engine.scheduler import Scheduler, SlotTimes, Turns, Verdict
from lmx_lab.engine.stream import Item, Mailbox
from lmx_lab.errors import ContextLengthError, EngineError, InvalidRequestError, LabError
from lmx_lab.values.engine import TokenTotals
from lmx_lab.values.outputs import Delta, GenerationReport, PromptProgress
from lmx_lab.values.timeline import StepKind

log = logging.getLogger(__name__)
Post = Callable[[Mailbox, Item], None]


@dataclass(kw_only=True, eq=False)
class LlamaGeneration:
    """One answer from its acceptance to its end. Times are seconds of ``time.perf_counter``."""

    prepared: PreparedRequest
    choice: int
    """Index of the answer among those to the same request."""
    reader: AnswerReader
    mailbox: Mailbox
    permit: Permit
    arrived_at: float
    timeout_s: float
    admitted: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while the request has a slot."""
    admitted_at: float = 0.0
    """When the request first got a slot."""
    task: asyncio.Task[GenerationReport] | None = None
    error: LabError | None = None
    """The error with which the engine cancels the generation; None if its reader cancels it."""

    @property
    def can_pause(self) -> bool:
        """Whether another request to llama.cpp can continue the answer."""
        return self.prepared.can_continue and self.reader.can_continue

    def cancel(self) -> None:
        """Cancel the generation because its reader no longer needs it. May be called from any thread."""
        if self.task is not None and not (loop := self.task.get_loop()).is_closed():
            loop.call_soon_threadsafe(self.task.cancel)


class LlamaQueue:
    """Runs the accepted generations.

    Args:
        totals: Counts the tokens of all generations that have ended.
        post: Posts an item to a reader.
    """

    def __init__(self, hosted: HostedModel, totals: TokenTotals, post: Post, turns: Turns) -> None:
        self._hosted = hosted
        self._ended_totals = totals
        self._post = post
        slots = hosted.plan.slots
        self._scheduler: Scheduler[LlamaGeneration] = Scheduler(slots=slots, prefills=slots, lanes=slots, turns=turns)
        self._turns = turns
        self._slot_times = SlotTimes()
        self._loop = asyncio.get_running_loop()
        self._pausing: asyncio.TimerHandle | None = None
        """Checks whether a request should be paused for a waiting one; None if none waits."""

    @property
    def running(self) -> list[LlamaGeneration]:
        return self._scheduler.running

    @property
    def queued(self) -> list[LlamaGeneration]:
        return self._scheduler.queued

    @property
    def slot_free_s(self) -> float:
        """Estimated time until one of the running requests ends, based on the durations of earlier requests."""
        running = self._scheduler.running
        if len(running) < self._scheduler.slots:
            return 1.0
        oldest_s = time.perf_counter() - min(generation.admitted_at for generation in running)
        return self._slot_times.free_in_s(running=len(running), oldest_s=oldest_s)

    def add_running(self, totals: TokenTotals) -> None:
        """Add the tokens of the running generations so far to ``totals``."""
        for generation in self.running:
            _add_tokens(totals, generation.reader)

    def add(self, generations: Sequence[LlamaGeneration]) -> None:
        """Queue the answers to one request."""
        # Each task checks its own deadline, so the scheduler needs none.
        prepared, now = generations[0].prepared, time.perf_counter()
        tokens, client = len(prepared.tokens), prepared.request.caller.client
        self._scheduler.add(generations, tokens=tokens, deadline=0.0, now=now, client=client)
        for generation in generations:
            name = f"lmx-lab generation on {self._hosted.entry.id}"
            generation.task = asyncio.create_task(self._run(generation), name=name)
            generation.task.add_done_callback(partial(self._finish, generation))
        self._admit()

    async def end(self, admission: AdmissionControl, error: LabError, *, queued_only: bool) -> None:
        """End the generations that hold permits of this admission control; returns when they have ended."""
        generations = self._scheduler.not_started if queued_only else self.queued + self.running
        await self._end([generation for generation in generations if generation.permit.admission is admission], error)

    async def end_all(self, error: LabError) -> None:
        """End all generations; returns when they have ended."""
        await self._end(self.queued + self.running, error)

    async def _end(self, generations: Sequence[LlamaGeneration], error: LabError) -> None:
        self._cancel(generations, error)
        if tasks := [generation.task for generation in generations if generation.task is not None]:
            await asyncio.wait(tasks)

    def end_readers_on(self, loop: asyncio.AbstractEventLoop) -> None:
        """End the generations whose readers' event loop is closed."""
        closed = [generation for generation in self.queued + self.running if generation.mailbox.loop is loop]
        self._cancel(closed, EngineError("the event loop of the reader is closed"))

    def _cancel(self, generations: Sequence[LlamaGeneration], error: LabError) -> None:
        for generation in generations:
            generation.error = generation.error or error
            if generation.task is not None:
                generation.task.cancel()

    def _admit(self) -> None:
        # A free slot has room in the KV cache for the longest request.
        while (generation := self._scheduler.admit(lambda _: Verdict.TAKE, time.perf_counter())) is not None:
            # All prompts may be computed at the same time.
            self._scheduler.prefilled(generation)
            generation.admitted.set()
        if self._pausing is None and self._scheduler.next_pause_at() is not None:
            self._pausing = self._loop.call_later(self._turns.check_s, self._pause_for_waiting)

    def _pause_for_waiting(self) -> None:
        """Pause a request if a client without a slot waits."""
        self._pausing = None
        paused = self._scheduler.pause(lambda generation: generation.can_pause, time.perf_counter())
        if paused is not None:
            # Its stream ends with the next token.
            paused.admitted.clear()
        self._admit()

    async def _run(self, generation: LlamaGeneration) -> GenerationReport:
        async with deadline(generation.arrived_at, generation.timeout_s):
            await generation.admitted.wait()
            generation.admitted_at = time.perf_counter()
            generation.mailbox.steps.start(generation.admitted_at)
            self._post(generation.mailbox, generation.reader.begin(generation.admitted_at))
            if generation.prepared.request.score_prompt:
                await self._score(generation)
            if (start := generation.prepared.start) is not None and start.tokens:
                is_full = not generation.prepared.max_tokens
                self._post(generation.mailbox, generation.reader.read_start(start, is_full=is_full))
                # As in ``_score``, it must arrive before the first delta.
                await asyncio.sleep(0)
            elif not generation.prepared.max_tokens:
                generation.reader.finish = "length"
            while generation.reader.finish is None:
                if not generation.admitted.is_set():
                    # A paused generation continues when it has a slot again.
                    await generation.admitted.wait()
                    generation.mailbox.steps.start(time.perf_counter())
                await self._generate(generation)
                generation.reader.pause()
        prepared, reader = generation.prepared, generation.reader
        report = reader.report(time.perf_counter(), peak_memory_bytes=self._hosted.memory_bytes)
        # The answer is complete. It ends without ids that cannot be found, whatever the reason.
        with contextlib.suppress(RefusedError, LabError, TimeoutError):
            async with asyncio.timeout(5.0):
                if reader.gaps:
                    await self._send_last_ids(generation)
                elif prepared.route != "/completion" and prepared.request.needs_ids:
                    fields = sampling(
                        prepared.request, choice=generation.choice, context_length=prepared.context_length
                    )
                    tokens = await _find_parsed_ids(
                        self._hosted,
                        prepared.tokens,
                        fields,
                        output_tokens=reader.output_tokens,
                        ended=reader.finish != "length",
                    )
                    self._post(generation.mailbox, Delta(text="", tokens=0, ids=tokens))
                    # As in ``_score``, they must arrive before the report.
                    await asyncio.sleep(0)
        return report

    async def _send_last_ids(self, generation: LlamaGeneration) -> None:
        """Send the ids of tokens that llama.cpp did not report, if they can be found."""
        index, reader = await self._hosted.load_token_index(), generation.reader
        found: list[Sequence[int]] = []
        for gap in reader.gaps:
            if not gap.text:
                # The answer ended within a character. Only the last tokens of a greedy answer can be generated again.
                prepared, missing = generation.prepared, []
                if prepared.can_continue and not prepared.request.sampling.temperature:
                    before = [*reader.tokens[: reader.sent_ids], *reader.last_ids(found).ids]
                    body = prepared.body(generation.choice, self._hosted, before, output_tokens=len(before))
                    body |= {"n_predict": gap.count, "stream": False, "return_progress": False, "return_tokens": True}
                    missing = list((await self._hosted.connection.post("/completion", body)).get("tokens") or [])
                found.append(missing)
                continue
            candidates = index.candidates(gap)
            usual: list[int] = []
            if len(candidates) > 1:
                usual = await self._hosted.tokenize(gap.text, at_most=len(gap.text.encode()) + 2, parse_special=False)
            if (tokens := choose(candidates, gap, usual)) is None:
                return
            found.append(tokens)
        self._post(generation.mailbox, reader.last_ids(found))

    async def _score(self, generation: LlamaGeneration) -> None:
        """Score the prompt, and post its scores."""
        prepared, reader = generation.prepared, generation.reader

        def progress(done: int) -> None:
            self._hosted.progress_at = now = time.perf_counter()
            self._log_step(generation, "prefill", now, done - reader.computed_tokens)
            reader.computed_tokens = done
            self._post(generation.mailbox, PromptProgress(done=done, total=len(prepared.tokens)))

        top = prepared.request.top_logprobs or 0
        scores = await score_prompt(
            self._hosted,
            prepared.tokens,
            top=top,
            start=prepared.request.score_from,
            distributions=prepared.request.score_distributions,
            progress=progress,
        )
        self._post(generation.mailbox, scores)
        # Posted items are sent by the next callback of this loop, and must arrive before the first delta.
        await asyncio.sleep(0)

    async def _generate(self, generation: LlamaGeneration) -> None:
        """Let llama.cpp compute the rest of the answer, until its end or until it is paused.

        The answer is read on its reader's event loop, because a switch between threads for each token would cost as
        much as all other work for the token.
        """
        prepared, connection, slots = generation.prepared, self._hosted.connection, self._hosted.slot_files
        reader = generation.reader
        if slots is not None and not reader.tokens:
            reader.restored_tokens = await slots.restore(prepared.tokens)
        answer, output_tokens = reader.pieces, reader.output_tokens
        fields = prepared.body(generation.choice, self._hosted, answer, output_tokens=output_tokens)
        body = json.dumps(fields).encode()
        streaming = connection.stream(prepared.route, body, partial(self._deliver, generation))
        try:
            future = asyncio.run_coroutine_threadsafe(streaming, generation.mailbox.loop)
        except RuntimeError:
            streaming.close()
            raise EngineError("the event loop of the reader is closed") from None
        try:
            await asyncio.wrap_future(future)
        except EngineError:
            # The end of a connection is detected before the end of the process, which may be the cause.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._hosted.process.died.wait(), 1.0)
                raise self._hosted.death_error() from None
            raise
        if slots is not None and reader.finish is not None:
            slots.save(prepared.tokens, reader, self._ended_totals)

    def _deliver(self, generation: LlamaGeneration, event: dict[str, Any]) -> bool:
        """Deliver the items of one event, and return whether to stop reading. Runs on the reader's loop."""
        now = time.perf_counter()
        self._hosted.progress_at = now
        reader, prepared = generation.reader, generation.prepared
        prompt_tokens, output_tokens = reader.computed_tokens, reader.output_tokens
        for item in reader.read(event, now):
            generation.mailbox.deliver(item)
        if (tokens := reader.output_tokens - output_tokens) > 0:
            self._log_step(generation, "decode", now, tokens)
        elif (tokens := reader.computed_tokens - prompt_tokens) > 0:
            self._log_step(generation, "prefill", now, tokens)
        is_paused = not generation.admitted.is_set() and generation.can_pause
        # Below the minimum length, a request ignores end tokens, so another request has to continue the answer.
        is_long_enough = reader.reaches(prepared.min_tokens) and reader.output_tokens < prepared.max_tokens
        return reader.finish is not None or is_paused or is_long_enough

    def _log_step(self, generation: LlamaGeneration, kind: StepKind, now: float, tokens: int) -> None:
        """Record what llama.cpp has computed for a request since the last step; it does not number its steps."""
        steps, running = generation.mailbox.steps, self.running
        cached_tokens = sum(other.reader.slot_tokens for other in running)
        steps.add(
            kind,
            steps.last_end,
            now,
            tokens=tokens,
            requests=len(running),
            kv_bytes=cached_tokens * self._hosted.plan.token_bytes,
        )

    def _finish(self, generation: LlamaGeneration, task: asyncio.Task[GenerationReport]) -> None:
        """Post the end of a generation: its report or its error. No other method does so."""
        self._scheduler.remove(generation)
        generation.permit.release()
        _add_tokens(self._ended_totals, generation.reader)
        now = self._hosted.progress_at = time.perf_counter()
        end: Item | None
        if task.cancelled():
            end = generation.error
        elif (failure := task.exception()) is not None:
            end = generation.error or _as_lab_error(failure, self._hosted)
        else:
            end = task.result()
            self._slot_times.add(now - generation.admitted_at)
        if end is not None:
            self._post(generation.mailbox, end)
        self._admit()


async def _find_parsed_ids(
    hosted: HostedModel, prompt: Sequence[int], fields: Mapping[str, Any], *, output_tokens: int, ended: bool
) -> tuple[int, ...]:
    """Return the tokens of an answer that llama.cpp has parsed and that has just ended; none if they cannot be found.

    For such an answer, llama.cpp sends neither token ids nor the generated text of its tool calls, but ``/slots``
    contains the text of the last answer in each slot. This text is tokenized. To compare the tokens with those in the
    slot's cache, one more token is generated after them: llama.cpp reports how many tokens the cache contained.

    Args:
        fields: The sampling parameters of the request, with llama.cpp's names.
        output_tokens: Number of tokens of the answer.
        ended: Whether the last one is the token with which the model ended its answer, which has no text.
    """
    # The last token of an answer is sampled, but is not in the cache.
    length = len(prompt) + output_tokens - 1
    for slot in await hosted.connection.get("/slots"):
        if slot["is_processing"] or slot.get("n_prompt_tokens") != length:
            continue
        tokens = await hosted.tokenize(
            slot.get("generated", ""), at_most=output_tokens + 1, parse_special=True, add_special=False
        )
        if len(tokens) != output_tokens - ended:
            continue
        known = [*prompt, *tokens]
        body = {**fields, "temperature": 0, "prompt": known, "n_predict": 1, "return_tokens": True}
        answer = await hosted.connection.post("/completion", body)
        # The last token is always computed again.
        if answer["timings"]["cache_n"] != len(known) - 1:
            continue
        if not ended:
            return tuple(tokens)
        ends = (await hosted.load_token_table()).eos_tokens
        return (*tokens, *(token for token in answer["tokens"] if token in ends))
    return ()


def _add_tokens(totals: TokenTotals, reader: AnswerReader) -> None:
    totals.prompt_tokens += reader.computed_tokens + reader.cached_tokens
    totals.cached_tokens += reader.cached_tokens
    totals.disk_cached_tokens += reader.disk_cached_tokens
    totals.output_tokens += reader.output_tokens
    totals.drafted_tokens += reader.drafted_tokens
    totals.accepted_tokens += reader.accepted_tokens


def _as_lab_error(failure: BaseException, hosted: HostedModel) -> LabError:
    match failure:
        case LabError():
            return failure
        case RefusedError(kind="exceed_context_size_error"):
            return ContextLengthError(f"the prompt does not fit: {failure.message}; shorten it")
        case RefusedError(status=400):
            return InvalidRequestError(f"llama.cpp refuses this request: {failure.message}")
        case RefusedError():
            return EngineError(f"the generation failed inside llama.cpp: {failure.message}")
    log.error("a generation of %s failed", hosted.entry.id, exc_info=failure)
    return EngineError(f"the generation failed: {type(failure).__name__}: {failure}")
