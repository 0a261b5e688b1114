import asyncio
import contextlib
import errno
import http.client
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from lmx_lab.errors import HostingError, PortTakenError
from lmx_lab.http import uvicorn_server
from lmx_lab.http.uvicorn_server import bind, recent_logs, serve
from lmx_lab.portal import LoopThread, run_nested

ROOT = Path(__file__).parents[2]
"""The working directory of scripts that import this module."""
WAIT_S = 60


def has_ipv6():
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as sock:
        sock.bind(("::1", 0))
        return True
    return False


HAS_IPV6 = has_ipv6()


def script_result(source, *options):
    command = [sys.executable, *options, "-c", source]
    return subprocess.run(command, capture_output=True, text=True, timeout=180, cwd=ROOT, check=False)


@pytest.fixture
def anyio_backend():
    return "asyncio"


class App:
    """Answers /healthz as the lab does, hangs on /hang, echoes over WebSocket; its lifespan can be told to fail."""

    def __init__(self, *, fail_at=None, name="lmx-lab"):
        self.fail_at = fail_at
        self.name = name
        self.hanging = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.ended = False

    async def __call__(self, scope, receive, send):
        if scope["type"] == "lifespan":
            await self.live(receive, send)
        elif scope["type"] == "websocket":
            await self.echo(receive, send)
        else:
            await self.answer(scope, send)

    async def live(self, receive, send):
        await receive()
        if self.fail_at == "startup":
            raise ValueError("no such model")
        if self.fail_at == "startup.failed":
            await send({"type": "lifespan.startup.failed", "message": "Traceback…\nValueError: no such model\n"})
            return
        if self.fail_at == "exit":
            sys.exit(7)
        if self.fail_at == "never":
            await asyncio.Event().wait()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        if self.fail_at == "shutdown hangs":
            await asyncio.Event().wait()
        self.ended = True
        await send({"type": "lifespan.shutdown.complete"})

    async def echo(self, receive, send):
        await receive()
        await send({"type": "websocket.accept"})
        while (message := await receive())["type"] == "websocket.receive":
            await send({"type": "websocket.send", "text": message["text"]})

    async def answer(self, scope, send):
        body = json.dumps({"status": "ok", "name": self.name}).encode()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if scope["path"] == "/hang":
            self.hanging.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancelled.set()
                raise
        await send({"type": "http.response.body", "body": body})


def fetch(port, path="/healthz", host="127.0.0.1"):
    connection = http.client.HTTPConnection(host, port, timeout=WAIT_S)
    try:
        connection.request("GET", path)
        return json.loads(connection.getresponse().read())["status"]
    finally:
        connection.close()


@contextlib.asynccontextmanager
async def serving(app=None, **options):
    host = await serve(app or App(), bind("127.0.0.1", 0, explicit=True), **options)
    try:
        yield host
    finally:
        await host.stop()


def test_port_zero_takes_a_free_one():
    with bind("127.0.0.1", 0, explicit=True) as sock:
        assert sock.getsockname()[1] > 0


@pytest.mark.parametrize("second", ["127.0.0.1", "0.0.0.0"])
def test_a_taken_explicit_port_is_an_error_that_names_port_and_remedy(second, monkeypatch):
    monkeypatch.setattr(uvicorn_server, "RESPONSE_S", 0.05)
    with bind("127.0.0.1", 0, explicit=True) as sock:
        port = sock.getsockname()[1]
        with pytest.raises(PortTakenError, match=rf"port {port} .* another program; use port 0"):
            bind(second, port, explicit=True)


def test_a_taken_preferred_port_gives_the_next_free_one():
    with bind("127.0.0.1", 0, explicit=True) as first:
        port = first.getsockname()[1]
        with bind("127.0.0.1", port, explicit=False) as second:
            assert port < second.getsockname()[1] <= port + uvicorn_server.PORTS_TRIED


def test_when_all_ports_tried_are_taken_the_error_names_them(monkeypatch):
    monkeypatch.setattr(uvicorn_server, "PORTS_TRIED", 0)
    monkeypatch.setattr(uvicorn_server, "RESPONSE_S", 0.05)
    with bind("127.0.0.1", 0, explicit=True) as sock, pytest.raises(PortTakenError, match="port 0"):
        bind("127.0.0.1", sock.getsockname()[1], explicit=False)


