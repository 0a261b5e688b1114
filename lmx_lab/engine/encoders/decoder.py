"""Run decoders of mlx-lm as embedders and rerankers, layer by layer and without a cache. Engine thread only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache, make_prompt_cache
from mlx_lm.utils import load_model

from lmx_lab.engine.encoders.layers import (
    SCORES_BYTES,
    Head,
    ModelConfig,
    Network,
    PaddedBatch,
    Steps,
    on_cpu,
    read_model,
    require_finite,
    require_one_label,
    run_to_end,
)
from lmx_lab.engine.mlx.weights import checked_classes
from lmx_lab.errors import UnusableModelError

PROBE = [[1, 2, 3]]
"""Token ids of a batch that checks the layers at load."""
TOLERANCE = 0.05
"""Largest difference, relative to the largest value. Rounding causes less, another order of operations more."""


class Decoder(Network):
    """A causal decoder without its head. Padding is on the right, so it has no effect.

    Args:
        model: mlx-lm's model, whose ``model`` has ``embed_tokens``, ``layers`` and ``norm``.
    """

    vectors = (10, 4)
    """Residual, norms, queries, keys, values, result; gate, up and their product."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.inner, self.positions, self.segments = model.model, None, 1
        embedded = model.model.embed_tokens(mx.array([0]))
        self.hidden_size = int(embedded.shape[-1])
        self.heads = int(getattr(model.args, "num_attention_heads", 1))
        self.inner_size = int(getattr(model.args, "intermediate_size", 4 * self.hidden_size))
        self.vocabulary_size = int(model.model.embed_tokens.weight.shape[0])
        self._itemsize = int(embedded.dtype.size)

    @property
    def itemsize(self) -> int:
        return self._itemsize

    def forward(self, batch: PaddedBatch) -> Steps:
        x = self.inner.embed_tokens(mx.array(batch.ids))
        chunk = self.block_length(*batch.ids.shape)
        for layer in self.inner.layers:
            x = yield from _run_layer(layer, x, chunk)
            yield x
        return self.inner.norm(x)  # type: ignore[no-any-return]

    def block_length(self, rows: int, length: int) -> int:
        """See ``Network``. A CPU does not store all attention scores."""
        if not on_cpu():
            return length
        return max(1, min(length, SCORES_BYTES // (self.itemsize * rows * self.heads * length)))


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


def read_decoder(
    folder: Path, config: ModelConfig, *, limit_bytes: int, dtype: str, head: bool
) -> tuple[Any, mx.array | None]:
    """Read mlx-lm's model, and return it with the weight of its ``score`` layer. Running its layers one by one must
    give the same result as the model.

    Args:
        head: Whether its head is needed, which predicts tokens.

    Raises:
        UnusableModelError: its attention or its layers are not supported, or a tensor is not finite.
        OutOfMemoryError: the weights exceed the limit.
    """
    model, score = open_decoder(folder, config, head=head)
    read_model(model, limit_bytes=limit_bytes, dtype=dtype)
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
    return model, score


def classifier_head(score: mx.array | None) -> Head:
    """Return the head that a ``score`` layer of one label is.

    Raises:
        UnusableModelError: it is missing, has several labels, or is not finite.
    """
    if score is None:
        raise UnusableModelError("the tensor score.weight is missing")
    require_one_label(int(score.shape[0]))
    weight = score[0].astype(mx.float32)
    require_finite("score.weight", weight)
    return lambda hidden, batch: batch.last_token(hidden).astype(mx.float32) @ weight


def logit_head(model: Any, true: int, false: int | None) -> Head:
    """Return the head whose score is the logit of the token ``true``, minus that of ``false`` if given.

    Raises:
        UnusableModelError: a token does not exist, or the logits are computed in another way.
    """
    known = int(model.model.embed_tokens.weight.shape[0])
    ids = [token for token in (true, false) if token is not None]
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
    weight = rows[0] - rows[1] if false is not None else rows[0]
    mx.eval(weight)
    logits = model(mx.array(PROBE))[:, -1].astype(mx.float32)
    expected = logits[:, true] - (logits[:, false] if false is not None else 0)
    found = model.model(mx.array(PROBE))[:, -1].astype(mx.float32) @ weight
    _require_close(found, expected, mx.abs(logits).max(), "its logits are not a plain product with its last layer")
    return lambda hidden, batch: batch.last_token(hidden).astype(mx.float32) @ weight


def open_decoder(folder: Path, config: ModelConfig, *, head: bool) -> tuple[Any, mx.array | None]:
    """Return mlx-lm's model and the weight of its ``score`` layer. They have not been read yet.

    Args:
        head: Whether its head is needed, which predicts tokens.

    Raises:
        UnusableModelError: as ``read_decoder``.
    """
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


def _require_close(found: mx.array, expected: mx.array, scale: mx.array, message: str) -> None:
    if not (mx.abs(found - expected).max() <= TOLERANCE * scale).item():
        raise UnusableModelError(message)
