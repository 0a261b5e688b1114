"""Tests with many simultaneous clients, some of which disconnect or do not read: the others are not affected."""

import asyncio
import json
import socket
from collections import Counter

import httpx2
import pytest

from tests.support.asking import chat_body, events
from tests.support.labs import manager_of, serving, wait_until_idle
from tests.support.waiting import until

pytestmark = pytest.mark.long

LONG = " ".join(f"word{number}" for number in range(600))


@pytest.fixture(scope="module")
def busy(long_home):
    # A client that pauses keeps its stream, however long the generation takes on a busy machine.
    with serving(long_home, "tiny-long", slots=8, queue_limit=64, slow_client_s=600) as lab:
        yield lab


def post_all(lab, bodies, *, timeout_s=120):
    """Send all requests at the same time. The response is None if the client's timeout was exceeded."""

    async def one(client, body):
        try:
            return await client.post("/v1/chat/completions", json=body)
        except httpx2.TimeoutException:
            return None

    async def post_concurrently():
        limits = httpx2.Limits(max_connections=len(bodies))
        async with httpx2.AsyncClient(base_url=lab.url, timeout=timeout_s, limits=limits) as client:
            return list(await asyncio.gather(*(one(client, body) for body in bodies)))

    return asyncio.run(post_concurrently())


def test_64_simultaneous_clients_are_served_by_8_slots(busy):
    bodies = [chat_body(model="default", max_tokens=20, seed=at, temperature=1, ignore_eos=True) for at in range(64)]
    responses = post_all(busy, bodies)
    assert Counter(response and response.status_code for response in responses) == {200: 64}
    usages = [response.json()["usage"] for response in responses if response]
    assert {usage["completion_tokens"] for usage in usages} == {20}
    alone = post_all(busy, bodies[:1])[0]
    assert alone.json()["choices"] == responses[0].json()["choices"]


def test_200_cancelled_long_requests_do_not_affect_the_next_one(busy):
    bodies = [
        chat_body(model="default", messages=[{"role": "user", "content": f"{at} {LONG}"}], max_tokens=4000)
        for at in range(200)
    ]
    responses = post_all(busy, bodies, timeout_s=0.5)
    assert {response and response.status_code for response in responses} <= {None, 429}
    wait_until_idle(busy)
    answered = post_all(busy, [chat_body(model="default")])[0]
    assert answered.json()["usage"]["completion_tokens"] == 8


def test_a_client_that_pauses_reading_receives_everything_and_does_not_delay_others(busy):
    assert busy.server.port is not None
    body = json.dumps(chat_body(model="default", stream=True, max_tokens=3000, ignore_eos=True)).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{busy.server.port}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with socket.socket() as reader:
        # The buffer is so small that the server's buffer is full after a few chunks.
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.connect(("127.0.0.1", busy.server.port))
        reader.sendall(head.encode() + body)
        until(lambda: manager_of(busy).snapshot.active_requests == 1)
        served = post_all(busy, [chat_body(model="default") for _ in range(3)])
        assert [response and response.status_code for response in served] == [200] * 3
        # The engine does not wait for the client: the generation ends and frees its slot before the client reads.
        wait_until_idle(busy)
        received = b"".join(iter(lambda: reader.recv(65536), b""))
    chunks = [json.loads(event) for event in _unchunked(received) if event != "[DONE]"]
    text = "".join(choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"])
    whole = post_all(busy, [chat_body(model="default", max_tokens=3000, ignore_eos=True)])[0]
    assert text == whole.json()["choices"][0]["message"]["content"]
    assert received.rstrip().endswith(b"0")
    assert "[DONE]" in _unchunked(received)


def _unchunked(response):
    """Return the events of a chunked HTTP/1.1 response."""
    rest, data = response.partition(b"\r\n\r\n")[2], b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        data, rest = data + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    return events(data.decode())
