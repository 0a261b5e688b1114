"""``lmx_lab.bench`` itself, against a server that emits at a known rate: whether it measures that, and with how much of
the machine."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict, dataclass
from statistics import median

from benchmarks.bench import Bench, BenchError
from benchmarks.processes import Worker
from benchmarks.rows import Limit, Row
from lmx_lab.bench import Case, ChatTarget, Sample, drive

FIGURE = "harness"
STREAMS, PER_SECOND = 64, 5000
TOKENS = 200
ROUNDS = 5


@dataclass(frozen=True, kw_only=True)
class Harness:
    """Rates as shares of what was emitted."""

    decode_share: float
    """The median stream's."""
    slowest_share: float
    total_share: float
    """Of all tokens, over the time from the first request to the last end."""
    itl_share: float
    """The median interval between two tokens, of the one that was emitted."""
    cpu_share: float
    """Of one core, that this process used meanwhile."""
    errors: int


def measure(bench: Bench) -> list[Row]:
    found = [measure_harness() for _ in range(1 if bench.quick else ROUNDS)]
    if errors := sum(one.errors for one in found):
        raise BenchError(f"{errors} requests of {len(found) * STREAMS} failed")
    rate, off, cores = (
        median(values)
        for values in zip(*((one.decode_share, abs(one.decode_share - 1), one.cpu_share) for one in found), strict=True)
    )
    detail = {"rounds": [asdict(one) for one in found]}
    case = f"{STREAMS} streams, {PER_SECOND} tokens/s"
    return [
        Row(
            figure="harness: measured rate off the emitted one",
            case=case,
            model="-",
            value=off * 100,
            unit="%",
            limit=Limit(sign="≤", bound=2),
            summary=f"{rate * PER_SECOND / STREAMS:.2f} against {PER_SECOND / STREAMS:.2f} tok/s for each stream",
            detail=detail,
        ),
        Row(
            figure="harness: cores that it uses",
            case=case,
            model="-",
            value=cores,
            # The promise is one core, and that it is not the bottleneck: some of that core must be left.
            limit=Limit(sign="≤", bound=0.8),
            detail=detail,
        ),
    ]


def measure_harness(*, streams: int = STREAMS, per_second: float = PER_SECOND, tokens: int = TOKENS) -> Harness:
    """Drive ``streams`` streams that together emit ``per_second``; takes ``tokens * streams / per_second`` seconds."""
    pace_s = streams / per_second
    case = Case(prompt_tokens=16, output_tokens=tokens, concurrency=streams, requests=streams, warm_up=0)

    async def driven(url: str) -> list[Sample]:
        return [sample async for sample in drive(ChatTarget(url), case)]

    with Worker("benchmarks.paced_process", pace_s=pace_s, streams=streams) as emitting:
        began_s, used_s = time.perf_counter(), time.process_time()
        samples = asyncio.run(driven(emitting.ready["url"]))
        wall_s, cpu_s = time.perf_counter() - began_s, time.process_time() - used_s
    rates = [sample.decode_tok_s or 0.0 for sample in samples]
    return Harness(
        decode_share=median(rates) * pace_s,
        slowest_share=min(rates) * pace_s,
        total_share=sum(sample.output_tokens or 0 for sample in samples) / wall_s / per_second,
        itl_share=median(sample.itl_ms_p50 or 0.0 for sample in samples) / 1e3 / pace_s,
        cpu_share=cpu_s / wall_s,
        errors=sum(sample.error is not None for sample in samples),
    )
