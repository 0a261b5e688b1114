"""Publish items from any thread to subscribers on event loops, within one process.

Publishing never blocks. Every subscriber receives the items in the order of publication. The buffer of a subscriber is
bounded: a subscriber that reads too slowly loses its oldest items, and the number of lost items is counted.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from typing import Generic, Self, TypeVar

T = TypeVar("T")


class Feed(Generic[T]):
    """One stream of items with any number of subscribers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._subscriptions: list[FeedSubscription[T]] = []
        self._closed = False

    @property
    def subscribers(self) -> int:
        """Number of open subscriptions."""
        return len(self._subscriptions)

    def publish(self, item: T) -> None:
        """Send an item to all current subscribers, from any thread, without blocking. No effect on a closed feed."""
        with self._lock:
            if self._closed:
                return
            for subscription in list(self._subscriptions):
                if len(subscription._items) >= subscription._limit:
                    subscription._items.popleft()
                    subscription.dropped += 1
                subscription._items.append(item)
                subscription._wake()

    def subscribe(self, limit: int = 256) -> FeedSubscription[T]:
        """Return a subscription to the items published from now on. Read it on the running event loop.

        Args:
            limit: The maximum number of unread items; beyond it the oldest are dropped.

        Raises:
            ValueError: ``limit`` is less than 1.
            RuntimeError: No event loop is running in this thread.
        """
        if limit < 1:
            raise ValueError(f"limit is {limit}; it must be at least 1")
        loop = asyncio.get_running_loop()
        with self._lock:
            subscription = FeedSubscription(self, loop, limit, ended=self._closed)
            if not self._closed:
                self._subscriptions.append(subscription)
        return subscription

    def close(self) -> None:
        """End the stream. Subscribers can read the items they have not read; then iteration stops. Idempotent."""
        with self._lock:
            self._closed = True
            for subscription in list(self._subscriptions):
                subscription._end()
            self._subscriptions.clear()


class FeedSubscription(Generic[T]):
    """The unread items of one subscriber, as an async iterator and a context manager that closes it.

    Only one task may iterate it. ``await asyncio.wait_for(anext(subscription), 15)`` is safe to cancel: an item is
    removed from the buffer only in the step that returns it.
    """

    def __init__(self, feed: Feed[T], loop: asyncio.AbstractEventLoop, limit: int, *, ended: bool) -> None:
        self._feed = feed
        self._lock = feed._lock
        self._loop = loop
        self._limit = limit
        self._ended = ended
        self._items: deque[T] = deque()
        self._changed = asyncio.Event()
        """Set on the loop after an item was added, or the stream has ended."""
        self._is_reading = self._wake_due = False
        self.dropped = 0
        """Number of items that this subscriber has lost."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        if self._is_reading:
            raise RuntimeError("two tasks read one subscription; create one subscription for each task")
        while True:
            with self._lock:
                if self._items:
                    return self._items.popleft()
                if self._ended:
                    raise StopAsyncIteration
                self._changed.clear()
                self._is_reading = self._wake_due = True
            try:
                await self._changed.wait()
            finally:
                self._is_reading = False

    def close(self) -> None:
        """Unsubscribe and discard unread items. Idempotent; may be called from any thread."""
        with self._lock:
            self._items.clear()
            self._end()
            if self in self._feed._subscriptions:
                self._feed._subscriptions.remove(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _end(self) -> None:
        self._ended = True
        self._wake()

    def _wake(self) -> None:
        if not self._wake_due:
            return
        self._wake_due = False
        try:
            self._loop.call_soon_threadsafe(self._changed.set)
        except RuntimeError:
            # The subscriber's event loop is closed, so this subscription can no longer be read or closed.
            self._ended = True
            if self in self._feed._subscriptions:
                self._feed._subscriptions.remove(self)
