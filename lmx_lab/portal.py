"""Run an event loop in a thread, alone or together with the loop of a notebook's kernel, and run coroutines on it for
blocking callers. Ctrl-C cancels the coroutine; ``KeyboardInterrupt`` is raised after its end."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import inspect
import os
import selectors
import signal
import threading
import time
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import Any, ClassVar, Self, TypeVar

from lmx_lab.errors import HostingError

T = TypeVar("T")

CANCEL_S = 2.0
"""Maximum time to wait for the end of a cancelled coroutine."""
POLL_S = 0.25
"""Maximum time of one wait. An interrupt that arrives exactly when a wait begins does not end it."""
TAKE_OVER_S = 0.05
"""Time in which the host of a ``HostedLoop`` has to begin a step. On a loaded machine, 10 ms moved 12 % of the requests
to the thread, and 50 ms none."""
STEP_S = 0.01
"""Maximum time of one step of a ``HostedLoop``, after which its host runs other callbacks."""
RETRY_S = 0.1
"""Interval at which a host that runs nested checks whether it may run steps again."""
WATCH_S = 1.0
"""Maximum time of one wait for events."""


class Call(concurrent.futures.Future[T]):
    """The future result of a coroutine on the loop of another thread. Cancelling it cancels the coroutine."""

    _running: ClassVar[set[Call[Any]]] = set()
    """Keeps running tasks alive: asyncio has only weak references to a task that waits for a stream's data, so that
    the garbage collector would delete it, and its result would never arrive."""

    def __init__(self, loop: asyncio.AbstractEventLoop, coro: Coroutine[Any, Any, T]) -> None:
        super().__init__()
        self._loop = loop
        self._coro = coro
        self._task: asyncio.Task[T] | None = None
        loop.call_soon_threadsafe(self._start)

    def cancel(self) -> bool:
        if not self.cancelled() and super().cancel():
            self.stop()
        return self.cancelled()

    def stop(self) -> None:
        """Cancel the coroutine, whose end sets the result. Can be called from any thread and from signal handlers."""
        with contextlib.suppress(RuntimeError):  # The loop is closed, and the coroutine has ended.
            self._loop.call_soon_threadsafe(lambda: self._task.cancel() if self._task else None)

    def _start(self) -> None:
        self._running.add(self)
        self._task = self._loop.create_task(_guarded(self._coro))
        self._task.add_done_callback(self._finish)

    def _finish(self, task: asyncio.Task[T]) -> None:
        self._running.discard(self)
        self._coro.close()  # It has ended, or was cancelled before its first step.
        if not self.set_running_or_notify_cancel():
            _close_result(task)
            return
        if task.cancelled():
            self.set_exception(HostingError("this call was cancelled, because its loop was stopped"))
        elif (error := task.exception()) is not None:
            self.set_exception(error)
        else:
            self.set_result(task.result())


async def _guarded(coro: Coroutine[Any, Any, T]) -> T:
    """Await a coroutine. Not a method of ``Call``, whose error would refer to this frame, and the frame to the call."""
    try:
        return await coro
    except (SystemExit, KeyboardInterrupt) as exc:
        # Raised by a task, these exceptions would end the loop for all its users.
        raise HostingError(f"code on the server's loop tried to exit the process: {exc!r}") from exc


class LoopThread:
    """An event loop in a daemon thread."""

    def __init__(self, name: str = "lmx-lab-server") -> None:
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending = asyncio.Event()
        self._stopped = False
        self._process = os.getpid()

    @property
    def is_of_parent(self) -> bool:
        """Whether the process was forked since the thread was created, so that waiting for it would never end."""
        return self._process != os.getpid()

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
        """Start the thread. A stopped thread cannot be started again.

        Raises:
            HostingError: it was stopped, or the process has too many open files or threads.
        """
        if self._stopped:
            raise HostingError("this loop thread was stopped; create a new one")
        if self._loop is not None:
            return
        try:
            self._loop = self._new_loop()
            self._thread.start()
        except (OSError, RuntimeError) as exc:
            if self._loop is not None:
                self._loop.close()
                self._loop = None
            raise HostingError(
                f"cannot start an event loop: {exc}; close files or connections, or end threads"
            ) from exc

    def submit(self, coro: Coroutine[Any, Any, T]) -> Call[T]:
        """Run a coroutine on the loop without waiting.

        Raises:
            HostingError: the thread is not running.
        """
        if self.is_of_parent:
            coro.close()
            raise HostingError(
                "this client or lab was created before the process forked; create another one in the child"
            )
        with self._lock:
            if self._stopped or self._loop is None:
                coro.close()
                raise HostingError("the server's loop is not running: it was stopped, or not started")
            return Call(self._loop, coro)

    def run(self, coro: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run a coroutine on the loop and wait for its result. Can be called from any other thread.

        An interrupt (Ctrl-C) cancels the coroutine, waits for its end and then raises ``KeyboardInterrupt``; a second
        one does not wait.

        Raises:
            HostingError: called on this loop, which would wait forever, or the thread is not running.
            TimeoutError: there was no result after ``timeout_s``; the coroutine was cancelled.
        """
        if (here := asyncio._get_running_loop()) is not None and here is self._loop:
            coro.close()
            raise HostingError(
                "a blocking call on the loop that has to answer it would wait forever; await the coroutine instead"
            )
        call: Call[T] | None = None
        try:
            with Interrupts() as interrupts:
                call = self.submit(coro)
                interrupts.set_cancel(call.stop)
                if not (done := _wait_for(call, timeout_s)):
                    call.stop()
                    _wait_for(call, CANCEL_S)
        except KeyboardInterrupt:
            # No caller receives the result, but the traceback refers to it.
            if call is not None:
                call.add_done_callback(_close_result)
            raise
        if not done:
            raise TimeoutError(f"there was no result after {timeout_s} s; the call was cancelled")
        return call.result()

    def stop(self) -> None:
        """Cancel all tasks, and end the loop and the thread. Idempotent; waits at most a few seconds."""
        with self._lock:
            self._stopped = True
            if self._loop is not None:
                with contextlib.suppress(RuntimeError):  # The loop is closed already.
                    self._loop.call_soon_threadsafe(self._ending.set)
        if self._thread.is_alive() and asyncio._get_running_loop() is not self._loop:
            self._thread.join(2 * CANCEL_S)

    def _new_loop(self) -> asyncio.AbstractEventLoop:
        # Not uvloop, so that servers on both kinds of loops behave in the same way.
        return asyncio.SelectorEventLoop()

    def _main(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
            runner.run(self._ending.wait())


class BackgroundLoop:
    """The event loop of this process for panels and blocking clients, in a thread that starts when it is first used."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: LoopThread | None = None

    @property
    def thread(self) -> LoopThread:
        """The running thread.

        Raises:
            HostingError: as ``LoopThread.start``.
        """
        with self._lock:
            if self._thread is None:
                self._thread = LoopThread("lmx-lab-background")
            self._thread.start()
            return self._thread

    def stop(self) -> None:
        if self._thread is not None:
            self._thread.stop()

    def reset(self) -> None:
        """Called in a forked child, which has no copy of the thread and may have a copy of a held lock."""
        self._lock, self._thread = threading.Lock(), None


BACKGROUND = BackgroundLoop()
atexit.register(BACKGROUND.stop)
os.register_at_fork(after_in_child=BACKGROUND.reset)


class _StepSelector(selectors.DefaultSelector):
    """Ends the run of its loop where the loop would wait, or after ``STEP_S``; the wait is a separate call."""

    def __init__(self) -> None:
        super().__init__()
        self.until = 0.0
        """Value of ``time.monotonic`` at which the run ends, even if there is more to do."""
        self.idle_s = 0.0
        """Time until the loop's next timer, at the end of the last run."""
        self.end_run: Callable[[], None]

    def wait(self, timeout_s: float) -> None:
        """Wait for an event of the loop, which stays pending. Can be called while another thread runs the loop."""
        super().select(timeout_s)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        is_idle = not events and timeout != 0
        if is_idle or time.monotonic() > self.until:
            self.idle_s = 0.0 if not is_idle else WATCH_S if timeout is None else timeout
            self.end_run()
        return events


class HostedLoop(LoopThread):
    """An event loop with two drivers: the host, another loop, runs its steps while the host is free, and the thread
    runs them while the host is blocked, for example by a cell of a notebook.

    All connections, tasks and locks belong to this one loop, so nothing waits for the host. A step runs all that is
    ready, for at most ``STEP_S``. The thread waits for events, asks the host to run the next step, and runs it itself
    if the host does not begin within ``TAKE_OVER_S``, or waits for this loop. Code that keeps the interpreter's lock
    stops both drivers.

    Args:
        host: A running loop of any kind; only its ``call_soon_threadsafe`` and ``call_later`` are used. If it ends,
            the thread continues alone.
    """

    def __init__(self, host: asyncio.AbstractEventLoop, name: str = "lmx-lab-server") -> None:
        super().__init__(name)
        self._host = host
        self._selector = _StepSelector()
        self._stepping = threading.Lock()
        self._answered = threading.Event()
        """Set when the host has run a step, or a caller in the host's thread begins to wait for this loop."""
        self._host_is_blocked = False
        self._waiting_callers = 0
        """Number of calls of ``run`` that block the host."""
        self._timer_at = 0.0
        self._is_waiting = False
        """Whether the thread waits for events, and would miss an earlier timer that a step of the host sets."""
        self.host_steps = 0
        """Number of steps that the host has run."""
        self.thread_steps = 0
        """Number of steps that the thread has run."""

    def run(self, coro: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        if asyncio._get_running_loop() is not self._host:
            return super().run(coro, timeout_s)
        self._waiting_callers += 1
        try:
            self._answered.set()
            return super().run(coro, timeout_s)
        finally:
            self._waiting_callers -= 1

    def _new_loop(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.SelectorEventLoop(self._selector)
        self._selector.end_run = loop.stop
        return loop

    def _main(self) -> None:
        while not self._stopped:
            self._wait()
            if self._host_is_blocked or not self._step_by_host():
                self.thread_steps += 1
                self._step()
        with self._stepping:
            ending = self.loop.create_task(self._end())
        self._step()
        while not ending.done():
            self._wait()
            self._step()
        with self._stepping:  # A step that the host has begun before the stop may still run.
            self.loop.close()

    def _wait(self) -> None:
        # Set before the timer is read, so that a step which replaces the timer meanwhile wakes the thread.
        self._is_waiting = True
        self._selector.wait(max(0.0, min(WATCH_S, self._timer_at - time.monotonic())))
        self._is_waiting = False

    def _step_by_host(self) -> bool:
        """Let the host run the next step; return False if it is blocked."""
        self._answered.clear()
        self._ask_host()
        if not self._is_host_busy() and self._answered.wait(TAKE_OVER_S):
            return True
        # Before the host is asked again: its late answer resets this, and would otherwise be lost.
        self._host_is_blocked = True
        self._ask_host()
        return False

    def _ask_host(self) -> None:
        with contextlib.suppress(RuntimeError):  # The host is closed.
            self._host.call_soon_threadsafe(self._on_host)

    def _is_host_busy(self) -> bool:
        """Whether a call blocks the host, or runs it nested, so that an interrupt would be raised within a request.

        During a cell without ``await``, ipykernel's handler of SIGINT is Python's own, which raises anywhere.
        """
        return self._waiting_callers > 0 or signal.getsignal(signal.SIGINT) is signal.default_int_handler

    def _on_host(self) -> None:
        if self._stopped:
            return
        if self._is_host_busy():
            self._host.call_later(RETRY_S, self._on_host)
            return
        self._host_is_blocked = False
        self.host_steps += 1
        self._step()
        self._answered.set()
        if self._is_waiting:
            # This step is a late answer. Each one has to wake the thread: the next one may receive the event instead.
            with contextlib.suppress(RuntimeError):
                self.loop.call_soon_threadsafe(lambda: None)

    def _step(self) -> None:
        outer = asyncio._get_running_loop()
        with self._stepping:
            if self.loop.is_closed():
                return
            self._selector.until = time.monotonic() + STEP_S
            self._selector.idle_s = 0.0  # For a run that an exception ends: its other callbacks are still ready.
            try:
                # asyncio does not run a loop inside another one.
                asyncio._set_running_loop(None)
                self.loop.run_forever()
            except (SystemExit, KeyboardInterrupt) as exc:
                # It belongs to the task that raised it, and must end neither the kernel nor this loop. But in the main
                # thread, a KeyboardInterrupt may be that of the host's program.
                if isinstance(exc, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
                    raise
            finally:
                asyncio._set_running_loop(outer)
            self._timer_at = time.monotonic() + self._selector.idle_s

    async def _end(self) -> None:
        """Cancel all tasks and wait until they have ended, as ``asyncio.Runner`` does."""
        current = asyncio.current_task()
        # Since Python 3.14, a running loop lists only the tasks that the current thread has created.
        asyncio._set_running_loop(None)
        tasks = asyncio.all_tasks(self.loop) - {current}
        asyncio._set_running_loop(self.loop)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.loop.shutdown_asyncgens()
        await self.loop.shutdown_default_executor()


class Interrupts:
    """Context in which the first SIGINT cancels the work, and is raised at the end; a second one is raised immediately.

    An immediate interrupt would be raised in whatever the loop runs at that moment, such as the request
    of another client. In cells with ``await``, ipykernel's own handler does not raise it at all, so that a blocking
    call could not be stopped.
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
    finally:
        # An error refers to this frame. If the frame referred to the error, its other frames, and so the request, would
        # stay in memory until the garbage collector runs.
        del waiting, future


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
