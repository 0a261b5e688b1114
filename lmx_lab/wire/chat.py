"""Pydantic models of the chat-completions format: request, answer, stream chunk and WebSocket messages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    FailFast,
    Field,
    JsonValue,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.config import JsonDict
from typing_extensions import TypeAliasType

from lmx_lab.values.bodies import MEMBER_LIMIT
from lmx_lab.values.outputs import FinishReason
from lmx_lab.wire.base import (
    FEW_VALUES,
    WHOLE,
    Alternatives,
    LenientModel,
    Neutral,
    OtherModel,
    Temperature,
    TokenLimit,
    Written,
)
from lmx_lab.wire.errors import ErrorDetail
from lmx_lab.wire.formats import ResponseFormat, json_text
from lmx_lab.wire.generation import AnswerHead, CompatibleFields, Timings, Usage
from lmx_lab.wire.tools import (
    PART_LIMIT,
    AnswerFunction,
    AnswerToolCall,
    CalledFunction,
    FunctionChoice,
    FunctionChunk,
    FunctionName,
    Functions,
    FunctionTool,
    HostedTool,
    MessageToolCall,
    MessageToolCalls,
    NamedToolChoice,
    ToolCallChunk,
    ToolChoice,
    Tools,
    check_choice,
    check_counts,
    tag,
    unique_functions,
)

MESSAGE_LIMIT = 4096
"""A model could not read more anyway, and validating 100,000 takes seconds in which the server does nothing else."""
Role = Literal["system", "developer", "user", "assistant", "tool", "function"]
RESERVED = frozenset(
    {
        *("messages", "conversation", "tools", "documents", "chat_template", "self"),
        *("add_generation_prompt", "continue_final_message", "return_assistant_tokens_mask"),
        *("tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs"),
    }
)
"""Names of template variables that the server sets, or of parameters of the function that renders the template."""
NO_AUDIO = Neutral("audio inputs and outputs")
ENDLESS = "which would never end with ignore_eos: true; leave one of them out"


HELLO: JsonValue = [{"role": "user", "content": "Say hello."}]


def _is_none(value: object) -> bool:
    return value is None


TEXT_TAGS = dict.fromkeys(("text", "input_text", "output_text", "summary_text", "reasoning_text"), "text")


class TextContent(LenientModel):
    """Text of a message, of the result of a tool or of reasoning. The chat format calls all of them ``text``."""

    type: Literal["text", "input_text", "output_text", "summary_text", "reasoning_text"]
    text: Written


class OtherContent(OtherModel):
    """A part of any other type, such as an image. Models of this server cannot see it."""


Content = Annotated[
    Annotated[TextContent, Tag("dict[text]")] | Annotated[OtherContent, Tag("dict[other]")],
    Discriminator(lambda value: tag(value, TEXT_TAGS)),
]
# A named type, because members of a union must be hashable, and FailFast is not.
Contents = TypeAliasType("Contents", Annotated[list[Content], FailFast(), Field(max_length=PART_LIMIT)])


def result_text(value: Any) -> Any:
    """Return the result of a tool that is neither a text nor a list of parts as JSON, since some clients send data."""
    is_data = isinstance(value, list) and not all(
        isinstance(part, BaseModel) or (isinstance(part, dict) and "type" in part) for part in value
    )
    return json_text(value) if is_data or isinstance(value, dict | int | float) else value


# Clients leave out empty contents of answers and of results.
CONTENT_OR_CALLS: JsonDict = {
    "anyOf": [
        {"required": ["content"]},
        {"properties": {"role": {"enum": ["assistant", "tool", "function"]}}},
    ]
}


class ChatMessage(LenientModel):
    """A message of the conversation."""

    model_config = ConfigDict(json_schema_extra=CONTENT_OR_CALLS)

    role: Role
    content: str | Contents | None = None
    name: str | None = None
    tool_calls: MessageToolCalls | None = None
    """Only in messages of the assistant."""
    tool_call_id: str | None = None
    """Only in messages of a tool: the id of the call that it answers. Without it, the message answers the first call
    without a result in the last answer with calls, preferably one of the function ``name``."""
    reasoning_content: str | None = None
    """Only in messages of the assistant: its reasoning, for templates that show it to the model again."""
    reasoning: str | None = None
    """The same as ``reasoning_content``, which takes precedence, under the name in newer versions of vLLM."""

    refusal: str | None = None
    """Only in messages of the assistant: the text of an answer that refuses."""
    audio: Any = None
    """Only in messages of the assistant: an answer as audio, which the model does not hear."""
    prefix: bool | None = None
    """DeepSeek's name for ``continue_final_message``, in the last message."""
    function_call: CalledFunction | None = None
    """Only in messages of the assistant: a call, in the older form of ``tool_calls``. A message of the role
    ``function`` has its result."""
    # openai-python's ``parse`` adds this field to an answer; it repeats the content.
    parsed: Any = None

    @property
    def effective_reasoning(self) -> str | None:
        """The reasoning, under either name."""
        return self.reasoning if self.reasoning_content is None else self.reasoning_content

    @property
    def calls(self) -> list[MessageToolCall]:
        """The calls, in either form."""
        if self.tool_calls or self.function_call is None:
            return self.tool_calls or []
        return [MessageToolCall.model_construct(function=self.function_call)]

    @field_validator("content", mode="before")
    @classmethod
    def _read_result(cls, value: Any, info: ValidationInfo) -> Any:
        # The result of a tool can be any JSON value in some clients.
        return result_text(value) if info.data.get("role") in ("tool", "function") else value

    @model_validator(mode="after")
    def _check_role(self) -> Self:
        if "content" not in self.model_fields_set and self.role not in ("assistant", "tool", "function"):
            raise ValueError("content is missing")
        for name, value, roles in (
            ("tool_calls", self.tool_calls, ("assistant",)),
            ("function_call", self.function_call, ("assistant",)),
            ("tool_call_id", self.tool_call_id, ("tool", "function")),
            ("reasoning_content", self.effective_reasoning, ("assistant",)),
        ):
            if value and self.role not in roles:
                raise ValueError(
                    f"{name} is only valid in messages of the role {roles[0]!r}; this role is {self.role!r}"
                )
        return self


