"""Measure the prefix cache on disk: the first token after a restart, and the cost of writing the files."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from benchmarks import client, prompts
from benchmarks.bench import Bench, BenchError
from benchmarks.models import gguf_starter
from benchmarks.rates import overall_rate
from benchmarks.report import Limit, Row
from benchmarks.second_turn import facts_of
from benchmarks.servers import LabServer, lab_server

FIGURE = "first token after a restart ÷ first time"
WRITING = "8 streams, prefix cache on disk ÷ in memory"
ANSWER_TOKENS = 16
STREAMS = 8
WRITE_S = 60.0


def measure(bench: Bench) -> list[Row]:
    models = {"MLX": bench.folder}
    if bench.promised:
        models["llama.cpp"] = gguf_starter().path
    return [
        row for engine, model in models.items() for row in (_restart(bench, engine, model), _cost(bench, engine, model))
    ]


@contextmanager
def _folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="lmx-lab-bench-") as folder:
        yield folder


def _restart(bench: Bench, engine: str, model: Path) -> Row:
    samples = []
    for number in range(bench.sizes.history_rounds):
        body = prompts.chat_body(prompts.history(9500 + number, bench.sizes.history_tokens), max_tokens=ANSWER_TOKENS)
        with _folder() as folder:
            with lab_server(model, prefix_cache_dir=folder) as ours:
                first = asyncio.run(_answer(ours, body, Path(folder)))
                # llama.cpp may round differently when it computes the whole prompt.
                cached = asyncio.run(client.stream(ours.url, body))
            with lab_server(model, prefix_cache_dir=folder) as ours:
                second = asyncio.run(_answer(ours, body, Path(folder)))
        if cached.text != second.text:
            raise BenchError("the answer after the restart differs from the one with the prefix cache in memory")
        samples.append({"first": facts_of(first), "after": facts_of(second)})
    before, after = (median(sample[turn]["ttft_s"] for sample in samples) for turn in ("first", "after"))
    history = samples[0]["first"]["prompt_tokens"]
    return Row(
        figure=FIGURE,
        case=f"{engine}, {history} tokens",
        model=bench.model,
        value=median(sample["after"]["ttft_s"] / sample["first"]["ttft_s"] for sample in samples),
        limit=Limit(sign="≤", bound=0.15),
        # The limit applies only to a long history.
        binding=bench.promised and history >= 1300,
        summary=f"{after * 1e3:.0f} against {before * 1e3:.0f} ms, {samples[0]['after']['cached_tokens']} cached",
        detail={"samples": samples},
    )


async def _answer(ours: LabServer, body: dict[str, object], folder: Path) -> client.Answer:
    answer = await client.stream(ours.url, body)
    tokens = answer.usage["prompt_tokens"]
    await ours.until(lambda _: _is_written(folder, tokens), limit_s=WRITE_S, what="the state is written")
    return answer


def _is_written(folder: Path, tokens: int) -> bool:
    """Return whether the state of at least this many tokens is on disk."""
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        if header["tokens"]["shape"][0] >= tokens:
            return True
    return False


def _cost(bench: Bench, engine: str, model: Path) -> Row:
    """Compare the speed of eight streams whose states are written to disk when they end with that without a disk."""
    rates: dict[str, list[float]] = {"disk": [], "memory": []}
    with _folder() as folder, lab_server(model, prefix_cache_dir=folder) as disk, lab_server(model) as memory:
        servers = {"disk": disk, "memory": memory}
        for number in range(max(3, bench.sizes.rounds)):
            for side in sorted(servers, reverse=bool(number % 2)):
                rates[side].append(asyncio.run(_rate(bench, servers[side], number)))
        written = int(disk.snapshot()["prefix_disk_written_bytes"])
    ratios = [a / b for a, b in zip(rates["disk"], rates["memory"], strict=True)]
    return Row(
        figure=WRITING,
        case=engine,
        model=bench.model,
        value=median(ratios),
        limit=Limit(sign="≥", bound=0.95),
        binding=bench.promised,
        summary=f"{median(rates['disk']):.0f} against {median(rates['memory']):.0f} tok/s, {written / 1e6:.0f} MB",
        detail={"rates": rates},
    )


async def _rate(bench: Bench, server: LabServer, number: int) -> float:
    """Return the tokens per second of two answers of each stream, so that states are written while others decode."""
    tokens = bench.sizes.together_tokens

    async def answers(stream: int) -> list[client.Answer]:
        found = []
        for turn in range(2):
            # Streams end at different times.
            length = tokens // 2 + tokens // 2 * ((stream + turn) % STREAMS) // STREAMS
            messages = prompts.story(9700 + 100 * number + 10 * stream + turn)
            body = prompts.chat_body(messages, max_tokens=length) | server.extras
            found.append(await client.stream(server.url, body))
        return found

    all_answers = await asyncio.gather(*map(answers, range(STREAMS)))
    return overall_rate([answer for each in all_answers for answer in each])
