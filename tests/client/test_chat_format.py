"""The client of any chat-format server, against what servers of different makes send."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from typing import Any

import pytest

from lmx_lab import errors
from lmx_lab.client.chat_chunks import CALLS, CallAssembly, Piece, TokenUsage, WholeCall
from lmx_lab.client.chat_format import ChatFormatClient
from lmx_lab.notebook import Lab
from tests.client.raw import Endless, answering, streamed
from tests.daemon.scripted import (
    DONE,
    DROP,
    STALL,
    Refusal,
    Script,
    Scripted,
    chunk,
    ending,
    event,
    json_answer,
    refuses,
    says,
    token,
)
from tests.flows.conftest import serving

pytestmark = pytest.mark.anyio
BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


async def pieces(url: str, **body: Any) -> list[Piece]:
    async with ChatFormatClient(url) as client:
        return [piece async for piece in client.stream({**BODY, **body})]


async def read(script: Script) -> tuple[str, str, tuple[WholeCall, ...], str | None, TokenUsage | None]:
    """Text, thoughts, calls, the reason of the end, usage."""
    assembly = CallAssembly()
    with Scripted(script) as upstream:
        found = await pieces(upstream.url)
    for piece in found:
        for call in piece.calls:
            assembly.add(call)
    reasons = [piece.finish_reason for piece in found if piece.finish_reason]
    usages = [piece.usage for piece in found if piece.usage]
    return (
        "".join(piece.text for piece in found),
        "".join(piece.thinking for piece in found),
        assembly.calls(),
        reasons[-1] if reasons else None,
        usages[-1] if usages else None,
    )


def delta(**fields: Any) -> bytes:
    return chunk(fields)


def called(name: str = "add", arguments: Any = "{}", **fields: Any) -> dict[str, Any]:
    return {"function": {"name": name, "arguments": arguments}, **fields}


# --- what is understood


async def test_text_thoughts_and_usage_of_a_proper_stream() -> None:
    text, thinking, found, reason, usage = await read(says("Hel", "lo", thinks=["Hm", "."]))
    assert (text, thinking, found, reason, usage) == ("Hello", "Hm.", (), "stop", TokenUsage(prompt=5, completion=4))


async def test_the_request_asks_for_a_stream_with_usage_and_adds_nothing_else() -> None:
    with Scripted(says("a")) as upstream:
        await pieces(upstream.url, temperature=0.5)
        assert upstream.bodies == [
            {**BODY, "temperature": 0.5, "stream": True, "stream_options": {"include_usage": True}}
        ]


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/"])
async def test_an_address_may_have_its_v1(end: str) -> None:
    with Scripted(says("a")) as upstream:
        async with ChatFormatClient(upstream.url + end) as client:
            assert await client.models() == ["scripted"]
            assert [piece.text async for piece in client.stream(BODY)][1] == "a"
        assert upstream.paths == ["/v1/models", "/v1/chat/completions"]


async def test_a_connection_is_used_again() -> None:
    with Scripted(says("a")) as upstream:
        async with ChatFormatClient(upstream.url) as client:
            for _ in range(3):
                async for _ in client.stream(BODY):
                    pass
        assert upstream.connections == 1


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
async def test_calls_are_put_together_however_they_come(deltas: list[list[dict[str, Any]]]) -> None:
    script = [*(delta(tool_calls=items) for items in deltas), *ending("tool_calls")]
    assert (await read(script))[2] == (
        WholeCall(id="a", name="add", arguments='{"x": 1}'),
        WholeCall(id="b", name="sub", arguments="{}"),
    )


async def test_calls_may_have_no_id_at_all() -> None:
    """As mlx_lm.server sends them: whole, in one delta."""
    found = (await read([delta(tool_calls=[called(), called()]), *ending("tool_calls")]))[2]
    assert [(call.id, call.name) for call in found] == [(None, "add"), (None, "add")]


async def test_the_older_function_call_is_a_call() -> None:
    script = [
        delta(function_call={"name": "add", "arguments": '{"x"'}),
        delta(function_call={"arguments": ": 1}"}),
        *ending("function_call"),
    ]
    _, _, found, reason, _ = await read(script)
    assert (found, reason) == ((WholeCall(id=None, name="add", arguments='{"x": 1}'),), "function_call")


@pytest.mark.parametrize("reason", ["stop", "length", "content_filter", "tool_calls", "eos_token"])
async def test_reasons_of_an_end_are_given_as_they_come(reason: str) -> None:
    assert (await read(says("a", finish=reason)))[3] == reason


@pytest.mark.parametrize(
    "message",
    [{"content": "hi", "reasoning": "hm"}, {"content": "hi", "reasoning_content": "hm", "tool_calls": None}],
)
async def test_a_whole_answer_in_the_place_of_a_stream(message: dict[str, Any]) -> None:
    usage = {"prompt_tokens": 3, "completion_tokens": 1}
    answer = json_answer({"choices": [{"message": message, "finish_reason": "stop"}], "usage": usage})
    assert await read(answer) == ("hi", "hm", (), "stop", TokenUsage(prompt=3, completion=1))


async def test_a_whole_answer_with_calls() -> None:
    answer = json_answer({"choices": [{"message": {"content": None, "tool_calls": [called(id="a")]}}]})
    assert (await read(answer))[2] == (WholeCall(id="a", name="add", arguments="{}"),)


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
async def test_odd_chunks_are_read(odd: bytes) -> None:
    assert (await read([odd, *ending()]))[0] == "a"


async def test_of_several_answers_the_first_counts() -> None:
    second = event({"choices": [{"index": 1, "delta": {"content": "b"}, "finish_reason": "length"}]})
    text, _, _, reason, _ = await read([token("a"), second, *ending()])
    assert (text, reason) == ("a", "stop")


async def test_what_comes_in_an_empty_choice_is_the_usage() -> None:
    assert (await read([token("a"), chunk({}, finish="stop"), event({"choices": [], "usage": None}), DONE]))[4] is None


@pytest.mark.parametrize("count", ["1e999", "-1e999", "NaN", "Infinity", "9" * 4000])
async def test_a_count_that_is_none_is_unknown_and_the_rest_counts(count: str) -> None:
    odd = b'data: {"choices":[],"usage":{"prompt_tokens":%s,"completion_tokens":1}}\n\n' % count.encode()
    text, _, _, reason, usage = await read([token("a"), chunk({}, finish="stop"), odd, DONE])
    assert (text, reason, usage) == ("a", "stop", TokenUsage(prompt=None, completion=1))


async def test_names_have_whole_characters_only() -> None:
    script = b'data: {"model":"m\\ud800","choices":[{"delta":{"content":"a"},"finish_reason":"s\\ude00"}]}\n\n'
    with Scripted([script, DONE]) as upstream:
        (piece,) = await pieces(upstream.url)
    assert (piece.model, piece.finish_reason) == ("m\ufffd", "s\ufffd")


async def test_comments_are_remarks() -> None:
    with Scripted([b": prompt 1/2 tokens\n\n", b": keepalive 3/4\n\n", *says("a")]) as upstream:
        found = await pieces(upstream.url)
    assert [piece.remark for piece in found if piece.remark] == ["prompt 1/2 tokens", "keepalive 3/4"]


async def test_halves_of_characters_are_put_together() -> None:
    halves = [b'data: {"choices":[{"delta":{"content":"%s"}}]}\n\n' % half for half in (b"a\\ud83d", b"\\ude00b")]
    alone = b'data: {"choices":[{"delta":{"content":"\\ude00"}}]}\n\n'
    assert (await read([*halves, alone, *ending()]))[0] == "a\U0001f600b�"


# --- ends


async def test_done_may_be_missing_after_the_reason() -> None:
    assert (await read([token("a"), chunk({}, finish="stop")]))[:1] == ("a",)
    assert (await read([token("a"), chunk({}, finish="stop"), DROP]))[:1] == ("a",)


async def test_the_reason_may_be_missing_before_done() -> None:
    assert (await read([token("a"), DONE]))[3] is None


async def test_a_stream_that_stays_open_after_its_end_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmx_lab.client.chat_format.END_S", 0.01)
    with Scripted([token("a"), chunk({}, finish="stop"), STALL]) as upstream:
        assert "".join(piece.text for piece in await pieces(upstream.url)) == "a"
        await upstream.until(lambda: upstream.left == 1)


async def test_a_stream_that_only_goes_on_with_comments_after_its_end_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmx_lab.client.chat_format.END_S", 0.05)
    comments = [step for _ in range(3000) for step in (b": ping\n\n", 0.01)]
    with Scripted([token("a"), chunk({}, finish="stop"), *comments]) as upstream:
        async with asyncio.timeout(10):
            assert "".join(piece.text for piece in await pieces(upstream.url)) == "a"


@pytest.mark.parametrize("script", [[token("a")], [token("a"), DROP], [DROP], [token("a")[:-9], DROP]])
async def test_a_stream_without_an_end_is_lost(script: Script) -> None:
    with Scripted(script) as upstream, pytest.raises(errors.ConnectionLostError):
        await pieces(upstream.url)


async def test_a_closed_stream_is_closed_at_the_server() -> None:
    with Scripted([token("a"), STALL]) as upstream:
        async with ChatFormatClient(upstream.url) as client:
            async with aclosing(client.stream(BODY)) as found:
                await anext(found)
            await upstream.until(lambda: upstream.left == 1)


# --- errors


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (refuses(503, "no-model-loaded"), errors.NotLoadedError),
        (refuses(400, "context-length-exceeded"), errors.ContextLengthError),
        (refuses(429, "queue-full", retry_after="3"), errors.QueueFullError),
        (refuses(401, "unauthorized"), errors.UnauthorizedError),
        (
            json_answer({"error": {"message": "no", "code": "context_length_exceeded"}}, status=400),
            errors.ContextLengthError,
        ),
        (
            json_answer({"error": {"code": 400, "message": "too long", "type": "exceed_context_size_error"}}),
            errors.ContextLengthError,
        ),
        (
            json_answer({"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}}, status=503),
            errors.ModelBusyError,
        ),
        (
            json_answer({"error": {"message": "model 'x' not found", "code": None}}, status=404),
            errors.ModelNotFoundError,
        ),
        (json_answer({"error": "the prompt is odd"}, status=404), errors.EngineError),
        (json_answer({"error": "Repo id must be x"}, status=404), errors.ModelNotFoundError),
        (
            json_answer({"error": {"message": "bad key", "code": "invalid_api_key"}}, status=401),
            errors.UnauthorizedError,
        ),
        (json_answer({"object": "error", "message": "bad", "code": 400}, status=400), errors.InvalidRequestError),
        (json_answer({"detail": [{"msg": "bad"}]}, status=422), errors.InvalidRequestError),
        (json_answer({"error": {"message": "boom"}}, status=500), errors.EngineError),
        (json_answer({"error": {}}, status=500), errors.EngineError),
        (json_answer({"detail": "Not Found"}, status=404), errors.EngineError),
        (Refusal(404, b"<html>", "text/html"), errors.WrongServerError),
        (Refusal(200, b"<html>", "text/html"), errors.WrongServerError),
        (Refusal(502, b"", ""), errors.UnreachableError),
        (json_answer([]), errors.WrongServerError),
    ],
)
async def test_refusals_of_all_makes_have_their_class(answer: Refusal, error: type[errors.LabError]) -> None:
    with Scripted(answer) as upstream, pytest.raises(error) as caught:
        await pieces(upstream.url)
    assert type(caught.value) is error
    assert len(str(caught.value)) < 700


@pytest.mark.parametrize(
    ("said", "error"),
    [
        ({"error": {"code": "oom-unloaded", "message": "m"}}, errors.OutOfMemoryError),
        ({"error": {"code": 500, "message": "Context size has been exceeded."}}, errors.ContextLengthError),
        ({"error": {"message": "boom"}, "choices": []}, errors.EngineError),
        ({"error": "boom"}, errors.EngineError),
        (7, errors.WrongServerError),
    ],
)
async def test_an_error_in_the_stream_is_raised_after_what_came(said: Any, error: type[errors.LabError]) -> None:
    with Scripted([token("a"), event(said)]) as upstream:
        async with ChatFormatClient(upstream.url) as client, aclosing(client.stream(BODY)) as found:
            assert (await anext(found)).text == "a"
            with pytest.raises(error) as caught:
                await anext(found)
    assert type(caught.value) is error


async def test_advice_when_to_come_again_is_kept() -> None:
    refusal = refuses(429, "queue-full", retry_after="3")
    with Scripted(refusal) as upstream, pytest.raises(errors.QueueFullError) as caught:
        await pieces(upstream.url)
    assert caught.value.retry_after_s == 3


async def test_nobody_at_the_address_is_said() -> None:
    with Scripted(says("a")) as upstream:
        pass
    with pytest.raises(errors.UnreachableError, match="nothing answers"):
        await pieces(upstream.url)


async def test_what_is_no_json_is_refused_before_it_is_sent() -> None:
    for value in (object(), float("nan")):
        with pytest.raises(errors.InvalidRequestError):
            await pieces("http://127.0.0.1:9", extra=value)


async def test_the_key_goes_into_a_header_and_nowhere_else() -> None:
    with Scripted(says("a")) as upstream:
        async with ChatFormatClient(upstream.url, api_key="open-sesame") as client:
            async for _ in client.stream(BODY):
                pass
            assert "sesame" not in repr(client)
        assert upstream.headers[0]["authorization"] == "Bearer open-sesame"


# --- bounds


async def test_no_answer_is_read_without_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmx_lab.client.chat_format.LONG_BYTES", 1_000_000)
    endless = answering(Endless(b"z" * 1_000_000))
    with endless as server, pytest.raises(errors.UnreachableError, match="answered with more than"):
        await pieces(server.url)
    with answering(streamed("data: " + "x" * 5_000_000)) as server, pytest.raises(errors.UnreachableError):
        await pieces(server.url)


async def test_calls_have_bounds() -> None:
    with pytest.raises(errors.EngineError, match="at once"):
        await read([delta(tool_calls=[called(id=str(number)) for number in range(CALLS + 1)]), *ending()])
    with pytest.raises(errors.EngineError, match="characters"):
        await read([delta(tool_calls=[called(arguments="x" * 600_000, index=0)]) for _ in range(2)] + ending())


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
async def test_models_are_listed(listed: Any, ids: list[str]) -> None:
    with Scripted(says("a"), models=listed) as upstream:
        async with ChatFormatClient(upstream.url) as client:
            assert (await client.models(), client.is_lab) == (ids, False)


@pytest.mark.parametrize(
    "listed", [json_answer({"data": 7}), json_answer({}), json_answer({"detail": "no"}, status=404)]
)
async def test_what_is_no_list_of_models_is_an_error(listed: Refusal) -> None:
    with Scripted(says("a"), models=listed) as upstream:
        async with ChatFormatClient(upstream.url) as client:
            with pytest.raises(errors.LabError):
                await client.models()
            assert client.is_lab is None


# --- the real one


@pytest.fixture(scope="module")
def lab(tiny_home: Any) -> Any:
    with serving(tiny_home, "tiny") as lab:
        yield lab


async def test_the_labs_own_server(lab: Lab) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    async with ChatFormatClient(lab.url) as client:
        assert "tiny" in await client.models()
        assert client.is_lab
        body = {**BODY, "model": "default", "max_tokens": 8, "temperature": 0}
        found = [piece async for piece in client.stream(body)]
        assert found[-1].usage is not None
        assert found[-1].usage.completion == 8
        assert {piece.model for piece in found} == {"tiny"}
        forced = {**body, "max_tokens": 200, "tools": [tool], "tool_choice": "required"}
        assembly = CallAssembly()
        async for piece in client.stream(forced):
            for call in piece.calls:
                assembly.add(call)
        assert [(call.name, json.loads(call.arguments)) for call in assembly.calls()][:1] == [("add", {})]
        with pytest.raises(errors.ModelNotFoundError):
            async for _ in client.stream({**body, "model": "nope"}):
                pass
