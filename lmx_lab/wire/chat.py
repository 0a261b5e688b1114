"""The chat-completions format: request, full response, stream chunk, WebSocket messages.

Specification sections 2.1-2.4 and 4.1. Requests are strict: a number in quotes is a mistake, an unknown field too.
What the format knows and this server cannot honour yet is refused unless it has its neutral value.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, StringConstraints, model_validator

from lmx_lab.wire.errors import ErrorDetail

STOP_LIMIT = 16
MESSAGE_LIMIT = 4096
"""More could not be answered anyway; reading 100,000 takes seconds in which nobody else is served."""
Role = Literal["system", "developer", "user", "assistant", "tool"]
NonEmpty = Annotated[str, StringConstraints(min_length=1)]
# JSON has one kind of number: 5.0 counts five.
Count = Annotated[
    int, BeforeValidator(lambda value: int(value) if isinstance(value, float) and value.is_integer() else value)
]
FinishReason = Literal["stop", "length"]


class RequestShape(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class TextPart(RequestShape):
    type: Literal["text"]
    text: str


class ChatMessage(RequestShape):
    role: Role
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[dict[str, Any]] | None = None

    @model_validator(mode="after")
    def _content_is_given(self) -> Self:
        if "content" not in self.model_fields_set and not self.tool_calls:
            raise ValueError("content is missing")
        return self


class StreamOptions(RequestShape):
    include_usage: bool = False
    include_obfuscation: bool = False


class TextFormat(RequestShape):
    type: Literal["text"]


class ChatRequest(RequestShape):
    """The body of POST /v1/chat/completions and the message of WS /v1/chat/stream."""

    model: NonEmpty
    messages: Annotated[list[ChatMessage], FailFast(), Field(min_length=1, max_length=MESSAGE_LIMIT)]
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = 0.7
    top_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = 1.0
    max_tokens: Annotated[Count, Field(ge=1)] | None = 4096
    max_completion_tokens: Annotated[Count, Field(ge=1)] | None = None
    stop: NonEmpty | Annotated[list[NonEmpty], Field(max_length=STOP_LIMIT)] | None = None

    # Known to the format, changing nothing here.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    # Known to the format, not offered yet: only the value that means "no".
    n: Literal[1] | None = None
    response_format: TextFormat | None = None
    logprobs: Literal[False] | None = None
    top_logprobs: Literal[0] | None = None
    presence_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    frequency_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Timings(BaseModel):
    """llama.cpp's ``timings``: milliseconds, tokens per second; ``prompt_n`` counts the tokens that were computed."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


class AnswerMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str


class Choice(BaseModel):
    index: int
    message: AnswerMessage
    logprobs: None = None
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


class ChoiceDelta(BaseModel):
    role: Literal["assistant"] | None = None
    content: str | None = None


class ChunkChoice(BaseModel):
    index: int
    delta: ChoiceDelta
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


class SocketToken(BaseModel):
    token: str


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
