"""Pydantic models of Anthropic's Messages format: the request of ``POST /v1/messages`` and its answer.

The format is that of https://docs.anthropic.com/en/api/messages. Its clients send many fields that have no effect here.
These are ignored and named in the header ``x-lmx-ignored``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    FailFast,
    Field,
    Tag,
    field_validator,
    model_validator,
)
from typing_extensions import TypeAliasType

from lmx_lab.wire.base import (
    ANY_MODEL,
    FEW_VALUES,
    NO_EMPTY_STOPS,
    WHOLE,
    AnyModel,
    FormatModel,
    LenientModel,
    OtherModel,
    Probability,
    Stops,
    Written,
)
from lmx_lab.wire.chat import MESSAGE_LIMIT, Contents, result_text
from lmx_lab.wire.formats import JsonSchema, Name
from lmx_lab.wire.tools import PART_LIMIT, TOOL_LIMIT, Arguments, ParameterSchema, check_argument_texts, tag


class TextBlock(LenientModel):
    """Text."""

    type: Literal["text"]
    text: Written


class ThinkingBlock(LenientModel):
    """The model's reasoning in an earlier answer."""

    type: Literal["thinking"]
    thinking: Written


class ToolUseBlock(LenientModel):
    """A tool call in an earlier answer."""

    type: Literal["tool_use"]
    id: str | None = None
    """Without an id, the results in the next message belong to the calls in their order."""
    name: str
    input: Annotated[Arguments, FEW_VALUES] = Field(default={})
    """An object. Its text and null, which some clients send for a call that was cut off, are also accepted."""

    @field_validator("input", mode="before")
    @classmethod
    def _check_text(cls, value: Any) -> Any:
        check_argument_texts([value])
        return value


class OtherBlock(OtherModel):
    """A block of any other type, such as an image. Which of them are ignored depends on the type."""


class ToolResultBlock(LenientModel):
    """The result of a tool call in the message before."""

    type: Literal["tool_result"]
    tool_use_id: str | None = None
    content: Annotated[str | Contents | None, BeforeValidator(result_text)] = None
    is_error: bool | None = None


BLOCK_TAGS = {kind: kind for kind in ("text", "thinking", "tool_use", "tool_result")}
Block = Annotated[
    Annotated[TextBlock, Tag("dict[text]")]
    | Annotated[ThinkingBlock, Tag("dict[thinking]")]
    | Annotated[ToolUseBlock, Tag("dict[tool_use]")]
    | Annotated[ToolResultBlock, Tag("dict[tool_result]")]
    | Annotated[OtherBlock, Tag("dict[other]")],
    Discriminator(lambda value: tag(value, BLOCK_TAGS)),
]
# Named types, because members of a union must be hashable, and FailFast is not.
Blocks = TypeAliasType("Blocks", Annotated[list[Block], FailFast(), Field(max_length=PART_LIMIT)])
SystemBlocks = TypeAliasType("SystemBlocks", Annotated[list[TextBlock], FailFast(), Field(max_length=PART_LIMIT)])


class InputMessage(LenientModel):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | Blocks | None


class ToolDefinition(LenientModel):
    """A tool. Only tools with an ``input_schema`` are called by the client; others run on Anthropic's servers."""

    type: str | None = None
    name: Name | None = None
    """Required, except for types of hosted tools without a name, such as ``mcp_toolset``."""
    description: str | None = None
    input_schema: ParameterSchema | None = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _check_name(self) -> Self:
        if self.name is None and (self.input_schema is not None or self.type in (None, "custom")):
            raise ValueError("has no name; name the tool")
        return self


ToolDefinitions = TypeAliasType(
    "ToolDefinitions", Annotated[list[ToolDefinition], FailFast(), Field(max_length=TOOL_LIMIT)]
)


class ToolChoiceObject(LenientModel):
    """Which tool is called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    """Required for ``tool``."""
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _check_name(self) -> ToolChoiceObject:
        if self.type == "tool" and not self.name:
            raise ValueError("has the type 'tool', but no name; name the tool to call")
        return self


class Thinking(LenientModel):
    """Whether the model reasons before its answer. Models that do not reason ignore it."""

    type: Literal["enabled", "disabled", "adaptive"]


class OutputFormat(LenientModel):
    """The required form of the answer's text."""

    type: Literal["json_schema"]
    schema_: JsonSchema = Field(alias="schema")


class OutputConfig(LenientModel):
    """Settings of the answer."""

    format: OutputFormat | None = None


class CountRequest(FormatModel):
    """The body of POST /v1/messages/count_tokens."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"model": "default", "messages": [{"role": "user", "content": "Say hello."}]}]}
    )
    model: AnyModel = ANY_MODEL
    messages: Annotated[list[InputMessage], FailFast(), Field(min_length=1, max_length=MESSAGE_LIMIT)]
    system: str | SystemBlocks | None = None
    tools: ToolDefinitions | None = None
    tool_choice: ToolChoiceObject | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """The older name of ``output_config.format``."""

    @model_validator(mode="after")
    def _check_format(self) -> Self:
        if self.output_format is not None and self.output_config is not None and self.output_config.format is not None:
            raise ValueError("has both output_format and output_config.format; send output_config.format only")
        return self

    @property
    def required_format(self) -> OutputFormat | None:
        return self.output_format if self.output_config is None else self.output_config.format or self.output_format

    def ignored(self) -> Iterator[str]:
        yield from super().ignored()
        for tool in self.tools or ():
            if tool.input_schema is None:
                yield f"tools.{tool.name or tool.type}"


class MessagesRequest(CountRequest):
    """The body of POST /v1/messages."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"model": "default", "max_tokens": 64, "messages": [{"role": "user", "content": "Say hello."}]}
            ]
        }
    )

    max_tokens: Annotated[int, Field(ge=1), WHOLE] = 4096
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, Field(ge=-1), WHOLE] | None = None
    stop_sequences: Annotated[Stops | None, NO_EMPTY_STOPS] = None


class MessagesUsage(BaseModel):
    """Number of tokens of a request. The three counts of input tokens do not overlap."""

    input_tokens: int
    """Tokens of the prompt that were computed."""
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0
    """Tokens of the prompt that were in the prefix cache."""
    output_tokens: int


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class Message(BaseModel):
    """The whole answer."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[dict[str, Any]]
    """Blocks: ``thinking``, ``text`` and ``tool_use``."""
    stop_reason: StopReason | None
    stop_sequence: str | None
    """The stop sequence that ended the answer."""
    usage: MessagesUsage


class MessageEvent(BaseModel):
    """One event of a stream; its name is its type. The other fields depend on the type."""

    model_config = ConfigDict(extra="allow")

    type: Literal[
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    index: int | None = None
    """Position of the block in the message."""
    message: Message | None = None
    content_block: dict[str, Any] | None = None
    delta: dict[str, Any] | None = None
    usage: MessagesUsage | None = None


class TokenCount(BaseModel):
    """The answer of POST /v1/messages/count_tokens."""

    input_tokens: int


class MessagesErrorDetail(BaseModel):
    """What failed."""

    type: str
    message: str
    code: str
    """An extension: the code of the error, as in the chat format."""


class MessagesError(BaseModel):
    """The body of a failed request, and the last event of a stream that fails."""

    type: Literal["error"] = "error"
    error: MessagesErrorDetail
    request_id: str | None = None
