"""Refuse impossible values in ``config.json`` and in the headers of model files. Does not read files.

The engines check only a few of these values. With NaN, infinity or zero, a model is loaded and generates nonsense, or
fails with an error that does not name the value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

from lmx_lab.errors import UnusableModelError

LAYER_KEYS = (
    "num_hidden_layers", "n_layers", "n_layer", "num_layers", "num_nextn_predict_layers", "num_encoder_layers",
    "num_decoder_layers", "encoder_layers", "decoder_layers", "depth", "num_transformer_layers", "num_loops",
    "num_kv_reuse_layers", "altup_num_inputs", "emb_neighbor_num", "o_groups",
)  # fmt: skip
EXPERT_KEYS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
MAX_COUNTS = dict.fromkeys(LAYER_KEYS, 1000) | dict.fromkeys(EXPERT_KEYS, 10_000)
"""Largest values in any part of ``config.json``. mlx-lm creates this many layers or experts before it reads a weight,
so a value of a billion would never end. The largest known models have a tenth of these values."""
POSITIVE = (
    dict.fromkeys(("num_hidden_layers", "n_layers", "n_layer", "num_layers"), 1000)
    | dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim"), 2**22)
    | dict.fromkeys(("num_attention_heads", "num_key_value_heads", "n_head", "n_heads", "head_dim"), 2**16)
    | {"vocab_size": 2**24, "max_position_embeddings": 2**40}
    | dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "norm_eps", "layer_norm_epsilon", "layernorm_epsilon"), 1)
    | {"rope_theta": 10**15, "rotary_emb_base": 10**15}
)
"""Values of the language model that must be above zero, with their largest possible values. Missing values have
defaults."""
BITS = (2, 3, 4, 5, 6, 8)
GROUP_SIZES = (16, 32, 64, 128)
WORD_BITS = 32


def check_config(path: Path, config: Mapping[str, Any]) -> None:
    """Check the values of ``config.json``.

    Args:
        path: The file, for messages.

    Raises:
        UnusableModelError: a value is impossible; the message names it and the limit.
    """
    # The object and all objects in it, each with the prefix of its keys' names.
    waiting: list[tuple[str, Mapping[str, Any]]] = [("", config)]
    while waiting:
        name, part = waiting.pop()
        for key, value in part.items():
            if isinstance(value, dict):
                waiting.append((f"{name}{key}.", value))
            if isinstance(value, float) and math.isnan(value):
                raise _impossible(path, name + key, value, "it must be a number")
            if _is_number(value) and key in MAX_COUNTS and value > MAX_COUNTS[key]:
                raise _impossible(path, name + key, value, f"the limit is {MAX_COUNTS[key]}")
        if name in ("", "text_config.", "rope_parameters.", "text_config.rope_parameters."):
            for key, limit in POSITIVE.items():
                check_positive(path, name + key, part.get(key), limit)
    for key in ("quantization", "quantization_config"):
        if isinstance(given := config.get(key), dict):
            _check_quantization(path, f"{key}.", given)


def check_quantized(path: Path, shapes: Mapping[str, tuple[str, list[int]]]) -> None:
    """Check that the number of columns of each of MLX's quantized tensors is a multiple of its group size.

    Args:
        path: The file, for messages.
        shapes: Type and shape of each tensor of the file.

    Raises:
        UnusableModelError: the number of groups of a tensor does not fit its shape.
    """
    for name, (_, groups) in shapes.items():
        kind, packed = shapes.get(f"{name.removesuffix('.scales')}.weight", ("", []))
        if not name.endswith(".scales") or kind != "U32" or not packed or not groups:
            continue
        bits_per_group = packed[-1] * WORD_BITS / groups[-1] if groups[-1] > 0 else 0
        if all(bits_per_group != bits * size for bits in BITS for size in GROUP_SIZES):
            raise UnusableModelError(
                f"{path}: {name!r:.80} has the shape {groups}, and its weight {packed}; no group size of "
                f"{', '.join(map(str, GROUP_SIZES))} and no number of bits explains that: fetch the model again"
            )


def check_positive(path: Path, name: str, value: object, limit: float) -> None:
    """Check that a number is above zero and at most ``limit``. Values of other types are ignored.

    Args:
        path: The file, for messages.
        name: Name of the value, for messages.

    Raises:
        UnusableModelError: the number is outside of this range.
    """
    if _is_number(value) and not 0 < value <= limit:
        raise _impossible(path, name, value, f"it must be above 0, and {limit:,} at most")


def _check_quantization(path: Path, name: str, given: Mapping[str, Any]) -> None:
    is_mlx = name.startswith("quantization.")
    bits, size = given.get("bits"), given.get("group_size")
    if _is_number(bits) and (bits not in BITS if is_mlx else not 1 <= bits <= WORD_BITS):
        raise _impossible(path, f"{name}bits", bits, f"it must be one of {', '.join(map(str, BITS))}")
    # In other projects' formats, -1 means one group for each row.
    if _is_number(size) and (size not in GROUP_SIZES if is_mlx else size != -1 and not 0 < size <= 2**16):
        raise _impossible(path, f"{name}group_size", size, f"it must be one of {', '.join(map(str, GROUP_SIZES))}")
    for key, layer in given.items():
        if is_mlx and isinstance(layer, dict):
            _check_quantization(path, f"{name}{key}.", layer)


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _impossible(path: Path, name: str, value: object, rule: str) -> UnusableModelError:
    return UnusableModelError(f"{path}: {name:.80} is {value!r:.40}; {rule}: use another model", param="model")
