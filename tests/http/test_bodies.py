"""Tests that large bodies are counted before they are parsed, and are read in short steps."""

import asyncio
import gc
import json
import threading
import time
import tracemalloc
from contextlib import asynccontextmanager
from dataclasses import replace

import httpx2
import pydantic_core
import pytest
from fastapi import APIRouter, FastAPI, Request, Response
from hypothesis import given
from hypothesis import strategies as st

from lmx_lab.errors import BodyTooLargeError, InvalidRequestError, QueueFullError, SlowRequestError
from lmx_lab.http import SMALL_BYTES, Limits, middleware
from lmx_lab.http.bodies import BodyMemory, StrictRoute, read_body, read_json
from lmx_lab.http.errors import respond
from lmx_lab.http.guard import local_policy
from lmx_lab.http.middleware import wrap_app
from lmx_lab.wire.base import CONTAINER_LIMIT, ITEM_LIMIT, MEMBERS_LIMIT, Structure
from tests.http.raw import SHORT, SHORT_S, check_timeout_error, connect_raw, lifespan, running
from tests.support.waiting import WAIT_S, auntil

pytestmark = pytest.mark.anyio
LARGE = b" " * SMALL_BYTES
TEXTS = st.text(alphabet='"\\,:[]{}a\n\u00e9\U0001f600')
VALUES = st.recursive(
    st.none() | st.integers() | TEXTS, lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner), max_leaves=30
)


async def read_value(text):
    return await read_json(text, lambda value: value)


def counts(value):
    """Count commas (items and members after the first), members, lists and objects."""
    if not isinstance(value, list | dict):
        return 0, 0, 0
    inner = [counts(child) for child in (value.values() if isinstance(value, dict) else value)]
    items, members, containers = (sum(each) for each in zip(*inner, strict=True)) if inner else (0, 0, 0)
    return items + max(0, len(value) - 1), members + (len(value) if isinstance(value, dict) else 0), containers + 1


@given(value=VALUES, size=st.integers(1, 40), ascii_only=st.booleans())
def test_the_count_is_exact_at_any_division_of_the_text(value, size, ascii_only):
    # The division can be within a character; none of the counted characters has several bytes.
    whole = json.dumps(value, ensure_ascii=ascii_only).encode()
    structure, start = Structure(), 0
    while start < len(whole):
        start = structure.add(whole, start, size)
    assert (structure.items, structure.members, structure.containers) == counts(value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "limit"),
    [
        (b"[" + b"{}," * CONTAINER_LIMIT + b"{}]", CONTAINER_LIMIT),
        (b"[" * 2 * CONTAINER_LIMIT, CONTAINER_LIMIT),
        (b"{" + b'"a":1,' * MEMBERS_LIMIT + b'"a":1}', MEMBERS_LIMIT),
        (b"[" + b"1," * ITEM_LIMIT + b"1,1]", ITEM_LIMIT),
        (b"[" + b"," * (ITEM_LIMIT + 1), ITEM_LIMIT),
    ],
)
async def test_a_body_with_too_many_values_is_rejected_before_it_is_parsed(monkeypatch, body, limit):
    monkeypatch.setattr(pydantic_core, "from_json", None)
    for text in (body, body.decode()):
        with pytest.raises(BodyTooLargeError, match=f"{limit:,}"):
            await read_value(text)


@pytest.mark.parametrize("padding", [b"", LARGE])
@pytest.mark.parametrize(
    "value",
    [
        pytest.param({"a": '[{":"' * ITEM_LIMIT + "1" * 401}, id="characters in a text"),
        pytest.param([12345] * ITEM_LIMIT, id="many items", marks=pytest.mark.slow),
        pytest.param({"a": [1e308, "x", {"b": -1.7e308}, 12]}, id="the largest numbers"),
    ],
)
async def test_a_body_within_the_limits_is_read(value, padding):
    assert await read_value(json.dumps(value).encode() + padding) == value


