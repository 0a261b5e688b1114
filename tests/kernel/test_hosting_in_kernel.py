"""Test servers in real kernels: one kernel for each loop, and a new one for each test that stops or restarts it."""

import contextlib
import socket
from queue import Empty

import pytest

from tests.support.kernels import Notebook, healthz

SETUP = """
import asyncio, atexit, signal
first_handler = signal.getsignal(signal.SIGINT)
host = sock = None
from lmx_lab.http.uvicorn_server import bind, serve
from lmx_lab.portal import HostedLoop, LoopThread, receive

async def app(scope, receive, send, fail=False):
    if scope["type"] == "lifespan":
        await receive()
        if fail:
            raise ValueError("no such model")
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await send({"type": "lifespan.shutdown.complete"})
    else:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

async def failing(scope, receive, send):
    await app(scope, receive, send, fail=True)

async def forever():
    print("started", flush=True)
    try:
        await asyncio.Event().wait()
    finally:
        await asyncio.sleep(0.01)
        print("cancelled", flush=True)
"""

THREADS = {"kernel": "HostedLoop(asyncio.get_running_loop())", "thread": "LoopThread()"}
START = """
thread = {thread}
thread.start()
atexit.register(thread.stop)
block = thread.run

async def awaited(coro):
    return await receive(thread.submit(coro))
"""

LAUNCH = """
    sock = bind("127.0.0.1", 0, explicit=True)
    host = block(serve(app, sock))
    atexit.register(host.stop_at_exit)
    print(host.port)
"""


RESET = """
    if host is not None and host.running:
        block(host.stop())
    if sock is not None:
        sock.close()
    host = sock = None
"""


@contextlib.contextmanager
def prepared(home, mode):
    with contextlib.closing(Notebook(home)) as kernel:
        kernel.run(SETUP)
        kernel.run(START.format(thread=THREADS[mode]))
        yield kernel


@pytest.fixture(scope="module", params=["kernel", "thread"])
def running(request, tmp_path_factory):
    with prepared(tmp_path_factory.mktemp("home"), request.param) as kernel:
        yield kernel


@pytest.fixture
def lab(running):
    """A kernel without a server."""
    running.run(RESET)
    return running


@pytest.fixture(params=["kernel", "thread"])
def fresh(request, tmp_path):
    """A kernel for one test, which may stop it."""
    with prepared(tmp_path, request.param) as kernel:
        yield kernel


def is_free(port):
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        return sock.connect_ex(("127.0.0.1", port)) != 0


def test_requests_are_answered_while_the_kernel_is_idle_until_the_server_is_stopped(lab):
    port = int(lab.run(LAUNCH))
    assert healthz(port) == 200
    assert lab.run("print(1)") == "1"
    assert healthz(port) == 200
    assert lab.run("block(host.stop()); print(host.running)") == "False"
    assert is_free(port)
    # The same with ``await``.
    port = int(lab.run('host = await awaited(serve(app, bind("127.0.0.1", 0, explicit=True))); print(host.port)'))
    assert healthz(port) == 200
    lab.run("await awaited(host.stop())")
    assert is_free(port)


def test_an_awaited_failing_start_is_an_error_in_the_cell_and_the_kernel_keeps_running(lab):
    assert lab.fail('await awaited(serve(failing, bind("127.0.0.1", 0, explicit=True)))').error == "HostingError"
    assert lab.run("print(1)") == "1"


@pytest.mark.parametrize("prefix", ["", "await asyncio.sleep(0)\n"], ids=["plain cell", "cell with await"])
def test_the_stop_button_cancels_a_blocking_verb_and_the_server_keeps_running(lab, prefix):
    port = int(lab.run(LAUNCH))
    output = lab.interrupt(prefix + "block(forever())")
    assert ("cancelled" in output.text, output.error) == (True, "KeyboardInterrupt")
    assert lab.run("print(1)") == "1"
    assert healthz(port) == 200


def test_the_kernel_keeps_its_handler_of_sigint(lab):
    lab.run(LAUNCH)
    assert lab.run("print(signal.getsignal(signal.SIGINT) == first_handler)") == "True"
    assert lab.interrupt("print('started', flush=True)\nwhile True: pass").error == "KeyboardInterrupt"


def test_nothing_is_logged_into_cells(lab):
    port = int(lab.run(LAUNCH))
    healthz(port)
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(b"not http\r\n\r\n")
        client.recv(65536)
    lab.run("block(host.stop())")
    with pytest.raises(Empty):
        lab.client.get_iopub_msg(timeout=0.2)
    assert "Invalid HTTP" in lab.run("from lmx_lab.http.uvicorn_server import recent_logs; print(recent_logs())")


def test_shutting_down_the_kernel_ends_the_lifespan_frees_the_port_and_exits_with_zero(fresh, tmp_path):
    fresh.run(f"""
        async def inner(scope, receive, send, app=app):
            await app(scope, receive, send)
            if scope["type"] == "lifespan":
                open({str(tmp_path / "ended")!r}, "w").close()

        app = inner
    """)
    port = int(fresh.run(LAUNCH))
    assert healthz(port) == 200
    fresh.manager.shutdown_kernel()
    assert fresh.process.wait(60) == 0
    assert is_free(port)
    assert (tmp_path / "ended").exists()
