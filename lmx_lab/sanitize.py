"""Make untrusted text safe: paths, names, and the output of models and tools, in terminals, logs and JSON.

Control characters in such text can move the cursor, change the window title or reverse the direction of text.
"""

from __future__ import annotations

import logging
import sys
import unicodedata
from collections import deque
from collections.abc import Sequence

MAX_LINE_CHARACTERS = 4000
"""Longer lines are cut when they are kept in memory."""
# The category Cf contains the characters that change the direction of text (U+202A to U+202E, U+2066 to U+2069).
UNSAFE_CATEGORIES = ("Cc", "Cf", "Cs", "Zl", "Zp")
# Line ends, tabs, and the two joiners, with which words of several languages are spelled.
KEPT_CHARACTERS = "\n\t\u200c\u200d"


def escape_text(text: str) -> str:
    """Return the text with control and formatting characters escaped, except line ends, tabs and joiners."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        char
        if char in KEPT_CHARACTERS or unicodedata.category(char) not in UNSAFE_CATEGORIES
        else char.encode("unicode_escape").decode()
        for char in text
    )


def replace_surrogates(text: str) -> str:
    """Replace lone surrogates, which JSON and JavaScript allow and UTF-8 cannot encode, by question marks."""
    return text.encode("utf-8", "replace").decode()


class LogFormatter(logging.Formatter):
    """A formatter that escapes control characters. Every message is one line, so none can imitate another record."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return super().formatMessage(record).replace("\n", "\\n")

    def format(self, record: logging.LogRecord) -> str:
        return escape_text(super().format(record))


class LastResortHandler(logging.Handler):
    """Print warnings to stderr while logging is not configured.

    ``logging.lastResort`` does this too, but it does not escape control characters.

    Args:
        without: Names of loggers whose records are not printed.
    """

    def __init__(self, without: Sequence[str] = ()) -> None:
        super().__init__(logging.WARNING)
        self.setFormatter(LogFormatter("%(message)s"))
        self.addFilter(lambda record: not record.name.startswith(tuple(without)))

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            print(self.format(record), file=sys.stderr)


def print_warnings(without: Sequence[str] = ()) -> None:
    """Print the package's warnings with control characters escaped, until logging is configured. Idempotent.

    Args:
        without: See ``LastResortHandler``. Only the value of the first call is used.
    """
    logger = logging.getLogger(__package__)
    if not any(isinstance(handler, LastResortHandler) for handler in logger.handlers):
        logger.addHandler(LastResortHandler(without))


class RecentLinesHandler(logging.Handler):
    """Keep the most recent log lines in memory: the log of a server must not appear in the output of a cell."""

    def __init__(self, max_lines: int) -> None:
        super().__init__()
        self.lines: deque[str] = deque(maxlen=max_lines)
        self.setFormatter(LogFormatter("%(asctime)s %(levelname)s %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record)[:MAX_LINE_CHARACTERS])
