"""Test labs in this process: the thread that runs their loop, and models that were unloaded because they were idle."""

import asyncio
import shutil
import threading

import httpx2
import pytest

import lmx_lab
from lmx_lab.arguments import chat_request, rerank_body
from lmx_lab.errors import InvalidRequestError, NotLoadedError
from lmx_lab.notebook.local import LocalBackend, LocalServer
from lmx_lab.panels.chat import ChatPanel
from lmx_lab.panels.rerank import RerankPanel
from lmx_lab.settings import Settings
from tests.support.asking import HELLO
from tests.support.labs import manager_of, read_answer
from tests.support.models import write_tiny_bert
from tests.support.panels import Reader
from tests.support.waiting import auntil

pytestmark = pytest.mark.anyio
CATS = ("a cat", ["a dog", "a cat"])
WAIT_S = 60.0


def while_blocked(lab, work):
    """Run a coroutine on the panels' loop, while this thread blocks the test's loop, on which the lab may run."""
    return lab.workbench.submit(work).result(WAIT_S)


async def test_the_thread_that_starts_a_lab_decides_who_runs_its_loop(tmp_path):
    lab = lmx_lab.Lab(Settings(home=tmp_path, port=0))
    with pytest.raises(InvalidRequestError, match="running event loop"):
        await asyncio.to_thread(lmx_lab.Lab(Settings(home=tmp_path / "other", port=0), loop="kernel").start)
    await asyncio.to_thread(lab.start)
    assert (lab.running, lab.server.mode) == (True, "thread")
    lab.stop()


def test_a_lab_that_was_not_started_is_stopped(tmp_path):
    backend = LocalBackend(LocalServer(Settings(home=tmp_path, port=0), loop="thread"))
    assert backend.state().state == "stopped"


# --- models that were unloaded because they were idle


@pytest.fixture(scope="module")
def swap_home(tmp_path_factory, tiny_home):
    home = tmp_path_factory.mktemp("swap")
    shutil.copytree(tiny_home / "models" / "tiny", home / "models" / "tiny")
    write_tiny_bert(home / "models" / "tiny-bert")
    return home


@pytest.fixture
async def swapping(swap_home):
    """A lab in swap mode, on this loop."""
    async with lmx_lab.Lab(Settings(home=swap_home, port=0, swap=True), loop="kernel") as lab:
        yield lab


@pytest.fixture
def slow(swapping, monkeypatch):
    return delay_loads(swapping, monkeypatch)


def delay_loads(lab, monkeypatch):
    """Let loads wait until the returned event is set."""
    engine, resume = manager_of(lab).engines.get("mlx"), threading.Event()
    load = engine.load

    async def slow_load(entry, spec, **options):
        await asyncio.to_thread(resume.wait, WAIT_S)
        return await load(entry, spec, **options)

    monkeypatch.setattr(engine, "load", slow_load)
    return resume


async def make_idle(lab, model):
    """Load a model when nothing is in memory, and let it be unloaded because it is idle."""
    await auntil(lambda: manager_of(lab).snapshot.model is None and manager_of(lab).snapshot.change is None)
    report = await lab.aload(model)
    await lab.akeep(report.model, ttl_s=0)
    await auntil(lambda: manager_of(lab).snapshot.model is None and manager_of(lab).snapshot.unload_cause == "idle")


def short_answer(lab):
    return read_answer(lab.workbench.backend, chat_request(HELLO, {"temperature": 0, "max_tokens": 5}))


async def test_a_model_of_a_path_is_restored_for_every_caller(swapping, swap_home, tmp_path):
    path = str(shutil.copytree(swap_home / "models" / "tiny", tmp_path / "elsewhere"))
    await make_idle(swapping, path)
    assert while_blocked(swapping, short_answer(swapping)).model == path
    async with httpx2.AsyncClient(base_url=swapping.url, timeout=WAIT_S) as client:
        for model in ("default", path):
            await make_idle(swapping, path)
            body = {"model": model, "messages": HELLO, "max_tokens": 5}
            response = await client.post("/v1/chat/completions", json=body)
            assert (response.status_code, response.json()["model"]) == (200, path)
        await auntil(
            lambda: manager_of(swapping).snapshot.model is None and manager_of(swapping).snapshot.change is None
        )
        await swapping.aunload()
        refused = await client.post("/v1/chat/completions", json=body)
        assert refused.status_code == 404, "after an unload it is a path like any other"


async def test_a_pinned_model_ranks_while_another_is_being_loaded(swap_home, monkeypatch):
    settings = Settings(home=swap_home, port=0, swap=True, embedder="tiny-bert")
    async with lmx_lab.Lab(settings, loop="kernel") as lab:
        await auntil(lambda: bool(manager_of(lab).snapshot.pinned))
        resume = delay_loads(lab, monkeypatch)
        loading = asyncio.create_task(lab.aload("tiny"))
        await auntil(lambda: manager_of(lab).snapshot.change is not None)
        ranking = await asyncio.to_thread(
            while_blocked, lab, lab.workbench.backend.rerank(rerank_body(*CATS, model=None))
        )
        assert ranking.model == "tiny-bert"
        assert not loading.done()
        resume.set()
        await loading


async def test_a_ranking_restores_the_idle_model_while_the_loop_is_blocked(swapping):
    await make_idle(swapping, "tiny-bert")
    ranking = while_blocked(swapping, swapping.workbench.backend.rerank(rerank_body(*CATS, model=None)))
    assert (ranking.model, ranking.order[0][0]) == ("tiny-bert", 1)


async def test_the_panels_show_which_model_is_being_loaded(swapping, slow):
    chat, rank = (Reader(panel(swapping.workbench)) for panel in (ChatPanel, RerankPanel))
    slow.set()
    await make_idle(swapping, "tiny")
    slow.clear()
    await asyncio.to_thread(chat.ask, "send", text="hello", max_tokens=5)
    await asyncio.to_thread(chat.until, lambda panel: panel.live.get("status") == "loading tiny")
    slow.set()
    await asyncio.to_thread(chat.until, lambda panel: not panel.live)
    assert (chat.panel.messages[-1]["error"], chat.panel.messages[-1]["stats"][:8]) == ("", "tiny · 5")
    await make_idle(swapping, "tiny-bert")
    slow.clear()
    await asyncio.to_thread(rank.ask, "rank", query="a cat", documents="a dog\na cat")
    await asyncio.to_thread(rank.until, lambda panel: panel.activity == "Loading tiny-bert…")
    slow.set()
    await asyncio.to_thread(rank.until, lambda panel: not panel.busy)
    assert (rank.panel.error, rank.panel.activity, bool(rank.panel.table["rows"])) == ("", "Ranking…", True)


async def test_an_idle_model_of_another_kind_is_not_restored(swapping):
    await make_idle(swapping, "tiny-bert")
    with pytest.raises(NotLoadedError):
        while_blocked(swapping, short_answer(swapping))
    assert manager_of(swapping).snapshot.model is None


async def test_an_idle_model_without_files_is_reported(swapping, swap_home):
    (swap_home / "models" / "short-lived").symlink_to(swap_home / "models" / "tiny")
    await make_idle(swapping, "short-lived")
    (swap_home / "models" / "short-lived").unlink()
    with pytest.raises(NotLoadedError, match="short-lived was unloaded"):
        while_blocked(swapping, short_answer(swapping))
