"""Tests of the portal and of blocking streams: which calls may wait, callbacks, and the end of streams."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from lmx_lab import errors
from lmx_lab.blocking import MAX_PENDING_CALLS, BlockingStream, CallbackQueue, run_with_callbacks
from lmx_lab.client.blocking import ClientPortal
from lmx_lab.client.lab import LabClient
from lmx_lab.http import uvicorn_server
from lmx_lab.portal import LoopThread
from tests.support.programs import run_script
from tests.support.sockets import Endless, answering, lab_app, whole
from tests.support.waiting import until

pytestmark = pytest.mark.anyio
ALIVE = whole('{"status": "ok"}')
THREAD = "lmx-lab-client"
EVENT_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nx-lmx-lab: 0\r\n\r\n"


@contextmanager
def served(host="127.0.0.1"):
    """Run the server on an event loop in a thread."""
    thread = LoopThread("test-server")
    thread.start()
    server = thread.run(uvicorn_server.serve(lab_app, uvicorn_server.bind(host, 0, explicit=False)))
    try:
        yield server
    finally:
        thread.run(server.stop(0))
        thread.stop()


def make_portal():
    async def close() -> None:
        pass

    return ClientPortal(close)


# --- calls that would wait for themselves


def test_a_blocking_call_on_the_clients_loop_is_refused():
    async def call(client: LabClient) -> str:
        return client.version()

    with answering(ALIVE) as server, LabClient(server.url) as client:
        client.version()
        with pytest.raises(errors.HostingError, match="await the async client"):
            client._portal.run(call(client))


# --- the background loop


@pytest.mark.slow
def test_all_clients_share_one_loop_which_importing_does_not_start():
    script = f"""
import threading
from lmx_lab.client import lab as it
from lmx_lab.errors import LabError
names = lambda: [thread.name for thread in threading.enumerate() if thread.name == {THREAD!r}]
client, other = it.LabClient("127.0.0.1:9"), it.LabClient("127.0.0.1:9")
assert names() == []
for each in (client, other):
    try:
        each.version()
    except LabError:
        pass
assert names() == [{THREAD!r}]
"""
    run_script(script)


@pytest.mark.slow
def test_a_script_can_end_while_a_stream_is_open():
    with answering(Endless(b"data: {}\n\n", head=EVENT_HEAD, every_s=0.01)) as server:
        run_script(f"""
from lmx_lab.client.lab import LabClient
client = LabClient({server.url!r})
stream = client.events()
next(stream), next(stream)
""")


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(__import__("os"), "fork"), reason="there is no fork here")
def test_a_forked_child_needs_clients_of_its_own():
    with answering(ALIVE) as server:
        output = run_script(f"""
import os, sys
from lmx_lab.client.lab import LabClient
from lmx_lab.errors import HostingError
client = LabClient({server.url!r})
unused = LabClient({server.url!r})
assert client.version() == "0"
child = os.fork()
if not child:
    try:
        client.version()
    except HostingError as exc:
        assert "forked" in str(exc)
        client.close()
        assert unused.version() == LabClient({server.url!r}).version() == "0"
        sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
