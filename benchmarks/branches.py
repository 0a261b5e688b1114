"""Measure branches of answers: the first token of a branch, and the expansion of eight answers."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import lmx_lab
from benchmarks.bench import Bench
from benchmarks.models import gguf_starter
from benchmarks.report import Limit, Row
from lmx_lab.settings import Settings

BRANCH = "first token of a branch ÷ decode step"
EXPLORE = "explore, 8 answers ÷ the longest one alone"
ANSWER_TOKENS, QUICK_ANSWER_TOKENS = 1000, 200
EXPLORED_TOKENS = 64
ROUNDS = 3
PROMPT = "Write a long story about a lighthouse and its keeper."


def measure(bench: Bench) -> list[Row]:
    with start_lab(bench.folder) as lab:
        rows = [_first_token(bench, lab, "MLX"), _explore(bench, lab)]
    if bench.model == "smollm2":
        with start_lab(gguf_starter().path) as lab:
            rows.append(_first_token(bench, lab, "llama.cpp"))
    return rows


@contextmanager
def start_lab(path: Path) -> Iterator[lmx_lab.Lab]:
    """Start a lab in this process, because branches and traces need tokens, which a server does not send."""
    with (
        tempfile.TemporaryDirectory() as home,
        lmx_lab.Lab(Settings(home=Path(home), port=0, slots=8), loop="thread") as lab,
    ):
        # Prompt lookup makes only an answer that is alone faster.
        lab.load(path, prompt_lookup=False)
        lab.chat("Hello.", max_tokens=2)
        yield lab


def _first_token(bench: Bench, lab: lmx_lab.Lab, engine: str) -> Row:
    """Generate a long answer, and branches of one token, at positions far from each other."""
    count = QUICK_ANSWER_TOKENS if bench.quick else ANSWER_TOKENS
    reply = lab.chat(PROMPT, max_tokens=count, temperature=0, ignore_eos=True)
    samples = []
    for number in range(1, ROUNDS + 1):
        at = count * number // (ROUNDS + 1)
        # A decode step at this length.
        branch = reply.branch(at, reply.ids[at], max_tokens=at + 17)
        steps = lab.requests[-1].record.timings
        step_s = steps["decode_s"] / steps["output_tokens"]
        started = time.perf_counter()
        branch = reply.branch(at, " Once" if reply.ids[at] == branch.ids[0] else branch.ids[0], max_tokens=at + 2)
        first_s = time.perf_counter() - started
        samples.append({"at": at, "first_s": first_s, "step_s": step_s, "tokens": len(branch.ids)})
    first_s, step_s = (median(sample[name] for sample in samples) for name in ("first_s", "step_s"))
    return Row(
        figure=BRANCH,
        case=f"{engine}, answer of {count} tokens",
        model=bench.model,
        value=median(sample["first_s"] / sample["step_s"] for sample in samples),
        limit=Limit(sign="≤", bound=3),
        binding=bench.promised and engine == "MLX",
        summary=f"{first_s * 1e3:.0f} against {step_s * 1e3:.1f} ms",
        detail={"samples": samples},
    )


def _explore(bench: Bench, lab: lmx_lab.Lab) -> Row:
    how: dict[str, Any] = {"max_tokens": EXPLORED_TOKENS, "temperature": 0, "ignore_eos": True}
    samples = []
    for number in range(ROUNDS):
        prompt = f"{PROMPT} Number {number}."
        started, used = time.perf_counter(), time.process_time()
        tree = lab.explore(prompt, width=2, depth=3, **how)
        middle, used_middle = time.perf_counter(), time.process_time()
        lab.chat(f"{prompt} Again.", **how)
        sample = {"answers": len(tree), "together_s": middle - started, "alone_s": time.perf_counter() - middle}
        cpu = {"together_cpu_s": used_middle - used, "alone_cpu_s": time.process_time() - used_middle}
        samples.append(sample | cpu)
    together_s, alone_s = (median(sample[name] for sample in samples) for name in ("together_s", "alone_s"))
    cpu_ratio = median(sample["together_cpu_s"] / sample["alone_cpu_s"] for sample in samples)
    return Row(
        figure=EXPLORE,
        case=f"width 2, depth 3, {EXPLORED_TOKENS} tokens",
        model=bench.model,
        value=median(sample["together_s"] / sample["alone_s"] for sample in samples),
        limit=Limit(sign="≤", bound=2.5),
        binding=bench.promised,
        summary=f"{together_s:.2f} against {alone_s:.2f} s, CPU time {cpu_ratio:.2f}",
        detail={"samples": samples},
    )
