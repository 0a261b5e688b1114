"""Define the result of ``lab.rerank``: documents in order of relevance, as rows, a data frame or a table."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, overload

from lmx_lab.backend import Ranking
from lmx_lab.errors import MissingPackageError
from lmx_lab.results.frames import dtypes_of, make_table
from lmx_lab.results.tables import align_columns, html_table
from lmx_lab.values.outputs import EncodeReport, RerankMethod

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = ("rank", "score", "index", "document")
SHOWN_ROWS = 20
SHOWN_CHARACTERS = 200
LINE_CHARACTERS = 90


@dataclass(frozen=True, kw_only=True)
class RankedDocument:
    """A row of the result."""

    rank: int
    """Place in the order of relevance, starting at 1."""
    score: float
    index: int
    """Index among the given documents."""
    document: str


class RerankResult(Sequence[RankedDocument]):
    """The ranked documents, the most relevant first. Documents with equal scores keep their given order.

    Args:
        show: Displays the result as a widget; raises ``MissingPackageError`` where widgets are not installed.
    """

    def __init__(self, ranking: Ranking, *, show: Callable[[RerankResult], None] | None = None) -> None:
        self.ranking = ranking
        self.query = ranking.query
        self.model = ranking.model
        self.method: RerankMethod = ranking.method
        """How the scores were computed. With ``cosine``, they are cosine similarities from an embedding model."""
        self.tokens = ranking.tokens
        """Number of tokens that the model has read."""
        self.report: EncodeReport | None = ranking.report
        """The engine's report; None if the engine runs in another process."""
        self.widget: Any = None
        """The widget that displays the result; None before it is displayed for the first time."""
        self._show = show
        self._rows = [
            RankedDocument(rank=rank, score=score, index=index, document=ranking.documents[index])
            for rank, (index, score) in enumerate(ranking.order, start=1)
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
        """The rows as a pandas data frame with the columns rank, score, index and document.

        Raises:
            MissingPackageError: pandas is not installed.
        """
        frame: pd.DataFrame = make_table(map(vars, self._rows), dtypes_of(RankedDocument))
        return frame

    def _ipython_display_(self) -> None:
        # After a NotImplementedError, IPython uses the other representations.
        if self._show is None:
            raise NotImplementedError
        try:
            self._show(self)
        except MissingPackageError:
            raise NotImplementedError from None

    def __repr__(self) -> str:
        rows = [COLUMNS, *(_cells(row, LINE_CHARACTERS) for row in self._shown())]
        return "\n".join([*align_columns(rows), self._footer()])

    def _repr_html_(self) -> str:
        table = html_table(COLUMNS, (_cells(row, SHOWN_CHARACTERS) for row in self._shown()))
        return f"{table}<small>{html.escape(self._footer())}</small>"

    def _shown(self) -> islice[RankedDocument]:
        return islice(self._rows, SHOWN_ROWS)

    def _footer(self) -> str:
        more = f"{len(self) - SHOWN_ROWS} more · " if len(self) > SHOWN_ROWS else ""
        return f"{more}{_line(self.model, LINE_CHARACTERS)} · {self.method}"


def _cells(row: RankedDocument, characters: int) -> tuple[str, ...]:
    return str(row.rank), f"{row.score:.4f}", str(row.index), _line(row.document, characters)


def _line(text: str, characters: int) -> str:
    """Shorten a text to one line. Characters that are not printable are replaced, because they could move a terminal's
    cursor or reverse the text."""
    start = "".join(char if char.isprintable() else " " for char in text[: 4 * characters])
    words = " ".join(start.split())
    cut = len(words) > characters or len(text) > 4 * characters
    return f"{words[: characters - 1]}…" if cut else words
