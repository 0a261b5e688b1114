"""The lab as its panels see it: they go on while a cell blocks the loop that serves, and outlive the lab they show."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

import lmx_lab
from lmx_lab.errors import HostingError, InvalidRequestError, LabError, ModelBusyError, NotLoadedError
from lmx_lab.notebook import launching
from lmx_lab.notebook.local import InProcess
from lmx_lab.notebook.loop_lag import LoopLag
from lmx_lab.panels.source import ChatPiece
from lmx_lab.settings import Settings
from lmx_lab.values.models import ModelEntry
from lmx_lab.weights import Progress
from lmx_lab.wire.admin import ModelEvent, RequestEvent

pytestmark = pytest.mark.anyio
HELLO = [{"role": "user", "content": "hello"}]
WAIT_S = 60.0


@pytest.fixture(params=["kernel", "thread"])
async def lab(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[lmx_lab.Lab]:
    """Of 4,000 tokens it sends for some seconds."""
    settings = Settings(home=tmp_path, port=0, echo_tokens_per_s=1000)
    async with lmx_lab.Lab(settings, loop=request.param) as lab:
        await lab.aload("echo")
        yield lab


@pytest.fixture(params=["kernel", "thread"])
async def tiny_lab(request: pytest.FixtureRequest, tiny_home: Path) -> AsyncIterator[lmx_lab.Lab]:
    """For memory, and for what a chat model cannot do."""
    async with lmx_lab.Lab(Settings(home=tiny_home, port=0), loop=request.param) as lab:
        await lab.aload("tiny")
        yield lab


@pytest.fixture
async def on_this_loop(tmp_path: Path) -> AsyncIterator[lmx_lab.Lab]:
    async with lmx_lab.Lab(Settings(home=tmp_path, port=0), loop="kernel") as lab:
        await lab.aload("echo")
        yield lab


@pytest.fixture
async def tiny_on_this_loop(tiny_home: Path) -> AsyncIterator[lmx_lab.Lab]:
    """For loads of another model."""
    async with lmx_lab.Lab(Settings(home=tiny_home, port=0), loop="kernel") as lab:
        await lab.aload("tiny")
        yield lab


async def whole(source: Any, **request: Any) -> list[ChatPiece]:
    return [piece async for piece in source.chat({"messages": HELLO, "temperature": 0, **request})]


def while_this_loop_waits(lab: lmx_lab.Lab, work: Any) -> Any:
    """What a panel does while a cell blocks: nothing of the test's loop, on which the lab may run, comes round."""
    return lab.workbench.submit(work).result(WAIT_S)


async def test_an_answer_comes_whole_while_the_loop_is_blocked(lab: lmx_lab.Lab) -> None:
    *pieces, end = while_this_loop_waits(lab, whole(lab.workbench.source, max_tokens=30, ignore_eos=True))
    reply = await lab.achat("hello", temperature=0, max_tokens=30, ignore_eos=True)
    assert "".join(piece.text for piece in pieces) == reply.text
    assert end.stats is not None
    assert (end.stats.model, end.stats.output_tokens, end.stats.finish_reason) == ("echo", 30, "length")


async def test_unload_and_load_work_while_the_loop_is_blocked(tiny_lab: lmx_lab.Lab) -> None:
    source = tiny_lab.workbench.source
    assert while_this_loop_waits(tiny_lab, source.unload()) > 0
    assert source.state().model is None
    with pytest.raises(NotLoadedError):
        while_this_loop_waits(tiny_lab, whole(source))
    assert while_this_loop_waits(tiny_lab, source.load("tiny")).model == "tiny"
    assert [record.id for record in while_this_loop_waits(tiny_lab, source.models()).models if record.loaded] == [
        "tiny"
    ]


async def test_what_the_model_cannot_do_is_said(tiny_lab: lmx_lab.Lab) -> None:
    source = tiny_lab.workbench.source
    with pytest.raises(InvalidRequestError, match="temperature"):
        while_this_loop_waits(tiny_lab, whole(source, temperature=9))
    with pytest.raises(LabError, match="load"):
        while_this_loop_waits(tiny_lab, source.rerank("a", ["b"]))


