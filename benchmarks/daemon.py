"""Measure the daemon: overhead of a turn, fan-out and replay of events, lists, memory of subscribers."""

from __future__ import annotations

import asyncio
import base64
import json
import secrets
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from statistics import median
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

from benchmarks import client, prompts
from benchmarks.bench import Bench, BenchError
from benchmarks.processes import Worker
from benchmarks.rates import quantile
from benchmarks.report import Limit, Row
from benchmarks.servers import lab_server

FIGURE = "daemon"
TURN_TOKENS = 32
PACE_S = 0.004
SUBSCRIBERS = 10
SESSIONS = 2000
REPLAYED_EVENTS = 100_000
IDLE = 400
STUCK = 5
SETTLE_S = 0.3
AT_ONCE = 100


class Watcher:
    """A subscriber on asyncio streams. It counts frames and parses events only when needed."""

    def __init__(self, url: str, token: str, query: str = "") -> None:
        parts = urlsplit(url)
        self._host, self._port, self._token, self._query = parts.hostname or "", parts.port or 80, token, query
        self._rest = bytearray()

    async def __aenter__(self) -> Self:
        self._reader, self._writer = await asyncio.open_connection(self._host, self._port, limit=2**22)
        lines = [
            f"GET /v3/events{self._query} HTTP/1.1",
            f"Host: {self._host}:{self._port}",
            f"Authorization: Bearer {self._token}",
            "Connection: Upgrade",
            "Upgrade: websocket",
            "Sec-WebSocket-Version: 13",
            f"Sec-WebSocket-Key: {base64.b64encode(secrets.token_bytes(16)).decode()}",
        ]
        self._writer.write("\r\n".join([*lines, "", ""]).encode())
        head = await self._reader.readuntil(b"\r\n\r\n")
        if b" 101 " not in head[:20]:
            raise BenchError(f"no WebSocket: {head[:200]!r}")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.transport.abort()

    async def next_event(self, kind: bytes) -> dict[str, Any]:
        """Read until the next event of this kind, and return it."""
        mark = b'{"event":"' + kind + b'"'
        while True:
            for text in await self._texts():
                if text.startswith(mark):
                    event: dict[str, Any] = json.loads(text)
                    return event

    async def read_events(self, count: int) -> float:
        """Read ``count`` events of the log, and return the time of the last one."""
        while count > 0:
            count -= sum(not text.startswith(b'{"event":"stream.') for text in await self._texts())
        return time.monotonic()

    async def _texts(self) -> list[bytes]:
        """Read all available messages together, because this process shares two cores with the daemon."""
        if not (data := await self._reader.read(2**18)):
            raise BenchError("the daemon closed the stream")
        self._rest += data
        texts, at = [], 0
        rest = bytes(self._rest)
        while len(rest) >= at + 2:
            size, begin = rest[at + 1] & 0x7F, at + 2
            if size >= 126:
                begin += 2 if size == 126 else 8
                size = int.from_bytes(rest[at + 2 : begin])
            if len(rest) < begin + size:
                break
            if rest[at] & 0x0F == 1:
                texts.append(rest[begin : begin + size])
            elif rest[at] & 0x0F == 9:
                # A pong with the same bytes, masked with zeros; without it the daemon would close the connection.
                self._writer.write(bytes([0x8A, 0x80 | size]) + bytes(4) + rest[begin : begin + size])
            at = begin + size
        del self._rest[:at]
        return texts


@asynccontextmanager
async def watching(worker: Worker, count: int = 1, query: str = "") -> AsyncIterator[list[Watcher]]:
    """Connect ``count`` subscribers that have received all earlier events."""
    watchers = [Watcher(worker.ready["url"], worker.ready["token"], query) for _ in range(count)]
    try:
        for watcher in watchers:
            await watcher.__aenter__()
            await watcher.next_event(b"stream.synced")
        yield watchers
    finally:
        for watcher in watchers:
            await watcher.__aexit__(None, None, None)


