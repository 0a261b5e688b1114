"""Streams and callbacks for blocking callers: coroutines in the background that call back into the caller's thread."""

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

from lmx_lab.client.blocking.portal import Portal, is_foreign
from lmx_lab.client.turn_permissions import OnPermission, Verdict
from lmx_lab.errors import HostingError
from lmx_lab.portal import LoopThread
from lmx_lab.wire.sessions import PermissionRecord

T = TypeVar("T")
Item = TypeVar("Item")
Call = Callable[[], None]
END_S = 5.0
"""Maximum wait for cancelled work, such as a turn that the daemon cancels."""
DUE = 10_000
"""Maximum number of pending callbacks."""


BlockingOnPermission = Literal["allow", "deny"] | Callable[[PermissionRecord], Verdict]
"""How to decide on permissions; a function is called in the thread that waits for the turn."""


class _Over(Enum):
    OVER = auto()


OVER = _Over.OVER


class CallbackQueue:
    """Callbacks for the thread that waits, in order."""

    def __init__(self) -> None:
        self._due: deque[Call] = deque()
        self._woken = asyncio.Event()

    def tell(self, function: Call) -> None:
        """Have the function called in the waiting thread.

        Raises:
            HostingError: too many calls are pending.
        """
        if len(self._due) >= DUE:
            raise HostingError(f"a callback has {DUE:,} calls before it; it has to return sooner")
        self._due.append(function)
        self._woken.set()

    async def ask(self, function: Callable[[], T]) -> T:
        """Call the function in the waiting thread and return its result. If it raises, the work is cancelled."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def settle(given: T) -> None:
            if not answer.done():
                answer.set_result(given)

        def call() -> None:
            # The work may have been cancelled.
            if not answer.cancelled():
                loop.call_soon_threadsafe(settle, function())

        self.tell(call)
        return await answer

    def notifier(self, function: Callable[[T], object] | None) -> Callable[[T], None] | None:
        """The same callback, called in the waiting thread without waiting for it."""
        return None if function is None else lambda value: self.tell(lambda: _call(function, value))

    def decider(self, on_permission: BlockingOnPermission | None) -> OnPermission | None:
        """The same policy, with a function called in the waiting thread."""
        if on_permission is None or isinstance(on_permission, str):
            return on_permission
        decide = on_permission

        async def decided(permission: PermissionRecord) -> Verdict:
            return await self.ask(partial(decide, permission))

        return decided

    def wake(self, *_: object) -> None:
        self._woken.set()

    async def due_before(self, *futures: asyncio.Future[Any]) -> list[Call]:
        """Wait for pending calls and return them; returns none if one of the futures is done first."""
        while not self._due and not any(future.done() for future in futures):
            self._woken.clear()
            await self._woken.wait()
        found = list(self._due)
        self._due.clear()
        return found


class _Work(Generic[T]):
    """A task on the background loop with its callbacks. It is one task from start to end, as cancel scopes require."""

    def __init__(self, thread: LoopThread) -> None:
        self._thread = thread
        self._callbacks = CallbackQueue()
        self._task: asyncio.Task[T] | None = None

    def begin(self, work: Callable[[CallbackQueue], Coroutine[Any, Any, T]]) -> None:
        async def made() -> None:
            self._task = asyncio.create_task(work(self._callbacks), name="lmx-lab work for a blocking caller")
            self._task.add_done_callback(_see)
            self._task.add_done_callback(self._callbacks.wake)

        self._thread.run(made())

    async def calls(self) -> list[Call]:
        """Wait for calls to make; returns none when all were made and the work has ended."""
        return [] if self._task is None else await self._callbacks.due_before(self._task)

    async def result(self) -> T:
        if self._task is None:
            raise HostingError("this work was cancelled before it began")
        return await self._task

    def drop(self) -> None:
        """Cancel the task; can be called on any thread and in finalizers."""
        with suppress(RuntimeError):  # the loop is closed, and the task has ended
            self._thread.loop.call_soon_threadsafe(self._cancel)

    def end(self) -> None:
        """Cancel the task, and wait until it has ended, for at most ``END_S``."""
        self._wait(self._ended())

    def _wait(self, work: Coroutine[Any, Any, None]) -> None:
        if is_foreign(self._thread):
            work.close()
            return
        with suppress(TimeoutError, HostingError):
            self._thread.run(work, END_S)

    async def _ended(self) -> None:
        self._cancel()
        if self._task is not None:
            await asyncio.wait({self._task})

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()


def _call(function: Callable[[T], object], value: T) -> None:
    function(value)


def _see(task: asyncio.Task[Any]) -> None:
    """Retrieve the exception, which nothing may wait for any more."""
    if not task.cancelled():
        task.exception()


def run_with_callbacks(portal: Portal, work: Callable[[CallbackQueue], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine in the background, and its callbacks in this thread while it waits.

    An interrupt, or an exception of a callback, cancels the coroutine, and is raised when that has ended.
    """
    portal.check()
    running: _Work[T] = _Work(portal.thread)
    try:
        running.begin(work)
        while calls := portal.run(running.calls()):
            for call in calls:
                call()
        return portal.run(running.result())
    except BaseException:
        running.end()
        raise


