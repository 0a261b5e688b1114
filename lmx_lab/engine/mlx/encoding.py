"""Compute embeddings and reranker scores on the engine thread.

Texts of all requests are computed in batches of similar lengths, one layer at a time. Between two layers the engine
generates, runs commands and cancels requests, so these wait for one layer at most, or for part of a layer of a long
text.
"""

from __future__ import annotations

import bisect
import logging
import time
import weakref
from collections.abc import Generator
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from lmx_lab.engine.cpu_blas import ThreadChoice
from lmx_lab.engine.encoders.loading import LoadedEncoder
from lmx_lab.engine.mlx import memory
from lmx_lab.engine.mlx.jobs import Job, JobQueue
from lmx_lab.engine.mlx.loop import Room
from lmx_lab.engine.texts import TextJob, TextTokens
from lmx_lab.errors import EngineError, QueueFullError
from lmx_lab.values.outputs import Vectors

log = logging.getLogger(__name__)
ON_CPU = mx.default_device() == mx.cpu
PART_TOKENS = 256 if ON_CPU else 16_384
"""Number of tokens of each part of a batch, including padding. On a CPU the results of a layer then stay in the core's
cache: with MiniLM on two cores, 1,920 tokens take 395 ms in one batch and 320 ms in parts of 256 tokens."""
BUSY_PART_TOKENS = 256 if ON_CPU else 4096
"""The same while answers are generated, since their next tokens wait for a layer of the batch."""
MIN_LENGTH_RATIO = 0.8
"""Length of the shortest text of a batch relative to the longest: at most a fifth of the batch is padding."""
LAYERWISE_TOKENS = 64
"""Smaller batches are computed without interruption, since their layers take less time than an interruption."""


@dataclass(kw_only=True, eq=False)
class EncodeJob(TextJob, Job[Vectors]):
    """The texts of one request, and the rows that have been computed: vectors, or a reranker's scores."""

    encoder: weakref.ref[LoadedEncoder]
    """A weak reference, so that an object that refers to an ended request does not keep the weights in memory."""
    rows: dict[int, Vectors] = field(default_factory=dict)
    """Rows of the distinct texts that have been computed, by the index of the text."""
    left: list[tuple[int, int]] = field(init=False)
    """Length and index of each distinct text that is not in a batch yet, in ascending order of length."""
    same_as: list[int] = field(init=False)
    """For each text, the index of the first text equal to it. Equal texts get identical rows."""

    def __post_init__(self) -> None:
        first: dict[TextTokens, int] = {}
        self.same_as = [first.setdefault(text, index) for index, text in enumerate(self.texts)]
        self.left = sorted((len(text.tokens), index) for text, index in first.items())
        self._distinct = len(first)

    @property
    def is_complete(self) -> bool:
        return len(self.rows) == self._distinct

    @property
    def is_in_batch(self) -> bool:
        """Whether some of its texts are in the batch that is being computed."""
        return len(self.rows) + len(self.left) < self._distinct

    def take(self, shortest: float, longest: int, at_most: int) -> list[int]:
        """Remove up to ``at_most`` texts of these lengths from those that are left, and return their indices, the
        longest text first.
        """
        end = bisect.bisect_right(self.left, longest, key=lambda item: item[0])
        start = max(bisect.bisect_left(self.left, shortest, key=lambda item: item[0]), end - at_most)
        taken = self.left[start:end]
        del self.left[start:end]
        return [index for _, index in reversed(taken)]

    def result(self, encoder: LoadedEncoder) -> Vectors:
        """Return the rows of all texts, all of which must have been computed."""
        rows: Vectors = np.stack([self.rows[index] for index in self.same_as])
        return rows if self.raw else encoder.activate(rows)


@dataclass(kw_only=True, eq=False)
class BatchPart:
    """A part of a batch that is computed on a separate stream, concurrently with the other parts."""

    stream: mx.Stream
    layers: Generator[mx.array, None, Vectors]
    members: list[tuple[EncodeJob, int]]


@dataclass(kw_only=True, eq=False)
class EncodingBatch:
    """Texts that are computed together, layer by layer."""

    encoder: LoadedEncoder
    parts: list[BatchPart]
    tokens: int
    """Number of tokens, including padding."""
    pending: list[mx.array] = field(default_factory=list)
    """The hidden states of the layer that is being computed, one array for each part."""
    results: list[tuple[EncodeJob, int, Vectors]] = field(default_factory=list)

    @property
    def members(self) -> list[tuple[EncodeJob, int]]:
        """The texts, as job and index."""
        return [member for part in self.parts for member in part.members]

    def close(self) -> None:
        """Compute no more layers."""
        for part in self.parts:
            part.layers.close()

    def next_layer(self) -> list[mx.array]:
        """Return the hidden states of the next layer, which are not evaluated yet; empty after the last layer, when
        ``results`` are set.
        """
        hidden = []
        for part in self.parts:
            with mx.stream(part.stream):
                try:
                    hidden.append(next(part.layers))
                except StopIteration as end:
                    rows = zip(part.members, end.value, strict=True)
                    self.results += [(job, index, row) for (job, index), row in rows]
        return hidden


