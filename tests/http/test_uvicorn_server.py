import asyncio
import contextlib
import errno
import logging
import signal
import socket
import sys
import time

import httpx2
import pytest
from fastapi import FastAPI
from starlette.requests import ClientDisconnect
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from lmx_lab.errors import HostingError, PortTakenError
from lmx_lab.http import Limits, uvicorn_server
from lmx_lab.http.streaming import EventStream
from lmx_lab.http.uvicorn_server import bind, recent_logs, serve
from tests.http.raw import HANDSHAKE, connect_raw, open_socket, running
from tests.support.sockets import HealthApp, answering, fetch

pytestmark = pytest.mark.anyio
WAIT_S = 60


def has_ipv6():
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as sock:
        sock.bind(("::1", 0))
        return True
    return False


HAS_IPV6 = has_ipv6()


@pytest.mark.parametrize("second", ["127.0.0.1", "0.0.0.0"])
def test_the_error_for_a_used_explicit_port_names_the_port_and_the_next_step(second):
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
        with pytest.raises(PortTakenError, match=rf"port {port} .* another program; use port 0"):
            bind(second, port, explicit=True)


@pytest.mark.parametrize("system", ["linux", "darwin"])
def test_the_next_free_port_replaces_a_used_preferred_port(system, monkeypatch):
    """On other systems than Linux, a listening program is found by connecting to it."""
    monkeypatch.setattr(sys, "platform", system)
    with bind("127.0.0.1", 0, explicit=True) as first:
        port = first.getsockname()[1]
        with bind("127.0.0.1", port, explicit=False) as second:
            assert port < second.getsockname()[1] <= port + uvicorn_server.PORTS_TRIED


def test_the_error_names_all_ports_that_were_tried():
    with bind("127.0.0.1", 0, explicit=True) as first:
        port = first.getsockname()[1]
        with bind("127.0.0.1", port + 1, explicit=True), pytest.raises(PortTakenError, match=rf"ports {port} to"):
            bind("127.0.0.1", port, explicit=False, ports_tried=1)


@pytest.mark.parametrize(
    ("host", "port"), [("192.0.2.1", 0), ("no-such-host.invalid", 0), ("a" * 300, 0), ("127.0.0.1", 65536), ("::zz", 0)]
)
def test_an_address_of_no_interface_is_a_hosting_error(host, port):
    with pytest.raises(HostingError):
        bind(host, port, explicit=True)


def test_a_forbidden_port_is_a_hosting_error(monkeypatch):
    def refuse(sock, address):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(socket.socket, "bind", refuse)
    with pytest.raises(HostingError, match="Permission denied"):
        bind("127.0.0.1", 80, explicit=False)


def test_a_program_on_the_port_that_does_not_respond_is_another_program():
    with bind("127.0.0.1", 0, explicit=True) as sock, pytest.raises(PortTakenError, match="another program"):
        bind("127.0.0.1", sock.getsockname()[1], explicit=True, response_s=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head", "body", "owner"),
    [
        ("x-lmx-lab: 1\r\n", "{}", "another LMX Lab server"),
        ("", '{"name": "lmx-lab"}', "another LMX Lab server"),
        ("", '{"name": "other"}', "another program"),
    ],
)
def test_the_program_on_the_port_is_named_in_the_error(head, body, owner):
    def answer_late():
        time.sleep(0.6)  # busy, for longer than a connection may take
        yield f"HTTP/1.1 200 OK\r\n{head}\r\n{body}".encode()

    with answering(answer_late()) as server, pytest.raises(PortTakenError, match=owner):
        bind("127.0.0.1", int(server.url.rpartition(":")[2]), explicit=True, response_s=WAIT_S)


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost", "0.0.0.0", "::1", "[::1]"])
async def test_the_url_can_be_used_directly(address):
    if ":" in address and not HAS_IPV6:
        pytest.skip("this machine has no IPv6 loopback")
    host = await serve(HealthApp(), bind(address, 0, explicit=True))
    name, _, port = host.url.removeprefix("http://").rpartition(":")
    assert await asyncio.to_thread(fetch, int(port), host=name) == "ok"
    await host.stop()


async def test_small_responses_do_not_wait_for_acknowledgements_of_the_client():
    async with running(HealthApp()) as host, open_socket(host):
        (connection,) = host._server.server_state.connections
        accepted = connection.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def test_a_request_sent_before_the_server_started_is_answered():
    sock = bind("127.0.0.1", 0, explicit=True)
    early = asyncio.create_task(asyncio.to_thread(fetch, sock.getsockname()[1]))
    client = socket.create_connection(sock.getsockname())
    client.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    host = await serve(HealthApp(), sock)
    assert await early == "ok"
    assert (await asyncio.to_thread(client.recv, 65536)).startswith(b"HTTP/1.1 200")
    client.close()
    await host.stop()


