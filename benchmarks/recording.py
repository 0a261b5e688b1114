"""Measure the CPU time of a token at eight streams while requests are recorded, against a server that records none."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import client, prompts
from benchmarks.bench import Bench
from benchmarks.report import Limit, Row
from benchmarks.servers import LabServer, lab_server

FIGURE = "CPU time of a token, recorded ÷ not recorded"
STREAMS = 8
PAIRS, QUICK_PAIRS = 5, 2
GROUPS = 4
"""Number of times that both servers are started. Equal processes differ in speed by up to a tenth."""
LIMITS = {"in memory": Limit(sign="≤", bound=1.02), "to a file": Limit(sign="≤", bound=1.03)}


def measure(bench: Bench) -> list[Row]:
    return [row for place in LIMITS for row in _compare(bench, place)]


def _compare(bench: Bench, place: str) -> Iterator[Row]:
    """Yield the rows of greedy streams and, where a token is fast enough that a seed matters, of sampled ones."""
    samples: dict[str, list[dict[str, float]]] = {"greedy": []} if bench.promised else {"greedy": [], "sampled": []}
    for group in range(GROUPS):
        with tempfile.TemporaryDirectory() as folder, lab_server(bench.folder, record="off") as off:
            record_to = str(Path(folder) / "requests.db") if place == "to a file" else None
            with lab_server(bench.folder, record="all", record_to=record_to) as on:
                for sampling in samples:
                    samples[sampling] += _samples(bench, on, off, group, sampling)
    for sampling, found in samples.items():
        yield _row(bench, place, sampling, found)


def _samples(bench: Bench, on: LabServer, off: LabServer, group: int, sampling: str) -> Iterator[dict[str, float]]:
    """Run both sides on the same prompts, in alternating order. Sampled requests get a seed if they are recorded."""
    pairs = QUICK_PAIRS if bench.quick else PAIRS
    for number in range(group * pairs, (group + 1) * pairs):
        sides = {"on": on, "off": off}
        order = list(sides) if number % 2 == 0 else list(reversed(sides))
        yield {side: _token_ms(bench, sides[side], number, sampling) for side in order}


def _row(bench: Bench, place: str, sampling: str, samples: list[dict[str, float]]) -> Row:
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
