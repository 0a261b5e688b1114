"""Call the native library of xllamacpp through ``ctypes``, in processes that may crash with it.

xllamacpp contains ggml and llama.cpp, but exports few of their functions to Python.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable, Sequence
from ctypes import (
    POINTER,
    c_bool,
    c_char_p,
    c_float,
    c_int,
    c_int8,
    c_int32,
    c_int64,
    c_size_t,
    c_uint32,
    c_uint64,
    c_void_p,
)
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lmx_lab.errors import UnusableModelError, counted
from lmx_lab.weights.gguf.header import TENSOR_TYPES

TYPE_NUMBERS = {name: number for number, (name, _, _) in TENSOR_TYPES.items()}
BLOCKS = {name: (weights, size) for name, weights, size in TENSOR_TYPES.values()}
"""Weights and bytes of a block, by type."""
WITH_FLOATS = {"F16": "ggml_fp16_to_fp32_row", "BF16": "ggml_bf16_to_fp32_row"}
CONTEXT_TOKENS, BATCH_TOKENS = 512, 2048
"""llama.cpp's defaults of the length of a context, and of the maximum number of tokens that are computed at once."""
MAX_TEXT_TOKENS = 4096
DEFAULT_TYPE = 1
"""float16, the default type of keys and values (``ggml_type``)."""
KEYS_AT = 26
"""Position of the type of keys in the parameters of a context, in words of 32 bits. The type of values follows it."""

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


class _Params(ctypes.Structure):
    """Parameters of a model or a context, with llama.cpp's defaults.

    The structure is larger than llama.cpp's, which is the last argument and may have any size.
    """

    _fields_ = (("content", c_uint64 * 128),)


class _Batch(ctypes.Structure):
    """``llama_batch``. The last field reserves space for fields of newer versions."""

    _fields_ = (
        ("n_tokens", c_int32),
        ("token", POINTER(c_int32)),
        ("embd", c_void_p),
        ("pos", POINTER(c_int32)),
        ("n_seq_id", POINTER(c_int32)),
        ("seq_id", POINTER(POINTER(c_int32))),
        ("logits", POINTER(c_int8)),
        ("reserved", c_uint64 * 16),
    )


_ignore_log = ctypes.CFUNCTYPE(None, c_int, c_char_p, c_void_p)(lambda _level, _text, _data: None)
"""A log callback of llama.cpp that does nothing."""


