"""Measure the figures with documented limits: ``make bench``, or ``python -m benchmarks`` in the repository.

Each figure is a ratio of two measurements of one run, or a time with a wide limit, so that it is meaningful on a busy
machine. Both sides of a comparison take turns on the same prompts; the value is the median of the rounds. Servers,
generator and clients are separate processes; the clients only record times.

    python -m benchmarks                                   everything; about an hour and a half on two CPU cores
    python -m benchmarks --model tiny --quick              a quick check, one or two minutes
    python -m benchmarks --only turn --only stall --model smollm2
    python -m benchmarks --only stream --model large       on a GPU
    python -m benchmarks --only stall --into FILE          measure a figure of an earlier run again

``--help`` describes each figure.

``tiny`` is a two-layer llama with random weights and SmolLM2's tokenizer. A token takes a millisecond, so that
overheads are visible. ``smollm2`` is SmolLM2-135M-Instruct with 4-bit weights and float32 scales, the same for all
servers (a CPU emulates float16); our server expands the weights. On a GPU it has the float16 scales of its files.
``large`` has the sizes of Llama 3.1 8B, random bfloat16 weights and SmolLM2's tokenizer. It is for GPUs: it takes 15
GB, and is only measured with ``--model large``, with up to 32 streams. The ratio to torch is only measured if ``make
parity`` has created an environment with torch. Limits on speed ratios apply to ``smollm2``, which is measured by
default; for ``tiny`` their verdict is in brackets. ``gguf`` uses the file from which ``smollm2`` is made. Figures
without a limit are shown only.

The exit status is 1 if a binding limit is not met. "Others' cores" is the number of cores that other programs used:
with more than about half a core the figures are unreliable, especially decode rates.

The table is printed; all samples and the provenance are stored in ``build/bench/<time>.json``, after each figure. A
complete run without errors also writes ``docs/benchmark-results.md`` and its charts. Models are stored in
``build/bench/models``, logs of the servers in ``build/bench/logs``.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import signal
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

import mlx.core as mx
import psutil

from benchmarks import (
    against_mlx_lm,
    branches,
    cells,
    curves,
    daemon,
    dialects,
    disconnect,
    draft_model,
    embeddings,
    flood,
    gguf,
    harness,
    kv_cache,
    leak,
    map,
    mixed,
    page,
    paths,
    prefill,
    product,
    prompt_lookup,
    quantized,
    recording,
    repetition,
    report,
    restart,
    second_turn,
    stall,
    start,
    structured,
    throughput,
    traces,
)
from benchmarks.bench import Bench, BenchError, Model
from benchmarks.models import folder_of
from benchmarks.report import Row
from lmx_lab.errors import LabError
from lmx_lab.results.provenance import provenance

ALL_MODELS: tuple[Model, ...] = get_args(Model)


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A figure that can be selected with ``--only``."""

    title: str
    about: str
    """What is measured, for ``--help``."""
    measure: Callable[[Bench], list[Row]]
    models: tuple[Model, ...] = ALL_MODELS
    """The models that it can be measured with."""
    overhead: bool = False
    """Whether it is also measured with ``tiny`` by default, because a limit applies to this model too."""

    @property
    def usual(self) -> tuple[Model, ...]:
        """The models that it is measured with by default."""
        if "smollm2" not in self.models:
            return self.models
        return ("tiny", "smollm2") if self.overhead else ("smollm2",)


