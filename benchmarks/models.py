"""Provide the folders of the models. They are created once, under ``build/bench/models``."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from mlx_lm.utils import dequantize_model, load_model

from benchmarks.bench import Model
from benchmarks.paths import MODELS, ROOT
from lmx_lab.engine.llama_cpp.quantize import quantize
from lmx_lab.settings import Settings
from lmx_lab.values.models import Format, ModelEntry
from lmx_lab.weights.catalog import Catalog
from tests.support.gguf import Tensor, read_gguf, renamed, write_tiny_gguf
from tests.support.models import write_tiny_llama

CONTEXT_TOKENS = 8192
LARGE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "vocab_size": 49152,
    "max_position_embeddings": CONTEXT_TOKENS,
    "tie_word_embeddings": False,
    "eos_token_id": [2],
}
"""Configuration of ``large``: the sizes of Llama 3.1 8B with SmolLM2's vocabulary, 7.4 billion weights."""
LAYERS = 30
"""Number of layers of SmolLM2-135M."""
LAYER = re.compile(r"blk\.(\d+)\.(.+)")
"""Name of a tensor of a layer in a GGUF file."""
WRITTEN = ("attn_output.weight", "ffn_down.weight")
"""The tensors with whose products a layer changes its input."""


def folder_of(model: Model) -> Path:
    """Return the model's folder. Create it if it is missing."""
    if model == "smollm2" and mx.default_device() != mx.cpu:
        # A GPU computes with float16, the type in the files.
        return _starter().path
    folder = MODELS / model
    if not folder.exists():
        unfinished = MODELS / f".{model}.part"
        shutil.rmtree(unfinished, ignore_errors=True)
        if model == "tiny":
            write_tiny_llama(unfinished, _starter().path, seed=0, context=CONTEXT_TOKENS)
        elif model == "large":
            _write_large(_starter().path, unfinished)
        else:
            _copy_as_float32(_starter().path, unfinished)
        unfinished.rename(folder)
    return folder


def _write_large(tokenizer_from: Path, target: Path) -> None:
    """Write a model with random bfloat16 weights, whose tokens are meaningless and whose speed is that of its size."""
    target.mkdir(parents=True)
    model = llama.Model(llama.ModelArgs.from_dict(LARGE))
    model.set_dtype(mx.bfloat16)
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(target / "model.safetensors"), weights, metadata={"format": "mlx"})
    (target / "config.json").write_text(json.dumps(LARGE | {"torch_dtype": "bfloat16"}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer_from / name, target / name)


def expanded() -> Path:
    """Return SmolLM2-135M in float32 without quantization, which is fastest for ``mlx_lm.server`` on a CPU."""
    folder = MODELS / "smollm2-float32"
    if not folder.exists():
        unfinished = MODELS / ".smollm2-float32.part"
        shutil.rmtree(unfinished, ignore_errors=True)
        _copy_expanded(_starter().path, unfinished)
        unfinished.rename(folder)
    return folder


def minilm() -> Path:
    return _starter("minilm-l6").path


def gguf_starter() -> ModelEntry:
    """Return SmolLM2-135M as a GGUF file. ``smollm2`` is made from the same weights."""
    return _starter(format_="gguf")


def tiny_gguf() -> Path:
    """Return a model with random weights like ``tiny`` as a GGUF file, with the context of the tests."""
    path = MODELS / "tiny.gguf"
    if not path.exists():
        MODELS.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".part")
        write_tiny_gguf(unfinished, gguf_starter().path, _starter().path)
        unfinished.rename(path)
    return path


def deepened_starter() -> Path:
    """Return ``gguf_starter`` with 60 more layers, which add zero. Its answers are the same, and its layers cost three
    times as much."""
    path = MODELS / "smollm2-deepened.gguf"
    if not path.exists():
        file = read_gguf(gguf_starter().path)
        tensors = dict(file.tensors)
        for name, tensor in file.tensors.items():
            if (match := LAYER.match(name)) is None:
                continue
            data = bytes(len(tensor.data)) if match[2] in WRITTEN else tensor.data
            for layer in (int(match[1]) + LAYERS, int(match[1]) + 2 * LAYERS):
                new = f"blk.{layer}.{match[2]}"
                tensors[new] = Tensor(info=renamed(tensor.info, new), data=data)
        unfinished = replace(file, tensors=tensors).changed({"llama.block_count": 3 * LAYERS})
        unfinished.written(path.with_suffix(".part")).rename(path)
    return path


def quantized_starter() -> ModelEntry:
    """Return the quantized copy of ``gguf_starter`` that a load uses by default. It is made if it is missing.

    It is not in the home folder of the tests, whose loads would use it.
    """
    return quantize(Settings(home=MODELS.parent), str(gguf_starter().path), "Q8_0")


def _starter(name: str = "smollm2-135m", format_: Format = "mlx") -> ModelEntry:
    """Return a starter model from the home folder of the tests. Download or convert it if it is missing."""
    home = Path(os.environ.get("LMX_LAB_TEST_HOME", ROOT / ".cache" / "test-home")).absolute()
    return Catalog(Settings(home=home)).fetch(name, format=format_)


def _copy_as_float32(source: Path, target: Path) -> None:
    """Copy a model and convert float16 to float32, including quantization scales. Integers are unchanged.

    Activations have the type of the scales, and a CPU emulates float16: ``mlx_lm.server`` would take three seconds for
    each token.
    """
    target.mkdir(parents=True)
    for path in source.iterdir():
        if path.suffix == ".safetensors":
            weights = mx.load(str(path))
            assert isinstance(weights, dict)
            wide = {name: _wide(weight) for name, weight in weights.items()}
            mx.save_safetensors(str(target / path.name), wide, metadata={"format": "mlx"})
        else:
            shutil.copy(path, target / path.name)


def _copy_expanded(source: Path, target: Path) -> None:
    target.mkdir(parents=True)
    model, config = load_model(source, lazy=True)
    model.set_dtype(mx.float32)
    dequantize_model(model)
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(target / "model.safetensors"), weights, metadata={"format": "mlx"})
    for name in ("quantization", "quantization_config"):
        config.pop(name, None)
    (target / "config.json").write_text(json.dumps(config))
    for path in source.iterdir():
        if path.suffix != ".safetensors" and path.name != "config.json":
            shutil.copy(path, target / path.name)


def _wide(weight: mx.array) -> mx.array:
    return weight.astype(mx.float32) if mx.issubdtype(weight.dtype, mx.floating) else weight
