"""What ``lab.rerank`` returns: documents in order of relevance, as rows, as a data frame, as a table."""

from __future__ import annotations

import html
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, overload

from lmx_lab.engine import EncodeReport, Ranking, RerankMethod

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
    """The documents, the most relevant first; of equals, the one that came first."""

    def __init__(self, query: str, documents: Sequence[str], ranking: Ranking, *, top_n: int | None = None) -> None:
        self.query = query
        self.method: RerankMethod = ranking.method
        """``cosine`` is of two vectors by an embedding model."""
        self.model: str = ranking.report.model
        self.report: EncodeReport = ranking.report
        self._rows = [
            RankedDocument(rank=rank, score=float(ranking.scores[index]), index=index, document=documents[index])
            for rank, index in enumerate(ranking.order(top_n), start=1)
        ]

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
        try:
            pandas: Any = importlib.import_module("pandas")
        except ImportError as exc:
            raise ImportError("df needs pandas, which is not installed: pip install 'lmx-lab[lab]'") from exc
        return pandas.DataFrame([vars(row) for row in self._rows], columns=list(COLUMNS))

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
