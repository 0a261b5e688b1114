"""The interface between the model manager and each engine.

An engine has at most one *main* model of any kind, and *pinned* encoders in addition. It loads, computes and unloads;
``engine.manager`` decides which model is loaded when, and what happens if that fails. The tests in
``tests/engine/contract`` check every engine against this interface; ``Capabilities`` and the table in
``docs/server.md`` describe where engines differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from lmx_lab.engine.admission import AdmissionControl, Permit
from lmx_lab.engine.requests import (
    EmbeddingRequest,
    Embeddings,
    GenerationRequest,
    Ranking,
    RerankRequest,
    TraceRequest,
)
from lmx_lab.engine.scheduler import Turns
from lmx_lab.engine.stream import Answer, Pending
from lmx_lab.errors import LabError
from lmx_lab.values.engine import EngineSnapshot
from lmx_lab.values.models import Kind, LoadReport, LoadSpec, ModelEntry
from lmx_lab.values.tracing import Trace


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """Optional features of an engine. Requests that need others are refused with ``InvalidRequestError``."""

    thinking_budget: bool
    """Supports ``GenerationRequest.thinking_budget``."""
    logprobs_with_own_tools: bool
    """Reports log-probabilities of an answer that may call tools in the model's own format."""
    input_types: bool
    """Supports ``EmbeddingRequest.input_type`` for models whose files have prompts for it."""
    steering: bool
    """Supports ``GenerationRequest.steer``."""


@dataclass(frozen=True, kw_only=True)
class EngineHost:
    """What the manager passes to each engine. The functions may be called from any thread."""

    used_by_others: Callable[[], int] = lambda: 0
    """Returns how many bytes of the memory limit other engines use."""
    lost_model: Callable[[bool], None] = lambda _: None
    """Called after a model left memory without ``unload`` or ``unpin``: it ran out of memory, or its process or thread
    ended. The snapshot and ``failure`` are up to date by then. The argument is True if a single request was the
    cause; the main model should then be loaded again."""
    turns: Turns = field(default_factory=Turns)
    """When a client without a slot gets a slot of another client."""


