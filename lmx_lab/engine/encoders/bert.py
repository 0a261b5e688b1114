"""BERT (arXiv 1810.04805) and RoBERTa (arXiv 1907.11692). RoBERTa's positions begin after the padding token's id."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

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
    join_linear,
    split_heads,
)
from lmx_lab.errors import UnusableModelError

ROBERTAS = frozenset({"roberta", "xlm-roberta", "camembert"})
IGNORED = r"pooler\.|cls\.|lm_head\.|classifier\.|embeddings\.(position_ids|token_type_ids)$"
"""Tensors in checkpoints that an encoder does not need."""


def rename(name: str) -> str:
    """Remove the model's prefix from the name of a tensor, and replace names that were in use before 2019."""
    name = re.sub(r"^(bert|roberta)\.", "", name)
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")


@dataclass(frozen=True, eq=False)
class BertLayer:
    heads: int
    qkv: Linear
    out: Linear
    attention_norm: Norm
    up: Linear
    act: Callable[[mx.array], mx.array]
    down: Linear
    norm: Norm

    @classmethod
    def take(cls, tensors: Tensors, config: ModelConfig, name: str) -> BertLayer:
        size, inner = config.size("hidden_size"), config.size("intermediate_size")
        eps = config.number("layer_norm_eps", 1e-12)
        attention = f"{name}.attention"
        qkv = [tensors.pair(f"{attention}.self.{part}", size, size) for part in ("query", "key", "value")]
        return cls(
            heads=config.size("num_attention_heads"),
            qkv=join_linear(qkv),
            out=tensors.linear(f"{attention}.output.dense", size, size),
            attention_norm=tensors.norm(f"{attention}.output.LayerNorm", size, eps),
            up=tensors.linear(f"{name}.intermediate.dense", size, inner),
            act=find_activation(config.values.get("hidden_act", "gelu"), ACTIVATIONS),
            down=tensors.linear(f"{name}.output.dense", inner, size),
            norm=tensors.norm(f"{name}.output.LayerNorm", size, eps),
        )

    def forward(self, x: mx.array, mask: mx.array | None) -> Steps:
        attended = join_heads((yield from attend(*split_heads(self.qkv(x), self.heads), mask)))
        x = self.attention_norm(x + self.out(attended))
        return self.norm(x + self.down(self.act(self.up(x))))


@dataclass(frozen=True, eq=False)
class Bert:
    """A BERT or RoBERTa model; implements ``Network``."""

    token_embeddings: mx.array
    position_embeddings: mx.array
    """RoBERTa's without the first ones, which no token of a text uses."""
    segment_embeddings: mx.array
    norm: Norm
    layers: tuple[BertLayer, ...]
    inner_size: int
    padding_id: int | None
    """RoBERTa's padding token, which is not counted in the positions; None for BERT."""
    padding_position: mx.array | None
    """Position embedding of the padding token."""

    @classmethod
    def take(cls, tensors: Tensors, config: ModelConfig) -> Bert:
        """Build the model from its tensors.

        Raises:
            UnusableModelError: a tensor is missing or invalid, or the configuration is not supported.
        """
        if (kind := config.values.get("position_embedding_type", "absolute")) != "absolute":
            raise UnusableModelError(f"its position embeddings are of type {kind!r}; only absolute ones are supported")
        if config.flag("is_decoder") or config.flag("add_cross_attention"):
            raise UnusableModelError(
                "config.json describes a decoder; with this model_type only encoders are supported"
            )
        config.head_size()
        size, count = config.size("hidden_size"), config.size("max_position_embeddings")
        padding = config.size("pad_token_id", 1) if config.values.get("model_type") in ROBERTAS else None
        positions = tensors.take("embeddings.position_embeddings.weight", count, size)
        first = 0 if padding is None else padding + 1
        return cls(
            token_embeddings=tensors.take("embeddings.word_embeddings.weight", config.size("vocab_size"), size),
            position_embeddings=positions[first:],
            segment_embeddings=tensors.take(
                "embeddings.token_type_embeddings.weight", config.size("type_vocab_size", 2), size
            ),
            norm=tensors.norm("embeddings.LayerNorm", size, config.number("layer_norm_eps", 1e-12)),
            layers=tuple(
                BertLayer.take(tensors, config, f"encoder.layer.{at}") for at in range(config.size("num_hidden_layers"))
            ),
            inner_size=config.size("intermediate_size"),
            padding_id=padding,
            padding_position=None if padding is None else positions[padding],
        )

    @property
    def hidden_size(self) -> int:
        return int(self.token_embeddings.shape[1])

    @property
    def vocabulary_size(self) -> int:
        return int(self.token_embeddings.shape[0])

    @property
    def positions(self) -> int:
        return int(self.position_embeddings.shape[0])

    @property
    def segments(self) -> int:
        return int(self.segment_embeddings.shape[0])

    def forward(self, batch: PaddedBatch) -> Generator[mx.array, None, mx.array]:
        length = batch.ids.shape[1]
        positions, counted = self.position_embeddings[:length], batch.ids != self.padding_id
        is_text = np.arange(length) < batch.lengths[:, None]
        if self.padding_position is not None and not counted[is_text].all():
            # A text may contain the padding token. It gets the position embedding of padding and is not counted.
            numbers = mx.array(np.maximum(np.cumsum(counted, axis=1) - 1, 0))
            positions = mx.where(mx.array(counted)[..., None], self.position_embeddings[numbers], self.padding_position)
        x = self.token_embeddings[mx.array(batch.ids)] + positions
        segments = self.segment_embeddings[0]
        if (batch.second_start < batch.lengths).any():
            in_second = np.arange(length) >= batch.second_start[:, None]
            segments = self.segment_embeddings[mx.array(in_second.astype(np.int32))]
        x = self.norm(x + segments)
        for layer in self.layers:
            x = yield from layer.forward(x, batch.mask)
            yield x
        return x

    def batch_bytes(self, rows: int, length: int) -> int:
        heads, itemsize = self.layers[0].heads, self.token_embeddings.dtype.size
        scores = rows * heads * length * block_length(rows, heads, length, None)
        # Scores and their softmax; input, product, queries, keys, values and result; steps of the activation.
        return itemsize * (2 * scores + rows * length * (9 * self.hidden_size + 5 * self.inner_size))


@dataclass(frozen=True, eq=False)
class FirstTokenHead:
    """Computes a score from the hidden state of the first token through a tanh layer, for BERT and RoBERTa."""

    dense: Linear
    out: Linear

    @classmethod
    def take(cls, tensors: Tensors, config: ModelConfig) -> FirstTokenHead:
        roberta, size = config.values.get("model_type") in ROBERTAS, config.size("hidden_size")
        dense, out = ("classifier.dense", "classifier.out_proj") if roberta else ("pooler.dense", "classifier")
        require_one_label(tensors.rows(f"{out}.weight"))
        return cls(tensors.linear(dense, size, size), tensors.linear(out, size, 1))

    def __call__(self, hidden: mx.array, batch: PaddedBatch) -> mx.array:
        return self.out(mx.tanh(self.dense(hidden[:, 0]))).squeeze(-1)


def require_one_label(labels: int) -> None:
    """Check that a classifier has one label.

    Raises:
        UnusableModelError: it has several.
    """
    if labels != 1:
        raise UnusableModelError(f"its classifier has {labels} labels; a reranker has one")
