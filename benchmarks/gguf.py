"""Measure GGUF files: our server on llama.cpp against llama.cpp's server, and against our server on MLX.

Both servers with llama.cpp use the same file, slots, context, threads and sampling. Ours has an additional process
between model and client, and its own text processing. MLX uses the same model in its own format.
"""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

import httpx2

from benchmarks import client, prompts
from benchmarks.bench import Bench, BenchError
from benchmarks.models import gguf_starter
from benchmarks.processes import START_S
from benchmarks.rates import decode_window, overall_rate, timeline
from benchmarks.report import Limit, Row
from benchmarks.servers import LabServer, lab_server, llama_server

DECODE = "gguf: decode tok/s ÷ llama.cpp's server"
OVERALL = "gguf: overall tok/s ÷ llama.cpp's server"
TTFT = "gguf: first token - llama.cpp's server's"
DECODE_MLX = "gguf: decode tok/s ÷ MLX engine"
PREFILL_MLX = "gguf: prefill tok/s ÷ MLX engine"
MEMORY_MLX = "gguf: server's memory ÷ MLX engine"
SCORING = "gguf: scored tok/s ÷ prefill tok/s"
SLOTS = "gguf: decode tok/s after mixed requests ÷ fresh server"
BESIDE = "gguf: decode tok/s beside other programs ÷ alone"
FIGURE = DECODE
STREAMS = (1, 8)
CASES = {1: "1 stream", 8: "8 streams"}
ROUNDS, QUICK_ROUNDS = 7, 3
TOKENS = 128
PROMPT_TOKENS = 156
PREFILL_TOKENS = 512
SCORED_TOKENS = 768
SAMPLING = {"temperature": 0.7, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
"""Servers have different defaults, and llama.cpp samples faster with a reduced vocabulary."""

Side = Literal["ours", "theirs"]
Found = dict[str, Any]
Sample = Mapping[Side, Found]
Visit = Callable[[str, int], Found]
"""Runs the round with the given number against the server at an address."""


def measure(bench: Bench) -> list[Row]:
    entry = gguf_starter()
    with llama_server(entry) as theirs, lab_server(entry.path) as ours:
        urls: dict[Side, str] = {"ours": ours.url, "theirs": theirs}
        rows = [row for streams in STREAMS for row in _against_llama(bench, urls, streams)]
    with lab_server(entry.path) as used, lab_server(entry.path) as fresh:
        rows += [_after_mixed_requests(bench, used.url, fresh.url), _scoring(bench, fresh.url)]
        rows += _beside_others(bench, used.url, fresh.url)
    with lab_server(entry.path) as ours, lab_server(bench.folder) as mlx:
        return [*rows, *_against_mlx(bench, {"ours": ours, "theirs": mlx})]


def run_rounds(urls: Mapping[Side, str], count: int, visit: Visit) -> list[Sample]:
    """Run both sides in each round, in alternating order."""
    sides = list(urls)
    return [
        {side: visit(urls[side], number) for side in (sides if number % 2 == 0 else reversed(sides))}
        for number in range(count)
    ]


# --- llama.cpp's server


def _against_llama(bench: Bench, urls: Mapping[Side, str], streams: int) -> list[Row]:
    samples = run_rounds(
        urls, QUICK_ROUNDS if bench.quick else ROUNDS, lambda url, number: send_chats(url, number, streams)
    )
    for sample in samples:
        _check_prompts(sample)
    turns = Turns(model=bench.model, case=CASES[streams], samples=samples)
    rows = [turns.ratio(DECODE, "decode", limit=Limit(sign="≥", bound=0.95)), turns.ratio(OVERALL, "overall")]
    if streams == 1:
        return [
            *rows,
            turns.difference("new_ms", f"{PROMPT_TOKENS} new tokens"),
            turns.difference("known_ms", "a cached prompt"),
        ]
    return [*rows, turns.difference("first_ms", "short prompts", binding=False)]


def send_chats(url: str, number: int, streams: int) -> Found:
    """Send new prompts at the same time; for a single stream, measure the first tokens too."""
    seeds = [8000 + 100 * number + 10 * streams + stream for stream in range(streams)]
    answers = asyncio.run(client.streams(url, [_body(prompts.story(seed), seed, TOKENS) for seed in seeds]))
    if any(answer.tokens != TOKENS for answer in answers):
        raise BenchError(f"{url} ended an answer early")
    found = {
        "decode": _decode_rate(answers),
        "overall": overall_rate(answers),
        "first_ms": _first_ms(answers),
        "prompt_tokens": [answer.usage["prompt_tokens"] for answer in answers],
    }
    return found | _first_tokens(url, seeds[0]) if streams == 1 else found


def _first_tokens(url: str, seed: int) -> Found:
    """Measure the times to the first token for new prompts, and for the last of them again, when it is cached."""
    new = [_body(prompts.history(seed + more, PROMPT_TOKENS), seed, 4) for more in range(1, 4)]
    found: Found = {}
    for name, bodies in {"new": new, "known": [new[-1]] * 5}.items():
        answers = [asyncio.run(client.stream(url, body)) for body in bodies]
        cached = [answer.usage["prompt_tokens_details"]["cached_tokens"] for answer in answers]
        found |= {f"{name}_ms": _first_ms(answers), f"{name}_cached_tokens": cached}
    return found


def _body(messages: list[prompts.Message], seed: int, tokens: int) -> dict[str, Any]:
    return prompts.chat_body(messages, max_tokens=tokens) | {**SAMPLING, "seed": seed, "ignore_eos": True}


def _check_prompts(sample: Sample) -> None:
    ours, theirs = (sample[side]["prompt_tokens"] for side in ("ours", "theirs"))
    if ours != theirs:
        raise BenchError(f"the servers rendered different prompts for the same chats: {ours} and {theirs} tokens")


def _first_ms(answers: list[client.Answer]) -> float:
    return median(answer.ttft_s for answer in answers) * 1e3


def _decode_rate(answers: list[client.Answer]) -> float:
    return decode_window([timeline(answer) for answer in answers]).rate


# --- our server alone


def _after_mixed_requests(bench: Bench, used: str, fresh: str) -> Row:
    """Compare four streams after requests that ended at different times with four in a server without other requests.

    llama.cpp computes only neighbouring slots together, so the speed depends on the slots that the streams get.
    """

    def decode(url: str, number: int) -> Found:
        if url == used:
            stories = [prompts.story(8300 + 10 * number + stream) for stream in range(7)]
            lengths = random.Random(number).sample(range(2, 60), len(stories))
            bodies = [prompts.chat_body(each, max_tokens=tokens) for each, tokens in zip(stories, lengths, strict=True)]
            asyncio.run(client.streams(url, bodies))
        return _decode(url, number, 4, TOKENS)

    samples = run_rounds({"ours": used, "theirs": fresh}, QUICK_ROUNDS if bench.quick else ROUNDS, decode)
    return Turns(model=bench.model, case="4 streams", samples=samples).ratio(
        SLOTS, "rate", limit=Limit(sign="≥", bound=0.95)
    )


def _scoring(bench: Bench, url: str) -> Row:
    """Compare the time in which a prompt is scored with that in which another one is computed."""
    requests: dict[Side, dict[str, Any]] = {
        "ours": {"max_tokens": 0, "echo": True, "logprobs": 1},
        "theirs": {"max_tokens": 1},
    }
    samples: list[Sample] = []
    # The first round starts the process that scores.
    for number in range(1 + (QUICK_ROUNDS if bench.quick else ROUNDS)):
        sample = {}
        for at, side in enumerate(sorted(requests, reverse=bool(number % 2))):
            body = {
                "model": "default",
                "prompt": prompts.words(8400 + 2 * number + at, SCORED_TOKENS),
                **requests[side],
            }
            began = time.perf_counter()
            answer = httpx2.post(f"{url}/v1/completions", json=body, timeout=START_S).raise_for_status().json()
            seconds = time.perf_counter() - began
            sample[side] = {"rate": answer["usage"]["prompt_tokens"] / seconds}
        samples.append(sample)
    turns = Turns(model=bench.model, case=f"{SCORED_TOKENS} tokens", samples=samples[1:])
    return turns.ratio(SCORING, "rate", limit=Limit(sign="≥", bound=0.5))


def _beside_others(bench: Bench, url: str, other: str) -> list[Row]:
    """Compare one stream beside a busy program, and the sum of two streams of two processes, with one stream alone.

    The threads of llama.cpp wait for each other, so the scheduling of the system decides how much remains.
    """
    busy, both = list[Sample](), list[Sample]()
    for number in range(QUICK_ROUNDS if bench.quick else ROUNDS):
        alone = _decode(url, 10 * number, 1, TOKENS)
        with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as program:
            try:
                busy.append({"ours": _decode(url, 10 * number + 1, 1, TOKENS), "theirs": alone})
            finally:
                program.kill()
        began = time.perf_counter()
        asyncio.run(_both([url, other], 10 * number + 2))
        both.append({"ours": {"rate": 2 * TOKENS / (time.perf_counter() - began)}, "theirs": alone})
    limits = {"a busy program": (busy, 0.4), "another model, both together": (both, 0.7)}
    return [
        Turns(model=bench.model, case=case, samples=samples).ratio(BESIDE, "rate", limit=Limit(sign="≥", bound=bound))
        for case, (samples, bound) in limits.items()
    ]


async def _both(urls: Sequence[str], number: int) -> None:
    body = prompts.chat_body(prompts.brief(8600 + number), max_tokens=TOKENS, ignore_eos=True)
    await asyncio.gather(*[client.streams(url, [body]) for url in urls])


# --- MLX


def _against_mlx(bench: Bench, servers: Mapping[Side, LabServer]) -> list[Row]:
    """Return rows without limits. ``theirs`` is MLX."""
    urls = {side: server.url for side, server in servers.items()}

    def turns(case: str, visit: Visit) -> Turns:
        return Turns(model=bench.model, case=case, samples=run_rounds(urls, bench.sizes.rounds, visit))

    rows = [
        turns(CASES[1], lambda url, number: _decode(url, number, 1, bench.sizes.alone_tokens)).ratio(
            DECODE_MLX, "rate"
        ),
        turns(CASES[8], lambda url, number: _decode(url, number, 8, TOKENS)).ratio(DECODE_MLX, "rate"),
        turns(f"{PREFILL_TOKENS} tokens", send_prompt).ratio(PREFILL_MLX, "rate"),
    ]
    memory: Sample = {side: {"MB": server.tree_bytes() / 1e6} for side, server in servers.items()}
    memory_turns = Turns(model=bench.model, case="after these measurements", samples=[memory])
    return [*rows, memory_turns.ratio(MEMORY_MLX, "MB", unit="MB")]


def _decode(url: str, number: int, streams: int, tokens: int) -> Found:
    chats = [prompts.brief(8800 + 100 * number + 10 * streams + stream) for stream in range(streams)]
    bodies = [prompts.chat_body(messages, max_tokens=tokens, ignore_eos=True) for messages in chats]
    return {"rate": _decode_rate(asyncio.run(client.streams(url, bodies)))}


def send_prompt(url: str, number: int) -> Found:
    body = prompts.chat_body(prompts.history(8900 + number, PREFILL_TOKENS), max_tokens=1)
    answer = asyncio.run(client.whole(url, body))
    return {"rate": answer["timings"]["prompt_per_second"], "prompt_tokens": answer["usage"]["prompt_tokens"]}


# --- rows


@dataclass(frozen=True, kw_only=True)
class Turns:
    """Samples of two sides that were measured in turns. Its methods create rows from them."""

    model: str
    case: str
    samples: Sequence[Sample]

    def ratio(self, figure: str, name: str, *, limit: Limit | None = None, unit: str = "tok/s") -> Row:
        """Return the median ratio of the pairs, because other load on the machine affects both sides."""
        ours, theirs = self._medians(name)
        return Row(
            figure=figure,
            case=self.case,
            model=self.model,
            value=median(sample["ours"][name] / sample["theirs"][name] for sample in self.samples),
            limit=limit,
            summary=f"{ours:.1f} against {theirs:.1f} {unit}",
            detail={"samples": self.samples},
        )

    def difference(self, name: str, prompt: str, *, binding: bool = True) -> Row:
        """Return the median difference in milliseconds between our first token and theirs."""
        ours, theirs = self._medians(name)
        return Row(
            figure=TTFT,
            case=f"{self.case}, {prompt}",
            model=self.model,
            value=median(sample["ours"][name] - sample["theirs"][name] for sample in self.samples),
            unit="ms",
            limit=Limit(sign="≤", bound=10),
            binding=binding,
            summary=f"{ours:.1f} against {theirs:.1f} ms",
            detail={"samples": self.samples},
        )

    def _medians(self, name: str) -> tuple[float, float]:
        ours, theirs = (median(sample[side][name] for sample in self.samples) for side in ("ours", "theirs"))
        return ours, theirs
