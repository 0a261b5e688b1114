"""Tests of reading chunks as servers of different projects send them."""

import pytest

from lmx_lab import errors
from lmx_lab.client.chat_format import MAX_CALLS, TokenUsage
from lmx_lab.values.outputs import ToolCallDelta
from tests.support.model_server import (
    DONE,
    Scripted,
    chunk,
    ending,
    event,
    json_answer,
    pieces,
    read_answer,
    says,
    token,
)

pytestmark = pytest.mark.anyio


def delta(**fields):
    return chunk(fields)


def called(name="add", arguments="{}", **fields):
    return {"function": {"name": name, "arguments": arguments}, **fields}


async def test_text_thoughts_and_usage_are_read():
    text, thinking, found, reason, usage = await read_answer(says("Hel", "lo", thinks=["Hm", "."]))
    assert (text, thinking, found, reason, usage) == ("Hello", "Hm.", (), "stop", TokenUsage(prompt=5, completion=4))


@pytest.mark.parametrize(
    "deltas",
    [
        pytest.param(
            [
                [called(arguments="", index=0, id="a")],
                [{"index": 0, "function": {"arguments": '{"x":'}}],
                [{"index": 0, "function": {"arguments": " 1}"}}],
                [called("sub", "", index=1, id="b")],
                [{"index": 1, "function": {"arguments": "{}"}}],
            ],
            id="OpenAI, llama.cpp, the lab",
        ),
        pytest.param(
            [
                [called(arguments="", index=0, id="a"), called("sub", "", index=1, id="b")],
                [
                    {"index": 1, "function": {"arguments": "{}"}},
                    {"index": 0, "function": {"arguments": '{"x": 1}', "name": None}, "id": ""},
                ],
            ],
            id="interleaved",
        ),
        pytest.param(
            [[called(arguments='{"x": 1}', index=0, id="a")], [called("sub", index=0, id="b")]],
            id="Ollama: every index is 0",
        ),
        pytest.param([[called(arguments='{"x": 1}', id="a"), called("sub", id="b")]], id="no index"),
        pytest.param(
            [[called(arguments='{"x":', id="a")], [{"function": {"arguments": " 1}"}}], [called("sub", id="b")]],
            id="no index, in pieces",
        ),
        pytest.param([[called(arguments={"x": 1}, id="a"), called("sub", {}, id="b")]], id="arguments as objects"),
        pytest.param(
            [
                [called(arguments='{"x":', index=0, id="a")],
                [called(arguments=" 1}", index=0, id="a")],
                [called("sub", index=1, id="b")],
            ],
            id="id and name again with each piece",
        ),
    ],
)
async def test_tool_calls_are_assembled_from_pieces_of_all_servers(deltas):
    script = [*(delta(tool_calls=items) for items in deltas), *ending("tool_calls")]
    assert (await read_answer(script))[2] == (
        ToolCallDelta(index=0, id="a", name="add", arguments='{"x": 1}'),
        ToolCallDelta(index=1, id="b", name="sub", arguments="{}"),
    )


async def test_tool_calls_may_have_no_id():
    """As mlx_lm.server sends them: whole, in one delta."""
    found = (await read_answer([delta(tool_calls=[called(), called()]), *ending("tool_calls")]))[2]
    assert [(call.id, call.name) for call in found] == [(None, "add"), (None, "add")]


async def test_the_older_function_call_is_read_as_a_tool_call():
    script = [
        delta(function_call={"name": "add", "arguments": '{"x"'}),
        delta(function_call={"arguments": ": 1}"}),
        *ending("function_call"),
    ]
    _, _, found, reason, _ = await read_answer(script)
    assert (found, reason) == ((ToolCallDelta(index=0, id=None, name="add", arguments='{"x": 1}'),), "function_call")


@pytest.mark.parametrize("reason", ["stop", "length", "content_filter", "tool_calls", "eos_token"])
async def test_finish_reasons_are_passed_on(reason):
    assert (await read_answer(says("a", finish=reason)))[3] == reason


