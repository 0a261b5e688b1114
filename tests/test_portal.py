import asyncio
import concurrent.futures
import contextlib
import gc
import http.client
import os
import signal
import socket
import sys
import threading
import time

import pytest

from lmx_lab.errors import HostingError
from lmx_lab.http.uvicorn_server import bind, serve
from lmx_lab.portal import HostedLoop, LoopThread, receive
from tests.support.programs import script_result
from tests.support.sockets import HealthApp, fetch

WAIT_S = 60


@contextlib.contextmanager
def raising_handler():
    """Replace Python's handler of SIGINT by one that does the same, so that a hosted loop uses its host."""

    def interrupt(number, frame):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def started(kind):
    """A running loop: one in a thread, one whose steps another loop runs, or one whose host is busy all the time."""
    host = LoopThread("test-host")
    busy, free = threading.Event(), threading.Event()

    async def occupy():
        busy.set()
        free.wait()

    with raising_handler():
        host.start()
        thread = LoopThread() if kind == "alone" else HostedLoop(host.loop)
        thread.start()
        if kind == "with a busy host":
            host.submit(occupy())
            assert busy.wait(WAIT_S)
        yield thread
        thread.stop()
        free.set()
        host.stop()
    assert not thread._thread.is_alive()


@pytest.fixture(params=["alone", "hosted", "with a busy host"])
def thread(request):
    with started(request.param) as thread:
        yield thread


def test_a_server_on_a_thread_works_while_its_caller_is_busy(thread):
    host = thread.run(serve(HealthApp(), bind("127.0.0.1", 0, explicit=True)))
    assert fetch(host.port) == "ok"
    thread.run(host.stop())
    bind("127.0.0.1", host.port, explicit=True).close()
    assert (thread._thread.daemon, thread._thread.name) == (True, "lmx-lab-server")


def test_a_blocking_call_on_its_own_event_loop_is_an_error(thread):
    async def misuse():
        return thread.run(asyncio.sleep(0))

    with pytest.raises(HostingError, match="wait forever"):
        thread.run(misuse())


def test_a_timeout_cancels_the_work_and_waits_for_its_end(thread):
    ended = []
    thread.run(asyncio.sleep(0))  # A loop with a busy host takes longer for the first call.
    with pytest.raises(TimeoutError):
        thread.run(until_cancelled(lambda: None, ended.append), timeout_s=0.2)
    assert ended == ["cancelled"]


async def until_cancelled(started, ended):
    started()
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        await asyncio.sleep(0.01)
        ended("cancelled")
        raise


def test_an_interrupt_cancels_the_work_and_is_raised_after_its_end(thread):
    before, ended = signal.getsignal(signal.SIGINT), []
    with pytest.raises(KeyboardInterrupt):
        thread.run(until_cancelled(lambda: os.kill(os.getpid(), signal.SIGINT), ended.append))
    assert ended == ["cancelled"]
    assert signal.getsignal(signal.SIGINT) is before
    assert thread.run(asyncio.sleep(0, "fine")) == "fine"


def test_a_second_interrupt_does_not_wait(thread):
    released = threading.Event()

    async def stubborn():
        os.kill(os.getpid(), signal.SIGINT)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.to_thread(released.wait)

    with pytest.raises(KeyboardInterrupt):
        thread.run(stubborn())
    released.set()


def test_submitted_work_returns_its_result_and_can_be_cancelled(thread):
    assert thread.submit(asyncio.sleep(0, "done")).result(WAIT_S) == "done"
    begun, ended = threading.Event(), threading.Event()
    future = thread.submit(until_cancelled(begun.set, lambda _: ended.set()))
    assert begun.wait(WAIT_S)
    assert future.cancel()
    assert ended.wait(WAIT_S)


def test_work_cancelled_before_its_first_step_never_runs(thread):
    busy, free = threading.Event(), threading.Event()

    async def occupy():
        busy.set()
        free.wait()

    thread.submit(occupy())
    assert busy.wait(WAIT_S)
    assert thread.submit(until_cancelled(lambda: None, print)).cancel()
    free.set()
    assert thread.run(asyncio.sleep(0, "fine")) == "fine"


def test_stop_cancels_pending_work_and_raises_in_waiting_callers(thread):
    begun, ended = threading.Event(), []
    future = thread.submit(until_cancelled(begun.set, ended.append))
    assert begun.wait(WAIT_S)
    thread.stop()
    thread.stop()
    assert ended == ["cancelled"]
    with pytest.raises(HostingError, match="stopped"):
        future.result(WAIT_S)
    for refused in (lambda: thread.run(asyncio.sleep(0)), thread.start):
        with pytest.raises(HostingError):
            refused()


