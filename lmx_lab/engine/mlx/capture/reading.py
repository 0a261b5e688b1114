"""Read the values of hooks while a model computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeVar

import mlx.core as mx

from lmx_lab.engine.mlx.capture.attention import AttentionRecorder
from lmx_lab.engine.mlx.capture.install import HookFunction, HookPoint, install
from lmx_lab.engine.mlx.capture.points import ATTN_OUT, BLOCK, EMBED, RESID_MID, RESID_PRE, HookPoints

ATTENTION = ".attn."
PATTERN = "attn.hook_pattern"
Key = TypeVar("Key", int, str)


class Reader:
    """Reads the values of hooks with these names.

    Args:
        names: Names in ``HookPoints.sizes``, or in ``extra``.
        extra: Additional hook points by name.
    """

    def __init__(self, found: HookPoints, names: Sequence[str], extra: Mapping[str, HookPoint]) -> None:
        self._found = found
        self._names = [*names, *extra]
        self._points = {**found.points, **extra}
        self._has_attention = any(ATTENTION in name and name not in found.points for name in names)
        blocks = len(found.parts.blocks)
        self.depth = max(
            block_of(name) + 1 if BLOCK.match(name) else 0 if name == EMBED else blocks for name in self._names
        )
        """Number of blocks on which the values depend."""

    def read(
        self, tokens: list[int], cache: Sequence[Any], rows: Sequence[int]
    ) -> tuple[dict[str, mx.array], list[list[mx.array]]]:
        """Compute tokens, and return the unevaluated values of some of them in float32. Patterns have the shape
        (rows, heads, keys), where the keys are those of the last positions. The second result contains the output of
        each block together with its values, in the order of the blocks.

        Args:
            cache: The key-value caches of the preceding tokens, to which these tokens are added.
            rows: Indices of the tokens whose values are needed.
        """
        blocks = self._found.parts.blocks
        values: dict[str, mx.array] = {}
        outputs: dict[int, mx.array] = {}
        functions: dict[HookPoint, HookFunction] = {
            HookPoint(block.module, "output"): partial(_keep, outputs, at) for at, block in enumerate(blocks)
        }
        for name in self._names:
            for key, point in self._sources(name).items():
                functions[point] = partial(_keep, values, key)
        recorder = AttentionRecorder(blocks) if self._has_attention else None
        with recorder or nullcontext(), install({**functions, **(recorder.functions if recorder else {})}, alone=True):
            self._found.parts.model(mx.array([tokens]), cache=cache)
        at = mx.array(list(rows), dtype=mx.int32)
        found = {name: self._value(name, values, recorder, at).astype(mx.float32) for name in self._names}
        computed = [[outputs[block]] for block in range(len(blocks))]
        for name, value in found.items() if rows else ():
            if BLOCK.match(name):
                computed[block_of(name)].append(value)
        return found, computed

    def _sources(self, name: str) -> dict[str, HookPoint]:
        """Return the hook points from which a value is computed, by name."""
        points = self._points
        if name in points:
            return {name: points[name]}
        if name.endswith(RESID_MID):
            return {part: points[part] for part in (name.replace(RESID_MID, end) for end in (RESID_PRE, ATTN_OUT))}
        return {}

    def _value(
        self, name: str, values: dict[str, mx.array], recorder: AttentionRecorder | None, rows: mx.array
    ) -> mx.array:
        if name.endswith(RESID_MID):
            before, added = (values[name.replace(RESID_MID, end)][0, rows] for end in (RESID_PRE, ATTN_OUT))
            return before + added
        if name in values:
            value = values[name][0, rows]
            return value.reshape(len(rows), *self._found.sizes.get(name, value.shape[1:]))
        assert recorder is not None
        attention = recorder.blocks[block_of(name)]
        if name.endswith(PATTERN):
            pattern = attention.softmax_rows(rows) if attention.call is None else attention.call.pattern(rows)
            assert pattern is not None
            return pattern
        assert attention.call is not None
        return attention.call.heads(name.rpartition("hook_")[2], rows)


def block_of(name: str) -> int:
    """Return the index of the block of a hook."""
    return int(name.split(".")[1])


def _keep(values: dict[Key, mx.array], key: Key, value: mx.array) -> None:
    values[key] = value
