"""Text that strangers have written, as terminals and logs may show it: paths, names, what models and tools say."""

from __future__ import annotations

import logging
import sys
import unicodedata
from collections import deque

LONGEST_LINE = 4000
HARMLESS = "\n\t"
# Cf has what changes the direction of text (U+202A to U+202E, U+2066 to U+2069); two of it belong to words.
JOINERS = "\u200c\u200d"


def shown(text: str) -> str:
    """The text with every character that does something written out, but for line ends and tabs."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(char if _is_text(char) else char.encode("unicode_escape").decode() for char in text)


class LogFormatter(logging.Formatter):
    """Records as lines that control no terminal. A message is one line: none can look like another record."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return super().formatMessage(record).replace("\n", "\\n")

    def format(self, record: logging.LogRecord) -> str:
        return shown(super().format(record))


class LastResort(logging.Handler):
    """Python's own prints warnings as they are where nobody has configured logging; this one as harmless lines."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.setFormatter(LogFormatter("%(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            print(self.format(record), file=sys.stderr)


def print_warnings() -> None:
    """Have the package's warnings printed as harmless lines, until somebody configures logging. Idempotent."""
    logger = logging.getLogger(__package__)
    if not any(isinstance(handler, LastResort) for handler in logger.handlers):
        logger.addHandler(LastResort())


class RecentLines(logging.Handler):
    """Keeps the last lines in memory: a cell's output is no place for a server's log."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.lines: deque[str] = deque(maxlen=most)
        self.setFormatter(LogFormatter("%(asctime)s %(levelname)s %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record)[:LONGEST_LINE])


def _is_text(char: str) -> bool:
    return char in HARMLESS or char in JOINERS or unicodedata.category(char) not in ("Cc", "Cf", "Cs", "Zl", "Zp")
