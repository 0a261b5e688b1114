"""Tests that large bodies are counted before they are parsed, and are read in short steps."""

import asyncio
import contextlib
import gc
import json
import threading
import time
from contextlib import asynccontextmanager

import httpx2
import pydantic_core
import pytest
from fastapi import APIRouter, FastAPI
from hypothesis import given
from hypothesis import strategies as st

from lmx_lab.errors import BodyTooLargeError, InvalidRequestError, QueueFullError
from lmx_lab.http import bodies
from lmx_lab.http.bodies import SMALL_BODY_BYTES, BodyMemory, LargeBodyQueue, StrictRoute, read_json
from lmx_lab.http.guard import local_policy
from lmx_lab.http.middleware import wrap_app
from lmx_lab.wire.limits import CONTAINER_LIMIT, ITEM_LIMIT, MEMBERS_LIMIT, Structure
from tests.http.raw import connect_raw, running
from tests.support.waiting import auntil

pytestmark = pytest.mark.anyio
LARGE = b" " * SMALL_BODY_BYTES
TEXTS = st.text(alphabet='"\\,:[]{}a\n\u00e9\U0001f600')
VALUES = st.recursive(
    st.none() | st.integers() | TEXTS, lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner), max_leaves=30
)


async def read_value(text):
    return await read_json(text, LargeBodyQueue(), lambda value: value)


def counts(value):
    """Count commas (items and members after the first), members, lists and objects."""
    if not isinstance(value, list | dict):
        return 0, 0, 0
    inner = [counts(child) for child in (value.values() if isinstance(value, dict) else value)]
    items, members, containers = (sum(each) for each in zip(*inner, strict=True)) if inner else (0, 0, 0)
    return items + max(0, len(value) - 1), members + (len(value) if isinstance(value, dict) else 0), containers + 1


@given(value=VALUES, size=st.integers(1, 40), ascii_only=st.booleans(), as_bytes=st.booleans())
def test_the_count_is_exact_at_any_division_of_the_text(value, size, ascii_only, as_bytes):
    text = json.dumps(value, ensure_ascii=ascii_only)
    # The division can be within a character; none of the counted characters has several bytes.
    whole = text.encode() if as_bytes else text
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


async def test_characters_in_strings_are_not_counted():
    text = '[{":"' * ITEM_LIMIT + "1" * 401
    assert await read_value(json.dumps({"a": text})) == {"a": text}


@pytest.mark.slow
async def test_a_body_within_the_limits_is_read():
    ids = [12345] * ITEM_LIMIT
    assert await read_value(json.dumps(ids).encode()) == ids


@pytest.mark.parametrize(
    ("body", "match"),
    [
        (b"[" + b"1," * SMALL_BODY_BYTES, "not valid JSON"),
        (b"[" + b"1," * SMALL_BODY_BYTES + b"1e400]", "exceeds"),
        (b"[" * 65 + b"1," * SMALL_BODY_BYTES + b"1" + b"]" * 65, "deeper than 64"),
        (b'{"a":"\\ud800"}' + LARGE, "lone surrogate"),
        (b"\xef\xbb\xbf1" + LARGE, "byte order mark"),
        (b"[1e2," + b"1" * 401 + b"]" + LARGE, "more than 400 digits"),
        (b"[" + b"1" * 4300 + b"]" + LARGE, "more than 400 digits"),
        (b" " * (SMALL_BODY_BYTES - 200) + b"1" * 401, "more than 400 digits"),
        (b'"' + b"\\" * 2 * SMALL_BODY_BYTES, "not valid JSON"),
        (b'"' * 2 * SMALL_BODY_BYTES, "not valid JSON"),
    ],
)
async def test_errors_in_large_and_small_bodies_have_the_same_messages(body, match):
    with pytest.raises(InvalidRequestError, match=match):
        await read_value(body)


@pytest.mark.slow
async def test_the_event_loop_runs_between_the_pieces_of_a_large_body():
    steps = 0

    async def count():
        nonlocal steps
        while True:
            steps += 1
            await asyncio.sleep(0)

    other = asyncio.create_task(count())
    await read_value(json.dumps([12345] * 5 * SMALL_BODY_BYTES))
    other.cancel()
    # Once for each piece of the text and of the list in it.
    assert steps > 5 * 7 + 5 * SMALL_BODY_BYTES // bodies.WALK_ITEMS


async def test_the_steps_of_large_bodies_run_one_at_a_time(monkeypatch):
    monkeypatch.setattr(bodies, "PAUSE_S", 0)
    turns, now, steps = LargeBodyQueue(), 0, []

    async def clock():
        nonlocal now
        while True:
            now += 1
            await asyncio.sleep(0)

    async def step():
        for _ in range(3):
            async with turns.step():
                steps.append(now)

    other = asyncio.create_task(clock())
    await asyncio.gather(*(step() for _ in range(5)))
    other.cancel()
    assert len(set(steps)) == len(steps) == 15


