"""Run the accepted generations of one model until their end, on every engine.

Plain synchronous code. An ``Answers`` belongs to the thread that computes the model, which calls ``update`` between two
steps. It decides what runs (``engine.scheduler``), ends each generation exactly once, and passes the results to the
event loops of their readers. Each engine implements ``Computation``, which contains the parts that differ.
"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Generic, Literal, Protocol, TypeVar

from lmx_lab.engine.requests import GenerationRequest
from lmx_lab.engine.scheduler import Permit, Scheduler, SlotTimes, Turns, Verdict
from lmx_lab.engine.stream import Answer, Item, Mailbox
from lmx_lab.engine.text.splitter import TextSplitter, Token
from lmx_lab.errors import GenerationTimeoutError, LabError
from lmx_lab.values.engine import TokenTotals
from lmx_lab.values.outputs import Delta, FinishReason, GenerationReport, PromptScores, TokenLogprob

if TYPE_CHECKING:
    from lmx_lab.engine.grammar.mask import Constraint

Row = TypeVar("Row")


@dataclass(kw_only=True, eq=False)
class Generation(Generic[Row]):
    """One answer on the side of its engine; ``stream.Answer`` is the same answer on the side of its reader.

    Belongs to the thread that computes the model. Times are seconds of ``time.perf_counter``.
    """

    request: GenerationRequest
    model: str
    """Id of the model."""
    prompt: list[int]
    """Tokens of the prompt, followed by those of ``start``."""
    start: list[int] = field(default_factory=list)
    """Tokens with which the answer begins, which are not generated."""
    max_tokens: int
    """Maximum number of tokens to generate: the requested one without ``start``, or less if the context is too
    short."""
    choice: int = 0
    """Index of the answer among those to the same request."""
    named_tokens: tuple[int, ...] = ()
    """Ids of the request's ``logprob_tokens``."""
    grammar: str | None = None
    """The format of the answer, if the engine enforces it itself; ``constraint`` then only checks the answer."""
    constraint: Constraint | None = None
    splitter: TextSplitter[TokenLogprob]
    mailbox: Mailbox
    permit: Permit
    arrived_at: float
    timeout_s: float
    row: Row
    """Data of an answer that only this engine needs."""
    failure: LabError | None = None
    """The error with which the answer ends instead of a report."""
    admitted_at: float = 0.0
    """When it first got a slot; 0 before."""
    decoding_at: float = 0.0
    """When its prompt was computed; 0 before."""
    first_token_at: float = 0.0
    cached_tokens: int = 0
    disk_cached_tokens: int = 0
    """Cached tokens whose state was read from disk."""
    computed_tokens: int = 0
    """Number of prompt tokens that have been computed, without cached ones."""
    output_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    peak_memory_bytes: int = 0
    start_delta: Delta | None = None
    """The beginning of the answer; None if all its tokens are generated."""
    start_finish: FinishReason | None = None
    """Why the answer ends before the first token is generated; None if it does not."""
    finish: FinishReason | None = None
    """Set when the answer is complete."""

    def read_start(self, *, ends: bool, tokens: Sequence[Token] | None = None) -> None:
        """Read the tokens with which the answer begins. Takes about 20 microseconds for each of them.

        Args:
            ends: Whether the last of them ends the answer.
            tokens: The tokens as the splitter takes them; by default ``start``.

        Raises:
            InvalidRequestError: the format of the answer does not allow them.
        """
        if self.constraint is not None:
            self.constraint.begin(self.start)
            ends = ends or self.constraint.complete
        finish = "stop" if ends else self.start_finish
        pieces = []
        for token in self.start if tokens is None else tokens:
            pieces.append(self.splitter.add(token))
            if pieces[-1].stopped:
                break
        if finish is not None and not pieces[-1].stopped:
            pieces.append(self.splitter.finish())
        if pieces[-1].stopped:
            finish = "stop"
        self.start_finish = "tool_calls" if finish == "stop" and self.splitter.has_called else finish
        self.start_delta = Delta(
            text="".join([piece.text for piece in pieces]),
            tokens=len(self.start),
            ids=tuple(self.start),
            reasoning="".join([piece.reasoning for piece in pieces]),
            tool_calls=tuple([call for piece in pieces for call in piece.calls]),
        )

    def add(
        self,
        token: Token,
        now: float,
        *,
        count: int = 1,
        ids: tuple[int, ...] = (),
        entry: TokenLogprob | None = None,
    ) -> Delta:
        """Add a generated token, and return what its reader gets. Sets ``finish`` if the token ends the answer.

        Args:
            token: The token, or the text of tokens that the engine has decoded.
            count: Number of tokens that it stands for.
            ids: Their ids, as far as they are known.
            entry: The log-probability of the token, if it has text and the request needs it.
        """
        if count and not self.first_token_at:
            self.first_token_at = now
        self.output_tokens += count
        piece = self.splitter.add(token, entry, count=count)
        if piece.stopped:
            self.finish = "tool_calls" if self.splitter.has_called else "stop"
        return Delta(
            text=piece.text,
            tokens=count,
            ids=ids,
            logprobs=piece.entries,
            reasoning=piece.reasoning,
            tool_calls=piece.calls,
        )

    def complete(self, reason: Literal["stop", "length"], entry: TokenLogprob | None = None) -> Delta:
        """Set ``finish``, and return the text that was held back. A stop string may be completed by it.

        Args:
            entry: The log-probability of the token without text that ended the answer.
        """
        piece = self.splitter.finish()
        entries = piece.entries
        if piece.stopped:
            reason = "stop"
        elif entry is not None:
            entries = (*entries, entry)
        self.finish = "tool_calls" if reason == "stop" and self.splitter.has_called else reason
        return Delta(text=piece.text, tokens=0, logprobs=entries, reasoning=piece.reasoning, tool_calls=piece.calls)

    def report(self, now: float) -> GenerationReport:
        """Return the report of the answer, which ends now."""
        assert self.finish is not None
        decoding_at = self.decoding_at or now
        return GenerationReport(
            model=self.model,
            finish_reason=self.finish,
            prompt_tokens=len(self.prompt),
            cached_tokens=self.cached_tokens,
            disk_cached_tokens=self.disk_cached_tokens,
            output_tokens=self.output_tokens,
            reasoning_tokens=self.splitter.reasoning_tokens,
            queue_s=self.admitted_at - self.arrived_at,
            prefill_s=decoding_at - self.admitted_at,
            ttft_s=(self.first_token_at or now) - self.arrived_at,
            decode_s=now - decoding_at,
            peak_memory_bytes=self.peak_memory_bytes,
            stop_sequence=self.splitter.stops.found,
            drafted_tokens=self.drafted_tokens,
            accepted_tokens=self.accepted_tokens,
        )

    def count(self, totals: TokenTotals) -> None:
        """Add its tokens so far to ``totals``."""
        totals.prompt_tokens += self.computed_tokens + self.cached_tokens
        totals.cached_tokens += self.cached_tokens
        totals.disk_cached_tokens += self.disk_cached_tokens
        totals.output_tokens += self.output_tokens
        totals.drafted_tokens += self.drafted_tokens
        totals.accepted_tokens += self.accepted_tokens


