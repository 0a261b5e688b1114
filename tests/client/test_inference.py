"""The client against a real server, and against servers that misbehave."""

from __future__ import annotations

import asyncio
import base64
import gc
import gzip
import json
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest

from lmx_lab import errors
from lmx_lab.client import AsyncLabClient, Remark, UnknownLabEvent, as_array
from lmx_lab.client.connection import SHORT_BYTES
from lmx_lab.client.inference import COMPONENTS, embeddings_bytes, rerank_bytes
from lmx_lab.notebook import Lab
from lmx_lab.notebook.arguments import chat_request
from lmx_lab.values.models import ModelEntry
from lmx_lab.wire.admin import ModelEvent, NotReady, RequestEvent, Sample, Throughput
from lmx_lab.wire.chat import ChatChunk, ChatRequest
from lmx_lab.wire.embeddings import EmbeddingItem, EmbeddingList, EmbeddingsBody, EncodingUsage
from lmx_lab.wire.rerank import RerankBody, RerankItem, RerankResults
from tests.client.raw import Endless, RawServer, answering, streamed, whole
from tests.flows.conftest import serving, wait_until
from tests.tiny import write_tiny_llama

pytestmark = pytest.mark.anyio
KEY = "open-sesame-42"
WAIT_S = 30.0
ENDLESS = {"max_tokens": 7500, "ignore_eos": True}


def asked(**changes: Any) -> ChatRequest:
    return chat_request("hello", {"temperature": 0, "max_tokens": 8, **changes})


def chunk(text: str = "a", **changes: Any) -> str:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
    body = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "system_fingerprint": "f"}
    return f"data: {json.dumps({**body, 'choices': [choice], **changes})}\n\n"


DONE = "data: [DONE]\n\n"


@pytest.fixture(scope="module")
def long_home(tmp_path_factory: pytest.TempPathFactory, smollm2: ModelEntry) -> Path:
    """With room for answers that are still being made when somebody leaves."""
    home = tmp_path_factory.mktemp("long-home")
    write_tiny_llama(home / "models" / "tiny-long", smollm2.path, seed=0, context=8192)
    return home


@pytest.fixture(scope="module")
def lab(long_home: Path) -> Iterator[Lab]:
    with serving(long_home, "tiny-long", slots=1, queue_limit=1, api_key=KEY) as lab:
        yield lab


@pytest.fixture
async def client(lab: Lab) -> AsyncIterator[AsyncLabClient]:
    async with AsyncLabClient(lab.url, api_key=KEY) as client:
        yield client
    wait_until(lambda: lab.engine.snapshot.active_requests + lab.engine.snapshot.queued_requests == 0)


async def begun(lab: Lab) -> None:
    while not lab.engine.snapshot.active_requests:  # noqa: ASYNC110
        await asyncio.sleep(0.001)


async def until_idle(lab: Lab) -> None:
    """While connections are still open."""
    while lab.engine.snapshot.active_requests + lab.engine.snapshot.queued_requests:  # noqa: ASYNC110
        await asyncio.sleep(0.001)


# --- the verbs


async def test_a_whole_answer_and_its_chunks_are_the_same(client: AsyncLabClient) -> None:
    answer = await client.chat(asked())
    chunks = [part async for part in client.stream(asked(stream_options={"include_usage": True}))]
    texts = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(texts) == answer.choices[0].message.content
    assert chunks[-1].usage is not None
    assert (chunks[-1].usage.completion_tokens, answer.usage.completion_tokens) == (8, 8)
    assert chunks[-2].timings is not None


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
async def test_a_request_arrives_as_it_was_made(form: dict[str, Any]) -> None:
    """Whatever has an alias, or is read into another form, or was left out."""
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
    with answering(whole("{}", status="500 Oops")) as server:
        async with AsyncLabClient(server.url) as client:
            with pytest.raises(errors.UnreachableError):
                await client.chat(body)
    sent = json.loads(server.requests[0].partition("\r\n\r\n")[2])
    assert "temperature" not in sent
    assert sent.pop("stream") is False
    assert ChatRequest.model_validate(sent) == body


