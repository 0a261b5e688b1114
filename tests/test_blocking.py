"""Test blocking methods and streams that are made from coroutines: both forms of a function, callbacks and streams."""

import asyncio
import gc
import inspect
import threading

import pytest

from lmx_lab.blocking import (
    MAX_PENDING_CALLS,
    BlockingStream,
    CallbackQueue,
    Portal,
    blocking,
    both,
    in_thread,
    on_loop,
    run_with_callbacks,
)
from lmx_lab.errors import ArgumentError, HostingError, QueueFullError
from lmx_lab.portal import LoopThread
from tests.support.waiting import interrupt, interrupt_when, until

WAIT_S = 60.0


class Result:
    """A result that has to be closed if no caller receives it."""

    closed = False

    def close(self):
        self.closed = True


class Counter:
    """An object with steps on the loop of a thread."""

    def __init__(self, thread):
        self._portal = Portal(lambda: self._checked(thread))
        self.in_use = True
        self.threads = []
        self.started = threading.Event()
        self.cancelled = threading.Event()
        self.results = []

    def _checked(self, thread):
        if not self.in_use:
            raise HostingError("not in use")
        return thread

    def _note_thread(self):
        self.threads.append(threading.current_thread().name)

    async def _double(self, number):
        self._note_thread()
        return 2 * number

    async def _compute(self, first: int, second: int = 1, *, fail: bool = False) -> int:
        """Add two numbers, and double the sum."""
        self._note_thread()
        result = await on_loop(self._portal, self._double(first + second))
        self._note_thread()
        await in_thread(self._note_thread)
        if fail:
            raise ValueError("failed")
        return result

    compute, acompute = both(_compute)

    async def _never(self):
        self.started.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled.set()

    async def _wait(self):
        try:
            await on_loop(self._portal, self._never())
        except (KeyboardInterrupt, asyncio.CancelledError) as exc:
            return type(exc).__name__

    wait, await_ = both(_wait)

    async def _interrupt_between(self):
        interrupt()
        self.work = self._double(1)
        return await on_loop(self._portal, self.work)

    interrupt_between = blocking(_interrupt_between)

    async def _open(self):
        result = await on_loop(self._portal, self._make())
        # The last step has ended, therefore no step cancels and raises this.
        interrupt()
        return result

    async def _make(self):
        self.results.append(Result())
        return self.results[-1]

    open = blocking(_open)

    async def _nest(self, function):
        return function(self), await on_loop(self._portal, self._double(1))

    nest, anest = both(_nest)


@pytest.fixture
def thread():
    thread = LoopThread("counter")
    thread.start()
    yield thread
    thread.stop()


@pytest.fixture
def counter(thread):
    return Counter(thread)


@pytest.fixture
def portal(thread):
    return Portal(lambda: thread)


# --- forms


def test_the_blocking_form_runs_its_own_code_in_the_callers_thread(counter):
    assert counter.compute(2, second=3) == 10
    assert counter.threads == ["MainThread", "counter", "MainThread", "MainThread"]


def test_the_awaited_form_runs_its_own_code_on_the_callers_loop(counter):
    assert asyncio.run(counter.acompute(2)) == 6
    here, there, again, pool = counter.threads
    assert (here, there, again) == ("MainThread", "counter", "MainThread")
    assert pool.startswith("asyncio")


def test_an_error_is_raised_in_both_forms(counter):
    for call in (counter.compute, lambda *args, **options: asyncio.run(counter.acompute(*args, **options))):
        counter.in_use = True
        with pytest.raises(ValueError, match="failed"):
            call(1, fail=True)
        counter.in_use, counter.threads = False, []
        with pytest.raises(HostingError, match="not in use"):
            call(1)
        assert counter.threads == ["MainThread"], "no step was run"


