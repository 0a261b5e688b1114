"""What every engine does, whatever computes: the seam between the server and MLX, llama.cpp, or what comes next.

An engine holds one *main* model of any kind and *pinned* encoders beside it. ``tests/engine/contract`` holds every
implementation to what is written here; where they differ, ``Capabilities`` and the table in ``docs/server.md`` say so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from lmx_lab.engine.pending import Pending
from lmx_lab.engine.requests import EmbeddingRequest, Embeddings, GenerationRequest, Ranking, RerankRequest
from lmx_lab.engine.stream import TokenStream
from lmx_lab.values.engine import EngineSnapshot
from lmx_lab.values.models import Kind, LoadReport, ModelEntry

NOTHING_LOADED = "; no model is loaded"
"""How the message of a failed load ends where there was no model before."""


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What an engine does beyond what all do; a request for the rest is refused with ``InvalidRequestError``."""

    prompt_scores: bool
    """``GenerationRequest.score_prompt``."""
    thinking_budget: bool
    logprobs_with_own_tools: bool
    """Log-probabilities of an answer that may call tools in the model's own format."""
    input_types: bool
    """Prompts before texts to embed, ``EmbeddingRequest.input_type``, where the model's files have them."""


class InferenceEngine(Protocol):
    """All methods may be called on any thread and any event loop; several loops may use one engine at the same time.

    Errors are ``LabError`` values. Whatever was accepted ends exactly once, in a report or in an error, also when the
    engine stops, unloads, or dies.
    """

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def fingerprint(self) -> str:
        """What computes, and its version, such as ``mlx-0.32.4``."""

    @property
    def snapshot(self) -> EngineSnapshot:
        """Models, requests, tokens since the start, memory: the state as of the last step. Never blocks."""

    @property
    def used(self) -> bool:
        """Whether it has ever had a model."""

    @property
    def alive(self) -> bool:
        """Whether what computes is running."""

    def start(self) -> None:
        """Begin, or begin again after the engine died. Idempotent."""

    def stop(self) -> None:
        """End every request, give all memory back. Blocks until that is done; idempotent."""

    def check_fits(self, entry: ModelEntry) -> None:
        """Refuse what cannot be loaded, before anything is unloaded for it.

        Raises:
            UnusableModelError: this engine cannot run such a model.
            OutOfMemoryError: it is larger than what may be used.
        """

    async def load(self, entry: ModelEntry, *, finish_queued: bool = False) -> LoadReport:
        """Put ``entry`` in the place of the main model, after running requests have ended (``drain_s`` at most).

        Requests in the queue end with an error; with ``finish_queued`` they are served first, within the same time.
        Once begun it goes on, whether or not the caller still waits. If it fails, the model before is loaded again.

        Raises:
            UnusableModelError, OutOfMemoryError: see the message for what is loaded now.
        """

    async def pin(self, entry: ModelEntry) -> LoadReport:
        """Keep an embedding model or a reranker in memory beside the main model, until the engine stops.

        Raises:
            UnusableModelError, OutOfMemoryError: nothing has changed.
        """

    async def unpin(self, kind: Kind) -> None:
        """Keep the model of this kind beside the main one no more, if there is one."""

    async def unload(self, *, why: str = "the model is unloaded", finish_queued: bool = False) -> int:
        """Unload the main model after running requests have ended; returns the bytes freed, 0 when there was none.

        ``why`` is what requests are told that do not end in time.
        """

    async def quiesce(self, timeout_s: float) -> None:
        """Let running requests end, for at most ``timeout_s``; the rest, and those that wait, end with an error."""

    async def submit_all(self, request: GenerationRequest, choices: int) -> list[TokenStream]:
        """Accept a request for several answers, all or none; seeds differ by choice. See ``Engine.submit``.

        Closing a stream cancels its generation in any phase: waiting, in its prompt, or decoding.
        """

    async def submit_embedding(self, request: EmbeddingRequest) -> Pending[Embeddings]:
        """Accept inputs to be embedded. See ``Engine.submit_embedding``."""

    async def submit_rerank(self, request: RerankRequest) -> Pending[Ranking]:
        """Accept documents to be ranked. See ``Engine.submit_rerank``."""

    async def decode(self, tokens: Sequence[int]) -> str:
        """The text of token ids as the loaded model's tokenizer shows it.

        Raises:
            NotLoadedError: no model is loaded.
        """
