"""Check the shapes of quantized weights before mlx-lm creates quantized layers for them."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.utils import _get_classes

Weights = dict[str, mx.array]


def checked_classes(config: dict[str, Any]) -> tuple[Any, Any]:
    """Return the classes of a model and of its arguments, for the parameter ``get_model_classes`` of ``load_model``.

    mlx-lm divides the number of columns of a layer by that of its scales. If the quotient is 0, MLX divides by it, and
    the process ends with SIGFPE. The returned class raises ``ValueError`` before this happens.
    """
    model_class, arguments = _get_classes(config)

    class Checked(model_class):  # type: ignore[misc, valid-type]
        def sanitize(self, weights: Weights) -> Weights:
            sanitized: Weights = super().sanitize(weights) if hasattr(model_class, "sanitize") else weights
            for name, module in self.named_modules():
                scales = sanitized.get(f"{name}.scales")
                if scales is None or not hasattr(module, "to_quantized"):
                    continue
                columns = module.weight.shape[-1]
                if scales.ndim == 0 or not 0 < scales.shape[-1] <= columns:
                    raise ValueError(
                        f"{name}.scales has the shape {scales.shape}, but its layer has {columns} columns according "
                        "to config.json; fetch the model again"
                    )
            return sanitized

    return Checked, arguments
