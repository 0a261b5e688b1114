"""Test attached labs: replies, loads, connections that release everything, and the backend of panels."""

import asyncio
import contextlib
import gc
import json
import threading
import weakref

import pytest

import lmx_lab
from lmx_lab import errors
from lmx_lab.arguments import chat_request
from lmx_lab.client import AsyncLabClient, LabClient
from lmx_lab.notebook import remote
from lmx_lab.notebook.lab import attach
from lmx_lab.values.models import LoadSpec, ModelEvent
from lmx_lab.wire.admin import RequestEvent
from tests.support.labs import manager_of, read_answer, serving, wait_until_idle
from tests.support.models import write_tiny_llama
from tests.support.programs import run_script
from tests.support.sockets import answering, streamed, whole
from tests.support.waiting import auntil, until

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
KEY = "open-sesame-42"
WAIT_S = 60.0
SLOTS = 2
VERSION = f"version {lmx_lab.__version__}"


@pytest.fixture(scope="module")
def lab(tmp_path_factory, smollm2):
    """A lab with a context long enough for answers that are running when they are stopped."""
    home = tmp_path_factory.mktemp("home")
    write_tiny_llama(home / "models" / "tiny", smollm2.path, seed=0, context=8192)
    with serving(home, "tiny", api_key=KEY, slots=SLOTS) as lab:
        yield lab


@pytest.fixture(scope="module")
def far(lab):
    with attach(lab.url, api_key=KEY) as far:
        yield far


def threads():
    return {thread.name for thread in threading.enumerate() if thread.name == "lmx-lab-attached"}


def test_a_lab_of_a_client_has_its_address_and_key(lab):
    with LabClient(lab.url, api_key=KEY) as client, attach(client) as of_client:
        assert of_client.map(["one", "two"], "{text}", max_tokens=2)["output_tokens"].tolist() == [2, 2]
        with pytest.raises(errors.InvalidRequestError, match="key of its own"):
            attach(client, api_key=KEY)
    with pytest.raises(errors.InvalidRequestError, match="address"):
        attach(7)

    async def map_rows():
        async with AsyncLabClient(lab.url, api_key=KEY) as client:
            with await asyncio.to_thread(attach, client) as of_client:
                answers = await of_client.amap(["one"], "{text}", max_tokens=2)
        return [*answers["finish_reason"]]

    assert asyncio.run(map_rows()) == ["length"]


# --- replies


def test_a_remote_reply_has_no_report_and_the_callers_time_to_first_token(far):
    reply = far.chat("hi", max_tokens=6, temperature=0)
    assert reply.report is None
    assert reply.ttft_s > reply.timings.prompt_ms / 1e3
    assert reply.tokens_per_second == reply.timings.predicted_per_second > 0
    assert f"first token in {reply.ttft_s:.2f} s" in repr(reply)


def test_an_answer_without_text_has_a_time_to_first_token(far):
    """The time is that of the answer's end."""
    reply = far.chat("hi", max_tokens=200, ignore_eos=True, stop=[" ", *"abcdefghijklmno"])
    assert reply.ttft_s > 0


@pytest.mark.parametrize("awaited", [False, True])
def test_a_load_shows_its_steps(tiny_home, monkeypatch, awaited):
    steps = []
    monkeypatch.setattr("lmx_lab.progress.ProgressBar.update", lambda self, step: steps.append(step))
    with serving(tiny_home, None) as lab, attach(lab.url) as far:
        step = ModelEvent(model="tiny", stage="download", done_bytes=1, total_bytes=2)
        load = manager_of(lab).load

        async def slowly(spec, *, local):
            lab.server.services.feed.publish(step)
            while not steps:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            return await load(spec, local=local)

        monkeypatch.setattr(manager_of(lab), "load", slowly)
        report = asyncio.run(far.aload("tiny")) if awaited else far.load("tiny")
    assert report.model == "tiny"
    assert steps[0] == step
    # A slow load shows that it has begun.
    assert all(each.stage == "load" for each in steps[1:])


# --- connections that are closed early


def test_the_answers_to_an_iterable_keep_the_connection_of_a_deleted_lab(lab):
    rows = attach(lab.url, api_key=KEY).map(({"text": text} for text in "ab"), "{text}", max_tokens=2)
    gc.collect()
    assert [row["error"] for row in rows] == [None, None]


