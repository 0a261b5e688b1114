"""Hooks read and replace the values of a model, and are removed completely."""

import mlx.core as mx
import pytest
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten

from lmx_lab.engine.mlx.capture.install import HookPoint, install
from lmx_lab.engine.mlx.capture.points import find_parts, find_points
from lmx_lab.errors import InvalidRequestError
from tests.engine.mlx.capture.families import PAGE, table, written
from tests.support.models import build_model

TOKENS = mx.array([[5, 6, 7, 8]])
GRANITE = {
    "logits_scaling": 1.0,
    "attention_multiplier": 0.3,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 0.22,
    "attention_bias": False,
    "mlp_bias": False,
}


def points_of(model):
    return find_points(find_parts(model, "tiny"), "tiny")


def values(model, points, *names):
    found = {}
    functions = {points.point(name): (lambda value, name=name: found.update({name: value})) for name in names}
    with install(functions):
        mx.eval(model(TOKENS))
    return found


@pytest.mark.parametrize(
    ("family", "changes", "expected"),
    [
        ("llama", {}, ["resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post"]),
        ("gemma2", {}, ["resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post"]),
        ("olmo2", {}, ["resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post"]),
        ("phi", {"partial_rotary_factor": 0.5}, ["resid_pre", "attn_out", "mlp_out", "resid_post"]),
        ("granite", GRANITE, ["resid_pre", "resid_post"]),
    ],
)
def test_a_block_has_the_hooks_whose_sum_is_its_output(family, changes, expected):
    model = build_model(family, **changes)
    points = points_of(model)
    block = [name.removeprefix("blocks.1.hook_") for name in points.sizes if name.startswith("blocks.1.hook_")]
    assert block == expected
    assert {"hook_embed", "ln_final.hook_normalized", "logits"} <= points.points.keys()
    if "attn_out" in expected:
        names = [f"blocks.1.hook_{name}" for name in ("resid_pre", "attn_out", "mlp_out", "resid_post")]
        before, attention, mlp, after = values(model, points, *names).values()
        assert mx.allclose(before + attention + mlp, after, atol=1e-6)


def test_hooks_are_removed_completely():
    model = build_model("llama")
    classes = [type(module) for _, module in model.named_modules()]
    parameters = [name for name, _ in tree_flatten(model.parameters())]
    logits = model(TOKENS)
    points = points_of(model)
    with pytest.raises(ZeroDivisionError), install({points.point("blocks.0.hook_resid_post"): lambda value: 1 / 0}):
        model(TOKENS)
    assert mx.array_equal(values(model, points, "logits")["logits"], logits)
    assert [type(module) for _, module in model.named_modules()] == classes
    assert [name for name, _ in tree_flatten(model.parameters())] == parameters
    assert not any("_lmx_lab_hooks" in vars(module) for _, module in model.named_modules())
    assert mx.array_equal(model(TOKENS), logits)


def test_a_replaced_value_is_used_instead_of_the_computed_one():
    model = build_model("llama")
    points = points_of(model)
    post = points.point("blocks.1.hook_resid_post")
    logits, clean = model(TOKENS), values(model, points, "blocks.1.hook_resid_post")["blocks.1.hook_resid_post"]
    with install({points.point("blocks.0.hook_resid_post"): mx.zeros_like}):
        assert not mx.allclose(model(TOKENS), logits)
        # The inner block restores what the outer one has changed.
        with install({post: lambda value: clean}):
            assert mx.array_equal(model(TOKENS), logits)
        with install({}, alone=True):
            assert mx.array_equal(model(TOKENS), logits)


def test_errors_name_the_hooks_that_exist():
    points = points_of(build_model("llama"))
    assert points.matching(["logits", "blocks.*.hook_resid_p*"])[:2] == [
        "blocks.0.hook_resid_pre",
        "blocks.0.hook_resid_post",
    ]
    with pytest.raises(
        InvalidRequestError, match=r"has no hook 'blocks\.9\.hook_resid_post'; it has blocks\.0\.hook_resid_po"
    ):
        points.matching(["blocks.9.hook_resid_post"])
    with pytest.raises(InvalidRequestError, match=r"can be read, but not replaced"):
        points.point("blocks.0.hook_resid_mid")
    with pytest.raises(
        InvalidRequestError, match=r"it has hook_embed, blocks.*; did you mean 'blocks.0.hook_resid_post'"
    ):
        points.point("blocks.0.hook_residpost")


def test_a_model_without_blocks_is_refused():
    class Blocks:
        model_type = "other"

    with pytest.raises(InvalidRequestError, match=r"tiny \(other\) has no list of blocks"):
        find_parts(Blocks(), "tiny")


def test_the_first_input_may_be_a_keyword():
    class Keyword(Module):
        def __call__(self, x):
            return x + 1, 2

    module = Keyword()
    with install({HookPoint(module, "input"): lambda x: x * 10, HookPoint(module, "output"): lambda x: -x}):
        assert (module(x=mx.array(3)), module(mx.array(3))) == ((-31, 2), (-31, 2))


@pytest.mark.long
def test_the_table_of_families_is_up_to_date():
    page = PAGE.read_text(encoding="utf-8")
    assert page == written(page, table()), "run: .venv/bin/python -m tests.engine.mlx.capture.families"
