"""Tests of the inference server's async client against a real server, and against servers that misbehave."""

import asyncio
import base64
import gzip
import json
import logging
import re
from contextlib import aclosing, asynccontextmanager
from typing import get_args

import httpx2
import numpy as np
import pytest

from lmx_lab import errors
from lmx_lab.arguments import chat_request
from lmx_lab.client import AsyncLabClient, Remark, UnknownLabEvent, as_array
from lmx_lab.client.connection import QUICK_S, SHORT_BYTES, HttpConnection
from lmx_lab.client.lab import (
    MAX_COMPONENTS,
    Include,
    KnownEvent,
    lab_event,
    max_embeddings_bytes,
    max_rerank_bytes,
    run_with_progress,
)
from lmx_lab.server.events import EXTRAS
from lmx_lab.server.openapi import EVENTS
from lmx_lab.values.models import ModelEvent
from lmx_lab.wire.admin import PAGE_REQUESTS, Heartbeat, NotReady, RequestEvent, Sample, Throughput
from lmx_lab.wire.chat import ChatRequest
from lmx_lab.wire.embeddings import EmbeddingItem, EmbeddingList, EmbeddingsBody, EncodingUsage
from lmx_lab.wire.rerank import RerankBody, RerankItem, RerankResults
from tests.support.asking import ENDLESS, echo_request, invalid
from tests.support.labs import KEY, is_idle, serving
from tests.support.sockets import Endless, answering, streamed, whole
from tests.support.waiting import WAIT_S, auntil

pytestmark = pytest.mark.anyio


def chunk(text="a", **changes):
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
    body = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "system_fingerprint": "f"}
    return f"data: {json.dumps({**body, 'choices': [choice], **changes})}\n\n"


DONE = "data: [DONE]\n\n"


@asynccontextmanager
async def answered(*answers):
    """A client of a server with these answers, and the server."""
    with answering(*answers) as server:
        async with AsyncLabClient(server.url) as client:
            yield client, server


# --- requests


@pytest.mark.parametrize(
    "form",
    [
        {"type": "text"},
        {"type": "json_object", "schema": {"type": "object"}},
        {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}},
        {"type": "regex", "regex": "a+"},
        {"type": "grammar", "grammar": 'start: "a"'},
    ],
    ids=lambda form: form["type"],
)
async def test_a_request_arrives_unchanged(form):
    """Fields with an alias, fields that are converted, and fields that were not set."""
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    call = {"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"x": "\u2028"}'}}
    history = [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": None, "tool_calls": [call], "parsed": {"x": 1}},
        {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "2"}]},
    ]
    choice = {"type": "function", "function": {"name": "add"}}
    fields = {"tools": [tool], "tool_choice": choice, "response_format": form, "logit_bias": {5: -1.5}, "seed": 10**30}
    body = chat_request(history, {**fields, "stop": ("x", "y"), "chat_template_kwargs": {"enable_thinking": False}})
    async with answered(whole("{}", status="500 Oops")) as (client, server):
        with pytest.raises(errors.UnreachableError):
            await client.chat(body)
    sent = json.loads(server.requests[0].partition("\r\n\r\n")[2])
    assert "temperature" not in sent
    assert sent.pop("stream") is False
    assert ChatRequest.model_validate(sent) == body


async def test_models_are_listed_loaded_and_unloaded(echo_home):
    with serving(echo_home, None) as lab:
        async with AsyncLabClient(lab.url) as client:
            async with aclosing(client.events(["models"])) as events:
                assert isinstance(await anext(events), Throughput)
                assert (await client.load("echo")).model == "echo"
                async for event in events:
                    if isinstance(event, ModelEvent) and event.stage == "loaded":
                        break
            assert event.model == "echo"
            records = (await client.models()).models
            assert {record.id: record.loaded for record in records} == {"echo": True, "other": False}
            assert (await client.ready()).model == "echo"
            assert await client.version()
            assert (await client.unload()).freed_vram_gb > 0
            not_ready = await client.ready()
            assert isinstance(not_ready, NotReady)
            assert (not_ready.ready, not_ready.error.code) == (False, "no-model-loaded")
            assert (await client.unload()).freed_vram_gb == 0


