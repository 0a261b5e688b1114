"""Pydantic models of version 2 of Cohere's chat format: the request of ``POST /v2/chat`` and its answer.

The format is that of https://docs.cohere.com/reference/chat. Messages and tools are nearly those of the chat format.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, field_validator

from lmx_lab.wire.base import (
    ANY_MODEL,
    NO_EMPTY_STOPS,
    WHOLE,
    AnyModel,
    FormatModel,
    LenientModel,
    Neutral,
    Probability,
    Stops,
    Temperature,
    TokenLimit,
)
from lmx_lab.wire.chat import HELLO, MESSAGE_LIMIT, ChatMessage
from lmx_lab.wire.formats import JsonSchema
from lmx_lab.wire.tools import FunctionTool, Tools, check_counts


class CohereMessage(ChatMessage):
    """A message of the conversation."""

    tool_plan: str | None = None
    """Only in messages of the assistant: the reasoning before its calls."""

    @field_validator("content", mode="before")
    @classmethod
    def _read_documents(cls, value: Any) -> Any:
        if not isinstance(value, list):
            return value
        parts = []
        for part in value:
            if isinstance(part, dict) and part.get("type") == "document":
                # It is usually a part of the result of a tool.
                document = part.get("document")
                data = document.get("data", document) if isinstance(document, dict) else document
                text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
                parts.append({"type": "text", "text": text})
            else:
                parts.append(part)
        return parts

    @property
    def effective_reasoning(self) -> str | None:
        return super().effective_reasoning or self.tool_plan


class CohereFormat(LenientModel):
    """The required form of the answer's text."""

    type: Literal["text", "json_object"]
    json_schema: JsonSchema | None = None
    schema_: JsonSchema | None = Field(default=None, alias="schema")
    """The older name of ``json_schema``."""


class CohereThinking(LenientModel):
    """Whether the model reasons before its answer. Models that do not reason ignore it."""

    type: Literal["enabled", "disabled"]
    token_budget: Annotated[int, Field(ge=0), WHOLE] | None = None


class CohereRequest(FormatModel):
    """The body of POST /v2/chat."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"model": "default", "messages": HELLO, "max_tokens": 64}]}
    )

    model: AnyModel = ANY_MODEL
    messages: Annotated[
        list[CohereMessage],
        FailFast(),
        Field(min_length=1, max_length=MESSAGE_LIMIT),
        BeforeValidator(check_counts),
    ]
    stream: bool | None = None
    tools: Tools | None = None
    strict_tools: bool | None = None
    """Whether the schemas of tools must be enforced as a whole; tools for which this is impossible are refused."""
    tool_choice: Literal["REQUIRED", "NONE"] | None = None
    """By default, the model decides whether it calls a tool."""
    response_format: CohereFormat | None = None
    max_tokens: TokenLimit | None = 4096
    temperature: Temperature | None = 0.3
    stop_sequences: Annotated[Stops | None, NO_EMPTY_STOPS] = None
    seed: Annotated[int, Field(ge=0, le=2**64 - 1), WHOLE] | None = None
    frequency_penalty: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    presence_penalty: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    k: Annotated[int, Field(ge=0), WHOLE] | None = None
    p: Probability | None = None
    thinking: CohereThinking | None = None

    # Fields of the format that are not supported; only values without effect are valid.
    documents: Annotated[Any, Neutral("documents (send them in messages)", ([],))] = None
    logprobs: Annotated[Any, Neutral("log-probabilities (use /v1/chat/completions)", (False,))] = None

    def functions(self) -> list[Any] | None:
        """Return the tools, strict if ``strict_tools`` is true."""
        if not self.tools or not self.strict_tools:
            return self.tools
        return [
            tool.model_copy(update={"function": tool.function.model_copy(update={"strict": True})})
            if isinstance(tool, FunctionTool)
            else tool
            for tool in self.tools
        ]


class CohereTokens(BaseModel):
    """Number of tokens."""

    input_tokens: int
    output_tokens: int


class CohereUsage(BaseModel):
    """The cost of an answer."""

    billed_units: CohereTokens
    tokens: CohereTokens
    cached_tokens: int
    """Tokens of the prompt that were in the prefix cache."""


FinishReason = Literal["COMPLETE", "STOP_SEQUENCE", "MAX_TOKENS", "TOOL_CALL", "ERROR"]


class CohereAnswer(BaseModel):
    """The whole answer."""

    id: str
    model: str
    """An extension: the model that answered."""
    finish_reason: FinishReason
    message: dict[str, Any]
    """``role``; ``content``, parts of the types ``thinking`` and ``text``; and ``tool_calls``, if there are any."""
    usage: CohereUsage


class CohereEvent(BaseModel):
    """One event of a stream; its name is its type. The other fields depend on the type."""

    model_config = ConfigDict(extra="allow")

    type: Literal[
        "message-start",
        "content-start",
        "content-delta",
        "content-end",
        "tool-call-start",
        "tool-call-delta",
        "tool-call-end",
        "message-end",
    ]
    index: int | None = None
    """Position of the part or of the call."""
    id: str | None = None
    delta: dict[str, Any] | None = None
