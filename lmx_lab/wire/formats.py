"""Pydantic models of ``response_format``, the required form of the answer.

Regular expressions and grammars are extensions.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    FailFast,
    Field,
    StringConstraints,
    Tag,
    WithJsonSchema,
    model_validator,
)
from typing_extensions import TypeAliasType

from lmx_lab.wire.base import Neutral, NonEmpty, RequestModel

PATTERN_CHARACTERS = 65_536
"""Largest size of a regular expression or a grammar."""
GBNF_CHARACTERS = 16_384
"""Largest size of a grammar in GBNF, which takes up to 50 ms to convert."""
NAME_CHARACTERS = 128
NAME_SHAPE = re.compile(r"[a-zA-Z0-9_./:-]+")
KINDS = {str: "a string", int: "a number", float: "a number", list: "a list", tuple: "a list", dict: "an object"}
FORMATS = ("text", "json_object", "json_schema", "regex", "grammar")


def json_text(value: Any) -> str:
    """Convert a value to JSON without spaces.

    Raises:
        ValueError: it has no JSON form; a value from a notebook can be any object.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        # A lone surrogate would fail later, when the text is encoded.
        text.encode()
    except RecursionError as exc:
        raise ValueError("cannot be written as JSON: it is nested too deeply") from exc
    except (TypeError, ValueError) as exc:
        raise ValueError(f"cannot be written as JSON: {exc!s:.200}") from exc
    return text


def kind_of(value: Any) -> str:
    """Return the JSON name of a value's type, for messages."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "true" if value else "false"
    return KINDS.get(type(value), f"of Python's type {type(value).__name__}")


def check_length(characters: int, limit: int) -> None:
    """Check the length of a text.

    Raises:
        ValueError: it exceeds the limit.
    """
    if characters > limit:
        raise ValueError(f"has {characters:,} characters, the limit is {limit:,}; send at most {limit:,}")


def _check_name(name: str) -> str:
    if len(name) > NAME_CHARACTERS:
        raise ValueError(f"has {len(name):,} characters, the limit is {NAME_CHARACTERS}; give a shorter name")
    if not NAME_SHAPE.fullmatch(name):
        raise ValueError("may contain only letters (a to z, A to Z), digits and the characters _ - . / : ; rename it")
    return name


Name = Annotated[
    str,
    AfterValidator(_check_name),
    WithJsonSchema({"type": "string", "pattern": f"^{NAME_SHAPE.pattern}$", "maxLength": NAME_CHARACTERS}),
]
"""Name of a tool."""


Label = Annotated[str, StringConstraints(min_length=1, max_length=256)]


def _at_most(limit: int) -> Callable[[str], str]:
    def check(text: str) -> str:
        check_length(len(text), limit)
        return text

    return check


Pattern = Annotated[
    NonEmpty,
    AfterValidator(_at_most(PATTERN_CHARACTERS)),
    WithJsonSchema({"type": "string", "minLength": 1, "maxLength": PATTERN_CHARACTERS}),
]
GbnfGrammar = Annotated[
    NonEmpty,
    AfterValidator(_at_most(GBNF_CHARACTERS)),
    WithJsonSchema({"type": "string", "minLength": 1, "maxLength": GBNF_CHARACTERS}),
]


def _check_schema(schema: Any) -> Any:
    if not isinstance(schema, dict | bool):
        raise ValueError(f"must be a JSON schema (an object, true or false); it is {kind_of(schema)}")
    # As JSON without spaces.
    check_length(len(json_text(schema)), 262_144)
    return schema


JsonSchema = Annotated[
    Any, AfterValidator(_check_schema), WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "boolean"}]})
]


def _check_object_schema(schema: Any) -> Any:
    if schema is not None and not isinstance(schema, dict):
        raise ValueError(f"must be a JSON schema as an object; it is {kind_of(schema)}")
    return _check_schema(schema) if schema is not None else None


def _check_type(kind: Any) -> Any:
    if kind not in FORMATS:
        raise ValueError(f"is not a format; supported are {', '.join(FORMATS)}")
    return kind


class TextFormat(RequestModel):
    """Any text; the default. Unknown and missing types are also validated as this one, for a helpful error."""

    type: Annotated[Literal["text"], BeforeValidator(_check_type)]


class JsonObjectFormat(RequestModel):
    """A JSON object. With a schema, as in llama.cpp, it has to satisfy the schema."""

    type: Literal["json_object"]
    schema_: Annotated[
        Any, AfterValidator(_check_object_schema), WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "null"}]})
    ] = Field(None, alias="schema")


class NamedSchema(RequestModel):
    """A JSON schema with a name."""

    name: Label | None = None
    """Not used. Clients may send the name of a generic class."""
    schema_: JsonSchema = Field(alias="schema")
    """JSON schema, draft 2020-12."""

    description: str | None = None
    """Not used."""
    strict: bool | None = None
    """Whether to refuse a schema of which a part cannot be enforced. Otherwise that part is left out, and named in the
    header ``x-lmx-ignored``."""


class JsonSchemaFormat(RequestModel):
    """JSON that satisfies a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema

    @model_validator(mode="before")
    @classmethod
    def _read_schema(cls, given: Any) -> Any:
        # llama.cpp's form.
        if isinstance(given, dict) and "schema" in given and "json_schema" not in given:
            others = {name: value for name, value in given.items() if name != "schema"}
            return {**others, "json_schema": {"schema": given["schema"]}}
        return given


