"""Measure the effect of a long prompt of another client on the inter-token gaps of a running stream."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from itertools import pairwise
from statistics import median
from typing import Any

from benchmarks import client, prompts
from benchmarks.bench import Bench, BenchError
from benchmarks.rates import quantile
from benchmarks.report import Limit, Row
from benchmarks.servers import LabServer, lab_server

FIGURE = "p99 gap during a prefill ÷ alone"
ANSWER_TOKENS = 6000
GAP_LIMIT_S = 60
WARM_UP = 3


class Watch:
    """A stream that decodes continuously, with the times of its pieces. It sends a new request when an answer ends."""

    def __init__(self, ours: LabServer) -> None:
        self._ours = ours
        self._requests = 0
        self._received = asyncio.Event()
        self.times: list[float] = []
        self.breaks: set[int] = set()
        """Indices in ``times`` of the first pieces of answers. The gap before them is not a gap between tokens."""

    async def run(self) -> None:
        while True:
            self._requests += 1
            self.breaks.add(len(self.times))
            messages = prompts.story(7000 + self._requests)
            body = prompts.chat_body(messages, max_tokens=ANSWER_TOKENS, **self._ours.extras)
            async with client.SentRequest(self._ours.url, body) as request:
                async for at, line in request.data():
                    if client.has_text(line):
                        self.times.append(at)
                        self._received.set()

    def gaps(self, start: int, until: float) -> list[float]:
        """Return the gaps from the piece with index ``start`` to the last one before ``until``."""
        pieces = [(index, at) for index, at in enumerate(self.times) if index >= start and at <= until]
        return [after - before for (_, before), (index, after) in pairwise(pieces) if index not in self.breaks]

    async def wait_for(self, pieces: int, limit_s: float) -> None:
        """Wait for ``pieces`` more pieces, for at most ``limit_s`` seconds."""
        goal = len(self.times) + pieces
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while len(self.times) < goal:
                    self._received.clear()
                    await self._received.wait()


def measure(bench: Bench) -> list[Row]:
    with lab_server(bench.folder) as ours:
        runs = [asyncio.run(_run(bench, ours, number)) for number in range(bench.sizes.history_rounds)]
    alone, busy = ([gap for run in runs for gap in run[side]] for side in ("alone", "busy"))
    if not alone or not busy:
        raise BenchError(f"{len(alone)} gaps alone, {len(busy)} while the prompt was computed: nothing to compare")
    row = Row(
        figure=FIGURE,
        case=f"prefill of {bench.sizes.history_tokens} tokens",
        model=bench.model,
        value=quantile(busy, 0.99) / quantile(alone, 0.99),
        limit=Limit(sign="≤", bound=3),
        # The limit is for a long prompt.
        binding=bench.promised and bench.sizes.history_tokens >= 1300,
        summary=f"{quantile(busy, 0.99) * 1e3:.1f} ms of {len(busy)} against "
        f"{quantile(alone, 0.99) * 1e3:.1f} ms of {len(alone)}; "
        f"medians {median(busy) * 1e3:.1f} and {median(alone) * 1e3:.1f}",
        detail={"runs": runs},
    )
    return [row]


async def _run(bench: Bench, ours: LabServer, number: int) -> dict[str, Any]:
    watch = Watch(ours)
    running = asyncio.create_task(watch.run())
    try:
        await watch.wait_for(WARM_UP, GAP_LIMIT_S)
        start = len(watch.times)
        await watch.wait_for(bench.sizes.gaps, bench.sizes.gaps_s)
        alone = watch.gaps(start, time.perf_counter())
        busy, prefill_s, finished = await _disturbed(bench, ours, watch, number)
    finally:
        running.cancel()
        await asyncio.wait([running])
        if not running.cancelled() and (error := running.exception()):
            raise error
    await ours.until_idle()
    return {"alone": alone, "busy": busy, "prefill_s": prefill_s, "prefill_finished": finished}


async def _disturbed(bench: Bench, ours: LabServer, watch: Watch, number: int) -> tuple[list[float], float, bool]:
    """Return the gaps during the prefill of the long prompt, its duration, and whether it finished within the limit."""
    start = len(watch.times) - 1
    sent_at = time.perf_counter()
    prompt = prompts.chat_body(prompts.history(8000 + number, bench.sizes.history_tokens), max_tokens=4)
    prefill = asyncio.create_task(client.stream(ours.url, prompt))
    await asyncio.wait([prefill], timeout=bench.sizes.gaps_s)
    finished = prefill.done()
    ended_at = prefill.result().times[0] if finished else time.perf_counter()
    # The gap at the end of the measurement counts too, because a stalled stream may have no other.
    await watch.wait_for(1, GAP_LIMIT_S)
    if not finished:
        prefill.cancel()
        await asyncio.wait([prefill])
    after = next((at for at in watch.times if at > ended_at), ended_at)
    return watch.gaps(start, after), ended_at - sent_at, finished
