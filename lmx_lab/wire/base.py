"""What all requests share: strict and lenient models, types of fields, ids, and fields that are not supported.

Requests are strict: a number in quotes and an unknown field are errors. ``null`` always means the default. A field of
the format that this server does not support is refused unless its value has no effect.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    GetCoreSchemaHandler,
    StringConstraints,
    WithJsonSchema,
    model_validator,
)
from typing_extensions import TypeAliasType

from lmx_lab.values.bodies import check_members, listed, whole

ANY_MODEL = "default"
"""The model name that stands for the loaded model."""
UNLIMITED = 2**31 - 1
"""The maximum number of tokens that stands for -1: more than any context."""
NonEmpty = Annotated[str, StringConstraints(min_length=1)]
# Longer stop strings would cost every stream time at every token.
Stop = Annotated[str, StringConstraints(min_length=1, max_length=1000)]
# A named type, because members of a union must be hashable, and FailFast is not.
Stops = TypeAliasType("Stops", Annotated[list[Stop], FailFast(), Field(max_length=16)])
NO_EMPTY_STOPS = BeforeValidator(
    lambda value: [each for each in value if each != ""] if isinstance(value, list) else None if value == "" else value
)
"""Removes empty stop strings, with which other servers mean none."""
WHOLE = BeforeValidator(whole)
"""Accepts 5.0 for 5. It comes after the bounds of a field, so that these are in its JSON schema too."""
LISTED = BeforeValidator(listed)
"""Accepts a list for a tuple, which strict models do not accept when they are validated from Python objects."""


Written = Annotated[
    str,
    BeforeValidator(lambda value: "" if value is None else value),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "null"}]}),
]
"""A text that some clients send as null if it is empty."""


def _check_token_id(key: str) -> str:
    # No vocabulary has ids of more than twelve digits, and this limits the input of int().
    if not (key.isascii() and key.isdigit() and len(key) <= 12):
        raise ValueError("the keys of logit_bias must be token ids, written in digits")
    return key


Probability = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Temperature = Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
# vLLM's range, except for the lower end: a divisor near 0 would exceed the range of float16.
RepetitionPenalty = Annotated[float, Field(ge=0.01, le=2, allow_inf_nan=False)]
Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]
TokenKey = Annotated[str, AfterValidator(_check_token_id)]
Biases = TypeAliasType("Biases", Annotated[dict[TokenKey, Bias], FailFast(), Field(max_length=1024)])
NamedTokens = TypeAliasType(
    "NamedTokens",
    Annotated[list[Annotated[int, Field(ge=0)] | Stop], FailFast(), Field(max_length=64)],
)
NO_LIMIT = BeforeValidator(lambda value: UNLIMITED if value == -1 else value)
"""Accepts -1 for as many tokens as the context allows, as llama.cpp does."""
TokenLimit = Annotated[
    int,
    Field(ge=1),
    WHOLE,
    NO_LIMIT,
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, {"const": -1}]}),
]
AnyModel = Annotated[
    NonEmpty,
    BeforeValidator(lambda value: ANY_MODEL if value is None else value),
    WithJsonSchema({"anyOf": [{"type": "string", "minLength": 1}, {"type": "null"}]}),
]
"""Name of the model that answers; null means ``ANY_MODEL``."""
Choices = Annotated[int, Field(ge=1, le=8), WHOLE]
Alternatives = Annotated[int, Field(ge=0, le=20), WHOLE]


class BodyModel(BaseModel):
    """Base class of request bodies and their parts: strict, immutable, with a limited number of members."""

    model_config = ConfigDict(strict=True, frozen=True, use_attribute_docstrings=True)

    _check_members = model_validator(mode="before")(check_members)


class RequestModel(BodyModel):
    """A body, or a part of one, without unknown fields."""

    model_config = ConfigDict(extra="forbid")


class LenientModel(BodyModel):
    """A body, or a part of one, that accepts unknown fields. Known fields are strict."""

    model_config = ConfigDict(extra="allow")

    @property
    def unknown(self) -> list[str]:
        """Names of the given fields that the format does not have. A field whose value is null is not given."""
        return [name for name, value in (self.model_extra or {}).items() if value is not None]


class OtherModel(LenientModel):
    """A part of a request whose type the format does not define. Its fields depend on the type."""

    type: NonEmpty


def unknown_fields(value: Any, path: str = "") -> Iterator[str]:
    """Yield the paths of the unknown fields of a body and of all of its parts, without the indices of lists."""
    if isinstance(value, list):
        for part in value:
            if isinstance(part, (list, BaseModel)):
                yield from unknown_fields(part, path)
    elif not isinstance(value, OtherModel):
        if isinstance(value, LenientModel) and value.model_extra:
            for name in value.unknown:
                yield f"{path}{name}"
        # Reading each field by its name would take twice as long; a conversation may have 4,096 messages.
        for name, inner in value.__dict__.items():
            if isinstance(inner, (list, BaseModel)):
                yield from unknown_fields(inner, f"{path}{name}.")


def request_class(name: str) -> type[RequestModel] | None:
    """Return the request class of this name, or the class of a part of a request; None if no such class is imported."""
    classes = [RequestModel]
    while classes:
        if (found := classes.pop()).__name__ == name:
            return found
        classes += found.__subclasses__()
    return None


# Ids

ID_PATTERN = r"^[A-Za-z0-9_-]{1,64}$"
Identifier = Annotated[str, StringConstraints(pattern=ID_PATTERN)]


def new_id(prefix: str) -> str:
    """Return a new id, such as ``ses_01kb…``, from a prefix, 48 bits of the time in milliseconds and 80 random bits."""
    value = (time.time_ns() // 1_000_000) << 80 | secrets.randbits(80)
    # 26 digits in base 32 as defined by Crockford: letters are distinct in upper and lower case.
    alphabet = "0123456789abcdefghjkmnpqrstvwxyz"
    digits = [alphabet[value >> shift & 31] for shift in range(125, -1, -5)]
    return f"{prefix}_{''.join(digits)}"


# Fields that are not supported


@dataclass(frozen=True)
class Neutral:
    """An annotation for such a field, which accepts null and the values without effect.

    Args:
        what: The unsupported feature, in the plural, for the message.
        values: Accepted values in addition to null.
    """

    what: str
    values: tuple[Any, ...] = ()

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        schema = {"enum": [None, *self.values], "description": f"Not supported: {self.what}"}
        return handler.generate_schema(Annotated[Any, AfterValidator(self._check), WithJsonSchema(schema)])

    def _check(self, value: Any) -> Any:
        # In Python, False equals 0.
        is_neutral = any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in self.values)
        if value is not None and not is_neutral:
            raise ValueError(f"{self.what} are not supported by this version; leave the field out")
        return value