@pytest.mark.parametrize(
    ("host", "port"),
    [("192.0.2.1", 0), ("no-such-host.invalid", 0), ("a" * 300, 0), ("127.0.0.1", 65536), ("::zz", 0)],
)
def test_an_impossible_address_is_a_hosting_error(host, port):
    with pytest.raises(HostingError):
        bind(host, port, explicit=True)


def test_a_forbidden_port_is_a_hosting_error(monkeypatch):
    def refuse(host, port):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(uvicorn_server, "_listen", refuse)
    with pytest.raises(HostingError, match="Permission denied"):
        bind("127.0.0.1", 80, explicit=False)


def test_a_silent_holder_does_not_hold_up_the_error(monkeypatch):
    monkeypatch.setattr(uvicorn_server, "RESPONSE_S", 0.05)
    with bind("127.0.0.1", 0, explicit=True) as sock, pytest.raises(PortTakenError, match="another program"):
        bind("127.0.0.1", sock.getsockname()[1], explicit=True)


def test_a_lab_that_answers_late_is_named_as_holder(monkeypatch):
    monkeypatch.setattr(uvicorn_server, "RESPONSE_S", WAIT_S)

    def answer(listener):
        client, _ = listener.accept()
        with client:
            client.recv(8192)
            time.sleep(1.5 * uvicorn_server.PROBE_S)  # busy
            client.sendall(b"HTTP/1.1 200 OK\r\nx-lmx-lab: 1\r\n\r\n{}")

    with bind("127.0.0.1", 0, explicit=True) as sock, ThreadPoolExecutor(1) as pool:
        sock.settimeout(WAIT_S)
        answering = pool.submit(answer, sock)
        with pytest.raises(PortTakenError, match="another LMX Lab server"):
            bind("127.0.0.1", sock.getsockname()[1], explicit=True)
        answering.result(WAIT_S)


def test_the_probe_sees_whether_somebody_listens():
    with bind("127.0.0.1", 0, explicit=True) as sock:
        port = sock.getsockname()[1]
        assert uvicorn_server._is_accepting("0.0.0.0", port)
    assert not uvicorn_server._is_accepting("0.0.0.0", port)


SERVER = """
import asyncio, sys
from tests.http.test_uvicorn_server import App, bind, serve
async def main():
    host = await serve(App(name=sys.argv[1]), bind("127.0.0.1", 0, explicit=True))
    print(host.port, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await host.stop()
asyncio.run(main())
"""


@pytest.mark.parametrize(("name", "holder"), [("lmx-lab", "another LMX Lab server"), ("other", "another program")])
def test_a_lab_of_another_process_is_named_as_holder(name, holder, monkeypatch):
    monkeypatch.setattr(uvicorn_server, "PROBE_S", WAIT_S)
    monkeypatch.setattr(uvicorn_server, "RESPONSE_S", WAIT_S)
    command = [sys.executable, "-c", SERVER, name]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        port = int(process.stdout.readline())
        with pytest.raises(PortTakenError, match=holder):
            bind("127.0.0.1", port, explicit=True)
        process.communicate()
    assert process.returncode == 0


@pytest.mark.anyio
async def test_a_lab_of_this_process_is_named_as_holder():
    async with serving() as host:
        with pytest.raises(PortTakenError, match="of this process"):
            bind("127.0.0.1", host.port, explicit=True)


@pytest.mark.anyio
@pytest.mark.parametrize("address", ["127.0.0.1", "localhost", "0.0.0.0", "::1", "[::1]"])
async def test_the_url_can_be_used_as_it_stands(address):
    if ":" in address and not HAS_IPV6:
        pytest.skip("this machine has no IPv6 loopback")
    host = await serve(App(), bind(address, 0, explicit=True))
    name, _, port = host.url.removeprefix("http://").rpartition(":")
    assert await asyncio.to_thread(fetch, int(port), host=name.strip("[]")) == "ok"
    await host.stop()


@pytest.mark.anyio
async def test_small_answers_do_not_wait_for_the_clients_acknowledgement():
    async with serving() as host:
        reader, writer = await asyncio.open_connection("127.0.0.1", host.port)
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        (connection,) = host._server.server_state.connections
        accepted = connection.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        writer.close()


@pytest.mark.anyio
async def test_a_request_that_came_before_the_server_is_answered():
    sock = bind("127.0.0.1", 0, explicit=True)
    early = asyncio.create_task(asyncio.to_thread(fetch, sock.getsockname()[1]))
    client = socket.create_connection(sock.getsockname())
    client.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    host = await serve(App(), sock)
    assert await early == "ok"
    assert (await asyncio.to_thread(client.recv, 65536)).startswith(b"HTTP/1.1 200")
    client.close()
    await host.stop()


