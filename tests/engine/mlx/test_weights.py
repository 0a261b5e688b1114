"""On a CPU, weights are expanded to float32 if they fit in memory. Quantized weights of wrong shapes are refused."""

import json
import shutil
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model, quantize_model

from lmx_lab.engine import ModelManager, memory
from lmx_lab.engine.mlx.weights import EXPANDED_SHARE, checked_classes, expanded_bytes, fit_weights
from lmx_lab.settings import Settings
from lmx_lab.weights.catalog import Catalog
from tests.support.engines import load_entry, run

on_cpu = pytest.mark.skipif(mx.default_device() != mx.cpu, reason="on a GPU, weights are not converted")
AMPLE = 2**40


@pytest.fixture(scope="module")
def quantized(tiny, tmp_path_factory):
    """The tiny model in 4 bits with float16 scales."""
    folder = tmp_path_factory.mktemp("quantized") / "tiny-4bit"
    folder.mkdir()
    model, config = load_model(tiny.path)
    model.set_dtype(mx.float16)
    model, config = quantize_model(model, config, group_size=32, bits=4)
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny.path / name, folder / name)
    return Catalog(Settings(home=folder.parent)).resolve(str(folder))


@pytest.fixture
def fitted(quantized):
    def fit(dtype, limit_bytes=AMPLE):
        model, _ = load_model(quantized.path, lazy=True)
        fit_weights(model, dtype, limit_bytes=limit_bytes)
        return model

    return fit


def dtypes(model):
    return {value.dtype for _, value in tree_flatten(model.parameters())}


def weights_bytes(model):
    return sum(value.nbytes for _, value in tree_flatten(model.parameters()))


@on_cpu
def test_the_size_of_expanded_weights_is_known_before(quantized, fitted):
    lazy, _ = load_model(quantized.path, lazy=True)
    assert expanded_bytes(lazy, mx.float32) == weights_bytes(fitted("auto"))


@on_cpu
def test_expanding_is_exact(fitted):
    prompt = mx.array([[300, 301, 302, 303]])
    difference = mx.abs(fitted("auto")(prompt) - fitted("keep")(prompt)).max()
    assert difference.item() < 1e-3


@on_cpu
def test_weights_that_do_not_fit_stay_quantized_with_float32_activations(fitted):
    needed = weights_bytes(fitted("auto"))
    model = fitted("auto", limit_bytes=round(needed / EXPANDED_SHARE) - 1000)
    assert dtypes(model) == {mx.uint32, mx.float32}
    assert dtypes(fitted("auto", limit_bytes=round(needed / EXPANDED_SHARE) + 1000)) == {mx.float32}


@on_cpu
def test_memory_of_other_programs_is_not_available(quantized, fitted, monkeypatch):
    needed = expanded_bytes(fitted("keep"), mx.float32)
    for free, expanded in ((needed / EXPANDED_SHARE + 1e3, True), (needed / EXPANDED_SHARE - 1e3, False)):
        monkeypatch.setattr(memory, "free_bytes", lambda free=free: round(free))
        assert (weights_bytes(fitted("auto")) >= needed) is expanded


@on_cpu
@pytest.mark.parametrize(
    ("name", "limit_bytes", "expected"),
    [
        pytest.param("auto", AMPLE, {mx.float32}, id="quantized weights are expanded if they fit"),
        pytest.param("keep", AMPLE, {mx.uint32, mx.float32}, id="keep leaves them quantized"),
        # A named type expands them even if they do not fit.
        ("float32", 1, {mx.float32}),
        ("float16", 1, {mx.float16}),
        ("bfloat16", 1, {mx.bfloat16}),
    ],
)
def test_quantized_weights_get_the_type_of_the_setting(fitted, name, limit_bytes, expected):
    assert dtypes(fitted(name, limit_bytes)) == expected


@on_cpu
@pytest.mark.anyio
@pytest.mark.parametrize(("dtype", "times"), [("auto", (3.0, 9.0)), ("keep", (0.5, 2.0))])
async def test_the_setting_reaches_the_engine(quantized, dtype, times):
    async with ModelManager(Settings(dtype=dtype)) as manager:
        report = await load_entry(manager, quantized)
        low, high = times
        assert low < report.memory_bytes / quantized.size_bytes < high
        text, _ = await run(manager)
        assert text


@on_cpu
def test_an_unknown_type_is_refused_with_the_valid_ones():
    with pytest.raises(Exception, match="dtype is 'float8'; it must be one of auto, keep, float32, float16, bfloat16"):
        Settings(dtype="float8")


@on_cpu
def test_the_folder_of_the_model_is_not_changed(quantized):
    assert sorted(path.name for path in Path(quantized.path).iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


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
