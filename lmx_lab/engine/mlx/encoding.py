"""Embedding and reranking on the engine thread: texts of all requests in batches of like lengths, layer by layer.

A layer, or of a long text a part of one, is the longest that anything else has to wait: in between the engine
generates, takes commands and notices that a request was given up.
"""

from __future__ import annotations

import bisect
import logging
import time
import traceback
import weakref
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from lmx_lab.engine.admission import AdmissionControl, Permit
from lmx_lab.engine.cpu_blas import ThreadChoice
from lmx_lab.engine.encoders import LoadedEncoder, TextTokens
from lmx_lab.engine.mlx import memory
from lmx_lab.errors import ContextLengthError, EngineError, GenerationTimeoutError, LabError, QueueFullError
from lmx_lab.values.encoding import EncodeReport, Vectors

log = logging.getLogger(__name__)
ON_CPU = mx.default_device() == mx.cpu
LANE_TOKENS = 256 if ON_CPU else 16_384
"""Of a batch, padding included, for each of its lanes. On a CPU what a layer computes then stays in the core's cache:
MiniLM, two cores, 1,920 tokens in one go 395 ms, in lanes of 256 tokens 320 ms."""
BUSY_LANE_TOKENS = 256 if ON_CPU else 4096
"""The same while answers are generated: each waits for a layer of a batch."""
MOST_TOKENS = 16_000_000
"""Of all requests together: Python keeps a token in about 40 bytes."""
BUCKET = 0.8
"""The shortest text of a batch as a share of the longest: at most a fifth is padding."""
LAZY_TOKENS = 64
"""Smaller batches are computed at once: their layers take less time than looking up in between."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Encoded:
    """A row for each text, in their order: vectors, or a reranker's raw scores."""

    rows: Vectors
    report: EncodeReport


@dataclass(kw_only=True, eq=False)
class EncodeJob:
    """The texts of one request and what has been computed of them."""

    texts: Sequence[TextTokens]
    encoder: weakref.ref[LoadedEncoder]
    """Weakly: whoever still holds an ended request must not hold the weights."""
    model_id: str
    permit: Permit
    arrived_at: float
    timeout_s: float
    raw: bool = False
    """Of a reranker, without its activation."""
    done: Future[Encoded] = field(default_factory=Future)
    rows: dict[int, Vectors] = field(default_factory=dict)
    """Of the distinct texts that have been computed, by index."""
    left: list[tuple[int, int]] = field(init=False)
    """Length and index of each distinct text that no batch has taken yet, the shortest first."""
    same_as: list[int] = field(init=False)
    """For each text, the index of the first one that is equal: equal texts shall have equal rows, to the last bit."""
    started_at: float = 0.0
    peak_memory_bytes: int = 0

    def __post_init__(self) -> None:
        first: dict[TextTokens, int] = {}
        self.same_as = [first.setdefault(text, index) for index, text in enumerate(self.texts)]
        self.left = sorted((len(text.tokens), index) for text, index in first.items())
        self._distinct = len(first)

    @property
    def complete(self) -> bool:
        return len(self.rows) == self._distinct

    @property
    def in_pass(self) -> bool:
        """Whether some of its texts were taken by a batch that has not given their rows."""
        return len(self.rows) + len(self.left) < self._distinct

    def take(self, shortest: float, longest: int, most: int) -> list[int]:
        """The indices of up to ``most`` texts of such lengths, the longest first; they are no longer left."""
        end = bisect.bisect_right(self.left, longest, key=lambda it: it[0])
        start = max(bisect.bisect_left(self.left, shortest, key=lambda it: it[0]), end - most)
        taken = self.left[start:end]
        del self.left[start:end]
        return [index for _, index in reversed(taken)]

    def encoded(self, encoder: LoadedEncoder, now: float) -> Encoded:
        """The result, once every text has its row."""
        report = EncodeReport(
            model=self.model_id,
            texts=len(self.texts),
            tokens=sum(len(text.tokens) for text in self.texts),
            queue_s=self.started_at - self.arrived_at,
            compute_s=now - self.started_at,
            peak_memory_bytes=self.peak_memory_bytes,
        )
        rows = np.stack([self.rows[index] for index in self.same_as])
        return Encoded(rows=rows if self.raw else encoder.activate(rows), report=report)


@dataclass(kw_only=True, eq=False)
class Lane:
    """A part of a batch, computed beside the others on a stream of its own."""

    stream: mx.Stream
    layers: Generator[mx.array, None, Vectors]
    members: list[tuple[EncodeJob, int]]


