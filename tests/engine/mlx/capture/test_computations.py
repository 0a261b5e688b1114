"""Compare traces, the logit lens, patches and attributions of small models with computations without hooks."""

from contextlib import suppress
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from mlx.nn.layers.quantized import quantize

from lmx_lab.engine.mlx.capture.activations import TraceContext, compute_activations
from lmx_lab.engine.mlx.capture.install import HookPoint, install
from lmx_lab.engine.mlx.capture.lens import compute_attribution, compute_logit_lens, most_likely
from lmx_lab.engine.mlx.capture.patching import compute_patching
from lmx_lab.engine.mlx.capture.points import find_parts, find_points
from lmx_lab.errors import InvalidRequestError
from lmx_lab.values.tracing import Activations, LogitLens, Patching
from tests.engine.mlx.capture.families import GENERIC, OWN
from tests.support.models import build_model

TOKENS = [int(token) for token in np.random.default_rng(0).integers(0, 97, 30)]
CLEAN = [*TOKENS[:4], 50, *TOKENS[5:]]
WINDOW = {"sliding_window": 8, "sliding_window_pattern": 2}
COHERE = {**WINDOW, "logit_scale": 1.0, "attention_bias": False, "layer_norm_bias": False}
FAMILIES = {
    "llama": {},
    "gemma2": {},
    "gemma3_text": WINDOW,
    "cohere2": COHERE,
    "phi": {"partial_rotary_factor": 0.5},
    "lfm2": {"num_hidden_layers": 4, **OWN["lfm2"]},
    "gpt_oss": {"num_hidden_layers": 4, "sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
}


def context(model):
    found = find_points(find_parts(model, "tiny"), "tiny")
    return TraceContext(found=found, limit_bytes=2**30, text_of=str)


def family(kind):
    return build_model(kind, **{**GENERIC, "num_hidden_layers": 3, **FAMILIES[kind]})


def finish(steps, limit=512):
    next(steps)
    try:
        while True:
            steps.send(limit)
    except StopIteration as end:
        return end.value


@pytest.mark.parametrize("kind", FAMILIES)
def test_values_do_not_depend_on_the_chunks_and_heads_follow_from_patterns(kind):
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
    assert details["positions"] == [29, 3]
    for name, values in some.items():
        np.testing.assert_allclose(values, whole[name][[29, 3]], atol=1e-4, err_msg=name)


SWEPT = ("*.hook_resid_*", "*.hook_*_out", "*.hook_z")


def replaced_logits(made, clean, name, head, positions):
    """Return the last logits of a pass in which a value is that of the clean text at some positions."""
    points, at = made.found.points, mx.array(positions)
    values = mx.array(clean[name][positions])
    before = []

    def change(old):
        new = mx.array(old)
        if name.endswith("hook_resid_mid"):
            new[0, at] = values - before[0][0, at]
        elif head is None:
            new[0, at] = values
        else:
            width = values.shape[-1]
            new[0, at, head * width : (head + 1) * width] = values[:, head]
        return new

    block, point = ".".join(name.split(".")[:2]), points[name.replace("resid_mid", "attn_out")]
    functions = {
        points[f"{block}.hook_resid_pre"]: before.append,
        HookPoint(point.module, point.side): change,
    }
    with install(functions):
        return np.array(made.found.parts.model(mx.array([TOKENS])))[0, -1]


@pytest.mark.parametrize("kind", FAMILIES)
def test_each_cell_of_a_sweep_equals_a_pass_with_this_value_replaced(kind):
    model = family(kind)
    made = context(model)
    work = Patching(answer=3, other=4, hooks=SWEPT, positions=(0, 4, 29))
    arrays, details = finish(compute_patching(made, TOKENS, CLEAN, (3, 4), work))
    for limit in (40, 1):
        pieces, _ = finish(compute_patching(made, TOKENS, CLEAN, (3, 4), work), limit)
        np.testing.assert_allclose(pieces["logits"], arrays["logits"], atol=1e-4)
    together, _ = finish(compute_patching(made, TOKENS, CLEAN, (3, 4), replace(work, together=True)), 20)
    assert together["logits"].shape == (len(details["names"]), 1, 2)
    clean, _ = finish(compute_activations(made, CLEAN, Activations(hooks=SWEPT)))
    for row, (name, head) in enumerate(zip(details["names"], details["heads"], strict=True)):
        for column, position in enumerate(details["positions"]):
            logits = replaced_logits(made, clean, name, head, [position])
            np.testing.assert_allclose(arrays["logits"][row, column], logits[[3, 4]], atol=2e-4, err_msg=name)
        logits = replaced_logits(made, clean, name, head, details["positions"])
        np.testing.assert_allclose(together["logits"][row, 0], logits[[3, 4]], atol=2e-4, err_msg=name)
    assert {*details["heads"]} == {None, *range(4)}
    np.testing.assert_allclose(details["clean"], np.array(model(mx.array([CLEAN])))[0, -1][[3, 4]], atol=1e-4)


def test_patching_nothing_changes_nothing_and_the_only_head_is_the_output_of_attention():
    made = context(build_model("llama", num_attention_heads=1, num_key_value_heads=1, head_dim=32))
    work = Patching(answer=3, other=4, hooks=SWEPT, together=True)
    arrays, details = finish(compute_patching(made, TOKENS, TOKENS, (3, 4), work))
    np.testing.assert_allclose(arrays["logits"], np.tile(details["corrupt"], (len(details["names"]), 1, 1)), atol=1e-5)
    arrays, details = finish(compute_patching(made, TOKENS, CLEAN, (3, 4), work))
    logits = dict(zip(details["names"], arrays["logits"][:, 0], strict=True))
    for block in range(3):
        np.testing.assert_allclose(
            logits[f"blocks.{block}.attn.hook_z"], logits[f"blocks.{block}.hook_attn_out"], atol=1e-5
        )
        np.testing.assert_allclose(logits[f"blocks.{block}.hook_resid_post"], details["clean"], atol=1e-4)
        np.testing.assert_allclose(logits[f"blocks.{block}.hook_resid_mid"], details["clean"], atol=1e-4)


@pytest.mark.parametrize("limit", [2, 7, 30])
def test_the_work_of_a_step_is_limited(limit):
    made = context(build_model("llama"))
    sweep = Patching(answer=3, other=4, hooks=SWEPT)
    for steps in (
        compute_activations(made, TOKENS, Activations(hooks=("*.hook_resid_post",))),
        compute_patching(made, TOKENS, CLEAN, (3, 4), sweep),
    ):
        work = [next(steps)]
        with suppress(StopIteration):
            while True:
                work.append(steps.send(limit))
        # A batch has at least two tokens of each row, or three if only one token would be left, and the first batch has
        # one more row.
        assert max(work) <= 2 * limit + 1
    assert sum(work) > 10 * len(TOKENS)


@pytest.mark.parametrize("kind", FAMILIES)
def test_the_logit_lens_and_contributions_end_with_the_logits(kind):
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


@pytest.mark.parametrize("width", [150, 6_463, 49_157])
def test_the_most_likely_tokens_of_any_vocabulary_are_those_of_a_sort(width):
    random = np.random.default_rng(width)
    logits = random.normal(size=(4, width)).astype(np.float32)
    logits[1] = logits[1].round()
    logits[2] = 0
    logits[3].sort()
    ids, logprobs = most_likely(logits, 100)
    largest = np.sort(logits, axis=1)[:, :-101:-1]
    np.testing.assert_array_equal(np.take_along_axis(logits, ids, axis=1), largest)
    assert all(len(set(row)) == 100 for row in ids.tolist())
    total = np.log(np.exp(logits.astype(np.float64)).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(logprobs, largest - total, atol=1e-4)
    assert np.isnan(most_likely(np.full((1, width), np.nan, np.float32), 100)[1]).all()


def test_traces_of_a_quantized_model_equal_its_own_computation():
    model = build_model("llama")
    quantize(model, group_size=32, bits=4)
    arrays, _ = finish(compute_activations(context(model), TOKENS, Activations(hooks=("*.hook_resid_post", "logits"))))
    np.testing.assert_allclose(arrays["logits"], np.array(model(mx.array([TOKENS])))[0], atol=1e-4)
    again = model.model.embed_tokens.as_linear(model.model.norm(mx.array(arrays["blocks.2.hook_resid_post"])))
    np.testing.assert_allclose(np.array(again), arrays["logits"], atol=1e-4)


def test_values_that_a_family_does_not_have_are_refused_by_name():
    mamba = build_model("mamba", state_size=8, conv_kernel=4, use_bias=False, use_conv_bias=True, time_step_rank=4)
    with pytest.raises(
        InvalidRequestError, match=r"no blocks\.0\.hook_attn_out: the outputs of its blocks are not sums"
    ):
        finish(compute_attribution(context(mamba), TOKENS, 3, None))
    with pytest.raises(InvalidRequestError, match=r"has no hook .*hook_pattern'; it has hook_embed"):
        finish(compute_activations(context(mamba), TOKENS, Activations(hooks=("*.hook_pattern",))))
    nanochat = build_model("nanochat", **{name: value for name, value in GENERIC.items() if name != "rope_scaling"})
    with pytest.raises(InvalidRequestError, match="not computed by a final norm and a head"):
        finish(compute_logit_lens(context(nanochat), TOKENS, LogitLens()))
    gated = build_model("afmoe", **{**GENERIC, **OWN["afmoe"]})
    work = Patching(answer=3, other=4, hooks=("*.hook_z",))
    with pytest.raises(InvalidRequestError, match=r"blocks\.0\.attn\.hook_z can be read, but not replaced"):
        finish(compute_patching(context(gated), TOKENS, CLEAN, (3, 4), work))
    with pytest.raises(InvalidRequestError, match="top is 0"):
        finish(compute_logit_lens(context(build_model("llama")), TOKENS, LogitLens(top=0)))
