"""Compute the vectors of a column, and find the rows that are similar to a query: ``embed_frame`` and ``search``."""

from __future__ import annotations

import base64
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from lmx_lab.arguments import embeddings_body, rerank_body
from lmx_lab.backend import Backend, HasBackend
from lmx_lab.batch.answers import RowAnswer
from lmx_lab.batch.cache import AnswerCache
from lmx_lab.batch.map import backends_of
from lmx_lab.batch.prompts import is_missing
from lmx_lab.batch.run import UNFINISHED, Errors
from lmx_lab.batch.servers import LoadedModel, RowServer, ServerRun, identify, same_models
from lmx_lab.blocking import in_thread, on_loop
from lmx_lab.errors import (
    BatchStoppedError,
    EngineDeadError,
    EngineError,
    InvalidRequestError,
    LabError,
    NotLoadedError,
)
from lmx_lab.extras import import_optional
from lmx_lab.progress import counter
from lmx_lab.results.database import digest
from lmx_lab.results.frames import RowSource, make_table, read_source, select_rows, to_table, vector_table
from lmx_lab.values.integers import whole_number
from lmx_lab.values.outputs import InputType, Vectors
from lmx_lab.wire.embeddings import EmbeddingsBody

if TYPE_CHECKING:
    import pandas as pd

TEXTS_AT_ONCE = 64
"""Maximum number of texts in a request. The engine fills its batches from a request."""
CHARACTERS_AT_ONCE = 200_000
"""Maximum number of characters in a request of several texts."""
PROBE = "The sea is blue, and bread is baked."
"""A text whose vectors are compared if there are several servers, because the hash of an attached lab's model is not
known."""


async def embed_frame(
    backend: Backend,
    /,
    frame: Any,
    column: str | int | None = None,
    *,
    model: str | None = None,
    dimensions: int | None = None,
    input_type: InputType | None = None,
    truncate: bool = False,
    errors: Errors = "row",
    cache: str | os.PathLike[str] | None = None,
    labs: Sequence[HasBackend] = (),
) -> pd.DataFrame:
    """Return the vectors of a column as a data frame with the same index.

    The columns are ``embedding``, a float32 array or None, and ``error``. Equal texts are computed once. An
    interrupted ``embed_frame`` returns the vectors so far, and sets ``.attrs["interrupted"]`` to True. For a polars
    or pyarrow table, the result is a table of the same type, whose vectors are lists of fixed length.

    Args:
        frame: A data frame, a series, a polars or pyarrow table, or a list of texts or dictionaries.
        column: The column of the texts; it can be left out if there is only one.
        model: An embedding model in memory; by default the pinned one, otherwise the loaded one.
        dimensions: Number of leading components to keep; the vectors are normalized again.
        input_type: Selects the prompt in the model's files that precedes each text; many models have no prompts.
        truncate: Whether to truncate texts that are too long for the model instead of refusing them.
        errors: ``row`` reports the error of a row in the column ``error``; ``raise`` raises the first error.
        cache: An SQLite file for the vectors. A later run with the same file computes only missing vectors.
        labs: Other labs with the same model, which also compute vectors. ``.attrs["labs"]`` has the statistics of
            each.

    Raises:
        NotLoadedError: no embedding model is in memory, in one of the labs.
        InvalidRequestError: an argument is invalid, the column does not exist, or the labs have different models.
        BatchStoppedError: no further vectors can be computed. The attribute ``frame`` contains those so far.
        MissingPackageError: pandas is not installed.
    """
    if errors not in ("row", "raise"):
        raise InvalidRequestError(f"errors is {errors!r:.40}; it must be 'row' or 'raise'", param="errors")
    source = read_source(frame)
    labels, texts = texts_of(source, column)
    if errors == "raise":
        for label, text in zip(labels, texts, strict=True):
            if (problem := problem_of(text)) is not None:
                raise InvalidRequestError(f"row {label!r:.80}: {problem}", param="frame")
    settings = {"dimensions": dimensions, "input_type": input_type, "truncate": truncate}
    run, interrupted = await _embed_texts(
        backend,
        source,
        texts,
        model,
        settings,
        cache=cache,
        errors=errors,
        labs=labs,
    )
    vectors: pd.DataFrame = _vectors_of(run, source)
    if source.library is None:
        vectors.attrs["interrupted"] = interrupted
    return vectors


