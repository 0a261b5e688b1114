"""Test how a lab loads and unloads, launched in this process and attached to: interrupts, cancelled calls, waits."""

import asyncio
import threading

import httpx2
import numpy as np
import pytest

import lmx_lab
from lmx_lab.engine.echo.engine import EchoEngine
from lmx_lab.errors import InvalidRequestError, NotLoadedError
from lmx_lab.notebook.loading import RunningChange
from tests.support.asking import ENDLESS
from tests.support.labs import PACE, manager_of, running_answer, serving
from tests.support.waiting import interrupt_when, until

pytestmark = pytest.mark.anyio
WAIT_S = 30.0
STATE = r"unloading, 1 answer left \((\d+ s|stopping now|no time limit)\)"


@pytest.fixture
def server(tmp_path):
    with serving(tmp_path, "echo", echo_tokens_per_s=PACE, drain_s=600) as lab:
        yield lab


@pytest.fixture(params=["here", "elsewhere"])
def lab(server, request):
    if request.param == "here":
        yield server
    else:
        with lmx_lab.attach(server.url) as attached:
            yield attached


@pytest.mark.slow
def test_an_interrupt_ends_the_wait_but_not_the_unload(lab, server, capfd):
    with running_answer(lab) as pieces:
        interrupting = interrupt_when(lambda: "unloading, 1 answer left (" in capfd.readouterr().err)
        with pytest.raises(KeyboardInterrupt, match=rf"echo is still {STATE}: lab.unload\(wait=False\) stops"):
            lab.unload()
        interrupting.join()
        # It continues, and everything says so.
        assert "echo" in repr(lab)
        assert "unloading, 1 answer left (" in repr(lab)
        assert "unloading, 1 answer left (" in repr(lab.models())
        assert "unloading, 1 answer left (" in repr(lab.snapshot())
        with pytest.raises(NotLoadedError, match="echo is being unloaded"):
            lab.chat("hello")
        assert lab.unload("echo", wait=False) > 0
        with pytest.raises(NotLoadedError, match="requested to stop running requests immediately"):
            list(pieces)
    assert manager_of(server).snapshot.model is None
    nothing = lab.unload()
    assert nothing == 0, "without a model"
    assert repr(nothing) == "0 bytes freed"
    with pytest.raises(InvalidRequestError, match="echo is not loaded"):
        lab.unload("echo", wait=True)


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("load", {"context_length": True}),
        ("load", {"context_length": "4096"}),
        ("load", {"deterministic": 1}),
        ("load", {"engine": "metal"}),
        ("load", {"draft": ""}),
        ("load", {"wait": "yes"}),
        ("unload", {"wait": "yes"}),
    ],
    ids=str,
)
def test_an_invalid_option_is_refused_as_over_http(lab, server, method, options):
    answer = httpx2.post(f"{server.url}/admin/models/{method}", json={"model": "echo", **options}).json()["error"]
    with pytest.raises(InvalidRequestError) as refused:
        getattr(lab, method)("echo", **options)
    assert (refused.value.message, refused.value.param) == (answer["message"], answer["param"])
    assert answer["param"] == next(iter(options))


@pytest.mark.parametrize("value", [np.True_, np.array([1, 2]), np.float64(0.5)], ids=repr)
def test_a_context_length_of_numpy_must_be_an_integer(lab, value):
    with pytest.raises(InvalidRequestError, match="context_length: Input should be a valid integer"):
        lab.load("echo", context_length=value)


async def test_a_cancelled_unload_continues_and_can_wait_without_a_limit(lab, server):
    stream = await lab.astream("hello", **ENDLESS)
    pieces = aiter(stream)
    await anext(pieces)
    unload = asyncio.create_task(lab.aunload())
    await asyncio.to_thread(until, lambda: manager_of(server).snapshot.unloading is not None)
    unload.cancel()
    with pytest.raises(asyncio.CancelledError):
        await unload
    waiting = asyncio.create_task(lab.aunload(wait=True))
    await asyncio.to_thread(until, lambda: "no time limit" in str(manager_of(server).snapshot.unloading))
    await stream.aclose()
    assert await waiting > 0


def test_a_load_can_stop_the_answers_of_the_loaded_model(lab, tiny_home):
    with running_answer(lab) as pieces:
        # The tiny model is a path for this server.
        load = threading.Thread(target=lambda: lab.load(tiny_home / "models" / "tiny", wait=False))
        load.start()
        with pytest.raises(NotLoadedError, match=r"the model was replaced by .*, because it was requested to stop"):
            list(pieces)
        load.join()
    assert "tiny" in repr(lab)


@pytest.mark.parametrize(
    ("where", "load"),
    [
        ("here", lambda lab: lab.load("echo")),
        ("elsewhere", lambda lab: lab.load("echo")),
        ("here", lambda lab: lab.compare(["hello"], [{"model": "echo"}])),
    ],
)
def test_an_interrupt_cancels_the_load(tmp_path, monkeypatch, where, load):
    started, ended = threading.Event(), threading.Event()

    async def hang(engine, entry, spec, **_):
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    with serving(tmp_path, None) as server:
        lab = server if where == "here" else lmx_lab.attach(server.url)
        with monkeypatch.context() as patched:
            patched.setattr(EchoEngine, "check", hang)
            interrupt_when(started.is_set)
            with pytest.raises(KeyboardInterrupt):
                load(lab)
        assert ended.wait(WAIT_S)
        # The load has ended, so that another one is not refused.
        assert lab.load("echo").model == "echo"
        if where == "elsewhere":
            lab.stop()


async def test_a_change_that_no_caller_receives_is_cancelled():
    async def work(report):
        await asyncio.Event().wait()

    change = RunningChange(work, "load")
    await asyncio.to_thread(change.close)
    with pytest.raises(asyncio.CancelledError):
        await change.result()
