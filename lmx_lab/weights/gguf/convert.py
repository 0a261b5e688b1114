"""Convert a llama GGUF file to MLX's names and ``config.json``, or say why that is impossible.

The conversion itself runs in a separate process (``convert_worker``).

Metadata keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from lmx_lab.errors import UnusableModelError
from lmx_lab.settings import without_secrets
from lmx_lab.weights.files import open_regular
from lmx_lab.weights.gguf.header import GgufHeader
from lmx_lab.weights.gguf.names import parts_of
from lmx_lab.weights.store import full_disk_error

LOAD_DIRECTLY = "Load it without conversion, with llama.cpp"
GROUP_SIZE = 32
QUANTIZED_BITS = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8}
# BF16 is missing: MLX reads it from GGUF files as float16.
FLOAT_DTYPES = {"F32": "float32", "F16": "float16"}
EXPANDED = "Q6_K"
"""The type of embedding and output in llama.cpp's Q4_0 files. MLX reads it as float16; only rounding is lost."""
EXPANDABLE = ("token_embd.weight", "output.weight")

TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
ROPE_FACTORS = "rope_freqs.weight"
LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.weight")
PACKAGE_PARENT = Path(__file__).resolve().parents[3]


def refuse_unsupported(header: GgufHeader) -> None:
    """Check by the header that the file can be converted to MLX. llama.cpp can run more files without conversion.

    Raises:
        UnusableModelError: the file is split into parts; it has an architecture other than llama, or a variant that MLX
            would compute incorrectly; a tensor is unknown or would have to be quantized again; or its vocabulary is
            not supported.
    """
    if len(parts_of(header.path.name)) > 1:
        raise UnusableModelError(
            f"{header.path} is split into parts, and only single files can be converted. {LOAD_DIRECTLY}, or join "
            "its parts"
        )
    if header.architecture != "llama":
        raise UnusableModelError(
            f"{header.path} has the architecture {header.architecture!r:.60}; only llama can be converted from .gguf. "
            f"{LOAD_DIRECTLY}, or fetch the model as safetensors from the hub"
        )
    if header.integer("llama.pooling_type"):
        raise UnusableModelError(
            f"{header.path} computes vectors or scores; only chat models can be converted. {LOAD_DIRECTLY}"
        )
    if header.integer("llama.expert_count"):
        raise UnusableModelError(f"{header.path} is a mixture of experts, which cannot be converted. {LOAD_DIRECTLY}")
    head = head_dim(header)
    if header.integer("llama.rope.dimension_count") not in (None, head):
        raise UnusableModelError(
            f"{header.path} rotates only a part of each head, which cannot be converted. {LOAD_DIRECTLY}"
        )
    scaling = header.text("llama.rope.scaling.type")
    if scaling not in (None, "none", "linear"):
        raise UnusableModelError(
            f"{header.path} scales positions by {scaling!r:.40}, which cannot be converted. {LOAD_DIRECTLY}"
        )
    _refuse_tensors(header)
    if (model := header.text("tokenizer.ggml.model")) not in ("gpt2", "llama"):
        raise UnusableModelError(
            f"{header.path} has a vocabulary of kind {model}; only gpt2 and llama can be converted. {LOAD_DIRECTLY}"
        )


