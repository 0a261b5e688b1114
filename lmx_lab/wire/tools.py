"""Pydantic models of tools, of the choice among them, and of their calls in histories, answers and chunks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Discriminator,
    FailFast,
    Field,
    Tag,
    TypeAdapter,
    ValidationError,
    WithJsonSchema,
)
from typing_extensions import TypeAliasType

from lmx_lab.values.bodies import MEMBER_LIMIT
from lmx_lab.wire.base import WHOLE, NonEmpty, RequestModel
from lmx_lab.wire.formats import Name, check_length, json_text, kind_of
from lmx_lab.wire.limits import FEW_VALUES, VALUE_LIMIT, Structure

TOOL_LIMIT = 128
CALL_LIMIT = 4096
"""Largest number of calls in a history; it has as many messages with results. Validating 100,000 takes seconds."""
PART_LIMIT = 4096
"""Largest number of content parts in a history."""


def format_names(names: Sequence[str]) -> str:
    """Format some of the names for a message. The caller chose them, so they can be many and long."""
    shown = names[:5]
    more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    return ", ".join(f"{name[:80]!r:.80}" for name in shown) + more


# Definitions


def _check_parameters(parameters: Any) -> Any:
    if parameters is None:
        return None
    if not isinstance(parameters, dict):
        raise ValueError(f"must be a JSON schema as an object; it is {kind_of(parameters)}")
    kind = parameters.get("type", "object")
    if kind != "object":
        raise ValueError(f"has the type {kind!r:.80}; arguments are an object, so the type must be 'object'")
    return parameters


# A named type, because members of a union must be hashable, and FailFast is not.
ParameterSchema = TypeAliasType(
    "ParameterSchema",
    Annotated[
        dict[str, Any], FailFast(), Field(max_length=MEMBER_LIMIT), FEW_VALUES, AfterValidator(_check_parameters)
    ],
)
"""JSON schema of the arguments of a function, in formats whose requests are converted to the chat format."""


class FunctionDefinition(RequestModel):
    """A function that the model can call."""

    name: Name
    description: str | None = None
    parameters: Annotated[
        Any, AfterValidator(_check_parameters), WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "null"}]})
    ] = None
    """JSON schema of the object of its arguments; null for a function without arguments."""

    # A field of the format that has no effect here: the schema of a forced call is always enforced.
    strict: bool | None = None


class FunctionTool(RequestModel):
    """A tool."""

    type: Literal["function"]
    function: FunctionDefinition


def _check_tools(tools: list[FunctionTool]) -> list[FunctionTool]:
    seen: dict[str, int] = {}
    characters = 0
    for number, tool in enumerate(tools):
        name, parameters = tool.function.name, tool.function.parameters
        if (first := seen.setdefault(name, number)) != number:
            raise ValueError(f"number {first} and number {number} are both named {name!r}; names must be unique")
        try:
            characters += len(json_text(parameters)) if parameters is not None else 0
        except ValueError as exc:
            raise ValueError(f"the parameters of {name!r}, number {number}: {exc}") from exc
    try:
        # As JSON without spaces.
        check_length(characters, 262_144)
    except ValueError as exc:
        raise ValueError(f"the parameters of all tools together: {exc}") from exc
    return tools


# Named types, here and for the calls below, for the reason given above TokenIds in wire.completions.
Tools = TypeAliasType(
    "Tools", Annotated[list[FunctionTool], FailFast(), Field(max_length=TOOL_LIMIT), AfterValidator(_check_tools)]
)


# The choice


class FunctionName(RequestModel):
    """The name of a function."""

    name: NonEmpty


def _check_choice_type(kind: Any) -> Any:
    if kind == "allowed_tools":
        raise ValueError("allowed_tools is not supported; send only the allowed tools, with auto or required")
    return kind


class NamedToolChoice(RequestModel):
    """A tool choice that names the function to call."""

    type: Annotated[Literal["function"], BeforeValidator(_check_choice_type)]
    function: FunctionName


def _choice_shape(choice: Any) -> str | None:
    return "str" if isinstance(choice, str) else "dict[function]" if isinstance(choice, dict) else None


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("str")] | Annotated[NamedToolChoice, Tag("dict[function]")],
    Discriminator(
        _choice_shape,
        custom_error_type="tool_choice_shape",
        custom_error_message="must be 'none', 'auto', 'required' or an object that names a function, "
        'such as {"type": "function", "function": {"name": "..."}}',
    ),
]


def check_choice(choice: NamedToolChoice | str | None, tools: Sequence[FunctionTool]) -> None:
    """Check that the function to call exists.

    Raises:
        ValueError: it does not.
    """
    if choice in (None, "none", "auto"):
        return
    if not tools:
        required = repr(choice) if isinstance(choice, str) else f"the function {choice.function.name[:80]!r:.80}"
        raise ValueError(f"is {required}, but there are no tools; send tools, or leave tool_choice out")
    if isinstance(choice, NamedToolChoice):
        names = [tool.function.name for tool in tools]
        if choice.function.name not in names:
            named = choice.function.name[:80]
            raise ValueError(f"names {named!r:.80}, which is not in tools; tools contains {format_names(names)}")


# In a history

_JSON: TypeAdapter[Any] = TypeAdapter(Any)


def read_arguments(given: Any) -> Any:
    """Read the arguments of a call. In the format they are JSON as a text, which is parsed only here.

    Raises:
        ValueError: they are not an object.
    """
    value = given
    if isinstance(given, str):
        try:
            value = _JSON.validate_json(given) if given.strip() else {}
        except ValidationError as exc:
            reason = exc.errors()[0]["msg"].removeprefix("Invalid JSON: ")
            raise ValueError(f"is not JSON, {reason}; it must be the text of a JSON object") from exc
    if not isinstance(value, dict):
        raise ValueError(f"must be a JSON object, as an object or as its text; it is {kind_of(value)}")
    if value is given:
        # Called for its error: an object from a notebook may contain anything.
        json_text(value)
    return value


class CalledFunction(RequestModel):
    """The function of a call in a history."""

    name: NonEmpty
    arguments: Annotated[
        dict[str, Any],
        FailFast(),
        Field(max_length=VALUE_LIMIT),
        BeforeValidator(read_arguments),
        WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "object"}]}),
    ]
    """An object, or its JSON as in answers. An empty text means an empty object."""

    # openai-python's ``parse`` adds this field to an answer; it repeats the arguments.
    parsed_arguments: Any = None


class MessageToolCall(RequestModel):
    """A call in a history."""

    id: NonEmpty
    type: Literal["function"] | None = "function"
    function: CalledFunction

    # Present if the call was copied from a stream. Not used: the order is that of the list.
    index: Annotated[int, WHOLE] | None = None


def _check_ids(calls: list[MessageToolCall]) -> list[MessageToolCall]:
    seen: set[str] = set()
    for call in calls:
        if call.id in seen:
            raise ValueError(f"two calls have the id {call.id[:80]!r:.80}; ids must be unique within a message")
        seen.add(call.id)
    return calls


MessageToolCalls = TypeAliasType(
    "MessageToolCalls",
    Annotated[list[MessageToolCall], FailFast(), Field(max_length=CALL_LIMIT), AfterValidator(_check_ids)],
)


def check_counts(messages: Any) -> Any:
    """Check the number of calls and parts in all messages. It runs before validation, which is the slow part.

    Raises:
        ValueError: there are too many tool calls or content parts.
    """
    given = [message for message in messages if isinstance(message, dict)] if isinstance(messages, list) else []
    for field, what, limit in (("tool_calls", "tool calls", CALL_LIMIT), ("content", "content parts", PART_LIMIT)):
        count = sum(len(_as_list(message.get(field))) for message in given)
        if count > limit:
            raise ValueError(f"have {count:,} {what} together, the limit is {limit:,}; leave the oldest out")
    functions = [
        call.get("function")
        for message in given
        for call in _as_list(message.get("tool_calls"))
        if isinstance(call, dict)
    ]
    check_argument_texts(function.get("arguments") for function in functions if isinstance(function, dict))
    return messages


def check_argument_texts(texts: Iterable[Any]) -> None:
    """Check the arguments of all calls in a history, which are JSON within texts; other values are skipped.

    Raises:
        ValueError: together they contain more than a body may.
    """
    structure = Structure()
    # The texts are joined, because each call of the counter has a fixed cost. A text with an unterminated string would
    # hide the contents of the texts after it, but validation stops at this error.
    structure.add_whole("\n".join(text for text in texts if isinstance(text, str)))
    if structure.excess is not None:
        raise ValueError(
            f"have tool calls whose arguments have more than {structure.excess} together, the limit; "
            "leave the oldest out"
        )


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


# In answers and chunks


class AnswerFunction(BaseModel):
    """The function of a call in an answer."""

    name: str
    arguments: str
    """JSON of an object as the model wrote it; incomplete if the answer was cut off."""


class AnswerToolCall(BaseModel):
    """A call in an answer."""

    id: str
    type: Literal["function"] = "function"
    function: AnswerFunction


class FunctionChunk(BaseModel):
    """A piece of a call's function."""

    name: str | None = None
    arguments: str


class ToolCallChunk(BaseModel):
    """A piece of a call. The first has id, name and empty arguments; the others have a piece of the arguments."""

    index: int
    """Index of the call in the answer."""
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionChunk
