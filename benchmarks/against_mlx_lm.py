"""Eight clients at once, prefill included: our server against ``mlx_lm.server`` on the same files."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from statistics import median
from typing import Any

from benchmarks import client, prompts
from benchmarks.bench import Bench
from benchmarks.rates import overall_rate
from benchmarks.rows import Limit, Row
from benchmarks.servers import lab_server, mlx_lm_server

STREAMS = 8
FIGURE = "overall tok/s ÷ mlx_lm.server"


def measure(bench: Bench) -> list[Row]:
    with lab_server(bench.folder) as ours, mlx_lm_server(bench.folder) as theirs:
        samples = [_round(bench, ours.url, theirs, number) for number in range(bench.sizes.rounds)]
    ours_rate, their_rate = (median(sample[side]["rate"] for sample in samples) for side in ("ours", "theirs"))
    row = Row(
        figure=FIGURE,
        case=f"{STREAMS} streams",
        model=bench.model,
        value=median(sample["ours"]["rate"] / sample["theirs"]["rate"] for sample in samples),
        limit=Limit(sign=">", bound=1),
        binding=bench.promised,
        summary=f"{ours_rate:.1f} against {their_rate:.1f} tok/s",
        detail={"samples": samples, "max_tokens": bench.sizes.together_tokens},
    )
    return [row]


def _round(bench: Bench, ours: str, theirs: str, number: int) -> dict[str, dict[str, Any]]:
    """One run of each side on the same new prompts; who begins changes. Ends by end-of-text are allowed on both."""
    asked = [prompts.story(5000 + 10 * number + stream) for stream in range(STREAMS)]
    sides: list[tuple[str, Callable[[], dict[str, Any]]]] = [
        ("ours", lambda: _run(bench, ours, asked, "default")),
        ("theirs", lambda: _run(bench, theirs, asked, "default_model")),
    ]
    return {side: run() for side, run in (sides if number % 2 == 0 else reversed(sides))}


def _run(bench: Bench, url: str, asked: list[list[prompts.Message]], model: str) -> dict[str, Any]:
    max_tokens = bench.sizes.together_tokens
    bodies = [prompts.chat_body(messages, max_tokens=max_tokens, model=model) for messages in asked]
    answers = asyncio.run(client.streams(url, bodies))
    return {
        "rate": overall_rate(answers),
        "tokens": [answer.tokens for answer in answers],
        "prompt_tokens": [answer.usage["prompt_tokens"] for answer in answers],
        "ttft_s": [answer.ttft_s for answer in answers],
    }
