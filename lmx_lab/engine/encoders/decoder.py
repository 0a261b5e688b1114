"""Decoders of mlx-lm's as embedders and rerankers: their layers run one by one, without a cache. Engine thread only."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache, make_prompt_cache
from mlx_lm.utils import _get_classes, load_model

from lmx_lab.engine.encoders.bert import require_one_label
from lmx_lab.engine.encoders.layers import SCORES_BYTES, Steps, on_cpu, run_to_end
from lmx_lab.engine.encoders.network import ModelConfig, PaddedBatch
from lmx_lab.engine.encoders.sentence_transformers import LogitTokens
from lmx_lab.engine.encoders.tensors import require_finite
from lmx_lab.engine.mlx.weights_dtype import DTYPES, fit_weights
from lmx_lab.errors import OutOfMemoryError, UnusableModelError

TRIAL = [[1, 2, 3]]
TOLERANCE = 0.05
"""Of the largest number: rounding makes less of a difference, another way through the layers more."""


@dataclass(frozen=True, eq=False)
class Decoder:
    """A ``Network``. Padding is on the right, where causal attention does not look."""

    inner: Any
    """mlx-lm's model without its head: ``embed_tokens``, ``layers`` and ``norm``."""
    heads: int
    hidden_size: int
    inner_size: int
    vocabulary_size: int
    itemsize: int
    positions: int | None = None

    def forward(self, batch: PaddedBatch) -> Generator[mx.array, None, mx.array]:
        x = self.inner.embed_tokens(mx.array(batch.ids))
        chunk = self._chunk(*batch.ids.shape)
        for layer in self.inner.layers:
            x = yield from _through(layer, x, chunk)
            yield x
        return self.inner.norm(x)  # type: ignore[no-any-return]

    def _chunk(self, rows: int, length: int) -> int:
        """Tokens at a time, so that a CPU does not write out the scores of all."""
        if not on_cpu():
            return length
        return max(1, min(length, SCORES_BYTES // (self.itemsize * rows * self.heads * length)))

    def batch_bytes(self, rows: int, length: int) -> int:
        scores = rows * self.heads * self._chunk(rows, length) * length
        # Scores and their softmax; residual, norms, queries, keys, values, result; gate, up and their product.
        return self.itemsize * (2 * scores + rows * length * (10 * self.hidden_size + 4 * self.inner_size))


def _through(layer: Any, x: mx.array, chunk: int) -> Steps:
    if chunk >= x.shape[1]:
        return layer(x, create_attention_mask(x), None)  # type: ignore[no-any-return]
    # Keys and values of this layer, and only while it runs.
    cache, parts = KVCache(), []
    for start in range(0, x.shape[1], chunk):
        part = x[:, start : start + chunk]
        parts.append(layer(part, create_attention_mask(part, cache), cache))
        yield parts[-1]
    return mx.concatenate(parts, axis=1)


@dataclass(frozen=True, eq=False)
class LastTokenHead:
    """A score from the last token's hidden state; what a classifier's one label or two logits' difference comes to."""

    weight: mx.array
    """(size,), float32."""

    def __call__(self, hidden: mx.array, batch: PaddedBatch) -> mx.array:
        return batch.last(hidden).astype(mx.float32) @ self.weight


def read_decoder(folder: Path, config: ModelConfig, *, limit_bytes: int, dtype: str) -> Decoder:
    """A decoder for its hidden states; a head that writes text is not read.

    Raises:
        UnusableModelError: its attention or its layers are of a kind that is not known here, or a tensor is not finite.
        OutOfMemoryError: the weights exceed the limit.
    """
    model, _ = _read(folder, config, limit_bytes=limit_bytes, dtype=dtype, head=False)
    return _network(model)


def read_classifier(
    folder: Path, config: ModelConfig, *, limit_bytes: int, dtype: str
) -> tuple[Decoder, LastTokenHead]:
    """A decoder with a ``score`` layer of one label. Raises as ``read_decoder`` does."""
    model, score = _read(folder, config, limit_bytes=limit_bytes, dtype=dtype, head=False)
    if score is None:
        raise UnusableModelError("the tensor score.weight is missing")
    require_one_label(int(score.shape[0]))
    weight = score[0].astype(mx.float32)
    require_finite("score.weight", weight)
    return _network(model), LastTokenHead(weight)


def read_logit_reranker(
    folder: Path, config: ModelConfig, tokens: LogitTokens, *, limit_bytes: int, dtype: str
) -> tuple[Decoder, LastTokenHead]:
    """A decoder and the two tokens whose logits are its score. Raises as ``read_decoder`` does."""
    model, _ = _read(folder, config, limit_bytes=limit_bytes, dtype=dtype, head=True)
    network = _network(model)
    known = network.vocabulary_size
    ids = [token for token in (tokens.true, tokens.false) if token is not None]
    if max(ids) >= known:
        raise UnusableModelError(f"its score is of the token {max(ids)}; the model knows 0 to {known - 1}")
    rows = _logit_rows(model, ids)
    weight = rows[0] - rows[1] if tokens.false is not None else rows[0]
    mx.eval(weight)
    head = LastTokenHead(weight)
    logits = model(mx.array(TRIAL))[:, -1].astype(mx.float32)
    expected = logits[:, tokens.true] - (logits[:, tokens.false] if tokens.false is not None else 0)
    found = model.model(mx.array(TRIAL))[:, -1].astype(mx.float32) @ weight
    _require_close(found, expected, mx.abs(logits).max(), "logits are no plain product of its last layer")
    return network, head


def _logit_rows(model: Any, ids: list[int]) -> mx.array:
    """(ids, size): what the hidden state is multiplied with for these tokens' logits."""
    head = model.lm_head if "lm_head" in model else model.model.embed_tokens
    chosen = mx.array(ids)
    rows = head.weight[chosen]
    if "scales" in head:
        biases = head.biases[chosen] if head.get("biases") is not None else None
        rows = mx.dequantize(
            rows, head.scales[chosen], biases, group_size=head.group_size, bits=head.bits, mode=head.mode
        )
    return mx.array(rows, mx.float32)


def _read(
    folder: Path, config: ModelConfig, *, limit_bytes: int, dtype: str, head: bool
) -> tuple[Any, mx.array | None]:
    """mlx-lm's model with its weights in memory, and the weight of a ``score`` layer."""
    if config.values.get("is_causal") is False or config.flag("use_bidirectional_attention"):
        raise UnusableModelError("its tokens look ahead (config.json); only causal decoders are known here")
    scores: list[mx.array] = []

    # mlx-lm passes it by this name.
    def classes(config: dict[str, Any]) -> tuple[Any, Any]:
        model_class, arguments = _get_classes(config)

        class Mended(model_class):  # type: ignore[misc, valid-type]
            def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
                weights = _mended(weights, scores, head=head)
                mended: dict[str, mx.array] = super().sanitize(weights) if hasattr(model_class, "sanitize") else weights
                return mended

        return Mended, arguments

    tied = {} if head else {"tie_word_embeddings": True}
    model, _ = load_model(folder, lazy=True, model_config=tied, get_model_classes=classes)
    _check_shape(model)
    wanted = DTYPES.get(dtype, mx.float32 if on_cpu() else None)
    needed = sum(_bytes(value, wanted) for value in _parameters(model).values())
    if needed > limit_bytes:
        raise OutOfMemoryError(f"its weights take {needed / 1e9:.2f} GB, {limit_bytes / 1e9:.2f} GB are allowed")
    fit_weights(model, dtype, limit_bytes=limit_bytes)
    for name, value in _parameters(model).items():
        if mx.issubdtype(value.dtype, mx.floating):
            require_finite(name, value)
    _try_layers(model)
    return model, scores[0] if scores else None


def _mended(weights: dict[str, mx.array], scores: list[mx.array], *, head: bool) -> dict[str, mx.array]:
    """Names as mlx-lm has them, where they come from a checkpoint without head; without the heads not wanted."""
    if "score.weight" in weights:
        scores.append(weights.pop("score.weight"))
    if not any(name.startswith("model.") for name in weights):
        weights = {name if name.startswith("lm_head.") else f"model.{name}": each for name, each in weights.items()}
    return weights if head else {name: each for name, each in weights.items() if not name.startswith("lm_head.")}


def _parameters(model: Any) -> dict[str, mx.array]:
    flat: Any = tree_flatten(model.parameters())
    return dict(flat)


def _bytes(value: mx.array, wanted: mx.Dtype | None) -> int:
    floating = mx.issubdtype(value.dtype, mx.floating)
    return int(value.size * wanted.size if floating and wanted is not None else value.nbytes)


def _check_shape(model: Any) -> None:
    inner = getattr(model, "model", None)
    if not all(hasattr(inner, part) for part in ("embed_tokens", "layers", "norm")):
        raise UnusableModelError("mlx-lm builds it of other parts than embed_tokens, layers and norm")
    kinds = sorted({type(cache).__name__ for cache in make_prompt_cache(model)})
    if kinds != ["KVCache"]:
        raise UnusableModelError(f"its layers ({', '.join(kinds)}) do not all attend to all tokens before")


def _try_layers(model: Any) -> None:
    """Whether the layers, run one by one, say the same as the model."""
    expected = model.model(mx.array(TRIAL)).astype(mx.float32)
    x = model.model.embed_tokens(mx.array(TRIAL))
    try:
        for layer in model.model.layers:
            x = run_to_end(_through(layer, x, x.shape[1]))
        found = model.model.norm(x).astype(mx.float32)
    except (TypeError, AttributeError) as exc:
        raise UnusableModelError(f"its layers in mlx-lm cannot be run one by one: {exc}") from exc
    _require_close(found, expected, mx.abs(expected).max(), "layers in mlx-lm do not simply follow one another")


def _require_close(found: mx.array, expected: mx.array, scale: mx.array, what: str) -> None:
    if not (mx.abs(found - expected).max() <= TOLERANCE * scale).item():
        raise UnusableModelError(f"its {what}")


def _network(model: Any) -> Decoder:
    embedded = model.model.embed_tokens(mx.array([0]))
    args = model.args
    return Decoder(
        inner=model.model,
        heads=int(getattr(args, "num_attention_heads", 1)),
        hidden_size=int(embedded.shape[-1]),
        inner_size=int(getattr(args, "intermediate_size", 4 * embedded.shape[-1])),
        vocabulary_size=int(model.model.embed_tokens.weight.shape[0]),
        itemsize=int(embedded.dtype.size),
    )
