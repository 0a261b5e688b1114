"""Loading refuses damaged and unsupported models and names the reason; batches are computed layer by layer."""

import gc
import json
from functools import partial
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from lmx_lab.engine.encoders.layers import on_cpu
from lmx_lab.engine.mlx import memory
from lmx_lab.engine.texts import TextTokens
from lmx_lab.errors import EngineError, OutOfMemoryError, UnusableModelError
from tests.support.models import (
    bert_weights,
    embed,
    load,
    pooling_files,
    tiny_tokenizer,
    write_tiny_bert,
    write_tiny_qwen3,
)

WEIGHT = "encoder.layer.1.output.dense.weight"


def damaged(number):
    weight = bert_weights()[WEIGHT]
    weight[3, 4] = number
    return {WEIGHT: weight}


DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("bert", damaged(float("nan")), f"{WEIGHT} contains NaN"),
        ("bert", damaged(float("inf")), f"{WEIGHT} contains NaN or infinite"),
        ("bert", {WEIGHT: None}, rf"Missing 1 parameters:\s+{WEIGHT}"),
        (
            "bert",
            {WEIGHT: np.zeros((32, 47), np.float32)},
            rf"Expected shape \(32, 48\) but received shape \(32, 47\) for parameter {WEIGHT}",
        ),
        ("bert", {WEIGHT: np.zeros((32, 48), np.int32)}, f"{WEIGHT} contains .*int32"),
        (
            "bert",
            {"encoder.layer.2.output.dense.weight": np.zeros((2, 2), np.float32)},
            r"not in model:\s+encoder.layer.2.output",
        ),
        ("qwen3", {DOWN: np.full((32, 48), float("nan"), np.float32)}, f"{DOWN} contains NaN"),
        ("qwen3", {DOWN: np.full((32, 48), float("-inf"), np.float32)}, f"{DOWN} contains NaN"),
        ("qwen3", {"model.norm.weight": None}, r"model\.norm\.weight"),
    ],
)
def test_a_damaged_tensor_is_refused_by_name(request, kind, change, message):
    with pytest.raises(UnusableModelError, match=message) as caught:
        request.getfixturevalue(kind)(change=change)
    assert caught.value.message.startswith(f"tiny-{kind} at /")
    assert caught.value.param == "model"


def test_unused_tensors_of_other_programs_are_ignored(bert):
    same = embed(bert(), "the cat")
    extra = {
        "embeddings.position_ids": np.arange(64)[None],
        "pooler.dense.weight": np.zeros((32, 32), np.float32),
        "cls.predictions.bias": np.zeros(5, np.float32),
    }
    np.testing.assert_array_equal(embed(bert(change=extra), "the cat"), same)


def test_old_tensor_names_are_supported(bert):
    same = embed(bert(), "the cat")
    renamed = {}
    for name, tensor in bert_weights(words=tiny_tokenizer().get_vocab_size()).items():
        old = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
        renamed |= {name: None} | {f"bert.{old}": tensor}
    np.testing.assert_array_equal(embed(bert(change=renamed), "the cat"), same)


@pytest.mark.parametrize(
    ("kind", "config", "message"),
    [
        ("bert", {"position_embedding_type": "relative_key"}, "relative_key"),
        ("bert", {"hidden_act": "mish"}, "mish"),
        ("bert", {"num_attention_heads": 5}, "5 heads"),
        ("bert", {"type_vocab_size": 0}, "type_vocab_size is 0"),
        ("bert", {"is_decoder": True}, "decoder"),
        ("bert", {"model_type": "distilbert"}, "encoders of type distilbert"),
        ("bert", {"model_type": "no_such_thing"}, "no_such_thing"),
        ("qwen3", {"is_causal": False}, "bidirectional"),
        ("qwen3", {"model_type": "gemma", "architectures": ["GemmaModel"]}, "tiny-qwen3"),
        ("qwen3", {"model_type": "mamba", "architectures": ["MambaModel"]}, "tiny-qwen3"),
    ],
)
def test_an_unsupported_configuration_is_refused(request, kind, config, message):
    with pytest.raises(UnusableModelError, match=message):
        request.getfixturevalue(kind)(**config)


@pytest.mark.parametrize(
    ("write", "options", "message"),
    [
        (write_tiny_bert, {"limit_bytes": 10_000}, "does not fit"),
        (write_tiny_qwen3, {"limit_bytes": 10_000}, "does not fit"),
        (partial(write_tiny_bert, change=damaged(float("nan"))), {}, "contains NaN"),
    ],
    ids=["an encoder over the memory limit", "a decoder over the memory limit", "a damaged tensor"],
)
def test_a_failed_load_leaves_no_memory_in_use(tmp_path, write, options, message):
    listed = write(tmp_path / "m")
    gc.collect()
    before = memory.used_bytes()
    with pytest.raises(OutOfMemoryError if options else UnusableModelError, match=message) as caught:
        load(listed, **options)
    assert memory.used_bytes() <= before
    assert caught.value.__context__ is None


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "auto", "keep"])
def test_weights_are_converted_to_the_requested_type(tmp_path, dtype):
    exact = embed(load(write_tiny_bert(tmp_path / "m")), "the cat sits")
    model = load(write_tiny_bert(tmp_path / "m"), dtype=dtype)
    vectors = embed(model, "the cat sits")
    assert vectors.dtype == np.float32
    assert (vectors @ exact.T)[0, 0] > 0.999


