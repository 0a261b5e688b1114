"""Write a quantized copy of a GGUF file, and measure it: ``python -m lmx_lab.engine.llama_cpp.quantize_worker``.

It runs in a separate process, because a damaged file can crash native code. Standard input is a JSON object:
``source``, ``target``, ``type``, ``threads`` and ``parent``, the id of the process with which this one ends. Each line
of standard output is a JSON object with ``stage``, ``done_bytes`` and ``total_bytes``; the last one has ``copy``, the
fields of ``QuantizedCopy``, or ``error`` and ``full``, which is true if the disk was full.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from lmx_lab.engine.llama_cpp.native import BLOCKS, TYPE_NUMBERS, Bytes, Ggml, Model
from lmx_lab.engine.sandbox_worker import exit_with_parent
from lmx_lab.errors import UnusableModelError
from lmx_lab.values.models import QuantizedCopy, QuantizedType
from lmx_lab.weights.gguf.header import FILE_TYPES, GgufHeader, GgufTensor, read_header
from lmx_lab.weights.store import FULL

BYTES = {name: size / weights for name, (weights, size) in BLOCKS.items()}
"""Bytes of a weight, by type."""
BLOCK = 32
"""Weights in a block of each ``QuantizedType``."""
SOURCES = frozenset({
    "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL",
    "IQ4_XS", "IQ3_S", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ3_XXS", "IQ1_S", "IQ1_M", "TQ1_0", "TQ2_0", "MXFP4",
})  # fmt: skip
"""Types that ggml can expand to float32."""
MATRIX = re.compile(r"blk\.\d+\.(attn_(q|k|v|qkv|output)|ffn_(gate|up|down)(_exps|_shexp)?)\.weight")
"""Matrices of layers. All others are few or small, and some must not be quantized."""
VOCABULARY = ("token_embd.weight", "output.weight")
"""Embedding and output, which lose most. They become Q8_0, or keep a type that is smaller."""
VOCABULARY_TYPE: QuantizedType = "Q8_0"
TEXT = Path(__file__).with_name("loss_text.txt")
MAX_TOKENS = 480
"""Tokens of the text that are used. The context has 512."""
CHUNK_TOKENS = 32
SLICE_WEIGHTS = 2**20
"""Number of weights that a thread converts at a time: 4 MB as float32."""
FILE_TYPE_KEY = struct.pack("<Q", 17) + b"general.file_type" + struct.pack("<I", 4)
PASSES = {128: 2, 8: 5, 1: 8}
"""Number of tokens of a timed pass, and how often it is repeated. The fastest time counts."""

Doubles = npt.NDArray[np.float64]


def type_after(tensor: GgufTensor, type_name: QuantizedType) -> str:
    """Return the type of a tensor in the copy: its own, if it is not converted."""
    if tensor.type not in SOURCES or len(tensor.shape) < 2 or tensor.shape[0] % BLOCK:
        return tensor.type
    if tensor.name in VOCABULARY:
        return VOCABULARY_TYPE if BYTES[tensor.type] > BYTES[VOCABULARY_TYPE] else tensor.type
    return type_name if MATRIX.fullmatch(tensor.name) else tensor.type


# The copy


def write_copy(header: GgufHeader, target: Path, type_name: QuantizedType, ggml: Ggml, threads: int) -> None:
    """Write the file again with other types of weights. Metadata and the order of tensors are kept."""
    types = [type_after(tensor, type_name) for tensor in header.tensors]
    alignment = header.integer("general.alignment") or 32
    sizes = []
    for tensor, new in zip(header.tensors, types, strict=True):
        weights, block_bytes = BLOCKS[new]
        sizes.append(math.prod(tensor.shape) // weights * block_bytes)
    with header.path.open("rb") as source, target.open("xb") as out:
        # Magic, version, counts and metadata, with the new type of the file, if the file states one.
        number = next(number for number, name in FILE_TYPES.items() if name == type_name)
        head, key, rest = source.read(header.table_offset).partition(FILE_TYPE_KEY)
        out.write(head + key + struct.pack("<I", number) + rest[4:] if key else head)
        offset = 0
        for tensor, new, size in zip(header.tensors, types, sizes, strict=True):
            name, count = tensor.name.encode(), len(tensor.shape)
            shape = struct.pack(f"<I{count}Q", count, *tensor.shape)
            place = struct.pack("<IQ", TYPE_NUMBERS[new], offset)
            out.write(struct.pack("<Q", len(name)) + name + shape + place)
            offset += _padded(size, alignment)
        out.write(bytes(_padded(out.tell(), alignment) - out.tell()))
        with ThreadPoolExecutor(threads) as pool:
            done = 0
            for tensor, new, size in zip(header.tensors, types, sizes, strict=True):
                for piece in _pieces(header, tensor, new, ggml, pool):
                    out.write(piece.data)
                out.write(bytes(_padded(size, alignment) - size))
                done += tensor.size_bytes
                _report("convert", done, header.size_bytes)


def _pieces(header: GgufHeader, tensor: GgufTensor, new: str, ggml: Ggml, pool: ThreadPoolExecutor) -> Iterator[Bytes]:
    """Return the data of a tensor in its new type, in pieces."""
    start = header.data_offset + tensor.offset
    row = tensor.shape[0]
    row_bytes = tensor.size_bytes // math.prod(tensor.shape[1:])
    step = max(1, SLICE_WEIGHTS // row) * row_bytes
    data = np.memmap(header.path, np.uint8, "r", start, (tensor.size_bytes,))

    def converted(begin: int) -> Bytes:
        piece: Bytes = np.array(data[begin : begin + step])
        return piece if new == tensor.type else ggml.quantize(new, ggml.dequantize(tensor.type, piece), row)

    return pool.map(converted, range(0, tensor.size_bytes, step))


def _padded(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


# The measurement


def measure(header: GgufHeader, target: Path, type_name: QuantizedType, ggml: Ggml, threads: int) -> QuantizedCopy:
    """Compare the copy with the original: its loss on the text, and its speed.

    Raises:
        UnusableModelError: llama.cpp cannot compute one of them, or the result is not finite.
    """
    original, copy = (Model(ggml, path, threads) for path in (header.path, target))
    tokens = original.tokenize(TEXT.read_text(encoding="utf-8"))[:MAX_TOKENS]
    if len(tokens) < 2:
        raise UnusableModelError(f"{header.path} has no tokens for the text on which the loss is measured")
    divergences: list[float] = []
    losses: dict[Model, list[float]] = {original: [], copy: []}
    for position in range(len(tokens)):
        if position % CHUNK_TOKENS == 0:
            for model in (original, copy):
                model.compute(tokens[position : position + CHUNK_TOKENS], position, outputs=True)
        logarithms: list[Doubles] = []
        for model in (original, copy):
            # Log-probabilities of the next token.
            values = model.logits(position % CHUNK_TOKENS).astype(np.float64)
            values -= values.max()
            values -= math.log(float(np.exp(values).sum()))
            logarithms.append(values)
        expected, found = logarithms
        _report("verify", header.size_bytes * (position + 1) // len(tokens), header.size_bytes)
        divergences.append(float(np.sum(np.exp(expected) * (expected - found))))
        if position + 1 < len(tokens):
            losses[original].append(-float(expected[tokens[position + 1]]))
            losses[copy].append(-float(found[tokens[position + 1]]))
    mean_kl, before, after = float(np.mean(divergences)), *(float(np.mean(losses[it])) for it in (original, copy))
    if not all(map(math.isfinite, (mean_kl, before, after))):
        raise UnusableModelError(f"{header.path} computes values that are not finite as {type_name}; keep the original")
    prefill, batch, decode = _speeds(original, copy)
    return QuantizedCopy(
        type=type_name,
        original=header.quantization or "unknown",
        tokens=len(tokens),
        mean_kl=max(0.0, mean_kl),
        perplexity=math.exp(min(after, 700.0)),
        original_perplexity=math.exp(min(before, 700.0)),
        prefill_speed=prefill,
        batch_speed=batch,
        decode_speed=decode,
    )


def _speeds(original: Model, copy: Model) -> list[float]:
    """Return the copy's speed as a multiple of the original's, for each number of tokens in ``PASSES``.

    CPU time on one thread is hardly affected by other programs.
    """
    for model in (original, copy):
        model.set_threads(1)
    ratios = []
    for count, repetitions in PASSES.items():
        times: dict[Model, list[float]] = {original: [], copy: []}
        for _ in range(repetitions):
            for model, found in times.items():
                model.forget(0)
                started = time.process_time()
                model.compute(range(1, count + 1), 0, outputs=count <= 8)
                found.append(time.process_time() - started)
        ratios.append(min(times[original]) / max(min(times[copy]), 1e-9))
    return ratios


# The process


def main() -> None:
    """Write and measure the copy that standard input describes."""
    parameters = json.load(sys.stdin)
    threading.Thread(target=exit_with_parent, args=(parameters["parent"],), daemon=True).start()
    type_name, target, threads = parameters["type"], Path(parameters["target"]), int(parameters["threads"])
    assert type_name in get_args(QuantizedType)
    try:
        header, ggml = read_header(Path(parameters["source"])), Ggml()
        write_copy(header, target, type_name, ggml, threads)
        copy = measure(header, target, type_name, ggml, threads)
    except UnusableModelError as exc:
        _print({"error": exc.message, "full": False})
    except OSError as exc:
        _print({"error": f"the copy cannot be written: {exc}", "full": exc.errno in FULL})
    else:
        _print({"copy": asdict(copy)})
    # Models are not closed; the end of the process frees them.
    os._exit(0)


def _report(stage: str, done: int, total: int) -> None:
    _print({"stage": stage, "done_bytes": done, "total_bytes": total})


def _print(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
