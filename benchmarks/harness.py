"""Measure the accuracy and the CPU usage of ``lmx_lab.bench`` with a server that emits tokens at a known rate."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict, dataclass
from statistics import median

from benchmarks.bench import Bench, BenchError
from benchmarks.processes import Worker
from benchmarks.report import Limit, Row
from lmx_lab.bench import Case, ChatTarget, RequestSample, runner

FIGURE = "harness"
STREAMS, PER_SECOND = 64, 5000
TOKENS = 200
ROUNDS = 5


@dataclass(frozen=True, kw_only=True)
class Harness:
    """Measured rates, relative to the emitted ones."""

    decode_share: float
    """Decode rate of the median stream."""
    slowest_share: float
    total_share: float
    """Rate of all tokens, between the first request and the end of the last answer."""
    itl_share: float
    """Median interval between two tokens."""
    cpu_share: float
    """CPU usage of this process; 1 is one core."""
    errors: int


def measure(bench: Bench) -> list[Row]:
    found = [measure_harness() for _ in range(1 if bench.quick else ROUNDS)]
    if errors := sum(one.errors for one in found):
        raise BenchError(f"{errors} requests of {len(found) * STREAMS} failed")
    rate, error, cores = (
        median(values)
        for values in zip(*((one.decode_share, abs(one.decode_share - 1), one.cpu_share) for one in found), strict=True)
    )
    detail = {"rounds": [asdict(one) for one in found]}
    case = f"{STREAMS} streams, {PER_SECOND} tokens/s"
    return [
        Row(
            figure="harness: error of the measured rate",
            case=case,
            model="-",
            value=error * 100,
            unit="%",
            limit=Limit(sign="≤", bound=2),
            summary=f"{rate * PER_SECOND / STREAMS:.2f} against {PER_SECOND / STREAMS:.2f} tok/s for each stream",
            detail=detail,
        ),
        Row(
            figure="harness: cores used",
            case=case,
            model="-",
            value=cores,
            # It must use less than one core, or it would be the bottleneck.
            limit=Limit(sign="≤", bound=0.8),
            detail=detail,
        ),
    ]


def measure_harness(*, streams: int = STREAMS, per_second: float = PER_SECOND, tokens: int = TOKENS) -> Harness:
    """Measure streams with ``per_second`` tokens/s in total. Takes ``tokens * streams / per_second`` seconds."""
    pace_s = streams / per_second
    case = Case(prompt_tokens=16, output_tokens=tokens, concurrency=streams, requests=streams, warm_up=0)

    async def collect(url: str) -> list[RequestSample]:
        return [sample async for sample in runner.samples(ChatTarget(url), case)]

    with Worker("benchmarks.paced_process", pace_s=pace_s, streams=streams) as server:
        began_s, used_s = time.perf_counter(), time.process_time()
        measured = asyncio.run(collect(server.ready["url"]))
        wall_s, cpu_s = time.perf_counter() - began_s, time.process_time() - used_s
    rates = [sample.decode_tok_s or 0.0 for sample in measured]
    return Harness(
        decode_share=median(rates) * pace_s,
        slowest_share=min(rates) * pace_s,
        total_share=sum(sample.output_tokens or 0 for sample in measured) / wall_s / per_second,
        itl_share=median(sample.itl_ms_p50 or 0.0 for sample in measured) / 1e3 / pace_s,
        cpu_share=cpu_s / wall_s,
        errors=sum(sample.error is not None for sample in measured),
    )
