"""Tests of the inference server's blocking client against a real server."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading

import httpx2
import pytest

from lmx_lab import errors
from lmx_lab.arguments import chat_request
from lmx_lab.client import AsyncLabClient, as_array
from lmx_lab.client.lab import LabClient
from lmx_lab.values.models import LoadReport, LoadSpec, ModelEvent
from lmx_lab.wire.admin import NotReady, Sample
from lmx_lab.wire.chat import ChatChunk
from lmx_lab.wire.embeddings import EmbeddingsBody
from lmx_lab.wire.rerank import RerankBody
from tests.support.labs import manager_of, serving, wait_until_idle
from tests.support.models import write_tiny_llama
from tests.support.waiting import until

pytestmark = pytest.mark.anyio
KEY = "open-sesame-42"
ENDLESS = {"max_tokens": 7500, "ignore_eos": True}


def hello(**changes):
    return chat_request("hello", {"temperature": 0, "max_tokens": 8, **changes})


def text_of(chunks):
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)


@pytest.fixture(scope="module")
def lab(tmp_path_factory, smollm2):
    home = tmp_path_factory.mktemp("long-home")
    write_tiny_llama(home / "models" / "tiny-long", smollm2.path, seed=0, context=8192)
    with serving(home, "tiny-long", api_key=KEY) as lab:
        yield lab


@pytest.fixture
def client(lab):
    with LabClient(lab.url, api_key=KEY) as client:
        yield client
    wait_until_idle(lab)


def test_blocking_methods_return_what_the_async_ones_return(lab, client):
    async def elsewhere() -> tuple[str | None, list[str]]:
        async with AsyncLabClient(lab.url, api_key=KEY) as async_client:
            return (await async_client.chat(hello())).choices[0].message.content, [
                it.id for it in (await async_client.models()).models
            ]

    text, models = asyncio.run(elsewhere())
    assert client.chat(hello()).choices[0].message.content == text
    assert text_of(list(client.stream(hello()))) == text
    assert text_of(list(client.stream(hello(), over="websocket"))) == text
    parts = list(client.stream_with_remarks(hello()))
    assert text_of([part for part in parts if isinstance(part, ChatChunk)]) == text
    assert [record.id for record in client.models().models] == models
    assert client.version()
    assert client.ready().model == "tiny-long"
    with client.events(["samples"]) as events:
        assert any(isinstance(event, Sample) for event in events)


def test_texts_are_embedded_and_documents_are_ranked(starter_home, minilm):
    with serving(starter_home, minilm.id) as lab, LabClient(lab.url) as client:
        assert as_array(client.embed(EmbeddingsBody(model="default", input=["a", "b"]))).shape == (2, 384)
        body = RerankBody(model="default", query="sea", documents=["Bread.", "Sea water."])
        assert client.rerank(body).results[0].index == 1


def test_the_servers_errors_are_raised(lab, client):
    with pytest.raises(errors.ModelNotFoundError):
        client.chat(hello(model="no-such"))
    with pytest.raises(errors.ModelNotFoundError):
        next(client.stream(hello(model="no-such")))
    with LabClient(lab.url) as stranger, pytest.raises(errors.UnauthorizedError):
        stranger.models()


def test_the_transport_can_be_replaced():
    def answer(request: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(200, headers={"x-lmx-lab": "9.9"}, json={"status": "ok"})

    with LabClient("http://far", transport=httpx2.MockTransport(answer)) as client:
        assert client.version() == "9.9"


def test_many_threads_can_use_one_client(client):
    texts = []
    threads = [threading.Thread(target=lambda: texts.append(text_of(list(client.stream(hello()))))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(texts) == 4
    assert len(set(texts)) == 1


# --- cancelling


def interrupt_when(true):
    def press() -> None:
        until(true)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    return thread


@pytest.mark.parametrize("way", ["chat", "sse", "websocket"])
def test_an_interrupt_ends_the_generation_on_the_server(lab, client, way):
    before = manager_of(lab).snapshot.totals.output_tokens

    def ask() -> None:
        if way == "chat":
            client.chat(hello(**ENDLESS))
        else:
            for _ in client.stream(hello(**ENDLESS), over="sse" if way == "sse" else "websocket"):
                pass

    thread = interrupt_when(lambda: manager_of(lab).snapshot.totals.output_tokens > before)
    with pytest.raises(KeyboardInterrupt):
        ask()
    thread.join()
    wait_until_idle(lab)
    assert manager_of(lab).snapshot.totals.output_tokens - before < 7500
    assert client.chat(hello()).usage.completion_tokens == 8


@pytest.mark.parametrize("over", ["sse", "websocket"])
def test_leaving_a_stream_frees_the_slot(lab, client, over):
    gc.disable()
    try:
        for _ in client.stream(hello(**ENDLESS), over=over):
            break
        wait_until_idle(lab)
    finally:
        gc.enable()


def test_a_stream_keeps_its_client_alive(lab):
    stream = LabClient(lab.url, api_key=KEY).stream(hello())
    gc.collect()
    assert len(list(stream)) > 2


# --- loads


@pytest.fixture
def loading(tiny_home):
    """A server that loads a model only after its first step was reported."""
    seen = []
    with serving(tiny_home, None) as lab, pytest.MonkeyPatch.context() as patched:
        load = manager_of(lab).load

        async def slowly(spec: LoadSpec, *, local: bool) -> LoadReport:
            lab.server.services.feed.publish(ModelEvent(model=spec.model, stage="verify", done_bytes=1, total_bytes=2))
            while not seen:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            return await load(spec, local=local)

        patched.setattr(manager_of(lab), "load", slowly)
        yield lab, seen


def test_the_progress_of_a_load_is_reported_in_the_callers_thread(loading):
    threads = set()
    lab, seen = loading

    def show(step: ModelEvent) -> None:
        threads.add(threading.get_ident())
        seen.append(step)

    with LabClient(lab.url) as client:
        assert client.load("tiny-two", progress=show).model == "tiny-two"
        assert client.load("tiny").model == "tiny"
        assert client.unload().freed_vram_gb > 0
        assert isinstance(client.ready(), NotReady)
    assert (seen[0].model, seen[0].stage, seen[0].done_bytes) == ("tiny-two", "verify", 1)
    assert {step.stage for step in seen} <= {"verify", "load"}
    assert threads == {threading.get_ident()}


@pytest.mark.parametrize("blocking", [True, False])
async def test_an_exception_of_progress_ends_the_wait_but_not_the_load(loading, blocking):
    lab, seen = loading

    def fail(step: ModelEvent) -> None:
        seen.append(step)
        raise errors.InvalidRequestError("no more")

    async with AsyncLabClient(lab.url) as async_client:
        with LabClient(lab.url) as client, pytest.raises(errors.InvalidRequestError, match="no more"):
            _ = client.load("tiny", progress=fail) if blocking else await async_client.load("tiny", progress=fail)
    until(lambda: manager_of(lab).snapshot.model == "tiny")


async def test_a_failed_load_raises_its_error_with_and_without_progress(lab):
    async with AsyncLabClient(lab.url, api_key=KEY) as client:
        for name, error in (("no-such", errors.ModelNotFoundError), ("", errors.InvalidRequestError)):
            with pytest.raises(error):
                await client.load(name, progress=print)


def test_an_invalid_argument_of_an_unload_is_an_error_that_names_it(client):
    with pytest.raises(errors.InvalidRequestError, match="wait: Input should be a valid boolean"):
        client.unload(wait="yes")
