"""Fixtures of every layer: a home with the starters, and a tiny model for milliseconds a token."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from lmx_lab.settings import Settings
from lmx_lab.weights import Catalog, ModelEntry

ROOT = Path(__file__).parent.parent
TINY_CONTEXT = 512


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True, scope="session")
def _no_foreign_settings() -> None:
    for name in [name for name in os.environ if name.startswith("LMX_LAB_") and name != "LMX_LAB_TEST_HOME"]:
        del os.environ[name]


@pytest.fixture(scope="session")
def starter_home() -> Path:
    """A lab's home with ``smollm2-135m``, fetched once and kept between runs."""
    home = Path(os.environ.get("LMX_LAB_TEST_HOME", ROOT / ".cache" / "test-home")).absolute()
    Catalog(Settings(home=home)).fetch("smollm2-135m")
    return home


@pytest.fixture(scope="session")
def smollm2(starter_home: Path) -> ModelEntry:
    return Catalog(Settings(home=starter_home)).resolve("smollm2-135m")


@pytest.fixture(scope="session")
def tiny_home(tmp_path_factory: pytest.TempPathFactory, smollm2: ModelEntry) -> Path:
    """A lab's home with ``tiny`` and ``tiny-two``: two-layer llamas of random weights with SmolLM2's tokenizer."""
    home = tmp_path_factory.mktemp("tiny-home")
    for seed, name in enumerate(("tiny", "tiny-two")):
        write_tiny_llama(home / "models" / name, smollm2.path, seed=seed)
    return home


@pytest.fixture(scope="session")
def tiny(tiny_home: Path) -> ModelEntry:
    return Catalog(Settings(home=tiny_home)).resolve("tiny")


def write_tiny_llama(folder: Path, tokenizer_from: Path, *, seed: int) -> None:
    """A llama of 2 layers, width 32, with random float32 weights: it says nonsense, fast and always the same."""
    width, hidden, heads, vocabulary = 32, 64, 2, 49152
    random = np.random.default_rng(seed)

    def weight(*shape: int) -> np.ndarray:
        return random.normal(0, 0.3, shape).astype(np.float32)

    weights = {"model.embed_tokens.weight": weight(vocabulary, width), "model.norm.weight": np.ones(width, np.float32)}
    for layer in (f"model.layers.{i}" for i in range(2)):
        for name in ("q", "k", "v", "o"):
            weights[f"{layer}.self_attn.{name}_proj.weight"] = weight(width, width)
        weights[f"{layer}.mlp.gate_proj.weight"] = weight(hidden, width)
        weights[f"{layer}.mlp.up_proj.weight"] = weight(hidden, width)
        weights[f"{layer}.mlp.down_proj.weight"] = weight(width, hidden)
        weights[f"{layer}.input_layernorm.weight"] = np.ones(width, np.float32)
        weights[f"{layer}.post_attention_layernorm.weight"] = np.ones(width, np.float32)
    folder.mkdir(parents=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "mlx"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": hidden,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "rms_norm_eps": 1e-5,
        "vocab_size": vocabulary,
        "max_position_embeddings": TINY_CONTEXT,
        "tie_word_embeddings": True,
        "eos_token_id": [2],
    }
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer_from / name, folder / name)
