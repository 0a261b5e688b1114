"""Write a quantized copy of a GGUF file, and measure it: ``python -m lmx_lab.engine.llama_cpp.quantize_worker``.

It runs in a separate process, because a damaged file can crash native code, and so can a mistake in the functions of
ggml and llama.cpp that xllamacpp contains but does not export to Python. They are called through ``ctypes``. Standard
input is a JSON object: ``source``, ``target``, ``type``, ``threads`` and ``parent``, the id of the process with which
this one ends. Each line of standard output is a JSON object with ``stage``, ``done_bytes`` and ``total_bytes``; the
last one has ``copy``, the fields of ``QuantizedCopy``, or ``error`` and ``full``, which is true if the disk was full.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import math
import os
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes import POINTER, c_bool, c_char_p, c_float, c_int, c_int8, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from lmx_lab.engine.llama_cpp.quantized_types import type_after
from lmx_lab.errors import UnusableModelError
from lmx_lab.values.models import QuantizedCopy, QuantizedType
from lmx_lab.weights.gguf.header import FILE_TYPES, TENSOR_TYPES, GgufHeader, GgufTensor, read_header
from lmx_lab.weights.store import FULL

TYPE_NUMBERS = {name: number for number, (name, _, _) in TENSOR_TYPES.items()}
BLOCKS = {name: (weights, size) for name, weights, size in TENSOR_TYPES.values()}
"""Weights and bytes of a block, by type."""
WITH_FLOATS = {"F16": "ggml_fp16_to_fp32_row", "BF16": "ggml_bf16_to_fp32_row"}
MAX_TEXT_TOKENS = 4096

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
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


class _Params(ctypes.Structure):
    """Parameters of a model or a context, with llama.cpp's defaults.

    No field is used. The structure is larger than llama.cpp's, which is the last argument and may have any size.
    """

    _fields_ = (("content", c_uint64 * 128),)


class _Batch(ctypes.Structure):
    """``llama_batch``. The last field reserves space for fields of newer versions."""

    _fields_ = (
        ("n_tokens", c_int32),
        ("token", POINTER(c_int32)),
        ("embd", c_void_p),
        ("pos", POINTER(c_int32)),
        ("n_seq_id", POINTER(c_int32)),
        ("seq_id", POINTER(POINTER(c_int32))),
        ("logits", POINTER(c_int8)),
        ("reserved", c_uint64 * 16),
    )


_ignore_log = ctypes.CFUNCTYPE(None, c_int, c_char_p, c_void_p)(lambda _level, _text, _data: None)
"""A log callback of llama.cpp that does nothing."""


class Ggml:
    """The native library of xllamacpp.

    Raises:
        UnusableModelError: the library, or one of its functions, does not exist in this version.
    """

    def __init__(self) -> None:
        package = importlib.util.find_spec("xllamacpp")
        assert package is not None
        assert package.origin is not None
        try:
            self._library = ctypes.CDLL(str(Path(package.origin).with_name("xllamacpp.abi3.so")))
        except OSError as exc:
            raise UnusableModelError(f"the library of xllamacpp cannot be opened: {exc}; install it again") from exc

    def function(self, name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
        """Return a function of the library."""
        try:
            found = getattr(self._library, name)
        except AttributeError as exc:
            raise UnusableModelError(
                f"the installed xllamacpp has no function {name}; install a newer one: pip install -U xllamacpp"
            ) from exc
        found.restype, found.argtypes = result, arguments
        return found  # type: ignore[no-any-return]

    def dequantize(self, type_name: str, data: Bytes) -> Floats:
        """Return the weights of whole blocks of a type."""
        if type_name == "F32":
            return data.view(np.float32)
        weights, size = BLOCKS[type_name]
        count = len(data) // size * weights
        name = WITH_FLOATS.get(type_name, f"dequantize_row_{type_name.lower().replace('_k', '_K')}")
        out = np.empty(count, np.float32)
        self.function(name, None, c_void_p, c_void_p, c_int64)(data.ctypes.data, out.ctypes.data, count)
        return out

    def quantize(self, type_name: str, values: Floats, row: int) -> Bytes:
        """Return values in a type of blocks.

        Args:
            row: Number of values in a row, a multiple of the block.
        """
        weights, size = BLOCKS[type_name]
        out = np.empty(len(values) // weights * size, np.uint8)
        call = self.function(
            "ggml_quantize_chunk", c_size_t, c_int, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p
        )
        values = np.ascontiguousarray(values)
        written = call(TYPE_NUMBERS[type_name], values.ctypes.data, out.ctypes.data, 0, len(values) // row, row, None)
        if written != out.nbytes:
            raise UnusableModelError(f"llama.cpp wrote {written} bytes of {type_name} instead of {out.nbytes}")
        return out


class Model:
    """A model in this process with a context of 512 tokens, which is never closed: the process ends soon."""

    def __init__(self, ggml: Ggml, path: Path, threads: int) -> None:
        self._ggml = ggml
        ggml.function("llama_log_set", None, c_void_p, c_void_p)(ctypes.cast(_ignore_log, c_void_p), None)
        defaults = ggml.function("llama_model_default_params", _Params)()
        load = ggml.function("llama_model_load_from_file", c_void_p, c_char_p, _Params)
        self._model = load(str(path).encode(), defaults)
        if not self._model:
            raise UnusableModelError(f"{path} cannot be loaded by llama.cpp; fetch it again, or use another model")
        self._vocabulary = ggml.function("llama_model_get_vocab", c_void_p, c_void_p)(self._model)
        self.vocabulary_size = ggml.function("llama_vocab_n_tokens", c_int32, c_void_p)(self._vocabulary)
        params = ggml.function("llama_context_default_params", _Params)()
        self._context = ggml.function("llama_init_from_model", c_void_p, c_void_p, _Params)(self._model, params)
        if not self._context:
            raise UnusableModelError(f"llama.cpp cannot create a context for {path}; use another model")
        self.set_threads(threads)
        self._batch = ggml.function("llama_batch_init", _Batch, c_int32, c_int32, c_int32)(512, 0, 1)
        self._decode = ggml.function("llama_decode", c_int32, c_void_p, _Batch)
        self._synchronize = ggml.function("llama_synchronize", None, c_void_p)
        self._logits = ggml.function("llama_get_logits_ith", POINTER(c_float), c_void_p, c_int32)

    def set_threads(self, count: int) -> None:
        """Compute with this number of threads."""
        self._ggml.function("llama_set_n_threads", None, c_void_p, c_int32, c_int32)(self._context, count, count)

    def tokenize(self, text: str) -> list[int]:
        """Return the first ``MAX_TEXT_TOKENS`` token ids of a text, with special tokens at its ends."""
        call = self._ggml.function(
            "llama_tokenize", c_int32, c_void_p, c_char_p, c_int32, POINTER(c_int32), c_int32, c_bool, c_bool
        )
        ids = (c_int32 * MAX_TEXT_TOKENS)()
        data = text.encode()
        count = call(self._vocabulary, data, len(data), ids, MAX_TEXT_TOKENS, True, False)
        return list(ids[: max(0, count)])

    def clear(self) -> None:
        """Forget all tokens."""
        memory = self._ggml.function("llama_get_memory", c_void_p, c_void_p)(self._context)
        self._ggml.function("llama_memory_clear", None, c_void_p, c_bool)(memory, True)

    def compute(self, tokens: Sequence[int], position: int, *, outputs: bool) -> None:
        """Compute tokens from a position on.

        Args:
            outputs: Whether ``logits`` are needed for each token, and not only for the last one.
        """
        batch = self._batch
        batch.n_tokens = len(tokens)
        for index, token in enumerate(tokens):
            batch.token[index], batch.pos[index] = token, position + index
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, 0
            batch.logits[index] = int(outputs or index == len(tokens) - 1)
        if (status := self._decode(self._context, batch)) != 0:
            raise UnusableModelError(f"llama.cpp cannot compute {len(tokens)} tokens: status {status}")
        self._synchronize(self._context)

    def logits(self, index: int) -> Floats:
        """Return the logits of a token of the last ``compute``. They are overwritten by the next one."""
        return np.ctypeslib.as_array(self._logits(self._context, index), (self.vocabulary_size,))


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
    for position, expected, found in _distributions(original, copy, tokens):
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


def _distributions(original: Model, copy: Model, tokens: list[int]) -> Iterator[tuple[int, Doubles, Doubles]]:
    """Yield each position with the logarithms of the next token's probabilities by both models."""
    for start in range(0, len(tokens), CHUNK_TOKENS):
        chunk = tokens[start : start + CHUNK_TOKENS]
        for model in (original, copy):
            model.compute(chunk, start, outputs=True)
        for index in range(len(chunk)):
            yield start + index, _log_softmax(original.logits(index)), _log_softmax(copy.logits(index))


def _log_softmax(logits: Floats) -> Doubles:
    shifted = logits.astype(np.float64)
    shifted -= shifted.max()
    shifted -= math.log(float(np.exp(shifted).sum()))
    return shifted


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
                model.clear()
                started = time.process_time()
                model.compute(range(1, count + 1), 0, outputs=count <= 8)
                found.append(time.process_time() - started)
        ratios.append(min(times[original]) / max(min(times[copy]), 1e-9))
    return ratios


# The process


def main() -> None:
    """Write and measure the copy that standard input describes."""
    parameters = json.load(sys.stdin)
    threading.Thread(target=_exit_with_parent, args=(parameters["parent"],), daemon=True).start()
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


def _exit_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _report(stage: str, done: int, total: int) -> None:
    _print({"stage": stage, "done_bytes": done, "total_bytes": total})


def _print(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
