"""Read the queries, keys, values and patterns of a model's attention.

MLX computes attention in one function, which does not return its pattern. While a pass is recorded, this function is
replaced by one that keeps its arguments, from which the pattern is computed. A few families compute attention step by
step; for these, the result of the softmax is kept. The functions are replaced in the whole process, so they check the
thread, and record only on the one that started the recording.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

import mlx.core as mx

from lmx_lab.engine.mlx.capture.install import HookFunction, HookPoint

REPLACING = threading.Lock()
"""Lock that is held while the functions are replaced, because a process may have several engine threads."""


@dataclass(kw_only=True, eq=False)
class AttentionCall:
    """The arguments and the result of one attention call. Shapes are (1, heads, tokens, width)."""

    queries: mx.array
    keys: mx.array
    values: mx.array
    scale: float
    mask: mx.array | str | None
    sinks: mx.array | None
    output: mx.array

    def pattern(self, rows: mx.array) -> mx.array:
        """Return the attention weights of these queries, of shape (rows, heads, keys). The rows of a head with a sink
        sum to less than 1.
        """
        queries = self.queries[:, :, rows].astype(mx.float32) * self.scale
        heads, length, count = queries.shape[1], self.queries.shape[2], self.keys.shape[2]
        keys = mx.repeat(self.keys.astype(mx.float32), heads // self.keys.shape[1], axis=1)
        scores = queries @ keys.swapaxes(-1, -2)
        mask = self.mask
        if isinstance(mask, str):
            mask = mx.arange(count - length, count)[:, None] >= mx.arange(count)[None]
        if mask is not None:
            mask = mask[..., rows, :] if mask.shape[-2] > 1 else mask
            scores = mx.where(mask, scores, -mx.inf) if mask.dtype == mx.bool_ else scores + mask.astype(mx.float32)
        if self.sinks is not None:
            sinks = mx.broadcast_to(self.sinks.astype(mx.float32)[None, :, None, None], (*scores.shape[:3], 1))
            scores = mx.concatenate([scores, sinks], axis=-1)
        weights = mx.softmax(scores, axis=-1)[0, :, :, :count]
        return weights.swapaxes(0, 1)

    def heads(self, kind: str, rows: mx.array) -> mx.array:
        """Return the values of these tokens, of shape (rows, heads, width).

        Args:
            kind: ``rot_q``, ``rot_k``, ``v`` or ``z``.
        """
        value = {"rot_q": self.queries, "rot_k": self.keys, "v": self.values, "z": self.output}[kind]
        # Keys and values include those of the preceding tokens.
        return value[0, :, value.shape[2] - self.queries.shape[2] :][:, rows].swapaxes(0, 1)


@dataclass(kw_only=True, eq=False)
class BlockAttention:
    """The attention computations of one block in a pass."""

    calls: list[AttentionCall] = field(default_factory=list)
    softmaxes: list[mx.array] = field(default_factory=list)
    """Results of softmax if attention is computed step by step."""

    @property
    def call(self) -> AttentionCall | None:
        """The only call of MLX's function; None if it was not called, or several times."""
        return self.calls[0] if len(self.calls) == 1 else None

    def softmax_rows(self, rows: mx.array) -> mx.array | None:
        """Return the attention weights of these queries, of shape (rows, heads, keys), if attention was computed step
        by step; None if there are other results of softmax.
        """
        if self.calls or len(self.softmaxes) != 1 or self.softmaxes[0].ndim < 4 or self.softmaxes[0].shape[0] != 1:
            return None
        weights = self.softmaxes[0]
        # Heads that share keys are on a separate axis.
        weights = weights.reshape(-1, *weights.shape[-2:])
        return weights[:, rows].astype(mx.float32).swapaxes(0, 1)


class AttentionRecorder:
    """Records the computations of attention in the blocks of a model.

    To record a pass, install ``functions``, and run the pass in ``with recorder``.

    Args:
        modules: The attention of each block; None if a block has none.
    """

    def __init__(self, modules: Sequence[Any | None]) -> None:
        self.blocks: dict[int, BlockAttention] = {}
        """The records by block index."""
        self.functions: dict[HookPoint, HookFunction] = {}
        self._current: BlockAttention | None = None
        self._originals: tuple[Callable[..., mx.array], Callable[..., mx.array]] | None = None
        for at, module in enumerate(modules):
            if module is not None:
                self.functions[HookPoint(module, "input")] = partial(self._begin, at)
                self.functions[HookPoint(module, "output")] = self._end

    def _begin(self, at: int, _: mx.array) -> None:
        self._current = self.blocks.setdefault(at, BlockAttention())

    def _end(self, _: mx.array) -> None:
        self._current = None

    def __enter__(self) -> Self:
        REPLACING.acquire()
        thread, attend, softmax = threading.get_ident(), mx.fast.scaled_dot_product_attention, mx.softmax

        def record_attention(queries: mx.array, keys: mx.array, values: mx.array, **options: Any) -> mx.array:
            output: mx.array = attend(queries, keys, values, **options)
            if self._current is not None and threading.get_ident() == thread:
                known = {name: options.get(name) for name in ("mask", "sinks")}
                call = AttentionCall(
                    queries=queries, keys=keys, values=values, scale=options["scale"], output=output, **known
                )
                self._current.calls.append(call)
            return output

        def record_softmax(values: mx.array, *args: Any, **options: Any) -> mx.array:
            result: mx.array = softmax(values, *args, **options)
            if self._current is not None and threading.get_ident() == thread:
                self._current.softmaxes.append(result)
            return result

        self._originals = attend, softmax
        setattr(mx.fast, "scaled_dot_product_attention", record_attention)  # noqa: B010
        mx.softmax = record_softmax
        return self

    def __exit__(self, *exc_info: object) -> None:
        assert self._originals is not None
        mx.fast.scaled_dot_product_attention, mx.softmax = self._originals
        REPLACING.release()
