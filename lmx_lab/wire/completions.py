"""The legacy completions format, as evaluation harnesses use it: plain prompts in, text and log-probabilities out."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, FailFast, Field, Tag, ValidationInfo, field_validator
from typing_extensions import TypeAliasType

from lmx_lab.wire import unsupported
from lmx_lab.wire.generation import WHOLE, Alternatives, Choices, FinishReason, GenerationFields, Timings, Usage
from lmx_lab.wire.limits import ITEM_LIMIT

PROMPT_LIMIT = 1024
# As named types, since a union needs members with a hash, and FailFast has none.
TokenIds = TypeAliasType(
    "TokenIds",
    Annotated[list[Annotated[int, Field(ge=0)]], FailFast(), Field(min_length=1, max_length=ITEM_LIMIT)],
)
Texts = TypeAliasType("Texts", Annotated[list[str], FailFast(), Field(min_length=1, max_length=PROMPT_LIMIT)])
TokenLists = TypeAliasType(
    "TokenLists", Annotated[list[TokenIds], FailFast(), Field(min_length=1, max_length=PROMPT_LIMIT)]
)


def shape_of(prompt: Any) -> str:
    """Which of the prompt's shapes is meant, by its first item: trying all of them on a million ids takes seconds."""
    if not isinstance(prompt, list):
        return "str"
    first = prompt[0] if prompt else ""
    return "list[list]" if isinstance(first, list) else "list[str]" if isinstance(first, str) else "list[int]"


Prompt = Annotated[
    Annotated[str, Tag("str")]
    | Annotated[Texts, Tag("list[str]")]
    | Annotated[TokenIds, Tag("list[int]")]
    | Annotated[TokenLists, Tag("list[list]")],
    Discriminator(shape_of),
]


class CompletionRequest(GenerationFields):
    """The body of POST /v1/completions."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"model": "default", "prompt": "The sea is", "max_tokens": 16}]}
    )

    prompt: Prompt
    """A text, texts, the token ids of one prompt, or those of several."""
    echo: bool | None = None
    """Put the prompt before the text; with ``logprobs``, its tokens before the text's."""
    max_tokens: Annotated[int, Field(ge=0), WHOLE] | None = 16
    """0 generates nothing and needs ``echo``."""
    logprobs: Alternatives | None = None
    """How many alternatives to report for each token; 0 reports the tokens alone."""

    # Known to the format, not offered: only the value that means "no".
    best_of: Choices | None = None
    suffix: Annotated[Any, unsupported.NO_SUFFIX] = None

    @field_validator("max_tokens")
    @classmethod
    def _something_is_asked_for(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value == 0 and not info.data.get("echo"):
            raise ValueError("0 generates nothing: it needs echo: true")
        return value

    @field_validator("best_of")
    @classmethod
    def _all_are_answered(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and value != (info.data.get("n") or 1):
            raise ValueError("must equal n: this server answers every text that it generates")
        return value


class CompletionLogprobs(BaseModel):
    """One item a token, in all four lists."""

    tokens: list[str]
    token_logprobs: list[float | None]
    """Null for the first token of a prompt, which nothing precedes."""
    top_logprobs: list[dict[str, float] | None]
    """The likeliest tokens in this place and the token itself."""
    text_offset: list[int]
    """Where the token begins in the choice's whole text, in characters."""


class CompletionChoice(BaseModel):
    text: str
    index: int
    """Which prompt, times ``n``, plus which of its choices."""
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    """Null in every chunk but a choice's last."""


class Completion(BaseModel):
    """The whole answer, and without ``usage`` one SSE ``data:`` line. Dump it with ``exclude_unset``."""

    id: str
    object: Literal["text_completion"]
    created: int
    """Unix time, seconds."""
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    timings: Timings | None = None
    """Of all choices, as in ``ChatCompletion``, or of the one that ends with this chunk."""