@pytest.mark.parametrize(
    ("body", "match"),
    [
        (b"[" + b"1," * SMALL_BYTES, "not valid JSON"),
        (b"[" + b"1," * SMALL_BYTES + b"1e400]", "exceeds"),
        (b"[" * 65 + b"1," * SMALL_BYTES + b"1" + b"]" * 65, "deeper than 64"),
        (b'{"a":"\\ud800"}' + b" " * 2**20, "lone surrogate"),
        (b'"' + b"\\ud800" * 20_001 + b'"', "lone surrogate"),
        (b"\xef\xbb\xbf1" + LARGE, "byte order mark"),
        (b"[1e2," + b"1" * 401 + b"]" + LARGE, "more than 400 digits"),
        (b"[" + b"1" * 401 + b"]", "more than 400 digits"),
        (b"[" + b"1" * 4300 + b"]" + LARGE, "more than 400 digits"),
        (b" " * (SMALL_BYTES - 200) + b"1" * 401, "more than 400 digits"),
        (b'"' + b"\\" * 2 * SMALL_BYTES, "not valid JSON"),
        (b'"' * 2 * SMALL_BYTES, "not valid JSON"),
    ],
)
async def test_errors_in_large_and_small_bodies_have_the_same_messages(body, match):
    with pytest.raises(InvalidRequestError, match=match):
        await read_value(body)


@pytest.mark.parametrize("end", ["", " " * SMALL_BYTES])
async def test_lone_surrogates_are_replaced(end):
    pair, first, second = r"\ud83d\ude00", r"\uD83D", r"\ude00"
    text = f"{pair}{first}{pair} {second}{first}x{first}" + r"\\ud83d \\" + first + r"\u00e9"
    assert await read_value(f'["{text}"]{end}') == ["😀�😀 ��x�\\ud83d \\�é"]
    with pytest.raises(InvalidRequestError, match="not valid JSON"):
        await read_value(f'["{text}"{end}')


@pytest.mark.slow
async def test_the_event_loop_runs_between_the_steps_of_a_large_body():
    iterations = 0

    async def count():
        nonlocal iterations
        while True:
            iterations += 1
            await asyncio.sleep(0)

    other = asyncio.create_task(count())
    await read_value(json.dumps([12345] * 5 * SMALL_BYTES))
    other.cancel()
    assert iterations > 5 * 7


async def test_large_bodies_are_read_one_at_a_time_on_one_thread_without_garbage_collections():
    seen = []

    def validate(value):
        seen.append((threading.current_thread(), gc.isenabled()))
        time.sleep(0.01)
        seen.append((threading.current_thread(), gc.isenabled()))

    large = json.dumps([12345] * SMALL_BYTES)
    await asyncio.gather(*(read_json(large, validate) for _ in range(3)))
    assert len(seen) == 6
    ((thread, has_gc),) = set(seen)
    assert (thread is threading.current_thread(), has_gc, gc.isenabled()) == (False, False, True)


async def test_a_small_body_is_read_on_the_event_loop_unless_it_has_many_values():
    async def thread_of(values):
        return await read_json(json.dumps([1] * values), lambda value: threading.current_thread())

    assert await thread_of(2000) is threading.current_thread()
    assert await thread_of(2001) is not threading.current_thread()


async def test_a_body_that_waits_for_others_too_long_is_refused_and_a_single_one_is_not():
    large, go_on = json.dumps([12345] * SMALL_BYTES), threading.Event()
    first = asyncio.create_task(read_json(large, lambda value: go_on.wait(), wait_s=0.001))
    await asyncio.sleep(0)
    with pytest.raises(QueueFullError) as refused:
        await read_json(large, len, wait_s=0.01)
    assert refused.value.retry_after_s == 2
    # Bodies that are read on the event loop do not wait.
    assert await read_json("[1]", len, wait_s=0) == 1
    go_on.set()
    assert await first
    assert await read_json(large, len) == SMALL_BYTES


async def test_a_body_whose_request_was_cancelled_is_not_read():
    large, go_on, read = json.dumps([12345] * SMALL_BYTES), threading.Event(), []
    first = asyncio.create_task(read_json(large, lambda value: go_on.wait()))
    second = asyncio.create_task(read_json(large, read.append))
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    go_on.set()
    await first
    await read_json(large, len)
    assert read == []


async def test_an_invalid_large_body_leaves_no_garbage():
    def validate(value):
        raise InvalidRequestError("invalid")

    large = json.dumps([12345] * SMALL_BYTES)
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequestError):
            await read_json(bytearray(large.encode()), validate)
        # The thread still holds the error for a moment.
        await auntil(lambda: tracemalloc.get_traced_memory()[0] < len(large))
    finally:
        tracemalloc.stop()
        gc.enable()


