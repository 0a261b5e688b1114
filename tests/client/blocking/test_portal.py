"""The loop behind blocking clients: who may wait on it, who may not, and what ends."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from lmx_lab import errors
from lmx_lab.client.blocking.lab import LabClient
from lmx_lab.client.blocking.portal import Portal, serves
from lmx_lab.client.blocking.stream import DUE, BlockingStream, CallbackQueue, run_with_callbacks
from lmx_lab.http import uvicorn_server
from lmx_lab.portal import LoopThread
from tests.client.raw import Endless, answering, whole
from tests.flows.conftest import wait_until

pytestmark = pytest.mark.anyio
ALIVE = whole('{"status": "ok"}')
THREAD = "lmx-lab-client"
EVENT_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nx-lmx-lab: 0\r\n\r\n"


async def app(scope: Any, receive: Any, send: Any) -> None:
    """It is alive, in the lab's words."""
    if scope["type"] == "lifespan":
        for event in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{event}.complete"})
        return
    await send({"type": "http.response.start", "status": 200, "headers": [(b"x-lmx-lab", b"9.9")]})
    await send({"type": "http.response.body", "body": b"{}"})


@contextmanager
def served(host: str = "127.0.0.1") -> Iterator[uvicorn_server.RunningServer]:
    """On a loop in a thread."""
    thread = LoopThread("test-server")
    thread.start()
    server = thread.run(uvicorn_server.serve(app, uvicorn_server.bind(host, 0, explicit=False)))
    try:
        yield server
    finally:
        thread.run(server.stop(0))
        thread.stop()


def a_portal(address: str = "http://127.0.0.1:9") -> Portal:
    async def close() -> None:
        pass

    return Portal(lambda: address, close)


# --- who would wait for itself


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost", "127.1", "0.0.0.0"])
async def test_a_call_on_the_loop_that_serves_is_refused_with_the_remedies(name: str) -> None:
    server = await uvicorn_server.serve(app, uvicorn_server.bind("127.0.0.1", 0, explicit=False))
    with LabClient(f"http://{name}:{server.port}") as client:
        for call in (client.version, lambda: next(client.events()), lambda: client.load("m", progress=print)):
            with pytest.raises(errors.HostingError, match=r"await.*offload.*to_thread.*loop='thread'"):
                call()
        if name != "0.0.0.0":
            assert await asyncio.to_thread(client.version) == "9.9"
    await server.stop(0)
    with LabClient(server.url) as client, pytest.raises(errors.UnreachableError):
        client.version()


async def test_a_loop_may_wait_for_what_another_one_serves() -> None:
    with served() as server, LabClient(server.url) as client:
        assert client.version() == "9.9"


async def test_another_machine_on_the_same_port_is_no_reason_to_refuse() -> None:
    server = await uvicorn_server.serve(app, uvicorn_server.bind("127.0.0.1", 0, explicit=False))
    here = asyncio.get_running_loop()
    assert serves(here, server.url)
    # 192.0.2.0/24 is for documents; no machine has it. The last two are no names at all.
    for host in ("192.0.2.1", "no-such.invalid", "a" * 300):
        assert not serves(here, f"http://{host}:{server.port}")
    assert not serves(here, f"http://127.0.0.1:{server.port + 1 if server.port < 65535 else 1}")
    await server.stop(0)


def test_a_blocking_call_on_the_clients_own_loop_is_refused() -> None:
    async def call(client: LabClient) -> str:
        return client.version()

    with answering(ALIVE) as server, LabClient(server.url) as client:
        client.version()
        with pytest.raises(errors.HostingError, match="await the async client"):
            client._portal.run(call(client))


# --- one loop, made late, ended early


def test_all_clients_share_one_loop_and_importing_makes_none() -> None:
    script = f"""
import threading
from lmx_lab.client.blocking import lab as it
from lmx_lab.errors import LabError
names = lambda: [thread.name for thread in threading.enumerate() if thread.name == {THREAD!r}]
client, other = it.LabClient("127.0.0.1:9"), it.LabClient("127.0.0.1:9")
assert names() == []
for asked in (client, other):
    try:
        asked.version()
    except LabError:
        pass
assert names() == [{THREAD!r}]
"""
    run_script(script)


def test_a_script_ends_while_a_stream_is_open() -> None:
    with answering(Endless(b"data: {}\n\n", head=EVENT_HEAD, every_s=0.01)) as server:
        run_script(f"""
from lmx_lab.client.blocking.lab import LabClient
client = LabClient({server.url!r})
stream = client.events()
next(stream), next(stream)
""")


def run_script(script: str) -> str:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