class Computation(Protocol[Row]):
    """Computes the generations that have a slot. Called by ``Answers`` only."""

    @property
    def judge(self) -> Callable[[Generation[Row]], Verdict] | None:
        """Decides whether a generation may have a slot now, and may free memory for it; None always allows it."""

    def begin(self, generation: Generation[Row], /) -> None:
        """Start to compute a generation, which has a slot."""

    def can_pause(self, generation: Generation[Row], /) -> bool:
        """Return whether a generation that decodes can lose its slot and continue later with the same text."""

    def pause(self, generation: Generation[Row], /) -> None:
        """Stop computing a generation until ``resume``."""

    def resume(self, generation: Generation[Row], /) -> None:
        """Continue a generation that was paused, and record that in its step log."""

    def remove(self, generation: Generation[Row], /) -> None:
        """Stop computing a generation that has ended or is cancelled, whether it had a slot or not."""

    def remaining_s(self, generation: Generation[Row], /) -> float:
        """Return the estimated time until the last token of a running generation; infinite if it is not known."""


class Answers(Generic[Row]):
    """The accepted generations of one model, queued and running.

    Args:
        post: Runs a function on the thread that computes the model, and may be called from any thread. By default, the
            model is computed by the running event loop.
    """

    def __init__(
        self,
        computation: Computation[Row],
        *,
        slots: int,
        turns: Turns,
        post: Callable[[Callable[[], object]], object] | None = None,
    ) -> None:
        # A weak reference, because the computation owns this object: a cycle would keep an unloaded model until it is
        # collected.
        self._computation: Computation[Row] = weakref.proxy(computation)
        self._ended = TokenTotals()
        """Counts of the generations that have ended."""
        self.progress_at = time.perf_counter()
        """When ``deliver`` was last called, which is after each step."""
        self.post_work = post or asyncio.get_running_loop().call_soon_threadsafe
        self._turns = turns
        self._slot_times = SlotTimes()
        self._items: dict[asyncio.AbstractEventLoop, list[tuple[Mailbox, Item]]] = defaultdict(list)
        """Items that ``deliver`` has not passed on yet, by the event loops of their readers."""
        self.scheduler: Scheduler[Generation[Row]] = Scheduler(slots=slots, prefills=slots, lanes=slots, turns=turns)

    @property
    def slot_free_s(self) -> float:
        """Estimated time until one of the running generations ends, from the durations of earlier ones and from the
        progress of those that run; at least 1.
        """
        running = self.scheduler.running
        if len(running) < self.scheduler.slots:
            return 1.0
        return self._slot_times.free_in_s(
            running=len(running),
            oldest_s=time.perf_counter() - min(generation.admitted_at for generation in running),
            at_most_s=min(map(self._computation.remaining_s, running)),
        )

    @property
    def totals(self) -> TokenTotals:
        """Counts of all generations since the load. May be read on any thread."""
        # Those that have ended are read first: a generation that ends meanwhile is then missing, and not counted twice.
        totals = replace(self._ended)
        # One that is paused meanwhile would be in both.
        for generation in dict.fromkeys((*self.scheduler.running, *self.scheduler.queued)):
            generation.count(totals)
        return totals

    def open(self, generations: Sequence[Generation[Row]]) -> list[Answer]:
        """Return the readers' side of the answers to one request. May be called from any thread."""
        first = generations[0]
        prompt = tuple(first.prompt[: len(first.prompt) - len(first.start)])
        answers = []
        for generation in generations:
            # Weak references, because an answer that is kept must not keep the model in memory.
            cancel = partial(_cancel_soon, weakref.ref(self), weakref.ref(generation))
            answers.append(Answer(generation.mailbox, cancel, request=first.request, model=first.model, prompt=prompt))
        return answers

    def add(self, generations: Sequence[Generation[Row]], *, uncached: int | None = None) -> None:
        """Queue the answers to one request.

        Args:
            uncached: Number of prompt tokens that must be computed; by default all.
        """
        first = generations[0]
        self.scheduler.add(
            generations,
            tokens=len(first.prompt) if uncached is None else uncached,
            now=time.perf_counter(),
            client=first.request.caller.client,
        )

    def update(self, now: float) -> None:
        """End the generations that are past their deadline, pause one for a client without a slot, and start those for
        which there is a slot.
        """
        scheduler, computation = self.scheduler, self._computation
        for each in (*scheduler.queued, *scheduler.running):
            # llama.cpp may still search the ids of the tokens of a complete answer.
            if each.finish is None and now > each.arrived_at + each.timeout_s:
                self.end(each, GenerationTimeoutError.after(each.timeout_s))
        if (paused := scheduler.pause(computation.can_pause, now)) is not None:
            computation.pause(paused)
        while (admitted := scheduler.admit(computation.judge, now)) is not None:
            if admitted.admitted_at:
                computation.resume(admitted)
                continue
            admitted.admitted_at = now
            admitted.mailbox.steps.start(now)
            if not admitted.request.score_prompt and self._post_start(admitted, now):
                continue
            computation.begin(admitted)

    def next_at(self, now: float) -> float | None:
        """Return when ``update`` must be called again even if no generation ends; None if that is not necessary."""
        scheduler = self.scheduler
        unended = (*scheduler.running, *scheduler.queued)
        if not unended:
            return None
        times = [each.arrived_at + each.timeout_s for each in unended if each.finish is None]
        if scheduler.queued:
            if len(scheduler.running) < scheduler.slots:
                return now
            if (pause_at := scheduler.next_pause_at()) is not None:
                # Running generations keep their slot for a while, so there is no need to check more often.
                times.append(max(pause_at, now + self._turns.check_s))
        return min(times, default=None)

    def post(self, generation: Generation[Row], *items: Item) -> None:
        """Add items for a reader, which ``deliver`` passes on."""
        mailbox = generation.mailbox
        posted = self._items[mailbox.loop]
        for item in items:
            posted.append((mailbox, item))

    def scored(self, generation: Generation[Row], scores: PromptScores, now: float) -> bool:
        """Post the scores of a prompt, before the beginning of the answer. Return whether the answer ends there."""
        self.post(generation, scores)
        return self._post_start(generation, now)

    def _post_start(self, generation: Generation[Row], now: float) -> bool:
        """Post the beginning of an answer, which is not generated. Return whether the answer ends there."""
        if generation.start_delta is not None:
            self.post(generation, generation.start_delta)
        generation.finish = generation.start_finish
        if generation.finish is None:
            return False
        self.end(generation, generation.failure or generation.report(now))
        return True

    def end(self, generation: Generation[Row], end: GenerationReport | LabError | None) -> None:
        """End a generation, free its slot, and post its end. No other method does so. Ignored if the generation has
        ended before.

        Args:
            end: What its reader gets; None if the reader has left.
        """
        if not self.scheduler.remove(generation):
            return
        if isinstance(end, GenerationReport):
            self._slot_times.add(end.prefill_s + end.decode_s)
        try:
            self._computation.remove(generation)
        finally:
            generation.count(self._ended)
            generation.permit.release()
            if end is not None:
                self.post(generation, end)

    def cancel(self, generation: Generation[Row]) -> None:
        """Stop a generation whose reader has left. Ignored if the generation has ended."""
        self.end(generation, None)

    def end_all(self, error: LabError, *, queued_only: bool = False, running_only: bool = False) -> None:
        """End all generations with an error. If the engine fails to remove some of them, the others end nevertheless,
        and the first failure is raised afterwards.

        Args:
            queued_only: Whether only those end that have never had a slot.
            running_only: Whether only those end that have a slot.
        """
        scheduler, failures = self.scheduler, []
        queued = [] if running_only else scheduler.not_started if queued_only else scheduler.queued
        for generation in queued if queued_only else scheduler.running + queued:
            try:
                self.end(generation, error)
            except Exception as exc:
                failures.append(exc)
        if failures:
            raise failures[0]

    def deliver(self) -> None:
        """Pass the posted items to each reader's loop in one call, and cancel the generations whose readers' loop is
        closed.
        """
        self.progress_at = time.perf_counter()
        items, self._items = self._items, defaultdict(list)
        closed = []
        for loop, posted in items.items():
            try:
                loop.call_soon_threadsafe(_deliver, posted)
            except RuntimeError:
                closed.append(loop)
        if closed:
            for generation in self.scheduler.running + self.scheduler.queued:
                if generation.mailbox.loop in closed:
                    self.cancel(generation)


def _cancel_soon(weak_answers: weakref.ref[Answers[Row]], weak_generation: weakref.ref[Generation[Row]]) -> None:
    """Cancel a generation whose reader has left. May be called from any thread."""

    def cancel() -> None:
        if (generation := weak_generation()) is not None and (answers := weak_answers()) is not None:
            answers.cancel(generation)

    # If the loop of the model is closed, all its generations have ended.
    with suppress(RuntimeError):
        if (answers := weak_answers()) is not None:
            answers.post_work(cancel)


def _deliver(items: list[tuple[Mailbox, Item]]) -> None:
    for mailbox, item in items:
        mailbox.deliver(item)


def shared_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of tokens of the longest prefix that both have in common, found by bisection."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
