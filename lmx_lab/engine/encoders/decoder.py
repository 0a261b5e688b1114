"""Run decoders of mlx-lm as embedders and rerankers, layer by layer and without a cache. Engine thread only."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache, make_prompt_cache
from mlx_lm.utils import load_model

from lmx_lab.engine.encoders.bert import require_one_label
from lmx_lab.engine.encoders.layers import (
    SCORES_BYTES,
    ModelConfig,
    PaddedBatch,
    Steps,
    on_cpu,
    require_finite,
    require_memory,
    run_to_end,
)
from lmx_lab.engine.encoders.sentence_transformers import LogitTokens
from lmx_lab.engine.mlx.weights import DTYPES, checked_classes, fit_weights, read_weights
from lmx_lab.errors import UnusableModelError

PROBE = [[1, 2, 3]]
"""Token ids of a batch that checks the layers at load."""
TOLERANCE = 0.05
"""Largest difference, relative to the largest value. Rounding causes less, another order of operations more."""


@dataclass(frozen=True, eq=False)
class Decoder:
    """A causal decoder without its head; implements ``Network``. Padding is on the right, so it has no effect."""

    inner: Any
    """mlx-lm's model without its head; it has ``embed_tokens``, ``layers`` and ``norm``."""
    heads: int
    hidden_size: int
    inner_size: int
    vocabulary_size: int
    itemsize: int
    positions: int | None = None
    segments: int = 1

    def forward(self, batch: PaddedBatch) -> Generator[mx.array, None, mx.array]:
        x = self.inner.embed_tokens(mx.array(batch.ids))
        chunk = self._chunk(*batch.ids.shape)
        for layer in self.inner.layers:
            x = yield from _run_layer(layer, x, chunk)
            yield x
        return self.inner.norm(x)  # type: ignore[no-any-return]

    def _chunk(self, rows: int, length: int) -> int:
        """Return the number of tokens computed at a time, so that a CPU does not store all attention scores."""
        if not on_cpu():
            return length
        return max(1, min(length, SCORES_BYTES // (self.itemsize * rows * self.heads * length)))

    def batch_bytes(self, rows: int, length: int) -> int:
        scores = rows * self.heads * self._chunk(rows, length) * length
        # Scores and their softmax; residual, norms, queries, keys, values, result; gate, up and their product.
        return self.itemsize * (2 * scores + rows * length * (10 * self.hidden_size + 4 * self.inner_size))


def _run_layer(layer: Any, x: mx.array, chunk: int) -> Steps:
    if chunk >= x.shape[1]:
        return layer(x, create_attention_mask(x), None)  # type: ignore[no-any-return]
    # Keys and values of this layer only, while it runs.
    cache, parts = KVCache(), []
    for start in range(0, x.shape[1], chunk):
        part = x[:, start : start + chunk]
        parts.append(layer(part, create_attention_mask(part, cache), cache))
        yield parts[-1]
    return mx.concatenate(parts, axis=1)


@dataclass(frozen=True, eq=False)
class LastTokenHead:
    """Computes a score from the hidden state of the last token.

    The weight is that of a classifier's only label, or the difference of the weights of two logits.
    """

    weight: mx.array
    """(size,), float32."""

    def __call__(self, hidden: mx.array, batch: PaddedBatch) -> mx.array:
        return batch.last_token(hidden).astype(mx.float32) @ self.weight


def read_decoder(folder: Path, config: ModelConfig, *, limit_bytes: int, dtype: str) -> Decoder:
    """Read a decoder without the head that predicts tokens.

    Raises:
        UnusableModelError: its attention or its layers are not supported, or a tensor is not finite.
        OutOfMemoryError: the weights exceed the limit.
    """
    model, _ = _read(folder, config, limit_bytes=limit_bytes, dtype=dtype, head=False)
    return _network(model)


def read_classifier(
    folder: Path, config: ModelConfig, *, limit_bytes: int, dtype: str
) -> tuple[Decoder, LastTokenHead]:
    """Read a decoder with a ``score`` layer of one label.

    Raises:
        UnusableModelError, OutOfMemoryError: as ``read_decoder``.
    """
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
    """Read a decoder whose score is made of the logits of one or two tokens.

    Raises:
        UnusableModelError, OutOfMemoryError: as ``read_decoder``.
    """
    model, _ = _read(folder, config, limit_bytes=limit_bytes, dtype=dtype, head=True)
    network = _network(model)
    known = network.vocabulary_size
    ids = [token for token in (tokens.true, tokens.false) if token is not None]
    if max(ids) >= known:
        raise UnusableModelError(f"its score uses the token id {max(ids)}; its ids are 0 to {known - 1}")
    # The weights that the hidden state is multiplied with for the logits of these tokens.
    layer = model.lm_head if "lm_head" in model else model.model.embed_tokens
    chosen = mx.array(ids)
    rows = layer.weight[chosen]
    if "scales" in layer:
        biases = layer.biases[chosen] if layer.get("biases") is not None else None
        how = {"group_size": layer.group_size, "bits": layer.bits, "mode": layer.mode}
        rows = mx.dequantize(rows, layer.scales[chosen], biases, **how)
    rows = rows.astype(mx.float32)
    weight = rows[0] - rows[1] if tokens.false is not None else rows[0]
    mx.eval(weight)
    head = LastTokenHead(weight)
    logits = model(mx.array(PROBE))[:, -1].astype(mx.float32)
    expected = logits[:, tokens.true] - (logits[:, tokens.false] if tokens.false is not None else 0)
    found = model.model(mx.array(PROBE))[:, -1].astype(mx.float32) @ weight
    _require_close(found, expected, mx.abs(logits).max(), "its logits are not a plain product with its last layer")
    return network, head


def decoder_bytes(folder: Path, config: ModelConfig, *, limit_bytes: int, dtype: str, head: bool) -> int:
    """Return the size of the weights of a decoder in memory, without reading them.

    Args:
        head: Whether its head is needed, which predicts tokens.

    Raises:
        UnusableModelError: as ``read_decoder``.
    """
    model, _ = _open(folder, config, head=head)
    fit_weights(model, dtype, limit_bytes=limit_bytes)
    return sum(value.nbytes for value in _parameters(model).values())


def _open(folder: Path, config: ModelConfig, *, head: bool) -> tuple[Any, mx.array | None]:
    """Return mlx-lm's model and the weight of its ``score`` layer. They have not been read yet."""
    if config.values.get("is_causal") is False or config.flag("use_bidirectional_attention"):
        raise UnusableModelError("its attention is bidirectional (config.json); only causal decoders are supported")
    scores: list[mx.array] = []

    # Called by mlx-lm with a keyword argument of this name.
    def classes(config: dict[str, Any]) -> tuple[Any, Any]:
        model_class, arguments = checked_classes(config)

        class Renamed(model_class):  # type: ignore[misc, valid-type]
            def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
                if "score.weight" in weights:
                    scores.append(weights.pop("score.weight"))
                # A checkpoint without a head has names without this prefix.
                prefix = "" if any(name.startswith("model.") for name in weights) else "model."
                renamed = {}
                for name, value in weights.items():
                    is_head = name.startswith("lm_head.")
                    if head or not is_head:
                        renamed[name if is_head else f"{prefix}{name}"] = value
                result: dict[str, mx.array] = super().sanitize(renamed)
                return result

        return Renamed, arguments

    tied = {} if head else {"tie_word_embeddings": True}
    model, _ = load_model(folder, lazy=True, model_config=tied, get_model_classes=classes)
    inner = getattr(model, "model", None)
    if not all(hasattr(inner, part) for part in ("embed_tokens", "layers", "norm")):
        raise UnusableModelError("mlx-lm's implementation does not consist of embed_tokens, layers and norm")
    kinds = sorted({type(cache).__name__ for cache in make_prompt_cache(model)})
    if kinds != ["KVCache"]:
        raise UnusableModelError(f"not all of its layers attend to all previous tokens ({', '.join(kinds)})")
    return model, scores[0] if scores else None


def _read(
    folder: Path, config: ModelConfig, *, limit_bytes: int, dtype: str, head: bool
) -> tuple[Any, mx.array | None]:
    """Load mlx-lm's model; return it and the weight of its ``score`` layer."""
    model, score = _open(folder, config, head=head)
    wanted, needed_bytes = DTYPES.get(dtype, mx.float32 if on_cpu() else None), 0
    for value in _parameters(model).values():
        converts = wanted is not None and mx.issubdtype(value.dtype, mx.floating)
        needed_bytes += value.size * wanted.size if wanted is not None and converts else value.nbytes
    require_memory(needed_bytes, limit_bytes)
    fit_weights(model, dtype, limit_bytes=limit_bytes)
    read_weights(model)
    for name, value in _parameters(model).items():
        if mx.issubdtype(value.dtype, mx.floating):
            require_finite(name, value)
    _check_layers(model)
    return model, score


def _parameters(model: Any) -> dict[str, mx.array]:
    flat: Any = tree_flatten(model.parameters())
    return dict(flat)


def _check_layers(model: Any) -> None:
    """Check that running the layers one by one gives the same result as the model."""
    expected = model.model(mx.array(PROBE)).astype(mx.float32)
    x = model.model.embed_tokens(mx.array(PROBE))
    try:
        for layer in model.model.layers:
            x = run_to_end(_run_layer(layer, x, x.shape[1]))
        found = model.model.norm(x).astype(mx.float32)
    except (TypeError, AttributeError) as exc:
        raise UnusableModelError(f"its layers in mlx-lm cannot be run one by one: {exc}") from exc
    what = "running its layers in mlx-lm one by one gives another result than the model"
    _require_close(found, expected, mx.abs(expected).max(), what)


def _require_close(found: mx.array, expected: mx.array, scale: mx.array, message: str) -> None:
    if not (mx.abs(found - expected).max() <= TOLERANCE * scale).item():
        raise UnusableModelError(message)


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
