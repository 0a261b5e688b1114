"""Deliver answers from an engine to a reader on an event loop.

The engine never waits for a reader. Deltas that a slow reader has not read are merged into one, so a mailbox holds at
most the text of one generation.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
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


class Mailbox:
    """The items of one generation that its reader has not read yet. Belongs to the event loop ``loop``.

    Args:
        arrived_at: When the request arrived; by default now.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, arrived_at: float | None = None) -> None:
        self.loop = loop
        self.steps = StepLog(time.perf_counter() if arrived_at is None else arrived_at)
        """The engine's steps for the generation. Unlike the items, the engine writes them directly."""
        self.changed = asyncio.Event()
        self.end: GenerationReport | LabError | None = None
        self.progress: PromptProgress | None = None
        self.scores: PromptScores | None = None
        self._deltas: list[Delta] = []

    def deliver(self, item: Item) -> None:
        """Add an item. Called on ``loop``, in order; a report or an error is the last one."""
        match item:
            case Delta():
                self._deltas.append(item)
                # More are merged for a slow reader.
                if len(self._deltas) > 64:
                    self._deltas = [merge_deltas(self._deltas)]
            case PromptProgress():
                self.progress = item
                return
            case PromptScores():
                self.scores = item
                return
            case _:
                self.end = item
        self.changed.set()

    def take(self) -> Delta | None:
        """Return everything since the last call as one delta; None if there is nothing to show."""
        if not self._deltas:
            return None
        deltas, self._deltas = self._deltas, []
        # Nearly always there is only one.
        delta = deltas[0] if len(deltas) == 1 else merge_deltas(deltas)
        return delta if delta.tokens or delta.ids or delta.has_content else None


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
        self._mailbox = mailbox
        self._cancel = cancel
        self._closed = False
        self._observe: Observer | None = None

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
    def steps(self) -> StepLog:
        """The engine's steps for the generation so far."""
        return self._mailbox.steps

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

    def on_end(self, observe: Observer) -> None:
        """Call a function exactly once at the end, on the answer's loop, unless the loop is closed.

        The answer ends when it was read completely, fails, is closed or is deleted.
        """
        self._observe = observe

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        mailbox = self._mailbox
        while not self._closed:
            if (delta := mailbox.take()) is not None:
                self.tokens += delta.tokens
                if self.deltas is not None:
                    self.deltas.append(delta)
                return delta
            if isinstance(mailbox.end, LabError):
                self._end("error", mailbox.end.code)
                raise mailbox.end
            if mailbox.end is not None:
                break
            mailbox.changed.clear()
            await mailbox.changed.wait()
        self._end(self._outcome)
        raise StopAsyncIteration

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
        self._end(self._outcome)

    def close(self) -> None:
        """Do the same as ``aclose``, from any thread. No reader may be waiting for a delta."""
        self._stop()
        self._end_later()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        # The observer is not called directly: a finalizer may run while this thread holds a lock that the observer
        # acquires.
        if not self._closed or self._observe is not None:
            self.close()

    def _stop(self) -> None:
        if not self._closed:
            self._closed = True
            if self._mailbox.end is None:
                self._cancel()

    @property
    def _outcome(self) -> Outcome:
        """The outcome of an answer that is not read any further, and may have ended before."""
        return self.report.finish_reason if self.report else "cancelled"

    def _end(self, outcome: Outcome, code: str | None = None) -> None:
        observe, self._observe = self._observe, None
        if observe is not None:
            observe(self, outcome, code)

    def _end_later(self) -> None:
        if self._observe is not None:
            with suppress(RuntimeError):  # The loop is closed, so the observer is not needed anymore.
                self._mailbox.loop.call_soon_threadsafe(lambda: self._end(self._outcome))


Observer = Callable[[Answer, Outcome, str | None], None]
"""Called with an answer that has ended, its outcome, and the code of its error or None."""
