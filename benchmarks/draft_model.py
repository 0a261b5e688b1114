"""Measure how fast llama.cpp decodes with a draft model and without.

The draft model is SmolLM2-135M, and its target is the same model with 60 more layers that change nothing. So the target
costs three times as much, and accepts every draft of a greedy answer, which is the best case.
"""

from __future__ import annotations

import asyncio
from statistics import median
from typing import Any

from benchmarks import client, prompts
from benchmarks.bench import Bench, BenchError
from benchmarks.gguf import QUICK_ROUNDS, ROUNDS, run_rounds
from benchmarks.models import deepened_starter, gguf_starter
from benchmarks.report import Row
from benchmarks.servers import lab_server

FIGURE = "gguf: decode tok/s with a draft model ÷ without"
TOKENS, QUICK_TOKENS = 128, 32


def measure(bench: Bench) -> list[Row]:
    target, draft = deepened_starter(), gguf_starter().path
    tokens, rounds = (QUICK_TOKENS, QUICK_ROUNDS) if bench.quick else (TOKENS, ROUNDS)
    with lab_server(target, draft=draft) as drafting, lab_server(target) as plain:
        samples = run_rounds(
            {"ours": drafting.url, "theirs": plain.url}, rounds, lambda url, number: _decode(url, number, tokens)
        )
    if any(sample["ours"]["text"] != sample["theirs"]["text"] for sample in samples):
        raise BenchError("the draft model has changed an answer")
    rates = [median(sample[side]["rate"] for sample in samples) for side in ("ours", "theirs")]
    accepted, drafted = (sum(sample["ours"][name] for sample in samples) for name in ("accepted", "drafted"))
    row = Row(
        figure=FIGURE,
        case=f"1 stream, a target of {target.stat().st_size / draft.stat().st_size:.1f} times the size that agrees",
        model=bench.model,
        value=median(sample["ours"]["rate"] / sample["theirs"]["rate"] for sample in samples),
        summary=f"{rates[0]:.1f} against {rates[1]:.1f} tok/s, {accepted} of {drafted} drafted tokens accepted",
        detail={"samples": samples},
    )
    return [row]


def _decode(url: str, number: int, tokens: int) -> dict[str, Any]:
    body = prompts.chat_body(prompts.story(9500 + number), max_tokens=tokens, ignore_eos=True)
    answer = asyncio.run(client.whole(url, body))
    timings = answer["timings"]
    return {
        "rate": timings["predicted_per_second"],
        "text": answer["choices"][0]["message"]["content"],
        "accepted": timings.get("draft_n_accepted", 0),
        "drafted": timings.get("draft_n", 0),
    }
