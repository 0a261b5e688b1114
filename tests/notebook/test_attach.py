"""Test attached labs: replies, loads, and connections that release everything."""

import asyncio
import gc
import json
import subprocess
import sys
import threading
import weakref

import pytest

import lmx_lab
from lmx_lab import errors
from lmx_lab.client import AsyncLabClient, LabClient
from lmx_lab.notebook import attach, remote
from lmx_lab.settings import Settings
from lmx_lab.values.models import ModelEvent
from tests.support.labs import manager_of, serving, wait_until_idle
from tests.support.models import write_tiny_llama
from tests.support.sockets import answering, streamed, whole
from tests.support.waiting import interrupt_when, until

pytestmark = pytest.mark.anyio
KEY = "open-sesame-42"
WAIT_S = 60.0


@pytest.fixture(scope="module")
def lab(tmp_path_factory, smollm2):
    """A lab with a context long enough for answers that are running when they are stopped."""
    home = tmp_path_factory.mktemp("home")
    write_tiny_llama(home / "models" / "tiny", smollm2.path, seed=0, context=8192)
    with serving(home, "tiny", api_key=KEY) as lab:
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


def test_a_remote_reply_has_thoughts_and_calls(thinker_home):
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    parameters = {"tools": [tool], "tool_choice": "required", "max_tokens": 60, "temperature": 0}
    with serving(thinker_home, "thinker") as lab, attach(lab.url) as far:
        here, there = lab.chat("hi", **parameters), far.chat("hi", **parameters)
        assert [call.name for call in there.tool_calls] == [call.name for call in here.tool_calls]
        assert there.tool_calls[0].arguments == here.tool_calls[0].arguments
        parameters = {"chat_template_kwargs": {"open_thoughts": True}, "max_tokens": 20, "temperature": 0}
        here, there = lab.chat("hi", **parameters), far.chat("hi", **parameters)
        assert here.reasoning
        assert (there.reasoning, there.reasoning_tokens) == (here.reasoning, here.reasoning_tokens)


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


# --- streams and connections that are closed early


def test_an_interrupt_ends_the_generation_on_the_server(lab, far):
    before = manager_of(lab).snapshot.totals.output_tokens

    interrupting = interrupt_when(lambda: manager_of(lab).snapshot.totals.output_tokens > before)
    with pytest.raises(KeyboardInterrupt):
        far.chat("hi", max_tokens=7500, ignore_eos=True)
    interrupting.join()
    wait_until_idle(lab)
    assert manager_of(lab).snapshot.totals.output_tokens - before < 7500
    assert far.chat("hi", max_tokens=2).usage.completion_tokens == 2


def test_a_deleted_lab_ends_its_connection(lab):
    with attach(lab.url, api_key=KEY):
        (thread,) = [thread for thread in threading.enumerate() if thread.name == "lmx-lab-attached"][-1:]
    thread.join()
    far = attach(lab.url, api_key=KEY)
    thread = [thread for thread in threading.enumerate() if thread.name == "lmx-lab-attached"][-1]
    del far
    gc.collect()
    thread.join()


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
    names = [thread.name for thread in set(threading.enumerate()) - before]
    assert "lmx-lab-attached" in names
    del far
    gc.collect()
    until(lambda: gone() is None)
    assert workbench.backend.state().state == "stopped"
    shared = {it for it in threading.enumerate() if it.name == "lmx-lab-background"}
    until(lambda: not {it for it in set(threading.enumerate()) - before - shared if it.name.startswith("lmx-lab")})


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
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, timeout=180, check=True
    )
    assert (done.stdout, done.stderr) == ("True 2\n", "")
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
            assert all(part in look for part in (lab.url, "tiny", "another process"))
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


@pytest.fixture
async def own(tiny_home):
    """A lab whose server runs with the test's event loop, as in a kernel."""
    async with lmx_lab.Lab(Settings(home=tiny_home, port=0), loop="kernel") as lab:
        yield lab


async def test_a_blocking_call_on_the_serving_loop_is_answered(own):
    for url in (own.url, f"http://localhost:{own.server.port}/v1"):
        with attach(url) as far:
            assert far.models() == await far.amodels() == await own.amodels() == await asyncio.to_thread(far.models)
            assert far.snapshot().models == own.snapshot().models
            assert f"version {lmx_lab.__version__}" in repr(far)