def _refuse_tensors(header: GgufHeader) -> None:
    """Check that MLX's llama knows each tensor, that none is missing, and that their shapes match the metadata."""
    tensors = [tensor for tensor in header.tensors if tensor.name != ROPE_FACTORS]
    for tensor in tensors:
        if mlx_name(tensor.name) is None:
            raise UnusableModelError(
                f"{header.path} has the tensor {tensor.name!r:.80}, which MLX's llama does not have. {LOAD_DIRECTLY}"
            )
        is_expanded = tensor.type == EXPANDED and tensor.name in EXPANDABLE
        if not is_expanded and tensor.type not in QUANTIZED_BITS and tensor.type not in FLOAT_DTYPES:
            raise UnusableModelError(
                f"{header.path} has tensors of type {tensor.type}, which would have to be quantized again. "
                f"{LOAD_DIRECTLY}, or use the file in {', '.join(QUANTIZED_BITS)} or F16, or the model as safetensors"
            )
    layers = _required(header, "block_count")
    if layers > 10_000:
        raise UnusableModelError(
            f"{header.path} is damaged: it has {layers} layers, the limit is 10,000; fetch it again"
        )
    wanted = {f"blk.{n}.{name}.weight" for n in range(layers) for name in LAYER_NAMES} | set(TOP_NAMES)
    if missing := sorted(wanted - {tensor.name for tensor in tensors} - {"output.weight"}):
        raise UnusableModelError(f"{header.path} lacks {len(missing)} tensors, first {missing[0]}; fetch it again")
    hidden, inner = _required(header, "embedding_length"), _required(header, "feed_forward_length")
    heads = _required(header, "attention.head_count")
    queries = heads * head_dim(header)
    values = (header.integer("llama.attention.head_count_kv") or heads) * head_dim(header)
    shapes = {
        "attn_q": (hidden, queries), "attn_k": (hidden, values), "attn_v": (hidden, values),
        "attn_output": (queries, hidden), "ffn_gate": (hidden, inner), "ffn_up": (hidden, inner),
        "ffn_down": (inner, hidden),
    }  # fmt: skip
    for tensor in tensors:
        if match := LAYER.fullmatch(tensor.name):
            expected: tuple[int, ...] = shapes.get(match[2], (hidden,))
        else:
            # The size of the vocabulary is only known from these.
            expected = (hidden, tensor.shape[-1]) if tensor.name in EXPANDABLE else (hidden,)
        if tensor.shape != expected:
            raise UnusableModelError(
                f"{header.path} is damaged: {tensor.name} has the shape {tensor.shape} instead of {expected}; "
                "fetch it again"
            )


def mlx_name(name: str) -> str | None:
    """Return MLX's name of a GGUF tensor; None if MLX's llama does not have it."""
    if match := LAYER.fullmatch(name):
        layer_name = LAYER_NAMES.get(match[2])
        return layer_name and f"model.layers.{int(match[1])}.{layer_name}.weight"
    return TOP_NAMES.get(name)


def converted_bytes(header: GgufHeader) -> int:
    """Return an upper bound of the converted size: scales and biases, expanded tensors, 32 MiB for the tokenizer."""
    weights = sum(
        tensor.size_bytes * 5 // 2 if tensor.type == EXPANDED else tensor.size_bytes * 9 // 8
        for tensor in header.tensors
    )
    return weights + 32 * 2**20


def mlx_config(header: GgufHeader, eos_ids: list[int], rope_scaling: dict[str, Any] | None) -> dict[str, Any]:
    """Return the ``config.json`` of the converted model. The header must have passed ``refuse_unsupported``."""
    names = {tensor.name for tensor in header.tensors}
    embedding = next(tensor for tensor in header.tensors if tensor.name == "token_embd.weight")
    heads = _required(header, "attention.head_count")
    bos, pad = (header.integer(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "padding"))
    linear = None
    if header.text("llama.rope.scaling.type") == "linear":
        linear = {"rope_type": "linear", "factor": header.number("llama.rope.scaling.factor") or 1.0}
    # The most frequent width, and an entry for each matrix that has another width or is not quantized.
    matrices = {
        str(mlx_name(tensor.name)).removesuffix(".weight"): QUANTIZED_BITS.get(tensor.type)
        for tensor in header.tensors
        if tensor.name != ROPE_FACTORS and len(tensor.shape) > 1
    }
    widths = [bits for bits in matrices.values() if bits is not None]
    quantization: dict[str, Any] | None = None
    if widths:
        usual = max(set(widths), key=widths.count)
        quantization = {"group_size": GROUP_SIZE, "bits": usual}
        for name, bits in matrices.items():
            if bits != usual:
                quantization[name] = bits is not None and {"group_size": GROUP_SIZE, "bits": bits}
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": _required(header, "embedding_length"),
        "num_hidden_layers": _required(header, "block_count"),
        "intermediate_size": _required(header, "feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": header.integer("llama.attention.head_count_kv") or heads,
        "head_dim": head_dim(header),
        "rms_norm_eps": header.number("llama.attention.layer_norm_rms_epsilon") or 1e-5,
        "vocab_size": embedding.shape[-1],
        "max_position_embeddings": header.context_length,
        "rope_theta": header.number("llama.rope.freq_base") or 10_000.0,
        # llama.cpp's converter permutes q and k so that rotated pairs are adjacent.
        "rope_traditional": True,
        "rope_scaling": rope_scaling or linear,
        "tie_word_embeddings": "output.weight" not in names,
        "torch_dtype": FLOAT_DTYPES.get(embedding.type, "float16"),
        "bos_token_id": bos,
        "eos_token_id": eos_ids,
        "pad_token_id": pad,
        "quantization": quantization,
    }
    return {key: value for key, value in config.items() if value is not None}


