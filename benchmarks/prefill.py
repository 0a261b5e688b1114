"""Measure the prefill of a prompt of 156 tokens: MLX with OpenBLAS against MLX as installed."""

from __future__ import annotations

import asyncio
from statistics import median

from benchmarks import client, prompts
from benchmarks.bench import Bench, BenchError
from benchmarks.rows import Limit, Row
from benchmarks.servers import lab_server

FIGURE = "prefill of 156 tokens ÷ stock MLX"
TOKENS = 156


def measure(bench: Bench) -> list[Row]:
    """Measure two servers that differ only in the BLAS. Both dequantize the weights to float32."""
    with lab_server(bench.folder) as ours, lab_server(bench.folder, blas="off") as stock:
        samples = [
            {"ours": _rate(ours.url, number), "stock": _rate(stock.url, number)} for number in range(bench.sizes.rounds)
        ]
    ours_rate, stock_rate = (median(sample[side] for sample in samples) for side in ("ours", "stock"))
    row = Row(
        figure=FIGURE,
        case="1 prompt",
        model=bench.model,
        value=median(sample["ours"] / sample["stock"] for sample in samples),
        limit=Limit(sign="≥", bound=12),
        binding=bench.promised,
        summary=f"{ours_rate:.0f} against {stock_rate:.1f} tok/s",
        detail={"samples": samples},
    )
    return [row]


def _rate(url: str, number: int) -> float:
    body = prompts.chat_body(prompts.history(7000 + number, TOKENS), max_tokens=1) | {"stream": False}
    body.pop("stream_options")
    answer = asyncio.run(client.whole(url, body))
    if abs(answer["usage"]["prompt_tokens"] - TOKENS) > 20:
        raise BenchError(f"the prompt has {answer['usage']['prompt_tokens']} tokens")
    return float(answer["timings"]["prompt_per_second"])
