"""Child process: replies to each line with the speed of a product by MLX and by numpy."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import mlx.core as mx
import numpy as np

from benchmarks.processes import Reply, child_settings, serve_lines, take_channel
from lmx_lab.engine.cpu_blas import configure_blas

SIZE = 1024
FLOP = 2 * SIZE**3
PAUSE_S = 0.5
REPEATS = 5


def main() -> None:
    channel = take_channel()
    report = configure_blas(child_settings()["blas"])
    random = np.random.default_rng(0)
    left, right = (random.standard_normal((SIZE, SIZE), dtype=np.float32) for _ in range(2))
    mlx_left, mlx_right = mx.array(left), mx.array(right)

    def by_mlx() -> None:
        mx.eval(mlx_left @ mlx_right)

    def by_numpy() -> None:
        np.matmul(left, right)

    def run(_: Reply) -> Reply:
        return {"mlx_gflops": _gflops(by_mlx), "numpy_gflops": _gflops(by_numpy)}

    run({})
    serve_lines(channel, dataclasses.asdict(report), run)


def _gflops(product: Callable[[], None]) -> float:
    """Speed of the fastest of several products. The pause lets numpy's threads, which spin for a while, fall asleep."""
    time.sleep(PAUSE_S)
    taken = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        product()
        taken.append(time.perf_counter() - started)
    return FLOP / min(taken) / 1e9


if __name__ == "__main__":
    main()
