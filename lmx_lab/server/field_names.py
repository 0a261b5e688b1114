"""Rename the fields in errors to those of the request's format.

Requests of other formats are converted to the chat format, so errors name the fields of the latter.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from lmx_lab.errors import CallerError

GIVEN = " (given: "
"""Start of the part of a message that quotes the request."""


class FieldNames:
    """Maps the fields of the chat format to those of another format.

    Args:
        names: Maps the path of a field in the chat format to its path in the other format. ``*`` stands for an index. A
            path that is a prefix of another one must come after it.
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        self._rules = [
            (
                re.compile(rf"(?<![\w.]){re.escape(name).replace(re.escape('*'), r'([0-9]+)')}(?!\w)"),
                path.replace("*", r"\1"),
                # Names without these characters are also English words.
                any(sign in name for sign in "_."),
            )
            for name, path in names.items()
        ]

    @contextmanager
    def in_errors(self) -> Iterator[None]:
        """Rename the fields in errors that the block raises about the request."""
        try:
            yield
        except CallerError as exc:
            if exc.param is not None:
                exc.param = self._renamed(exc.param)
            exc.message = self._renamed(exc.message)
            exc.args = (exc.message,)
            raise

    def _renamed(self, text: str) -> str:
        head, quote, rest = text.partition(GIVEN)
        for pattern, path, is_distinct in self._rules:
            if is_distinct:
                head = pattern.sub(path, head)
            elif (found := pattern.match(head)) is not None and head[found.end() :][:1] in ("", ":", "."):
                head = found.expand(path) + head[found.end() :]
        return head + quote + rest
