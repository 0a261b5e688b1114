"""The chat-completions format: request, full response, stream chunk, WebSocket messages.

Specification sections 2.1-2.4 and 4.1.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, FailFast, Field, ValidationInfo, field_validator, model_validator

from lmx_lab.wire import neutral
from lmx_lab.wire.errors import ErrorDetail
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

MESSAGE_LIMIT = 4096
"""More could not be answered anyway; reading 100,000 takes seconds in which nobody else is served."""
Role = Literal["system", "developer", "user", "assistant", "tool"]


class TextPart(RequestShape):
    type: Literal["text"]
    text: str


class ChatMessage(RequestShape):
    role: Role
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[dict[str, Any]] | None = None

    # What answers of other servers have, so that a history can be sent as it came: only what says nothing.
    refusal: Annotated[Any, neutral.NO_REFUSAL] = None
    audio: Annotated[Any, neutral.NO_AUDIO] = None
    annotations: Annotated[Any, neutral.NO_ANNOTATIONS] = None
    function_call: Annotated[Any, neutral.NO_TOOL_CHOICE] = None
    reasoning_content: Annotated[Any, neutral.NO_REASONING_TEXT] = None

    @model_validator(mode="after")
    def _content_is_given(self) -> Self:
        if "content" not in self.model_fields_set and not self.tool_calls:
            raise ValueError("content is missing")
        return self


class ChatRequest(GenerationFields):
    """The body of POST /v1/chat/completions and the message of WS /v1/chat/stream."""

    messages: Annotated[list[ChatMessage], FailFast(), Field(min_length=1, max_length=MESSAGE_LIMIT)]
    temperature: Temperature | None = 0.7
    max_tokens: Annotated[int, Field(ge=1), WHOLE] | None = 4096
    max_completion_tokens: Annotated[int, Field(ge=1), WHOLE] | None = None
    """The newer name; it wins over ``max_tokens``."""
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None

    # Known to the format, changing nothing here.
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    prompt_cache_retention: str | None = None
    parallel_tool_calls: bool | None = None

    # Known to the format, not offered: only the values that mean "no".
    response_format: Annotated[Any, neutral.NO_FORMAT] = None
    tools: Annotated[Any, neutral.NO_TOOLS] = None
    tool_choice: Annotated[Any, neutral.NO_TOOL_CHOICE] = None
    functions: Annotated[Any, neutral.NO_TOOLS] = None
    function_call: Annotated[Any, neutral.NO_TOOL_CHOICE] = None
    reasoning_effort: Annotated[Any, neutral.NO_REASONING] = None
    verbosity: Annotated[Any, neutral.NO_VERBOSITY] = None
    audio: Annotated[Any, neutral.NO_AUDIO] = None
    modalities: Annotated[Any, neutral.NO_MODALITIES] = None
    prediction: Annotated[Any, neutral.NO_PREDICTION] = None
    web_search_options: Annotated[Any, neutral.NO_SEARCH] = None
    moderation: Annotated[Any, neutral.NO_MODERATION] = None

    @field_validator("top_logprobs")
    @classmethod
    def _logprobs_are_asked_for(cls, value: int | None, info: ValidationInfo) -> int | None:
        # Without logprobs 0 asks for what it gets: nothing.
        if value and not info.data.get("logprobs"):
            raise ValueError("needs logprobs: true")
        return value


class AnswerMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str


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
    role: Literal["assistant"] | None = None
    content: str | None = None


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
    """Dump it with ``exclude_unset``: ``logprobs`` is there only for those who asked."""

    token: str
    logprobs: list[TokenLogprobs] | None = None


class SocketStats(BaseModel):
    tokens_per_second: float
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    ttft_ms: float
    total_ms: float
    finish_reason: FinishReason


class SocketDone(BaseModel):
    done: Literal[True] = True
    stats: SocketStats


class SocketError(BaseModel):
    error: ErrorDetail
