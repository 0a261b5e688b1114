"""Which texts are computed when, and how their requests end: with a made-up encoder, whose batches can be watched."""

from __future__ import annotations

import time
import weakref
from collections.abc import Generator, Sequence
from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest

from lmx_lab.engine.cpu_blas import ThreadChoice
from lmx_lab.engine.encoders import TextTokens
from lmx_lab.engine.mlx import memory
from lmx_lab.engine.mlx.encoding import BUCKET, BUSY_LANE_TOKENS, LANE_TOKENS, EncodeJob, Encoding
from lmx_lab.errors import ContextLengthError, EngineError, GenerationTimeoutError, LabError, QueueFullError
from lmx_lab.values.encoding import Vectors
from lmx_lab.values.engine import BlasReport


class Watched:
    """Gives each text its first token as a vector; ``layers`` steps a batch."""

    def __init__(self, *, layers: int = 2, bytes_per_token: int = 0) -> None:
        self.layers = layers
        self.bytes_per_token = bytes_per_token
        self.batches: list[list[int]] = []
        """Of each batch, the first tokens."""
        self.closed = 0
        self.fails: Exception | None = None
        self.fails_to_activate = False

    def forward(self, batch: Sequence[TextTokens]) -> Generator[mx.array, None, Vectors]:
        self.batches.append([text.tokens[0] for text in batch])
        self.lengths = [len(text.tokens) for text in batch]
        try:
            for _ in range(self.layers):
                if self.fails is not None:
                    raise self.fails
                yield mx.zeros(1)
        except GeneratorExit:
            self.closed += 1
            raise
        return np.array([[text.tokens[0]] for text in batch], dtype=np.float32)

    def activate(self, raw: Vectors) -> Vectors:
        if self.fails_to_activate:
            raise MemoryError("as an example")
        return raw + 0.5

    def batch_bytes(self, rows: int, length: int) -> int:
        return rows * length * self.bytes_per_token


class Telling(Encoding):
    """Hands out what has ended after each call, as the engine does."""

    def step(self, limit_s: float, *, busy: bool) -> None:
        super().step(limit_s, busy=busy)
        self.deliver()

    def cancel(self, job: EncodeJob) -> None:
        super().cancel(job)
        self.deliver()

    def end_all(self, jobs: Sequence[EncodeJob], error: LabError) -> None:
        super().end_all(jobs, error)
        self.deliver()


def encoding(*, threads: int = 1, **changes: Any) -> Encoding:
    limits = {"queue_limit": 8, "limit_bytes": 2**40, "make_room": lambda _: None, "note_peak": lambda _: None}
    report = BlasReport(name="openblas", detail="", threads=threads, threads_fixed=False)
    return Telling(ThreadChoice(report), **(limits | changes))


def job(encoder: Watched, lengths: Sequence[int], *, first: int = 0, **changes: Any) -> EncodeJob:
    """Texts of these lengths, the first token of each its number."""
    texts = [TextTokens((first + at,) + (0,) * (length - 1)) for at, length in enumerate(lengths)]
    fields: dict[str, Any] = {"model_id": "watched", "arrived_at": time.perf_counter(), "timeout_s": 60.0}
    reference: Any = weakref.ref(encoder)
    return EncodeJob(texts=texts, encoder=reference, **(fields | changes))


def run(work: Encoding, *, busy: bool = False) -> None:
    while not work.idle:
        work.step(0.0, busy=busy)


def failure(of: EncodeJob) -> LabError:
    error = of.done.exception(timeout=0)
    assert isinstance(error, LabError)
    return error


def test_rows_come_back_in_the_order_of_the_texts() -> None:
    work, encoder = encoding(), Watched()
    asked = job(encoder, [3, 9, 1, 2, 9])
    work.add(asked)
    run(work)
    assert asked.done.result(timeout=0).rows.ravel().tolist() == [0.5, 1.5, 2.5, 3.5, 4.5]


def test_equal_texts_are_computed_once() -> None:
    work, encoder = encoding(), Watched()
    asked = EncodeJob(
        texts=[TextTokens((1, 2)), TextTokens((5,)), TextTokens((1, 2)), TextTokens((1, 2), second_start=1)],
        encoder=cast(Any, weakref.ref(encoder)),
        model_id="watched",
        arrived_at=time.perf_counter(),
        timeout_s=60.0,
    )
    work.add(asked)
    run(work)
    encoded = asked.done.result(timeout=0)
    assert encoded.rows.ravel().tolist() == [1.5, 5.5, 1.5, 1.5]
    assert sum(len(batch) for batch in encoder.batches) == 3
    assert encoded.report.tokens == 7


def test_raw_scores_are_left_as_they_are() -> None:
    work, encoder = encoding(), Watched()
    asked = job(encoder, [3], raw=True)
    work.add(asked)
    run(work)
    assert asked.done.result(timeout=0).rows.tolist() == [[0.0]]


