"""Tests of the transport for servers of this machine: which connections are used again, and its errors."""

import asyncio
from contextlib import asynccontextmanager

import httpx2
import pytest

from lmx_lab.client.plain_http import PlainConnection, PlainTransport
from tests.support.sockets import HEAD, streamed
from tests.support.sockets import answering as closing

pytestmark = pytest.mark.anyio
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n"


class _Server:
    """Sends the same bytes for each request, and closes no connection."""

    def __init__(self, answer):
        self.answer = answer
        self.connections = 0
        self.requests = []
        self.url = ""

    async def serve(self, reader, writer):
        self.connections += 1
        try:
            while True:
                self.requests.append(await reader.readuntil(b"\r\n\r\nbody"))
                writer.write(self.answer)
        except asyncio.IncompleteReadError:
            writer.close()


@asynccontextmanager
async def answering(answer):
    server = _Server(answer)
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    async with listener:
        yield server


def client(*, keepalive_s=60.0, read_s=30.0):
    timeout = httpx2.Timeout(30.0, read=read_s)
    return httpx2.AsyncClient(transport=PlainTransport(keepalive_s=keepalive_s), timeout=timeout)


@pytest.mark.parametrize(
    ("answer", "text", "is_reused"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi", "hi", True),
        (b"HTTP/1.1 204 No Content\r\n\r\n", "", True),
        (CHUNKED + b"\r\n2\r\nhi\r\n0\r\n\r\n", "hi", True),
        (CHUNKED + b"\r\n2\r\nhi\r\n0\r\nx-trailer: 1\r\n\r\n", "hi", True),
        (CHUNKED + b"\r\n2\r\nhi\r\n0\r\n\r\n, and more", "hi", False),
        (CHUNKED + b"connection: close\r\n\r\n2\r\nhi\r\n0\r\n\r\n", "hi", False),
        (b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nhi", "hi", False),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi, and more", "hi", False),
    ],
)
async def test_a_connection_is_used_again_if_the_response_is_complete(answer, text, is_reused):
    async with answering(answer) as server, client() as http:
        for _ in range(3):
            assert (await http.post(server.url, content=b"body")).text == text
        assert server.connections == (1 if is_reused else 3)


async def test_a_connection_that_was_idle_for_too_long_or_was_left_early_is_not_used_again():
    complete, part = (CHUNKED + b"\r\n2\r\nhi\r\n" + end for end in (b"0\r\n\r\n", b""))
    async with answering(complete) as server, client(keepalive_s=0.0) as http:
        for _ in range(2):
            await http.post(server.url, content=b"body")
        assert server.connections == 2
    async with answering(part) as server, client() as http:
        for _ in range(2):
            async with http.stream("POST", server.url, content=b"body") as response:
                assert await anext(response.aiter_bytes()) == b"hi"
        assert server.connections == 2


async def test_requests_have_all_header_fields_and_none_that_begins_another_field():
    async with answering(b"HTTP/1.1 204 No Content\r\n\r\n") as server, client() as http:
        await http.post(f"{server.url}/a%20b?c=d", content=b"body", headers={"x-own": "1"})
        head = server.requests[0].lower()
        assert head.startswith(b"post /a%20b?c=d http/1.1\r\nhost: 127.0.0.1:")
        assert b"\r\nx-own: 1\r\n" in head
        assert b"\r\ncontent-length: 4\r\n" in head
        with pytest.raises(httpx2.LocalProtocolError, match="line break"):
            await http.post(server.url, content=b"body", headers={"x-own": "1\r\nx-other: 2"})


async def test_errors_are_those_of_the_library():
    async with answering(b"") as server, client(read_s=0.01) as http:
        with pytest.raises(httpx2.ReadTimeout):
            await http.post(server.url, content=b"body")
    async with answering(b"SSH-2.0\r\n\r\n") as server, client() as http:
        with pytest.raises(httpx2.RemoteProtocolError, match="it starts with"):
            await http.post(server.url, content=b"body")
    async with client() as http:
        with pytest.raises(httpx2.ConnectError):
            await http.post(server.url, content=b"body")


async def responding(server):
    """Send a request, and return the connection after the head of the response was read."""
    url = httpx2.URL(server.url)
    _, connection = await asyncio.get_running_loop().create_connection(PlainConnection, url.host, url.port)
    connection.send(b"GET", b"/", [(b"host", url.netloc)], b"")
    await connection.head()
    return connection


async def body_of(answer):
    """Return the body of a response in pieces of any size."""
    with closing(answer) as server:
        connection = await responding(server)
        data = b""
        while piece := (await connection.body())[1]:
            data += piece
        await connection.aclose()
        return data


@pytest.mark.parametrize("length", [1, 7, 50, 1000])
async def test_chunked_coding_is_decoded_from_pieces_of_any_size(length):
    parts = [b"x" * 40, b"y", b"\r\n0\r\n\r\n", b"z" * 100]
    sent = b"".join(b"%x;name=value\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
    pieces = [sent[at : at + length] for at in range(0, len(sent), length)]
    assert await body_of([CHUNKED + b"\r\n", *pieces]) == b"".join(parts)


async def test_a_body_without_a_length_ends_with_the_connection():
    head = HEAD.format(status="200 OK", kind="text/plain").encode()
    assert await body_of([head + b"\r\n", b"some", b" text"]) == b"some text"


async def test_informational_responses_are_skipped():
    assert await body_of([b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n", streamed("hi")]) == b"hi"


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (b"-5\r\n", "illegal chunk header"),
        (b"x\r\n", "illegal chunk header"),
        (b"\r\n", "illegal chunk header"),
        (b"1" * 70_000, "the size field of a chunk is longer than 65536 bytes"),
    ],
)
async def test_an_invalid_chunk_size_is_refused(size, message):
    with pytest.raises(ValueError, match=message):
        await body_of(CHUNKED + b"\r\n" + size)


async def test_a_head_without_end_is_refused():
    with pytest.raises(ValueError, match="its head is longer than 65536 bytes"):
        await body_of(b"HTTP/1.1 200 OK\r\nx-long: " + b"x" * 100_000)


async def test_a_server_that_sends_more_than_is_read_has_to_wait():
    """Of 4 MB that are not read, a part is in the buffer, and the rest has not left the server."""
    with closing(streamed(*["x" * 100_000] * 40)) as server:
        connection = await responding(server)
        while connection.transport.is_reading():  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert connection.unread_bytes < 2_000_000
        left = 4_000_000
        while left:
            left -= len((await connection.body())[1])
        assert connection.unread_bytes == 0
        await connection.aclose()


async def test_other_tasks_run_while_buffered_data_is_read():
    with closing(streamed("x" * 4_000_000)) as server:
        connection = await responding(server)
        while connection.transport.is_reading():  # noqa: ASYNC110
            await asyncio.sleep(0)
        turns = []

        async def note():
            while True:
                turns.append(connection.unread_bytes)
                await asyncio.sleep(0)

        task = asyncio.create_task(note())
        while connection.unread_bytes:
            await connection.body()
        task.cancel()
        # The loop reads at most 256 KiB at once, so that a million bytes are at least four pieces.
        assert len(set(turns)) >= 4
        await connection.aclose()
