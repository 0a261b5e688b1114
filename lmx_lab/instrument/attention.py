"""Show the attention of a block: how much each token attends to the preceding tokens."""

from __future__ import annotations

import html

import numpy as np
from numpy.typing import NDArray

from lmx_lab.backend import Backend
from lmx_lab.blocking import in_thread, on_loop
from lmx_lab.errors import InvalidRequestError
from lmx_lab.instrument.traces import What, activation_fields, token_label, traced
from lmx_lab.results.figures import HeatMap, Picture
from lmx_lab.values.integers import whole_number
from lmx_lab.values.tracing import Trace

SHOWN_TOKENS = 40
"""Maximum number of tokens on each axis of the display, counted from the first; ``pattern`` contains all."""


class AttentionPattern(Picture):
    """The attention of all heads of a block. Notebooks display one head large, and the others on demand.

    Attributes:
        layer: Index of the block.
        head: Index of the head that is displayed large.
        tokens, texts: The ids and the texts of the tokens.
        pattern: Attention weights in float32, of shape (heads, queries, keys). The weights of a query sum to 1, or to
            less if the model has attention sinks.
    """

    def __init__(self, trace: Trace, *, head: int) -> None:
        self.model = trace.model
        self.tokens, self.texts = trace.tokens, trace.texts
        ((name, pattern),) = trace.arrays.items()
        self.layer = int(name.split(".")[1])
        self.pattern: NDArray[np.float32] = pattern.swapaxes(0, 1)
        self.head = self._index_of(head)

    def _index_of(self, head: int) -> int:
        heads = len(self.pattern)
        if not -heads <= head < heads:
            raise InvalidRequestError(
                f"head is {head}; block {self.layer} of {self.model} has {heads} heads, 0 to {heads - 1}", param="head"
            )
        return head % heads

    def heat_map(self, head: int | None = None) -> HeatMap:
        """Return the heat map of a head, by default ``head``, with one row for each attending token. A negative head
        counts from the last one.

        Raises:
            InvalidRequestError: the head does not exist.
        """
        head = self.head if head is None else self._index_of(head)
        values = self.pattern[head, :SHOWN_TOKENS, :SHOWN_TOKENS]
        labels = [token_label(text) for text in self.texts[:SHOWN_TOKENS]]

        def describe(row: int, column: int) -> str:
            return f"{self.texts[row]!r} attends to {self.texts[column]!r}: {values[row, column]:.2%}"

        return HeatMap(
            title=f"Block {self.layer}, head {head} of {self.model}",
            values=values.tolist(),
            rows=labels,
            columns=labels,
            row_axis="query",
            column_axis="key",
            describe=describe,
            limit=1.0,
            unit="attention weight",
        )

    def __repr__(self) -> str:
        heads, queries, _ = self.pattern.shape
        return f"<AttentionPattern of {self.model}: block {self.layer}, {heads} heads, {queries} tokens; .pattern>"

    def _repr_html_(self) -> str:
        small = ""
        for head, pattern in enumerate(self.pattern[:, :SHOWN_TOKENS, :SHOWN_TOKENS]):
            names, side = [""] * len(pattern), 110 / max(1, len(pattern))
            cells = {"values": pattern.tolist(), "rows": names, "columns": names, "cell": (side, side)}
            small += HeatMap(title=f"head {head}", limit=1.0, **cells).svg()
        more = len(self.tokens) - SHOWN_TOKENS
        note = (
            f"<div>The first {SHOWN_TOKENS} tokens are shown; .pattern contains {more} more.</div>" if more > 0 else ""
        )
        title = html.escape(f"All heads of block {self.layer}")
        return f"{self.svg()}<details><summary>{title}</summary>{small}</details>{note}"


async def attention(backend: Backend, what: What, layer: int, head: int = 0) -> AttentionPattern:
    """Return how much each token of a text attends to the preceding tokens, in all heads of a block.

    Args:
        what: As in ``trace``.
        layer: Index of the block; negative ones count from the last block.
        head: Index of the head that is displayed large; negative ones count from the last head.

    Raises:
        LabError: see ``trace``.
    """
    block, shown = whole_number(layer, "layer"), whole_number(head, "head")
    fields = activation_fields(f"blocks.{block}.attn.hook_pattern", None)
    text = await in_thread(lambda: traced(what))
    found = await on_loop(backend.portal, text.run(backend, fields))
    return AttentionPattern(found, head=shown)