def measure(bench: Bench) -> list[Row]:
    figures = [_fan_out, _slow_readers, _lists, _idle, _replay] if bench.model == "tiny" else []
    rows = [_paced(bench)] if bench.model == "tiny" else []
    with (
        tempfile.TemporaryDirectory() as home,
        lab_server(bench.folder) as ours,
        Worker("benchmarks.daemon_process", home=home, upstream=ours.url) as worker,
    ):
        rows.append(asyncio.run(_turns(bench, ours.url, worker, ours.extras)))
        return rows + [asyncio.run(figure(bench, worker)) for figure in figures]


# --- turns


def _paced(bench: Bench) -> Row:
    """The overhead of a turn with a model whose tokens all take the same time."""
    with (
        tempfile.TemporaryDirectory() as home,
        Worker("benchmarks.paced_process", pace_s=PACE_S) as upstream,
        Worker("benchmarks.daemon_process", home=home, upstream=upstream.ready["url"]) as worker,
    ):
        row = asyncio.run(_turns(bench, upstream.ready["url"], worker, {}))
    return replace(
        row, model="-", case=f"a token in {PACE_S * 1e3:g} ms, median of {len(row.detail['turns_s'])}", binding=True
    )


async def _turns(bench: Bench, url: str, worker: Worker, extras: dict[str, Any]) -> Row:
    """Send the same question to the model server and as a turn, alternately; no prompt is cached."""
    rounds = 10 if bench.quick else 40
    direct: list[float] = []
    turns: list[float] = []
    async with watching(worker) as (watcher,):
        for number in range(rounds):
            direct.append(await _chat(url, 5000 + 2 * number, extras))
            turns.append(await _turn(worker, watcher, 5001 + 2 * number, extras))
    overhead = [(turn - alone) * 1e3 for turn, alone in zip(turns, direct, strict=True)]
    return Row(
        figure="turn - the same chat",
        case=f"{TURN_TOKENS} tokens, median of {rounds}",
        model=bench.model,
        value=median(overhead),
        unit="ms",
        limit=Limit(sign="≤", bound=5),
        # The time of a real model varies by more than that; with the tiny one, three processes share two cores.
        binding=False,
        summary=f"{median(turns) * 1e3:.1f} against {median(direct) * 1e3:.1f} ms",
        detail={"direct_s": direct, "turns_s": turns},
    )


def _question(number: int) -> list[dict[str, Any]]:
    return [{"role": "user", "content": f"{number}: {prompts.story(number)[-1]['content']}"}]


async def _chat(url: str, number: int, extras: dict[str, Any]) -> float:
    answer = await client.stream(url, prompts.chat_body(_question(number), max_tokens=TURN_TOKENS) | extras)
    return answer.ended_at - answer.sent_at


async def _turn(worker: Worker, watcher: Watcher, number: int, extras: dict[str, Any]) -> float:
    session = (await _request(worker, "/v3/sessions", {})).json()
    overrides = {"max_tokens": TURN_TOKENS, "temperature": 0, "extra": extras}
    body = {"content": _question(number)[0]["content"], "overrides": overrides}
    submitted = await _request(worker, f"/v3/sessions/{session['session_id']}/turns", body)
    done = await watcher.next_event(b"turn.done")
    took = time.perf_counter() - submitted.sent_at
    if done["stats"]["completion_tokens"] != TURN_TOKENS:
        raise BenchError(f"a turn of {done['stats']['completion_tokens']} tokens, not {TURN_TOKENS}")
    return took


@dataclass(frozen=True, kw_only=True)
class _Answer:
    sent_at: float
    ended_at: float
    text: bytes

    def json(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self.text)
        return answer


async def _request(worker: Worker, path: str, body: dict[str, Any] | None) -> _Answer:
    """Send a request on a new connection, opened before the measured time. Without a body it is a GET."""
    parts = urlsplit(worker.ready["url"])
    content = b"" if body is None else json.dumps(body).encode()
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    sent_at = time.perf_counter()
    writer.write(
        f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n"
        f"Authorization: Bearer {worker.ready['token']}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n\r\n".encode()
        + content
    )
    head = await reader.readuntil(b"\r\n\r\n")
    text = await reader.read()
    ended_at = time.perf_counter()
    writer.close()
    if head[9:10] != b"2":
        raise BenchError(f"{path}: {head[:15]!r} {text[:300]!r}")
    return _Answer(sent_at=sent_at, ended_at=ended_at, text=text)


