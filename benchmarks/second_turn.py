"""Measure the effect of the prefix cache: the time to the first token of turn 2, after a long turn 1."""

from __future__ import annotations

import asyncio
from statistics import median
from typing import Any

from benchmarks import client, prompts
from benchmarks.bench import Bench
from benchmarks.report import Limit, Row
from benchmarks.servers import LabServer, lab_server

ANSWER_TOKENS = 16
FIGURE = "first token, turn 2 ÷ turn 1"


def measure(bench: Bench) -> list[Row]:
    with lab_server(bench.folder) as ours:
        samples = [asyncio.run(_session(bench, ours, number)) for number in range(bench.sizes.history_rounds)]
    first, second = (median(sample[turn]["ttft_s"] for sample in samples) for turn in ("turn_1", "turn_2"))
    history = samples[0]["turn_1"]["prompt_tokens"]
    row = Row(
        figure=FIGURE,
        case=f"{history} tokens of history",
        model=bench.model,
        value=median(sample["turn_2"]["ttft_s"] / sample["turn_1"]["ttft_s"] for sample in samples),
        limit=Limit(sign="≤", bound=0.10),
        # The limit is for a long history.
        binding=bench.promised and history >= 1300,
        summary=f"{second * 1e3:.0f} against {first * 1e3:.0f} ms, {samples[0]['turn_2']['cached_tokens']} cached",
        detail={"samples": samples},
    )
    return [row]


async def _session(bench: Bench, ours: LabServer, number: int) -> dict[str, dict[str, Any]]:
    messages = prompts.history(9000 + number, bench.sizes.history_tokens)
    first = await client.stream(ours.url, prompts.chat_body(messages, max_tokens=ANSWER_TOKENS))
    messages = prompts.following(messages, first.text, "Continue, please.")
    second = await client.stream(ours.url, prompts.chat_body(messages, max_tokens=ANSWER_TOKENS))
    return {"turn_1": facts_of(first), "turn_2": facts_of(second)}


def facts_of(answer: client.Answer) -> dict[str, Any]:
    """Return the time to the first token of an answer, and the tokens of its prompt."""
    return {
        "ttft_s": answer.ttft_s,
        "prompt_tokens": answer.usage["prompt_tokens"],
        "cached_tokens": (answer.usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0),
    }