async def test_models_are_listed_loaded_and_unloaded(tiny_home: Path) -> None:
    with serving(tiny_home, None) as lab:
        async with AsyncLabClient(lab.url) as client:
            async with aclosing(client.events(["models"])) as events:
                assert isinstance(await anext(events), Throughput)
                assert (await client.load("tiny-two")).model == "tiny-two"
                async for event in events:
                    if isinstance(event, ModelEvent) and event.stage == "loaded":
                        break
            assert event.model == "tiny-two"
            records = (await client.models()).models
            assert {record.id: record.loaded for record in records} == {"tiny": False, "tiny-two": True}
            assert (await client.ready()).model == "tiny-two"
            assert (await client.unload()).freed_vram_gb > 0
            not_ready = await client.ready()
            assert isinstance(not_ready, NotReady)
            assert (not_ready.ready, not_ready.error.code) == (False, "no-model-loaded")
            assert (await client.unload()).freed_vram_gb == 0


async def test_vectors_and_scores(starter_home: Path, minilm: Any) -> None:
    body = EmbeddingsBody(model="default", input=["The sea is blue.", "Bread is baked."])
    documents = RerankBody(model="default", query="How salty is the sea?", documents=["Bread is baked.", "Sea salt."])
    with serving(starter_home, minilm.id) as lab:
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
def test_what_is_no_table_of_vectors_is_said(rows: list[Any]) -> None:
    data = [{"index": index, "embedding": row} for index, row in enumerate(rows)]
    usage = {"prompt_tokens": 1, "total_tokens": 1}
    with pytest.raises(errors.UnreachableError):
        as_array(EmbeddingList.model_validate({"data": data, "model": "m", "usage": usage}))


async def test_samples_and_ends_of_requests_are_events(client: AsyncLabClient) -> None:
    seen: list[Any] = []
    async with aclosing(client.events(["samples", "requests"])) as events:
        async for event in events:
            seen.append(event)
            if isinstance(event, Sample) and len(seen) < 5:
                await client.chat(asked(max_tokens=2))
            if isinstance(event, RequestEvent):
                break
    assert {Throughput, Sample, RequestEvent} <= {type(event) for event in seen}
    assert (seen[-1].finish_reason, seen[-1].completion_tokens) == ("length", 2)


async def test_events_end_when_the_server_stops(tiny_home: Path) -> None:
    with serving(tiny_home, None) as lab:
        async with AsyncLabClient(lab.url) as client:
            events = client.events()
            await anext(events)
            stop = asyncio.create_task(lab.astop())
            assert [event async for event in events if isinstance(event, UnknownLabEvent)] == []
            await stop


# --- leaving


async def test_a_closed_stream_frees_the_slot_and_the_client_goes_on(lab: Lab, client: AsyncLabClient) -> None:
    stream = client.stream(asked(**ENDLESS))
    async for part in stream:
        if part.choices[0].delta.content:
            break
    await stream.aclose()
    await until_idle(lab)
    assert (await client.chat(asked())).usage.completion_tokens == 8


async def test_a_dropped_stream_frees_the_slot(lab: Lab, client: AsyncLabClient) -> None:
    gc.disable()
    try:
        stream = client.stream(asked(**ENDLESS))
        await anext(stream)
        await begun(lab)
        del stream
        await until_idle(lab)
    finally:
        gc.enable()


@pytest.mark.parametrize("way", ["chat", "stream"])
async def test_a_cancelled_request_frees_the_slot(lab: Lab, client: AsyncLabClient, way: str) -> None:
    async def ask() -> None:
        if way == "chat":
            await client.chat(asked(**ENDLESS))
        else:
            async for _ in client.stream(asked(**ENDLESS)):
                pass

    task = asyncio.create_task(ask())
    await begun(lab)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    await until_idle(lab)


async def test_a_closed_client_frees_what_it_asked_for(lab: Lab) -> None:
    client = AsyncLabClient(lab.url, api_key=KEY)
    stream = client.stream(asked(**ENDLESS))
    await anext(stream)
    await begun(lab)
    await client.aclose()
    await client.aclose()
    await until_idle(lab)
    with pytest.raises(errors.ConnectionLostError):
        async for _ in stream:
            pass


# --- the server's own errors


