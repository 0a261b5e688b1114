"""The order in which texts are computed, and how their requests end, with a fake encoder that records its batches."""

import time
import weakref
from types import SimpleNamespace
from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest

from lmx_lab.engine.cpu_blas import ThreadChoice
from lmx_lab.engine.memory import Budget
from lmx_lab.engine.mlx import memory
from lmx_lab.engine.mlx.encoding import BUSY_PART_TOKENS, MIN_LENGTH_RATIO, ON_CPU, PART_TOKENS, EncodeJob, EncodingLoop
from lmx_lab.engine.mlx.loop import Room
from lmx_lab.engine.texts import TextTokens
from lmx_lab.errors import ContextLengthError, EngineError, LabError, QueueFullError
from lmx_lab.values.engine import BlasReport


class FakeEncoder:
    """An encoder whose vector of a text is its first token; each batch has ``layers`` steps."""

    def __init__(self, *, layers=2, bytes_per_token=0):
        self.layers = layers
        self.bytes_per_token = bytes_per_token
        self.batches = []
        """The first tokens of the texts of each batch."""
        self.closed = 0
        self.failure_to_raise = None
        self.activation_fails = False

    def forward(self, batch):
        self.batches.append([text.tokens[0] for text in batch])
        self.lengths = [len(text.tokens) for text in batch]
        try:
            for _ in range(self.layers):
                if self.failure_to_raise is not None:
                    raise self.failure_to_raise
                yield mx.zeros(1)
        except GeneratorExit:
            self.closed += 1
            raise
        return np.array([[text.tokens[0]] for text in batch], dtype=np.float32)

    def activate(self, raw):
        if self.activation_fails:
            raise MemoryError("as an example")
        return raw + 0.5

    def batch_bytes(self, rows, length):
        return rows * length * self.bytes_per_token


class WatchedRoom(Room):
    """The memory of a device, without answers; it records how many bytes were to be freed."""

    def __init__(self, limit_bytes):
        super().__init__(Budget(None), limit_bytes, {})
        self.freed = []

    def free(self, excess_bytes):
        self.freed.append(excess_bytes)
        super().free(excess_bytes)


def create_loop(*, threads=1, limit_bytes=2**40, **changes):
    report = BlasReport(name="openblas", detail="", threads=threads, threads_fixed=False)
    return EncodingLoop(ThreadChoice(report), WatchedRoom(limit_bytes), **changes)


def job(encoder, lengths, *, first=0, **changes):
    """A job of texts with these lengths; the first token of each text is its number."""
    texts = [TextTokens((first + at,) + (0,) * (length - 1)) for at, length in enumerate(lengths)]
    return job_of(encoder, texts, **changes)


def job_of(encoder, texts, **changes):
    model = SimpleNamespace(entry=SimpleNamespace(id="watched"), encoded_tokens=0)
    return EncodeJob(
        texts=texts, encoder=weakref.ref(encoder), model=cast(Any, model), arrived_at=time.perf_counter(), **changes
    )


def step(loop, *jobs, busy=False):
    for submitted in jobs:
        loop.add(submitted)
    loop.step(0.0, busy=busy)


def run(loop, *jobs):
    step(loop, *jobs)
    while not loop.idle:
        step(loop)


def computed(encoder, lengths, **changes):
    """Compute a single job of texts with these lengths, and return it."""
    loop, submitted = create_loop(), job(encoder, lengths, **changes)
    run(loop, submitted)
    return submitted


def failure(of):
    error = of.done.exception(timeout=0)
    assert isinstance(error, LabError)
    return error


def test_equal_texts_are_computed_once():
    loop, encoder = create_loop(), FakeEncoder()
    texts = [TextTokens((1, 2)), TextTokens((5,)), TextTokens((1, 2)), TextTokens((1, 2), second_start=1)]
    submitted = job_of(encoder, texts)
    run(loop, submitted)
    assert submitted.done.result(timeout=0).ravel().tolist() == [1.5, 5.5, 1.5, 1.5]
    assert sum(len(batch) for batch in encoder.batches) == 3
    report = submitted.report("watched")
    assert (report.model, report.texts, report.tokens) == ("watched", 4, 7)
    assert report.queue_s >= 0
    assert report.compute_s > 0
    assert submitted.model.encoded_tokens == 5