def test_a_thread_must_be_started():
    thread = LoopThread()
    for refused in (lambda: thread.run(asyncio.sleep(0)), lambda: thread.submit(asyncio.sleep(0)), lambda: thread.loop):
        with pytest.raises(HostingError):
            refused()


def test_work_that_raises_system_exit_does_not_end_the_event_loop(thread):
    async def leave():
        sys.exit(3)

    with pytest.raises(HostingError, match="exit the process"):
        thread.run(leave())
    assert thread.run(asyncio.sleep(0, "fine")) == "fine"


@pytest.mark.parametrize("kind", ["hosted", "with a busy host"])
@pytest.mark.parametrize("exception", [SystemExit, KeyboardInterrupt])
def test_an_exit_in_a_callback_does_not_end_a_hosted_loop_or_delay_other_callbacks(kind, exception):
    def leave():
        raise exception

    with started(kind) as hosted:

        def both(other):
            hosted.loop.call_soon(leave)
            hosted.loop.call_soon(other.set)

        prompt = []
        for _ in range(5):
            time.sleep(0.01)  # The thread begins to wait for events.
            other = threading.Event()
            hosted.loop.call_soon_threadsafe(both, other)
            # The thread would notice it after a second.
            prompt.append(other.wait(0.5))
        assert sum(prompt) > len(prompt) / 2
        assert hosted.submit(asyncio.sleep(0, "fine")).result(WAIT_S) == "fine"


NO_FILES = """
import asyncio, os, resource
from lmx_lab.errors import HostingError
from lmx_lab.portal import HostedLoop, LoopThread

async def main():
    for thread in (HostedLoop(asyncio.get_running_loop()), LoopThread()):
        os.close(free := os.dup(0))
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, before[1]))
        try:
            thread.start()
        except HostingError as exc:
            print(exc)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        thread.stop()

asyncio.run(main())
"""


@pytest.mark.slow
def test_a_start_without_file_descriptors_is_an_error():
    done = script_result(NO_FILES)
    assert done.returncode == 0
    assert done.stdout.count("cannot start an event loop: [Errno 24] Too many open files; close files") == 2


def test_stopping_the_thread_closes_connections_and_frees_the_port_of_a_running_server(thread):
    app = HealthApp()
    host = thread.run(serve(app, bind("127.0.0.1", 0, explicit=True)))
    with socket.create_connection(("127.0.0.1", host.port), timeout=WAIT_S) as client:
        client.sendall(b"GET /hang HTTP/1.1\r\nHost: localhost\r\n\r\n")
        thread.run(app.hanging.wait())
        thread.stop()
        with contextlib.suppress(ConnectionResetError):
            assert client.recv(65536).startswith(b"HTTP/1.1 200")
            assert client.recv(65536) == b""
    bind("127.0.0.1", host.port, explicit=True).close()
    host.stop_at_exit()


SCRIPT = """
import atexit, asyncio, sys, threading, urllib.request
from lmx_lab.http.uvicorn_server import bind, serve
from lmx_lab.portal import LoopThread
from tests.support.sockets import HealthApp, fetch
app, thread = HealthApp(), LoopThread()
thread.start()
host = thread.run(serve(app, bind("127.0.0.1", 0, explicit=True)))
atexit.register(lambda: print("ended", app.ended))
atexit.register(thread.stop)
atexit.register(host.stop_at_exit)
print(fetch(host.port))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("register", "printed"), [("atexit.register", "ok\nended True\n"), ("(lambda *_: None)", "ok\n")]
)
def test_a_script_with_a_running_server_exits_with_zero_with_and_without_atexit(register, printed):
    done = script_result(SCRIPT.replace("atexit.register", register))
    assert (done.returncode, done.stdout, done.stderr) == (0, printed, "")


def test_a_loop_that_waits_for_another_thread_sees_callbacks_that_do_not_wake_it():
    future = concurrent.futures.Future()
    # Without the other callback, the loop would sleep until this one.
    late = threading.Timer(WAIT_S, future.set_result, [None])
    late.start()
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        task = loop.create_task(receive(future))
        # As ipykernel's handler of SIGINT does. It runs in the loop's thread while the loop sleeps.
        interrupt = threading.Timer(0.05, loop.call_soon, [task.cancel])
        interrupt.start()
        with pytest.raises(asyncio.CancelledError):
            loop.run_until_complete(task)
    late.cancel()
    assert future.cancelled()


# A loop with two drivers


async def thread_name():
    return threading.current_thread().name


def hosted_main(function, *, loop_factory=None):
    """Run a function on a loop that hosts another one, in the main thread, as a notebook's kernel does."""

    async def main():
        hosted = HostedLoop(asyncio.get_running_loop(), "test-hosted")
        hosted.start()
        try:
            return await function(hosted)
        finally:
            await asyncio.to_thread(hosted.stop)

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(main())


