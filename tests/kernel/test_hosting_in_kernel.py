"""Test servers in real kernels: one kernel for each loop, and a new one for each test that stops or restarts it."""

import contextlib
import http.client
import socket
import textwrap
from queue import Empty

import pytest

from tests.support.kernels import a_kernel

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


class Kernel:
    """A kernel, and its cells."""

    def __init__(self):
        self.manager = a_kernel()
        # A kernel is terminated after half of this time; the tests check that it ends by itself.
        self.manager.shutdown_wait_time = 120
        self.manager.start_kernel()
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)
        self.process = self.manager.provisioner.process

    def start(self, code):
        self.request_id = self.client.execute(textwrap.dedent(code), store_history=False)

    def read(self, until=None):
        """Return the printed text of a cell, up to a text or to its end, and the name of its error."""
        text, error = "", None
        while until is None or until not in text:
            message = self.client.get_iopub_msg(timeout=60)
            content = message["content"]
            if message["msg_type"] == "stream":
                text += content["text"]
            elif message["msg_type"] == "error":
                error = content["ename"]
            elif (message["msg_type"], content.get("execution_state")) == ("status", "idle") and (
                # During the start, several requests have asked whether the kernel is ready; their replies are skipped.
                message["parent_header"].get("msg_id") == self.request_id
            ):
                break
        return text, error

    def run(self, code):
        self.start(code)
        text, error = self.read()
        assert error is None, (error, text)
        return text.strip()

    def error(self, code):
        self.start(code)
        return self.read()[1]

    def interrupt(self, code):
        """Run a cell until it has printed, press the stop button, and return its further text and its error."""
        self.start(code)
        self.read(until="started")
        self.manager.interrupt_kernel()
        return self.read()

    def leave(self):
        self.client.stop_channels()
        if self.manager.is_alive():
            self.manager.shutdown_kernel(now=True)
        self.manager.cleanup_resources()


@contextlib.contextmanager
def prepared(mode):
    kernel = Kernel()
    try:
        kernel.run(SETUP)
        kernel.run(START.format(thread=THREADS[mode]))
        yield kernel
    finally:
        kernel.leave()


@pytest.fixture(scope="module", params=["kernel", "thread"])
def running(request):
    with prepared(request.param) as kernel:
        yield kernel


@pytest.fixture
def lab(running):
    """A kernel without a server."""
    running.run(RESET)
    return running


@pytest.fixture(params=["kernel", "thread"])
def fresh(request):
    """A kernel for one test, which may stop it."""
    with prepared(request.param) as kernel:
        kernel.mode = request.param
        yield kernel


def fetch(port):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("GET", "/")
        return connection.getresponse().read()
    finally:
        connection.close()


def is_free(port):
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        return sock.connect_ex(("127.0.0.1", port)) != 0


def test_requests_are_answered_while_the_kernel_is_idle(lab):
    port = int(lab.run(LAUNCH))
    assert fetch(port) == b"ok"
    assert lab.run("print(1)") == "1"
    assert fetch(port) == b"ok"
    assert lab.run("block(host.stop()); print(host.running)") == "False"
    assert is_free(port)


def test_an_awaited_start_serves_too(lab):
    port = int(lab.run('host = await awaited(serve(app, bind("127.0.0.1", 0, explicit=True))); print(host.port)'))
    assert fetch(port) == b"ok"
    lab.run("await awaited(host.stop())")
    assert is_free(port)


def test_a_request_during_the_blocking_launch_cell_is_answered_by_it(lab):
    lab.start("""
        sock = bind("127.0.0.1", 0, explicit=True)
        print(sock.getsockname()[1], flush=True)
        go = input()
        host = block(serve(app, sock))
    """)
    port = int(lab.read(until="\n")[0])
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        lab.client.get_stdin_msg(timeout=30)
        lab.client.input("go")
        assert lab.read()[1] is None
        assert client.recv(65536).startswith(b"HTTP/1.1 200")


def test_a_taken_port_is_an_error_in_the_cell_and_the_kernel_keeps_running(lab):
    lab.run('sock = bind("127.0.0.1", 0, explicit=True)')
    assert lab.error('bind("127.0.0.1", sock.getsockname()[1], explicit=True)') == "PortTakenError"
    assert fetch(int(lab.run(LAUNCH))) == b"ok"


def test_a_failing_start_is_an_error_in_the_cell_and_the_kernel_keeps_running(lab):
    assert lab.error('block(serve(failing, bind("127.0.0.1", 0, explicit=True)))') == "HostingError"
    assert fetch(int(lab.run(LAUNCH))) == b"ok"


def test_an_awaited_failing_start_is_an_error_in_the_cell_and_the_kernel_keeps_running(lab):
    assert lab.error('await awaited(serve(failing, bind("127.0.0.1", 0, explicit=True)))') == "HostingError"
    assert lab.run("print(1)") == "1"


@pytest.mark.parametrize("prefix", ["", "await asyncio.sleep(0)\n"], ids=["plain cell", "cell with await"])
def test_the_stop_button_cancels_a_blocking_verb_and_the_server_keeps_running(lab, prefix):
    port = int(lab.run(LAUNCH))
    text, error = lab.interrupt(prefix + "block(forever())")
    assert ("cancelled" in text, error) == (True, "KeyboardInterrupt")
    assert lab.run("print(1)") == "1"
    assert fetch(port) == b"ok"


def test_a_server_answers_during_a_blocking_verb(lab):
    port = int(lab.run(LAUNCH))
    lab.start("block(forever())")
    lab.read(until="started")
    assert fetch(port) == b"ok"
    lab.manager.interrupt_kernel()
    assert lab.read()[1] == "KeyboardInterrupt"


def test_the_kernel_keeps_its_handler_of_sigint(lab):
    lab.run(LAUNCH)
    assert lab.run("print(signal.getsignal(signal.SIGINT) == first_handler)") == "True"
    lab.start("print('started', flush=True)\nwhile True: pass")
    lab.read(until="started")
    lab.manager.interrupt_kernel()
    assert lab.read()[1] == "KeyboardInterrupt"


def test_nothing_is_logged_into_cells(lab):
    port = int(lab.run(LAUNCH))
    fetch(port)
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
    assert fetch(port) == b"ok"
    fresh.manager.shutdown_kernel()
    assert fresh.process.wait(60) == 0
    assert is_free(port)
    assert (tmp_path / "ended").exists()


def test_a_restarted_kernel_gets_the_same_port_again(fresh):
    port = int(fresh.run(LAUNCH))
    fresh.manager.restart_kernel()
    fresh.client.wait_for_ready(timeout=60)
    fresh.run(SETUP)
    fresh.run(START.format(thread=THREADS[fresh.mode]))
    host = f'host = await awaited(serve(app, bind("127.0.0.1", {port}, explicit=True))); print(host.port)'
    assert int(fresh.run(host)) == port
    assert fetch(port) == b"ok"
