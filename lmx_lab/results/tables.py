"""Show rows as a table of text or HTML."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence


class Html(str):
    """A cell that is HTML, and therefore not escaped."""

    __slots__ = ()


def align_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a line of text for each row, in which the cells of a column begin at the same position."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def html_table(
    names: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    caption: str = "",
    row_names: bool = False,
    style: str = "text-align:left",
) -> str:
    """Return an HTML table. Texts are escaped, except those of class ``Html``.

    Args:
        names: Texts of the header; empty for a table without one.
        row_names: Whether the first cell of each row is its name.
        style: The CSS style of all cells and of the caption.
    """

    def cells(kind: str, row: Sequence[object]) -> str:
        texts = (cell if isinstance(cell, Html) else html.escape(str(cell)) for cell in row)
        return "".join(f"<{kind} style='{style}'>{text}</{kind[:2]}>" for text in texts)

    first = 1 if row_names else 0
    above = f"<caption style='{style}'>{html.escape(caption)}</caption>" if caption else ""
    head = f"<thead><tr>{cells('th scope=col', names)}</tr></thead>" if names else ""
    body = "".join(f"<tr>{cells('th scope=row', row[:first])}{cells('td', row[first:])}</tr>" for row in rows)
    return f"<table>{above}{head}<tbody>{body}</tbody></table>"
