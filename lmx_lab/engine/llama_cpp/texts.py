"""Embedding and reranking on llama.cpp: texts to tokens, tokens to rows, a slice at a time. On the engine's loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from typing import Any

import numpy as np

from lmx_lab.engine.llama_cpp.connection import RefusedError
from lmx_lab.engine.llama_cpp.model import Hosted
from lmx_lab.engine.requests import EmbeddingRequest, Embeddings, Ranking, RerankRequest
from lmx_lab.engine.validation import check_characters
from lmx_lab.engine.vectors import cosines, cut
from lmx_lab.errors import ContextLengthError, EngineError, GenerationTimeoutError, InvalidRequestError
from lmx_lab.values.encoding import EncodeReport, Vectors

SLICE = 16
"""Texts asked for at once: who waits with a few comes in between, and who leaves is heard."""
Tokens = tuple[int, ...]


class TextJob:
    """One request's texts, checked and turned into tokens; ``embeddings`` and ``ranking`` compute them."""

    def __init__(self, hosted: Hosted, timeout_s: float, arrived_at: float) -> None:
        self._hosted = hosted
        self.timeout_s = timeout_s
        self._arrived_at = arrived_at
        self._started_at = 0.0
        self._tokens: list[Tokens] = []
        self.computed = 0
        """Tokens of the texts that are done."""

    # Before it is accepted

    async def read_inputs(self, request: EmbeddingRequest) -> None:
        """
        Raises:
            InvalidRequestError, ContextLengthError: as ``Engine.submit_embedding``.
        """
        hosted = self._hosted
        if request.input_type is not None:
            raise InvalidRequestError(
                "a GGUF file has no prompts for queries and documents; leave out input_type, and write what belongs "
                "before the text into it",
                param="input_type",
            )
        if request.dimensions is not None and hosted.dimensions is not None and request.dimensions > hosted.dimensions:
            raise InvalidRequestError(
                f"dimensions is {request.dimensions}; vectors of {hosted.entry.id} have {hosted.dimensions}",
                param="dimensions",
            )
        for at, text in enumerate(request.inputs):
            self._tokens.append(await self._read(text, f"input.{at}", truncate=request.truncate))

    async def read_documents(self, request: RerankRequest) -> None:
        """For scores by cosine; raises as ``read_inputs``."""
        self._tokens.append(await self._read(request.query, "query", truncate=False))
        for at, text in enumerate(request.documents):
            self._tokens.append(await self._read(text, f"documents.{at}", truncate=request.truncate))

    async def read_pairs(self, request: RerankRequest) -> list[str]:
        """The documents as the model can take them beside the query; raises as ``read_inputs``."""
        query = await self._read(request.query, "query", truncate=False)
        room = self._hosted.context_length - len(query) - self._hosted.around_pair
        if room <= 0:
            raise ContextLengthError(
                f"query has {len(query)} tokens and {self._hosted.entry.id} takes {self._hosted.context_length} in "
                "all, the document and what is written around both included; shorten the query",
                param="query",
            )
        documents = []
        for at, text in enumerate(request.documents):
            tokens = await self._read(text, f"documents.{at}", truncate=request.truncate, most=room)
            self._tokens.append((*query, *tokens))
            cut = len(tokens) == room and len(await self._tokenized(text)) > room
            documents.append(await self._shown(tokens) if cut else text)
        return documents

    async def _read(self, text: str | Tokens, place: str, *, truncate: bool, most: int | None = None) -> Tokens:
        hosted, most = self._hosted, most or self._hosted.context_length
        if isinstance(text, str):
            check_characters(text, place)
            tokens = await self._tokenized(text)
        else:
            tokens = tuple(text)
            unknown = next((token for token in tokens if not 0 <= token < hosted.vocabulary_size), None)
            if unknown is not None:
                raise InvalidRequestError(
                    f"{place} has the token id {unknown}; {hosted.entry.id} knows 0 to {hosted.vocabulary_size - 1}",
                    param=place,
                )
        if not tokens:
            raise InvalidRequestError(f"{place} is empty: no token came out of it", param=place)
        if len(tokens) <= most:
            return tokens
        if not truncate:
            raise ContextLengthError(
                f"{place} has {len(tokens)} tokens and {hosted.entry.id} takes {most}; shorten it"
                f"{'' if place == 'query' else ' or send truncate: true'}",
                param=place,
            )
        # The last token of a text is often a special one, on which the model counts.
        return (*tokens[: most - 1], tokens[-1]) if isinstance(text, str) else tokens[:most]

    async def _tokenized(self, text: str) -> Tokens:
        return tuple(await self._hosted.tokenized(text, most=self._hosted.context_length, parse_special=False))

    async def _shown(self, tokens: Sequence[int]) -> str:
        """Without the special tokens around it."""
        found = await self._hosted.connection.ask("/detokenize", {"tokens": list(tokens[1:-1])})
        return str(found["content"])

    # After

    async def embeddings(self, dimensions: int | None) -> Embeddings:
        """
        Raises:
            GenerationTimeoutError, EngineError: it did not end well.
        """
        rows = await self._in_time(self._vectors())
        return Embeddings(vectors=cut(rows, dimensions), report=self._report())

    async def cosine_ranking(self) -> Ranking:
        """Raises as ``embeddings``."""
        rows = await self._in_time(self._vectors())
        return Ranking(scores=cosines(rows), method="cosine", report=self._report())

    async def head_ranking(self, query: str, documents: Sequence[str], *, raw: bool) -> Ranking:
        """Raises as ``embeddings``."""
        scores = await self._in_time(self._scores(query, documents))
        # As sentence-transformers activates a head of one score, where no file says otherwise.
        activated = scores if raw else (1 / (1 + np.exp(-scores))).astype(np.float32)
        return Ranking(scores=activated, method="cross-encoder", report=self._report())

    async def _vectors(self) -> Vectors:
        rows: list[list[float]] = []
        for first in range(0, len(self._tokens), SLICE):
            part = self._tokens[first : first + SLICE]
            async with self._hosted.turn:
                self._started_at = self._started_at or time.perf_counter()
                answer = await self._ask("/v1/embeddings", {"input": [list(tokens) for tokens in part]})
            rows += [row["embedding"] for row in sorted(answer["data"], key=lambda row: int(row["index"]))]
            self.computed += sum(map(len, part))
            self._hosted.progress_at = time.perf_counter()
        return np.asarray(rows, dtype=np.float32)

    async def _scores(self, query: str, documents: Sequence[str]) -> Vectors:
        scores = np.zeros(len(documents), dtype=np.float32)
        for first in range(0, len(documents), SLICE):
            part = documents[first : first + SLICE]
            async with self._hosted.turn:
                self._started_at = self._started_at or time.perf_counter()
                answer = await self._ask("/v1/rerank", {"query": query, "documents": list(part)})
            for row in answer["results"]:
                scores[first + int(row["index"])] = row["relevance_score"]
            self.computed += sum(map(len, self._tokens[first : first + SLICE]))
            self._hosted.progress_at = time.perf_counter()
        return scores

    async def _ask(self, path: str, question: dict[str, object]) -> Any:
        try:
            return await self._hosted.connection.ask(path, question)
        except RefusedError as exc:
            raise EngineError(f"llama.cpp did not compute these texts: {exc.message}") from exc

    async def _in_time(self, work: Coroutine[Any, Any, Vectors]) -> Vectors:
        limit = asyncio.get_running_loop().time() + self._arrived_at + self.timeout_s - time.perf_counter()
        try:
            async with asyncio.timeout_at(limit):
                return await work
        except TimeoutError:
            raise GenerationTimeoutError(f"not finished after {self.timeout_s:g} s, the request's limit") from None

    def _report(self) -> EncodeReport:
        now = time.perf_counter()
        return EncodeReport(
            model=self._hosted.entry.id,
            texts=len(self._tokens),
            tokens=sum(map(len, self._tokens)),
            queue_s=self._started_at - self._arrived_at,
            compute_s=now - self._started_at,
            peak_memory_bytes=self._hosted.memory_bytes,
        )
