"""Measure the time to a complete answer after 200 clients with a short timeout."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from statistics import median
from typing import Any

from benchmarks import client, prompts
from benchmarks.bench import Bench, BenchError
from benchmarks.report import Limit, Row
from benchmarks.servers import LabServer, lab_server
from lmx_lab.errors import LabError, QueueFullError

FIGURE = "complete answer after a flood"
CLIENTS = 200
CLIENT_TIMEOUT_S = 0.5
PROMPT_TOKENS = 1000
LONG_TOKENS = 6000
RETRY_S = 0.05
TIMEOUT_S = 60.0


def measure(bench: Bench) -> list[Row]:
    with lab_server(bench.folder) as ours:
        runs = [asyncio.run(_run(ours, number)) for number in range(1 if bench.quick else 3)]
    outcomes = Counter(runs[0]["flood"])
    row = Row(
        figure=FIGURE,
        case=f"{CLIENTS} long requests, {CLIENT_TIMEOUT_S:g} s each",
        model=bench.model,
        value=max(run["answer_s"] for run in runs),
        unit="s",
        limit=Limit(sign="≤", bound=2.0),
        summary=f"median {median(run['answer_s'] for run in runs):.2f} s, "
        f"{max(run['rejections'] for run in runs)} rejections; flood: "
        + ", ".join(f"{count} {what}" for what, count in outcomes.most_common()),
        detail={"runs": runs},
    )
    return [row]


async def _run(ours: LabServer, number: int) -> dict[str, Any]:
    flood = await asyncio.gather(*(_request_with_timeout(ours, 1000 * number + one) for one in range(CLIENTS)))
    started = time.perf_counter()
    rejections = await _request_until_answered(ours, number)
    answer_s = time.perf_counter() - started
    await ours.until_idle()
    return {"answer_s": answer_s, "rejections": rejections, "flood": flood}


async def _request_with_timeout(ours: LabServer, seed: int) -> str:
    """Send a request with a short timeout; every second request streams."""
    body = prompts.chat_body(prompts.history(seed, PROMPT_TOKENS), max_tokens=LONG_TOKENS, **ours.extras)
    request = client.stream if seed % 2 else client.whole
    try:
        async with asyncio.timeout(CLIENT_TIMEOUT_S):
            await request(ours.url, body)
    except TimeoutError:
        return "timed out"
    except LabError as exc:
        return exc.code
    return "answered"


async def _request_until_answered(ours: LabServer, number: int) -> int:
    """Send a normal request until it is answered, and return how often it was rejected because the queue was full."""
    body = prompts.chat_body(prompts.story(4000 + number), max_tokens=16)
    deadline = time.perf_counter() + TIMEOUT_S
    rejections = 0
    while time.perf_counter() < deadline:
        try:
            await client.whole(ours.url, body)
        except QueueFullError:
            rejections += 1
            await asyncio.sleep(RETRY_S)
        else:
            return rejections
    raise BenchError(f"no answer within {TIMEOUT_S:g} s")
