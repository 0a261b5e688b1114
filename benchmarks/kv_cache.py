"""Measure what a quantized KV cache of llama.cpp costs: the change of the log-likelihood of a text, and what it gains:
the number of tokens in the same memory.

The text is generated token by token under a grammar that allows only its tokens, so each token is scored with the
cache that decoding has written.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from benchmarks.bench import Bench, BenchError
from benchmarks.models import gguf_starter
from benchmarks.paths import ROOT
from benchmarks.report import Limit, Row
from lmx_lab.engine.llama_cpp.engine import LlamaCppEngine
from lmx_lab.engine.llama_cpp.memory_plan import layer_caches
from lmx_lab.engine.llama_cpp.tokenizer import LlamaTokenizer
from lmx_lab.engine.memory import limit_bytes, total_bytes
from lmx_lab.engine.model import EngineHost
from lmx_lab.errors import NotLoadedError
from lmx_lab.settings import Settings
from lmx_lab.values.models import KvCacheDtype, LoadSpec
from lmx_lab.values.plan import kv_bytes_per_token
from lmx_lab.weights.facts import read_gguf
from lmx_lab.weights.fingerprint import with_marks

FIGURE = "quantized KV cache: change of the log-likelihood"
CONTEXT = "quantized KV cache: tokens in the same memory ÷ float16"
TEXT = ROOT / "docs" / "engines.md"
TOKENS, QUICK_TOKENS = 1000, 200
TYPES: Sequence[KvCacheDtype] = ("q8_0", "q4_0")
LIMITS = {"q8_0": Limit(sign="≤", bound=0.01)}


def measure(bench: Bench) -> list[Row]:
    count = QUICK_TOKENS if bench.quick else TOKENS
    exact, *found = (asyncio.run(_log_likelihood(count, dtype)) for dtype in (None, *TYPES))
    header = read_gguf(gguf_starter().path)
    rows = []
    for dtype, changed in zip(TYPES, found, strict=True):
        change = (changed - exact) / abs(exact)
        summary = f"{changed:.2f} against {exact:.2f} of {count} tokens ({change:+.2%})"
        likelihood = Row(
            figure=FIGURE, case=dtype, model=bench.model, value=abs(change), limit=LIMITS.get(dtype), summary=summary
        )
        plain, quantized = (kv_bytes_per_token(layer_caches(header, it)) for it in (None, dtype))
        summary = f"{quantized:,} against {plain:,} bytes for each token"
        context = Row(figure=CONTEXT, case=dtype, model=bench.model, value=plain / quantized, summary=summary)
        rows += [likelihood, context]
    return rows


async def _log_likelihood(count: int, dtype: KvCacheDtype | None) -> float:
    """Return the sum of the log-probabilities of the first tokens of the text, except for the first one."""
    spec = LoadSpec(model="smollm2-135m", kv_cache_dtype=dtype)
    entry, limit = with_marks(gguf_starter()), limit_bytes(None, total_bytes())
    model = await LlamaCppEngine(Settings(slots=1), EngineHost()).load(entry, spec, room_bytes=limit)
    try:
        return await _score(model.tokenizer, count)
    finally:
        await model.close(NotLoadedError("the benchmark has ended"))


async def _score(tokenizer: LlamaTokenizer, count: int) -> float:
    text = TEXT.read_text(encoding="utf-8")
    tokens = (await tokenizer.tokenize(text, at_most=count, parse_special=False))[:count]
    body: dict[str, Any] = {
        "prompt": tokens[:1],
        "n_predict": count - 1,
        "n_probs": 1,
        "temperature": 0,
        "grammar": f"root ::= {' '.join(f'<[{token}]>' for token in tokens[1:])}",
    }
    scored = (await tokenizer.connection.post("/completion", body))["completion_probabilities"]
    if [entry["id"] for entry in scored] != tokens[1:]:
        raise BenchError("llama.cpp has not generated the tokens of the text")
    return sum(float(entry["logprob"]) for entry in scored)