def schema_format(schema: Any) -> JsonSchemaFormat:
    """Return the format of a schema that was checked."""
    named = NamedSchema.model_construct(name="schema", schema_=schema)
    return JsonSchemaFormat.model_construct(type="json_schema", json_schema=named)


class RegexFormat(RequestModel):
    """An extension: a text that a regular expression matches as a whole."""

    type: Literal["regex"]
    regex: Pattern
    r"""The expression, in the syntax that JavaScript and Python share. ``\d``, ``\w`` and ``\s`` match only ASCII
    characters."""


class GrammarFormat(RequestModel):
    """An extension: a text that a grammar generates."""

    type: Literal["grammar"]
    grammar: Pattern
    syntax: Literal["lark", "gbnf"] | None = "lark"
    """llguidance's variant of Lark, or llama.cpp's GBNF."""

    @model_validator(mode="after")
    def _check_length(self) -> Self:
        if self.syntax == "gbnf":
            check_length(len(self.grammar), GBNF_CHARACTERS)
        return self


AnyFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat | RegexFormat | GrammarFormat


def _format_shape(given: Any) -> str | None:
    if not isinstance(given, dict):
        return None
    kind = given.get("type")
    return f"dict[{kind}]" if kind in FORMATS else "dict[text]"


ResponseFormat = Annotated[
    Annotated[TextFormat, Tag("dict[text]")]
    | Annotated[JsonObjectFormat, Tag("dict[json_object]")]
    | Annotated[JsonSchemaFormat, Tag("dict[json_schema]")]
    | Annotated[RegexFormat, Tag("dict[regex]")]
    | Annotated[GrammarFormat, Tag("dict[grammar]")],
    Discriminator(
        _format_shape,
        custom_error_type="format_shape",
        custom_error_message=f'must be an object, such as {{"type": "json_object"}}; types are {", ".join(FORMATS)}',
    ),
]


# vLLM's names


def _parse_schema(given: Any) -> Any:
    try:
        return json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError) as exc:
        raise ValueError(f"is a text that is not JSON ({exc!s:.80}); send the schema as an object") from None


SchemaOrText = Annotated[JsonSchema, BeforeValidator(_parse_schema)]
"""A JSON schema, also as text."""


def _check_texts(texts: list[str]) -> list[str]:
    check_length(sum(map(len, texts)), PATTERN_CHARACTERS)
    return texts


# A named type, because members of a union must be hashable, and FailFast is not.
ChoiceTexts = TypeAliasType(
    "ChoiceTexts",
    Annotated[list[NonEmpty], FailFast(), Field(min_length=1, max_length=1024), AfterValidator(_check_texts)],
)


class StructuredOutputs(RequestModel):
    """vLLM's ``structured_outputs``: the required form of the answer, exactly one."""

    json_: SchemaOrText | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: Pattern | None = None
    choice: ChoiceTexts | None = None
    """The texts of which the answer is one."""
    grammar: Pattern | None = None
    """A grammar in GBNF if it contains ``::=``, otherwise in llguidance's variant of Lark."""

    # Not supported; only values without effect are valid.
    structural_tag: Annotated[Any, Neutral("structural tags")] = None
    whitespace_pattern: Annotated[Any, Neutral("patterns of whitespace")] = None
    disable_any_whitespace: Annotated[Any, Neutral("restrictions of whitespace", (False,))] = None
    disable_additional_properties: Annotated[Any, Neutral("changes of the schema", (False,))] = None
    disable_fallback: Any = None
    """Ignored: there is one implementation."""

    @model_validator(mode="after")
    def _check_one_form(self) -> Self:
        forms = {"json": self.json_, "regex": self.regex, "choice": self.choice, "grammar": self.grammar}
        given = [name for name, form in forms.items() if form is not None] + ["json_object"] * bool(self.json_object)
        if len(given) != 1:
            what = f"has {' and '.join(given)}" if given else "has no form"
            raise ValueError(f"{what}; send exactly one of json, json_object, regex, choice and grammar")
        if self.grammar is not None and "::=" in self.grammar:
            check_length(len(self.grammar), GBNF_CHARACTERS)
        return self

    @property
    def format(self) -> AnyFormat:
        """The same as a ``response_format``."""
        if self.json_object:
            return JsonObjectFormat(type="json_object", schema=None)
        if self.regex is not None:
            return RegexFormat.model_construct(type="regex", regex=self.regex)
        if self.json_ is not None:
            return schema_format(self.json_)
        # Strings of Lark are written like those of JSON.
        grammar = self.grammar or f"start: {' | '.join(map(json_text, self.choice or ()))}"
        syntax: Literal["gbnf", "lark"] = "gbnf" if self.grammar is not None and "::=" in grammar else "lark"
        return GrammarFormat.model_construct(type="grammar", grammar=grammar, syntax=syntax)
