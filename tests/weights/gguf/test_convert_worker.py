"""Tests of the conversion of GGUF files to MLX folders with the same values."""

import json
import math
import subprocess
import sys

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from lmx_lab.errors import StorageFullError, UnusableModelError
from lmx_lab.settings import Settings
from lmx_lab.weights.catalog import Catalog
from lmx_lab.weights.gguf.convert import converted_bytes, llama3_scaling
from lmx_lab.weights.gguf.header import read_header

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def smollm(smollm2_gguf, tmp_path_factory):
    return Catalog(Settings(home=tmp_path_factory.mktemp("home"))).convert(str(smollm2_gguf))


def test_the_converted_smollm2_has_the_right_entry(smollm, smollm2_gguf):
    assert (smollm.format, smollm.kind, smollm.architecture, smollm.source) == ("mlx", "chat", "llama", "store")
    assert (smollm.quantization, smollm.context_length) == ("4-bit, group 32", 8192)
    config = json.loads((smollm.path / "config.json").read_text())
    assert config["quantization"]["model.embed_tokens"] == {"group_size": 32, "bits": 8}
    assert config["eos_token_id"] == [2]
    written = sum(path.stat().st_size for path in smollm.path.iterdir())
    assert written < converted_bytes(read_header(smollm2_gguf)) < 2 * written


@pytest.mark.parametrize(
    "text",
    [
        "Hello, world!",
        " leading",
        "don't I'LL",
        "12345 6.7e8",
        "日本語のテキスト",
        "naïve Ωμέγα 🎉👩‍👩‍👧",
        "\t\n\n x  y \r\n",
        "\u0000\u200d",
    ],
)
def test_the_tokenizer_returns_every_text_unchanged(smollm, text):
    tokenizer = Tokenizer.from_file(str(smollm.path / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_the_tokenizer_splits_digits_but_not_special_tokens(smollm):
    tokenizer = Tokenizer.from_file(str(smollm.path / "tokenizer.json"))
    assert len(tokenizer.encode("2024").ids) == 4
    assert tokenizer.encode("<|im_start|>user\nHi<|im_end|>").ids == [1, 4093, 198, 26843, 2]
    assert tokenizer.decode([1, 26843, 2], skip_special_tokens=True) == "Hi"


def import_tiny(catalog, tmp_path, data):
    source = tmp_path / "Tiny Llama (1).gguf"
    source.write_bytes(data)
    entry = catalog.convert(str(source))
    return entry.path, load_file(entry.path / "model.safetensors")


def unpack(weights, name, bits):
    packed = weights[f"{name}.weight"]
    integers = np.stack([(packed >> shift) & (2**bits - 1) for shift in range(0, 32, bits)], axis=-1)
    groups = integers.reshape(packed.shape[0], -1, 32).astype(np.float32)
    scales, biases = (weights[f"{name}.{part}"].astype(np.float32)[..., None] for part in ("scales", "biases"))
    return (groups * scales + biases).reshape(packed.shape[0], -1)


def test_quantized_matrices_keep_their_values(catalog, tmp_path, tiny_llama):
    data = tiny_llama({"blk.0.attn_q": "Q4_1", "blk.0.attn_k": "Q8_0"})
    folder, weights = import_tiny(catalog, tmp_path, data)
    header = read_header(tmp_path / "Tiny Llama (1).gguf")
    start = len(data) - max(t.offset + t.size_bytes + -t.size_bytes % 32 for t in header.tensors)
    for name, target, bits in (("attn_v", "v_proj", 4), ("attn_q", "q_proj", 4), ("attn_k", "k_proj", 8)):
        tensor = next(t for t in header.tensors if t.name == f"blk.0.{name}.weight")
        content = data[start + tensor.offset : start + tensor.offset + tensor.size_bytes]
        expected = dequantize(np.frombuffer(content, np.uint8).reshape(256, -1), GGMLQuantizationType[tensor.type])
        found = unpack(weights, f"model.layers.0.self_attn.{target}", bits)
        np.testing.assert_allclose(found, expected, atol=2e-3)
    table = json.loads((folder / "config.json").read_text())["quantization"]
    assert (table["bits"], table["model.layers.0.self_attn.k_proj"]["bits"]) == (4, 8)


@pytest.mark.parametrize(("kind", "dtype"), [("F16", "float16"), ("Q6_K", "float16"), ("F32", "float32")])
def test_a_separate_output_matrix_that_is_not_quantized_stays_unquantized(catalog, tmp_path, tiny_llama, kind, dtype):
    folder, weights = import_tiny(catalog, tmp_path, tiny_llama({"output": kind}))
    assert weights["lm_head.weight"].dtype == dtype
    config = json.loads((folder / "config.json").read_text())
    assert (config["tie_word_embeddings"], config["quantization"]["lm_head"]) == (False, False)


def test_the_end_of_turn_token_of_the_template_is_an_end_token_too(catalog, tmp_path, tiny_llama):
    folder, _ = import_tiny(catalog, tmp_path, tiny_llama())
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] == [0, 258]


def test_a_file_is_converted_once_and_found_by_its_content(catalog, tmp_path, tiny_llama):
    folder, _ = import_tiny(catalog, tmp_path, tiny_llama())
    assert folder.name.startswith("tiny-llama-1-")
    seen = []
    assert catalog.convert(str(tmp_path / "Tiny Llama (1).gguf"), seen.append).path == folder
    assert {progress.stage for progress in seen} == {"verify"}
    other, _ = import_tiny(catalog, tmp_path, tiny_llama(metadata={"llama.context_length": 99}))
    assert other != folder


def test_a_listed_file_and_its_conversion_are_one_model_until_the_file_changes(catalog, tmp_path, tiny_llama):
    file, same_name = tmp_path / "extra/tiny.gguf", tmp_path / "extra/org/other/tiny.gguf"
    same_name.parent.mkdir(parents=True)
    file.write_bytes(tiny_llama())
    same_name.write_bytes(tiny_llama(metadata={"llama.context_length": 99}))
    entry = catalog.convert("tiny.gguf")
    name = entry.path.name
    assert (entry.id, entry.aliases, entry.format) == ("tiny.gguf", (name,), "mlx")
    assert [(it.id, it.format) for it in catalog.scan()] == [
        ("org/other", "gguf"), ("tiny.gguf", "gguf"), ("tiny.gguf", "mlx")
    ]  # fmt: skip
    assert catalog.find_formats(name) == [entry] == catalog.find_formats(str(file), all_formats=True)[1:]
    assert [it.format for it in catalog.find_formats(str(file))] == ["gguf"]
    file.write_bytes(tiny_llama(metadata={"llama.context_length": 98}))
    assert [it.id for it in catalog.scan()] == ["org/other", name, "tiny.gguf"]


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ({"tokenizer.ggml.pre": "unheard-of"}, "unheard-of"),
        ({"tokenizer.ggml.merges": ["ab"]}, "merges"),
        ({"tokenizer.ggml.merges": ["zz yy"]}, "rebuilt"),
        ({"tokenizer.ggml.tokens": ["a", "a"]}, "vocabulary"),
        ({"tokenizer.ggml.model": "llama"}, "score"),
    ],
)
def test_errors_of_the_conversion_process_are_returned_with_their_reason(
    catalog, tmp_path, tiny_llama, metadata, reason
):
    with pytest.raises(UnusableModelError, match=reason):
        import_tiny(catalog, tmp_path, tiny_llama(metadata=metadata))
    assert catalog.scan() == []