async def test_signal_handlers_logging_and_event_loop_are_unchanged(capfd):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    loop, root = asyncio.get_running_loop(), list(logging.getLogger().handlers)
    async with running(HealthApp()) as host:
        assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
        assert await asyncio.to_thread(fetch, host.port) == "ok"
        assert host.loop is loop
    assert logging.getLogger().handlers == root
    assert capfd.readouterr() == ("", "")
    assert any("startup complete" in line for line in recent_logs())
    assert len(recent_logs()) <= 500


@pytest.mark.parametrize("fail_at", ["startup", "startup.failed", "exit"])
async def test_an_error_at_startup_is_raised_and_frees_the_port(fail_at, capfd):
    sock = bind("127.0.0.1", 0, explicit=True)
    port = sock.getsockname()[1]
    with pytest.raises(HostingError, match="could not start") as caught:
        await serve(HealthApp(fail_at=fail_at), sock)
    assert "7" in str(caught.value) if fail_at == "exit" else "no such model" in str(caught.value)
    assert caught.value.__cause__ is not None
    assert capfd.readouterr() == ("", "")
    bind("127.0.0.1", port, explicit=True).close()


async def test_a_cancelled_start_leaves_no_task_and_no_port():
    sock = bind("127.0.0.1", 0, explicit=True)
    port = sock.getsockname()[1]
    tasks = asyncio.all_tasks()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(serve(HealthApp(fail_at="never"), sock), 0.05)
    assert asyncio.all_tasks() == tasks
    bind("127.0.0.1", port, explicit=True).close()


async def test_stop_ends_the_lifespan_frees_the_port_and_is_idempotent():
    app, tasks = HealthApp(), asyncio.all_tasks()
    host = await serve(app, bind("127.0.0.1", 0, explicit=True))
    assert host.running
    waiting = asyncio.create_task(host.wait())
    await asyncio.gather(host.stop(), host.stop())
    await host.stop()
    await waiting
    assert app.ended
    assert not host.running
    assert asyncio.all_tasks() == tasks
    again = await serve(HealthApp(), bind("127.0.0.1", host.port, explicit=True))
    assert await asyncio.to_thread(fetch, host.port) == "ok"
    await again.stop()


