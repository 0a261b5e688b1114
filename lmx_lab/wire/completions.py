"""Pydantic models of the legacy completions format, which evaluation harnesses use for text and log-probabilities."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
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

from lmx_lab.errors import InvalidRequestError
from lmx_lab.values.outputs import FinishReason
from lmx_lab.wire.base import ITEM_LIMIT, NO_LIMIT, WHOLE, Alternatives, Choices, FormatModel, LenientModel, Neutral
from lmx_lab.wire.errors import validated
from lmx_lab.wire.generation import AnswerHead, CompatibleFields, Timings, Usage

PROMPT_LIMIT = 1024
RANDOM_SEEDS = (-1, 2**32 - 1)
"""Values of ``seed`` for which llama.cpp chooses a random seed."""
# Named types, because members of a union must be hashable, and FailFast is not.
TokenIds = TypeAliasType(
    "TokenIds",
    Annotated[list[Annotated[int, Field(ge=0, strict=True)]], FailFast(), Field(min_length=1, max_length=ITEM_LIMIT)],
)
Texts = TypeAliasType("Texts", Annotated[list[str], FailFast(), Field(min_length=1, max_length=PROMPT_LIMIT)])
TokenLists = TypeAliasType(
    "TokenLists", Annotated[list[TokenIds], FailFast(), Field(min_length=1, max_length=PROMPT_LIMIT)]
)


def shape_of(prompt: Any) -> str | None:
    """Return the tag of a prompt's type by its first item; None if it is neither a text nor a list.

    Trying all types on a million ids would take seconds.
    """
    if not isinstance(prompt, list):
        return "str" if isinstance(prompt, str) else None
    first = prompt[0] if prompt else ""
    return "list[list]" if isinstance(first, list) else "list[str]" if isinstance(first, str) else "list[int]"


BY_SHAPE = Discriminator(
    shape_of,
    custom_error_type="shape_of_texts",
    custom_error_message="must be a text, a list of texts, the token ids of one text, or a list of such lists of ids",
)
Prompt = Annotated[
    Annotated[str, Tag("str")]
    | Annotated[Texts, Tag("list[str]")]
    | Annotated[TokenIds, Tag("list[int]")]
    | Annotated[TokenLists, Tag("list[list]")],
    BY_SHAPE,
]


Piece = Annotated[int, Field(ge=0, strict=True)] | str
Pieces = TypeAliasType("Pieces", Annotated[list[Piece], FailFast(), Field(min_length=1, max_length=ITEM_LIMIT)])
PieceLists = TypeAliasType(
    "PieceLists", Annotated[list[Pieces | str], FailFast(), Field(min_length=1, max_length=PROMPT_LIMIT)]
)


def mixed_shape_of(prompt: Any) -> str | None:
    """Return the tag of a prompt's type, as ``shape_of`` does, but also for texts and token ids in one list."""
    if not isinstance(prompt, list):
        return shape_of(prompt)
    kinds = set(map(type, prompt))
    is_mixed = len(kinds) > 1 or any(isinstance(each, list) and len(set(map(type, each))) > 1 for each in prompt)
    return shape_of(prompt) if not is_mixed else "list[list[int | str]]" if list in kinds else "list[int | str]"


LlamaPrompt = Annotated[
    Annotated[str, Tag("str")]
    | Annotated[Texts, Tag("list[str]")]
    | Annotated[TokenIds, Tag("list[int]")]
    | Annotated[TokenLists, Tag("list[list]")]
    | Annotated[Pieces, Tag("list[int | str]")]
    | Annotated[PieceLists, Tag("list[list[int | str]]")],
    Discriminator(
        mixed_shape_of,
        custom_error_type="shape_of_texts",
        custom_error_message="must be a text, the token ids and texts of one prompt, or a list of such prompts",
    ),
]


