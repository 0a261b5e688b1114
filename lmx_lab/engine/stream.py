"""Deliver answers from an engine to a reader on an event loop.

The engine never waits for a reader. Deltas that a slow reader has not read are merged into one, so a mailbox holds at
most the text of one generation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal, Self, TypeVar

from lmx_lab.engine.requests import GenerationRequest
from lmx_lab.errors import EngineError, LabError
from lmx_lab.values.models import LoadSpec, ModelEntry
from lmx_lab.values.outputs import Delta, GenerationReport, PromptProgress, PromptScores, merge_deltas
from lmx_lab.values.timeline import StepLog

Result = TypeVar("Result")
Outcome = Literal["stop", "length", "tool_calls", "cancelled", "error"]
Item = Delta | PromptProgress | PromptScores | GenerationReport | LabError


@dataclass(eq=False)
class Mailbox:
    """The items of one generation that its reader has not read yet. Belongs to the event loop ``loop``."""

    loop: asyncio.AbstractEventLoop
    steps: StepLog
    """The engine's steps for the generation. Unlike the items, the engine writes them directly."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    end: GenerationReport | LabError | None = None
    progress: PromptProgress | None = None
    scores: PromptScores | None = None
    deltas: list[Delta] = field(default_factory=list)
    pass_on: Callable[[Delta], bool] | None = None
    """Set while the reader waits, if it can use a delta without waking up. Returns whether it has used the delta."""

    def deliver(self, item: Item) -> None:
        """Add an item. Called on ``loop``, in order; a report or an error is the last one."""
        match item:
            case Delta():
                if not (item.tokens or item.ids or item.has_content):
                    return
                if self.pass_on is not None and self.pass_on(item):
                    return
                # Later deltas must not overtake this one.
                self.pass_on = None
                self.deltas.append(item)
                # More are merged for a slow reader.
                if len(self.deltas) > 64:
                    self.deltas = [merge_deltas(self.deltas)]
            case PromptProgress():
                self.progress = item
                return
            case PromptScores():
                self.scores = item
                return
            case _:
                # The first one counts: a generation that was stopped may have ended in the meantime.
                self.end = self.end or item
        self.changed.set()


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The model of an answer and how it was loaded, which do not change if another model is loaded."""

    entry: ModelEntry
    spec: LoadSpec
    fingerprint: str
    """Name and version of the library that computes the model, such as ``mlx-0.32.4``."""


class Answer:
    """The running answer to one choice of a generation request. Iterating it yields ``Delta`` values; after that,
    ``report`` is set.

    If the generation fails, the iteration raises its ``LabError``. ``asyncio.wait_for(anext(answer), s)`` waits for a
    limited time, and no delta is lost.

    To stop early, call ``aclose()`` or use ``async with``: the slot is free within one engine step. An answer that is
    garbage-collected before its end is cancelled. It belongs to the event loop on which the request was sent.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        cancel: Callable[[], object],
        *,
        request: GenerationRequest,
        model: str = "",
        prompt: tuple[int, ...] = (),
    ) -> None:
        self.request = request
        """The request to the engine."""
        self.index = 0
        """Index among the answers to the caller, who sets it."""
        self.model = model
        """Id of the model that answers."""
        self.prompt = prompt
        """Token ids of the prompt."""
        self.origin: Origin
        """Set by the model that accepts the request."""
        self.deltas: list[Delta] | None = None
        """All deltas that were read; None if they are not kept, which is the default."""
        self.tokens = 0
        """Number of tokens that were read."""
        self.steps = mailbox.steps
        """The engine's steps for the generation so far."""
        self.pass_on: Callable[[Delta], bool] | None = None
        """Called with a delta that the engine delivers while the reader waits. Returns whether it has used the delta,
        which the reader then does not get. Switching to the reader's task would take longer than writing the delta.
        """
        self._mailbox = mailbox
        self._cancel = cancel
        self._closed = False
        self.on_end: Observer | None = None
        """Called exactly once at the end, on the answer's loop, unless the loop is closed. The answer ends when it was
        read completely, fails, is closed or is deleted."""

    @property
    def report(self) -> GenerationReport | None:
        """Tokens and times of the generation; None until it has ended without an error."""
        end = self._mailbox.end
        return end if isinstance(end, GenerationReport) else None

    @property
    def ended(self) -> bool:
        """Whether the engine has ended the generation and released its slot. Its last deltas may still be unread."""
        return self._mailbox.end is not None

    @property
    def status(self) -> str:
        """The state of the request, such as ``queued``, for a client that waits for the first token."""
        progress = self._mailbox.progress
        return "queued" if progress is None else f"prompt {progress.done}/{progress.total} tokens"

    @property
    def progress(self) -> PromptProgress | None:
        """How much of the prompt has been computed; None while the request waits for a slot."""
        return self._mailbox.progress

    @property
    def prompt_scores(self) -> PromptScores | None:
        """The scores of a request with ``score_prompt``; set before the first delta, or before the end."""
        return self._mailbox.scores

    def final_report(self) -> GenerationReport:
        """Return the report of an answer that was read to its end.

        Raises:
            EngineError: there is no report, because the answer was closed before its end.
        """
        if self.report is None:
            raise EngineError("the generation ended without a report")
        return self.report

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        mailbox = self._mailbox
        while not self._closed:
            if mailbox.deltas:
                deltas, mailbox.deltas = mailbox.deltas, []
                # There is nearly always only one delta.
                delta = deltas[0] if len(deltas) == 1 else merge_deltas(deltas)
                self._count(delta)
                return delta
            if isinstance(mailbox.end, LabError):
                self._end(is_failure=True)
                raise mailbox.end
            if mailbox.end is not None:
                break
            mailbox.changed.clear()
            if self.pass_on is not None:
                mailbox.pass_on = self._pass_on
            try:
                await mailbox.changed.wait()
            finally:
                mailbox.pass_on = None
        self._end()
        raise StopAsyncIteration

    def _pass_on(self, delta: Delta) -> bool:
        assert self.pass_on is not None
        try:
            is_used = not self._closed and self.pass_on(delta)
        except Exception:
            # It must not reach the engine. The reader gets the delta, and then the same error.
            return False
        if is_used:
            self._count(delta)
        return is_used

    def _count(self, delta: Delta) -> None:
        self.tokens += delta.tokens
        if self.deltas is not None:
            self.deltas.append(delta)

    async def read(self) -> Delta:
        """Return the rest of the answer as one delta. Closes the answer, even if it fails.

        Raises:
            LabError: the generation failed.
        """
        async with self:
            return merge_deltas([delta async for delta in self])

    async def aclose(self) -> None:
        """Cancel the generation if it has not ended. Idempotent."""
        self._stop()
        self._mailbox.changed.set()
        self._end()

    def close(self) -> None:
        """Do the same as ``aclose``, from any thread. No reader may be waiting for a delta."""
        self._stop()
        if self.on_end is not None:
            with suppress(RuntimeError):  # The loop is closed, so the observer is not needed anymore.
                self._mailbox.loop.call_soon_threadsafe(self._end)

    def fail(self, error: LabError) -> None:
        """Cancel the generation, and end it with an error for its reader. Ignored if it has ended. May be called from
        any thread.
        """
        self._cancel()
        with suppress(RuntimeError):  # The loop is closed, and the reader with it.
            self._mailbox.loop.call_soon_threadsafe(self._mailbox.deliver, error)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        # The observer is not called directly: a finalizer may run while this thread holds a lock that the observer
        # acquires.
        if not self._closed or self.on_end is not None:
            self.close()

    def _stop(self) -> None:
        if not self._closed:
            self._closed = True
            if self._mailbox.end is None:
                self._cancel()

    def _end(self, *, is_failure: bool = False) -> None:
        """Call the observer.

        Args:
            is_failure: Whether the reader gets the error of the generation, if there is one.
        """
        observe, self.on_end = self.on_end, None
        if observe is None:
            return
        end = self._mailbox.end
        if isinstance(end, LabError) and is_failure:
            observe(self, "error", end.code)
        else:
            observe(self, end.finish_reason if isinstance(end, GenerationReport) else "cancelled", None)


Observer = Callable[[Answer, Outcome, str | None], None]
"""Called with an answer that has ended, its outcome, and the code of its error or None."""
