"""The harness itself, against a server that emits at a known rate: it measures that rate and is not what limits it."""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from lmx_lab.bench.case import Case
from lmx_lab.bench.driving import drive
from lmx_lab.bench.sample import Sample
from lmx_lab.bench.targets import ChatTarget

STREAMS, PER_SECOND = 64, 5000
TRIES = 4


@dataclass(frozen=True, kw_only=True)
class HarnessFigures:
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

    @property
    def is_right(self) -> bool:
        rates_are = abs(self.decode_share - 1) < 0.03 and abs(self.itl_share - 1) < 0.1 and self.slowest_share > 0.9
        return rates_are and self.total_share > 0.8 and self.cpu_share < 0.6


@contextmanager
def emitting(pace_s: float) -> Iterator[str]:
    command = [sys.executable, str(Path(__file__).parent / "emitter.py"), str(pace_s)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}"


def measure_harness(*, streams: int = STREAMS, per_second: float = PER_SECOND, tokens: int = 200) -> HarnessFigures:
    """Drive ``streams`` streams that together emit ``per_second``; takes ``tokens * streams / per_second`` seconds."""
    pace_s = streams / per_second
    case = Case(prompt_tokens=16, output_tokens=tokens, concurrency=streams, requests=streams, warm_up=0)

    async def driven(url: str) -> list[Sample]:
        return [sample async for sample in drive(ChatTarget(url), case)]

    with emitting(pace_s) as url:
        began_s, used_s = time.perf_counter(), time.process_time()
        samples = asyncio.run(driven(url))
        wall_s, cpu_s = time.perf_counter() - began_s, time.process_time() - used_s
    rates = [sample.decode_tok_s or 0.0 for sample in samples]
    return HarnessFigures(
        decode_share=statistics.median(rates) * pace_s,
        slowest_share=min(rates) * pace_s,
        total_share=sum(sample.output_tokens or 0 for sample in samples) / wall_s / per_second,
        itl_share=statistics.median(sample.itl_ms_p50 or 0.0 for sample in samples) / 1e3 / pace_s,
        cpu_share=cpu_s / wall_s,
        errors=sum(sample.error is not None for sample in samples),
    )


def test_64_streams_at_5000_tokens_a_second_take_less_than_a_core_and_are_measured_right() -> None:
    """Alone on two cores the rates are within 0.5 %, and a quarter of a core is used. Where other programs take the
    cores it is tried again: a harness that cannot do it never will.
    """
    for _ in range(TRIES):
        found = measure_harness()
        assert found.errors == 0
        if found.is_right:
            return
    pytest.fail(f"{found}")


def test_one_stream_is_measured_right_too() -> None:
    found = measure_harness(streams=1, per_second=100, tokens=60)
    assert found.decode_share == pytest.approx(1, abs=0.05), found