async def search(
    backend: Backend,
    /,
    frame: Any,
    query: str,
    column: str | int | None = None,
    *,
    top_n: int = 10,
    rerank: bool | None = None,
    model: str | None = None,
    cache: str | os.PathLike[str] | None = None,
) -> pd.DataFrame:
    """Return the rows whose texts are most similar to a query, sorted by similarity.

    The rows keep their labels. Two columns are added: ``similarity``, the cosine similarity of the vectors, and
    ``score``, which orders the rows: the score of the reranker or, without a reranker, the similarity. Rows without
    a text are left out. Texts that are too long for a model are truncated. If it is interrupted, the rows without a
    vector are left out too, and ``.attrs["interrupted"]`` is True. For a polars or pyarrow table, the result is a
    table of the same type.

    Args:
        frame: A data frame, a series, a polars or pyarrow table, or a list of texts or dictionaries.
        query: The text to compare with.
        column: The column of the texts; it can be left out if there is only one.
        top_n: Maximum number of rows to return.
        rerank: Whether a reranker orders the rows with the most similar vectors, at least 50 of them. By default, a
            reranker is used if one is in memory.
        model: An embedding model in memory; by default the pinned one, otherwise the loaded one.
        cache: An SQLite file for the vectors, as for ``embed_frame``.

    Raises:
        NotLoadedError: no embedding model is in memory, or ``rerank`` is true and no reranker is in memory.
        InvalidRequestError: an argument is invalid, or the column does not exist.
        MissingPackageError: pandas is not installed.
    """
    top_n = whole_number(top_n, "top_n", low=1)
    if not isinstance(query, str):
        raise InvalidRequestError(f"query is {query!r:.80}; it must be one text", param="query")
    table = to_table(frame)
    source = read_source(table)
    if source.library is None and source.columns is not None:
        pandas = import_optional("pandas", "search")
        if not isinstance(table, pandas.DataFrame):
            table = make_table([row for _, row in source.rows], dict.fromkeys(source.columns))
            source = read_source(table)
    if taken := [name for name in ("similarity", "score") if name in (source.columns or ())]:
        raise InvalidRequestError(
            f"the rows have a column {taken[0]!r}, which the result adds; rename it", param="frame"
        )
    _, texts = texts_of(source, column)
    body = embeddings_body(query, model=model, input_type="query", truncate=True)
    reranker = None
    if rerank is not False:
        records = (await on_loop(backend.portal, backend.models())).models
        reranker = next((each.id for each in records if each.loaded and each.kind == "rerank"), None)
        if reranker is None and rerank:
            raise NotLoadedError("no reranker is in memory; start the lab with reranker=..., or leave out rerank=True")
    settings = {"dimensions": None, "input_type": "document", "truncate": True}
    run, interrupted = await _embed_texts(backend, source, texts, model, settings, cache=cache)
    # A reranker compares at least 50 texts with the query, if there are as many.
    count = top_n if reranker is None else max(top_n, 50)
    similar = most_similar(matrix_of(run.vectors()), await on_loop(backend.portal, backend.embed(body)), count)
    similarities = dict(similar)
    ranked = similar
    if reranker is not None and similar:
        documents = [texts[at] for at, _ in similar]
        asked = rerank_body(query, documents, top_n=min(top_n, len(similar)), model=reranker, truncate=True)
        ranking = await on_loop(backend.portal, backend.rerank(asked))
        ranked = [(similar[index][0], score) for index, score in ranking.order]
    scores = {"similarity": [similarities[at] for at, _ in ranked], "score": [score for _, score in ranked]}
    found: pd.DataFrame = select_rows(table, source, [at for at, _ in ranked], scores)
    if source.library is None:
        found.attrs["interrupted"] = interrupted
    return found


