"""A terminal: text of models and tools on it, which could control it or turn lines around, and who sits before it."""

from __future__ import annotations

import contextlib
import sys
import termios

from lmx_lab.sanitize import escape_text as shown

__all__ = ["asked", "can_be_asked", "forget_typed", "line", "shown"]


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