async def test_freed_memory_is_returned_some_time_after_requests_that_do_not_end(monkeypatch):
    trimmed = []
    monkeypatch.setattr(middleware, "return_freed_memory", lambda: trimmed.append(threading.current_thread()))
    app = wrap_app(application(), lambda: local_policy(80), limits=Limits(trim_s=0.2))
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://127.0.0.1") as client:
        requests = 0
        async with asyncio.timeout(WAIT_S):
            while len(trimmed) < 2:
                await client.get("/none")
                requests += 1
                await asyncio.sleep(0)
    assert requests > 2
    assert threading.current_thread() not in trimmed


@pytest.mark.parametrize(("before", "after"), [(b"[", b"]"), (b'{"a":', b"}")])
async def test_64_levels_of_nesting_are_accepted_and_65_are_rejected(before, after):
    await read_value(before * 64 + b"1" + after * 64)
    with pytest.raises(InvalidRequestError, match="deeper than 64"):
        await read_value(before * 65 + b"1" + after * 65)


@pytest.mark.parametrize("padding", [b"", LARGE])
@pytest.mark.parametrize("text", [b"1e400", b"[1, -1e999]", b'{"a": [{"b": 1e309}]}'])
async def test_a_number_that_would_be_parsed_as_infinity_is_rejected(text, padding):
    with pytest.raises(InvalidRequestError, match="exceeds"):
        await read_value(text + padding)


LARGE_BYTES = SMALL_BYTES + 30_000
LIMIT_BYTES = 8 * LARGE_BYTES


def application(max_body_bytes=LIMIT_BYTES):
    api, router = FastAPI(), APIRouter(route_class=StrictRoute)

    @router.post("/size")
    async def size(text: list[str]) -> int:
        return len(text[0])

    api.include_router(router)
    api.state.max_body_bytes = max_body_bytes
    return api


@asynccontextmanager
async def serving(memory_bytes=10**9, limits=None, max_body_bytes=LIMIT_BYTES):
    api = application(max_body_bytes)
    ports = []
    app = wrap_app(api, lambda: local_policy(ports[0]), limits=limits)
    memory = api.state.body_memory = BodyMemory(memory_bytes)
    async with running(app, limits) as host:
        ports.append(host.port)
        yield host, memory


def body_of(size):
    return json.dumps(["x" * (size - 4)]).encode()


def begin(client, host, body, part=None):
    names = f"host: 127.0.0.1:{host.port}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    client.send(f"POST /size HTTP/1.1\r\n{names}\r\n\r\n".encode() + body[:part])


async def status(client, host, body):
    begin(client, host, body)
    head, _, said = (await client.read_response()).partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(said), head.lower()


async def test_large_bodies_share_a_memory_limit_and_small_ones_are_not_counted():
    async with (
        serving(memory_bytes=50_000) as (host, memory),
        connect_raw(host) as slow,
        connect_raw(host) as second,
        connect_raw(host) as third,
    ):
        body = body_of(LARGE_BYTES)
        begin(slow, host, body, part=LARGE_BYTES - 1)
        await auntil(lambda: memory.used_bytes == LARGE_BYTES - 1 - SMALL_BYTES)

        code, said, head = await status(second, host, body)
        assert (code, said["error"]["code"], said["error"]["retryable"]) == (429, "queue-full", True)
        assert b"retry-after: 2" in head
        assert (await status(second, host, body_of(SMALL_BYTES)))[:2] == (200, SMALL_BYTES - 4)
        # An error that waiting cannot resolve precedes the one about memory.
        assert (await status(third, host, body_of(LIMIT_BYTES + 1)))[0] == 413
        assert memory.used_bytes == LARGE_BYTES - 1 - SMALL_BYTES

        slow.send(body[-1:])
        assert (await slow.read_response()).endswith(str(LARGE_BYTES - 4).encode())
        assert memory.used_bytes == 0
        assert (await status(second, host, body))[0] == 200


async def test_a_client_that_disconnects_in_the_middle_releases_its_memory():
    async with serving(memory_bytes=50_000) as (host, memory):
        async with connect_raw(host) as slow:
            begin(slow, host, body_of(LARGE_BYTES), part=LARGE_BYTES - 1)
            await auntil(lambda: memory.used_bytes > 0)
        await auntil(lambda: memory.used_bytes == 0)


