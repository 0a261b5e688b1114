"""Clients that leave, clients that hardly read, clients that vanish; and the one beside them, or after them."""

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

from soak import vanishing
from soak.chats import CUT, GIVE_UP_S, HUNG, Body, End, Good, ask, long_body, note_good
from soak.models import Engine, on_each_engine
from soak.row import Row
from soak.served import SMALL_CACHE, Home, Server, end_well
from soak.soak import Soak
from soak.watch import Allowance, Watch

CLIENTS = 200
PATIENCE_S = 0.5
LONG_TOKENS = 6000
LONG_WORDS = 600
ROUNDS, QUICK_ROUNDS = 10, 1
AGAIN_S = 0.05

SIPPING = 4
"""Of eight slots."""
SIPPED_TOKENS = 1500
"""0.35 MB a stream, of which the buffers of a socket that nobody reads hold a part."""
SIP_S = 1.0
"""Between two bytes."""
SIPPING_S, QUICK_SIPPING_S = 20.0, 4.0
STREAM_MB = 4.0
"""Of memory, for each stream that is not taken."""


def run(soak: Soak) -> list[Row]:
    rows: list[Row] = []
    for engine, model in on_each_engine(soak, "load", rows):
        with (
            tempfile.TemporaryDirectory(prefix="lmx-soak-") as name,
            Server(Home(Path(name)), model, *SMALL_CACHE) as server,
        ):
            good = asyncio.run(Good.first(server.url))
            rows += [flood(soak, server, good, engine), slow_readers(soak, server, good, engine)]
            end_well(server, rows[-1])
    return [*rows, *vanishing.run(soak)]


# Clients that leave


def flood(soak: Soak, server: Server, good: Good, engine: Engine = "MLX") -> Row:
    """Again and again so many who leave, then one who does not: that one is answered in time."""
    row = Row(part=f"load: {CLIENTS} clients that leave, {engine}")
    outcomes: Counter[str] = Counter()
    watch = Watch(server.pid)
    # The first one is the warm-up: threads and buffers for so many at once are made in it, and kept.
    for number in range(1 + (QUICK_ROUNDS if soak.quick else ROUNDS)):
        if number == 1:
            watch.begin()
        asyncio.run(_flooded(server, soak.seed + 1000 * number, good, row, outcomes))
        if not server.until_idle():
            row.hung += 1
            row.wrong.append(f"requests that nobody waits for still run: {server.figures()}")
    row.notes = ", ".join(f"{count} {what}" for what, count in outcomes.most_common())
    watch.add_to(row)
    return row


async def _flooded(server: Server, seed: int, good: Good, row: Row, outcomes: Counter[str]) -> None:
    ends = await asyncio.gather(*(_impatient(server.url, seed + number) for number in range(CLIENTS)))
    row.requests += CLIENTS
    row.faults += sum(end.outcome == HUNG for end in ends)
    outcomes.update("left" if end.outcome == HUNG else end.outcome for end in ends)
    row.wrong += sorted({f"a request was {end.outcome}" for end in ends if not _may_be(end)})
    end, waited_s = await _answered(server.url, good)
    row.requests += 1
    note_good(row, End(outcome=end.outcome, text=end.text, seconds=waited_s))


async def _impatient(url: str, seed: int) -> End:
    body = long_body(seed, LONG_TOKENS, words=LONG_WORDS)
    return await ask(url, body, way="SSE" if seed % 2 else "whole", limit_s=PATIENCE_S)


def _may_be(end: End) -> bool:
    return end.finished or end.outcome in (HUNG, "queue-full")


async def _answered(url: str, good: Good) -> tuple[End, float]:
    """A normal client's request, sent again while it is told that the queue is full; and how long that took."""
    began = time.perf_counter()
    while True:
        end = await good.again(url, limit_s=GIVE_UP_S)
        if end.outcome != "queue-full" or time.perf_counter() - began > GIVE_UP_S:
            return end, time.perf_counter() - began
        await asyncio.sleep(AGAIN_S)


# Clients that hardly read


def slow_readers(soak: Soak, server: Server, good: Good, engine: Engine = "MLX") -> Row:
    """The normal one is answered as ever, what the slow ones do not take is bounded, and they lose nothing."""
    row = Row(part=f"load: slow readers beside a normal one, {engine}")
    asyncio.run(_sipped(server, SIPPING, good, Row(part="warm-up"), sip_s=0.0))
    server.until_idle()
    held = Watch(server.pid, allowance=Allowance(rss_mb=SIPPING * STREAM_MB, descriptors=SIPPING))
    held.begin()
    watch = Watch(server.pid)
    watch.base = held.base
    sip_s = QUICK_SIPPING_S if soak.quick else SIPPING_S
    most = asyncio.run(_sipped(server, SIPPING, good, row, sip_s=sip_s, held=held))
    row.notes = f"{SIPPING} streams, a byte a second each for {sip_s:g} s, then to their ends; {most}"
    if not server.until_idle():
        row.hung += 1
    watch.add_to(row)
    return row


async def _sipped(server: Server, count: int, good: Good, row: Row, *, sip_s: float, held: Watch | None = None) -> str:
    """Read so slowly for a while beside the good request, then everything; says what the server held meanwhile."""
    async with contextlib.AsyncExitStack() as stack:
        opened = [stack.enter_async_context(_reader(server.url, long_body(at, SIPPED_TOKENS))) for at in range(count)]
        readers = [await reader for reader in opened]
        row.requests += count
        row.faults += count
        sipping = [asyncio.create_task(_sip(reader)) for reader in readers]
        until = time.monotonic() + sip_s
        while time.monotonic() < until:
            row.requests += 1
            note_good(row, await good.again(server.url, limit_s=GIVE_UP_S))
        # The engine waits for no reader: all has been computed, and what is not taken is held.
        if not await asyncio.to_thread(server.until_idle):
            row.hung += 1
            row.wrong.append("slow readers hold slots: their generations have not ended")
        most = ""
        if held is not None and held.base is not None:
            excess = await asyncio.to_thread(held.excess, limit_s=2.0)
            row.leaked_mb += round(excess.rss_bytes / 1e6, 1)
            most = f"meanwhile RSS {held.read().rss_bytes / 1e6:.1f} MB (allowed: {held.allowance})"
        for task in sipping:
            task.cancel()
        await asyncio.wait(sipping)
        for reader, task in zip(readers, sipping, strict=True):
            await _rest(reader, task, row)
    return most


@contextlib.asynccontextmanager
async def _reader(url: str, body: Body) -> AsyncIterator[socket.socket]:
    """A stream on a socket whose buffer is so small that the server's side fills up after a few tokens."""
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


async def _sip(sock: socket.socket) -> None:
    while await asyncio.get_running_loop().sock_recv(sock, 1):  # noqa: ASYNC110 (it is no waiting: this is the pace)
        await asyncio.sleep(SIP_S)


async def _rest(sock: socket.socket, sipping: asyncio.Task[None], row: Row) -> None:
    """Everything that is left, as fast as it comes: who was slow has lost nothing."""
    loop, last = asyncio.get_running_loop(), b""
    outcome = "" if sipping.cancelled() else "ended before it was read"
    try:
        async with asyncio.timeout(GIVE_UP_S):
            while data := await loop.sock_recv(sock, 65536):
                last = (last + data)[-200:]
    except TimeoutError:
        outcome = HUNG
    except OSError:
        outcome = CUT
    if outcome or b"data: [DONE]" not in last:
        row.lost += 1
        row.wrong.append(f"a slow reader's stream was {outcome or 'not ended'}: {last[-80:]!r}")
