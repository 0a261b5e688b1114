"""ModernBERT (arXiv 2412.13663): rotary positions, gated layers, and a sliding window in most layers."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from lmx_lab.engine.encoders.bert import require_one_label
from lmx_lab.engine.encoders.layers import (
    ACTIVATIONS,
    Linear,
    ModelConfig,
    Norm,
    PaddedBatch,
    Steps,
    Tensors,
    attend,
    block_length,
    find_activation,
    join_heads,
    pool,
    split_heads,
)
from lmx_lab.engine.encoders.sentence_transformers import PoolingMode
from lmx_lab.errors import UnusableModelError

IGNORED = r"head\.|decoder\.|classifier\."
GLOBAL, LOCAL = "full_attention", "sliding_attention"
THETA = {GLOBAL: ("global_rope_theta", 160_000.0), LOCAL: ("local_rope_theta", 10_000.0)}
"""For each kind of layer, the key of the rotary base in configurations of transformers 4, and its default."""


def rename(name: str) -> str:
    """Remove the model's prefix from the name of a tensor."""
    return re.sub(r"^model\.", "", name)


@dataclass(frozen=True, eq=False)
class ModernBertLayer:
    heads: int
    window: int | None
    """Number of tokens on either side that a token attends to; None for all."""
    theta: float
    """Base of the rotary positions."""
    attention_norm: Norm | None
    qkv: Linear
    out: Linear
    norm: Norm
    up: Linear
    """Projection to the values and their gates."""
    act: Callable[[mx.array], mx.array]
    down: Linear

    @classmethod
    def take(cls, tensors: Tensors, config: ModelConfig, at: int) -> ModernBertLayer:
        name, size, inner = f"layers.{at}", config.size("hidden_size"), config.size("intermediate_size")
        kinds = config.values.get("layer_types")
        if kinds is None:
            kind = LOCAL if at % config.size("global_attn_every_n_layers", 3) else GLOBAL
        elif isinstance(kinds, list) and at < len(kinds) and kinds[at] in THETA:
            kind = str(kinds[at])
        else:
            raise UnusableModelError(f"config.json: layer {at} has none of the layer_types {', '.join(THETA)}")
        eps, norm_bias = config.number("norm_eps", 1e-5), config.flag("norm_bias")
        attention, mlp = config.flag("attention_bias"), config.flag("mlp_bias")
        return cls(
            heads=config.size("num_attention_heads"),
            window=config.size("local_attention", 128) // 2 if kind == LOCAL else None,
            theta=_theta(config, kind),
            # The norm of the embeddings comes directly before the first layer.
            attention_norm=tensors.norm(f"{name}.attn_norm", size, eps, bias=norm_bias) if at else None,
            qkv=tensors.linear(f"{name}.attn.Wqkv", size, 3 * size, bias=attention),
            out=tensors.linear(f"{name}.attn.Wo", size, size, bias=attention),
            norm=tensors.norm(f"{name}.mlp_norm", size, eps, bias=norm_bias),
            up=tensors.linear(f"{name}.mlp.Wi", size, 2 * inner, bias=mlp),
            act=find_activation(config.values.get("hidden_activation", "gelu"), ACTIVATIONS),
            down=tensors.linear(f"{name}.mlp.Wo", inner, size, bias=mlp),
        )

    def forward(self, x: mx.array, mask: mx.array | None) -> Steps:
        normed = x if self.attention_norm is None else self.attention_norm(x)
        queries, keys, values = split_heads(self.qkv(normed), self.heads)
        queries, keys = self._rotate(queries), self._rotate(keys)
        attended = yield from attend(queries, keys, values, mask, self.window)
        x = x + self.out(join_heads(attended))
        inputs, gates = mx.split(self.up(self.norm(x)), 2, axis=-1)
        return x + self.down(self.act(inputs) * gates)

    def _rotate(self, x: mx.array) -> mx.array:
        return mx.fast.rope(x, x.shape[-1], traditional=False, base=self.theta, scale=1.0, offset=0)