class Ggml:
    """The native library of xllamacpp.

    Raises:
        UnusableModelError: the library, or one of its functions, does not exist in this version.
    """

    def __init__(self) -> None:
        package = importlib.util.find_spec("xllamacpp")
        assert package is not None
        assert package.origin is not None
        try:
            self._library = ctypes.CDLL(str(Path(package.origin).with_name("xllamacpp.abi3.so")))
        except OSError as exc:
            raise UnusableModelError(f"the library of xllamacpp cannot be opened: {exc}; install it again") from exc

    def function(self, name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
        """Return a function of the library."""
        try:
            found = getattr(self._library, name)
        except AttributeError as exc:
            raise UnusableModelError(
                f"the installed xllamacpp has no function {name}; install a newer one: pip install -U xllamacpp"
            ) from exc
        found.restype, found.argtypes = result, arguments
        return found  # type: ignore[no-any-return]

    def dequantize(self, type_name: str, data: Bytes) -> Floats:
        """Return the weights of whole blocks of a type."""
        if type_name == "F32":
            return data.view(np.float32)
        weights, size = BLOCKS[type_name]
        count = len(data) // size * weights
        name = WITH_FLOATS.get(type_name, f"dequantize_row_{type_name.lower().replace('_k', '_K')}")
        out = np.empty(count, np.float32)
        self.function(name, None, c_void_p, c_void_p, c_int64)(data.ctypes.data, out.ctypes.data, count)
        return out

    def quantize(self, type_name: str, values: Floats, row: int) -> Bytes:
        """Return values in a type of blocks.

        Args:
            row: Number of values in a row, a multiple of the block.
        """
        weights, size = BLOCKS[type_name]
        out = np.empty(len(values) // weights * size, np.uint8)
        call = self.function(
            "ggml_quantize_chunk", c_size_t, c_int, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p
        )
        values = np.ascontiguousarray(values)
        written = call(TYPE_NUMBERS[type_name], values.ctypes.data, out.ctypes.data, 0, len(values) // row, row, None)
        if written != out.nbytes:
            raise UnusableModelError(f"llama.cpp wrote {written} bytes of {type_name} instead of {out.nbytes}")
        return out


class Model:
    """A model in this process with a context for one text, which is never closed: the process ends soon.

    Args:
        tokens: Maximum length of the text, in tokens.
        step_tokens: Number of tokens that are computed in one step; None for llama.cpp's default.
        cache_types: Types of keys and values (``ggml_type``).
    """

    def __init__(
        self,
        ggml: Ggml,
        path: Path,
        threads: int,
        *,
        tokens: int = CONTEXT_TOKENS,
        step_tokens: int | None = None,
        cache_types: tuple[int, int] = (DEFAULT_TYPE, DEFAULT_TYPE),
    ) -> None:
        self._ggml = ggml
        ggml.function("llama_log_set", None, c_void_p, c_void_p)(ctypes.cast(_ignore_log, c_void_p), None)
        defaults = ggml.function("llama_model_default_params", _Params)()
        load = ggml.function("llama_model_load_from_file", c_void_p, c_char_p, _Params)
        self._model = load(str(path).encode(), defaults)
        if not self._model:
            raise UnusableModelError(f"{path} cannot be loaded by llama.cpp; fetch it again, or use another model")
        self._vocabulary = ggml.function("llama_model_get_vocab", c_void_p, c_void_p)(self._model)
        self.vocabulary_size = ggml.function("llama_vocab_n_tokens", c_int32, c_void_p)(self._vocabulary)
        params = ggml.function("llama_context_default_params", _Params)()
        words = (c_uint32 * (ctypes.sizeof(params) // 4)).from_buffer(params)
        # The fields are not the same in each version, and the defaults show whether these are where they should be.
        known = (*words[:3], *words[KEYS_AT : KEYS_AT + 2])
        if known != (CONTEXT_TOKENS, BATCH_TOKENS, CONTEXT_TOKENS, DEFAULT_TYPE, DEFAULT_TYPE):
            raise UnusableModelError(
                "the parameters of a context have other fields in the installed xllamacpp; install the version that "
                "this package was tested with: pip install xllamacpp==2026.10.11549"
            )
        words[0], words[2] = tokens, step_tokens or words[2]
        words[KEYS_AT : KEYS_AT + 2] = list(cache_types)
        self._context = ggml.function("llama_init_from_model", c_void_p, c_void_p, _Params)(self._model, params)
        if not self._context:
            raise UnusableModelError(f"llama.cpp cannot create a context for {path}; use another model")
        self.set_threads(threads)
        self._batch = ggml.function("llama_batch_init", _Batch, c_int32, c_int32, c_int32)(CONTEXT_TOKENS, 0, 1)
        self._decode = ggml.function("llama_decode", c_int32, c_void_p, _Batch)
        self._synchronize = ggml.function("llama_synchronize", None, c_void_p)
        self._logits = ggml.function("llama_get_logits_ith", POINTER(c_float), c_void_p, c_int32)

    def set_threads(self, count: int) -> None:
        """Compute with this number of threads."""
        self._ggml.function("llama_set_n_threads", None, c_void_p, c_int32, c_int32)(self._context, count, count)

    def tokenize(self, text: str) -> list[int]:
        """Return the first ``MAX_TEXT_TOKENS`` token ids of a text, with special tokens at its ends."""
        call = self._ggml.function(
            "llama_tokenize", c_int32, c_void_p, c_char_p, c_int32, POINTER(c_int32), c_int32, c_bool, c_bool
        )
        ids = (c_int32 * MAX_TEXT_TOKENS)()
        data = text.encode()
        count = call(self._vocabulary, data, len(data), ids, MAX_TEXT_TOKENS, True, False)
        return list(ids[: max(0, count)])

    def forget(self, position: int) -> int:
        """Forget the tokens from a position on. Return how many are left: 0 if the model cannot keep a part of them."""
        memory = self._ggml.function("llama_get_memory", c_void_p, c_void_p)(self._context)
        remove = self._ggml.function("llama_memory_seq_rm", c_bool, c_void_p, c_int32, c_int32, c_int32)
        if position and remove(memory, 0, position, -1):
            return position
        self._ggml.function("llama_memory_clear", None, c_void_p, c_bool)(memory, True)
        return 0

    def compute(self, tokens: Sequence[int], position: int, *, outputs: bool) -> None:
        """Compute tokens from a position on.

        Args:
            outputs: Whether ``logits`` are needed for each token, and not only for the last one.
        """
        batch = self._batch
        batch.n_tokens = len(tokens)
        for index, token in enumerate(tokens):
            batch.token[index], batch.pos[index] = token, position + index
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, 0
            batch.logits[index] = int(outputs or index == len(tokens) - 1)
        if (status := self._decode(self._context, batch)) != 0:
            raise UnusableModelError(f"llama.cpp cannot compute {counted(len(tokens), 'token')}: status {status}")
        self._synchronize(self._context)

    def logits(self, index: int) -> Floats:
        """Return the logits of a token of the last ``compute``. They are overwritten by the next one."""
        return np.ctypeslib.as_array(self._logits(self._context, index), (self.vocabulary_size,))
