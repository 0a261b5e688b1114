"""Hold the weights of a chat model, choose their type in memory, check quantized weights, and expand them.

On a CPU, MLX multiplies quantized weights with simple code on one thread and emulates float16; float32 uses the BLAS
library.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
from mlx_lm.utils import _get_classes, dequantize_model

from lmx_lab.engine import memory
from lmx_lab.engine.mlx.capture.points import HookPoints, find_parts, find_points
from lmx_lab.engine.mlx.kv_cache import Traits, number_of
from lmx_lab.engine.text.vocabulary import Vocabulary
from lmx_lab.errors import NotLoadedError
from lmx_lab.values.models import ModelEntry

log = logging.getLogger(__name__)
EXPANDED_SHARE = 0.6
"""Share of the memory limit, and of the free memory, that expanded weights may use. The rest is for caches and
activations."""
USED_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "n_experts_per_token", "moe_topk", "moe_top_k", "top_k")
"""Names in the configurations of models for the number of experts that compute a token."""
DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


class Cancellation:
    """A cancellation request for work on another thread. All methods may be called from any thread."""

    def __init__(self) -> None:
        self._cancelled = False

    def cancel(self) -> None:
        """Cancel the work. Idempotent."""
        self._cancelled = True

    def check(self) -> None:
        """Check that the work was not cancelled.

        Raises:
            NotLoadedError: it was cancelled.
        """
        if self._cancelled:
            raise NotLoadedError("the load was cancelled")

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Make this the object that ``check_cancelled`` checks on this thread within the block."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)


_current: ContextVar[Cancellation | None] = ContextVar("cancellation", default=None)


def check_cancelled() -> None:
    """Check that the load that runs on this thread was not cancelled. Called between the tensors of a model.

    Raises:
        NotLoadedError: it was cancelled.
    """
    if (current := _current.get()) is not None:
        current.check()


def fit_weights(model: Any, dtype: str, *, limit_bytes: int, free_bytes: int | None = None) -> None:
    """Convert the weights of a model, which have not been read from disk yet. Nothing is read or computed.

    Weights that ``auto`` would expand stay quantized if they do not fit; on a CPU their scales, and so the activations,
    are float32 then.

    Args:
        dtype: See ``Settings.dtype``.
        free_bytes: Free memory of the machine; by default that of now.
    """
    target = DTYPES.get(dtype, mx.float32 if mx.default_device() == mx.cpu else None)
    if target is None:
        return
    # Scales are converted first, so that the expanded weights have the precision of the wider type.
    model.set_dtype(target)
    free_bytes = memory.free_bytes() if free_bytes is None else free_bytes
    needed, room = expanded_bytes(model, target), round(min(limit_bytes, free_bytes) * EXPANDED_SHARE)
    if dtype in DTYPES or (dtype == "auto" and needed <= room):
        dequantize_model(model)
    elif dtype == "auto" and any("scales" in module for _, module in model.named_modules()):
        log.info(
            "weights stay quantized: expanded they would use %.2f GB, and %.2f GB are free for them",
            needed / 1e9,
            room / 1e9,
        )


def read_weights(model: Any, *, before_each: Callable[[int], object] = lambda _: None) -> None:
    """Read the weights of a model from disk.

    Args:
        before_each: Called before each weight is read, with the size of the weights that are left. An exception from it
            ends the load.

    Raises:
        NotLoadedError: the load was cancelled.
    """
    # Evaluated one by one, so that only one weight at a time is in memory in both forms.
    parameters: Any = tree_flatten(model.parameters())
    left_bytes = sum(value.nbytes for _, value in parameters)
    for _, value in parameters:
        check_cancelled()
        before_each(left_bytes)
        mx.eval(value)
        left_bytes -= value.nbytes


def read_bytes(model: Any) -> int:
    """Return the size of the weights that are read for each token: one row of the embeddings, and of a layer with
    experts the part that is used.
    """
    count, used = 0.0, max(number_of(model, name) for name in USED_EXPERTS)
    is_tied = not any(name.endswith("lm_head") for name, _ in model.named_modules())
    for _, module in model.named_modules():
        size = sum(value.nbytes for value in module.values() if isinstance(value, mx.array))
        if hasattr(module, "as_linear") and not is_tied:
            continue
        experts = getattr(module, "num_experts", 0) if isinstance(module, SwitchLinear | QuantizedSwitchLinear) else 0
        count += size * min(1.0, used / experts) if used and experts else size
    return round(count)


def expanded_bytes(model: Any, dtype: mx.Dtype) -> int:
    """Return the size of the weights if none of them is quantized."""
    count = 0
    for _, module in model.named_modules():
        arrays = {name: value for name, value in module.items() if isinstance(value, mx.array)}
        if "scales" in arrays:
            # Quantized weights are packed into words of 32 bits.
            count += arrays["weight"].size * 32 // module.bits + (arrays["bias"].size if "bias" in arrays else 0)
        else:
            count += sum(value.size for value in arrays.values())
    return count * dtype.size


def checked_classes(config: dict[str, Any]) -> tuple[Any, Any]:
    """Return the classes of a model and of its arguments, for the parameter ``get_model_classes`` of ``load_model``."""
    model_class, arguments = _get_classes(config)
    return checked(model_class), arguments


def checked(model_class: Any) -> Any:
    """Return a class that raises ``ValueError`` for quantized weights that do not fit the layers of a model.

    mlx-lm divides the number of columns of a layer by that of its scales. If the quotient is 0, MLX divides by it, and
    the process ends with SIGFPE.
    """

    class Checked(model_class):  # type: ignore[misc]
        def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
            sanitized: dict[str, mx.array]
            sanitized = super().sanitize(weights) if hasattr(model_class, "sanitize") else weights
            for name, module in self.named_modules():
                scales = sanitized.get(f"{name}.scales")
                if scales is None or not hasattr(module, "to_quantized"):
                    continue
                columns = module.weight.shape[-1]
                if scales.ndim == 0 or not 0 < scales.shape[-1] <= columns:
                    raise ValueError(
                        f"{name}.scales has the shape {scales.shape}, but its layer has {columns} columns according to "
                        "config.json; fetch the model again"
                    )
            return sanitized

    return Checked


@dataclass(frozen=True, kw_only=True, eq=False)
class ChatWeights:
    """A chat model in memory. Used on the engine thread only."""

    entry: ModelEntry
    model: Any
    traits: Traits
    """Those of the model, with the sizes of both models if there is a draft model."""
    draft: tuple[Any, int] | None
    """The draft model, and the number of tokens that both models know; None if there is none."""
    vocabulary: Vocabulary
    ends: frozenset[int]
    """The tokens that end any answer."""

    @cached_property
    def hook_points(self) -> HookPoints:
        """The places in the model at which values can be read and replaced. The first use computes a few tokens.

        Raises:
            InvalidRequestError: the values of its blocks have no names.
        """
        return find_points(find_parts(self.model, self.entry.id), self.entry.id)

    def arithmetic(self) -> list[str]:
        """Return the properties, in addition to the model's files, that the values in KV caches depend on."""
        parameters: Any = tree_flatten(self.model.parameters())
        weights = sorted(f"{name} {value.dtype} {value.shape}" for name, value in parameters)
        versions = [f"{package} {version(package)}" for package in ("lmx-lab", "mlx", "mlx-lm")]
        return [*versions, str(mx.default_device()), *weights]