class CompletionRequest(CompatibleFields):
    """The body of POST /v1/completions."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"model": "default", "prompt": "The sea is", "max_tokens": 16}]}
    )

    prompt: Prompt
    """A text, texts, the token ids of one prompt, or those of several."""
    echo: bool | None = None
    """Whether to put the prompt before the text and, with ``logprobs``, its tokens before those of the text."""
    max_tokens: (
        Annotated[
            int,
            Field(ge=0),
            WHOLE,
            NO_LIMIT,
            WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 0}, {"const": -1}]}),
        ]
        | None
    ) = 16
    """0 generates nothing and requires ``echo``."""
    suffix: str | None = None
    """The text after the gap that the completion fills (fill-in-the-middle)."""
    logprobs: Alternatives | None = None
    """Number of alternatives to return for each token; 0 returns only the tokens."""

    # Fields of the format that are not supported; only the value without effect is valid.
    best_of: Choices | None = None
    prompt_embeds: Annotated[Any, Neutral("vectors as prompts")] = None

    @field_validator("max_tokens")
    @classmethod
    def _check_max_tokens(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value == 0 and not info.data.get("echo"):
            raise ValueError("0 generates nothing, so it requires echo: true")
        return value

    @field_validator("suffix")
    @classmethod
    def _check_suffix(cls, value: str | None, info: ValidationInfo) -> str | None:
        if not value:
            return None
        if info.data.get("echo"):
            raise ValueError("cannot be combined with echo: true; leave one of them out")
        if "prompt" in info.data and shape_of(info.data["prompt"]) not in ("str", "list[str]"):
            raise ValueError("needs prompts that are texts; send the prompt as text")
        return value

    @field_validator("best_of")
    @classmethod
    def _check_best_of(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and value != (info.data.get("n") or 1):
            raise ValueError("must equal n: this server returns every text that it generates")
        return value


class CompletionLogprobs(BaseModel):
    """Log-probabilities of a choice. All four lists have one item per token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    """Null for the first token of a prompt."""
    top_logprobs: list[dict[str, float] | None]
    """The most likely tokens at this position, and the token itself."""
    text_offset: list[int]
    """Position of the token in the whole text of the choice, in characters."""
    logprob_tokens: list[dict[str, float]] | None = Field(None, exclude_if=lambda value: value is None)
    """The log-probabilities of the tokens that the request names, by text, empty for tokens of the prompt; absent if it
    names none."""


class CompletionChoice(BaseModel):
    """One of several answers, or a piece of one."""

    text: str
    index: int
    """Index of the prompt times ``n``, plus the index of its choice."""
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    """Null in every chunk of a choice except the last."""
    token_ids: list[int] | None = None
    """Ids of the tokens of the text; absent unless requested."""
    prompt_token_ids: list[int] | None = None
    """Ids of the tokens of the prompt, if requested. In a stream, the first chunk of a choice has them."""


