"""Idle connections by the hundred, beside one that works: it is answered as if they were not there."""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from soak.chats import GIVE_UP_S, End, Good, note_good
from soak.row import Row
from soak.served import SMALL_CACHE, Daemon, Home, Server, end_well, until
from soak.soak import Soak
from soak.watch import Allowance, Watch
from tests.daemon.scripted import Scripted, says

IDLE, QUICK_IDLE = 256, 64
"""Of each kind."""
AT_ONCE = 32
"""Handshakes under way."""
ROUNDS, QUICK_ROUNDS = 5, 1
WARM_UPS, QUICK_WARM_UPS = 3, 1
"""Rounds before the first reading: memory for so many connections is taken in them, and used again."""
EVENTS = Allowance(rss_mb=8.0)
"""The daemon keeps the newest events in memory, up to 8 MiB of them; the turns of all rounds are a part of that."""
GOOD, QUICK_GOOD = 60, 10
TURNS, QUICK_TURNS = 40, 8
SOCKETS_S = 60.0
"""How long a connection may take to be made, or to get what it should."""
WORDS = ("It ", "is ", "as ", "it ", "was.")
SESSION = "s"


def run(soak: Soak) -> list[Row]:
    return [beside_the_server(soak), beside_the_daemon(soak)]


def _idle(soak: Soak) -> int:
    return QUICK_IDLE if soak.quick else IDLE


def _rounds(soak: Soak) -> int:
    return QUICK_ROUNDS if soak.quick else ROUNDS


def _warm_ups(soak: Soak) -> int:
    return QUICK_WARM_UPS if soak.quick else WARM_UPS


# The inference server


def beside_the_server(soak: Soak) -> Row:
    with (
        tempfile.TemporaryDirectory(prefix="lmx-soak-") as name,
        Server(Home(Path(name)), soak.folder, *SMALL_CACHE) as server,
    ):
        row = beside_a_chat(soak, server)
        end_well(server, row)
    return row


def beside_a_chat(soak: Soak, server: Server) -> Row:
    """Chats beside idle streams and sockets, which are opened and closed again and again."""
    row = Row(part="connections: idle, beside a chat")
    good = asyncio.run(Good.first(server.url))
    watch = Watch(server.pid)
    for _ in range(_warm_ups(soak)):
        asyncio.run(_chatted(server.url, _idle(soak), 2, good, Row(part="warm-up")))
    watch.begin()
    for _ in range(_rounds(soak)):
        asyncio.run(_chatted(server.url, _idle(soak), QUICK_GOOD if soak.quick else GOOD, good, row))
    row.notes = f"{_idle(soak)} streams of events and as many WebSockets, {_rounds(soak)} times"
    watch.add_to(row)
    return row


async def _chatted(url: str, idle: int, count: int, good: Good, row: Row) -> None:
    async with contextlib.AsyncExitStack() as stack:
        streams = [_EventStream(url) for _ in range(idle)]
        sockets = [_socket(f"{url.replace('http', 'ws', 1)}/v1/chat/stream") for _ in range(idle)]
        opened = await _opened(stack, [*streams, *sockets])
        row.requests += len(opened) + count
        for _ in range(count):
            note_good(row, await good.again(url, limit_s=GIVE_UP_S))
        for beats in await asyncio.gather(*(stream.beats() for stream in streams)):
            if not beats:
                row.hung += 1
                row.wrong.append("a stream of events is silent, or was closed")
        for socket in opened[idle:]:
            with contextlib.suppress(TimeoutError):
                # Nobody has asked anything: whatever comes is wrong.
                row.wrong.append(f"an idle WebSocket was told {await _told(socket)}")
                row.lost += 1


async def _told(socket: ClientConnection) -> str:
    """
    Raises:
        TimeoutError: nothing.
    """
    try:
        return repr(await asyncio.wait_for(socket.recv(), 0))[:100]
    except ConnectionClosed as exc:
        return f"to go: {exc}"


