"""Embeddings by feature hashing: texts with the same words, or parts of words, are similar.

Each word and each three letters of a word add to one component, found by a hash (Weinberger et al., arXiv 0902.2206).
"""

from __future__ import annotations

import asyncio
import re
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

import numpy as np

from lmx_lab.engine.echo.model import EchoModel
from lmx_lab.engine.echo.vocabulary import LONGEST_PIECE
from lmx_lab.engine.pending import Pending
from lmx_lab.engine.validation import check_characters
from lmx_lab.errors import ContextLengthError, EngineError, GenerationTimeoutError, InvalidRequestError, LabError
from lmx_lab.values.encoding import EncodeReport, Vectors
from lmx_lab.values.models import ModelEntry

T = TypeVar("T")
Text = str | tuple[int, ...]
Finish = Callable[[Vectors, EncodeReport], T]
DIMENSIONS = 384
WORD = re.compile(r"\w+")
PART_WEIGHT = 0.5
"""Of three letters, where a whole word weighs 1."""


def vector(text: str) -> Vectors:
    """The text as a vector of length 1."""
    row = np.zeros(DIMENSIONS, dtype=np.float32)
    for feature, weight in _features(text):
        code = zlib.crc32(feature.encode(errors="replace"))
        row[code % DIMENSIONS] += weight if code & 0x8000_0000 else -weight
    length = float(np.linalg.norm(row))
    if length == 0:
        row[0], length = 1.0, 1.0
    unit: Vectors = row / np.float32(length)
    return unit


def _features(text: str) -> Iterator[tuple[str, float]]:
    for word in WORD.findall(text.casefold()) or [text]:
        yield word, 1.0
        padded = f"<{word}>"
        for at in range(len(padded) - 2):
            yield padded[at : at + 3], PART_WEIGHT


class Texts:
    """The texts of one request: first ``read``, then computed one after the other. Belongs to the engine's loop."""

    def __init__(self, model: EchoModel, entry: ModelEntry, *, tokens_per_s: float | None) -> None:
        self._model = model
        self._entry = entry
        self._tokens_per_s = tokens_per_s
        self._arrived_at = time.perf_counter()
        self._texts: list[list[int]] = []
        self.computed = 0
        """Tokens of the texts that are done."""

    def read(self, text: Text, place: str, *, truncate: bool) -> None:
        """
        Raises:
            InvalidRequestError, ContextLengthError: as ``Engine.submit_embedding``.
        """
        vocabulary, limit, id_ = self._model.vocabulary, self._entry.context_length or 0, self._entry.id
        if isinstance(text, str):
            check_characters(text, place)
            # No more than it takes to know that a text is too long: encoding holds Python's lock.
            enough = (limit + 1) * LONGEST_PIECE
            tokens = vocabulary.encode(text[:enough])
            count = f"more than {limit}" if len(text) > enough else str(len(tokens))
        else:
            tokens = list(text)
            count = str(len(tokens))
            unknown = next((token for token in tokens if not 0 <= token < vocabulary.size), None)
            if unknown is not None:
                raise InvalidRequestError(
                    f"{place} has the token id {unknown}; {id_} knows 0 to {vocabulary.size - 1}", param=place
                )
        if not tokens:
            raise InvalidRequestError(f"{place} is empty: no token came out of it", param=place)
        if len(tokens) > limit and not truncate:
            raise ContextLengthError(
                f"{place} has {count} tokens and {id_} takes {limit}; shorten it"
                f"{'' if place == 'query' else ' or send truncate: true'}",
                param=place,
            )
        self._texts.append(tokens[:limit])

    def begin(
        self, running: set[asyncio.Task[Any]], timeout_s: float, finish: Finish[T], ended: Callable[[], None]
    ) -> Pending[T]:
        """Compute the texts in a task that is in ``running`` until it has ended."""
        future: Future[T] = Future()
        task = asyncio.create_task(self._computed(timeout_s), name="lmx-lab echo texts")
        loop = asyncio.get_running_loop()
        running.add(task)

        def hand_over(_: asyncio.Task[tuple[Vectors, EncodeReport]]) -> None:
            running.discard(task)
            ended()
            if future.set_running_or_notify_cancel():
                _hand_over(task, future, finish)

        def cancel(given: Future[T]) -> None:
            if given.cancelled() and not loop.is_closed():
                loop.call_soon_threadsafe(task.cancel)

        task.add_done_callback(hand_over)
        future.add_done_callback(cancel)
        return Pending(future, _as_it_is, future.cancel)

    async def _computed(self, timeout_s: float) -> tuple[Vectors, EncodeReport]:
        started_at, pace = time.perf_counter(), self._tokens_per_s
        rows: list[Vectors] = []
        try:
            async with asyncio.timeout(self._arrived_at + timeout_s - started_at):
                for tokens in self._texts:
                    rows.append(vector(self._model.vocabulary.decode(tokens)))
                    self.computed += len(tokens)
                    await asyncio.sleep(len(tokens) / pace if pace is not None else 0)
        except TimeoutError:
            raise GenerationTimeoutError(f"not finished after {timeout_s:g} s, the request's limit") from None
        report = EncodeReport(
            model=self._entry.id,
            texts=len(self._texts),
            tokens=sum(map(len, self._texts)),
            queue_s=started_at - self._arrived_at,
            compute_s=time.perf_counter() - started_at,
            peak_memory_bytes=self._model.memory_bytes,
        )
        return np.stack(rows), report


def _hand_over(task: asyncio.Task[tuple[Vectors, EncodeReport]], future: Future[T], finish: Finish[T]) -> None:
    """The end of a task, as the future's."""
    try:
        future.set_result(finish(*task.result()))
    except asyncio.CancelledError as exc:
        given = exc.args[0] if exc.args else None
        future.set_exception(given if isinstance(given, LabError) else EngineError("the work was cancelled"))
    except Exception as exc:
        future.set_exception(exc if isinstance(exc, LabError) else EngineError(f"{type(exc).__name__}: {exc}"))


def _as_it_is(result: T) -> T:
    return result
