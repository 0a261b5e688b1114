"""Tests of answers, which are the same for each way to reach a lab."""

import asyncio
import copy
import functools
import gc
import json
import pickle
from typing import Literal

import pandas
import pytest

from lmx_lab.arguments import chat_request
from lmx_lab.errors import InvalidRequestError, NotFoundError, RequestStoppedError
from tests.support.asking import ENDLESS
from tests.support.labs import manager_of, read_answer, wait_until_idle
from tests.support.waiting import auntil

pytestmark = pytest.mark.anyio
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
TEXT = "The sea is wide and deep, and what it says it says again and again."


def on_the_panels_loop(lab, work):
    """Run a coroutine on the loop of the lab's panels, and block the caller's loop, on which the lab may run."""
    return lab.workbench.submit(work).result(60)


async def test_a_chat_gives_text_usage_and_timings(lab, served):
    reply = await lab.achat(TEXT, max_tokens=4, temperature=0, seed=1, system="Be brief.")
    assert reply.text == (await served.achat(TEXT, max_tokens=4, temperature=0, seed=1, system="Be brief.")).text
    assert (reply.model, reply.finish_reason, reply.usage.completion_tokens) == ("echo", "length", 4)
    assert (reply.timings.predicted_n, reply.reasoning_tokens) == (4, 0)
    assert str(reply) == reply.text


@pytest.mark.parametrize(
    ("prompt", "parameters"),
    [("<think>mm hm</think>hello", {}), ("hello", {"tools": [TOOL], "tool_choice": "required"})],
    ids=["thoughts", "calls"],
)
async def test_thoughts_and_calls_are_those_of_the_server(lab, served, prompt, parameters):
    here, there = [await each.achat(prompt, temperature=0, max_tokens=60, **parameters) for each in (served, lab)]
    assert (there.reasoning, there.reasoning_tokens) == (here.reasoning, here.reasoning_tokens)
    assert [(it.name, it.arguments) for it in there.tool_calls] == [(it.name, it.arguments) for it in here.tool_calls]
    assert bool(here.reasoning) != bool(here.tool_calls)


async def test_the_pieces_of_a_stream_are_its_reply(lab):
    stream = await lab.astream([{"role": "user", "content": TEXT}], max_tokens=15)
    pieces = [piece async for piece in stream]
    assert "".join(pieces) == stream.text == stream.reply.text
    assert stream.reply.usage.completion_tokens == 15
    assert [piece async for piece in stream] == []
    pending = lab.astream(TEXT, max_tokens=15, temperature=0)
    assert "".join([piece async for piece in pending]) == pending.reply.text != ""
    with pytest.raises(InvalidRequestError, match="temperature"):
        await anext(aiter(lab.astream("hi", temperature=-1)))
    # Awaiting and iterating start the same answer once, in any order and number.
    assert (await pending).reply is pending.reply
    pending = lab.astream(TEXT, max_tokens=15, temperature=0)
    awaited = await pending
    assert "".join([piece async for piece in pending]) == awaited.text == pending.reply.text

    # Of two tasks, one reads the stream, and the other gets an error.
    async def read(shared):
        return [piece async for piece in shared]

    shared = lab.astream(TEXT, max_tokens=15, temperature=0)
    pieces, error = await asyncio.gather(read(shared), read(shared), return_exceptions=True)
    assert "".join(pieces) == awaited.text
    assert isinstance(error, RuntimeError)
    # It is a coroutine for tasks.
    stream = await asyncio.create_task(lab.astream(TEXT, max_tokens=15, temperature=0))
    assert "".join([piece async for piece in stream]) == awaited.text
    shared = lab.astream(TEXT)
    await shared.aclose()
    with pytest.raises(RuntimeError, match="was closed"):
        await shared
    # The blocking form, in another thread, because this one runs the loop.
    blocking = lab.chat(TEXT, stream=True, max_tokens=15, temperature=0)
    assert "".join(await asyncio.to_thread(list, blocking)) == blocking.reply.text


