"""Define values that are also bodies of requests, or parts of them, which pydantic reads as strictly as ``wire.base``.

pydantic is imported only to read a body, because a server starts to load its model before it imports pydantic.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, ClassVar

MEMBER_LIMIT = 256
"""Members of one object, unless its field has another limit."""
TOKEN_LIMIT = 65_536
"""Largest number of token ids in one request. Decoding holds the interpreter's lock for about a microsecond each."""


def whole(value: Any) -> Any:
    """Return 5 for 5.0. JSON has only one type of number: 5.0 is a valid count."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def listed(value: Any) -> Any:
    """Return a tuple for a list. Strict classes do not accept a list in place of a tuple if it is a Python object."""
    return tuple(value) if isinstance(value, list) else value


def check_members(value: Any) -> Any:
    """Check the number of members of an object. Each unknown member would cause a separate error.

    Raises:
        ValueError: the object has more members than any request has fields.
    """
    if isinstance(value, dict) and len(value) > MEMBER_LIMIT:
        raise ValueError(f"has {len(value):,} members, the limit is {MEMBER_LIMIT}; send only fields that exist")
    return value


class Limits:
    """An annotation of a field of a ``Body`` with its limits. They apply only to values that pydantic reads.

    Args:
        before: Converts the given value before it is checked.
        limits: Arguments of pydantic's ``Field``.
    """

    def __init__(self, before: Callable[[Any], Any] = lambda value: value, **limits: Any) -> None:
        self._before = before
        self._limits = limits

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic import BeforeValidator, Field

        return handler.generate_schema(Annotated[source, Field(**self._limits), BeforeValidator(self._before)])


class Body:
    """Base class of bodies: strict dataclasses without unknown fields, with a limited number of members."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {
        "strict": True,
        "extra": "forbid",
        "use_attribute_docstrings": True,
    }

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        schema = handler(source)
        described = handler.resolve_ref_schema(schema)
        # The fields remain strict. A strict dataclass itself would not be read from a dict.
        described["strict"] = False
        return core_schema.no_info_before_validator_function(check_members, schema)
