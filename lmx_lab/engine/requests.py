"""What goes into the engine and what comes out: frozen values without MLX, HTTP or a loop.

All times are seconds of ``time.perf_counter``, the engine's one clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lmx_lab.engine.cpu_blas import BlasReport
from lmx_lab.weights import ModelEntry

FinishReason = Literal["stop", "length", "tool_calls"]
Vectors = NDArray[np.float32]
InputType = Literal["query", "document"]
RerankMethod = Literal["cross-encoder", "decoder", "cosine"]


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A function that the model may ask for."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any]
    """JSON schema of the object of its arguments."""


@dataclass(frozen=True, kw_only=True)
class ToolUse:
    """What the model may call, and whether it must."""

    tools: tuple[Tool, ...]
    forced: bool = False
    """The answer is calls and nothing else."""
    only: str | None = None
    """The one tool that may be called, and is called once; the model is told of all."""
    parallel: bool = True
    """Several calls in one answer."""


@dataclass(frozen=True, kw_only=True)
class ChatPrompt:
    """Messages of the chat format, for the model's own chat template.

    The ``arguments`` of the tool calls in them are objects, not texts.
    """

    messages: tuple[Mapping[str, Any], ...]
    tools: ToolUse | None = None
    template_options: Mapping[str, Any] = field(default_factory=dict)
    """Variables for the template, such as ``enable_thinking`` or ``reasoning_effort``."""


@dataclass(frozen=True, kw_only=True)
class TokenPrompt:
    """Token ids, taken as they are."""

    tokens: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class TextPrompt:
    """Plain text, without a chat template."""

    text: str


Prompt = ChatPrompt | TextPrompt | TokenPrompt


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is drawn.

    First the penalties and the bias change the logits, then ``top_p``, ``min_p`` and ``top_k`` cut, then the
    temperature spreads what is left.
    """

    temperature: float = 0.7
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 cuts nothing, like anything from the vocabulary's size up."""
    min_p: float = 0.0
    """Tokens less likely than this share of the likeliest one's probability are cut."""
    repetition_penalty: float = 1.0
    """Divides the positive logits of tokens in the output so far, multiplies the negative ones (arXiv 1909.05858)."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of every token in the output so far."""
    frequency_penalty: float = 0.0
    """Subtracted once for each time the token is in the output so far."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Token id and what is added to its logit."""
    seed: int | None = None
    """Any integer. The same seed, prompt and parameters draw the same tokens, whatever else is in the batch."""


@dataclass(frozen=True, kw_only=True)
class AnswerFormat:
    """What the whole answer has to be, thoughts aside. It is enforced token by token."""

    kind: Literal["json_schema", "regex", "lark"]
    text: str
    """The schema as JSON (draft 2020-12), the regular expression (Rust's syntax), or the grammar (Lark, as llguidance
    reads it)."""


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    prompt: Prompt
    model: str | None = None
    """The id that must be loaded; None takes whatever is."""
    sampling: Sampling = Sampling()
    max_tokens: int = 4096
    """Upper bound; the room left in the model's context may be smaller. 0 checks the prompt, or scores it."""
    stop: tuple[str, ...] = ()
    """Strings that end the text before them."""
    answer_format: AnswerFormat | None = None
    thinking_budget: int | None = None
    """After so many tokens of thoughts the model is made to answer; None lets it think."""
    ignore_eos: bool = False
    """Go on to ``max_tokens`` even if the model ends its text."""
    top_logprobs: int | None = None
    """How many alternatives to report for each token, beside the token itself; None reports nothing."""
    score_prompt: bool = False
    """Report the log-probability of every token of the prompt, with ``top_logprobs`` alternatives."""
    timeout_s: float | None = None
    """From arrival to the last token; None takes the engine's setting."""


@dataclass(frozen=True, kw_only=True)
class TokenLogprob:
    """One token and how likely the model held it, after penalties and bias, before temperature and cuts."""

    token: int
    text: str
    """What the token is; ``bytes:\\xe2\\x82`` where it is only a part of a character."""
    bytes: bytes
    """What it adds to the text: nothing, if it is a special token in an answer."""
    logprob: float | None
    """Natural logarithm; None for the first token of a prompt, which nothing precedes."""
    ends: bool = False
    """The model ended its text with this token."""
    top: tuple[TokenLogprob, ...] = ()
    """The likeliest tokens in this place, likeliest first; their own ``top`` is empty."""


