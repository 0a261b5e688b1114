"""Measure how fast the MLX engine decodes with and without prompt lookup, for answers that copy their prompt or not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

from benchmarks import client, prompts
from benchmarks.bench import Bench, BenchError
from benchmarks.rates import decode_window, timeline
from benchmarks.report import Limit, Row
from benchmarks.servers import LabServer, lab_server

FIGURE = "decode tok/s with prompt lookup ÷ without"
PROGRAM = """\
def area_of_{0}(width, height):
    \"\"\"Return the area of a {0}.\"\"\"
    return width * height


def volume_of_{1}(width, height, depth):
    \"\"\"Return the volume of a {1}.\"\"\"
    return width * height * depth


def price_of_{2}(count, price):
    \"\"\"Return the price of several items of {2}.\"\"\"
    return count * price
"""
ANSWER_TOKENS = 160
"""Length of the program and the sentence before it. In a shorter answer, this sentence is a larger part."""
ROUNDS = 9
"""A story gains or loses a few percent only, which is less than the difference between two rounds."""


def _copy(seed: int) -> list[prompts.Message]:
    names = prompts.words(seed, 3).split()
    text = f"Repeat this program without any change:\n```python\n{PROGRAM.format(*names)}```"
    return [{"role": "user", "content": text}]


CASES: Mapping[str, tuple[Callable[[int], list[prompts.Message]], Limit]] = {
    "a program is copied": (_copy, Limit(sign="≥", bound=1.3)),
    "a story": (prompts.story, Limit(sign="≥", bound=0.97)),
}


def measure(bench: Bench) -> list[Row]:
    with lab_server(bench.folder, prompt_lookup=True) as used, lab_server(bench.folder) as plain:
        return [_compare(bench, used, plain, case) for case in CASES]


def _compare(bench: Bench, used: LabServer, plain: LabServer, case: str) -> Row:
    write, limit = CASES[case]
    rounds = bench.sizes.rounds if bench.quick else ROUNDS
    samples = [_round(bench, used, plain, write(number), number) for number in range(rounds)]
    rates = [median(sample[side] for sample in samples) for side in ("used", "plain")]
    return Row(
        figure=FIGURE,
        case=case,
        model=bench.model,
        value=median(sample["used"] / sample["plain"] for sample in samples),
        limit=limit,
        binding=bench.promised,
        summary=f"{rates[0]:.1f} against {rates[1]:.1f} tok/s",
        detail={"samples": samples},
    )


def _round(bench: Bench, used: LabServer, plain: LabServer, chat: list[prompts.Message], number: int) -> dict[str, Any]:
    """Run each side on the same prompt, in alternating order.

    Raises:
        BenchError: The answers differ.
    """
    body = prompts.chat_body(chat, max_tokens=bench.sizes.alone_tokens if bench.quick else ANSWER_TOKENS)
    servers = {"used": used, "plain": plain}
    answers: dict[str, client.Answer] = {}
    for side in servers if number % 2 == 0 else reversed(servers):
        url = servers[side].url
        asyncio.run(client.whole(url, body | {"max_tokens": 1}))
        answers[side] = asyncio.run(client.stream(url, body))
    if answers["used"].text != answers["plain"].text:
        raise BenchError("prompt lookup changed the answer")
    return {side: decode_window([timeline(answer)]).rate for side, answer in answers.items()} | {
        "tokens": answers["used"].tokens
    }
