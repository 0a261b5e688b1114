"""Whatever happens to a generation, its end is told once."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator

import pytest

from lmx_lab.engine import TokenStream
from lmx_lab.engine.stream import Mailbox
from lmx_lab.errors import EngineError
from lmx_lab.server.generation import Generation, RequestEnd, attended, gathered
from lmx_lab.values.generation import Delta, PromptProgress, ToolCallDelta
from tests.server.test_translate import report

pytestmark = pytest.mark.anyio


class Watched:
    """A generation over a mailbox that the test fills."""

    def __init__(self) -> None:
        self.ends: list[RequestEnd] = []
        self.cancelled = 0
        self.mailbox = Mailbox(asyncio.get_running_loop())
        stream = TokenStream(self.mailbox, self._cancel, (1, 2, 3))
        self.generation = Generation(stream, request_id="req_1", model="tiny", observe=self.ends.append)

    def _cancel(self) -> None:
        self.cancelled += 1

    @property
    def outcomes(self) -> list[tuple[str, str | None]]:
        return [(end.outcome, end.code) for end in self.ends]


async def test_a_good_end_is_told_once_with_its_report() -> None:
    watched = Watched()
    watched.mailbox.deliver(Delta(text="a", tokens=1))
    watched.mailbox.deliver(report())
    assert (await watched.generation.whole()).text == "a"
    await watched.generation.aclose()
    assert watched.ends == [
        RequestEnd(
            request_id="req_1",
            model="tiny",
            outcome="stop",
            report=report(),
            prompt_tokens=3,
            output_tokens=1,
        )
    ]
    assert watched.ends[0].event().completion_tokens == 5


async def test_an_answer_of_calls_is_an_outcome_of_its_own() -> None:
    watched = Watched()
    watched.mailbox.deliver(report(finish="tool_calls"))
    await watched.generation.whole()
    assert watched.outcomes == [("tool_calls", None)]
    assert watched.ends[0].event().finish_reason == "tool_calls"


async def test_everything_that_comes_is_joined() -> None:
    async def pieces() -> AsyncIterator[Delta]:
        yield Delta(text="", tokens=1, reasoning="h")
        yield Delta(text="a", tokens=2, reasoning="m")
        yield Delta(text="b", tokens=1, tool_calls=(ToolCallDelta(index=0, id="c", name="f", arguments="{"),))
        yield Delta(text="", tokens=1, tool_calls=(ToolCallDelta(index=0, arguments="}"),))

    calls = (ToolCallDelta(index=0, id="c", name="f", arguments="{}"),)
    assert await gathered(pieces()) == Delta(text="ab", tokens=5, reasoning="hm", tool_calls=calls)


async def test_a_failure_is_told_with_its_code() -> None:
    watched = Watched()
    watched.mailbox.deliver(EngineError("broken"))
    with pytest.raises(EngineError):
        await watched.generation.whole()
    assert watched.outcomes == [("error", "internal-error")]


async def test_leaving_is_told_with_what_was_handed_on() -> None:
    watched = Watched()
    watched.mailbox.deliver(Delta(text="a", tokens=2))
    async with attended([watched.generation]):
        await anext(watched.generation)
    assert watched.outcomes == [("cancelled", None)]
    assert (watched.ends[0].prompt_tokens, watched.ends[0].output_tokens) == (3, 2)
    assert watched.ends[0].event().finish_reason == "cancelled"
    assert watched.cancelled == 1


async def test_what_is_dropped_is_told_too() -> None:
    watched = Watched()
    del watched.generation
    gc.collect()
    await asyncio.sleep(0)
    assert watched.outcomes == [("cancelled", None)]


async def test_what_had_ended_before_it_was_left_has_ended_well() -> None:
    watched = Watched()
    watched.mailbox.deliver(report())
    await watched.generation.aclose()
    assert watched.outcomes == [("stop", None)]


async def test_a_wait_that_was_cut_short_is_no_end() -> None:
    watched = Watched()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(watched.generation), 0)
    assert watched.ends == []
    watched.mailbox.deliver(report())
    await watched.generation.whole()
    assert watched.outcomes == [("stop", None)]


async def test_a_remark_says_where_it_stands() -> None:
    watched = Watched()
    assert watched.generation.remark == "queued"
    watched.mailbox.deliver(PromptProgress(done=512, total=1400))
    assert watched.generation.remark == "prompt 512/1400 tokens"
    await watched.generation.aclose()
