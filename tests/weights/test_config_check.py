"""Test that impossible values are refused before anything is loaded, with an error that names them."""

import json
from pathlib import Path

import pytest

from lmx_lab.errors import UnusableModelError
from lmx_lab.weights.config_check import check_config, check_quantized

PATH = Path("model/config.json")
LLAMA = {
    "model_type": "llama",
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-5,
    "vocab_size": 49152,
    "rope_theta": 1e5,
    "quantization": {
        "group_size": 32,
        "bits": 4,
        "model.embed_tokens": {"group_size": 64, "bits": 8},
        "lm_head": False,
    },
}


NAN, INFINITE = float("nan"), float("inf")
IMPOSSIBLE = {
    "hidden_size": (0, 10**12, -576),
    "num_hidden_layers": (0, 10**9),
    "num_attention_heads": (0,),
    "num_key_value_heads": (-1,),
    "vocab_size": (0,),
    "rope_theta": (NAN, INFINITE, 0),
    "rms_norm_eps": (-INFINITE, -1e-5, 7),
    "attention_dropout": (NAN,),
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in IMPOSSIBLE.items() for value in values])
@pytest.mark.parametrize("part", ["", "text_config"])
def test_an_impossible_value_is_named(key, value, part):
    config = {"text_config": {**LLAMA, key: value}} if part else {**LLAMA, key: value}
    name = f"{part}.{key}" if part else key
    # The form in which Python and the hub's files write the value.
    with pytest.raises(UnusableModelError, match=rf"config\.json: {name} is "):
        check_config(PATH, json.loads(json.dumps(config)))


@pytest.mark.parametrize(
    ("quantization", "name"),
    [
        ({"bits": 0, "group_size": 64}, "quantization.bits is 0"),
        ({"bits": 7, "group_size": 64}, "quantization.bits is 7"),
        ({"bits": 4, "group_size": 0}, "quantization.group_size is 0"),
        ({"bits": 4, "group_size": 48}, "quantization.group_size is 48"),
        ({"bits": 4, "group_size": 64, "lm_head": {"bits": -4}}, "quantization.lm_head.bits is -4"),
    ],
)
def test_an_impossible_quantization_is_named(quantization, name):
    with pytest.raises(UnusableModelError, match=name):
        check_config(PATH, {**LLAMA, "quantization": quantization})


@pytest.mark.parametrize(
    "more",
    [
        {},
        # mamba2
        {"time_step_limit": [0.0, float("inf")], "max_rate": float("inf")},
        {"num_experts": 0, "num_nextn_predict_layers": 0, "head_dim": None},
        {"vision_config": {"hidden_size": 0, "num_hidden_layers": 0}},
        {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": -1}},
        {"quantization": {"bits": 4, "group_size": 16, "mode": "nvfp4"}},
    ],
)
def test_possible_values_are_accepted(more):
    check_config(PATH, {**LLAMA, **more})


def test_groups_that_do_not_divide_a_tensor_are_refused():
    shapes = {"q.weight": ("U32", [576, 72]), "q.scales": ("F16", [576, 18]), "norm.weight": ("F16", [576])}
    check_quantized(PATH, shapes)
    with pytest.raises(UnusableModelError, match=r"'q\.scales' has the shape \[576, 17\]"):
        check_quantized(PATH, {**shapes, "q.scales": ("F16", [576, 17])})