def _theta(config: ModelConfig, kind: str) -> float:
    """Return the base of the rotary positions. transformers 5 stores it under the kind of layer."""
    key, default = THETA[kind]
    if config.values.get("rope_scaling"):
        raise UnusableModelError("config.json has a rope_scaling, which is not supported")
    nested: Any = config.values.get("rope_parameters")
    found = nested.get(kind) if isinstance(nested, dict) else None
    if isinstance(found, dict):
        if found.get("rope_type", "default") != "default":
            raise UnusableModelError(f"config.json: the rope_type {found['rope_type']!r} is not supported")
        if "rope_theta" in found:
            return ModelConfig(found).number("rope_theta", default)
    return config.number(key, default) if config.values.get(key) is not None else default


@dataclass(frozen=True, eq=False)
class ModernBert:
    """A ModernBERT model; implements ``Network``."""

    token_embeddings: mx.array
    norm: Norm
    layers: tuple[ModernBertLayer, ...]
    final_norm: Norm
    inner_size: int
    positions: int
    segments: int = 1

    @classmethod
    def take(cls, tensors: Tensors, config: ModelConfig) -> ModernBert:
        """Build the model from its tensors.

        Raises:
            UnusableModelError: a tensor is missing or invalid, or the configuration is not supported.
        """
        config.head_size()
        size = config.size("hidden_size")
        eps, norm_bias = config.number("norm_eps", 1e-5), config.flag("norm_bias")
        return cls(
            token_embeddings=tensors.take("embeddings.tok_embeddings.weight", config.size("vocab_size"), size),
            norm=tensors.norm("embeddings.norm", size, eps, bias=norm_bias),
            layers=tuple(ModernBertLayer.take(tensors, config, at) for at in range(config.size("num_hidden_layers"))),
            final_norm=tensors.norm("final_norm", size, eps, bias=norm_bias),
            inner_size=config.size("intermediate_size"),
            positions=config.size("max_position_embeddings", 8192),
        )

    @property
    def hidden_size(self) -> int:
        return int(self.token_embeddings.shape[1])

    @property
    def vocabulary_size(self) -> int:
        return int(self.token_embeddings.shape[0])

    def forward(self, batch: PaddedBatch) -> Generator[mx.array, None, mx.array]:
        x = self.norm(self.token_embeddings[mx.array(batch.ids)])
        for layer in self.layers:
            x = yield from layer.forward(x, batch.mask)
            yield x
        return self.final_norm(x)

    def batch_bytes(self, rows: int, length: int) -> int:
        heads, itemsize = self.layers[0].heads, self.token_embeddings.dtype.size
        scores = rows * heads * length * block_length(rows, heads, length, None)
        # Scores and their softmax; input, product, queries, keys, values and result; values, gates and activation.
        return itemsize * (2 * scores + rows * length * (12 * self.hidden_size + 8 * self.inner_size))


@dataclass(frozen=True, eq=False)
class ModernBertHead:
    """Computes a score from the first token or the mean of all tokens, through one more layer."""

    mode: PoolingMode
    dense: Linear
    act: Callable[[mx.array], mx.array]
    norm: Norm
    out: Linear

    @classmethod
    def take(cls, tensors: Tensors, config: ModelConfig) -> ModernBertHead:
        mode = config.values.get("classifier_pooling", "cls")
        if mode not in {"cls", "mean"}:
            raise UnusableModelError(
                f"config.json: the classifier_pooling {mode!r} is not supported; supported are cls and mean"
            )
        require_one_label(tensors.rows("classifier.weight"))
        size, norm_bias = config.size("hidden_size"), config.flag("norm_bias")
        return cls(
            mode=mode,
            dense=tensors.linear("head.dense", size, size, bias=config.flag("classifier_bias")),
            act=find_activation(config.values.get("classifier_activation", "gelu"), ACTIVATIONS),
            norm=tensors.norm("head.norm", size, config.number("norm_eps", 1e-5), bias=norm_bias),
            out=tensors.linear("classifier", size, 1),
        )

    def __call__(self, hidden: mx.array, batch: PaddedBatch) -> mx.array:
        pooled = pool(hidden, batch, self.mode).astype(hidden.dtype)
        return self.out(self.norm(self.act(self.dense(pooled)))).squeeze(-1)