def test_a_disk_without_enough_space_is_an_error_before_the_conversion(tmp_path, tiny_llama):
    catalog = Catalog(Settings(home=tmp_path / "home", disk_reserve_bytes=2**60))
    with pytest.raises(StorageFullError, match="reserve"):
        import_tiny(catalog, tmp_path, tiny_llama())


def test_a_disk_that_becomes_full_during_the_conversion_is_reported_as_such(tmp_path, tiny_llama):
    """A limit on the file size simulates the full disk: MLX reports both with the same message."""
    source = tmp_path / "tiny.gguf"
    source.write_bytes(tiny_llama())
    command = f"ulimit -f 100; {sys.executable} -m lmx_lab.weights.gguf.convert_worker {source} {tmp_path}"
    process = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    answer = json.loads(process.stdout)
    assert (process.returncode, answer["full"]) == (1, True)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_the_frequency_factors_of_llama_3_are_recognized(factor):
    factors = []
    for i in range(0, 64, 2):
        wavelength = 2 * math.pi * 500_000 ** (i / 64)
        if wavelength < 8192 / 4:
            factors.append(1.0)
        elif wavelength > 8192:
            factors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / 3
            factors.append(1 / ((1 - smooth) / factor + smooth))
    scaling = llama3_scaling(factors, 64, 500_000)
    assert (scaling["rope_type"], scaling["factor"]) == ("llama3", factor)
    assert llama3_scaling([*factors[:-1], 1.0], 64, 500_000) is None
    assert llama3_scaling(factors[:-1], 64, 500_000) is None


def test_a_model_in_mlx_format_is_not_converted(catalog, make_model, tmp_path):
    make_model(tmp_path / "extra/m")
    assert catalog.convert("m") == catalog.resolve("m")


def test_a_split_file_is_not_converted_and_the_error_contains_the_next_step(catalog, write_split, tmp_path):
    first, *_ = write_split(tmp_path / "tiny")
    with pytest.raises(UnusableModelError, match=r"split into parts.*Load it without conversion"):
        catalog.convert(str(first))