@pytest.mark.parametrize("way", ["chat", "stream"])
@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"model": "no-such"}, errors.ModelNotFoundError),
        ({"messages": [{"role": "user", "content": "word " * 9000}]}, errors.ContextLengthError),
        ({"temperature": -1}, errors.InvalidRequestError),
        ({"temperature": object()}, errors.InvalidRequestError),
    ],
)
async def test_a_refusal_is_the_servers_own_error(
    client: AsyncLabClient, way: str, changes: dict[str, Any], error: type[errors.LabError]
) -> None:
    body = asked().model_copy(update=changes) if "messages" not in changes else ChatRequest(model="default", **changes)
    with pytest.raises(error) as caught:
        await (client.chat(body) if way == "chat" else anext(client.stream(body)))
    assert type(caught.value) is error


async def test_a_full_queue_says_when_to_ask_again(lab: Lab, client: AsyncLabClient) -> None:
    running = client.stream(asked(**ENDLESS))
    await anext(running)
    await begun(lab)
    waiting = asyncio.create_task(client.chat(asked()))
    while not lab.engine.snapshot.queued_requests:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    with pytest.raises(errors.QueueFullError) as caught:
        await client.chat(asked())
    assert (caught.value.retry_after_s or 0) >= 1
    await running.aclose()
    assert (await waiting).usage.completion_tokens == 8


async def test_errors_of_models_and_arguments(client: AsyncLabClient) -> None:
    with pytest.raises(errors.ModelNotFoundError):
        await client.load("no-such")
    with pytest.raises(errors.InvalidRequestError) as caught:
        await client.load("")
    assert caught.value.param == "model"
    with pytest.raises(errors.InvalidRequestError, match="runs on echo and not on mlx") as caught:
        await client.load("echo", engine="mlx")
    assert caught.value.param == "engine"
    with pytest.raises(errors.InvalidRequestError) as caught:
        await anext(client.events(["nope"]))  # type: ignore[list-item]
    assert caught.value.param == "include"


async def test_without_a_model_and_over_time(long_home: Path) -> None:
    with serving(long_home, None, request_timeout_s=0.05) as lab:
        async with AsyncLabClient(lab.url) as client:
            with pytest.raises(errors.NotLoadedError):
                await client.chat(asked())
            await client.load("tiny-long")
            with pytest.raises(errors.GenerationTimeoutError):
                await client.chat(asked(**ENDLESS))
            # A stream has begun by then: the error is its last event.
            with pytest.raises(errors.GenerationTimeoutError):
                async for _ in client.stream(asked(**ENDLESS)):
                    pass


async def test_a_name_that_the_server_does_not_go_by_is_refused(lab: Lab) -> None:
    async with AsyncLabClient(f"http://127.1:{lab.port}", api_key=KEY) as client:
        with pytest.raises(errors.HostForbiddenError):
            await client.models()


