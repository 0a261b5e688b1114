"""Run coroutines for blocking callers: on an event loop in a thread of its own, or nested in the one that runs already.

Both treat Ctrl-C alike: the work is cancelled, has ended, and then the interrupt is raised.
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
from typing import Any, Generic, Protocol, Self, TypeVar

from lmx_lab.errors import HostingError

T = TypeVar("T")

BEGIN_S = 5.0
"""How long work for a loop that another thread runs may wait for its first step."""
CANCEL_S = 2.0
"""How long cancelled work may take to end before nobody waits for it any more."""
LOOK_S = 0.25
"""How often one who waits looks up: an interrupt that comes at the very moment a wait begins does not wake it."""


class _Call(Generic[T]):
    """One coroutine on another thread's loop. Asking it to end and seeing it end are two things here."""

    def __init__(self, loop: asyncio.AbstractEventLoop, coro: Coroutine[Any, Any, T]) -> None:
        self._loop = loop
        self._coro = coro
        self._task: asyncio.Task[T] | None = None
        self.begun = threading.Event()
        """Set, or the work was cancelled before its first step."""
        self.future: concurrent.futures.Future[T] = concurrent.futures.Future()
        # Weakly: a future keeps its callbacks, and with them its result, until somebody collects cycles.
        me = weakref.ref(self)
        self.future.add_done_callback(lambda future: _cancel(me) if future.cancelled() else None)
        loop.call_soon_threadsafe(self._start)

    def cancel(self) -> None:
        """Ask the coroutine to end; from any thread and from signal handlers."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, and the coroutine has ended
            self._loop.call_soon_threadsafe(lambda: self._task.cancel() if self._task else None)

    def _start(self) -> None:
        self.begun.set()
        self._task = self._loop.create_task(self._guarded())
        self._task.add_done_callback(self._finish)

    async def _guarded(self) -> T:
        try:
            return await self._coro
        except (SystemExit, KeyboardInterrupt) as exc:
            # Out of a task they would end the loop for everybody.
            raise HostingError(f"the work on the server's loop tried to end the process: {exc!r}") from exc

    def _finish(self, task: asyncio.Task[T]) -> None:
        self._coro.close()  # it has ended, or was cancelled before its first step
        if not self.future.set_running_or_notify_cancel():
            _close_result(task)
            return
        if task.cancelled():
            self.future.set_exception(HostingError("this work was cancelled: its loop was stopped"))
        elif (error := task.exception()) is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(task.result())


def _cancel(call: weakref.ref[_Call[Any]]) -> None:
    if (found := call()) is not None:
        found.cancel()


class LoopThread:
    """An event loop on a daemon thread of its own, which serves while cells are busy."""

    def __init__(self, name: str = "lmx-lab-server") -> None:
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._lock = threading.Lock()
        self._ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending: asyncio.Event | None = None
        self._stopped = False

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """
        Raises:
            HostingError: not started yet.
        """
        if self._loop is None:
            raise HostingError("this loop thread was not started; call start() first")
        return self._loop

    def start(self) -> None:
        """Start the thread; returns when its loop runs. A thread that was stopped cannot be started again."""
        if self._stopped:
            raise HostingError("this loop thread was stopped; make a new one")
        if not self._thread.is_alive():
            self._thread.start()
        self._ready.wait()

    def submit(self, coro: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run the coroutine on the loop, without waiting; cancelling the future cancels it.

        Raises:
            HostingError: the thread does not run.
        """
        return self._call(coro).future

    def run(self, coro: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run the coroutine on the loop and wait for its result, from any other thread.

        An interrupt (Ctrl-C) cancels the coroutine, waits until it has ended and then raises ``KeyboardInterrupt``; a
        second one does not wait.

        Raises:
            HostingError: called on the thread itself, which would never return, or the thread does not run.
            TimeoutError: after ``timeout_s``; the coroutine was cancelled.
        """
        if threading.current_thread() is self._thread:
            coro.close()
            raise HostingError("a blocking call on the server's own loop would never return; await the coroutine")
        with _interruptible(lambda: call.future), Interrupts() as interrupts:
            call = self._call(coro)
            interrupts.aim(call.cancel)
            if not (settled := _settled(call.future, timeout_s)):
                call.cancel()
                _settled(call.future, CANCEL_S)
        if not settled:
            raise TimeoutError(f"no result after {timeout_s} s; the work was cancelled")
        return call.future.result()

    def stop(self) -> None:
        """Cancel whatever still runs, end the loop and the thread. Idempotent; waits a few seconds at most."""
        with self._lock:
            self._stopped = True
            if self._ending is not None:
                with contextlib.suppress(RuntimeError):  # its loop is closed already
                    self.loop.call_soon_threadsafe(self._ending.set)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(2 * CANCEL_S)

    def _call(self, coro: Coroutine[Any, Any, T]) -> _Call[T]:
        with self._lock:
            if self._stopped or self._loop is None:
                coro.close()
                raise HostingError("the server's loop does not run: it was stopped, or never started")
            return _Call(self._loop, coro)

    def _main(self) -> None:
        # Not uvloop: a kernel's loop that shall be nested cannot be one, and both modes shall behave the same.
        with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
            runner.run(self._live())

    async def _live(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ending = asyncio.Event()
        self._ready.set()
        await self._ending.wait()


def run_nested(loop: asyncio.AbstractEventLoop, coro: Coroutine[Any, Any, T]) -> T:
    """Run the coroutine to its end on this thread's loop although that loop runs already; the rest of it goes on.

    For blocking verbs in a kernel; on another thread than the loop's, the coroutine is handed over and awaited. An
    interrupt cancels the coroutine, waits until it has ended and then raises ``KeyboardInterrupt``; a second one does
    not wait.

    Raises:
        HostingError: a loop that cannot be nested (uvloop), or another thread's that does not come round.
    """
    if loop.is_running() and asyncio._get_running_loop() is None:
        return _run_across(loop, coro)
    problem = _unnestable(loop)
    if problem:
        coro.close()
        raise HostingError(f"{problem}; await the verb's a… twin instead, or launch with loop='thread'")
    # Here and not above: it patches asyncio for the whole process, so only those who need it pay.
    import nest_asyncio2  # type: ignore[import-untyped,unused-ignore]

    nest_asyncio2.apply(loop)
    with _interruptible(lambda: task), Interrupts() as interrupts:
        task = loop.create_task(coro)
        interrupts.aim(lambda: loop.call_soon_threadsafe(task.cancel))
        return loop.run_until_complete(task)


def _run_across(loop: asyncio.AbstractEventLoop, coro: Coroutine[Any, Any, T]) -> T:
    with _interruptible(lambda: call.future), Interrupts() as interrupts:
        call = _Call(loop, coro)
        interrupts.aim(call.cancel)
        # A cell that waits for this very thread keeps the loop from ever coming round.
        if not call.begun.wait(BEGIN_S):
            call.cancel()
            raise HostingError(
                f"the server's loop has not come round for {BEGIN_S:g} s, so this thread's work was given up: a cell "
                "keeps the loop busy, perhaps by waiting for this thread; put the cell under %%offload, or launch with "
                "loop='thread'"
            )
        _settled(call.future, None)
    return call.future.result()


def _unnestable(loop: asyncio.AbstractEventLoop) -> str | None:
    if not isinstance(loop, asyncio.BaseEventLoop):
        return f"a loop of {type(loop).__module__} cannot run nested"
    if loop.is_running() and asyncio._get_running_loop() is not loop:
        return "this loop runs on another thread"
    return None


class Interrupts:
    """Within the block the first SIGINT cancels the work and is raised after the block; a second one is raised at once.

    A raised interrupt would land in whatever the loop runs at that moment, a stranger's request for one; and in cells
    with ``await`` ipykernel's own handler raises nothing at all, so that a blocking verb could not be stopped.
    """

    def __init__(self) -> None:
        self._received = 0
        self._cancel: Callable[[], object] | None = None
        self._previous: Any = None

    def aim(self, cancel: Callable[[], object]) -> None:
        """Say how the work is cancelled, as soon as there is any; an interrupt may have come already."""
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
    """Close the result of the work if the block is interrupted: no caller gets it, and the traceback keeps it alive."""
    try:
        yield
    except KeyboardInterrupt:
        with contextlib.suppress(NameError):  # interrupted before the work began
            work().add_done_callback(_close_result)
        raise


async def receive(future: concurrent.futures.Future[T]) -> T:
    """The result of another thread's future. Cancelling the caller cancels the work and closes a late result."""
    try:
        return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
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


def _settled(future: concurrent.futures.Future[Any], timeout_s: float | None) -> bool:
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        left_s = LOOK_S if deadline is None else min(LOOK_S, deadline - time.monotonic())
        done, _ = concurrent.futures.wait([future], max(0.0, left_s))
        if done or left_s <= 0:
            return bool(done)


class RunningServer(Protocol):
    """A server of this process, from its start on."""

    @property
    def port(self) -> int: ...
    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...
    @property
    def running(self) -> bool: ...


_SERVING: weakref.WeakSet[RunningServer] = weakref.WeakSet()
_SERVING_LOCK = threading.Lock()


def note_serving(server: RunningServer) -> None:
    """Remember who serves a port, as long as anybody holds it; from any thread."""
    with _SERVING_LOCK:
        _SERVING.add(server)


def loops_serving(port: int) -> list[asyncio.AbstractEventLoop]:
    """The loops of this process that serve the port now, at any address: who waits on one of them waits for itself."""
    with _SERVING_LOCK:
        servers = list(_SERVING)
    return [server.loop for server in servers if server.port == port and server.running]
