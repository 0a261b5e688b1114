"""Show rows as a table of text or HTML."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from lmx_lab.results.pages import Displayed, html_text
from lmx_lab.sanitize import escape_text

if TYPE_CHECKING:
    import pandas as pd

T = TypeVar("T")
DESCRIPTION_CHARACTERS = 80
"""Characters of a description that a table shows."""


class Html(str):
    """A cell that is HTML, and therefore not escaped."""

    __slots__ = ()


UNBROKEN = "text-align:left;white-space:nowrap"
"""Style of tables of names and numbers, whose lines are not wrapped. A notebook scrolls wide outputs."""


def align_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return one line for each row. The cells of a column begin at the same position, and unsafe characters are
    escaped.
    """
    rows = [[escape_text(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def html_table(
    names: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    caption: str = "",
    row_names: bool = False,
    numbers: range = range(0),
    style: str = "text-align:left",
) -> str:
    """Return an HTML table. Texts are escaped, except those of class ``Html``.

    Args:
        names: Texts of the header; empty for a table without one.
        row_names: Whether the first cell of each row is its name.
        numbers: The positions of columns whose cells have the class ``number``.
        style: The CSS style of all cells and of the caption; empty if the page has the styles.
    """
    styled = f" style='{style}'" if style else ""

    def cells(kind: str, row: Sequence[object], start: int = 0) -> str:
        texts = (cell if isinstance(cell, Html) else html_text(cell) for cell in row)
        marks = (" class='number'" if at in numbers else "" for at in itertools.count(start))
        return "".join(f"<{kind}{mark}{styled}>{text}</{kind[:2]}>" for text, mark in zip(texts, marks, strict=False))

    first = 1 if row_names else 0
    above = f"<caption{styled}>{html_text(caption)}</caption>" if caption else ""
    head = f"<thead><tr>{cells('th scope=col', names)}</tr></thead>" if names else ""
    body = "".join(f"<tr>{cells('th scope=row', row[:first])}{cells('td', row[first:], first)}</tr>" for row in rows)
    return f"<table>{above}{head}<tbody>{body}</tbody></table>"


class RecordList(Displayed, list[T]):
    """Records, displayed as a table with a column for each of the given fields.

    Args:
        shape: The class of the records, a pydantic model.
        columns: The fields that the table shows; by default all.
    """

    notes: Sequence[str] = ()
    """Lines below the table."""
    nothing = ""
    """Displayed instead of an empty table."""

    def __init__(self, records: Iterable[T], shape: type[T], columns: Sequence[str] = ()) -> None:
        super().__init__(records)
        self.shape = shape
        fields: Any = shape
        self.columns = columns or tuple(fields.model_fields)

    def cell(self, record: T, name: str) -> str:
        """Return what the table shows of a field."""
        value = getattr(record, name)
        if name == "description":
            return textwrap.shorten(value, DESCRIPTION_CHARACTERS, placeholder=" …")
        if isinstance(value, bool):
            return "yes" if value else ""
        return f"{value:.3f}" if isinstance(value, float) else "" if value is None else str(value)

    @property
    def df(self) -> pd.DataFrame:
        """The records as a pandas data frame, with a column for each field.

        Raises:
            MissingPackageError: pandas is not installed.
        """
        # Imported here, because NumPy is imported only for tables.
        from lmx_lab.results.frames import dtypes_of, make_table

        rows: list[Any] = list(self)
        return make_table([row.model_dump() for row in rows], dtypes_of(self.shape))

    @property
    def _rows(self) -> list[list[str]]:
        return [[self.cell(record, name) for name in self.columns] for record in self]

    def __repr__(self) -> str:
        if self.nothing and not self:
            return self.nothing
        return "\n".join([*align_columns([self.columns, *self._rows]), *self.notes])

    def _repr_html_(self) -> str:
        if self.nothing and not self:
            return self.nothing
        notes = "".join(f"<div>{html_text(note)}</div>" for note in self.notes)
        return f"{html_table(self.columns, self._rows)}{notes}"
