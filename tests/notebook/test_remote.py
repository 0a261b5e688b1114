"""A lab elsewhere as its panels see it: figures, answers, and a server that goes and comes back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import lmx_lab
from lmx_lab import errors
from lmx_lab.backend import ChatPiece, Source
from lmx_lab.notebook import AttachedLab
from lmx_lab.notebook.remote_server import attach
from lmx_lab.notebook.remote_source import AttachedSource
from lmx_lab.values.models import ModelEntry
from lmx_lab.wire.admin import ModelEvent, RequestEvent
from tests.flows.conftest import serving, wait_until
from tests.tiny import write_tiny_llama

pytestmark = pytest.mark.anyio
HELLO = [{"role": "user", "content": "hello"}]
WAIT_S = 60.0


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, smollm2: ModelEntry) -> Iterator[lmx_lab.Lab]:
    home = tmp_path_factory.mktemp("home")
    write_tiny_llama(home / "models" / "tiny", smollm2.path, seed=0, context=8192)
    with serving(home, "tiny", slots=1) as lab:
        yield lab


@pytest.fixture
def far(lab: lmx_lab.Lab) -> Iterator[AttachedLab]:
    with attach(lab.url) as far:
        yield far


@pytest.fixture
async def source(far: AttachedLab) -> AttachedSource:
    return far._source()


@contextlib.asynccontextmanager
async def watched(source: Source) -> AsyncIterator[list[Any]]:
    """What a workbench does: ask for news, again and again."""
    seen: list[Any] = []

    async def watch() -> None:
        while True:
            with contextlib.suppress(errors.LabError):
                async for event in source.progress():
                    seen.append(event)
            await asyncio.sleep(0.01)

    task = asyncio.create_task(watch())
    yield seen
    task.cancel()
    await asyncio.wait([task])


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def whole(source: Source, **request: Any) -> list[ChatPiece]:
    return [piece async for piece in source.chat({"messages": HELLO, "temperature": 0, **request})]


async def test_figures_state_and_ends_of_requests_are_heard(lab: lmx_lab.Lab, source: Source) -> None:
    assert (source.state().state, source.sample()) == ("running", None)
    async with watched(source) as seen:
        await until(lambda: source.sample() is not None)
        state = source.state()
        assert (state.state, state.model, state.url, state.note) == ("running", "tiny", lab.url, "")
        await whole(source, max_tokens=3)
        await until(lambda: any(isinstance(event, RequestEvent) for event in seen))


async def test_an_answer_is_that_of_the_lab_and_its_cost_is_told(lab: lmx_lab.Lab, source: Source) -> None:
    *pieces, end = await whole(source, max_tokens=30)
    reply = await lab.achat("hello", temperature=0, max_tokens=30)
    assert "".join(piece.text for piece in pieces) == reply.text
    assert {piece.tokens for piece in pieces} == {0}
    assert end.stats is not None
    assert (end.stats.model, end.stats.output_tokens, end.stats.finish_reason) == ("tiny", 30, "length")
    assert end.stats.ttft_ms > 0


async def test_who_waits_for_a_slot_is_told_and_may_leave(lab: lmx_lab.Lab, source: Source) -> None:
    running = await lab.astream("hi", max_tokens=7500, ignore_eos=True)
    waiting = source.chat({"messages": HELLO})
    assert (await anext(waiting)).remark
    await waiting.aclose()
    await running.aclose()
    await asyncio.to_thread(
        wait_until, lambda: lab.engine.snapshot.active_requests + lab.engine.snapshot.queued_requests == 0
    )


@pytest.mark.parametrize("way", ["close", "cancel"])
async def test_leaving_an_answer_ends_it_on_the_server(lab: lmx_lab.Lab, source: Source, way: str) -> None:
    before = lab.engine.snapshot.output_tokens
    answer = source.chat({"messages": HELLO, "max_tokens": 7500, "ignore_eos": True})
    while not (await anext(answer)).text:
        pass
    if way == "close":
        await answer.aclose()
    else:
        task = asyncio.ensure_future(collect(answer))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
    await until(lambda: lab.engine.snapshot.active_requests == 0)
    assert lab.engine.snapshot.output_tokens - before < 7500


async def collect(answer: Any) -> list[ChatPiece]:
    return [piece async for piece in answer]


async def test_models_are_loaded_and_unloaded_and_everybody_hears(tiny_home: Path) -> None:
    with serving(tiny_home, None) as lab, attach(lab.url) as far:
        source = far._source()
        async with watched(source) as seen:
            await until(lambda: source.sample() is not None)
            assert (await source.load("tiny")).model == "tiny"
            await until(lambda: source.state().model == "tiny")
            assert [record.loaded for record in (await source.models()).models] == [True, False]
            assert await source.unload() > 0
            await until(lambda: source.state().model is None)
        stages = [event.stage for event in seen if isinstance(event, ModelEvent)]
        assert [stages[-2], stages[-1]] == ["loaded", "unloaded"]
        with pytest.raises(errors.NotLoadedError):
            await whole(source)
        with pytest.raises(errors.InvalidRequestError, match="elsewhere"):
            await source.cancel_load("tiny")


async def test_documents_are_ranked(starter_home: Path, minilm: Any) -> None:
    with serving(starter_home, minilm.id) as lab, attach(lab.url) as far:
        ranked = await far._source().rerank("How salty is the sea?", ["Bread.", "Sea salt.", "Sand."], top_n=2)
        here = lab.rerank("How salty is the sea?", ["Bread.", "Sea salt.", "Sand."], top_n=2)
    assert [index for index, _ in ranked.order] == [row.index for row in here]
    assert (ranked.model, ranked.method) == (minilm.id, "cosine")


async def test_a_server_that_goes_and_comes_back_is_seen(tiny_home: Path) -> None:
    with contextlib.ExitStack() as stack:
        lab = stack.enter_context(serving(tiny_home, None))
        far = stack.enter_context(attach(lab.url))
        source = far._source()
        async with watched(source):
            await until(lambda: source.sample() is not None)
            await asyncio.to_thread(lab.stop)
            await until(lambda: source.state().state == "unreachable")
            assert lab.url in source.state().note
            assert source.sample() is None
            with pytest.raises(errors.UnreachableError):
                await source.models()
            again = lmx_lab.Lab(lmx_lab.Settings(home=tiny_home, port=lab.port), loop="thread")
            stack.enter_context(again)
            await until(lambda: source.state().state == "running" and source.sample() is not None)
        far.stop()
        assert (source.state().state, source.sample()) == ("stopped", None)


async def test_silence_is_lag(source: AttachedSource, monkeypatch: pytest.MonkeyPatch) -> None:
    async with watched(source):
        await until(lambda: source.sample() is not None)
        monkeypatch.setattr("lmx_lab.notebook.remote_source.LATE_S", -1.0)
        state = source.state()
        assert (state.state, source.sample()) == ("lagging", None)
        assert "a cell" in state.note


def test_panels_show_it_and_stop_with_it(lab: lmx_lab.Lab) -> None:
    with attach(lab.url) as far:
        panel = far.metrics()
        assert far.metrics() is panel
        wait_until(lambda: bool(far.workbench.history.samples))
        assert panel.server["state"] == "running"
    wait_until(lambda: panel.server["state"] == "stopped")