async def test_stop_takes_a_limited_time_if_a_request_hangs():
    app = HealthApp()
    async with running(app) as host, connect_raw(host) as client:
        client.send(b"GET /hang HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await app.hanging.wait()
        await host.stop(grace_s=0)
        assert app.cancelled.is_set()
        await client.read_to_end()


async def test_stop_takes_a_limited_time_if_the_lifespan_hangs():
    async with running(HealthApp(fail_at="shutdown hangs"), Limits(cancel_s=0.3)) as host:
        await host.stop(grace_s=0)
        assert not host.running


async def test_websockets_have_a_size_limit_and_are_closed_by_stop():
    async with running(HealthApp(), ws_max_bytes=1000) as host:
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


class Flooding(HealthApp):
    """Sends more than the buffers of its client hold, then records the messages that it receives."""

    size = 24 * 2**20

    def __init__(self):
        super().__init__()
        self.received = asyncio.Queue()

    async def echo(self, receive, send):
        await receive()
        await send({"type": "websocket.accept"})
        await send({"type": "websocket.send", "text": "x" * self.size})
        while True:
            message = await receive()
            self.received.put_nowait(message)
            if message["type"] == "websocket.disconnect":
                return


def masked(opcode, payload, *, fin=True):
    """Return a frame of a client, with a mask of zeros."""
    return bytes([0x80 * fin | opcode, 0x80 | len(payload), 0, 0, 0, 0]) + payload


@pytest.mark.slow
async def test_pings_of_a_client_that_does_not_read_are_not_queued_and_its_messages_are_received():
    app = Flooding()
    async with running(app) as host, open_socket(host) as client:
        reader, writer = client.reader, client.writer
        writer.transport.pause_reading()
        writer.write(masked(1, b"begun"))
        assert (await app.received.get())["text"] == "begun"
        (connection,) = host._server.server_state.connections
        before = connection.transport.get_write_buffer_size()
        assert before > 2**16
        # With the messages, as many as a connection may send in a second.
        writer.write(masked(9, b"p" * 125) * 490)
        await writer.drain()
        writer.write(masked(9, b"the latest") + masked(1, b"cancel"))
        assert (await app.received.get())["text"] == "cancel"
        assert connection.transport.get_write_buffer_size() <= before
        # The client reads again: it receives the whole message, then the pong to the last ping.
        writer.transport.resume_reading()
        await reader.readexactly(10 + app.size)
        await reader.readuntil(b"\x8a\x0athe latest")
        writer.write(masked(9, b"and now"))
        assert await reader.readexactly(9) == b"\x8a\x07and now"
        writer.write(masked(8, b"\x03\xe8"))
        assert (await app.received.get())["code"] == 1000
        assert await reader.read() == masked(8, b"")[:1] + b"\x02\x03\xe8"


async def test_tiny_fragments_are_joined_in_one_buffer_without_the_pings_between_them():
    async with running(HealthApp()) as host, open_socket(host) as client:
        reader, writer = client.reader, client.writer
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


class Slow(HealthApp):
    """Waits before it accepts a WebSocket."""

    def __init__(self):
        super().__init__()
        self.waiting, self.accept = asyncio.Event(), asyncio.Event()

    async def echo(self, receive, send):
        self.waiting.set()
        await self.accept.wait()
        await super().echo(receive, send)


async def test_an_invalid_frame_before_the_end_of_the_handshake_closes_the_connection_without_a_log(caplog):
    app, before = Slow(), set(recent_logs())
    async with running(app) as host, connect_raw(host) as client, asyncio.timeout(WAIT_S):
        client.send(HANDSHAKE)
        await app.waiting.wait()
        client.send(masked(3, b"no such opcode"))
        assert await client.read_to_end() == b""
        app.accept.set()
        while host._server.server_state.tasks:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
    assert not [line for line in set(recent_logs()) - before if "ERROR" in line or "Traceback" in line]


class FinalMessage(Flooding):
    async def echo(self, receive, send):
        await super().echo(receive, send)
        await send({"type": "websocket.send", "text": "and that is why"})


@pytest.mark.slow
async def test_a_slow_client_receives_the_last_message_of_a_stopping_server_before_the_close():
    app = FinalMessage()
    async with running(app) as host, open_socket(host) as client:
        reader, writer = client.reader, client.writer
        writer.transport.pause_reading()
        stopping = asyncio.create_task(host.stop(WAIT_S))
        assert (await app.received.get())["code"] == 1012
        await asyncio.sleep(0.1)
        assert not stopping.done()
        writer.transport.resume_reading()
        (connection,) = host._server.server_state.connections
        received = bytearray()
        while not connection.close_sent:
            received += await reader.read(2**16)
        # The client has not received the close frame yet and may still send.
        writer.write(masked(10, b"late"))
        await asyncio.sleep(0.1)
        writer.write(masked(1, b"later") * 3)
        received += await reader.read()
        assert len(received) == 10 + app.size + 17 + 4
        assert received.endswith(b"x" + b"\x81\x0fand that is why" + b"\x88\x02\x03\xf4")
        await stopping


class Large(Flooding):
    async def answer(self, scope, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x" * self.size})


CHUNKED = b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("begin", "end"),
    [(HANDSHAKE, masked(8, b"\x03\xe8")), (HANDSHAKE, masked(9, b"ping")), (CHUNKED, b"no chunk\r\n")],
    ids=["close", "ping", "broken"],
)
async def test_a_client_that_does_not_read_and_disconnects_does_not_interrupt_the_stop(begin, end):
    app = Large()
    async with running(app) as host, connect_raw(host) as client, asyncio.timeout(WAIT_S):
        client.send(begin)
        await client.reader.readuntil(b"\r\n\r\n")
        client.writer.transport.pause_reading()
        await asyncio.sleep(0.1)
        client.send(end)
        await asyncio.sleep(0.1)
        await host.stop(grace_s=0.3)
        assert app.ended
        client.writer.transport.abort()


async def test_the_disconnect_of_a_client_that_does_not_read_is_detected():
    app = Flooding()
    async with running(app) as host, open_socket(host) as client:
        writer = client.writer
        writer.transport.pause_reading()
        writer.write(masked(9, b"p" * 125) * 400 + masked(1, b"begun"))
        assert (await app.received.get())["text"] == "begun"
        writer.transport.abort()
        assert (await app.received.get())["type"] == "websocket.disconnect"


async def test_a_server_cannot_be_stopped_from_another_event_loop():
    async with running(HealthApp()) as host:
        with pytest.raises(HostingError, match="another loop"):
            await asyncio.to_thread(asyncio.run, host.stop())


async def test_a_stream_that_waits_has_keep_alives_also_on_another_server():
    api = FastAPI()
    api.state.limits = Limits(keep_alive_s=0.01)

    async def texts():
        for text in ("first\n\n", "last\n\n"):
            yield text
            await asyncio.sleep(0.1)

    @api.get("/")
    async def stream() -> EventStream:
        return EventStream(texts(), keep_alive=lambda: ": waiting\n\n")

    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(api), base_url="http://other") as http:
        first, *waiting, last, end = (await http.get("/")).text.split("\n\n")
    assert (first, {*waiting}, end) == ("first", {": waiting", "last"}, "")
    assert last == ": waiting"


async def test_a_keep_alive_that_another_server_cannot_send_ends_the_stream():
    api = FastAPI()
    api.state.limits = Limits(keep_alive_s=0.01)
    closed = asyncio.Event()

    async def texts():
        try:
            yield "first\n\n"
            await asyncio.sleep(60)
        finally:
            closed.set()

    @api.get("/")
    async def stream() -> EventStream:
        return EventStream(texts(), keep_alive=lambda: ": waiting\n\n")

    async def send(message):
        if b"waiting" in message.get("body", b""):
            raise OSError("the client has disconnected")

    scope = {"type": "http", "asgi": {"version": "3.0", "spec_version": "2.4"}, "method": "GET", "path": "/"}
    with pytest.raises(ClientDisconnect):
        await asyncio.wait_for(api({**scope, "query_string": b"", "headers": []}, asyncio.Event().wait, send), 30)
    assert closed.is_set()
