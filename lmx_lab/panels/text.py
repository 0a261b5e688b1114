"""Make untrusted text (of models, documents, events) safe and short enough to be displayed."""

from __future__ import annotations

import html
import re

# Characters that a terminal or a page would interpret. Joiners and marks of direction belong to their languages.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
LEFT = "style='text-align:left'"
"""Attribute of the cells of tables in snapshots."""


def clip(text: str, limit: int) -> str:
    """Return at most ``limit`` characters of a text, with escapes in place of unsafe characters."""
    return escape_unsafe(text[: limit - 1] + "…" if len(text) > limit else text)


def escape_unsafe(text: str) -> str:
    """Replace control characters, marks that override direction, and half surrogate pairs by escapes."""
    return _UNSAFE.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)


def replace_surrogates(text: str) -> str:
    """Replace half surrogate pairs, which JavaScript's strings may contain and UTF-8 cannot encode."""
    return text.encode("utf-8", "replace").decode("utf-8")


def preformatted(text: str) -> str:
    """Return HTML that keeps the lines of a text."""
    return f'<pre style="white-space: pre-wrap">{html.escape(text)}</pre>'


def table_row(cells: tuple[object, ...] | list[object], tag: str = "td") -> str:
    """Return a row of a table in a snapshot."""
    return "<tr>" + "".join(f"<{tag} {LEFT}>{html.escape(str(cell))}</{tag}>" for cell in cells) + "</tr>"
