"""Child process: only the matrix products of a prefill in MLX. Replies to a line with the CPU time of one thread."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx

from benchmarks.processes import Reply, child_settings, serve_lines, take_channel
from lmx_lab.engine.cpu_blas import configure_blas

Product = tuple[mx.array, mx.array]


def main() -> None:
    channel = take_channel()
    configure_blas(threads=1)
    config = json.loads((Path(child_settings()["model"]) / "config.json").read_text())
    weights = _weights(config)
    mx.eval(weights)

    def run(question: Reply) -> Reply:
        return {"seconds": _seconds(config, weights, question["tokens"], question["chunk"])}

    run({"tokens": 256, "chunk": 128})
    serve_lines(channel, {}, run)


def _weights(config: Reply) -> list[mx.array]:
    """Return the matrices of a layer, stored as in the engine."""
    size, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    pairs = size // heads * config["num_key_value_heads"]
    shapes = [(size, size), (pairs, size), (pairs, size), (size, size), (inner, size), (inner, size), (size, inner)]
    return [mx.random.normal(shape) for shape in shapes]


def _seconds(config: Reply, weights: list[mx.array], tokens: int, chunk: int) -> float:
    """Compute the products of all layers for a prompt in chunks; return their CPU time."""
    seconds = 0.0
    for start in range(0, tokens, chunk):
        rows = min(chunk, tokens - start)
        products = list(_products(config, weights, rows, start + rows))
        mx.eval(products)
        for _ in range(config["num_hidden_layers"]):
            started = time.process_time()
            mx.eval([left @ right for left, right in products])
            seconds += time.process_time() - started
    return seconds


def _products(config: Reply, weights: list[mx.array], rows: int, length: int) -> Iterator[Product]:
    """Yield the operands of a layer: the weights, and the attention of ``rows`` tokens to ``length`` tokens."""
    for weight in weights:
        yield mx.random.normal((rows, weight.shape[1])), weight.T
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    head_size = config["hidden_size"] // heads
    keys = mx.random.normal((groups, length, head_size))
    queries = mx.random.normal((groups, heads // groups * rows, head_size))
    yield queries, keys.swapaxes(-1, -2)
    yield mx.random.normal((groups, heads // groups * rows, length)), keys


if __name__ == "__main__":
    main()
