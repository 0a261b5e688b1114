"""Embed texts by feature hashing: texts that share words, or parts of words, have similar vectors.

Each word, and each sequence of three letters in a word, adds to one component of the vector, which is selected by a
hash (Weinberger et al., arXiv 0902.2206).
"""

from __future__ import annotations

import asyncio
import re
import time
import zlib
from collections.abc import Iterator, Sequence

import numpy as np

from lmx_lab.engine.echo.model import LONGEST_PIECE, EchoModel
from lmx_lab.engine.loop_engine import deadline
from lmx_lab.engine.validation import check_characters, check_text, check_token_ids
from lmx_lab.values.models import ModelEntry
from lmx_lab.values.outputs import EncodeReport, Vectors

DIMENSIONS = 384
WORD = re.compile(r"\w+")
PART_WEIGHT = 0.5
"""Weight of a sequence of three letters; a whole word has the weight 1."""


def vector(text: str) -> Vectors:
    """Return the text as a vector of length 1 with ``DIMENSIONS`` components."""
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


class EchoTexts:
    """The texts of one request, which are first added with ``read`` and then computed. Belongs to the engine's loop."""

    def __init__(self, model: EchoModel, entry: ModelEntry, *, tokens_per_s: float | None) -> None:
        self._model = model
        self._entry = entry
        self._tokens_per_s = tokens_per_s
        self._arrived_at = time.perf_counter()
        self._texts: list[list[int]] = []
        self.computed_tokens = 0
        """Number of tokens of the texts that have been computed."""

    def read(self, text: str | Sequence[int], param: str, *, truncate: bool) -> None:
        """Add a text, or the token ids of a text.

        Raises:
            InvalidRequestError, ContextLengthError: see ``InferenceEngine.submit_embedding``.
        """
        vocabulary, limit, count = self._model.vocabulary, self._entry.context_length or 0, None
        if isinstance(text, str):
            check_characters(text, param)
            # Only as much as is needed to detect that a text is too long, because encoding holds the GIL.
            enough = (limit + 1) * LONGEST_PIECE
            tokens = vocabulary.encode(text[:enough])
            if len(text) > enough:
                count = f"more than {limit}"
        else:
            tokens = list(text)
            check_token_ids(tokens, param, self._entry, vocabulary.size)
        check_text(tokens, param, self._entry, limit, truncate=truncate, count=count)
        self._texts.append(tokens[:limit])

    async def compute(self, timeout_s: float) -> tuple[Vectors, EncodeReport]:
        """Return a vector for each text, and the report.

        Raises:
            GenerationTimeoutError: the texts are not finished ``timeout_s`` after their arrival.
        """
        started_at, pace = time.perf_counter(), self._tokens_per_s
        rows: list[Vectors] = []
        async with deadline(self._arrived_at, timeout_s):
            for tokens in self._texts:
                rows.append(vector(self._model.vocabulary.decode(tokens)))
                self.computed_tokens += len(tokens)
                await asyncio.sleep(len(tokens) / pace if pace is not None else 0)
        report = EncodeReport(
            model=self._entry.id,
            texts=len(self._texts),
            tokens=sum(map(len, self._texts)),
            queue_s=started_at - self._arrived_at,
            compute_s=time.perf_counter() - started_at,
            peak_memory_bytes=self._model.memory_bytes,
        )
        return np.stack(rows), report
