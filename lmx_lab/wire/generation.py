"""What chat and plain completions share: the fields that steer a generation, usage, timings.

Requests are strict: a number in quotes is a mistake, an unknown field too. ``null`` always means the default. What the
format knows and this server cannot honour is refused unless it has its neutral value.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    StringConstraints,
    model_validator,
)
from typing_extensions import TypeAliasType

from lmx_lab.wire.limits import check_members

STOP_LIMIT = 16
STOP_CHARACTERS = 1000
"""Longer ones would cost every stream time at every token."""
CHOICE_LIMIT = 8
LOGPROB_LIMIT = 20
BIAS_LIMIT = 1024
LOWEST_LOGPROB = -9999.0
"""The chat format's word for "impossible": JSON has no infinity."""
ANY_MODEL = "default"
"""The model name that stands for the loaded model."""
FinishReason = Literal["stop", "length", "tool_calls"]
NonEmpty = Annotated[str, StringConstraints(min_length=1)]
Stop = Annotated[str, StringConstraints(min_length=1, max_length=STOP_CHARACTERS)]
# As a named type, since a union needs members with a hash, and FailFast has none.
Stops = TypeAliasType("Stops", Annotated[list[Stop], FailFast(), Field(max_length=STOP_LIMIT)])
# JSON has one kind of number: 5.0 counts five.
WHOLE = BeforeValidator(lambda value: int(value) if isinstance(value, float) and value.is_integer() else value)
"""Behind the bounds of a field, which then are in its JSON schema too."""
LISTED = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)
"""For tuples in strict shapes, which from Python take no list."""


def _check_token_id(key: str) -> str:
    # Twelve digits are more than any vocabulary has, and a bound on what int() is given.
    if not (key.isascii() and key.isdigit() and len(key) <= 12):
        raise ValueError("the keys of logit_bias are token ids, in digits")
    return key


Probability = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Temperature = Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
# vLLM's range, but for its lower end: a divisor near 0 would push logits out of float16.
RepetitionPenalty = Annotated[float, Field(ge=0.01, le=2, allow_inf_nan=False)]
Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]
TokenKey = Annotated[str, AfterValidator(_check_token_id)]
Biases = TypeAliasType("Biases", Annotated[dict[TokenKey, Bias], FailFast(), Field(max_length=BIAS_LIMIT)])
Choices = Annotated[int, Field(ge=1, le=CHOICE_LIMIT), WHOLE]
Alternatives = Annotated[int, Field(ge=0, le=LOGPROB_LIMIT), WHOLE]


class RequestShape(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _members_are_few(cls, value: Any) -> Any:
        return check_members(value)


class StreamOptions(RequestShape):
    include_usage: bool = False
    include_obfuscation: bool = False


class GenerationFields(RequestShape):
    """How tokens are drawn and when the text ends; the same in every route."""

    model: NonEmpty
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: Temperature | None = 1.0
    top_p: Probability | None = 1.0
    top_k: Annotated[int, Field(ge=-1), WHOLE] | None = None
    """-1 and 0 cut nothing."""
    min_p: Probability | None = None
    repetition_penalty: RepetitionPenalty | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Biases | None = None
    seed: Annotated[int, WHOLE] | None = None
    n: Choices | None = None
    stop: Stop | Stops | None = None
    ignore_eos: bool | None = None

    # Known to the format, changing nothing here.
    user: str | None = None

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class CompletionTokensDetails(BaseModel):
    reasoning_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class Timings(BaseModel):
    """llama.cpp's ``timings``: milliseconds, tokens per second; ``prompt_n`` counts the tokens that were computed.

    The last three are the lab's own, and None where somebody else made the answer.
    """

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float
    queue_ms: float | None = None
    """From arrival until the prompt was begun."""
    ttft_ms: float | None = None
    """From arrival to the first token."""
    peak_memory_gb: float | None = None
    """The most memory that the engine had while the request ran, models included; GB are 10^9 bytes."""
