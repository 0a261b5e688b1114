"""Pass items between tasks: a buffer with back-pressure, an observable value, and reading with a deadline."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from typing import Generic, TypeVar

from lmx_lab.errors import UnreachableError

T = TypeVar("T")
MAX_ITEMS, MAX_CHARACTERS = 1000, 4_000_000
"""Limits of a buffer, which is full when it has reached one of them."""
MAX_UNREAD = 64
"""Number of changes of a value that are kept for a slow reader."""


class EventBuffer(Generic[T]):
    """A queue of items between two tasks. The producer waits until there is room; nothing is dropped."""

    def __init__(self) -> None:
        self._items: deque[tuple[T, int]] = deque()
        self._characters = 0
        self._filled, self._room = asyncio.Event(), asyncio.Event()
        self._room.set()
        self._ended = False

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: T, characters: int) -> None:
        """Add an item, even if the buffer is full; the producer waits for room before it adds the next one.

        Args:
            characters: Size of the item.
        """
        self._items.append((item, characters))
        self._characters += characters
        self._filled.set()
        if len(self._items) >= MAX_ITEMS or self._characters >= MAX_CHARACTERS:
            self._room.clear()

    def take(self) -> T | None:
        """Remove and return the oldest item; None if the buffer is empty."""
        if not self._items:
            return None
        item, characters = self._items.popleft()
        self._characters -= characters
        if len(self._items) <= MAX_ITEMS // 2 and self._characters < MAX_CHARACTERS:
            self._room.set()
        if not self._items and not self._ended:
            self._filled.clear()
        return item

    @property
    def has_room(self) -> bool:
        """Whether the buffer is not full. A full buffer has room again when half of its items were taken."""
        return self._room.is_set()

    async def room(self) -> None:
        """Wait until there is room."""
        await self._room.wait()

    async def filled(self) -> None:
        """Wait until there is an item, or until the end is marked."""
        await self._filled.wait()

    def end(self) -> None:
        """Mark the end. Items in the buffer can still be taken."""
        self._ended = True
        self._filled.set()


class ObservableValue(Generic[T]):
    """A value whose changes can be read. A slow reader misses old changes, but never the newest one."""

    def __init__(self, value: T) -> None:
        self.value = value
        self._readers: set[_Reader[T]] = set()
        self._ended = False

    def set(self, value: T) -> None:
        """Change the value."""
        self.value = value
        for reader in self._readers:
            reader.add(value)

    def end(self) -> None:
        """Mark the end, after which the value no longer changes."""
        self._ended = True
        for reader in self._readers:
            reader.changed.set()

    async def changes(self) -> AsyncGenerator[T, None]:
        """Yield the current value, then each change until the end."""
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
        self.unread: deque[T] = deque(maxlen=MAX_UNREAD)
        self.changed = asyncio.Event()

    def add(self, value: T) -> None:
        self.unread.append(value)
        self.changed.set()


async def next_until(items: AsyncGenerator[T, None], until_s: float | None) -> T | None:
    """Return the next item of a stream.

    Args:
        until_s: Deadline on the loop's clock, if the answer is complete; None while it is not, because a timer for each
            token would be too slow.

    Returns:
        None after the last item, and if the stream of a complete answer is not closed before the deadline.
    """
    if until_s is None:
        return await anext(items, None)
    try:
        async with asyncio.timeout_at(until_s):
            return await anext(items, None)
    except (TimeoutError, UnreachableError):
        return None
