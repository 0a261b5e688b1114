"""Prepare embedding and rerank requests for the engine thread, and convert their rows to vectors and scores.

Texts are tokenized outside the engine thread. The engine thread converts tokens to rows.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Awaitable, Callable, Iterator, Sequence, Sized
from typing import TypeVar

from lmx_lab.engine.admission import LOAD_FIRST, Permit
from lmx_lab.engine.encoders import LoadedEncoder, TextTokens
from lmx_lab.engine.loop_engine import deadline
from lmx_lab.engine.mlx.encoding import EncodedRows, EncodeJob
from lmx_lab.engine.mlx.model import LoadedModel
from lmx_lab.engine.mlx.thread import EngineThread
from lmx_lab.engine.requests import EmbeddingRequest, Embeddings, Ranking, RerankRequest
from lmx_lab.engine.stream import Pending
from lmx_lab.engine.tokenizing.encoder import SHORT_CHARACTERS
from lmx_lab.engine.validation import check_dimensions
from lmx_lab.engine.vectors import cosines, shorten
from lmx_lab.errors import NotLoadedError, QueueFullError
from lmx_lab.settings import Settings
from lmx_lab.values.models import ModelEntry

Item = TypeVar("Item", bound=Sized)
Result = TypeVar("Result")
Tokenize = Callable[[int, Sequence[Item]], Awaitable[list[TextTokens]]]
"""Tokenizes a part of the texts of a request, the first of which has the given index."""
SLICE = 256
"""Number of texts that are tokenized together, so that a request of one text need not wait for ten thousand others.
They have at most ``SHORT_CHARACTERS`` characters, unless a single text has more."""


class TextPreparer:
    """Tokenizes the texts of requests, and submits them to the engine thread.

    Args:
        model_of: Returns the model in memory for an entry, or raises an error if it is no longer there.
    """

    def __init__(
        self,
        settings: Settings,
        thread: EngineThread,
        model_of: Callable[[ModelEntry], LoadedModel | LoadedEncoder],
    ) -> None:
        self._settings = settings
        self._thread = thread
        self._model_of = model_of
        self.max_characters = 64 * 2**20
        """Maximum number of characters of all texts that are being tokenized. A single request may have more."""
        self._characters = 0
        """Number of characters of the requests that are being tokenized."""

    async def embed(self, entry: ModelEntry, request: EmbeddingRequest, permit: Permit) -> Pending[Embeddings]:
        """See ``InferenceEngine.submit_embedding``."""
        arrived_at, timeout_s = time.perf_counter(), request.timeout_s or self._settings.request_timeout_s
        encoder = self._encoder_of(entry)
        check_dimensions(request.dimensions, encoder.dimensions, entry)
        tokenizer = encoder.texts
        # While this waits, it must not refer to the model, or the model could not be unloaded.
        del encoder

        async def tokenize(first: int, part: Sequence[str | Sequence[int]]) -> list[TextTokens]:
            return await tokenizer.texts(part, input_type=request.input_type, truncate=request.truncate, first=first)

        with self._tokenizing(request.inputs):
            async with deadline(arrived_at, timeout_s):
                texts = await _in_slices(tokenize, request.inputs)
            job = self._job(request, entry, permit, texts, arrived_at=arrived_at, timeout_s=timeout_s)
            return await self._submit(
                job,
                lambda encoded: Embeddings(vectors=shorten(encoded.rows, request.dimensions), report=encoded.report),
            )

    async def rerank(self, entry: ModelEntry, request: RerankRequest, permit: Permit) -> Pending[Ranking]:
        """See ``InferenceEngine.submit_rerank``."""
        arrived_at, timeout_s = time.perf_counter(), request.timeout_s or self._settings.request_timeout_s
        encoder = self._encoder_of(entry)
        tokenizer, method = encoder.texts, encoder.method
        del encoder
        texts: list[TextTokens] = []

        async def query(_: int, part: Sequence[str]) -> list[TextTokens]:
            return await tokenizer.texts(part, input_type="query", truncate=False, param="query", first=None)

        async def documents(first: int, part: Sequence[str]) -> list[TextTokens]:
            return await tokenizer.texts(
                part, input_type="document", truncate=request.truncate, param="documents", first=first
            )

        async def pairs(first: int, part: Sequence[str]) -> list[TextTokens]:
            return await tokenizer.pairs(request.query, part, truncate=request.truncate, first=first)

        def ranking(encoded: EncodedRows) -> Ranking:
            scores = cosines(encoded.rows) if method == "cosine" else encoded.rows
            return Ranking(scores=scores, method=method, report=encoded.report)

        with self._tokenizing(request.documents):
            async with deadline(arrived_at, timeout_s):
                if method == "cosine":
                    texts += await _in_slices(query, [request.query])
                    texts += await _in_slices(documents, request.documents)
                else:
                    texts += await _in_slices(pairs, request.documents, beside=request.query)
            job = self._job(request, entry, permit, texts, arrived_at=arrived_at, timeout_s=timeout_s)
            return await self._submit(job, ranking)

    async def _submit(self, job: EncodeJob, finish: Callable[[EncodedRows], Result]) -> Pending[Result]:
        # Created first: if the caller is cancelled in the meantime, it is dropped, which cancels the job.
        pending = Pending(job.done, finish, lambda: self._thread.post(lambda core: core.cancel_encoding(job)))
        await self._thread.call(lambda core: core.encode(job))
        return pending

    @contextlib.contextmanager
    def _tokenizing(self, texts: Sequence[str | Sequence[int]]) -> Iterator[None]:
        """Count the characters of texts that are being tokenized within the block.

        Raises:
            QueueFullError: all requests together would have too many characters.
        """
        characters = sum(map(len, texts))
        if self._characters and self._characters + characters > self.max_characters:
            raise QueueFullError(
                f"texts of {self._characters} characters are being tokenized, and these have {characters}; "
                f"the limit is {self.max_characters} in all; try again in 1 s",
                retry_after_s=1,
            )
        # Several event loops change this without a lock. A count that is briefly wrong refuses one request too many or
        # too few.
        self._characters += characters
        try:
            yield
        finally:
            self._characters -= characters

    def _job(
        self,
        request: EmbeddingRequest | RerankRequest,
        entry: ModelEntry,
        permit: Permit,
        texts: list[TextTokens],
        *,
        arrived_at: float,
        timeout_s: float,
    ) -> EncodeJob:
        return EncodeJob(
            texts=texts,
            encoder=weakref.ref(self._encoder_of(entry)),
            model_id=entry.id,
            permit=permit,
            arrived_at=arrived_at,
            timeout_s=timeout_s,
            raw=isinstance(request, RerankRequest) and request.raw_scores,
        )

    def _encoder_of(self, entry: ModelEntry) -> LoadedEncoder:
        encoder = self._model_of(entry)
        if not isinstance(encoder, LoadedEncoder):
            raise NotLoadedError(f"{entry.id} does not embed or rank texts; {LOAD_FIRST}")
        return encoder


async def _in_slices(tokenize: Tokenize[Item], items: Sequence[Item], *, beside: str = "") -> list[TextTokens]:
    """Tokenize some items at a time, and return all texts.

    Args:
        beside: A text that is tokenized together with each item.
    """
    texts: list[TextTokens] = []
    for first, part in _slices(items, len(beside)):
        texts += await tokenize(first, part)
    return texts


def _slices(items: Sequence[Item], beside: int) -> Iterator[tuple[int, list[Item]]]:
    """Yield the index of the first item, and items that are tokenized together."""
    first, part, characters = 0, list[Item](), 0
    for at, item in enumerate(items):
        if part and (len(part) == SLICE or characters + len(item) + beside > SHORT_CHARACTERS):
            yield first, part
            first, part, characters = at, [], 0
        part.append(item)
        characters += len(item) + beside
    if part:
        yield first, part
