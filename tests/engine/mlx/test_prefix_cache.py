"""The prefix cache finds the longest usable prefix, never a whole prompt, and stores no more bytes than allowed."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmx_lab.engine.mlx.prefix_cache import MIN_TOKENS, PrefixCache
from lmx_lab.engine.prefix_files import common_prefix


@dataclass(frozen=True)
class FakeState:
    """A cached state that stores its tokens."""

    tokens: tuple[int, ...]
    can_be_trimmed: bool = True
    bytes_per_token: int = 10

    @property
    def nbytes(self):
        return len(self.tokens) * self.bytes_per_token

    def trimmed(self, tokens):
        assert self.can_be_trimmed
        return FakeState(self.tokens[: len(self.tokens) - tokens])


def array(tokens):
    return np.asarray(tokens, dtype=np.int32)


def store(cache, tokens, *, can_be_trimmed=True):
    cache.store(tokens, FakeState(tokens, can_be_trimmed))


def cached_prefix(cache, tokens):
    longest = cache.longest(array(tokens))
    hit = cache.find(array(tokens))
    if hit is None:
        assert longest == 0
        return None
    assert len(hit.state.tokens) == hit.tokens == longest
    return hit.state.tokens


FIRST = tuple(range(100))


@pytest.fixture
def cache():
    return PrefixCache(limit_bytes=10_000)


def test_a_later_turn_of_a_session_finds_the_earlier_ones(cache):
    store(cache, FIRST)
    assert cached_prefix(cache, (*FIRST, 7, 8, 9)) == FIRST


def test_one_token_of_a_fully_cached_prompt_is_computed(cache):
    store(cache, FIRST)
    assert cached_prefix(cache, FIRST) == FIRST[:-1]


def test_a_prompt_that_differs_in_the_middle_finds_the_common_prefix(cache):
    store(cache, FIRST)
    assert cached_prefix(cache, (*FIRST[:50], 7, 7, 7)) == FIRST[:50]


def test_a_state_that_cannot_be_trimmed_is_used_only_as_a_whole(cache):
    store(cache, FIRST, can_be_trimmed=False)
    assert cached_prefix(cache, (*FIRST[:50], 7, 7, 7)) is None
    assert cached_prefix(cache, FIRST) is None
    assert cached_prefix(cache, (*FIRST, 7)) == FIRST


def test_a_very_short_common_prefix_is_ignored(cache):
    store(cache, FIRST)
    assert cached_prefix(cache, (*FIRST[: MIN_TOKENS - 1], 999, 999)) is None


def test_a_longer_turn_replaces_the_shorter_one(cache):
    store(cache, FIRST[:50])
    store(cache, FIRST)
    store(cache, FIRST[:70])
    assert len(cache) == 1
    assert cache.nbytes == 1000


def test_shorter_states_are_kept_if_longer_ones_cannot_be_trimmed(cache):
    store(cache, FIRST[:50], can_be_trimmed=False)
    store(cache, FIRST, can_be_trimmed=False)
    assert cached_prefix(cache, (*FIRST[:50], 7)) == FIRST[:50]


def test_the_least_recently_used_state_is_dropped_first(cache):
    sessions = [tuple(range(start, start + 400)) for start in (0, 1000, 2000)]
    store(cache, sessions[0])
    store(cache, sessions[1])
    assert cached_prefix(cache, (*sessions[0], 7)) is not None
    store(cache, sessions[2])
    assert cached_prefix(cache, (*sessions[1], 7)) is None
    assert cached_prefix(cache, (*sessions[0], 7)) is not None


def test_a_state_larger_than_the_limit_is_not_stored(cache):
    store(cache, FIRST)
    store(cache, tuple(range(5000, 7000)))
    assert len(cache) == 1


def test_with_a_limit_of_zero_nothing_is_stored():
    cache = PrefixCache(limit_bytes=0)
    store(cache, FIRST)
    assert len(cache) == 0


def test_shrinking_does_not_change_the_limit(cache):
    store(cache, FIRST)
    store(cache, tuple(range(1000, 1100)))
    cache.shrink(1500)
    assert (len(cache), cache.nbytes, cache.limit_bytes) == (1, 1000, 10_000)


PROMPTS = st.lists(st.sampled_from([0, 1]), min_size=1, max_size=60).map(tuple)


@pytest.mark.slow
@given(st.lists(st.tuples(PROMPTS, st.booleans()), max_size=20), PROMPTS)
def test_a_hit_is_the_longest_usable_prefix(kept, prompt):
    cache = PrefixCache(limit_bytes=2000)
    for tokens, can_be_trimmed in kept:
        store(cache, tokens, can_be_trimmed=can_be_trimmed)
        assert cache.nbytes == sum(entry.state.nbytes for entry in cache._entries) <= 2000
    usable = [
        shared
        for entry in cache._entries
        if (shared := min(common_prefix(entry.tokens, array(prompt)), len(prompt) - 1)) == len(entry.tokens)
        or entry.state.can_be_trimmed
    ]
    hit = cached_prefix(cache, prompt)
    if hit is None:
        assert max(usable, default=0) < MIN_TOKENS
    else:
        assert hit == prompt[: len(hit)]
        assert len(hit) == max(usable) < len(prompt)
