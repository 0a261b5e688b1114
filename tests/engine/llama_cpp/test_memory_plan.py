"""The planned context length fits in memory, for any header."""

import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmx_lab.engine.llama_cpp.memory_plan import (
    BASE_BYTES,
    BATCH_TOKENS,
    MIN_CACHE_BYTES,
    MIN_SLOT_TOKENS,
    MIN_TOKENS,
    STEP_BYTES,
    TEXTS_AT_ONCE,
    is_batch_invariant,
    layer_caches,
    plan_context,
)
from lmx_lab.errors import OutOfMemoryError
from lmx_lab.values.models import LoadSpec, ModelEntry
from lmx_lab.values.plan import STEP_TOKENS, kv_bytes_per_token
from lmx_lab.weights.facts import POOLING_LAST, POOLING_RANK
from lmx_lab.weights.gguf.header import GgufHeader, GgufTensor

GB = 10**9
VOCABULARY = 1000


def header(**values):
    shape = {"block_count": 4, "embedding_length": 64, "attention.head_count": 4} | values
    known = {f"llama.{key}": value for key, value in shape.items() if value is not None}
    metadata = {"general.architecture": "llama", **known}
    embedding = GgufTensor(
        name="token_embd.weight", shape=(64, VOCABULARY), type="F32", offset=0, size_bytes=4 * 64 * VOCABULARY
    )
    return GgufHeader(path=Path("m.gguf"), size_bytes=1, metadata=metadata, tensors=(embedding,))


def entry(context=4096, size=10_000_000):
    return ModelEntry(
        id="m", path=Path("m.gguf"), source="path", kind="chat", format="gguf", architecture="llama",
        size_bytes=size, quantization=None, context_length=context,
    )  # fmt: skip


