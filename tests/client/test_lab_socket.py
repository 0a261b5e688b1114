"""Tests of chat over a WebSocket: it has the same chunks and errors as server-sent events, and frees slots alike."""

import asyncio
import base64
import gc
import hashlib
import json
import re
from collections.abc import Iterator

import pytest

from lmx_lab import errors
from lmx_lab.client import AsyncLabClient
from lmx_lab.client.lab import SOCKET_MESSAGE, SocketChunks
from tests.support.asking import ENDLESS, echo_request
from tests.support.labs import is_idle, serving
from tests.support.sockets import answering, whole
from tests.support.waiting import auntil

pytestmark = pytest.mark.anyio
GUID = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"


async def read(stream):
    return [part async for part in stream]


def merged(chunks):
    """The parts of an answer that do not depend on how it was split into chunks."""
    choices = [choice for chunk in chunks for choice in chunk.choices]
    calls = [call for choice in choices for call in choice.delta.tool_calls or ()]
    shown = [token for choice in choices if choice.logprobs for token in choice.logprobs.content]
    return {
        "text": "".join(choice.delta.content or "" for choice in choices),
        "thoughts": "".join(choice.delta.reasoning_content or "" for choice in choices),
        "names": [call.function.name for call in calls if call.function.name],
        "arguments": "".join(call.function.arguments or "" for call in calls),
        "logprobs": [(token.token, pytest.approx(token.logprob, abs=1e-3)) for token in shown],
        "role": choices[0].delta.role,
        "finish_reason": [choice.finish_reason for choice in choices if choice.finish_reason],
        "usage": [chunk.usage.completion_tokens for chunk in chunks if chunk.usage],
        "timed": [(chunk.timings.predicted_n, (chunk.timings.ttft_ms or 0) > 0) for chunk in chunks if chunk.timings],
    }


@pytest.mark.parametrize("options", [{}, {"stream_options": {"include_usage": True}}, {"logprobs": True}], ids=str)
async def test_both_transports_return_the_same_chunks(client, options):
    sse, socket = [await read(client.stream(echo_request(**options), over=over)) for over in ("sse", "websocket")]
    assert merged(socket) == merged(sse)
    assert merged(socket)["text"]
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in socket}) == 1


async def test_thoughts_and_tool_calls_are_sent_over_a_websocket(thinker_home):
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    calling = echo_request(model="default", tools=[tool], tool_choice="required", max_tokens=60)
    thinking = echo_request(model="default", chat_template_kwargs={"open_thoughts": True}, max_tokens=20)
    with serving(thinker_home, "thinker") as lab:
        async with AsyncLabClient(lab.url) as client:
            for body in (calling, thinking):
                sse = merged(await read(client.stream(body)))
                assert merged(await read(client.stream(body, over="websocket"))) == sse
                assert sse["names"] or sse["thoughts"]


def test_a_message_with_several_kinds_of_content_is_several_chunks():
    call = {"index": 0, "id": "c", "type": "function", "function": {"name": "add", "arguments": ""}}
    token = {"token": "t", "logprob": -1.0, "bytes": [116], "top_logprobs": []}
    text = json.dumps({"token": "t", "reasoning_content": "r", "tool_calls": [call], "logprobs": [token]})
    message = SOCKET_MESSAGE.validate_json(text)
    first, *pieces = SocketChunks(echo_request()).read(message)
    assert first.choices[0].delta.role == "assistant"
    deltas = [chunk.choices[0].delta.model_dump(exclude_unset=True) for chunk in pieces]
    assert [list(delta) for delta in deltas] == [["reasoning_content"], ["content"], ["tool_calls"]]
    assert [chunk.choices[0].logprobs is not None for chunk in pieces] == [True, False, False]


@pytest.mark.parametrize("way", ["chat", "sse", "websocket"])
@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"model": "no-such"}, errors.ModelNotFoundError),
        ({"messages": [{"role": "user", "content": "word " * 20_000}]}, errors.ContextLengthError),
        ({"temperature": -1}, errors.InvalidRequestError),
        ({"temperature": object()}, errors.InvalidRequestError),
    ],
    ids=["model", "length", "value", "not JSON"],
)
async def test_a_refusal_raises_the_servers_error(client, way, changes, error):
    body = echo_request(**changes) if "messages" in changes else echo_request().model_copy(update=changes)
    with pytest.raises(error) as caught:
        await (client.chat(body) if way == "chat" else anext(client.stream(body, over=way)))
    assert type(caught.value) is error


