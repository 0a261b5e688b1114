import asyncio
import concurrent.futures
import contextlib
import gc
import os
import signal
import socket
import sys
import textwrap
import threading

import pytest

from lmx_lab.errors import HostingError
from lmx_lab.http.uvicorn_server import bind, serve
from lmx_lab.portal import LoopThread, receive, run_nested
from tests.http.serving import HealthApp, fetch, script_result

WAIT_S = 60


@pytest.fixture
def thread():
    thread = LoopThread()
    thread.start()
    yield thread
    thread.stop()
    assert not thread._thread.is_alive()


def test_a_server_on_a_thread_works_while_its_caller_is_busy(thread):
    host = thread.run(serve(HealthApp(), bind("127.0.0.1", 0, explicit=True)))
    assert fetch(host.port) == "ok"
    thread.run(host.stop())
    bind("127.0.0.1", host.port, explicit=True).close()


def test_the_thread_is_a_daemon_thread_with_a_name(thread):
    assert thread._thread.daemon
    assert thread._thread.name == "lmx-lab-server"
    assert thread.loop.is_running()


def test_an_error_at_startup_on_a_thread_is_raised_in_the_caller(thread):
    with pytest.raises(HostingError, match="no such model"):
        thread.run(serve(HealthApp(fail_at="startup"), bind("127.0.0.1", 0, explicit=True)))


def test_a_blocking_call_on_its_own_event_loop_is_an_error(thread):
    async def misuse():
        return thread.run(asyncio.sleep(0))

    with pytest.raises(HostingError, match="wait forever"):
        thread.run(misuse())


def test_a_timeout_cancels_the_work_and_waits_for_its_end(thread):
    ended = []
    with pytest.raises(TimeoutError):
        thread.run(until_cancelled(lambda: None, ended.append), timeout_s=0.01)
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
    started, ended = threading.Event(), threading.Event()
    future = thread.submit(until_cancelled(started.set, lambda _: ended.set()))
    assert started.wait(WAIT_S)
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


def test_stop_cancels_pending_work_and_raises_in_waiting_callers():
    thread = LoopThread()
    thread.start()
    started, ended = threading.Event(), []
    future = thread.submit(until_cancelled(started.set, ended.append))
    assert started.wait(WAIT_S)
    thread.stop()
    thread.stop()
    assert ended == ["cancelled"]
    with pytest.raises(HostingError, match="stopped"):
        future.result(WAIT_S)


def test_submitting_work_to_a_stopped_thread_is_an_error():
    thread = LoopThread()
    for refused in (lambda: thread.run(asyncio.sleep(0)), lambda: thread.submit(asyncio.sleep(0)), lambda: thread.loop):
        with pytest.raises(HostingError):
            refused()
    thread.start()
    thread.stop()
    with pytest.raises(HostingError):
        thread.run(asyncio.sleep(0))
    with pytest.raises(HostingError):
        thread.start()


def test_work_that_raises_system_exit_does_not_end_the_event_loop(thread):
    async def leave():
        sys.exit(3)

    with pytest.raises(HostingError, match="exit the process"):
        thread.run(leave())
    assert thread.run(asyncio.sleep(0, "fine")) == "fine"


def test_stopping_the_thread_closes_connections_and_frees_the_port_of_a_running_server():
    thread = LoopThread()
    thread.start()
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
from tests.http.serving import HealthApp, fetch
app, thread = HealthApp(), LoopThread()
thread.start()
host = thread.run(serve(app, bind("127.0.0.1", 0, explicit=True)))
atexit.register(lambda: print("ended", app.ended))
atexit.register(thread.stop)
atexit.register(host.stop_at_exit)
print(fetch(host.port))
"""


@pytest.mark.slow
def test_a_script_with_a_running_server_exits_with_zero_after_the_end_of_the_lifespan():
    done = script_result(SCRIPT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ok\nended True\n", "")


@pytest.mark.slow
def test_a_script_exits_without_atexit_too():
    script = SCRIPT.replace("atexit.register", "(lambda *_: None)")
    done = script_result(script)
    assert (done.returncode, done.stdout) == (0, "ok\n")


# Nested event loops patch asyncio for the whole process, so each of these tests runs in a process of its own.
NESTED = """
import asyncio, os, signal, sys
from lmx_lab.errors import HostingError
from lmx_lab.http.uvicorn_server import bind, serve
from lmx_lab.portal import run_nested
from tests.http.serving import HealthApp, fetch
from tests.test_portal import until_cancelled

