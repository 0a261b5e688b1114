"""Measure ``lab.map``: its throughput against ``lmx-lab bench``, its CPU time, and rows with a common beginning."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks import prompts
from benchmarks.bench import Bench, BenchError
from benchmarks.models import gguf_starter, tiny_gguf
from benchmarks.processes import Reply, Worker
from benchmarks.report import Limit, Row
from benchmarks.servers import LabServer, lab_server
from lmx_lab.bench import Case, ChatTarget, RequestSample, runner, summary
from lmx_lab.bench.case import prompt
from lmx_lab.bench.load_generator import calibrate

FIGURE = "map: tok/s ÷ lmx-lab bench"
CORES = "map: cores used by the client"
BEGINNING = "map: rows/s with a common beginning ÷ without"
ROWS, QUICK_ROWS = 500, 80
PARTS = 5
ROUNDS = 3
TOKENS = 32
"""Length of the answers."""
CASE = Case(prompt_tokens=64, output_tokens=TOKENS)
CONCURRENCY = (4, 8, 16)
"""Numbers of concurrent requests. ``map`` is compared with the one that has the highest throughput."""
BEGINNING_TOKENS = 300
COMMON_ROWS, OWN_ROWS = 200, 40
"""Number of rows with a common beginning, and of rows with different beginnings. Their rates are compared."""
ANSWER_TOKENS = 8
"""Length of the answers to rows with long beginnings. They are short, like those of a classification."""
INVALID = "map: sampled answers that are not valid"
TYPED_ROWS, TYPED_TOKENS = 1000, 400
TYPED = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "days": {"type": "integer", "minimum": 0, "maximum": 99},
        "price": {"type": "number", "minimum": 0, "maximum": 100},
        "far": {"type": "boolean"},
        "kind": {"enum": ["sea", "hills"]},
        "stops": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 3},
        "guide": {"anyOf": [{"enum": ["Ann", "Bob"]}, {"type": "null"}]},
    },
    "required": ["city", "days", "price", "far", "kind", "stops", "guide"],
    "additionalProperties": False,
}
GREEDY = {"temperature": 0, "ignore_eos": True}


def measure(bench: Bench) -> list[Row]:
    rows = QUICK_ROWS if bench.quick else ROWS
    if bench.model == "tiny":
        with _servers(bench.folder) as (_, client):
            found = [_cores(bench, client, rows), _typed(bench, client, "MLX")]
        with _servers(tiny_gguf()) as (_, client):
            return [*found, _typed(bench, client, "llama.cpp")]
    path = gguf_starter().path
    with _servers(path) as (server, client):
        found = [_against_bench(bench, server, client, rows), _beginnings(bench, client, "llama.cpp")]
    with _servers(bench.folder) as (_, client):
        return [*found, _beginnings(bench, client, "MLX")]


@contextmanager
def _servers(model: Path) -> Iterator[tuple[LabServer, Worker]]:
    """Run a server, and a process that is attached to it."""
    with lab_server(model) as server, Worker("benchmarks.map_process", url=server.url) as client:
        yield server, client


def _map(client: Worker, texts: Sequence[str], tokens: int) -> Reply:
    reply = client.ask(texts=list(texts), parameters={"max_tokens": tokens, **GREEDY})
    if reply["errors"] or reply["output_tokens"] != len(texts) * tokens:
        raise BenchError(f"{reply['errors']} of {len(texts)} rows failed; {reply['output_tokens']} tokens")
    return reply


# --- throughput


def _against_bench(bench: Bench, server: LabServer, client: Worker, rows: int) -> Row:
    """Compare ``map`` with the bench. Both answer the same number of prompts in each round, in alternating order."""
    probes = {count: _bench_rate(server, count, max(2 * count, rows // 10)) for count in CONCURRENCY}
    best = max(CONCURRENCY, key=lambda count: probes[count])
    texts = asyncio.run(_texts(server, rows))
    size = rows // PARTS
    samples = []
    for part in range(PARTS):
        sides: dict[str, Callable[[], float]] = {
            "map": partial(_map_rate, client, texts[part * size : (part + 1) * size]),
            "bench": partial(_bench_rate, server, best, size),
        }
        order = list(sides) if part % 2 == 0 else list(reversed(sides))
        samples.append({side: sides[side]() for side in order})
    rate, of_bench = (median(sample[side] for sample in samples) for side in ("map", "bench"))
    return Row(
        figure=FIGURE,
        case=f"{rows} rows in {PARTS} parts, {TOKENS} tokens each, llama.cpp",
        model=bench.model,
        value=median(sample["map"] / sample["bench"] for sample in samples),
        limit=Limit(sign="≥", bound=0.97),
        binding=not bench.quick,
        summary=f"{rate:.1f} against {of_bench:.1f} tok/s with {best} requests at once",
        detail={"samples": samples, "probes": probes},
    )


def _map_rate(client: Worker, texts: Sequence[str]) -> float:
    found = _map(client, texts, TOKENS)
    return float(found["output_tokens"] / found["seconds"])


def _bench_rate(server: LabServer, concurrency: int, requests: int) -> float:
    """Return the tokens per second that ``lmx-lab bench`` reports."""

    async def collect() -> list[RequestSample]:
        case = replace(CASE, concurrency=concurrency, requests=requests)
        return [sample async for sample in runner.samples(ChatTarget(server.url), case)]

    measured = asyncio.run(collect())
    if errors := [sample.error for sample in measured if sample.error is not None]:
        raise BenchError(f"{len(errors)} requests of {requests} failed: {errors[0]}")
    return float(summary(measured)["total_tok_s"].iloc[0])


async def _texts(server: LabServer, rows: int) -> list[str]:
    """Return texts as long as the prompts of the bench."""
    calibration = await calibrate(ChatTarget(server.url), CASE.prompt_tokens)
    tokens, per_word = calibration.word_tokens(CASE.prompt_tokens), calibration.tokens_per_word
    return [
        prompt(CASE, repeat=0, request=number, run="map", tokens=tokens, tokens_per_word=per_word)
        for number in range(rows)
    ]


# --- CPU time


def _cores(bench: Bench, client: Worker, rows: int) -> Row:
    """Return the CPU usage of the process that calls ``map``."""
    texts = [prompts.words(number, 24) for number in range(rows)]
    rounds = [_map(client, texts, TOKENS) for _ in range(1 if bench.quick else ROUNDS)]
    cores = median(found["cpu_s"] / found["seconds"] for found in rounds)
    rate = median(found["output_tokens"] / found["seconds"] for found in rounds)
    return Row(
        figure=CORES,
        case=f"{rows} rows, {TOKENS} tokens each",
        model=bench.model,
        value=cores,
        limit=Limit(sign="≤", bound=0.3),
        summary=f"at {rate:.0f} tok/s",
        detail={"rounds": rounds},
    )


# --- typed columns


def _typed(bench: Bench, client: Worker, engine: str) -> Row:
    """Return how many sampled answers do not fit the schema. Random weights sample any text that it allows."""
    rows = TYPED_ROWS // 10 if bench.quick else TYPED_ROWS
    parameters = {"temperature": 1.0, "seed": 1, "max_tokens": TYPED_TOKENS}
    found = client.ask(texts=[f"Row {number}" for number in range(rows)], schema=TYPED, parameters=parameters)
    return Row(
        figure=INVALID,
        case=f"{rows} rows, temperature 1, {engine}",
        model=bench.model,
        value=float(found["errors"]),
        limit=Limit(sign="≤", bound=0),
        summary=found["first_error"],
        detail=found,
    )


# --- common beginnings


def _beginnings(bench: Bench, client: Worker, engine: str) -> Row:
    """Compare rows with a common beginning to rows with different beginnings, which no cache contains."""
    common, own = (COMMON_ROWS // 4, OWN_ROWS // 4) if bench.quick else (COMMON_ROWS, OWN_ROWS)
    beginning = prompts.words(1, BEGINNING_TOKENS)
    ends = [prompts.words(1000 + number, 8) for number in range(common)]
    first = _map(
        client,
        [f"{prompts.words(5000 + number, BEGINNING_TOKENS)} {ends[number]}" for number in range(own)],
        ANSWER_TOKENS,
    )
    second = _map(client, [f"{beginning} {end}" for end in ends], ANSWER_TOKENS)
    rates = common / second["seconds"], own / first["seconds"]
    return Row(
        figure=BEGINNING,
        case=f"{common} rows, {BEGINNING_TOKENS} tokens in common, answers of {ANSWER_TOKENS}, {engine}",
        model=bench.model,
        value=rates[0] / rates[1],
        limit=Limit(sign="≥", bound=3),
        binding=not bench.quick,
        summary=f"{rates[0]:.2f} against {rates[1]:.2f} rows/s",
        detail={"common": second, "own": first},
    )
