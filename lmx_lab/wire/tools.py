"""Tools, the choice among them, and their calls: in histories, in answers, in chunks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

from lmx_lab.wire.formats import Name, check_length, json_text, kind_of
from lmx_lab.wire.generation import NonEmpty, RequestShape
from lmx_lab.wire.limits import VALUE_LIMIT, Structure

TOOL_LIMIT = 128
PARAMETERS_CHARACTERS = 262_144
"""Of the parameters of all tools together, as JSON without spaces."""
CALL_LIMIT = 4096
"""Calls in one history, which would take as many messages to answer; reading 100,000 takes seconds."""
PART_LIMIT = 4096
"""Parts of content in one history."""
SHOWN = 5
"""Names in a message that lists what there is."""


def listed(names: Sequence[str]) -> str:
    """Some of the names, for messages: a caller chose them, so there may be many and long ones."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(f"{name[:80]!r:.80}" for name in names[:SHOWN]) + more


# Definitions


def _check_parameters(parameters: Any) -> Any:
    if parameters is None:
        return None
    if not isinstance(parameters, dict):
        raise ValueError(f"has to be a JSON schema as an object; it is {kind_of(parameters)}")
    kind = parameters.get("type", "object")
    if kind != "object":
        raise ValueError(f"has the type {kind!r:.80}; arguments are an object, so the type has to be 'object'")
    return parameters


class FunctionDefinition(RequestShape):
    name: Name
    description: str | None = None
    parameters: Annotated[
        Any, AfterValidator(_check_parameters), WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "null"}]})
    ] = None
    """JSON schema of the object of its arguments; null is a function without any."""

    # Known to the format, changing nothing here: where a call is forced, its schema is enforced.
    strict: bool | None = None


class FunctionTool(RequestShape):
    type: Literal["function"]
    function: FunctionDefinition


def _check_tools(tools: list[FunctionTool]) -> list[FunctionTool]:
    seen: dict[str, int] = {}
    characters = 0
    for number, tool in enumerate(tools):
        name, parameters = tool.function.name, tool.function.parameters
        if (first := seen.setdefault(name, number)) != number:
            raise ValueError(f"number {first} and number {number} are both named {name!r}; names have to differ")
        try:
            characters += len(json_text(parameters)) if parameters is not None else 0
        except ValueError as exc:
            raise ValueError(f"the parameters of {name!r}, number {number}: {exc}") from exc
    try:
        check_length(characters, PARAMETERS_CHARACTERS)
    except ValueError as exc:
        raise ValueError(f"the parameters of all tools together: {exc}") from exc
    return tools


# As a named type, for the reason given where TokenIds is defined; so are the calls below.
Tools = TypeAliasType(
    "Tools", Annotated[list[FunctionTool], FailFast(), Field(max_length=TOOL_LIMIT), AfterValidator(_check_tools)]
)


# The choice


class FunctionName(RequestShape):
    name: NonEmpty


def _check_choice_type(kind: Any) -> Any:
    if kind == "allowed_tools":
        raise ValueError("allowed_tools is not supported; send only the tools that may be called, and auto or required")
    return kind


class NamedToolChoice(RequestShape):
    type: Annotated[Literal["function"], BeforeValidator(_check_choice_type)]
    function: FunctionName


def _choice_shape(choice: Any) -> str | None:
    return "str" if isinstance(choice, str) else "dict[function]" if isinstance(choice, dict) else None


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("str")] | Annotated[NamedToolChoice, Tag("dict[function]")],
    Discriminator(
        _choice_shape,
        custom_error_type="tool_choice_shape",
        custom_error_message="has to be 'none', 'auto', 'required' or an object that names a function, "
        'such as {"type": "function", "function": {"name": "..."}}',
    ),
]


def check_choice(choice: NamedToolChoice | str | None, tools: Sequence[FunctionTool]) -> None:
    """
    Raises:
        ValueError: what has to be called is not there.
    """
    if choice in (None, "none", "auto"):
        return
    if not tools:
        asked = repr(choice) if isinstance(choice, str) else f"the function {choice.function.name[:80]!r:.80}"
        raise ValueError(f"is {asked}, and there are no tools; send tools, or leave tool_choice out")
    if isinstance(choice, NamedToolChoice):
        names = [tool.function.name for tool in tools]
        if choice.function.name not in names:
            named = choice.function.name[:80]
            raise ValueError(f"names {named!r:.80}, which is not in tools; there are {listed(names)}")


