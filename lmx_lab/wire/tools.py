"""Pydantic models of tools, of the choice among them, and of their calls in histories, answers and chunks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    FailFast,
    Field,
    Tag,
    TypeAdapter,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from typing_extensions import TypeAliasType

from lmx_lab.values.bodies import MEMBER_LIMIT
from lmx_lab.wire.base import FEW_VALUES, VALUE_LIMIT, WHOLE, LenientModel, NonEmpty, OtherModel, Structure, Written
from lmx_lab.wire.formats import Name, check_length, json_text, kind_of

T = TypeVar("T", bound=BaseModel)
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


def _read_parameters(parameters: Any) -> Any:
    """Return the schema of an object, whose type may be missing or allow null. PHP writes empty objects as lists."""
    if parameters == []:
        return {}
    if not isinstance(parameters, dict):
        return parameters
    kind, changes = parameters.get("type", "object"), dict[str, Any]()
    if kind in (None, "") or (isinstance(kind, list) and "object" in kind):
        changes["type"] = "object"
    if parameters.get("properties") == []:
        changes["properties"] = {}
    return {**parameters, **changes} if changes else parameters


READ_PARAMETERS = BeforeValidator(_read_parameters)


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
        dict[str, Any],
        FailFast(),
        Field(max_length=MEMBER_LIMIT),
        FEW_VALUES,
        AfterValidator(_check_parameters),
        READ_PARAMETERS,
    ],
)
"""JSON schema of the arguments of a function, in formats whose requests are converted to the chat format."""


class FunctionDefinition(LenientModel):
    """A function that the model can call."""

    name: Name
    description: str | None = None
    parameters: Annotated[
        Any,
        AfterValidator(_check_parameters),
        READ_PARAMETERS,
        WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "null"}]}),
    ] = None
    """JSON schema of the object of its arguments; null for a function without arguments."""

    strict: bool | None = None
    """Whether to refuse a schema of which a part cannot be enforced, if the tool must be called. Otherwise that part is
    left out, and named in the header ``x-lmx-ignored``."""


class FunctionTool(LenientModel):
    """A tool."""

    type: Literal["function"]
    function: FunctionDefinition


class HostedTool(OtherModel):
    """A tool of any other type, which runs on the servers of a service. It is ignored."""


def tag(value: Any, tags: Mapping[str, str], default: str | None = None) -> str:
    """Return the tag of a member of a union by its ``type``. With its brackets, it is not shown in errors."""
    given = (value.get("type") or default) if isinstance(value, dict) else getattr(value, "type", None)
    return f"dict[{tags.get(given, 'other') if isinstance(given, str) else 'other'}]"


def _read_tool(tool: Any) -> Any:
    """Convert a function from the Responses or the Messages format, which Cursor sends, to this format."""
    match tool:
        case {"function": _}:
            return tool if tool.get("type") else {**tool, "type": "function"}
        case {"type": "function", "name": str()}:
            return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}
        case {"name": str(), "input_schema": schema}:
            others = {name: value for name, value in tool.items() if name not in ("type", "input_schema")}
            return {"type": "function", "function": {**others, "parameters": schema}}
    return tool


def _check_tools(tools: list[T]) -> list[T]:
    characters = 0
    for number, tool in enumerate(tools):
        function = tool.function if isinstance(tool, FunctionTool) else tool
        if not isinstance(function, FunctionDefinition) or function.parameters is None:
            continue
        try:
            characters += len(json_text(function.parameters))
        except ValueError as exc:
            raise ValueError(f"the parameters of {function.name!r}, number {number}: {exc}") from exc
    try:
        # As JSON without spaces.
        check_length(characters, 262_144)
    except ValueError as exc:
        raise ValueError(f"the parameters of all tools together: {exc}") from exc
    return tools


# Named types, here and for the calls below, for the reason given above TokenIds in wire.completions.
Tools = TypeAliasType(
    "Tools",
    Annotated[
        list[
            Annotated[
                Annotated[FunctionTool, Tag("dict[function]")] | Annotated[HostedTool, Tag("dict[other]")],
                Discriminator(lambda value: tag(value, {"function": "function"})),
                BeforeValidator(_read_tool),
            ]
        ],
        FailFast(),
        Field(max_length=TOOL_LIMIT),
        AfterValidator(_check_tools),
    ],
)
Functions = TypeAliasType(
    "Functions",
    Annotated[list[FunctionDefinition], FailFast(), Field(max_length=TOOL_LIMIT), AfterValidator(_check_tools)],
)
"""The functions of a request, in the older form of tools."""


def unique_functions(tools: Iterable[FunctionTool | HostedTool]) -> dict[str, FunctionDefinition]:
    """Return the functions by their name. Of several with the same name, as of two MCP servers, the first counts."""
    functions: dict[str, FunctionDefinition] = {}
    for tool in tools:
        if isinstance(tool, FunctionTool):
            functions.setdefault(tool.function.name, tool.function)
    return functions


# The choice


class FunctionName(LenientModel):
    """The name of a function."""

    name: NonEmpty


class NamedToolChoice(LenientModel):
    """A tool choice that names the function to call."""

    type: Literal["function"]
    function: FunctionName


class AllowedTools(LenientModel):
    """The functions that may be called, and whether one must be."""

    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[list[NamedToolChoice], FailFast(), Field(min_length=1, max_length=TOOL_LIMIT)]


class AllowedToolsChoice(LenientModel):
    """A tool choice that allows some of the functions."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def _read_choice(choice: Any) -> Any:
    """Return a choice in this format that is spelled as by Mistral, by Anthropic or in the Responses format."""
    match choice:
        case "any" | {"type": "any" | "required"}:
            return "required"
        case {"type": "auto" | "none" as kind}:
            return kind
        case {"type": "tool" | "function", "name": str(name)}:
            return {"type": "function", "function": {"name": name}}
        case {"type": "allowed_tools", "allowed_tools": {"tools": list(tools)} as allowed}:
            return {
                "type": "allowed_tools",
                "allowed_tools": {**allowed, "tools": [_read_choice(each) for each in tools]},
            }
        case {"type": "allowed_tools", "tools": list()}:
            allowed = {name: value for name, value in choice.items() if name != "type"}
            return _read_choice({"type": "allowed_tools", "allowed_tools": allowed})
    return choice


