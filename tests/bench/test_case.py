"""Tests of cases, sweeps and prompts."""

import json
import statistics
from dataclasses import asdict
from itertools import takewhile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmx_lab.bench import Case, Closed, Poisson, Sweep
from lmx_lab.bench.case import (
    BOUNDS,
    MAX_CASES,
    MIN_WORDS,
    TASK,
    UNIQUE_WORDS,
    number_repeats,
    prompt,
    prompt_hash,
    words,
)
from lmx_lab.errors import InvalidRequestError

SIZES = {"prompt_tokens": 16, "output_tokens": 8}
COLD = Case(prompt_tokens=200, output_tokens=8, concurrency=1)
WARM = Case(prompt_tokens=200, output_tokens=8, cache="warm")


def test_a_name_contains_the_measured_sizes():
    assert Case(**SIZES).name == "p16-o8-c1-cold"
    assert (
        Case(**SIZES, concurrency=4, cache="warm", arrival=Poisson(per_second=2.5)).name == "p16-o8-c4-warm-poisson2.5"
    )


@pytest.mark.parametrize("name", [name for name in BOUNDS if name != "repeats"])
@pytest.mark.parametrize("wrong", [-1, 2**64, 1.5, "8", None, True, float("nan")])
def test_an_invalid_number_is_reported_with_its_bounds(name, wrong):
    low, high = BOUNDS[name]
    with pytest.raises(InvalidRequestError) as caught:
        Case(**SIZES | {name: wrong})
    assert caught.value.param == name
    assert all(text in caught.value.message for text in (name, repr(wrong), f"{low:,}", f"{high:,}"))


@pytest.mark.parametrize("wrong", [0, -1.0, float("nan"), float("inf"), 1e9, "2", True, None])
def test_an_invalid_rate_is_refused(wrong):
    with pytest.raises(InvalidRequestError, match="per_second"):
        Poisson(per_second=wrong)


@pytest.mark.parametrize(
    "fields",
    [
        {"cache": "hot"},
        {"arrival": "poisson"},
        {"arrival": Poisson},
        {"concurrency": 9},  # of 8 requests
        {"cache": "warm", "warm_up": 0},
    ],
)
def test_what_cannot_be_measured_is_refused(fields):
    with pytest.raises(InvalidRequestError):
        Case(**SIZES, **fields)
    with pytest.raises(InvalidRequestError):
        Sweep(**SIZES, **{"requests": 8} | fields)


def test_with_poisson_arrivals_concurrency_may_exceed_the_number_of_requests():
    assert Case(**SIZES, concurrency=64, requests=8, arrival=Poisson(per_second=1)).concurrency == 64


def test_numpy_integers_become_python_integers():
    case = Case(prompt_tokens=np.int64(16), output_tokens=np.uint8(8))
    assert case == Case(**SIZES)
    assert json.loads(json.dumps(asdict(case)))["prompt_tokens"] == 16


def test_arrivals_have_the_requested_rate_and_are_reproducible():
    arrival = Poisson(per_second=20)
    times = arrival.times_s(4000, seed=1)
    gaps = np.diff(times)
    assert times == arrival.times_s(4000, seed=1) != arrival.times_s(4000, seed=2)
    assert times[0] == 0
    assert len(times) == 4000
    assert 1 / statistics.mean(gaps) == pytest.approx(20, rel=0.1)
    # The standard deviation of exponential gaps equals their mean.
    assert statistics.stdev(gaps) * 20 == pytest.approx(1, rel=0.1)


def test_a_sweep_measures_all_combinations_before_it_repeats_one():
    cases = Sweep(prompt_tokens=(16, 32), output_tokens=8, concurrency=range(1, 3), cache=("cold", "warm"), repeats=3)
    assert len(cases) == 24
    assert len(set(cases[:8])) == 8
    assert cases[:8] == cases[8:16] == cases[16:]
    assert [repeat for repeat, _ in number_repeats(cases)] == [0] * 8 + [1] * 8 + [2] * 8


def test_several_arrivals_are_an_axis():
    arrivals = (Closed(), Poisson(per_second=1))
    assert tuple(case.arrival for case in Sweep(**SIZES, arrival=arrivals)) == arrivals