@pytest.mark.parametrize(
    "message",
    [{"content": "hi", "reasoning": "hm"}, {"content": "hi", "reasoning_content": "hm", "tool_calls": None}],
)
async def test_a_complete_answer_instead_of_a_stream_is_read(message):
    usage = {"prompt_tokens": 3, "completion_tokens": 1}
    answer = json_answer({"choices": [{"message": message, "finish_reason": "stop"}], "usage": usage})
    assert await read_answer(answer) == ("hi", "hm", (), "stop", TokenUsage(prompt=3, completion=1))


async def test_a_complete_answer_with_tool_calls_is_read():
    answer = json_answer({"choices": [{"message": {"content": None, "tool_calls": [called(id="a")]}}]})
    assert (await read_answer(answer))[2] == (ToolCallDelta(index=0, id="a", name="add", arguments="{}"),)


@pytest.mark.parametrize(
    "odd",
    [
        event({"choices": [{"delta": {"content": "a"}, "finish_reason": None}]}),
        chunk({"content": "a"}, error=None, usage=None),
        event({"choices": [{"delta": {"content": None, "reasoning": None}}]}) + token("a"),
        event({"choices": [{"delta": None}]}) + token("a"),
        event({"choices": None}) + token("a"),
        event({}) + token("a"),
        b"data: \n\n" + token("a"),
        chunk({"content": [{"type": "text", "text": "a"}]}),
        chunk({"refusal": "a"}),
        chunk({"content": "a", "tool_calls": [], "audio": 7}),
        b"event: message\nid: 7\n" + token("a"),
        token("a").replace(b"\n", b"\r\n"),
    ],
)
async def test_unusual_chunks_are_read(odd):
    assert (await read_answer([odd, *ending()]))[0] == "a"


async def test_of_several_answers_the_first_is_read():
    second = event({"choices": [{"index": 1, "delta": {"content": "b"}, "finish_reason": "length"}]})
    text, _, _, reason, _ = await read_answer([token("a"), second, *ending()])
    assert (text, reason) == ("a", "stop")


async def test_usage_of_null_is_unknown():
    assert (await read_answer([token("a"), chunk({}, finish="stop"), event({"choices": [], "usage": None}), DONE]))[
        4
    ] is None


@pytest.mark.parametrize("count", ["1e999", "-1e999", "NaN", "Infinity", "9" * 4000])
async def test_an_implausible_count_is_unknown(count):
    odd = b'data: {"choices":[],"usage":{"prompt_tokens":%s,"completion_tokens":1}}\n\n' % count.encode()
    text, _, _, reason, usage = await read_answer([token("a"), chunk({}, finish="stop"), odd, DONE])
    assert (text, reason, usage) == ("a", "stop", TokenUsage(prompt=None, completion=1))


async def test_halves_of_surrogate_pairs_in_names_are_replaced():
    script = b'data: {"model":"m\\ud800","choices":[{"delta":{"content":"a"},"finish_reason":"s\\ude00"}]}\n\n'
    with Scripted([script, DONE]) as upstream:
        (piece,) = await pieces(upstream.url)
    assert (piece.model, piece.finish_reason) == ("m\ufffd", "s\ufffd")


async def test_halves_of_surrogate_pairs_are_joined():
    halves = [b'data: {"choices":[{"delta":{"content":"%s"}}]}\n\n' % half for half in (b"a\\ud83d", b"\\ude00b")]
    alone = b'data: {"choices":[{"delta":{"content":"\\ude00"}}]}\n\n'
    assert (await read_answer([*halves, alone, *ending()]))[0] == "a\U0001f600b�"


async def test_the_number_and_length_of_tool_calls_are_limited():
    with pytest.raises(errors.EngineError, match="at once"):
        await read_answer([delta(tool_calls=[called(id=str(number)) for number in range(MAX_CALLS + 1)]), *ending()])
    with pytest.raises(errors.EngineError, match="characters"):
        await read_answer([delta(tool_calls=[called(arguments="x" * 600_000, index=0)]) for _ in range(2)] + ending())
