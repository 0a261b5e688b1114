"""Pydantic models of OpenAI's Responses format: the request of ``POST /v1/responses``, its answer and its events.

The format is that of https://platform.openai.com/docs/api-reference/responses. Its clients send many fields that have
no effect here. These are ignored and named in the header ``x-lmx-ignored``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    FailFast,
    Field,
    Tag,
    TypeAdapter,
    model_validator,
)
from typing_extensions import TypeAliasType

from lmx_lab.wire.base import (
    ANY_MODEL,
    WHOLE,
    Alternatives,
    AnyModel,
    FormatModel,
    LenientModel,
    Neutral,
    NonEmpty,
    OtherModel,
    Penalty,
    Probability,
    Temperature,
    Written,
)
from lmx_lab.wire.chat import MESSAGE_LIMIT, Contents, Effort, result_text
from lmx_lab.wire.formats import Name, Pattern, json_text
from lmx_lab.wire.tools import (
    ARGUMENTS_SCHEMA,
    TOOL_LIMIT,
    HostedTool,
    ParameterSchema,
    check_argument_texts,
    read_arguments,
    tag,
)

LOGPROBS = "message.output_text.logprobs"
"""The value of ``include`` that requests log-probabilities."""
WITHOUT_EFFECT = ("max_tool_calls", "safety_identifier", "prompt_cache_key", "user")
"""Fields of requests that are only returned with the response."""
EFFORTS = get_args(Effort)
"""Values of ``reasoning.effort`` that the chat format has."""


# Input items


class MessageItem(LenientModel):
    """A message of the conversation."""

    type: Literal["message"] | None = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Contents | None


def _arguments_text(given: Any) -> Any:
    return given if isinstance(given, str) else json_text(read_arguments(given))


class FunctionCallItem(LenientModel):
    """A call of a function in an earlier answer."""

    type: Literal["function_call"]
    call_id: str | None = None
    """Without it, the outputs in the next items belong to the calls in their order."""
    name: str
    namespace: str | None = None
    arguments: Annotated[str, BeforeValidator(_arguments_text), ARGUMENTS_SCHEMA] = "{}"
    """JSON of an object, or the object."""


class CustomCallItem(LenientModel):
    """A call of a custom tool in an earlier answer."""

    type: Literal["custom_tool_call"]
    call_id: str | None = None
    name: str
    namespace: str | None = None
    input: Written


class CallOutputItem(LenientModel):
    """The output of a call."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str | None = None
    output: Annotated[str | Contents | None, BeforeValidator(result_text)] = None


class ReasoningItem(LenientModel):
    """The model's reasoning in an earlier answer."""

    type: Literal["reasoning"]
    summary: Contents | None = None
    content: Contents | None = None
    """The reasoning itself; if it is present, the summary is not read."""


class CompactionItem(LenientModel):
    """The summary of an earlier conversation, from an answer of POST /v1/responses/compact."""

    type: Literal["compaction"]
    encrypted_content: str | None = None


class ItemReference(LenientModel):
    """A reference to an item in the output of a stored response, or in its conversation."""

    type: Literal["item_reference"] | None = "item_reference"
    id: NonEmpty


class OtherItem(OtherModel):
    """An item of any other type. Which of them are ignored depends on the type."""


ITEM_TAGS = {
    "message": "message",
    "function_call": "function_call",
    "custom_tool_call": "custom_tool_call",
    "function_call_output": "output",
    "custom_tool_call_output": "output",
    "reasoning": "reasoning",
    "compaction": "compaction",
    "item_reference": "reference",
}


def _item_tag(value: Any) -> str:
    # An item without a type is a message, or a reference.
    default = "item_reference" if isinstance(value, dict) and value.keys() <= {"id", "type"} else None
    return tag(value, ITEM_TAGS, "message" if isinstance(value, dict) and "role" in value else default)


InputItem = Annotated[
    Annotated[MessageItem, Tag("dict[message]")]
    | Annotated[FunctionCallItem, Tag("dict[function_call]")]
    | Annotated[CustomCallItem, Tag("dict[custom_tool_call]")]
    | Annotated[CallOutputItem, Tag("dict[output]")]
    | Annotated[ReasoningItem, Tag("dict[reasoning]")]
    | Annotated[CompactionItem, Tag("dict[compaction]")]
    | Annotated[ItemReference, Tag("dict[reference]")]
    | Annotated[OtherItem, Tag("dict[other]")],
    Discriminator(_item_tag),
]
STORED_ITEMS: TypeAdapter[list[Any]] = TypeAdapter(list[InputItem])
"""Reads and writes the items of stored responses, whose number was limited before."""


def _check_arguments(items: Any) -> Any:
    """Check the arguments of all calls, which are JSON within texts. It runs before validation."""
    if isinstance(items, list):
        check_argument_texts(item.get("arguments") for item in items if isinstance(item, dict))
    return items