def test_both_forms_have_the_name_the_signature_and_the_docstring_of_the_function():
    for function, name in ((Counter.compute, "compute"), (Counter.acompute, "acompute")):
        assert (function.__name__, function.__qualname__) == (name, f"Counter.{name}")
        assert function.__doc__ == "Add two numbers, and double the sum."
        assert list(inspect.signature(function).parameters) == ["self", "first", "second", "fail"]
    assert inspect.iscoroutinefunction(Counter.acompute)
    assert not inspect.iscoroutinefunction(Counter.compute)


@pytest.mark.parametrize(
    "function",
    # The first is called in a task that code of the blocking form creates.
    [lambda counter: asyncio.run(counter.acompute(1)), lambda counter: counter.compute(1)],
    ids=["awaited", "blocking"],
)
def test_code_of_a_blocking_call_can_call_both_forms(counter, function):
    assert counter.nest(function) == (4, 2)


def test_code_of_an_awaited_call_can_call_the_blocking_form(counter):
    assert asyncio.run(counter.anest(lambda counter: counter.compute(1))) == (4, 2)


def test_a_task_that_a_blocking_call_creates_on_a_running_loop_can_await(counter):
    """As in a cell of a notebook, where the loop runs already and the caller is a task."""

    async def cell() -> tuple[int, tuple[int, int]]:
        tasks = []

        def create(counter: Counter) -> int:
            tasks.append(asyncio.create_task(counter.acompute(1)))
            return 0

        nested = counter.nest(create)
        return await tasks[0], nested

    assert asyncio.run(cell()) == (4, (0, 2))


def test_arguments_that_do_not_fit_are_an_error_that_names_the_form(counter):
    with pytest.raises(ArgumentError, match=r"^compute\(\) .*'second'"):
        counter.compute(1, seconds=2)
    with pytest.raises(ArgumentError, match=r"^acompute\(\) .*'second'"):
        asyncio.run(counter.acompute(1, seconds=2))


# --- interrupts and cancellation


def test_an_interrupt_cancels_the_step_and_is_raised_in_the_function(counter):
    interrupt_when(counter.started.is_set)
    assert counter.wait() == "KeyboardInterrupt"
    assert counter.cancelled.wait(WAIT_S)


def test_an_interrupt_between_two_steps_is_raised_instead_of_the_next_step(counter):
    with pytest.raises(KeyboardInterrupt):
        counter.interrupt_between()
    assert counter.threads == []
    assert inspect.getcoroutinestate(counter.work) == inspect.CORO_CLOSED


def test_a_result_that_no_caller_receives_is_closed(counter):
    with pytest.raises(KeyboardInterrupt):
        counter.open()
    assert [result.closed for result in counter.results] == [True]


def test_cancelling_the_awaited_form_cancels_its_step(counter):
    async def cancel() -> str:
        task = asyncio.create_task(counter.await_())
        await asyncio.to_thread(counter.started.wait, WAIT_S)
        task.cancel()
        return await task

    assert asyncio.run(cancel()) == "CancelledError"
    assert counter.cancelled.wait(WAIT_S)


# --- callbacks


def test_callbacks_are_called_in_order_in_the_waiting_thread(portal):
    seen = []

    async def work(callbacks: CallbackQueue) -> str:
        for at in range(100):
            callbacks.schedule(lambda at=at: seen.append((at, threading.current_thread().name)))
        return await callbacks.call(lambda: f"{len(seen)} at {threading.current_thread().name}")

    name = threading.current_thread().name
    assert run_with_callbacks(portal, work) == f"100 at {name}"
    assert seen == [(at, name) for at in range(100)]


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt, SystemExit])
def test_an_exception_of_a_callback_cancels_the_coroutine_and_is_raised(error, portal):
    cancelled = threading.Event()

    def fail() -> None:
        raise error

    async def work(callbacks: CallbackQueue) -> None:
        try:
            await callbacks.call(fail)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    with pytest.raises(error):
        run_with_callbacks(portal, work)
    assert cancelled.is_set()


