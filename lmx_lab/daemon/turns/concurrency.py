"""Asyncio primitives of the turn runner: slots of running turns, delays, and shielded tasks.

Each is used on one event loop.
"""

from __future__ import annotations

import asyncio
import functools
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def give_way(iterations: int) -> None:
    """Let work that is ready on the event loop run first, for this number of iterations of the loop."""
    for _ in range(iterations):
        await asyncio.sleep(0)


def retry_delays(first_s: float) -> Iterator[float]:
    """Return the delays before repeated attempts: each twice as long as the one before, up to 30 times the first."""
    delay_s = first_s
    while True:
        yield delay_s
        delay_s = min(2 * delay_s, 30 * first_s)


class TurnSlots:
    """A semaphore of running turns. A turn that continues has priority over turns that start; otherwise it is FIFO.

    A turn that has acquired a slot must release it.
    """

    def __init__(self, count: int) -> None:
        self.free = count
        """Number of free slots. There is none while a turn waits for one."""
        self._continuing: deque[asyncio.Future[None]] = deque()
        self._starting: deque[asyncio.Future[None]] = deque()

    def acquire_nowait(self) -> bool:
        """Acquire a slot if one is free. Returns whether it was acquired."""
        acquired = self.free > 0
        self.free -= acquired
        return acquired

    async def acquire(self, *, continuing: bool = False) -> None:
        """Wait for a slot and acquire it.

        Args:
            continuing: Whether the turn has started before and released its slot, while its time limit is running.
        """
        if self.acquire_nowait():
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = self._continuing if continuing else self._starting
        waiting.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if not waiter.cancelled():
                self.release()  # The slot was assigned at the same moment.
            elif waiter in waiting:
                waiting.remove(waiter)
            raise

    def release(self) -> None:
        """Release a slot: assign it to the next waiting turn, or make it free."""
        for waiting in (self._continuing, self._starting):
            while waiting:
                if not (waiter := waiting.popleft()).done():
                    waiter.set_result(None)
                    return
        self.free += 1


class ShieldedTasks:
    """Work that is completed even if its caller is cancelled, so that memory and database stay consistent."""

    def __init__(self) -> None:
        self.tasks: set[asyncio.Task[Any]] = set()
        """Tasks that have not ended."""

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a coroutine as a task and keep a reference to it until it ends."""
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        # Retrieved, so that asyncio does not log it if the caller was cancelled.
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        return task


def shielded(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """Decorate a method so that each call is completed even if its caller is cancelled.

    The calls run as tasks in ``shielded_tasks`` of the object.
    """

    @functools.wraps(method)
    async def call(owner: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.shield(owner.shielded_tasks.start(method(owner, *args, **kwargs)))

    return call
