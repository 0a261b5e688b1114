"""Measure embeddings of 64 texts of 30 tokens with MiniLM: our engine, MLX as installed, and torch if available."""

from __future__ import annotations

import random
from statistics import median
from typing import Any

from benchmarks import prompts
from benchmarks.bench import Bench
from benchmarks.models import minilm
from benchmarks.paths import ROOT
from benchmarks.processes import Worker, folder_argument
from benchmarks.report import Limit, Row

FIGURE = "MiniLM embeddings ÷ stock MLX"
TORCH_FIGURE = "MiniLM embeddings ÷ torch"
TEXTS = 64
WORDS = 28
"""Words in a text. Each is one token; two special tokens are added."""
ROUNDS = 7
TORCH_PYTHON = ROOT / "build" / "parity" / "bin" / "python"


def measure(bench: Bench) -> list[Row]:
    model = folder_argument(minilm())
    with (
        Worker("benchmarks.embed_process", model=model, blas="auto") as ours,
        Worker("benchmarks.embed_process", model=model, blas="off") as stock,
    ):
        samples = _rounds({"ours": ours, "stock": stock}, ROUNDS if not bench.quick else 3)
        rows = [_row(FIGURE, samples, "stock", bound=12, binding=True)]
        if TORCH_PYTHON.exists():
            with Worker("benchmarks.torch_process", python=TORCH_PYTHON, model=model) as torch:
                samples = _rounds({"ours": ours, "torch": torch}, ROUNDS)
            rows.append(_row(TORCH_FIGURE, samples, "torch", bound=1, binding=False))
    return rows


def _rounds(sides: dict[str, Worker], count: int) -> list[dict[str, Any]]:
    """Return the texts per second of each side. They take turns, with new texts in each round."""
    samples = []
    for number in range(count):
        texts = [prompts.words(9000 + 100 * number + at, WORDS) for at in range(TEXTS)]
        random.Random(number).shuffle(texts)
        replies = {side: worker.ask(texts=texts) for side, worker in sides.items()}
        samples.append(
            {side: TEXTS / reply["seconds"] for side, reply in replies.items()}
            | {"tokens": {side: reply["tokens"] for side, reply in replies.items()}}
        )
    return samples


def _row(figure: str, samples: list[dict[str, Any]], other: str, *, bound: float, binding: bool) -> Row:
    ours, theirs = (median(sample[side] for sample in samples) for side in ("ours", other))
    return Row(
        figure=figure,
        case=f"{TEXTS} texts, 30 tokens",
        model="minilm-l6",
        value=median(sample["ours"] / sample[other] for sample in samples),
        limit=Limit(sign="≥", bound=bound),
        binding=binding,
        summary=f"{ours:.0f} against {theirs:.1f} texts/s",
        detail={"samples": samples},
    )
