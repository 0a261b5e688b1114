"""Define the requests to an engine, and the vectors and scores that it returns, as frozen values.

All times are seconds; points in time are those of ``time.perf_counter``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from lmx_lab.values.outputs import EncodeReport, InputType, RerankMethod, Vectors
from lmx_lab.values.steering import SteeringVector
from lmx_lab.values.tracing import TraceWork

MIN_GAIN_TOKENS = 32
"""Minimum number of tokens by which a state must exceed those on disk to be saved, and those in memory to be read.
Computing fewer tokens takes about as long as reading the file."""
SHARED = "*"
"""The scope of prefixes that all callers may use."""


@dataclass(frozen=True, kw_only=True)
class Caller:
    """Who sent a request, and how it is treated."""

    local: bool = False
    """Whether the caller is on this machine, so that it may name models by their paths, steer, and see paths."""
    client: str | None = None
    """Address of the client, among which slots are shared fairly; None for this process."""
    request_id: str | None = None
    """Id of the request, for logs and records."""
    own: bool | None = False
    """Whether the request is one of the lab's own notebook; None if it must not be recorded."""
    internal: bool = False
    """Whether the request is a step of other work, such as scoring the tokens of an answer. It is not shown among the
    requests of the notebook."""
    batch: bool = False
    """See ``Record.batch``."""
    patient: bool = False
    """Whether to wait if the queue is full, because the request is part of one that was accepted."""

    @property
    def scope(self) -> str:
        """Text that all requests of one caller have in common. All programs on this machine are one caller, and other
        callers are distinguished by their addresses.
        """
        return "" if self.local or self.client is None else f"client {self.client}"


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any]
    """JSON schema of its arguments, which are an object."""
    strict: bool = True
    """Whether to refuse a schema of which a part cannot be enforced; otherwise that part is left out."""


@dataclass(frozen=True, kw_only=True)
class ToolUse:
    """The tools that the model may call, and whether it must call one."""

    tools: tuple[Tool, ...]
    forced: bool = False
    """Whether the answer must consist of tool calls only."""
    only: str | None = None
    """Name of the only tool that may be called; it is called exactly once. The prompt still describes all tools."""
    parallel: bool = True
    """Whether an answer may contain several calls."""


@dataclass(frozen=True, kw_only=True)
class ChatPrompt:
    """Messages of the chat format, for the model's own chat template.

    The ``arguments`` of tool calls in the messages are objects, and not JSON strings as in the chat format; a text is
    that of a call that was cut off.
    """

    messages: tuple[Mapping[str, Any], ...]
    tools: ToolUse | None = None
    template_options: Mapping[str, Any] = field(default_factory=dict)
    """Variables for the template, such as ``enable_thinking`` or ``reasoning_effort``."""
    continues: bool = False
    """Whether the answer continues the last message, which is one of the assistant without calls."""


@dataclass(frozen=True, kw_only=True)
class TokenPrompt:
    """A prompt of token ids, which are not changed."""

    tokens: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class TextPrompt:
    """A prompt of plain text, to which no chat template is applied."""

    text: str
    special: bool = True
    """Whether the tokenizer adds its special tokens, such as one that begins every text."""


@dataclass(frozen=True, kw_only=True)
class InfillPrompt:
    """A text with a gap, which the model fills (fill-in-the-middle)."""

    prefix: str
    """The text before the gap."""
    suffix: str
    """The text after the gap."""


Prompt = ChatPrompt | TextPrompt | TokenPrompt | InfillPrompt


