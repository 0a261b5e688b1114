"""Create small random models with transformers, and compute reference results with PyTorch."""

import inspect
import json

import numpy as np
import torch
import transformers
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from lmx_lab.engine.encoders.loading import load_encoder
from lmx_lab.engine.mlx.weights import fit_weights
from lmx_lab.engine.texts import TextTokens
from tests.support.models import entry, run, write_json, write_tokenizer

TOLERANCE = 1e-4
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 640,
    "vocab_size": 400,
    "pad_token_id": 0,
}


def save(folder, model, files):
    """Save a transformers model with a tokenizer, and load it with the lab."""
    model.save_pretrained(folder)
    write_tokenizer(folder, model_max_length=10**30)
    write_json(folder, files)
    return load_encoder(entry(folder), limit_bytes=2**40)


def build(kind, config, *, seed=0):
    """Create a model with weights, biases and norms so large that errors are visible."""
    torch.manual_seed(seed)
    model = kind(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name.lower() and "weight" in name else 0.0, 0.2)
    return model


def load_both(folder):
    """Load a llama model for MLX, with float32 weights, and the same weights as a model of transformers."""
    model, _ = load_model(folder, lazy=True)
    fit_weights(model, "float32", limit_bytes=2**34)
    settings = json.loads((folder / "config.json").read_text())
    names = inspect.signature(model.args.__class__).parameters
    config = transformers.LlamaConfig(
        **{name: settings[name] for name in settings if name in names and name not in ("rope_scaling", "head_dim")},
        attn_implementation="eager",
    )
    reference = transformers.LlamaForCausalLM(config).eval()
    weights = {name: torch.tensor(np.array(value)) for name, value in tree_flatten(model.parameters())}
    if model.args.rope_traditional:
        # Weights from a GGUF file have the two halves of each head interleaved.
        for name in [name for name in weights if name.endswith(("q_proj.weight", "k_proj.weight"))]:
            width = weights[name].shape[1]
            pairs = weights[name].reshape(-1, model.layers[0].self_attn.head_dim // 2, 2, width)
            weights[name] = pairs.transpose(1, 2).reshape(-1, width)
    missing = reference.load_state_dict(weights, strict=False)
    assert set(missing.missing_keys) <= {"lm_head.weight"}
    assert not missing.unexpected_keys
    return model, reference


def texts(*lengths, vocabulary=400, seed=0):
    """Return random texts of these lengths in tokens."""
    random = np.random.default_rng(seed)
    return [TextTokens(tuple(int(n) for n in random.integers(5, vocabulary, length))) for length in lengths]


def padded(batch, pad=0):
    """Return a batch as inputs of a transformers model, padded on the right."""
    longest = max(len(text.tokens) for text in batch)
    rows = [[*text.tokens, *[pad] * (longest - len(text.tokens))] for text in batch]
    mask = [[1] * len(text.tokens) + [0] * (longest - len(text.tokens)) for text in batch]
    return {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(mask)}


def mean(hidden, mask):
    """Return the mean of the hidden states of each text, without padding."""
    weights = mask[..., None].float()
    return np.asarray(((hidden * weights).sum(1) / weights.sum(1)).numpy())


def last(hidden, mask):
    """Return the hidden state of the last token of each text."""
    return np.asarray(hidden[torch.arange(len(mask)), mask.sum(1) - 1].numpy())


def check(loaded, batch, expected):
    """Assert that the lab's results for a batch equal the expected ones within ``TOLERANCE``."""
    np.testing.assert_allclose(run(loaded.forward(batch)), expected, atol=TOLERANCE)
