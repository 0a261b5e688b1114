"""Test that quantized weights whose shapes would end the process are refused."""

import json

import mlx.core as mx
import pytest
from mlx_lm.utils import load_model

from lmx_lab.engine.quantized_layers import checked_classes

pytestmark = pytest.mark.slow
WEIGHT = "model.layers.0.mlp.up_proj"


def write(folder, tiny, scales):
    """Write the weights of the tiny model. One tensor is quantized to 4 bits and has scales of the given shape."""
    weights = mx.load(str(tiny.path / "model.safetensors"))
    weights[f"{WEIGHT}.weight"], right, weights[f"{WEIGHT}.biases"] = mx.quantize(
        weights[f"{WEIGHT}.weight"], group_size=32, bits=4
    )
    weights[f"{WEIGHT}.scales"] = right if right.shape == scales else mx.ones(scales)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    config = json.loads((tiny.path / "config.json").read_text())
    quantization = {"group_size": 32, "bits": 4}
    (folder / "config.json").write_text(json.dumps(config | {"quantization": quantization}))


def test_a_quantized_layer_is_loaded(tiny, tmp_path):
    write(tmp_path, tiny, (64, 1))
    model, _ = load_model(tmp_path, get_model_classes=checked_classes)
    assert model.model.layers[0].mlp.up_proj.bits == 4


def test_scales_with_more_columns_than_their_layer_are_refused(tiny, tmp_path):
    write(tmp_path, tiny, (1, 64))
    with pytest.raises(ValueError, match=rf"{WEIGHT}.scales has the shape \(1, 64\).* its layer has 32 columns"):
        load_model(tmp_path, get_model_classes=checked_classes)
