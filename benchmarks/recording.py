"""Measure the CPU time of a token at eight streams while requests are recorded, against a server that records none."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import client, prompts
from benchmarks.bench import Bench
from benchmarks.rows import Limit, Row
from benchmarks.servers import LabServer, lab_server

FIGURE = "CPU time of a token, recorded ÷ not recorded"
STREAMS = 8
PAIRS, QUICK_PAIRS = 20, 5
LIMITS = {"in memory": Limit(sign="≤", bound=1.02), "to a file": Limit(sign="≤", bound=1.03)}


def measure(bench: Bench) -> list[Row]:
    rows = []
    with tempfile.TemporaryDirectory() as folder, lab_server(bench.folder, record="off") as off:
        for place, record_to in (("in memory", None), ("to a file", str(Path(folder) / "requests.db"))):
            with lab_server(bench.folder, record="all", record_to=record_to) as on:
                rows += [_compare(bench, on, off, place, sampling) for sampling in ("greedy", "sampled")]
    return rows


def _compare(bench: Bench, on: LabServer, off: LabServer, place: str, sampling: str) -> Row:
    """Run both sides on the same prompts, in alternating order. Sampled requests get a seed if they are recorded."""
    samples: list[dict[str, float]] = []
    for number in range(QUICK_PAIRS if bench.quick else PAIRS):
        sides = {"on": on, "off": off}
        order = list(sides) if number % 2 == 0 else list(reversed(sides))
        samples.append({side: _token_ms(bench, sides[side], number, sampling) for side in order})
    times = {side: median(sample[side] for sample in samples) for side in ("on", "off")}
    return Row(
        figure=FIGURE,
        case=f"{STREAMS} {sampling} streams, {place}",
        model=bench.model,
        value=median(sample["on"] / sample["off"] for sample in samples),
        limit=LIMITS[place],
        binding=bench.promised and sampling == "greedy",
        summary=f"{times['on']:.2f} against {times['off']:.2f} ms",
        detail={"samples": samples},
    )


def _token_ms(bench: Bench, server: LabServer, number: int, sampling: str) -> float:
    """Return the CPU time of the server for each token, in milliseconds."""
    how: dict[str, Any] = {"temperature": 0 if sampling == "greedy" else 0.7, **server.extras}
    chats = [prompts.story(100 * number + stream) for stream in range(STREAMS)]
    bodies = [prompts.chat_body(chat, max_tokens=bench.sizes.together_tokens, **how) for chat in chats]
    before = server.cpu_s()
    answers = asyncio.run(client.streams(server.url, bodies))
    return (server.cpu_s() - before) * 1e3 / sum(answer.tokens for answer in answers)
