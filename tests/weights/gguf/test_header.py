"""Tests of valid, truncated and malicious GGUF headers."""

import contextlib
import struct

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from lmx_lab.errors import UnusableModelError
from lmx_lab.settings import Settings
from lmx_lab.weights.catalog import Catalog
from lmx_lab.weights.facts import read_gguf_facts
from lmx_lab.weights.gguf.header import read_header


def test_metadata_and_tensors_are_read_and_arrays_only_on_request(tmp_path, tiny_llama):
    path = tmp_path / "tiny.gguf"
    path.write_bytes(tiny_llama())
    header = read_header(path)
    assert (header.architecture, header.context_length, header.quantization) == ("llama", 512, "Q4_0")
    assert header.items("tokenizer.ggml.tokens") == []
    whole = read_header(path, arrays=True)
    assert whole.items("tokenizer.ggml.tokens")[-1] == "tool"
    assert whole.items("tokenizer.ggml.token_type")[-3:] == [3, 3, 4]
    assert whole.tensors == header.tensors


@pytest.mark.parametrize(("number", "shown"), [(15, "Q4_K_M"), (0, "Q4_0"), (1, "Q4_0"), (999, "Q4_0"), (1039, "Q4_0")])
def test_the_quantization_is_the_one_that_the_file_states(tmp_path, tiny_llama, number, shown):
    path = tmp_path / "tiny.gguf"
    path.write_bytes(tiny_llama({}, {"general.file_type": number}))
    header = read_header(path)
    assert (header.quantization, header.main_type) == (shown, "Q4_0")
    assert read_gguf_facts(path).quantization == shown


def test_texts_of_any_length_are_skipped_as_they_are_read(tmp_path, tiny_llama):
    # They cross the ends of the reader's buffer in lengths and in texts, and one text is as long as the buffer.
    texts = ["x" * (1 + number % 4093) for number in range(1500)] + ["y" * 2**20, "", "z"]
    path = tmp_path / "long.gguf"
    path.write_bytes(tiny_llama({}, {"tokenizer.ggml.merges": texts}))
    header, whole = read_header(path), read_header(path, arrays=True)
    assert whole.items("tokenizer.ggml.merges") == texts
    assert header.tensors == whole.tensors
    path.write_bytes(path.read_bytes().replace(struct.pack("<Q", 2**20), struct.pack("<Q", 2**20 + 1)))
    with pytest.raises(UnusableModelError, match="truncated or damaged"):
        read_header(path)


@pytest.mark.parametrize(
    ("name", "value"),
    [("block_count", 4_000_000_000), ("embedding_length", 0), ("rope.freq_base", float("nan")), ("context_length", 0)],
)
def test_a_file_with_impossible_values_is_refused_by_name(tmp_path, tiny_llama, name, value):
    path = tmp_path / "impossible.gguf"
    path.write_bytes(tiny_llama({}, {f"llama.{name}": value}))
    with pytest.raises(UnusableModelError, match=rf"llama\.{name} is "):
        read_gguf_facts(path)


@pytest.mark.parametrize(
    ("types", "metadata", "reason"),
    [
        ({}, {"general.architecture": "qwen2"}, "architecture 'qwen2'"),
        ({"blk.0.attn_q": "Q4_K"}, {}, "quantized again"),
        ({"blk.0.attn_q": "Q6_K"}, {}, "quantized again"),
        ({"blk.0.attn_q_norm": "F16"}, {}, "MLX's llama does not have"),
        ({}, {"llama.block_count": 2}, "lacks 9 tensors"),
        ({}, {"llama.embedding_length": 512}, "shape"),
        ({}, {"llama.attention.head_count_kv": 2}, r"attn_k.*shape"),
        ({}, {"llama.attention.head_count": 0}, "head_count"),
        ({}, {"llama.expert_count": 8}, "mixture of experts"),
        ({}, {"llama.rope.dimension_count": 16}, "part of each head"),
        ({}, {"llama.rope.scaling.type": "yarn"}, "yarn"),
        ({}, {"tokenizer.ggml.model": "bert"}, "vocabulary of kind bert"),
        ({}, {"llama.pooling_type": 3}, "computes vectors or scores"),
    ],
)
def test_a_file_that_cannot_be_converted_can_be_used_unchanged(tmp_path, tiny_llama, types, metadata, reason):
    path = tmp_path / "other.gguf"
    path.write_bytes(tiny_llama(types, metadata))
    catalog = Catalog(Settings(home=tmp_path / "home"))
    assert catalog.fetch(str(path)).format == "gguf"
    with pytest.raises(UnusableModelError, match=reason):
        catalog.convert(str(path))


@pytest.mark.slow
def test_a_file_truncated_at_any_byte_is_rejected(tmp_path, tiny_llama):
    whole = tiny_llama()
    path = tmp_path / "cut.gguf"
    for length in [*range(0, 200), *range(200, len(whole), 997), len(whole) - 32]:
        path.write_bytes(whole[:length])
        with pytest.raises(UnusableModelError):
            read_header(path, arrays=True)


@pytest.mark.slow
@hypothesis_settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=3 * hypothesis_settings().max_examples
)
@given(data=st.data())
def test_changed_bytes_raise_no_other_error(tmp_path, tiny_llama, data):
    file = bytearray(tiny_llama())
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, 1500) | st.integers(0, 9000))
        file[at : at + 1] = data.draw(st.binary(min_size=1, max_size=9))
    path = tmp_path / "fuzz.gguf"
    path.write_bytes(bytes(file[: data.draw(st.integers(9000, len(file)) | st.just(len(file)))]))
    with contextlib.suppress(UnusableModelError):
        read_header(path, arrays=True)
    with contextlib.suppress(UnusableModelError):
        read_gguf_facts(path)