@pytest.mark.anyio
async def test_signals_logging_and_loop_stay_as_they_were(capfd):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    loop, root = asyncio.get_running_loop(), list(logging.getLogger().handlers)
    async with serving() as host:
        assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
        assert await asyncio.to_thread(fetch, host.port) == "ok"
        assert host.loop is loop
    assert logging.getLogger().handlers == root
    assert capfd.readouterr() == ("", "")
    assert any("startup complete" in line for line in recent_logs())
    assert len(recent_logs()) <= uvicorn_server.LOG_RECORDS


@pytest.mark.anyio
@pytest.mark.parametrize("fail_at", ["startup", "startup.failed", "exit"])
async def test_a_failing_start_is_an_exception_and_frees_the_port(fail_at, capfd):
    sock = bind("127.0.0.1", 0, explicit=True)
    port = sock.getsockname()[1]
    with pytest.raises(HostingError, match="could not start") as caught:
        await serve(App(fail_at=fail_at), sock)
    assert "7" in str(caught.value) if fail_at == "exit" else "no such model" in str(caught.value)
    assert caught.value.__cause__ is not None
    assert capfd.readouterr() == ("", "")
    bind("127.0.0.1", port, explicit=True).close()


@pytest.mark.anyio
async def test_a_cancelled_start_leaves_no_task_and_no_port():
    sock = bind("127.0.0.1", 0, explicit=True)
    port = sock.getsockname()[1]
    tasks = asyncio.all_tasks()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(serve(App(fail_at="never"), sock), 0.05)
    assert asyncio.all_tasks() == tasks
    bind("127.0.0.1", port, explicit=True).close()


@pytest.mark.anyio
async def test_stop_ends_the_lifespan_frees_the_port_and_can_be_repeated():
    app, tasks = App(), asyncio.all_tasks()
    host = await serve(app, bind("127.0.0.1", 0, explicit=True))
    assert host.running
    waiting = asyncio.create_task(host.wait())
    await asyncio.gather(host.stop(), host.stop())
    await host.stop()
    await waiting
    assert app.ended
    assert not host.running
    assert asyncio.all_tasks() == tasks
    again = await serve(App(), bind("127.0.0.1", host.port, explicit=True))
    assert await asyncio.to_thread(fetch, host.port) == "ok"
    await again.stop()


@pytest.mark.anyio
async def test_stop_is_bounded_when_a_request_hangs():
    app = App()
    host = await serve(app, bind("127.0.0.1", 0, explicit=True))
    reader, writer = await asyncio.open_connection("127.0.0.1", host.port)
    writer.write(b"GET /hang HTTP/1.1\r\nHost: localhost\r\n\r\n")
    await app.hanging.wait()
    await host.stop(grace_s=0)
    assert app.cancelled.is_set()
    with contextlib.suppress(ConnectionError):
        await reader.read()
    writer.close()


@pytest.mark.anyio
async def test_stop_is_bounded_when_the_lifespan_hangs(monkeypatch):
    monkeypatch.setattr(uvicorn_server, "CANCEL_S", 0.3)
    host = await serve(App(fail_at="shutdown hangs"), bind("127.0.0.1", 0, explicit=True))
    await host.stop(grace_s=0)
    assert not host.running


@pytest.mark.anyio
async def test_websockets_work_have_a_size_limit_and_are_closed_by_stop():
    host = await serve(App(), bind("127.0.0.1", 0, explicit=True), ws_max_bytes=1000)
    url = f"ws://127.0.0.1:{host.port}/"
    async with connect(url, proxy=None) as client:
        await client.send("hello")
        assert await client.recv() == "hello"
        await client.send("x" * 1001)
        with pytest.raises(ConnectionClosed) as caught:
            await client.recv()
        assert caught.value.rcvd.code == 1009
    async with connect(url, proxy=None) as client:
        await host.stop()
        with pytest.raises(ConnectionClosed) as caught:
            await client.recv()
        assert caught.value.rcvd.code == 1012


class Flooding(App):
    """Sends more than its client's buffers hold, then says what it hears."""

    size = 24 * 2**20

    def __init__(self):
        super().__init__()
        self.heard = asyncio.Queue()

    async def echo(self, receive, send):
        await receive()
        await send({"type": "websocket.accept"})
        await send({"type": "websocket.send", "text": "x" * self.size})
        while True:
            message = await receive()
            self.heard.put_nowait(message)
            if message["type"] == "websocket.disconnect":
                return