@pytest.mark.parametrize("key", [None, "wrong-sesame-43"])
async def test_a_missing_or_wrong_key_is_said_and_not_shown(
    lab: Lab, key: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with AsyncLabClient(lab.url, api_key=key) as client:
        assert (await client.ready()).model == "tiny-long"
        for ask in (client.models(), client.chat(asked()), anext(client.stream(asked())), anext(client.events())):
            with pytest.raises(errors.UnauthorizedError) as caught:
                await ask
            assert "api_key=" in str(caught.value)
            assert "sesame" not in f"{caught.value!r} {caught.value.__context__!r}"
        assert "sesame" not in f"{client!r} {client!s}"
    assert "sesame" not in caplog.text


# --- addresses


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/"])
async def test_the_ends_of_an_address_do_not_matter(lab: Lab, end: str) -> None:
    async with AsyncLabClient(lab.url + end, api_key=KEY) as client:
        assert await client.version()
        assert (await client.models()).models


async def test_a_proxys_prefix_stays_before_every_route() -> None:
    with answering(whole("{}")) as server:
        async with AsyncLabClient(f"{server.url}/user/x/proxy/8400/") as client:
            await client.version()
            for ask in (client.models(), client.chat(asked()), anext(client.events()), anext(client.stream(asked()))):
                with pytest.raises(errors.UnreachableError):
                    await ask
    paths = [request.split()[1].removeprefix("/user/x/proxy/8400") for request in server.requests]
    chat = "/v1/chat/completions"
    assert paths == ["/healthz", "/admin/models", chat, "/admin/events", chat]
    # The only value with which jupyter-server-proxy hands events on as they come.
    accepted = ["accept: text/event-stream\r\n" in request.lower() for request in server.requests]
    assert accepted == [False, False, False, True, True]


# --- servers that misbehave


async def parts(client: AsyncLabClient) -> list[ChatChunk | Remark]:
    return [part async for part in client.stream_with_remarks(asked())]


async def test_remarks_come_between_the_chunks() -> None:
    with answering(streamed(": queued\n\n", chunk("a"), ": prompt 1/2 tok", "ens\n\n", chunk("b"), DONE)) as server:
        async with AsyncLabClient(server.url) as client:
            found = await parts(client)
            assert [part.text if isinstance(part, Remark) else part.choices[0].delta.content for part in found] == [
                *("queued", "a", "prompt 1/2 tokens", "b")
            ]
            assert len([chunk async for chunk in client.stream(asked())]) == 2


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (streamed(chunk(), end=False), errors.ConnectionLostError),
        (streamed(chunk(), end=True), errors.ConnectionLostError),
        (streamed(chunk()[:-9], end=False), errors.ConnectionLostError),
        (streamed(), errors.ConnectionLostError),
        (streamed()[:40], errors.ConnectionLostError),
        (b"", errors.ConnectionLostError),
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
async def test_a_stream_that_is_none_or_breaks_is_an_error_that_names_the_address(
    answer: bytes, error: type[errors.LabError]
) -> None:
    with answering(answer) as server:
        async with AsyncLabClient(server.url) as client:
            with pytest.raises(error) as caught:
                await parts(client)
    assert type(caught.value) is error or error is errors.UnreachableError
    assert isinstance(caught.value, errors.OutOfMemoryError) or server.url in str(caught.value)
    assert len(str(caught.value)) < 400


async def unreachable(server: RawServer) -> str:
    async with AsyncLabClient(server.url) as client:
        for ask in (client.version(), client.ready(), client.models(), client.unload(), client.chat(asked())):
            with pytest.raises(errors.UnreachableError) as caught:
                await ask
            assert server.url in str(caught.value)
    return str(caught.value)


async def test_another_program_at_the_address_is_told_apart() -> None:
    html = whole("<html>hi</html>", kind="text/html").replace(b"x-lmx-lab: 0\r\n", b"")
    with answering(html) as server:
        assert "text/html" in await unreachable(server)
    with answering(b"220 mail ready\r\n") as server:
        await unreachable(server)


async def test_a_connection_that_is_cut_before_the_answer_is_said() -> None:
    with answering(b"") as server:
        assert "went away before it answered" in await unreachable(server)


async def test_nobody_at_the_address_is_said() -> None:
    with answering(b"") as server:
        pass
    assert "lmx-lab serve" in await unreachable(server)


async def test_a_silent_server_is_given_up_after_the_time_limit() -> None:
    def slow(request: httpx2.Request) -> httpx2.Response:
        raise httpx2.ReadTimeout("", request=request)

    async with AsyncLabClient("http://h", transport=httpx2.MockTransport(slow), timeout_s=5) as client:
        with pytest.raises(errors.UnreachableError, match="timeout_s"):
            await client.chat(asked())


async def test_only_generations_may_take_for_ever() -> None:
    limits = []

    def note(request: httpx2.Request) -> httpx2.Response:
        limits.append(request.extensions["timeout"])
        return httpx2.Response(200, headers={"x-lmx-lab": "0"})

    async with AsyncLabClient("http://h", transport=httpx2.MockTransport(note)) as client:
        await client.version()
        with pytest.raises(errors.UnreachableError):
            await client.chat(asked())
    assert [limit["connect"] for limit in limits] == [5, 5]
    assert [limit["read"] for limit in limits] == [30, None]


# --- servers that say too much

TEXTS = EmbeddingsBody(model="default", input=["a", "b"])
PAPERS = RerankBody(model="default", query="q", documents=["a", "b"])


async def test_an_answer_without_an_end_is_read_no_further_than_one_can_be() -> None:
    with answering(Endless(b"z" * 1_000_000)) as server:
        async with AsyncLabClient(server.url) as client:
            for ask in (
                *(client.version(), client.ready(), client.models(), client.load("m"), client.unload()),
                *(client.chat(asked()), client.embed(TEXTS), client.rerank(PAPERS)),
            ):
                with pytest.raises(errors.UnreachableError, match="answered with more than") as caught:
                    await ask
                assert server.url in str(caught.value)


async def test_of_a_refusal_without_an_end_the_beginning_is_read() -> None:
    with answering(Endless(b"z" * 1_000_000, status="502 Bad Gateway")) as server:
        async with AsyncLabClient(server.url) as client:
            for ask in (client.ready(), client.models(), client.chat(asked()), anext(client.events())):
                with pytest.raises(errors.UnreachableError, match="answered 502"):
                    await ask


async def test_what_is_packed_small_counts_as_it_is_unpacked() -> None:
    packed = gzip.compress(b" " * 20_000_000)
    assert len(packed) < SHORT_BYTES
    head, _, _ = whole("", extra="content-encoding: gzip\r\n").partition(b"content-length")
    with answering(head + f"content-length: {len(packed)}\r\n\r\n".encode() + packed) as server:
        async with AsyncLabClient(server.url) as client:
            with pytest.raises(errors.UnreachableError, match="answered with more than"):
                await client.version()


@pytest.mark.parametrize(
    "endless",
    [Endless(b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n", head=b""), Endless(b" ", every_s=0.01)],
    ids=["early hints", "drop by drop"],
)
async def test_quick_answers_have_a_time_limit_for_the_whole(endless: Endless, monkeypatch: pytest.MonkeyPatch) -> None:
    with answering(endless) as server:
        async with AsyncLabClient(server.url) as client, asyncio.timeout(WAIT_S):
            monkeypatch.setattr("lmx_lab.client.connection.QUICK_S", 0.5)
            for ask in (client.version(), client.ready(), client.models()):
                with pytest.raises(errors.UnreachableError, match="within"):
                    await ask


@pytest.mark.parametrize("written", ["float", "base64"])
def test_the_longest_vectors_there_are_may_come(written: Any) -> None:
    numbers = -np.random.default_rng(0).random((2, COMPONENTS), np.float32) * np.float32(1e-30)
    rows: list[Any] = [base64.b64encode(row).decode() if written == "base64" else row.tolist() for row in numbers]
    answer = EmbeddingList(
        data=[EmbeddingItem(index=index, embedding=row) for index, row in enumerate(rows)],
        model="m" * 1000,
        usage=EncodingUsage(prompt_tokens=1, total_tokens=1),
    )
    limit = embeddings_bytes(TEXTS.model_copy(update={"encoding_format": written}))
    assert limit / 2 < len(answer.model_dump_json()) <= limit


@pytest.mark.parametrize("character", ["é", "\x01", '"', "\U0001f600", "a"])
def test_the_documents_may_come_back_in_escapes(character: str) -> None:
    body = RerankBody(model="default", query="q", documents=[character * 100_000, *[character] * 1000])
    results = [RerankItem(index=at, relevance_score=-1.5e-300, document=text) for at, text in enumerate(body.texts)]
    usage = EncodingUsage(prompt_tokens=1, total_tokens=1)
    answer = RerankResults(id="i", model="m", method="cosine", results=results, usage=usage)
    longest = json.dumps(answer.model_dump())
    assert len(longest) <= rerank_bytes(len(body.documents), sent=len(body.model_dump_json().encode()))


@pytest.mark.parametrize("told", [[2], [-1], [0, 1, 0]])
async def test_a_ranking_of_other_documents_is_refused(told: list[int]) -> None:
    results = [{"index": index, "relevance_score": 0.5} for index in told]
    usage = {"prompt_tokens": 1, "total_tokens": 1}
    answer = {"id": "i", "model": "m", "method": "cosine", "results": results, "usage": usage}
    with answering(whole(json.dumps(answer))) as server:
        async with AsyncLabClient(server.url) as client:
            with pytest.raises(errors.UnreachableError, match="2 documents"):
                await client.rerank(PAPERS)
