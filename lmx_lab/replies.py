"""What the notebook's chat verbs return: a reply, or a stream of text that ends in one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from lmx_lab.engine import Delta, GenerationReport, TokenStream
from lmx_lab.wire.chat import Timings, Usage

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Reply:
    """A whole answer and what it cost."""

    text: str
    model: str
    finish_reason: str
    usage: Usage
    timings: Timings
    report: GenerationReport = field(repr=False)

    @property
    def tokens_per_second(self) -> float:
        """Decode speed."""
        return self.report.tokens_per_second

    @property
    def ttft_s(self) -> float:
        """Seconds from the call to the first token."""
        return self.report.ttft_s

    def __str__(self) -> str:
        return self.text

    def _repr_markdown_(self) -> str:
        cost = f"{self.usage.completion_tokens} tokens, {self.tokens_per_second:.1f} tokens/s"
        return f"{self.text}\n\n<small>{self.model} · {cost} · first after {self.ttft_s:.2f} s</small>"


class ReplyStream:
    """Text as it is generated: ``for piece in stream`` or ``async for``. Afterwards ``reply`` has the whole.

    Leaving the loop early and dropping the stream ends the generation; ``close()`` does it at once.
    """

    def __init__(
        self,
        stream: TokenStream,
        finish: Callable[[str, GenerationReport], Reply],
        block: Callable[[Any], Any],
        hand_over: Callable[[Any], Awaitable[Any]],
    ) -> None:
        self._stream = stream
        self._finish = finish
        self._block = block
        self._hand_over = hand_over
        self._text: list[str] = []
        self.reply: Reply | None = None
        """Set when the generation has ended."""

    def __iter__(self) -> Iterator[str]:
        while (delta := self._block(self._next())) is not None:
            if text := self._take(delta):
                yield text
        self._end()

    async def __aiter__(self) -> AsyncIterator[str]:
        while (delta := await self._hand_over(self._next())) is not None:
            if text := self._take(delta):
                yield text
        self._end()

    def close(self) -> None:
        """End the generation. Idempotent."""
        self._block(self._stream.aclose())

    async def aclose(self) -> None:
        await self._hand_over(self._stream.aclose())

    async def _next(self) -> Delta | None:
        try:
            return await anext(self._stream, None)
        except BaseException:
            await self._stream.aclose()
            raise

    def _take(self, delta: Delta) -> str:
        self._text.append(delta.text)
        return delta.text

    def _end(self) -> None:
        if self._stream.report is not None:
            self.reply = self._finish("".join(self._text), self._stream.report)
