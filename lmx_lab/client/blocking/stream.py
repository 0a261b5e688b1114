"""Run coroutines and streams in the background for blocking callers, with callbacks in the caller's thread."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, suppress
from enum import Enum, auto
from functools import partial
from types import TracebackType
from typing import Any, Generic, Literal, Self, TypeVar

from lmx_lab.client.blocking.portal import Portal, belongs_to_parent
from lmx_lab.client.turn import OnPermission, Verdict
from lmx_lab.errors import HostingError
from lmx_lab.portal import LoopThread
from lmx_lab.wire.sessions import PermissionRecord

T = TypeVar("T")
Item = TypeVar("Item")
Call = Callable[[], None]
END_S = 5.0
"""Maximum wait for the end of a cancelled coroutine, such as that of a turn, which the daemon has to cancel."""
MAX_PENDING_CALLS = 10_000
"""Maximum number of pending callbacks."""


BlockingOnPermission = Literal["allow", "deny"] | Callable[[PermissionRecord], Verdict]
"""How to decide on permissions. A function is called in the thread that waits for the turn."""


class _End(Enum):
    END = auto()


END = _End.END
"""Returned instead of an item at the end of a stream."""


class CallbackQueue:
    """Passes callbacks from the background loop to the waiting thread, in order."""

    def __init__(self) -> None:
        self._pending: deque[Call] = deque()
        self._woken = asyncio.Event()

    def schedule(self, function: Call) -> None:
        """Have the function called in the waiting thread.

        Raises:
            HostingError: too many calls are pending.
        """
        if len(self._pending) >= MAX_PENDING_CALLS:
            raise HostingError(
                f"{MAX_PENDING_CALLS:,} calls of callbacks are pending; make the callbacks return sooner"
            )
        self._pending.append(function)
        self._woken.set()

    async def call(self, function: Callable[[], T]) -> T:
        """Call the function in the waiting thread and return its result. If it raises, the coroutine is cancelled."""
        loop = asyncio.get_running_loop()
        result: asyncio.Future[T] = loop.create_future()

        def set_result(value: T) -> None:
            if not result.done():
                result.set_result(value)

        def call() -> None:
            # The coroutine may have been cancelled.
            if not result.cancelled():
                loop.call_soon_threadsafe(set_result, function())

        self.schedule(call)
        return await result

    def notifier(self, function: Callable[[T], object] | None) -> Callable[[T], None] | None:
        """Return a function that has the callback called in the waiting thread, without waiting for it."""
        return None if function is None else lambda value: self.schedule(lambda: _call(function, value))

    def decider(self, on_permission: BlockingOnPermission | None) -> OnPermission | None:
        """Return the same policy, whose function is called in the waiting thread."""
        if on_permission is None or isinstance(on_permission, str):
            return on_permission
        decide = on_permission

        async def decided(permission: PermissionRecord) -> Verdict:
            return await self.call(partial(decide, permission))

        return decided

    def wake(self, *_: object) -> None:
        """Let ``calls_before`` check its futures again."""
        self._woken.set()

    async def calls_before(self, *futures: asyncio.Future[Any]) -> list[Call]:
        """Wait for pending calls, and return them. The list is empty if one of the futures is done first."""
        while not self._pending and not any(future.done() for future in futures):
            self._woken.clear()
            await self._woken.wait()
        calls = list(self._pending)
        self._pending.clear()
        return calls


class _BackgroundTask(Generic[T]):
    """A task on the background loop, with its callbacks. It is one task from start to end, as cancel scopes require."""

    def __init__(self, thread: LoopThread) -> None:
        self._thread = thread
        self._callbacks = CallbackQueue()
        self._task: asyncio.Task[T] | None = None

    def start(self, work: Callable[[CallbackQueue], Coroutine[Any, Any, T]]) -> None:
        async def create_task() -> None:
            self._task = asyncio.create_task(work(self._callbacks), name="lmx-lab work for a blocking caller")
            self._task.add_done_callback(_retrieve_exception)
            self._task.add_done_callback(self._callbacks.wake)

        self._thread.run(create_task())

    async def calls(self) -> list[Call]:
        """Wait for callbacks to call, and return them. The list is empty when the task has ended."""
        return [] if self._task is None else await self._callbacks.calls_before(self._task)

    async def result(self) -> T:
        """Wait for the task's result.

        Raises:
            HostingError: the task was cancelled before it started.
        """
        if self._task is None:
            raise HostingError("this call was cancelled before it started")
        return await self._task

    def cancel_later(self) -> None:
        """Cancel the task without waiting; can be called on any thread and in finalizers."""
        with suppress(RuntimeError):  # The loop is closed, and the task has ended.
            self._thread.loop.call_soon_threadsafe(self._cancel)

    def cancel(self) -> None:
        """Cancel the task, and wait until it has ended, for at most ``END_S``."""
        self._wait(self._cancel_and_wait())

    def _wait(self, work: Coroutine[Any, Any, None]) -> None:
        if belongs_to_parent(self._thread):
            work.close()
            return
        with suppress(TimeoutError, HostingError):
            self._thread.run(work, END_S)

    async def _cancel_and_wait(self) -> None:
        self._cancel()
        if self._task is not None:
            await asyncio.wait({self._task})

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()


def _call(function: Callable[[T], object], value: T) -> None:
    function(value)


def _retrieve_exception(task: asyncio.Task[Any]) -> None:
    """Retrieve the task's exception. If nothing did, asyncio would log it."""
    if not task.cancelled():
        task.exception()


