"""Convert a llama-family GGUF file into an MLX folder: ``python -m lmx_lab.weights.gguf.convert_worker SOURCE FOLDER``.

A process of its own: MLX lives on the engine thread of the server and nowhere else, and a hostile file can at worst
end this process. The last line of standard output is ``{"ok": true}`` or ``{"error": "...", "full": false}``, where
``full`` says that the disk was.
"""

from __future__ import annotations

import errno
import json
import sys
from pathlib import Path
from typing import Any, cast

import mlx.core as mx

from lmx_lab.errors import UnusableModelError
from lmx_lab.weights.gguf.config import (
    GROUP_SIZE,
    QUANTIZED_BITS,
    ROPE_FACTORS,
    head_dim,
    llama3_scaling,
    mlx_config,
    mlx_name,
    refuse_unsupported,
)
from lmx_lab.weights.gguf.header import GgufHeader, GgufTensor, read_header
from lmx_lab.weights.gguf.tokenizer import build_tokenizer, eos_ids, read_vocabulary, tokenizer_config


def convert(source: Path, folder: Path) -> None:
    """Write ``config.json``, ``model.safetensors`` and the tokenizer's files into an existing folder.

    Every tensor keeps its bits, the float32 norms too: they make MLX compute in float32, where its CPU kernels, in
    float16, lose the answers of a small model. MLX must not be in use elsewhere in this process.

    Raises:
        UnusableModelError: the file is damaged, or nothing that can be imported without quantizing anew.
        OSError: the folder cannot be written.
    """
    header = read_header(source, arrays=True)
    refuse_unsupported(header)
    vocabulary = read_vocabulary(header)
    tokenizer = build_tokenizer(vocabulary, header.text("tokenizer.ggml.model"))
    arrays = _load(source)
    scaling = _rope_scaling(header, arrays.pop(ROPE_FACTORS, None))
    weights = _mlx_weights(header, arrays)
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", tokenizer_config(vocabulary, header.context_length))
    _write_json(folder / "config.json", mlx_config(header, eos_ids(vocabulary), scaling))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})


def _load(source: Path) -> dict[str, mx.array]:
    try:
        arrays = mx.load(str(source), format="gguf")
    except (RuntimeError, ValueError) as exc:
        raise UnusableModelError(f"{source} cannot be read by MLX: {exc}") from exc
    if not isinstance(arrays, dict):
        raise UnusableModelError(f"{source} is read by MLX as {type(arrays).__name__}, not as named tensors")
    return arrays


def _rope_scaling(header: GgufHeader, factors: mx.array | None) -> dict[str, Any] | None:
    if factors is None:
        return None
    theta = header.number("llama.rope.freq_base") or 10_000.0
    scaling = llama3_scaling(cast("list[float]", factors.tolist()), head_dim(header), theta)
    if scaling is None:
        raise UnusableModelError(f"{header.path} scales positions in a way that cannot be imported ({ROPE_FACTORS})")
    return scaling


def _mlx_weights(header: GgufHeader, arrays: dict[str, mx.array]) -> dict[str, mx.array]:
    weights: dict[str, mx.array] = {}
    for tensor in header.tensors:
        if tensor.name != ROPE_FACTORS:
            weights.update(_renamed(tensor, arrays))
    return weights


def _renamed(tensor: GgufTensor, arrays: dict[str, mx.array]) -> dict[str, mx.array]:
    """One tensor under MLX's names; a quantized one comes as weight, scales and biases."""
    name = str(mlx_name(tensor.name))
    bits = QUANTIZED_BITS.get(tensor.type)
    shape = tuple(reversed(tensor.shape))
    if bits is None:
        return {name: _expect(arrays, tensor.name, shape)}
    stem, mlx_stem = tensor.name.removesuffix("weight"), name.removesuffix("weight")
    groups = (*shape[:-1], shape[-1] // GROUP_SIZE)
    packed = _expect(arrays, tensor.name, (*shape[:-1], shape[-1] * bits // 32))
    return {name: packed} | {
        f"{mlx_stem}{part}": _expect(arrays, f"{stem}{part}", groups) for part in ("scales", "biases")
    }


def _expect(arrays: dict[str, mx.array], name: str, shape: tuple[int, ...]) -> mx.array:
    array = arrays.get(name)
    if array is None or array.shape != shape:
        found = array.shape if array is not None else "nothing"
        raise UnusableModelError(f"tensor {name!r:.80} is read by MLX as {found}, not as {shape}")
    return array


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _is_full_disk(exc: Exception) -> bool:
    """MLX and tokenizers raise errors of no kind with the system's message, or MLX's own, in them."""
    known = isinstance(exc, OSError) and exc.errno in (errno.ENOSPC, errno.EDQUOT)
    return known or any(phrase in str(exc) for phrase in ("[write] Unable", "No space left", "quota exceeded"))


def main(source: str, folder: str) -> int:
    """Run ``convert`` and print one line of JSON about it."""
    answer: dict[str, object] = {"ok": True}
    try:
        convert(Path(source), Path(folder))
    except UnusableModelError as exc:
        answer = {"error": exc.message, "full": False}
    # Whatever it is, this process ends with it, and its last word is for the caller.
    except Exception as exc:
        answer = {"error": f"{source} cannot be imported: {exc!r}", "full": _is_full_disk(exc)}
    finally:
        mx.synchronize()
        # Streams are per thread; the process aborts at exit if they outlive it.
        mx.clear_streams()
    print(json.dumps(answer))
    return 0 if "ok" in answer else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
