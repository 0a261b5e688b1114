"""The engine as the rest of the program sees it: one main model and pinned encoders, on MLX or on llama.cpp.

Each model runs on the engine for the format of its files. There is one main model of all: loading a model of the other
format unloads it first, and brings it back if that fails.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import Self

from lmx_lab.engine.contract import NOTHING_LOADED, InferenceEngine
from lmx_lab.engine.gguf import GgufEngine
from lmx_lab.engine.gguf.loads import Load
from lmx_lab.engine.mlx_engine import MlxEngine
from lmx_lab.engine.pending import Pending
from lmx_lab.engine.requests import (
    EmbeddingRequest,
    Embeddings,
    EngineSnapshot,
    GenerationRequest,
    LoadReport,
    Ranking,
    RerankRequest,
)
from lmx_lab.engine.stream import TokenStream
from lmx_lab.engine.wanted import EMBEDDERS, RERANKERS, fitting, refusal
from lmx_lab.errors import LabError, NotLoadedError
from lmx_lab.settings import Settings
from lmx_lab.weights import Format, Kind, ModelEntry
from lmx_lab.weights.files import check_files
from lmx_lab.weights.threads import in_thread


class Engine:
    """``async with Engine(settings) as engine``; or ``start()`` and ``stop()`` from anywhere, both idempotent.

    What its methods promise is written in ``InferenceEngine``.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._mlx = MlxEngine(settings, beside_bytes=lambda: self._gguf.snapshot.memory_used_bytes)
        self._gguf = GgufEngine(settings, beside_bytes=lambda: self._mlx.snapshot.memory_used_bytes)
        self._by_format: dict[Format, InferenceEngine] = {"mlx": self._mlx, "gguf": self._gguf}
        self._main: Format = "mlx"
        """Of the main model, or of the one that was it last."""
        self._swapping = False
        """The main model of one engine goes, that of the other comes."""
        self._made_at = time.monotonic()

    # Lifetime

    def start(self) -> None:
        """Start, or start again what died."""
        self._mlx.start()

    def stop(self) -> None:
        """End every request, give all memory back. Blocks until the current step is over."""
        self._gguf.stop()
        self._mlx.stop()

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self.start)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.stop)

    @property
    def alive(self) -> bool:
        return self._by_format[self._main].alive

    @property
    def fingerprint(self) -> str:
        """What computes the main model, and its version."""
        return self._by_format[self._main].fingerprint

    @property
    def uptime_s(self) -> float:
        return time.monotonic() - self._made_at

    # Models

    @property
    def snapshot(self) -> EngineSnapshot:
        """The state as of the last step. Never blocks."""
        if not self._gguf.used:
            return self._mlx.snapshot
        main, other = self._mlx.snapshot, self._gguf.snapshot
        if self._main == "gguf":
            main, other = other, main
        now = _together(main, other, blas_of=self._mlx.snapshot)
        return replace(now, state="loading") if self._swapping and now.entry is None else now

    def check_fits(self, entry: ModelEntry) -> None:
        """Refuse what cannot be loaded, before anything is unloaded for it.

        Raises:
            UnusableModelError: its engine cannot run such a model, or is not installed.
            OutOfMemoryError: it is larger than what may be used.
        """
        self._by_format[entry.format].check_fits(entry)

    async def load(self, entry: ModelEntry, *, finish_queued: bool = False) -> LoadReport:
        """Load ``entry`` in the place of what is loaded, after running requests have ended (``drain_s`` at most).

        Requests in the queue end with an error; with ``finish_queued`` they are served first, within the same time.

        Raises:
            UnusableModelError, OutOfMemoryError: see the message for what is loaded now.
            NotLoadedError: it was given up, on llama.cpp: an unload, or the load of another model, came meanwhile.
        """
        if entry.format == "gguf":
            # It reads the file's header.
            await in_thread(lambda: self.check_fits(entry))
        else:
            self.check_fits(entry)
        if entry.format == self._main and not self._swapping:
            return await self._by_format[entry.format].load(entry, finish_queued=finish_queued)
        return await self._gguf.owned(entry, functools.partial(self._exchange, entry, finish_queued=finish_queued))

    async def _exchange(self, entry: ModelEntry, asked: Load, *, finish_queued: bool) -> LoadReport:
        if entry.format == self._main:
            # Another exchange has been faster.
            return await self._load_of(asked, finish_queued=finish_queued)
        if entry.format == "mlx":
            # Before the other engine's model is unloaded for it.
            await in_thread(lambda: check_files(entry.path))
        before = self._by_format[self._main]
        previous, format_before = before.snapshot.entry, self._main
        self._swapping = True
        try:
            await before.unload(why=f"{entry.id} is loaded in the model's place", finish_queued=finish_queued)
            asked.check()
            self._main = entry.format
            return await self._load_of(asked)
        except NotLoadedError:
            # Given up, for an unload or another load: nothing comes back for that.
            raise
        except LabError as exc:
            self._main = format_before
            failed = exc.message.removesuffix(NOTHING_LOADED)
            raise type(exc)(failed + await _restored(before, previous), param=exc.param) from None
        finally:
            self._swapping = False

    async def _load_of(self, asked: Load, *, finish_queued: bool = False) -> LoadReport:
        if asked.entry.format == "gguf":
            return await self._gguf.load(asked.entry, finish_queued=finish_queued, part_of=asked)
        return await self._mlx.load(asked.entry, finish_queued=finish_queued)

    async def pin(self, entry: ModelEntry) -> LoadReport:
        """Keep an embedding model or a reranker in memory beside the loaded model, until the engine stops.

        Raises:
            UnusableModelError, OutOfMemoryError: nothing has changed.
        """
        report = await self._by_format[entry.format].pin(entry)
        for engine in set(self._by_format.values()) - {self._by_format[entry.format]}:
            await engine.unpin(entry.kind)
        return report

    async def unload(self) -> int:
        """Unload the model after running requests have ended; returns the bytes freed, 0 when there was none.

        A load on llama.cpp that has not ended is given up, a load on MLX is waited for.
        """
        self._gguf.give_up_loads("the model is unloaded")
        return await self._by_format[self._main].unload()

    def gives_up(self, entry: ModelEntry) -> bool:
        """Whether ``unload`` ends a load of this model that is under way: a process can be ended, MLX's thread not."""
        return self._by_format[entry.format] is self._gguf

    async def quiesce(self, timeout_s: float) -> None:
        """Let running requests end, for at most ``timeout_s``; the rest, and those that wait, end with an error."""
        await asyncio.gather(self._mlx.quiesce(timeout_s), self._gguf.quiesce(timeout_s))

    # Requests

    async def submit(self, request: GenerationRequest) -> TokenStream:
        """Accept a request. What is wrong with it is raised here, before its first token.

        Raises:
            NotLoadedError: no model, or not the one that ``request.model`` names.
            OutOfMemoryError: the model had to be unloaded for lack of memory.
            ContextLengthError: the prompt leaves no room in the model's context.
            InvalidRequestError: the prompt cannot be made into tokens, a token id is not in the vocabulary, or the
                model's engine does not do this (its ``capabilities``).
            QueueFullError: too many requests wait.
            EngineDeadError: the engine is gone.
        """
        (stream,) = await self.submit_all(request, choices=1)
        return stream

    async def submit_all(self, request: GenerationRequest, choices: int) -> list[TokenStream]:
        """Accept a request for several answers, all or none; seeds differ by choice.

        Raises: as ``submit``.
        """
        return await self._engine_for(request.model, ("chat",)).submit_all(request, choices)

    async def embed(self, request: EmbeddingRequest) -> Embeddings:
        """The vector of each input. Cancelling the wait gives the work up.

        Raises: as ``submit_embedding``, and
            GenerationTimeoutError, EngineError: it began, and did not end well.
        """
        return await (await self.submit_embedding(request)).result()

    async def submit_embedding(self, request: EmbeddingRequest) -> Pending[Embeddings]:
        """Accept inputs to be embedded; what is wrong with them is raised here.

        Raises:
            NotLoadedError: no embedding model is in memory, or not the one that ``request.model`` names.
            InvalidRequestError: that is no embedding model; a text that is none; more dimensions than a vector has.
            ContextLengthError: an input is longer than the model takes.
            QueueFullError: too many requests are under way.
        """
        return await self._engine_for(request.model, EMBEDDERS).submit_embedding(request)

    async def rerank(self, request: RerankRequest) -> Ranking:
        """How relevant each document is to the query, by a reranker or, without one, by an embedding model.

        Raises: as ``embed``.
        """
        return await (await self.submit_rerank(request)).result()

    async def submit_rerank(self, request: RerankRequest) -> Pending[Ranking]:
        """Accept documents to be ranked; raises as ``submit_embedding``."""
        return await self._engine_for(request.model, RERANKERS).submit_rerank(request)

    async def decode(self, tokens: Sequence[int]) -> str:
        """The text of token ids as the loaded model's tokenizer shows it.

        Raises:
            NotLoadedError: no model is loaded.
        """
        return await self._engine_for(None, ("chat",)).decode(tokens)

    def _engine_for(self, name: str | None, kinds: tuple[Kind, ...]) -> InferenceEngine:
        """The engine that has the model which a request means.

        Raises: as ``submit``, if neither has.
        """
        if not self._gguf.used:
            return self._mlx
        now = self.snapshot
        if (entry := fitting(now, name, kinds)) is not None:
            return self._by_format[entry.format]
        if now.state == "dead":
            # It knows what it died of.
            return self._by_format[self._main]
        raise refusal(now, name, kinds)


