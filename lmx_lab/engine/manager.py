"""The engine as the rest of the program sees it: one main model and pinned encoders, each on the engine for its format.

There is one main model of all engines: loading a model of another format unloads it first, and loads it again if that
fails.
"""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self, cast

from lmx_lab.engine.exchanges import Exchanges
from lmx_lab.engine.interface import NOTHING_LOADED, InferenceEngine
from lmx_lab.engine.loads import Load
from lmx_lab.engine.machine_memory import total_bytes
from lmx_lab.engine.model_lookup import EMBEDDERS, RERANKERS, fitting, refusal
from lmx_lab.engine.pending import Pending
from lmx_lab.engine.registry import ENGINES
from lmx_lab.engine.requests import EmbeddingRequest, Embeddings, GenerationRequest, Ranking, RerankRequest
from lmx_lab.engine.stream import TokenStream
from lmx_lab.errors import LabError, NotLoadedError
from lmx_lab.settings import Settings
from lmx_lab.values.engine import EngineSnapshot
from lmx_lab.values.models import Format, Kind, LoadReport, ModelEntry
from lmx_lab.weights.files import check_files
from lmx_lab.weights.threads import in_thread

if TYPE_CHECKING:
    from lmx_lab.engine.llama_cpp.engine import GgufEngine
    from lmx_lab.engine.mlx.engine import MlxEngine

SUMMED = (
    "active_requests",
    "queued_requests",
    "encode_requests",
    "output_tokens",
    "prompt_tokens",
    "cached_tokens",
    "encoded_tokens",
    "prefix_cache_bytes",
    "memory_used_bytes",
    "memory_peak_bytes",
)
"""Fields of a snapshot that count for all engines together."""