class Completion(AnswerHead):
    """The whole answer or, without ``usage``, one ``data:`` line of a stream. Dump it with ``exclude_unset``."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage | None = None
    timings: Timings | None = None
    """Timings of all choices, as in ``ChatCompletion``, or of the choice that ends with this chunk; in other chunks,
    the timings so far if requested."""


class ExtraText(LenientModel):
    """A text from elsewhere, such as another file."""

    filename: str | None = None
    text: str


ExtraTexts = TypeAliasType("ExtraTexts", Annotated[list[ExtraText], FailFast(), Field(max_length=PROMPT_LIMIT)])


FieldPaths = TypeAliasType("FieldPaths", Annotated[list[str], FailFast(), Field(max_length=64)])


def _text_of(prompt: Any) -> Any:
    if not isinstance(prompt, dict) or not isinstance(prompt.get("prompt_string"), str):
        return prompt
    if prompt.get("multimodal_data"):
        raise ValueError("multimodal_data: images and audio are not supported; send only a prompt_string")
    return prompt["prompt_string"]


class LlamaRequest(FormatModel):
    """The body of llama.cpp's ``POST /completion`` and ``/infill``.

    The fields of ``CompletionRequest`` are also valid.
    """

    model_config = ConfigDict(json_schema_extra={"examples": [{"prompt": "The sea is", "n_predict": 16}]})

    prompt: LlamaPrompt = ""
    """As in ``CompletionRequest``, but a prompt may also mix texts and token ids, or be an object with a
    ``prompt_string``. For ``/infill``, the beginning of the text in the gap."""
    stream: bool | None = False
    n_predict: Annotated[int, Field(ge=-2), WHOLE] | None = None
    """Maximum number of tokens; -1 and -2 set no limit, and 0 only computes the prompt."""
    n_cmpl: Choices | None = None
    """Number of completions of each prompt."""
    n_probs: Alternatives | None = None
    """Number of alternatives to return for each token; 0 returns no log-probabilities."""
    post_sampling_probs: bool | None = None
    """With ``n_probs``: whether to return the probabilities with which tokens are sampled, after the temperature,
    top-p, min-p and top-k, instead of log-probabilities."""
    input_prefix: str = ""
    """The text before the gap, for ``/infill``."""
    input_suffix: str = ""
    """The text after the gap, for ``/infill``."""
    input_extra: ExtraTexts | None = None
    """Texts that the model reads before the gap, for ``/infill``."""
    return_tokens: bool | None = None
    """Whether a complete answer contains the ids of its tokens. Streams always contain them."""
    response_fields: FieldPaths | None = None
    """The members to return in a complete answer or in the last event of a stream, such as
    ``generation_settings/seed``; by default all."""

    @classmethod
    def names(cls) -> Collection[str]:
        return {*cls.model_fields, *CompletionRequest.model_fields}

    @field_validator("prompt", mode="before")
    @classmethod
    def _read_objects(cls, prompt: Any) -> Any:
        return [_text_of(each) for each in prompt] if isinstance(prompt, list) else _text_of(prompt)

    def converted(self, *, infill: bool) -> CompletionRequest:
        """Return the request in the completions format.

        Raises:
            InvalidRequestError: a field is not valid.
        """
        given = {name: value for name, value in (self.model_extra or {}).items() if value is not None}
        given |= {} if self.n_cmpl is None else {"n": self.n_cmpl}
        # llama.cpp's defaults.
        defaults = {"temperature": 0.8, "top_p": 0.95, "top_k": 40, "min_p": 0.05}
        if infill and not isinstance(self.prompt, str):
            raise InvalidRequestError("prompt must be a text with which the gap begins; send a string", param="prompt")
        if self.post_sampling_probs and given.get("logprob_tokens"):
            raise InvalidRequestError(
                "post_sampling_probs cannot be combined with logprob_tokens; leave one of them out",
                param="post_sampling_probs",
            )
        # As llama.cpp writes them for models without tokens for several files.
        extra = "".join(f"\n\n--- snippet ---\n\n{each.text}" for each in self.input_extra or ())
        gap = {"prompt": f"{extra}{self.input_prefix}{self.prompt}", "suffix": self.input_suffix}
        if given.get("seed") in RANDOM_SEEDS:
            del given["seed"]
        own = {"stream": self.stream, "logprobs": self.n_probs or None, **(gap if infill else {"prompt": self.prompt})}
        if self.n_predict is not None or not {"max_tokens", "max_completion_tokens"} & given.keys():
            own["n_predict"] = max(self.n_predict or -1, -1)
        return validated(CompletionRequest, {**defaults, **given, **own}, ignores_unknown=True)


class LlamaCompletion(BaseModel):
    """The answer of ``POST /completion`` to one prompt or, with only the first fields, a ``data:`` line of a stream."""

    index: int
    content: str
    tokens: list[int]
    stop: bool
    """Whether this is the whole answer, or the last line of its stream."""
    id_slot: int = -1
    tokens_predicted: int
    tokens_evaluated: int
    completion_probabilities: list[dict[str, Any]] | None = Field(None, exclude_if=lambda value: value is None)
    prompt: str | None = None
    """The prompt, if it is a text."""
    model: str | None = None
    stop_type: Literal["eos", "limit", "word"] | None = None
    stopping_word: str | None = None
    tokens_cached: int | None = None
    truncated: bool | None = None
    has_new_line: bool | None = None
    generation_settings: dict[str, Any] | None = None
    timings: Timings | None = None
