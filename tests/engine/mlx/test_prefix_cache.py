"""The prefix cache: the longest usable beginning, never a whole prompt, never more bytes than allowed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmx_lab.engine.mlx.prefix_cache import MIN_TOKENS, PrefixCache, common_prefix


@dataclass(frozen=True)
class Fake:
    """A cache of tokens that knows which they are."""

    tokens: tuple[int, ...]
    can_be_cut: bool = True
    bytes_per_token: int = 10

    @property
    def nbytes(self) -> int:
        return len(self.tokens) * self.bytes_per_token

    def cut(self, tokens: int) -> Fake:
        assert self.can_be_cut
        return Fake(self.tokens[: len(self.tokens) - tokens])


def array(tokens: tuple[int, ...]) -> np.ndarray:
    return np.asarray(tokens, dtype=np.int32)


def keep(cache: PrefixCache[Fake], tokens: tuple[int, ...], *, can_be_cut: bool = True) -> None:
    cache.keep(tokens, Fake(tokens, can_be_cut))


def found(cache: PrefixCache[Fake], tokens: tuple[int, ...]) -> tuple[int, ...] | None:
    longest = cache.longest(array(tokens))
    hit = cache.take(array(tokens))
    if hit is None:
        assert longest == 0
        return None
    assert len(hit.kept.tokens) == hit.tokens == longest
    return hit.kept.tokens


FIRST = tuple(range(100))


@pytest.fixture
def cache() -> PrefixCache[Fake]:
    return PrefixCache(limit_bytes=10_000)


def test_the_next_turn_finds_the_turns_before(cache: PrefixCache[Fake]) -> None:
    keep(cache, FIRST)
    assert found(cache, (*FIRST, 7, 8, 9)) == FIRST


def test_a_prompt_that_is_kept_whole_leaves_one_token_to_compute(cache: PrefixCache[Fake]) -> None:
    keep(cache, FIRST)
    assert found(cache, FIRST) == FIRST[:-1]


def test_a_prompt_that_departs_in_the_middle_finds_what_is_common(cache: PrefixCache[Fake]) -> None:
    keep(cache, FIRST)
    assert found(cache, (*FIRST[:50], 7, 7, 7)) == FIRST[:50]


def test_caches_that_cannot_be_cut_serve_only_whole(cache: PrefixCache[Fake]) -> None:
    keep(cache, FIRST, can_be_cut=False)
    assert found(cache, (*FIRST[:50], 7, 7, 7)) is None
    assert found(cache, FIRST) is None
    assert found(cache, (*FIRST, 7)) == FIRST


def test_a_beginning_too_short_to_matter_is_no_hit(cache: PrefixCache[Fake]) -> None:
    keep(cache, FIRST)
    assert found(cache, (*FIRST[: MIN_TOKENS - 1], 999, 999)) is None


def test_a_longer_turn_takes_the_place_of_the_shorter_one(cache: PrefixCache[Fake]) -> None:
    keep(cache, FIRST[:50])
    keep(cache, FIRST)
    keep(cache, FIRST[:70])
    assert len(cache) == 1
    assert cache.nbytes == 1000


def test_shorter_ones_stay_where_longer_ones_cannot_be_cut(cache: PrefixCache[Fake]) -> None:
    keep(cache, FIRST[:50], can_be_cut=False)
    keep(cache, FIRST, can_be_cut=False)
    assert found(cache, (*FIRST[:50], 7)) == FIRST[:50]


def test_what_was_used_longest_ago_goes_first(cache: PrefixCache[Fake]) -> None:
    sessions = [tuple(range(start, start + 400)) for start in (0, 1000, 2000)]
    keep(cache, sessions[0])
    keep(cache, sessions[1])
    assert found(cache, (*sessions[0], 7)) is not None
    keep(cache, sessions[2])
    assert found(cache, (*sessions[1], 7)) is None
    assert found(cache, (*sessions[0], 7)) is not None


def test_what_is_larger_than_the_limit_is_not_kept_and_drops_nothing(cache: PrefixCache[Fake]) -> None:
    keep(cache, FIRST)
    keep(cache, tuple(range(5000, 7000)))
    assert len(cache) == 1


def test_a_limit_of_nothing_keeps_nothing() -> None:
    cache: PrefixCache[Fake] = PrefixCache(limit_bytes=0)
    keep(cache, FIRST)
    assert len(cache) == 0


def test_shrinking_frees_and_keeps_the_limit(cache: PrefixCache[Fake]) -> None:
    keep(cache, FIRST)
    keep(cache, tuple(range(1000, 1100)))
    cache.shrink(1500)
    assert (len(cache), cache.nbytes, cache.limit_bytes) == (1, 1000, 10_000)


PROMPTS = st.lists(st.sampled_from([0, 1]), min_size=1, max_size=60).map(tuple)


@given(st.lists(st.tuples(PROMPTS, st.booleans()), max_size=20), PROMPTS)
def test_a_hit_is_a_true_beginning_and_as_long_as_any(kept: list[tuple[tuple[int, ...], bool]], prompt: tuple) -> None:
    cache: PrefixCache[Fake] = PrefixCache(limit_bytes=2000)
    for tokens, can_be_cut in kept:
        keep(cache, tokens, can_be_cut=can_be_cut)
        assert cache.nbytes == sum(value.nbytes for _, value in cache._entries) <= 2000
    usable = [
        shared
        for tokens, value in cache._entries
        if (shared := min(common_prefix(tokens, array(prompt)), len(prompt) - 1)) == len(tokens) or value.can_be_cut
    ]
    hit = found(cache, prompt)
    if hit is None:
        assert max(usable, default=0) < MIN_TOKENS
    else:
        assert hit == prompt[: len(hit)]
        assert len(hit) == max(usable) < len(prompt)
