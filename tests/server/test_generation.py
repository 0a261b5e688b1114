"""Tests that the end of a generation is reported exactly once."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator

import pytest

from lmx_lab.engine import GenerationRequest, TextPrompt, TokenStream
from lmx_lab.engine.stream import Mailbox
from lmx_lab.errors import EngineError
from lmx_lab.server.generation import Generation, RequestEnd, closing_all, collect
from lmx_lab.values.outputs import Delta, PromptProgress, ToolCallDelta
from tests.support.asking import report

ASKED = GenerationRequest(prompt=TextPrompt(text="hello"))

pytestmark = pytest.mark.anyio


class Watched:
    """A generation that reads a mailbox, into which the test puts deltas."""

    def __init__(self) -> None:
        self.ends: list[RequestEnd] = []
        self.cancelled = 0
        self.mailbox = Mailbox(asyncio.get_running_loop())
        stream = TokenStream(self.mailbox, self._cancel, model="tiny", prompt=(1, 2, 3))
        self.generation = Generation(stream, request=ASKED, request_id="req_1", observe=self.ends.append)

    def _cancel(self) -> None:
        self.cancelled += 1

    @property
    def outcomes(self) -> list[tuple[str, str | None]]:
        return [(end.outcome, end.code) for end in self.ends]


async def test_a_complete_answer_is_reported_with_its_cost():
    watched = Watched()
    watched.mailbox.deliver(Delta(text="a", tokens=1))
    watched.mailbox.deliver(report())
    assert (await watched.generation.read_all()).text == "a"
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


async def test_tool_calls_are_a_separate_outcome():
    watched = Watched()
    watched.mailbox.deliver(report(finish="tool_calls"))
    await watched.generation.read_all()
    assert watched.outcomes == [("tool_calls", None)]
    assert watched.ends[0].event().finish_reason == "tool_calls"


async def test_all_deltas_are_merged():
    async def pieces() -> AsyncIterator[Delta]:
        yield Delta(text="", tokens=1, reasoning="h")
        yield Delta(text="a", tokens=2, reasoning="m")
        yield Delta(text="b", tokens=1, tool_calls=(ToolCallDelta(index=0, id="c", name="f", arguments="{"),))
        yield Delta(text="", tokens=1, tool_calls=(ToolCallDelta(index=0, arguments="}"),))

    calls = (ToolCallDelta(index=0, id="c", name="f", arguments="{}"),)
    assert await collect(pieces()) == Delta(text="ab", tokens=5, reasoning="hm", tool_calls=calls)


async def test_an_error_is_reported_with_its_code():
    watched = Watched()
    watched.mailbox.deliver(EngineError("broken"))
    with pytest.raises(EngineError):
        await watched.generation.read_all()
    assert watched.outcomes == [("error", "internal-error")]


async def test_a_closed_generation_is_reported_with_the_tokens_that_were_delivered():
    watched = Watched()
    watched.mailbox.deliver(Delta(text="a", tokens=2))
    async with closing_all([watched.generation]):
        await anext(watched.generation)
    assert watched.outcomes == [("cancelled", None)]
    assert (watched.ends[0].prompt_tokens, watched.ends[0].output_tokens) == (3, 2)
    assert watched.ends[0].event().finish_reason == "cancelled"
    assert watched.cancelled == 1


async def test_a_deleted_generation_is_reported_as_cancelled():
    watched = Watched()
    del watched.generation
    gc.collect()
    await asyncio.sleep(0)
    assert watched.outcomes == [("cancelled", None)]


async def test_a_generation_that_was_complete_when_it_was_closed_is_reported_as_complete():
    watched = Watched()
    watched.mailbox.deliver(report())
    await watched.generation.aclose()
    assert watched.outcomes == [("stop", None)]


async def test_a_cancelled_wait_for_a_delta_does_not_end_the_generation():
    watched = Watched()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(watched.generation), 0)
    assert watched.ends == []
    watched.mailbox.deliver(report())
    await watched.generation.read_all()
    assert watched.outcomes == [("stop", None)]


async def test_the_status_describes_the_request_before_the_first_token():
    watched = Watched()
    assert watched.generation.status == "queued"
    watched.mailbox.deliver(PromptProgress(done=512, total=1400))
    assert watched.generation.status == "prompt 512/1400 tokens"
    await watched.generation.aclose()