async def _embed_texts(
    backend: Backend,
    source: RowSource,
    texts: Sequence[Any],
    model: str | None,
    settings: Mapping[str, Any],
    *,
    cache: str | os.PathLike[str] | None,
    errors: Errors = "row",
    labs: Sequence[HasBackend] = (),
) -> tuple[EmbeddingRun, bool]:
    """Compute the vectors of texts, and return the run and whether it was interrupted. Has steps.

    Args:
        source: The rows from which the texts were read.
        labs: Other labs that also compute vectors.
    """
    backends = backends_of(backend, labs)
    find = partial(embedding_model, name=model, hashed=cache is not None or len(backends) > 1)
    loaded, _ = await on_loop(backend.portal, same_models(backends, find))
    embeddings_body(["x"], model=loaded.id, **settings)
    stored = None if cache is None else await in_thread(lambda: AnswerCache(cache))
    run = EmbeddingRun(
        backends,
        loaded,
        texts,
        lambda some: embeddings_body(some, model=loaded.id, **settings),
        name=model,
        # Identifies the model and the settings in the cache. NumPy numbers are converted to those of Python.
        key=json.dumps(["vector", loaded.key, settings], sort_keys=True, default=lambda number: number.item()),
        errors=errors,
        cache=stored,
    )
    interrupted, began = False, time.monotonic()
    try:
        try:
            with counter("embed", backend) as bar:
                while await on_loop(backend.portal, run.step()):
                    run.warn()
                    bar.show(f"{run.done / (time.monotonic() - began):.0f} texts/s", run.done, run.total)
        except KeyboardInterrupt:
            interrupted = True
        finally:
            run.warn()
            await on_loop(backend.portal, run.stop())
    except BatchStoppedError as exc:
        exc.frame = _vectors_of(run, source)
        raise
    finally:
        if stored is not None:
            await in_thread(stored.close)
    return run, interrupted


def _vectors_of(run: EmbeddingRun, source: RowSource) -> Any:
    table = vector_table(run.vectors(), run.errors(), source)
    if source.library is None:
        table.attrs["labs"] = run.figures()
    return table


async def embedding_model(backend: Backend, name: str | None, *, hashed: bool) -> LoadedModel:
    """Return the embedding model that ``name`` selects: by default the pinned one, otherwise the loaded one.

    Args:
        hashed: Whether to hash the model's files, if they are on this machine.

    Raises:
        NotLoadedError: no such model is in memory.
    """
    loaded = [record for record in (await backend.models()).models if record.loaded]
    if name is not None:
        loaded = [record for record in loaded if name in (record.id, record.path)]
    # The echo engine is a chat model that also computes vectors.
    loaded = [each for each in loaded if each.kind == "embedding"] or [each for each in loaded if each.engine == "echo"]
    if not loaded:
        wanted = "no embedding model is in memory" if name is None else f"no embedding model {name!r:.80} is in memory"
        raise NotLoadedError(
            f"{wanted} at {backend.state().url}; start the lab with embedder=..., or load one: lab.load('minilm-l6')"
        )
    record = min(loaded, key=lambda each: (not each.pinned, not each.main))
    return await identify(backend, record, hashed=hashed)


def texts_of(source: RowSource, column: str | int | None) -> tuple[list[Any], list[Any]]:
    """Return the labels of the rows, and the values of a column.

    Raises:
        InvalidRequestError: the column does not exist, or it is not named and there are several.
    """
    columns = source.columns
    if columns is None:
        raise InvalidRequestError("the rows are an iterable; pass a data frame, a column or a list", param="frame")
    if column is None and len(columns) != 1:
        listed = ", ".join(columns) or "none"
        raise InvalidRequestError(f"name the column of the texts, one of: {listed}", param="column")
    # Names of columns that are not texts, such as numbers, have been converted.
    name = columns[0] if column is None else str(column)
    if name not in columns:
        raise InvalidRequestError(
            f"there is no column {name!r:.80}; the columns are {', '.join(columns)}", param="column"
        )
    rows = list(source.rows)
    return [label for label, _ in rows], [row.get(name) for _, row in rows]


