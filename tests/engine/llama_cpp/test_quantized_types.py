"""Tests of the types of tensors in a quantized copy."""

from dataclasses import replace
from pathlib import Path

import pytest

from lmx_lab.engine.llama_cpp.quantized_types import copy_bytes, refuse_unsupported, type_after
from lmx_lab.errors import UnusableModelError
from lmx_lab.weights.gguf.header import GgufHeader, GgufTensor
from tests.support.models import TINY_ENTRY

CHAT = replace(TINY_ENTRY, id="m", format="gguf")


def tensor(name, type_name, *shape):
    return GgufTensor(name=f"{name}.weight", shape=shape, type=type_name, offset=0, size_bytes=0)


def header(*tensors, name="m.gguf"):
    return GgufHeader(path=Path(name), size_bytes=1, metadata={}, tensors=tensors)


@pytest.mark.parametrize(
    ("found", "wanted", "expected"),
    [
        (tensor("blk.0.attn_q", "Q4_1", 64, 8), "Q8_0", "Q8_0"),
        (tensor("blk.31.ffn_down_exps", "F16", 64, 8, 4), "Q4_0", "Q4_0"),
        (tensor("output", "F32", 64, 8), "Q4_0", "Q8_0"),
        (tensor("token_embd", "Q6_K", 256, 8), "Q8_0", "Q6_K"),
        (tensor("token_embd", "Q8_0", 64, 8), "Q4_0", "Q8_0"),
        (tensor("blk.0.attn_norm", "F32", 64), "Q8_0", "F32"),
        (tensor("blk.0.ffn_gate_inp", "F32", 64, 8), "Q8_0", "F32"),
        (tensor("blk.0.ssm_conv1d", "F32", 64, 8), "Q8_0", "F32"),
        (tensor("blk.0.attn_k", "F16", 48, 8), "Q8_0", "F16"),
        (tensor("blk.0.attn_v", "I32", 64, 8), "Q8_0", "I32"),
    ],
)
def test_matrices_of_layers_change_and_the_vocabulary_keeps_eight_bits(found, wanted, expected):
    assert type_after(found, wanted) == expected


def test_a_model_that_would_not_change_or_cannot_be_measured_is_refused_with_the_reason():
    matrix = tensor("blk.0.attn_q", "Q4_1", 64, 8)
    refuse_unsupported(CHAT, header(matrix), "Q8_0")
    with pytest.raises(UnusableModelError, match="no matrices that could become Q8_0: they are Q8_0"):
        refuse_unsupported(CHAT, header(replace(matrix, type="Q8_0")), "Q8_0")
    with pytest.raises(UnusableModelError, match="not a chat model"):
        refuse_unsupported(replace(CHAT, kind="embedding"), header(matrix), "Q8_0")
    with pytest.raises(UnusableModelError, match="split into parts"):
        refuse_unsupported(CHAT, header(matrix, name="m-00001-of-00002.gguf"), "Q8_0")


def test_the_size_of_the_copy_is_that_of_its_types():
    assert copy_bytes(header(tensor("blk.0.attn_q", "F32", 64, 8)), "Q8_0") == 64 * 8 // 32 * 34 + 64
