"""What the routes and the notebook's verbs share: texts become vectors, or scores, and the end is told once."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, TypeAlias, TypeVar

import numpy as np

from lmx_lab.broadcast import Feed
from lmx_lab.engine import EmbeddingRequest, Embeddings, Engine, Pending, Ranking, RerankRequest
from lmx_lab.errors import EngineError, LabError, NotLoadedError
from lmx_lab.server.loading import Event
from lmx_lab.server.naming import EMBEDDING, RERANK, Kinds, in_memory, loaded_id, not_loaded
from lmx_lab.server.swap import ModelSwap
from lmx_lab.values.encoding import EncodeReport, Vectors
from lmx_lab.weights import Catalog
from lmx_lab.wire.admin import RequestEvent

Task = Literal["embedding", "rerank"]
Outcome = Literal["stop", "cancelled", "error"]


class Reported(Protocol):
    @property
    def report(self) -> EncodeReport: ...


Request = TypeVar("Request", EmbeddingRequest, RerankRequest)
Result = TypeVar("Result", bound=Reported)
Submit: TypeAlias = Callable[[Request], Coroutine[Any, Any, Pending[Result]]]


@dataclass(frozen=True, kw_only=True)
class EncodeEnd:
    """How one request for vectors or scores ended, for metrics."""

    request_id: str
    """Empty for the notebook's own."""
    kind: Task
    model: str
    outcome: Outcome
    code: str | None = None
    """The error's."""
    report: EncodeReport | None = None
    """What it cost; None unless it ended well."""

    def event(self) -> RequestEvent:
        """The same, for those who watch."""
        report = self.report
        return RequestEvent(
            request_id=self.request_id,
            kind=self.kind,
            model=self.model,
            finish_reason=self.outcome,
            code=self.code,
            prompt_tokens=report.tokens if report else 0,
            completion_tokens=0,
            tokens_per_second=report.tokens / report.compute_s if report and report.compute_s > 0 else 0.0,
            ttft_ms=report.total_s * 1e3 if report else 0.0,
        )


EncodeObserver = Callable[[EncodeEnd], None]


class EncodingService:
    """Asks the engine, and tells exactly once for each request how it has ended.

    Args:
        swap: Loads what a request names; None refuses what is not loaded.
        observe: Called on the loop with every end, beside the ``RequestEvent`` in ``feed``.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        catalog: Catalog,
        feed: Feed[Event],
        swap: ModelSwap | None = None,
        observe: EncodeObserver | None = None,
    ) -> None:
        self._engine = engine
        self._catalog = catalog
        self._feed = feed
        self._swap = swap
        self._observe = observe

    async def embed(
        self, request: EmbeddingRequest, request_id: str | None = None, *, local: bool = False
    ) -> Embeddings:
        """One vector for each input. Cancelling gives the work up.

        Args:
            local: Asked by a program on this machine, which may name a loaded model by its path.

        Raises:
            NotLoadedError, ModelNotFoundError: the model it names is not loaded, or not there at all.
            InvalidRequestError: it is no embedding model; otherwise as ``Engine.embed``.
            EngineError: the model made something that is no number.
        """
        work = self._asked(request, self._engine.submit_embedding, EMBEDDING, local=local)
        return await self._told("embedding", request_id, self._meant(request, EMBEDDING), work, lambda it: it.vectors)

    async def rerank(self, request: RerankRequest, request_id: str | None = None, *, local: bool = False) -> Ranking:
        """A score for each document. Cancelling gives the work up.

        Raises:
            LabError: as ``embed``.
        """
        work = self._asked(request, self._engine.submit_rerank, RERANK, local=local)
        return await self._told("rerank", request_id, self._meant(request, RERANK), work, lambda it: it.scores)

    def _meant(self, request: EmbeddingRequest | RerankRequest, kinds: Kinds) -> str:
        """The id of the model in memory that is to answer; the name as it was asked for may be anything."""
        fitting = [entry.id for kind in kinds for entry in in_memory(self._engine.snapshot) if kind in entry.kinds]
        return next((name for name in fitting if request.model in (None, name)), "")

    async def _told(
        self,
        kind: Task,
        request_id: str | None,
        model: str,
        work: Coroutine[Any, Any, Result],
        values: Callable[[Result], Vectors],
    ) -> Result:
        """The result, whose values are numbers; however it ends, that is told."""
        told = functools.partial(self._ended, request_id=request_id or "", kind=kind, model=model)
        try:
            result = await work
            _check_numbers(values(result), result.report)
        except LabError as exc:
            told(outcome="error", code=exc.code)
            raise
        except asyncio.CancelledError:
            told(outcome="cancelled")
            raise
        except Exception:
            told(outcome="error", code=LabError.code)
            raise
        told(outcome="stop", model=result.report.model, report=result.report)
        return result

    def _ended(self, **how: Any) -> None:
        end = EncodeEnd(**how)
        self._feed.publish(end.event())
        if self._observe is not None:
            self._observe(end)

    async def _asked(self, request: Request, submit: Submit[Request, Result], kinds: Kinds, *, local: bool) -> Result:
        request = replace(request, model=loaded_id(request.model, self._engine.snapshot, local=local))
        try:
            if self._swap is None or self._pinned(request.model, kinds):
                pending = await submit(request)
            else:
                pending = await self._swap.submit(request, submit, kinds=kinds)
        except NotLoadedError as exc:
            found = await self._catalog.alisting()
            raise not_loaded(exc, request.model, found.entries, self._engine.snapshot, kinds=kinds) from exc
        return await pending.result()

    def _pinned(self, name: str | None, kinds: Kinds) -> bool:
        """Whether a model that always is in memory answers."""
        entries = [pinned.entry for pinned in self._engine.snapshot.pinned]
        return any(entry.id == name if name is not None else entry.answers(kinds) for entry in entries)


def _check_numbers(values: Vectors, report: EncodeReport) -> None:
    """
    Raises:
        EngineError: JSON has no word for what the model made.
    """
    if not np.isfinite(values).all():
        raise EngineError(
            f"{report.model} computed values that are no numbers (NaN or infinity): its weights are damaged, or too "
            "large for their type; fetch it again, or start with dtype float32"
        )
