"""What all requests share: strict and lenient models, types of fields, ids, unsupported fields, and limits.

Known fields are strict: a number in quotes is an error. ``null`` always means the default. A field of the format that
this server does not support is refused unless its value has no effect. Other unknown fields are errors in requests of
this package's own routes, and are ignored in the formats of other servers.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    GetCoreSchemaHandler,
    StringConstraints,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError
from typing_extensions import TypeAliasType

from lmx_lab.errors import UNKNOWN_FIELD, did_you_mean
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
"""A text for which some clients send null if it is empty."""


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


def read_biases(given: Any) -> Any:
    """Convert llama.cpp's list of pairs to an object of biases. False, which excludes a token, becomes -100."""
    is_list = isinstance(given, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in given)
    pairs = {str(token): bias for token, bias in given} if is_list else given
    if not isinstance(pairs, dict):
        return given
    return {token: -100 if bias is False else bias for token, bias in pairs.items()}


Biases = TypeAliasType(
    "Biases", Annotated[dict[TokenKey, Bias], FailFast(), Field(max_length=1024), BeforeValidator(read_biases)]
)
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
    BeforeValidator(lambda value: ANY_MODEL if value in (None, "") else value),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "null"}]}),
]
"""Name of the model that answers; null and an empty name mean ``ANY_MODEL``."""
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

    def ignored(self) -> Iterator[str]:
        """Yield the names of the given fields that have no effect, for the header ``x-lmx-ignored``."""
        yield from unknown_fields(self)


NOT_MISSPELT = frozenset({"mode", "models"})
"""Fields of other servers whose names are similar to ``model``."""


class FormatModel(LenientModel):
    """A body in a format of other servers. Unknown fields are ignored, unless the name is a misspelt name of a known
    field or another name for it.
    """

    @classmethod
    def names(cls) -> Collection[str]:
        """Return the names of the known fields."""
        return cls.model_fields

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        if not self.model_extra:
            return self
        known = self.names()
        # Only 64 names are compared: all 256 that a body may have would take 50 ms.
        for name in [name for name in self.unknown if name not in known and name not in NOT_MISSPELT][:64]:
            if meant := did_you_mean(name, known, similarity=0.88):
                error = PydanticCustomError("misspelt", f"{UNKNOWN_FIELD}{meant}")
                detail = InitErrorDetails(type=error, loc=(name,), input=None)
                raise ValidationError.from_exception_data(type(self).__name__, [detail])
        return self


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


def request_class(name: str) -> type[BodyModel] | None:
    """Return the request class of this name, or the class of a part of a request; None if no such class is imported."""
    classes: list[type[BodyModel]] = [BodyModel]
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


# Limits on the contents of a request, which are checked before validation, the slow part

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


@dataclass
class Structure:
    """Counts the contents of JSON without parsing it. The counts are exact if the text is valid JSON."""

    items: int = 0
    """Number of commas: one for each item or member after the first of its list or object."""
    members: int = 0
    containers: int = 0
    """Number of lists and objects."""
    quotes: int = 0
    depth: int = 0
    """Largest number of lists and objects that are nested."""
    has_long_number: bool = False
    """Whether a number has more than ``DIGITS_LIMIT`` digits."""
    may_have_infinity: bool = False
    """Whether a number may exceed the largest float64."""
    unclosed: int = 0
    """Number of lists and objects that have not ended."""
    in_string: bool = False
    number: bytes = b""
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

    def add(self, text: bytes | bytearray, start: int, size: int) -> int:
        """Count a piece of about ``size`` bytes that begins at ``start``. Return where the next piece begins."""
        piece = text[start : start + size]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:
            # The piece ends within an escape; its second character belongs to it.
            piece = text[start : start + size + 1]
        parts = piece.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = self.number + b"".join(parts[self.in_string :: 2])
        self.in_string ^= len(parts) % 2 == 0
        self.quotes += len(parts) - 1
        self.items += outside.count(b",")
        self.members += outside.count(b":")
        opened = outside.count(b"[") + outside.count(b"{")
        self.containers += opened
        changes = memoryview(outside.translate(DEPTH_CHANGES, NOT_BRACKETS)).cast("b")
        deepest = max(accumulate(changes, initial=self.unclosed))
        self.depth = max(self.depth, deepest)
        self.unclosed += opened - (len(changes) - opened)
        self.has_long_number = self.has_long_number or LONG_NUMBER.search(outside) is not None
        self.may_have_infinity = self.may_have_infinity or LARGE_NUMBER.search(outside) is not None
        # The trailing characters of a number: digits, and the letter and sign of an exponent.
        tail = outside[-DIGITS_LIMIT:]
        self.number = tail[len(tail.rstrip(b"0123456789+eE")) :]
        return start + len(piece)


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