InputItems = TypeAliasType(
    "InputItems",
    Annotated[list[InputItem], FailFast(), Field(max_length=MESSAGE_LIMIT), BeforeValidator(_check_arguments)],
)


# Tools


def _flattened(value: Any) -> Any:
    """Return a function, or its name, in this format if it is written as in the chat format."""
    if not isinstance(value, dict) or not isinstance(function := value.get("function"), dict):
        return value
    return {**{name: each for name, each in value.items() if name != "function"}, **function}


class FlatFunction(LenientModel):
    """A function that the model can call."""

    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: ParameterSchema | None = None
    strict: bool | None = None

    _flatten = model_validator(mode="before")(_flattened)


class InputGrammar(LenientModel):
    """The grammar of a custom tool's input."""

    type: Literal["grammar"]
    syntax: Literal["lark", "regex"]
    definition: Pattern


class InputText(LenientModel):
    """Any text as the input of a custom tool."""

    type: Literal["text"]


class CustomTool(LenientModel):
    """A tool that is called with text instead of JSON."""

    type: Literal["custom"]
    name: Name
    description: str | None = None
    format: Annotated[InputText | InputGrammar, Discriminator("type")] | None = None


TOOL_TAGS = {"function": "function", "custom": "custom"}
GroupedTool = Annotated[
    Annotated[FlatFunction, Tag("dict[function]")]
    | Annotated[CustomTool, Tag("dict[custom]")]
    | Annotated[HostedTool, Tag("dict[other]")],
    Discriminator(lambda value: tag(value, TOOL_TAGS)),
]


class ToolNamespace(LenientModel):
    """A group of tools, whose names need not differ from those of other groups."""

    type: Literal["namespace"]
    name: Name
    description: str | None = None
    tools: Annotated[list[GroupedTool], FailFast(), Field(max_length=TOOL_LIMIT)]


ResponseTool = Annotated[
    Annotated[FlatFunction, Tag("dict[function]")]
    | Annotated[CustomTool, Tag("dict[custom]")]
    | Annotated[ToolNamespace, Tag("dict[namespace]")]
    | Annotated[HostedTool, Tag("dict[other]")],
    Discriminator(lambda value: tag(value, {**TOOL_TAGS, "namespace": "namespace"})),
]
ResponseTools = TypeAliasType("ResponseTools", Annotated[list[ResponseTool], FailFast(), Field(max_length=TOOL_LIMIT)])


class ToolReference(LenientModel):
    """The name of a tool."""

    type: NonEmpty
    name: str | None = None
    namespace: str | None = None

    _flatten = model_validator(mode="before")(_flattened)


ToolReferences = TypeAliasType(
    "ToolReferences", Annotated[list[ToolReference], FailFast(), Field(max_length=TOOL_LIMIT)]
)


class ToolSelection(ToolReference):
    """The tool to call or, with the type ``allowed_tools``, the tools that may be called."""

    mode: Literal["auto", "required"] | None = None
    tools: ToolReferences | None = None


# Requests


class ResponseTextFormat(LenientModel):
    """The required form of the answer, like ``response_format`` of the chat format, but without nesting."""

    type: NonEmpty
    name: str | None = None
    schema_: Any = Field(None, alias="schema")
    description: str | None = None
    strict: bool | None = None


class ResponseTextSettings(LenientModel):
    """Settings of the answer's text."""

    format: ResponseTextFormat | None = None


class ReasoningSettings(LenientModel):
    """Settings of the reasoning. Models that do not reason ignore them."""

    effort: str | None = None
    summary: str | None = None
    """Has no effect: the summary of an answer is always the whole reasoning."""


IncludedFields = TypeAliasType("IncludedFields", Annotated[list[str], FailFast(), Field(max_length=32)])
ResponseMetadata = TypeAliasType("ResponseMetadata", Annotated[dict[str, str], FailFast(), Field(max_length=16)])


