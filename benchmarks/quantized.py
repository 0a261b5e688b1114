"""Measure a quantized copy: our server with the copy against llama.cpp's server with the original file."""

from __future__ import annotations

from functools import partial

from benchmarks.bench import Bench
from benchmarks.gguf import (
    CASES,
    PREFILL_TOKENS,
    QUICK_ROUNDS,
    ROUNDS,
    STREAMS,
    Side,
    Turns,
    run_rounds,
    send_chats,
    send_prompt,
)
from benchmarks.models import gguf_starter, quantized_starter
from benchmarks.report import Limit, Row
from benchmarks.servers import lab_server, llama_server
from lmx_lab.values.models import MAX_AUTO_KL

PREFILL = "quantized: prefill tok/s ÷ llama.cpp's server with the original"
DECODE = "quantized: decode tok/s ÷ llama.cpp's server with the original"
LOSS = "quantized: mean KL per token against the original"
FIGURE = PREFILL
FASTER = Limit(sign="≥", bound=1.3)
"""What docs/engines.md states. On some CPUs prompts were 2.4 times as fast, and eight answers 1.8 times."""
LIMITS = {8: FASTER}
"""A single answer may be slower, because the copy is larger."""


def measure(bench: Bench) -> list[Row]:
    entry = quantized_starter()
    assert entry.copy is not None
    rounds = QUICK_ROUNDS if bench.quick else ROUNDS
    with llama_server(gguf_starter()) as theirs, lab_server(entry.path) as ours:
        urls: dict[Side, str] = {"ours": ours.url, "theirs": theirs}
        prefill = run_rounds(urls, rounds, send_prompt)
        decode = {streams: run_rounds(urls, rounds, partial(send_chats, streams=streams)) for streams in STREAMS}
    rows = [
        Turns(model=bench.model, case=f"{PREFILL_TOKENS} tokens", samples=prefill).ratio(PREFILL, "rate", limit=FASTER)
    ]
    rows += [
        Turns(model=bench.model, case=CASES[streams], samples=samples).ratio(
            DECODE, "decode", limit=LIMITS.get(streams)
        )
        for streams, samples in decode.items()
    ]
    loss = Row(
        figure=LOSS,
        case=entry.copy.title,
        model=bench.model,
        value=entry.copy.mean_kl,
        limit=Limit(sign="≤", bound=MAX_AUTO_KL),
        summary=f"perplexity {entry.copy.perplexity:.2f} against {entry.copy.original_perplexity:.2f}",
    )
    return [*rows, loss]
