"""Embed and rank texts on llama.cpp: tokenize them, and compute a slice at a time. Runs on the engine's loop."""

from __future__ import annotations

import time
from collections.abc import Coroutine, Sequence
from typing import Any

import numpy as np

from lmx_lab.engine.llama_cpp.connection import RefusedError
from lmx_lab.engine.llama_cpp.model import HostedModel
from lmx_lab.engine.loop_engine import deadline
from lmx_lab.engine.requests import EmbeddingRequest, Embeddings, Ranking, RerankRequest
from lmx_lab.engine.validation import check_characters, check_dimensions, check_text, check_token_ids
from lmx_lab.engine.vectors import cosines, shorten
from lmx_lab.errors import ContextLengthError, EngineError, InvalidRequestError
from lmx_lab.values.outputs import EncodeReport, Vectors

SLICE = 16
"""Number of texts sent together. Between two slices, other requests are computed and cancellations take effect."""
Tokens = tuple[int, ...]


class LlamaTexts:
    """The texts of one request, which are first checked and tokenized, and then computed."""

    def __init__(self, hosted: HostedModel, timeout_s: float, arrived_at: float) -> None:
        self._hosted = hosted
        self.timeout_s = timeout_s
        self.arrived_at = arrived_at
        self._started_at = 0.0
        self._tokens: list[Tokens] = []
        self.computed_tokens = 0
        """Number of tokens of the texts that have been computed."""

    # Before the request is accepted

    async def read_inputs(self, request: EmbeddingRequest) -> None:
        """Check and tokenize the inputs of an embedding request.

        Raises:
            InvalidRequestError, ContextLengthError: see ``InferenceEngine.submit_embedding``.
        """
        hosted = self._hosted
        if request.input_type is not None:
            raise InvalidRequestError(
                "a GGUF file has no prompts for queries and documents; leave out input_type, and write the prompt into "
                "the text",
                param="input_type",
            )
        check_dimensions(request.dimensions, hosted.dimensions, hosted.entry)
        for at, text in enumerate(request.inputs):
            self._tokens.append(await self._read(text, f"input.{at}", truncate=request.truncate))

    async def read_documents(self, request: RerankRequest) -> None:
        """Check and tokenize query and documents for a ranking by cosine. Raises the same as ``read_inputs``."""
        self._tokens.append(await self._read(request.query, "query", truncate=False))
        for at, text in enumerate(request.documents):
            self._tokens.append(await self._read(text, f"documents.{at}", truncate=request.truncate))

    async def read_pairs(self, request: RerankRequest) -> list[str]:
        """Check and tokenize query and documents for a reranker, and return the documents, truncated to the length that
        the query leaves. Raises the same as ``read_inputs``.
        """
        query = await self._read(request.query, "query", truncate=False)
        room = self._hosted.context_length - len(query) - self._hosted.pair_overhead_tokens
        if room <= 0:
            raise ContextLengthError(
                f"query has {len(query)} tokens and {self._hosted.entry.id} takes {self._hosted.context_length} in "
                "all, the document and the tokens around both included; shorten the query",
                param="query",
            )
        documents = []
        for at, text in enumerate(request.documents):
            tokens = await self._read(text, f"documents.{at}", truncate=request.truncate, limit=room)
            self._tokens.append((*query, *tokens))
            is_cut = len(tokens) == room and len(await self._tokenize(text)) > room
            if not is_cut:
                documents.append(text)
                continue
            # The special tokens at both ends are left out.
            response = await self._hosted.connection.post("/detokenize", {"tokens": list(tokens[1:-1])})
            documents.append(str(response["content"]))
        return documents

    async def _read(self, text: str | Sequence[int], param: str, *, truncate: bool, limit: int | None = None) -> Tokens:
        hosted, limit = self._hosted, limit or self._hosted.context_length
        if isinstance(text, str):
            check_characters(text, param)
            tokens = await self._tokenize(text)
        else:
            tokens = tuple(text)
            check_token_ids(tokens, param, hosted.entry, hosted.vocabulary_size)
        check_text(tokens, param, hosted.entry, limit, truncate=truncate)
        if len(tokens) <= limit:
            return tokens
        # The last token of a text is often a special one, which the model needs.
        return (*tokens[: limit - 1], tokens[-1]) if isinstance(text, str) else tokens[:limit]

    async def _tokenize(self, text: str) -> Tokens:
        context_length = self._hosted.context_length
        return tuple(await self._hosted.tokenize(text, at_most=context_length, parse_special=False))

    # After the request is accepted

    async def embeddings(self, dimensions: int | None) -> Embeddings:
        """Compute and return the vectors.

        Raises:
            GenerationTimeoutError, EngineError: the vectors could not be computed.
        """
        rows = await self._in_time(self._vectors())
        return Embeddings(vectors=shorten(rows, dimensions), report=self._report())

    async def cosine_ranking(self) -> Ranking:
        """Compute and return scores as the cosine of vectors. Raises the same as ``embeddings``."""
        rows = await self._in_time(self._vectors())
        return Ranking(scores=cosines(rows), method="cosine", report=self._report())

    async def head_ranking(self, query: str, documents: Sequence[str], *, raw: bool) -> Ranking:
        """Compute and return the scores of a reranker's head. Raises the same as ``embeddings``.

        Args:
            raw: Whether the scores are returned without the activation.
        """
        scores = await self._in_time(self._scores(query, documents))
        # The activation that sentence-transformers uses for a head with one score, unless a file names another.
        activated = scores if raw else (1 / (1 + np.exp(-scores))).astype(np.float32)
        return Ranking(scores=activated, method="cross-encoder", report=self._report())

    async def _vectors(self) -> Vectors:
        rows: list[list[float]] = []
        for first in range(0, len(self._tokens), SLICE):
            part = self._tokens[first : first + SLICE]
            async with self._hosted.encoding:
                self._started_at = self._started_at or time.perf_counter()
                answer = await self._request("/v1/embeddings", {"input": [list(tokens) for tokens in part]})
            rows += [row["embedding"] for row in sorted(answer["data"], key=lambda row: int(row["index"]))]
            self.computed_tokens += sum(map(len, part))
            self._hosted.progress_at = time.perf_counter()
        return np.asarray(rows, dtype=np.float32)

    async def _scores(self, query: str, documents: Sequence[str]) -> Vectors:
        scores = np.zeros(len(documents), dtype=np.float32)
        for first in range(0, len(documents), SLICE):
            part = documents[first : first + SLICE]
            async with self._hosted.encoding:
                self._started_at = self._started_at or time.perf_counter()
                answer = await self._request("/v1/rerank", {"query": query, "documents": list(part)})
            for row in answer["results"]:
                scores[first + int(row["index"])] = row["relevance_score"]
            self.computed_tokens += sum(map(len, self._tokens[first : first + SLICE]))
            self._hosted.progress_at = time.perf_counter()
        return scores

    async def _request(self, path: str, body: dict[str, object]) -> Any:
        try:
            return await self._hosted.connection.post(path, body)
        except RefusedError as exc:
            raise EngineError(f"llama.cpp did not compute these texts: {exc.message}") from exc

    async def _in_time(self, work: Coroutine[Any, Any, Vectors]) -> Vectors:
        async with deadline(self.arrived_at, self.timeout_s):
            return await work

    def _report(self) -> EncodeReport:
        now = time.perf_counter()
        return EncodeReport(
            model=self._hosted.entry.id,
            texts=len(self._tokens),
            tokens=sum(map(len, self._tokens)),
            queue_s=self._started_at - self.arrived_at,
            compute_s=now - self._started_at,
            peak_memory_bytes=self._hosted.memory_bytes,
        )
