"""The panels' JavaScript and CSS as widgets carry them: plain files of this folder, put together without a bundler."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent
_TOKEN = re.compile(
    r"""
    (?P<space> (?: \s | //[^\n]* | /\*[\s\S]*?\*/ )+ )
    | (?P<text> "(?:[^"\\\n]|\\.)*" | '(?:[^'\\\n]|\\.)*' | `(?:[^`\\]|\\.)*` )
    | (?P<word> [\w$]+ )
    | (?P<mark> [\s\S] )
    """,
    re.VERBOSE,
)
_PATTERN = re.compile(r"/(?:[^/\\\n\[]|\\.|\[(?:[^\]\\\n]|\\.)*\])+/")
# Where a line break cannot end a statement: the line before goes on, or the one after goes on with it.
_OPEN = frozenset("{[(,;:?&|=<>!*%~^")
_CLOSE = frozenset(")]},;:?&|=<>.*%^")
_CSS_SPACE = re.compile(r"/\*[\s\S]*?\*/|^[ \t]+|\n(?=\n)", re.MULTILINE)


@cache
def script(*names: str) -> str:
    """One ES module from several files, in this order.

    Every widget instance carries its code, into the saved notebook too.
    """
    return "\n".join(source(name) for name in names)


@cache
def styles(*names: str) -> str:
    return "\n".join(source(name) for name in names)


@cache
def source(name: str) -> str:
    """One file as it is sent: without comments and needless space; what is vendored, unchanged."""
    text = (FOLDER / name).read_text(encoding="utf-8")
    if "/" in name:
        return text
    return tightened(text) if name.endswith(".js") else _CSS_SPACE.sub("", text).strip()


def tightened(text: str) -> str:
    """JavaScript without comments and needless space; names, texts and patterns stay as they are.

    A template literal must not have another one inside.
    """
    parts: list[str] = []
    at = 0
    while at < len(text):
        last = parts[-1][-1] if parts else ";"
        if text[at] == "/" and (last in _OPEN or last in "}+-") and (pattern := _PATTERN.match(text, at)):
            parts.append(pattern[0])
            at = pattern.end()
            continue
        token = _TOKEN.match(text, at)
        assert token is not None
        at = token.end()
        if token.lastgroup != "space":
            parts.append(token[0])
            continue
        after = text[at : at + 1]
        if last == "," and after in {")", "}"}:
            parts.pop()
        elif space := _space(last, token[0], after):
            parts.append(space)
    return "".join(parts).strip()


def _space(before: str, space: str, after: str) -> str:
    """What must remain of some space."""
    if "\n" in space:
        return "" if before in _OPEN or after in _CLOSE else "\n"
    needed = (_in_word(before) and _in_word(after)) or (before == after and before in "+-")
    return " " if needed else ""


def _in_word(character: str) -> bool:
    return character.isalnum() or character in {"_", "$"}
