"""Tests that the end of an answer is reported exactly once."""

import asyncio
import gc

import pytest

from lmx_lab.engine import Answer, GenerationRequest, TextPrompt
from lmx_lab.engine.stream import Mailbox
from lmx_lab.errors import EngineError
from lmx_lab.values.outputs import Delta, PromptProgress, ToolCallDelta
from lmx_lab.values.timeline import StepLog
from tests.support.asking import report

pytestmark = pytest.mark.anyio


class Watched:
    """An answer that reads a mailbox, into which the test puts deltas."""

    def __init__(self):
        self.ends = []
        self.cancelled = 0
        self.mailbox = Mailbox(asyncio.get_running_loop(), StepLog(0.0))
        request = GenerationRequest(prompt=TextPrompt(text="hello"))
        self.answer = Answer(self.mailbox, self._cancel, request=request, model="tiny", prompt=(1, 2, 3))
        self.answer.on_end = lambda answer, outcome, code: self.ends.append((outcome, code, answer.tokens))

    def _cancel(self):
        self.cancelled += 1


@pytest.fixture
async def watched():
    return Watched()


async def test_a_complete_answer_is_reported_once(watched):
    watched.mailbox.deliver(Delta(text="a", tokens=1))
    watched.mailbox.deliver(report())
    assert (await watched.answer.read()).text == "a"
    await watched.answer.aclose()
    watched.answer.close()
    await asyncio.sleep(0)
    assert watched.ends == [("stop", None, 1)]
    assert watched.answer.final_report() == report()
    assert watched.cancelled == 0


@pytest.mark.parametrize("finish", ["stop", "tool_calls"])
@pytest.mark.parametrize("end", [Answer.read, Answer.aclose])
async def test_a_complete_answer_is_reported_with_its_reason_even_if_it_is_closed(watched, finish, end):
    watched.mailbox.deliver(report(finish=finish))
    await end(watched.answer)
    assert watched.ends == [(finish, None, 0)]


async def test_all_deltas_are_merged_and_kept_if_requested(watched):
    watched.answer.deltas = []
    parts = [
        Delta(text="", tokens=1, reasoning="h"),
        Delta(text="a", tokens=2, reasoning="m"),
        Delta(text="b", tokens=1, tool_calls=(ToolCallDelta(index=0, id="c", name="f", arguments="{"),)),
        Delta(text="", tokens=1, tool_calls=(ToolCallDelta(index=0, arguments="}"),)),
    ]
    first = asyncio.ensure_future(anext(watched.answer))
    await asyncio.sleep(0)
    watched.mailbox.deliver(parts[0])
    assert await first == parts[0]
    for part in (*parts[1:], report()):
        watched.mailbox.deliver(part)
    calls = (ToolCallDelta(index=0, id="c", name="f", arguments="{}"),)
    rest = Delta(text="ab", tokens=4, reasoning="m", tool_calls=calls)
    assert await watched.answer.read() == rest
    assert watched.answer.deltas == [parts[0], rest]


async def test_deltas_are_passed_on_in_order_and_only_while_the_reader_waits():
    watched, passed, accepts = Watched(), [], True

    def pass_on(delta):
        if accepts:
            passed.append(delta.text)
        return accepts

    answer, deliver = watched.answer, watched.mailbox.deliver
    answer.deltas, answer.pass_on = [], pass_on
    deliver(Delta(text="a", tokens=1))
    assert (await anext(answer)).text == "a", "there was no reader"
    waiting = asyncio.ensure_future(anext(answer))
    await asyncio.sleep(0)
    for text in ("b", "", "c"):
        deliver(Delta(text=text, tokens=len(text)))
    accepts = False
    deliver(Delta(text="d", tokens=1))
    accepts = True
    deliver(Delta(text="e", tokens=1))
    assert (await waiting).text == "de", "it does not overtake the refused delta"
    waiting = asyncio.ensure_future(anext(answer))
    await asyncio.sleep(0)
    deliver(Delta(text="f", tokens=1))
    deliver(report())
    with pytest.raises(StopAsyncIteration):
        await waiting
    assert passed == ["b", "c", "f"]
    assert "".join(delta.text for delta in answer.deltas) == "abcdef"
    assert watched.ends == [("stop", None, 6)]


async def test_a_delta_that_cannot_be_passed_on_is_read(watched):
    watched.answer.pass_on = lambda delta: 1 / 0
    waiting = asyncio.ensure_future(anext(watched.answer))
    await asyncio.sleep(0)
    watched.mailbox.deliver(Delta(text="a", tokens=1))
    assert (await waiting).text == "a"
    await watched.answer.aclose()


async def test_an_error_is_reported_with_its_code(watched):
    watched.mailbox.deliver(EngineError("broken"))
    with pytest.raises(EngineError):
        await watched.answer.read()
    assert watched.ends == [("error", "internal-error", 0)]
    with pytest.raises(EngineError, match="without a report"):
        watched.answer.final_report()


async def test_a_closed_answer_is_reported_with_the_tokens_that_were_delivered(watched):
    watched.mailbox.deliver(Delta(text="a", tokens=2))
    async with watched.answer:
        await anext(watched.answer)
    assert watched.ends == [("cancelled", None, 2)]
    assert watched.cancelled == 1


@pytest.mark.parametrize("closes", [False, True])
async def test_an_answer_that_is_deleted_or_closed_on_another_thread_is_reported_as_cancelled(watched, closes):
    if closes:
        await asyncio.to_thread(watched.answer.close)
    else:
        del watched.answer
        gc.collect()
    await asyncio.sleep(0)
    assert watched.ends == [("cancelled", None, 0)]
    assert watched.cancelled == 1


async def test_a_cancelled_wait_for_a_delta_does_not_end_the_answer(watched):
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(watched.answer), 0)
    assert watched.ends == []
    watched.mailbox.deliver(report())
    await watched.answer.read()
    assert watched.ends == [("stop", None, 0)]


async def test_the_status_describes_the_request_before_the_first_token(watched):
    assert watched.answer.status == "queued"
    watched.mailbox.deliver(PromptProgress(done=512, total=1400))
    assert watched.answer.status == "prompt 512/1400 tokens"
    await watched.answer.aclose()
