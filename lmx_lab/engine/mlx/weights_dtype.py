"""Choose the type of weights in memory, and expand quantized weights. Runs on the engine thread.

On a CPU, MLX multiplies quantized weights with simple code on one thread and emulates float16; float32 uses the BLAS
library.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.utils import dequantize_model

from lmx_lab.engine import memory
from lmx_lab.engine.cancellation import check_cancelled

log = logging.getLogger(__name__)
EXPANDED_SHARE = 0.6
"""Share of the memory limit, and of the free memory, that expanded weights may use. The rest is for caches and
activations."""
DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


def fit_weights(model: Any, dtype: str, *, limit_bytes: int, before_each: Callable[[], object] = lambda: None) -> None:
    """Convert the weights of a model, which have not been read from disk yet, and read them.

    Weights that ``auto`` would expand stay quantized if they do not fit; on a CPU their scales, and so the activations,
    are float32 then.

    Args:
        dtype: See ``Settings.dtype``.
        before_each: Called before each weight is read. An exception from it ends the load.

    Raises:
        NotLoadedError: the load was cancelled.
    """
    target = DTYPES.get(dtype, mx.float32 if mx.default_device() == mx.cpu else None)
    if target is not None:
        # Scales are converted first, so that the expanded weights have the precision of the wider type.
        model.set_dtype(target)
        if dtype in DTYPES or (dtype == "auto" and _fits(model, target, limit_bytes)):
            dequantize_model(model)
    # Evaluated one by one, so that only one weight at a time is in memory in both forms.
    parameters: Any = tree_flatten(model.parameters())
    for _, value in parameters:
        check_cancelled()
        before_each()
        mx.eval(value)


def _fits(model: Any, dtype: mx.Dtype, limit_bytes: int) -> bool:
    needed, room = expanded_bytes(model, dtype), round(min(limit_bytes, memory.free_bytes()) * EXPANDED_SHARE)
    if needed > room:
        log.info(
            "weights stay quantized: expanded they would use %.2f GB, and %.2f GB are free for them",
            needed / 1e9,
            room / 1e9,
        )
    return needed <= room


def expanded_bytes(model: Any, dtype: mx.Dtype) -> int:
    """Return the size of the weights if none of them is quantized."""
    return sum(_weight_count(module) for _, module in model.named_modules()) * dtype.size


def _weight_count(module: Any) -> int:
    arrays = {name: value for name, value in module.items() if isinstance(value, mx.array)}
    if "scales" not in arrays:
        return sum(value.size for value in arrays.values())
    # Quantized weights are packed into words of 32 bits.
    bias = arrays["bias"].size if "bias" in arrays else 0
    return int(arrays["weight"].size * 32 // module.bits + bias)
