"""From the engine thread to a reader on an event loop: the mailbox that is filled, the stream that is read.

The engine never waits for a reader. What a slow reader has not taken is merged into one delta, so a mailbox holds at
most the text of one generation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self

from lmx_lab.engine.requests import Delta, GenerationReport


class Mailbox:
    """What the engine has said about one generation and the reader has not taken yet. Lives on ``loop``."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.changed = asyncio.Event()
        self.end: GenerationReport | Exception | None = None
        self._text: list[str] = []
        self._tokens = 0

    def deliver(self, item: Delta | GenerationReport | Exception) -> None:
        """Called on ``loop``, in order, at most once with an end."""
        if isinstance(item, Delta):
            self._text.append(item.text)
            self._tokens += item.tokens
        else:
            self.end = item
        self.changed.set()

    def take(self) -> Delta | None:
        """Everything since the last call as one delta."""
        if not self._tokens:
            return None
        delta = Delta(text="".join(self._text), tokens=self._tokens)
        self._text, self._tokens = [], 0
        return delta


class TokenStream:
    """Iterate for ``Delta`` values; after the last, ``report`` is set. A failed generation raises its ``LabError``.

    Leaving early needs ``aclose()`` (or ``async with``): it frees the slot within one engine step. A stream that is
    dropped without it is cancelled when it is collected.
    """

    def __init__(self, mailbox: Mailbox, cancel: Callable[[], object]) -> None:
        self._mailbox = mailbox
        self._cancel = cancel
        self._left = False

    @property
    def report(self) -> GenerationReport | None:
        """What the generation cost; None until it has ended well."""
        end = self._mailbox.end
        return end if isinstance(end, GenerationReport) else None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        while not self._left:
            if (delta := self._mailbox.take()) is not None:
                return delta
            if isinstance(self._mailbox.end, Exception):
                raise self._mailbox.end
            if self._mailbox.end is not None:
                break
            self._mailbox.changed.clear()
            await self._mailbox.changed.wait()
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Stop the generation if it still runs. Idempotent."""
        self._leave()
        self._mailbox.changed.set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        self._leave()

    def _leave(self) -> None:
        if not self._left:
            self._left = True
            if self._mailbox.end is None:
                self._cancel()
