"""Tests of chat over a WebSocket: it returns the same chunks as server-sent events, and frees slots alike."""

import asyncio
import base64
import gc
import hashlib
import json
import re
from collections.abc import Iterator

import pytest

from lmx_lab import errors
from lmx_lab.arguments import chat_request
from lmx_lab.client import AsyncLabClient
from lmx_lab.client.lab import SOCKET_MESSAGE, SocketChunks
from lmx_lab.wire.chat import ChatRequest
from tests.support.labs import manager_of, serving
from tests.support.models import write_tiny_llama
from tests.support.sockets import answering, whole

pytestmark = pytest.mark.anyio
KEY = "open-sesame-42"
ENDLESS = {"max_tokens": 7500, "ignore_eos": True}
GUID = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"


def hello(**changes):
    return chat_request("hello", {"temperature": 0, "max_tokens": 8, **changes})


@pytest.fixture(scope="module")
def lab(tmp_path_factory, smollm2):
    home = tmp_path_factory.mktemp("long-home")
    write_tiny_llama(home / "models" / "tiny-long", smollm2.path, seed=0, context=8192)
    with serving(home, "tiny-long", api_key=KEY) as lab:
        yield lab


@pytest.fixture
async def client(lab):
    async with AsyncLabClient(lab.url, api_key=KEY) as client:
        yield client
        await until_idle(lab)


async def until_idle(lab):
    while manager_of(lab).snapshot.active_requests + manager_of(lab).snapshot.queued_requests:  # noqa: ASYNC110
        await asyncio.sleep(0.001)


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
    body = ChatRequest.model_validate({**hello().model_dump(exclude_unset=True), **options})
    sse = [chunk async for chunk in client.stream(body)]
    socket = [chunk async for chunk in client.stream(body, over="websocket")]
    assert merged(socket) == merged(sse)
    assert merged(socket)["text"]
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in socket}) == 1


async def test_thoughts_and_tool_calls_are_sent_over_a_websocket(thinker_home):
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    calling = hello(tools=[tool], tool_choice="required", max_tokens=60)
    thinking = hello(chat_template_kwargs={"open_thoughts": True}, max_tokens=20)
    with serving(thinker_home, "thinker") as lab:
        async with AsyncLabClient(lab.url) as client:
            for body in (calling, thinking):
                sse = merged([chunk async for chunk in client.stream(body)])
                assert merged([chunk async for chunk in client.stream(body, over="websocket")]) == sse
                assert sse["names"] or sse["thoughts"]


def test_a_message_with_several_kinds_of_content_is_several_chunks():
    call = {"index": 0, "id": "c", "type": "function", "function": {"name": "add", "arguments": ""}}
    token = {"token": "t", "logprob": -1.0, "bytes": [116], "top_logprobs": []}
    text = json.dumps({"token": "t", "reasoning_content": "r", "tool_calls": [call], "logprobs": [token]})
    message = SOCKET_MESSAGE.validate_json(text)
    first, *pieces = SocketChunks(hello()).read(message)
    assert first.choices[0].delta.role == "assistant"
    deltas = [chunk.choices[0].delta.model_dump(exclude_unset=True) for chunk in pieces]
    assert [list(delta) for delta in deltas] == [["reasoning_content"], ["content"], ["tool_calls"]]
    assert [chunk.choices[0].logprobs is not None for chunk in pieces] == [True, False, False]


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (hello(model="no-such"), errors.ModelNotFoundError),
        (hello(messages=[{"role": "user", "content": "word " * 9000}]), errors.ContextLengthError),
        (hello().model_copy(update={"temperature": -1}), errors.InvalidRequestError),
        (hello().model_copy(update={"n": 2}), errors.InvalidRequestError),
    ],
    ids=["model", "length", "value", "choices"],
)
async def test_a_refusal_raises_the_servers_error(client, body, error):
    with pytest.raises(error) as caught:
        await anext(client.stream(body, over="websocket"))
    assert type(caught.value) is error


async def test_a_missing_key_is_refused_before_the_websocket_is_opened(lab):
    async with AsyncLabClient(lab.url) as client:
        with pytest.raises(errors.UnauthorizedError):
            await anext(client.stream(hello(), over="websocket"))


@pytest.mark.parametrize("way", ["closed", "dropped", "cancelled"])
async def test_leaving_the_stream_frees_the_slot(lab, client, way):
    gc.disable()
    try:
        stream = client.stream(hello(**ENDLESS), over="websocket")
        await anext(stream)
        if way == "closed":
            await stream.aclose()
        elif way == "cancelled":
            reading = asyncio.create_task(_read(stream))
            await asyncio.sleep(0)
            reading.cancel()
            await asyncio.wait([reading])
            assert reading.cancelled()
        del stream
        await until_idle(lab)
    finally:
        gc.enable()
    assert (await client.chat(hello())).usage.completion_tokens == 8


async def _read(stream):
    async for _ in stream:
        pass


async def test_a_slow_reader_gets_all_chunks(client):
    stream = client.stream(hello(max_tokens=300, ignore_eos=True), over="websocket")
    chunks = [await anext(stream)]
    await client.chat(hello())
    chunks += [chunk async for chunk in stream]
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
                await _read(client.stream(hello(), over="websocket"))
    assert type(caught.value) is error


@pytest.mark.parametrize("answer", [whole("<html>", kind="text/html"), whole("{}", status="404 Not Found"), b""])
async def test_a_server_without_a_websocket_is_reported(answer):
    with answering(answer) as server:
        async with AsyncLabClient(server.url) as client:
            with pytest.raises(errors.UnreachableError):
                await anext(client.stream(hello(), over="websocket"))


@pytest.mark.slow
async def test_a_silent_websocket_is_an_error_after_the_time_limit():
    def silent(request: str) -> Iterator[bytes]:
        yield upgraded(TOKEN)(request)
        yield from iter(lambda: b"\x89\x00", None)  # pings do not count as an answer

    with answering(silent) as server:
        async with AsyncLabClient(server.url, timeout_s=0.2) as client:
            with pytest.raises(errors.UnreachableError, match="timeout_s"):
                await _read(client.stream(hello(), over="websocket"))