class ResponsesRequest(FormatModel):
    """The body of POST /v1/responses."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"model": "default", "input": "Say hello.", "max_output_tokens": 64}]}
    )

    model: AnyModel = ANY_MODEL
    input: str | InputItems
    instructions: str | None = None
    """A system message before the input. That of a previous response is not used again."""
    previous_response_id: NonEmpty | None = None
    """Id of a stored response, whose conversation the input continues."""
    tools: ResponseTools | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolSelection | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: Annotated[int, Field(ge=1), WHOLE] | None = None
    temperature: Temperature | None = None
    top_p: Probability | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    top_logprobs: Alternatives | None = None
    text: ResponseTextSettings | None = None
    reasoning: ReasoningSettings | None = None
    include: IncludedFields | None = None
    store: bool | None = None
    """Whether the response is kept for ``previous_response_id`` and for GET; the default is true."""
    background: bool | None = None
    """Whether to answer immediately and generate the response afterwards. It is then read with GET."""
    stream: bool | None = None
    generate: bool | None = None
    """False only computes the prompt, for the prefix cache. The response has no output, and can be continued."""
    metadata: ResponseMetadata | None = None
    """Returned with the response."""

    # Fields that have no effect here, and are returned with the response.
    max_tool_calls: Annotated[int, Field(ge=1), WHOLE] | None = None
    """Limits the calls of tools that run on the server, of which there are none."""
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    user: str | None = None

    # Fields that are not supported; only values without effect are valid.
    conversation: Annotated[Any, Neutral("conversations (send previous_response_id, or the whole input)")] = None
    prompt: Annotated[Any, Neutral("stored prompts (send instructions and input)")] = None

    @model_validator(mode="after")
    def _check_background(self) -> ResponsesRequest:
        if self.background and self.stream:
            raise ValueError(
                "background and stream are both true, which is not supported; leave one of them out, and read a "
                "background response with GET /v1/responses/{id}"
            )
        if self.background and self.store is False:
            raise ValueError("background is true and store is false, but a response in the background must be stored")
        return self

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ()) or bool(self.top_logprobs)

    def ignored(self) -> Iterator[str]:
        yield from (name for name in WITHOUT_EFFECT if getattr(self, name) is not None)
        yield from super().ignored()
        for tool in self.tools or ():
            if isinstance(tool, HostedTool):
                yield f"tools.{tool.type}"
            elif isinstance(tool, ToolNamespace):
                yield from (f"tools.{tool.name}.{each.type}" for each in tool.tools if isinstance(each, HostedTool))
        if self.reasoning is not None and self.reasoning.effort not in (None, *EFFORTS):
            yield "reasoning.effort"
        yield from (f"include.{name}" for name in self.include or () if name != LOGPROBS)


class ResponseCreate(ResponsesRequest):
    """A message of a client over the WebSocket ``/v1/responses``."""

    type: Literal["response.create"]
    background: Annotated[Any, Neutral("responses in the background over a WebSocket", (False,))] = None


class CompactRequest(FormatModel):
    """The body of POST /v1/responses/compact."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"model": "default", "input": [{"role": "user", "content": "Say hello."}]}]}
    )

    model: NonEmpty
    input: str | InputItems | None = None
    instructions: str | None = None
    previous_response_id: NonEmpty | None = None
    """Id of a stored response, whose conversation is before the input."""
    prompt_cache_key: str | None = None
    """Has no effect."""


# Answers

ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class ResponseError(BaseModel):
    """Why a response failed."""

    code: str
    message: str


class IncompleteDetails(BaseModel):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class InputTokensDetails(BaseModel):
    """Details of the input tokens."""

    cached_tokens: int


class OutputTokensDetails(BaseModel):
    """Details of the output tokens."""

    reasoning_tokens: int


class ResponseUsage(BaseModel):
    """Number of tokens of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ModelResponse(BaseModel):
    """A response. It also contains fields of the request."""

    model_config = ConfigDict(extra="allow")

    id: str
    object: Literal["response"] = "response"
    created_at: int
    """Unix time, seconds."""
    completed_at: int | None = None
    status: ResponseStatus
    model: str
    output: list[dict[str, Any]]
    """Items: ``reasoning``, ``message``, ``function_call`` and ``custom_tool_call``."""
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    usage: ResponseUsage | None = None


class CompactedResponse(BaseModel):
    """The answer of POST /v1/responses/compact: items that replace the conversation in later requests."""

    id: str
    object: Literal["response.compaction"] = "response.compaction"
    created_at: int
    """Unix time, seconds."""
    output: list[dict[str, Any]]
    """The messages of the user, and an item ``compaction`` with a summary."""
    usage: ResponseUsage
    """Number of tokens of the summary and its prompt."""


class ResponseEvent(BaseModel):
    """One event of a stream; its name is its type. The other fields depend on the type."""

    model_config = ConfigDict(extra="allow")

    type: Literal[
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.reasoning_summary_part.added",
        "response.reasoning_summary_text.delta",
        "response.reasoning_summary_text.done",
        "response.reasoning_summary_part.done",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.custom_tool_call_input.delta",
        "response.custom_tool_call_input.done",
        "response.output_item.done",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    sequence_number: int
    """Number of the event in the stream, from 0."""
    response: ModelResponse | None = None
    item: dict[str, Any] | None = None
    item_id: str | None = None
    output_index: int | None = None
    """Position of the item in the response."""


class ResponseItems(BaseModel):
    """The answer of GET /v1/responses/{id}/input_items."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
    """Whether there are more items after the last one."""


class InputTokens(BaseModel):
    """The answer of POST /v1/responses/input_tokens."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class DeletedResponse(BaseModel):
    """The answer of DELETE /v1/responses/{id}."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True