@pytest.mark.skipif(not hasattr(__import__("os"), "fork"), reason="there is no fork here")
def test_a_forked_child_makes_clients_of_its_own() -> None:
    with answering(ALIVE) as server:
        said = run_script(f"""
import os, sys
from lmx_lab.client.blocking.lab import LabClient
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
    assert said == "0\n"


def test_a_closed_client_says_so() -> None:
    with answering(ALIVE) as server:
        client = LabClient(server.url)
        assert client.version() == "0"
        client.close()
        client.close()
        for call in (client.version, lambda: next(client.events())):
            with pytest.raises(errors.HostingError, match="closed"):
                call()
        assert repr(client) == f"<LabClient of {server.url}>"


def test_a_dropped_client_closes_its_connections() -> None:
    closed = threading.Event()

    async def close() -> None:
        closed.set()

    portal = Portal(lambda: "http://127.0.0.1:9", close)
    portal.run(asyncio.sleep(0))
    gc.disable()
    try:
        del portal
        assert closed.wait(20)
    finally:
        gc.enable()


# --- callbacks


def test_functions_are_called_where_the_caller_waits_in_their_order() -> None:
    seen: list[tuple[int, str]] = []

    async def work(callbacks: CallbackQueue) -> str:
        for at in range(100):
            callbacks.tell(lambda at=at: seen.append((at, threading.current_thread().name)))  # type: ignore[misc]
        return await callbacks.ask(lambda: f"{len(seen)} at {threading.current_thread().name}")

    name = threading.current_thread().name
    assert run_with_callbacks(a_portal(), work) == f"100 at {name}"
    assert seen == [(at, name) for at in range(100)]


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt, SystemExit])
def test_what_a_function_raises_cancels_the_work_and_is_raised(error: type[BaseException]) -> None:
    cancelled = threading.Event()

    def fail() -> None:
        raise error

    async def work(callbacks: CallbackQueue) -> None:
        try:
            await callbacks.ask(fail)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    with pytest.raises(error):
        run_with_callbacks(a_portal(), work)
    assert cancelled.is_set()


def test_an_error_of_the_work_comes_after_all_calls() -> None:
    seen: list[int] = []

    async def work(callbacks: CallbackQueue) -> None:
        callbacks.tell(lambda: seen.append(1))
        raise KeyError

    with pytest.raises(KeyError):
        run_with_callbacks(a_portal(), work)
    assert seen == [1]


def test_a_question_that_nobody_needs_any_more_is_not_asked() -> None:
    seen: list[int] = []

    async def work(callbacks: CallbackQueue) -> None:
        asking = asyncio.create_task(callbacks.ask(lambda: seen.append(1)))
        await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait([asking])

    run_with_callbacks(a_portal(), work)
    assert seen == []


async def test_due_calls_have_a_bound() -> None:
    callbacks = CallbackQueue()
    for _ in range(DUE):
        callbacks.tell(lambda: None)
    with pytest.raises(errors.HostingError, match="10,000"):
        callbacks.tell(lambda: None)


# --- streams


class Counting:
    """Counts, and notes what it was asked for and how it was left."""

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


def test_an_item_is_asked_for_when_it_is_wanted_and_no_earlier() -> None:
    source = Counting(3)
    stream = BlockingStream(a_portal(), lambda _: source)
    assert (next(stream), source.given) == (1, 1)
    assert (next(stream), source.given) == (2, 2)
    assert list(stream) == [3]
    assert list(stream) == []
    assert source.left == "well"


@pytest.mark.parametrize(("way", "left"), [("with", "well"), ("close", "CancelledError"), ("drop", "CancelledError")])
def test_a_stream_is_left_as_its_reader_leaves(way: str, left: str) -> None:
    source = Counting()
    stream = BlockingStream(a_portal(), lambda _: source)
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
        wait_until(lambda: source.left is not None)
    finally:
        gc.enable()
    assert source.left == left


def test_an_error_in_the_block_is_an_error_for_the_source() -> None:
    source = Counting()
    with pytest.raises(KeyError), BlockingStream(a_portal(), lambda _: source) as items:
        {}[next(items)]
    assert source.left == "CancelledError"


def test_a_stream_asks_its_reader_while_that_waits() -> None:
    class Asking(Counting):
        async def __anext__(self) -> int:
            assert self.callbacks is not None
            return await self.callbacks.ask(threading.get_ident)

    with BlockingStream(a_portal(), lambda callbacks: Asking(callbacks=callbacks)) as items:
        assert [next(items), next(items)] == [threading.get_ident()] * 2


def test_an_error_of_the_source_is_the_readers_and_then_it_is_over() -> None:
    class Failing(Counting):
        async def __anext__(self) -> int:
            raise errors.QueueFullError("full")

    stream = BlockingStream(a_portal(), lambda _: Failing())
    with pytest.raises(errors.QueueFullError):
        next(stream)
    assert list(stream) == []


def test_a_second_thread_that_reads_the_same_stream_is_told() -> None:
    class Asking(Counting):
        async def __anext__(self) -> int:
            assert self.callbacks is not None
            return await self.callbacks.ask(lambda: list(thread_reads()) and 1)

    def thread_reads() -> Iterator[None]:
        with pytest.raises(RuntimeError, match="two threads"):
            next(items)
        yield

    with BlockingStream(a_portal(), lambda callbacks: Asking(callbacks=callbacks)) as items:
        assert next(items) == 1


def test_streams_end_in_one_task() -> None:
    """Cancel scopes, which libraries open, can be left by no other."""
    tasks: list[Any] = []

    class Scoped(Counting):
        async def __aenter__(self) -> Counting:
            tasks.append(asyncio.current_task())
            return self

        async def __anext__(self) -> int:
            tasks.append(asyncio.current_task())
            return await super().__anext__()

        async def __aexit__(self, *_: Any) -> None:
            tasks.append(asyncio.current_task())

    with BlockingStream(a_portal(), lambda _: Scoped(2)) as items:
        assert list(items) == [1, 2]
    assert len(tasks) == 5
    assert len(set(map(id, tasks))) == 1