def test_the_report_counts_texts_and_tokens() -> None:
    work, encoder = encoding(), Watched()
    asked = job(encoder, [3, 9])
    work.add(asked)
    run(work)
    report = asked.done.result(timeout=0).report
    assert (report.model, report.texts, report.tokens) == ("watched", 2, 12)
    assert report.queue_s >= 0
    assert report.compute_s > 0
    assert work.tokens == 12


def test_batches_hold_like_lengths_only() -> None:
    work, encoder = encoding(), Watched()
    work.add(job(encoder, [10, 100, 11, 90, 50, 12]))
    shortest_shares = []
    while not work.idle:
        work.step(0.0, busy=False)
        shortest_shares.append(min(encoder.lengths) / max(encoder.lengths))
    assert encoder.batches == [[1, 3], [4], [5, 2, 0]]
    assert min(shortest_shares) >= BUCKET


@pytest.mark.parametrize(("busy", "tokens"), [(False, LANE_TOKENS), (True, BUSY_LANE_TOKENS)])
def test_a_batch_has_so_many_tokens(busy: bool, tokens: int) -> None:
    work, encoder = encoding(), Watched()
    work.add(job(encoder, [64] * 500))
    work.step(0.0, busy=busy)
    assert len(encoder.batches[0]) == tokens // 64


def test_a_batch_has_a_lane_for_each_core() -> None:
    work, encoder = encoding(threads=2), Watched()
    asked = job(encoder, [64] * 7)
    work.add(asked)
    work.step(0.0, busy=False)
    assert [len(lane) for lane in encoder.batches] == [4, 3]
    run(work)
    assert asked.done.result(timeout=0).rows.ravel().tolist() == [at + 0.5 for at in range(7)]


def test_giving_up_ends_all_lanes() -> None:
    work, encoder = encoding(threads=2), Watched(layers=5)
    asked = job(encoder, [64] * 7)
    work.add(asked)
    work.step(0.0, busy=False)
    work.cancel(asked)
    assert encoder.closed == 2


def test_a_text_longer_than_a_batch_is_computed_alone() -> None:
    work, encoder = encoding(), Watched()
    asked = job(encoder, [LANE_TOKENS * 2, LANE_TOKENS * 2])
    work.add(asked)
    run(work)
    assert encoder.batches == [[1], [0]]
    assert asked.done.done()


def test_one_text_does_not_wait_for_ten_thousand() -> None:
    work, encoder = encoding(), Watched(layers=1)
    flood, single = job(encoder, [30] * 10_000), job(encoder, [5], first=20_000)
    work.add(flood)
    work.step(0.0, busy=False)
    work.add(single)
    run_until(work, single)
    assert len(encoder.batches) <= 3
    run(work)
    assert len(flood.done.result(timeout=0).rows) == 10_000


def run_until(work: Encoding, awaited: EncodeJob) -> None:
    for _ in range(1000):
        if awaited.done.done():
            return
        work.step(0.0, busy=False)
    pytest.fail("never computed")


def test_texts_of_several_requests_share_a_batch() -> None:
    work, encoder = encoding(), Watched()
    one, two = job(encoder, [30] * 3), job(encoder, [29], first=100)
    work.add(one)
    work.add(two)
    run(work)
    assert encoder.batches == [[2, 1, 0, 100]]
    assert two.done.result(timeout=0).rows.tolist() == [[100.5]]


def test_texts_for_another_model_do_not() -> None:
    work, encoder, other = encoding(), Watched(), Watched()
    work.add(job(encoder, [30]))
    work.add(job(other, [30], first=7))
    run(work)
    assert (encoder.batches, other.batches) == ([[0]], [[7]])


def test_giving_up_in_the_middle_of_a_batch_ends_it_there() -> None:
    work, encoder = encoding(), Watched(layers=5)
    asked = job(encoder, [300])
    work.add(asked)
    work.step(0.0, busy=False)
    work.cancel(asked)
    assert encoder.closed == 1
    assert work.idle
    assert isinstance(failure(asked), EngineError)


def test_giving_up_does_not_end_what_shares_the_batch() -> None:
    work, encoder = encoding(), Watched(layers=5)
    leaves, stays = job(encoder, [100]), job(encoder, [100], first=9)
    work.add(leaves)
    work.add(stays)
    work.step(0.0, busy=False)
    work.cancel(leaves)
    run(work)
    assert encoder.closed == 0
    assert stays.done.result(timeout=0).rows.tolist() == [[9.5]]