def test_the_texts_of_a_batch_have_similar_lengths():
    loop, encoder = create_loop(), FakeEncoder()
    loop.add(job(encoder, [10, 100, 11, 90, 50, 12]))
    shortest_shares = []
    while not loop.idle:
        step(loop)
        shortest_shares.append(min(encoder.lengths) / max(encoder.lengths))
    assert encoder.batches == [[1, 3], [4], [5, 2, 0]]
    assert min(shortest_shares) >= MIN_LENGTH_RATIO


@pytest.mark.parametrize(("busy", "tokens"), [(False, PART_TOKENS), (True, BUSY_PART_TOKENS)])
def test_the_number_of_tokens_of_a_batch_is_limited(busy, tokens):
    loop, encoder = create_loop(), FakeEncoder()
    step(loop, job(encoder, [64] * 500), busy=busy)
    assert len(encoder.batches[0]) == tokens // 64


@pytest.mark.skipif(not ON_CPU, reason="on a GPU a batch has a single part")
def test_a_batch_has_a_part_for_each_core():
    loop, encoder = create_loop(threads=2), FakeEncoder()
    submitted = job(encoder, [64] * 7)
    step(loop, submitted)
    assert [len(part) for part in encoder.batches] == [4, 3]
    run(loop)
    assert submitted.done.result(timeout=0).ravel().tolist() == [at + 0.5 for at in range(7)]


@pytest.mark.skipif(not ON_CPU, reason="on a GPU a batch has a single part")
def test_cancelling_ends_all_parts_of_a_batch():
    loop, encoder = create_loop(threads=2), FakeEncoder(layers=5)
    submitted = job(encoder, [64] * 7)
    step(loop, submitted)
    loop.cancel(submitted)
    assert encoder.closed == 2


def test_a_text_longer_than_a_batch_is_computed_alone():
    encoder = FakeEncoder()
    assert computed(encoder, [PART_TOKENS * 2, PART_TOKENS * 2]).done.done()
    assert encoder.batches == [[1], [0]]


@pytest.mark.slow
def test_one_text_does_not_wait_for_ten_thousand():
    loop, encoder = create_loop(), FakeEncoder(layers=1)
    flood, single = job(encoder, [30] * 10_000), job(encoder, [5], first=20_000)
    step(loop, flood)
    loop.add(single)
    while not single.done.done():
        assert len(encoder.batches) <= 3
        step(loop)
    run(loop)
    assert len(flood.done.result(timeout=0)) == 10_000


def test_texts_of_several_requests_share_a_batch():
    loop, encoder = create_loop(), FakeEncoder()
    one, two = job(encoder, [30] * 3), job(encoder, [29], first=100)
    run(loop, one, two)
    assert encoder.batches == [[2, 1, 0, 100]]
    assert two.done.result(timeout=0).tolist() == [[100.5]]


def test_texts_for_different_models_do_not_share_a_batch():
    loop, encoder, other = create_loop(), FakeEncoder(), FakeEncoder()
    run(loop, job(encoder, [30]), job(other, [30], first=7))
    assert (encoder.batches, other.batches) == ([[0]], [[7]])


def test_cancelling_ends_a_batch_between_two_layers():
    loop, encoder = create_loop(), FakeEncoder(layers=5)
    submitted = job(encoder, [300])
    step(loop, submitted)
    loop.cancel(submitted)
    assert encoder.closed == 1
    assert loop.idle
    assert not submitted.done.done()


def test_cancelling_one_request_does_not_end_others_of_the_batch():
    loop, encoder = create_loop(), FakeEncoder(layers=5)
    leaves, stays = job(encoder, [100]), job(encoder, [100], first=9)
    step(loop, leaves, stays)
    loop.cancel(leaves)
    run(loop)
    assert encoder.closed == 0
    assert stays.done.result(timeout=0).tolist() == [[9.5]]


