"""Pydantic models of Ollama's API: the requests of the routes below ``/api``, and their answers.

The format is that of https://github.com/ollama/ollama/blob/main/docs/api.md. Its clients send many fields and options
that have no effect here. These are ignored, and named in the header ``x-lmx-ignored``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    FailFast,
    Field,
    Tag,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
)
from typing_extensions import TypeAliasType

from lmx_lab.values.bodies import MEMBER_LIMIT
from lmx_lab.values.models import TimeToLive
from lmx_lab.wire.base import (
    ANY_MODEL,
    FEW_VALUES,
    NO_EMPTY_STOPS,
    WHOLE,
    Alternatives,
    AnyModel,
    FormatModel,
    LenientModel,
    Neutral,
    NonEmpty,
    Penalty,
    Probability,
    RepetitionPenalty,
    Stop,
    Stops,
    Temperature,
)
from lmx_lab.wire.chat import MESSAGE_LIMIT, Contents, result_text
from lmx_lab.wire.completions import shape_of
from lmx_lab.wire.embeddings import INPUT_LIMIT
from lmx_lab.wire.formats import Name, kind_of
from lmx_lab.wire.tools import PART_LIMIT, TOOL_LIMIT, MessageToolCalls, check_counts

NO_VISION = Neutral("images (the models of this server have no vision; send text only)", ([],))
DURATION = re.compile(r"(?P<sign>[-+]?)(?P<parts>(?:(?:\d+\.?\d*|\.\d+)(?:ns|us|µs|μs|ms|s|m|h))+)", re.ASCII)
PART = re.compile(r"([\d.]+)(ns|us|µs|μs|ms|s|m|h)")
UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
DURATION_CHARACTERS = 100


def read_duration(value: Any) -> float:
    """Return seconds from a number, or from a text such as ``5m`` or ``1h30m``. Negative values mean no limit.

    Raises:
        ValueError: it is neither.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value) if abs(value) < 1e300 else math.copysign(math.inf, value)
    text = value.strip() if isinstance(value, str) else ""
    match = DURATION.fullmatch(text) if len(text) <= DURATION_CHARACTERS else None
    if match is not None:
        seconds = sum(float(number) * UNITS[unit] for number, unit in PART.findall(match["parts"]))
        return -seconds if match["sign"] == "-" else seconds
    try:
        seconds = float(text[:DURATION_CHARACTERS])
    except ValueError:
        seconds = math.nan
    if math.isnan(seconds):
        raise ValueError('must be a number of seconds, or a duration such as "5m" or "1h30m"')
    return seconds


LONGEST_S = 30 * 86_400.0
"""Longest time to live of a model; a longer one means that it stays."""
OllamaDuration = Annotated[
    float, BeforeValidator(read_duration), WithJsonSchema({"anyOf": [{"type": "number"}, {"type": "string"}]})
]


def _check_format(value: Any) -> Any:
    if value in ("", "json") or isinstance(value, dict):
        return value or None
    raise ValueError(f'must be "json" or a JSON schema as an object; it is {kind_of(value)}')


OllamaFormat = Annotated[
    Any,
    FEW_VALUES,
    AfterValidator(_check_format),
    WithJsonSchema({"anyOf": [{"enum": ["", "json"]}, {"type": "object"}]}),
]
# Named types, because members of a union must be hashable, and FailFast is not.
OllamaParameters = TypeAliasType(
    "OllamaParameters", Annotated[dict[str, Any], FailFast(), Field(max_length=MEMBER_LIMIT), FEW_VALUES]
)


class OllamaOptions(LenientModel):
    """Parameters of the generation. Other options are ignored."""

    num_predict: Annotated[int, WHOLE] | None = None
    """Maximum number of tokens; 0 and negative numbers mean as many as the context allows."""
    temperature: Temperature | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, Field(ge=-1), WHOLE] | None = None
    min_p: Probability | None = None
    seed: Annotated[int, WHOLE] | None = None
    """-1 means a random seed."""
    stop: Annotated[Stop | Stops | None, NO_EMPTY_STOPS] = None
    repeat_penalty: RepetitionPenalty | None = None
    repeat_last_n: Annotated[int, Field(ge=-1), WHOLE] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None


