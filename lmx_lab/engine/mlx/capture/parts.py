"""Find the parts of a model by their role: the embedding, the blocks with attention and MLP, and the final norm.

The models of mlx-lm name their parts differently. Each role has a list of names that are tried in order. The lists
cover the families of mlx-lm; a family with another name needs an additional entry.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mlx.nn.layers.base import Module

from lmx_lab.errors import InvalidRequestError

EMBEDDINGS = (
    *("embed_tokens", "wte", "word_embeddings", "embeddings", "tok_embeddings"),
    *("embedding", "token_embeddings", "embed_in", "embed"),
)
FINAL_NORMS = (
    *("norm", "ln_f", "norm_f", "final_layernorm", "final_layer_norm", "final_norm"),
    *("embedding_norm", "output_norm"),
)
ATTENTIONS = (
    *("self_attn", "attn", "attention", "self_attention"),
    *("linear_attn", "conv", "mamba", "temporal_block", "mixer"),
)
"""Attention, and the modules that replace it in some layers of hybrid models."""
QUERIES = ("q_proj", "query_proj", "wq", "attn_query")
KEYS = ("k_proj", "key_proj", "wk", "attn_key")
VALUES = ("v_proj", "value_proj", "wv", "attn_value")
ATTENTION_OUTPUTS = ("o_proj", "out_proj", "dense", "c_proj", "wo", "attn_out", "attn_resid")
"""Projections in attention, from and to the residual stream."""
MLPS = ("mlp", "feed_forward", "block_sparse_moe", "ffn", "moe", "mlp_block")
ATTENTION_NORMS = (
    "post_attention_layernorm",
    "post_self_attn_layernorm",
    "post_attention_norm",
    "post_attn_norm",
    "post_mixer_norm",
)
"""Norms that some families apply to the output of attention, before it is added to the residual stream."""
MLP_NORMS = ("post_feedforward_layernorm", "post_mlp_layernorm", "post_ffw_norm", "post_ffn_norm", "post_mlp_norm")
"""Norms that some families apply to the output of the MLP, before it is added to the residual stream."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Block:
    """One block of a model. Its first input and its output are the residual stream."""

    module: Any
    attention: Any | None
    """None if the block has none of the names in ``ATTENTIONS``."""
    mlp: Any | None

    @property
    def queries(self) -> Any | None:
        """The projection that computes the queries of all heads."""
        return _child([self.attention], QUERIES)

    @property
    def keys(self) -> Any | None:
        """The projection that computes the keys of all heads."""
        return _child([self.attention], KEYS)

    @property
    def values(self) -> Any | None:
        """The projection that computes the values of all heads."""
        return _child([self.attention], VALUES)

    @property
    def attention_output(self) -> Any | None:
        """The projection that is applied to the outputs of all heads."""
        return _child([self.attention], ATTENTION_OUTPUTS)

    @property
    def attention_ends(self) -> list[Any]:
        """Modules whose output attention may add to the residual stream, the most likely one first."""
        return _candidates(self.attention, self.module, ATTENTION_NORMS)

    @property
    def mlp_ends(self) -> list[Any]:
        """Modules whose output the MLP may add to the residual stream, the most likely one first."""
        return _candidates(self.mlp, self.module, MLP_NORMS)


@dataclass(frozen=True, kw_only=True, eq=False)
class Parts:
    """The parts of a model. ``embedding`` and ``norm`` are None if their names are unknown."""

    model: Any
    blocks: Sequence[Block]
    embedding: Any | None
    norm: Any | None


def find_parts(model: Any, name: str) -> Parts:
    """Return the parts of a model.

    Args:
        name: Id of the model, for messages.

    Raises:
        InvalidRequestError: the model has no list of blocks.
    """
    layers = getattr(model, "layers", None)
    if not isinstance(layers, list | tuple) or not all(isinstance(layer, Module) for layer in layers) or not layers:
        kind = getattr(model, "model_type", type(model).__name__)
        raise InvalidRequestError(
            f"{name} ({kind}) has no list of blocks, so its activations have no names; use a model of another family",
            param="model",
        )
    owners = list(_owners(model, layers[0]))
    return Parts(
        model=model,
        blocks=[Block(module=layer, attention=_attention(layer), mlp=_child([layer], MLPS)) for layer in layers],
        embedding=_child(owners, EMBEDDINGS),
        norm=_child(owners, FINAL_NORMS),
    )


def _owners(model: Any, layer: Any) -> Iterator[Any]:
    """Yield the module whose list contains a layer, and the modules that contain this module, innermost first."""
    path = next((name for name, module in model.named_modules() if module is layer), "")
    names = path.split(".")
    modules = [model]
    for name in names:
        inner = modules[-1]
        step = inner[int(name)] if isinstance(inner, list | tuple) else getattr(inner, name, None)
        modules.append(step)
    return (module for module in reversed(modules[:-1]) if isinstance(module, Module))


def _child(owners: Sequence[Any], names: Sequence[str]) -> Any | None:
    children = (getattr(owner, name, None) for owner in owners for name in names)
    return next((child for child in children if isinstance(child, Module)), None)


def _attention(block: Any) -> Any | None:
    """Return the attention of a block. In a few families, it is inside a module that is not called."""
    found = _child([block], ATTENTIONS)
    return found if found is None else _child([found], ("attention",)) or found


def _candidates(part: Any | None, block: Any, names: Sequence[str]) -> list[Any]:
    norms = [_child([block], [name]) for name in names]
    return [] if part is None else [part, *(norm for norm in norms if norm is not None)]
