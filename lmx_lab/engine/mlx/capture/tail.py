"""Compute the logits of arbitrary values of the residual stream, with the final norm and the head of a model."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from lmx_lab.engine.mlx.capture.install import HookFunction, HookPoint, Side, install

ANY_TOKEN = 1
VOCABULARY_ROWS = 32
"""Number of rows whose logits a step computes while answers are generated."""


def logits_of_residual(model: Any, norm: Any, residual: mx.array) -> mx.array:
    """Return the logits of values of the residual stream after the last block, of shape (rows, width).

    The model is called with another input of its final norm, because families scale and cap logits in different
    ways. Its blocks are not computed, because no value depends on them.
    """
    return _logits(model, norm, "input", residual)


def logits_of_normalized(model: Any, norm: Any, normalized: mx.array) -> mx.array:
    """Return the logits of outputs of the final norm, of shape (rows, width)."""
    return _logits(model, norm, "output", normalized)


def _logits(model: Any, norm: Any, side: Side, values: mx.array) -> mx.array:
    replace: HookFunction = lambda value: values[None].astype(value.dtype)  # noqa: E731
    with install({HookPoint(norm, side): replace}, alone=True):
        logits: mx.array = model(mx.array([[ANY_TOKEN]]), cache=make_prompt_cache(model))
    return logits[0]