def test_quantized_weights_are_expanded(bert):
    exact = embed(bert(), "the cat sits")
    change = {}
    for name, weight in bert_weights(words=tiny_tokenizer().get_vocab_size()).items():
        if name.endswith("weight") and weight.shape[-1:] == (32,) and weight.ndim == 2:
            stem = name.removesuffix(".weight")
            parts = mx.quantize(mx.array(weight), group_size=32, bits=8)
            change |= {
                f"{stem}.{kind}": np.array(x) for kind, x in zip(("weight", "scales", "biases"), parts, strict=True)
            }
    model = bert(change=change, quantization={"group_size": 32, "bits": 8})
    assert (embed(model, "the cat sits") @ exact.T)[0, 0] > 0.999


def test_numbers_beyond_half_precision_are_reported(tmp_path):
    listed = write_tiny_bert(tmp_path / "m", change=damaged(1e6))
    load(listed)
    with pytest.raises(UnusableModelError, match=f"{WEIGHT} contains NaN or infinite numbers in .*float16"):
        load(listed, dtype="float16")


def test_a_result_that_is_not_finite_is_an_error(bert):
    model = bert(change={WEIGHT: np.full((32, 48), 3e38, np.float32)})
    with pytest.raises(EngineError, match="not finite"):
        embed(model, "the cat sits")


@pytest.mark.parametrize("kind", ["bert", "qwen3"])
def test_a_vector_does_not_depend_on_the_rest_of_its_batch(request, kind):
    model = request.getfixturevalue(kind)()
    texts = ["cat", "the big dog sleeps under the tree and the bird sits on the mat", "", "a a a"]
    for text, vector in zip(texts, embed(model, *texts), strict=True):
        np.testing.assert_allclose(embed(model, text)[0], vector, atol=1e-5)


def test_a_batch_is_computed_layer_by_layer_and_can_be_cancelled(bert):
    model = bert()
    batch = [TextTokens((2, 5, 3)), TextTokens((2, 3))]
    layers = model.forward(batch)
    first = next(layers)
    mx.eval(first)
    assert first.shape == (2, 3, 32)
    layers.close()
    assert len(list(model.forward(batch))) == 2
    del first, layers
    gc.collect()
    before = memory.used_bytes()
    left = model.forward(batch)
    mx.eval(next(left))
    left.close()
    del left
    assert memory.used_bytes() == before


@pytest.mark.skipif(not on_cpu(), reason="a GPU does not store attention scores, so it needs no blocks")
@pytest.mark.parametrize("kind", ["bert", "qwen3"])
def test_long_texts_are_computed_in_blocks(request, kind, monkeypatch):
    model = request.getfixturevalue(kind)()
    texts = ["the cat " * 25, "a dog"]
    whole, needed = embed(model, *texts), model.batch_bytes(2, 64)
    # Room for the attention scores of 10 tokens.
    for module in ("layers", "decoder"):
        monkeypatch.setattr(f"lmx_lab.engine.encoders.{module}.SCORES_BYTES", 4 * 2 * 4 * 52 * 10)
    np.testing.assert_allclose(embed(model, *texts), whole, atol=1e-5)
    assert model.batch_bytes(2, 64) < needed


def test_the_memory_estimate_grows_with_the_batch(bert):
    model = bert(pooling_files("mean_tokens"))
    assert model.batch_bytes(8, 64) > 4 * model.batch_bytes(2, 64) * 0.9
    assert model.batch_bytes(2, 64) > 2 * 64 * 32 * 4


# Vectors that PyTorch computed with the real all-MiniLM-L6-v2.
REFERENCE = json.loads(Path(__file__).with_name("minilm_reference.json").read_bytes())
TEXTS = [item["text"] for item in REFERENCE["items"]]


@pytest.fixture(scope="module")
def model(minilm):
    return load(minilm)


def test_vectors_equal_the_reference(model):
    vectors = embed(model, *TEXTS)
    expected = np.array([item["vector"] for item in REFERENCE["items"]], np.float32)
    assert vectors.dtype == np.float32
    assert (np.einsum("ij,ij->i", vectors, expected) >= 0.9999).all()
    np.testing.assert_allclose(vectors, expected, atol=1e-5)
    # Each text alone, not in a batch.
    np.testing.assert_allclose([embed(model, text)[0] for text in TEXTS], expected, atol=1e-5)


def test_properties_are_read_from_the_files(model):
    assert (model.dimensions, model.context_length, model.method) == (384, 256, "cosine")
    assert 90e6 < model.memory_bytes < 95e6
