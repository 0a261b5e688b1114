"""How much a request may hold. Counts are checked before validation, which is what takes long."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BeforeValidator

ITEM_LIMIT = 400_000
"""Items of lists and members of objects in one body: token ids, above all."""
MEMBERS_LIMIT = 150_000
"""Members of objects in one body: enough for 16,384 documents of nine fields."""
CONTAINER_LIMIT = 50_000
"""Lists and objects in one body. Each costs the parser, and Python's collector of garbage, as much as ten numbers."""
MEMBER_LIMIT = 256
"""Members of one object, unless its field has a limit of its own."""
VALUE_LIMIT = 10_000
"""Values at all depths of an object whose shape is the caller's own, such as metadata."""


def check_members(value: Any) -> Any:
    """
    Raises:
        ValueError: an object with more members than any request has fields. Each unknown one would be an error.
    """
    if isinstance(value, dict) and len(value) > MEMBER_LIMIT:
        raise ValueError(f"has {len(value):,} members, the limit is {MEMBER_LIMIT}; send only fields that exist")
    return value


def check_values(value: Any) -> Any:
    """
    Raises:
        ValueError: more than ``VALUE_LIMIT`` values. Stops counting there, so that a cycle of Python objects ends too.
    """
    count, waiting = 0, [value]
    while waiting:
        item = waiting.pop()
        children = item.values() if isinstance(item, Mapping) else item if isinstance(item, list | tuple) else ()
        count += len(children)
        if count > VALUE_LIMIT:
            raise ValueError(f"has more than {VALUE_LIMIT:,} values, the limit; send fewer")
        waiting.extend(child for child in children if isinstance(child, Mapping | list | tuple))
    return value


FEW_VALUES = BeforeValidator(check_values)