async def test_texts_are_embedded_and_documents_are_ranked(echo_home):
    body = EmbeddingsBody(model="default", input=["The sea is blue.", "Bread is baked."])
    documents = RerankBody(model="default", query="How salty is the sea?", documents=["Bread is baked.", "Sea salt."])
    with serving(echo_home, "echo") as lab:
        here = await lab.aembed(["The sea is blue.", "Bread is baked."])
        async with AsyncLabClient(lab.url) as client:
            numbers = as_array(await client.embed(body))
            exact = as_array(await client.embed(body.model_copy(update={"encoding_format": "base64"})))
            ranked = await client.rerank(documents)
    assert (exact.dtype, exact.flags.writeable) == (np.float32, True)
    np.testing.assert_array_equal(exact, here)
    np.testing.assert_allclose(numbers, here, atol=1e-6)
    assert [item.index for item in ranked.results] == [1, 0]
    assert ranked.method == "cosine"


@pytest.mark.parametrize("rows", [[[1.0], [1.0, 2.0]], ["AAA"], ["é"], []])
def test_vectors_that_do_not_form_an_array_are_refused(rows):
    data = [{"index": index, "embedding": row} for index, row in enumerate(rows)]
    usage = {"prompt_tokens": 1, "total_tokens": 1}
    with pytest.raises(errors.UnreachableError):
        as_array(EmbeddingList.model_validate({"data": data, "model": "m", "usage": usage}))


async def test_samples_and_ends_of_requests_are_events(client):
    seen = []
    async with aclosing(client.events(["samples", "requests"])) as events:
        async for event in events:
            seen.append(event)
            if isinstance(event, Sample) and len(seen) < 5:
                await client.chat(echo_request(max_tokens=2))
            if isinstance(event, RequestEvent):
                break
    assert {Throughput, Sample, RequestEvent} <= {type(event) for event in seen}
    assert (seen[-1].finish_reason, seen[-1].completion_tokens) == ("length", 2)


async def test_events_end_when_the_server_stops(echo_home):
    with serving(echo_home, None) as lab:
        async with AsyncLabClient(lab.url) as client:
            events = client.events()
            await anext(events)
            stop = asyncio.create_task(lab.astop())
            assert [event async for event in events if isinstance(event, UnknownLabEvent)] == []
            await stop


# --- cancelling


async def test_closing_the_client_frees_the_slot(lab):
    client = AsyncLabClient(lab.url, api_key=KEY)
    stream = client.stream(echo_request(**ENDLESS))
    await anext(stream)
    assert not is_idle(lab)
    await client.aclose()
    await client.aclose()
    await auntil(lambda: is_idle(lab))
    with pytest.raises(errors.ConnectionLostError):
        async for _ in stream:
            pass


# --- errors of the server


async def test_errors_of_models_and_arguments_are_raised(client):
    for progress in (None, print):
        with pytest.raises(errors.ModelNotFoundError):
            await client.load("no-such", progress=progress)
        with invalid("model"):
            await client.load("", progress=progress)
    with invalid("engine", "runs on echo and not on mlx"):
        await client.load("echo", engine="mlx")
    with invalid("include"):
        await anext(client.events(["nope"]))


@pytest.mark.parametrize("key", [None, "wrong-sesame-43"])
async def test_a_missing_or_wrong_key_is_reported_without_showing_it(lab, key, caplog):
    caplog.set_level(logging.DEBUG)
    async with AsyncLabClient(lab.url, api_key=key) as client:
        assert (await client.ready()).model == "echo"
        for ask in (
            client.models(),
            client.chat(echo_request()),
            anext(client.stream(echo_request())),
            anext(client.stream(echo_request(), over="websocket")),
            anext(client.events()),
        ):
            with pytest.raises(errors.UnauthorizedError) as caught:
                await ask
            assert "api_key=" in str(caught.value)
            assert "sesame" not in f"{caught.value!r} {caught.value.__context__!r}"
        assert "sesame" not in f"{client!r} {client!s}"
    assert "sesame" not in caplog.text


