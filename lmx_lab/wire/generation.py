"""Parameters of the generation that chat and plain completions share, names of other servers, usage and timings.

Of the fields of other servers' formats, some are other names of a parameter, some are hints, which cannot change the
answer and are ignored, and some are accepted only with values without effect. ``docs/server.md`` has a table of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, FailFast, Field, WithJsonSchema, model_validator
from typing_extensions import TypeAliasType

from lmx_lab.values.steering import STEER_LIMIT, SteeringVector
from lmx_lab.wire.base import (
    ANY_MODEL,
    FEW_VALUES,
    NO_EMPTY_STOPS,
    WHOLE,
    AnyModel,
    Biases,
    BodyModel,
    Choices,
    FormatModel,
    LenientModel,
    NamedTokens,
    Neutral,
    Penalty,
    Probability,
    RepetitionPenalty,
    Stop,
    Stops,
    Temperature,
    TokenLimit,
)
from lmx_lab.wire.formats import (
    AnyFormat,
    ChoiceTexts,
    GbnfGrammar,
    GrammarFormat,
    JsonSchema,
    Pattern,
    ResponseFormat,
    SchemaOrText,
    StructuredOutputs,
    TextFormat,
    schema_format,
)

NAMES: Mapping[str, tuple[str, ...]] = {
    "max_tokens": ("max_completion_tokens", "n_predict"),
    "repetition_penalty": ("repeat_penalty",),
    "response_format": (
        *("json_schema", "grammar", "structured_outputs"),
        *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    ),
}
"""Other names of parameters."""
# A named type, because members of a union must be hashable, and FailFast is not.
Steerings = TypeAliasType("Steerings", Annotated[list[SteeringVector], FailFast(), Field(max_length=STEER_LIMIT)])
Breakers = TypeAliasType(
    "Breakers", Annotated[list[Annotated[str, Field(min_length=1, max_length=40)]], FailFast(), Field(max_length=16)]
)
EMPTY_MEANS_NONE = BeforeValidator(lambda value: None if value == "" else value)
Hint = Annotated[Any, FEW_VALUES, WithJsonSchema({"description": "Ignored: it cannot change the answer"})]


class StreamOptions(LenientModel):
    """Options of a streamed answer."""

    include_usage: bool = False
    include_obfuscation: bool = False


class GenerationFields(FormatModel):
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
    repeat_last_n: Annotated[int, Field(ge=-1), WHOLE] | None = None
    """Number of tokens at the end of the output that the penalties count; -1 counts all, and 0 turns them off."""
    logit_bias: Biases | None = None
    seed: Annotated[int, WHOLE] | None = None
    n: Choices | None = None
    stop: Annotated[Stop | Stops | None, NO_EMPTY_STOPS] = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    """Whether the answer has the ids of its tokens and of those of the prompt, as in vLLM."""
    timings_per_token: bool | None = None
    """Whether each chunk of a stream has the timings so far, as in llama.cpp."""
    min_tokens: Annotated[int, Field(ge=0), WHOLE] | None = None
    """Number of tokens before which neither the end of the text nor a stop string ends the answer."""
    logprob_tokens: NamedTokens | None = None
    """Tokens whose log-probability is returned at each position of the answer, whatever their rank: ids, or texts of
    one token each. An extension, which requires ``logprobs``."""

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


# Names and hints of other servers


class Hints(BodyModel):
    """Fields that cannot change the answer. They are ignored, and named in the header ``x-lmx-ignored``."""

    # The chat format itself.
    user: Hint = None
    metadata: Hint = None
    store: Hint = None
    service_tier: Hint = None
    safety_identifier: Hint = None
    prompt_cache_key: Hint = None
    prompt_cache_retention: Hint = None
    prompt_cache_options: Hint = None
    verbosity: Hint = None

    # llama.cpp. The parameters of samplers have no effect while the samplers are off.
    cache_prompt: Hint = None
    id_slot: Hint = None
    n_keep: Hint = None
    return_progress: Hint = None
    n_cache_reuse: Hint = None
    n_indent: Hint = None
    sse_ping_interval: Hint = None
    t_max_prompt_ms: Hint = None
    t_max_predict_ms: Hint = None
    backend_sampling: Hint = None
    dynatemp_exponent: Hint = None
    mirostat_tau: Hint = None
    mirostat_eta: Hint = None

    # vLLM.
    request_id: Hint = None
    priority: Hint = None
    cache_salt: Hint = None
    guided_decoding_backend: Hint = None
    return_tokens_as_token_ids: Hint = None

    # Programs that load models themselves: Ollama and LM Studio.
    keep_alive: Hint = None
    num_ctx: Hint = None
    ttl: Hint = None
    draft_model: Hint = None

    # Services that forward requests, such as OpenRouter.
    provider: Hint = None
    transforms: Hint = None
    models: Hint = None
    route: Hint = None
    usage: Hint = None


class CompatibleFields(GenerationFields, Hints):
    """Parameters of the generation, also under the names of other servers."""

    response_format: ResponseFormat | None = None
    json_schema: JsonSchema | None = None
    """llama.cpp's name for a ``response_format`` with this schema."""
    grammar: Annotated[GbnfGrammar | None, EMPTY_MEANS_NONE] = None
    """A format of the answer as a grammar in GBNF, llama.cpp's grammar format."""
    structured_outputs: StructuredOutputs | None = None
    """vLLM's name for ``response_format``."""
    guided_json: SchemaOrText | None = None
    """The name of ``structured_outputs.json`` in older versions of vLLM. The next three are older names, too."""
    guided_regex: Pattern | None = None
    guided_choice: ChoiceTexts | None = None
    guided_grammar: Pattern | None = None
    max_completion_tokens: TokenLimit | None = None
    """The newer name of ``max_tokens``, which it overrides."""
    n_predict: TokenLimit | None = None
    """llama.cpp's name for ``max_tokens``."""
    repeat_penalty: RepetitionPenalty | None = None
    """llama.cpp's name for ``repetition_penalty``."""
    dry_multiplier: Annotated[float, Field(ge=0, le=100)] | None = None
    """DRY and XTC, two of llama.cpp's samplers; other engines refuse them unless they are turned off (0)."""
    dry_base: Annotated[float, Field(ge=1, le=100)] | None = None
    dry_allowed_length: Annotated[int, Field(ge=0), WHOLE] | None = None
    dry_penalty_last_n: Annotated[int, Field(ge=-1), WHOLE] | None = None
    dry_sequence_breakers: Breakers | None = None
    xtc_probability: Probability | None = None
    xtc_threshold: Probability | None = None
    steer: Steerings | None = None
    """An extension: vectors that are added to the residual stream of this request. Only callers on the server's machine
    may send them."""
    share_prefix: bool | None = None
    """An extension: whether requests of all callers may continue the cached prompt and answer of this request, such as
    a system prompt. Only callers on the server's machine may set it."""

    # Not supported; only values without effect are valid.
    typical_p: Annotated[Any, Neutral("locally typical samplers", (1,))] = None
    dynatemp_range: Annotated[Any, Neutral("dynamic temperatures", (0,))] = None
    mirostat: Annotated[Any, Neutral("Mirostat samplers", (0,))] = None
    tfs_z: Annotated[Any, Neutral("tail-free samplers", (1,))] = None
    top_a: Annotated[Any, Neutral("top-a samplers", (0,))] = None
    top_n_sigma: Annotated[Any, Neutral("top-n-sigma samplers", (-1, 0))] = None
    n_discard: Annotated[Any, Neutral("discarded tokens", (0,))] = None
    min_keep: Annotated[Any, Neutral("minimum numbers of candidates", (0,))] = None
    n_probs: Annotated[Any, Neutral("probabilities (send logprobs and top_logprobs)", (0,))] = None
    post_sampling_probs: Annotated[
        Any, Neutral("probabilities after sampling (send the request to /completion)", (False,))
    ] = None
    lora: Annotated[Any, Neutral("adapters in requests", ([],))] = None
    skip_special_tokens: Annotated[Any, Neutral("special tokens in answers", (True,))] = None
    spaces_between_special_tokens: Annotated[Any, Neutral("special tokens in answers", (True, False))] = None
    include_stop_str_in_output: Annotated[Any, Neutral("stop strings in answers", (False,))] = None
    detokenize: Annotated[Any, Neutral("answers without text", (True,))] = None
    best_of: Annotated[Any, Neutral("answers that are selected from several ones", (1,))] = None
    use_beam_search: Annotated[Any, Neutral("beam searches", (False,))] = None
    length_penalty: Annotated[Any, Neutral("length penalties", (1,))] = None
    early_stopping: Annotated[Any, Neutral("beam searches", (False,))] = None
    bad_words: Annotated[Any, Neutral("excluded words (send logit_bias)", ([],))] = None
    allowed_token_ids: Annotated[Any, Neutral("lists of allowed tokens", ([],))] = None
    stop_token_ids: Annotated[Any, Neutral("stop tokens (send stop)", ([],))] = None
    prompt_logprobs: Annotated[Any, Neutral("scores of a prompt (send echo to /v1/completions)", (False,))] = None
    truncate_prompt_tokens: Annotated[Any, Neutral("truncated prompts", (-1,))] = None
    logits_processors: Annotated[Any, Neutral("logits processors", ([],))] = None
    vllm_xargs: Annotated[Any, Neutral("arguments of vLLM's plugins", ({},))] = None
    repetition_detection: Annotated[Any, Neutral("answers that end when they repeat themselves")] = None
    adaptive_target: Annotated[Any, Neutral("adaptive-p samplers", (-1,))] = None
    mm_processor_kwargs: Annotated[Any, Neutral("inputs other than text", ({},))] = None
    plugins: Annotated[Any, Neutral("plugins", ([],))] = None
    safe_prompt: Annotated[Any, Neutral("prompts of a service", (False,))] = None
    guided_whitespace_pattern: Annotated[Any, Neutral("patterns of whitespace")] = None
    reasoning_format: Annotated[Any, Neutral("other reasoning formats", ("auto", "deepseek"))] = None

    def ignored(self) -> Iterator[str]:
        given = self.model_fields_set
        yield from (name for name in Hints.model_fields if name in given and getattr(self, name) is not None)
        yield from super().ignored()

    @property
    def format(self) -> tuple[str, AnyFormat | None]:
        """The name under which the request gives the required format of the answer, and this format."""
        value: Any
        name, value = next(iter(self._given("response_format").items()), ("response_format", self.response_format))
        if name == "json_schema":
            value = schema_format(value)
        elif name == "grammar":
            value = GrammarFormat.model_construct(type="grammar", grammar=value, syntax="gbnf")
        elif name.startswith("guided_"):
            value = StructuredOutputs.model_validate({name.removeprefix("guided_"): value})
        return name, value.format if isinstance(value, StructuredOutputs) else value

    def setting(self, name: str) -> Any:
        """Return the value of a parameter, which the request may give under any of its names, or its default."""
        return next(iter(self._given(name).values()), getattr(self, name))

    def _given(self, name: str) -> dict[str, Any]:
        """Return the values of a parameter by the name under which they are given."""
        given = {}
        for each in (name, *NAMES[name]):
            # Any text is not a format.
            if each in self.model_fields_set and not isinstance(value := getattr(self, each), TextFormat | None):
                given[each] = value
        if "max_completion_tokens" in given:
            given.pop("max_tokens", None)
        return given

    @model_validator(mode="after")
    def _check_parameters(self) -> Self:
        asked: bool | int | None = getattr(self, "logprobs", None)
        if self.logprob_tokens and (asked is None or asked is False):
            raise ValueError("logprob_tokens requires logprobs")
        for name in NAMES:
            (first, value), *others = self._given(name).items() or [(name, None)]
            for other, differing in others:
                if name == "response_format" or differing != value:
                    raise ValueError(f"{first} and {other} are two names of one parameter; send only one of them")
        most = self.setting("max_tokens")
        if self.min_tokens and most is not None and self.min_tokens > most:
            raise ValueError(f"min_tokens is {self.min_tokens}, and max_tokens is {most}; send a larger max_tokens")
        return self


# Answers


class AnswerHead(BaseModel):
    """The beginning of whole answers and chunks in the chat and in the completions format."""

    id: str
    object: str
    created: int
    """Unix time, seconds."""
    model: str
    system_fingerprint: str


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
    answer. ``peak_memory_gb`` is also null before the end of an answer.
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
