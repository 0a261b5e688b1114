"""Compute the vectors of the texts of a table, several texts per request, and store them in a cache."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np

from lmx_lab.backend import Backend
from lmx_lab.batch.answer import RowAnswer
from lmx_lab.batch.cache import AnswerCache
from lmx_lab.batch.prompts import is_missing
from lmx_lab.batch.run import MAX_PAUSE_S, MIN_PAUSE_S, RETRY_S, UNFINISHED, Errors
from lmx_lab.batch.servers import LoadedModel, identify
from lmx_lab.batch.table import RowSource
from lmx_lab.errors import InvalidRequestError, NotLoadedError, UnavailableError
from lmx_lab.values.encoding import Vectors
from lmx_lab.wire.embeddings import EmbeddingsBody

TEXTS_AT_ONCE = 64
"""Maximum number of texts in a request. The engine fills its batches from a request."""
CHARACTERS_AT_ONCE = 200_000
"""Maximum number of characters in a request of several texts."""


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
        raise NotLoadedError(f"{wanted}; start the lab with embedder=..., or load one: lab.load('minilm-l6')")
    record = min(loaded, key=lambda each: not each.pinned)
    return await identify(backend, record, hashed=hashed)


def texts_of(source: RowSource, column: str | None) -> tuple[list[Any], list[Any]]:
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


class EmbeddingRun:
    """Computes the vectors of texts. Equal texts are computed once. Coroutines run on the lab's event loop.

    Args:
        texts: Values of a column. A value that is not a text has an error instead of a vector.
        make_body: Creates the request for a list of texts.
        key: Identifies the model and the settings in the keys of the cache.
    """

    def __init__(
        self,
        backend: Backend,
        texts: Sequence[Any],
        make_body: Callable[[Sequence[str]], EmbeddingsBody],
        *,
        key: str,
        errors: Errors = "row",
        cache: AnswerCache | None = None,
    ) -> None:
        self._backend, self._make_body, self._key, self._cache = backend, make_body, key, cache
        self._texts, self._errors = texts, errors
        self._vectors: dict[str, Vectors] = {}
        self._failures: dict[str, str] = {}
        different = dict.fromkeys(text for text in texts if isinstance(text, str) and text)
        self._left = deque(_requests(different))
        self._progress_at = time.monotonic()
        self.total = len(different)

    @property
    def done(self) -> int:
        """Number of distinct texts that have a vector or an error."""
        return len(self._vectors) + len(self._failures)

    async def step(self) -> bool:
        """Compute the vectors of the next texts. Returns whether texts remain.

        Raises:
            LabError: vectors cannot be computed, or a text failed and ``errors`` is ``raise``.
        """
        if not self._left:
            return False
        texts = self._left.popleft()
        missing = await self._find(texts)
        try:
            vectors = await self._backend.embed(self._make_body(missing)) if missing else ()
        except UnavailableError as exc:
            if exc.retry_after_s is None or time.monotonic() - self._progress_at > RETRY_S:
                raise
            self._left.appendleft(missing)
            await asyncio.sleep(min(max(exc.retry_after_s, MIN_PAUSE_S), MAX_PAUSE_S))
            return True
        except InvalidRequestError as exc:
            self._fail(missing, exc)
            return bool(self._left)
        self._progress_at = time.monotonic()
        self._vectors.update(zip(missing, vectors, strict=True))
        if self._cache is not None and missing:
            await self._cache.add_all({self._key_of(text): _stored(self._vectors[text]) for text in missing}, self._key)
        return bool(self._left)

    async def _find(self, texts: Sequence[str]) -> list[str]:
        """Read vectors from the cache, and return the texts whose vectors it does not contain."""
        if self._cache is not None:
            found = await self._cache.find([self._key_of(text) for text in texts])
            for text in texts:
                if (answer := found.get(self._key_of(text))) is not None:
                    self._vectors[text] = np.frombuffer(base64.b64decode(answer.text or ""), dtype="<f4")
        return [text for text in texts if text not in self._vectors]

    def _fail(self, texts: Sequence[str], error: InvalidRequestError) -> None:
        """Record the error of the text that was refused, and queue the other texts again.

        Raises:
            InvalidRequestError: the whole request was refused, or ``errors`` is ``raise``.
        """
        name, _, at = (error.param or "").partition(".")
        if name != "input" or not (at.isdigit() or len(texts) == 1):
            raise error
        refused = texts[int(at or 0)]
        if self._errors == "raise":
            raise error
        self._failures[refused] = error.message
        if others := [text for text in texts if text is not refused]:
            self._left.appendleft(others)

    def _key_of(self, text: str) -> str:
        return hashlib.sha256(json.dumps([self._key, text]).encode()).hexdigest()[:32]

    def check_values(self, labels: Sequence[Any]) -> None:
        """Check that all values are texts.

        Raises:
            InvalidRequestError: one is not.
        """
        for label, text in zip(labels, self._texts, strict=True):
            if (problem := _problem(text)) is not None:
                raise InvalidRequestError(f"row {label!r:.80}: {problem}", param="frame")

    def vectors(self) -> list[Vectors | None]:
        """Return the vector of each text; None if it was not computed."""
        return [self._vectors.get(text) if isinstance(text, str) else None for text in self._texts]

    def errors(self) -> list[str | None]:
        """Return for each text why it has no vector; None if it has one."""
        return [_problem(text) or self._error_of(text) for text in self._texts]

    def _error_of(self, text: str) -> str | None:
        return None if text in self._vectors else self._failures.get(text, UNFINISHED.error)


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


def settings_key(model: LoadedModel, settings: Mapping[str, Any]) -> str:
    """Return the text that identifies a model and the settings of its vectors in the cache."""
    return json.dumps(["vector", model.key, settings], sort_keys=True)


def _requests(texts: Iterable[str]) -> list[list[str]]:
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


def _problem(text: Any) -> str | None:
    if not isinstance(text, str):
        if is_missing(text):
            return "the text is missing"
        return f"the value is {text!r:.40}, not a text; convert the column with .astype(str)"
    return None if text else "the text is empty"


def _stored(vector: Vectors) -> RowAnswer:
    return RowAnswer(text=base64.b64encode(np.asarray(vector, dtype="<f4").tobytes()).decode())