# --- addresses


async def test_a_proxys_prefix_is_kept_before_every_route():
    with answering(whole("{}")) as server:
        async with AsyncLabClient(f"{server.url}/user/x/proxy/8400/") as client:
            await client.version()
            for ask in (
                client.models(),
                client.chat(echo_request()),
                anext(client.events()),
                anext(client.stream(echo_request())),
            ):
                with pytest.raises(errors.UnreachableError):
                    await ask
    paths = [request.split()[1].removeprefix("/user/x/proxy/8400") for request in server.requests]
    chat = "/v1/chat/completions"
    assert paths == ["/healthz", "/admin/models", chat, "/admin/events", chat]
    # The only value with which jupyter-server-proxy passes events on without buffering them.
    accepted = ["accept: text/event-stream\r\n" in request.lower() for request in server.requests]
    assert accepted == [False, False, False, True, True]


async def test_all_requests_of_a_conversation_have_the_same_header_for_proxies():
    first = [{"role": "system", "content": "s"}, {"role": "user", "content": "Hello"}]
    later = [*first, {"role": "assistant", "content": "Hi"}, {"role": "user", "content": "Bye"}]
    other = [first[0], {"role": "user", "content": "Hello?"}]
    async with answered(whole("{}")) as (client, server):
        for messages in (first, later, other):
            body = chat_request(messages, {})
            for ask in (client.chat(body), anext(client.stream(body))):
                with pytest.raises(errors.UnreachableError):
                    await ask
    sent = [re.findall(r"x-session-id: (\w{16})\r", request.lower())[0] for request in server.requests]
    assert len(set(sent[:4])) == len(set(sent[4:])) == 1
    assert sent[0] != sent[4]


# --- servers that misbehave


async def parts(client):
    return [part async for part in client.stream_with_remarks(echo_request())]


async def test_remarks_are_returned_between_chunks():
    sent = streamed(": queued\n\n", chunk("a"), ": prompt 1/2 tok", "ens\n\n", chunk("b"), DONE)
    async with answered(sent) as (client, _):
        found = await parts(client)
        assert [part.text if isinstance(part, Remark) else part.choices[0].delta.content for part in found] == [
            *("queued", "a", "prompt 1/2 tokens", "b")
        ]
        assert len([chunk async for chunk in client.stream(echo_request())]) == 2


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        *((streamed(*pieces), errors.ConnectionLostError) for pieces in ([], [chunk()])),
        *((streamed(piece, end=False), errors.ConnectionLostError) for piece in (chunk(), chunk()[:-9])),
        *((answer, errors.ConnectionLostError) for answer in (streamed()[:40], b"")),
        (b"SSH-2.0-OpenSSH\r\n", errors.UnreachableError),
        (streamed(chunk(), "data: {\n\n", DONE), errors.UnreachableError),
        (streamed(chunk(), 'data: {"object": "moon"}\n\n', DONE), errors.UnreachableError),
        (streamed("data: " + "x" * 5_000_000), errors.UnreachableError),
        (streamed(chunk(), 'data: {"error": {"code": "oom-unloaded", "message": "m"}}\n\n'), errors.OutOfMemoryError),
        (whole("<html>hi</html>", kind="text/html"), errors.UnreachableError),
        (whole("<html>hi</html>", kind="text/html", status="404 Not Found"), errors.UnreachableError),
        (whole("", status="302 Found", extra="location: /login\r\n"), errors.UnreachableError),
        (whole("x" * 1_000_000, status="502 Bad Gateway", kind="text/plain"), errors.UnreachableError),
        (whole("x", kind="text/event-stream", extra="content-encoding: gzip\r\n"), errors.UnreachableError),
    ],
)
async def test_an_invalid_or_broken_stream_is_an_error_that_names_the_address(answer, error):
    async with answered(answer) as (client, server):
        with pytest.raises(error) as caught:
            await parts(client)
    assert type(caught.value) is error or error is errors.UnreachableError
    assert isinstance(caught.value, errors.OutOfMemoryError) or server.url in str(caught.value)
    assert len(str(caught.value)) < 400