def test_giving_up_twice_or_too_late_is_nothing() -> None:
    work, encoder = encoding(), Watched()
    asked = job(encoder, [3])
    work.add(asked)
    run(work)
    work.cancel(asked)
    work.cancel(asked)
    assert asked.done.result(timeout=0).rows.tolist() == [[0.5]]


def test_a_deadline_ends_what_waits_and_what_runs() -> None:
    work, encoder = encoding(), Watched(layers=5)
    late = job(encoder, [300], arrived_at=time.perf_counter() - 10, timeout_s=5.0)
    fine = job(encoder, [300])
    work.add(late)
    work.add(fine)
    run(work)
    assert isinstance(failure(late), GenerationTimeoutError)
    assert fine.done.result(timeout=0).rows.tolist() == [[0.5]]


def test_a_failed_batch_fails_its_requests_and_no_other() -> None:
    work, encoder, other = encoding(), Watched(), Watched()
    broken, fine = job(encoder, [300]), job(other, [10])
    encoder.fails = ValueError("no such shape")
    work.add(broken)
    work.add(fine)
    run(work)
    assert "no such shape" in failure(broken).message
    assert fine.done.result(timeout=0).rows.tolist() == [[0.5]]


def test_out_of_memory_in_a_batch_says_what_to_do() -> None:
    work, encoder = encoding(), Watched()
    encoder.fails = MemoryError("no more")
    asked = job(encoder, [300])
    work.add(asked)
    run(work)
    assert "send fewer or shorter texts" in failure(asked).message


def test_a_failure_at_the_end_of_a_request_is_its_own() -> None:
    work, encoder = encoding(), Watched()
    broken, fine = job(encoder, [30]), job(encoder, [30], first=9, raw=True)
    work.add(broken)
    work.add(fine)
    encoder.fails_to_activate = True
    run(work)
    assert "could not be put together" in failure(broken).message
    assert fine.done.result(timeout=0).rows.tolist() == [[9.0]]


def test_the_activation_is_not_lost_with_the_model() -> None:
    work, encoder = encoding(), Watched()
    asked = job(encoder, [30])
    work.add(asked)
    work.step(0.0, busy=False)
    del encoder
    run(work)
    assert asked.done.result(timeout=0).rows.tolist() == [[0.5]]


def test_beside_answers_a_batch_waits_for_memory() -> None:
    encoder = Watched(bytes_per_token=1_000_000)
    work = encoding(limit_bytes=memory.used_bytes() + 10_000_000)
    asked = job(encoder, [64])
    work.add(asked)
    for _ in range(3):
        work.step(0.0, busy=True)
    assert not asked.done.done()
    work.step(0.0, busy=False)
    assert isinstance(failure(asked), ContextLengthError)


def test_too_many_tokens_at_once_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmx_lab.engine.mlx.encoding.MOST_TOKENS", 100)
    work, encoder = encoding(), Watched()
    work.add(job(encoder, [150]))
    with pytest.raises(QueueFullError, match="150 tokens are under way, and these have 3; 100"):
        work.add(job(encoder, [3]))


def test_an_encoder_that_is_gone_ends_its_requests() -> None:
    work, encoder = encoding(), Watched()
    asked = job(encoder, [3])
    del encoder
    work.add(asked)
    run(work)
    assert "was unloaded" in failure(asked).message


def test_a_batch_is_as_large_as_memory_allows() -> None:
    room: list[int] = []
    encoder = Watched(bytes_per_token=1000)
    work = encoding(limit_bytes=memory.used_bytes() + 100_000, make_room=room.append)
    asked = job(encoder, [64] * 3)
    work.add(asked)
    run(work)
    assert room
    assert encoder.batches == [[2], [1], [0]]
    assert asked.done.done()


def test_a_text_that_memory_cannot_take_is_refused_with_the_numbers() -> None:
    encoder = Watched(bytes_per_token=1_000_000)
    work = encoding(limit_bytes=memory.used_bytes() + 10_000_000)
    asked = job(encoder, [64])
    work.add(asked)
    run(work)
    assert isinstance(failure(asked), ContextLengthError)
    assert "64 tokens takes 0.06 GB" in failure(asked).message


def test_too_many_requests_are_refused() -> None:
    work, encoder = encoding(queue_limit=2), Watched()
    work.add(job(encoder, [3]))
    work.add(job(encoder, [3]))
    with pytest.raises(QueueFullError, match="2 requests"):
        work.add(job(encoder, [3]))


def test_ending_all_ends_each_once() -> None:
    work, encoder = encoding(), Watched(layers=5)
    jobs = [job(encoder, [300]), job(encoder, [10])]
    for asked in jobs:
        work.add(asked)
    work.step(0.0, busy=False)
    work.end_all(work.queued + work.running, EngineError("stopped"))
    assert [failure(asked).message for asked in jobs] == ["stopped", "stopped"]
    assert work.idle
    assert encoder.closed == 1
