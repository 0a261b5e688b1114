"""Tests of the list of running requests, beyond what formats and labs share."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from lmx_lab.broadcast import Feed
from lmx_lab.engine import Caller
from lmx_lab.errors import RequestStoppedError
from lmx_lab.server.requests import Requests
from lmx_lab.wire.chat import ChatRequest
from tests.support.asking import CHAT, ENDLESS, echo_body, refused
from tests.support.labs import PACE, serving
from tests.support.waiting import auntil, until

ELSEWHERE = {"x-forwarded-for": "192.168.1.6"}
BODY = echo_body(**ENDLESS)


@pytest.fixture(scope="module")
def lab(echo_home):
    with serving(echo_home, "echo", slots=1, echo_tokens_per_s=PACE) as lab:
        yield lab


def listed(http, headers=None):
    return http.get("/admin/requests", headers=headers).json()["requests"]


def stop(http, id_, headers=None):
    return http.post("/admin/requests/stop", json={"id": id_}, headers=headers)


def test_callers_on_other_machines_see_and_stop_only_their_own_requests(lab, http):
    with ThreadPoolExecutor() as threads:
        here = threads.submit(http.post, CHAT, json=BODY)
        until(lambda: len(listed(http)) == 1)
        there = threads.submit(http.post, CHAT, json=BODY, headers=ELSEWHERE)
        until(lambda: len(listed(http)) == 2)
        until(lambda: [each["state"] for each in listed(http)] == ["running", "queued"])
        first, second = listed(http)
        assert [first["client"], second["client"]] == ["127.0.0.1", "127.0.0.1 192.168.1.6"]
        assert [each["id"] for each in listed(http, ELSEWHERE)] == [second["id"]]
        refused(stop(http, first["id"], ELSEWHERE), 404, "not-found")
        message = refused(stop(http, "req_"), 404, "not-found")["message"]
        assert "2 running requests have ids that begin with 'req_'" in message
        # The beginning of an id is sufficient; a queued request never gets a slot.
        for request, waiting in ((second, there), (first, here)):
            assert stop(http, request["id"][:12]).json() == {"success": True, "id": request["id"]}
            answer = waiting.result()
            assert refused(answer, 410, "request-stopped")["retryable"] is False
            assert answer.headers["x-request-id"] == request["id"]
    assert listed(http) == []


def test_all_choices_and_prompts_of_a_request_are_one_request(http):
    body = {"prompt": ["one two three", "four"], "n": 2, "model": "echo", **ENDLESS}
    with ThreadPoolExecutor() as threads:
        answer = threads.submit(http.post, "/v1/completions", json=body)
        until(lambda: any(each["completion_tokens"] for each in listed(http)))
        (request,) = listed(http)
        assert request["prompt_tokens"] > 0
        stop(http, request["id"])
        refused(answer.result(), 410, "request-stopped")
    assert listed(http) == []


def test_steps_of_other_work_are_listed_as_internal(lab, http):
    request = ChatRequest.model_validate(BODY)
    answer = lab.backend.portal.run(lab.backend.generate(request))
    step = lab.backend.portal.run(lab.backend.generate(request, internal=True))
    assert [each["kind"] for each in listed(http)] == ["chat", "internal"]
    for each in listed(http):
        stop(http, each["id"])
    for each in (answer, step):
        with pytest.raises(RequestStoppedError):
            lab.backend.portal.run(each.read())
    until(lambda: listed(http) == [])


@pytest.mark.anyio
async def test_embeddings_and_requests_that_wait_for_their_model_can_be_stopped():
    # Work that never ends, because embeddings of small models end before they can be listed.
    requests, never = Requests(Feed()), asyncio.Event()
    embedding, waiting = (
        asyncio.create_task(requests.wait(requests.begin(Caller(), kind=kind, model="m"), never.wait()))
        for kind in ("embedding", "chat")
    )
    await auntil(lambda: len(requests.read()) == 2)
    assert [(each.kind, each.state) for each in requests.read()] == [("embedding", "running"), ("chat", "queued")]
    assert requests.stop("lab_1") == "lab_1"
    with pytest.raises(RequestStoppedError):
        await embedding
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert requests.read() == []


@pytest.mark.anyio
async def test_requests_that_begin_within_microseconds_are_listed_oldest_first():
    requests = Requests(Feed())
    parts = [requests.begin(Caller(), kind="chat", model="m") for _ in range(200)]
    waits = [asyncio.create_task(requests.wait(part, asyncio.sleep(60))) for part in parts]
    await auntil(lambda: len(requests.read()) == len(parts))
    assert [each.id for each in requests.read()] == [part.id for part in parts]
    for wait in waits:
        wait.cancel()
    await asyncio.gather(*waits, return_exceptions=True)
