"""Measure the effect of the prefix cache: the time to the first token of turn 2, after a long turn 1.

Turn 1 ends or, on llama.cpp, is stopped just before.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from statistics import median
from typing import Any

from benchmarks import client, prompts
from benchmarks.bench import Bench
from benchmarks.models import gguf_starter
from benchmarks.report import Limit, Row
from benchmarks.servers import LabServer, lab_server

ANSWER_TOKENS = 16
FIGURE = "first token, turn 2 ÷ turn 1"
STOPPED = "gguf: first token after a stop ÷ turn 1, slowest"


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
    return [row, *(_after_stops(bench, beside) for beside in (0, 4) if bench.model == "smollm2")]


def _after_stops(bench: Bench, beside: int) -> Row:
    """Return the row of llama.cpp for answers that are stopped, alone or beside others."""
    with lab_server(gguf_starter().path) as ours:
        samples = asyncio.run(_stops(bench, ours, beside))
    ratios = [sample["turn_2"]["ttft_s"] / sample["turn_1"]["ttft_s"] for sample in samples]
    history = samples[0]["turn_2"]["prompt_tokens"]
    return Row(
        figure=STOPPED,
        case=f"{history} tokens, {f'beside {beside} streams' if beside else 'alone'}",
        model=bench.model,
        value=max(ratios),
        limit=Limit(sign="≤", bound=0.20),
        binding=bench.promised and history >= 900,
        summary=f"median {median(ratios):.2f}, at least {min(s['turn_2']['cached_tokens'] for s in samples)} cached",
        detail={"samples": samples},
    )


async def _stops(bench: Bench, ours: LabServer, beside: int) -> list[dict[str, dict[str, Any]]]:
    stories = [prompts.chat_body(prompts.story(9500 + at), max_tokens=4000, ignore_eos=True) for at in range(beside)]
    others = [asyncio.create_task(client.stream(ours.url, body)) for body in stories]
    try:
        return [await _stop(bench, ours, number) for number in range(bench.sizes.history_rounds)]
    finally:
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


async def _stop(bench: Bench, ours: LabServer, number: int) -> dict[str, dict[str, Any]]:
    """Close the connection after a few tokens, and send the next turn at once."""
    messages = prompts.history(9100 + number, bench.sizes.history_tokens)
    body = prompts.chat_body(messages, max_tokens=200, ignore_eos=True)
    async with client.SentRequest(ours.url, body) as request, aclosing(request.data()) as lines:
        stopped = client.Answer(sent_at=request.sent_at)
        async for line in lines:
            stopped.lines.append(line)
            if sum(client.has_text(text) for _, text in stopped.lines) > number % 4:
                break
    messages = prompts.following(messages, stopped.text, "Continue, please.")
    second = await client.stream(ours.url, prompts.chat_body(messages, max_tokens=ANSWER_TOKENS))
    return {"turn_1": {"ttft_s": stopped.ttft_s}, "turn_2": facts_of(second)}


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
