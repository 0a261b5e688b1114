"""Compare traces of small random models with the hidden states, attentions and logits of transformers on PyTorch."""

import mlx.core as mx
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not in this environment; make parity has one with it")

import transformers  # noqa: E402
from mlx_lm.utils import load_model  # noqa: E402

from lmx_lab.engine.mlx.capture.activations import TraceContext, compute_activations  # noqa: E402
from lmx_lab.engine.mlx.capture.points import find_parts, find_points  # noqa: E402
from lmx_lab.values.tracing import Activations  # noqa: E402
from tests.parity.reference import build, load_both  # noqa: E402

TOLERANCE = 1e-3
"""Relative to the largest value of the array."""
SIZES = {
    "vocab_size": 400,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 640,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attn_implementation": "eager",
}
WINDOW = {"sliding_window": 8, "head_dim": 8}
FAMILIES = {
    "Llama": {},
    # mlx-lm has another default than transformers.
    "Qwen2": {"rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0}},
    "Qwen3": {"head_dim": 8},
    "Gemma2": {**WINDOW, "sliding_window": 640, "query_pre_attn_scalar": 8},
    "Gemma3Text": {**WINDOW, "query_pre_attn_scalar": 8, "sliding_window_pattern": 2},
    "Phi3": {},
    "Mistral": {"head_dim": 8, "sliding_window": None},
}
TOKENS = [int(token) for token in np.random.default_rng(0).integers(3, 400, 40)]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_trace_equals_transformers(family, tmp_path):
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **FAMILIES[family]})
    kind = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")
    reference = build(kind, config)
    reference.save_pretrained(tmp_path)
    model, _ = load_model(tmp_path)
    model.set_dtype(mx.float32)
    check(model, reference, family, TOKENS)


def test_a_trace_of_the_starter_model_equals_transformers(smollm2):
    model, reference = load_both(smollm2.path)
    check(model, reference, "smollm2-135m", [int(token) for token in np.random.default_rng(1).integers(3, 40_000, 60)])


def check(model, reference, name, tokens):
    """Assert that hidden states, attention patterns and logits are equal."""
    with torch.no_grad():
        expected = reference(torch.tensor([tokens]), output_hidden_states=True, output_attentions=True, use_cache=False)
    found = find_points(find_parts(model, name), name)
    context = TraceContext(found=found, limit_bytes=2**30, text_of=str)
    work = Activations(hooks=("*.hook_resid_pre", "ln_final.hook_normalized", "*.hook_pattern", "logits"))
    arrays = finish(compute_activations(context, tokens, work))
    blocks = len(found.parts.blocks)
    for layer in range(blocks):
        close(arrays[f"blocks.{layer}.hook_resid_pre"], expected.hidden_states[layer][0])
        close(arrays[f"blocks.{layer}.attn.hook_pattern"].swapaxes(0, 1), expected.attentions[layer][0])
    # The last hidden state of transformers is that after the final norm.
    close(arrays["ln_final.hook_normalized"], expected.hidden_states[blocks][0])
    close(arrays["logits"], expected.logits[0])


def finish(steps):
    """Perform all steps, with chunks that are shorter than the text."""
    next(steps)
    try:
        while True:
            steps.send(7)
    except StopIteration as end:
        arrays = end.value[0]
        return arrays


def close(values, expected):
    reference = expected.numpy()
    assert values.shape == reference.shape
    np.testing.assert_allclose(values, reference, atol=TOLERANCE * np.abs(reference).max())
