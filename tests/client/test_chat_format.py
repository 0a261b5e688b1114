"""Tests of the client of any chat-format server: requests, ends, chunks, errors, limits and lists of models."""

import asyncio
from contextlib import aclosing, asynccontextmanager

import httpx2
import pytest

from lmx_lab import errors
from lmx_lab.client.chat_format import MAX_CALLS, ChatFormatClient, TokenUsage
from lmx_lab.values.outputs import ToolCallDelta
from tests.support.labs import KEY
from tests.support.model_server import (
    BODY,
    DONE,
    DROP,
    STALL,
    Refusal,
    Scripted,
    chunk,
    ending,
    event,
    json_answer,
    pieces,
    read_answer,
    refuses,
    says,
    token,
)
from tests.support.sockets import Endless, answering, streamed

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def scripted(*scripts, models=("scripted",), end="", **options):
    """A client of a scripted server, whose address has this end, and the server."""
    with Scripted(*scripts, models=models) as upstream:
        async with ChatFormatClient(upstream.url + end, **options) as client:
            yield client, upstream


# --- requests


async def test_a_request_adds_only_the_fields_for_a_stream_with_usage():
    with Scripted(says("a")) as upstream:
        await pieces(upstream.url, temperature=0.5)
        assert upstream.bodies == [
            {**BODY, "temperature": 0.5, "stream": True, "stream_options": {"include_usage": True}}
        ]


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/"])
async def test_an_address_may_end_with_v1(end):
    async with scripted(says("a"), end=end) as (client, upstream):
        assert await client.models() == ["scripted"]
        assert [piece.text async for piece in client.stream(BODY)][1] == "a"
        assert upstream.paths == ["/v1/models", "/v1/chat/completions"]


async def test_a_connection_is_reused():
    async with scripted(says("a")) as (client, upstream):
        for _ in range(3):
            async for _ in client.stream(BODY):
                pass
        assert upstream.connections == 1


async def test_comments_are_returned_as_remarks():
    with Scripted([b": prompt 1/2 tokens\n\n", b": keepalive 3/4\n\n", *says("a")]) as upstream:
        found = await pieces(upstream.url)
    assert [piece.remark for piece in found if piece.remark] == ["prompt 1/2 tokens", "keepalive 3/4"]


# --- ends


async def test_done_may_be_missing_after_the_finish_reason():
    assert (await read_answer([token("a"), chunk({}, finish="stop")]))[:1] == ("a",)
    assert (await read_answer([token("a"), chunk({}, finish="stop"), DROP]))[:1] == ("a",)


async def test_the_finish_reason_may_be_missing_before_done():
    assert (await read_answer([token("a"), DONE]))[3] is None


async def test_a_stream_that_stays_open_after_its_end_is_complete():
    async with scripted([token("a"), chunk({}, finish="stop"), STALL], max_open_s=0.01) as (client, upstream):
        assert "".join([piece.text async for piece in client.stream(BODY)]) == "a"
        await upstream.until(lambda: upstream.left == 1)


async def test_a_stream_that_continues_with_comments_after_its_end_is_complete():
    comments = [step for _ in range(3000) for step in (b": ping\n\n", 0.01)]
    with Scripted([token("a"), chunk({}, finish="stop"), *comments]) as upstream:
        async with asyncio.timeout(10), ChatFormatClient(upstream.url, max_open_s=0.05) as client:
            assert "".join([piece.text async for piece in client.stream(BODY)]) == "a"


@pytest.mark.parametrize("script", [[token("a")], [token("a"), DROP], [DROP], [token("a")[:-9], DROP]])
async def test_a_stream_without_an_end_is_an_error(script):
    with Scripted(script) as upstream, pytest.raises(errors.ConnectionLostError):
        await pieces(upstream.url)


async def test_closing_a_stream_closes_it_on_the_server():
    async with scripted([token("a"), STALL]) as (client, upstream):
        async with aclosing(client.stream(BODY)) as found:
            await anext(found)
        await upstream.until(lambda: upstream.left == 1)


# --- errors


def error_answer(status, error, **document):
    return json_answer({"error": error, **document}, status=status)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (refuses(503, "no-model-loaded"), errors.NotLoadedError),
        (refuses(400, "context_length_exceeded"), errors.ContextLengthError),
        (refuses(401, "unauthorized"), errors.UnauthorizedError),
        (error_answer(400, {"message": "no", "code": "context_length_exceeded"}), errors.ContextLengthError),
        (
            error_answer(200, {"code": 400, "message": "too long", "type": "exceed_context_size_error"}),
            errors.ContextLengthError,
        ),
        (
            error_answer(503, {"code": 503, "message": "Loading model", "type": "unavailable_error"}),
            errors.ModelBusyError,
        ),
        (error_answer(404, {"message": "model 'x' not found", "code": None}), errors.ModelNotFoundError),
        (error_answer(404, "the prompt is odd"), errors.EngineError),
        (error_answer(404, "Repo id must be x"), errors.ModelNotFoundError),
        (error_answer(401, {"message": "bad key", "code": "invalid_api_key"}), errors.UnauthorizedError),
        (json_answer({"object": "error", "message": "bad", "code": 400}, status=400), errors.InvalidRequestError),
        (json_answer({"detail": [{"msg": "bad"}]}, status=422), errors.InvalidRequestError),
        (error_answer(500, {"message": "boom"}), errors.EngineError),
        (error_answer(500, {}), errors.EngineError),
        (json_answer({"detail": "Not Found"}, status=404), errors.EngineError),
        (Refusal(404, b"<html>", "text/html"), errors.WrongServerError),
        (Refusal(200, b"<html>", "text/html"), errors.WrongServerError),
        (Refusal(502, b"", ""), errors.UnreachableError),
        (json_answer([]), errors.WrongServerError),
    ],
)
async def test_errors_of_all_servers_have_a_class(answer, error):
    with Scripted(answer) as upstream, pytest.raises(error) as caught:
        await pieces(upstream.url)
    assert type(caught.value) is error
    assert len(str(caught.value)) < 700


