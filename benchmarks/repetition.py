"""Measure how many answers are the same alone and in parallel with seven others, on both engines."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import client, prompts
from benchmarks.bench import Bench
from benchmarks.models import gguf_starter
from benchmarks.report import Limit, Row
from benchmarks.servers import lab_server

FIGURE = "repetition: same answers alone and in parallel"
STREAMS = 8
ROUNDS, QUICK_ROUNDS = 8, 2
SEEDS = 24
TOKENS = 40


def measure(bench: Bench) -> list[Row]:
    return [
        row
        for name, path in (("MLX", bench.folder), ("llama.cpp", gguf_starter().path))
        for row in _rows(bench, name, path)
    ]


def _rows(bench: Bench, engine: str, path: Path) -> list[Row]:
    greedy = [_body(number, temperature=0) for number in range(STREAMS)]
    seeded = [_body(number, temperature=0.9, seed=number) for number in range(STREAMS if bench.quick else SEEDS)]
    # With prompt lookup, which is the default on MLX.
    with lab_server(path, prompt_lookup=engine == "MLX") as server:
        return [
            _row(bench, f"{engine}, greedy", server.url, greedy, rounds=QUICK_ROUNDS if bench.quick else ROUNDS),
            _row(bench, f"{engine}, seeded", server.url, seeded, rounds=1),
        ]


def _row(bench: Bench, case: str, url: str, bodies: Sequence[dict[str, Any]], *, rounds: int) -> Row:
    """Compare the texts of answers that run one after the other with those of ``STREAMS`` answers at the same time."""
    alone = [asyncio.run(client.stream(url, body)).text for body in bodies]
    same = 0
    for _ in range(rounds):
        for first in range(0, len(bodies), STREAMS):
            parallel = asyncio.run(client.streams(url, list(bodies[first : first + STREAMS])))
            same += sum(answer.text == text for answer, text in zip(parallel, alone[first:], strict=False))
    answers = rounds * len(bodies)
    return Row(
        figure=FIGURE,
        case=case,
        model=bench.model,
        value=same / answers,
        limit=Limit(sign="≥", bound=1),
        summary=f"{same} of {answers}",
    )


def _body(number: int, **sampling: Any) -> dict[str, Any]:
    return prompts.chat_body(prompts.story(7000 + number), max_tokens=TOKENS, **sampling)
