"""Measure eight streams beside long prompts, batches of texts and a load, all from different clients."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any

from benchmarks import client, prompts
from benchmarks.bench import Bench, BenchError
from benchmarks.embeddings import TEXTS, WORDS
from benchmarks.models import minilm
from benchmarks.processes import folder_argument
from benchmarks.rates import quantile
from benchmarks.report import Limit, Row
from benchmarks.servers import LabServer, lab_server
from lmx_lab.client.lab import AsyncLabClient
from lmx_lab.errors import LabError, ModelBusyError, NotLoadedError
from lmx_lab.wire.embeddings import EmbeddingsBody

FIGURE = "mixed traffic"
MEMORY = "most memory in the second half of the time ÷ in the first"
STREAMS = 8
ANSWER_TOKENS = 64
ALONE_S, QUICK_ALONE_S = 60.0, 15.0
MIXED_S, QUICK_MIXED_S = 600.0, 40.0
PREFIX_CACHE_BYTES = 300_000_000
"""Size of the prefix cache, which is full before memory is first measured: its contents are not a leak."""
PAUSE_S = 2.0
"""Pause of a client between two long prompts, and of another one between two batches of texts."""
RETRY_S = 0.2


@dataclass(kw_only=True)
class _Traffic:
    """What the clients have seen."""

    gaps: list[float] = field(default_factory=list)
    """Gaps between the pieces of the streams."""
    health_s: list[float] = field(default_factory=list)
    answered: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)

    async def count(self, what: str, request: Any) -> None:
        """Wait for a request, and count its end. A model that is being replaced is no failure; it is tried again."""
        try:
            await request
        except (NotLoadedError, ModelBusyError):
            self.answered["refused during the load"] += 1
            await asyncio.sleep(RETRY_S)
        except (LabError, BenchError) as exc:
            self.failed[f"{what}: {exc}"[:200]] += 1
            await asyncio.sleep(RETRY_S)
        else:
            self.answered[what] += 1


def measure(bench: Bench) -> list[Row]:
    settings: dict[str, Any] = {"slots": STREAMS + 2, "prefix_cache_bytes": PREFIX_CACHE_BYTES}
    with lab_server(bench.folder, embedder=str(minilm()), **settings) as ours:
        alone, mixed, memory = asyncio.run(_run(bench, ours))
    if not alone.gaps or not mixed.gaps:
        raise BenchError(f"{len(alone.gaps)} gaps alone, {len(mixed.gaps)} in mixed traffic: nothing to compare")
    counts = ", ".join(f"{count} x {what}" for what, count in mixed.answered.most_common())
    ratio = quantile(mixed.gaps, 0.99) / quantile(alone.gaps, 0.99)
    gaps = f"p99 of {len(mixed.gaps)} gaps {quantile(mixed.gaps, 0.99) * 1e3:.0f} ms"
    rows = [
        ("p99 gap ÷ the streams alone", ratio, 3.0, "", f"{gaps}, alone {quantile(alone.gaps, 0.99) * 1e3:.0f} ms"),
        ("p99 of a health request", quantile(mixed.health_s, 0.99) * 1e3, 50.0, "ms", f"of {len(mixed.health_s)}"),
        ("failed requests", float(mixed.failed.total()), 0.0, "", counts),
        (MEMORY, memory[1] / memory[0], 1.1, "", f"{memory[1] / 1e6:.0f} against {memory[0] / 1e6:.0f} MB"),
    ]
    return [
        Row(
            figure=f"{FIGURE}: {name}",
            case=f"{STREAMS} streams, prompts, texts, a load",
            model=bench.model,
            value=value,
            unit=unit,
            limit=Limit(sign="≤", bound=bound),
            binding=bench.promised and not bench.quick,
            summary=summary,
            detail={"failed": dict(mixed.failed), "answered": dict(mixed.answered)},
        )
        for name, value, bound, unit, summary in rows
    ]


async def _run(bench: Bench, ours: LabServer) -> tuple[_Traffic, _Traffic, tuple[int, int]]:
    """Return what the streams alone have seen, what all clients have, and the most memory in both halves of the time.

    Memory is used and returned with each long prompt, so two moments cannot be compared.
    """
    alone, mixed = _Traffic(), _Traffic()
    alone_s, mixed_s = (QUICK_ALONE_S, QUICK_MIXED_S) if bench.quick else (ALONE_S, MIXED_S)
    await _for_a_time(alone_s, [_streams(ours, alone, number) for number in range(STREAMS)])
    async with AsyncLabClient(ours.url) as lab:
        others = [
            _long_prompts(bench, ours, mixed),
            _texts(lab, mixed),
            _load_once(bench, lab, mixed, mixed_s / 2),
            _health(lab, mixed),
        ]
        streams = [_streams(ours, mixed, number) for number in range(STREAMS)]
        memory: list[int] = []
        await _for_a_time(mixed_s, [*streams, *others, _memory(ours, memory)])
    half = len(memory) // 2
    return alone, mixed, (max(memory[:half]), max(memory[half:]))


async def _for_a_time(seconds: float, clients: list[Any]) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds), asyncio.TaskGroup() as group:
            for each in clients:
                group.create_task(each)


async def _streams(ours: LabServer, traffic: _Traffic, number: int) -> None:
    """Stream one answer after the other."""
    for repeat in range(1_000_000):
        body = prompts.chat_body(prompts.story(100 * repeat + number), max_tokens=ANSWER_TOKENS, **ours.extras)
        await traffic.count("streams", _stream(ours, body, traffic))


async def _stream(ours: LabServer, body: dict[str, Any], traffic: _Traffic) -> None:
    before, line = None, ""
    async with client.SentRequest(ours.url, body) as request, aclosing(request.data()) as lines:
        async for at, line in lines:
            if client.has_text(line):
                if before is not None:
                    traffic.gaps.append(at - before)
                before = at
    if line != client.DONE:
        raise BenchError(f"a stream ended with {line[:100]}")


async def _long_prompts(bench: Bench, ours: LabServer, traffic: _Traffic) -> None:
    for number in range(1_000_000):
        body = prompts.chat_body(prompts.history(9000 + number, bench.sizes.history_tokens), max_tokens=4)
        await traffic.count("long prompts", client.stream(ours.url, body))
        await asyncio.sleep(PAUSE_S)


async def _texts(lab: AsyncLabClient, traffic: _Traffic) -> None:
    for number in range(1_000_000):
        texts = [prompts.words(TEXTS * number + at, WORDS) for at in range(TEXTS)]
        await traffic.count("batches of texts", lab.embed(EmbeddingsBody(model="default", input=texts)))
        await asyncio.sleep(PAUSE_S)


async def _load_once(bench: Bench, lab: AsyncLabClient, traffic: _Traffic, after_s: float) -> None:
    """Load the model again. Its running answers end first."""
    await asyncio.sleep(after_s)
    await traffic.count("loads", lab.load(folder_argument(bench.folder), prompt_lookup=False))


async def _health(lab: AsyncLabClient, traffic: _Traffic) -> None:
    while True:
        started = time.perf_counter()
        await lab.ready()
        traffic.health_s.append(time.perf_counter() - started)
        await asyncio.sleep(0.1)


async def _memory(ours: LabServer, memory: list[int]) -> None:
    while True:
        memory.append(ours.tree_bytes())
        await asyncio.sleep(0.5)
