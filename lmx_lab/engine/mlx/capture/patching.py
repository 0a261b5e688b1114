"""Compute logits after a text in which single values are replaced by those of another text (activation patching).

All replaced values at one position are rows of one batch. A row starts at the block and the position of its value,
because all earlier values are equal in all rows: it joins the batch at its block, and uses the keys and values of the
text for the preceding positions. Models whose caches do not support this compute each row from the start.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache, create_attention_mask, make_prompt_cache

from lmx_lab.engine.mlx.capture.activations import (
    Array,
    Steps,
    TraceContext,
    next_chunk,
    read_rows,
    resolve_positions,
)
from lmx_lab.engine.mlx.capture.install import HookFunction, HookPoint, install
from lmx_lab.engine.mlx.capture.points import RESID_POST, RESID_PRE
from lmx_lab.engine.mlx.capture.reading import block_of
from lmx_lab.engine.mlx.capture.tail import logits_of_residual
from lmx_lab.errors import InvalidRequestError
from lmx_lab.values.tracing import PATCHABLE, Patching

BATCH_TOKENS = 4096
"""Maximum total number of tokens of the rows of a batch, which limits the memory for keys and values."""
SAME = 1e-2
"""Maximum difference that rounding can cause between the logits of a row without a replaced value and those of the
text."""


@dataclass(frozen=True)
class _Cell:
    """One row of a batch."""

    name: str
    replaces: bool = True
    """False for a row that verifies that the batch reproduces the text."""

    @property
    def block(self) -> int:
        return block_of(self.name)

    @property
    def joins_after(self) -> bool:
        """Whether the row joins the batch after its block, not before it."""
        return self.name.endswith(RESID_POST)


def compute_patching(
    context: TraceContext, tokens: Sequence[int], clean: Sequence[int], pair: tuple[int, int], work: Patching
) -> Steps:
    """Return the array ``logits``, of shape (hooks, positions, 2), with the logits of two tokens after the text.

    Args:
        clean: Tokens of the text that provides the values.
        pair: The two tokens.
    """
    names = _names(context, work.hooks)
    if len(clean) != len(tokens):
        raise InvalidRequestError(
            f"the clean text has {len(clean)} tokens and the corrupt one {len(tokens)}; both need the same number, so "
            "that their positions correspond; lab.patch compares texts such as two names of one token each",
            param="clean",
        )
    context.require_tail()
    positions = resolve_positions(work.positions, len(tokens))
    found = context.found
    width = found.sizes[names[0]][0]
    context.check_bytes(
        4 * len(tokens) * width * (len(names) + len(found.parts.blocks) + 1),
        f"the values of {len(names)} hooks at {len(tokens)} positions",
        "name fewer hooks, or shorten the texts",
    )
    sweep = _Sweep(context, tokens, pair)
    yield from sweep.read(clean, names)
    logits = np.zeros((len(names), len(positions), 2), np.float32)
    cells = [_Cell(name) for name in names]
    size = max(1, BATCH_TOKENS // len(tokens))
    for at, position in enumerate(positions):
        for first in range(0, len(cells), size):
            logits[first : first + size, at] = yield from sweep.run(cells[first : first + size], position)
    details = {"names": names, "positions": positions, "clean": sweep.clean_logits, "corrupt": sweep.corrupt_logits}
    return {"logits": logits}, details


def _names(context: TraceContext, hooks: Sequence[str]) -> list[str]:
    names = context.found.matching(hooks)
    wrong = next((name for name in names if not name.endswith(PATCHABLE)), None)
    if wrong is not None:
        raise InvalidRequestError(
            f"{wrong} cannot be patched; name hooks that end with {', '.join(PATCHABLE)}", param="hooks"
        )
    return names


class _Sweep:
    """The values of both texts that the rows use."""

    def __init__(self, context: TraceContext, tokens: Sequence[int], pair: tuple[int, int]) -> None:
        self._context = context
        self._parts = context.found.parts
        self._tokens = tokens
        self._pair = mx.array(pair)
        self._clean: dict[str, mx.array] = {}
        """Values of the clean text, of shape (positions, width)."""
        self._stream: list[mx.array] = []
        """The residual stream of the text before each block, and after the last one."""
        self._cache: list[Any] = []
        """The keys and values of the text."""
        self._restarts = False
        """Whether rows can start at their block and position."""
        self._verified = False
        self.clean_logits: list[float] = []
        self.corrupt_logits: list[float] = []

    def read(self, clean: Sequence[int], names: Sequence[str]) -> Generator[int, int, None]:
        """Compute both texts."""
        last = f"blocks.{len(self._parts.blocks) - 1}.{RESID_POST}"
        cleaned = yield from self._read_all(clean, [*dict.fromkeys([*names, last])])
        self._clean = {name: mx.array(cleaned[name]) for name in names}
        stream = [*(f"blocks.{at}.{RESID_PRE}" for at in range(len(self._parts.blocks))), last]
        self._cache = make_prompt_cache(self._parts.model)
        self._restarts = all(type(layer) is KVCache for layer in self._cache)
        corrupt = yield from self._read_all(self._tokens, stream, self._cache)
        self._stream = [mx.array(corrupt[name]) for name in stream]
        self.clean_logits, self.corrupt_logits = (
            np.array(self._pair_logits(mx.array(values[last][-1:])))[0].tolist() for values in (cleaned, corrupt)
        )

    def _read_all(
        self, tokens: Sequence[int], names: Sequence[str], cache: Sequence[Any] | None = None
    ) -> Generator[int, int, dict[str, Array]]:
        found = self._context.found
        arrays = {name: np.zeros((len(tokens), *found.sizes[name]), np.float32) for name in names}

        def keep(first: int, end: int, values: Mapping[str, Array]) -> None:
            for name, value in values.items():
                arrays[name][first : first + len(value)] = value

        yield from read_rows(found, names, tokens, range(len(tokens)), keep, cache=cache)
        return arrays

    def _pair_logits(self, residual: mx.array) -> mx.array:
        """Return the logits of both tokens, for values of the residual stream after the last block."""
        logits = logits_of_residual(self._parts.model, self._parts.norm, residual)
        return logits[:, self._pair].astype(mx.float32)

    def run(self, cells: Sequence[_Cell], position: int) -> Generator[int, int, Array]:
        """Compute the rows of these cells, in the order of the model, at one position, and return their logits."""
        if self._restarts and not self._verified:
            control = _Cell(cells[0].name, replaces=False)
            logits = yield from self._restarted([control, *cells], position)
            error = np.abs(logits[0] - self.corrupt_logits).max()
            self._verified = self._restarts = bool(error <= SAME * max(1.0, np.abs(self.corrupt_logits).max()))
            if self._verified:
                return logits[1:]
        if self._restarts:
            return (yield from self._restarted(cells, position))
        return (yield from self._complete(cells, position))

    def _restarted(self, cells: Sequence[_Cell], position: int) -> Generator[int, int, Array]:
        """Compute each row from its block and its position."""
        layers = [_RowCache(layer.keys[..., :position, :], layer.values[..., :position, :]) for layer in self._cache]
        begins = [cell.block + cell.joins_after for cell in cells]
        blocks = len(self._parts.blocks)
        work = sum(blocks - begin for begin in begins) / blocks
        limit = yield 0
        at = position
        while True:
            end = at + next_chunk(len(self._tokens) - at, int(limit / max(1.0, work)))
            functions = self._joining(cells, at, end, replaces=at == position)
            residual = self._run(self._tokens[at:end], functions, layers)
            if end == len(self._tokens):
                break
            mx.eval([layer.state for layer in layers[begins[0] :]])
            limit, at = (yield round(work * (end - at))), end
        logits = np.array(self._pair_logits(residual))
        yield round(work * (end - at))
        return logits

    def _joining(self, cells: Sequence[_Cell], at: int, end: int, *, replaces: bool) -> dict[HookPoint, HookFunction]:
        """Return the functions that add rows to the batch, with the values of the text at these positions.

        Args:
            replaces: Whether the values at the first of these positions are replaced.
        """
        functions: dict[HookPoint, HookFunction] = {}
        groups: dict[tuple[int, bool], list[int]] = {}
        for row, cell in enumerate(cells):
            groups.setdefault((cell.block, cell.joins_after), []).append(row)
        for (block, after), rows in groups.items():
            stream = self._stream[block + after][at:end]
            side = RESID_POST if after else RESID_PRE
            own = [cells[row] for row in rows if cells[row].name.endswith(side)] if replaces else []
            function = partial(_join, stream, count=len(rows), is_first=rows[0] == 0)
            changes = [(cells.index(cell), self._clean[cell.name][at]) for cell in own if cell.replaces]
            functions[self._context.found.point(f"blocks.{block}.{side}")] = _then(function, changes)
            for row in rows if replaces else []:
                if not cells[row].name.endswith(side) and cells[row].replaces:
                    point = self._context.found.point(cells[row].name)
                    functions[point] = partial(_change, [(row, self._clean[cells[row].name][at])], 0)
        return functions

    def _complete(self, cells: Sequence[_Cell], position: int) -> Generator[int, int, Array]:
        """Compute each row from the start of the text."""
        layers = make_prompt_cache(self._parts.model)
        limit = yield 0
        at = 0
        while True:
            end = at + next_chunk(len(self._tokens) - at, limit // len(cells))
            functions: dict[HookPoint, HookFunction] = {}
            if at <= position < end:
                for row, cell in enumerate(cells):
                    change = [(row, self._clean[cell.name][position])]
                    functions[self._context.found.point(cell.name)] = partial(_change, change, position - at)
            residual = self._run(self._tokens[at:end], functions, layers, rows=len(cells))
            if end == len(self._tokens):
                break
            mx.eval([layer.state for layer in layers])
            limit, at = (yield len(cells) * (end - at)), end
        logits = np.array(self._pair_logits(residual))
        yield len(cells) * (end - at)
        return logits

    def _run(
        self,
        tokens: Sequence[int],
        functions: dict[HookPoint, HookFunction],
        layers: Sequence[Any],
        *,
        rows: int = 1,
    ) -> mx.array:
        """Compute tokens, and return the residual stream of each row after the last block, at the last position."""
        kept: list[mx.array] = []
        keep = HookPoint(self._parts.norm, "input")
        with install({**functions, keep: kept.append}, alone=True):
            self._parts.model(mx.array([tokens] * rows), cache=layers)
        return kept[0][:, -1]


class _RowCache:
    """Keys and values of a batch that additional rows can join in each block. Has the interface of ``KVCache``."""

    def __init__(self, keys: mx.array, values: mx.array) -> None:
        self._keys, self._values = keys, values
        self.offset = keys.shape[2]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self._keys, self._values = _extended(self._keys, keys), _extended(self._values, values)
        self.offset += keys.shape[2]
        return self._keys, self._values

    def make_mask(self, length: int, **options: Any) -> Any:
        return create_attention_mask(length, offset=self.offset, **options)

    @property
    def state(self) -> tuple[mx.array, mx.array]:
        return self._keys, self._values


def _extended(before: mx.array, new: mx.array) -> mx.array:
    return mx.concatenate([mx.broadcast_to(before, (len(new), *before.shape[1:])), new], axis=2)


def _join(stream: mx.array, value: mx.array, *, count: int, is_first: bool) -> mx.array:
    """Return a batch with ``count`` more rows. The first rows replace the row with which the model was called."""
    rows = mx.broadcast_to(stream.astype(value.dtype)[None], (count, *stream.shape))
    return rows if is_first else mx.concatenate([value, rows])


def _then(function: HookFunction, changes: Sequence[tuple[int, mx.array]]) -> HookFunction:
    """Return a function that also replaces values of rows at the first position."""

    def call(value: mx.array) -> mx.array:
        joined = function(value)
        assert joined is not None
        return _change(changes, 0, joined) if changes else joined

    return call


def _change(changes: Sequence[tuple[int, mx.array]], position: int, value: mx.array) -> mx.array:
    """Return a value in which rows are replaced at a position."""
    changed = mx.array(value)  # a copy, because the model still uses the original
    for row, new in changes:
        changed[row, position] = new.astype(value.dtype)
    return changed