async def test_garbage_is_not_collected_in_a_step_of_a_large_body():
    queue, enabled = LargeBodyQueue(), []

    async def step():
        async with queue.step():
            await asyncio.to_thread(bodies.parse_json, "[1]")
            enabled.append(gc.isenabled())

    await asyncio.gather(step(), step())
    assert enabled == [False, False]
    assert gc.isenabled()


@pytest.mark.slow
async def test_freed_memory_is_returned_once_after_large_bodies_and_after_requests(monkeypatch):
    trimmed = []
    trim = bodies.return_freed_memory

    def record() -> None:
        trim()
        trimmed.append(threading.current_thread().name)

    monkeypatch.setattr(bodies, "return_freed_memory", record)
    monkeypatch.setattr(bodies, "TRIM_S", 1.0)
    queue, large = LargeBodyQueue(), json.dumps([12345] * SMALL_BODY_BYTES)
    await read_json("[1]", queue, list)
    assert queue._trimming is None
    for _ in range(3):
        await read_json(large, queue, list)
    last = time.monotonic()
    await auntil(lambda: trimmed)
    assert time.monotonic() - last > 0.5
    assert queue._trimming is None
    (thread,) = trimmed
    assert thread != threading.current_thread().name

    app = wrap_app(application(), lambda: local_policy(80))
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://127.0.0.1") as client:
        await client.get("/none")
    await auntil(lambda: len(trimmed) == 2)


async def test_a_body_that_waits_for_others_too_long_is_refused_and_a_single_one_is_not(monkeypatch):
    monkeypatch.setattr(bodies, "WAIT_S", 0)
    queue, large = LargeBodyQueue(), json.dumps([12345] * SMALL_BODY_BYTES)
    first, second = await asyncio.gather(*(read_json(large, queue, len) for _ in range(2)), return_exceptions=True)
    assert isinstance(first, QueueFullError)
    assert first.retry_after_s == bodies.RETRY_S
    assert second == await read_json(large, queue, len) == SMALL_BODY_BYTES


@pytest.mark.parametrize(("before", "after"), [(b"[", b"]"), (b'{"a":', b"}")])
def test_64_levels_of_nesting_are_accepted_and_65_are_rejected(before, after):
    bodies.parse_json(before * 64 + b"1" + after * 64)
    with pytest.raises(InvalidRequestError, match="deeper than 64"):
        bodies.parse_json(before * 65 + b"1" + after * 65)


@pytest.mark.parametrize("text", [b"1e400", b"[1, -1e999]", b'{"a": [{"b": 1e309}]}'])
def test_a_number_that_would_be_parsed_as_infinity_is_rejected(text):
    with pytest.raises(InvalidRequestError, match="exceeds"):
        bodies.parse_json(text)


@pytest.mark.parametrize("enabled", [True, False])
def test_the_state_of_the_garbage_collector_is_restored(enabled):
    (gc.enable if enabled else gc.disable)()
    try:
        for text in (b"[1]", b"[1"):
            with contextlib.suppress(InvalidRequestError):
                bodies.parse_json(text)
            assert gc.isenabled() == enabled
    finally:
        gc.enable()


LARGE_BYTES = SMALL_BODY_BYTES + 30_000
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
async def serving(memory_bytes):
    api = application()
    ports = []
    app = wrap_app(api, lambda: local_policy(ports[0]))
    memory = api.state.body_memory = BodyMemory(memory_bytes)
    async with running(app) as host:
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
        await auntil(lambda: memory.used_bytes == LARGE_BYTES - 1 - SMALL_BODY_BYTES)

        code, said, head = await status(second, host, body)
        assert (code, said["error"]["code"], said["error"]["retryable"]) == (429, "queue-full", True)
        assert b"retry-after: 2" in head
        assert (await status(second, host, body_of(SMALL_BODY_BYTES)))[:2] == (200, SMALL_BODY_BYTES - 4)
        # An error that waiting cannot resolve precedes the one about memory.
        assert (await status(third, host, body_of(LIMIT_BYTES + 1)))[0] == 413
        assert memory.used_bytes == LARGE_BYTES - 1 - SMALL_BODY_BYTES

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
    for limit, size in ((LIMIT_BYTES, bodies.MEMORY_BYTES), (2 * bodies.MEMORY_BYTES, 2 * bodies.MEMORY_BYTES)):
        api = application(limit)
        wrap_app(api, lambda: local_policy(1))
        assert api.state.body_memory.size_bytes == size


async def test_a_body_without_memory_keeps_its_reservation_until_it_is_released():
    memory = BodyMemory(10)
    held = memory.resize(0, SMALL_BODY_BYTES + 4)
    with pytest.raises(QueueFullError):
        memory.resize(held, SMALL_BODY_BYTES + 11)
    assert memory.used_bytes == 4
    assert memory.resize(held, 0) == memory.used_bytes == 0
