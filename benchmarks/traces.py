"""Measure traces: all residual streams of a text against its prefill, a patch sweep against one pass per cell, and the
gaps between the tokens of a stream while both are computed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from itertools import pairwise
from statistics import median

import lmx_lab
from benchmarks.bench import Bench
from benchmarks.branches import PROMPT, start_lab
from benchmarks.rates import quantile
from benchmarks.report import Limit, Row

TRACE = "trace of all hook_resid_post ÷ prefill"
PATCH = "one pass for each cell ÷ patch sweep"
GAP = "p99 gap beside a trace ÷ alone"
TRACED_TOKENS, QUICK_TRACED_TOKENS = 1000, 200
SWEPT_TOKENS = 12
ROUNDS = 3
PASSES = 10
RESIDUAL = "blocks.*.hook_resid_post"
WARM_UP = 20
ANSWER_TOKENS = 1900
"""Maximum length of the answer that is generated while traces are computed."""
QUICK_GAPS, GAPS = 60, 300


def measure(bench: Bench) -> list[Row]:
    with start_lab(bench.folder) as lab:
        return [_trace(bench, lab), _patch(bench, lab), *_gaps(bench, lab)]


def _trace(bench: Bench, lab: lmx_lab.Lab) -> Row:
    count = QUICK_TRACED_TOKENS if bench.quick else TRACED_TOKENS
    lab.trace("The sea is wide.", RESIDUAL)
    samples = []
    for number in range(ROUNDS):
        # Another text in each round, because prompts are cached.
        words = f"Round {number}. " + "The keeper of the lighthouse looked at the sea and waited. " * (count // 10)
        used = time.process_time()
        reply = lab.chat(words, max_tokens=1)
        prefill_cpu_s = time.process_time() - used
        assert reply.report is not None
        started, used = time.perf_counter(), time.process_time()
        lab.trace(list(reply.prompt_ids), RESIDUAL)
        sample = {"trace_s": time.perf_counter() - started, "prefill_s": reply.report.prefill_s}
        cpu = {"trace_cpu_s": time.process_time() - used, "prefill_cpu_s": prefill_cpu_s}
        samples.append({"tokens": len(reply.prompt_ids), **sample, **cpu})
    trace_s, prefill_s = (median(sample[name] for sample in samples) for name in ("trace_s", "prefill_s"))
    cpu_ratio = median(sample["trace_cpu_s"] / sample["prefill_cpu_s"] for sample in samples)
    return Row(
        figure=TRACE,
        case=f"{samples[0]['tokens']} tokens",
        model=bench.model,
        value=median(sample["trace_s"] / sample["prefill_s"] for sample in samples),
        limit=Limit(sign="≤", bound=1.3),
        binding=bench.promised,
        summary=f"{trace_s:.2f} against {prefill_s:.2f} s, CPU time {cpu_ratio:.2f}",
        detail={"samples": samples},
    )


def _patch(bench: Bench, lab: lmx_lab.Lab) -> Row:
    tokens = list(range(1000, 1000 + SWEPT_TOKENS))
    clean = [tokens[0], 2000, *tokens[2:]]
    samples = []
    for _ in range(ROUNDS):
        started, used = time.perf_counter(), time.process_time()
        for _ in range(PASSES):
            lab.trace(tokens, "logits", positions=-1)
        middle, used_middle = time.perf_counter(), time.process_time()
        sweep = lab.patch(clean, tokens, answer=300, other=400)
        sample = {"pass_s": (middle - started) / PASSES, "sweep_s": time.perf_counter() - middle}
        cpu = {"pass_cpu_s": (used_middle - used) / PASSES, "sweep_cpu_s": time.process_time() - used_middle}
        samples.append({"cells": sweep.restored.size, **sample, **cpu})
    pass_s, sweep_s = (median(sample[name] for sample in samples) for name in ("pass_s", "sweep_s"))
    cpu_ratio = median(sample["cells"] * sample["pass_cpu_s"] / sample["sweep_cpu_s"] for sample in samples)
    return Row(
        figure=PATCH,
        case=f"{samples[0]['cells']} cells, {SWEPT_TOKENS} tokens",
        model=bench.model,
        value=median(sample["cells"] * sample["pass_s"] / sample["sweep_s"] for sample in samples),
        limit=Limit(sign="≥", bound=5),
        binding=bench.promised and bench.model == "smollm2",
        summary=f"a pass {pass_s * 1e3:.0f} ms, the sweep {sweep_s:.2f} s, CPU time {cpu_ratio:.1f}",
        detail={"samples": samples},
    )


def _gaps(bench: Bench, lab: lmx_lab.Lab) -> list[Row]:
    tokens = list(range(1000, 1000 + (QUICK_TRACED_TOKENS if bench.quick else TRACED_TOKENS)))
    short = tokens[:SWEPT_TOKENS]
    clean = [short[0], 2000, *short[2:]]
    kinds: dict[str, Callable[[], Awaitable[object]]] = {
        f"{len(tokens)} tokens": lambda: lab.atrace(tokens, RESIDUAL),
        f"sweep, {SWEPT_TOKENS} tokens": lambda: lab.apatch(clean, short, answer=300, other=400),
        f"sweep of heads, {SWEPT_TOKENS} tokens": lambda: lab.apatch(
            clean, short, answer=300, other=400, hooks="blocks.*.attn.hook_z", together=True
        ),
    }
    rows = []
    for case, work in kinds.items():
        alone, beside = asyncio.run(_stream_beside(bench, lab, work))
        wall, cpu = (quantile(beside[at], 0.99) / quantile(alone[at], 0.99) for at in (0, 1))
        rows.append(
            Row(
                figure=GAP,
                case=case,
                model=bench.model,
                value=cpu,
                limit=Limit(sign="≤", bound=3),
                binding=bench.promised and bench.model == "smollm2",
                summary=f"CPU time, {quantile(beside[1], 0.99) * 1e3:.1f} ms of {len(beside[0])} against "
                f"{quantile(alone[1], 0.99) * 1e3:.1f} ms; time {wall:.2f}; medians "
                f"{median(beside[0]) * 1e3:.1f} and {median(alone[0]) * 1e3:.1f} ms",
                detail={"alone": alone, "beside": beside},
            )
        )
    return rows


async def _stream_beside(
    bench: Bench, lab: lmx_lab.Lab, work: Callable[[], Awaitable[object]]
) -> tuple[list[list[float]], list[list[float]]]:
    """Return the gaps of a stream alone, and while traces are computed one after the other: the time and the CPU time
    of each gap.
    """
    count = QUICK_GAPS if bench.quick else GAPS
    marks: list[tuple[float, float]] = []
    job: asyncio.Future[object] | None = None
    stream = await lab.astream(PROMPT, max_tokens=ANSWER_TOKENS, temperature=0, ignore_eos=True)
    async for _ in stream:
        marks.append((time.perf_counter(), time.process_time()))
        if len(marks) >= WARM_UP + 2 * count:
            break
        if len(marks) >= WARM_UP + count and (job is None or job.done()):
            job = asyncio.ensure_future(work())
    await stream.aclose()
    if job is not None:
        job.cancel()
        with suppress(asyncio.CancelledError):
            await job
    sides = marks[WARM_UP : WARM_UP + count], marks[WARM_UP + count :]
    alone, beside = ([[after[at] - before[at] for before, after in pairwise(side)] for at in (0, 1)] for side in sides)
    return alone, beside