def test_duplicate_values_are_measured_once():
    assert len(Sweep(**SIZES, concurrency=[1, 4, 4, np.int64(1)])) == 2


def test_by_default_every_user_has_two_requests():
    assert [case.requests for case in Sweep(**SIZES, concurrency=(1, 4, 16))] == [8, 8, 32]


@pytest.mark.parametrize(
    "fields", [{"prompt_tokens": ()}, {"repeats": 0}, {"repeats": 1.5}, {"concurrency": "4"}, {"seed": [[1]]}]
)
def test_a_sweep_refuses_invalid_values(fields):
    with pytest.raises(InvalidRequestError, match=next(iter(fields))):
        Sweep(**SIZES | fields)


def test_a_sweep_with_too_many_cases_is_refused():
    with pytest.raises(InvalidRequestError, match=f"{MAX_CASES:,}"):
        Sweep(prompt_tokens=range(1, 5000), output_tokens=range(1, 5000))


def shared_words(prompts):
    """The number of words that all prompts begin with."""
    places = zip(*(text.split() for text in prompts), strict=False)
    return sum(1 for _ in takewhile(lambda place: len(set(place)) == 1, places))


@given(tokens=st.integers(1, 3000), per_word=st.floats(0.5, 4))
def test_the_number_of_words_follows_the_number_of_tokens(tokens, per_word):
    text = words(0, 3, tokens, per_word)
    assert len(text.split()) * per_word == pytest.approx(tokens, abs=per_word)
    assert text == words(0, 3, tokens, per_word)


@pytest.mark.parametrize("case", [COLD, WARM])
@pytest.mark.parametrize("tokens", [1, 2, 9, 25, 26, 27, 1000])
def test_a_prompt_has_its_length_and_a_long_one_contains_a_task(case, tokens):
    text = prompt(case, repeat=0, request=0, tokens=tokens)
    assert len(text.split()) == max(MIN_WORDS, tokens)
    assert text.endswith(TASK) == (tokens >= 26)


def test_cold_prompts_have_no_beginning_in_common():
    others = [Case(prompt_tokens=400, output_tokens=8), Case(prompt_tokens=200, output_tokens=8, concurrency=2)]
    prompts = [
        *(prompt(COLD, repeat=0, request=request) for request in range(20)),
        *(prompt(COLD, repeat=1, request=request) for request in range(20)),
        prompt(COLD, repeat=0, request=0, warm_up=True),
        prompt(COLD, repeat=0, request=0, run="another"),
        *(prompt(case, repeat=0, request=0) for case in others),
    ]
    beginnings = {" ".join(text.split()[:UNIQUE_WORDS]) for text in prompts}
    assert len(beginnings) == len(prompts)


def test_warm_prompts_differ_only_in_their_last_words():
    prompts = [prompt(WARM, repeat=repeat, request=request) for repeat in range(2) for request in range(10)]
    warm_up = prompt(WARM, repeat=0, request=0, warm_up=True)
    assert len({*prompts, warm_up}) == 21
    assert 200 - len(TASK.split()) - UNIQUE_WORDS <= shared_words([*prompts, warm_up]) < 200


def test_warm_prompts_of_different_runs_begin_differently():
    assert shared_words([prompt(WARM, repeat=0, request=0, run=run) for run in ("monday", "tuesday")]) < UNIQUE_WORDS


@pytest.mark.parametrize("case", [COLD, WARM])
def test_equal_hashes_mean_that_two_targets_got_the_same_prompt(case):
    one, other = (prompt(case, repeat=0, request=5, run=run) for run in ("run a", "run b"))
    assert one != other
    assert prompt_hash(one) == prompt_hash(other) != prompt_hash(prompt(case, repeat=0, request=6, run="run a"))
    assert len(prompt_hash(one)) == 16


def test_the_shortest_cold_prompts_differ():
    shortest = Case(prompt_tokens=1, output_tokens=8)
    assert len({prompt(shortest, repeat=0, request=request) for request in range(200)}) == 200
