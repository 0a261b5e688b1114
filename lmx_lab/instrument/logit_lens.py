"""Show the tokens that a model would predict after each of its blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from lmx_lab.backend import Backend
from lmx_lab.blocking import in_thread, on_loop
from lmx_lab.errors import InvalidRequestError
from lmx_lab.instrument.traces import What, position_list, token_label, traced
from lmx_lab.results.figures import HeatMap, Picture
from lmx_lab.results.frames import make_table
from lmx_lab.values.tracing import Trace

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = {
    **{"block": "int64", "position": "int64", "token": "str", "rank": "int64", "predicted": "str"},
    **{"id": "int64", "logprob": "float32"},
}
SHOWN_POSITIONS = 16
"""Maximum number of positions in the display, counted from the last; the data frame contains all."""


class LogitLensTable(Picture):
    """The most likely next tokens after each block and each position of a text.

    Attributes:
        tokens, texts: The ids and the texts of the tokens of the whole text.
        positions: The positions that were computed.
        ids: Ids of the predicted tokens, of shape (blocks, positions, top), by descending probability.
        logprobs: The natural log-probabilities of ``ids``.
    """

    def __init__(self, trace: Trace) -> None:
        self.model = trace.model
        self.tokens, self.texts = trace.tokens, trace.texts
        self.positions: tuple[int, ...] = tuple(trace.details["positions"])
        self.ids, self.logprobs = trace.arrays["ids"], trace.arrays["logprobs"]
        self._predicted: dict[str, str] = trace.details["texts"]

    def predicted(self, block: int, position: int) -> tuple[str, ...]:
        """Return the texts of the most likely next tokens after a block and a position, by descending probability.

        Args:
            block: Index of the block; negative ones count from the end.
            position: One of ``positions``; negative ones count from the end of the text.

        Raises:
            InvalidRequestError: the block does not exist, or the position was not computed.
        """
        blocks, at = len(self.ids), position + len(self.texts) if position < 0 else position
        if not -blocks <= block < blocks:
            raise InvalidRequestError(
                f"block is {block}; {self.model} has {blocks} blocks, 0 to {blocks - 1}", param="block"
            )
        if at not in self.positions:
            raise InvalidRequestError(
                f"position is {position}, which was not computed; .positions lists the computed ones", param="position"
            )
        return tuple(self._predicted[str(token)] for token in self.ids[block, self.positions.index(at)])

    @property
    def df(self) -> pd.DataFrame:
        """A data frame with one row for each block, position and rank (1 is the most likely token).

        Raises:
            MissingPackageError: pandas is not installed.
        """
        blocks, places, ranks = (axis.ravel() for axis in np.indices(self.ids.shape))
        positions = np.array(self.positions)[places]
        columns = (
            blocks,
            positions,
            [self.texts[at] for at in positions],
            ranks + 1,
            [self._predicted[str(token)] for token in self.ids.ravel()],
            self.ids.ravel(),
            self.logprobs.ravel(),
        )
        return make_table(dict(zip(COLUMNS, columns, strict=True)), COLUMNS)

    def heat_map(self) -> HeatMap:
        """Return the heat map: the most likely token in each cell, coloured by its probability, with the last block on
        top. It contains the last ``SHOWN_POSITIONS`` positions.
        """
        shown = range(max(0, len(self.positions) - SHOWN_POSITIONS), len(self.positions))
        blocks = range(len(self.ids))[::-1]
        probabilities = np.exp(self.logprobs[..., 0])

        def describe(row: int, column: int) -> str:
            block, at = blocks[row], shown[column]
            pairs = zip(self.predicted(block, self.positions[at]), self.logprobs[block, at], strict=True)
            lines = [f"{np.exp(logprob):7.2%}  {text!r}" for text, logprob in pairs]
            return "\n".join([f"block {block}, after {self.texts[self.positions[at]]!r}", *lines])

        return HeatMap(
            title=f"Logit lens of {self.model}",
            values=[[float(probabilities[block, at]) for at in shown] for block in blocks],
            rows=[str(block) for block in blocks],
            columns=[token_label(self.texts[self.positions[at]]) for at in shown],
            row_axis="block",
            column_axis="token",
            texts=[[token_label(self.predicted(block, self.positions[at])[0]) for at in shown] for block in blocks],
            describe=describe,
            limit=1.0,
            unit="probability of the token",
            cell=(62.0, 17.0),
        )

    def __repr__(self) -> str:
        blocks, positions, top = self.ids.shape
        last = ", ".join(map(repr, self.predicted(-1, max(self.positions))))
        return (
            f"<LogitLensTable of {self.model}: {blocks} blocks, {positions} positions, {top} tokens each; after the "
            f"last block and position: {last}; .df contains all values>"
        )

    def _repr_html_(self) -> str:
        more = len(self.positions) - SHOWN_POSITIONS
        note = (
            f"<div>The last {SHOWN_POSITIONS} positions are shown; .df contains {more} more.</div>" if more > 0 else ""
        )
        return self.svg() + note


async def logit_lens(
    backend: Backend, what: What, *, top: int = 5, positions: int | Sequence[int] | None = None
) -> LogitLensTable:
    """Return the tokens that the model would predict after each of its blocks, at each position of a text.

    The final norm and the head of the model are applied to the residual stream after each block.

    Args:
        what: As in ``trace``.
        top: Number of tokens for each block and position, up to 100.
        positions: As in ``trace``.

    Raises:
        LabError: see ``trace``.
    """
    fields = {"kind": "logit_lens", "top": top, "positions": position_list(positions)}
    text = await in_thread(lambda: traced(what))
    return LogitLensTable(await on_loop(backend.portal, text.run(backend, fields)))