class Engine:
    """``async with Engine(settings) as engine``; or ``start()`` and ``stop()`` from anywhere, both idempotent.

    What its methods promise is written in ``InferenceEngine``.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._engines: dict[Format, InferenceEngine] = {}
        """Those that a model was loaded on, or checked for."""
        self._making = threading.Lock()
        self._main: Format = "mlx"
        """Of the main model, or of the one that was it last."""
        self._swapping = False
        """The main model of one engine goes, that of the other comes."""
        self._exchanges: Exchanges | None = None
        self._machine_bytes = total_bytes()
        self._made_at = time.monotonic()

    # Lifetime

    def start(self) -> None:
        """Start again what died; each engine starts with its first model."""
        for engine in list(self._engines.values()):
            engine.start()

    def stop(self) -> None:
        """End every request, give all memory back. Blocks until the current step is over."""
        with self._making:
            exchanges, self._exchanges = self._exchanges, None
        if exchanges is not None:
            exchanges.give_up("the engine was stopped")
        for engine in reversed(list(self._engines.values())):
            engine.stop()
        if exchanges is not None:
            exchanges.stop()

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self.start)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.stop)

    @property
    def alive(self) -> bool:
        main = self._engines.get(self._main)
        return main is None or not main.used or main.alive

    @property
    def fingerprint(self) -> str:
        """What computes the main model, and its version; empty before the first model."""
        main = self._engines.get(self._main)
        return main.fingerprint if main is not None else ""

    @property
    def uptime_s(self) -> float:
        return time.monotonic() - self._made_at

    # Models

    def on(self, format: Format) -> InferenceEngine:
        """The engine for models of this format, imported and made if it is not there yet."""
        with self._making:
            if format not in self._engines:
                beside = functools.partial(self._used_bytes, but=format)
                self._engines[format] = ENGINES[format].make(self.settings, beside)
            return self._engines[format]

    @property
    def snapshot(self) -> EngineSnapshot:
        """The state as of the last step. Never blocks."""
        used = {format_: engine.snapshot for format_, engine in list(self._engines.items()) if engine.used}
        main = used.pop(self._main, None) or EngineSnapshot(memory_total_bytes=self._machine_bytes)
        now = _together(main, *used.values()) if used else main
        return replace(now, state="loading") if self._swapping and now.entry is None else now

    def _used_bytes(self, *, but: Format) -> int:
        """Memory that the other engines use."""
        return sum(it.snapshot.memory_used_bytes for format_, it in list(self._engines.items()) if format_ != but)

    def check_fits(self, entry: ModelEntry) -> None:
        """Refuse what cannot be loaded, before anything is unloaded for it.

        Raises:
            UnusableModelError: its engine cannot run such a model, or is not installed.
            OutOfMemoryError: it is larger than what may be used.
        """
        self.on(entry.format).check_fits(entry)

    async def load(self, entry: ModelEntry, *, finish_queued: bool = False) -> LoadReport:
        """Load ``entry`` in the place of what is loaded, after running requests have ended (``drain_s`` at most).

        Requests in the queue end with an error; with ``finish_queued`` they are served first, within the same time.

        Raises:
            UnusableModelError, OutOfMemoryError: see the message for what is loaded now.
            NotLoadedError: it was given up, on llama.cpp: an unload, or the load of another model, came meanwhile.
        """
        if entry.format not in self._engines:
            # Imports it; later, loads and unloads reach the engine in the order of the calls.
            await asyncio.to_thread(self.on, entry.format)
        if entry.format == "gguf":
            # It reads the file's header.
            await in_thread(lambda: self.check_fits(entry))
        else:
            self.check_fits(entry)
        if entry.format == self._main and not self._swapping:
            return await self.on(entry.format).load(entry, finish_queued=finish_queued)
        exchanges = await asyncio.to_thread(self._exchanging)
        self._give_up_loads(f"{entry.id} is loaded in its place", but=entry.path)
        # The caller may leave; the exchange continues.
        return await asyncio.shield(
            exchanges.submit(entry, functools.partial(self._exchange, entry, finish_queued=finish_queued))
        )

    def _exchanging(self) -> Exchanges:
        with self._making:
            if self._exchanges is None:
                self._exchanges = Exchanges()
            return self._exchanges

    async def _exchange(self, entry: ModelEntry, asked: Load, *, finish_queued: bool) -> LoadReport:
        if entry.format == self._main:
            # Another exchange has been faster.
            return await self._load_of(asked, finish_queued=finish_queued)
        if entry.format == "mlx":
            # Before the other engine's model is unloaded for it.
            await in_thread(lambda: check_files(entry.path))
        before, format_before = self._engines.get(self._main), self._main
        previous = before.snapshot.entry if before is not None else None
        self._swapping = True
        try:
            if before is not None:
                await before.unload(why=f"{entry.id} is loaded in the model's place", finish_queued=finish_queued)
            asked.check()
            self._main = entry.format
            return await self._load_of(asked)
        except NotLoadedError:
            # Cancelled by an unload or another load: the previous model is not wanted either.
            raise
        except LabError as exc:
            asked.check()
            self._main = format_before
            failed = exc.message.removesuffix(NOTHING_LOADED)
            raise type(exc)(failed + await _restored(before, previous), param=exc.param) from None
        finally:
            self._swapping = False

    async def _load_of(self, asked: Load, *, finish_queued: bool = False) -> LoadReport:
        engine = self.on(asked.entry.format)
        if asked.entry.format == "gguf":
            return await self._gguf.load(asked.entry, finish_queued=finish_queued, part_of=asked)
        return await engine.load(asked.entry, finish_queued=finish_queued)

    def _give_up_loads(self, why: str, *, but: Path | None = None) -> None:
        """Tell the loads that can be ended to end."""
        if "gguf" in self._engines:
            self._gguf.give_up_loads(why, but=but)

    @property
    def _mlx(self) -> MlxEngine:
        return cast("MlxEngine", self.on("mlx"))

    @property
    def _gguf(self) -> GgufEngine:
        return cast("GgufEngine", self.on("gguf"))

    async def pin(self, entry: ModelEntry) -> LoadReport:
        """Keep an embedding model or a reranker in memory beside the loaded model, until the engine stops.

        Raises:
            UnusableModelError, OutOfMemoryError: nothing has changed.
        """
        engine = await asyncio.to_thread(self.on, entry.format)
        report = await engine.pin(entry)
        for other in list(self._engines.values()):
            if other is not engine:
                await other.unpin(entry.kind)
        return report

    async def unload(self) -> int:
        """Unload the model after running requests have ended; returns the bytes freed, 0 when there was none.

        A load on llama.cpp that has not ended is given up, a load on MLX is waited for.
        """
        if self._exchanges is not None:
            self._exchanges.give_up("the model is unloaded")
        self._give_up_loads("the model is unloaded")
        main = self._engines.get(self._main)
        return await main.unload() if main is not None else 0

    def gives_up(self, entry: ModelEntry) -> bool:
        """Whether ``unload`` ends a load of this model that is under way: a process can be ended, MLX's thread not."""
        return entry.format == "gguf"

    async def quiesce(self, timeout_s: float) -> None:
        """Let running requests end, for at most ``timeout_s``; the rest, and those that wait, end with an error."""
        await asyncio.gather(*(engine.quiesce(timeout_s) for engine in list(self._engines.values())))

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

        Raises: as ``submit``, if none has.
        """
        now = self.snapshot
        if (entry := fitting(now, name, kinds)) is not None:
            return self._engines[entry.format]
        main = self._engines.get(self._main)
        if main is not None and (now.state == "dead" or len(self._engines) == 1):
            # It can say more about why there is no model.
            return main
        raise refusal(now, name, kinds)


async def _restored(engine: InferenceEngine | None, previous: ModelEntry | None) -> str:
    """Load again what was there before; says how that went."""
    if engine is None or previous is None:
        return NOTHING_LOADED
    try:
        await engine.load(previous)
    except LabError as exc:
        return f"; the previous model {previous.id} could not be loaded again either: {exc.message}"
    return f"; the previous model {previous.id} is loaded again"


def _together(*every: EngineSnapshot) -> EngineSnapshot:
    """The state of several engines as that of one, whose main model is the first's."""
    working = [it.progress_at for it in every if it.active_requests + it.queued_requests]
    sums = {name: sum(getattr(it, name) for it in every) for name in SUMMED}
    return replace(
        every[0],
        pinned=tuple(pinned for it in every for pinned in it.pinned),
        memory_total_bytes=max(it.memory_total_bytes for it in every),
        blas=next((it.blas for it in every if it.blas is not None), None),
        progress_at=min(working, default=max(it.progress_at for it in every)),
        **sums,
    )