@dataclass(frozen=True, kw_only=True)
class ToolCallDelta:
    """A piece of a tool call. The first piece of each has its id and its name."""

    index: int
    """Which call of the answer."""
    id: str | None = None
    name: str | None = None
    arguments: str = ""
    """All pieces joined are a JSON object, unless the answer was cut off."""


def merged_calls(pieces: Iterable[ToolCallDelta]) -> tuple[ToolCallDelta, ...]:
    """One piece for each call: its arguments joined, in the order in which the calls began."""
    calls: dict[int, list[ToolCallDelta]] = {}
    for piece in pieces:
        calls.setdefault(piece.index, []).append(piece)
    return tuple(
        ToolCallDelta(
            index=index,
            id=next((part.id for part in parts if part.id is not None), None),
            name=next((part.name for part in parts if part.name is not None), None),
            arguments="".join([part.arguments for part in parts]),
        )
        for index, parts in calls.items()
    )


@dataclass(frozen=True, kw_only=True)
class Delta:
    """A piece of an answer and the number of tokens that made it. It may show nothing: text can be held back."""

    text: str
    tokens: int
    logprobs: tuple[TokenLogprob, ...] = ()
    """Of the tokens whose text has gone out with this piece, and at the end of the token that ended the text."""
    reasoning: str = ""
    """Of the model's thoughts, which come before the text."""
    tool_calls: tuple[ToolCallDelta, ...] = ()

    @property
    def shows(self) -> bool:
        """Whether there is anything in it but a number of tokens."""
        return bool(self.text or self.reasoning or self.tool_calls or self.logprobs)


def joined(deltas: Sequence[Delta]) -> Delta:
    """All of them as one."""
    return Delta(
        text="".join([delta.text for delta in deltas]),
        tokens=sum([delta.tokens for delta in deltas]),
        logprobs=tuple([logprob for delta in deltas for logprob in delta.logprobs]),
        reasoning="".join([delta.reasoning for delta in deltas]),
        tool_calls=merged_calls([call for delta in deltas for call in delta.tool_calls]),
    )


@dataclass(frozen=True, kw_only=True)
class PromptProgress:
    """How far the prompt of a request that has a slot is computed, in tokens; cached ones count as done."""

    done: int
    total: int


@dataclass(frozen=True, kw_only=True)
class PromptScores:
    """The prompt's tokens, each with the log-probability that the model gave it."""

    tokens: tuple[TokenLogprob, ...]


@dataclass(frozen=True, kw_only=True)
class GenerationReport:
    """What one request cost. Feeds usage, timings, metrics and benchmarks.

    Decode is one forward pass per output token (the first one reads the last prompt token), so ``tokens_per_second``
    is ``output_tokens / decode_s``, also for a single token; prefill is every prompt token before that.
    """

    model: str
    finish_reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    reasoning_tokens: int = 0
    """Of the output, those of the thoughts, with the marker that ends them."""
    queue_s: float
    prefill_s: float
    ttft_s: float
    """Time to first token, from arrival."""
    decode_s: float
    peak_memory_bytes: int
    """The highest memory of the engine while the request ran, everything counted."""

    @property
    def total_s(self) -> float:
        return self.queue_s + self.prefill_s + self.decode_s

    @property
    def tokens_per_second(self) -> float:
        return self.output_tokens / self.decode_s if self.decode_s > 0 else 0.0

    @property
    def prompt_tokens_per_second(self) -> float:
        computed = self.prompt_tokens - self.cached_tokens
        return computed / self.prefill_s if self.prefill_s > 0 else 0.0


