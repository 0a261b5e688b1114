"""What panels show and ask for: the seam between a panel and a lab, in this process or elsewhere."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from lmx_lab.wire.admin import LoadAnswer, ModelEvent, ModelRecords, RequestEvent, Sample


@dataclass(frozen=True, kw_only=True)
class ServerState:
    """The server as of now."""

    state: Literal["running", "lagging", "stopped", "unreachable"]
    """``lagging``: its loop has not come round for over a second."""
    place: str
    """Where it runs, in words: ``the kernel's loop``."""
    url: str
    lan_url: str | None = None
    proxy_url: str | None = None
    proxy_path: str | None = None
    """Where the notebook's own server passes requests on, for pages that it has sent."""
    model: str | None = None
    pinned: tuple[str, ...] = ()
    note: str = ""
    """What the reader should know now and can do about it: the remedy after a cell has blocked the loop, or how a
    stopped server is started again."""


@dataclass(frozen=True, kw_only=True)
class ChatStats:
    """What one answer has cost."""

    model: str
    finish_reason: str
    prompt_tokens: int
    output_tokens: int
    tokens_per_second: float
    ttft_ms: float


@dataclass(frozen=True, kw_only=True)
class ChatPiece:
    """A part of an answer, or what there is to say while there is none."""

    text: str = ""
    reasoning: str = ""
    tokens: int = 0
    remark: str = ""
    """Before the first token: ``queued``, or how far the prompt is computed."""
    stats: ChatStats | None = None
    """With the last piece."""


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """Documents in order of relevance."""

    order: Sequence[tuple[int, float]]
    """Index among the given documents, and score; the best first."""
    model: str
    method: str
    took_ms: float


class Source(Protocol):
    """A lab as panels need it. Coroutines run on the panels' own loop; the other methods on any thread, at once.

    Whatever fails, fails with a ``LabError``.
    """

    can_cancel_loads: bool

    def state(self) -> ServerState: ...

    def sample(self) -> Sample | None:
        """The figures of now; None while there are none."""

    async def models(self) -> ModelRecords: ...

    async def load(self, model: str) -> LoadAnswer:
        """By id, path or name on the hub; returns when it is loaded."""

    async def cancel_load(self, model: str) -> None:
        """Give up a load that has not reached the engine."""

    async def unload(self) -> float:
        """The GB (10^9 bytes) freed."""

    def progress(self) -> AsyncGenerator[ModelEvent | RequestEvent, None]:
        """Every load, unload and end of a request from now on, whoever asked; ends when the server stops."""

    def chat(self, request: Mapping[str, Any]) -> AsyncGenerator[ChatPiece, None]:
        """The answer to a body of the chat format, without ``stream``; closing the generator ends the generation."""

    async def rerank(self, query: str, documents: Sequence[str], *, top_n: int | None = None) -> Ranked: ...
