"""Tests with clients that disconnect often, or never read, during a long turn."""

import asyncio
import random
import socket

import pytest

from tests.support.daemons import Follower, Program, check_log
from tests.support.model_server import Gate, Scripted, counted

pytestmark = [pytest.mark.anyio, pytest.mark.long]
TOKENS = 2000
RECONNECTS = 50


@pytest.fixture
def last():
    return Gate()


@pytest.fixture
def program(tmp_path, last):
    # About four seconds; longer if the reconnects take longer.
    with Scripted(lambda body: counted(TOKENS, pause_s=0.02, every=10, gate=last)) as upstream:
        program = Program(tmp_path, upstream.url).start()
        yield program
        assert program.stop() == 0


async def begin(program):
    async with program.client() as http:
        await http.post("/sessions", json={"session_id": "s"})
        answer = await http.post("/sessions/s/turns", json={"turn_id": "t", "content": "write"})
        assert answer.status_code == 202


def text_of(events):
    return "".join(event["data"]["text"] for event in events if event["event"] == "turn.token")


EXPECTED = "".join(f"w{at} " for at in range(TOKENS))


async def test_fifty_reconnects_during_one_turn_receive_the_complete_text(program, last):
    chance = random.Random(3)
    follower = Follower(program)
    await begin(program)
    for _ in range(RECONNECTS):
        await asyncio.wait_for(follower.connect_once(most=chance.choice((1, 1, 2))), 30)
    last.open()
    async with follower.following():
        await follower.until_ended(["t"])
    check_log(follower.events)
    text = text_of(follower.events)
    async with program.client() as http:
        assert text == (await http.get("/sessions/s/turns/t")).json()["text"]
    assert text.startswith(EXPECTED)
    assert follower.connections == RECONNECTS + 1


async def test_clients_that_never_read_do_not_delay_others(program, last):
    last.open()
    stuck = [await asyncio.to_thread(connect_and_read_nothing, program) for _ in range(5)]
    follower = Follower(program)
    async with follower.following():
        await begin(program)
        await follower.until_ended(["t"])
    assert text_of(follower.events) == EXPECTED
    for connection in stuck:
        connection.close()


def connect_and_read_nothing(program):
    """Connect with the smallest possible buffer, and do not read after the handshake."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    connection.connect((program.state.host, program.state.port))
    lines = [
        "GET /v3/events?after=0 HTTP/1.1",
        f"Host: {program.state.host}:{program.state.port}",
        f"Authorization: Bearer {program.state.token}",
        "Connection: Upgrade",
        "Upgrade: websocket",
        "Sec-WebSocket-Version: 13",
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
    ]
    connection.sendall("\r\n".join([*lines, "", ""]).encode())
    assert connection.recv(12) == b"HTTP/1.1 101"
    return connection
