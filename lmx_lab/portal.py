"""Run coroutines for blocking callers: on an event loop in a thread, or nested in the loop that already runs.

Both handle Ctrl-C in the same way: the coroutine is cancelled, and after its end ``KeyboardInterrupt`` is raised.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import inspect
import signal
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Iterator
from types import FrameType
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

from lmx_lab.errors import HostingError

T = TypeVar("T")

START_S = 5.0
"""Maximum time for the first step of a coroutine on a loop that another thread runs."""
CANCEL_S = 2.0
"""Maximum time to wait for the end of a cancelled coroutine."""
POLL_S = 0.25
"""Maximum time of one wait. An interrupt that arrives exactly when a wait begins does not end it."""


class _Call(Generic[T]):
    """A coroutine on the loop of another thread. ``cancel`` cancels it, and ``future`` receives its result."""

    _running: ClassVar[set[_Call[Any]]] = set()
    """Keeps running tasks alive: asyncio has only weak references to a task that waits for a stream's data, so that
    the garbage collector would delete it, and its result would never arrive."""

    def __init__(self, loop: asyncio.AbstractEventLoop, coro: Coroutine[Any, Any, T]) -> None:
        self._loop = loop
        self._coro = coro
        self._task: asyncio.Task[T] | None = None
        self.started = threading.Event()
        """Set when the loop has created the task."""
        self.future: concurrent.futures.Future[T] = concurrent.futures.Future()
        # A weak reference: a future keeps its callbacks, and a cycle would keep the result until garbage collection.
        me = weakref.ref(self)
        self.future.add_done_callback(lambda future: _cancel(me) if future.cancelled() else None)
        loop.call_soon_threadsafe(self._start)

    def cancel(self) -> None:
        """Cancel the coroutine. Can be called from any thread and from signal handlers."""
        with contextlib.suppress(RuntimeError):  # The loop is closed, and the coroutine has ended.
            self._loop.call_soon_threadsafe(lambda: self._task.cancel() if self._task else None)

    def _start(self) -> None:
        self.started.set()
        self._running.add(self)
        self._task = self._loop.create_task(self._run())
        self._task.add_done_callback(self._finish)

    async def _run(self) -> T:
        try:
            return await self._coro
        except (SystemExit, KeyboardInterrupt) as exc:
            # Raised by a task, these exceptions would end the loop for all its users.
            raise HostingError(f"code on the server's loop tried to exit the process: {exc!r}") from exc

    def _finish(self, task: asyncio.Task[T]) -> None:
        self._running.discard(self)
        self._coro.close()  # It has ended, or was cancelled before its first step.
        if not self.future.set_running_or_notify_cancel():
            _close_result(task)
            return
        if task.cancelled():
            self.future.set_exception(HostingError("this call was cancelled, because its loop was stopped"))
        elif (error := task.exception()) is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(task.result())


def _cancel(call: weakref.ref[_Call[Any]]) -> None:
    if (existing := call()) is not None:
        existing.cancel()


class LoopThread:
    """An event loop in a daemon thread, which also runs while a cell blocks the kernel's loop."""

    def __init__(self, name: str = "lmx-lab-server") -> None:
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._lock = threading.Lock()
        self._ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending: asyncio.Event | None = None
        self._stopped = False

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop.

        Raises:
            HostingError: the thread was not started.
        """
        if self._loop is None:
            raise HostingError("this loop thread was not started; call start() first")
        return self._loop

    def start(self) -> None:
        """Start the thread; returns when its loop runs. A stopped thread cannot be started again."""
        if self._stopped:
            raise HostingError("this loop thread was stopped; create a new one")
        if not self._thread.is_alive():
            self._thread.start()
        self._ready.wait()

    def submit(self, coro: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run a coroutine on the loop without waiting. Cancelling the future cancels it.

        Raises:
            HostingError: the thread is not running.
        """
        return self._call(coro).future

    def run(self, coro: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run a coroutine on the loop and wait for its result. Can be called from any other thread.

        An interrupt (Ctrl-C) cancels the coroutine, waits for its end and then raises ``KeyboardInterrupt``; a second
        one does not wait.

        Raises:
            HostingError: called on the thread itself, which would wait forever, or the thread is not running.
            TimeoutError: there was no result after ``timeout_s``; the coroutine was cancelled.
        """
        if threading.current_thread() is self._thread:
            coro.close()
            raise HostingError(
                "a blocking call on the server's own loop would wait forever; await the coroutine instead"
            )
        with _interruptible(lambda: call.future), Interrupts() as interrupts:
            call = self._call(coro)
            interrupts.set_cancel(call.cancel)
            if not (done := _wait_for(call.future, timeout_s)):
                call.cancel()
                _wait_for(call.future, CANCEL_S)
        if not done:
            raise TimeoutError(f"there was no result after {timeout_s} s; the call was cancelled")
        return call.future.result()

    def stop(self) -> None:
        """Cancel all tasks, and end the loop and the thread. Idempotent; waits at most a few seconds."""
        with self._lock:
            self._stopped = True
            if self._ending is not None:
                with contextlib.suppress(RuntimeError):  # The loop is closed already.
                    self.loop.call_soon_threadsafe(self._ending.set)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(2 * CANCEL_S)

    def _call(self, coro: Coroutine[Any, Any, T]) -> _Call[T]:
        with self._lock:
            if self._stopped or self._loop is None:
                coro.close()
                raise HostingError("the server's loop is not running: it was stopped, or not started")
            return _Call(self._loop, coro)

    def _main(self) -> None:
        # Not uvloop: nested loops do not support it, and servers on both kinds of loops should behave in the same way.
        with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
            runner.run(self._wait_for_stop())

    async def _wait_for_stop(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ending = asyncio.Event()
        self._ready.set()
        await self._ending.wait()


def run_nested(loop: asyncio.AbstractEventLoop, coro: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on a loop and wait for its result. In the loop's own thread, the loop, which is running already,
    is run nested, so that its other tasks continue.

    This is for blocking verbs in a kernel. In other threads, the coroutine is sent to the loop. An interrupt cancels
    the coroutine, waits for its end and then raises ``KeyboardInterrupt``; a second one does not wait.

    Raises:
        HostingError: the loop cannot run nested (uvloop), or is blocked in its own thread.
    """
    if loop.is_running() and asyncio._get_running_loop() is None:
        return _run_from_other_thread(loop, coro)
    problem = _unnestable(loop)
    if problem:
        coro.close()
        raise HostingError(f"{problem}; await the form of the verb that begins with a, or launch with loop='thread'")
    # Here, because it patches asyncio for the whole process.
    import nest_asyncio2  # type: ignore[import-untyped,unused-ignore]

    nest_asyncio2.apply(loop)
    with _interruptible(lambda: task), Interrupts() as interrupts:
        task = loop.create_task(coro)
        interrupts.set_cancel(lambda: loop.call_soon_threadsafe(task.cancel))
        return loop.run_until_complete(task)


def _run_from_other_thread(loop: asyncio.AbstractEventLoop, coro: Coroutine[Any, Any, T]) -> T:
    with _interruptible(lambda: call.future), Interrupts() as interrupts:
        call = _Call(loop, coro)
        interrupts.set_cancel(call.cancel)
        # A cell that waits for this thread would block the loop forever.
        if not call.started.wait(START_S):
            call.cancel()
            raise HostingError(
                f"the server's loop has been blocked for {START_S:g} s, so this call was cancelled: a cell blocks the "
                "loop, perhaps by waiting for this thread; put the cell under %%offload, or launch with loop='thread'"
            )
        _wait_for(call.future, None)
    return call.future.result()


def _unnestable(loop: asyncio.AbstractEventLoop) -> str | None:
    if not isinstance(loop, asyncio.BaseEventLoop):
        return f"a loop of {type(loop).__module__} cannot run nested"
    if loop.is_running() and asyncio._get_running_loop() is not loop:
        return "this loop runs on another thread"
    return None


class Interrupts:
    """Context in which the first SIGINT cancels the work, and is raised at the end; a second one is raised immediately.

    An immediate interrupt would be raised in whatever the loop runs at that moment, such as the request
    of another client. In cells with ``await``, ipykernel's own handler does not raise it at all, so that a blocking
    verb could not be stopped.
    """

    def __init__(self) -> None:
        self._received = 0
        self._cancel: Callable[[], object] | None = None
        self._previous: Any = None

    def set_cancel(self, cancel: Callable[[], object]) -> None:
        """Set the function that cancels the work. Calls it if an interrupt was received already."""
        self._cancel = cancel
        if self._received:
            cancel()

    def check(self) -> None:
        """Raise an interrupt that was received; it is not raised again after the block."""
        if self._received:
            self._received = 0
            raise KeyboardInterrupt

    def __enter__(self) -> Self:
        handler = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is threading.main_thread() and callable(handler):
            self._previous = handler
            signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
        if self._received:
            raise KeyboardInterrupt from None

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._received += 1
        if self._received > 1:
            raise KeyboardInterrupt
        if self._cancel is not None:
            self._cancel()


@contextlib.contextmanager
def _interruptible(work: Callable[[], concurrent.futures.Future[Any] | asyncio.Task[Any]]) -> Iterator[None]:
    """Close the work's result if the block is interrupted: no caller receives it, but the traceback refers to it."""
    try:
        yield
    except KeyboardInterrupt:
        with contextlib.suppress(NameError):  # Interrupted before the work was started.
            work().add_done_callback(_close_result)
        raise


async def receive(future: concurrent.futures.Future[T]) -> T:
    """Return the result of another thread's future. Cancelling the caller cancels the work and closes a late result."""
    waiting = asyncio.wrap_future(future)
    try:
        # ipykernel cancels a cell when its loop wakes up, and its handler of SIGINT does not wake it.
        while not waiting.done():
            await asyncio.wait([waiting], timeout=POLL_S)
        return waiting.result()
    except asyncio.CancelledError:
        waiting.cancel()
        future.add_done_callback(_close_result)
        raise


def _close_result(done: concurrent.futures.Future[Any] | asyncio.Task[Any]) -> None:
    if not done.cancelled() and done.exception() is None:
        close_result(done.result())


def close_result(result: object) -> None:
    """Close a result that no caller receives. Deleting it would not be enough: tracebacks may refer to it."""
    for each in result if isinstance(result, list) else [result]:
        if not inspect.iscoroutinefunction(close := getattr(each, "close", None)) and callable(close):
            close()


def _wait_for(future: concurrent.futures.Future[Any], timeout_s: float | None) -> bool:
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        wait_s = POLL_S if deadline is None else min(POLL_S, deadline - time.monotonic())
        done, _ = concurrent.futures.wait([future], max(0.0, wait_s))
        if done or wait_s <= 0:
            return bool(done)


class StartedServer(Protocol):
    """A server in this process that was started."""

    @property
    def port(self) -> int: ...
    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...
    @property
    def running(self) -> bool: ...


_SERVERS: weakref.WeakSet[StartedServer] = weakref.WeakSet()
_SERVERS_LOCK = threading.Lock()


def register_server(server: StartedServer) -> None:
    """Register a server as long as it is referenced elsewhere. Can be called from any thread."""
    with _SERVERS_LOCK:
        _SERVERS.add(server)


def loops_serving(port: int) -> list[asyncio.AbstractEventLoop]:
    """Return the loops of this process that serve this port at any address. A caller that waits on one of them for its
    own server waits forever.
    """
    with _SERVERS_LOCK:
        servers = list(_SERVERS)
    return [server.loop for server in servers if server.port == port and server.running]