async def test_plain_text_is_continued_without_a_template(lab, served):
    reply = await lab.acomplete(TEXT, max_tokens=4, temperature=0)
    assert (reply.text, reply.finish_reason) == (
        (await served.acomplete(TEXT, max_tokens=4, temperature=0)).text,
        "length",
    )
    assert (reply.usage.completion_tokens, reply.usage.prompt_tokens) == (4, len(await lab.atokenize(TEXT)))
    scored = await lab.acomplete("hi there", max_tokens=0, echo=True, logprobs=0)
    assert (scored.text, len(scored.tokens)) == ("hi there", scored.usage.prompt_tokens)
    tokens = await lab.atokenize(TEXT)
    assert (await lab.acomplete(tokens, max_tokens=4, temperature=0)).text == reply.text
    for prompt in ("hi there", await lab.atokenize("hi there")):
        echoed = await lab.acomplete(prompt, max_tokens=1, echo=True, logprobs=2)
        assert echoed.text == "hi there" + (await lab.acomplete(prompt, max_tokens=1)).text
        assert [token.text for token in echoed.tokens][:-1] == [token.text for token in scored.tokens]
        assert echoed.tokens[0].logprob is None
        assert len(echoed.tokens[-1].top) == 2
    for wrong in ({"prompt": ["a", "b"]}, {"prompt": "a", "n": 2}, {"prompt": "a", "stream": True}):
        with pytest.raises(InvalidRequestError, match=r"complete\(\)"):
            await lab.acomplete(**wrong)
    # Messages are counted as the model reads them.
    messages = [{"role": "user", "content": "hi"}]
    assert len(await lab.atokenize(messages)) == (await lab.achat(messages, max_tokens=1)).usage.prompt_tokens
    assert lab.model == "echo"