class EncodingLoop(JobQueue[EncodeJob, Vectors]):
    """Computes the texts of all encoders: jobs in turn, one batch each. Runs on the engine thread.

    Args:
        max_tokens: Number of tokens of all requests together. Python stores a token in about 40 bytes.
    """

    def __init__(self, threads: ThreadChoice, room: Room, *, max_tokens: int = 16_000_000) -> None:
        super().__init__()
        self._max_tokens = max_tokens
        self._threads = threads
        # One core computes each part: apart from matrix products, MLX uses only one core for much of a layer.
        self._streams = (
            [mx.new_stream(mx.cpu) for _ in range(threads.max_threads)] if ON_CPU else [mx.default_stream(mx.gpu)]
        )
        self._room = room
        self._batch: EncodingBatch | None = None

    def add(self, job: EncodeJob) -> None:
        """Queue a job.

        Raises:
            QueueFullError: the jobs have too many tokens.
        """
        tokens = sum(len(text.tokens) for text in job.texts)
        queued = sum(len(text.tokens) for other in self._jobs for text in other.texts)
        if queued and queued + tokens > self._max_tokens:
            raise QueueFullError(
                f"other texts have {queued} tokens and these have {tokens}; {self._max_tokens} are allowed in all; "
                "try again in 5 s",
                retry_after_s=5,
            )
        super().add(job)

    def step(self, limit_s: float, *, busy: bool) -> None:
        """Compute for about ``limit_s``, at least one layer.

        Args:
            busy: Whether answers are generated at the same time; batches are smaller then.
        """
        until = time.perf_counter() + limit_s
        while self._jobs:
            try:
                if self._batch is None:
                    self._batch = self._start_batch(BUSY_PART_TOKENS if busy else PART_TOKENS, may_wait=busy)
                if self._batch is not None:
                    self._advance(self._batch)
                elif busy:
                    break  # until the end of an answer frees memory
            except Exception as exc:
                self._batch = None
                failed = [job for job in self._jobs if job.is_in_batch] or self._jobs[:1]
                self._fail(failed, exc, work="the texts", remedy="send fewer or shorter texts")
            if time.perf_counter() >= until:
                break
        if busy and self._batch is not None:
            # Generation may use another number of threads.
            mx.eval(self._batch.pending)

    def _start_batch(self, part_tokens: int, *, may_wait: bool) -> EncodingBatch | None:
        """Return the next batch: the longest texts of the job whose turn it is, and texts of other jobs with similar
        lengths. None if there is nothing to do, or if memory is short.

        Args:
            may_wait: Whether the job waits if memory is short; otherwise it fails.
        """
        first = next((job for job in self._jobs if job.left), None)
        if first is None:
            return None
        encoder = first.encoder()
        if encoder is None:
            self.end_all([first], EngineError(f"{first.model.entry.id} was unloaded before this request ended"))
            return None
        longest = first.left[-1][0]
        for rows in (max(1, part_tokens // longest) * len(self._streams), 1):
            if (shortage := self._room.shortage(encoder.batch_bytes(rows, longest), tokens=longest)) is None:
                break
        else:
            if shortage is not None and not may_wait:
                self.end_all([first], shortage)
            return None
        members: list[tuple[EncodeJob, int]] = []
        for job in [first, *(job for job in self._jobs if job is not first)]:
            if job.encoder() is encoder:
                taken = job.take(longest * MIN_LENGTH_RATIO, longest, rows - len(members))
                members += [(job, index) for index in taken]
        for job, _ in members:
            job.start()
        # Moved behind the others, so that a request of one text does not wait for all batches of one of ten thousand.
        self._jobs.remove(first)
        self._jobs.append(first)
        parts = [
            BatchPart(stream=stream, layers=encoder.forward([job.texts[index] for job, index in part]), members=part)
            for at, stream in enumerate(self._streams)
            if (part := members[at :: len(self._streams)])
        ]
        longest = max(len(job.texts[index].tokens) for job, index in members)
        return EncodingBatch(encoder=encoder, parts=parts, tokens=longest * len(members))

    def _advance(self, batch: EncodingBatch) -> None:
        """Compute one layer, or the end of the batch."""
        if len(batch.parts) == 1:
            # The number of threads may change.
            mx.eval(batch.pending)
        # Short batches always use one thread, so that the same text always gets an identical vector.
        self._threads.prepare(batch.tokens if batch.tokens >= PART_TOKENS else 1, lanes=len(batch.parts))
        while hidden := batch.next_layer():
            if batch.tokens >= LAYERWISE_TOKENS:
                # One layer is computed while the graph of the next one is built.
                mx.async_eval(hidden)  # type: ignore[no-untyped-call]
                mx.eval(batch.pending)
                batch.pending = hidden
                return
        self._batch = None
        peak = memory.take_peak_bytes()
        self._room.note_peak(peak)
        for job, index, row in batch.results:
            job.model.encoded_tokens += len(job.texts[index].tokens)
            job.rows[index] = row
            job.peak_memory_bytes = max(job.peak_memory_bytes, peak)
        for job in [job for job in self._jobs if job.is_complete]:
            try:
                result = job.result(batch.encoder)
            except Exception as exc:
                log.exception("the result of a request for embeddings or scores could not be made from its rows")
                message = f"the result could not be made from the computed rows: {type(exc).__name__}: {exc}"
                self._end(job, EngineError(message))
            else:
                self._end(job, result)

    def cancel(self, job: EncodeJob) -> None:
        """See ``JobQueue``. The batch of the job is still computed if it has texts of other jobs."""
        super().cancel(job)
        if self._batch is not None and not any(member in self._jobs for member, _ in self._batch.members):
            self._batch.close()
            self._batch = None