@dataclass(frozen=True, kw_only=True)
class EmbeddingRequest:
    inputs: tuple[str | tuple[int, ...], ...]
    """Texts, or the token ids of texts, which are taken as they are."""
    model: str | None = None
    """The id of an embedding model that must be in memory; None takes the pinned one, else the loaded one."""
    dimensions: int | None = None
    """Keep so many leading components and normalize again; None keeps all."""
    input_type: InputType | None = None
    """Which of the prompts in the model's files goes before each text; None takes the model's default, often none."""
    truncate: bool = False
    """Cut what is too long for the model, instead of refusing it."""
    timeout_s: float | None = None
    """From arrival to the last vector; None takes the engine's setting."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Embeddings:
    vectors: Vectors
    """One row for each input, in the order of the inputs."""
    report: EncodeReport


@dataclass(frozen=True, kw_only=True)
class RerankRequest:
    query: str
    documents: tuple[str, ...]
    model: str | None = None
    """The id of a model in memory; None takes a reranker, or else an embedding model, the pinned ones first."""
    truncate: bool = False
    """Cut documents that are too long for the model, instead of refusing them."""
    raw_scores: bool = False
    """Scores as the model's head has them, without the activation that its files name."""
    timeout_s: float | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Ranking:
    scores: Vectors
    """How relevant each document is, in the order of the documents; larger is better."""
    method: RerankMethod
    report: EncodeReport

    def order(self, top_n: int | None = None) -> list[int]:
        """The documents' indices, the most relevant first; of equals, the one that came first."""
        best_first = np.argsort(-self.scores, kind="stable")
        return [int(index) for index in best_first[:top_n]]


@dataclass(frozen=True, kw_only=True)
class EncodeReport:
    """What embedding or reranking one request's texts cost."""

    model: str
    texts: int
    """Texts computed; of a rerank by an embedding model the query is one of them."""
    tokens: int
    """Special tokens and prompts included, padding not."""
    queue_s: float
    """From arrival to the first computation, turning texts into tokens included."""
    compute_s: float
    """From there to the end; other requests may have been computed in between."""
    peak_memory_bytes: int

    @property
    def total_s(self) -> float:
        return self.queue_s + self.compute_s


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    model: str
    load_s: float
    memory_bytes: int
    """What the model takes in memory, measured."""


@dataclass(frozen=True, kw_only=True)
class PinnedModel:
    """An encoder that is kept in memory beside the loaded model."""

    entry: ModelEntry
    memory_bytes: int


EngineState = Literal["empty", "loading", "ready", "dead"]
UnloadCause = Literal["asked", "idle", "memory"]


@dataclass(frozen=True, kw_only=True)
class EngineSnapshot:
    """The engine as of its last step; replaced whole, so any thread may read it."""

    state: EngineState = "empty"
    entry: ModelEntry | None = None
    """The loaded model."""
    model_memory_bytes: int = 0
    context_length: int | None = None
    pinned: tuple[PinnedModel, ...] = ()
    active_requests: int = 0
    queued_requests: int = 0
    encode_requests: int = 0
    """Of both, those for embeddings and reranking."""
    output_tokens: int = 0
    """Since the engine started, like the next two."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that the prefix cache had; part of ``prompt_tokens``."""
    encoded_tokens: int = 0
    """Of texts that were embedded or scored."""
    prefix_cache_bytes: int = 0
    place_free_s: float = 1.0
    """In how long a running request is likely to end, and a place in the queue to be free."""
    unloaded_model: str | None = None
    """The model that was loaded before, while none is."""
    unload_cause: UnloadCause | None = None
    memory_used_bytes: int = 0
    memory_peak_bytes: int = 0
    memory_total_bytes: int = 0
    progress_at: float = 0.0
    """When the engine last came round, or a request got something."""
    blas: BlasReport | None = None
    """What multiplies matrices on a CPU; None until the engine has started."""

    @property
    def model(self) -> str | None:
        """The loaded model's id."""
        return self.entry.id if self.entry else None

    @property
    def resting_model(self) -> str | None:
        """That was unloaded for want of requests, and neither by somebody nor for lack of memory: it may come back."""
        return self.unloaded_model if self.model is None and self.unload_cause == "idle" else None

    def stalled(self, now: float, limit_s: float) -> bool:
        """Whether work waits and nothing has moved for longer than ``limit_s``."""
        return self.active_requests + self.queued_requests > 0 and now - self.progress_at > limit_s
