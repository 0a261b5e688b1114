"""Prompts are reproducible, and differ where a cache could be used."""

from __future__ import annotations

from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmx_lab.bench import Case
from lmx_lab.bench.prompts import MIN_WORDS, TASK, UNIQUE_WORDS, prompt, prompt_hash, words

COLD = Case(prompt_tokens=200, output_tokens=8, concurrency=1)
WARM = Case(prompt_tokens=200, output_tokens=8, cache="warm")


def shared_words(prompts: list[str]) -> int:
    """The number of words that all prompts begin with."""
    places = zip(*(text.split() for text in prompts), strict=False)
    return sum(1 for _ in takewhile(lambda place: len(set(place)) == 1, places))


@given(tokens=st.integers(1, 3000), per_word=st.floats(0.5, 4))
def test_the_number_of_words_follows_the_number_of_tokens(tokens: int, per_word: float) -> None:
    text = words(0, 3, tokens, per_word)
    assert len(text.split()) * per_word == pytest.approx(tokens, abs=per_word)
    assert text == words(0, 3, tokens, per_word)


@pytest.mark.parametrize("case", [COLD, WARM])
@pytest.mark.parametrize("tokens", [1, 2, 9, 25, 26, 27, 1000])
def test_a_prompt_has_its_length_and_a_long_one_contains_a_task(case: Case, tokens: int) -> None:
    text = prompt(case, repeat=0, request=0, tokens=tokens)
    assert len(text.split()) == max(MIN_WORDS, tokens)
    assert text.endswith(TASK) == (tokens >= 26)


def test_cold_prompts_have_no_beginning_in_common() -> None:
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


def test_another_run_has_the_same_prompts_except_for_the_beginning() -> None:
    one, other = (prompt(COLD, repeat=0, request=5, run=run).split() for run in ("monday", "tuesday"))
    assert one[:UNIQUE_WORDS] != other[:UNIQUE_WORDS]
    assert one[UNIQUE_WORDS:] == other[UNIQUE_WORDS:]


def test_warm_prompts_differ_only_in_their_last_words() -> None:
    prompts = [prompt(WARM, repeat=repeat, request=request) for repeat in range(2) for request in range(10)]
    warm_up = prompt(WARM, repeat=0, request=0, warm_up=True)
    assert len({*prompts, warm_up}) == 21
    assert 200 - len(TASK.split()) - UNIQUE_WORDS <= shared_words([*prompts, warm_up]) < 200


def test_warm_prompts_of_different_runs_begin_differently() -> None:
    assert shared_words([prompt(WARM, repeat=0, request=0, run=run) for run in ("monday", "tuesday")]) < UNIQUE_WORDS


@pytest.mark.parametrize("case", [COLD, WARM])
def test_equal_hashes_mean_that_two_targets_got_the_same_prompt(case: Case) -> None:
    one, other = (prompt(case, repeat=0, request=5, run=run) for run in ("run a", "run b"))
    assert one != other
    assert prompt_hash(one) == prompt_hash(other) != prompt_hash(prompt(case, repeat=0, request=6, run="run a"))
    assert len(prompt_hash(one)) == 16


def test_the_shortest_cold_prompts_differ() -> None:
    shortest = Case(prompt_tokens=1, output_tokens=8)
    assert len({prompt(shortest, repeat=0, request=request) for request in range(200)}) == 200
