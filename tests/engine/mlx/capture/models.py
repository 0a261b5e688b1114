"""Build small models with random weights from mlx-lm's architectures, without files."""

from __future__ import annotations

import importlib
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "layer_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": True,
}


def build(kind: str, *, seed: int = 0, **changes: Any) -> Any:
    """Return a model of an architecture with random weights, whose activations are neither tiny nor huge."""
    mx.random.seed(seed)
    module = importlib.import_module(f"mlx_lm.models.{kind}")
    model = module.Model(module.ModelArgs.from_dict({"model_type": kind, **SIZES, **changes}))
    model.update(tree_map(lambda value: value + 0.1 * mx.random.normal(value.shape), model.parameters()))
    mx.eval(model.parameters())
    return model
