"""Find the parts of a model, and name its hook points, where values can be read and replaced, as TransformerLens does.

The models of mlx-lm name their parts differently. Each role (embedding, blocks with attention and MLP, final norm) has
a list of names that are tried in order. The lists cover the families of mlx-lm; a family with another name needs an
additional entry.

Names of hook points that depend on the structure of a block are verified: the model computes two tokens, and
``hook_attn_out`` and ``hook_mlp_out`` exist only in blocks whose output is the sum of its input and both of them.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import make_prompt_cache

from lmx_lab.engine.mlx.capture.attention import AttentionRecorder, BlockAttention
from lmx_lab.engine.mlx.capture.install import HookFunction, HookPoint, Side, install
from lmx_lab.errors import InvalidRequestError, did_you_mean

EMBED, NORMALIZED, LOGITS = "hook_embed", "ln_final.hook_normalized", "logits"
RESID_PRE, RESID_MID, RESID_POST = "hook_resid_pre", "hook_resid_mid", "hook_resid_post"
ATTN_OUT, MLP_OUT, Z = "hook_attn_out", "hook_mlp_out", "attn.hook_z"
BLOCK = re.compile(r"^blocks\.(-?\d+)\.")
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
ProbeValues = Callable[[Any, Side], mx.array | None]
"""Returns the input or output of a module in a pass of two tokens; None if the module was not called."""
Places = tuple[dict[str, tuple[int, ...]], dict[str, HookPoint]]
"""The shapes of values at one position, and their hook points if they have one, by the last part of their names."""
SAME = 1e-2
"""Maximum rounding error of the outputs of heads, compared with the products of their patterns and values, relative to
the largest output."""
PROBE = (1, 2)
"""Tokens of the pass that verifies a model."""
TOLERANCE = 1e-3
"""Maximum rounding error of a sum, relative to the added terms."""
ROUNDING, HALF_ROUNDING = 2**-20, 2**-7
"""Maximum rounding error of a sum, relative to the sum, in float32 and in 16-bit types."""
DIFFERENT = 0.25
"""Difference, relative to the added terms, above which a value is never considered equal to a sum."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Block:
    """One block of a model. Its first input and its output are the residual stream."""

    module: Any
    attention: Any | None
    """None if the block has none of the names in ``ATTENTIONS``."""
    mlp: Any | None
    queries: Any | None
    """The projection that computes the queries of all heads, and those of keys and values."""
    keys: Any | None
    values: Any | None
    attention_output: Any | None
    """The projection that is applied to the outputs of all heads."""
    attention_ends: Sequence[Any]
    """Modules whose output attention may add to the residual stream, the most likely one first."""
    mlp_ends: Sequence[Any]
    """The same for the MLP."""


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
    # The module whose list contains the blocks, and the modules that contain this module, innermost first.
    path = next((name for name, module in model.named_modules() if module is layers[0]), "")
    owners = [model]
    for step in path.split("."):
        inner = owners[-1]
        owners.append(inner[int(step)] if isinstance(inner, list | tuple) else getattr(inner, step, None))
    owners = [module for module in reversed(owners[:-1]) if isinstance(module, Module)]
    blocks = []
    for layer in layers:
        attention, mlp = _child([layer], ATTENTIONS), _child([layer], MLPS)
        # In a few families, attention is inside a module that is not called.
        attention = _child([attention], ("attention",)) or attention
        blocks.append(
            Block(
                module=layer,
                attention=attention,
                mlp=mlp,
                queries=_child([attention], QUERIES),
                keys=_child([attention], KEYS),
                values=_child([attention], VALUES),
                attention_output=_child([attention], ATTENTION_OUTPUTS),
                attention_ends=_candidates(attention, layer, ATTENTION_NORMS),
                mlp_ends=_candidates(mlp, layer, MLP_NORMS),
            )
        )
    return Parts(model=model, blocks=blocks, embedding=_child(owners, EMBEDDINGS), norm=_child(owners, FINAL_NORMS))


def _child(owners: Sequence[Any], names: Sequence[str]) -> Any | None:
    children = (getattr(owner, name, None) for owner in owners for name in names)
    return next((child for child in children if isinstance(child, Module)), None)


def _candidates(part: Any | None, block: Any, names: Sequence[str]) -> list[Any]:
    norms = [_child([block], [name]) for name in names]
    return [] if part is None else [part, *(norm for norm in norms if norm is not None)]