async def test_python_functions_are_tools(lab):
    def weather(city: Literal["Rome", "Oslo"], days: int = 1) -> str:
        """The weather in a city.

        Args:
            city: Its name.
        """
        return f"{days} days of sun in {city}"

    reply = await lab.achat("hello", tools=[weather, TOOL], tool_choice="required", max_tokens=60, temperature=0)
    by_hand = {"city": {"enum": ["Rome", "Oslo"], "type": "string", "description": "Its name."}}
    tool = {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather in a city.",
            "parameters": {
                "type": "object",
                "properties": {**by_hand, "days": {"type": "integer", "default": 1}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
    same = await lab.achat("hello", tools=[tool, TOOL], tool_choice="required", max_tokens=60, temperature=0)
    assert [(it.name, it.arguments) for it in reply.tool_calls] == [(it.name, it.arguments) for it in same.tool_calls]
    assert reply.usage.prompt_tokens == same.usage.prompt_tokens
    with pytest.raises(InvalidRequestError, match="cannot be a tool: its parameter 'args'"):
        await lab.achat("hello", tools=[lambda *args: None])
    in_rome = functools.partial(weather, "Rome")
    for given in (weather, {weather}, {"weather": weather}.values(), [weather, weather], [in_rome]):
        called = await lab.achat("hello", tools=given, tool_choice="required", max_tokens=60, temperature=0)
        assert {it.name for it in called.tool_calls} == {"weather"}
    with pytest.raises(InvalidRequestError, match="two functions with the name 'weather'"):
        await lab.achat("hello", tools=[weather, in_rome])


async def test_replies_can_be_copied_stored_and_listed(lab):
    reply = await lab.achat(TEXT, max_tokens=4, temperature=0)
    for same in (copy.copy(reply), copy.deepcopy(reply), pickle.loads(pickle.dumps(reply))):
        assert same == reply
        assert same.to_dict() == reply.to_dict()
    assert json.loads(json.dumps(reply.to_dict()))["output_tokens"] == 4
    assert list(pandas.DataFrame([reply, reply])["text"]) == [reply.text, reply.text]
    assert list((await lab.amodels()).df["id"]) == ["echo"]


async def test_the_requests_of_all_clients_are_listed_and_each_can_be_stopped(lab, served):
    assert repr(await lab.aclients()) == "no request waits or runs"
    streams = [aiter(await each.astream("hi", **ENDLESS)) for each in (lab, served)]
    for stream in streams:
        await anext(stream)
    first, second = running = await lab.aclients()
    assert (second.client, second.id[:4]) == (None, "lab_")
    assert first.completion_tokens > 0
    assert first.age_s > second.age_s > 0
    assert list(running.df["id"]) == [first.id, second.id]
    assert "the notebook" in repr(running)
    assert "the notebook" in running._repr_html_()
    with pytest.raises(NotFoundError, match="no running request has an id that begins with 'x'"):
        await lab.astop_request("x")
    for stream, request in zip(streams, running, strict=True):
        assert await lab.astop_request(request.id) == request.id
        with pytest.raises(RequestStoppedError):
            [piece async for piece in stream]
    assert await lab.aclients() == []


@pytest.mark.parametrize("end", ["left", "closed", "left blocking", "closed blocking", "cancelled"])
async def test_an_answer_that_is_not_read_to_its_end_frees_its_slot(lab, served, end):
    before = manager_of(served).snapshot.totals.output_tokens

    def left(stream):
        for _ in stream:
            break

    # The end of the loop ends the answer, and not the collection of the iterator.
    gc.disable()
    try:
        if end == "cancelled":
            chat = asyncio.create_task(lab.achat("hi", **ENDLESS))
            await auntil(lambda: manager_of(served).snapshot.totals.output_tokens > before)
            chat.cancel()
            await asyncio.wait([chat])
            assert chat.cancelled()
        elif end == "left":
            stream = await lab.astream("hi", **ENDLESS)
            async for _ in stream:
                break
        elif end == "closed":
            stream = await lab.astream("hi", **ENDLESS)
            await stream.aclose()
            stream.close()
            assert [piece async for piece in stream] == []
        elif end == "left blocking":
            stream = await asyncio.to_thread(lab.chat, "hi", stream=True, **ENDLESS)
            await asyncio.to_thread(left, stream)
        else:
            stream = await asyncio.to_thread(lab.chat, "hi", stream=True, **ENDLESS)
            await asyncio.to_thread(stream.close)
            assert await asyncio.to_thread(list, stream) == []
        await asyncio.to_thread(wait_until_idle, served)
    finally:
        gc.enable()
    assert end == "cancelled" or stream.reply is None
    assert manager_of(served).snapshot.totals.output_tokens - before < ENDLESS["max_tokens"]


async def test_concurrent_chats_share_the_engine(lab):
    def blocking():
        return lab.chat(TEXT, max_tokens=20, temperature=0)

    chats = [lab.achat(TEXT, max_tokens=20, temperature=0) for _ in range(4)]
    threads = [asyncio.to_thread(blocking) for _ in range(4)]
    assert len({reply.text for reply in await asyncio.gather(*chats, *threads)}) == 1


async def test_verbs_can_be_awaited_on_another_loop(lab):
    def ask():
        return asyncio.run(lab.achat(TEXT, max_tokens=2)).usage.completion_tokens

    assert await asyncio.to_thread(ask) == 2


# --- answers for panels


async def test_an_answer_for_panels_is_complete_while_the_callers_loop_is_blocked(lab, served, way):
    parameters = {"temperature": 0, "max_tokens": 30, "ignore_eos": True}
    request = chat_request("hello", {**parameters, "logprobs": 2})

    async def read():
        running = await lab.workbench.backend.generate(request)
        tokens = set()
        while (delta := await running.next()) is not None:
            tokens.add(delta.tokens)
        return running.text, tokens, running.finished

    blocked = on_the_panels_loop(lab, read_answer(lab.workbench.backend, request))
    text, tokens, cost = on_the_panels_loop(lab, read())
    assert blocked.text == text == (await served.achat("hello", **parameters)).text
    first = blocked.tokens[0]
    assert (len(first.top), first.text, first.bytes) == (2, first.top[0].text, first.top[0].text.encode())
    for found in (blocked, cost):
        assert (found.model, found.usage.completion_tokens, found.finish_reason) == ("echo", 30, "length")
        # Only the server's own process has a report.
        assert (found.report is None) == (way == "attached")
    assert way != "attached" or tokens == {0}, "the wire has no number of tokens"
    assert cost.ttft_s > 0


@pytest.mark.parametrize("end", ["closed", "cancelled"])
async def test_an_answer_that_a_panel_leaves_frees_its_slot(lab, served, end):
    def cancelled():
        return sum(each.event.finish_reason == "cancelled" for each in lab.workbench.history.requests)

    await auntil(lambda: bool(lab.workbench.history.samples))
    before, ended = manager_of(served).snapshot.totals.output_tokens, cancelled()
    backend, request = lab.workbench.backend, chat_request("hello", ENDLESS)
    if end == "closed":

        async def first():
            running = await backend.generate(request)
            try:
                while not running.text:
                    await running.next()
                return running.text
            finally:
                running.close()

        assert on_the_panels_loop(lab, first())
    else:
        answer = lab.workbench.submit(read_answer(backend, request))
        await auntil(lambda: manager_of(served).snapshot.totals.output_tokens > before)
        answer.cancel()
    await auntil(lambda: manager_of(served).snapshot.active_requests == 0)
    assert manager_of(served).snapshot.totals.output_tokens - before < ENDLESS["max_tokens"]
    await auntil(lambda: cancelled() == ended + 1)
