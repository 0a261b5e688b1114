"""What was unloaded for want of requests comes back for panels as for everybody else, and they say that it does."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

import lmx_lab
from lmx_lab.errors import HostingError, NotLoadedError
from lmx_lab.panels.chat import ChatPanel
from lmx_lab.panels.rerank import RerankPanel
from lmx_lab.settings import Settings
from lmx_lab.values.models import LoadReport, LoadSpec, ModelEntry
from lmx_lab.wire.admin import ModelEvent
from tests.engine.conftest import unload_when_idle_for
from tests.engine.encoders.models import write_tiny_bert
from tests.panels.standins import Reader

pytestmark = pytest.mark.anyio
HELLO = [{"role": "user", "content": "hello"}]
WAIT_S = 60.0


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, tiny_home: Path) -> Path:
    home = tmp_path_factory.mktemp("returning")
    shutil.copytree(tiny_home / "models" / "tiny", home / "models" / "tiny")
    write_tiny_bert(home / "models" / "tiny-bert")
    return home


@pytest.fixture
async def lab(request: pytest.FixtureRequest, home: Path) -> AsyncIterator[lmx_lab.Lab]:
    """On this loop, as in a kernel, or on a thread of its own."""
    loop: Any = getattr(request, "param", "kernel")
    async with lmx_lab.Lab(Settings(home=home, port=0, swap=True), loop=loop) as lab:
        yield lab


@pytest.fixture
def slow(lab: lmx_lab.Lab, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """The engine goes on with its loads when this is set."""
    return slowed(lab, monkeypatch)


def slowed(lab: lmx_lab.Lab, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    engine, go_on = lab.engine.engine("mlx"), threading.Event()
    load = engine.load

    async def slow_load(entry: ModelEntry, spec: LoadSpec) -> LoadReport:
        await asyncio.to_thread(go_on.wait, WAIT_S)
        return await load(entry, spec)

    monkeypatch.setattr(engine, "load", slow_load)
    return go_on


async def rested(lab: lmx_lab.Lab, model: str) -> None:
    """It was loaded, and nobody asked for long enough."""
    await lab.aload(model)
    await unload_when_idle_for(lab.engine, 0.001)
    await until(lambda: lab.engine.snapshot.model is None and lab.engine.snapshot.unload_cause == "idle")
    await unload_when_idle_for(lab.engine, None)


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def answer(lab: lmx_lab.Lab) -> str:
    pieces = lab.workbench.source.chat({"messages": HELLO, "temperature": 0, "max_tokens": 5})
    return "".join([piece.text async for piece in pieces])


def while_this_loop_waits(lab: lmx_lab.Lab, work: Any) -> Any:
    return lab.workbench.submit(work).result(WAIT_S)


@pytest.mark.parametrize("lab", ["kernel", "thread"], indirect=True)
async def test_a_chat_brings_the_model_back_while_the_loop_is_blocked(lab: lmx_lab.Lab) -> None:
    await rested(lab, "tiny")
    text = while_this_loop_waits(lab, answer(lab))
    assert lab.engine.snapshot.model == "tiny"
    assert text == (await lab.achat("hello", temperature=0, max_tokens=5)).text


async def test_a_model_of_a_path_comes_back_whoever_asks(lab: lmx_lab.Lab, home: Path, tmp_path: Path) -> None:
    path = str(shutil.copytree(home / "models" / "tiny", tmp_path / "elsewhere"))
    await rested(lab, path)
    while_this_loop_waits(lab, answer(lab))
    assert lab.engine.snapshot.model == path
    async with httpx2.AsyncClient(base_url=lab.url, timeout=WAIT_S) as client:
        for model in ("default", path):
            await rested(lab, path)
            body = {"model": model, "messages": HELLO, "max_tokens": 5}
            asked = await client.post("/v1/chat/completions", json=body)
            assert (asked.status_code, asked.json()["model"]) == (200, path)
        await lab.aunload()
        refused = await client.post("/v1/chat/completions", json=body)
        assert refused.status_code == 404, "by then it is a path like any other"


async def test_a_model_that_is_pinned_ranks_while_another_is_loaded(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(home=home, port=0, swap=True, embedder="tiny-bert")
    async with lmx_lab.Lab(settings, loop="kernel") as lab:
        await until(lambda: bool(lab.engine.snapshot.pinned))
        go_on = slowed(lab, monkeypatch)
        loading = asyncio.create_task(lab.aload("tiny"))
        await until(lambda: lab.engine.snapshot.change is not None)
        ranked = await asyncio.to_thread(
            while_this_loop_waits, lab, lab.workbench.source.rerank("a cat", ["a dog", "a cat"])
        )
        assert ranked.model == "tiny-bert"
        assert not loading.done()
        go_on.set()
        await loading


async def test_a_ranking_brings_the_model_back_while_the_loop_is_blocked(lab: lmx_lab.Lab) -> None:
    await rested(lab, "tiny-bert")
    ranked = while_this_loop_waits(lab, lab.workbench.source.rerank("a cat", ["a dog", "a cat"]))
    assert (ranked.model, ranked.order[0][0]) == ("tiny-bert", 1)


async def test_the_panels_say_what_they_wait_for(lab: lmx_lab.Lab, slow: threading.Event) -> None:
    chat, rank = (Reader(panel(lab.workbench), lab.workbench) for panel in (ChatPanel, RerankPanel))
    slow.set()
    await rested(lab, "tiny")
    slow.clear()
    await asyncio.to_thread(chat.ask, "send", text="hello", max_tokens=5)
    await asyncio.to_thread(chat.until, lambda panel: panel.live.get("remark") == "loading tiny")
    slow.set()
    await asyncio.to_thread(chat.until, lambda panel: not panel.live)
    assert (chat.panel.turns[-1]["error"], chat.panel.turns[-1]["stats"][:8]) == ("", "tiny · 5")
    await rested(lab, "tiny-bert")
    slow.clear()
    await asyncio.to_thread(rank.ask, "rank", query="a cat", documents="a dog\na cat")
    await asyncio.to_thread(rank.until, lambda panel: panel.doing == "Loading tiny-bert…")
    slow.set()
    await asyncio.to_thread(rank.until, lambda panel: not panel.busy)
    assert (rank.panel.problem, rank.panel.doing, bool(rank.panel.table["rows"])) == ("", "Ranking…", True)


async def test_who_asks_at_the_same_time_waits_for_the_same_load(lab: lmx_lab.Lab, slow: threading.Event) -> None:
    slow.set()
    await rested(lab, "tiny")
    slow.clear()
    with lab.services.feed.subscribe() as events:
        panels = [lab.workbench.submit(answer(lab)) for _ in range(2)]
        cell = asyncio.create_task(lab.achat("hello", temperature=0, max_tokens=5))
        await until(lambda: lab.engine.snapshot.change is not None)
        slow.set()
        texts = {(await cell).text, *[await asyncio.wrap_future(panel) for panel in panels]}
        told = []
        async for event in events:
            told.append(event.stage if isinstance(event, ModelEvent) else "answered")
            if told.count("answered") == 3:
                break
    assert (len(texts), told.count("load")) == (1, 1)


async def test_a_model_that_cannot_do_it_is_left_where_it_is(lab: lmx_lab.Lab) -> None:
    await rested(lab, "tiny-bert")
    with pytest.raises(NotLoadedError):
        while_this_loop_waits(lab, answer(lab))
    assert lab.engine.snapshot.model is None


async def test_what_somebody_unloaded_stays_so(lab: lmx_lab.Lab) -> None:
    await lab.aload("tiny")
    await lab.aunload()
    with pytest.raises(NotLoadedError, match="load"):
        while_this_loop_waits(lab, answer(lab))


async def test_a_model_whose_files_are_gone_is_told_of(lab: lmx_lab.Lab, home: Path) -> None:
    (home / "models" / "short-lived").symlink_to(home / "models" / "tiny")
    await rested(lab, "short-lived")
    (home / "models" / "short-lived").unlink()
    with pytest.raises(NotLoadedError, match="short-lived was unloaded"):
        while_this_loop_waits(lab, answer(lab))


async def test_a_lab_that_has_stopped_loads_nothing(lab: lmx_lab.Lab) -> None:
    await rested(lab, "tiny")
    await lab.astop()
    with pytest.raises(HostingError, match="stopped"):
        await answer(lab)
    with pytest.raises(HostingError, match="stopped"):
        await lab.workbench.source.rerank("a cat", ["a dog"])


async def test_without_swap_one_is_told_what_to_load(home: Path) -> None:
    async with lmx_lab.Lab(Settings(home=home, port=0), loop="kernel") as lab:
        await rested(lab, "tiny")
        with pytest.raises(NotLoadedError, match="tiny was unloaded because it was idle"):
            while_this_loop_waits(lab, answer(lab))