def _choice_shape(choice: Any) -> str | None:
    if not isinstance(choice, dict):
        return "str" if isinstance(choice, str) else None
    return "dict[allowed_tools]" if choice.get("type") == "allowed_tools" else "dict[function]"


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("str")]
    | Annotated[NamedToolChoice, Tag("dict[function]")]
    | Annotated[AllowedToolsChoice, Tag("dict[allowed_tools]")],
    Discriminator(
        _choice_shape,
        custom_error_type="tool_choice_shape",
        custom_error_message="must be 'none', 'auto', 'required' or an object that names a function, "
        'such as {"type": "function", "function": {"name": "..."}}',
    ),
    BeforeValidator(_read_choice),
]


FunctionChoice = Annotated[
    Annotated[Literal["none", "auto"], Tag("str")] | Annotated[FunctionName, Tag("dict[name]")],
    Discriminator(
        lambda choice: {str: "str", dict: "dict[name]", FunctionName: "dict[name]"}.get(type(choice)),
        custom_error_type="function_call_shape",
        custom_error_message="must be 'none', 'auto' or an object that names a function, such as {\"name\": \"...\"}",
    ),
]
"""The choice among the functions of a request, in the older form of ``tool_choice``."""


def check_choice(
    choice: NamedToolChoice | AllowedToolsChoice | str | None,
    functions: Mapping[str, FunctionDefinition],
    *,
    fields: tuple[str, str] = ("tools", "tool_choice"),
) -> None:
    """Check that the functions exist that the choice names or requires.

    Args:
        fields: The names of the request's fields with the functions and with the choice.

    Raises:
        ValueError: one does not exist.
    """
    if choice in (None, "none", "auto"):
        return
    named, (tools, field) = chosen_names(choice), fields
    if not functions:
        required = f"the function {named[0][:80]!r:.80}" if named else repr(choice)
        raise ValueError(f"is {required}, but there are no {tools}; send {tools}, or leave {field} out")
    for name in named:
        if name not in functions:
            known = format_names(list(functions))
            raise ValueError(f"names {name[:80]!r:.80}, which is not in {tools}; {tools} contains {known}")


def chosen_names(choice: NamedToolChoice | AllowedToolsChoice | str | None) -> list[str]:
    """Return the names of the functions that a choice allows; none if it allows all."""
    if isinstance(choice, AllowedToolsChoice):
        return [tool.function.name for tool in choice.allowed_tools.tools]
    return [choice.function.name] if isinstance(choice, NamedToolChoice) else []


# In a history

_JSON: TypeAdapter[Any] = TypeAdapter(Any)