class InferenceEngine(Protocol):
    """An engine. All methods may be called from any thread and any event loop, and several loops may use one engine.

    Errors are ``LabError`` values. Every accepted request ends exactly once, with a report or an error, even if the
    engine stops, unloads or dies. When a request ends, the engine releases its permit.
    """

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def fingerprint(self) -> str:
        """Name and version of the library that computes the model, such as ``mlx-0.32.4``."""

    @property
    def snapshot(self) -> EngineSnapshot:
        """The state as of the last step. Never blocks."""

    @property
    def alive(self) -> bool:
        """Whether the thread or process that computes is running."""

    @property
    def failure(self) -> LabError | None:
        """The error because of which the engine lost its main model without ``unload``; None if it did not."""

    def start(self) -> None:
        """Start, or start again after the engine died. Idempotent; blocks."""

    def stop(self) -> None:
        """End every request and release all memory. Idempotent; blocks until that is done."""

    # Models

    async def check(self, entry: ModelEntry, spec: LoadSpec, *, other_bytes: int = 0) -> None:
        """Check that a model can be loaded, before the current one is unloaded.

        Reads files on threads, and tries the model's tokenizer and chat template in processes with limits. Cancelling
        the caller ends the check; a thread that waits for a disk is abandoned.

        Args:
            other_bytes: Memory of the other models that are loaded at the same time.

        Raises:
            UnusableModelError: the engine cannot run this model, or not with these options.
            OutOfMemoryError: the model is larger than the rest of the memory limit.
        """

    async def load(self, entry: ModelEntry, spec: LoadSpec) -> LoadReport:
        """Load the main model. Called only while the engine has no main model, after ``check``.

        Cancelling this method or ``pin`` ends the load, and releases its memory and its processes.

        Raises:
            UnusableModelError, OutOfMemoryError: the engine has no main model, and the memory is released.
        """

    async def unload(self) -> int:
        """Drop the main model and return the bytes that this released; 0 if there is none."""

    async def pin(self, entry: ModelEntry, spec: LoadSpec) -> LoadReport:
        """Load an encoder in addition to the main model, in place of the pinned encoder of the same kind.

        Raises:
            UnusableModelError, OutOfMemoryError: nothing has changed.
        """

    async def unpin(self, kind: Kind) -> None:
        """Drop the pinned encoder of this kind, if there is one. Its requests end with an error."""

    # Requests

    async def end_requests(self, admission: AdmissionControl, error: LabError, *, queued_only: bool = False) -> None:
        """End the requests that hold permits of this admission control; with ``queued_only``, only the queued ones."""

    async def submit_all(
        self, entry: ModelEntry, request: GenerationRequest, permits: Sequence[Permit]
    ) -> list[Answer]:
        """Queue a request for one answer for each permit, all or none. Each answer has its own seed.

        Closing a stream cancels its generation in any phase: while it is queued, computes its prompt, or decodes.

        Args:
            entry: The main model, which answers.

        Raises:
            NotLoadedError: the model has been replaced, or is being unloaded.
            ContextLengthError: the prompt leaves no room in the model's context.
            InvalidRequestError: the prompt cannot be tokenized, a token id is not in the vocabulary, or the
                engine does not support the request (``capabilities``).
            OutOfMemoryError, EngineDeadError: the engine lost the model.
        """

    async def submit_embedding(
        self, entry: ModelEntry, request: EmbeddingRequest, permit: Permit
    ) -> Pending[Embeddings]:
        """Queue inputs to be embedded by the main or a pinned model.

        Raises:
            NotLoadedError: the model has been replaced, or is being unloaded.
            InvalidRequestError: an input is not valid text or has no tokens; ``dimensions`` exceeds those of the model.
            ContextLengthError: an input is longer than the model's context.
            QueueFullError: the texts of all requests together are too long.
        """

    async def submit_rerank(self, entry: ModelEntry, request: RerankRequest, permit: Permit) -> Pending[Ranking]:
        """Queue documents to be ranked by the main or a pinned model. Raises the same as ``submit_embedding``."""

    async def submit_trace(self, entry: ModelEntry, request: TraceRequest, permit: Permit) -> Pending[Trace]:
        """Queue a trace of the main model.

        Raises:
            NotLoadedError: the model has been replaced, or is being unloaded.
            ContextLengthError: the text is longer than the model's context.
            InvalidRequestError: the text cannot be tokenized, or the engine does not compute traces.
        """

    async def encode(self, entry: ModelEntry, request: GenerationRequest) -> list[int]:
        """Return the token ids of a request's prompt, which may be longer than the model's context.

        Args:
            entry: The main model.

        Raises:
            NotLoadedError: the model has been replaced, or is being unloaded.
            ContextLengthError: the prompt is so long that it is not tokenized.
            InvalidRequestError: the prompt cannot be tokenized.
        """

    async def render(self, entry: ModelEntry, request: GenerationRequest) -> str:
        """Return the text that the chat template of the main model makes of a chat prompt.

        Raises:
            NotLoadedError: the model has been replaced, or is being unloaded.
            InvalidRequestError: there is no template, or it refuses the messages or exceeds a limit.
        """

    async def decode(self, entry: ModelEntry, tokens: Sequence[int]) -> str:
        """Return the text of token ids as the tokenizer of the main model shows it.

        Args:
            entry: The main model. Another one may have been loaded since the caller looked it up, and has other tokens.

        Raises:
            NotLoadedError: the model has been replaced, or is being unloaded.
            InvalidRequestError: a token is not in the vocabulary.
        """

    async def token_bytes(self, entry: ModelEntry, tokens: Sequence[int]) -> list[bytes]:
        """Return the bytes that each token adds to a text; those of a special token are its name.

        Raises:
            NotLoadedError, InvalidRequestError: as ``decode``.
        """
