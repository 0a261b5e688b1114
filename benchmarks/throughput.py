"""Measure the cost of HTTP: decode by our server against mlx-lm's ``BatchGenerator``, for one stream and several."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from statistics import median
from typing import Any

from benchmarks import client, prompts
from benchmarks.bench import Bench, BenchError
from benchmarks.processes import Worker
from benchmarks.rates import Timeline, decode_window, timeline
from benchmarks.report import Limit, Row
from benchmarks.servers import LabServer, bare_generator, lab_server

FIGURE = "stream tok/s ÷ bare BatchGenerator"


def measure(bench: Bench) -> list[Row]:
    with lab_server(bench.folder, slots=max(bench.streams)) as ours, bare_generator(bench.folder) as bare:
        return [_compare(bench, ours, bare, streams) for streams in bench.streams]


def _compare(bench: Bench, ours: LabServer, bare: Worker, streams: int) -> Row:
    max_tokens = bench.sizes.alone_tokens if streams == 1 else bench.sizes.together_tokens
    samples = [_round(ours, bare, streams, max_tokens, number) for number in range(bench.sizes.rounds)]
    ours_rate, bare_rate = (median(sample[side] for sample in samples) for side in ("ours", "bare"))
    return Row(
        figure=FIGURE,
        case="1 stream" if streams == 1 else f"{streams} streams",
        model=bench.model,
        # The ratio of each pair: other load on the machine affects both sides.
        value=median(sample["ours"] / sample["bare"] for sample in samples),
        limit=Limit(sign="≥", bound=0.95),
        binding=bench.promised,
        summary=f"{ours_rate:.1f} against {bare_rate:.1f} tok/s",
        detail={"samples": samples, "max_tokens": max_tokens, "request_extras": ours.extras},
    )


def _round(ours: LabServer, bare: Worker, streams: int, max_tokens: int, number: int) -> dict[str, Any]:
    """Run each side on the same prompts, in alternating order."""
    chats = [prompts.brief(1000 * number + 10 * streams + stream) for stream in range(streams)]
    sides: list[tuple[str, Callable[[], list[Timeline]]]] = [
        ("ours", lambda: _ours(ours, chats, max_tokens)),
        ("bare", lambda: _bare(bare, chats, max_tokens)),
    ]
    timelines = {side: run() for side, run in (sides if number % 2 == 0 else reversed(sides))}
    windows = {side: decode_window(lines) for side, lines in timelines.items()}
    return {side: window.rate for side, window in windows.items()} | {
        "window_tokens": {side: window.tokens for side, window in windows.items()},
        # There are fewer pieces than tokens if text was held back, or if the reader was slow and tokens were merged.
        "pieces": [len(line.times) for line in timelines["ours"]],
        "tokens": [line.tokens for line in timelines["ours"]],
    }


def _ours(ours: LabServer, chats: list[list[prompts.Message]], max_tokens: int) -> list[Timeline]:
    bodies = [prompts.chat_body(messages, max_tokens=max_tokens, **ours.extras) for messages in chats]
    return [timeline(answer) for answer in asyncio.run(_prefilled(ours.url, bodies))]


async def _prefilled(url: str, bodies: list[dict[str, Any]]) -> list[client.Answer]:
    """Return all answers. They start together, after the prefill of each prompt, so that all decode at the same time.

    Without that, a server that computes prompts in small steps between the tokens of running streams would finish the
    first answers before the last ones begin.
    """
    for body in bodies:
        await client.whole(url, body | {"max_tokens": 1})
    return await client.streams(url, bodies)


def _bare(bare: Worker, chats: list[list[prompts.Message]], max_tokens: int) -> list[Timeline]:
    streams = bare.ask(prompts=chats, max_tokens=max_tokens)["times"]
    if any(len(times) != max_tokens for times in streams):
        raise BenchError("the bare generator stopped early")
    return [Timeline(times=times, tokens=len(times)) for times in streams]
