"""Measure a 1024³ float32 matrix product of MLX against numpy's, in the same process."""

from __future__ import annotations

from statistics import median

from benchmarks.bench import Bench
from benchmarks.processes import Worker
from benchmarks.report import Limit, Row

FIGURE = "MLX 1024³ product ÷ numpy's"
ROUNDS = 9


def measure(bench: Bench) -> list[Row]:
    with (
        Worker("benchmarks.product_process", blas="auto") as fast,
        Worker("benchmarks.product_process", blas="off") as slow,
    ):
        samples = [fast.ask() for _ in range(ROUNDS)]
        stock = slow.ask()
        detail = {"samples": samples, "stock": stock, "blas": fast.ready, "stock_blas": slow.ready}
    ours, numpys = (median(sample[side] for sample in samples) for side in ("mlx_gflops", "numpy_gflops"))
    row = Row(
        figure=FIGURE,
        case=fast.ready["detail"],
        model="-",
        value=median(sample["mlx_gflops"] / sample["numpy_gflops"] for sample in samples),
        limit=Limit(sign="≥", bound=0.9),
        summary=f"{ours:.0f} against {numpys:.0f} GFLOP/s; stock MLX {stock['mlx_gflops']:.1f}",
        detail=detail,
    )
    return [row]
