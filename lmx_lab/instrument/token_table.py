"""Show the log-probabilities of an answer's tokens as a table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING, overload

from lmx_lab.frames import align_columns, html_table, make_table
from lmx_lab.values.generation import TokenLogprob

if TYPE_CHECKING:
    import pandas as pd

TABLE_COLUMNS = {"token": "str", "logprob": "float64", "probability": "float64", "alternatives": "object"}
SHOWN_ROWS = 40


class TokenTable(Sequence[TokenLogprob]):
    """The tokens of an answer with their log-probabilities and alternatives; ``df`` is a data frame."""

    def __init__(self, tokens: Sequence[TokenLogprob]) -> None:
        self._tokens = tuple(tokens)

    def __len__(self) -> int:
        return len(self._tokens)

    @overload
    def __getitem__(self, at: int) -> TokenLogprob: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[TokenLogprob, ...]: ...
    def __getitem__(self, at: int | slice) -> TokenLogprob | tuple[TokenLogprob, ...]:
        return self._tokens[at]

    @property
    def df(self) -> pd.DataFrame:
        """A data frame with one row for each token: its text, its natural log-probability, its probability from 0 to 1,
        and a dictionary of the most likely tokens at this position with their log-probabilities.

        Raises:
            MissingPackageError: pandas is not installed.
        """
        rows = [
            (token.text, token.logprob, _probability(token), {other.text: other.logprob for other in token.top})
            for token in self._tokens
        ]
        frame: pd.DataFrame = make_table(rows, TABLE_COLUMNS)
        return frame

    def __repr__(self) -> str:
        rows = [tuple(TABLE_COLUMNS), *map(_cells, islice(self._tokens, SHOWN_ROWS))]
        return "\n".join([*align_columns(rows), *self._footer()])

    def _repr_html_(self) -> str:
        table = html_table(tuple(TABLE_COLUMNS), map(_cells, islice(self._tokens, SHOWN_ROWS)))
        return table + "".join(f"<div>{line}</div>" for line in self._footer())

    def _footer(self) -> list[str]:
        more = len(self) - SHOWN_ROWS
        return [f"{more} more tokens: see .df"] if more > 0 else []


def _cells(token: TokenLogprob) -> tuple[str, ...]:
    others = ", ".join(f"{other.text!r} {_percent(other)}" for other in token.top if other.text != token.text)
    logprob = "" if token.logprob is None else f"{token.logprob:.3f}"
    return repr(token.text), logprob, _percent(token), others


def _percent(token: TokenLogprob) -> str:
    probability = _probability(token)
    return "" if probability is None else f"{probability:.1%}"


def _probability(token: TokenLogprob) -> float | None:
    return None if token.logprob is None else math.exp(token.logprob)
