"""Send requests whose clients disconnect, read slowly or become unreachable, and one that must be answered."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

from soak import unreachable_clients
from soak.chat_requests import (
    CUT,
    HUNG,
    TIMEOUT_S,
    Body,
    ChatResult,
    ReferenceChat,
    long_body,
    record_reference,
    send_chat,
)
from soak.models import Engine, on_each_engine
from soak.programs import SMALL_CACHE, Home, Server, end_and_check
from soak.report import Row, Soak
from soak.resources import SETTLED_SERVER, Allowance, ResourceMonitor

CLIENTS = 200
PATIENCE_S = 0.5
LONG_TOKENS = 6000
LONG_WORDS = 600
ROUNDS, QUICK_ROUNDS = 10, 1
AGAIN_S = 0.05

SLOW_READERS = 4
"""Slow clients; the server has eight slots."""
SLOW_TOKENS = 1500
"""Tokens of a stream, which are 0.35 MB; the buffers of an unread socket hold a part of them."""
SLOW_READ_S = 1.0
"""Seconds between two bytes that a slow client reads."""
SLOW_READING_S, QUICK_SLOW_READING_S = 20.0, 4.0
STREAM_MB = 4.0
"""Memory that the server may use for each unread stream."""


def run(soak: Soak) -> list[Row]:
    rows: list[Row] = []
    for engine, model in on_each_engine(soak, "load", rows):
        with (
            tempfile.TemporaryDirectory(prefix="lmx-soak-") as name,
            # On a busy machine the streams of the slow readers are computed for longer than the 10 s of the default.
            Server(Home(Path(name)), model, *SMALL_CACHE, environment={"LMX_LAB_SLOW_CLIENT_S": "120"}) as server,
        ):
            reference = asyncio.run(ReferenceChat.record(server.url))
            rows += [flood(soak, server, reference, engine), slow_readers(soak, server, reference, engine)]
            end_and_check(server, rows[-1])
    return [*rows, *unreachable_clients.run(soak)]


# Clients that disconnect


def flood(soak: Soak, server: Server, reference: ReferenceChat, engine: Engine = "MLX") -> Row:
    """Send requests whose clients disconnect, then the reference request, which must be answered in time."""
    row = Row(part=f"load: {CLIENTS} clients that disconnect, {engine}")
    outcomes: Counter[str] = Counter()
    monitor = ResourceMonitor(server.pid, allowance=SETTLED_SERVER)
    # The first round is the warm-up, which creates the buffers that the server keeps.
    for number in range(1 + (QUICK_ROUNDS if soak.quick else ROUNDS)):
        if number == 1:
            monitor.begin()
        asyncio.run(_flood_once(server, soak.seed + 1000 * number, reference, row, outcomes))
        if not server.wait_until_idle():
            row.hung += 1
            row.wrong.append(f"requests without a client still run: {server.metrics()}")
    row.notes = ", ".join(f"{count} {what}" for what, count in outcomes.most_common())
    monitor.add_to(row)
    return row


async def _flood_once(server: Server, seed: int, reference: ReferenceChat, row: Row, outcomes: Counter[str]) -> None:
    impatient = (
        send_chat(
            server.url,
            long_body(each, LONG_TOKENS, words=LONG_WORDS),
            mode="SSE" if each % 2 else "whole",
            limit_s=PATIENCE_S,
        )
        for each in range(seed, seed + CLIENTS)
    )
    results = await asyncio.gather(*impatient)
    row.requests += CLIENTS
    row.faults += sum(result.outcome == HUNG for result in results)
    outcomes.update("disconnected" if result.outcome == HUNG else result.outcome for result in results)
    unexpected = (result for result in results if not result.finished and result.outcome not in (HUNG, "queue-full"))
    row.wrong += sorted({f"a request was {result.outcome}" for result in unexpected})
    result, waited_s = await _reference_once_accepted(server.url, reference)
    row.requests += 1
    record_reference(row, ChatResult(outcome=result.outcome, text=result.text, seconds=waited_s))


async def _reference_once_accepted(url: str, reference: ReferenceChat) -> tuple[ChatResult, float]:
    """Repeat the reference request while the queue is full; return its result, and the seconds since the first try."""
    began = time.perf_counter()
    while True:
        result = await reference.repeat(url, limit_s=TIMEOUT_S)
        if result.outcome != "queue-full" or time.perf_counter() - began > TIMEOUT_S:
            return result, time.perf_counter() - began
        await asyncio.sleep(AGAIN_S)


# Slow clients


def slow_readers(soak: Soak, server: Server, reference: ReferenceChat, engine: Engine = "MLX") -> Row:
    """Read streams slowly while sending the reference request.

    The reference request must be answered in time, the memory for unread streams is limited, and no text is lost.
    """
    row = Row(part=f"load: slow readers and a normal client, {engine}")
    asyncio.run(_read_slowly_beside_reference(server, SLOW_READERS, reference, Row(part="warm-up"), slow_s=0.0))
    server.wait_until_idle()
    monitor_unread = ResourceMonitor(
        server.pid, allowance=Allowance(rss_mb=SLOW_READERS * STREAM_MB, descriptors=SLOW_READERS)
    )
    monitor_unread.begin()
    monitor = ResourceMonitor(server.pid, allowance=SETTLED_SERVER)
    monitor.base = monitor_unread.base
    slow_s = QUICK_SLOW_READING_S if soak.quick else SLOW_READING_S
    memory = asyncio.run(
        _read_slowly_beside_reference(
            server, SLOW_READERS, reference, row, slow_s=slow_s, monitor_unread=monitor_unread
        )
    )
    row.notes = f"{SLOW_READERS} streams, one byte per second each for {slow_s:g} s, then to their ends; {memory}"
    if not server.wait_until_idle():
        row.hung += 1
    monitor.add_to(row)
    return row


async def _read_slowly_beside_reference(
    server: Server,
    count: int,
    reference: ReferenceChat,
    row: Row,
    *,
    slow_s: float,
    monitor_unread: ResourceMonitor | None = None,
) -> str:
    """Read streams slowly while sending the reference request, then read the rest.

    Returns:
        The memory that the server used meanwhile, as a note.
    """
    async with contextlib.AsyncExitStack() as stack:
        opened = [stack.enter_async_context(_reader(server.url, long_body(at, SLOW_TOKENS))) for at in range(count)]
        readers = [await reader for reader in opened]
        row.requests += count
        row.faults += count
        slow_tasks = [asyncio.create_task(_read_slowly(reader)) for reader in readers]
        until = time.monotonic() + slow_s
        while time.monotonic() < until:
            row.requests += 1
            record_reference(row, await reference.repeat(server.url, limit_s=TIMEOUT_S))
        # The engine does not wait for readers: everything has been computed, and unread text is in memory.
        if not await asyncio.to_thread(server.wait_until_idle):
            row.hung += 1
            row.wrong.append("slow readers occupy slots: their generations have not ended")
        memory = ""
        if monitor_unread is not None and monitor_unread.base is not None:
            excess = await asyncio.to_thread(monitor_unread.excess, limit_s=2.0)
            row.leaked_mb += round(excess.rss_bytes / 1e6, 1)
            memory = (
                f"meanwhile RSS {monitor_unread.read().rss_bytes / 1e6:.1f} MB (allowed: {monitor_unread.allowance})"
            )
        for task in slow_tasks:
            task.cancel()
        await asyncio.wait(slow_tasks)
        for reader, task in zip(readers, slow_tasks, strict=True):
            await _read_rest(reader, task, row)
    return memory


@contextlib.asynccontextmanager
async def _reader(url: str, body: Body) -> AsyncIterator[socket.socket]:
    """Open a stream on a socket with so small a buffer that the server's buffer fills after a few tokens."""
    place, loop = urlsplit(url), asyncio.get_running_loop()
    data = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {place.netloc}\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        await loop.sock_connect(sock, (place.hostname, place.port))
        await loop.sock_sendall(sock, head.encode() + data)
        yield sock


async def _read_slowly(sock: socket.socket) -> None:
    while await asyncio.get_running_loop().sock_recv(sock, 1):  # noqa: ASYNC110 (this is not a wait for a condition, but the rate of reading)
        await asyncio.sleep(SLOW_READ_S)


async def _read_rest(sock: socket.socket, reading: asyncio.Task[None], row: Row) -> None:
    """Read the rest of a stream at full speed; it must be complete."""
    loop, last = asyncio.get_running_loop(), b""
    outcome = "" if reading.cancelled() else "ended before it was read"
    try:
        async with asyncio.timeout(TIMEOUT_S):
            while data := await loop.sock_recv(sock, 65536):
                last = (last + data)[-200:]
    except TimeoutError:
        outcome = HUNG
    except OSError:
        outcome = CUT
    if outcome or b"data: [DONE]" not in last:
        row.lost += 1
        row.wrong.append(f"a slow reader's stream is incomplete ({outcome or 'it has no result'}): {last[-80:]!r}")
