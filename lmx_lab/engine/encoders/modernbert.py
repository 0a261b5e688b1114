"""ModernBERT (arXiv 2412.13663): rotary positions, gated layers, and a sliding window in most layers."""

from __future__ import annotations

from typing import Any, cast

import mlx.core as mx
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Identity, Linear
from mlx.nn.layers.normalization import LayerNorm

from lmx_lab.engine.encoders.layers import (
    ACTIVATIONS,
    Encoder,
    ModelConfig,
    PaddedBatch,
    PoolingMode,
    Steps,
    TypedModule,
    attend,
    find_activation,
    join_modules,
    pool,
    split_heads,
)
from lmx_lab.errors import UnusableModelError

GLOBAL, LOCAL = "full_attention", "sliding_attention"
THETA = {GLOBAL: ("global_rope_theta", 160_000.0), LOCAL: ("local_rope_theta", 10_000.0)}
"""For each kind of layer, the key of the rotary base in configurations of transformers 4, and its default."""


def _norm(config: ModelConfig) -> LayerNorm:
    return LayerNorm(config.size("hidden_size"), config.number("norm_eps", 1e-5), bias=config.flag("norm_bias"))


class ModernBertLayer(TypedModule):
    def __init__(self, config: ModelConfig, at: int) -> None:
        super().__init__()
        size, inner = config.size("hidden_size"), config.size("intermediate_size")
        kinds = config.values.get("layer_types")
        if kinds is None:
            kind = LOCAL if at % config.size("global_attn_every_n_layers", 3) else GLOBAL
        elif isinstance(kinds, list) and at < len(kinds) and kinds[at] in THETA:
            kind = str(kinds[at])
        else:
            raise UnusableModelError(f"config.json: layer {at} has none of the layer_types {', '.join(THETA)}")
        attention, mlp = config.flag("attention_bias"), config.flag("mlp_bias")
        self.heads = config.size("num_attention_heads")
        self.window = config.size("local_attention", 128) // 2 if kind == LOCAL else None
        """Number of tokens on either side that a token attends to; None for all."""
        self.theta = _theta(config, kind)
        """Base of the rotary positions."""
        # The norm of the embeddings comes directly before the first layer.
        self.attn_norm = _norm(config) if at else Identity()
        self.attn = join_modules(Wqkv=Linear(size, 3 * size, attention), Wo=Linear(size, size, attention))
        self.mlp_norm = _norm(config)
        self.mlp = join_modules(Wi=Linear(size, 2 * inner, mlp), Wo=Linear(inner, size, mlp))
        self.act = find_activation(config.values.get("hidden_activation", "gelu"), ACTIVATIONS)

    def forward(self, x: mx.array, mask: mx.array | None) -> Steps:
        product = mx.split(self.attn.Wqkv(self.attn_norm(x)), 3, axis=-1)
        queries, keys, values = (split_heads(part, self.heads) for part in product)
        queries, keys = (
            mx.fast.rope(part, part.shape[-1], traditional=False, base=self.theta, scale=1.0, offset=0)
            for part in (queries, keys)
        )
        attended = yield from attend(queries, keys, values, mask, self.window)
        x = x + self.attn.Wo(attended)
        # The values and their gates.
        inputs, gates = mx.split(self.mlp.Wi(self.mlp_norm(x)), 2, axis=-1)
        return x + self.mlp.Wo(self.act(inputs) * gates)  # type: ignore[no-any-return]


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


class ModernBert(Encoder):
    """A ModernBERT model.

    The head of a classifier computes a score from the first token or the mean of all tokens, through one more layer.
    """

    prefix, ignored = r"model\.", r"head\.|decoder\.|classifier\."
    vectors = (12, 8)
    """Input, product, queries, keys, values and result; values, gates and activation."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        size, self.segments = self.hidden_size, 1
        self.positions = config.size("max_position_embeddings", 8192)
        self.embeddings = join_modules(tok_embeddings=Embedding(self.vocabulary_size, size), norm=_norm(config))
        self.layers = [ModernBertLayer(config, at) for at in range(config.size("num_hidden_layers"))]
        self.final_norm = _norm(config)
        if config.flag("has_head"):
            mode = config.values.get("classifier_pooling", "cls")
            if mode not in {"cls", "mean"}:
                raise UnusableModelError(
                    f"config.json: the classifier_pooling {mode!r} is not supported; supported are cls and mean"
                )
            self.labels, self.mode = "classifier.weight", cast("PoolingMode", mode)
            self.act = find_activation(config.values.get("classifier_activation", "gelu"), ACTIVATIONS)
            bias = config.flag("classifier_bias")
            self.head = join_modules(dense=Linear(size, size, bias), norm=_norm(config))
            self.classifier = Linear(size, 1)

    @property
    def itemsize(self) -> int:
        return int(self.final_norm.weight.dtype.size)

    def forward(self, batch: PaddedBatch) -> Steps:
        x = self.embeddings.norm(self.embeddings.tok_embeddings(mx.array(batch.ids)))
        for layer in self.layers:
            x = yield from layer.forward(x, batch.mask)
            yield x
        return self.final_norm(x)  # type: ignore[no-any-return]

    def classify(self, hidden: mx.array, batch: PaddedBatch) -> mx.array:
        pooled = pool(hidden, batch, self.mode).astype(hidden.dtype)
        score: Any = self.classifier(self.head.norm(self.act(self.head.dense(pooled))))
        return score.squeeze(-1)  # type: ignore[no-any-return]
