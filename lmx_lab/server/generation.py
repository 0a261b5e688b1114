"""Generations whose end is reported, and the report on the end of each request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal, Self

from lmx_lab.engine import EmbeddingRequest, GenerationRequest, RerankRequest, TokenStream
from lmx_lab.errors import EngineError, LabError
from lmx_lab.server.recording import RecordedGeneration
from lmx_lab.values.models import Kind
from lmx_lab.values.outputs import Delta, EncodeReport, GenerationReport, PromptProgress, PromptScores, merge_deltas
from lmx_lab.values.timeline import StepLog
from lmx_lab.wire.admin import RequestEvent

Outcome = Literal["stop", "length", "tool_calls", "cancelled", "error"]


@dataclass(frozen=True, kw_only=True)
class RequestEnd:
    """The end of a generation, an embedding or a rerank. A refused request ends with an error and without a report."""

    kind: Kind = "chat"
    request_id: str
    """Id of the request; empty for requests of the notebook."""
    index: int = 0
    """Index of the choice in the answer."""
    model: str
    outcome: Outcome
    code: str | None = None
    """Code of the error; None if there was none."""
    report: GenerationReport | EncodeReport | None = None
    """The engine's report; None if the request failed or was cancelled before its end."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    """Number of tokens that were delivered. Used if there is no report."""
    recorded: RecordedGeneration | None = None
    """The data for the record of the generation; None if it is not recorded."""
    steps: StepLog | None = field(default=None, compare=False)
    """The engine's steps for the generation; None if the request was refused, or is not a generation."""
    request: GenerationRequest | EmbeddingRequest | RerankRequest | None = field(default=None, compare=False)
    """The request to the engine. All choices of one prompt have the same one."""
    deltas: Sequence[Delta] = field(default=(), compare=False)
    """The parts of the answer that were delivered; empty unless they are kept."""

    def event(self) -> RequestEvent:
        """Return the event for clients of ``/admin/events``."""
        report, rate, ttft_s = self.report, 0.0, 0.0
        prompt_tokens, output_tokens = self.prompt_tokens, self.output_tokens
        if isinstance(report, GenerationReport):
            prompt_tokens, output_tokens = report.prompt_tokens, report.output_tokens
            rate, ttft_s = report.tokens_per_second, report.ttft_s
        elif report is not None:
            prompt_tokens, ttft_s = report.tokens, report.total_s
            rate = report.tokens / report.compute_s if report.compute_s > 0 else 0.0
        return RequestEvent(
            kind=self.kind,
            request_id=self.request_id,
            index=self.index,
            model=self.model,
            finish_reason=self.outcome,
            code=self.code,
            prompt_tokens=prompt_tokens,
            completion_tokens=output_tokens,
            tokens_per_second=rate,
            ttft_ms=ttft_s * 1e3,
        )


Observer = Callable[[RequestEnd], None]
"""Called once at the end of a request."""


class Generation:
    """A ``TokenStream`` that calls an observer exactly once at its end.

    It ends when it was read completely, fails, is closed or is deleted. It has to be created and read on the same event
    loop.

    Args:
        keep: Whether the end contains the parts of the answer.
    """

    def __init__(
        self,
        stream: TokenStream,
        *,
        request: GenerationRequest,
        request_id: str,
        observe: Observer,
        index: int = 0,
        recorded: RecordedGeneration | None = None,
        keep: bool = False,
    ) -> None:
        self.model = stream.model
        self.request = request
        """The request to the engine."""
        self.index = index
        self.request_id = request_id
        self._stream = stream
        self._observe: Observer | None = observe
        self._recorded = recorded
        self._deltas: list[Delta] | None = recorded.deltas if recorded is not None else [] if keep else None
        self._loop = asyncio.get_running_loop()
        self._tokens = 0

    @property
    def report(self) -> GenerationReport | None:
        """The engine's report; None until the generation has ended without an error."""
        return self._stream.report

    @property
    def ended(self) -> bool:
        """Whether the engine has ended the generation and released its slot. The last deltas may still be unread."""
        return self._stream.ended

    @property
    def progress(self) -> PromptProgress | None:
        """Progress of computing the prompt; None while the request waits for a slot."""
        return self._stream.progress

    @property
    def prompt(self) -> tuple[int, ...]:
        """Token ids of the prompt."""
        return self._stream.prompt

    @property
    def prompt_scores(self) -> PromptScores | None:
        """Log-probabilities of the prompt; None if they were not requested or are not known yet."""
        return self._stream.prompt_scores

    @property
    def steps(self) -> StepLog:
        """The engine's steps for the generation so far."""
        return self._stream.steps

    def final_report(self) -> GenerationReport:
        """Return the report of a generation that was read to its end.

        Raises:
            EngineError: there is no report, because the generation was closed before its end.
        """
        if self.report is None:
            raise EngineError("the generation ended without a report")
        return self.report

    @property
    def status(self) -> str:
        """The state of the request, such as ``queued``, for a client that waits for the first token."""
        progress = self.progress
        return "queued" if progress is None else f"prompt {progress.done}/{progress.total} tokens"

    async def read_all(self) -> Delta:
        """Return the complete answer as one delta. Closes the generation, even if it fails.

        Raises:
            LabError: the generation failed.
        """
        async with self:
            return await collect(self)

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
        if self._deltas is not None:
            self._deltas.append(delta)
        return delta

    async def aclose(self) -> None:
        """Cancel the generation if it has not ended. Idempotent."""
        await self._stream.aclose()
        self._end(self._outcome)

    def close(self) -> None:
        """Do the same as ``aclose``, from any thread. No task may be waiting for the next delta."""
        self._stream.close()
        if self._observe is not None:
            with suppress(RuntimeError):  # The loop is closed, so the observer is not needed anymore.
                self._loop.call_soon_threadsafe(lambda: self._end(self._outcome))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if self._observe is not None:
            # Not called directly: a finalizer may run while this thread holds a lock that the observer acquires. If the
            # loop is closed, the observer is not needed anymore.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._observe, self._request_end(self._outcome))

    @property
    def _outcome(self) -> Outcome:
        """The outcome of a generation that is not read any further, and may have ended before."""
        return self.report.finish_reason if self.report else "cancelled"

    def _end(self, outcome: Outcome, code: str | None = None) -> None:
        observe, self._observe = self._observe, None
        if observe is not None:
            observe(self._request_end(outcome, code))

    def _request_end(self, outcome: Outcome, code: str | None = None) -> RequestEnd:
        return RequestEnd(
            request_id=self.request_id,
            index=self.index,
            model=self.model,
            outcome=outcome,
            code=code,
            report=self.report,
            prompt_tokens=len(self.prompt),
            output_tokens=self._tokens,
            recorded=self._recorded,
            steps=self.steps,
            request=self.request,
            deltas=self._deltas or (),
        )


async def collect(deltas: AsyncIterator[Delta]) -> Delta:
    """Read all deltas and merge them into one."""
    return merge_deltas([delta async for delta in deltas])


@asynccontextmanager
async def closing_all(generations: Iterable[Generation]) -> AsyncIterator[None]:
    """Close all generations after the block."""
    try:
        yield
    finally:
        for generation in generations:
            await generation.aclose()