async def test_leaving_an_answer_frees_its_slot(lab: lmx_lab.Lab) -> None:
    async def first() -> ChatPiece:
        pieces = lab.workbench.source.chat({"messages": HELLO, "max_tokens": 4000, "ignore_eos": True})
        try:
            return await anext(piece async for piece in pieces if piece.text)
        finally:
            await pieces.aclose()

    while_this_loop_waits(lab, first())
    await until(lambda: lab.engine.snapshot.active_requests == 0)
    await until(lambda: [each.event.finish_reason for each in lab.workbench.history.requests] == ["cancelled"])


async def test_a_blocked_loop_is_noticed_and_the_remedy_named(on_this_loop: lmx_lab.Lab) -> None:
    lab, source, seen = on_this_loop, on_this_loop.workbench.source, threading.Event()
    await until(lambda: source.state().state == "running")
    notes = []

    def look() -> None:
        while not seen.is_set():
            if (state := source.state()).state == "lagging":
                notes.append(state.note)
                seen.set()
            seen.wait(0.05)

    looking = threading.Thread(target=look)
    looking.start()
    noticed = seen.wait(WAIT_S)  # the cell
    seen.set()
    looking.join()
    assert noticed
    assert "%%offload" in notes[0]
    await until(lambda: lab.lag.worst is not None and source.state().state == "running")
    assert "%%offload" in source.state().note


async def test_on_a_thread_no_cell_is_blamed(tmp_path: Path) -> None:
    async with lmx_lab.Lab(Settings(home=tmp_path, port=0), loop="thread") as lab:
        assert lab._thread is not None

        async def sleep() -> None:
            time.sleep(1.3)  # noqa: ASYNC251

        await asyncio.wrap_future(lab._thread.submit(sleep()))
        await until(lambda: lab.lag.worst is not None)
        assert lab.workbench.source.state().note == ""


async def test_a_loop_that_comes_round_has_no_lag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmx_lab.notebook.loop_lag.BLOCKED_S", 60.0)  # no pause of a busy machine
    lag = LoopLag()
    lag.start()
    await asyncio.sleep(0.25)
    await until(lambda: lag.now_s == 0)
    assert lag.worst is None
    lag.stop()
    assert lag.now_s == 0


async def test_the_history_has_figures_and_requests(tiny_lab: lmx_lab.Lab) -> None:
    while_this_loop_waits(tiny_lab, whole(tiny_lab.workbench.source, max_tokens=5))
    history = tiny_lab.workbench.history
    await until(lambda: len(history.requests) == 1 and len(history.samples) >= 2)
    assert history.requests[0].event.completion_tokens == 5
    assert history.samples[-1].memory_active_gb > 0


async def test_a_stopped_lab_says_so(tmp_path: Path) -> None:
    async with lmx_lab.Lab(Settings(home=tmp_path, port=0), loop="thread") as lab:
        source = lab.workbench.source
    assert (source.state().state, source.sample()) == ("stopped", None)
    assert "launch" in source.state().note
    with pytest.raises(HostingError, match="launch"):
        while_this_loop_waits(lab, source.unload())
    lab.workbench.rest()
    assert not [thread for thread in threading.enumerate() if thread.name == "lmx-lab-panels"]


def test_the_next_lab_is_shown_where_the_last_one_was(tmp_path: Path) -> None:
    first = lmx_lab.launch(port=0, home=tmp_path)
    workbench = first.workbench
    first.stop()
    assert workbench.source.state().state == "stopped"
    with lmx_lab.launch(port=0, home=tmp_path) as second:
        assert second.workbench is workbench
        assert workbench.source.state().url == second.url
        with lmx_lab.launch(port=0, home=tmp_path, slots=2) as third:
            assert (third.workbench is workbench, workbench.source.state().state) == (True, "running")


# --- loads from two loops


