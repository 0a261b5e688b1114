"""Chunks of prompts are short enough that streams do not stall, and long enough to be efficient."""

import pytest

from lmx_lab.engine.mlx.prefill import PREFILL_STEP_S, PrefillPace


class Machine:
    """A simulated machine that takes a fixed time for each decode step and each prompt token."""

    def __init__(self, *, decode_s, token_s, step_s=0.0):
        self.decode_s, self.token_s, self.step_s = decode_s, token_s, step_s
        self.pace = PrefillPace(minimum=1, maximum=2048)

    def decode(self, steps):
        for _ in range(steps):
            self.pace.record(self.decode_s, prompt_tokens=0, decoding=1)

    def prefill(self, steps, *, prompts=1, decoding=0):
        """Compute steps; return the longest duration in the second half."""
        longest = 0.0
        for step in range(steps):
            tokens = self.pace.chunk(prompts=prompts, decoding=decoding) * prompts
            took = self.step_s + tokens * self.token_s + decoding * self.decode_s
            self.pace.record(took, prompt_tokens=tokens, decoding=decoding)
            longest = max(longest, took) if step > steps // 2 else 0.0
        return longest


@pytest.mark.parametrize("token_s", [1e-5, 1e-3, 0.1])
def test_prompts_slow_decode_steps_down_to_a_third_at_most(token_s):
    machine = Machine(decode_s=0.5 * token_s * 20, token_s=token_s)
    machine.decode(5)
    assert machine.prefill(40, prompts=1, decoding=1) <= 3 * machine.decode_s


@pytest.mark.parametrize("token_s", [1e-5, 1e-3])
def test_chunks_are_longer_if_more_requests_wait_than_decode(token_s):
    one, three = (Machine(decode_s=10 * token_s, token_s=token_s) for _ in range(2))
    for machine in (one, three):
        machine.decode(5)
    alone, crowded = one.prefill(40, prompts=1, decoding=1), three.prefill(40, prompts=3, decoding=1)
    assert 1.5 * alone < crowded <= (1 + 3 * 1.7) * three.decode_s


@pytest.mark.parametrize("token_s", [1e-4, 1e-3, 0.01, 0.1])
def test_without_decoding_a_step_is_as_long_as_a_cancellation_may_wait(token_s):
    machine = Machine(decode_s=0.01, token_s=token_s)
    longest = machine.prefill(40)
    assert longest <= 1.2 * PREFILL_STEP_S
    assert longest >= min(0.5 * PREFILL_STEP_S, 0.9 * 2048 * token_s)


def test_the_first_chunk_on_an_unknown_machine_is_small():
    assert PrefillPace(minimum=1, maximum=2048).chunk(prompts=1, decoding=0) <= 8


def test_the_size_of_chunks_is_limited():
    pace = PrefillPace(minimum=64, maximum=512)

    def run(steps, token_s):
        for _ in range(steps):
            tokens = pace.chunk(prompts=1, decoding=0)
            pace.record(tokens * token_s, prompt_tokens=tokens, decoding=0)
        return pace.chunk(prompts=1, decoding=0)

    assert pace.chunk(prompts=8, decoding=1) == 64
    assert run(20, 1e-6) == 512
    assert run(20, 1.0) == 64


def test_chunks_are_multiples_of_the_minimum():
    pace = PrefillPace(minimum=64, maximum=2048)
    for tokens, seconds in ((512, 1.0), (512, 1.0)):
        pace.record(seconds, prompt_tokens=tokens, decoding=0)
    # 204 tokens take 0.4 s.
    assert pace.chunk(prompts=1, decoding=0) == 192


def test_chunks_of_many_prompts_have_the_maximum_together():
    pace = PrefillPace(minimum=256, maximum=2048)
    assert [pace.chunk(prompts=prompts, decoding=0) for prompts in (1, 8, 32, 1024)] == [256, 256, 64, 16]


def test_one_slow_step_does_not_make_chunks_much_smaller():
    machine = Machine(decode_s=0.01, token_s=1e-3)
    machine.prefill(20)
    usual = machine.pace.chunk(prompts=1, decoding=0)
    machine.pace.record(60.0, prompt_tokens=usual, decoding=0)
    assert machine.pace.chunk(prompts=1, decoding=0) > usual // 4


@pytest.mark.parametrize("step_s", [0.0, 0.01, 0.045])
def test_chunks_are_long_enough_for_their_fixed_cost(step_s):
    # Reading the weights costs nearly as much as a decode step: as on a machine with a fast BLAS.
    machine = Machine(decode_s=0.05, token_s=0.003, step_s=step_s)
    machine.prefill(12)
    machine.decode(5)
    tokens, took = 0, 0.0
    while tokens < 1400:
        chunk = machine.pace.chunk(prompts=1, decoding=1)
        step = step_s + chunk * 0.003 + 0.05
        machine.pace.record(step, prompt_tokens=chunk, decoding=1)
        tokens, took = tokens + chunk, took + step
        assert step <= 4 * 0.05
    assert took < 3.5 * 1400 * 0.003


def test_chunks_grow_with_the_number_of_decoding_requests():
    pace = PrefillPace(minimum=1, maximum=2048)
    # As on a CPU that computes row by row: eight answers take eight times as long as one.
    for tokens in (1, 2, 4, 8):
        pace.record(0.1 * tokens, prompt_tokens=tokens, decoding=0)
    pace.record(0.1, prompt_tokens=0, decoding=1)
    for decoding in range(1, 8):
        tokens = pace.chunk(prompts=1, decoding=decoding)
        assert abs(tokens - min(decoding, 4)) <= 1
        pace.record(0.1 * decoding + 0.1 * tokens, prompt_tokens=tokens, decoding=decoding)


def test_chunks_adapt_to_a_machine_that_decodes_many_requests_as_fast_as_one():
    pace = PrefillPace(minimum=1, maximum=2048)

    def step(decoding):
        tokens = pace.chunk(prompts=1, decoding=decoding) if decoding else 64
        took = (0.01 if decoding else 0) + 0.001 * tokens
        pace.record(took, prompt_tokens=tokens, decoding=decoding)
        return took

    for tokens in (8, 16, 64):
        pace.record(0.001 * tokens, prompt_tokens=tokens, decoding=0)
    pace.record(0.01, prompt_tokens=0, decoding=1)
    steps = [step(decoding) for decoding in (2, 4, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8)]
    assert steps[-1] <= 3 * 0.01


def test_chunks_adapt_also_if_requests_decode_from_the_beginning():
    machine = Machine(decode_s=0.01, token_s=1e-3)
    assert machine.prefill(60, decoding=1) <= 3 * machine.decode_s


@pytest.mark.parametrize("step_s", [0.1, 0.6])
def test_a_chunk_is_worth_its_fixed_cost_on_a_busy_machine(step_s):
    token_s = step_s / 30
    machine = Machine(decode_s=0.01, token_s=token_s, step_s=step_s)
    machine.prefill(40)
    assert machine.pace.chunk(prompts=1, decoding=0) >= 15
    assert machine.prefill(40) <= max(1.2 * PREFILL_STEP_S, 3 * step_s)
