"""Grammars are checked one after the other, and none waits long for another."""

import asyncio
import threading

import pytest

from lmx_lab.engine.grammar import compile as module
from lmx_lab.engine.grammar.compile import GrammarQueue
from lmx_lab.errors import QueueFullError

pytestmark = pytest.mark.anyio


@pytest.fixture
def grammars():
    grammars = GrammarQueue("test")
    yield grammars
    grammars.close()


async def test_a_grammar_that_waits_too_long_is_refused_and_a_later_one_is_checked(grammars, monkeypatch):
    monkeypatch.setattr(module, "WAIT_S", 0.01)
    started, released = threading.Event(), threading.Event()

    def slow():
        started.set()
        assert released.wait(60)
        return "slow"

    first = asyncio.create_task(grammars.run(slow))
    await asyncio.to_thread(started.wait)
    with pytest.raises(QueueFullError, match=r"0\.01 s") as refused:
        await grammars.run(pytest.fail)
    assert refused.value.retry_after_s == 1
    released.set()
    # The time limit is one for waiting; work that has started ends by itself.
    assert await first == "slow"
    monkeypatch.setattr(module, "WAIT_S", 60.0)
    assert await grammars.run(lambda: "later") == "later"
    assert grammars._unfinished == 0


async def test_grammars_behind_a_slow_one_that_was_refused_are_refused_earlier(grammars, monkeypatch):
    monkeypatch.setattr(module, "WAIT_BEHIND_SLOW_S", 0.01)
    started, ended = threading.Event(), threading.Event()

    def refused():
        assert started.wait(60)
        raise QueueFullError("slow")

    first = asyncio.create_task(grammars.run(refused))
    second = asyncio.create_task(grammars.run(lambda: ended.wait(60)))
    third = asyncio.create_task(grammars.run(pytest.fail))
    while grammars._unfinished < 3:  # noqa: ASYNC110
        await asyncio.sleep(0)
    started.set()
    with pytest.raises(QueueFullError, match="slow"):
        await first
    with pytest.raises(QueueFullError, match=r"0\.01 s"):
        await third
    ended.set()
    assert await second


async def test_cancelling_removes_a_grammar_that_waits(grammars):
    released = threading.Event()
    first = asyncio.create_task(grammars.run(lambda: released.wait(60)))
    second = asyncio.create_task(grammars.run(pytest.fail))
    while grammars._unfinished < 2:  # noqa: ASYNC110
        await asyncio.sleep(0)
    second.cancel()
    await asyncio.wait([second])
    assert second.cancelled()
    released.set()
    assert await first
