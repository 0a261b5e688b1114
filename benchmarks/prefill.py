"""Measure prefill on MLX: 156 tokens with OpenBLAS against MLX as installed, and 1,400 tokens against the CPU time of
their matrix products alone.
"""

from __future__ import annotations

import asyncio
from statistics import median

from benchmarks import client, prompts
from benchmarks.bench import Bench, BenchError
from benchmarks.processes import Worker, folder_argument
from benchmarks.report import Limit, Row
from benchmarks.servers import lab_server

FIGURE = "prefill of 156 tokens ÷ stock MLX"
PRODUCTS_FIGURE = "prefill of 1,400 tokens: matrix products ÷ all"
TOKENS = 156
LONG_TOKENS = 1400
CHUNK_TOKENS = 128
"""The engine chooses the size of its chunks by their duration; this is a usual one."""


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
    return [row, _against_products(bench)]


def _against_products(bench: Bench) -> Row:
    """Compare the CPU time of a prefill on one thread with that of its matrix products, in a process of their own."""
    model = folder_argument(bench.folder)
    samples = []
    with (
        lab_server(bench.folder, threads=1) as ours,
        Worker("benchmarks.products_process", model=model) as products,
    ):
        for number in range(bench.sizes.history_rounds):
            before_s = ours.cpu_s()
            _rate(ours.url, number, LONG_TOKENS)
            all_s = ours.cpu_s() - before_s
            product_s = products.ask(tokens=LONG_TOKENS, chunk=CHUNK_TOKENS)["seconds"]
            samples.append({"products_s": product_s, "all_s": all_s})
    product_s, all_s = (median(sample[side] for sample in samples) for side in ("products_s", "all_s"))
    return Row(
        figure=PRODUCTS_FIGURE,
        case="1 prompt",
        model=bench.model,
        value=median(sample["products_s"] / sample["all_s"] for sample in samples),
        summary=f"{product_s:.2f} of {all_s:.2f} s of CPU time on one thread",
        detail={"samples": samples, "chunk": CHUNK_TOKENS},
    )


def _rate(url: str, number: int, tokens: int = TOKENS) -> float:
    body = prompts.chat_body(prompts.history(7000 + number, tokens), max_tokens=1) | {"stream": False}
    body.pop("stream_options")
    answer = asyncio.run(client.whole(url, body))
    if abs(answer["usage"]["prompt_tokens"] - tokens) > tokens / 8:
        raise BenchError(f"the prompt has {answer['usage']['prompt_tokens']} tokens")
    return float(answer["timings"]["prompt_per_second"])
