"""Requests to an engine, and the vectors and scores it returns: frozen values without MLX, HTTP or a loop.

All times are seconds of ``time.perf_counter``, the engine's one clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from lmx_lab.values.encoding import EncodeReport, InputType, RerankMethod, Vectors


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