def _check_template_key(key: str) -> str:
    if key in RESERVED:
        raise ValueError("is set by this server; use other variables of the model's chat template")
    if not key.isidentifier():
        raise ValueError(
            "is not a valid name of a variable; use letters, digits and underscores, as in enable_thinking"
        )
    return key


TemplateKey = Annotated[str, AfterValidator(_check_template_key)]
# Named types, for the reason given above TextParts.
TemplateVariables = TypeAliasType(
    "TemplateVariables",
    Annotated[dict[TemplateKey, JsonValue], FailFast(), Field(max_length=MEMBER_LIMIT), FEW_VALUES],
)


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ThinkingSwitch(LenientModel):
    """Whether the model reasons before its answer. Models that do not reason ignore it."""

    type: Literal["enabled", "disabled", "adaptive", "auto"]


class Reasoning(LenientModel):
    """The same with an effort, in the spelling of OpenRouter."""

    effort: Effort | None = None
    enabled: bool | None = None


class Prediction(LenientModel):
    """A text that the answer is likely to repeat, such as a file that the model is asked to change."""

    type: Literal["content"] = "content"
    content: str | Contents


class ChatRequest(CompatibleFields):
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
    max_tokens: TokenLimit | None = 4096
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None
    post_sampling_probs: bool | None = None
    """Whether the answer has the probabilities with which tokens are sampled, after the temperature, top-p, min-p and
    top-k, instead of log-probabilities, as in llama.cpp."""
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    """Null means ``auto``."""
    parallel_tool_calls: bool | None = True
    functions: Functions | None = None
    """The form of ``tools`` in older clients. A call is then the message's ``function_call``."""
    function_call: FunctionChoice | None = None
    """The form of ``tool_choice`` in older clients."""
    reasoning_effort: Effort | None = None
    """A variable of the chat template. ``none`` also disables reasoning in templates with ``enable_thinking``."""

    thinking: ThinkingSwitch | None = None
    """Whether the model reasons, in the spelling of DeepSeek, GLM and Kimi."""
    enable_thinking: bool | None = None
    """The same in that of Qwen."""
    reasoning: Reasoning | None = None

    prediction: Prediction | None = None

    # Extensions.
    continue_final_message: bool | None = None
    """Whether the answer continues the last message, which must be one of the assistant. Null continues it if it is one
    and neither a format of the answer nor a call is enforced."""
    add_generation_prompt: bool | None = None
    """True begins a new answer also after a message of the assistant; false is only valid with a continuation."""
    chat_template_kwargs: TemplateVariables | None = None
    """Variables of the chat template; they override ``reasoning_effort``."""
    thinking_token_budget: Annotated[int, Field(ge=0), WHOLE] | None = None
    """Number of reasoning tokens after which the model is forced to answer."""

    # Fields of the format that are not supported; only values without effect are valid.
    audio: Annotated[Any, NO_AUDIO] = None
    modalities: Annotated[Any, Neutral("modalities other than text", (["text"],))] = None
    web_search_options: Annotated[Any, Neutral("web searches")] = None
    moderation: Annotated[Any, Neutral("moderations")] = None
    echo: Annotated[Any, Neutral("echoes of a chat", (False,))] = None
    add_special_tokens: Annotated[Any, Neutral("special tokens around a chat", (False,))] = None
    documents: Annotated[Any, Neutral("documents (send them in messages)", ([],))] = None
    chat_template: Annotated[Any, Neutral("templates in requests (the model's own is used)", ("",))] = None
    parse_tool_calls: Annotated[Any, Neutral("calls as text (leave tools out)", (True,))] = None
    include_reasoning: Annotated[Any, Neutral("answers without their reasoning", (True,))] = None

    def ignored(self) -> Iterator[str]:
        yield from super().ignored()
        if not (offered := self.offered):
            return
        kept = unique_functions(offered)
        for tool in offered:
            if not isinstance(tool, FunctionTool):
                yield f"tools.{tool.type}"
            elif kept[tool.function.name] is not tool.function:
                yield f"tools.{tool.function.name}"

    @property
    def offered(self) -> list[FunctionTool | HostedTool]:
        """The tools, in either form."""
        tools = list(self.tools or ())
        for each in self.functions or ():
            tools.append(FunctionTool.model_construct(type="function", function=each))
        return tools

    @property
    def choice(self) -> ToolChoice | None:
        """The choice among the tools, in either form."""
        if isinstance(self.function_call, FunctionName):
            return NamedToolChoice(type="function", function=self.function_call)
        return self.function_call or self.tool_choice

    @field_validator("top_logprobs")
    @classmethod
    def _check_top_logprobs(cls, value: int | None, info: ValidationInfo) -> int | None:
        # Without logprobs, 0 is valid: it requests nothing.
        if value and not info.data.get("logprobs"):
            raise ValueError("requires logprobs: true")
        return value

    @field_validator("post_sampling_probs")
    @classmethod
    def _check_probs(cls, value: bool | None, info: ValidationInfo) -> bool | None:
        if value and info.data.get("logprob_tokens"):
            raise ValueError("cannot be combined with logprob_tokens; leave one of them out")
        return value

    @field_validator("response_format")
    @classmethod
    def _check_format_can_end(cls, value: ResponseFormat | None, info: ValidationInfo) -> ResponseFormat | None:
        if value is not None and value.type != "text" and info.data.get("ignore_eos"):
            raise ValueError(f"is {value.type!r}, {ENDLESS}")
        return value

    @field_validator("tool_choice")
    @classmethod
    def _check_tool_choice(cls, value: ToolChoice | None, info: ValidationInfo) -> ToolChoice | None:
        # Errors in the tools are reported first.
        if "tools" in info.data:
            check_choice(value, unique_functions(info.data["tools"] or ()))
        if value not in (None, "none", "auto") and info.data.get("ignore_eos"):
            raise ValueError(f"forces a call, {ENDLESS}")
        return value

    @field_validator("functions", "function_call")
    @classmethod
    def _check_older(cls, value: Any, info: ValidationInfo) -> Any:
        newer = {"functions": "tools", "function_call": "tool_choice"}[str(info.field_name)]
        if value and info.data.get(newer):
            raise ValueError(f"is an older form of {newer}, which is also given; send only {newer}")
        if isinstance(value, FunctionName) and "functions" in info.data:
            functions = {each.name: each for each in info.data["functions"] or ()}
            named = NamedToolChoice(type="function", function=value)
            check_choice(named, functions, fields=("functions", "function_call"))
            if info.data.get("ignore_eos"):
                raise ValueError(f"forces a call, {ENDLESS}")
        return value


