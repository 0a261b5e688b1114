"""Name the fields of a request in errors as its format does, although the request was converted to the chat format."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from lmx_lab.errors import CallerError

GIVEN = " (given: "
"""Begins the part of a message that quotes the request."""


class FieldNames:
    """The names of fields in another format.

    Args:
        names: The path of a field in that format by its path in the chat format. ``*`` stands for an index. A path that
            is the beginning of another one comes after it.
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        self._rules = [
            (
                re.compile(rf"(?<![\w.]){re.escape(name).replace(re.escape('*'), r'([0-9]+)')}(?!\w)"),
                path.replace("*", r"\1"),
                # Other names are also words of English.
                any(sign in name for sign in "_."),
            )
            for name, path in names.items()
        ]

    @contextmanager
    def in_errors(self) -> Iterator[None]:
        """Rename the fields in errors about the request that the block raises."""
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
