"""Tests with many simultaneous clients, some of which disconnect or do not read: the others are not affected."""

import asyncio
from collections import Counter

import httpx2
import pytest

from tests.support.asking import chat_body
from tests.support.labs import serving, wait_until_idle

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