async def _opened(stack: contextlib.AsyncExitStack, contexts: list[Any]) -> list[Any]:
    """Enter all, some at a time."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def enter(context: Any) -> Any:
        async with gate:
            return await stack.enter_async_context(context)

    return list(await asyncio.gather(*(enter(context) for context in contexts)))


def _socket(address: str, **headers: str) -> connect:
    return connect(address, additional_headers=headers, proxy=None, open_timeout=SOCKETS_S, max_queue=None)


class _EventStream:
    """``GET /admin/events``, of which only the amount is looked at. A context."""

    def __init__(self, url: str) -> None:
        self._place = urlsplit(url)
        self._came = asyncio.Event()
        self._writer: asyncio.StreamWriter
        self._reading: asyncio.Task[None]

    async def __aenter__(self) -> _EventStream:
        reader, self._writer = await asyncio.open_connection(self._place.hostname, self._place.port)
        self._writer.write(f"GET /admin/events HTTP/1.1\r\nHost: {self._place.netloc}\r\n\r\n".encode())
        head = await reader.readuntil(b"\r\n\r\n")
        assert b" 200 " in head.partition(b"\r\n")[0], head
        self._reading = asyncio.create_task(self._read(reader))
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._reading.cancel()
        self._writer.close()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while await reader.read(65536):
            self._came.set()

    async def beats(self) -> bool:
        """Whether something comes from now on; there is something every second."""
        self._came.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._came.wait(), GIVE_UP_S)
        return self._came.is_set()


# The daemon


def beside_the_daemon(soak: Soak) -> Row:
    row = Row(part="connections: idle, beside turns")
    count = QUICK_TURNS if soak.quick else TURNS
    with (
        tempfile.TemporaryDirectory(prefix="lmx-soak-") as name,
        Scripted(says(*WORDS)) as upstream,
        Daemon(Home(Path(name)), upstream.url) as daemon,
    ):
        watch = Watch(daemon.pid, allowance=EVENTS)
        asyncio.run(_begin_session(daemon))
        for number in range(_warm_ups(soak)):
            asyncio.run(_turned(daemon, f"warm-up-{number}", _idle(soak), count, Row(part="warm-up")))
        watch.begin()
        for number in range(_rounds(soak)):
            asyncio.run(_turned(daemon, f"round-{number}", _idle(soak), count, row))
            if not until(lambda: asyncio.run(_watching(daemon)) == 0, SOCKETS_S):
                row.wrong.append("subscribers are counted that have left")
        row.notes = f"{_idle(soak)} WebSockets of events, {_rounds(soak)} times"
        watch.add_to(row)
        end_well(daemon, row)
    return row


async def _begin_session(daemon: Daemon) -> None:
    async with daemon.client() as http:
        (await http.post("/sessions", json={"session_id": SESSION})).raise_for_status()


async def _watching(daemon: Daemon) -> int:
    async with daemon.client() as http:
        return int((await http.get("/daemon")).json()["counts"]["subscribers"])


async def _turned(daemon: Daemon, name: str, idle: int, count: int, row: Row) -> None:
    """Turns, one after the other, with everybody told of each of their events, once."""
    state = daemon.state
    async with contextlib.AsyncExitStack() as stack:
        address = f"{state.url.replace('http', 'ws', 1)}/v3/events"
        http = await stack.enter_async_context(daemon.client())
        sockets = await _opened(stack, [_socket(address, Authorization=f"Bearer {state.token}") for _ in range(idle)])
        before = [await _synced(socket) for socket in sockets]
        row.requests += idle + count
        for number in range(count):
            note_good(row, await _turn(http, f"{name}-{number}"))
        latest = int((await http.get("/daemon")).json()["latest_seq"])
        for socket, cursor in zip(sockets, before, strict=True):
            lost, doubled = await _missed(socket, cursor, latest)
            row.lost += lost
            row.doubled += doubled


async def _turn(http: Any, turn_id: str) -> End:
    began, turns = time.perf_counter(), f"/sessions/{SESSION}/turns"
    (await http.post(turns, json={"turn_id": turn_id, "content": "how is it?"})).raise_for_status()
    record = (await http.get(f"{turns}/{turn_id}", params={"wait": GIVE_UP_S})).json()
    outcome = "stop" if record["text"] == "".join(WORDS) else "wrong"
    return End(outcome=outcome, text=json.dumps(record), seconds=time.perf_counter() - began)


async def _synced(socket: ClientConnection) -> int:
    """The cursor of somebody who has all that there is."""
    while True:
        message = json.loads(await asyncio.wait_for(socket.recv(), SOCKETS_S))
        if message["event"] == "stream.synced":
            return int(message["data"]["cursor"])


async def _missed(socket: ClientConnection, cursor: int, latest: int) -> tuple[int, int]:
    """How many of the events from the cursor to the latest one did not come, and how many came again."""
    seen: list[int] = []
    with contextlib.suppress(TimeoutError, ConnectionClosed):
        while latest not in seen[-1:]:
            seq = json.loads(await asyncio.wait_for(socket.recv(), SOCKETS_S))["seq"]
            seen += [] if seq is None else [seq]
    return len(set(range(cursor + 1, latest + 1)) - set(seen)), len(seen) - len(set(seen))