async def test_who_asks_for_a_model_that_another_loop_loads_waits_for_the_same_load(
    tiny_on_this_loop: lmx_lab.Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab, checking, go_on, seen = tiny_on_this_loop, threading.Event(), threading.Event(), []
    check = lab.catalog.check

    def slow_check(entry: ModelEntry) -> None:
        seen.append(entry.id)
        checking.set()
        go_on.wait(WAIT_S)
        check(entry)

    monkeypatch.setattr(lab.catalog, "check", slow_check)
    there = lab.workbench.submit(lab.workbench.source.load("tiny-two"))
    await asyncio.to_thread(checking.wait, WAIT_S)
    here = asyncio.create_task(lab.aload("tiny-two"))
    given_up = asyncio.create_task(lab.aload("tiny-two"))
    await asyncio.sleep(0.1)
    given_up.cancel()
    # It is in the engine's hands.
    with pytest.raises(ModelBusyError, match="already being loaded into memory"):
        await lab.workbench.source.cancel_load("tiny-two")
    go_on.set()
    answers = [(await here).model, (await asyncio.wrap_future(there)).model]
    assert (answers, seen, lab.engine.snapshot.model) == (["tiny-two"] * 2, ["tiny-two"], "tiny-two")
    with pytest.raises(InvalidRequestError, match="not being loaded"):
        await lab.workbench.source.cancel_load("tiny-two")


async def test_a_load_that_fetches_can_be_given_up(on_this_loop: lmx_lab.Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    lab, fetching, go_on = on_this_loop, threading.Event(), threading.Event()

    def slow_fetch(name: str, tell: Callable[[Progress], None]) -> ModelEntry:
        fetching.set()
        go_on.wait(WAIT_S)
        raise NotLoadedError("given up")

    monkeypatch.setattr(lab.catalog, "fetch", slow_fetch)
    source = lab.workbench.source
    seen: list[ModelEvent | RequestEvent] = []

    async def watch() -> None:
        async for event in source.progress():
            seen.append(event)

    watching = asyncio.create_task(watch())
    loading = lab.workbench.submit(source.load("somebody/large"))
    await asyncio.to_thread(fetching.wait, WAIT_S)
    await source.cancel_load("somebody/large")
    with pytest.raises(NotLoadedError, match="cancelled"):
        await asyncio.wrap_future(loading)
    go_on.set()
    await until(lambda: any(isinstance(event, ModelEvent) and event.stage == "failed" for event in seen))
    assert lab.engine.snapshot.model == "echo"
    watching.cancel()


def test_a_lab_that_was_replaced_leaves_the_panels_to_the_next_one(tmp_path: Path) -> None:
    first = lmx_lab.launch("echo", port=0, home=tmp_path)
    with lmx_lab.launch(port=0, home=tmp_path, slots=2) as second:
        workbench = second.workbench
        first.stop()
        # Its panels have gone; what it says is about itself.
        assert (first.workbench is workbench, first.snapshot().server.state) == (False, "stopped")
        seen = len(workbench.history.samples)
        wait_until(lambda: len(workbench.history.samples) > seen)
        assert second.snapshot().server.state == "running"


def test_a_stopped_lab_that_was_asked_something_falls_asleep_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmx_lab.panels.workbench.TICK_S", 0.01)
    with lmx_lab.launch(port=0, home=tmp_path) as lab:
        pass
    with pytest.raises(HostingError, match="launch"):
        lab.workbench.submit(lab.workbench.source.unload()).result(WAIT_S)
    wait_until(lambda: not [thread for thread in threading.enumerate() if thread.name == "lmx-lab-panels"])


def test_a_source_that_fails_once_does_not_stop_the_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmx_lab.panels.workbench.TICK_S", 0.01)
    with lmx_lab.launch(port=0, home=tmp_path) as lab:
        sample, failed = lab.workbench.source.sample, threading.Event()

        def fail_once() -> Any:
            if not failed.is_set():
                failed.set()
                raise RuntimeError("no figures")
            return sample()

        monkeypatch.setattr(lab.workbench.source, "sample", fail_once)
        assert failed.wait(WAIT_S)
        seen = len(lab.workbench.history.samples)
        wait_until(lambda: len(lab.workbench.history.samples) > seen)


def test_a_launch_that_waits_for_another_one_gives_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmx_lab.notebook.launching.PATIENCE_S", 0.05)
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with launching._REGISTRY.lock:
            held.set()
            release.wait(WAIT_S)

    other = threading.Thread(target=hold)
    other.start()
    held.wait(WAIT_S)
    try:
        with pytest.raises(HostingError, match="another launch"):
            lmx_lab.launch(port=0, home=tmp_path)
    finally:
        release.set()
        other.join()


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_in_process_is_a_source(tmp_path: Path) -> None:
    from lmx_lab.panels.source import Source

    source: Source = InProcess(lmx_lab.Lab(Settings(home=tmp_path, port=0), loop="thread"))
    assert source.state().state == "stopped"


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
