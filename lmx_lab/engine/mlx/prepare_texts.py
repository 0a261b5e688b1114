"""Embedding and reranking, from texts to vectors and scores: the part of the engine's face beside generation."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from lmx_lab.engine.encoders import LoadedEncoder, TextTokenizer, TextTokens
from lmx_lab.engine.mlx.encoding import Encoded, EncodeJob
from lmx_lab.engine.mlx.state import EngineCore
from lmx_lab.engine.mlx.thread import EngineThread
from lmx_lab.engine.model_lookup import EMBEDDERS, RERANKERS, encoder
from lmx_lab.engine.pending import Pending
from lmx_lab.engine.requests import EmbeddingRequest, Embeddings, Ranking, RerankRequest
from lmx_lab.engine.vectors import cosines, cut
from lmx_lab.errors import InvalidRequestError, NotLoadedError, QueueFullError
from lmx_lab.settings import Settings
from lmx_lab.values.encoding import RerankMethod
from lmx_lab.values.models import Kind

Item = TypeVar("Item")
Result = TypeVar("Result")
SLICE = 256
"""Texts turned into tokens at once: a request of one text need not wait for all of another's ten thousand."""
MOST_CHARACTERS = 64 * 2**20
"""Of all texts that are being tokenized; a request that is alone may have more."""


class Texts:
    """Texts become tokens on a thread of their own, tokens become rows on the engine's thread."""

    def __init__(self, thread: EngineThread, settings: Settings) -> None:
        self._thread = thread
        self._settings = settings
        self._executor: ThreadPoolExecutor | None = None
        self._tokenizing = 0
        self._characters = 0
        """Of the requests that are being tokenized."""

    @property
    def tokenizing(self) -> bool:
        """Whether texts are on their way to the engine's thread."""
        return self._tokenizing > 0

    def stop(self) -> None:
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(wait=False, cancel_futures=True)

    async def embed(self, request: EmbeddingRequest) -> Pending[Embeddings]:
        """See ``Engine.submit_embedding``."""
        arrived_at = time.perf_counter()
        found = encoder(self._thread, request.model, EMBEDDERS)
        _check_dimensions(request, found)
        tokenizer = found.texts
        # Nobody may hold the model while something else is awaited, or it could not be unloaded.
        del found

        def tokens(first: int, part: Sequence[str | tuple[int, ...]]) -> list[TextTokens]:
            return tokenizer.texts(part, input_type=request.input_type, truncate=request.truncate, first=first)

        with self._place(request.inputs):
            texts = await self._in_slices(tokens, request.inputs)
            job = self._job(request, EMBEDDERS, tokenizer, texts, arrived_at=arrived_at)
            return await self._accept(job, functools.partial(_embeddings, request.dimensions))

    async def rerank(self, request: RerankRequest) -> Pending[Ranking]:
        """See ``Engine.submit_rerank``."""
        arrived_at = time.perf_counter()
        found = encoder(self._thread, request.model, RERANKERS)
        tokenizer, method = found.texts, found.method
        del found
        texts: list[TextTokens] = []

        def pairs(first: int, part: Sequence[str]) -> list[TextTokens]:
            return tokenizer.pairs(request.query, part, truncate=request.truncate, first=first)

        def documents(first: int, part: Sequence[str]) -> list[TextTokens]:
            return tokenizer.texts(
                part, input_type="document", truncate=request.truncate, param="documents", first=first
            )

        def query(_: int, part: Sequence[str]) -> list[TextTokens]:
            return tokenizer.texts(part, input_type="query", truncate=False, param="query", first=None)

        with self._place(request.documents):
            if method == "cosine":
                texts += await self._in_slices(query, [request.query])
            texts += await self._in_slices(documents if method == "cosine" else pairs, request.documents)
            job = self._job(request, RERANKERS, tokenizer, texts, arrived_at=arrived_at)
            return await self._accept(job, functools.partial(_ranking, method))

    async def _accept(self, job: EncodeJob, finish: Callable[[Encoded], Result]) -> Pending[Result]:
        # Made before: a caller who leaves meanwhile drops it, which gives the job up.
        give_up = functools.partial(_give_up, job)
        pending = Pending(job.done, finish, lambda: self._thread.post(give_up))
        await self._thread.call(lambda core: core.encode(job))
        return pending

    @contextlib.contextmanager
    def _place(self, texts: Sequence[str | tuple[int, ...]]) -> Iterator[None]:
        """Texts on their way to the engine are bounded like those that it has taken, and in their length."""
        if not texts:
            raise InvalidRequestError("there are no texts; send at least one")
        most, characters = self._settings.slots + self._settings.queue_limit, sum(map(len, texts))
        if self._tokenizing >= most or (self._characters and self._characters + characters > MOST_CHARACTERS):
            raise QueueFullError(
                f"{self._tokenizing} requests for embeddings or scores are being read; {most} may be (slots and "
                f"queue_limit), with {MOST_CHARACTERS} characters in all; try again in 1 s",
                retry_after_s=1,
            )
        # Written on the event loops' threads, of which there can be two: a count that is off by one for a moment
        # refuses one request more or less.
        self._tokenizing += 1
        self._characters += characters
        try:
            yield
        finally:
            self._tokenizing -= 1
            self._characters -= characters

    async def _in_slices(
        self, tokenize: Callable[[int, Sequence[Item]], list[TextTokens]], items: Sequence[Item]
    ) -> list[TextTokens]:
        """Tokenize some at a time; ``tokenize`` is told the number of the first and the texts."""
        loop = asyncio.get_running_loop()
        self._executor = self._executor or ThreadPoolExecutor(max_workers=1, thread_name_prefix="lmx-lab-texts")
        texts: list[TextTokens] = []
        for first in range(0, len(items), SLICE):
            texts += await loop.run_in_executor(self._executor, tokenize, first, items[first : first + SLICE])
        return texts

    def _job(
        self,
        request: EmbeddingRequest | RerankRequest,
        kinds: tuple[Kind, ...],
        tokenizer: TextTokenizer,
        texts: list[TextTokens],
        *,
        arrived_at: float,
    ) -> EncodeJob:
        found = encoder(self._thread, request.model, kinds)
        if found.texts is not tokenizer:
            raise NotLoadedError(f"the model was exchanged for {found.entry.id} before this request began; ask again")
        return EncodeJob(
            texts=texts,
            encoder=weakref.ref(found),
            model_id=found.entry.id,
            arrived_at=arrived_at,
            timeout_s=request.timeout_s or self._settings.request_timeout_s,
            raw=isinstance(request, RerankRequest) and request.raw_scores,
        )


def _give_up(job: EncodeJob, core: EngineCore) -> None:
    core.give_up(job)


def _embeddings(dimensions: int | None, encoded: Encoded) -> Embeddings:
    return Embeddings(vectors=cut(encoded.rows, dimensions), report=encoded.report)


def _ranking(method: RerankMethod, encoded: Encoded) -> Ranking:
    scores = cosines(encoded.rows) if method == "cosine" else encoded.rows
    return Ranking(scores=scores, method=method, report=encoded.report)


def _check_dimensions(request: EmbeddingRequest, found: LoadedEncoder) -> None:
    if request.dimensions is not None and found.dimensions is not None and request.dimensions > found.dimensions:
        raise InvalidRequestError(
            f"dimensions is {request.dimensions}; vectors of {found.entry.id} have {found.dimensions}",
            param="dimensions",
        )