print(client.version())
""")
    assert output == "0\n"


def test_a_closed_client_refuses_calls():
    with answering(ALIVE) as server:
        client = LabClient(server.url)
        assert client.version() == "0"
        client.close()
        client.close()
        for call in (client.version, lambda: next(client.events())):
            with pytest.raises(errors.HostingError, match="closed"):
                call()
        assert repr(client) == f"<LabClient of {server.url}>"


def test_deleting_a_client_closes_its_connections():
    closed = threading.Event()

    async def close() -> None:
        closed.set()

    portal = ClientPortal(close)
    portal.run(asyncio.sleep(0))
    gc.disable()
    try:
        del portal
        assert closed.wait(20)
    finally:
        gc.enable()


# --- callbacks


def test_callbacks_are_called_in_order_in_the_waiting_thread():
    seen = []

    async def work(callbacks: CallbackQueue) -> str:
        for at in range(100):
            callbacks.schedule(lambda at=at: seen.append((at, threading.current_thread().name)))
        return await callbacks.call(lambda: f"{len(seen)} at {threading.current_thread().name}")

    name = threading.current_thread().name
    assert run_with_callbacks(make_portal(), work) == f"100 at {name}"
    assert seen == [(at, name) for at in range(100)]


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt, SystemExit])
def test_an_exception_of_a_callback_cancels_the_coroutine_and_is_raised(error):
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
        run_with_callbacks(make_portal(), work)
    assert cancelled.is_set()


def test_an_error_of_the_coroutine_is_raised_after_all_callbacks():
    seen = []

    async def work(callbacks: CallbackQueue) -> None:
        callbacks.schedule(lambda: seen.append(1))
        raise KeyError

    with pytest.raises(KeyError):
        run_with_callbacks(make_portal(), work)
    assert seen == [1]


def test_a_cancelled_call_is_not_made():
    seen = []

    async def work(callbacks: CallbackQueue) -> None:
        asking = asyncio.create_task(callbacks.call(lambda: seen.append(1)))
        await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait([asking])

    run_with_callbacks(make_portal(), work)
    assert seen == []


async def test_the_number_of_pending_calls_is_limited():
    callbacks = CallbackQueue()
    for _ in range(MAX_PENDING_CALLS):
        callbacks.schedule(lambda: None)
    with pytest.raises(errors.HostingError, match="10,000"):
        callbacks.schedule(lambda: None)


# --- streams


class Counting:
    """A source of numbers that records how many were requested and how it was left."""

    def __init__(self, last: int = 10**9, callbacks: CallbackQueue | None = None) -> None:
        self.last = last
        self.given = 0
        self.left: str | None = None
        self.callbacks = callbacks

    async def __aenter__(self) -> Counting:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.left = kind.__name__ if kind else "well"

    def __aiter__(self) -> Counting:
        return self

    async def __anext__(self) -> int:
        if self.given == self.last:
            raise StopAsyncIteration
        self.given += 1
        return self.given


def test_an_item_is_requested_only_when_it_is_needed():
    source = Counting(3)
    stream = BlockingStream(make_portal(), lambda _: source)
    assert (next(stream), source.given) == (1, 1)
    assert (next(stream), source.given) == (2, 2)
    assert list(stream) == [3]
    assert list(stream) == []
    assert source.left == "well"


@pytest.mark.parametrize(("way", "left"), [("with", "well"), ("close", "CancelledError"), ("drop", "CancelledError")])
def test_a_source_is_left_in_the_way_the_stream_is_left(way, left):
    source = Counting()
    stream = BlockingStream(make_portal(), lambda _: source)
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


def test_an_error_in_the_block_cancels_the_source():
    source = Counting()
    with pytest.raises(KeyError), BlockingStream(make_portal(), lambda _: source) as items:
        {}[next(items)]
    assert source.left == "CancelledError"


def test_a_stream_can_call_back_while_its_reader_waits():
    class Asking(Counting):
        async def __anext__(self) -> int:
            assert self.callbacks is not None
            return await self.callbacks.call(threading.get_ident)

    with BlockingStream(make_portal(), lambda callbacks: Asking(callbacks=callbacks)) as items:
        assert [next(items), next(items)] == [threading.get_ident()] * 2


def test_an_error_of_the_source_is_raised_and_ends_the_stream():
    class Failing(Counting):
        async def __anext__(self) -> int:
            raise errors.QueueFullError("full")

    stream = BlockingStream(make_portal(), lambda _: Failing())
    with pytest.raises(errors.QueueFullError):
        next(stream)
    assert list(stream) == []


def test_a_second_thread_that_reads_the_same_stream_is_refused():
    class Asking(Counting):
        async def __anext__(self) -> int:
            assert self.callbacks is not None
            return await self.callbacks.call(lambda: list(thread_reads()) and 1)

    def thread_reads() -> Iterator[None]:
        with pytest.raises(RuntimeError, match="two threads"):
            next(items)
        yield

    with BlockingStream(make_portal(), lambda callbacks: Asking(callbacks=callbacks)) as items:
        assert next(items) == 1


def test_a_source_is_entered_read_and_left_in_one_task():
    """Cancel scopes, which libraries use, must be left by the task that entered them."""
    tasks = []

    class Scoped(Counting):
        async def __aenter__(self) -> Counting:
            tasks.append(asyncio.current_task())
            return self

        async def __anext__(self) -> int:
            tasks.append(asyncio.current_task())
            return await super().__anext__()

        async def __aexit__(self, *_: Any) -> None:
            tasks.append(asyncio.current_task())

    with BlockingStream(make_portal(), lambda _: Scoped(2)) as items:
        assert list(items) == [1, 2]
    assert len(tasks) == 5
    assert len(set(map(id, tasks))) == 1
