"""Compute the vectors of a column, and find the rows that are similar to a query: ``embed_frame`` and ``search``."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from lmx_lab.arguments import embeddings_body, rerank_body
from lmx_lab.backend import Backend, HasBackend
from lmx_lab.batch.cache import AnswerCache
from lmx_lab.batch.map import backends_of
from lmx_lab.batch.run import Errors
from lmx_lab.batch.servers import same_models
from lmx_lab.batch.vectors import (
    EmbeddingRun,
    embedding_model,
    matrix_of,
    most_similar,
    problem_of,
    texts_of,
)
from lmx_lab.blocking import in_thread, on_loop
from lmx_lab.errors import BatchStoppedError, InvalidRequestError, NotLoadedError
from lmx_lab.extras import import_optional
from lmx_lab.progress import counter
from lmx_lab.results.frames import RowSource, make_table, read_source, select_rows, to_table, vector_table
from lmx_lab.values.integers import whole_number
from lmx_lab.values.outputs import InputType

if TYPE_CHECKING:
    import pandas as pd


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
