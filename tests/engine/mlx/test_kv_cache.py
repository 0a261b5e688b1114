"""Memory estimates grow with requests, and never promise more than the limit."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from lmx_lab.engine.mlx.kv_cache import UNBOUNDED_TOKENS, Footprint, LayerCache

MIB = 2**20
FULL = LayerCache(bytes_per_token=1024)
SLIDING = LayerCache(bytes_per_token=1024, window_tokens=512)
STATE = LayerCache(fixed_bytes=MIB)
MODEL = Footprint(
    weights_bytes=100 * MIB,
    layers=(FULL,) * 4,
    logits_bytes=4096,
    chunk_bytes_per_token=4096,
    score_bytes_per_pair=72,
)


def test_a_batch_pads_every_request_to_the_longest():
    assert MODEL.kv_bytes([1000, 10]) == 2 * 1024 * 4 * 1024
    assert MODEL.kv_bytes([]) == 0


def test_caches_with_a_window_or_a_fixed_size_stop_growing():
    model = replace(MODEL, layers=(SLIDING, STATE))
    assert model.kv_bytes([100_000]) == 512 * 1024 + MIB


def test_a_draft_model_has_one_cache_as_long_as_the_longest_request():
    model = replace(MODEL, draft_layers=(FULL, FULL))
    for lengths in ([1000], [1000, 10]):
        more = model.running_bytes(lengths, chunk=1) - MODEL.running_bytes(lengths, chunk=1)
        assert more == 2 * 1024 * 1024
    assert model.longest_request(200 * MIB, chunk=1) < MODEL.longest_request(200 * MIB, chunk=1)


@given(st.integers(0, 2**33), st.integers(1, 2048))
def test_the_longest_request_fits_and_one_token_more_does_not(limit_bytes, chunk):
    longest = MODEL.longest_request(limit_bytes, chunk=chunk)
    if longest:
        assert MODEL.running_bytes([longest], chunk=min(chunk, longest)) <= limit_bytes
    assert MODEL.running_bytes([longest + 1], chunk=min(chunk, longest + 1)) > limit_bytes


def test_memory_does_not_limit_the_context_of_a_model_whose_state_does_not_grow():
    model = replace(MODEL, layers=(STATE,), score_bytes_per_pair=0)
    assert model.longest_request(2**33, chunk=512) == UNBOUNDED_TOKENS
