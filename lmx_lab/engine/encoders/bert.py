"""BERT (arXiv 1810.04805) and RoBERTa (arXiv 1907.11692), whose positions begin behind the padding token's id."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from lmx_lab.engine.encoders.layers import (
    ACTIVATIONS,
    Linear,
    Norm,
    Steps,
    activation,
    attend,
    block_length,
    join_heads,
    split_heads,
)
from lmx_lab.engine.encoders.network import ModelConfig, PaddedBatch
from lmx_lab.engine.encoders.tensors import Tensors, joined
from lmx_lab.errors import UnusableModelError

ROBERTAS = frozenset({"roberta", "xlm-roberta", "camembert"})
IGNORED = r"pooler\.|cls\.|lm_head\.|classifier\.|embeddings\.(position_ids|token_type_ids)$"
"""Parts that checkpoints have and an encoder of texts does not need."""


def rename(name: str) -> str:
    """The tensor's name without the model's own in front, and as it is since 2019."""
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
            qkv=joined(qkv),
            out=tensors.linear(f"{attention}.output.dense", size, size),
            attention_norm=tensors.norm(f"{attention}.output.LayerNorm", size, eps),
            up=tensors.linear(f"{name}.intermediate.dense", size, inner),
            act=activation(config.values.get("hidden_act", "gelu"), ACTIVATIONS),
            down=tensors.linear(f"{name}.output.dense", inner, size),
            norm=tensors.norm(f"{name}.output.LayerNorm", size, eps),
        )

    def steps(self, x: mx.array, mask: mx.array | None) -> Steps:
        attended = join_heads((yield from attend(*split_heads(self.qkv(x), self.heads), mask)))
        x = self.attention_norm(x + self.out(attended))
        return self.norm(x + self.down(self.act(self.up(x))))


@dataclass(frozen=True, eq=False)
class Bert:
    """A ``Network``."""

    words: mx.array
    places: mx.array
    """Position embeddings; RoBERTa's without those that no text reaches."""
    kinds: mx.array
    """Embeddings of the segments."""
    norm: Norm
    layers: tuple[BertLayer, ...]
    inner_size: int
    padding_id: int | None
    """Of a RoBERTa: this token has no position of its own."""
    padding_place: mx.array | None

    @classmethod
    def take(cls, tensors: Tensors, config: ModelConfig) -> Bert:
        """
        Raises:
            UnusableModelError: as of ``Tensors``, or the configuration asks for what is not known here.
        """
        if (kind := config.values.get("position_embedding_type", "absolute")) != "absolute":
            raise UnusableModelError(f"its position embeddings are of type {kind!r}; only absolute ones are known here")
        if config.flag("is_decoder") or config.flag("add_cross_attention"):
            raise UnusableModelError("config.json makes a decoder of it; only encoders are known here")
        config.head_size()
        size, count = config.size("hidden_size"), config.size("max_position_embeddings")
        padding = config.size("pad_token_id", 1) if config.values.get("model_type") in ROBERTAS else None
        places = tensors.take("embeddings.position_embeddings.weight", count, size)
        first = 0 if padding is None else padding + 1
        return cls(
            words=tensors.take("embeddings.word_embeddings.weight", config.size("vocab_size"), size),
            places=places[first:],
            kinds=tensors.take("embeddings.token_type_embeddings.weight", config.size("type_vocab_size", 2), size),
            norm=tensors.norm("embeddings.LayerNorm", size, config.number("layer_norm_eps", 1e-12)),
            layers=tuple(
                BertLayer.take(tensors, config, f"encoder.layer.{at}") for at in range(config.size("num_hidden_layers"))
            ),
            inner_size=config.size("intermediate_size"),
            padding_id=padding,
            padding_place=None if padding is None else places[padding],
        )

    @property
    def hidden_size(self) -> int:
        return int(self.words.shape[1])

    @property
    def vocabulary_size(self) -> int:
        return int(self.words.shape[0])

    @property
    def positions(self) -> int:
        return int(self.places.shape[0])

    @property
    def segments(self) -> int:
        return int(self.kinds.shape[0])

    def forward(self, batch: PaddedBatch) -> Generator[mx.array, None, mx.array]:
        x = self._embed(batch)
        for layer in self.layers:
            x = yield from layer.steps(x, batch.mask)
            yield x
        return x

    def _embed(self, batch: PaddedBatch) -> mx.array:
        length = batch.ids.shape[1]
        x = self.words[mx.array(batch.ids)] + self._placed(batch)
        if (batch.second_start < batch.lengths).any():
            second = np.arange(length) >= batch.second_start[:, None]
            return self.norm(x + self.kinds[mx.array(second.astype(np.int32))])
        return self.norm(x + self.kinds[0])

    def _placed(self, batch: PaddedBatch) -> mx.array:
        length = batch.ids.shape[1]
        mask = np.arange(length) < batch.lengths[:, None]
        counted = batch.ids != self.padding_id
        if self.padding_place is None or counted[mask].all():
            return self.places[:length]
        # A text may contain the padding token: it gets the padding's position, and no number.
        numbers = mx.array(np.maximum(np.cumsum(counted, axis=1) - 1, 0))
        return mx.where(mx.array(counted)[..., None], self.places[numbers], self.padding_place)

    def batch_bytes(self, rows: int, length: int) -> int:
        heads, itemsize = self.layers[0].heads, self.words.dtype.size
        scores = rows * heads * length * block_length(rows, heads, length, None)
        # Scores and their softmax; input, product, queries, keys, values and result; the activation's steps.
        return itemsize * (2 * scores + rows * length * (9 * self.hidden_size + 5 * self.inner_size))


@dataclass(frozen=True, eq=False)
class FirstTokenHead:
    """A score from the first token's hidden state through a tanh layer, as BERT and RoBERTa both have it."""

    dense: Linear
    out: Linear

    @classmethod
    def take(cls, tensors: Tensors, size: int, *, roberta: bool) -> FirstTokenHead:
        dense, out = ("classifier.dense", "classifier.out_proj") if roberta else ("pooler.dense", "classifier")
        require_one_label(tensors.rows(f"{out}.weight"))
        return cls(tensors.linear(dense, size, size), tensors.linear(out, size, 1))

    def __call__(self, hidden: mx.array, batch: PaddedBatch) -> mx.array:
        return self.out(mx.tanh(self.dense(hidden[:, 0]))).squeeze(-1)


def require_one_label(labels: int) -> None:
    """
    Raises:
        UnusableModelError: a classifier of several classes.
    """
    if labels != 1:
        raise UnusableModelError(f"it tells {labels} labels apart; a reranker has one")