async def main():
    loop = asyncio.get_running_loop()
    {body}

asyncio.run(main())
"""


def nested(body):
    script = NESTED.replace("{body}", textwrap.indent(textwrap.dedent(body), "    ").strip())
    done = script_result(script, "-W", "error")
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


@pytest.mark.slow
def test_the_server_works_during_a_nested_call():
    assert nested("""
        host = run_nested(loop, serve(HealthApp(), bind("127.0.0.1", 0, explicit=True)))
        print(run_nested(loop, asyncio.to_thread(fetch, host.port)))
        run_nested(loop, host.stop())
        print(host.running)
    """) == ["ok", "False"]


@pytest.mark.slow
def test_an_interrupted_nested_call_is_cancelled_and_the_event_loop_still_runs():
    assert nested("""
        before, ended = signal.getsignal(signal.SIGINT), []
        bystander = asyncio.create_task(asyncio.sleep(0.05, "bystander"))
        try:
            run_nested(loop, until_cancelled(lambda: os.kill(os.getpid(), signal.SIGINT), ended.append))
        except KeyboardInterrupt:
            print(*ended, signal.getsignal(signal.SIGINT) is before, await bystander)
    """) == ["cancelled", "True", "bystander"]


@pytest.mark.slow
def test_an_error_of_a_nested_call_is_raised_in_the_caller():
    assert nested("""
        try:
            run_nested(loop, serve(HealthApp(fail_at="startup"), bind("127.0.0.1", 0, explicit=True)))
        except HostingError as exc:
            print(type(exc.__cause__).__name__)
    """) == ["ValueError"]


def test_work_for_the_event_loop_of_another_thread_runs_there(thread):
    assert run_nested(thread.loop, asyncio.sleep(0, "slept")) == "slept"
    with pytest.raises(ValueError, match="no"):
        run_nested(thread.loop, failing())


def test_work_for_a_busy_event_loop_of_another_thread_times_out(thread, monkeypatch):
    monkeypatch.setattr("lmx_lab.portal.START_S", 0.05)
    release, busy, ran = threading.Event(), threading.Event(), []

    async def keep_busy():
        busy.set()
        release.wait(WAIT_S)

    async def work():
        ran.append("ran")

    kept = thread.submit(keep_busy())
    assert busy.wait(WAIT_S)
    with pytest.raises(HostingError, match="%%offload"):
        run_nested(thread.loop, work())
    release.set()
    kept.result(WAIT_S)
    thread.run(asyncio.sleep(0))
    assert ran == []


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


async def failing():
    raise ValueError("no")


def test_an_event_loop_of_another_thread_cannot_be_nested(thread):
    async def nest():
        return run_nested(thread.loop, asyncio.sleep(0))

    with pytest.raises(HostingError, match="another thread"):
        asyncio.run(nest())


def test_uvloop_cannot_be_nested():
    uvloop = pytest.importorskip("uvloop", reason="uvloop is not installed")
    loop = uvloop.new_event_loop()
    with pytest.raises(HostingError, match="uvloop"):
        run_nested(loop, asyncio.sleep(0))
    loop.close()


@pytest.mark.slow
def test_importing_does_not_patch_asyncio():
    script = "import asyncio, lmx_lab.http.uvicorn_server, lmx_lab.portal; print(hasattr(asyncio, '_nest_patched'))"
    done = script_result(script)
    assert done.stdout == "False\n"


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
