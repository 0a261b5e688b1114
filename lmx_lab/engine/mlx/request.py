"""Track one answer of the MLX engine from its acceptance to its report."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

import numpy as np

from lmx_lab.engine.admission import Permit
from lmx_lab.engine.grammar.mask import Constraint
from lmx_lab.engine.mlx.disk_prefixes import PrefixRead
from lmx_lab.engine.mlx.model import LoadedModel
from lmx_lab.engine.mlx.sampling import Processor, Sampler
from lmx_lab.engine.mlx.speculative import Drafter
from lmx_lab.engine.mlx.steering import RequestSteering
from lmx_lab.engine.prefix_files import Tokens
from lmx_lab.engine.requests import GenerationRequest
from lmx_lab.engine.stream import Mailbox
from lmx_lab.engine.text.channels import ChannelFormat
from lmx_lab.engine.text.splitter import TextSplitter, read_start
from lmx_lab.values.outputs import Delta, FinishReason, GenerationReport, TokenLogprob


@dataclass(kw_only=True, eq=False)
class MlxGeneration:
    """The request, its state, and when it reached each phase. Belongs to the engine thread once it is submitted.

    Times are seconds of ``time.perf_counter``.
    """

    request: GenerationRequest
    prompt: list[int]
    """Tokens of the prompt, followed by those of ``start``."""
    start: list[int] = field(default_factory=list)
    """Tokens with which the answer begins."""
    start_delta: Delta | None = None
    """The beginning of the answer; None if all tokens of the answer are generated."""
    start_finish: FinishReason | None = None
    """Set if the answer ends with ``start``."""
    mailbox: Mailbox
    permit: Permit
    model: weakref.ref[LoadedModel]
    """A weak reference, so that an object that refers to an ended request does not keep the weights in memory."""
    arrived_at: float
    timeout_s: float
    choice: int = 0
    """Index of the answer among those to the same request."""
    named_tokens: tuple[int, ...] = ()
    """Ids of the request's ``logprob_tokens``."""
    channel_format: ChannelFormat | None = None
    constraint: Constraint | None = None
    steering: RequestSteering | None = None
    """The vectors that are added to its residual stream; None if there are none."""
    admitted_at: float = 0.0
    decoding_at: float = 0.0
    first_token_at: float = 0.0
    cached_tokens: int = 0
    disk_cached_tokens: int = 0
    """Cached tokens whose state this request, or one that waited with it, read from disk."""
    disk_read: PrefixRead | None = None
    """The state for which the request waits or waited; None until that is decided."""
    computed_tokens: int = 0
    """Number of prompt tokens that have been computed, without cached ones."""
    output_tokens: int = 0
    is_decoding: bool = False
    """Whether all its tokens have been computed, so that each step generates a token."""
    peak_memory_bytes: int = 0
    drafter: Drafter | None = None
    """Drafts tokens of this answer; None if it must not use drafts."""
    uid: int | None = None
    """Id of the request in mlx-lm's batch."""
    waits_for: MlxGeneration | None = None
    """A request whose prompt begins with the same tokens and is being computed."""
    is_waited_for: bool = False
    """Whether another request waits for this one's prompt."""
    tokens: list[int] = field(init=False)
    """The tokens to compute: the prompt, and after a pause also the answer so far."""
    uncomputed_tokens: int = field(init=False)
    """Number of tokens that are still to be computed before the next token is generated."""
    key: Tokens = field(init=False)
    """``tokens`` as the prefix cache compares them."""
    sampler: Sampler | None = None
    """Created when the request first gets a slot, because it may have a random state."""
    processors: list[Processor] | None = None
    """The functions that change the logits, which count the tokens of the answer. Created with the sampler."""
    model_id: str = field(init=False)
    max_tokens: int = field(init=False)
    """Maximum length of the answer: the requested one, or less if the context is too short."""
    splitter: TextSplitter[TokenLogprob] = field(init=False)

    def __post_init__(self) -> None:
        model = self.model()
        assert model is not None
        self.set_tokens(self.prompt)
        self.model_id = model.entry.id
        left = self.request.max_tokens - len(self.start)
        self.max_tokens = min(left, (model.context_length or 2**31) - len(self.prompt))
        self.splitter = TextSplitter(
            model.text.decode, self.request.stop, self.channel_format, min_tokens=self.request.min_tokens
        )

    def read_start(self) -> None:
        """Read the tokens with which the answer begins. Takes about 20 microseconds for each of them.

        Raises:
            InvalidRequestError: the format of the answer does not allow them.
        """
        if not self.start:
            return
        model = self.model()
        assert model is not None
        if self.constraint is not None:
            self.constraint.begin(self.start)
        ends = not self.request.ignore_eos and self.start[-1] in model.end_tokens(self.request)
        is_complete = ends or (self.constraint is not None and self.constraint.complete)
        limit: FinishReason | None = None if self.max_tokens else "length"
        self.start_delta, self.start_finish = read_start(
            self.splitter, self.start, ids=self.start, finish="stop" if is_complete else limit
        )

    def set_tokens(self, tokens: list[int]) -> None:
        """Set the tokens to compute."""
        self.tokens, self.uncomputed_tokens = tokens, len(tokens)
        self.key = np.asarray(tokens, dtype=np.int32)

    @property
    def variant(self) -> str:
        """The property, in addition to the tokens, that the KV cache depends on; see ``PrefixCache``."""
        return self.steering.key if self.steering is not None else ""

    @property
    def cached_length(self) -> int:
        """Number of tokens in its KV cache."""
        return len(self.prompt) + self.output_tokens if self.is_decoding else len(self.tokens) - self.uncomputed_tokens

    @property
    def length(self) -> int:
        """Number of tokens of the prompt and of an answer of maximum length."""
        return len(self.prompt) + self.max_tokens

    def report(self, reason: FinishReason, now: float) -> GenerationReport:
        """Return the report of the generation, which ends now."""
        decoding_at = self.decoding_at or now
        return GenerationReport(
            model=self.model_id,
            finish_reason=reason,
            prompt_tokens=len(self.prompt),
            cached_tokens=self.cached_tokens,
            disk_cached_tokens=self.disk_cached_tokens,
            output_tokens=self.output_tokens,
            reasoning_tokens=self.splitter.reasoning_tokens,
            queue_s=self.admitted_at - self.arrived_at,
            prefill_s=decoding_at - self.admitted_at,
            ttft_s=(self.first_token_at or now) - self.arrived_at,
            decode_s=now - decoding_at,
            peak_memory_bytes=self.peak_memory_bytes,
            stop_sequence=self.splitter.stop_string,
            drafted_tokens=self.drafter.drafted if self.drafter is not None else 0,
            accepted_tokens=self.drafter.accepted if self.drafter is not None else 0,
        )
