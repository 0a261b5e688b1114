"""Measure eight concurrent clients, prefill included: our server against ``mlx_lm.server``.

Both read the same files; ``mlx_lm.server`` computes with quantized weights. With SmolLM2 it is also measured with
float32 weights, to which our server expands them in memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import client, prompts
from benchmarks.bench import Bench
from benchmarks.models import expanded
from benchmarks.rates import overall_rate
from benchmarks.report import Limit, Row
from benchmarks.servers import lab_server, mlx_lm_server

STREAMS = 8
FIGURE = "overall tok/s ÷ mlx_lm.server"
SHORT_TOKENS = 32
PROMPT_TOKENS = 156


def measure(bench: Bench) -> list[Row]:
    tokens = bench.sizes.together_tokens
    rows = [_compare(bench, bench.folder, _stories, tokens, case="same files", limit=Limit(sign=">", bound=1))]
    if bench.promised:
        case = f"prompts of {PROMPT_TOKENS}, float32 files"
        limit = Limit(sign="≥", bound=12)
        rows.append(_compare(bench, expanded(), _lists, SHORT_TOKENS, case=case, limit=limit))
    return rows


Prompts = Callable[[int], list[list[prompts.Message]]]


def _stories(number: int) -> list[list[prompts.Message]]:
    """Return prompts of about 50 tokens, different in each round."""
    return [prompts.story(5000 + 10 * number + stream) for stream in range(STREAMS)]


def _lists(number: int) -> list[list[prompts.Message]]:
    return [prompts.history(6000 + 10 * number + stream, PROMPT_TOKENS) for stream in range(STREAMS)]


def _compare(bench: Bench, folder: Path, make_prompts: Prompts, tokens: int, *, case: str, limit: Limit) -> Row:
    """Compare both servers. ``folder`` is the model of ``mlx_lm.server``."""
    with lab_server(bench.folder) as ours, mlx_lm_server(folder) as theirs:
        samples = [
            _round(ours.url, theirs, number, make_prompts(number), tokens) for number in range(bench.sizes.rounds)
        ]
    ours_rate, their_rate = (median(sample[side]["rate"] for sample in samples) for side in ("ours", "theirs"))
    return Row(
        figure=FIGURE,
        case=f"{STREAMS} streams of {tokens} tokens, {case}",
        model=bench.model,
        value=median(sample["ours"]["rate"] / sample["theirs"]["rate"] for sample in samples),
        limit=limit,
        binding=bench.promised,
        summary=f"{ours_rate:.1f} against {their_rate:.1f} tok/s",
        detail={"samples": samples, "max_tokens": tokens},
    )


def _round(
    ours: str, theirs: str, number: int, chats: list[list[prompts.Message]], tokens: int
) -> dict[str, dict[str, Any]]:
    """Run each side on the same new prompts, in alternating order. Answers may end at end-of-text on both sides."""
    sides: list[tuple[str, Callable[[], dict[str, Any]]]] = [
        ("ours", lambda: _run(ours, chats, tokens, "default")),
        ("theirs", lambda: _run(theirs, chats, tokens, "default_model")),
    ]
    return {side: run() for side, run in (sides if number % 2 == 0 else reversed(sides))}


def _run(url: str, chats: list[list[prompts.Message]], tokens: int, model: str) -> dict[str, Any]:
    bodies = [prompts.chat_body(messages, max_tokens=tokens, model=model) for messages in chats]
    answers = asyncio.run(client.streams(url, bodies))
    return {
        "rate": overall_rate(answers),
        "tokens": [answer.tokens for answer in answers],
        "prompt_tokens": [answer.usage["prompt_tokens"] for answer in answers],
        "ttft_s": [answer.ttft_s for answer in answers],
    }
