"""Provide the MLX engine for other threads and event loops.

Requests go to the engine thread as commands on a queue; tokens come back through ``Answer``, vectors and scores as
numpy arrays. Any number of event loops may use one engine at the same time.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Coroutine, Sequence
from importlib.metadata import version
from typing import Any, ParamSpec, TypeVar

import mlx.core as mx

from lmx_lab.engine.admission import AdmissionControl, Permit
from lmx_lab.engine.interface import Capabilities, EngineHost
from lmx_lab.engine.mlx import memory
from lmx_lab.engine.mlx.model import check_fits
from lmx_lab.engine.mlx.prepare import PromptPreparer
from lmx_lab.engine.mlx.prepare_texts import TextPreparer
from lmx_lab.engine.mlx.state import Loaded, MlxCore
from lmx_lab.engine.mlx.thread import EngineThread
from lmx_lab.engine.requests import (
    EmbeddingRequest,
    Embeddings,
    GenerationRequest,
    Ranking,
    RerankRequest,
    TraceRequest,
)
from lmx_lab.engine.stream import Answer, Pending
from lmx_lab.engine.tokenizing.loading import check_tokenizer_files, read_tokens
from lmx_lab.engine.tokenizing.templates import try_templates_of
from lmx_lab.engine.validation import check_options, check_vocabularies
from lmx_lab.errors import EngineDeadError, EngineError, LabError, UnusableModelError
from lmx_lab.settings import Settings
from lmx_lab.values.engine import EngineSnapshot
from lmx_lab.values.models import Kind, LoadReport, LoadSpec, ModelEntry
from lmx_lab.values.tracing import Trace
from lmx_lab.weights.files import check_files, in_thread

log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")


def _without_frames(method: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Decorate a method so that its errors have no traceback, and other exceptions become an ``EngineError``.

    Some frames refer to the model. Code that keeps the error, such as a notebook with its last error, would therefore
    keep the weights in memory.
    """

    @functools.wraps(method)
    async def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return await method(*args, **kwargs)
        except LabError as exc:
            failure = exc.with_traceback(None)
        except Exception as exc:
            log.exception("a request could not be started")
            failure = EngineError(f"the request could not be started: {type(exc).__name__}: {exc}")
        failure.__context__ = None
        raise failure

    return call


