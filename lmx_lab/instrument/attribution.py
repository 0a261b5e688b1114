"""Show the contribution of each part of a model to the logit of a token (direct logit attribution)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from lmx_lab.backend import Backend
from lmx_lab.blocking import in_thread, on_loop
from lmx_lab.instrument.traces import Token, What, token_name, traced
from lmx_lab.results.figures import HeatMap, Picture
from lmx_lab.results.frames import make_table
from lmx_lab.values.tracing import Trace

if TYPE_CHECKING:
    import pandas as pd


class LogitAttribution(Picture):
    """The contributions of the parts of a model to the logit of the next token, or to a difference of two logits.

    Attributes:
        logit: The logit or the difference, without the soft cap that some families apply. It is the sum of
            ``embedding``, ``attention``, ``mlp`` and ``bias``.
        embedding: Contribution of the values before the first block.
        attention, mlp: Contributions of each block, of shape (blocks).
        heads: Contributions of each attention head, of shape (blocks, heads); NaN where attention is not the sum of
            its heads. Their sum differs from ``attention`` by the bias of the output projection, if there is one.
        bias: Contribution of the biases of the final norm and the output head.
    """

    def __init__(self, trace: Trace, *, label: str) -> None:
        details = trace.details
        self.model, self.texts = trace.model, trace.texts
        self.logit: float = details["logit"]
        self.embedding: float = details["embedding"]
        self.bias: float = details["bias"]
        self.attention: NDArray[np.float32] = trace.arrays["attention"]
        self.mlp: NDArray[np.float32] = trace.arrays["mlp"]
        self.heads: NDArray[np.float32] = trace.arrays["heads"]
        self._label = label

    @property
    def df(self) -> pd.DataFrame:
        """A data frame with one row for each part: ``embedding``, ``attention``, ``head``, ``mlp`` and ``bias``. The
        rows of heads are the parts of those of attention.

        Raises:
            MissingPackageError: pandas is not installed.
        """
        rows: list[tuple[int | None, str, int | None, float]] = [(None, "embedding", None, self.embedding)]
        for block, (attention, mlp) in enumerate(zip(self.attention, self.mlp, strict=True)):
            rows.append((block, "attention", None, float(attention)))
            rows += [(block, "head", head, float(value)) for head, value in enumerate(self.heads[block])]
            rows.append((block, "mlp", None, float(mlp)))
        rows.append((None, "bias", None, self.bias))
        return make_table(rows, {"block": "Int64", "part": "str", "head": "Int64", "contribution": "float64"})

    def heat_map(self) -> HeatMap:
        """Return the heat map of the contributions, with the last block on top."""
        names = [*(f"head {head}" for head in range(self.heads.shape[1])), "attention", "MLP"]
        values = np.column_stack([self.heads, self.attention, self.mlp])[::-1]
        blocks = range(len(values))[::-1]

        def describe(row: int, column: int) -> str:
            return f"block {blocks[row]}, {names[column]}: {values[row, column]:+.3f}"

        return HeatMap(
            title=f"Contributions to the logit of {self._label}, {self.model}",
            values=values.tolist(),
            rows=[str(block) for block in blocks],
            columns=names,
            row_axis="block",
            describe=describe,
            unit="contribution in logits",
            cell=(30.0, 12.0),
        )

    def __repr__(self) -> str:
        return (
            f"<LogitAttribution of {self.model}: {self._label} {self.logit:.3f} = {self.embedding:.3f} embedding, "
            f"{self.attention.sum():.3f} attention, {self.mlp.sum():.3f} MLPs, {self.bias:.3f} biases; .df has all>"
        )


async def direct_logit_attribution(
    backend: Backend, what: What, token: Token, *, other: Token | None = None
) -> LogitAttribution:
    """Return the contribution of each block, and each of its attention heads, to the logit of the next token.

    Args:
        what: As in ``trace``.
        token: Id or text of the token, such as ``" Paris"``; a text must be exactly one token.
        other: If set, the logit of ``token`` minus that of ``other`` is decomposed.

    Raises:
        LabError: see ``trace``.
    """
    names = [token_name(token, "token"), *([] if other is None else [token_name(other, "other")])]
    fields = {"kind": "attribution", **dict(zip(("token", "other"), names, strict=False))}
    text = await in_thread(lambda: traced(what))
    found = await on_loop(backend.portal, text.run(backend, fields))
    label = " minus ".join(map(repr, names))
    return LogitAttribution(found, label=label)