def test_a_deleted_lab_ends_its_connection_and_its_panels(lab):
    before = set(threading.enumerate())
    far = attach(lab.url, api_key=KEY)
    far._repr_mimebundle_()
    workbench, gone = far.workbench, weakref.ref(far)
    until(lambda: workbench.backend.sample() is not None)
    threads = set(threading.enumerate()) - before
    assert "lmx-lab-attached" in {thread.name for thread in threads}
    del far
    gc.collect()
    until(lambda: gone() is None)
    assert workbench.backend.state().state == "stopped"
    for thread in threads:
        if thread.name.startswith("lmx-lab") and thread.name != "lmx-lab-background":
            thread.join()


def test_panels_keep_their_connection_until_those_of_another_one_are_shown(lab):
    first = attach(lab.url, api_key=KEY).metrics()
    gc.collect()
    until(lambda: first.server["model"] == "tiny")
    second = attach(lab.url, api_key=KEY).metrics()
    gc.collect()
    until(lambda: first.server["state"] == "stopped")
    until(lambda: second.server["model"] == "tiny")
    remote._PANEL_CONNECTIONS[lab.url].close()
    until(lambda: second.server["state"] == "stopped")
    assert lab.url not in remote._PANEL_CONNECTIONS


def test_connections_are_not_kept_without_a_limit():
    servers = [remote.RemoteServer(f"http://127.0.0.1:{port}") for port in range(9001, 9010)]
    for server in servers:
        server.panels_shown()
    assert list(remote._PANEL_CONNECTIONS.values()) == servers[1:]
    for server in servers:
        server.close()
    assert remote._PANEL_CONNECTIONS == {}


def test_a_script_that_does_not_stop_its_lab_exits_quietly(lab):
    script = f"""
import lmx_lab
far = lmx_lab.attach({lab.url!r}, api_key={KEY!r})
stream = far.chat("hi", stream=True, max_tokens=7500)
print(next(iter(stream)) is not None, far.chat("hi", max_tokens=2).usage.completion_tokens)
"""
    assert run_script(f"import warnings; warnings.simplefilter('error')\n{script}") == "True 2\n"
    wait_until_idle(lab)


# --- addresses, keys, display


def attach_patiently(url, key=None):
    """Attach to a server. ``repr`` waits long enough for its answer, even on a busy machine."""
    far = lmx_lab.Lab.over(remote.RemoteServer(url, api_key=key, repr_s=WAIT_S))
    far.start()
    return far


@pytest.mark.parametrize("end", ["", "/", "/v1"])
def test_the_repr_describes_the_connection(lab, end):
    with attach_patiently(lab.url + end, KEY) as far:
        assert far.url == lab.url
        assert far.openai == {"base_url": f"{lab.url}/v1", "api_key": KEY}
        for look in (repr(far), far._repr_html_()):
            assert all(part in look for part in (lab.url, "tiny", "another process", VERSION))
            assert KEY not in look


def test_the_repr_says_that_the_server_does_not_answer(tiny_home):
    with serving(tiny_home, None) as lab:
        far = attach_patiently(lab.url)
        assert "no model ready" in repr(far)
    assert "does not answer" in repr(far)
    with pytest.raises(errors.UnreachableError):
        far.chat("hi")
    far.stop()


@pytest.mark.parametrize("key", [None, "wrong-sesame-43"])
def test_attaching_checks_the_key(lab, key):
    before = threads()
    with pytest.raises(errors.UnauthorizedError, match="api_key=") as caught:
        attach(lab.url, api_key=key)
    assert "sesame" not in str(caught.value)
    assert threads() == before


@pytest.mark.parametrize("answer", [whole("<html>", kind="text/html"), b"220 mail\r\n", b""])
def test_attaching_to_another_program_is_refused(answer):
    before = threads()
    with answering(answer.replace(b"x-lmx-lab: 0\r\n", b"")) as server:
        with pytest.raises(errors.UnreachableError) as caught:
            attach(server.url)
        assert server.url in str(caught.value)
    with pytest.raises(errors.UnreachableError):
        attach(server.url)
    with pytest.raises(errors.InvalidRequestError):
        attach("")
    assert threads() == before


