"""Make untrusted text (of models, documents, events) safe and short enough to be displayed."""

from __future__ import annotations

import html
import re

# Characters that a terminal or a page would interpret. Zero-width joiners and plain direction marks are not among them,
# because some languages need them.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
LEFT = "style='text-align:left'"
"""HTML attribute of the cells of tables in snapshots."""


def clip(text: str, limit: int) -> str:
    """Return at most ``limit`` characters of a text, in which unsafe characters are then replaced by escapes."""
    return escape_unsafe(text[: limit - 1] + "…" if len(text) > limit else text)


def escape_unsafe(text: str) -> str:
    """Replace control characters, characters that override the text direction, and lone surrogates by escapes."""
    return _UNSAFE.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)


def preformatted(text: str) -> str:
    """Return HTML that displays a text with its line breaks and spaces."""
    return f'<pre style="white-space: pre-wrap">{html.escape(text)}</pre>'


def table_row(cells: tuple[object, ...] | list[object], tag: str = "td") -> str:
    """Return a row of a table in a snapshot, with escaped cells."""
    return "<tr>" + "".join(f"<{tag} {LEFT}>{html.escape(str(cell))}</{tag}>" for cell in cells) + "</tr>"