def logits_of(parts: Parts, values: mx.array, side: Side = "input") -> mx.array:
    """Return the logits of inputs or outputs of the final norm. Its inputs are values of the residual stream after the
    last block.

    The model is called with other values at its final norm, because families scale and cap logits in different ways.
    Its blocks are not computed, because no value depends on them.

    Args:
        values: Of shape (rows, width).
    """
    replaced: HookFunction = lambda value: values[None].astype(value.dtype)  # noqa: E731
    with install({HookPoint(parts.norm, side): replaced}, alone=True):
        logits: mx.array = parts.model(mx.array([PROBE[:1]]), cache=make_prompt_cache(parts.model))
    return logits[0]


@dataclass(frozen=True, kw_only=True, eq=False)
class HookPoints:
    """The hook points of one model."""

    model: str
    """Id of the model, for messages."""
    parts: Parts
    points: dict[str, HookPoint] = field(default_factory=dict)
    """The hook points by name."""
    sizes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Shape of the value at one position, by the names that can be read. These are all names in
    ``points``, those of attention, and ``hook_resid_mid`` of blocks that add the outputs of attention and MLP
    sequentially. In patterns, 0 stands for the number of keys."""

    has_tail: bool = False
    """Whether the final norm and the head, applied to the output of the last block, give the logits."""

    def point(self, name: str) -> HookPoint:
        """Return the hook point with this name.

        Raises:
            InvalidRequestError: the model does not have the hook point, or its value can only be read.
        """
        if name in self.points:
            return self.points[name]
        if name in self.sizes:
            raise InvalidRequestError(f"{name} can be read, but not replaced; replace hook_attn_out", param="hooks")
        raise unknown_name(name, self.sizes, self.model)

    def matching(self, patterns: Sequence[str]) -> list[str]:
        """Return the names that can be read and match one of these patterns, in the order of the model. In a pattern,
        ``*`` stands for any characters, and a negative number of a block counts from the last block.

        Raises:
            InvalidRequestError: a pattern matches no name.
        """
        found, blocks = set[str](), len(self.parts.blocks)
        for pattern in patterns:
            known = BLOCK.sub(lambda match: f"blocks.{(at := int(match[1])) + blocks * (at < 0)}.", pattern)
            expression = re.compile(re.escape(known).replace(r"\*", ".*"))
            matches = [name for name in self.sizes if expression.fullmatch(name)]
            if not matches:
                raise unknown_name(pattern, self.sizes, self.model)
            found.update(matches)
        return [name for name in self.sizes if name in found]


def unknown_name(name: str, names: Iterable[str], model: str) -> InvalidRequestError:
    """Return the error for a name that a model does not have."""
    blocks: dict[str, list[str]] = {}
    for each in names:
        blocks.setdefault(BLOCK.sub("blocks.*.", each), []).append(each)
    if same := blocks.get(BLOCK.sub("blocks.*.", name)):
        listed = ", ".join(same if len(same) < 5 else [*same[:2], "…", same[-1]])
        return InvalidRequestError(f"{model} has no hook {name!r:.80}; it has {listed}", param="hooks")
    similar = did_you_mean(name, [*blocks, *itertools.chain.from_iterable(blocks.values())])
    return InvalidRequestError(f"{model} has no hook {name!r:.80}; it has {', '.join(blocks)}{similar}", param="hooks")


def find_points(parts: Parts, model: str) -> HookPoints:
    """Return the hook points of a model. To find them, the model computes two tokens, twice.

    Args:
        model: Id of the model, for messages.

    Raises:
        InvalidRequestError: the blocks do not pass one vector for each position.
    """
    probe = _Probe(parts)
    for block in parts.blocks:
        before, after = probe.value(block.module, "input"), probe.value(block.module, "output")
        if before is None or after is None or before.ndim != 3 or before.shape != after.shape:
            kind = getattr(parts.model, "model_type", type(parts.model).__name__)
            raise InvalidRequestError(
                f"{model} ({kind}) does not pass one vector for each position from block to block, so its activations "
                "have no names; use a model of another family",
                param="model",
            )
    ends = [_ends(probe, block) for block in parts.blocks]
    # If the output of attention is zero and the input of the block is the same, an MLP that depends on it changes.
    changes: dict[HookPoint, HookFunction] = {}
    for block, added in zip(parts.blocks, ends, strict=True):
        if added is not None:
            before = probe.value(block.module, "input")
            changes[HookPoint(block.module, "input")] = partial(lambda value, _: value, before)
            changes[HookPoint(added[0], "output")] = mx.zeros_like
    changed = probe.run(changes)
    found = HookPoints(model=model, parts=parts)
    _add(found, EMBED, probe, parts.embedding)
    for at, block in enumerate(parts.blocks):
        prefix = f"blocks.{at}."
        attention, mlp = ends[at] or (None, None)
        _add(found, prefix + RESID_PRE, probe, block.module, "input")
        sizes, points = _attention_places(probe, at, block)
        found.sizes.update({f"{prefix}attn.{name}": size for name, size in sizes.items()})
        found.points.update({f"{prefix}attn.{name}": point for name, point in points.items()})
        _add(found, prefix + ATTN_OUT, probe, attention)
        before, after = probe.value(mlp, "output"), changed.get((id(mlp), "output"))
        if before is not None and after is not None and not bool(mx.array_equal(before, after)):
            found.sizes[prefix + RESID_MID] = found.sizes[prefix + RESID_PRE]
        _add(found, prefix + MLP_OUT, probe, mlp)
        _add(found, prefix + RESID_POST, probe, block.module)
    _add(found, NORMALIZED, probe, parts.norm)
    _add(found, LOGITS, probe, parts.model)
    residual, logits = probe.value(parts.blocks[-1].module, "output"), probe.value(parts.model, "output")
    if NORMALIZED not in found.points or residual is None or logits is None:
        return found
    again = logits_of(parts, residual[0])
    has_tail = again.shape == logits[0].shape and _is_sum([mx.zeros_like(logits[0]), again], logits[0])
    return replace(found, has_tail=has_tail)


def _add(found: HookPoints, name: str, probe: _Probe, module: Any | None, side: Side = "output") -> None:
    """Add a hook point if the module exists and was called."""
    value = None if module is None else probe.value(module, side)
    if value is not None:
        found.points[name] = HookPoint(module, side)
        found.sizes[name] = tuple(value.shape[2:])


class _Probe:
    """Computes two tokens with a model, and keeps the inputs and outputs of its parts."""

    def __init__(self, parts: Parts) -> None:
        self._model = parts.model
        ends = [end for block in parts.blocks for end in (*block.attention_ends, *block.mlp_ends)]
        outputs = [part for part in (parts.embedding, parts.norm, parts.model) if part is not None]
        blocks = [block.module for block in parts.blocks]
        projections = [
            part for block in parts.blocks for part in (block.queries, block.keys, block.values) if part is not None
        ]
        heads = [block.attention_output for block in parts.blocks if block.attention_output is not None]
        self._places: list[tuple[Any, Side]] = [
            *((module, "input") for module in (*blocks, *heads)),
            *((module, "output") for module in (*blocks, *ends, *outputs, *projections)),
        ]
        recorder = AttentionRecorder([block.attention for block in parts.blocks])
        with recorder:
            self._values = self.run(recorder.functions)
        self.attention = recorder.blocks
        """The computations of attention by block index."""

    def value(self, module: Any, side: Side) -> mx.array | None:
        """Return a value; None if the module was not called, or does not have one row for each token."""
        return self._values.get((id(module), side))

    def run(self, changes: Mapping[HookPoint, HookFunction]) -> dict[tuple[int, Side], mx.array]:
        """Return the values of a pass in which some values are replaced."""
        values: dict[tuple[int, Side], mx.array] = {}

        def keep(key: tuple[int, Side], value: object) -> None:
            if isinstance(value, mx.array) and value.shape[:2] == (1, len(PROBE)):
                values[key] = value

        keeping = {HookPoint(module, side): partial(keep, (id(module), side)) for module, side in self._places}
        with install({**changes, **keeping}, alone=True):
            self._model(mx.array([PROBE]), cache=make_prompt_cache(self._model))
        mx.eval(list(values.values()))
        return values


def _ends(probe: _Probe, block: Block) -> tuple[Any, Any] | None:
    """Return the modules whose outputs a block adds to its input; None if its output is not such a sum."""
    before, after = probe.value(block.module, "input"), probe.value(block.module, "output")
    assert before is not None
    assert after is not None
    for attention, mlp in itertools.product(block.attention_ends, block.mlp_ends):
        added = [probe.value(end, "output") for end in (attention, mlp)]
        if all(value is not None and value.shape == before.shape for value in added) and _is_sum(
            [before, *(value for value in added if value is not None)], after
        ):
            return attention, mlp
    return None


def _is_sum(terms: Sequence[mx.array], total: mx.array) -> bool:
    """Return whether a value is the sum of terms, apart from rounding. The first term may exceed the others by far."""
    exact = [term.astype(mx.float32) for term in terms]
    error = mx.abs(sum(exact[1:], exact[0]) - total.astype(mx.float32)).max()
    added = mx.stack([mx.abs(term).max() for term in exact[1:]]).max()
    rounding = ROUNDING if total.dtype == mx.float32 else HALF_ROUNDING
    allowed = TOLERANCE * added + rounding * mx.abs(total).max()
    return bool(error <= mx.minimum(allowed, DIFFERENT * added))


def _attention_places(probe: _Probe, at: int, block: Block) -> Places:
    """Return the values of attention that a block has.

    Queries, keys, values and head outputs are available only if the output projection receives all head outputs in one
    vector. In the shape of the pattern, 0 stands for the number of keys.
    """
    if (attention := probe.attention.get(at)) is None:
        return {}, {}
    values = probe.value
    joined = values(block.attention_output, "input") if block.attention_output is not None else None
    if attention.call is None:
        return _places_of_softmax(block, attention, values, joined)
    call, sizes, points = attention.call, dict[str, tuple[int, ...]](), dict[str, HookPoint]()
    if joined is not None and joined.shape[-1] == call.output.shape[1] * call.output.shape[3]:
        kinds = {"rot_q": call.queries, "rot_k": call.keys, "v": call.values, "z": call.output}
        shapes = {kind: (value.shape[1], value.shape[3]) for kind, value in kinds.items()}
        for kind, module in (("q", block.queries), ("k", block.keys)):
            projected, shape = values(module, "output") if module is not None else None, shapes[f"rot_{kind}"]
            if projected is not None and math.prod(projected.shape[2:]) == math.prod(shape):
                sizes[f"hook_{kind}"] = shape
                points[f"hook_{kind}"] = HookPoint(module, "output")
        sizes.update({f"hook_{kind}": shape for kind, shape in shapes.items()})
        # Some families multiply the outputs of heads with a gate before the projection.
        if bool(mx.array_equal(joined, call.output.swapaxes(1, 2).reshape(joined.shape))):
            points["hook_z"] = HookPoint(block.attention_output, "input")
    z = sizes.pop("hook_z", None)
    sizes["hook_pattern"] = (call.queries.shape[1], 0)
    return (sizes if z is None else {**sizes, "hook_z": z}), points


def _places_of_softmax(block: Block, attention: BlockAttention, values: ProbeValues, joined: mx.array | None) -> Places:
    """Return the values of attention that is computed step by step. Queries, keys, values and head outputs are
    available only if the head outputs are the products of the pattern and the projected values.

    Args:
        joined: The input of the output projection.
    """
    pattern = attention.softmax_rows(mx.arange(2))
    if pattern is None or pattern.shape[2] != 2:
        return {}, {}
    heads = pattern.shape[1]
    sizes: dict[str, tuple[int, ...]] = {"hook_pattern": (heads, 0)}
    modules = {"q": block.queries, "k": block.keys, "v": block.values}
    found = {kind: None if module is None else values(module, "output") for kind, module in modules.items()}
    if joined is None or found["v"] is None or joined.shape[-1] % heads:
        return sizes, {}
    width = joined.shape[-1] // heads
    shared = found["v"].shape[-1] // width
    if not shared or found["v"].shape[-1] % width or heads % shared:
        return sizes, {}
    projected = mx.repeat(
        found["v"].astype(mx.float32).reshape(2, shared, width).swapaxes(0, 1), heads // shared, axis=0
    )
    outputs = (pattern.swapaxes(0, 1) @ projected).swapaxes(0, 1).reshape(joined.shape[1:])
    error, largest = mx.abs(outputs - joined[0].astype(mx.float32)).max(), mx.abs(outputs).max()
    if not bool(error <= SAME * largest):
        return sizes, {}
    points = {"hook_v": HookPoint(block.values, "output"), "hook_z": HookPoint(block.attention_output, "input")}
    head_counts = {"q": heads, "k": shared, "v": shared}
    for kind, count in head_counts.items():
        value = found[kind]
        if value is not None and value.shape[-1] % count == 0:
            sizes[f"hook_{kind}"] = (count, value.shape[-1] // count)
            points[f"hook_{kind}"] = HookPoint(modules[kind], "output")
    order = ("hook_q", "hook_k", "hook_v", "hook_pattern")
    return {**{name: sizes[name] for name in order if name in sizes}, "hook_z": (heads, width)}, points