# In a history

_JSON: TypeAdapter[Any] = TypeAdapter(Any)


def _read_arguments(given: Any) -> Any:
    """The object that arguments are, which the format has as a text; read once, here."""
    value = _parsed(given) if isinstance(given, str) else given
    if not isinstance(value, dict):
        raise ValueError(f"has to be a JSON object, as an object or as its text; it is {kind_of(value)}")
    if value is given:
        # For the error: a notebook's object may hold anything.
        json_text(value)
    return value


def _parsed(text: str) -> Any:
    if not text.strip():
        return {}
    try:
        return _JSON.validate_json(text)
    except ValidationError as exc:
        said = exc.errors()[0]["msg"].removeprefix("Invalid JSON: ")
        raise ValueError(f"is no JSON, {said}; it has to be the text of a JSON object") from exc


class CalledFunction(RequestShape):
    name: NonEmpty
    arguments: Annotated[
        dict[str, Any],
        FailFast(),
        Field(max_length=VALUE_LIMIT),
        BeforeValidator(_read_arguments),
        WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "object"}]}),
    ]
    """An object, or JSON of one as answers have it; an empty text is an empty object."""

    # What openai-python's ``parse`` adds to an answer: the same again.
    parsed_arguments: Any = None


class MessageToolCall(RequestShape):
    id: NonEmpty
    type: Literal["function"] | None = "function"
    function: CalledFunction

    # Left over from the chunks of a stream; the order is that of the list.
    index: int | None = None


def _check_ids(calls: list[MessageToolCall]) -> list[MessageToolCall]:
    seen: set[str] = set()
    for call in calls:
        if call.id in seen:
            raise ValueError(f"two calls have the id {call.id[:80]!r:.80}; ids have to differ within a message")
        seen.add(call.id)
    return calls


MessageToolCalls = TypeAliasType(
    "MessageToolCalls",
    Annotated[list[MessageToolCall], FailFast(), Field(max_length=CALL_LIMIT), AfterValidator(_check_ids)],
)


def check_counts(messages: Any) -> Any:
    """Count what all messages hold together, before they are validated, since that is what takes long.

    Raises:
        ValueError: too many tool calls, or too many parts of content.
    """
    given = [message for message in messages if isinstance(message, dict)] if isinstance(messages, list) else []
    for field, what, limit in (("tool_calls", "tool calls", CALL_LIMIT), ("content", "parts of content", PART_LIMIT)):
        count = sum(len(_listed(message.get(field))) for message in given)
        if count > limit:
            raise ValueError(f"have {count:,} {what} together, the limit is {limit:,}; leave the oldest out")
    _check_arguments(given)
    return messages


def _check_arguments(messages: Sequence[Mapping[str, Any]]) -> None:
    """
    Raises:
        ValueError: the arguments of all calls, which are JSON within texts, hold more than a body may.
    """
    structure = Structure()
    for call in (call for message in messages for call in _listed(message.get("tool_calls"))):
        function = call.get("function") if isinstance(call, dict) else None
        arguments = function.get("arguments") if isinstance(function, dict) else None
        if isinstance(arguments, str):
            structure.add_whole(arguments)
        if structure.excess is not None:
            raise ValueError(
                f"have tool calls whose arguments have more than {structure.excess} together, the limit; "
                "leave the oldest out"
            )


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


# In answers and chunks


class AnswerFunction(BaseModel):
    name: str
    arguments: str
    """JSON of an object, as the model wrote it; only a part of one if the answer was cut off."""


class AnswerToolCall(BaseModel):
    id: str
    type: Literal["function"] = "function"
    function: AnswerFunction


class FunctionChunk(BaseModel):
    name: str | None = None
    arguments: str


class ToolCallChunk(BaseModel):
    """The first of a call has its id and its name, and empty arguments; the others have a piece of the arguments."""

    index: int
    """Which call of the answer."""
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionChunk
