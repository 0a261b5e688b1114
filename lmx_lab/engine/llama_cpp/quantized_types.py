"""Choose the type of each tensor in a quantized copy. Pure."""

from __future__ import annotations

import math
import re

from lmx_lab.errors import UnusableModelError
from lmx_lab.values.models import ModelEntry, QuantizedType
from lmx_lab.weights.gguf.header import TENSOR_TYPES, GgufHeader, GgufTensor
from lmx_lab.weights.gguf.names import parts_of

SOURCES = frozenset({
    "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL",
    "IQ4_XS", "IQ3_S", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ3_XXS", "IQ1_S", "IQ1_M", "TQ1_0", "TQ2_0", "MXFP4",
})  # fmt: skip
"""Types that ggml can expand to float32."""
MATRIX = re.compile(r"blk\.\d+\.(attn_(q|k|v|qkv|output)|ffn_(gate|up|down)(_exps|_shexp)?)\.weight")
"""Matrices of layers. All others are few or small, and some must not be quantized."""
VOCABULARY = ("token_embd.weight", "output.weight")
"""Embedding and output, which lose most. They become Q8_0, or keep a type that is smaller."""
VOCABULARY_TYPE: QuantizedType = "Q8_0"
BLOCK = 32
"""Weights in a block of each ``QuantizedType``."""
BYTES = {name: size / weights for name, weights, size in TENSOR_TYPES.values()}


def type_after(tensor: GgufTensor, type_name: QuantizedType) -> str:
    """Return the type of a tensor in the copy: its own, if it is not converted."""
    if tensor.type not in SOURCES or len(tensor.shape) < 2 or tensor.shape[0] % BLOCK:
        return tensor.type
    if tensor.name in VOCABULARY:
        return VOCABULARY_TYPE if BYTES[tensor.type] > BYTES[VOCABULARY_TYPE] else tensor.type
    return type_name if MATRIX.fullmatch(tensor.name) else tensor.type


def refuse_unsupported(entry: ModelEntry, header: GgufHeader, type_name: QuantizedType) -> None:
    """Check by the header that a copy in this type can be made and measured.

    Raises:
        UnusableModelError: the model is split into parts, does not generate text, or would not change.
    """
    if len(parts_of(header.path.name)) > 1:
        raise UnusableModelError(f"{entry.id} is split into parts, and only single files can be copied; join its parts")
    if entry.kind != "chat":
        raise UnusableModelError(
            f"{entry.id} is not a chat model, and the loss of a copy is measured by the next token; use it as it is"
        )
    if all(type_after(tensor, type_name) == tensor.type for tensor in header.tensors):
        types = ", ".join(sorted({tensor.type for tensor in header.tensors if len(tensor.shape) > 1}))
        raise UnusableModelError(
            f"{entry.id} has no matrices that could become {type_name}: they are {types}, or their rows are not "
            f"multiples of {BLOCK}; use it as it is"
        )


def copy_bytes(header: GgufHeader, type_name: QuantizedType) -> int:
    """Return an upper bound of the size of the copy."""
    weights = sum(
        math.ceil(math.prod(tensor.shape) * BYTES[type_after(tensor, type_name)]) for tensor in header.tensors
    )
    return weights + header.data_offset + 64 * len(header.tensors)