FIGURES = {
    "stream": Figure(
        title=throughput.FIGURE,
        measure=throughput.measure,
        about="HTTP decode tok/s ÷ mlx-lm's `BatchGenerator` alone, 1 and 8 streams",
    ),
    "mlx-lm": Figure(
        title=against_mlx_lm.FIGURE,
        measure=against_mlx_lm.measure,
        about=(
            "overall tok/s of 8 clients ÷ `mlx_lm.server` on the same files; with smollm2 also on files of "
            "float32 weights"
        ),
    ),
    "product": Figure(
        title=product.FIGURE,
        measure=product.measure,
        models=("smollm2",),
        about="MLX's 1024³ float32 product ÷ numpy's",
    ),
    "prefill": Figure(
        title=prefill.FIGURE,
        measure=prefill.measure,
        about=(
            "prefill of 156 tokens ÷ MLX with the BLAS of its wheel; matrix products of a prefill of 1,400 tokens "
            "÷ all of it"
        ),
    ),
    "embeddings": Figure(
        title=embeddings.FIGURE,
        measure=embeddings.measure,
        models=("smollm2",),
        about="64 texts through MiniLM ÷ MLX with the BLAS of its wheel, and ÷ torch",
    ),
    "structured": Figure(
        title=structured.FIGURE,
        measure=structured.measure,
        overhead=True,
        about="decode tok/s with a JSON schema ÷ without, 1 and 8 streams",
    ),
    "lookup": Figure(
        title=prompt_lookup.FIGURE,
        measure=prompt_lookup.measure,
        about="decode tok/s with prompt lookup ÷ without, of copied and of other text",
    ),
    "draft": Figure(
        title=draft_model.FIGURE,
        measure=draft_model.measure,
        models=("smollm2",),
        about="decode tok/s of llama.cpp with a draft model ÷ without, if all drafts are accepted",
    ),
    "kv": Figure(
        title=kv_cache.FIGURE,
        measure=kv_cache.measure,
        models=("smollm2",),
        about="change of a text's log-likelihood with a quantized KV cache; tokens in the same memory ÷ float16",
    ),
    "gguf": Figure(
        title=gguf.FIGURE,
        measure=gguf.measure,
        models=("smollm2",),
        about=(
            "our server on llama.cpp against xllamacpp's own, 1 and 8 streams: decode and overall tok/s as "
            "ratios, TTFT as a difference in ms; decode after mixed requests ÷ fresh server; scoring ÷ prefill; and "
            "decode, prefill and memory ÷ our server on MLX"
        ),
    ),
    "quantized": Figure(
        title=quantized.FIGURE,
        measure=quantized.measure,
        models=("smollm2",),
        about=(
            "our server with a quantized copy against xllamacpp's own with the original: prefill, and decode of 1 "
            "and 8 streams; the loss of the copy"
        ),
    ),
    "repetition": Figure(
        title=repetition.FIGURE,
        measure=repetition.measure,
        models=("smollm2",),
        about=(
            "share of answers that are the same alone and with seven others: 64 greedy ones and 24 with seeds, on "
            "both engines"
        ),
    ),
    "recording": Figure(
        title=recording.FIGURE,
        measure=recording.measure,
        about="CPU time of a token at 8 streams with requests recorded ÷ not recorded",
    ),
    "dialects": Figure(
        title=dialects.FIGURE,
        measure=dialects.measure,
        models=("tiny",),
        about="CPU time of a token at 8 streams in the formats Messages, Responses and Ollama ÷ in the chat format",
    ),
    "branches": Figure(
        title=branches.BRANCH,
        measure=branches.measure,
        about=(
            "time to the first token of a branch ÷ a decode step; time of `explore` with 8 answers ÷ the longest "
            "answer alone"
        ),
    ),
    "traces": Figure(
        title=traces.TRACE,
        measure=traces.measure,
        about=(
            "time of a trace ÷ prefill; one pass for each cell ÷ a patch sweep; CPU time of the p99 gap of a "
            "stream beside both ÷ alone"
        ),
    ),
    "curves": Figure(
        title=curves.FIGURE,
        measure=curves.measure,
        models=("smollm2",),
        about=(
            "tok/s against streams and against the length of the prompt: both engines, llama.cpp's server and "
            "`mlx_lm.server`; drawn as charts"
        ),
    ),
    "start": Figure(
        title=start.FIGURE,
        measure=start.measure,
        models=("smollm2",),
        about="ms to import the package, to show the help, and to start a server",
    ),
    "turn": Figure(
        title=second_turn.FIGURE,
        measure=second_turn.measure,
        about="time to first token of turn 2 ÷ turn 1, after 1,400 tokens; on llama.cpp also after a stopped turn 1",
    ),
    "restart": Figure(
        title=restart.FIGURE,
        measure=restart.measure,
        about=(
            "time to first token after a restart ÷ the first time, with the prefix cache on disk; tok/s of 8 "
            "streams that write its files ÷ in memory"
        ),
    ),
    "stall": Figure(
        title=stall.FIGURE,
        measure=stall.measure,
        about="p99 inter-token gap of a stream during a prefill of 1,400 tokens ÷ alone",
    ),
    "disconnect": Figure(
        title=disconnect.FIGURE,
        measure=disconnect.measure,
        about="seconds from a cut connection to a free slot, nine cases",
    ),
    "cells": Figure(
        title=cells.FIGURE,
        measure=cells.measure,
        models=("tiny",),
        about=(
            "longest gap of a stream, a WebSocket and requests while a cell sleeps 20 s; CPU time of an idle "
            'kernel with a lab, `loop="kernel"` ÷ `"thread"`'
        ),
    ),
    "leak": Figure(
        title=leak.FIGURE,
        measure=leak.measure,
        models=("tiny",),
        about="resident memory after 1,000 requests ÷ after 100",
    ),
    "daemon": Figure(
        title=daemon.FIGURE,
        measure=daemon.measure,
        overhead=True,
        about=(
            "a turn - the same chat; fan-out to 10; delay while other subscribers do not read; list of 2,000 "
            "sessions; memory of an idle subscriber; replay of 100,000 events"
        ),
    ),
    "harness": Figure(
        title=harness.FIGURE,
        measure=harness.measure,
        models=("tiny",),
        about="`lmx_lab.bench` with 64 streams at a known rate: error, cores used",
    ),
    "map": Figure(
        title=map.FIGURE,
        measure=map.measure,
        models=("tiny", "smollm2"),
        overhead=True,
        about=(
            "tok/s of 500 rows through `lab.map` on llama.cpp ÷ `lmx-lab bench`; rows/s with 300 tokens in common "
            "÷ with 300 of their own, both engines; cores that the process with `lab.map` uses; sampled answers "
            "of 1,000 that do not fit their schema, both engines"
        ),
    ),
    "mixed": Figure(
        title=mixed.FIGURE,
        measure=mixed.measure,
        models=("smollm2",),
        about=(
            "p99 gap of 8 streams beside long prompts, batches of texts and a load, for 10 minutes ÷ the streams "
            "alone; p99 of a health request; failed requests; most memory in the second half of the time ÷ in the "
            "first"
        ),
    ),
    "flood": Figure(
        title=flood.FIGURE,
        measure=flood.measure,
        models=("tiny",),
        about="seconds to a complete answer after 200 requests with a timeout of 0.5 s",
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    chosen = parser.parse_args(arguments)
    if chosen.into and not chosen.into.is_file():
        parser.error(f"--into {chosen.into}: no such file; build/bench has the results of earlier runs")
    # Unwind the contexts that stop the servers.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    settings = {"quick": chosen.quick, "only": chosen.only, "models": chosen.model}
    device = f"{mx.default_device()} {mx.device_info().get('device_name', '')}".strip()
    facts = provenance(mlx_device=device, settings=settings)
    stored, rows = report.new_path(), list[Row]()
    if chosen.into:
        stored = chosen.into
        rows, earlier = report.read(stored)
        again = {"started_at": facts["started_at"], "commit": facts["commit"], **settings}
        facts = earlier | {"again": [*earlier.get("again", ()), again]}
    for model, name in itertools.product(chosen.model or ALL_MODELS, chosen.only or FIGURES):
        if model in (FIGURES[name].models if chosen.model else FIGURES[name].usual):
            measured = _rows(name, Bench(model=model, folder=folder_of(model), quick=chosen.quick))
            rows = report.merge(rows, measured)
            # After each figure, so that an interrupted run keeps the figures before it.
            report.store(rows, facts, stored)
    report.print_table(rows)
    report.say(f"stored in build/bench/{stored.name}")
    if not any(facts["settings"].values()) and all(row.verdict != "ERROR" for row in rows):
        page.write(rows, facts, paths.PAGE)
        report.say(f"written: {paths.PAGE.name}")
    return int(any(row.verdict in report.BAD for row in rows))


def _parser() -> argparse.ArgumentParser:
    described = [
        textwrap.fill(
            f"{figure.about} ({', '.join(figure.models)})",
            110,
            initial_indent=f"  {name:12}",
            subsequent_indent=" " * 14,
        )
        for name, figure in FIGURES.items()
    ]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure the figures that have documented limits.",
        epilog="figures:\n" + "\n".join(described),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", action="append", choices=FIGURES, help="figure to measure; repeatable; default: all")
    parser.add_argument(
        "--model",
        action="append",
        choices=ALL_MODELS,
        help="model to measure; repeatable; default: those that a figure's limits apply to",
    )
    parser.add_argument(
        "--into",
        type=Path,
        metavar="FILE",
        help="results of an earlier run, in which the measured figures replace the previous ones",
    )
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds")
    return parser


def _rows(name: str, bench: Bench) -> list[Row]:
    """Measure a figure and return its rows. A failed measurement gives a row with the error."""
    started, load = time.perf_counter(), Load()
    try:
        rows = FIGURES[name].measure(bench)
    except (BenchError, LabError, OSError, EOFError) as exc:
        title = FIGURES[name].title
        rows = [Row(figure=title, case="", model=bench.model, value=math.nan, summary=str(exc)[:500])]
    rows = [replace(row, others_cores=load.others_cores()) for row in rows]
    values = ", ".join(report.value_of(row) for row in rows)
    report.say(f"{name}, {bench.model}: {values}  ({time.perf_counter() - started:.0f} s)")
    return rows


class Load:
    """CPU usage of other programs since the object was created. On a busy machine the figures are unreliable.

    The CPU time of child processes counts as our own after they have ended.
    """

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._all, self._own = _all_busy_s(), _own_busy_s()

    def others_cores(self) -> float:
        """Return the mean number of cores that other programs used."""
        others_s = (_all_busy_s() - self._all) - (_own_busy_s() - self._own)
        return max(0.0, others_s / (time.perf_counter() - self._started))


def _all_busy_s() -> float:
    times = psutil.cpu_times()
    return float(times.user + times.system + times.nice)


def _own_busy_s() -> float:
    now = os.times()
    return now.user + now.system + now.children_user + now.children_system


if __name__ == "__main__":
    sys.exit(main())