# Streams

Source = Callable[[CallbackQueue], AbstractAsyncContextManager[AsyncIterator[Item]]]


class _Pulled(_Work[None], Generic[Item]):
    """An async iterator whose next item is requested only when the caller wants it."""

    def __init__(self, thread: LoopThread) -> None:
        super().__init__(thread)
        self._wanted: asyncio.Queue[asyncio.Future[Item] | None] = asyncio.Queue()
        self._pending: asyncio.Future[Item] | None = None

    def open(self, source: Source[Item]) -> None:
        self.begin(lambda callbacks: self._serve(source(callbacks)))

    async def _serve(self, source: AbstractAsyncContextManager[AsyncIterator[Item]]) -> None:
        async with source as items:
            while (wanted := await self._wanted.get()) is not None:
                item = await anext(items, OVER)
                if item is OVER:
                    return
                wanted.set_result(item)

    async def pull(self) -> Item | list[Call] | _Over:
        """The next item, or calls to make before it arrives."""
        task, pending = self._task, self._pending
        if task is None:
            return OVER
        if pending is None:
            pending = self._pending = asyncio.get_running_loop().create_future()
            pending.add_done_callback(self._callbacks.wake)
            self._wanted.put_nowait(pending)
        if calls := await self._callbacks.due_before(pending, task):
            return calls
        if not pending.done():
            if not task.cancelled():
                task.result()
            return OVER
        self._pending = None
        return pending.result()

    def leave(self) -> None:
        """Leave the source as a block without an error."""

        async def left() -> None:
            self._wanted.put_nowait(None)
            if self._task is not None:
                await asyncio.wait({self._task})

        self._wait(left())


class BlockingStream(Generic[Item]):
    """A stream for a ``for`` loop, also as ``with … as items``. It starts with the first item.

    Closing or deleting it, or an interrupt (Ctrl-C), ends the stream, and the server's work for it.
    """

    def __init__(self, portal: Portal, source: Source[Item]) -> None:
        self._portal = portal
        self._source = source
        self._pulled: _Pulled[Item] | None = None
        self._reading = threading.Lock()
        self._over = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Item:
        if not self._reading.acquire(blocking=False):
            raise RuntimeError("two threads read one stream; make one for each")
        try:
            found = OVER if self._over else self._next()
        except BaseException:
            self.close()
            raise
        finally:
            self._reading.release()
        if found is OVER:
            self._over = True
            raise StopIteration
        return found

    def _next(self) -> Item | _Over:
        while isinstance(found := self._portal.run(self._begun().pull()), list):
            for call in found:
                call()
        return found

    def close(self) -> None:
        """End the stream. Idempotent."""
        self._over = True
        if self._pulled is not None:
            self._pulled.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self._pulled is not None and not self._over:
            self._pulled.leave()
        self.close()

    def _check(self) -> None:
        """Called once before the stream starts.

        Raises:
            HostingError: the caller would wait for itself.
        """
        self._portal.check()

    def _begun(self) -> _Pulled[Item]:
        if self._pulled is None:
            if self._over:
                raise HostingError("this stream was closed; make a new one")
            self._check()
            self._pulled = _Pulled(self._portal.thread)
            weakref.finalize(self, self._pulled.drop).atexit = False
            self._pulled.open(self._source)
        return self._pulled