class EmbeddingRun(ServerRun[list[str]]):
    """Computes the vectors of texts. Equal texts are computed once. Coroutines run on the lab's event loop.

    Args:
        backends: The servers, which have the same model. Each computes one request at a time.
        texts: Values of a column. A value that is not a text has an error instead of a vector.
        make_body: Creates the request for a list of texts.
        name: The name that selects the model, as for ``embedding_model``.
        key: Identifies the model and the settings in the keys of the cache.
    """

    product = "vectors"

    def __init__(
        self,
        backends: Sequence[Backend],
        model: LoadedModel,
        texts: Sequence[Any],
        make_body: Callable[[Sequence[str]], EmbeddingsBody],
        *,
        name: str | None,
        key: str,
        errors: Errors = "row",
        cache: AnswerCache | None = None,
    ) -> None:
        servers = [RowServer(each, 1, waiting=0) for each in backends]
        super().__init__(model, servers, partial(embedding_model, name=name, hashed=False), cache=cache)
        self._make_body, self._key = make_body, key
        self._texts, self._errors = texts, errors
        self._vectors: dict[str, Vectors] = {}
        self._failures: dict[str, str] = {}
        self._expected: Vectors | None = None
        """The vector of ``PROBE``; None if it was not computed."""
        different = dict.fromkeys(text for text in texts if isinstance(text, str) and text)
        self._ready.extend(divide_texts(different))
        self.total = len(different)

    def figures(self) -> list[dict[str, Any]]:
        """Return the statistics of each server as rows of a table. Vectors from the cache are not counted."""
        return [
            {
                "url": each.url,
                "vectors": each.answers,
                "vectors_per_s": each.rate(each.answers),
                "returned": each.returned,
                "error": each.error,
            }
            for each in self._servers
        ]

    async def step(self) -> bool:
        """Compute the vectors of the next texts. Returns whether texts remain.

        Raises:
            BatchStoppedError: no further vectors can be computed, for example because the model was unloaded.
            InvalidRequestError: two servers compute different vectors for the same text.
            LabError: no vectors could be computed, or a text failed and ``errors`` is ``raise``.
        """
        if len(self._servers) > 1 and self._ready and self._expected is None:
            # All servers must compute the same vector for a text, before the first texts are sent.
            first = self._servers[0]
            expected = await self._send(lambda: self._probe(first), first, waits=True)
            for server in self._servers[1:]:
                vector = await self._send(partial(self._probe, server), server, waits=True)
                if not _is_same(vector, expected):
                    raise InvalidRequestError(
                        f"the labs compute different vectors for the same text: {self._model.description} at "
                        f"{first.url}, and a model with the same name and size but other files at {server.url}; load "
                        "the same files in all of them",
                        param="labs",
                    )
            self._expected = expected
        await self._work()
        return self._has_texts

    @property
    def _has_texts(self) -> bool:
        return bool(self._ready) or any(each.running for each in self._servers)

    def _must_return(self) -> bool:
        return self._failure is not None or not self._has_texts

    async def _probe(self, server: RowServer) -> Vectors:
        vectors = await server.backend.embed(self._make_body([PROBE]))
        vector: Vectors = vectors[0]
        return vector

    async def _has_model(self, server: RowServer) -> bool:
        if self._expected is None or not await super()._has_model(server):
            return False
        return _is_same(await self._probe(server), self._expected)

    async def _compute(self, item: list[str], server: RowServer) -> None:
        if self._cache is not None:
            found = await self._cache.find([self._key_of(text) for text in item])
            for text in item:
                if (answer := found.get(self._key_of(text))) is not None:
                    self._vectors[text] = np.frombuffer(base64.b64decode(answer.text or ""), dtype="<f4")
                    self.done += 1
        missing = [text for text in item if text not in self._vectors]
        if not missing:
            return
        body = self._make_body(missing)
        try:
            vectors = await self._send(lambda: server.backend.embed(body), server)
        except LabError as exc:
            # Continue without the text that was refused, or with another server.
            name, _, at = (exc.param or "").partition(".")
            concerns_text = name == "input" and (at.isdigit() or len(missing) == 1)
            if isinstance(exc, InvalidRequestError) and concerns_text:
                if self._errors == "raise":
                    self._fail(exc, concerns_row=True)
                    return
                refused = missing[int(at or 0)]
                # The number is that of the text in the request.
                self._failures[refused] = re.sub(r"^input(\.\d+)?(?= )", "the text", exc.message)
                self.done += 1
                if others := [text for text in missing if text is not refused]:
                    self._ready.appendleft(others)
                return
            concerns_request = isinstance(exc, InvalidRequestError | EngineError) and name != "model"
            if concerns_request and not isinstance(exc, EngineDeadError):
                raise
            await self._give_back(missing, server, exc, rows=len(missing))
            return
        server.count(len(missing))
        await self._store(self._add(missing, vectors))

    async def _add(self, texts: Sequence[str], vectors: Iterable[Vectors]) -> None:
        """Store vectors in the cache, and add them to the result."""
        found = dict(zip(texts, vectors, strict=True))
        self._vectors.update(found)
        self.done += len(found)
        self._progress_at = time.monotonic()
        if self._cache is not None:
            answers = {}
            for text, vector in found.items():
                content = base64.b64encode(np.asarray(vector, dtype="<f4").tobytes()).decode()
                answers[self._key_of(text)] = RowAnswer(text=content)
            await self._cache.add(answers, self._key)

    def _key_of(self, text: str) -> str:
        return digest(self._key, text)

    def vectors(self) -> list[Vectors | None]:
        """Return the vector of each text; None if it was not computed."""
        return [self._vectors.get(text) if isinstance(text, str) else None for text in self._texts]

    def errors(self) -> list[str | None]:
        """Return for each text why it has no vector; None if it has one."""
        return [
            problem_of(text) or (None if text in self._vectors else self._failures.get(text, UNFINISHED.error))
            for text in self._texts
        ]