class AnswerMessage(BaseModel):
    """The message of the assistant in an answer."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    """Null if there are calls and no text."""
    reasoning_content: str | None = Field(None, exclude_if=_is_none)
    """The model's reasoning; absent if there is none."""
    tool_calls: list[AnswerToolCall] | None = Field(None, exclude_if=_is_none)
    """Absent if there are none."""
    function_call: AnswerFunction | None = Field(None, exclude_if=_is_none)
    """The call, if the request has ``functions`` instead of ``tools``."""


class TopLogprob(BaseModel):
    """A token and its log-probability."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprobs(TopLogprob):
    """A token of the answer and its alternatives."""

    top_logprobs: list[TopLogprob]
    logprob_tokens: list[TopLogprob] | None = Field(None, exclude_if=_is_none)
    """The tokens that the request names, in its order; absent if it names none."""


class TopProb(BaseModel):
    """A token and the probability with which it is sampled."""

    token: str
    prob: float
    bytes: list[int]


class TokenProbs(TopProb):
    """A token of the answer and its alternatives, with ``post_sampling_probs``."""

    top_probs: list[TopProb]
    """The most likely tokens. Tokens that are never sampled are left out."""


class ChoiceLogprobs(BaseModel):
    """Log-probabilities of a choice, or its probabilities with ``post_sampling_probs``."""

    content: list[TokenLogprobs] | list[TokenProbs]
    refusal: None = None


class Choice(BaseModel):
    """One of several answers to a request."""

    index: int
    message: AnswerMessage
    logprobs: ChoiceLogprobs | None = None
    finish_reason: FinishReason | Literal["function_call"]
    token_ids: list[int] | None = Field(None, exclude_if=_is_none)
    """Ids of the tokens of the answer; absent unless requested."""


class ChatCompletion(AnswerHead):
    """The whole answer to a chat request."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[Choice]
    usage: Usage
    timings: Timings
    """Timings of all choices together: tokens are summed, and times are those of the longest choice."""
    prompt_token_ids: list[int] | None = Field(None, exclude_if=_is_none)
    """Ids of the tokens of the prompt; absent unless requested."""


