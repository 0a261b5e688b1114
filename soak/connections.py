"""Open hundreds of idle connections, which must not slow down an active one."""

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

from soak.chat_requests import TIMEOUT_S, ChatResult, ReferenceChat, record_reference
from soak.programs import SMALL_CACHE, Daemon, Home, Server, end_and_check, wait_until
from soak.report import Row, Soak
from soak.resources import POOL, Allowance, ResourceMonitor
from tests.support.model_server import Scripted, says

IDLE, QUICK_IDLE = 256, 64
"""Number of idle connections of each kind."""
AT_ONCE = 32
"""Number of simultaneous handshakes."""
ROUNDS, QUICK_ROUNDS = 5, 1
WARM_UPS, QUICK_WARM_UPS = 3, 1
"""Rounds before the measurement, in which memory for the connections is allocated; later rounds use it again."""
EVENTS = Allowance(rss_mb=8.0)
"""The daemon keeps up to 8 MiB of the newest events in memory, including those of these turns."""
GOOD, QUICK_GOOD = 60, 10
TURNS, QUICK_TURNS = 40, 8
SOCKETS_S = 60.0
"""Limit for opening a connection, and for receiving an expected message."""
WORDS = ("It ", "is ", "as ", "it ", "was.")
SESSION = "s"


def run(soak: Soak) -> list[Row]:
    return [attack_server(soak), beside_the_daemon(soak)]


def _idle(soak: Soak) -> int:
    return QUICK_IDLE if soak.quick else IDLE


def _rounds(soak: Soak) -> int:
    return QUICK_ROUNDS if soak.quick else ROUNDS


def _warm_ups(soak: Soak) -> int:
    return QUICK_WARM_UPS if soak.quick else WARM_UPS


# The inference server


def attack_server(soak: Soak) -> Row:
    with (
        tempfile.TemporaryDirectory(prefix="lmx-soak-") as name,
        Server(Home(Path(name)), soak.folder, *SMALL_CACHE) as server,
    ):
        row = beside_a_chat(soak, server)
        end_and_check(server, row)
    return row


def beside_a_chat(soak: Soak, server: Server) -> Row:
    """Chat while hundreds of idle streams and WebSockets are open, in several rounds."""
    row = Row(part="connections: idle, with a chat")
    reference = asyncio.run(ReferenceChat.record(server.url))
    monitor = ResourceMonitor(server.pid, allowance=Allowance(threads=POOL))
    for _ in range(_warm_ups(soak)):
        asyncio.run(_chat_beside_idle(server.url, _idle(soak), 2, reference, Row(part="warm-up")))
    monitor.begin()
    for _ in range(_rounds(soak)):
        asyncio.run(_chat_beside_idle(server.url, _idle(soak), QUICK_GOOD if soak.quick else GOOD, reference, row))
    row.notes = f"{_idle(soak)} streams of events and as many WebSockets, {_rounds(soak)} times"
    monitor.add_to(row)
    return row


async def _chat_beside_idle(url: str, idle: int, count: int, reference: ReferenceChat, row: Row) -> None:
    async with contextlib.AsyncExitStack() as stack:
        streams = [_EventStream(url) for _ in range(idle)]
        sockets = [_socket(f"{url.replace('http', 'ws', 1)}/v1/chat/stream") for _ in range(idle)]
        opened = await _open_all(stack, [*streams, *sockets])
        row.requests += len(opened) + count
        for _ in range(count):
            record_reference(row, await reference.repeat(url, limit_s=TIMEOUT_S))
        for receives_more in await asyncio.gather(*(stream.receives_more() for stream in streams)):
            if not receives_more:
                row.hung += 1
                row.wrong.append("an event stream sends nothing, or was closed")
        for socket in opened[idle:]:
            with contextlib.suppress(TimeoutError):
                # No request was sent, so any message is wrong.
                row.wrong.append(f"an idle WebSocket received {await _received_text(socket)}")
                row.lost += 1


async def _received_text(socket: ClientConnection) -> str:
    """Describe what the socket has received.

    Raises:
        TimeoutError: it has received nothing.
    """
    try:
        return repr(await asyncio.wait_for(socket.recv(), 0))[:100]
    except ConnectionClosed as exc:
        return f"a close: {exc}"