class MlxEngine:
    """``InferenceEngine`` for models in MLX's format."""

    capabilities = Capabilities(
        thinking_budget=True,
        logprobs_with_own_tools=True,
        input_types=True,
        steering=True,
    )
    # On a GPU, the last bits of a result depend on the number of requests that are computed together.
    fingerprint = f"mlx-{version('mlx')}{'' if mx.default_device() == mx.cpu else '-batch-dependent'}"

    def __init__(self, settings: Settings, host: EngineHost | None = None) -> None:
        self._settings = settings
        self._thread = EngineThread(settings, host or EngineHost())
        self._prompts = PromptPreparer(settings, self._model_of)
        self.texts = TextPreparer(settings, self._thread, self._model_of)

    def start(self) -> None:
        """See ``InferenceEngine``."""
        self._thread.start()

    def stop(self) -> None:
        """See ``InferenceEngine``. Blocks until the current step, or load, is over."""
        self._thread.stop()

    @property
    def snapshot(self) -> EngineSnapshot:
        """See ``InferenceEngine``."""
        return self._thread.snapshot

    @property
    def alive(self) -> bool:
        """See ``InferenceEngine``."""
        return self._thread.alive

    @property
    def failure(self) -> LabError | None:
        """See ``InferenceEngine``."""
        return self._thread.core.failure if self._thread.core is not None else None

    # Models

    async def check(self, entry: ModelEntry, spec: LoadSpec, *, other_bytes: int = 0) -> None:
        """See ``InferenceEngine``."""
        check_options(entry, spec)
        if spec.deterministic:
            raise UnusableModelError(
                f"{entry.id} runs on MLX, whose results may differ in the last bits while other requests run; for a "
                "deterministic load use a GGUF file of the model, such as smollm2-135m-gguf",
                param="deterministic",
            )
        if spec.kv_cache_dtype is not None:
            raise UnusableModelError(
                f"{entry.id} runs on MLX, whose batches of requests do not support a quantized KV cache; leave out "
                "kv_cache_dtype, or load a GGUF file of the model, such as smollm2-135m-gguf",
                param="kv_cache_dtype",
            )

        def check() -> None:
            check_fits(entry, limit_bytes=memory.limit_bytes(self._settings.memory_limit_bytes) - other_bytes)
            # Files that would block a load, or never end, are refused while the current model still answers.
            check_files(entry.path)

        await in_thread(check, name="lmx-lab-check")
        try:
            await check_tokenizer_files(entry.path)
        except UnusableModelError as exc:
            raise UnusableModelError(
                f"{entry.id} at {entry.path} cannot be loaded: {exc.message}", param="model"
            ) from exc
        if entry.kind == "chat":
            await try_templates_of(entry.path)
        if (draft := entry.draft) is not None:

            def check_draft() -> None:
                check_files(draft.path)
                check_vocabularies(entry, draft, *(read_tokens(it.path) for it in (entry, draft)))

            await in_thread(check_draft, name="lmx-lab-check")

    async def load(self, entry: ModelEntry, spec: LoadSpec) -> LoadReport:
        """See ``InferenceEngine``."""
        await in_thread(self.start)
        return await self._thread.call_cancellable(lambda core: core.load(entry, spec))

    async def unload(self) -> int:
        """See ``InferenceEngine``."""
        # A thread that has died has already released all memory.
        with contextlib.suppress(EngineDeadError):
            return await self._thread.call(MlxCore.unload)
        return 0

    async def pin(self, entry: ModelEntry, spec: LoadSpec) -> LoadReport:
        """See ``InferenceEngine``."""
        await in_thread(self.start)
        return await self._thread.call_cancellable(lambda core: core.pin(entry, spec))

    async def unpin(self, kind: Kind) -> None:
        """See ``InferenceEngine``."""
        with contextlib.suppress(EngineDeadError):
            await self._thread.call(lambda core: core.unpin(kind))

    # Requests

    async def end_requests(self, admission: AdmissionControl, error: LabError, *, queued_only: bool = False) -> None:
        """See ``InferenceEngine``."""
        # A thread that has died has already ended all requests.
        with contextlib.suppress(EngineDeadError):
            await self._thread.call(lambda core: core.end_requests(admission, error, queued_only=queued_only))

    @_without_frames
    async def submit_all(
        self, entry: ModelEntry, request: GenerationRequest, permits: Sequence[Permit]
    ) -> list[Answer]:
        """See ``InferenceEngine``. The prompt is computed once for all answers."""
        generations = await self._prompts.prepare(entry, request, permits)
        if (core := self._thread.core) is None:
            raise EngineDeadError("the engine was stopped")
        streams = core.generating.answers.open(generations)
        try:
            await self._thread.call(lambda core: core.submit(generations))
        except LabError as exc:
            for generation in generations:
                generation.mailbox.deliver(exc)
            raise
        # On any other exception, such as a cancellation, the streams are dropped, which cancels the generations.
        return streams

    @_without_frames
    async def submit_embedding(
        self, entry: ModelEntry, request: EmbeddingRequest, permit: Permit
    ) -> Pending[Embeddings]:
        """See ``InferenceEngine``."""
        return await self.texts.embed(entry, request, permit)

    @_without_frames
    async def submit_rerank(self, entry: ModelEntry, request: RerankRequest, permit: Permit) -> Pending[Ranking]:
        """See ``InferenceEngine``."""
        return await self.texts.rerank(entry, request, permit)

    @_without_frames
    async def submit_trace(self, entry: ModelEntry, request: TraceRequest, permit: Permit) -> Pending[Trace]:
        """See ``InferenceEngine``."""
        job = await self._prompts.prepare_trace(entry, request, permit)
        await self._thread.call(lambda core: core.trace(job))
        return Pending(job.done, lambda trace: trace, lambda: self._thread.post(lambda core: core.cancel_trace(job)))

    @_without_frames
    async def encode(self, entry: ModelEntry, request: GenerationRequest) -> list[int]:
        """See ``InferenceEngine``."""
        return await self._prompts.tokens_of(entry, request)

    @_without_frames
    async def render(self, entry: ModelEntry, request: GenerationRequest) -> str:
        """See ``InferenceEngine``."""
        return await self._prompts.render(entry, request)

    @_without_frames
    async def decode(self, entry: ModelEntry, tokens: Sequence[int]) -> str:
        """See ``InferenceEngine``."""
        return await self._prompts.decode(entry, tokens)

    @_without_frames
    async def token_bytes(self, entry: ModelEntry, tokens: Sequence[int]) -> list[bytes]:
        """See ``InferenceEngine``."""
        return await self._prompts.token_bytes(entry, tokens)

    def _model_of(self, entry: ModelEntry) -> Loaded:
        """Return the model in memory that was loaded with this entry.

        Raises:
            EngineDeadError: the engine thread has died.
            NotLoadedError, OutOfMemoryError: see ``MlxCore.model_of``.
        """
        if (dead := self._thread.dead) is not None:
            raise EngineDeadError(f"the engine has died ({dead!r}); load a model to start it again")
        core = self._thread.core
        assert core is not None, "a model was loaded"
        return core.model_of(entry)
