"""Make untrusted text safe: paths, names, and the output of models and tools, in terminals, logs, pages and JSON.

Characters in such text can move the cursor, change the window title or reverse the direction of text.
"""

from __future__ import annotations

import logging
import math
import re
import sys
from collections import deque
from collections.abc import Sequence
from typing import Any

UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u206f\ufff9-\ufffb\ufffe\uffff\ud800-\udfff\U000e0001"
    "\U000e0020-\U000e007f]"
)
"""Characters that a terminal or a page interprets, or with which a text could be displayed as a different one: control
characters except line ends and tabs, line separators, overrides of the direction of text, lone surrogates, others that
XML does not have, and invisible copies of ASCII. Joiners, direction marks and soft hyphens are safe, because they are
part of the spelling of words in several languages."""


def escape_text(text: str) -> str:
    """Return the text with unsafe characters escaped."""
    return UNSAFE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def shorten(text: str, limit: int) -> str:
    """Return a text of at most ``limit`` characters. An ellipsis replaces the rest of a longer text."""
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def clip(text: str, limit: int) -> str:
    """Return at most ``limit`` characters of a text, in which unsafe characters are then escaped."""
    return escape_text(shorten(text, limit))


def single_line(text: str, most: int = 100) -> str:
    """Return the start of a text as one line of at most ``most`` characters before unsafe characters are escaped."""
    start = text[: 4 * most]
    words = " ".join(start.split())
    return clip(words if start == text else f"{words}…", most)


def replace_surrogates(text: str) -> str:
    """Replace lone surrogates, which JSON and JavaScript allow and UTF-8 cannot encode, by question marks."""
    return text.encode("utf-8", "replace").decode()


def finite(value: Any) -> Any:
    """Replace NaN and infinity in a JSON value, which JSON does not allow, by texts such as ``NaN``."""
    match value:
        case float() if not math.isfinite(value):
            return {math.inf: "Infinity", -math.inf: "-Infinity"}.get(value, "NaN")
        case dict():
            return {name: finite(item) for name, item in value.items()}
        case list():
            return [finite(item) for item in value]
    return value


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
        # Longer lines are cut.
        self.lines.append(self.format(record)[:4000])