class ChoiceDelta(BaseModel):
    """At most one of reasoning, text and calls. The first delta of a call contains nothing else."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallChunk] | None = None
    function_call: FunctionChunk | None = None


class ChunkChoice(BaseModel):
    """A piece of a choice."""

    index: int
    delta: ChoiceDelta
    logprobs: ChoiceLogprobs | None = None
    """Log-probabilities of the tokens whose text is in ``delta``; absent unless requested."""
    finish_reason: FinishReason | Literal["function_call"] | None
    token_ids: list[int] | None = None
    """Ids of the tokens since the last chunk of the choice; absent unless requested."""


class ChatChunk(AnswerHead):
    """One ``data:`` line of a stream. Dump it with ``exclude_unset``: an absent field differs from null."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChunkChoice]
    usage: Usage | None = None
    timings: Timings | None = None
    """Timings of the choice that ends with this chunk; in other chunks, the timings so far if requested."""
    prompt_token_ids: list[int] | None = None
    """In the first chunk with tokens of the answer, if requested."""


class SocketToken(BaseModel):
    """A WebSocket message with a piece of the answer.

    Dump it with ``exclude_unset``: ``logprobs`` is present only if requested, and the other fields only if not empty.
    """

    token: str
    """May be empty if another field is present."""
    reasoning_content: str | None = None
    tool_calls: list[ToolCallChunk] | None = None
    logprobs: list[TokenLogprobs] | list[TokenProbs] | None = None


class SocketStats(BaseModel):
    """Statistics of an answer."""

    tokens_per_second: float
    prompt_tokens: int
    completion_tokens: int
    reasoning_tokens: int
    cached_tokens: int
    ttft_ms: float
    total_ms: float
    finish_reason: FinishReason


class SocketDone(BaseModel):
    """The WebSocket message at the end of an answer."""

    done: Literal[True] = True
    stats: SocketStats


class SocketError(BaseModel):
    """The WebSocket message at the end of a failed request."""

    error: ErrorDetail
