"""The tokenizers' word caches use no memory after their model was unloaded."""

import asyncio
import ctypes
import gc
import platform

import pytest
from tokenizers import Tokenizer

from lmx_lab.engine.mlx.load import load_chat
from lmx_lab.settings import Settings
from lmx_lab.weights.catalog import Catalog
from tests.support.engines import request
from tests.support.models import load, texts_of, write_tiny_llama, write_tiny_qwen3
from tests.support.waiting import until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        platform.libc_ver()[0] != "glibc", reason="only glibc reports the memory that malloc has allocated"
    ),
]
# 10,000 different words, which is the capacity of the word cache of a model.
WORDS = " ".join("".join(chr(97 + number // 26**place % 26) for place in range(4)) for number in range(10_000))
CONTEXT = 32_768
LOADS = 2
# The cached words would use 3.3 MB for each load.
MOST_BYTES = 1_000_000


class MallocReport(ctypes.Structure):
    """``struct mallinfo2``, as in mallinfo(3)."""

    _fields_ = (
        ("arenas", ctypes.c_size_t * 7),
        ("in_use", ctypes.c_size_t),
        ("free", ctypes.c_size_t * 2),
    )


def in_use():
    """Return the number of bytes that malloc has allocated."""
    gc.collect()
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = MallocReport
    return int(mallinfo().in_use)


def check_leaks(use):
    """Check by how many bytes the allocated memory grows when ``use`` is called ``LOADS`` times."""
    use()
    before = in_use()
    for _ in range(LOADS):
        use()
    # The thread of a tokenizer refers to the tokenizer for a moment after it has returned its result.
    until(lambda: in_use() - before < MOST_BYTES)


def test_an_unloaded_chat_model_leaves_no_cached_words(tmp_path, smollm2):
    write_tiny_llama(tmp_path / "tiny", smollm2.path, seed=0, context=CONTEXT)
    tiny = Catalog(Settings()).resolve(str(tmp_path / "tiny"))

    def use():
        _, tokenizer = load_chat(tiny, limit_bytes=2**40)
        encoding = tokenizer.encode(request(), WORDS, special=True, param="prompt")
        assert len(asyncio.run(encoding)) > 10_000

    check_leaks(use)


@pytest.mark.long
def test_an_unloaded_embedding_model_leaves_no_cached_words(tmp_path, smollm2):
    bpe = Tokenizer.from_file(str(smollm2.path / "tokenizer.json"))
    entry = write_tiny_qwen3(
        tmp_path / "tiny-qwen3",
        tokenizer={"tokenizer": bpe, "model_max_length": CONTEXT},
        max_position_embeddings=CONTEXT,
    )

    def use():
        assert texts_of(load(entry), [WORDS], input_type=None, truncate=False)

    check_leaks(use)
