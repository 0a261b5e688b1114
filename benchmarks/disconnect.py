"""Measure the time from a closed connection to the free slot, by transport and phase."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

from websockets.asyncio.client import connect

from benchmarks import client, prompts
from benchmarks.bench import Bench, BenchError
from benchmarks.processes import Reply
from benchmarks.report import Limit, Row
from benchmarks.servers import LabServer, is_idle, lab_server
from lmx_lab.errors import LabError

FIGURE = "disconnect → slot free"
TRANSPORTS = ("SSE", "WebSocket", "non-streaming")
PHASES = ("queued", "prefill", "decode")
LONG_TOKENS = 6000
TIMEOUT_S = 120.0
COUNTED_S = 0.5
"""Time after which all tokens of an ended answer have been counted."""
Disconnect = Callable[[], None]
Body = dict[str, Any]


def measure(bench: Bench) -> list[Row]:
    # One slot, so that a second request waits.
    with lab_server(bench.folder, slots=1) as ours:
        return [asyncio.run(_case(bench, ours, transport, phase)) for transport in TRANSPORTS for phase in PHASES]


async def _case(bench: Bench, ours: LabServer, transport: str, phase: str) -> Row:
    await ours.until_idle()
    await asyncio.sleep(COUNTED_S)
    seed = 100 * TRANSPORTS.index(transport) + PHASES.index(phase)
    run = {"queued": _queued, "prefill": _prefilling, "decode": _decoding}[phase]
    seconds = await run(bench, ours, transport, 3000 + seed)
    return Row(
        figure=FIGURE,
        case=f"{transport}, {phase}",
        model=bench.model,
        value=seconds,
        unit="s",
        limit=Limit(sign="≤", bound=1.0),
    )


async def _queued(bench: Bench, ours: LabServer, transport: str, seed: int) -> float:
    async with _running_request("SSE", ours, _long_answer(ours, seed)):
        await ours.until(_decodes_since(ours.snapshot()), limit_s=TIMEOUT_S, what="a request decodes")
        async with _running_request(transport, ours, _long_answer(ours, seed + 50)) as disconnect:
            await ours.until(lambda now: now["queued_requests"] == 1, limit_s=TIMEOUT_S, what="a request waits")
            disconnect()
            seconds = await ours.until(
                lambda now: now["queued_requests"] == 0, limit_s=TIMEOUT_S, what="the waiting request is removed"
            )
        if ours.snapshot()["active_requests"] != 1:
            raise BenchError("the request in the slot ended too early, so the waiting one may have got the slot")
    return seconds


async def _prefilling(bench: Bench, ours: LabServer, transport: str, seed: int) -> float:
    before = ours.snapshot()
    body = prompts.chat_body(prompts.history(seed, bench.sizes.prefill_tokens), max_tokens=16)
    async with _running_request(transport, ours, body) as disconnect:
        await ours.until(lambda now: now["active_requests"] == 1, limit_s=TIMEOUT_S, what="a request has the slot")
        # The prefill takes much longer than this.
        await asyncio.sleep(0.05)
        disconnect()
        seconds = await ours.until(is_idle, limit_s=TIMEOUT_S, what="the slot is free")
    if ours.snapshot()["output_tokens"] != before["output_tokens"]:
        raise BenchError("the prefill ended before the client disconnected; make the prompt longer")
    return seconds


async def _decoding(bench: Bench, ours: LabServer, transport: str, seed: int) -> float:
    before = ours.snapshot()
    async with _running_request(transport, ours, _long_answer(ours, seed)) as disconnect:
        await ours.until(_decodes_since(before), limit_s=TIMEOUT_S, what="a request decodes")
        disconnect()
        seconds = await ours.until(is_idle, limit_s=TIMEOUT_S, what="the slot is free")
    if ours.snapshot()["output_tokens"] - before["output_tokens"] >= LONG_TOKENS:
        raise BenchError("the answer ended before the client disconnected")
    return seconds


def _long_answer(ours: LabServer, seed: int) -> Body:
    return prompts.chat_body(prompts.story(seed), max_tokens=LONG_TOKENS, **ours.extras)


def _decodes_since(before: Reply) -> Callable[[Reply], bool]:
    return lambda now: bool(now["output_tokens"] >= before["output_tokens"] + 3)


@asynccontextmanager
async def _running_request(transport: str, ours: LabServer, body: Body) -> AsyncIterator[Disconnect]:
    """Start a request, and yield the function that aborts its connection."""
    if transport == "WebSocket":
        async with connect(ours.url.replace("http", "ws") + "/v1/chat/stream", max_queue=None) as socket:
            await socket.send(json.dumps({name: body[name] for name in body if not name.startswith("stream")}))
            yield socket.transport.abort
            socket.transport.abort()
        return
    if transport == "non-streaming":
        body = {name: body[name] for name in body if not name.startswith("stream")}
    async with client.SentRequest(ours.url, body) as request:
        reading = asyncio.create_task(_read(request))
        try:
            yield request.abort
        finally:
            reading.cancel()
            await asyncio.wait([reading])


async def _read(request: client.SentRequest) -> None:
    """Read as a client does, because a full buffer would stop the server for another reason."""
    with suppress(LabError):
        async for _ in request.data():
            pass
