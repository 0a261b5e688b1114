"""Build request bodies from arguments and encode them as JSON. Invalid ones are refused before anything is sent."""

from __future__ import annotations

import hashlib
from typing import TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError

from lmx_lab.errors import InvalidRequestError, did_you_mean
from lmx_lab.wire.chat import ChatRequest

Shape = TypeVar("Shape")
CONVERSATION_HEADER = "x-session-id"
"""The header in which Ray Serve expects the name of a session. Other proxies can be configured to use it."""


def build_body(shape: type[Shape], **fields: object) -> Shape:
    """Return a request body of this shape.

    Raises:
        InvalidRequestError: a field is invalid; the message names the first one.
    """
    try:
        return TypeAdapter(shape).validate_python(fields)
    except ValidationError as exc:
        first = exc.errors(include_url=False, include_context=False)[0]
        field = ".".join(str(part)[:80] for part in first["loc"])
        reason = first["msg"].removeprefix("Value error, ")
        if first["type"] == "extra_forbidden" and len(first["loc"]) == 1 and issubclass(shape, BaseModel):
            reason = f"there is no such field{did_you_mean(field, shape.model_fields)}"
        given = f" (given: {first['input']!r:.80})" if isinstance(first["input"], str | int | float) else ""
        raise InvalidRequestError(f"{field or 'the request'}: {reason}{given}", param=field or None) from None


def encode_body(body: BaseModel) -> bytes:
    """Return the body as JSON, with only the fields that were set: an older server may not know new ones.

    Raises:
        InvalidRequestError: a value cannot be written as JSON.
    """
    try:
        # pydantic warns about unions whose members are chosen by a validator, but serializes them correctly.
        return body.model_dump_json(by_alias=True, exclude_unset=True, warnings="none").encode()
    except PydanticSerializationError as exc:
        raise InvalidRequestError(
            f"the request cannot be written as JSON: {exc!s:.200}; give plain Python values"
        ) from None


def conversation_header(body: ChatRequest) -> dict[str, str]:
    """Return a header that is the same for all requests of a conversation.

    A proxy in front of several servers can send them to the same one, whose prefix cache contains their beginning. The
    value is a hash of the messages up to the first one of the user.
    """
    digest = hashlib.sha256()
    for message in body.messages:
        digest.update(encode_body(message))
        if message.role == "user":
            break
    return {CONVERSATION_HEADER: digest.hexdigest()[:16]}