@pytest.mark.parametrize("content", [b"[1", b'{"a": 1}'])
async def test_a_rejected_body_releases_its_memory(content):
    async with serving(memory_bytes=50_000) as (host, memory), connect_raw(host) as client:
        assert (await status(client, host, content + b" " * LARGE_BYTES))[0] == 400
        assert memory.used_bytes == 0


async def test_a_single_body_within_the_size_limit_is_always_accepted():
    for limit, size in ((1000, 10_000), (20_000, 20_000)):
        api = application(limit)
        wrap_app(api, lambda: local_policy(1), limits=Limits(memory_bytes=10_000))
        assert api.state.body_memory.size_bytes == size


async def test_a_body_without_memory_keeps_its_reservation_until_it_is_released():
    memory = BodyMemory(10)
    held = memory.resize(0, SMALL_BYTES + 4)
    with pytest.raises(QueueFullError):
        memory.resize(held, SMALL_BYTES + 11)
    assert memory.used_bytes == 4
    assert memory.resize(held, 0) == memory.used_bytes == 0


# The time for a body


def head_of(host, length="content-length: 1000000000"):
    lines = ("POST /size HTTP/1.1", f"host: 127.0.0.1:{host.port}", "content-type: application/json", length, "", "")
    return "\r\n".join(lines).encode()


@pytest.mark.parametrize("drip", [b"", b"y"])
@pytest.mark.parametrize(
    ("length", "begin"), [("content-length: 1000000", b"y"), ("transfer-encoding: chunked", b"ffff\r\ny")]
)
async def test_an_incomplete_body_is_answered_with_408_and_the_connection_is_closed(length, begin, drip):
    async with serving(limits=SHORT) as (host, memory), connect_raw(host) as client:
        client.send(head_of(host, length) + begin)
        assert "of the body arrived in 0.2 s" in check_timeout_error(await client.read_to_end(drip))
        assert memory.used_bytes == 0


async def test_a_body_that_fills_the_buffer_for_a_moment_still_has_its_deadline():
    async with serving(limits=SHORT, max_body_bytes=10**9) as (host, _), connect_raw(host) as client:
        client.send(head_of(host))
        assert "of the body arrived in 0.2 s" in check_timeout_error(await client.read_to_end(b"y" * 70_000))


@pytest.mark.slow
async def test_a_slow_client_that_is_fast_enough_is_answered():
    limits = Limits(body_s=0.6, body_bytes=3, late_s=0.05)
    async with serving(limits=limits) as (host, _), connect_raw(host) as client:
        client.send(head_of(host, "content-length: 15"))
        for byte in b'["xxxxxxxxxxx"]':
            await asyncio.sleep(0.1)
            client.send(bytes([byte]))
        assert (await client.read_response()).endswith(b"\r\n11")


@pytest.mark.slow
async def test_time_in_which_the_server_was_busy_does_not_count_against_the_sender_of_a_body():
    limits = replace(SHORT, late_s=SHORT_S / 5)
    async with serving(limits=limits) as (host, memory), connect_raw(host) as client:
        body = body_of(LARGE_BYTES)
        begin(client, host, body, part=LARGE_BYTES - 1)
        await auntil(lambda: memory.used_bytes > 0)
        time.sleep(3 * SHORT_S)  # noqa: ASYNC251 (that is the case)
        # Data that arrives in the next moment counts too.
        await asyncio.sleep(SHORT_S / 10)
        client.send(body[-1:])
        assert (await client.read_response()).startswith(b"HTTP/1.1 200 ")


@pytest.mark.slow
async def test_the_deadline_of_a_body_begins_when_the_application_reads_it():
    async def read_later(scope, receive, send):
        if scope["type"] == "lifespan":
            await lifespan(receive, send)
            return
        await asyncio.sleep(2 * SHORT_S)
        try:
            async with read_body(Request(scope, receive), 10**6, BodyMemory(10**6), SHORT) as body:
                response = Response(str(len(body)))
        except SlowRequestError as exc:
            response = respond(scope, exc)
        await response(scope, receive, send)

    async with running(read_later, SHORT) as host, connect_raw(host) as client:
        expecting = head_of(host, "content-length: 3\r\nexpect: 100-continue")
        client.send(expecting)
        assert (await client.read_response()).startswith(b"HTTP/1.1 100 ")
        client.send(b"yyy")
        assert (await client.read_response()).endswith(b"\r\n3")
        client.send(head_of(host, "content-length: 3") + b"y")
        assert (await client.read_response()).startswith(b"HTTP/1.1 408 ")