@dataclass(frozen=True, kw_only=True)
class AnswerStart:
    """The first tokens of an answer, which are not generated, and the tokens of the prompt before them."""

    prompt: tuple[int, ...]
    """Token ids of the rendered prompt. The prompt of the request is not rendered again, but still determines how the
    answer is divided into reasoning, text and tool calls."""
    answer: tuple[int, ...] = ()
    """Token ids of the answer up to the position where it is continued."""
    token: int | str | None = None
    """The token at this position: an id, or a text of exactly one token; None generates it."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is sampled.

    First the penalties and the bias change the logits, then ``top_p``, ``min_p`` and ``top_k`` remove tokens, then the
    temperature is applied to the rest.
    """

    temperature: float = 0.7
    """0 always takes the most likely token."""
    top_p: float = 1.0
    top_k: int = 0
    """0 removes no tokens; neither do values from the size of the vocabulary upward."""
    min_p: float = 0.0
    """Tokens are removed if their probability is less than this fraction of that of the most likely token."""
    repetition_penalty: float = 1.0
    """Divides positive logits of tokens in the output so far, and multiplies negative ones (arXiv 1909.05858)."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens in the output so far."""
    frequency_penalty: float = 0.0
    """Subtracted from the logit of a token once for each occurrence in the output so far."""
    repeat_last_n: int = -1
    """Number of tokens at the end of the output that the three penalties count; -1 counts all, and 0 turns them off."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs of a token id and the number that is added to its logit."""
    dry_multiplier: float = 0.0
    """Strength of the DRY penalty, which subtracts ``multiplier * base ** (n - allowed_length)`` from the logit of a
    token that would continue a repetition of ``n`` tokens of prompt and output. 0 turns it off."""
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    """Repetitions of fewer tokens are not penalized."""
    dry_penalty_last_n: int = -1
    """Number of last tokens in which repetitions are found; -1 means all."""
    dry_sequence_breakers: tuple[str, ...] | None = None
    """Texts at which a repetition ends; None takes llama.cpp's: a newline, a colon, a quote and an asterisk."""
    xtc_probability: float = 0.0
    """Probability with which XTC removes, at a position, all tokens above ``xtc_threshold`` except the least likely of
    them. 0 turns it off."""
    xtc_threshold: float = 0.1
    """Above 0.5 it has no effect."""
    seed: int | None = None
    """Any integer. With the same seed, prompt and parameters, the tokens are the same, regardless of other requests."""

    @property
    def has_penalties(self) -> bool:
        """Whether one of the three penalties changes the logits."""
        penalties = (self.repetition_penalty - 1, self.presence_penalty, self.frequency_penalty)
        return self.repeat_last_n != 0 and any(penalties)


@dataclass(frozen=True, kw_only=True)
class AnswerFormat:
    """The format of the whole answer, except reasoning. It is enforced at each token."""

    kind: Literal["json_schema", "regex", "lark", "gbnf"]
    text: str
    """The schema as JSON (draft 2020-12), the regular expression (Rust's syntax), or the grammar (Lark, as llguidance
    reads it, or llama.cpp's GBNF)."""
    strict: bool = True
    """Whether to refuse a schema of which a part cannot be enforced; otherwise that part is left out."""


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """A request for the continuation of a prompt."""

    prompt: Prompt
    start: AnswerStart | None = None
    """How the answer begins. Its tokens count against ``max_tokens``, and are the first part of the answer."""
    model: str | None = None
    """Id of the model; None takes any loaded model."""
    sampling: Sampling = Sampling()
    max_tokens: int = 4096
    """Maximum number of tokens; the context of the model may allow fewer. With 0 the prompt is only checked or
    scored."""
    stop: tuple[str, ...] = ()
    """The text ends before the first of these strings."""
    answer_format: AnswerFormat | None = None
    steer: tuple[SteeringVector, ...] = ()
    """Vectors that are added to the residual stream of this request."""
    prediction: str = ""
    """A text that the answer is likely to repeat. MLX drafts tokens from it. It does not change the answer."""
    thinking_budget: int | None = None
    """Maximum number of tokens of reasoning, after which the end of the reasoning is forced; None sets no limit."""
    ignore_eos: bool = False
    """Whether to generate ``max_tokens`` even if the model ends its text before."""
    min_tokens: int = 0
    """Number of tokens before which neither the end of the text nor a stop string ends the answer. A format of the
    answer still ends it."""
    top_logprobs: int | None = None
    """Number of alternatives to report for each token, in addition to its own log-probability; None reports neither."""
    logprob_tokens: tuple[int | str, ...] = ()
    """Tokens whose log-probability is reported at each position of the answer, with ``top_logprobs``: ids, or texts of
    one token each."""
    after_sampling: bool = False
    """Whether the reported log-probabilities are those with which tokens are sampled, after the temperature, top-p,
    min-p and top-k. An enforced format is not considered. The alternatives exclude tokens that are never sampled."""
    score_prompt: bool = False
    """Whether to report the log-probability of each prompt token, with ``top_logprobs`` alternatives."""
    score_from: int = 0
    """Position of the first prompt token whose score is needed; an engine may leave out those before it."""
    is_counted: bool = False
    """Whether the tokens of the prompt are only counted. They may then exceed the context length."""
    share_prefix: bool = False
    """Whether requests of all callers may continue the cached prompt and answer."""
    timeout_s: float | None = None
    """Time limit from arrival to the last token; None takes ``Settings.request_timeout_s``."""
    caller: Caller = Caller()

    @property
    def tools(self) -> ToolUse | None:
        """The tools that the model may call; None if there are none."""
        return self.prompt.tools if isinstance(self.prompt, ChatPrompt) else None

    @property
    def scope(self) -> str:
        """Whose cached prefixes it may use, besides those in ``SHARED``, and add to."""
        return SHARED if self.share_prefix else self.caller.scope