# --- the log


async def _fan_out(bench: Bench, worker: Worker) -> Row:
    """Measure the events per second that each of ten subscribers receives while they are written."""
    count = 5000 if bench.quick else 20_000
    async with watching(worker, SUBSCRIBERS) as watchers:
        reads = [asyncio.create_task(watcher.read_events(count)) for watcher in watchers]
        began = (await asyncio.to_thread(worker.ask, events=count, at_once=AT_ONCE))["began"][0]
        ended = max(await asyncio.gather(*reads))
    rate = count / (ended - began)
    return Row(
        figure="fan-out: events/s to each of 10",
        case=f"{count} events, {SUBSCRIBERS} sockets",
        model="-",
        value=rate,
        unit="/s",
        limit=Limit(sign="≥", bound=20_000),
        summary=f"{rate * SUBSCRIBERS:.0f} deliveries/s",
        detail={"seconds": ended - began},
    )


async def _slow_readers(bench: Bench, worker: Worker) -> Row:
    """Measure the delay of events at a subscriber while five others do not read."""
    count = 200 if bench.quick else 1000
    delays_s: list[float] = []
    async with watching(worker, STUCK), watching(worker) as (watcher,):
        await asyncio.to_thread(worker.ask, events=50_000, at_once=5000)
        await watcher.read_events(50_000)
        for _ in range(count):
            writing = asyncio.create_task(asyncio.to_thread(worker.ask, events=1, at_once=1))
            received_at = await watcher.read_events(1)
            delays_s.append(received_at - (await writing)["began"][0])
    return _latency_row(f"delay of an event, {STUCK} readers stuck", delays_s, q=0.99, bound_ms=50)


async def _lists(bench: Bench, worker: Worker) -> Row:
    """Measure the time for a list of all sessions."""
    worker.ask(sessions=SESSIONS)
    times_s: list[float] = []
    for _ in range(20 if bench.quick else 60):
        answer = await _request(worker, f"/v3/sessions?limit={SESSIONS}", None)
        times_s.append(answer.ended_at - answer.sent_at)
    if len(listed := answer.json()["sessions"]) != SESSIONS:
        raise BenchError(f"{len(listed)} sessions listed, not {SESSIONS}")
    return _latency_row("list of 2,000 sessions", times_s, q=0.95, bound_ms=40)


def _latency_row(figure: str, times_s: list[float], *, q: float, bound_ms: float) -> Row:
    return Row(
        figure=figure,
        case=f"p{q * 100:.0f} of {len(times_s)}",
        model="-",
        value=quantile(times_s, q) * 1e3,
        unit="ms",
        limit=Limit(sign="≤", bound=bound_ms),
        summary=f"median {median(times_s) * 1e3:.2f} ms",
        detail={"times_s": times_s},
    )


async def _idle(bench: Bench, worker: Worker) -> Row:
    """Measure the daemon's resident memory for each additional idle connection."""
    async with watching(worker, 50):
        before = worker.ask()["rss_bytes"]
        async with watching(worker, IDLE):
            await asyncio.sleep(SETTLE_S)
            after = worker.ask()["rss_bytes"]
    return Row(
        figure="memory of an idle subscriber",
        case=f"of {IDLE}",
        model="-",
        value=(after - before) / IDLE / 1e3,
        unit="kB",
        limit=Limit(sign="≤", bound=50),
        summary=f"{before / 1e6:.0f} to {after / 1e6:.0f} MB",
    )


async def _replay(bench: Bench, worker: Worker) -> Row:
    """Measure the time to receive all stored events from the database over a socket."""
    await asyncio.to_thread(worker.ask, events=REPLAYED_EVENTS, at_once=5000)
    began = time.monotonic()
    async with Watcher(worker.ready["url"], worker.ready["token"], "?after=0") as watcher:
        took = await watcher.read_events(REPLAYED_EVENTS) - began
    return Row(
        figure="replay of 100,000 events",
        case="one client, from the database",
        model="-",
        value=took,
        unit="s",
        limit=Limit(sign="≤", bound=2),
        summary=f"{REPLAYED_EVENTS / took:.0f} events/s",
    )
