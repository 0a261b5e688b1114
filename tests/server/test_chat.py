"""Test the chunks of a streamed answer with reasoning and tool calls, and that an answer can be sent back unchanged."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from lmx_lab.engine import GenerationRequest, TextPrompt, TokenStream
from lmx_lab.engine.stream import Mailbox
from lmx_lab.server.chat import _chunks, _complete
from lmx_lab.server.generation import Generation
from lmx_lab.server.serialize import ChatAnswer
from lmx_lab.server.translate import generation_request
from lmx_lab.values.generation import Delta, ToolCallDelta
from tests.server.test_translate import chat, report

ASKED = GenerationRequest(prompt=TextPrompt(text="hello"))

pytestmark = pytest.mark.anyio
ANSWER = ChatAnswer(model="tiny", fingerprint="mlx")
CALLS = (ToolCallDelta(index=0, id="c1", name="look", arguments='{"at":"sea"}'),)


class FakeStream(TokenStream):
    """A stream that returns the given deltas without merging them."""

    def __init__(self, *deltas: Delta) -> None:
        mailbox = Mailbox(asyncio.get_running_loop())
        mailbox.deliver(report(reasoning=2, finish="tool_calls"))
        super().__init__(mailbox, lambda: None, model="tiny")
        self._deltas = list(deltas)

    async def __anext__(self) -> Delta:
        if not self._deltas:
            raise StopAsyncIteration
        return self._deltas.pop(0)


def generation() -> Generation:
    deltas = (
        Delta(text="", tokens=2, reasoning="hm"),
        Delta(text="", tokens=1),
        Delta(text="Let me see.", tokens=1),
        Delta(text="", tokens=1, tool_calls=CALLS),
    )
    return Generation(FakeStream(*deltas), request=ASKED, request_id="req_1", observe=lambda end: None)


async def test_reasoning_text_and_calls_are_streamed_in_separate_chunks() -> None:
    lines = [json.loads(line) async for line in _chunks(ANSWER, [generation()], include_usage=True)]
    named = {"index": 0, "id": "c1", "type": "function", "function": {"name": "look", "arguments": ""}}
    assert [choice["delta"] for line in lines for choice in line["choices"]] == [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "hm"},
        {"content": "Let me see."},
        {"tool_calls": [named]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"at":"sea"}'}}]},
        {},
    ]
    assert [choice["finish_reason"] for line in lines for choice in line["choices"]][-2:] == [None, "tool_calls"]
    assert lines[-1]["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}
    chunks = [ChatCompletionChunk.model_validate(line) for line in lines]
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    calls = [call for delta in deltas for call in delta.tool_calls or ()]
    assert "".join(call.function.arguments or "" for call in calls if call.function) == '{"at":"sea"}'


async def test_an_answer_may_be_sent_back_in_the_next_request() -> None:
    body = json.loads(await _complete(ANSWER, [generation()]))
    assert ChatCompletion.model_validate(body).choices[0].finish_reason == "tool_calls"
    answer: dict[str, Any] = body["choices"][0]["message"]
    history = [answer, {"role": "tool", "tool_call_id": "c1", "content": "blue"}]
    prompt: Any = generation_request(chat(messages=history)).prompt
    assert prompt.messages[0]["reasoning_content"] == "hm"
    assert prompt.messages[0]["tool_calls"][0]["function"] == {"name": "look", "arguments": {"at": "sea"}}