def test_an_error_of_the_coroutine_is_raised_after_all_callbacks(portal):
    seen = []

    async def work(callbacks: CallbackQueue) -> None:
        callbacks.schedule(lambda: seen.append(1))
        raise KeyError

    with pytest.raises(KeyError):
        run_with_callbacks(portal, work)
    assert seen == [1]


def test_a_cancelled_call_is_not_made(portal):
    seen = []

    async def work(callbacks: CallbackQueue) -> None:
        asking = asyncio.create_task(callbacks.call(lambda: seen.append(1)))
        await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait([asking])

    run_with_callbacks(portal, work)
    assert seen == []


@pytest.mark.anyio
async def test_the_number_of_pending_calls_is_limited():
    callbacks = CallbackQueue()
    for _ in range(MAX_PENDING_CALLS):
        callbacks.schedule(lambda: None)
    with pytest.raises(HostingError, match="10,000"):
        callbacks.schedule(lambda: None)


# --- streams


class Counting:
    """A source of numbers that records how many were requested, how it was left, and the tasks that used it.

    Args:
        item: Coroutine function that returns each item instead of a number.
    """

    def __init__(self, last=10**9, item=None):
        self.last, self.item = last, item
        self.given = 0
        self.left = None
        self.tasks = set()

    async def __aenter__(self):
        self.tasks.add(asyncio.current_task())
        return self

    async def __aexit__(self, kind, *_):
        self.tasks.add(asyncio.current_task())
        self.left = kind.__name__ if kind else "well"

    def __aiter__(self):
        return self

    async def __anext__(self):
        self.tasks.add(asyncio.current_task())
        if self.given == self.last:
            raise StopAsyncIteration
        self.given += 1
        return self.given if self.item is None else await self.item()


def test_an_item_is_requested_only_when_it_is_needed(portal):
    source = Counting(3)
    stream = BlockingStream(portal, lambda _: source)
    assert (next(stream), source.given) == (1, 1)
    assert (next(stream), source.given) == (2, 2)
    assert list(stream) == [3]
    assert list(stream) == []
    assert source.left == "well"
    assert len(source.tasks) == 1, "cancel scopes, which libraries use, must be left by the task that entered them"


@pytest.mark.parametrize(("way", "left"), [("with", "well"), ("close", "CancelledError"), ("drop", "CancelledError")])
def test_a_source_is_left_in_the_way_the_stream_is_left(way, left, portal):
    source = Counting()
    stream = BlockingStream(portal, lambda _: source)
    if way == "with":
        with stream as items:
            assert next(items) == 1
    else:
        assert next(stream) == 1
    if way == "close":
        stream.close()
    gc.disable()
    try:
        del stream
        until(lambda: source.left is not None)
    finally:
        gc.enable()
    assert source.left == left


def test_an_error_in_the_block_cancels_the_source(portal):
    source = Counting()
    with pytest.raises(KeyError), BlockingStream(portal, lambda _: source) as items:
        {}[next(items)]
    assert source.left == "CancelledError"


def test_an_error_of_the_source_is_raised_and_ends_the_stream(portal):
    async def fail():
        raise QueueFullError("full")

    stream = BlockingStream(portal, lambda _: Counting(item=fail))
    with pytest.raises(QueueFullError):
        next(stream)
    assert list(stream) == []


def test_a_stream_can_call_back_while_its_reader_waits(portal):
    with BlockingStream(portal, lambda calls: Counting(item=lambda: calls.call(threading.get_ident))) as items:
        assert [next(items), next(items)] == [threading.get_ident()] * 2


def test_a_second_thread_that_reads_the_same_stream_is_refused(portal):
    def read_again():
        with pytest.raises(RuntimeError, match="two threads"):
            next(items)
        return 1

    with BlockingStream(portal, lambda calls: Counting(item=lambda: calls.call(read_again))) as items:
        assert next(items) == 1