@dataclass(kw_only=True, eq=False)
class Pass:
    """A batch on its way through the layers."""

    encoder: LoadedEncoder
    lanes: list[Lane]
    tokens: int
    """Padding included."""
    ahead: list[mx.array] = field(default_factory=list)
    """The hidden states of the layer that is being computed."""
    results: list[tuple[EncodeJob, int, Vectors]] = field(default_factory=list)

    @property
    def members(self) -> list[tuple[EncodeJob, int]]:
        return [member for lane in self.lanes for member in lane.members]

    def close(self) -> None:
        for lane in self.lanes:
            lane.layers.close()

    def layer(self) -> list[mx.array]:
        """What the next layer is to compute; empty after the last one, when ``results`` are there."""
        hidden = []
        for lane in self.lanes:
            with mx.stream(lane.stream):
                try:
                    hidden.append(next(lane.layers))
                except StopIteration as end:
                    rows = zip(lane.members, end.value, strict=True)
                    self.results += [(job, index, row) for (job, index), row in rows]
        return hidden


class Encoding:
    """Takes jobs, computes them in turn, a batch each, and ends each exactly once. Belongs to the engine thread.

    Args:
        queue_limit: Jobs that may be there at the same time.
        make_room: Asked for bytes that a batch needs beyond the limit; gives up what is only kept.
        note_peak: Told the highest memory of each batch.
    """

    def __init__(
        self,
        threads: ThreadChoice,
        *,
        limit_bytes: int,
        make_room: Callable[[int], None],
        note_peak: Callable[[int], None],
    ) -> None:
        self._threads = threads
        # A core computes each lane alone: beside matrix products much is left that MLX does on one core only.
        self._streams = (
            [mx.new_stream(mx.cpu) for _ in range(threads.max_threads)] if ON_CPU else [mx.default_stream(mx.gpu)]
        )
        self._limit_bytes = limit_bytes
        self._make_room = make_room
        self._note_peak = note_peak
        self._jobs: list[EncodeJob] = []
        """Whose turn it is comes first."""
        self._pass: Pass | None = None
        self._ended: list[tuple[EncodeJob, Encoded | LabError]] = []
        """Whoever waits for them is told by ``deliver()``."""
        self.tokens = 0
        """Computed since the engine started."""

    @property
    def idle(self) -> bool:
        return not self._jobs

    @property
    def running(self) -> list[EncodeJob]:
        return [job for job in self._jobs if job.started_at]

    @property
    def queued(self) -> list[EncodeJob]:
        return [job for job in self._jobs if not job.started_at]

    def add(self, job: EncodeJob) -> None:
        """Take a job in.

        Raises:
            QueueFullError: too many are there.
        """
        tokens = sum(len(text.tokens) for text in job.texts)
        there = sum(len(text.tokens) for other in self._jobs for text in other.texts)
        if there and there + tokens > MOST_TOKENS:
            said = f"texts of {there} tokens are under way, and these have {tokens}; {MOST_TOKENS} may be in all"
            raise QueueFullError(f"{said}; try again in 5 s", retry_after_s=5)
        # Marked as running, it cannot be cancelled by a caller who leaves; ``cancel`` gives it up.
        job.done.set_running_or_notify_cancel()
        self._jobs.append(job)

    def cancel(self, job: EncodeJob) -> None:
        """Nobody waits any more: compute no more of it than the others of its batch need."""
        self._fail(job, EngineError("the request was given up"))

    def end_requests(self, admission: AdmissionControl, error: LabError, *, queued_only: bool) -> None:
        """End the jobs that hold permits of this admission control."""
        jobs = self.queued if queued_only else self._jobs
        self.end_all([job for job in jobs if job.permit.admission is admission], error)

    def end_all(self, jobs: Sequence[EncodeJob], error: LabError) -> None:
        for job in jobs:
            self._fail(job, error)

    def deliver(self) -> None:
        """Hand out what has ended: figures that were renewed before it have the work of every answer."""
        for job, end in self._ended:
            if isinstance(end, LabError):
                job.done.set_exception(end)
            else:
                job.done.set_result(end)
        self._ended.clear()

    def step(self, limit_s: float, *, busy: bool) -> None:
        """Compute for about so long, a layer at least; in smaller batches if others are ``busy`` beside."""
        until = time.perf_counter() + limit_s
        self._expire()
        while self._jobs:
            try:
                if self._pass is None:
                    self._pass = self._begin(BUSY_LANE_TOKENS if busy else LANE_TOKENS, patient=busy)
                if self._pass is not None:
                    self._advance(self._pass)
                elif busy:
                    break  # until answers have given back the memory
            except Exception as exc:
                self._fail_pass(exc)
            if time.perf_counter() >= until:
                break
        if busy and self._pass is not None:
            # What follows may compute with another number of threads.
            mx.eval(self._pass.ahead)

    def _expire(self) -> None:
        now = time.perf_counter()
        for job in [job for job in self._jobs if now > job.arrived_at + job.timeout_s]:
            limit = f"not finished after {job.timeout_s:g} s, the request's limit (request_timeout_s); send fewer texts"
            self._fail(job, GenerationTimeoutError(limit))

    def _begin(self, lane_tokens: int, *, patient: bool) -> Pass | None:
        """The next batch: the longest texts of the job whose turn it is, and what others have of that length.

        None if there is nothing to do, or not enough memory as yet; unless ``patient``, the job then fails.
        """
        first = next((job for job in self._jobs if job.left), None)
        if first is None:
            return None
        encoder = first.encoder()
        if encoder is None:
            self._fail(first, EngineError(f"{first.model_id} was unloaded before this request ended"))
            return None
        longest = first.left[-1][0]
        rows = self._rows(encoder, longest, max(1, lane_tokens // longest) * len(self._streams))
        if not rows:
            if not patient:
                self._fail(first, self._too_large(encoder, longest))
            return None
        members: list[tuple[EncodeJob, int]] = []
        for job in [first, *(job for job in self._jobs if job is not first)]:
            if job.encoder() is encoder:
                taken = job.take(longest * BUCKET, longest, rows - len(members))
                members += [(job, index) for index in taken]
        now = time.perf_counter()
        for job, _ in members:
            job.started_at = job.started_at or now
        # Behind the others: a request with ten thousand texts leaves room for one with a single text.
        self._jobs.remove(first)
        self._jobs.append(first)
        return self._pass_of(encoder, members)

    def _pass_of(self, encoder: LoadedEncoder, members: list[tuple[EncodeJob, int]]) -> Pass:
        lanes = [
            Lane(stream=stream, layers=encoder.passes([job.texts[index] for job, index in part]), members=part)
            for at, stream in enumerate(self._streams)
            if (part := members[at :: len(self._streams)])
        ]
        longest = max(len(job.texts[index].tokens) for job, index in members)
        return Pass(encoder=encoder, lanes=lanes, tokens=longest * len(members))

    def _rows(self, encoder: LoadedEncoder, length: int, rows: int) -> int:
        """How many texts of this length, at most ``rows``, fit into memory together; 0 if not even one."""
        for attempt in (rows, 1):
            excess = memory.used_bytes() + encoder.batch_bytes(attempt, length) - self._limit_bytes
            if excess > 0:
                self._make_room(excess)
            if memory.used_bytes() + encoder.batch_bytes(attempt, length) <= self._limit_bytes:
                return attempt
        return 0

    def _too_large(self, encoder: LoadedEncoder, length: int) -> LabError:
        needed, used = encoder.batch_bytes(1, length), memory.used_bytes()
        return ContextLengthError(
            f"a text of {length} tokens takes {needed / 1e9:.2f} GB beside the {used / 1e9:.2f} GB in use, "
            f"{self._limit_bytes / 1e9:.2f} GB are allowed; shorten it, or raise memory_limit_bytes"
        )

    def _advance(self, batch: Pass) -> None:
        """One layer, or the end of the batch."""
        if len(batch.lanes) == 1:
            # The number of threads may change.
            mx.eval(batch.ahead)
        # Short work by one thread, whatever there was before: the same text gets the same vector to the last bit.
        self._threads.prepare(batch.tokens if batch.tokens >= LANE_TOKENS else 1, lanes=len(batch.lanes))
        while hidden := batch.layer():
            if batch.tokens >= LAZY_TOKENS:
                # One layer is computed while the next one is put together.
                mx.async_eval(hidden)  # type: ignore[no-untyped-call]
                mx.eval(batch.ahead)
                batch.ahead = hidden
                return
        self._pass = None
        peak = memory.take_peak_bytes()
        self._note_peak(peak)
        self.tokens += sum(len(job.texts[index].tokens) for job, index in batch.members)
        for job, index, row in batch.results:
            job.rows[index] = row
            job.peak_memory_bytes = max(job.peak_memory_bytes, peak)
        for job in [job for job in self._jobs if job.complete]:
            self._complete(job, batch.encoder)

    def _complete(self, job: EncodeJob, encoder: LoadedEncoder) -> None:
        try:
            encoded = job.encoded(encoder, time.perf_counter())
        except Exception as exc:
            log.exception("a request for embeddings or scores failed at its end")
            self._fail(job, EngineError(f"the rows could not be put together: {type(exc).__name__}: {exc}"))
            return
        self._end(job, encoded)

    def _fail_pass(self, exc: Exception) -> None:
        """The requests of the batch fail; the model stays."""
        log.error("computing a batch of texts failed:\n%s", "".join(traceback.format_exception(exc)))
        exc.__traceback__ = None
        self._pass = None
        why = f"{type(exc).__name__}: {exc}"
        if memory.is_out_of_memory(exc):
            why = f"out of memory ({exc}); send fewer or shorter texts"
        error = EngineError(f"the texts could not be computed: {why}")
        self.end_all([job for job in self._jobs if job.in_pass] or self._jobs[:1], error)
        memory.release()

    def _fail(self, job: EncodeJob, error: LabError) -> None:
        if job in self._jobs:
            self._end(job, error)
        if self._pass is not None and not any(member in self._jobs for member, _ in self._pass.members):
            self._pass.close()
            self._pass = None

    def _end(self, job: EncodeJob, end: Encoded | LabError) -> None:
        self._jobs.remove(job)
        job.permit.release()
        self._ended.append((job, end))
