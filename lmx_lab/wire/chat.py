"""The chat-completions format: request, full response, stream chunk, WebSocket messages.

Specification sections 2.1-2.4 and 4.1.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    JsonValue,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.config import JsonDict
from typing_extensions import TypeAliasType

from lmx_lab.wire import unsupported
from lmx_lab.wire.errors import ErrorDetail
from lmx_lab.wire.formats import ResponseFormat
from lmx_lab.wire.generation import (
    WHOLE,
    Alternatives,
    FinishReason,
    GenerationFields,
    RequestShape,
    Temperature,
    Timings,
    Usage,
)
from lmx_lab.wire.limits import FEW_VALUES, MEMBER_LIMIT
from lmx_lab.wire.tools import (
    PART_LIMIT,
    AnswerToolCall,
    MessageToolCalls,
    ToolCallChunk,
    ToolChoice,
    Tools,
    check_choice,
    check_counts,
)

MESSAGE_LIMIT = 4096
"""More could not be answered anyway; reading 100,000 takes seconds in which nobody else is served."""
Role = Literal["system", "developer", "user", "assistant", "tool"]
RESERVED = frozenset(
    {
        *("messages", "conversation", "tools", "documents", "chat_template", "self"),
        *("add_generation_prompt", "continue_final_message", "return_assistant_tokens_mask"),
        *("tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs"),
    }
)
"""What the template has from elsewhere, or the function that renders it takes for itself."""
ENDLESS = "which ignore_eos: true would never let end; leave one of them out"


HELLO: JsonValue = [{"role": "user", "content": "Say hello."}]


def _is_none(value: object) -> bool:
    return value is None


class TextPart(RequestShape):
    type: Literal["text"]
    text: str


# As a named type, since a union needs members with a hash, and FailFast has none.
TextParts = TypeAliasType("TextParts", Annotated[list[TextPart], FailFast(), Field(max_length=PART_LIMIT)])
# An assistant that calls tools may have nothing to say beside that.
CONTENT_OR_CALLS: JsonDict = {
    "anyOf": [
        {"required": ["content"]},
        {"required": ["tool_calls"], "properties": {"tool_calls": {"type": "array", "minItems": 1}}},
    ]
}


class ChatMessage(RequestShape):
    model_config = ConfigDict(json_schema_extra=CONTENT_OR_CALLS)

    role: Role
    content: str | TextParts | None = None
    name: str | None = None
    tool_calls: MessageToolCalls | None = None
    """Of an assistant."""
    tool_call_id: str | None = None
    """Of a tool: which call it answers."""
    reasoning_content: str | None = None
    """Of an assistant: its thoughts, for templates that show them to the model again."""
    reasoning: str | None = None
    """The same, as newer versions of vLLM call it; ``reasoning_content`` wins."""

    # What answers of other servers have, so that a history can be sent as it came: only what says nothing.
    refusal: Annotated[Any, unsupported.NO_REFUSAL] = None
    audio: Annotated[Any, unsupported.NO_AUDIO] = None
    annotations: Annotated[Any, unsupported.NO_ANNOTATIONS] = None
    function_call: Annotated[Any, unsupported.NO_FUNCTION_CALL] = None
    # What openai-python's ``parse`` adds to an answer: the content again.
    parsed: Any = None

    @property
    def thoughts(self) -> str | None:
        return self.reasoning if self.reasoning_content is None else self.reasoning_content

    @model_validator(mode="after")
    def _content_is_given(self) -> Self:
        if "content" not in self.model_fields_set and not self.tool_calls:
            raise ValueError("content is missing")
        return self

    @model_validator(mode="after")
    def _fields_fit_the_role(self) -> Self:
        for name, value, role in (
            ("tool_calls", self.tool_calls, "assistant"),
            ("tool_call_id", self.tool_call_id, "tool"),
            ("reasoning_content", self.thoughts, "assistant"),
        ):
            if value and self.role != role:
                raise ValueError(f"{name} belongs in messages of the role {role!r}, and this one's is {self.role!r}")
        return self


def _check_template_key(key: str) -> str:
    if key in RESERVED:
        raise ValueError("is set by this server; give other variables of the model's chat template")
    if not key.isidentifier():
        raise ValueError("is no name of a variable; letters, digits and underscores make one, such as enable_thinking")
    return key


TemplateKey = Annotated[str, AfterValidator(_check_template_key)]
# As a named type, for the reason given where TextParts is defined.
TemplateVariables = TypeAliasType(
    "TemplateVariables",
    Annotated[dict[TemplateKey, JsonValue], FailFast(), Field(max_length=MEMBER_LIMIT), FEW_VALUES],
)
Metadata = TypeAliasType("Metadata", Annotated[dict[str, Any], FailFast(), Field(max_length=MEMBER_LIMIT), FEW_VALUES])


class ChatRequest(GenerationFields):
    """The body of POST /v1/chat/completions and the message of WS /v1/chat/stream."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"model": "default", "messages": HELLO, "max_tokens": 64}]}
    )

    messages: Annotated[
        list[ChatMessage],
        FailFast(),
        Field(min_length=1, max_length=MESSAGE_LIMIT),
        BeforeValidator(check_counts),
    ]
    temperature: Temperature | None = 0.7
    max_tokens: Annotated[int, Field(ge=1), WHOLE] | None = 4096
    max_completion_tokens: Annotated[int, Field(ge=1), WHOLE] | None = None
    """The newer name; it wins over ``max_tokens``."""
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None
    response_format: ResponseFormat | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    """Null is ``auto``."""
    parallel_tool_calls: bool | None = True
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    """For the chat template; ``none`` also turns the thinking off in templates that have ``enable_thinking``."""

    # Extensions.
    chat_template_kwargs: TemplateVariables | None = None
    """Variables for the chat template; they win over ``reasoning_effort``."""
    thinking_token_budget: Annotated[int, Field(ge=0), WHOLE] | None = None
    """After so many tokens of thoughts the model is made to answer."""

    # Known to the format, changing nothing here.
    metadata: Metadata | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    # Known to the format, not offered: only the values that mean "no".
    functions: Annotated[Any, unsupported.NO_FUNCTIONS] = None
    function_call: Annotated[Any, unsupported.NO_FUNCTION_CHOICE] = None
    verbosity: Annotated[Any, unsupported.NO_VERBOSITY] = None
    audio: Annotated[Any, unsupported.NO_AUDIO] = None
    modalities: Annotated[Any, unsupported.NO_MODALITIES] = None
    prediction: Annotated[Any, unsupported.NO_PREDICTION] = None
    web_search_options: Annotated[Any, unsupported.NO_SEARCH] = None
    moderation: Annotated[Any, unsupported.NO_MODERATION] = None

    @field_validator("top_logprobs")
    @classmethod
    def _logprobs_are_asked_for(cls, value: int | None, info: ValidationInfo) -> int | None:
        # Without logprobs 0 asks for what it gets: nothing.
        if value and not info.data.get("logprobs"):
            raise ValueError("needs logprobs: true")
        return value

    @field_validator("response_format")
    @classmethod
    def _a_format_has_an_end(cls, value: ResponseFormat | None, info: ValidationInfo) -> ResponseFormat | None:
        if value is not None and value.type != "text" and info.data.get("ignore_eos"):
            raise ValueError(f"is {value.type!r}, {ENDLESS}")
        return value

    @field_validator("tool_choice")
    @classmethod
    def _the_choice_can_be_made(cls, value: ToolChoice | None, info: ValidationInfo) -> ToolChoice | None:
        # Tools that are wrong are what is said first.
        if "tools" in info.data:
            check_choice(value, info.data["tools"] or ())
        if value not in (None, "none", "auto") and info.data.get("ignore_eos"):
            raise ValueError(f"forces a call, {ENDLESS}")
        return value


class AnswerMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str | None
    """Null where there are calls and no text."""
    reasoning_content: str | None = Field(None, exclude_if=_is_none)
    """The model's thoughts; absent if it had none."""
    tool_calls: list[AnswerToolCall] | None = Field(None, exclude_if=_is_none)
    """Absent if there are none."""


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprobs(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(BaseModel):
    content: list[TokenLogprobs]
    refusal: None = None


class Choice(BaseModel):
    index: int
    message: AnswerMessage
    logprobs: ChoiceLogprobs | None = None
    finish_reason: FinishReason


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    """Unix time, seconds."""
    model: str
    system_fingerprint: str
    choices: list[Choice]
    usage: Usage
    timings: Timings
    """Of all choices: tokens are summed, the times are the longest choice's."""


class ChoiceDelta(BaseModel):
    """At most one of thoughts, text and calls; a call's first piece is alone too."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallChunk] | None = None


class ChunkChoice(BaseModel):
    index: int
    delta: ChoiceDelta
    logprobs: ChoiceLogprobs | None = None
    """Of the tokens whose text is in ``delta``; absent unless asked for."""
    finish_reason: FinishReason | None


class ChatChunk(BaseModel):
    """One SSE ``data:`` line. Dump it with ``exclude_unset``: an absent field and a null mean different things."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChunkChoice]
    usage: Usage | None = None
    timings: Timings | None = None
    """Of the choice that ends with this chunk."""


class SocketToken(BaseModel):
    """Dump it with ``exclude_unset``: ``logprobs`` is there only for those who asked, and the others where there are
    any."""

    token: str
    """May be empty, where something else comes."""
    reasoning_content: str | None = None
    tool_calls: list[ToolCallChunk] | None = None
    logprobs: list[TokenLogprobs] | None = None


class SocketStats(BaseModel):
    tokens_per_second: float
    prompt_tokens: int
    completion_tokens: int
    reasoning_tokens: int
    cached_tokens: int
    ttft_ms: float
    total_ms: float
    finish_reason: FinishReason


class SocketDone(BaseModel):
    done: Literal[True] = True
    stats: SocketStats


class SocketError(BaseModel):
    error: ErrorDetail
