"""Measure the tokens per second of four servers against the number of streams and the length of the prompt.

The rows have no limits. ``page`` draws them as charts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from benchmarks import client, prompts
from benchmarks.bench import Bench
from benchmarks.models import gguf_starter, quantized_starter
from benchmarks.rates import overall_rate
from benchmarks.report import Row
from benchmarks.servers import lab_server, llama_server, mlx_lm_server

FIGURE = STREAMS = "tok/s of all streams"
PROMPTS = "prompt tok/s"
STREAM_COUNTS = (1, 2, 4, 8)
PROMPT_TOKENS = (64, 256, 1024, 4096)
QUICK_PROMPT_TOKENS = (64, 256)
ANSWER_TOKENS, QUICK_ANSWER_TOKENS = 64, 16
FIRST_TOKENS = 8
"""Length of an answer of which only the first token with text counts."""
ROUNDS = 3


@dataclass(frozen=True, kw_only=True)
class _Server:
    name: str
    url: str
    model: str = "default"
    rounds: int = ROUNDS
    max_prompt_tokens: int = PROMPT_TOKENS[-1]
    extras: Mapping[str, Any] = field(default_factory=lambda: {"ignore_eos": True})
    """Fields of each request."""


def measure(bench: Bench) -> list[Row]:
    rounds = 1 if bench.quick else ROUNDS
    with ExitStack() as stack:
        mlx = stack.enter_context(lab_server(bench.folder))
        llama = stack.enter_context(lab_server(gguf_starter().path))
        copy = stack.enter_context(lab_server(quantized_starter().path))
        servers = [
            _Server(name="LMX Lab, MLX engine", url=mlx.url, rounds=rounds),
            _Server(name="LMX Lab, llama.cpp engine", url=llama.url, rounds=rounds),
            _Server(name="LMX Lab, llama.cpp engine, quantized copy", url=copy.url, rounds=rounds),
            _Server(name="llama.cpp's server", url=stack.enter_context(llama_server(gguf_starter())), rounds=rounds),
            # Without a fast BLAS it computes about ten tokens of a prompt per second.
            _Server(
                name="mlx_lm.server",
                url=stack.enter_context(mlx_lm_server(bench.folder)),
                model="default_model",
                extras={},
                rounds=1,
                max_prompt_tokens=1024,
            ),
        ]
        return [*_by_streams(bench, servers), *_by_prompt(bench, servers)]


def _by_streams(bench: Bench, servers: list[_Server]) -> list[Row]:
    tokens = QUICK_ANSWER_TOKENS if bench.quick else ANSWER_TOKENS
    rows = []
    for streams in STREAM_COUNTS:
        rates: dict[str, list[float]] = {server.name: [] for server in servers}
        for number in range(ROUNDS):
            chats = [prompts.story(10_000 + 1000 * streams + 10 * number + stream) for stream in range(streams)]
            for server in servers:
                if number < server.rounds:
                    bodies = [
                        prompts.chat_body(chat, max_tokens=tokens, model=server.model, **server.extras)
                        for chat in chats
                    ]
                    rates[server.name].append(overall_rate(asyncio.run(client.streams(server.url, bodies))))
        case = f"{streams} stream{'s' if streams > 1 else ''}"
        rows += [_row(bench, STREAMS, server, case, x=streams, rates=rates[server.name]) for server in servers]
    return rows


def _by_prompt(bench: Bench, servers: list[_Server]) -> list[Row]:
    rows = []
    for tokens in QUICK_PROMPT_TOKENS if bench.quick else PROMPT_TOKENS:
        rates: dict[str, list[float]] = {server.name: [] for server in servers}
        for number in range(ROUNDS):
            chat = prompts.history(20_000 + 10 * tokens + number, tokens)
            for server in servers:
                if number < server.rounds and tokens <= server.max_prompt_tokens:
                    body = prompts.chat_body(chat, max_tokens=FIRST_TOKENS, model=server.model, **server.extras)
                    answer = asyncio.run(client.stream(server.url, body))
                    rates[server.name].append(answer.usage["prompt_tokens"] / answer.ttft_s)
        rows += [
            _row(bench, PROMPTS, server, f"a prompt of {tokens:,} tokens", x=tokens, rates=rates[server.name])
            for server in servers
            if rates[server.name]
        ]
    return rows


def _row(bench: Bench, figure: str, server: _Server, case: str, *, x: int, rates: list[float]) -> Row:
    detail: dict[str, Any] = {"server": server.name, "x": x, "samples": rates}
    return Row(
        figure=figure,
        case=f"{case}, {server.name}",
        model=bench.model,
        value=median(rates),
        unit="tok/s",
        summary=f"{min(rates):.1f} to {max(rates):.1f}" if len(rates) > 1 else "",
        detail=detail,
    )