class OllamaBody(FormatModel):
    """The fields of all requests that a model answers."""

    model: NonEmpty
    """With or without the tag ``:latest``."""
    options: OllamaOptions | None = None
    keep_alive: OllamaDuration | None = None
    """How long the model stays in memory without requests. It has an effect only without a prompt: 0 unloads the model,
    and a negative number keeps it."""

    @property
    def has_prompt(self) -> bool:
        """Whether the request has a prompt. Without one, it loads or unloads the model."""
        return True

    @property
    def ttl_s(self) -> TimeToLive | None:
        """Time to live of the model that the request loads; None if the request has no ``keep_alive``."""
        is_long = self.keep_alive is not None and not 0 <= self.keep_alive <= LONGEST_S
        return "never" if is_long else self.keep_alive

    @property
    def unloads(self) -> bool:
        """Whether the request unloads the model."""
        return not self.has_prompt and self.keep_alive == 0

    def ignored(self) -> Iterator[str]:
        yield from super().ignored()
        if self.keep_alive is not None and self.has_prompt:
            yield "keep_alive"


class OllamaGenerationBody(OllamaBody):
    """The fields of requests for text."""

    model: AnyModel = ANY_MODEL
    stream: bool | None = True
    format: OllamaFormat | None = None
    """``json``, or a JSON schema of the answer."""
    think: bool | Literal["low", "medium", "high"] | None = None
    """Whether the model reasons before its answer, or how much. Models that do not reason ignore it."""
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None


OllamaImages = TypeAliasType("OllamaImages", Annotated[list[str], FailFast(), Field(max_length=PART_LIMIT)])


class OllamaMessage(LenientModel):
    """A message of the conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | Contents | None = None
    thinking: str | None = None
    """The model's reasoning in an earlier answer."""
    images: OllamaImages | None = None
    """The model does not see them. They are refused in the newest message of the user."""
    tool_calls: MessageToolCalls | None = None
    tool_name: str | None = None
    """In messages of a tool: the function whose result this is."""
    tool_call_id: str | None = None
    """In messages of a tool: the call whose result this is."""

    @field_validator("content", mode="before")
    @classmethod
    def _read_result(cls, value: Any, info: ValidationInfo) -> Any:
        return result_text(value) if info.data.get("role") == "tool" else value


class OllamaFunction(LenientModel):
    """A function that the model can call."""

    name: Name
    description: str | None = None
    parameters: OllamaParameters | None = None


class OllamaTool(LenientModel):
    """A tool."""

    type: Any = None
    """Ignored: every tool is a function."""
    function: OllamaFunction


OllamaTools = TypeAliasType("OllamaTools", Annotated[list[OllamaTool], FailFast(), Field(max_length=TOOL_LIMIT)])


class OllamaChatRequest(OllamaGenerationBody):
    """The body of POST /api/chat. Without messages, the model is loaded or unloaded."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"model": "default", "messages": [{"role": "user", "content": "Say hello."}]}]}
    )

    messages: Annotated[
        list[OllamaMessage], FailFast(), Field(max_length=MESSAGE_LIMIT), BeforeValidator(check_counts)
    ] = Field(default=[])
    tools: OllamaTools | None = None

    @property
    def has_prompt(self) -> bool:
        return bool(self.messages)


class OllamaGenerateRequest(OllamaGenerationBody):
    """The body of POST /api/generate. Without a prompt, the model is loaded or unloaded."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"model": "default", "prompt": "The sea is"}]})

    prompt: str | None = None
    suffix: str | None = None
    """The text after the gap that the answer fills (fill-in-the-middle)."""
    system: str | None = None
    raw: bool | None = None
    """Whether to continue the prompt without the model's chat template."""
    images: Annotated[Any, NO_VISION] = None
    template: Annotated[
        Any, Neutral("templates in requests (the model's own is used; with raw: true none is used)", ("",))
    ] = None
    context: Annotated[Any, Neutral("token contexts (send the conversation as messages to /api/chat)", ([],))] = None

    @property
    def has_prompt(self) -> bool:
        return bool(self.prompt or self.suffix)


OllamaTexts = TypeAliasType("OllamaTexts", Annotated[list[str], FailFast(), Field(max_length=INPUT_LIMIT)])
BY_SHAPE = Discriminator(
    shape_of, custom_error_type="shape_of_texts", custom_error_message="must be a text or a list of texts"
)


