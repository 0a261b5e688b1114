"""ModernBERT computes what its paper defines, here with NumPy; unsupported configurations are refused by name."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import save_file

from lmx_lab.engine.texts import TextTokens
from lmx_lab.errors import UnusableModelError
from tests.support.models import TINY_POSITIONS, entry, load, pooling_files, run, write_json, write_tokenizer

WIDTH, INNER, HEADS, LAYERS, WINDOW = 32, 48, 4, 3, 3
TEXTS = [TextTokens((2, 9, 3)), TextTokens(tuple(range(5, 25))), TextTokens((7,))]
ROPE = {"full_attention": {"rope_theta": 500.0}, "sliding_attention": {"rope_type": "default", "rope_theta": 50.0}}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 2.0}
Array = npt.NDArray[Any]


def modernbert_weights(words, *, bias, labels):
    random = np.random.default_rng(3)
    tensors = {"model.embeddings.tok_embeddings.weight": random.normal(0, 0.5, (words, WIDTH))}
    norms = {"model.embeddings.norm", "model.final_norm", *({"head.norm"} if labels else ())}
    linear = {"head.dense": (WIDTH, WIDTH), "classifier": (labels, WIDTH)} if labels else {}
    for layer in (f"model.layers.{at}" for at in range(LAYERS)):
        norms |= {f"{layer}.mlp_norm", *(() if layer.endswith(".0") else (f"{layer}.attn_norm",))}
        linear |= {f"{layer}.attn.Wqkv": (3 * WIDTH, WIDTH), f"{layer}.attn.Wo": (WIDTH, WIDTH)}
        linear |= {f"{layer}.mlp.Wi": (2 * INNER, WIDTH), f"{layer}.mlp.Wo": (WIDTH, INNER)}
    for name in sorted(norms):
        tensors[f"{name}.weight"] = 1 + random.normal(0, 0.1, WIDTH)
    for name, shape in linear.items():
        tensors[f"{name}.weight"] = random.normal(0, 0.3, shape)
    for name in sorted(tensors if bias else {"classifier.weight"} & set(tensors)):
        if "embeddings.tok" not in name:
            tensors[name.replace(".weight", ".bias")] = random.normal(0, 0.1, tensors[name].shape[0])
    return {name: tensor.astype(np.float32) for name, tensor in tensors.items()}


@pytest.fixture
def modernbert(tmp_path):
    """A ModernBERT of 3 layers: an embedder, or with ``labels`` a classifier. The other arguments are in its config."""

    def write(*, labels=0, **config):
        folder = tmp_path / "tiny-modernbert"
        words = write_tokenizer(folder).get_vocab_size()
        save_file(modernbert_weights(words, bias="norm_bias" in config, labels=labels), folder / "model.safetensors")
        written = {
            "architectures": ["ModernBertForSequenceClassification" if labels else "ModernBertModel"],
            "model_type": "modernbert",
            "hidden_size": WIDTH,
            "intermediate_size": INNER,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "max_position_embeddings": TINY_POSITIONS,
            "vocab_size": words,
            "local_attention": 2 * WINDOW,
            "pad_token_id": 0,
        }
        files = {} if labels else pooling_files("mean_tokens", normalize=False)
        write_json(folder, {"config.json": written | config, **files})
        return load(entry(folder))

    return write


class Reference:
    """ModernBERT with NumPy, for a single text.

    Args:
        thetas: For each layer, the base of its rotary positions.
        local: For each layer, whether its attention has a window.
    """

    def __init__(self, model, thetas, local, **weights):
        self.tensors = modernbert_weights(model.network.vocabulary_size, **{"bias": False, "labels": 0} | weights)
        self.thetas, self.local = thetas, local

    def linear(self, name, x):
        return x @ self.tensors[f"{name}.weight"].T.astype(float) + self.tensors.get(f"{name}.bias", 0.0)

    def norm(self, name, x):
        centered = x - x.mean(-1, keepdims=True)
        scaled = centered / np.sqrt((centered**2).mean(-1, keepdims=True) + 1e-5)
        return scaled * self.tensors[f"{name}.weight"] + self.tensors.get(f"{name}.bias", 0.0)

    def hidden(self, tokens):
        x = self.tensors["model.embeddings.tok_embeddings.weight"][list(tokens)].astype(float)
        x = self.norm("model.embeddings.norm", x)
        for at in range(LAYERS):
            name = f"model.layers.{at}"
            x = x + self.attention(at, x if at == 0 else self.norm(f"{name}.attn_norm", x))
            inputs, gates = np.split(self.linear(f"{name}.mlp.Wi", self.norm(f"{name}.mlp_norm", x)), 2, axis=-1)
            x = x + self.linear(f"{name}.mlp.Wo", gelu(inputs) * gates)
        return self.norm("model.final_norm", x)

    def attention(self, at, x):
        length, size = len(x), WIDTH // HEADS
        product = self.linear(f"model.layers.{at}.attn.Wqkv", x)
        queries, keys, values = product.reshape(length, 3, HEADS, size).transpose(1, 2, 0, 3)
        scores = rotate(queries, self.thetas[at]) @ rotate(keys, self.thetas[at]).transpose(0, 2, 1) / math.sqrt(size)
        if self.local[at]:
            position = np.arange(length)
            scores = np.where(abs(position[:, None] - position) <= WINDOW, scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        attended = weights / weights.sum(-1, keepdims=True) @ values
        return self.linear(f"model.layers.{at}.attn.Wo", attended.transpose(1, 0, 2).reshape(length, WIDTH))


def gelu(x):
    return x * (np.vectorize(math.erf)(x / math.sqrt(2)) + 1) / 2


def rotate(x, theta):
    """Rotate pairs of one number of the first half and one of the second, by an angle that grows with the position."""
    half = x.shape[-1] // 2
    angles = np.arange(x.shape[1])[:, None] * theta ** (-np.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    cosines, sines = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cosines - second * sines, second * cosines + first * sines], axis=-1)


@pytest.mark.parametrize(
    ("config", "thetas", "local"),
    [
        ({}, (160_000, 10_000, 10_000), (False, True, True)),
        (
            {"global_attn_every_n_layers": 2, "attention_bias": True, "mlp_bias": True, "norm_bias": True},
            (160_000, 10_000, 160_000),
            (False, True, False),
        ),
        ({"local_rope_theta": 70.0, "global_rope_theta": 700.0}, (700, 70, 70), (False, True, True)),
        (
            {"layer_types": ["sliding_attention", "full_attention", "full_attention"], "rope_parameters": ROPE},
            (50, 500, 500),
            (True, False, False),
        ),
    ],
    ids=["defaults", "biases", "transformers 4", "transformers 5"],
)
def test_vectors_equal_the_definition(modernbert, config, thetas, local):
    model = modernbert(**config)
    reference = Reference(model, thetas, local, bias="norm_bias" in config)
    expected = [reference.hidden(text.tokens).mean(0) for text in TEXTS]
    np.testing.assert_allclose(run(model.forward(TEXTS)), expected, atol=1e-4)
    assert model.batch_bytes(4, 64) > 1.9 * model.batch_bytes(2, 64)


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_the_score_of_a_classifier_equals_the_definition(modernbert, pooling):
    model = modernbert(labels=1, classifier_pooling=pooling)
    reference = Reference(model, (160_000, 10_000, 10_000), (False, True, True), labels=1)
    expected = []
    for text in TEXTS:
        hidden = reference.hidden(text.tokens)
        pooled = hidden[0] if pooling == "cls" else hidden.mean(0)
        activated = reference.norm("head.norm", gelu(reference.linear("head.dense", pooled)))
        expected.append(reference.linear("classifier", activated)[0])
    np.testing.assert_allclose(run(model.forward(TEXTS)), expected, atol=1e-4)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rope_scaling": {"factor": 2.0}}, "rope_scaling, which is not supported"),
        ({"rope_parameters": {**ROPE, "full_attention": YARN}}, "rope_type 'yarn' is not supported"),
        ({"hidden_activation": "mish"}, "mish"),
        ({"labels": 2}, "2 labels; a reranker has one"),
    ],
)
def test_an_unsupported_configuration_is_refused(modernbert, config, message):
    with pytest.raises(UnusableModelError, match=message):
        modernbert(**config)
