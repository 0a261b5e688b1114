"""Read the values of hooks for a text, which is computed in chunks."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from numpy.typing import NDArray

from lmx_lab.engine.mlx import memory
from lmx_lab.engine.mlx.capture.attention import AttentionRecorder
from lmx_lab.engine.mlx.capture.install import HookFunction, HookPoint, install
from lmx_lab.engine.mlx.capture.points import ATTN_OUT, BLOCK, EMBED, LOGITS, RESID_MID, RESID_PRE, HookPoints
from lmx_lab.errors import InvalidRequestError, counted
from lmx_lab.values.tracing import Activations

LOGITS_CHUNK_TOKENS = 64
"""Maximum number of tokens of a chunk whose logits are read, because each token has logits for the whole vocabulary."""
VOCABULARY_ROWS = 32
"""Number of rows whose logits a step computes while answers are generated."""
NO_POINTS: Mapping[str, HookPoint] = {}
Array = NDArray[Any]
Results = tuple[dict[str, Array], dict[str, Any]]
"""The arrays and the details of a ``Trace``."""
Steps = Generator[float, int, Results]
"""A computation that is divided into steps. It yields the work of a step, and receives the limit for the work of the
next step. The unit of work is one token, computed by all blocks. After other work, it yields 0."""
Part = tuple[list[mx.array], float]
"""Arrays that a block computes, and their work in the unit of ``Steps``."""
PATTERN = "attn.hook_pattern"


@dataclass(frozen=True, kw_only=True, eq=False)
class TraceContext:
    """The traced model and the limits."""

    found: HookPoints
    limit_bytes: int
    """Maximum size of the values that a trace keeps."""
    text_of: Callable[[int], str]
    """Returns the text of a token."""

    def check_bytes(self, needed: int, what: str, remedy: str) -> None:
        """Check the size of values before they are computed.

        Args:
            what: Description of the values for the message.
            remedy: What the caller can do.

        Raises:
            InvalidRequestError: the size exceeds the limit.
        """
        if needed > self.limit_bytes:
            raise InvalidRequestError(
                f"{what} need {needed:,} bytes, and {self.limit_bytes:,} are allowed (trace_bytes); {remedy}",
                param="hooks",
            )

    def require_tail(self) -> None:
        """Check that the logits of any value of the residual stream can be computed.

        Raises:
            InvalidRequestError: the final norm of the model is unknown.
        """
        if not self.found.has_tail:
            raise InvalidRequestError(
                f"the logits of {self.found.model} are not computed by a final norm and a head after its last block, "
                "so they cannot be computed for other values; read the logits with lab.trace, or use a model of "
                "another family",
                param="model",
            )


def resolve_positions(positions: Sequence[int] | None, count: int) -> tuple[list[int], list[int]]:
    """Return the positions to compute, in ascending order without duplicates and negative ones, and for each requested
    position its index among them.

    Args:
        positions: None returns all positions.
        count: Number of tokens.

    Raises:
        InvalidRequestError: a position does not exist, or the list is empty.
    """
    if positions is None:
        return list(range(count)), list(range(count))
    wrong = next((at for at in positions if not -count <= at < count), None)
    if wrong is not None or not positions:
        found = "is empty" if wrong is None else f"contains {wrong}"
        raise InvalidRequestError(
            f"positions {found}; the text has {counted(count, 'token')}, at the positions 0 to {count - 1}",
            param="positions",
        )
    computed = sorted({at % count for at in positions})
    return computed, [bisect_left(computed, at % count) for at in positions]


def in_requested_order(values: Array, order: Sequence[int], axis: int = 0) -> Array:
    """Return values at computed positions as values at the requested ones; see ``resolve_positions``."""
    return values if list(order) == list(range(values.shape[axis])) else values.take(order, axis)


def next_chunk(left: int, limit: int) -> int:
    """Return the number of tokens of the next chunk.

    A chunk has a single token only if the text has one, because sliding-window caches reorder keys for single tokens.
    """
    count = min(left, max(2, limit))
    return count + 1 if left - count == 1 else count


def evaluate(parts: list[Part], limit: int) -> Generator[float, int, float]:
    """Evaluate arrays in the order of the blocks, and yield before the work of a step would exceed ``limit``.

    MLX computes lazily: after the graph of a pass has been built, its evaluation can be interrupted after any block.

    Args:
        parts: The arrays of each block. The list is emptied, so that values are freed as soon as possible.

    Returns:
        The work since the last yield.
    """
    done, pending = 0.0, list[mx.array]()
    while parts:
        arrays, work = parts.pop(0)
        pending += arrays
        done += work
        if not parts or done + parts[0][1] > limit:
            mx.eval(pending)
            pending.clear()
            if parts:
                limit, done = (yield done), 0.0
    return done


def chunk_limit(limit: int, blocks: int, rows: int = 1) -> int:
    """Return the maximum number of tokens of each row in a pass, so that a step can compute at least one block.

    Args:
        limit: Maximum work of a step, in the unit of ``Steps``.
        rows: Number of rows of the batch.
    """
    return min(limit * blocks, memory.MAX_CHUNK_TOKENS) // rows


def compute_activations(context: TraceContext, tokens: Sequence[int], work: Activations) -> Steps:
    """Return the values of the hooks by name."""
    names = context.found.matching(work.hooks)
    positions, order = resolve_positions(work.positions, len(tokens))
    shapes: dict[str, tuple[int, ...]] = {}
    for name in names:
        size = context.found.sizes[name]
        shapes[name] = (len(positions), size[0], len(tokens)) if name.endswith(PATTERN) else (len(positions), *size)
    context.check_bytes(
        sum(4 * int(np.prod(shape)) * len(order) // len(positions) for shape in shapes.values()),
        f"{counted(len(names), 'hook')} at {counted(len(order), 'position')} of a text with "
        f"{counted(len(tokens), 'token')}",
        "name fewer hooks or positions, or shorten the text",
    )
    arrays: dict[str, Array] = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}

    def keep(first: int, end: int, values: Mapping[str, Array]) -> None:
        for name, value in values.items():
            rows = arrays[name][first : first + len(value)]
            # With a sliding window, the keys are those of the last positions.
            (rows[..., end - value.shape[-1] : end] if name.endswith(PATTERN) else rows)[:] = value

    yield from read_rows(context.found, names, tokens, positions, keep)
    ordered = {name: in_requested_order(value, order) for name, value in arrays.items()}
    return ordered, {"positions": [positions[at] for at in order]}


def read_rows(
    found: HookPoints,
    names: Sequence[str],
    tokens: Sequence[int],
    positions: Sequence[int],
    keep: Callable[[int, int, Mapping[str, Array]], None],
    *,
    cache: Sequence[Any] | None = None,
    extra: Mapping[str, HookPoint] = NO_POINTS,
) -> Generator[float, int, None]:
    """Compute a text in chunks, and pass the values of hooks at some positions to ``keep``. Tokens after the last of
    these positions are not computed.

    Args:
        positions: In ascending order.
        keep: Called with the index of the first of the positions in a chunk, the number of tokens computed so far, and
            the values of the positions in the chunk.
        cache: Receives the keys and values of all computed tokens; by default they are discarded.
        extra: Additional hook points to read, by name.
    """
    reader, blocks = Reader(found, names, extra), len(found.parts.blocks)
    layers = make_prompt_cache(found.parts.model) if cache is None else cache
    last = len(tokens) if cache is not None else positions[-1] + 1
    at, first = 0, 0
    limit = yield 0
    while at < last:
        largest = min(limit, LOGITS_CHUNK_TOKENS) if LOGITS in names else chunk_limit(limit, blocks)
        end = at + next_chunk(min(len(tokens) - at, max(2, last - at)), largest)
        rows = [position - at for position in positions if at <= position < end]
        values, computed = reader.read(list(tokens[at:end]), layers, rows)
        # The cache is needed only for further chunks.
        needs_cache = end < last or cache is not None
        parts = [(arrays, (end - at) / blocks) for arrays in computed[: blocks if needs_cache else reader.depth]]
        del computed
        limit = yield 0
        done = yield from evaluate(parts, limit)
        mx.eval(values if rows else {}, [layer.state for layer in layers] if needs_cache else [])
        if rows:
            keep(first, end, {name: np.array(value, copy=False) for name, value in values.items()})
        del values
        first += len(rows)
        limit, at = (yield done), end


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
        self._has_attention = any(".attn." in name and name not in found.points for name in names)
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
            HookPoint(block.module, "output"): partial(outputs.__setitem__, at) for at, block in enumerate(blocks)
        }
        for name in self._names:
            # The residual stream between attention and MLP is the sum of two values.
            sources = [name.replace(RESID_MID, end) for end in (RESID_PRE, ATTN_OUT)]
            for source in sources if name.endswith(RESID_MID) else [name] if name in self._points else []:
                functions[self._points[source]] = partial(values.__setitem__, source)
        recorder = AttentionRecorder([block.attention for block in blocks]) if self._has_attention else None
        with recorder or nullcontext(), install({**functions, **(recorder.functions if recorder else {})}, alone=True):
            self._found.parts.model(mx.array([tokens]), cache=cache)
        at = mx.array(list(rows), dtype=mx.int32)
        found = {name: self._value(name, values, recorder, at).astype(mx.float32) for name in self._names}
        computed = [[outputs[block]] for block in range(len(blocks))]
        for name, value in found.items() if rows else ():
            if BLOCK.match(name):
                computed[block_of(name)].append(value)
        return found, computed

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
