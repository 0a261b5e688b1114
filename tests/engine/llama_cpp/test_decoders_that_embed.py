"""Embedding models that are decoders, such as Qwen3-Embedding, and have a key-value cache."""

import numpy as np
import pytest

from lmx_lab.engine import EmbeddingRequest, ModelManager, RerankRequest
from lmx_lab.engine.llama_cpp.memory_plan import BATCH_TOKENS
from lmx_lab.errors import ContextLengthError
from tests.support.engines import LLAMA_SETTINGS, entry_of, pin
from tests.support.gguf import with_values

pytestmark = pytest.mark.anyio
MEAN, LAST, RANK = 1, 3, 4
CONTEXT = 4 * BATCH_TOKENS


def decoder_entry(source, folder, values):
    """Write the tiny decoder as an embedding model or a reranker, and return its entry."""
    return entry_of(with_values(source, folder / "decoder.gguf", {"llama.context_length": CONTEXT, **values}))


@pytest.mark.long
@pytest.mark.parametrize("pooling", [MEAN, LAST])
async def test_texts_of_all_lengths_have_the_same_vectors_alone_and_together(tiny_gguf, tmp_path, pooling):
    entry = decoder_entry(tiny_gguf, tmp_path, {"llama.pooling_type": pooling})
    assert entry.kind == "embedding"
    texts = ("the sea", "the sea " * BATCH_TOKENS, *(f"{at} " + "of the land " * 20 * at for at in range(12)))
    async with ModelManager(LLAMA_SETTINGS) as manager:
        await pin(manager, entry)
        result = await manager.embed(EmbeddingRequest(inputs=texts))
        assert result.report.tokens > 8 * BATCH_TOKENS
        for at in (0, 1, 2, 7, 13):
            alone = (await manager.embed(EmbeddingRequest(inputs=(texts[at],)))).vectors[0]
            assert float(np.dot(alone, result.vectors[at])) == pytest.approx(1.0, abs=1e-3)
        with pytest.raises(ContextLengthError, match=f"length is {CONTEXT - (pooling == LAST)} tokens"):
            await manager.embed(EmbeddingRequest(inputs=("the sea " * CONTEXT,)))


@pytest.mark.parametrize("pooling", [MEAN, LAST])
async def test_a_text_may_be_as_long_as_the_context_and_a_longer_one_is_truncated(tiny_gguf, tmp_path, pooling):
    entry = decoder_entry(tiny_gguf, tmp_path, {"llama.pooling_type": pooling})
    longest = (tuple(range(100, 100 + CONTEXT - (pooling == LAST))),)
    async with ModelManager(LLAMA_SETTINGS) as manager:
        await pin(manager, entry)
        whole = (await manager.embed(EmbeddingRequest(inputs=longest))).vectors
        cut = (await manager.embed(EmbeddingRequest(inputs=((*longest[0], 7),), truncate=True))).vectors
        assert np.allclose(whole, cut, atol=1e-3)


async def test_the_template_around_a_pair_counts_toward_its_length(tiny_gguf, tmp_path):
    around = "Judge whether the document answers the query. " * 8
    values = {
        "llama.pooling_type": RANK,
        "tokenizer.chat_template.rerank": f"{around}<query>{{query}}</query><document>{{document}}</document>",
    }
    entry = decoder_entry(tiny_gguf, tmp_path, values)
    async with ModelManager(LLAMA_SETTINGS) as manager:
        await pin(manager, entry)
        for words in range(CONTEXT // 2 - 80, CONTEXT // 2, 20):
            rerank_request = RerankRequest(query="the sea", documents=("the sea " * words,), truncate=True)
            assert np.isfinite((await manager.rerank(rerank_request)).scores).all()
        with pytest.raises(ContextLengthError):
            await manager.rerank(RerankRequest(query="the sea", documents=("the sea " * (CONTEXT // 2 - 10),)))