async def _restored(engine: InferenceEngine, previous: ModelEntry | None) -> str:
    """Load again what was there before; says how that went."""
    if previous is None:
        return NOTHING_LOADED
    try:
        await engine.load(previous)
    except LabError as exc:
        return f"; the previous model {previous.id} could not be loaded again either: {exc.message}"
    return f"; the previous model {previous.id} is loaded again"


def _together(main: EngineSnapshot, other: EngineSnapshot, *, blas_of: EngineSnapshot) -> EngineSnapshot:
    """The state of both engines as that of one, whose main model is the first's."""
    working = [it.progress_at for it in (main, other) if it.active_requests + it.queued_requests]
    return replace(
        main,
        pinned=(*main.pinned, *other.pinned),
        active_requests=main.active_requests + other.active_requests,
        queued_requests=main.queued_requests + other.queued_requests,
        encode_requests=main.encode_requests + other.encode_requests,
        output_tokens=main.output_tokens + other.output_tokens,
        prompt_tokens=main.prompt_tokens + other.prompt_tokens,
        cached_tokens=main.cached_tokens + other.cached_tokens,
        encoded_tokens=main.encoded_tokens + other.encoded_tokens,
        prefix_cache_bytes=main.prefix_cache_bytes + other.prefix_cache_bytes,
        memory_used_bytes=main.memory_used_bytes + other.memory_used_bytes,
        memory_peak_bytes=main.memory_peak_bytes + other.memory_peak_bytes,
        memory_total_bytes=blas_of.memory_total_bytes,
        progress_at=min(working, default=max(main.progress_at, other.progress_at)),
        blas=blas_of.blas,
    )
