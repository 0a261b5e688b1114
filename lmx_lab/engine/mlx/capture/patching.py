"""Compute logits after a text in which single values are replaced by those of another text (activation patching).

All values that are replaced at one position are rows of one batch. A row starts at the block and the position of its
value, because all earlier values are equal in all rows: it joins the batch at its block, and uses the keys and values
of the text for the preceding positions. If the cache of a model does not support this, each row starts at the first
block and position.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache, create_attention_mask, make_prompt_cache

from lmx_lab.engine.mlx.capture.activations import (
    VOCABULARY_ROWS,
    Array,
    Part,
    Steps,
    TraceContext,
    block_of,
    chunk_limit,
    evaluate,
    in_requested_order,
    next_chunk,
    read_rows,
    resolve_positions,
)
from lmx_lab.engine.mlx.capture.install import HookFunction, HookPoint, install
from lmx_lab.engine.mlx.capture.points import ATTN_OUT, RESID_MID, RESID_POST, RESID_PRE, HookPoints, Z, logits_of
from lmx_lab.errors import InvalidRequestError, counted
from lmx_lab.values.tracing import PATCHABLE, Patching

BATCH_TOKENS = 4096
"""Maximum total number of tokens of the rows of a batch, which limits the memory for keys and values."""
SAME = 1e-2
"""Maximum rounding error of the logits of a row without a replaced value, compared with those of the text."""
NO_ROWS = np.zeros((0, 2), np.float32)


@dataclass(frozen=True, kw_only=True)
class _Cell:
    """One row of a batch: the value that is replaced in it."""

    name: str
    head: int | None = None
    """Index of the head whose value is replaced; None if the value does not consist of heads."""
    replaces: bool = True
    """False for a row that verifies that the batch reproduces the text."""

    @property
    def block(self) -> int:
        return block_of(self.name)

    @property
    def joins_after(self) -> bool:
        """Whether the row joins the batch after its block instead of before it."""
        return self.name.endswith(RESID_POST)

    @property
    def begins(self) -> int:
        """Index of the first block that the row computes."""
        return self.block + self.joins_after


def compute_patching(
    context: TraceContext, tokens: Sequence[int], clean: Sequence[int], pair: tuple[int, int], work: Patching
) -> Steps:
    """Return the array ``logits``, of shape (values, positions, 2), with the logits of two tokens after the text. The
    details ``names`` and ``heads`` describe the values. With ``together``, there is one position.

    Args:
        clean: Tokens of the text that provides the values.
        pair: The two tokens.
    """
    found = context.found
    cells = []
    for name in found.matching(work.hooks):
        if not name.endswith(PATCHABLE):
            raise InvalidRequestError(
                f"{name} cannot be patched; name hooks that end with {', '.join(PATCHABLE)}", param="hooks"
            )
        _point(found, name)  # raises an error if the value cannot be replaced
        heads = range(found.sizes[name][0]) if name.endswith(Z) else [None]
        cells += [_Cell(name=name, head=head) for head in heads]
    if len(clean) != len(tokens):
        raise InvalidRequestError(
            f"the clean text has {counted(len(clean), 'token')} and the corrupt one {len(tokens)}; both need the same "
            "number, so that their positions correspond; lab.patch compares texts such as two names of one token each",
            param="clean",
        )
    context.require_tail()
    positions, order = resolve_positions(work.positions, len(tokens))
    names = [*dict.fromkeys(cell.name for cell in cells)]
    width = found.sizes[f"blocks.0.{RESID_PRE}"][0] * (len(found.parts.blocks) + 1)
    context.check_bytes(
        4 * len(tokens) * (width + sum(math.prod(found.sizes[name]) for name in names)),
        f"the values of {counted(len(names), 'hook')} at {counted(len(tokens), 'position')}",
        "name fewer hooks, or shorten the texts",
    )
    sweep = _Sweep(context, tokens, pair)
    yield from sweep.read(clean, names)
    places = [positions] if work.together else [[position] for position in positions]
    logits = np.zeros((len(cells), len(places), 2), np.float32)
    for at, place in enumerate(places):
        logits[:, at] = yield from sweep.run(cells, place)
    details = {
        "names": [cell.name for cell in cells],
        "heads": [cell.head for cell in cells],
        "positions": [positions[at] for at in order],
        "clean": sweep.clean_logits,
        "corrupt": sweep.corrupt_logits,
    }
    return {"logits": logits if work.together else in_requested_order(logits, order, 1)}, details


def _point(found: HookPoints, name: str) -> HookPoint:
    """Return the place at which a value is replaced. Raises the same as ``HookPoints.point``."""
    # The residual stream between attention and MLP is changed through the output of attention.
    return found.point(name.replace(RESID_MID, ATTN_OUT))


class _Sweep:
    """The values of both texts that the rows use."""

    def __init__(self, context: TraceContext, tokens: Sequence[int], pair: tuple[int, int]) -> None:
        self._found = context.found
        self._parts = context.found.parts
        self._tokens = tokens
        self._pair = mx.array(pair)
        self._clean: dict[str, mx.array] = {}
        """Values of the clean text, with the positions as the first axis."""
        self._stream: list[mx.array] = []
        """The residual stream of the text before each block, and after the last one."""
        self._cache: list[Any] = []
        """The keys and values of the text."""
        self._restarts = False
        """Whether rows can start at their block and position."""
        self._verified = False
        self.clean_logits: list[float] = []
        self.corrupt_logits: list[float] = []

    def read(self, clean: Sequence[int], names: Sequence[str]) -> Generator[float, int, None]:
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
    ) -> Generator[float, int, dict[str, Array]]:
        arrays = {name: np.zeros((len(tokens), *self._found.sizes[name]), np.float32) for name in names}

        def keep(first: int, end: int, values: Mapping[str, Array]) -> None:
            for name, value in values.items():
                arrays[name][first : first + len(value)] = value

        yield from read_rows(self._found, names, tokens, range(len(tokens)), keep, cache=cache)
        return arrays

    def _pair_logits(self, residual: mx.array) -> mx.array:
        """Return the logits of both tokens, for values of the residual stream after the last block."""
        logits = logits_of(self._parts, residual)
        return logits[:, self._pair].astype(mx.float32)

    def run(self, cells: Sequence[_Cell], place: Sequence[int]) -> Generator[float, int, Array]:
        """Return the logits of each of these values, which is replaced at all positions of ``place``."""
        found = [NO_ROWS]
        while cells:
            limit = yield 0
            # A step computes at least one block of all rows, at two positions.
            rows = min(BATCH_TOKENS // len(self._tokens), chunk_limit(limit, len(self._parts.blocks)) // 2)
            some, cells = cells[: max(1, rows)], cells[max(1, rows) :]
            if self._restarts and not self._verified:
                both = yield from self._rows([replace(some[0], replaces=False), *some], place)
                error = np.abs(both[0] - self.corrupt_logits).max()
                self._verified = self._restarts = bool(error <= SAME * max(1.0, np.abs(self.corrupt_logits).max()))
                if self._verified:
                    found.append(both[1:])
                    continue
            found.append((yield from self._rows(some, place)))
        return np.concatenate(found)

    def _rows(self, cells: Sequence[_Cell], place: Sequence[int]) -> Generator[float, int, Array]:
        """Compute one batch, in which each row begins at its block and at the first position if that is possible."""
        at, first, layers = 0, 0, make_prompt_cache(self._parts.model)
        if self._restarts:
            at, first = place[0], cells[0].begins
            layers = [_RowCache(layer.keys[..., :at, :], layer.values[..., :at, :]) for layer in self._cache]
        limit = yield 0
        while True:
            end = at + next_chunk(len(self._tokens) - at, chunk_limit(limit, len(self._parts.blocks), len(cells)))
            functions = self._functions(cells, at, end, place)
            residual, parts = self._run(self._tokens[at:end], cells, functions, layers)
            limit = yield 0
            done = yield from evaluate(parts, limit)
            if end == len(self._tokens):
                break
            mx.eval([layer.state for layer in layers[first:]])
            limit, at = (yield done), end
        mx.eval(residual)
        yield done
        logits = [NO_ROWS]
        for row in range(0, len(cells), VOCABULARY_ROWS):
            logits.append(np.array(self._pair_logits(residual[row : row + VOCABULARY_ROWS])))
            yield 0
        return np.concatenate(logits)

    def _functions(
        self, cells: Sequence[_Cell], at: int, end: int, place: Sequence[int]
    ) -> dict[HookPoint, HookFunction]:
        """Return the functions for the positions from ``at`` to ``end``, exclusive. They replace values of rows. At the
        block where a row starts, they also add it to the batch, with the values of the text at these positions.
        """
        positions = [position for position in place if at <= position < end]
        rows_at: dict[HookPoint, list[int]] = {}
        for row, cell in enumerate(cells):
            if cell.replaces and positions:
                rows_at.setdefault(_point(self._found, cell.name), []).append(row)
        offsets = mx.array([position - at for position in positions])
        functions: dict[HookPoint, HookFunction] = {}
        for point, rows in rows_at.items():
            replacing = [cells[row] for row in rows]
            # Values of shape (positions, width).
            values = []
            for cell in replacing:
                value = self._clean[cell.name][mx.array(positions)]
                if cell.name.endswith(RESID_MID):
                    value = value - self._stream[cell.block][mx.array(positions)]
                elif cell.head is not None:
                    value = value[:, cell.head]
                values.append(value)
            functions[point] = partial(
                _change,
                self._found.sizes[replacing[0].name][0] if replacing[0].head is not None else 1,
                (mx.array(rows)[:, None], offsets[None], mx.array([cell.head or 0 for cell in replacing])[:, None]),
                mx.stack(values),
            )
        groups: dict[tuple[int, bool], list[int]] = {}
        for row, cell in enumerate(cells if self._restarts else ()):
            groups.setdefault((cell.block, cell.joins_after), []).append(row)
        for (block, after), rows in groups.items():
            point = self._found.point(f"blocks.{block}.{RESID_POST if after else RESID_PRE}")
            functions[point] = partial(
                _join,
                self._stream[block + after][at:end],
                count=len(rows),
                is_first=rows[0] == 0,
                change=functions.get(point),
            )
        return functions

    def _run(
        self,
        tokens: Sequence[int],
        cells: Sequence[_Cell],
        functions: Mapping[HookPoint, HookFunction],
        layers: Sequence[Any],
    ) -> tuple[mx.array, list[Part]]:
        """Compute tokens. Return the residual stream of each row after the last block, at the last position, and the
        outputs of the blocks, which are not evaluated yet.
        """
        blocks, outputs, kept = self._parts.blocks, dict[int, mx.array](), list[mx.array]()
        first, begins = (cells[0].begins if self._restarts else 0), sorted(cell.begins for cell in cells)
        # These functions are called after those that replace values.
        keep: dict[HookPoint, HookFunction] = {HookPoint(self._parts.norm, "input"): kept.append}
        for block in range(first, len(blocks)):
            keep[HookPoint(blocks[block].module, "output")] = partial(outputs.__setitem__, block)
        with install({**functions, **keep}, alone=True):
            self._parts.model(mx.array([tokens] * (1 if self._restarts else len(cells))), cache=layers)
        rows = [bisect_right(begins, block) if self._restarts else len(cells) for block in range(len(blocks))]
        parts = [([value], rows[block] * len(tokens) / len(blocks)) for block, value in outputs.items()]
        return kept[0][:, -1], parts


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


def _join(
    stream: mx.array, value: mx.array, *, count: int, is_first: bool, change: HookFunction | None
) -> mx.array | None:
    """Return a batch with ``count`` more rows. The first rows replace the row with which the model was called.

    Args:
        change: Replaces values of the batch; None if there are none to replace.
    """
    rows = mx.broadcast_to(stream.astype(value.dtype)[None], (count, *stream.shape))
    joined = rows if is_first else mx.concatenate([value, rows])
    return joined if change is None else change(joined)


def _change(heads: int, at: tuple[mx.array, mx.array, mx.array], new: mx.array, value: mx.array) -> mx.array:
    """Return a value in which rows are replaced.

    Args:
        heads: Number of heads in a row; 1 if the value does not consist of heads.
        at: Indices of rows, positions and heads, which are broadcast together.
        new: The values at these places.
    """
    changed = mx.array(value).reshape(*value.shape[:2], heads, -1)  # a copy: the model still uses the value itself
    changed[at] = new.astype(value.dtype)
    return changed.reshape(value.shape)