def matrix_of(vectors: Iterable[Any]) -> Vectors:
    """Return vectors as the rows of a matrix in float32. A row without a vector is NaN."""
    listed = list(vectors)
    width = next((len(vector) for vector in listed if vector is not None), 0)
    missing = np.full(width, np.nan, dtype=np.float32)
    rows = [missing if vector is None else vector for vector in listed]
    return np.array(rows, dtype=np.float32).reshape(len(rows), width)


def most_similar(vectors: Vectors, query: Vectors, count: int) -> list[tuple[int, float]]:
    """Return the positions and cosine similarities of the rows that are most similar to a query, in descending order.

    Rows of NaN are left out. Equal rows keep their order.
    """
    if not vectors.size:
        return []
    lengths = np.linalg.norm(vectors, axis=1) * np.linalg.norm(query)
    # Rounding may move the similarity of equal vectors slightly above 1.
    similarities = np.clip((vectors @ query) / np.where(lengths == 0, np.inf, lengths), -1, 1)
    order = np.argsort(-similarities, kind="stable")
    known = ((int(at), float(similarities[at])) for at in order if not np.isnan(similarities[at]))
    return list(islice(known, count))


def _is_same(vector: Vectors, other: Vectors) -> bool:
    """Return whether two vectors are equal apart from the rounding of different machines, by their cosine."""
    if vector.shape != other.shape:
        return False
    return float(vector @ other) >= 0.999 * float(np.linalg.norm(vector) * np.linalg.norm(other))


def divide_texts(texts: Iterable[str]) -> list[list[str]]:
    """Divide texts into requests."""
    requests: list[list[str]] = []
    characters = 0
    for text in texts:
        characters += len(text)
        if not requests or len(requests[-1]) == TEXTS_AT_ONCE or characters > CHARACTERS_AT_ONCE:
            requests.append([])
            characters = len(text)
        requests[-1].append(text)
    return requests


def problem_of(text: Any) -> str | None:
    """Return why a value of a column has no vector; None if it is a text."""
    if not isinstance(text, str):
        if is_missing(text):
            return "the text is missing"
        return f"the value is {text!r:.40}, not a text; convert the column with .astype(str)"
    return None if text else "the text is empty"