@pytest.mark.parametrize(
    ("data", "error"),
    [
        ({"error": {"code": "oom-unloaded", "message": "m"}}, errors.OutOfMemoryError),
        ({"error": {"code": 500, "message": "Context size has been exceeded."}}, errors.ContextLengthError),
        ({"error": {"message": "boom"}, "choices": []}, errors.EngineError),
        ({"error": "boom"}, errors.EngineError),
        (7, errors.WrongServerError),
    ],
)
async def test_an_error_in_the_stream_is_raised_after_the_pieces_before_it(data, error):
    async with scripted([token("a"), event(data)]) as (client, _), aclosing(client.stream(BODY)) as found:
        assert (await anext(found)).text == "a"
        with pytest.raises(error) as caught:
            await anext(found)
    assert type(caught.value) is error


async def test_the_advised_delay_is_kept():
    refusal = refuses(429, "queue-full", retry_after="3")
    with Scripted(refusal) as upstream, pytest.raises(errors.QueueFullError) as caught:
        await pieces(upstream.url)
    assert caught.value.retry_after_s == 3


async def test_an_address_without_a_server_is_reported():
    with Scripted(says("a")) as upstream:
        pass
    with pytest.raises(errors.UnreachableError, match="nothing answers"):
        await pieces(upstream.url)


async def test_a_body_that_is_not_json_is_refused_before_it_is_sent():
    for value in (object(), float("nan")):
        with pytest.raises(errors.InvalidRequestError):
            await pieces("http://127.0.0.1:9", extra=value)


async def test_the_key_is_sent_in_a_header_and_not_displayed():
    async with scripted(says("a"), api_key="open-sesame") as (client, upstream):
        async for _ in client.stream(BODY):
            pass
        assert "sesame" not in repr(client)
        assert upstream.headers[0]["authorization"] == "Bearer open-sesame"


@pytest.mark.parametrize("transport", [None, httpx2.AsyncHTTPTransport()], ids=["plain", "httpx2"])
async def test_a_header_that_cannot_be_sent_is_refused_without_showing_it(transport):
    headers = {"x-own": "hidden\r\nx-other: 2"}
    async with scripted(says("a"), headers=headers, transport=transport) as (client, upstream):
        with pytest.raises(errors.InvalidRequestError, match="a line break; correct the additional headers") as caught:
            await client.models()
    assert "hidden" not in str(caught.value)
    assert upstream.paths == []


# --- bounds


async def test_the_size_of_a_response_is_limited():
    endless = answering(Endless(b"z" * 1_000_000))
    with endless as server, pytest.raises(errors.UnreachableError, match="answered with more than"):
        await pieces(server.url)
    with answering(streamed("data: " + "x" * 5_000_000)) as server, pytest.raises(errors.UnreachableError):
        await pieces(server.url)


# --- models


@pytest.mark.parametrize(
    ("listed", "ids"),
    [
        (("a", "b"), ["a", "b"]),
        (json_answer({"object": "list", "data": None}), []),
        (json_answer([{"id": "a"}]), ["a"]),
        (json_answer({"data": [{"id": "a"}], "models": [{"name": "a"}]}), ["a"]),
    ],
)
async def test_models_are_listed(listed, ids):
    async with scripted(says("a"), models=listed) as (client, _):
        assert (await client.models(), client.is_lab) == (ids, False)


@pytest.mark.parametrize(
    "listed", [json_answer({"data": 7}), json_answer({}), json_answer({"detail": "no"}, status=404)]
)
async def test_an_invalid_list_of_models_is_an_error(listed):
    async with scripted(says("a"), models=listed) as (client, _):
        with pytest.raises(errors.LabError):
            await client.models()
        assert client.is_lab is False


# --- chunks, as servers of different projects send them


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
    "message", [{"content": "hi", "reasoning": "hm"}, {"content": "hi", "reasoning_content": "hm", "tool_calls": None}]
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
    script = [token("a"), chunk({}, finish="stop"), event({"choices": [], "usage": None}), DONE]
    assert (await read_answer(script))[4] is None


@pytest.mark.parametrize(
    "count", ["1e999", "-1e999", "NaN", "Infinity", "9" * 4000, "null", "true", "-1", '"3"', "[]", "{}"]
)
async def test_an_implausible_count_is_unknown(count):
    usage = f'{{"prompt_tokens":{count},"prompt_tokens_details":{count},"completion_tokens":1}}'
    odd = f'data: {{"choices":[],"usage":{usage}}}\n\n'.encode()
    text, _, _, reason, usage = await read_answer([token("a"), chunk({}, finish="stop"), odd, DONE])
    assert (text, reason, usage) == ("a", "stop", TokenUsage(prompt=None, cached=None, completion=1))


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


# --- the real one


async def test_the_labs_server_is_recognized(lab):
    """A daemon calls its models in ``tests/daemon/turns/test_runner.py``."""
    async with ChatFormatClient(lab.url, api_key=KEY) as client:
        assert "echo" in await client.models()
        assert client.is_lab
