"""Measure the memory over many requests with distinct prompts and temperatures, eight at a time.

The prefix cache is bounded so that it is full before the first measurement: its contents are not a leak.
"""

from __future__ import annotations

import asyncio
from typing import Any

from benchmarks import client, prompts
from benchmarks.bench import Bench
from benchmarks.report import Limit, Row
from benchmarks.servers import LabServer, lab_server

FIGURE = "server RSS, last ÷ after the first 100"
EVERY = 100
REQUESTS = 1000
QUICK_REQUESTS = 300
AT_ONCE = 8
PREFIX_CACHE_BYTES = 2_000_000


def measure(bench: Bench) -> list[Row]:
    requests = QUICK_REQUESTS if bench.quick else REQUESTS
    with lab_server(bench.folder, prefix_cache_bytes=PREFIX_CACHE_BYTES) as ours:
        samples = asyncio.run(_run(ours, requests))
    first, last = samples[0]["rss_bytes"], samples[-1]["rss_bytes"]
    row = Row(
        figure=FIGURE,
        case=f"{requests} requests",
        model=bench.model,
        value=last / first,
        limit=Limit(sign="≤", bound=1.02),
        summary=f"{last / 1e6:.1f} against {first / 1e6:.1f} MB; "
        f"prefix cache {samples[-1]['prefix_cache_bytes'] / 1e6:.1f} MB",
        detail={"samples": samples},
    )
    return [row]


async def _run(ours: LabServer, requests: int) -> list[dict[str, Any]]:
    samples = []
    for start in range(0, requests, EVERY):
        slots = asyncio.Semaphore(AT_ONCE)
        await asyncio.gather(*(_one(ours, slots, start + number) for number in range(EVERY)))
        await ours.until_idle()
        # Memory that is freed with a delay is not a leak.
        await asyncio.sleep(0.5)
        cache = ours.snapshot()["prefix_cache_bytes"]
        samples.append({"requests": start + EVERY, "rss_bytes": ours.rss_bytes(), "prefix_cache_bytes": cache})
    return samples


async def _one(ours: LabServer, slots: asyncio.Semaphore, number: int) -> None:
    body = prompts.chat_body(prompts.story(20_000 + number), max_tokens=8, temperature=0.2 + number / 1000)
    async with slots:
        await client.whole(ours.url, body)