async def _open_all(stack: contextlib.AsyncExitStack, contexts: list[Any]) -> list[Any]:
    """Enter all contexts, ``AT_ONCE`` at a time."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def enter(context: Any) -> Any:
        async with gate:
            return await stack.enter_async_context(context)

    return list(await asyncio.gather(*(enter(context) for context in contexts)))


def _socket(address: str, **headers: str) -> connect:
    return connect(address, additional_headers=headers, proxy=None, open_timeout=SOCKETS_S, max_queue=None)


class _EventStream:
    """A stream of ``GET /admin/events`` whose content is ignored, as a context manager."""

    def __init__(self, url: str) -> None:
        self._place = urlsplit(url)
        self._received = asyncio.Event()
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
            self._received.set()

    async def receives_more(self) -> bool:
        """Return whether anything is received from now on; the server sends an event every second."""
        self._received.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._received.wait(), TIMEOUT_S)
        return self._received.is_set()


# The daemon


def beside_the_daemon(soak: Soak) -> Row:
    row = Row(part="connections: idle, with turns")
    count = QUICK_TURNS if soak.quick else TURNS
    with (
        tempfile.TemporaryDirectory(prefix="lmx-soak-") as name,
        Scripted(says(*WORDS)) as upstream,
        Daemon(Home(Path(name)), upstream.url) as daemon,
    ):
        monitor = ResourceMonitor(daemon.pid, allowance=EVENTS)
        asyncio.run(_begin_session(daemon))
        for number in range(_warm_ups(soak)):
            asyncio.run(_run_turns(daemon, f"warm-up-{number}", _idle(soak), count, Row(part="warm-up")))
        monitor.begin()
        for number in range(_rounds(soak)):
            asyncio.run(_run_turns(daemon, f"round-{number}", _idle(soak), count, row))
            if not wait_until(lambda: asyncio.run(_count_subscribers(daemon)) == 0, SOCKETS_S):
                row.wrong.append("the daemon still counts subscribers that have disconnected")
        row.notes = f"{_idle(soak)} WebSockets of events, {_rounds(soak)} times"
        monitor.add_to(row)
        end_and_check(daemon, row)
    return row


async def _begin_session(daemon: Daemon) -> None:
    async with daemon.client() as http:
        (await http.post("/sessions", json={"session_id": SESSION})).raise_for_status()


async def _count_subscribers(daemon: Daemon) -> int:
    async with daemon.client() as http:
        return int((await http.get("/daemon")).json()["counts"]["subscribers"])


async def _run_turns(daemon: Daemon, name: str, idle: int, count: int, row: Row) -> None:
    """Run turns one after the other; every subscriber must receive each of their events exactly once."""
    state = daemon.state
    async with contextlib.AsyncExitStack() as stack:
        address = f"{state.url.replace('http', 'ws', 1)}/v3/events"
        http = await stack.enter_async_context(daemon.client())
        sockets = await _open_all(stack, [_socket(address, Authorization=f"Bearer {state.token}") for _ in range(idle)])
        before = [await _read_until_synced(socket) for socket in sockets]
        row.requests += idle + count
        for number in range(count):
            record_reference(row, await _run_turn(http, f"{name}-{number}"))
        latest = int((await http.get("/daemon")).json()["latest_seq"])
        for socket, cursor in zip(sockets, before, strict=True):
            lost, doubled = await _count_missed(socket, cursor, latest)
            row.lost += lost
            row.doubled += doubled


async def _run_turn(http: Any, turn_id: str) -> ChatResult:
    began, turns = time.perf_counter(), f"/sessions/{SESSION}/turns"
    (await http.post(turns, json={"turn_id": turn_id, "content": "how is it?"})).raise_for_status()
    record = (await http.get(f"{turns}/{turn_id}", params={"wait": TIMEOUT_S})).json()
    outcome = "stop" if record["text"] == "".join(WORDS) else "wrong"
    return ChatResult(outcome=outcome, text=json.dumps(record), seconds=time.perf_counter() - began)


async def _read_until_synced(socket: ClientConnection) -> int:
    """Read until the subscriber has the whole log; return its cursor."""
    while True:
        message = json.loads(await asyncio.wait_for(socket.recv(), SOCKETS_S))
        if message["event"] == "stream.synced":
            return int(message["data"]["cursor"])


async def _count_missed(socket: ClientConnection, cursor: int, latest: int) -> tuple[int, int]:
    """Count the events after the cursor, up to the latest, that were not received, and those received twice."""
    seen: list[int] = []
    with contextlib.suppress(TimeoutError, ConnectionClosed):
        while latest not in seen[-1:]:
            seq = json.loads(await asyncio.wait_for(socket.recv(), SOCKETS_S))["seq"]
            seen += [] if seq is None else [seq]
    return len(set(range(cursor + 1, latest + 1)) - set(seen)), len(seen) - len(set(seen))
