"""What blocking callers wait for again and again: items of a stream, and work that asks them something meanwhile."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, suppress
from enum import Enum, auto
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from lmx_lab.client.blocking.portal import Portal, is_foreign
from lmx_lab.errors import HostingError
from lmx_lab.loops import LoopThread

T = TypeVar("T")
Item = TypeVar("Item")
Call = Callable[[], None]
END_S = 5.0
"""So long one waits for cancelled work, such as a turn that is being cancelled on its daemon."""
DUE = 10_000
"""So many calls of a callback may be due."""


class _Over(Enum):
    OVER = auto()


OVER = _Over.OVER


class CallbackQueue:
    """Brings functions of a caller to the thread in which it waits, in their order."""

    def __init__(self) -> None:
        self._due: deque[Call] = deque()
        self._woken = asyncio.Event()

    def tell(self, function: Call) -> None:
        """Have it called there, soon.

        Raises:
            HostingError: too many calls are due.
        """
        if len(self._due) >= DUE:
            raise HostingError(f"a callback has {DUE:,} calls before it; it has to return sooner")
        self._due.append(function)
        self._woken.set()

    async def ask(self, function: Callable[[], T]) -> T:
        """What it gives there. If it raises, the work is cancelled, and its caller gets that."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def settle(given: T) -> None:
            if not answer.done():
                answer.set_result(given)

        def call() -> None:
            # Who asked may not want to know any more.
            if not answer.cancelled():
                loop.call_soon_threadsafe(settle, function())

        self.tell(call)
        return await answer

    def wake(self, *_: object) -> None:
        self._woken.set()

    async def due_before(self, *futures: asyncio.Future[Any]) -> list[Call]:
        """What is to be called; nothing if one of the futures, which wake this, is done first."""
        while not self._due and not any(future.done() for future in futures):
            self._woken.clear()
            await self._woken.wait()
        found = list(self._due)
        self._due.clear()
        return found


class _Errand(Generic[T]):
    """A task on the background loop, and the calls that it has for who waits for it. One task from its first step to
    its last: cancel scopes in it need that."""

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
        """What is to be called now; nothing when all was called and the work has ended."""
        return [] if self._task is None else await self._callbacks.due_before(self._task)

    async def result(self) -> T:
        if self._task is None:
            raise HostingError("this work was cancelled before it began")
        return await self._task

    def drop(self) -> None:
        """Ask it to end, on any thread and in destructors."""
        with suppress(RuntimeError):  # the loop is closed, and the task has ended
            self._thread.loop.call_soon_threadsafe(self._cancel)

    def end(self) -> None:
        """Ask it to end, and wait until it has, for a while."""
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


def _see(task: asyncio.Task[Any]) -> None:
    """Whoever waited for it may have left."""
    if not task.cancelled():
        task.exception()


def run_with_callbacks(portal: Portal, work: Callable[[CallbackQueue], Coroutine[Any, Any, T]]) -> T:
    """Run work in the background whose callbacks are called here, in the caller's thread, while it waits.

    An interrupt, or whatever a callback raises, cancels the work, and is raised when that has ended.
    """
    portal.check()
    errand: _Errand[T] = _Errand(portal.thread)
    try:
        errand.begin(work)
        while calls := portal.run(errand.calls()):
            for call in calls:
                call()
        return portal.run(errand.result())
    except BaseException:
        errand.end()
        raise


# Streams

Source = Callable[[CallbackQueue], AbstractAsyncContextManager[AsyncIterator[Item]]]


class _Pulled(_Errand[None], Generic[Item]):
    """An async iterator whose next item is asked for when a caller wants it, and no earlier: what it then takes to be
    seen, somebody has seen."""

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
        """The next item, or what is to be called before it comes."""
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
        """End it as a block that is left without an error."""

        async def left() -> None:
            self._wanted.put_nowait(None)
            if self._task is not None:
                await asyncio.wait({self._task})

        self._wait(left())


class BlockingStream(Generic[Item]):
    """A stream for a ``for`` loop: begun when the first item is wanted; also ``with … as items``.

    It ends when it is closed or dropped, and by an interrupt (Ctrl-C), which ends what the server does for it, too.
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
        """End it. Idempotent."""
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
        """Once, before it begins.

        Raises:
            HostingError: waiting for an item would keep it from coming.
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
