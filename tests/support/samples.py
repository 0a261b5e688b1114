"""Samples of measurements, of an evaluation, and of the ends of requests."""

from __future__ import annotations

from collections.abc import AsyncIterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from lmx_lab.bench import RequestSample
from lmx_lab.engine import ChatPrompt, GenerationRequest
from lmx_lab.evals.evaluation import Evaluation
from lmx_lab.evals.rows import EvaluatedRow, RunFacts
from lmx_lab.server.requests import RequestEnd
from lmx_lab.values.outputs import Delta, GenerationReport
from lmx_lab.values.timeline import EngineStep, RequestTimeline
from lmx_lab.wire.admin import RequestEvent


async def collect(samples: AsyncIterable[RequestSample]) -> list[RequestSample]:
    return [sample async for sample in samples]


DAY = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def sample(*, at_s: float = 0.0, **fields: Any) -> RequestSample:
    stamp = (DAY + timedelta(seconds=at_s)).isoformat(timespec="microseconds")
    defaults: dict[str, Any] = {
        "target": "lab",
        "case": "p16-o8-c1-cold",
        "prompt_tokens_wanted": 16,
        "output_tokens_wanted": 8,
        "concurrency": 1,
        "arrival": "closed",
        "cache": "cold",
        "seed": 0,
        "repeat": 0,
        "request": 0,
    }
    return RequestSample(started_at=stamp, **defaults | fields)


def run_of(
    ttft_ms: list[float], *, per_repeat: int | None = None, e2e_ms: float = 1000.0, tokens: int = 8, **fields: Any
) -> list[RequestSample]:
    """Samples of consecutive requests without gaps."""
    size = per_repeat or len(ttft_ms)
    return [
        sample(
            at_s=at * e2e_ms / 1000,
            ttft_ms=value,
            decode_tok_s=1000 / value,
            e2e_ms=e2e_ms,
            output_tokens=tokens,
            repeat=at // size,
            request=at % size,
            **fields,
        )
        for at, value in enumerate(ttft_ms)
    ]


FACTS = RunFacts(
    at=1e9,
    name="capitals",
    model="m",
    engine="mlx",
    weights="abc",
    settings={"prompt": "{country}", "metric": {"name": "contains"}, "parameters": {"temperature": 0}},
    frame="def",
    versions={"lmx-lab": "1"},
    machine="Linux",
)
ROWS = [
    EvaluatedRow(label="fr", prompt="France", expected="Paris", answer="Paris", score=1.0),
    EvaluatedRow(label="jp", prompt="Japan", expected="Tokyo", answer="Kyoto", score=0.0),
    EvaluatedRow(label="x", prompt=None, expected=None, answer=None, score=None, error="missing"),
]
EVALUATION = Evaluation(FACTS, ROWS)


def request_end(
    *,
    report: GenerationReport | None = None,
    request: GenerationRequest = GenerationRequest(prompt=ChatPrompt(messages=())),  # noqa: B008
    deltas: Sequence[Delta] = (),
    **event: Any,
) -> RequestEnd:
    defaults: dict[str, Any] = {
        "request_id": "req_1",
        "model": "tiny",
        "finish_reason": "stop",
        **dict.fromkeys(("prompt_tokens", "completion_tokens"), 0),
        **dict.fromkeys(("tokens_per_second", "ttft_ms"), 0.0),
    }
    return RequestEnd(event=RequestEvent(**defaults | event), report=report, request=request, deltas=deltas)


def request_timeline(*steps: EngineStep, **changes: Any) -> RequestTimeline:
    defaults: dict[str, Any] = {
        **{"request_id": "r", "index": 0, "model": "m", "at": 100.0, "outcome": "stop", "code": None},
        **{"stop_string": False, "prompt_tokens": 4, "cached_tokens": 0, "output_tokens": 1},
        **{"queue_s": 1.0, "prefill_s": 0.5, "decode_s": 0.5},
    }
    return RequestTimeline(**defaults | changes, steps=steps)