@dataclass(frozen=True, kw_only=True)
class TraceRequest:
    """A request to compute a text, and to return internal values of the model."""

    prompt: Prompt | None = None
    """The text; None for ``HookNames``, which needs none."""
    clean: Prompt | None = None
    """The text from which ``Patching`` takes values."""
    work: TraceWork
    model: str | None = None
    """Id of the model; None takes any loaded model."""
    timeout_s: float | None = None
    """Time limit from arrival to the result; None takes ``Settings.request_timeout_s``."""
    caller: Caller = Caller()


@dataclass(frozen=True, kw_only=True)
class EmbeddingRequest:
    """A request for the embedding vectors of texts."""

    inputs: tuple[str | Sequence[int], ...]
    """Texts, or token ids of texts, which are not changed."""
    model: str | None = None
    """Id of an embedding model; None takes the pinned one or, without one, the main model."""
    dimensions: int | None = None
    """Number of leading components to keep, normalized to length 1; None keeps all."""
    input_type: InputType | None = None
    """Selects the prompt from the model's files that is put before each text; None takes the model's default, if
    any."""
    truncate: bool = False
    """Whether to truncate texts that are too long for the model, instead of refusing them."""
    timeout_s: float | None = None
    """Time limit from arrival to the last vector; None takes ``Settings.request_timeout_s``."""
    caller: Caller = Caller()


@dataclass(frozen=True, kw_only=True, eq=False)
class Embeddings:
    """The result of an ``EmbeddingRequest``."""

    vectors: Vectors
    """One row for each input, in the order of the inputs."""
    report: EncodeReport


@dataclass(frozen=True, kw_only=True)
class RerankRequest:
    """A request to rank documents by their relevance to a query."""

    query: str
    documents: tuple[str, ...]
    model: str | None = None
    """Id of a model; None takes a reranker or, without one, an embedding model, and pinned models first."""
    truncate: bool = False
    """Whether to truncate documents that are too long for the model, instead of refusing them."""
    max_document_tokens: int | None = None
    """Number of tokens to which documents are truncated; if it is set, ``truncate`` applies too."""
    raw_scores: bool = False
    """Whether to return the scores of the model's head without the activation that its files name."""
    timeout_s: float | None = None
    caller: Caller = Caller()


@dataclass(frozen=True, kw_only=True, eq=False)
class Ranking:
    """The result of a ``RerankRequest``."""

    scores: Vectors
    """The relevance of each document, in the order of the documents; larger is more relevant."""
    method: RerankMethod
    report: EncodeReport

    def order(self, top_n: int | None = None) -> list[int]:
        """Return the indices of the documents in descending order of relevance; equal scores keep their order."""
        scores = self.scores.tolist()
        return sorted(range(len(scores)), key=lambda index: -scores[index])[:top_n]
