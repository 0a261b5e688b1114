"""Tests of the HTTP client of the benchmark: times of arrival, documents, and all kinds of invalid responses."""

import pytest

from lmx_lab.bench.http_stream import ChatEndpoint, TimedRequest
from lmx_lab.errors import ConnectionLostError, EngineError, InvalidRequestError, UnreachableError
from tests.support.sockets import HEAD, answering, free_port, streamed, whole

pytestmark = pytest.mark.anyio
EVENTS = ("data: one\n\n", ": waits\n\n", "data: two\r\n\r\ndata:three\n\n")


async def events(url):
    async with TimedRequest(ChatEndpoint(url), b"{}") as request:
        request.send()
        return [event async for event in request.events()]


async def test_events_have_their_time_of_arrival():
    with answering(streamed(*EVENTS)) as server:
        async with TimedRequest(ChatEndpoint(f"{server.url}/v1/", "secret"), b'{"a":1}') as request:
            sent_at_s = request.send()
            found = [event async for event in request.events()]
    assert [event.data for event in found] == ["one", None, "two", "three"]
    moments = [sent_at_s, *(event.at_s for event in found)]
    assert moments == sorted(moments)
    head, _, body = server.requests[0].partition("\r\n\r\n")
    assert head.startswith("POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:")
    assert "authorization: Bearer secret" in head
    assert body == '{"a":1}'


async def test_a_refusal_raises_the_servers_error():
    with (
        answering(whole('{"error": {"message": "it broke", "code": 500}}', status="500 Oh")) as server,
        pytest.raises(EngineError, match="it broke"),
    ):
        await events(server.url)


@pytest.mark.parametrize(
    "answer",
    [
        whole("<html>", kind="text/html"),
        whole("<html>", status="404 Not Found", kind="text/html"),
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 what\r\n\r\n",
        b"x" * 100_000,
        HEAD.format(status="200 OK", kind="text/event-stream").encode() + b"content-encoding: gzip\r\n\r\n",
        HEAD.format(status="200 OK", kind="text/event-stream").encode() + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
    ],
)
async def test_a_response_of_another_program_is_an_error(answer):
    with answering(answer) as server, pytest.raises(UnreachableError, match=r"unlike a chat-format server") as raised:
        await events(server.url)
    assert not isinstance(raised.value, ConnectionLostError)


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200 OK\r\ncontent-t", streamed("data: one\n\n", end=False)])
async def test_a_connection_that_ends_too_early_is_an_error(answer):
    with answering(answer) as server, pytest.raises(ConnectionLostError):
        await events(server.url)


async def test_an_address_without_a_server_differs_from_a_lost_connection():
    with pytest.raises(UnreachableError, match="nothing answers") as raised:
        await events(f"http://127.0.0.1:{free_port()}")
    assert type(raised.value) is UnreachableError


@pytest.mark.slow
def test_an_invalid_address_is_refused():
    with pytest.raises(InvalidRequestError):
        ChatEndpoint("ftp://x")
    assert ChatEndpoint("https://host/hub/proxy/8400/v1").path == "/hub/proxy/8400/v1/chat/completions"
    assert ChatEndpoint("https://host").port == 443
