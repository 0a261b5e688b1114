"""Tests of the client of any chat-format server: requests, ends, errors, limits and lists of models."""

import asyncio
import json
from contextlib import aclosing

import httpx2
import pytest

from lmx_lab import errors
from lmx_lab.client.chat_format import ChatFormatClient
from lmx_lab.values.outputs import merge_tool_calls
from tests.support.labs import serving
from tests.support.model_server import (
    BODY,
    DONE,
    DROP,
    STALL,
    Refusal,
    Scripted,
    chunk,
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
# --- requests


async def test_a_request_adds_only_the_fields_for_a_stream_with_usage():
    with Scripted(says("a")) as upstream:
        await pieces(upstream.url, temperature=0.5)
        assert upstream.bodies == [
            {**BODY, "temperature": 0.5, "stream": True, "stream_options": {"include_usage": True}}
        ]


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/"])
async def test_an_address_may_end_with_v1(end):
    with Scripted(says("a")) as upstream:
        async with ChatFormatClient(upstream.url + end) as client:
            assert await client.models() == ["scripted"]
            assert [piece.text async for piece in client.stream(BODY)][1] == "a"
        assert upstream.paths == ["/v1/models", "/v1/chat/completions"]


async def test_a_connection_is_reused():
    with Scripted(says("a")) as upstream:
        async with ChatFormatClient(upstream.url) as client:
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
    with Scripted([token("a"), chunk({}, finish="stop"), STALL]) as upstream:
        async with ChatFormatClient(upstream.url, max_open_s=0.01) as client:
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
    with Scripted([token("a"), event(data)]) as upstream:
        async with ChatFormatClient(upstream.url) as client, aclosing(client.stream(BODY)) as found:
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
    with Scripted(says("a")) as upstream:
        async with ChatFormatClient(upstream.url, api_key="open-sesame") as client:
            async for _ in client.stream(BODY):
                pass
            assert "sesame" not in repr(client)
        assert upstream.headers[0]["authorization"] == "Bearer open-sesame"


@pytest.mark.parametrize("transport", [None, httpx2.AsyncHTTPTransport()], ids=["plain", "httpx2"])
async def test_a_header_that_cannot_be_sent_is_refused_without_showing_it(transport):
    headers = {"x-own": "hidden\r\nx-other: 2"}
    with Scripted(says("a")) as upstream:
        async with ChatFormatClient(upstream.url, headers=headers, transport=transport) as client:
            with pytest.raises(
                errors.InvalidRequestError, match="a line break; correct the additional headers"
            ) as caught:
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
    with Scripted(says("a"), models=listed) as upstream:
        async with ChatFormatClient(upstream.url) as client:
            assert (await client.models(), client.is_lab) == (ids, False)


@pytest.mark.parametrize(
    "listed", [json_answer({"data": 7}), json_answer({}), json_answer({"detail": "no"}, status=404)]
)
async def test_an_invalid_list_of_models_is_an_error(listed):
    with Scripted(says("a"), models=listed) as upstream:
        async with ChatFormatClient(upstream.url) as client:
            with pytest.raises(errors.LabError):
                await client.models()
            assert client.is_lab is False


# --- the real one


@pytest.fixture(scope="module")
def lab(tiny_home):
    with serving(tiny_home, "tiny") as lab:
        yield lab


async def test_the_labs_server_is_supported(lab):
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    async with ChatFormatClient(lab.url) as client:
        assert "tiny" in await client.models()
        assert client.is_lab
        body = {**BODY, "model": "default", "max_tokens": 8, "temperature": 0}
        found = [piece async for piece in client.stream(body)]
        assert found[-1].usage.completion == 8
        assert {piece.model for piece in found} == {"tiny"}
        forced = {**body, "max_tokens": 200, "tools": [tool], "tool_choice": "required"}
        calls = merge_tool_calls([call async for piece in client.stream(forced) for call in piece.calls])
        assert [(call.name, json.loads(call.arguments)) for call in calls][:1] == [("add", {})]
        with pytest.raises(errors.ModelNotFoundError):
            async for _ in client.stream({**body, "model": "nope"}):
                pass