class OllamaEmbedRequest(OllamaBody):
    """The body of POST /api/embed."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"model": "default", "input": ["The sea is blue.", "Bread is baked."]}]}
    )

    input: Annotated[Annotated[str, Tag("str")] | Annotated[OllamaTexts, Tag("list[str]")], BY_SHAPE]
    truncate: bool | None = True
    dimensions: Annotated[int, Field(ge=1), WHOLE] | None = None


class OllamaEmbeddingsRequest(OllamaBody):
    """The body of POST /api/embeddings, the older route for a single text."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"model": "default", "prompt": "The sea is blue."}]})

    prompt: str


class OllamaModelRequest(FormatModel):
    """A request about a model."""

    model: NonEmpty | None = None
    name: NonEmpty | None = None
    """The older name of ``model``."""


class OllamaShowRequest(OllamaModelRequest):
    """The body of POST /api/show."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"model": "default"}]})


class OllamaPullRequest(OllamaModelRequest):
    """The body of POST /api/pull."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"model": "smollm2-135m"}]})

    stream: bool | None = True


# Answers


class OllamaAnswerCall(BaseModel):
    """A tool call in an answer."""

    id: str
    function: dict[str, Any]
    """``name``, ``arguments`` as an object, and ``index``."""


class OllamaAnswerMessage(BaseModel):
    """The message of an answer, or a part of it."""

    role: Literal["assistant"] = "assistant"
    content: str
    thinking: str | None = None
    tool_calls: list[OllamaAnswerCall] | None = None


class OllamaAnswer(BaseModel):
    """A whole answer, or a line of a stream. The counters are in the last line; durations are in nanoseconds."""

    model: str
    created_at: str
    done: bool
    done_reason: Literal["stop", "length", "load", "unload"] | None = None
    logprobs: list[dict[str, Any]] | None = None
    total_duration: int | None = None
    load_duration: int | None = None
    """Time from the arrival of the request until its prompt is computed, including a load of the model."""
    prompt_eval_count: int | None = None
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    eval_duration: int | None = None


class OllamaChatAnswer(OllamaAnswer):
    """An answer of POST /api/chat."""

    message: OllamaAnswerMessage


class OllamaGenerateAnswer(OllamaAnswer):
    """An answer of POST /api/generate."""

    response: str
    thinking: str | None = None


class OllamaEmbedAnswer(BaseModel):
    """The answer of POST /api/embed."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbeddingsAnswer(BaseModel):
    """The answer of POST /api/embeddings."""

    embedding: list[float]


class OllamaModelDetails(BaseModel):
    """Properties of a model's files."""

    parent_model: str = ""
    format: str
    family: str
    families: list[str]
    parameter_size: str = ""
    """Empty, because the files do not contain it."""
    quantization_level: str


class OllamaModelBase(BaseModel):
    """What models on disk and in memory share."""

    name: str
    model: str
    size: int
    """Bytes of the weight files, or of memory for a model in memory."""
    digest: str
    """Changes when the files of the model do."""
    details: OllamaModelDetails


class OllamaModel(OllamaModelBase):
    """A model on disk."""

    modified_at: str


class OllamaModels(BaseModel):
    """The answer of GET /api/tags."""

    models: list[OllamaModel]


class OllamaRunningModel(OllamaModelBase):
    """A model in memory."""

    expires_at: str
    """When the model is unloaded if there are no further requests."""
    size_vram: int
    context_length: int | None


class OllamaRunningModels(BaseModel):
    """The answer of GET /api/ps."""

    models: list[OllamaRunningModel]


class OllamaModelInfo(BaseModel):
    """The answer of POST /api/show."""

    modified_at: str
    license: str = ""
    modelfile: str
    parameters: str
    """One parameter and its value in each line."""
    template: str
    """The chat template, in Jinja's language."""
    details: OllamaModelDetails
    model_info: dict[str, Any]
    capabilities: list[Literal["completion", "tools", "thinking", "insert", "embedding"]]


class OllamaPullProgress(BaseModel):
    """A line of the stream of POST /api/pull; the last one has the status ``success``."""

    status: str
    digest: str | None = None
    """Identifies the download."""
    completed: int | None = None
    total: int | None = None


class OllamaVersion(BaseModel):
    """The answer of GET /api/version."""

    version: str


class OllamaError(BaseModel):
    """The body of a failed request, and the last line of a stream that fails."""

    error: str
    code: str
    """An extension: the code of the error, as in the chat format."""
    request_id: str | None = None
    """An extension: the id of the request."""
