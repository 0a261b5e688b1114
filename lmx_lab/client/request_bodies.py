"""Makes requests from arguments, and JSON from requests; invalid ones are refused before anything is sent."""

from __future__ import annotations

from typing import TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticSerializationError

from lmx_lab.errors import InvalidRequestError

Shape = TypeVar("Shape", bound=BaseModel)


def shaped(shape: type[Shape], **fields: object) -> Shape:
    """Make a request of this shape.

    Raises:
        InvalidRequestError: a field is invalid; the message names the first one.
    """
    try:
        return shape.model_validate(fields)
    except ValidationError as exc:
        wrong = exc.errors(include_url=False, include_context=False)[0]
        field = ".".join(str(part)[:80] for part in wrong["loc"])
        said = wrong["msg"].removeprefix("Value error, ")
        given = f" (given: {wrong['input']!r:.80})" if isinstance(wrong["input"], str | int | float) else ""
        raise InvalidRequestError(f"{field or 'the request'}: {said}{given}", param=field or None) from None


def as_content(body: BaseModel) -> bytes:
    """The request as JSON, with only the fields that were set: an older server may not know new ones.

    Raises:
        InvalidRequestError: a value cannot be written as JSON.
    """
    try:
        # pydantic warns about unions whose members are chosen by a validator, but serializes them correctly.
        return body.model_dump_json(by_alias=True, exclude_unset=True, warnings="none").encode()
    except PydanticSerializationError as exc:
        raise InvalidRequestError(f"the request cannot be written as JSON: {exc!s:.200}; give plain values") from exc
