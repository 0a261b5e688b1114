"""Measure traces: all residual streams of a text against its prefill, and a patch sweep against one pass per cell."""

from __future__ import annotations

import time
from statistics import median

import lmx_lab
from benchmarks.bench import Bench
from benchmarks.branches import start_lab
from benchmarks.rows import Limit, Row

TRACE = "trace of all hook_resid_post ÷ prefill"
PATCH = "one pass for each cell ÷ patch sweep"
TRACED_TOKENS, QUICK_TRACED_TOKENS = 1000, 200
SWEPT_TOKENS = 12
ROUNDS = 3
PASSES = 10
RESIDUAL = "blocks.*.hook_resid_post"


def measure(bench: Bench) -> list[Row]:
    with start_lab(bench.folder) as lab:
        return [_trace(bench, lab), _patch(bench, lab)]


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