async def error_of_each_request(url):
    """Return the text of the error that the last of several requests raises."""
    async with AsyncLabClient(url) as client:
        for ask in (client.version(), client.ready(), client.models(), client.unload(), client.chat(echo_request())):
            with pytest.raises(errors.UnreachableError) as caught:
                await ask
            assert url in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("answer", "part"),
    [
        (whole("<html>hi</html>", kind="text/html").replace(b"x-lmx-lab: 0\r\n", b""), "text/html"),
        (b"220 mail ready\r\n", "before the response"),
        (b"", "before the response"),
    ],
    ids=["page", "mail", "nothing"],
)
async def test_another_program_at_the_address_is_recognized(answer, part):
    with answering(answer) as server:
        assert part in await error_of_each_request(server.url)


async def test_an_address_without_a_server_is_reported():
    with answering(b"") as server:
        pass
    assert "lmx-lab serve" in await error_of_each_request(server.url)


async def test_a_silent_server_is_an_error_after_the_time_limit():
    def slow(request):
        raise httpx2.ReadTimeout("", request=request)

    async with AsyncLabClient("http://h", transport=httpx2.MockTransport(slow), timeout_s=5) as client:
        with pytest.raises(errors.UnreachableError, match="timeout_s"):
            await client.chat(echo_request())


async def test_only_generations_have_no_time_limit():
    limits = []

    def answer(request):
        limits.append(request.extensions["timeout"])
        return httpx2.Response(500)

    async with AsyncLabClient("http://lab", transport=httpx2.MockTransport(answer)) as client:
        for ask in (client.version(), client.ready(), client.models(), client.timeline(), client.chat(echo_request())):
            with pytest.raises(errors.UnreachableError):
                await ask
    assert {limit["connect"] for limit in limits} == {5}
    assert [limit["read"] for limit in limits] == [QUICK_S] * 4 + [None]


# --- limits of responses

TEXTS = EmbeddingsBody(model="default", input=["a", "b"])
PAPERS = RerankBody(model="default", query="q", documents=["a", "b"])


@pytest.mark.slow
async def test_an_endless_response_is_read_up_to_the_limit():
    async with answered(Endless(b"z" * 1_000_000)) as (client, server):
        for ask in (
            *(client.version(), client.ready(), client.models(), client.load("m"), client.unload()),
            *(client.chat(echo_request()), client.embed(TEXTS), client.rerank(PAPERS)),
        ):
            with pytest.raises(errors.UnreachableError, match="answered with more than") as caught:
                await ask
            assert server.url in str(caught.value)


async def test_of_an_endless_error_only_the_start_is_read():
    async with answered(Endless(b"z" * 1_000_000, status="502 Bad Gateway")) as (client, _):
        for ask in (client.ready(), client.models(), client.chat(echo_request()), anext(client.events())):
            with pytest.raises(errors.UnreachableError, match="answered 502"):
                await ask


async def test_a_compressed_response_counts_with_its_decompressed_size():
    packed = gzip.compress(b" " * 20_000_000)
    assert len(packed) < SHORT_BYTES
    head, _, _ = whole("", extra="content-encoding: gzip\r\n").partition(b"content-length")
    async with answered(head + f"content-length: {len(packed)}\r\n\r\n".encode() + packed) as (client, _):
        with pytest.raises(errors.UnreachableError, match="answered with more than"):
            await client.version()


