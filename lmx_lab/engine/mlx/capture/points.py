"""Name the hook points of a model, at which values can be read and replaced, as TransformerLens does.

Names that depend on the structure of a block are verified: the model computes two tokens, and
``hook_attn_out`` and ``hook_mlp_out`` exist only in blocks whose output is the sum of its input and both of them.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from lmx_lab.engine.mlx.capture.attention import AttentionRecorder, Places, attention_places
from lmx_lab.engine.mlx.capture.install import HookFunction, HookPoint, Side, install
from lmx_lab.engine.mlx.capture.parts import Block, Parts
from lmx_lab.engine.mlx.capture.tail import logits_of_residual
from lmx_lab.errors import InvalidRequestError, did_you_mean

EMBED, NORMALIZED, LOGITS = "hook_embed", "ln_final.hook_normalized", "logits"
RESID_PRE, RESID_MID, RESID_POST = "hook_resid_pre", "hook_resid_mid", "hook_resid_post"
ATTN_OUT, MLP_OUT, Z = "hook_attn_out", "hook_mlp_out", "attn.hook_z"
BLOCK = re.compile(r"^blocks\.\d+\.")
PROBE = (1, 2)
"""Tokens of the pass that verifies a model."""
TOLERANCE = 1e-3
"""Maximum rounding error of a sum, relative to the added terms."""
ROUNDING, HALF_ROUNDING = 2**-20, 2**-7
"""Maximum rounding error of a sum, relative to the sum, in float32 and in 16-bit types."""
DIFFERENT = 0.25
"""Difference, relative to the added terms, above which a value is never considered equal to a sum."""


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
        ``*`` stands for any characters.

        Raises:
            InvalidRequestError: a pattern matches no name.
        """
        return match_names(patterns, self.sizes, self.model)


def match_names(patterns: Iterable[str], names: Iterable[str], model: str) -> list[str]:
    """Return the names that match one of these patterns, in their order. Raises the same as ``HookPoints.matching``."""
    names, found = list(names), set[str]()
    for pattern in patterns:
        expression = re.compile(re.escape(pattern).replace(r"\*", ".*"))
        matches = [name for name in names if expression.fullmatch(name)]
        if not matches:
            raise unknown_name(pattern, names, model)
        found.update(matches)
    return [name for name in names if name in found]


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
    _require_blocks(probe, parts, model)
    ends = [_ends(probe, block) for block in parts.blocks]
    sequential = _sequential(probe, parts.blocks, ends)
    found = HookPoints(model=model, parts=parts)
    _add(found, EMBED, probe, parts.embedding)
    for at, block in enumerate(parts.blocks):
        prefix = f"blocks.{at}."
        attention, mlp = ends[at] or (None, None)
        _add(found, prefix + RESID_PRE, probe, block.module, "input")
        sizes, points = probe.attention_places(at, block)
        found.sizes.update({f"{prefix}attn.{name}": size for name, size in sizes.items()})
        found.points.update({f"{prefix}attn.{name}": point for name, point in points.items()})
        _add(found, prefix + ATTN_OUT, probe, attention)
        if sequential[at]:
            found.sizes[prefix + RESID_MID] = found.sizes[prefix + RESID_PRE]
        _add(found, prefix + MLP_OUT, probe, mlp)
        _add(found, prefix + RESID_POST, probe, block.module)
    _add(found, NORMALIZED, probe, parts.norm)
    _add(found, LOGITS, probe, parts.model)
    return replace(found, has_tail=NORMALIZED in found.points and _has_tail(probe, parts))


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
        self._attention = AttentionRecorder(parts.blocks)
        with self._attention:
            self._values = self.run(self._attention.functions)

    def attention_places(self, at: int, block: Block) -> Places:
        """Return the shapes and places of the values of attention in a block."""
        attention = self._attention.blocks.get(at)
        return ({}, {}) if attention is None else attention_places(block, attention, self.value)

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


def _require_blocks(probe: _Probe, parts: Parts, model: str) -> None:
    for block in parts.blocks:
        before, after = probe.value(block.module, "input"), probe.value(block.module, "output")
        if before is None or after is None or before.ndim != 3 or before.shape != after.shape:
            kind = getattr(parts.model, "model_type", type(parts.model).__name__)
            raise InvalidRequestError(
                f"{model} ({kind}) does not pass one vector for each position from block to block, so its activations "
                "have no names; use a model of another family",
                param="model",
            )


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


def _sequential(probe: _Probe, blocks: Sequence[Block], ends: Sequence[tuple[Any, Any] | None]) -> list[bool]:
    """Return for each block whether its MLP depends on the output of its attention."""
    changes: dict[HookPoint, HookFunction] = {}
    for block, found in zip(blocks, ends, strict=True):
        before = probe.value(block.module, "input")
        if found is not None and before is not None:
            changes[HookPoint(block.module, "input")] = partial(_constant, before)
            changes[HookPoint(found[0], "output")] = mx.zeros_like
    changed = probe.run(changes)
    results = []
    for found in ends:
        before = None if found is None else probe.value(found[1], "output")
        after = None if found is None else changed.get((id(found[1]), "output"))
        results.append(before is not None and after is not None and not bool(mx.array_equal(before, after)))
    return results


def _has_tail(probe: _Probe, parts: Parts) -> bool:
    residual, logits = probe.value(parts.blocks[-1].module, "output"), probe.value(parts.model, "output")
    if residual is None or logits is None:
        return False
    again = logits_of_residual(parts.model, parts.norm, residual[0])
    return again.shape == logits[0].shape and _is_sum([mx.zeros_like(logits[0]), again], logits[0])


def _constant(value: mx.array, _: mx.array) -> mx.array:
    return value