async def test_a_websocket_has_one_answer(client):
    with pytest.raises(errors.InvalidRequestError, match="n"):
        await anext(client.stream(echo_request(n=2), over="websocket"))


@pytest.mark.parametrize("over", ["sse", "websocket"])
@pytest.mark.parametrize("way", ["closed", "dropped", "cancelled"])
async def test_leaving_a_stream_frees_the_slot_and_the_client_can_be_used_again(lab, client, over, way):
    gc.disable()
    try:
        stream = client.stream(echo_request(**ENDLESS), over=over)
        await anext(stream)
        assert not is_idle(lab)
        if way == "closed":
            await stream.aclose()
        elif way == "cancelled":
            reading = asyncio.create_task(read(stream))
            await asyncio.sleep(0)
            reading.cancel()
            await asyncio.wait([reading])
            assert reading.cancelled()
        del stream
        await auntil(lambda: is_idle(lab))
    finally:
        gc.enable()
    assert (await client.chat(echo_request())).usage.completion_tokens == 8


async def test_a_slow_reader_gets_all_chunks(client):
    stream = client.stream(echo_request(max_tokens=300, ignore_eos=True), over="websocket")
    chunks = [await anext(stream)]
    await client.chat(echo_request())
    chunks += await read(stream)
    assert merged(chunks)["timed"] == [(300, True)]


# --- other servers


def upgraded(*frames):
    """Each connection is upgraded, gets these bytes, and is closed."""

    def answer(request: str) -> bytes:
        key = re.search(r"(?i)sec-websocket-key: (\S+)", request)
        assert key
        accepted = base64.b64encode(hashlib.sha1((key[1] + GUID).encode()).digest()).decode()
        head = f"upgrade: websocket\r\nconnection: upgrade\r\nsec-websocket-accept: {accepted}\r\nx-lmx-lab: 0"
        return f"HTTP/1.1 101 Switching Protocols\r\n{head}\r\n\r\n".encode() + b"".join(frames)

    return answer


def text_frame(text):
    data = text.encode()
    assert len(data) < 126
    return bytes([0x81, len(data)]) + data


TOKEN = text_frame('{"token": "a"}')


@pytest.mark.parametrize(
    ("frames", "error"),
    [
        ([TOKEN], errors.ConnectionLostError),
        ([TOKEN, TOKEN[:5]], errors.ConnectionLostError),
        ([TOKEN, b"\x88\x02\x03\xf3"], errors.ConnectionLostError),
        ([TOKEN, b"\xff\xff\xff\xff"], errors.ConnectionLostError),
        ([TOKEN, b"\x82\x01a"], errors.ConnectionLostError),
        ([text_frame('{"what": 1}')], errors.WrongServerError),
        ([text_frame("half {")], errors.WrongServerError),
        ([text_frame('{"error": {"code": "queue-full", "message": "m", "type": "t"}}')], errors.QueueFullError),
    ],
    ids=["cut", "half-frame", "closed", "no-frame", "binary", "no-message", "no-json", "error"],
)
async def test_a_broken_websocket_is_an_error_that_names_the_address(frames, error):
    with answering(upgraded(*frames)) as server:
        async with AsyncLabClient(server.url) as client:
            with pytest.raises(error) as caught:
                await read(client.stream(echo_request(), over="websocket"))
    assert type(caught.value) is error


@pytest.mark.parametrize("answer", [whole("<html>", kind="text/html"), whole("{}", status="404 Not Found"), b""])
async def test_a_server_without_a_websocket_is_reported(answer):
    with answering(answer) as server:
        async with AsyncLabClient(server.url) as client:
            with pytest.raises(errors.UnreachableError):
                await anext(client.stream(echo_request(), over="websocket"))


@pytest.mark.slow
async def test_a_silent_websocket_is_an_error_after_the_time_limit():
    def silent(request: str) -> Iterator[bytes]:
        yield upgraded(TOKEN)(request)
        yield from iter(lambda: b"\x89\x00", None)  # pings do not count as an answer

    with answering(silent) as server:
        async with AsyncLabClient(server.url, timeout_s=0.2) as client:
            with pytest.raises(errors.UnreachableError, match="timeout_s"):
                await read(client.stream(echo_request(), over="websocket"))