@pytest.mark.slow
@pytest.mark.parametrize(
    "endless",
    [Endless(b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n", head=b""), Endless(b" ", every_s=0.01)],
    ids=["early hints", "drop by drop"],
)
async def test_a_time_limit_applies_to_the_complete_response(endless):
    with answering(endless) as server:
        connection = HttpConnection(server.url)
        async with asyncio.timeout(WAIT_S):
            with pytest.raises(errors.UnreachableError, match=r"was not complete within 0\.5 s"):
                await connection.request("GET", "/healthz", within_s=0.5)
        await connection.aclose()


@pytest.mark.parametrize("written", ["float", "base64"])
def test_the_longest_vectors_fit_into_the_limit(written):
    numbers = -np.random.default_rng(0).random((2, MAX_COMPONENTS), np.float32) * np.float32(1e-30)
    rows = [base64.b64encode(row).decode() if written == "base64" else row.tolist() for row in numbers]
    answer = EmbeddingList(
        data=[EmbeddingItem(index=index, embedding=row) for index, row in enumerate(rows)],
        model="m" * 1000,
        usage=EncodingUsage(prompt_tokens=1, total_tokens=1),
    )
    limit = max_embeddings_bytes(TEXTS.model_copy(update={"encoding_format": written}))
    assert limit / 2 < len(answer.model_dump_json()) <= limit


@pytest.mark.parametrize("character", ["é", "\x01", '"', "\U0001f600", "a"])
def test_escaped_documents_fit_into_the_limit(character):
    body = RerankBody(model="default", query="q", documents=[character * 100_000, *[character] * 1000])
    results = [RerankItem(index=at, relevance_score=-1.5e-300, document=text) for at, text in enumerate(body.texts)]
    usage = EncodingUsage(prompt_tokens=1, total_tokens=1)
    answer = RerankResults(id="i", model="m", method="cosine", results=results, usage=usage)
    longest = json.dumps(answer.model_dump())
    assert len(longest) <= max_rerank_bytes(len(body.documents), request_bytes=len(body.model_dump_json().encode()))


@pytest.mark.parametrize("indices", [[2], [-1], [0, 1, 0]])
async def test_a_ranking_with_wrong_indices_is_refused(indices):
    results = [{"index": index, "relevance_score": 0.5} for index in indices]
    usage = {"prompt_tokens": 1, "total_tokens": 1}
    answer = {"id": "i", "model": "m", "method": "cosine", "results": results, "usage": usage}
    async with answered(whole(json.dumps(answer))) as (client, _):
        with pytest.raises(errors.UnreachableError, match="2 documents"):
            await client.rerank(PAPERS)


# --- events


async def test_a_load_does_not_wait_for_events_that_a_proxy_withholds():
    async def silent():
        await asyncio.Event().wait()
        yield

    async def load():
        return "loaded"

    async with asyncio.timeout(WAIT_S):
        assert await run_with_progress(load, events=silent(), progress=print, open_s=0.01) == "loaded"


async def test_a_timeline_is_read_in_pages(client):
    for _ in range(PAGE_REQUESTS + 2):
        await client.chat(echo_request(max_tokens=1))
    whole = (await client.timeline(3600)).requests
    assert len(whole) > PAGE_REQUESTS
    assert [request.at for request in whole] == sorted({request.at for request in whole})
    newest = (await client.timeline(3600, most=PAGE_REQUESTS + 1)).requests
    assert [request.at for request in newest] == [request.at for request in whole[-PAGE_REQUESTS - 1 :]]


def test_the_client_knows_all_events_of_the_server():
    assert set(get_args(KnownEvent)) == set(EVENTS)
    assert set(get_args(Include)) == set(EXTRAS)


def test_new_fields_of_an_event_are_ignored():
    assert lab_event('{"type": "heartbeat", "uptime": 1.5, "mood": "good"}') == Heartbeat(uptime=1.5)


@pytest.mark.parametrize(
    "text", ['{"type": "weather", "rain": true}', '{"type": "heartbeat"}', '{"uptime": 1}', "[]", "{", "", "\x00"]
)
def test_an_unknown_event_is_passed_on_unchanged(text):
    assert lab_event(text) == UnknownLabEvent(text=text)