def run_with_callbacks(portal: Portal, work: Callable[[CallbackQueue], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine in the background, and call its callbacks in this thread, which waits for it.

    An interrupt, or an exception of a callback, cancels the coroutine, and is raised when the coroutine has ended.
    """
    task: _BackgroundTask[T] = _BackgroundTask(portal.thread)
    try:
        task.start(work)
        while calls := portal.run(task.calls()):
            for call in calls:
                call()
        return portal.run(task.result())
    except BaseException:
        task.cancel()
        raise


# Streams

Source = Callable[[CallbackQueue], AbstractAsyncContextManager[AsyncIterator[Item]]]


class _PulledIterator(_BackgroundTask[None], Generic[Item]):
    """An async iterator in the background, whose next item is requested only when the caller needs it."""

    def __init__(self, thread: LoopThread) -> None:
        super().__init__(thread)
        self._requests: asyncio.Queue[asyncio.Future[Item] | None] = asyncio.Queue()
        """Futures for the next items; None ends the iteration."""
        self._next_item: asyncio.Future[Item] | None = None
        """The requested item, which may not have arrived before an interrupt."""

    def open(self, source: Source[Item]) -> None:
        """Start the task that enters the source."""
        self.start(lambda callbacks: self._serve(source(callbacks)))

    async def _serve(self, source: AbstractAsyncContextManager[AsyncIterator[Item]]) -> None:
        async with source as items:
            while (request := await self._requests.get()) is not None:
                item = await anext(items, END)
                if item is END:
                    return
                request.set_result(item)

    async def pull(self) -> Item | list[Call] | _End:
        """Return the next item, or callbacks to call before it arrives, or ``END``."""
        task, item = self._task, self._next_item
        if task is None:
            return END
        if item is None:
            item = self._next_item = asyncio.get_running_loop().create_future()
            item.add_done_callback(self._callbacks.wake)
            self._requests.put_nowait(item)
        if calls := await self._callbacks.calls_before(item, task):
            return calls
        if not item.done():
            if not task.cancelled():
                task.result()
            return END
        self._next_item = None
        return item.result()

    def finish(self) -> None:
        """Leave the source like a ``with`` block that ends without an error, and wait until it is left."""

        async def finish() -> None:
            self._requests.put_nowait(None)
            if self._task is not None:
                await asyncio.wait({self._task})

        self._wait(finish())


class BlockingStream(Generic[Item]):
    """A stream for a ``for`` loop, optionally in ``with … as items``. It starts when the first item is requested.

    Closing or deleting it, or an interrupt (Ctrl-C), ends the stream and the server's work for it.
    """

    def __init__(self, portal: Portal, source: Source[Item]) -> None:
        self._portal = portal
        self._source = source
        self._iterator: _PulledIterator[Item] | None = None
        self._reading = threading.Lock()
        self._has_ended = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Item:
        if not self._reading.acquire(blocking=False):
            raise RuntimeError("two threads read the same stream; create one for each thread")
        try:
            item = END if self._has_ended else self._next()
        except BaseException:
            self.close()
            raise
        finally:
            self._reading.release()
        if item is END:
            self._has_ended = True
            raise StopIteration
        return item

    def _next(self) -> Item | _End:
        while isinstance(result := self._portal.run(self._started().pull()), list):
            for call in result:
                call()
        return result

    def close(self) -> None:
        """End the stream. Idempotent."""
        self._has_ended = True
        if self._iterator is not None:
            self._iterator.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self._iterator is not None and not self._has_ended:
            self._iterator.finish()
        self.close()

    def _started(self) -> _PulledIterator[Item]:
        if self._iterator is None:
            if self._has_ended:
                raise HostingError("this stream was closed; create a new one")
            self._iterator = _PulledIterator(self._portal.thread)
            weakref.finalize(self, self._iterator.cancel_later).atexit = False
            self._iterator.open(self._source)
        return self._iterator