@pytest.mark.parametrize("kind", ["asyncio", "uvloop"])
def test_a_free_host_runs_the_steps_and_the_thread_those_of_a_blocked_host(kind):
    factory = (
        pytest.importorskip("uvloop", reason="uvloop is not installed").new_event_loop if kind == "uvloop" else None
    )

    async def names(hosted):
        assert "MainThread" in {await receive(hosted.submit(thread_name())) for _ in range(20)}
        while_blocked = [hosted.submit(thread_name()).result(WAIT_S), *(hosted.run(thread_name()) for _ in range(5))]
        while await receive(hosted.submit(thread_name())) != "MainThread":
            pass
        return while_blocked

    assert hosted_main(names, loop_factory=factory) == ["test-hosted"] * 6


def test_connections_tasks_and_timers_survive_each_change_of_the_driver():
    async def alternate(hosted):
        host = await receive(hosted.submit(serve(HealthApp(), bind("127.0.0.1", 0, explicit=True))))
        ticks, ended = [], threading.Event()

        async def tick():
            while not ended.is_set():
                ticks.append(threading.current_thread().name)
                await asyncio.sleep(0.001)

        ticking = hosted.submit(tick())
        texts = []
        connection = http.client.HTTPConnection("127.0.0.1", host.port, timeout=WAIT_S)

        def ask():
            connection.request("GET", "/")
            texts.append(connection.getresponse().read() == b'{"status": "ok", "name": "lmx-lab"}')

        for _ in range(20):
            ask()
            await asyncio.to_thread(ask)
            while ticks[-1] != "MainThread":  # noqa: ASYNC110 - an event would have to wake this loop
                await asyncio.sleep(0.001)
        ended.set()
        connection.close()
        await receive(ticking)
        await receive(hosted.submit(host.stop()))
        return set(texts), set(ticks)

    assert hosted_main(alternate) == ({True}, {"MainThread", "test-hosted"})


def test_timers_that_a_late_step_of_the_host_sets_are_in_time():
    async def late_steps(hosted):
        loop, in_time = hosted.loop, []
        await receive(hosted.submit(asyncio.sleep(0)))
        for _ in range(10):
            hosted.submit(asyncio.sleep(0)).result(WAIT_S)  # The thread takes over.
            time.sleep(0.01)  # noqa: ASYNC251 - it begins to wait for events, while the host is blocked
            fired = threading.Event()
            loop.call_soon_threadsafe(loop.call_later, 0.02, fired.set)
            # The host now runs the steps that it was asked for. The thread would notice the timer after a second.
            in_time.append(await asyncio.to_thread(fired.wait, 0.5))
        return in_time

    in_time = hosted_main(late_steps)
    assert sum(in_time) > len(in_time) / 2


def test_a_host_that_runs_nested_in_blocking_code_runs_no_steps():
    # An interrupt of that code would be raised within a request. Python's own handler of SIGINT says that it may come.
    async def nested(hosted):
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            names = {await receive(hosted.submit(thread_name())) for _ in range(20)}
        finally:
            signal.signal(signal.SIGINT, before)
        return names

    assert hosted_main(nested) == {"test-hosted"}


def test_a_loop_outlives_its_host():
    with contextlib.ExitStack() as ended:

        async def start():
            hosted = HostedLoop(asyncio.get_running_loop(), "test-hosted")
            hosted.start()
            ended.callback(hosted.stop)
            return hosted, await receive(hosted.submit(serve(HealthApp(), bind("127.0.0.1", 0, explicit=True))))

        hosted, server = asyncio.run(start())
        assert [fetch(server.port) for _ in range(3)] == ["ok"] * 3
        hosted.run(server.stop())


def test_a_call_that_waits_for_data_survives_garbage_collection(thread):
    # asyncio refers to a waiting task only through its reader, to which the protocol has only a weak reference.
    here, there = socket.socketpair()
    waits = threading.Event()

    async def read():
        reader, writer = await asyncio.open_connection(sock=here)
        waits.set()
        try:
            return await reader.read(1)
        finally:
            writer.close()

    future = thread.submit(read())
    assert waits.wait(WAIT_S)
    thread.run(asyncio.sleep(0))
    gc.collect()
    there.send(b"x")
    assert future.result(10) == b"x"
    there.close()
