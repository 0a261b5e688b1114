"""From the engine thread to a reader on an event loop: the mailbox that is filled, the stream that is read.

The engine never waits for a reader. What a slow reader has not taken is merged into one delta, so a mailbox holds at
most the text of one generation.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from types import TracebackType
from typing import Self

from lmx_lab.errors import LabError
from lmx_lab.values.generation import Delta, GenerationReport, PromptProgress, PromptScores, merge_deltas

MOST_DELTAS = 64
"""That are held apart for a slow reader."""
Item = Delta | PromptProgress | PromptScores | GenerationReport | LabError


class Mailbox:
    """What the engine has said about one generation and the reader has not taken yet. Lives on ``loop``."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.changed = asyncio.Event()
        self.end: GenerationReport | LabError | None = None
        self.progress: PromptProgress | None = None
        self.scores: PromptScores | None = None
        self._deltas: list[Delta] = []

    def deliver(self, item: Item) -> None:
        """Called on ``loop``, in order, at most once with an end."""
        match item:
            case Delta():
                self._deltas.append(item)
                if len(self._deltas) > MOST_DELTAS:
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
        """Everything since the last call as one delta."""
        if not self._deltas:
            return None
        deltas, self._deltas = self._deltas, []
        # Nearly always there is one.
        delta = deltas[0] if len(deltas) == 1 else merge_deltas(deltas)
        return delta if delta.tokens or delta.has_content else None


class Outbox:
    """What the engine's step has to say to the mailboxes, handed to each reader's loop in one call."""

    def __init__(self) -> None:
        self._items: dict[asyncio.AbstractEventLoop, list[tuple[Mailbox, Item]]] = defaultdict(list)

    def post(self, mailbox: Mailbox, item: Item) -> None:
        self._items[mailbox.loop].append((mailbox, item))

    def send(self) -> list[asyncio.AbstractEventLoop]:
        """Deliver all; returns the loops that are closed, where nobody is left to read."""
        posted, self._items = self._items, defaultdict(list)
        closed = []
        for loop, items in posted.items():
            try:
                loop.call_soon_threadsafe(_deliver, items)
            except RuntimeError:
                closed.append(loop)
        return closed


def _deliver(items: list[tuple[Mailbox, Item]]) -> None:
    for mailbox, item in items:
        mailbox.deliver(item)


class TokenStream:
    """Iterate for ``Delta`` values; after the last, ``report`` is set. A failed generation raises its ``LabError``.

    ``asyncio.wait_for(anext(stream), s)`` waits for a limited time and loses nothing.

    Leaving early needs ``aclose()`` (or ``async with``): it frees the slot within one engine step. A stream that is
    dropped without it is cancelled when it is collected.
    """

    def __init__(self, mailbox: Mailbox, cancel: Callable[[], object], prompt: tuple[int, ...] = ()) -> None:
        self.prompt = prompt
        """The tokens of the prompt."""
        self._mailbox = mailbox
        self._cancel = cancel
        self._left = False

    @property
    def report(self) -> GenerationReport | None:
        """What the generation cost; None until it has ended well."""
        end = self._mailbox.end
        return end if isinstance(end, GenerationReport) else None

    @property
    def progress(self) -> PromptProgress | None:
        """How far the prompt is computed; None while the request waits for a slot."""
        return self._mailbox.progress

    @property
    def prompt_scores(self) -> PromptScores | None:
        """For a request with ``score_prompt``: set before the first delta, or the end."""
        return self._mailbox.scores

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
        self.close()
        self._mailbox.changed.set()

    def close(self) -> None:
        """As ``aclose``, from any thread; no reader may be waiting."""
        self._leave()

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