def masked(opcode, payload, *, fin=True):
    """A frame as a client sends it, with a mask of zeros."""
    return bytes([0x80 * fin | opcode, 0x80 | len(payload), 0, 0, 0, 0]) + payload


HANDSHAKE = (
    b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


@pytest.mark.anyio
async def test_pings_of_a_client_that_takes_nothing_do_not_pile_up_and_what_else_it_says_is_heard():
    app = Flooding()
    async with serving(app) as host, asyncio.timeout(WAIT_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", host.port, limit=2**20)
        writer.write(HANDSHAKE)
        await reader.readuntil(b"\r\n\r\n")
        writer.transport.pause_reading()
        writer.write(masked(1, b"begun"))
        assert (await app.heard.get())["text"] == "begun"
        (connection,) = host._server.server_state.connections
        before = connection.transport.get_write_buffer_size()
        assert before > 2**16
        # As many as a connection may send in a second, with the messages.
        writer.write(masked(9, b"p" * 125) * 490)
        await writer.drain()
        writer.write(masked(9, b"the latest") + masked(1, b"cancel"))
        assert (await app.heard.get())["text"] == "cancel"
        assert connection.transport.get_write_buffer_size() <= before
        # It takes again: the message, whole, then the answers to what was read last.
        writer.transport.resume_reading()
        await reader.readexactly(10 + app.size)
        await reader.readuntil(b"\x8a\x0athe latest")
        writer.write(masked(9, b"and now"))
        assert await reader.readexactly(9) == b"\x8a\x07and now"
        writer.write(masked(8, b"\x03\xe8"))
        assert (await app.heard.get())["code"] == 1000
        assert await reader.read() == masked(8, b"")[:1] + b"\x02\x03\xe8"
        writer.close()


@pytest.mark.anyio
async def test_a_message_in_tiny_fragments_is_one_buffer_and_pings_between_them_are_none_of_it():
    async with serving(App()) as host, asyncio.timeout(WAIT_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", host.port, limit=2**20)
        writer.write(HANDSHAKE)
        await reader.readuntil(b"\r\n\r\n")
        (connection,) = host._server.server_state.connections
        for opcode in (1, *[0] * 399):
            writer.write(masked(opcode, b"ab", fin=False) + masked(9, b"p" * 125))
        while sum(map(len, connection.frames)) < 800:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert len(connection.frames) == 1
        while connection.held_bytes != 800:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        writer.write(masked(0, b"!"))
        whole = b"\x81\x7e\x03\x21" + b"ab" * 400 + b"!"
        assert (await reader.readuntil(b"ab!")).endswith(whole)
        assert connection.held_bytes == 0
        writer.write(masked(1, b"again"))
        assert (await reader.readuntil(b"again")).endswith(b"\x81\x05again")
        writer.close()


class Slow(App):
    """Lets a WebSocket wait before it is accepted."""

    def __init__(self):
        super().__init__()
        self.waiting, self.go_on = asyncio.Event(), asyncio.Event()

    async def echo(self, receive, send):
        self.waiting.set()
        await self.go_on.wait()
        await super().echo(receive, send)


@pytest.mark.anyio
async def test_a_bad_frame_before_the_handshake_is_answered_ends_the_connection_without_a_word(caplog):
    app, before = Slow(), set(recent_logs())
    async with serving(app) as host, asyncio.timeout(WAIT_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", host.port)
        writer.write(HANDSHAKE)
        await app.waiting.wait()
        writer.write(masked(3, b"no such opcode"))
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()
        app.go_on.set()
        while host._server.server_state.tasks:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
    assert not [line for line in set(recent_logs()) - before if "ERROR" in line or "Traceback" in line]


class LastWords(Flooding):
    async def echo(self, receive, send):
        await super().echo(receive, send)
        await send({"type": "websocket.send", "text": "and that is why"})


@pytest.mark.anyio
async def test_the_last_words_of_a_server_that_stops_reach_a_slow_client_before_the_close():
    app = LastWords()
    host = await serve(app, bind("127.0.0.1", 0, explicit=True))
    async with asyncio.timeout(WAIT_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", host.port, limit=2**20)
        writer.write(HANDSHAKE)
        await reader.readuntil(b"\r\n\r\n")
        writer.transport.pause_reading()
        stopping = asyncio.create_task(host.stop())
        assert (await app.heard.get())["code"] == 1012
        await asyncio.sleep(0.1)
        assert not stopping.done()
        writer.transport.resume_reading()
        (connection,) = host._server.server_state.connections
        came = b""
        while not connection.close_sent:
            came += await reader.read(2**16)
        # It has not seen the close yet, and may say what it likes.
        writer.write(masked(10, b"late"))
        await asyncio.sleep(0.1)
        writer.write(masked(1, b"later") * 3)
        came += await reader.read()
        assert len(came) == 10 + app.size + 17 + 4
        assert came.endswith(b"x" + b"\x81\x0fand that is why" + b"\x88\x02\x03\xf4")
        await stopping
        writer.close()


class Large(Flooding):
    async def answer(self, scope, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x" * self.size})


CHUNKED = b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("begin", "end"),
    [(HANDSHAKE, masked(8, b"\x03\xe8")), (HANDSHAKE, masked(9, b"ping")), (CHUNKED, b"no chunk\r\n")],
    ids=["close", "ping", "broken"],
)
async def test_a_client_that_takes_nothing_and_leaves_does_not_break_off_the_stop_for_others(begin, end):
    app = Large()
    host = await serve(app, bind("127.0.0.1", 0, explicit=True))
    async with asyncio.timeout(WAIT_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", host.port, limit=2**16)
        writer.write(begin)
        await reader.readuntil(b"\r\n\r\n")
        writer.transport.pause_reading()
        await asyncio.sleep(0.1)
        writer.write(end)
        await asyncio.sleep(0.1)
        await host.stop(grace_s=0.3)
        assert app.ended
        writer.transport.abort()


@pytest.mark.anyio
async def test_a_client_that_vanishes_while_it_takes_nothing_is_noticed():
    app = Flooding()
    async with serving(app) as host, asyncio.timeout(WAIT_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", host.port, limit=2**16)
        writer.write(HANDSHAKE)
        await reader.readuntil(b"\r\n\r\n")
        writer.transport.pause_reading()
        writer.write(masked(9, b"p" * 125) * 400 + masked(1, b"begun"))
        assert (await app.heard.get())["text"] == "begun"
        writer.transport.abort()
        assert (await app.heard.get())["type"] == "websocket.disconnect"


@pytest.mark.anyio
async def test_a_server_cannot_be_stopped_from_a_foreign_loop():
    async with serving() as host:
        with pytest.raises(HostingError, match="another loop"):
            await asyncio.to_thread(asyncio.run, host.stop())


@pytest.fixture
def thread():
    thread = LoopThread()
    thread.start()
    yield thread
    thread.stop()
    assert not thread._thread.is_alive()


def test_a_thread_serves_while_its_caller_is_busy(thread):
    host = thread.run(serve(App(), bind("127.0.0.1", 0, explicit=True)))
    assert fetch(host.port) == "ok"
    thread.run(host.stop())
    bind("127.0.0.1", host.port, explicit=True).close()


def test_the_thread_is_a_named_daemon(thread):
    assert thread._thread.daemon
    assert thread._thread.name == "lmx-lab-server"
    assert thread.loop.is_running()


def test_a_failing_start_on_a_thread_reaches_the_caller(thread):
    with pytest.raises(HostingError, match="no such model"):
        thread.run(serve(App(fail_at="startup"), bind("127.0.0.1", 0, explicit=True)))


def test_a_blocking_call_on_its_own_loop_is_refused(thread):
    async def misuse():
        return thread.run(asyncio.sleep(0))

    with pytest.raises(HostingError, match="never return"):
        thread.run(misuse())


def test_a_timeout_cancels_the_work_and_has_seen_it_end(thread):
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


def test_an_interrupt_cancels_the_work_waits_for_its_end_and_is_raised(thread):
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


def test_submitted_work_gives_its_result_and_can_be_cancelled(thread):
    assert thread.submit(asyncio.sleep(0, "done")).result(WAIT_S) == "done"
    started, ended = threading.Event(), threading.Event()
    future = thread.submit(until_cancelled(started.set, lambda _: ended.set()))
    assert started.wait(WAIT_S)
    assert future.cancel()
    assert ended.wait(WAIT_S)


def test_work_cancelled_before_its_first_step_leaves_no_trace(thread):
    busy, free = threading.Event(), threading.Event()

    async def occupy():
        busy.set()
        free.wait()

    thread.submit(occupy())
    assert busy.wait(WAIT_S)
    assert thread.submit(until_cancelled(lambda: None, print)).cancel()
    free.set()
    assert thread.run(asyncio.sleep(0, "fine")) == "fine"


def test_stop_cancels_what_is_left_and_tells_who_waits():
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


def test_a_thread_that_does_not_run_refuses_work():
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


def test_work_that_tries_to_exit_does_not_end_the_loop(thread):
    async def leave():
        sys.exit(3)

    with pytest.raises(HostingError, match="end the process"):
        thread.run(leave())
    assert thread.run(asyncio.sleep(0, "fine")) == "fine"


def test_stopping_the_thread_ends_connections_and_frees_the_port_of_a_server_left_running():
    thread = LoopThread()
    thread.start()
    app = App()
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
from tests.http.test_uvicorn_server import App, LoopThread, bind, serve, fetch
app, thread = App(), LoopThread()
thread.start()
host = thread.run(serve(app, bind("127.0.0.1", 0, explicit=True)))
atexit.register(lambda: print("ended", app.ended))
atexit.register(thread.stop)
atexit.register(host.stop_at_exit)
print(fetch(host.port))
"""


def test_a_script_with_a_running_server_exits_with_zero_and_an_ended_lifespan():
    done = script_result(SCRIPT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ok\nended True\n", "")


def test_a_script_without_atexit_exits_too():
    script = SCRIPT.replace("atexit.register", "(lambda *_: None)")
    done = script_result(script)
    assert (done.returncode, done.stdout) == (0, "ok\n")


# Nested loops patch asyncio for the whole process: these tests run in processes of their own.
NESTED = """
import asyncio, os, signal, sys
from tests.http.test_uvicorn_server import App, HostingError, bind, fetch, run_nested, serve, until_cancelled

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


def test_a_nested_call_serves_while_it_waits():
    assert nested("""
        host = run_nested(loop, serve(App(), bind("127.0.0.1", 0, explicit=True)))
        print(run_nested(loop, asyncio.to_thread(fetch, host.port)))
        run_nested(loop, host.stop())
        print(host.running)
    """) == ["ok", "False"]


def test_an_interrupted_nested_call_is_cancelled_and_the_loop_goes_on():
    assert nested("""
        before, ended = signal.getsignal(signal.SIGINT), []
        bystander = asyncio.create_task(asyncio.sleep(0.05, "bystander"))
        try:
            run_nested(loop, until_cancelled(lambda: os.kill(os.getpid(), signal.SIGINT), ended.append))
        except KeyboardInterrupt:
            print(*ended, signal.getsignal(signal.SIGINT) is before, await bystander)
    """) == ["cancelled", "True", "bystander"]


def test_a_nested_error_is_the_callers():
    assert nested("""
        try:
            run_nested(loop, serve(App(fail_at="startup"), bind("127.0.0.1", 0, explicit=True)))
        except HostingError as exc:
            print(type(exc.__cause__).__name__)
    """) == ["ValueError"]


def test_work_for_a_loop_of_another_thread_is_handed_over(thread):
    assert run_nested(thread.loop, asyncio.sleep(0, "slept")) == "slept"
    with pytest.raises(ValueError, match="no"):
        run_nested(thread.loop, failing())


def test_work_for_a_loop_that_its_thread_keeps_busy_is_given_up(thread, monkeypatch):
    monkeypatch.setattr("lmx_lab.portal.BEGIN_S", 0.05)
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


async def failing():
    raise ValueError("no")


def test_a_loop_of_another_thread_cannot_be_nested_in_a_running_one(thread):
    async def nest():
        return run_nested(thread.loop, asyncio.sleep(0))

    with pytest.raises(HostingError, match="another thread"):
        asyncio.run(nest())


def test_uvloop_cannot_be_nested():
    uvloop = pytest.importorskip("uvloop", reason="uvloop is not installed, so there is nothing to refuse")
    loop = uvloop.new_event_loop()
    with pytest.raises(HostingError, match="uvloop"):
        run_nested(loop, asyncio.sleep(0))
    loop.close()


def test_importing_patches_nothing():
    script = "import asyncio, lmx_lab.http.uvicorn_server, lmx_lab.portal; print(hasattr(asyncio, '_nest_patched'))"
    done = script_result(script)
    assert done.stdout == "False\n"
