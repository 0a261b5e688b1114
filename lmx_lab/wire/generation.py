"""Pydantic models that chat and plain completions share: parameters of the generation, usage and timings.

Requests are strict: a number in quotes and an unknown field are errors. ``null`` always means the default. A field of
the format that this server does not support is refused unless its value has no effect.
"""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    StringConstraints,
    WithJsonSchema,
    model_validator,
)
from typing_extensions import TypeAliasType

from lmx_lab.wire.limits import check_members

STOP_LIMIT = 16
STOP_CHARACTERS = 1000
"""Longer stop strings would cost every stream time at every token."""
CHOICE_LIMIT = 8
LOGPROB_LIMIT = 20
BIAS_LIMIT = 1024
NAMED_LIMIT = 64
LOWEST_LOGPROB = -9999.0
"""The log-probability of an impossible token in the chat-completions format, because JSON has no infinity."""
ANY_MODEL = "default"
"""The model name that stands for the loaded model."""
UNLIMITED = 2**31 - 1
"""The maximum number of tokens that stands for -1: more than any context."""
NonEmpty = Annotated[str, StringConstraints(min_length=1)]
Stop = Annotated[str, StringConstraints(min_length=1, max_length=STOP_CHARACTERS)]
# A named type, because members of a union must be hashable, and FailFast is not.
Stops = TypeAliasType("Stops", Annotated[list[Stop], FailFast(), Field(max_length=STOP_LIMIT)])
# JSON has only one type of number: 5.0 is a valid count.
WHOLE = BeforeValidator(lambda value: int(value) if isinstance(value, float) and value.is_integer() else value)
"""Accepts 5.0 for 5. It comes after the bounds of a field, so that these are in its JSON schema too."""
LISTED = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)
"""Accepts a list for a tuple, which strict models do not accept when they are validated from Python objects."""


def _check_token_id(key: str) -> str:
    # No vocabulary has ids of more than twelve digits, and this limits the input of int().
    if not (key.isascii() and key.isdigit() and len(key) <= 12):
        raise ValueError("the keys of logit_bias must be token ids, written in digits")
    return key


Probability = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Temperature = Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
# vLLM's range, except for the lower end: a divisor near 0 would exceed the range of float16.
RepetitionPenalty = Annotated[float, Field(ge=0.01, le=2, allow_inf_nan=False)]
Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]
TokenKey = Annotated[str, AfterValidator(_check_token_id)]
Biases = TypeAliasType("Biases", Annotated[dict[TokenKey, Bias], FailFast(), Field(max_length=BIAS_LIMIT)])
NamedTokens = TypeAliasType(
    "NamedTokens",
    Annotated[list[Annotated[int, Field(ge=0)] | Stop], FailFast(), Field(max_length=NAMED_LIMIT)],
)
NO_LIMIT = BeforeValidator(lambda value: UNLIMITED if value == -1 else value)
"""Accepts -1 for as many tokens as the context allows, as llama.cpp does."""
TokenLimit = Annotated[
    int,
    Field(ge=1),
    WHOLE,
    NO_LIMIT,
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, {"const": -1}]}),
]
AnyModel = Annotated[
    NonEmpty,
    BeforeValidator(lambda value: ANY_MODEL if value is None else value),
    WithJsonSchema({"anyOf": [{"type": "string", "minLength": 1}, {"type": "null"}]}),
]
"""Name of the model that answers; null means ``ANY_MODEL``."""
Choices = Annotated[int, Field(ge=1, le=CHOICE_LIMIT), WHOLE]
Alternatives = Annotated[int, Field(ge=0, le=LOGPROB_LIMIT), WHOLE]


class BodyModel(BaseModel):
    """Base class of request bodies and their parts: strict, immutable, with a limited number of members."""

    model_config = ConfigDict(strict=True, frozen=True, use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _check_members(cls, value: Any) -> Any:
        return check_members(value)


class RequestModel(BodyModel):
    """A body, or a part of one, without unknown fields."""

    model_config = ConfigDict(extra="forbid")


class LenientModel(BodyModel):
    """A body, or a part of one, that accepts unknown fields. Known fields are strict."""

    model_config = ConfigDict(extra="allow")

    @property
    def unknown(self) -> list[str]:
        """Names of the given fields that the format does not have. A field whose value is null is not given."""
        return [name for name, value in (self.model_extra or {}).items() if value is not None]


def request_class(name: str) -> type[RequestModel] | None:
    """Return the request class of this name, or the class of a part of a request; None if no such class is imported."""
    classes = [RequestModel]
    while classes:
        if (found := classes.pop()).__name__ == name:
            return found
        classes += found.__subclasses__()
    return None


class StreamOptions(RequestModel):
    """Options of a streamed answer."""

    include_usage: bool = False
    include_obfuscation: bool = False


class GenerationFields(RequestModel):
    """Parameters of the generation that all routes share."""

    model: AnyModel = ANY_MODEL
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: Temperature | None = 1.0
    top_p: Probability | None = 1.0
    top_k: Annotated[int, Field(ge=-1), WHOLE] | None = None
    """-1 and 0 disable it."""
    min_p: Probability | None = None
    repetition_penalty: RepetitionPenalty | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Biases | None = None
    seed: Annotated[int, WHOLE] | None = None
    n: Choices | None = None
    stop: Stop | Stops | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0), WHOLE] | None = None
    """Number of tokens before which neither the end of the text nor a stop string ends the answer."""
    logprob_tokens: NamedTokens | None = None
    """Tokens whose log-probability is returned at each position of the answer, whatever their rank: ids, or texts of
    one token each. An extension, which requires ``logprobs``."""

    @model_validator(mode="after")
    def _check_logprob_tokens(self) -> Self:
        asked: bool | int | None = getattr(self, "logprobs", None)
        if self.logprob_tokens and (asked is None or asked is False):
            raise ValueError("logprob_tokens requires logprobs")
        return self

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class PromptTokensDetails(BaseModel):
    """Details of the prompt tokens."""

    cached_tokens: int
    disk_cached_tokens: int = 0
    """Cached tokens that were read from the prefix cache on disk."""


class CompletionTokensDetails(BaseModel):
    """Details of the generated tokens."""

    reasoning_tokens: int


class Usage(BaseModel):
    """Number of tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class Timings(BaseModel):
    """llama.cpp's ``timings``: milliseconds and tokens per second. ``prompt_n`` counts the tokens that were computed.

    ``queue_ms``, ``ttft_ms`` and ``peak_memory_gb`` are extensions, which are null if another server generated the
    answer.
    """

    cache_n: int
    cache_disk_n: int = 0
    """Number of tokens of ``cache_n`` that were read from disk; an extension."""
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float
    queue_ms: float | None = None
    """Time from arrival to the start of the prompt."""
    ttft_ms: float | None = None
    """Time from arrival to the first token."""
    peak_memory_gb: float | None = None
    """Largest memory use of the engine while the request ran, including models; 1 GB is 10^9 bytes."""
    draft_n: int = 0
    """Tokens that prompt lookup or a draft model drafted, and that were verified; llama.cpp sends it only if it is not
    zero."""
    draft_n_accepted: int = 0
    """Drafted tokens that became part of the answer."""
