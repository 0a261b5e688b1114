"""What ``lab.rerank`` returns: documents in order of relevance, as rows, as a data frame, as a table."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Self, overload

from lmx_lab.engine import Ranking
from lmx_lab.frames import pandas_for
from lmx_lab.values.encoding import EncodeReport, RerankMethod

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = ("rank", "score", "index", "document")
SHOWN_ROWS = 20
SHOWN_CHARACTERS = 200
LINE_CHARACTERS = 90


@dataclass(frozen=True, kw_only=True)
class RankedDocument:
    rank: int
    """From 1."""
    score: float
    index: int
    """Which of the documents that were given."""
    document: str


class RerankResult(Sequence[RankedDocument]):
    """The documents, the most relevant first; of equals, the one that came first.

    Args:
        order: Index among the documents, and score; the most relevant first.
    """

    def __init__(
        self,
        query: str,
        documents: Sequence[str],
        order: Iterable[tuple[int, float]],
        *,
        model: str,
        method: RerankMethod,
        tokens: int,
        report: EncodeReport | None = None,
    ) -> None:
        self.query = query
        self.model = model
        self.method: RerankMethod = method
        """``cosine`` is of two vectors by an embedding model."""
        self.tokens = tokens
        """What the model has read."""
        self.report = report
        """The engine's own words; None where it runs elsewhere."""
        self.display_as: Callable[[RerankResult], None] | None = None
        """Shows it in a notebook; None leaves it at a plain table."""
        self._rows = [
            RankedDocument(rank=rank, score=score, index=index, document=documents[index])
            for rank, (index, score) in enumerate(order, start=1)
        ]

    @classmethod
    def by_engine(cls, query: str, documents: Sequence[str], ranking: Ranking, *, top_n: int | None = None) -> Self:
        """What the engine of this process has ranked."""
        order = [(index, float(ranking.scores[index])) for index in ranking.order(top_n)]
        report = ranking.report
        return cls(
            query, documents, order, model=report.model, method=ranking.method, tokens=report.tokens, report=report
        )

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, at: int) -> RankedDocument: ...
    @overload
    def __getitem__(self, at: slice) -> list[RankedDocument]: ...
    def __getitem__(self, at: int | slice) -> RankedDocument | list[RankedDocument]:
        return self._rows[at]

    @property
    def df(self) -> pd.DataFrame:
        """The rows as a pandas data frame: rank, score, index, document.

        Raises:
            ImportError: pandas is not installed.
        """
        pandas = pandas_for("df")
        return pandas.DataFrame([vars(row) for row in self._rows], columns=list(COLUMNS))

    def _ipython_display_(self) -> None:
        if self.display_as is None:
            raise NotImplementedError  # which sends IPython to the other forms
        self.display_as(self)

    def __repr__(self) -> str:
        rows = [COLUMNS, *(_cells(row, LINE_CHARACTERS) for row in self._shown())]
        widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
        table = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return "\n".join([*table, self._foot()])

    def _repr_html_(self) -> str:
        left = "style='text-align:left'"
        head = "".join(f"<th {left}>{name}</th>" for name in COLUMNS)
        rows = "".join(
            "<tr>" + "".join(f"<td {left}>{html.escape(cell)}</td>" for cell in _cells(row, SHOWN_CHARACTERS)) + "</tr>"
            for row in self._shown()
        )
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
        return f"{table}<small>{html.escape(self._foot())}</small>"

    def _shown(self) -> islice[RankedDocument]:
        return islice(self._rows, SHOWN_ROWS)

    def _foot(self) -> str:
        more = f"{len(self) - SHOWN_ROWS} more · " if len(self) > SHOWN_ROWS else ""
        return f"{more}{_line(self.model, LINE_CHARACTERS)} · {self.method}"


def _cells(row: RankedDocument, characters: int) -> tuple[str, ...]:
    return str(row.rank), f"{row.score:.4f}", str(row.index), _line(row.document, characters)


def _line(text: str, characters: int) -> str:
    """On one line and short. What does not print could move a terminal's cursor, or turn the text around."""
    start = "".join(char if char.isprintable() else " " for char in text[: 4 * characters])
    words = " ".join(start.split())
    cut = len(words) > characters or len(text) > 4 * characters
    return f"{words[: characters - 1]}…" if cut else words
