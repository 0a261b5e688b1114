"""Limits on the contents of a request. They are checked before validation, which is the slow part."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import accumulate
from typing import Any

from pydantic import BeforeValidator

ITEM_LIMIT = 400_000
"""Items of lists and members of objects in one body. Most of them are token ids."""
MEMBERS_LIMIT = 100_000
"""Members of objects in one body: enough for 16,384 documents with six fields. The parser takes 45 to 60 ms for an
object with this number of different names, in one step; 150,000 take 70 to 80 ms."""
CONTAINER_LIMIT = 50_000
"""Lists and objects in one body. Each costs the parser and Python's garbage collector as much as ten numbers."""
DIGITS_LIMIT = 400
"""Digits of a number in a body. The largest float64 has 309. The time to parse a number is quadratic in its digits."""
LONG_NUMBER = re.compile(rb"(?<![0-9])[0-9]{%d}" % (DIGITS_LIMIT + 1))
LARGE_NUMBER = re.compile(rb"[eE]\+?[0-9]{3}|[0-9]{309}")
"""Matches a part of every number that may exceed the largest float64."""
NOT_BRACKETS = bytes(set(range(256)) - set(b"[{]}"))
DEPTH_CHANGES = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
"""Translates each bracket to a signed byte, by which it changes the depth."""
VALUE_LIMIT = 10_000
"""Values at all depths of an object with arbitrary contents, such as metadata."""
NESTED = (dict, list, tuple, Mapping)
"""Types of values that contain others. The abstract one is last, because checking it is slow."""


class Structure:
    """Counts the contents of JSON without parsing it. The counts are exact if the text is valid JSON."""

    def __init__(self) -> None:
        self.items = 0
        """Number of commas: one for each item or member after the first of its list or object."""
        self.members = 0
        self.containers = 0
        """Number of lists and objects."""
        self.quotes = 0
        self.depth = 0
        """Largest number of lists and objects that are nested."""
        self.has_long_number = False
        """Whether a number has more than ``DIGITS_LIMIT`` digits."""
        self.may_have_infinity = False
        """Whether a number may exceed the largest float64."""
        self._open = 0
        """Number of lists and objects that have not ended."""
        self._in_string = False
        self._number = b""
        """The unfinished number at the end of the last piece; it may continue in the next piece."""

    @property
    def excess(self) -> str | None:
        """The exceeded limit, or None."""
        for count, limit, what in (
            (self.containers, CONTAINER_LIMIT, "lists and objects"),
            (self.members, MEMBERS_LIMIT, "members of objects"),
            (self.items, ITEM_LIMIT, "items"),
            # Valid JSON within the other limits cannot contain more texts and names of members.
            (self.quotes // 2, ITEM_LIMIT + MEMBERS_LIMIT + CONTAINER_LIMIT, "texts"),
        ):
            if count > limit:
                return f"{limit:,} {what}"
        return None

    def add(self, text: bytes | bytearray | str, start: int, size: int) -> int:
        """Count a piece of about ``size`` that begins at ``start``. Return where the next piece begins."""
        piece = text[start : start + size]
        data = piece.encode() if isinstance(piece, str) else piece
        if (len(data) - len(data.rstrip(b"\\"))) % 2:
            # The piece ends within an escape; its second character belongs to it.
            piece = text[start : start + size + 1]
            data = piece.encode() if isinstance(piece, str) else piece
        parts = data.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = self._number + b"".join(parts[self._in_string :: 2])
        self._in_string ^= len(parts) % 2 == 0
        self.quotes += len(parts) - 1
        self.items += outside.count(b",")
        self.members += outside.count(b":")
        opened = outside.count(b"[") + outside.count(b"{")
        self.containers += opened
        changes = memoryview(outside.translate(DEPTH_CHANGES, NOT_BRACKETS)).cast("b")
        deepest = max(accumulate(changes, initial=self._open))
        self.depth = max(self.depth, deepest)
        self._open += opened - (len(changes) - opened)
        self.has_long_number = self.has_long_number or LONG_NUMBER.search(outside) is not None
        self.may_have_infinity = self.may_have_infinity or LARGE_NUMBER.search(outside) is not None
        # The trailing characters of a number: digits, and the letter and sign of an exponent.
        tail = outside[-DIGITS_LIMIT:]
        self._number = tail[len(tail.rstrip(b"0123456789+eE")) :]
        return start + len(piece)

    def add_whole(self, text: str) -> None:
        """Count another text that does not begin within a string."""
        self._in_string = False
        start = 0
        while start < len(text) and self.excess is None:
            # Counting stops after the piece in which a limit is exceeded.
            start = self.add(text, start, 65_536)


def check_values(value: Any) -> Any:
    """Check the number of values in an object. Counting stops at the limit, so cyclic Python objects end too.

    Raises:
        ValueError: there are more than ``VALUE_LIMIT`` values.
    """
    count = 0
    waiting: list[Any] = [value]
    while waiting:
        item = waiting.pop()
        children: Any = ()
        if isinstance(item, NESTED):
            children = item.values() if isinstance(item, Mapping) else item
        count += len(children)
        if count > VALUE_LIMIT:
            raise ValueError(f"has more than {VALUE_LIMIT:,} values, the limit; send fewer")
        waiting += [child for child in children if isinstance(child, NESTED)]
    return value


FEW_VALUES = BeforeValidator(check_values)
