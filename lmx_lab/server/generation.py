"""A generation under way, and the one word that is said about its end, whatever that end is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self

from lmx_lab.engine import TokenStream
from lmx_lab.errors import EngineError, LabError
from lmx_lab.values.generation import Delta, GenerationReport, PromptProgress, PromptScores, merge_deltas
from lmx_lab.wire.admin import RequestEvent

Outcome = Literal["stop", "length", "tool_calls", "cancelled", "error"]


@dataclass(frozen=True, kw_only=True)
class RequestEnd:
    """How one generation ended, for metrics. A request that is refused ends too, as an error without a report."""

    request_id: str
    """Empty for the notebook's own."""
    index: int = 0
    """Which choice of the answer."""
    model: str
    outcome: Outcome
    code: str | None = None
    """The error's."""
    report: GenerationReport | None = None
    """What it cost; None unless it ended well."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    """Those that were handed on, if it did not end well."""

    def event(self) -> RequestEvent:
        """The same, for those who watch."""
        report = self.report
        return RequestEvent(
            request_id=self.request_id,
            index=self.index,
            model=self.model,
            finish_reason=self.outcome,
            code=self.code,
            prompt_tokens=report.prompt_tokens if report else self.prompt_tokens,
            completion_tokens=report.output_tokens if report else self.output_tokens,
            tokens_per_second=report.tokens_per_second if report else 0.0,
            ttft_ms=report.ttft_s * 1e3 if report else 0.0,
        )


Observer = Callable[[RequestEnd], None]


class Generation:
    """A ``TokenStream`` whose end is observed exactly once: read to the end, failed, left, or dropped.

    Made and read on one event loop.
    """

    def __init__(self, stream: TokenStream, *, request_id: str, model: str, observe: Observer, index: int = 0) -> None:
        self.model = model
        self.index = index
        self.request_id = request_id
        self._stream = stream
        self._observe: Observer | None = observe
        self._loop = asyncio.get_running_loop()
        self._tokens = 0

    @property
    def report(self) -> GenerationReport | None:
        """What it cost; None until it has ended well."""
        return self._stream.report

    @property
    def progress(self) -> PromptProgress | None:
        """How far the prompt is computed; None while the request waits for a slot."""
        return self._stream.progress

    @property
    def prompt(self) -> tuple[int, ...]:
        return self._stream.prompt

    @property
    def prompt_scores(self) -> PromptScores | None:
        return self._stream.prompt_scores

    def finished(self) -> GenerationReport:
        """The report of a generation that was read to its end.

        Raises:
            EngineError: it has none: it was left before.
        """
        if self.report is None:
            raise EngineError("the generation ended without a report")
        return self.report

    @property
    def remark(self) -> str:
        """Where it stands, for somebody who waits for its first token."""
        progress = self.progress
        return "queued" if progress is None else f"prompt {progress.done}/{progress.total} tokens"

    async def whole(self) -> Delta:
        """Everything as one delta; frees the slot however it ends."""
        async with self:
            return await gathered(self)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        try:
            delta = await anext(self._stream)
        except LabError as exc:
            self._end("error", exc.code)
            raise
        except StopAsyncIteration:
            self._end(self._outcome)
            raise
        self._tokens += delta.tokens
        return delta

    async def aclose(self) -> None:
        """Stop the generation if it still runs. Idempotent."""
        await self._stream.aclose()
        self._end(self._outcome)

    def close(self) -> None:
        """As ``aclose``, from any thread; no reader may be waiting."""
        self._stream.close()
        if self._observe is not None:
            with suppress(RuntimeError):  # the loop is closed, and no observer is left
                self._loop.call_soon_threadsafe(lambda: self._end(self._outcome))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if self._observe is not None:
            # A finalizer runs anywhere, perhaps inside the very lock that an observer would take; a closed loop has
            # nobody left to tell.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._observe, self._ended(self._outcome))

    @property
    def _outcome(self) -> Outcome:
        """Of one that nobody reads any more: it may have ended by itself before."""
        return self.report.finish_reason if self.report else "cancelled"

    def _end(self, outcome: Outcome, code: str | None = None) -> None:
        observe, self._observe = self._observe, None
        if observe is not None:
            observe(self._ended(outcome, code))

    def _ended(self, outcome: Outcome, code: str | None = None) -> RequestEnd:
        return RequestEnd(
            request_id=self.request_id,
            index=self.index,
            model=self.model,
            outcome=outcome,
            code=code,
            report=self.report,
            prompt_tokens=len(self.prompt),
            output_tokens=self._tokens,
        )


async def gathered(deltas: AsyncIterator[Delta]) -> Delta:
    """Everything that comes as one delta."""
    return merge_deltas([delta async for delta in deltas])


@asynccontextmanager
async def attended(generations: Iterable[Generation]) -> AsyncIterator[None]:
    """However the block is left, all of them are over afterwards."""
    try:
        yield
    finally:
        for generation in generations:
            await generation.aclose()
