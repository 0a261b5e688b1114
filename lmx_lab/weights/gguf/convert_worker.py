"""Convert a llama GGUF file to a model folder for MLX: ``python -m lmx_lab.weights.gguf.convert_worker SOURCE FOLDER``.

It runs in a separate process, because in the server only the engine thread may use MLX, and because a malicious file
can only crash this process. The last line of standard output is ``{"ok": true}`` or
``{"error": "...", "full": false}``; ``full`` is true if the disk was full.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, cast

import mlx.core as mx

from lmx_lab.errors import UnusableModelError
from lmx_lab.weights.gguf.convert import (
    GROUP_SIZE,
    QUANTIZED_BITS,
    ROPE_FACTORS,
    head_dim,
    llama3_scaling,
    mlx_config,
    mlx_name,
    refuse_unsupported,
)
from lmx_lab.weights.gguf.header import read_header
from lmx_lab.weights.gguf.tokenizer import build_tokenizer, eos_ids, read_vocabulary, tokenizer_config
from lmx_lab.weights.store import FULL


def convert(source: Path, folder: Path) -> None:
    """Write ``config.json``, ``model.safetensors`` and the tokenizer's files into an existing folder.

    The bits of all tensors are kept. Norms stay in float32, which makes MLX compute in float32; in float16, its CPU
    kernels give wrong answers for small models. MLX must not be in use elsewhere in this process.

    Raises:
        UnusableModelError: the file is damaged, or cannot be converted without quantizing it again.
        OSError: the folder cannot be written.
    """
    header = read_header(source, arrays=True)
    refuse_unsupported(header)
    vocabulary = read_vocabulary(header)
    tokenizer = build_tokenizer(vocabulary, header.text("tokenizer.ggml.model"))
    try:
        arrays = mx.load(str(source), format="gguf")
    except (RuntimeError, ValueError) as exc:
        raise UnusableModelError(f"{source} cannot be read by MLX: {exc}") from exc
    if not isinstance(arrays, dict):
        raise UnusableModelError(f"{source} was read by MLX as {type(arrays).__name__} instead of named tensors")
    scaling = None
    if (factors := arrays.pop(ROPE_FACTORS, None)) is not None:
        theta = header.number("llama.rope.freq_base") or 10_000.0
        scaling = llama3_scaling(cast("list[float]", factors.tolist()), head_dim(header), theta)
        if scaling is None:
            raise UnusableModelError(f"{source} scales positions in a way that cannot be converted ({ROPE_FACTORS})")
    weights: dict[str, mx.array] = {}
    for tensor in header.tensors:
        if tensor.name == ROPE_FACTORS:
            continue
        # A quantized tensor consists of weight, scales and biases.
        name, bits, shape = str(mlx_name(tensor.name)), QUANTIZED_BITS.get(tensor.type), tuple(reversed(tensor.shape))
        stored = shape if bits is None else (*shape[:-1], shape[-1] * bits // 32)
        weights[name] = _expect(arrays, tensor.name, stored)
        if bits is not None:
            groups = (*shape[:-1], shape[-1] // GROUP_SIZE)
            for part in ("scales", "biases"):
                found = _expect(arrays, f"{tensor.name.removesuffix('weight')}{part}", groups)
                weights[f"{name.removesuffix('weight')}{part}"] = found
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", tokenizer_config(vocabulary, header.context_length))
    _write_json(folder / "config.json", mlx_config(header, eos_ids(vocabulary), scaling))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})


def _expect(arrays: dict[str, mx.array], name: str, shape: tuple[int, ...]) -> mx.array:
    array = arrays.get(name)
    if array is None or array.shape != shape:
        found = array.shape if array is not None else "nothing"
        raise UnusableModelError(f"the tensor {name!r:.80} was read by MLX as {found} instead of {shape}")
    return array


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main(source: str, folder: str) -> int:
    """Run ``convert`` and print the result as one line of JSON."""
    answer: dict[str, object] = {"ok": True}
    try:
        convert(Path(source), Path(folder))
    except UnusableModelError as exc:
        answer = {"error": exc.message, "full": False}
    # The process ends after any exception, and the caller reads the reason from its output.
    except Exception as exc:
        # MLX and tokenizers raise generic errors with a message about a full disk.
        is_full = (isinstance(exc, OSError) and exc.errno in FULL) or any(
            phrase in str(exc) for phrase in ("[write] Unable", "No space left", "quota exceeded")
        )
        answer = {"error": f"{source} cannot be converted: {exc!r}", "full": is_full}
    finally:
        mx.synchronize()
        # Streams belong to a thread; if they outlive it, the process aborts at exit.
        mx.clear_streams()
    print(json.dumps(answer))
    return 0 if "ok" in answer else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