FIXED = 10_000_000 + BASE_BYTES + BATCH_TOKENS * VOCABULARY * 4
PER_TOKEN = 4 * 4 * (16 + 16) * 2


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, PER_TOKEN),
        ({"attention.head_count_kv": 2}, PER_TOKEN // 2),
        ({"attention.key_length": 32, "attention.value_length": 8}, 4 * 4 * (32 + 8) * 2),
        ({"attention.head_count_kv": [4, 0, 2, 0]}, PER_TOKEN // 4 + PER_TOKEN // 8),
        ({"attention.head_count": None}, 4 * 1 * (64 + 64) * 2),
        ({"attention.head_count": 0}, 0),
        ({"block_count": 0}, 0),
        # Latent attention: the values are a part of the keys.
        ({"attention.head_count_kv": 1, "attention.key_length": 40, "attention.key_length_mla": 24}, 4 * 40 * 2),
        # Layers that use the caches of earlier ones.
        ({"attention.shared_kv_layers": 1}, PER_TOKEN * 3 // 4),
    ],
)
def test_the_cache_of_a_token_has_keys_and_values_of_all_layers_with_attention(values, expected):
    assert kv_bytes_per_token(layer_caches(header(**values))) == expected


@pytest.mark.parametrize(
    ("architecture", "values", "windows"),
    [
        ("gemma2", {}, [0, 2]),
        ("cohere2", {}, [0, 1, 2]),
        # A file may contain another period than is usual for its architecture, or the layers themselves.
        ("gemma3", {"attention.sliding_window_pattern": 2}, [0, 2]),
        ("gpt-oss", {"attention.sliding_window_pattern": [True, True, False, True]}, [0, 1, 3]),
        ("llama", {}, []),
    ],
)
def test_layers_with_a_sliding_window_stop_growing(architecture, values, windows):
    shape = header(**{"attention.sliding_window": 1000} | values)
    renamed = {key.replace("llama.", f"{architecture}.", 1): value for key, value in shape.metadata.items()}
    layers = layer_caches(replace(shape, metadata=renamed | {"general.architecture": architecture}))
    assert [at for at, layer in enumerate(layers) if layer.window_tokens is not None] == windows
    # A window and one step of the prompt, rounded up.
    assert {layers[at].bytes(100_000) for at in windows} <= {1280 * PER_TOKEN // 4}


SSM = {"ssm.conv_kernel": 4, "ssm.inner_size": 128, "ssm.state_size": 16, "ssm.group_count": 1}
SSM_BYTES = (3 * (128 + 2 * 16) + 16 * 128) * 4


@pytest.mark.parametrize(
    ("architecture", "values", "states", "attending"),
    [
        ("mamba", SSM | {"attention.head_count": 0}, {SSM_BYTES: 4}, 0),
        ("jamba", SSM | {"attention.head_count_kv": [0, 4, 0, 0]}, {SSM_BYTES: 3}, 1),
        ("falcon-h1", SSM, {SSM_BYTES: 4}, 4),
        ("qwen3next", SSM, {SSM_BYTES: 3}, 1),
        ("qwen3next", SSM | {"full_attention_interval": 2}, {SSM_BYTES: 2}, 2),
        # Its layers are attention, a state, or a feed-forward network.
        (
            "nemotron_h",
            SSM | {"attention.head_count_kv": [0, 4, 0, 0], "feed_forward_length": [0, 0, 96, 0]},
            {SSM_BYTES: 2},
            1,
        ),
        ("lfm2", {"shortconv.l_cache": 3, "attention.head_count_kv": [0, 4, 0, 4]}, {64 * 2 * 4: 2}, 2),
        ("rwkv7", {"wkv.head_size": 8, "attention.head_count": 0}, {64 * (2 + 8) * 4: 4}, 0),
        ("arwkv7", {"wkv.head_size": 8, "attention.head_count": 0}, {64 * (1 + 8) * 4: 4}, 0),
    ],
)
def test_recurrent_layers_have_a_state_of_a_fixed_size(architecture, values, states, attending):
    renamed = {key.replace("llama.", f"{architecture}.", 1): value for key, value in header(**values).metadata.items()}
    layers = layer_caches(replace(header(), metadata=renamed | {"general.architecture": architecture}))
    assert Counter(layer.fixed_bytes for layer in layers if layer.fixed_bytes) == states
    assert sum(layer.bytes_per_token > 0 for layer in layers) == attending


@pytest.mark.parametrize(("dtype", "block_bytes"), [("q8_0", 34), ("q4_0", 18)])
def test_in_the_same_memory_a_quantized_cache_has_more_tokens(dtype, block_bytes):
    heads = {"attention.head_count": 2}
    per_token = kv_bytes_per_token(layer_caches(header(**heads), dtype))
    assert per_token == 4 * 2 * (1 + 1) * block_bytes
    limit = FIXED + kv_bytes_per_token(layer_caches(header(**heads))) * 8 * 4096
    plain, quantized = (
        plan_context(
            entry(context=131_072),
            header(**heads),
            slots=4,
            limit_bytes=limit,
            spec=LoadSpec(model="m", kv_cache_dtype=it),
        )
        for it in (None, dtype)
    )
    assert quantized.cache_tokens >= 64 // block_bytes * plain.cache_tokens
    assert quantized.bytes == FIXED + per_token * quantized.cache_tokens <= limit


def test_a_draft_model_has_weights_and_a_cache_of_the_same_length():
    with_draft = replace(entry(), draft=entry(size=1_000_000))
    plan = plan_context(with_draft, header(), slots=4, limit_bytes=GB, draft=header(block_count=2))
    assert (plan.slots, plan.context_length) == (4, 4096)
    assert plan.bytes == FIXED + 1_000_000 + BATCH_TOKENS * VOCABULARY * 4 + (PER_TOKEN + PER_TOKEN // 2) * 5 * 4096
    with pytest.raises(OutOfMemoryError, match="m and its draft model m need"):
        plan_context(with_draft, header(), slots=4, limit_bytes=FIXED, draft=header(block_count=2))


def test_with_enough_memory_each_slot_has_the_whole_context():
    plan = plan_context(entry(), header(), slots=4, limit_bytes=GB)
    assert (plan.context_length, plan.total_tokens, plan.slots, plan.unified) == (4096, 4 * 4096, 4, False)
    assert plan.bytes == FIXED + PER_TOKEN * 5 * 4096


@pytest.mark.parametrize(
    ("tokens", "requested", "slots", "context"),
    [
        # At most half of the memory is used, and one slot more than requests have.
        (2 * 5 * 4096, None, 4, 4096),
        (2 * 5 * 4096 - 2, None, 3, 4096),
        (2 * 3 * 4096, None, 2, 4096),
        (2 * 2 * 4096, None, 1, 4096),
        # One request may use more than half, and with too little memory the context is shorter.
        (2 * 4096, None, 1, 4096),
        (1000, None, 1, 256),
        # A requested context changes the number of slots, and is not rounded.
        (2 * 5 * 4096, 2000, 4, 2000),
        (2 * 3 * 4096, 2000, 4, 2000),
        (2 * 3 * 4096, 3000, 3, 3000),
        (2 * 2 * 2048, 2048, 1, 2048),
    ],
)
def test_slots_and_context_are_planned_together(tokens, requested, slots, context):
    limit = FIXED + PER_TOKEN * tokens
    plan = plan_context(
        entry(), header(), slots=4, limit_bytes=limit, spec=LoadSpec(model="m", context_length=requested)
    )
    assert (plan.slots, plan.context_length, plan.unified) == (slots, context, False)
    assert plan.bytes == FIXED + PER_TOKEN * plan.cache_tokens <= limit


def test_a_model_with_a_long_context_has_fewer_slots_on_request():
    plans = [
        plan_context(
            entry(context=131_072),
            header(**QWEN3),
            slots=8,
            limit_bytes=8 * GB,
            spec=LoadSpec(model="m", context_length=requested),
        )
        for requested in (None, 2000, 20_000)
    ]
    assert [(plan.slots, plan.context_length) for plan in plans] == [(1, MIN_SLOT_TOKENS + 512), (3, 2000), (1, 20_000)]


def test_a_requested_context_without_memory_is_refused_with_its_length():
    limit = FIXED + PER_TOKEN * (2 * 4096 - 1)
    with pytest.raises(OutOfMemoryError, match=r"with a context_length of 4000, .* choose a smaller context_length"):
        plan_context(entry(), header(), slots=4, limit_bytes=limit, spec=LoadSpec(model="m", context_length=4000))


@pytest.mark.parametrize(
    ("kind", "same"), [("Q4_0", True), ("Q4_1", True), ("Q8_0", True), ("Q4_K", False), ("F16", False)]
)
def test_only_some_types_of_weights_are_independent_of_the_batch(kind, same):
    norm = replace(header().tensors[0], name="output_norm.weight", shape=(64,), type="F32")
    weight = replace(header().tensors[0], type=kind)
    shape = replace(header(), tensors=(norm, weight))
    assert is_batch_invariant(shape) is same
    # On Linux, the option keeps the slots where the type is enough.
    same = same and sys.platform == "linux"
    plan = plan_context(entry(), shape, slots=4, limit_bytes=GB, spec=LoadSpec(model="m", deterministic=True))
    assert (plan.slots, plan.one_by_one) == ((4, False) if same else (1, True))


def test_a_file_without_a_context_length_gets_the_usual_one():
    assert plan_context(entry(context=None), header(), slots=1, limit_bytes=GB).context_length == 8192


def test_the_size_of_the_cache_is_limited():
    plan = plan_context(entry(context=1_000_000), header(), slots=8, limit_bytes=4 * GB)
    assert 0.9 * MIN_CACHE_BYTES < plan.cache_tokens * PER_TOKEN <= MIN_CACHE_BYTES
    assert (plan.slots, plan.context_length) == (8, plan.total_tokens // 8)


@pytest.mark.parametrize("limit", [0, -5, FIXED, FIXED + PER_TOKEN * (2 * MIN_TOKENS - 1)])
def test_a_model_without_memory_for_the_shortest_context_is_refused(limit):
    with pytest.raises(OutOfMemoryError, match=r"m needs 0\.\d\d GB, and \d\.\d\d GB are allowed; choose a smaller"):
        plan_context(entry(), header(), slots=4, limit_bytes=limit)


# Vectors and scores

ENCODER = replace(entry(context=512), kind="embedding", architecture="bert")
EMBEDDER = replace(entry(context=32768), kind="embedding")


@pytest.mark.parametrize("kind", ["embedding", "rerank"])
def test_an_encoder_has_no_cache(kind):
    encoder, of_bert = replace(ENCODER, kind=kind), replace(header(), metadata={"general.architecture": "bert"})
    plan = plan_context(encoder, of_bert, slots=2, limit_bytes=FIXED)
    assert (plan.slots, plan.context_length, plan.cache_tokens, plan.bytes) == (TEXTS_AT_ONCE, 512, 4096, FIXED)
    assert plan.batch_tokens == 512
    with pytest.raises(OutOfMemoryError):
        plan_context(encoder, of_bert, slots=2, limit_bytes=FIXED - 1)


QWEN3 = {"block_count": 28, "attention.head_count": 16, "attention.head_count_kv": 8, "attention.key_length": 128,
         "attention.value_length": 128}  # fmt: skip
SCORES = VOCABULARY * STEP_BYTES
"""Memory of a token in addition to its cache."""


@pytest.mark.parametrize(
    ("pooling", "context", "batch", "gigabytes"),
    # Like Qwen3-Embedding-0.6B, for which eight texts of 32,768 tokens would use 30 GB.
    [(POOLING_LAST, 8192, BATCH_TOKENS, 1.65), (POOLING_RANK, 5120, 5120, 1.33)],
)
def test_the_memory_of_a_decoder_that_embeds_is_limited(pooling, context, batch, gigabytes):
    shape = header(**QWEN3, pooling_type=pooling)
    plan = plan_context(replace(EMBEDDER, size_bytes=640_000_000), shape, slots=4, limit_bytes=16 * GB)
    assert (plan.slots, plan.context_length) == (1, context - (pooling == POOLING_LAST))
    assert plan.cache_tokens == context
    assert plan.batch_tokens == batch
    assert plan.bytes / GB == pytest.approx(gigabytes, abs=0.01)


def test_a_large_vocabulary_shortens_texts_that_are_computed_in_one_step():
    """Like Qwen3-Reranker-0.6B: for 8,192 tokens, the scores of 151,669 tokens of the vocabulary would use 10 GB."""
    table = replace(header().tensors[0], shape=(64, 151_669))
    shape = replace(header(**QWEN3, pooling_type=POOLING_RANK), tensors=(table,))
    plan = plan_context(replace(EMBEDDER, size_bytes=640_000_000), shape, slots=4, limit_bytes=16 * GB)
    assert (plan.slots, plan.context_length, plan.unified) == (1, 1024, True)
    assert 2 * GB < plan.bytes < 2.2 * GB


@pytest.mark.parametrize(
    ("room", "expected"),
    [(GB, (8, 32768)), (50_000 * (PER_TOKEN + SCORES), (5, 32768)), (5000 * (PER_TOKEN + SCORES), (1, 4864)),
     (256 * (PER_TOKEN + SCORES), (1, 256))],
)  # fmt: skip
def test_with_less_memory_there_are_fewer_texts_at_once_and_then_shorter_ones(room, expected):
    plan = plan_context(EMBEDDER, header(), slots=4, limit_bytes=10_000_000 + BASE_BYTES + room)
    assert (plan.slots, plan.context_length) == expected
    assert plan.batch_tokens == plan.context_length
    assert plan.bytes <= 10_000_000 + BASE_BYTES + room


def test_a_decoder_without_memory_for_the_shortest_text_is_refused():
    with pytest.raises(OutOfMemoryError, match="choose a smaller"):
        plan_context(EMBEDDER, header(), slots=4, limit_bytes=10_000_000 + BASE_BYTES + 255 * (PER_TOKEN + SCORES))


@given(
    context=st.none() | st.integers(1, 2**20),
    slots=st.integers(1, 64),
    limit=st.integers(0, 8 * GB),
    layers=st.integers(1, 80),
)
def test_a_plan_never_exceeds_its_limit_and_fits_one_request(context, slots, limit, layers):
    try:
        plan = plan_context(entry(context=context), header(block_count=layers), slots=slots, limit_bytes=limit)
    except OutOfMemoryError:
        return
    assert plan.bytes <= limit
    assert 0 < plan.context_length <= plan.total_tokens
    assert plan.context_length <= (context or plan.context_length)
    assert plan.total_tokens % STEP_TOKENS == 0
    assert 1 <= plan.slots <= slots
    assert plan.total_tokens >= plan.slots * plan.context_length
