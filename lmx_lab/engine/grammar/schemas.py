"""JSON schemas as they are enforced. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
LISTED = ("anyOf", "oneOf", "allOf", "prefixItems")
SINGLE = ("items", "additionalProperties", "contains", "not", "if", "then", "else", "propertyNames")
COMBINING = ("anyOf", "oneOf", "$ref", "$dynamicRef")
OPEN = ("additionalProperties", "unevaluatedProperties", "patternProperties", "minProperties", "propertyNames")
"""With these a schema says itself what else an object has, or needs more than its named properties."""

REMARKS = ("password", "binary", "byte", "path", "file-path", "directory-path")
"""Formats that say nothing of what a text looks like; pydantic writes them for secrets, bytes and paths."""


def enforceable(schema: Any) -> Any:
    """The same schema, whose objects have no properties but the named ones, unless it says so itself.

    What follows it follows the given one. Left open, small models add properties until they have no tokens left; other
    local servers close objects too. A schema whose parts are combined is left as it is: closed ones might exclude each
    other.
    """
    return _made(schema, close=not any(_combines(part) for part in _parts(schema)))


def _made(schema: Any, *, close: bool) -> Any:
    if not isinstance(schema, dict):
        return schema
    made = {key: _made_under(key, value, close=close) for key, value in schema.items()}
    if made.get("format") in REMARKS:
        del made["format"]
    if close and _is_finished(schema):
        made["additionalProperties"] = False
    return made


def _is_finished(schema: dict[str, Any]) -> bool:
    """Whether an object that follows it needs no properties but the named ones."""
    named, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(named, dict) or any(key in schema for key in OPEN):
        return False
    return isinstance(required, list) and all(isinstance(name, str) and name in named for name in required)


def _made_under(key: str, value: Any, *, close: bool) -> Any:
    if key in BY_NAME and isinstance(value, dict):
        return {name: _made(part, close=close) for name, part in value.items()}
    if key in LISTED and isinstance(value, list):
        return [_made(part, close=close) for part in value]
    return _made(value, close=close) if key in SINGLE else value


def _combines(schema: dict[str, Any]) -> bool:
    """Whether an object has to follow two parts of the schema at once."""
    return "allOf" in schema or ("properties" in schema and any(key in schema for key in COMBINING))


def _parts(schema: Any) -> Iterator[dict[str, Any]]:
    """The schema and all schemas in it."""
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if not isinstance(part, dict):
            continue
        yield part
        for key, value in part.items():
            if key in BY_NAME and isinstance(value, dict):
                waiting.extend(value.values())
            elif key in LISTED and isinstance(value, list):
                waiting.extend(value)
            elif key in SINGLE:
                waiting.append(value)