def test_cancelling_twice_or_too_late_does_nothing():
    loop, encoder = create_loop(), FakeEncoder()
    submitted = job(encoder, [3])
    run(loop, submitted)
    loop.cancel(submitted)
    loop.cancel(submitted)
    assert submitted.done.result(timeout=0).tolist() == [[0.5]]


def test_only_the_requests_of_a_failed_batch_fail():
    loop, encoder, other = create_loop(), FakeEncoder(), FakeEncoder()
    broken, fine = job(encoder, [300]), job(other, [10])
    encoder.failure_to_raise = ValueError("no such shape")
    run(loop, broken, fine)
    assert "no such shape" in failure(broken).message
    assert fine.done.result(timeout=0).tolist() == [[0.5]]


def test_an_error_of_the_encoder_is_passed_on_without_a_traceback_in_the_log(caplog):
    encoder = FakeEncoder()
    encoder.failure_to_raise = EngineError("watched computed numbers that are not finite")
    assert failure(computed(encoder, [3])).message == "watched computed numbers that are not finite"
    assert caplog.records == []


def test_the_error_of_a_batch_that_ran_out_of_memory_names_the_next_step():
    encoder = FakeEncoder()
    encoder.failure_to_raise = MemoryError("no more")
    assert "send fewer or shorter texts" in failure(computed(encoder, [300])).message


def test_a_result_that_cannot_be_made_fails_its_request_only():
    loop, encoder = create_loop(), FakeEncoder()
    broken, fine = job(encoder, [30]), job(encoder, [30], first=9, raw=True)
    encoder.activation_fails = True
    run(loop, broken, fine)
    assert "could not be made from the computed rows" in failure(broken).message
    assert fine.done.result(timeout=0).tolist() == [[9.0]]


def test_a_running_batch_keeps_the_activation_of_its_model():
    loop, encoder = create_loop(), FakeEncoder()
    submitted = job(encoder, [30])
    step(loop, submitted)
    del encoder
    run(loop)
    assert submitted.done.result(timeout=0).tolist() == [[0.5]]


def test_while_answers_are_generated_a_batch_waits_for_memory():
    encoder = FakeEncoder(bytes_per_token=1_000_000)
    loop = create_loop(limit_bytes=memory.used_bytes() + 10_000_000)
    submitted = job(encoder, [64])
    loop.add(submitted)
    for _ in range(3):
        step(loop, busy=True)
    assert not submitted.done.done()
    step(loop)
    assert isinstance(failure(submitted), ContextLengthError)
    assert "64 tokens needs 0.06 GB" in failure(submitted).message


def test_too_many_tokens_at_once_are_refused():
    loop, encoder = create_loop(max_tokens=100), FakeEncoder()
    loop.add(job(encoder, [150]))
    with pytest.raises(QueueFullError, match="other texts have 150 tokens and these have 3; 100 are allowed"):
        loop.add(job(encoder, [3]))


def test_requests_for_an_unloaded_encoder_end():
    loop, encoder = create_loop(), FakeEncoder()
    submitted = job(encoder, [3])
    del encoder
    run(loop, submitted)
    assert "was unloaded" in failure(submitted).message


def test_a_batch_is_as_large_as_memory_allows():
    encoder = FakeEncoder(bytes_per_token=1000)
    loop = create_loop(limit_bytes=memory.used_bytes() + 100_000)
    submitted = job(encoder, [64] * 3)
    run(loop, submitted)
    assert loop._room.freed
    assert encoder.batches == [[2], [1], [0]]
    assert submitted.done.done()


def test_all_jobs_can_be_ended_each_once():
    loop, encoder = create_loop(), FakeEncoder(layers=5)
    jobs = [job(encoder, [300]), job(encoder, [10])]
    step(loop, *jobs)
    loop.end_all(loop.jobs, EngineError("stopped"))
    assert [failure(submitted).message for submitted in jobs] == ["stopped", "stopped"]
    assert loop.idle
    assert encoder.closed == 1
