"""Streams between tasks: a buffer with back-pressure, an observable value, and reading a stream with a deadline."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from typing import Generic, TypeVar

from lmx_lab.errors import UnreachableError

T = TypeVar("T")
ITEMS, CHARACTERS = 1000, 4_000_000
"""Limits of a buffer; it has no room when either is reached."""
UNREAD = 64
"""Changes of a value that are kept for a slow reader."""


class EventBuffer(Generic[T]):
    """Items from one task to another, in order. The producer waits for room; nothing is dropped."""

    def __init__(self) -> None:
        self._items: deque[tuple[T, int]] = deque()
        self._characters = 0
        self._filled, self._room = asyncio.Event(), asyncio.Event()
        self._room.set()
        self._ended = False

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: T, characters: int) -> None:
        """Add an item, whether there is room or not."""
        self._items.append((item, characters))
        self._characters += characters
        self._filled.set()
        if len(self._items) >= ITEMS or self._characters >= CHARACTERS:
            self._room.clear()

    def take(self) -> T | None:
        """Remove and return the oldest item; None if the buffer is empty."""
        if not self._items:
            return None
        item, characters = self._items.popleft()
        self._characters -= characters
        if len(self._items) <= ITEMS // 2 and self._characters < CHARACTERS:
            self._room.set()
        if not self._items and not self._ended:
            self._filled.clear()
        return item

    @property
    def has_room(self) -> bool:
        return self._room.is_set()

    async def room(self) -> None:
        """Wait until there is room."""
        await self._room.wait()

    async def filled(self) -> None:
        """Wait until there is an item, or until the end."""
        await self._filled.wait()

    def end(self) -> None:
        """Mark the end; items in the buffer can still be taken."""
        self._ended = True
        self._filled.set()


class ObservableValue(Generic[T]):
    """A value with readers of its changes. A slow reader misses old changes, never the newest."""

    def __init__(self, value: T) -> None:
        self.value = value
        self._readers: set[_Reader[T]] = set()
        self._ended = False

    def set(self, value: T) -> None:
        self.value = value
        for reader in self._readers:
            reader.add(value)

    def end(self) -> None:
        """Mark the end; the value does not change any more."""
        self._ended = True
        for reader in self._readers:
            reader.changed.set()

    async def changes(self) -> AsyncGenerator[T, None]:
        """The current value, then each change, until the end."""
        reader: _Reader[T] = _Reader()
        reader.add(self.value)
        self._readers.add(reader)
        try:
            while True:
                while reader.unread:
                    yield reader.unread.popleft()
                if self._ended:
                    return
                reader.changed.clear()
                await reader.changed.wait()
        finally:
            self._readers.discard(reader)


class _Reader(Generic[T]):
    def __init__(self) -> None:
        self.unread: deque[T] = deque(maxlen=UNREAD)
        self.changed = asyncio.Event()

    def add(self, value: T) -> None:
        self.unread.append(value)
        self.changed.set()


async def next_until(items: AsyncGenerator[T, None], until_s: float | None) -> T | None:
    """The next item; None after the last one, or if the stream of a complete answer is not closed properly.

    Args:
        until_s: Deadline on the loop's clock; None while the answer is not complete. A timer for each token would be
            too slow.
    """
    if until_s is None:
        return await anext(items, None)
    try:
        async with asyncio.timeout_at(until_s):
            return await anext(items, None)
    except (TimeoutError, UnreachableError):
        return None