def test_a_broken_answer_is_an_error_and_not_a_reply():
    greeting = [whole("{}"), whole('{"models": []}')]
    choice = {"index": 0, "delta": {"content": "a"}, "finish_reason": None}
    head = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "system_fingerprint": "f"}
    chunk = f"data: {json.dumps({**head, 'choices': [choice]})}\n\n"
    broken, costless = streamed(chunk, end=False), streamed(chunk, "data: [DONE]\n\n")
    with answering(*greeting, broken, broken, costless) as server, attach(server.url) as far:
        with pytest.raises(errors.ConnectionLostError):
            far.chat("hi")
        stream = far.chat("hi", stream=True)
        pieces = iter(stream)
        assert next(pieces) == "a"
        with pytest.raises(errors.ConnectionLostError):
            next(pieces)
        assert (stream.reply, stream.text) == (None, "a")
        with pytest.raises(errors.UnreachableError, match="cost"):
            far.chat("hi")


# --- the backend: samples, events, and a server that stops and starts again


@pytest.fixture
async def backend(lab):
    with attach(lab.url, api_key=KEY) as far:
        yield far.workbench.backend


@contextlib.asynccontextmanager
async def watched(backend):
    """Read the events within the block, over lost connections, as a workbench does."""
    received = []

    async def watch():
        while True:
            with contextlib.suppress(errors.LabError):
                async for event in backend.events():
                    received.append(event)
            await asyncio.sleep(0.01)

    task = asyncio.create_task(watch())
    yield received
    task.cancel()
    await asyncio.wait([task])


async def test_samples_state_and_ends_of_requests_are_received(lab, backend):
    assert (backend.state().state, backend.sample()) == ("running", None)
    async with watched(backend) as received:
        await auntil(lambda: backend.sample() is not None)
        state = backend.state()
        assert (state.state, state.model, state.url, state.note) == ("running", "tiny", lab.url, "")
        assert state.disk == f"the disk of 127.0.0.1:{lab.server.port}"
        await read_answer(backend, chat_request("hello", {"max_tokens": 3}))
        await auntil(lambda: any(isinstance(event, RequestEvent) for event in received))


async def test_an_answer_that_waits_for_a_slot_has_a_status_and_can_be_closed(lab, backend):
    running = [await lab.astream("hi", max_tokens=7500, ignore_eos=True) for _ in range(SLOTS)]
    waiting = await backend.generate(chat_request("hello", {}))
    assert waiting.status
    waiting.close()
    for stream in running:
        await stream.aclose()
    await asyncio.to_thread(wait_until_idle, lab)


async def test_loads_and_unloads_are_published(tiny_home):
    with serving(tiny_home, None) as lab, attach(lab.url) as far:
        backend = far.workbench.backend
        async with watched(backend) as received:
            await auntil(lambda: backend.sample() is not None)
            assert (await backend.load(LoadSpec(model="tiny"))).model == "tiny"
            await auntil(lambda: backend.state().model == "tiny")
            assert await backend.unload() > 0
            await auntil(lambda: backend.state().model is None)
        stages = [event.stage for event in received if isinstance(event, ModelEvent)]
        assert [stages[-2], stages[-1]] == ["loaded", "unloaded"]


async def test_a_restarted_server_is_detected(tiny_home):
    with contextlib.ExitStack() as stack:
        lab = stack.enter_context(serving(tiny_home, None))
        far = stack.enter_context(attach(lab.url))
        backend = far.workbench.backend
        async with watched(backend):
            await auntil(lambda: backend.sample() is not None)
            await asyncio.to_thread(lab.stop)
            await auntil(lambda: backend.state().state == "unreachable")
            assert lab.url in backend.state().note
            assert backend.sample() is None
            with pytest.raises(errors.UnreachableError):
                await backend.models()
            again = lmx_lab.Lab(lmx_lab.Settings(home=tiny_home, port=lab.server.port), loop="thread")
            stack.enter_context(again)
            await auntil(lambda: backend.state().state == "running" and backend.sample() is not None)
        far.stop()
        assert (backend.state().state, backend.sample()) == ("stopped", None)


async def test_a_silent_server_is_lagging(lab):
    server = remote.RemoteServer(lab.url, api_key=KEY, late_s=-1.0)
    await server.start()
    backend = server.backend(keeps=True)
    async with watched(backend):
        await auntil(lambda: backend.state().state == "lagging")
        assert backend.sample() is None
        assert "a cell" in backend.state().note
    await server.stop()
