"""The body of error responses, and pydantic's errors about a request as one message.

A body has ``code``, ``message``, and the other fields that chat clients expect. The message of an invalid request names
the field, the problem and the value.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from lmx_lab.errors import UNKNOWN_FIELD, InvalidRequestError, counted, did_you_mean
from lmx_lab.wire.base import FormatModel

Shape = TypeVar("Shape")
Fields = Mapping[str, object]
"""The fields of a request, in place of an object of its class."""
Expiry = Literal["pruned", "ahead", "other-stream"]
# What other servers express with 0 or -1.
UNLIMITED_HINTS = {
    **dict.fromkeys(
        ("max_tokens", "max_completion_tokens", "n_predict"), "for no limit except the model's context, send -1"
    ),
    "top_n": "for all documents, leave the field out",
    "dimensions": "for all dimensions of the model, leave the field out",
}
# Cached, because this takes 4 ms for a dataclass: the docstrings of its fields are read from its source.
_adapter: Callable[..., TypeAdapter[Any]] = functools.cache(TypeAdapter)
UNION_TYPES = ("str", "constrained-str", "constrained-int", "bool", "ToolSelection")


class ErrorDetail(BaseModel):
    """An error."""

    code: str
    message: str
    type: str
    param: str | None = None
    retryable: bool = False
    """Whether the same request can succeed later without any change."""
    request_id: str | None = None
    reason: Expiry | None = Field(None, exclude_if=lambda reason: reason is None)
    """Only for ``cursor-expired``: why the cursor is not valid."""


class ErrorBody(BaseModel):
    """The body of an error response."""

    error: ErrorDetail


# Errors of pydantic


def validated(shape: type[Shape], fields: Fields | Shape, *, ignores_unknown: bool = False) -> Shape:
    """Return a request of this class with these fields. A request of this class is returned unchanged.

    Unknown fields are refused unless ``ignores_unknown`` is true, also in the formats of other servers: a caller in
    Python does not see the header that names ignored fields.

    Values that are instances of pydantic models are not validated again. Numbers and arrays of NumPy are read as
    Python's.

    Raises:
        InvalidRequestError: a field is invalid; the message names the first one. Or the request is neither an
            object of the class nor a dictionary.
    """
    if isinstance(fields, shape):
        return fields
    if not isinstance(fields, Mapping):
        raise InvalidRequestError(
            f"the request is {fields!r:.80}; pass a {shape.__name__}, or a dictionary with its fields"
        )
    values = {name: value.tolist() if hasattr(value, "tolist") else value for name, value in fields.items()}
    try:
        request: Shape = _adapter(shape).validate_python(values)
    except ValidationError as exc:
        raise invalid_request(exc.errors(), shape=shape if issubclass(shape, BaseModel) else None) from None
    if isinstance(request, FormatModel) and request.unknown and not ignores_unknown:
        raise invalid_request([{"type": "extra_forbidden", "loc": (request.unknown[0],)}], shape=type(request))
    return request


def invalid_request(problems: Sequence[Any], shape: type[BaseModel] | None = None) -> InvalidRequestError:
    """Return the error for the first invalid field of a request.

    Args:
        problems: ``errors()`` of pydantic's exception.
        shape: The class of the request. A similar field of this class is suggested for an unknown field.
    """
    problem = problems[0]
    if problem["loc"] and _is_union_type(problem["loc"][-1]):
        # The member of the union that was most likely intended is the one that matched the longest path. Of several
        # such members, it is one without a wrong type.
        union = problem["loc"][:-1]
        alternatives = [each for each in problems if each["loc"][: len(union)] == union]
        problem = max(alternatives, key=lambda each: (len(each["loc"]), not each["type"].endswith("_type")))
    # A part of the path may be a name from the request, of any length.
    parts = tuple(problem["loc"])
    # The name of an unknown field may look like a type of a union.
    last = len(parts) - 1 if problem["type"] in ("extra_forbidden", "unexpected_keyword_argument") else None
    path = [str(part)[:80] for at, part in enumerate(parts) if at == last or not _is_union_type(part)]
    field = ".".join(path)
    # pydantic's message, unless it describes its internals or lacks the number.
    match problem["type"]:
        case "extra_forbidden" | "unexpected_keyword_argument":
            name, *rest = problem["loc"]
            similar = did_you_mean(str(name), shape.model_fields) if shape is not None and not rest else ""
            message = f"{UNKNOWN_FIELD}{similar or '; leave it out'}"
        case "model_type" | "model_attributes_type" | "dataclass_type" | "dict_type":
            message = "must be a JSON object"
        case "too_long":
            limit = problem["ctx"]["max_length"]
            message = f"has {len(problem['input'])} items, the limit is {limit}; send at most {limit}"
        case "too_short":
            message = f"has {counted(len(problem['input']), 'item')}; send at least {problem['ctx']['min_length']}"
        case "union_tag_invalid":
            # The message contains the tag, which may have any length.
            tag = str(problem["ctx"]["tag"])
            message = str(problem["msg"]).replace(tag, tag[:80])
        case _:
            message = str(problem["msg"]).removeprefix("Value error, ")
    value = problem.get("input")
    # An integer from a notebook may have more digits than Python converts to text.
    if isinstance(value, str | float) or (isinstance(value, int) and value.bit_length() <= 1000):
        # Truncated first: the repr of a text of 8 MB takes tens of milliseconds.
        shown = value[:80] if isinstance(value, str) else value
        message = f"{message} (given: {shown!r:.80})"
    if problem["type"] == "greater_than_equal" and path[-1:] and path[-1] in UNLIMITED_HINTS:
        message = f"{message}; {UNLIMITED_HINTS[path[-1]]}"
    return InvalidRequestError(f"{field or 'body'}: {message}", param=field or None)


def _is_union_type(part: str | int) -> bool:
    """Whether a part of a path is not a field but a type of a union, which pydantic has tried."""
    return part in UNION_TYPES or "[" in str(part)
