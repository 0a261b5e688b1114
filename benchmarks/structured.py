"""Measure the cost of a grammar: decode with a JSON schema against decode without, for one stream and several."""

from __future__ import annotations

import asyncio
from statistics import median
from typing import Any

from benchmarks import client, prompts
from benchmarks.bench import Bench, BenchError
from benchmarks.rates import Window, decode_window, timeline
from benchmarks.report import Limit, Row
from benchmarks.servers import LabServer, lab_server

FIGURE = "decode tok/s with a JSON schema ÷ without"
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "likes": {"type": "array", "items": {"enum": ["apples", "pears", "plums"]}, "maxItems": 3},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}
# The list is so long that every answer reaches its token limit.
PEOPLE = {"type": "array", "items": PERSON, "minItems": 1000}
ROUNDS = 7
"""More rounds than usual, because the limit is close to 1 and two rounds may differ by a tenth."""
FORMAT = {"type": "json_schema", "json_schema": {"name": "people", "schema": PEOPLE}}


def measure(bench: Bench) -> list[Row]:
    with lab_server(bench.folder, slots=max(bench.streams)) as server:
        return [_compare(bench, server, streams) for streams in bench.streams]


def _compare(bench: Bench, server: LabServer, streams: int) -> Row:
    max_tokens = bench.sizes.alone_tokens if streams == 1 else bench.sizes.together_tokens
    rounds = bench.sizes.rounds if bench.quick else ROUNDS
    samples = [_round(server, streams, max_tokens, number) for number in range(rounds)]
    constrained, free = (median(sample[side] for sample in samples) for side in ("constrained", "free"))
    return Row(
        figure=FIGURE,
        case="1 stream" if streams == 1 else f"{streams} streams",
        model=bench.model,
        value=median(sample["constrained"] / sample["free"] for sample in samples),
        # A mask takes about 0.09 ms on the engine's thread, which is a sixth of the time of a token with ``tiny``.
        limit=Limit(sign="≥", bound=0.75 if bench.model == "tiny" else 0.95),
        binding=bench.model in ("tiny", "smollm2"),
        summary=f"{constrained:.1f} against {free:.1f} tok/s",
        detail={"samples": samples, "max_tokens": max_tokens, "schema": PEOPLE},
    )


def _round(server: LabServer, streams: int, max_tokens: int, number: int) -> dict[str, Any]:
    """Run each side on the same prompts, in alternating order."""
    chats = [prompts.brief(1000 * number + 10 * streams + stream) for stream in range(streams)]
    sides: dict[str, dict[str, Any]] = {"constrained": {"response_format": FORMAT}, "free": {"ignore_eos": True}}
    order = list(sides) if number % 2 == 0 else list(reversed(sides))
    return {side: _decode(server, chats, max_tokens, sides[side]).rate for side in order}


def _decode(server: LabServer, chats: list[list[prompts.Message]], max_tokens: int, more: dict[str, Any]) -> Window:
    bodies = [prompts.chat_body(messages, max_tokens=max_tokens, **more) for messages in chats]
    answers = asyncio.run(_prefilled(server.url, bodies))
    if any(answer.tokens != max_tokens for answer in answers):
        raise BenchError("an answer ended early")
    return decode_window([timeline(answer) for answer in answers])


async def _prefilled(url: str, bodies: list[dict[str, Any]]) -> list[client.Answer]:
    """Return all answers. They start together, after the prefill and the compilation of the grammar."""
    for body in bodies:
        await client.whole(url, body | {"max_tokens": 1})
    return await client.streams(url, bodies)
