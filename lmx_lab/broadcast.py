"""Ordered, bounded fan-out inside one process: any thread publishes, tasks of an event loop subscribe.

A publisher never waits. Every subscriber sees the items in the one order of publication; one that reads too slowly
loses its oldest items and can tell how many.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from dataclasses import dataclass
from typing import Generic, Self, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class FeedStatistics:
    subscribers: int
    published: int
    dropped: int
    """Items lost by slow subscribers, those that have left included."""


class Feed(Generic[T]):
    """One stream of items with any number of readers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._subscriptions: list[Subscription[T]] = []
        self._published = 0
        self._dropped = 0
        self._closed = False

    def publish(self, item: T) -> None:
        """Hand the item to every present subscriber; returns at once, from any thread. Does nothing once closed."""
        with self._lock:
            if self._closed:
                return
            self._published += 1
            for subscription in list(self._subscriptions):
                self._dropped += subscription._offer(item)

    def subscribe(self, limit: int = 256) -> Subscription[T]:
        """A reader of what is published from now on, for the running loop; keeps at most ``limit`` unread items.

        Raises:
            ValueError: a limit below 1.
            RuntimeError: no event loop runs in this thread.
        """
        if limit < 1:
            raise ValueError(f"limit is {limit}; a subscription keeps at least 1 item")
        loop = asyncio.get_running_loop()
        with self._lock:
            subscription = Subscription(self, loop, limit, ended=self._closed)
            if not self._closed:
                self._subscriptions.append(subscription)
        return subscription

    def close(self) -> None:
        """End the stream: readers still get what they have not read, then their iteration stops. Idempotent."""
        with self._lock:
            self._closed = True
            for subscription in list(self._subscriptions):
                subscription._end()
            self._subscriptions.clear()

    def statistics(self) -> FeedStatistics:
        with self._lock:
            return FeedStatistics(
                subscribers=len(self._subscriptions), published=self._published, dropped=self._dropped
            )


class Subscription(Generic[T]):
    """What one reader has not read yet. Iterate it in one task; close it, or leave its ``with`` block, when done.

    ``await asyncio.wait_for(anext(subscription), 15)`` waits for a limited time and loses nothing: an item leaves the
    buffer only in the step that returns it.
    """

    def __init__(self, feed: Feed[T], loop: asyncio.AbstractEventLoop, limit: int, *, ended: bool) -> None:
        self._feed = feed
        self._lock = feed._lock
        self._loop = loop
        self._limit = limit
        self._ended = ended
        self._items: deque[T] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._wake_due = False
        self.dropped = 0
        """How many items this reader has lost so far."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        if self._waiter is not None:
            raise RuntimeError("two tasks read one subscription; subscribe once for each")
        while True:
            with self._lock:
                if self._items:
                    return self._items.popleft()
                if self._ended:
                    raise StopAsyncIteration
                self._waiter = self._loop.create_future()
                self._wake_due = True
            try:
                await self._waiter
            finally:
                self._waiter = None

    def close(self) -> None:
        """Stop receiving and forget what was not read. Idempotent, from any thread."""
        with self._lock:
            self._items.clear()
            self._end()
            if self in self._feed._subscriptions:
                self._feed._subscriptions.remove(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.close()

    def _offer(self, item: T) -> int:
        """Under the lock: keep the item and return how many were dropped for it."""
        lost = 0
        if len(self._items) >= self._limit:
            self._items.popleft()
            lost = 1
        self._items.append(item)
        self.dropped += lost
        self._wake()
        return lost

    def _end(self) -> None:
        self._ended = True
        self._wake()

    def _wake(self) -> None:
        if not self._wake_due:
            return
        self._wake_due = False
        try:
            self._loop.call_soon_threadsafe(self._release)
        except RuntimeError:
            # The reader's loop is closed, so nobody will ever read or close this.
            self._ended = True
            if self in self._feed._subscriptions:
                self._feed._subscriptions.remove(self)

    def _release(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
