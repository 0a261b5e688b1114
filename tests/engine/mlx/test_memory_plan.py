"""Memory estimates: they grow with what is asked, and never promise more than the limit."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from lmx_lab.engine.mlx.memory_plan import UNBOUNDED_TOKENS, Footprint, LayerCache

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


def test_a_batch_pads_every_request_to_the_longest() -> None:
    assert MODEL.kv_bytes([1000, 10]) == 2 * 1024 * 4 * 1024
    assert MODEL.kv_bytes([]) == 0


def test_sliding_and_constant_layers_stop_growing() -> None:
    model = replace(MODEL, layers=(SLIDING, STATE))
    assert model.kv_bytes([100_000]) == 512 * 1024 + MIB


@given(st.integers(0, 2**33), st.integers(1, 2048))
def test_the_longest_request_fits_and_one_token_more_does_not(limit_bytes: int, chunk: int) -> None:
    held = MODEL.longest_request(limit_bytes, chunk=chunk)
    if held:
        assert MODEL.running_bytes([held], chunk=min(chunk, held)) <= limit_bytes
    assert MODEL.running_bytes([held + 1], chunk=min(chunk, held + 1)) > limit_bytes


def test_a_model_whose_state_does_not_grow_has_no_bound_of_memory() -> None:
    model = replace(MODEL, layers=(STATE,), score_bytes_per_pair=0)
    assert model.longest_request(2**33, chunk=512) == UNBOUNDED_TOKENS
