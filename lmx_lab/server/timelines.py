"""Keep what the engines did for the last requests, for a lab's timeline. Neither texts nor tokens are kept."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from lmx_lab.values.generation import GenerationReport
from lmx_lab.values.timeline import RequestTimeline, StepLog, phase_durations

KEPT_REQUESTS = 256
"""Maximum number of requests, running ones included. With the limit of each, this is at most 25 MB."""


@dataclass(kw_only=True)
class _Entry:
    request_id: str
    index: int
    model: str
    prompt_tokens: int
    at: float = field(default_factory=time.time)
    """Unix time of the call."""
    called_at: float = field(default_factory=time.perf_counter)
    ended_at: float | None = None
    outcome: str = "running"
    code: str | None = None
    report: GenerationReport | None = None


class TimelineLog:
    """The timelines of the last requests of all clients. It may be used on any thread."""

    def __init__(self) -> None:
        self._entries: dict[StepLog, _Entry] = {}

    def add(self, steps: StepLog, *, request_id: str, index: int, model: str, prompt_tokens: int) -> None:
        """Add an accepted request. If there are too many, the oldest one is dropped."""
        self._entries[steps] = _Entry(request_id=request_id, index=index, model=model, prompt_tokens=prompt_tokens)
        while len(self._entries) > KEPT_REQUESTS:
            del self._entries[next(iter(self._entries))]

    def end(self, steps: StepLog, outcome: str, code: str | None, report: GenerationReport | None) -> None:
        """Record the end of a request."""
        if (entry := self._entries.get(steps)) is not None:
            entry.ended_at = time.perf_counter()
            entry.outcome, entry.code, entry.report = outcome, code, report

    def read(self, last_s: float, *, most: int | None = None) -> list[RequestTimeline]:
        """Return the requests that ran in the last seconds, the oldest first.

        Args:
            most: Maximum number of requests; the newest are returned. None sets no limit.
        """
        now = time.perf_counter()
        entries = [
            (steps, entry)
            for steps, entry in list(self._entries.items())
            if entry.ended_at is None or now - entry.ended_at <= last_s
        ]
        return [_timeline(steps, entry, now) for steps, entry in entries[-most if most else 0 :]]


def _timeline(log: StepLog, entry: _Entry, now: float) -> RequestTimeline:
    steps, report = log.steps(), entry.report
    elapsed_s = (now if entry.ended_at is None else entry.ended_at) - log.arrived_at
    measured = None if report is None else (report.queue_s, report.prefill_s, report.decode_s)
    queue_s, prefill_s, decode_s = phase_durations(steps, elapsed_s=elapsed_s, report=measured)
    return RequestTimeline(
        request_id=entry.request_id,
        index=entry.index,
        model=entry.model,
        at=entry.at - (entry.called_at - log.arrived_at),
        outcome=entry.outcome,
        code=entry.code,
        stop_string=report is not None and report.stop_sequence is not None,
        prompt_tokens=entry.prompt_tokens,
        cached_tokens=report.cached_tokens if report is not None else 0,
        output_tokens=sum(step.tokens for step in steps if step.kind == "decode"),
        queue_s=queue_s,
        prefill_s=prefill_s,
        decode_s=decode_s,
        steps=steps,
    )
