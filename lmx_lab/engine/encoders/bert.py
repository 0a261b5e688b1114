"""BERT (arXiv 1810.04805) and RoBERTa (arXiv 1907.11692). RoBERTa's positions begin after the padding token's id."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import LayerNorm

from lmx_lab.engine.encoders.layers import (
    ACTIVATIONS,
    Encoder,
    ModelConfig,
    PaddedBatch,
    Steps,
    TypedModule,
    attend,
    find_activation,
    join_modules,
    split_heads,
)
from lmx_lab.errors import UnusableModelError

ROBERTAS = frozenset({"roberta", "xlm-roberta", "camembert"})


class BertLayer(TypedModule):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        size, inner = config.size("hidden_size"), config.size("intermediate_size")
        eps = config.number("layer_norm_eps", 1e-12)
        self.heads = config.size("num_attention_heads")
        self.act = find_activation(config.values.get("hidden_act", "gelu"), ACTIVATIONS)
        own = join_modules(query=Linear(size, size), key=Linear(size, size), value=Linear(size, size))
        output = join_modules(dense=Linear(size, size), LayerNorm=LayerNorm(size, eps))
        self.attention = join_modules(**{"self": own, "output": output})
        self.intermediate = join_modules(dense=Linear(size, inner))
        self.output = join_modules(dense=Linear(inner, size), LayerNorm=LayerNorm(size, eps))

    def forward(self, x: mx.array, mask: mx.array | None) -> Steps:
        own: Any = self.attention.self
        queries, keys, values = (split_heads(part(x), self.heads) for part in (own.query, own.key, own.value))
        attended = yield from attend(queries, keys, values, mask)
        x = self.attention.output.LayerNorm(x + self.attention.output.dense(attended))
        inner = self.act(self.intermediate.dense(x))
        return self.output.LayerNorm(x + self.output.dense(inner))  # type: ignore[no-any-return]


class Bert(Encoder):
    """A BERT or RoBERTa model. The head of a classifier computes a score from the first token through a tanh layer."""

    prefix = r"bert\.|roberta\."
    ignored = r"pooler\.|cls\.|lm_head\.|classifier\.|embeddings\.(position_ids|token_type_ids)$"
    vectors = (9, 5)
    """Input, product, queries, keys, values and result; steps of the activation."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        if (kind := config.values.get("position_embedding_type", "absolute")) != "absolute":
            raise UnusableModelError(f"its position embeddings are of type {kind!r}; only absolute ones are supported")
        if config.flag("is_decoder") or config.flag("add_cross_attention"):
            raise UnusableModelError(
                "config.json describes a decoder; with this model_type only encoders are supported"
            )
        size, count = self.hidden_size, config.size("max_position_embeddings")
        is_roberta = config.values.get("model_type") in ROBERTAS
        self.padding_id = config.size("pad_token_id", 1) if is_roberta else None
        """RoBERTa's padding token, which is not counted in the positions; None for BERT."""
        self.first_position = 0 if self.padding_id is None else self.padding_id + 1
        self.positions, self.segments = count - self.first_position, config.size("type_vocab_size", 2)
        self.embeddings = join_modules(
            word_embeddings=Embedding(self.vocabulary_size, size),
            position_embeddings=Embedding(count, size),
            token_type_embeddings=Embedding(self.segments, size),
            LayerNorm=LayerNorm(size, config.number("layer_norm_eps", 1e-12)),
        )
        self.encoder = join_modules(layer=[BertLayer(config) for _ in range(config.size("num_hidden_layers"))])
        if config.flag("has_head"):
            last = Linear(size, 1)
            self.labels = "classifier.out_proj.weight" if is_roberta else "classifier.weight"
            self.classifier = join_modules(dense=Linear(size, size), out_proj=last) if is_roberta else last
            if not is_roberta:
                self.pooler = join_modules(dense=Linear(size, size))

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        # Names that were in use before 2019.
        old = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
        for before, now in old.items():
            weights = {name.replace(before, now): weight for name, weight in weights.items()}
        return super().sanitize(weights)

    @property
    def itemsize(self) -> int:
        return int(self.embeddings.LayerNorm.weight.dtype.size)

    def forward(self, batch: PaddedBatch) -> Steps:
        length, known = batch.ids.shape[1], self.embeddings
        numbers = np.arange(length) + self.first_position
        if self.padding_id is not None:
            # A text may contain the padding token. It gets the position embedding of padding and is not counted.
            counted = batch.ids != self.padding_id
            if not counted[np.arange(length) < batch.lengths[:, None]].all():
                counts = self.first_position + np.maximum(np.cumsum(counted, axis=1) - 1, 0)
                numbers = np.where(counted, counts, self.padding_id)
        x = known.word_embeddings(mx.array(batch.ids)) + known.position_embeddings(mx.array(numbers))
        in_second = np.arange(length) >= batch.second_start[:, None]
        segments = in_second if (batch.second_start < batch.lengths).any() else in_second[:1, :1] & False
        x = known.LayerNorm(x + known.token_type_embeddings(mx.array(segments.astype(np.int32))))
        for layer in self.encoder.layer:
            x = yield from layer.forward(x, batch.mask)
            yield x
        return x  # type: ignore[no-any-return]

    def classify(self, hidden: mx.array, batch: PaddedBatch) -> mx.array:
        if isinstance(self.classifier, Linear):
            dense, out = self.pooler.dense, self.classifier
        else:
            dense, out = self.classifier.dense, self.classifier.out_proj
        return out(mx.tanh(dense(hidden[:, 0]))).squeeze(-1)
