"""In which type weights are kept in memory: the policy, and the expansion of quantized ones. Engine thread only.

On a CPU, MLX multiplies quantized weights on one naive thread and emulates float16; float32 goes to the BLAS.
"""

from __future__ import annotations

import logging
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.utils import dequantize_model

from lmx_lab.engine import machine_memory

log = logging.getLogger(__name__)
EXPANDED_SHARE = 0.6
"""Of the memory limit, and of what others leave free: so much may expanded weights take; the rest is for caches and
what is computed."""
DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


def fit_weights(model: Any, dtype: str, *, limit_bytes: int) -> None:
    """Bring a model, its weights not yet read from disk, to the type that ``Settings.dtype`` asks for, and read them.

    What ``auto`` would expand but does not fit stays quantized, with float32 scales on a CPU, hence activations.
    """
    wanted = DTYPES.get(dtype, mx.float32 if mx.default_device() == mx.cpu else None)
    if wanted is not None:
        # Scales first, so that expanding loses nothing of what the wider type holds.
        model.set_dtype(wanted)
        if dtype in DTYPES or (dtype == "auto" and _fits(model, wanted, limit_bytes)):
            dequantize_model(model)
    # One by one, so that beside the expanded weights only one is there in its old form too.
    parameters: Any = tree_flatten(model.parameters())
    for _, value in parameters:
        mx.eval(value)


def _fits(model: Any, dtype: mx.Dtype, limit_bytes: int) -> bool:
    needed, room = expanded_bytes(model, dtype), round(min(limit_bytes, machine_memory.free_bytes()) * EXPANDED_SHARE)
    if needed > room:
        log.info("weights stay quantized: expanded they take %.2f GB, there is room for %.2f", needed / 1e9, room / 1e9)
    return needed <= room


def expanded_bytes(model: Any, dtype: mx.Dtype) -> int:
    """What the weights take when none of them is quantized."""
    return sum(_weights(module) for _, module in model.named_modules()) * dtype.size


def _weights(module: Any) -> int:
    arrays = {name: value for name, value in module.items() if isinstance(value, mx.array)}
    if "scales" not in arrays:
        return sum(value.size for value in arrays.values())
    # Packed into words of 32 bits.
    bias = arrays["bias"].size if "bias" in arrays else 0
    return int(arrays["weight"].size * 32 // module.bits + bias)
