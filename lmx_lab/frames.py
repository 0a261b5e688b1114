"""Show tables: as data frames of pandas, which is optional and takes half a second to import, or as lines of text."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
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
