"""Compare traces, the logit lens, patches and attributions of small models with computations without hooks."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.nn.layers.quantized import quantize

from lmx_lab.engine.mlx.capture.activations import Steps, TraceContext, compute_activations
from lmx_lab.engine.mlx.capture.attribution import compute_attribution
from lmx_lab.engine.mlx.capture.install import install
from lmx_lab.engine.mlx.capture.logit_lens import compute_logit_lens
from lmx_lab.engine.mlx.capture.parts import find_parts
from lmx_lab.engine.mlx.capture.patching import compute_patching
from lmx_lab.engine.mlx.capture.points import find_points
from lmx_lab.errors import InvalidRequestError
from lmx_lab.values.tracing import Activations, LogitLens, Patching
from tests.engine.mlx.capture.families import GENERIC, OWN
from tests.engine.mlx.capture.models import build

TOKENS = [int(token) for token in np.random.default_rng(0).integers(0, 97, 30)]
CLEAN = [*TOKENS[:4], 50, *TOKENS[5:]]
WINDOW = {"sliding_window": 8, "sliding_window_pattern": 2}
COHERE = {**WINDOW, "logit_scale": 1.0, "attention_bias": False, "layer_norm_bias": False}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma2": {},
    "gemma3_text": WINDOW,
    "cohere2": COHERE,
    "phi": {"partial_rotary_factor": 0.5},
    "lfm2": {"num_hidden_layers": 4, **OWN["lfm2"]},
    "gpt_oss": {"num_hidden_layers": 4, "sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
}


def context(model: Any) -> TraceContext:
    found = find_points(find_parts(model, "tiny"), "tiny")
    return TraceContext(found=found, limit_bytes=2**30, text_of=str)


def family(kind: str) -> Any:
    return build(kind, **{**GENERIC, "num_hidden_layers": 3, **FAMILIES[kind]})


def finish(steps: Steps, limit: int = 512) -> tuple[dict[str, Any], dict[str, Any]]:
    next(steps)
    try:
        while True:
            steps.send(limit)
    except StopIteration as end:
        results: tuple[dict[str, Any], dict[str, Any]] = end.value
        return results


@pytest.mark.parametrize("kind", FAMILIES)
def test_values_do_not_depend_on_the_chunks_and_heads_follow_from_patterns(kind: str) -> None:
    model = family(kind)
    made = context(model)
    whole, _ = finish(compute_activations(made, TOKENS, Activations(hooks=("*",))))
    pieces, _ = finish(compute_activations(made, TOKENS, Activations(hooks=("*",))), 7)
    for name, values in whole.items():
        np.testing.assert_allclose(pieces[name], values, atol=1e-4, err_msg=name)
    np.testing.assert_allclose(whole["logits"], np.array(model(mx.array([TOKENS])))[0], atol=1e-4)
    for name in [name for name in whole if name.endswith("hook_z")]:
        pattern, values = (whole[name.replace("hook_z", other)] for other in ("hook_pattern", "hook_v"))
        heads = np.repeat(values, pattern.shape[1] // values.shape[1], axis=1)
        np.testing.assert_allclose(np.einsum("qhk,khd->qhd", pattern, heads), whole[name], atol=1e-4)
    some, details = finish(compute_activations(made, TOKENS, Activations(hooks=("*",), positions=(-1, 3))), 7)
    assert details["positions"] == [3, 29]
    for name, values in some.items():
        np.testing.assert_allclose(values, whole[name][[3, 29]], atol=1e-4, err_msg=name)


@pytest.mark.parametrize("kind", FAMILIES)
def test_each_cell_of_a_sweep_equals_a_pass_with_this_value_replaced(kind: str) -> None:
    model = family(kind)
    made = context(model)
    hooks = ("*.hook_resid_p*", "*.hook_*_out")
    work = Patching(answer=3, other=4, hooks=hooks, positions=(0, 4, 29))
    arrays, details = finish(compute_patching(made, TOKENS, CLEAN, (3, 4), work))
    pieces, _ = finish(compute_patching(made, TOKENS, CLEAN, (3, 4), work), 40)
    np.testing.assert_allclose(pieces["logits"], arrays["logits"], atol=1e-4)
    clean, _ = finish(compute_activations(made, CLEAN, Activations(hooks=hooks)))
    for row, name in enumerate(details["names"]):
        for column, position in enumerate(details["positions"]):
            value = mx.array(clean[name][position])

            def replaced(old: mx.array, position: int = position, value: mx.array = value) -> mx.array:
                new = mx.array(old)
                new[0, position] = value
                return new

            with install({made.found.point(name): replaced}):
                logits = np.array(model(mx.array([TOKENS])))[0, -1]
            np.testing.assert_allclose(arrays["logits"][row, column], logits[[3, 4]], atol=2e-4, err_msg=name)
    np.testing.assert_allclose(details["clean"], np.array(model(mx.array([CLEAN])))[0, -1][[3, 4]], atol=1e-4)


@pytest.mark.parametrize("kind", FAMILIES)
def test_the_logit_lens_and_contributions_end_with_the_logits(kind: str) -> None:
    model = family(kind)
    made = context(model)
    logits = np.array(model(mx.array([TOKENS])))[0]
    lens, _ = finish(compute_logit_lens(made, TOKENS, LogitLens(top=3)))
    np.testing.assert_array_equal(lens["ids"][-1, :, 0], logits.argmax(axis=1))
    shares = np.exp(logits - logits.max(axis=1, keepdims=True))
    expected = np.log(shares.max(axis=1) / shares.sum(axis=1))
    np.testing.assert_allclose(lens["logprobs"][-1, :, 0], expected, atol=1e-4)
    arrays, details = finish(compute_attribution(made, TOKENS, 3, 4))
    total = details["embedding"] + arrays["attention"].sum() + arrays["mlp"].sum() + details["bias"]
    assert total == pytest.approx(details["logit"], abs=1e-3)
    if kind != "gemma2":  # It caps logits.
        assert details["logit"] == pytest.approx(logits[-1, 3] - logits[-1, 4], abs=1e-3)


def test_a_quantized_model_is_traced_as_it_computes() -> None:
    model = build("llama")
    quantize(model, group_size=32, bits=4)
    arrays, _ = finish(compute_activations(context(model), TOKENS, Activations(hooks=("*.hook_resid_post", "logits"))))
    np.testing.assert_allclose(arrays["logits"], np.array(model(mx.array([TOKENS])))[0], atol=1e-4)
    again = model.model.embed_tokens.as_linear(model.model.norm(mx.array(arrays["blocks.2.hook_resid_post"])))
    np.testing.assert_allclose(np.array(again), arrays["logits"], atol=1e-4)


def test_what_a_family_does_not_have_is_refused_by_name() -> None:
    mamba = build("mamba", state_size=8, conv_kernel=4, use_bias=False, use_conv_bias=True, time_step_rank=4)
    with pytest.raises(
        InvalidRequestError, match=r"no blocks\.0\.hook_attn_out: the outputs of its blocks are not sums"
    ):
        finish(compute_attribution(context(mamba), TOKENS, 3, None))
    with pytest.raises(InvalidRequestError, match=r"has no hook .*hook_pattern'; it has hook_embed"):
        finish(compute_activations(context(mamba), TOKENS, Activations(hooks=("*.hook_pattern",))))
    nanochat = build("nanochat", **{name: value for name, value in GENERIC.items() if name != "rope_scaling"})
    with pytest.raises(InvalidRequestError, match="not computed by a final norm and a head"):
        finish(compute_logit_lens(context(nanochat), TOKENS, LogitLens()))
    with pytest.raises(InvalidRequestError, match="top is 0"):
        finish(compute_logit_lens(context(build("llama")), TOKENS, LogitLens(top=0)))
