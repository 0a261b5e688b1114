"""The memory that bodies under way have together."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fastapi import APIRouter, FastAPI

from lmx_lab.errors import QueueFullError
from lmx_lab.http import bodies
from lmx_lab.http.bodies import SMALL_BODY_BYTES, BodyRoom, StrictRoute
from lmx_lab.http.guard import local_policy
from lmx_lab.http.middleware import wrapped
from lmx_lab.http.uvicorn_server import Host
from tests.http.serving import Line, connected, running, until

pytestmark = pytest.mark.anyio
LARGE = SMALL_BODY_BYTES + 30_000
LIMIT = 8 * LARGE


def application(max_body_bytes: int = LIMIT) -> FastAPI:
    api, router = FastAPI(), APIRouter(route_class=StrictRoute)

    @router.post("/size")
    async def size(text: list[str]) -> int:
        return len(text[0])

    api.include_router(router)
    api.state.max_body_bytes = max_body_bytes
    return api


@asynccontextmanager
async def serving(room_bytes: int) -> AsyncIterator[tuple[Host, BodyRoom]]:
    api = application()
    ports: list[int] = []
    app = wrapped(api, lambda: local_policy(ports[0]))
    room = api.state.body_room = BodyRoom(room_bytes)
    async with running(app) as host:
        ports.append(host.port)
        yield host, room


def body_of(size: int) -> bytes:
    return json.dumps(["x" * (size - 4)]).encode()


def begin(line: Line, host: Host, body: bytes, part: int | None = None) -> None:
    names = f"host: 127.0.0.1:{host.port}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    line.send(f"POST /size HTTP/1.1\r\n{names}\r\n\r\n".encode() + body[:part])


async def status(line: Line, host: Host, body: bytes) -> tuple[int, Any, bytes]:
    begin(line, host, body)
    head, _, said = (await line.answer()).partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(said), head.lower()


async def test_large_bodies_share_their_room_and_small_ones_need_none() -> None:
    async with (
        serving(room_bytes=50_000) as (host, room),
        connected(host) as slow,
        connected(host) as second,
        connected(host) as third,
    ):
        body = body_of(LARGE)
        begin(slow, host, body, part=LARGE - 1)
        await until(lambda: room.taken_bytes == LARGE - 1 - SMALL_BODY_BYTES)

        code, said, head = await status(second, host, body)
        assert (code, said["error"]["code"], said["error"]["retryable"]) == (429, "queue-full", True)
        assert b"retry-after: 2" in head
        assert (await status(second, host, body_of(SMALL_BODY_BYTES)))[:2] == (200, SMALL_BODY_BYTES - 4)
        # What no wait would help with is said first.
        assert (await status(third, host, body_of(LIMIT + 1)))[0] == 413
        assert room.taken_bytes == LARGE - 1 - SMALL_BODY_BYTES

        slow.send(body[-1:])
        assert (await slow.answer()).endswith(str(LARGE - 4).encode())
        assert room.taken_bytes == 0
        assert (await status(second, host, body))[0] == 200


async def test_who_leaves_in_the_middle_gives_the_room_back() -> None:
    async with serving(room_bytes=50_000) as (host, room):
        async with connected(host) as slow:
            begin(slow, host, body_of(LARGE), part=LARGE - 1)
            await until(lambda: room.taken_bytes > 0)
        await until(lambda: room.taken_bytes == 0)


@pytest.mark.parametrize("content", [b"[1", b'{"a": 1}'])
async def test_a_body_that_is_refused_gives_the_room_back(content: bytes) -> None:
    async with serving(room_bytes=50_000) as (host, room), connected(host) as line:
        assert (await status(line, host, content + b" " * LARGE))[0] == 400
        assert room.taken_bytes == 0


async def test_what_is_not_too_large_always_has_room_alone() -> None:
    for limit, size in ((LIMIT, bodies.ROOM_BYTES), (2 * bodies.ROOM_BYTES, 2 * bodies.ROOM_BYTES)):
        api = application(limit)
        wrapped(api, lambda: local_policy(1))
        assert api.state.body_room.size_bytes == size


async def test_a_body_that_finds_no_room_keeps_what_it_has_until_it_is_let_go() -> None:
    room = BodyRoom(10)
    held = room.resize(0, SMALL_BODY_BYTES + 4)
    with pytest.raises(QueueFullError):
        room.resize(held, SMALL_BODY_BYTES + 11)
    assert room.taken_bytes == 4
    assert room.resize(held, 0) == room.taken_bytes == 0
