"""Activations of encoders; pooling and modules that convert hidden states to vectors as the model's files define."""

import math

import mlx.core as mx
import numpy as np
import pytest
from safetensors.numpy import save_file

from lmx_lab.engine.encoders.layers import gelu
from lmx_lab.engine.texts import TextTokens
from lmx_lab.errors import UnusableModelError
from tests.support.models import embed, modules, pooling_files, run, texts_of

TOKENS = ((2, 5, 7, 9, 3), (2, 6, 3))


def test_gelu_is_exact_for_small_and_large_numbers():
    small = np.linspace(-8, 8, 20_001, dtype=np.float32)
    expected = [0.5 * x * math.erfc(-x / math.sqrt(2)) for x in small.tolist()]
    assert np.abs(np.array(gelu(mx.array(small))) - expected).max() < 1e-6
    large = np.array([-1e38, -1e9, -100, 100, 1e9, 1e38], dtype=np.float32)
    assert np.array_equal(np.array(gelu(mx.array(large))), np.maximum(large, 0))
    assert float(gelu(mx.array(0.0))) == 0


def hidden(model, tokens):
    """(length, size) of one text: the last array that the generator yields."""
    states = [np.array(state) for state in model.forward([TextTokens(tokens)])]
    return np.asarray(states[-1][0])


def expected(states, mode):
    places = np.arange(1, len(states) + 1)[:, None]
    pooled = {
        "cls_token": states[0],
        "max_tokens": states.max(0),
        "mean_tokens": states.mean(0),
        "mean_sqrt_len_tokens": states.sum(0) / np.sqrt(len(states)),
        "weightedmean_tokens": (states * places).sum(0) / places.sum(),
        "lasttoken": states[-1],
    }
    return np.asarray(pooled[mode])


@pytest.mark.parametrize(
    "mode", ["cls_token", "max_tokens", "mean_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken"]
)
def test_padding_is_not_pooled(bert, mode):
    model = bert(pooling_files(mode, normalize=False))
    for tokens, vector in zip(TOKENS, embed(model, *TOKENS), strict=True):
        np.testing.assert_allclose(vector, expected(hidden(model, tokens), mode), atol=1e-5)


def test_the_new_pooling_key_is_supported(bert):
    model = bert({"modules.json": modules("Pooling"), "1_Pooling/config.json": {"pooling_mode": "cls"}})
    np.testing.assert_allclose(embed(model, TOKENS[0])[0], hidden(model, TOKENS[0])[0], atol=1e-6)


def test_the_vectors_of_several_modes_are_concatenated(bert):
    model = bert(pooling_files("cls_token", normalize=False, pooling_mode_mean_tokens=True))
    assert model.dimensions == 64
    states = hidden(model, TOKENS[0])
    np.testing.assert_allclose(embed(model, TOKENS[0])[0], np.concatenate([states[0], states.mean(0)]), atol=1e-5)


@pytest.mark.parametrize("normalize", [True, False])
def test_vectors_are_normalized_if_the_files_require_it(bert, normalize):
    lengths = np.linalg.norm(embed(bert(pooling_files("mean_tokens", normalize=normalize)), *TOKENS), axis=1)
    assert np.allclose(lengths, 1, atol=1e-6) == normalize


def test_an_encoder_without_pooling_files_uses_the_mean_and_logs_it(bert, caplog):
    model = bert({})
    states = hidden(model, TOKENS[0]).mean(0)
    np.testing.assert_allclose(embed(model, TOKENS[0])[0], states / np.linalg.norm(states), atol=1e-5)
    assert [record.getMessage() for record in caplog.records] == [
        "tiny-bert has no pooling files; using mean pooling and vectors of length 1"
    ]


def test_a_decoder_without_pooling_files_uses_the_last_token(qwen3):
    model = qwen3({"README.md": "---\npipeline_tag: feature-extraction\n---\n"})
    same = qwen3(pooling_files("lasttoken"))
    np.testing.assert_allclose(embed(model, *TOKENS), embed(same, *TOKENS))


def test_a_prompt_can_be_excluded_from_pooling(bert):
    prompts = {"config_sentence_transformers.json": {"prompts": {"query": "query: "}}}
    model = bert(pooling_files("mean_tokens", normalize=False, include_prompt=False) | prompts)
    tokens = texts_of(model, ["the cat"], input_type="query", truncate=False)
    plain = texts_of(model, ["the cat"], input_type=None, truncate=False)
    assert tokens[0].skipped_tokens == len(tokens[0].tokens) - len(plain[0].tokens) + 1
    states = hidden(model, tokens[0].tokens)[tokens[0].skipped_tokens :]
    other = texts_of(model, ["a big dog sits on the mat"], input_type="query", truncate=False)
    np.testing.assert_allclose(run(model.forward(tokens + other))[0], states.mean(0), atol=1e-5)


def dense(config):
    """Return the files of a dense module after the pooling."""
    return {"modules.json": modules("Pooling", "Dense"), "2_Dense/config.json": config}


@pytest.mark.parametrize(("activation", "act"), [("Tanh", np.tanh), ("Identity", lambda x: x)])
def test_a_dense_module_is_applied_after_the_pooling(tmp_path, bert, activation, act):
    weight, bias = np.random.default_rng(1).normal(0, 1, (8, 32)), np.arange(8) / 10
    config = {"in_features": 32, "out_features": 8, "activation_function": f"torch.nn.modules.activation.{activation}"}
    (tmp_path / "tiny-bert" / "2_Dense").mkdir(parents=True)
    tensors = {"linear.weight": weight.astype(np.float32), "linear.bias": bias.astype(np.float32)}
    save_file(tensors, tmp_path / "tiny-bert" / "2_Dense" / "model.safetensors")
    model = bert(pooling_files("mean_tokens") | dense(config))
    assert model.dimensions == 8
    pooled = hidden(model, TOKENS[0]).mean(0)
    np.testing.assert_allclose(embed(model, TOKENS[0])[0], act(pooled @ weight.T + bias), atol=1e-4)


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({"modules.json": modules("Pooling", "Whitening")}, "Whitening"),
        ({"modules.json": [{"type": "my_code.Pooling", "path": "1_Pooling"}]}, "custom code"),
        ({"modules.json": [{"type": "sentence_transformers.models.Pooling", "path": "../x"}]}, "'../x'"),
        ({"modules.json": [{"path": "1_Pooling"}]}, "type"),
        ({"1_Pooling/config.json": {"pooling_mode": "median"}}, "median"),
        (dense({"in_features": 32}), "out_features"),
        (dense({"in_features": 32, "out_features": 8, "activation_function": "torch.nn.Foo"}), "Foo"),
        (dense({"in_features": 32, "out_features": 8}), "2_Dense contains no model"),
    ],
)
def test_an_unsupported_module_or_pooling_is_refused_by_name(bert, files, named):
    with pytest.raises(UnusableModelError, match=named):
        bert(pooling_files("mean_tokens") | files)
