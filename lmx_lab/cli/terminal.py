"""A terminal: text of models and tools on it, which could control it or turn lines around, and who sits before it."""

from __future__ import annotations

import contextlib
import sys
import termios
import unicodedata

HARMLESS = "\n\t"
# Cf has what changes the direction of text (U+202A to U+202E, U+2066 to U+2069); two of it belong to words.
JOINERS = "\u200c\u200d"


def shown(text: str) -> str:
    """The text with every character that does something written out, but for line ends and tabs."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(char if _is_text(char) else char.encode("unicode_escape").decode() for char in text)


def line(text: str, most: int = 100) -> str:
    """The beginning of a text, on one line."""
    words = " ".join(text.split())
    return shown(words if len(words) <= most else words[: most - 1] + "…")


def can_be_asked() -> bool:
    """Whether somebody sits before this."""
    return sys.stdin is not None and sys.stdin.isatty()


def asked(prompt: str) -> str:
    """A line that somebody types. The prompt is on standard error where standard output goes elsewhere.

    Raises:
        EOFError: the input has ended.
    """
    if sys.stdout.isatty():
        return input(prompt)
    sys.stderr.write(prompt)
    sys.stderr.flush()
    return input()


def forget_typed() -> None:
    """What was typed before a question is no answer to it."""
    with contextlib.suppress(termios.error):
        termios.tcflush(sys.stdin, termios.TCIFLUSH)


def _is_text(char: str) -> bool:
    return char in HARMLESS or char in JOINERS or unicodedata.category(char) not in ("Cc", "Cf", "Cs", "Zl", "Zp")
