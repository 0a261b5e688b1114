"""Test the backend over HTTP: samples, events, and a server that stops and starts again."""

import asyncio
import contextlib

import pytest

import lmx_lab
from lmx_lab import errors
from lmx_lab.arguments import chat_request
from lmx_lab.notebook import attach
from lmx_lab.notebook.remote import RemoteBackend, RemoteServer
from lmx_lab.values.models import LoadSpec, ModelEvent
from lmx_lab.wire.admin import RequestEvent
from tests.support.labs import manager_of, read_answer, serving
from tests.support.models import write_tiny_llama
from tests.support.waiting import auntil, until

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


@pytest.fixture(scope="module")
def lab(tmp_path_factory, smollm2):
    home = tmp_path_factory.mktemp("home")
    write_tiny_llama(home / "models" / "tiny", smollm2.path, seed=0, context=8192)
    with serving(home, "tiny", slots=1) as lab:
        yield lab


@pytest.fixture
def far(lab):
    with attach(lab.url) as far:
        yield far


@pytest.fixture
async def backend(far):
    return backend_of(far)


def backend_of(far):
    backend = far.workbench.backend
    assert isinstance(backend, RemoteBackend)
    return backend


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


async def answer(backend, **parameters):
    return await read_answer(backend, chat_request("hello", {"temperature": 0, **parameters}))


async def test_log_probabilities_are_received(backend):
    table = (await answer(backend, logprobs=2, max_tokens=3)).tokens
    assert len(table[0].top) == 2
    assert table[0].top[0].text == table[0].text == table[0].bytes.decode()


async def test_samples_state_and_ends_of_requests_are_received(lab, backend):
    assert (backend.state().state, backend.sample()) == ("running", None)
    async with watched(backend) as received:
        await auntil(lambda: backend.sample() is not None)
        state = backend.state()
        assert (state.state, state.model, state.url, state.note) == ("running", "tiny", lab.url, "")
        assert state.disk == f"the disk of 127.0.0.1:{lab.server.port}"
        await answer(backend, max_tokens=3)
        await auntil(lambda: any(isinstance(event, RequestEvent) for event in received))


async def test_an_answer_that_waits_for_a_slot_has_a_status_and_can_be_closed(lab, backend):
    running = await lab.astream("hi", max_tokens=7500, ignore_eos=True)
    waiting = await backend.generate(chat_request("hello", {}))
    assert waiting.status
    waiting.close()
    await running.aclose()
    await asyncio.to_thread(
        until, lambda: manager_of(lab).snapshot.active_requests + manager_of(lab).snapshot.queued_requests == 0
    )


async def test_loads_and_unloads_are_published(tiny_home):
    with serving(tiny_home, None) as lab, attach(lab.url) as far:
        backend = backend_of(far)
        async with watched(backend) as received:
            await auntil(lambda: backend.sample() is not None)
            assert (await backend.load(LoadSpec(model="tiny"))).model == "tiny"
            await auntil(lambda: backend.state().model == "tiny")
            # The load has ended, so that there is nothing to cancel, and the model stays.
            with pytest.raises(errors.InvalidRequestError, match="tiny is not being loaded"):
                await backend.cancel_load("tiny")
            assert [record.loaded for record in (await backend.models()).models] == [True, False]
            assert await backend.unload() > 0
            await auntil(lambda: backend.state().model is None)
        stages = [event.stage for event in received if isinstance(event, ModelEvent)]
        assert [stages[-2], stages[-1]] == ["loaded", "unloaded"]
        with pytest.raises(errors.NotLoadedError):
            await answer(backend)


async def test_a_restarted_server_is_detected(tiny_home):
    with contextlib.ExitStack() as stack:
        lab = stack.enter_context(serving(tiny_home, None))
        far = stack.enter_context(attach(lab.url))
        backend = backend_of(far)
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
    server = RemoteServer(lab.url, late_s=-1.0)
    await server.start()
    backend = server.backend(keeps=True)
    async with watched(backend):
        await auntil(lambda: backend.state().state == "lagging")
        assert backend.sample() is None
        assert "a cell" in backend.state().note
    await server.stop()


def test_panels_show_a_remote_lab_and_stop_with_it(lab):
    with attach(lab.url) as far:
        panel = far.metrics()
        assert far.metrics() is panel
        until(lambda: bool(far.workbench.history.samples))
        assert panel.server["state"] == "running"
    until(lambda: panel.server["state"] == "stopped")