def read_arguments(given: Any) -> Any:
    """Read the arguments of a call. In the format they are JSON as a text, which is parsed only here.

    A text that is not a JSON object is returned unchanged, because an answer that was cut off at ``max_tokens`` ends
    with a part of an object, and the conversation has to remain usable. Some clients send null or an empty list for no
    arguments.

    Raises:
        ValueError: they are neither a text nor an object.
    """
    value = {} if given is None or given == [] else given
    if isinstance(given, str):
        try:
            value = (_JSON.validate_json(given) if given.strip() else None) or {}
        except ValidationError:
            return given
        if not isinstance(value, dict):
            return given
    if not isinstance(value, dict):
        raise ValueError(f"must be a JSON object, as an object or as its text; it is {kind_of(value)}")
    if len(value) > VALUE_LIMIT:
        raise ValueError(f"has {len(value):,} members, the limit is {VALUE_LIMIT:,}; send at most {VALUE_LIMIT:,}")
    if value is given:
        # Called for its error: an object from a notebook may contain anything.
        json_text(value)
    return value


ARGUMENTS_SCHEMA = WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "object"}, {"type": "null"}]})
Arguments = Annotated[Any, AfterValidator(read_arguments), ARGUMENTS_SCHEMA]


class CalledFunction(LenientModel):
    """The function of a call in a history."""

    name: str
    """Empty if another server could not read the call."""
    arguments: Arguments = Field(default={})
    """An object, or its JSON as in answers. An empty text and null mean an empty object."""

    # openai-python's ``parse`` adds this field to an answer; it repeats the arguments.
    parsed_arguments: Any = None


class CustomCall(LenientModel):
    """The call of a custom tool, which is called with text instead of JSON."""

    name: str
    input: Written


class MessageToolCall(LenientModel):
    """A call in a history."""

    model_config = ConfigDict(
        json_schema_extra={"anyOf": [{"required": [name]} for name in ("function", "custom", "type")]}
    )

    id: str | None = None
    """Without an id, the results in the next messages belong to the calls in their order."""
    type: NonEmpty | None = "function"
    """Types other than ``function`` and ``custom`` are those of tools that a service runs itself."""
    function: CalledFunction | None = None
    custom: CustomCall | None = None

    # Present if the call was copied from a stream. Not used: the order is that of the list.
    index: Annotated[int, WHOLE] | None = None

    @model_validator(mode="after")
    def _check_called(self) -> Self:
        if self.function is None and self.custom is None and self.type in (None, "function", "custom"):
            raise ValueError("has no function; name the function that was called, and its arguments")
        return self

    @property
    def called(self) -> CalledFunction:
        """The function. A custom tool is a function with one argument, ``input``."""
        if self.function is not None:
            return self.function
        if self.custom is not None:
            return CalledFunction.model_construct(name=self.custom.name, arguments={"input": self.custom.input})
        return CalledFunction.model_construct(name=self.type or "", arguments={})


MessageToolCalls = TypeAliasType(
    "MessageToolCalls", Annotated[list[MessageToolCall], FailFast(), Field(max_length=CALL_LIMIT)]
)


def check_counts(messages: Any) -> Any:
    """Check the number of calls and parts in all messages. It runs before validation, which is the slow part.

    Raises:
        ValueError: there are too many tool calls or content parts.
    """
    calls: list[Any] = []
    functions: list[Any] = []
    parts = 0
    for message in messages if isinstance(messages, list) else ():
        given = message if isinstance(message, dict) else {}
        if isinstance(its_calls := given.get("tool_calls"), list):
            calls += its_calls
        if (function := given.get("function_call")) is not None:
            functions.append(function)
        if isinstance(content := given.get("content"), list):
            parts += len(content)
    for count, what, limit in ((len(calls), "tool calls", CALL_LIMIT), (parts, "content parts", PART_LIMIT)):
        if count > limit:
            raise ValueError(f"have {count:,} {what} together, the limit is {limit:,}; leave the oldest out")
    for call in calls:
        if isinstance(call, dict):
            functions.append(call.get("function"))
    if functions:
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
    text, start = "\n".join(text for text in texts if isinstance(text, str)).encode(), 0
    # Counting stops after the piece in which a limit is exceeded.
    while start < len(text) and structure.excess is None:
        start = structure.add(text, start, 65_536)
    if structure.excess is not None:
        raise ValueError(
            f"have tool calls whose arguments have more than {structure.excess} together, the limit; "
            "leave the oldest out"
        )


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
