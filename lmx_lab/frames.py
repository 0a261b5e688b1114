"""Show tables: as data frames of pandas, which is optional and takes half a second to import, as text, or as HTML."""

from __future__ import annotations

import html
import importlib
from collections.abc import Iterable, Sequence
from typing import Any


def pandas_for(name: str) -> Any:
    """Return the module pandas.

    Args:
        name: The attribute or function that needs it, for the error message.

    Raises:
        ImportError: pandas is not installed; the message contains the command that installs it.
    """
    try:
        return importlib.import_module("pandas")
    except ImportError as exc:
        raise ImportError(f"{name} needs pandas, which is not installed: pip install 'lmx-lab[lab]'") from exc


def align_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a line of text for each row, in which the cells of a column begin at the same position."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def html_table(names: Sequence[str], rows: Iterable[Sequence[str]], *, style: str = "text-align:left") -> str:
    """Return an HTML table of texts, which are escaped.

    Args:
        names: Texts of the header.
        style: The CSS style of all cells.
    """
    head = "".join(f"<th style='{style}'>{html.escape(name)}</th>" for name in names)
    body = "".join(
        "<tr>" + "".join(f"<td style='{style}'>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