def head_dim(header: GgufHeader) -> int:
    """Return the size of one attention head."""
    hidden, heads = _required(header, "embedding_length"), _required(header, "attention.head_count")
    return header.integer("llama.attention.key_length") or hidden // heads


def llama3_scaling(rope_factors: list[float], head_size: int, rope_theta: float) -> dict[str, Any] | None:
    """Return the ``rope_scaling`` of Llama 3's frequency factors (``rope_freqs.weight``); None if it has another form.

    Llama 3.1 and 3.2 divide low frequencies by 8 or 32, keep high ones and interpolate between them. The file contains
    the resulting factors, and MLX needs the parameters. To check the parameters, the factors are computed from them.
    """
    factor = max(rope_factors, default=1.0)
    table = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    expected = []
    for i in range(0, head_size, 2):
        turns = 8192 / (2 * 3.141592653589793 * rope_theta ** (i / head_size))
        smooth = min(1.0, max(0.0, (turns - 1.0) / 3.0))
        expected.append(1 / ((1 - smooth) / factor + smooth))
    matches = len(expected) == len(rope_factors) and all(
        abs(a - b) <= 1e-3 * b for a, b in zip(rope_factors, expected, strict=True)
    )
    return table if matches else None


def _required(header: GgufHeader, name: str) -> int:
    value = header.integer(f"llama.{name}")
    if value is None or value < 1:
        raise UnusableModelError(f"{header.path} does not define {name}; fetch it again, or use another file")
    return value


def convert_gguf(source: Path, folder: Path) -> None:
    """Convert ``source`` into an existing, empty folder that MLX can load.

    Raises:
        UnusableModelError: the file cannot be converted; the message contains the reason.
        StorageFullError: the disk became full.
    """
    process = subprocess.run(
        [sys.executable, "-P", "-m", "lmx_lab.weights.gguf.convert_worker", source.absolute(), folder.absolute()],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
        env=worker_environ(),
    )
    answer: object = None
    with contextlib.suppress(IndexError, ValueError):
        answer = json.loads(process.stdout.decode(errors="replace").strip().splitlines()[-1])
    answer = answer if isinstance(answer, dict) else {}
    if process.returncode == 0 and answer.get("ok") is True:
        return
    if answer.get("full") is True:
        raise full_disk_error(f"{source.name} was converted", folder)
    if answer.get("error"):
        raise UnusableModelError(str(answer["error"]))
    last = process.stderr.decode(errors="replace").strip().splitlines()[-1:]
    cause = "probably because memory ran out" if process.returncode == -9 else " ".join(last)[:300]
    raise UnusableModelError(
        f"{source} cannot be converted: the converter ended with exit code {process.returncode}, "
        f"{cause or 'without a message'}"
    )


def worker_environ() -> dict[str, str]:
    """Return the environment of a process that runs a module of this package."""
    # The package may be importable only because of the caller's current folder.
    search = os.pathsep.join(filter(None, (str(PACKAGE_PARENT), os.environ.get("PYTHONPATH"))))
    return without_secrets(os.environ) | {"PYTHONPATH": search}


def converted_id(path: Path) -> str:
    """Return the id of the converted model: the file's name and a part of its hash, so it is converted only once."""
    with open_regular(path) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).strip(".-")[:80] or "model"
    return f"{stem}-{digest[:8]}".lower()
