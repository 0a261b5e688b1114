"""Compute answers in the slots of a llama.cpp process. Belongs to the manager's loop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from lmx_lab.engine.answers import Answers
from lmx_lab.engine.llama_cpp.completion import (
    AnswerReader,
    LlamaGeneration,
    Slot,
    choose,
    completion_body,
    is_repeatable,
    needs_steps,
    set_decoding_at,
)
from lmx_lab.engine.llama_cpp.connection import RefusedError
from lmx_lab.engine.llama_cpp.memory_plan import ContextPlan
from lmx_lab.engine.llama_cpp.process import explained_end
from lmx_lab.engine.llama_cpp.scoring import LlamaScorer
from lmx_lab.engine.llama_cpp.slot_states import SlotStates
from lmx_lab.engine.llama_cpp.tokenizer import LlamaTokenizer
from lmx_lab.engine.requests import MIN_GAIN_TOKENS
from lmx_lab.engine.scheduler import Turns
from lmx_lab.errors import ContextLengthError, EngineError, InvalidRequestError, LabError
from lmx_lab.values.outputs import GenerationReport, PromptProgress
from lmx_lab.values.timeline import StepKind

if TYPE_CHECKING:
    from lmx_lab.engine.llama_cpp.slot_files import SlotFiles

log = logging.getLogger(__name__)


class LlamaSlots:
    """The ``Computation`` of one chat model. Each generation that has a slot has a task.

    Args:
        slot_files: Keeps the slots on disk; None if that is off.
        uses_drafts: Whether llama.cpp drafts tokens, with a draft model or by prompt lookup.
        is_invariant: Whether the result for a token does not depend on the cached part of its prompt.
        state_bytes, reserve_bytes: Limits of ``SlotStates``.
    """

    def __init__(
        self,
        tokenizer: LlamaTokenizer,
        plan: ContextPlan,
        *,
        scorer: LlamaScorer,
        turns: Turns,
        slot_files: SlotFiles | None,
        uses_drafts: bool,
        is_invariant: bool,
        state_bytes: int,
        reserve_bytes: int,
    ) -> None:
        self._tokenizer = tokenizer
        self._process = tokenizer.process
        self._connection = tokenizer.connection
        self._plan = plan
        self._scorer = scorer
        self._slot_files = slot_files
        self._uses_drafts = uses_drafts
        self._is_invariant = is_invariant
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.Handle | None = None
        self._tasks: dict[LlamaGeneration, asyncio.Task[None]] = {}
        self._paused: dict[LlamaGeneration, asyncio.Event] = {}
        """The generations without a slot whose tasks stop or wait, and the events that wake the tasks."""
        self.answers: Answers[AnswerReader] = Answers(self, slots=plan.slots, turns=turns)
        self._states = SlotStates(
            self._connection,
            lambda: self.answers.scheduler.running,
            slots=plan.slots,
            files=slot_files,
            folder=self._process.folder,
            limit_bytes=state_bytes,
            reserve_bytes=reserve_bytes,
        )

    def update(self) -> None:
        """Start what can start, deliver, and set the time of the next call."""
        now = time.perf_counter()
        self.answers.update(now)
        self.answers.deliver()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if (next_at := self.answers.next_at(now)) is not None:
            self._timer = self._loop.call_later(max(0.0, next_at - now), self.update)

    async def close(self, error: LabError) -> None:
        """End all generations, and wait until their tasks have ended."""
        self.answers.end_all(error)
        self.answers.deliver()
        if self._tasks:
            await asyncio.wait(list(self._tasks.values()))
        await self._scorer.close()
        if self._timer is not None:
            self._timer.cancel()

    # Computation

    judge = None
    """See ``Computation``. A free slot has room in the KV cache for the longest request."""

    def begin(self, generation: LlamaGeneration) -> None:
        """See ``Computation``. All prompts may be computed at the same time."""
        self.answers.scheduler.prefilled(generation)
        self.answers.post(generation, PromptProgress(done=0, total=len(generation.prompt)))
        task = asyncio.create_task(self._run(generation), name=f"lmx-lab generation on {self._tokenizer.entry.id}")
        self._tasks[generation] = task
        task.add_done_callback(lambda _: self._tasks.pop(generation))

    def can_pause(self, generation: LlamaGeneration) -> bool:
        """See ``Computation``."""
        return generation.row.can_continue(generation)

    def pause(self, generation: LlamaGeneration) -> None:
        """See ``Computation``. Its stream ends with the next token."""
        self._paused[generation] = asyncio.Event()

    def resume(self, generation: LlamaGeneration) -> None:
        """See ``Computation``. The task records it, unless its stream has not ended yet."""
        self.answers.scheduler.prefilled(generation)
        self._paused.pop(generation).set()

    def remove(self, generation: LlamaGeneration) -> None:
        """See ``Computation``."""
        self._paused.pop(generation, None)
        task = self._tasks.get(generation)
        if task is not None and task is not asyncio.current_task():
            task.cancel()
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_soon(self.update)

    def remaining_s(self, generation: LlamaGeneration) -> float:
        """See ``Computation``."""
        return math.inf

    async def _run(self, generation: LlamaGeneration) -> None:
        """Compute a generation, and end it."""
        try:
            end: GenerationReport | LabError | None = await self._compute(generation)
        except asyncio.CancelledError:
            # The generation has ended, or the loop of its reader was closed.
            self.answers.cancel(generation)
            raise
        except LabError as exc:
            end = exc
        except RefusedError as exc:
            if exc.kind == "exceed_context_size_error":
                end = ContextLengthError(f"prompt is too long: {exc.message}; shorten it")
            elif exc.status == 400:
                end = InvalidRequestError(f"llama.cpp refuses this request: {exc.message}")
            else:
                end = EngineError(f"the generation failed inside llama.cpp: {exc.message}")
        except Exception as exc:
            log.exception("a generation of %s failed", self._tokenizer.entry.id)
            end = EngineError(f"the generation failed: {type(exc).__name__}: {exc}")
        if end is not None:
            self.answers.end(generation, end)
            self.update()

    async def _compute(self, generation: LlamaGeneration) -> GenerationReport | None:
        """Compute a generation, and return its report; None if it ended with the scores of its prompt."""
        if generation.request.score_prompt and await self._score(generation):
            return None
        reader, slot = generation.row, None
        while generation.finish is None:
            if (paused := self._paused.get(generation)) is not None:
                # It continues when it has a slot again.
                await paused.wait()
                generation.mailbox.steps.start(time.perf_counter())
            if slot is None or slot.user is not generation:
                known = [*generation.prompt, *reader.tokens]
                is_exact = not self._is_invariant and not generation.output_tokens and is_repeatable(generation)
                slot = await self._states.take(generation, known, is_exact=is_exact)
            await self._generate(generation, slot)
            reader.pause(generation)
        now = time.perf_counter()
        set_decoding_at(generation, now)
        generation.peak_memory_bytes = max(generation.peak_memory_bytes, self._process.memory_bytes)
        report = generation.report(now)
        if reader.gaps:
            # The answer is complete. It ends without ids that cannot be found, whatever the reason.
            with contextlib.suppress(RefusedError, LabError, TimeoutError):
                async with asyncio.timeout(5.0):
                    await self._send_last_ids(generation)
        return report

    async def _send_last_ids(self, generation: LlamaGeneration) -> None:
        """Send the ids of tokens that llama.cpp did not report, if they can be found."""
        index, reader = await self._tokenizer.load_token_index(), generation.row
        is_greedy = not generation.request.sampling.temperature
        found: list[Sequence[int]] = []
        for gap in reader.gaps:
            if not gap.text:
                # The answer ended within a character. Only the last tokens of a greedy answer can be generated again.
                missing: list[int] = []
                if generation.grammar is None and is_greedy:
                    before = [*reader.tokens[: reader.sent_ids], *reader.last_ids(found).ids]
                    body = self._body(generation, before, output_tokens=len(before))
                    body |= {"n_predict": gap.count, "stream": False, "return_progress": False, "return_tokens": True}
                    missing = list((await self._connection.post("/completion", body)).get("tokens") or [])
                found.append(missing)
                continue
            candidates = index.candidates(gap)
            usual: list[int] = []
            if len(candidates) > 1:
                usual = await self._tokenizer.tokenize(
                    gap.text, at_most=len(gap.text.encode()) + 2, parse_special=False
                )
            if (tokens := choose(candidates, gap, usual)) is None:
                return
            found.append(tokens)
        self.answers.post(generation, reader.last_ids(found))

    async def _score(self, generation: LlamaGeneration) -> bool:
        """Score the prompt, and post its scores. Return whether the answer ends there."""
        request, prompt = generation.request, generation.prompt

        def progress(done: int) -> None:
            now = time.perf_counter()
            self._log_step(generation, "prefill", now, done - generation.computed_tokens)
            generation.computed_tokens = done
            self.answers.post(generation, PromptProgress(done=done, total=len(prompt)))
            self.answers.deliver()

        scores = await self._scorer.score(
            prompt,
            scope=request.scope,
            top=request.top_logprobs or 0,
            start=request.score_from,
            progress=progress,
        )
        has_ended = self.answers.scored(generation, scores, time.perf_counter())
        # They must arrive before the first delta, which does not pass this loop.
        self.answers.deliver()
        return has_ended

    async def _generate(self, generation: LlamaGeneration, slot: Slot) -> None:
        """Let llama.cpp compute the rest of the answer, until its end or until it is paused or interrupted.

        The answer is read on its reader's event loop, because a switch between threads for each token would cost as
        much as all other work for the token.
        """
        reader, connection, slots = generation.row, self._connection, self._slot_files
        reader.slot = slot.id
        body = json.dumps(self._body(generation, reader.pieces, output_tokens=generation.output_tokens)).encode()
        async with explained_end(self._process, self._tokenizer.entry.id):
            await slot.lock.acquire()
            try:
                sock = await connection.open()
            except BaseException:
                slot.lock.release()
                raise
            try:
                streaming = connection.stream(sock, "/completion", body, partial(self._deliver_event, generation, slot))
                try:
                    future = asyncio.run_coroutine_threadsafe(streaming, generation.mailbox.loop)
                except RuntimeError:
                    streaming.close()
                    raise EngineError("the event loop of the reader is closed") from None
                await asyncio.wrap_future(future)
            finally:
                ending = asyncio.create_task(connection.end(sock), name="lmx-lab end of a llama.cpp request")
                ending.add_done_callback(lambda _: slot.lock.release())
                if slot.user is generation:
                    # llama.cpp finishes the running step of a prompt.
                    done = generation.cached_tokens + generation.computed_tokens + self._plan.batch_tokens
                    slot.tokens = [*generation.prompt, *reader.tokens] if reader.tokens else generation.prompt[:done]
        if slots is not None and generation.finish is not None:
            slots.save(generation, slot)

    def _body(self, generation: LlamaGeneration, answer: Sequence[int | str], *, output_tokens: int) -> dict[str, Any]:
        """Return the body of a request for an answer.

        Args:
            answer: The part of the answer that was generated by earlier requests, as ids of tokens and as texts.
            output_tokens: Number of tokens of this part.
        """
        request, tokenizer, start = generation.request, self._tokenizer, generation.start
        max_tokens = generation.max_tokens - output_tokens
        if needs_steps(request, generation.grammar):
            max_tokens = min(max_tokens, generation.row.step_tokens)
        return completion_body(
            request,
            generation.prompt[: len(generation.prompt) - len(start)],
            [*start, *answer],
            slot=generation.row.slot,
            choice=generation.choice,
            max_tokens=max_tokens,
            context_length=self._plan.context_length,
            start_tokens=len(start),
            output_tokens=output_tokens,
            may_end=output_tokens >= request.min_tokens - len(start),
            grammar=generation.grammar,
            markers=list(tokenizer.chat_format.markers),
            vocabulary_size=tokenizer.vocabulary_size,
            uses_cache=generation.row.uses_cache or output_tokens > 0,
            timings=self._uses_drafts,
        )

    def _deliver_event(self, generation: LlamaGeneration, slot: Slot, event: dict[str, Any]) -> bool:
        """Deliver the items of one event, and return whether to stop reading. Runs on the reader's loop."""
        if generation not in self.answers.scheduler:
            # It has ended, and ``answers`` delivers the end to its reader.
            return True
        reader = generation.row
        if event.get("stop") and reader.ends_step(generation, event):
            return True
        now = time.perf_counter()
        # It is passed to the reader directly, and not by ``answers``.
        self.answers.progress_at = now
        prompt_tokens, output_tokens = generation.computed_tokens, generation.output_tokens
        for item in reader.read(generation, event, now):
            generation.mailbox.deliver(item)
        if (tokens := generation.output_tokens - output_tokens) > 0:
            self._log_step(generation, "decode", now, tokens)
        elif (tokens := generation.computed_tokens - prompt_tokens) > 0:
            self._log_step(generation, "prefill", now, tokens)
            if generation.computed_tokens >= MIN_GAIN_TOKENS:
                milliseconds = event["prompt_progress"]["time_ms"]
                self._states.token_s = milliseconds / 1e3 / generation.computed_tokens
        is_awaited = bool(awaited := slot.awaited) and reader.can_lend(generation, min(awaited))
        is_paused = generation in self._paused and reader.can_continue(generation)
        # Below the minimum length, a request ignores end tokens, so another request has to continue the answer.
        min_tokens = generation.request.min_tokens
        is_long_enough = (
            min_tokens > 0
            and reader.reaches(generation, min_tokens - len(generation.start))
            and generation.output_tokens < generation.max_tokens
        )
        return generation.finish is not None or is_paused or is_awaited or is_long_enough

    def _log_step(self, generation: LlamaGeneration, kind: StepKind, now: float, tokens: int) -> None:
        """Record what llama.cpp has computed for a request since the last step; it does not number its steps."""
        steps, running = generation.mailbox.steps, self.answers.scheduler.running
        cached_tokens = sum([other.cached_tokens + other.computed_tokens + other.output_tokens for other in running])
        steps.add(
            kind,
            None,
            now,
            tokens=tokens,
            requests=len(running),
            kv_bytes=cached_tokens * self._plan.token_bytes,
        )
