"""Values that describe what an engine did for a request and when: its steps, and the spans of requests and loads.

Points in time are seconds of ``time.perf_counter`` while a request runs, and seconds since its arrival afterwards.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Annotated, Any, Literal, NamedTuple

from lmx_lab.values.models import LoadStage

StepKind = Literal["queued", "prefill", "decode", "paused"]
"""``queued``: waited for a slot. ``prefill``: a chunk of the prompt was computed, or scored. ``decode``: tokens of the
answer were generated. ``paused``: the slot was taken for another client."""
KINDS: tuple[StepKind, ...] = ("queued", "prefill", "decode", "paused")
MAX_STEPS = 2048
"""Maximum number of steps that are kept of a request. When there are more, neighbouring steps are merged in pairs."""
FIELDS = 7
SLOW = 3.0
"""Duration of a slow decode step, as a multiple of the median."""
SegmentKind = Literal["queued", "prefill", "decode", "paused", "slow", "load", "unload"]


class EngineStep(NamedTuple):
    """Work that an engine did for one request, or a time during which the request waited."""

    kind: StepKind
    start_s: float
    """Seconds since the arrival of the request."""
    duration_s: float
    tokens: int = 0
    """Number of prompt tokens that were computed, or of tokens that were generated."""
    step: int = 0
    """Number of the engine's step. Requests that were computed together have the same one; 0 if the engine does not
    report it."""
    requests: int = 0
    """Number of requests that had a slot."""
    kv_bytes: int = 0
    """Estimated size of the KV caches of all requests that had a slot; 0 if the engine has none."""

    @property
    def end_s(self) -> float:
        return self.start_s + self.duration_s


class StepLog:
    """Records the steps of one running request. One thread writes; others may read at any time.

    Args:
        arrived_at: When the request arrived.
    """

    def __init__(self, arrived_at: float) -> None:
        self.arrived_at = arrived_at
        self._values = array("d")
        """``FIELDS`` numbers for each step, because objects would take several times the memory."""

    def add(
        self,
        kind: StepKind,
        start: float | None,
        end: float,
        *,
        tokens: int,
        step: int = 0,
        requests: int = 0,
        kv_bytes: int = 0,
    ) -> None:
        """Record a step. Consecutive calls with the same ``kind`` and ``step`` are merged.

        Args:
            start: None means the end of the last step, or the arrival of the request for the first step.
            step: Number of the engine's step; 0 if the step has none and is not merged.
        """
        values, code = self._values, KINDS.index(kind)
        if step and values and values[-3] == step and values[-FIELDS] == code:
            values[-4] += tokens
            values[-5] = end
            return
        if start is None:
            start = values[-5] if values else self.arrived_at
        values.extend((code, start, end, tokens, step, requests, kv_bytes))
        if len(values) >= MAX_STEPS * FIELDS:
            self._values = _merge_pairs(values)

    def start(self, now: float) -> None:
        """Record that the request has a slot: for the first time, or again after a pause."""
        kind: StepKind = "paused" if self._values else "queued"
        self.add(kind, None, now, tokens=0)

    def steps(self) -> tuple[EngineStep, ...]:
        """Return the steps so far."""
        values, arrived_at = self._values[:], self.arrived_at
        return tuple(
            EngineStep(KINDS[int(code)], start - arrived_at, end - start, *map(int, counts))
            for code, start, end, *counts in _rows(values)
        )


def _rows(values: array[float]) -> Iterator[tuple[float, ...]]:
    numbers = iter(values)
    return zip(*[numbers] * FIELDS, strict=False)


def _merge_pairs(values: array[float]) -> array[float]:
    """Return the steps with neighbours of the same kind merged in pairs."""
    merged, last = array("d"), None
    for row in _rows(values):
        if last is not None and last[0] == row[0]:
            most = (max(last[5], row[5]), max(last[6], row[6]))
            merged.extend((last[0], last[1], row[2], last[3] + row[3], last[4], *most))
            last = None
            continue
        if last is not None:
            merged.extend(last)
        last = row
    if last is not None:
        merged.extend(last)
    return merged


def encode_steps(steps: Sequence[EngineStep]) -> list[list[int]]:
    """Return steps as columns, with times in microseconds. They take a third of the space of rows with names."""
    rows = [
        (KINDS.index(step.kind), round(step.start_s * 1e6), round(step.duration_s * 1e6), *step[3:]) for step in steps
    ]
    return list(map(list, zip(*rows, strict=True)))


def decode_steps(columns: Sequence[Sequence[int]]) -> tuple[EngineStep, ...]:
    """Return the steps that ``encode_steps`` of this or an earlier version has encoded."""
    return tuple(
        EngineStep(KINDS[kind], start / 1e6, duration / 1e6, *counts)
        for kind, start, duration, *counts in zip(*columns, strict=True)
    )


def _read_steps(columns: Sequence[Sequence[int]]) -> tuple[EngineStep, ...]:
    """Return the steps that a server of this or another version has sent. Additional columns are ignored.

    Raises:
        ValueError: the columns are invalid.
    """
    if columns and len(columns) < FIELDS:
        raise ValueError(f"has {len(columns)} columns; there must be at least {FIELDS}")
    if len({len(column) for column in columns}) > 1:
        raise ValueError("has columns of different lengths")
    if columns and not all(0 <= kind < len(KINDS) for kind in columns[0]):
        raise ValueError(f"has an unknown kind of step; the kinds are 0 to {len(KINDS) - 1}")
    return decode_steps(columns[:FIELDS])


class _StepColumns:
    """Tells pydantic how the steps of a request are read and written."""

    @staticmethod
    def __get_pydantic_core_schema__(source: Any, handler: Any) -> Any:
        # Imported here, because a server starts to load its model before it imports pydantic.
        from pydantic_core import core_schema

        columns = core_schema.list_schema(core_schema.list_schema(core_schema.int_schema()))
        written = core_schema.plain_serializer_function_ser_schema(encode_steps)
        return core_schema.no_info_after_validator_function(_read_steps, columns, serialization=written)

    @staticmethod
    def __get_pydantic_json_schema__(schema: Any, handler: Any) -> dict[str, Any]:
        return {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}, "title": "Steps"}


Steps = Annotated[tuple[EngineStep, ...], _StepColumns]
"""The steps of a request. In JSON, these are columns with one number for each step: its kind (0 is ``queued``, 1
``prefill``, 2 ``decode``, 3 ``paused``), its beginning in microseconds since the arrival, its duration in microseconds,
its number of tokens, the number of the engine's step, the number of requests that had a slot, and the bytes of their KV
caches."""


class Span(NamedTuple):
    """A part of the time of a request or load. Spans of a higher depth are within one of the next lower depth."""

    name: str
    """``request``, a ``StepKind``, ``load``, ``unload``, or a ``LoadStage``."""
    depth: int
    """0 for the whole request, load or unload; 1 for the phases ``queued``, ``prefill`` and ``decode`` of a request,
    and for the stages of a load, which have no gaps between them; 2 for steps."""
    start_s: float
    """Seconds since the arrival of the request, or the beginning of the load."""
    duration_s: float
    tokens: int = 0
    step: int = 0
    requests: int = 0
    kv_bytes: int = 0
    """Estimated size of the KV caches of all requests that had a slot: after a step, or the maximum of other spans."""


class Segment(NamedTuple):
    """A part of the time of a request that is displayed as one bar."""

    kind: SegmentKind
    start_s: float
    """Seconds since the arrival of the request."""
    duration_s: float

    @property
    def end_s(self) -> float:
        return self.start_s + self.duration_s


@dataclass(frozen=True, kw_only=True)
class RequestTimeline:
    """The engine's steps for one request, until its end or until now."""

    request_id: str
    """Id of the request in the log; empty for requests of the notebook."""
    index: int
    """Index of the answer among those to the request."""
    model: str
    at: float
    """Unix time of the arrival."""
    outcome: str
    """``running``, or how the request ended: ``stop``, ``length``, ``tool_calls``, ``cancelled`` or ``error``."""
    code: str | None
    """Code of the error; None if there was none."""
    stop_string: bool
    """Whether a stop string ended the answer."""
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    queue_s: float
    prefill_s: float
    decode_s: float
    steps: Steps
    internal: bool = False
    """Whether it is a step of other work, such as scoring the tokens of an answer, and not an answer to a caller."""

    @property
    def total_s(self) -> float:
        """Time from the arrival to the end."""
        return self.queue_s + self.prefill_s + self.decode_s

    @property
    def kv_bytes(self) -> int:
        """Maximum size of the KV caches of all requests that had a slot at the same time."""
        return max((step.kv_bytes for step in self.steps), default=0)

    def spans(self) -> list[Span]:
        """Return the request, its phases and its steps as nested spans, in order of their start."""
        decode_at = self.queue_s + self.prefill_s
        phases = {
            "queued": (0.0, self.queue_s, 0),
            "prefill": (self.queue_s, decode_at, self.prompt_tokens - self.cached_tokens),
            "decode": (decode_at, self.total_s, self.output_tokens),
        }
        tokens, kv_bytes = self.prompt_tokens + self.output_tokens, self.kv_bytes
        spans = [Span("request", 0, 0.0, self.total_s, tokens, kv_bytes=kv_bytes)]
        for name, (start, end, tokens) in phases.items():
            if end > start:
                inside = [step for step in self.steps if _phase(step, decode_at) == name]
                kv_bytes = max((step.kv_bytes for step in inside), default=0)
                spans.append(Span(name, 1, start, end - start, tokens, kv_bytes=kv_bytes))
                # They do not overlap, and lie within the phase, whose limits may be estimates.
                before = start
                for step in inside:
                    first, last = (min(max(before, at), end) for at in (step.start_s, step.end_s))
                    before = max(first, last)
                    spans.append(Span(step.kind, 2, first, before - first, *step[3:]))
        return spans

    def segments(self) -> list[Segment]:
        """Return the time of the request as consecutive parts without gaps. Neighbours of the same kind are merged.

        Decoding is divided at the ends of its steps, so that a part includes the time before the step, in which the
        engine did something else. A ``slow`` part took ``SLOW`` times as long as the median.
        """
        segments = [Segment("queued", 0.0, self.queue_s), Segment("prefill", self.queue_s, self.prefill_s)]
        before = decode_at = self.queue_s + self.prefill_s
        parts = []
        for step in self.steps:
            if _phase(step, decode_at) == "decode":
                end = min(max(before, step.end_s), self.total_s)
                parts.append(Segment(step.kind, before, end - before))
                before = end
        usual_s = median([part.duration_s for part in parts if part.kind == "decode"] or [0.0])
        # Shorter steps are not slow.
        limit_s = max(SLOW * usual_s, 0.02)
        for part in [*parts, Segment("decode", before, self.total_s - before)]:
            is_slow = part.kind == "decode" and part.duration_s >= limit_s
            kind: SegmentKind = "slow" if is_slow else part.kind
            if segments[-1].kind == kind != "slow":
                segments[-1] = Segment(kind, segments[-1].start_s, segments[-1].duration_s + part.duration_s)
            else:
                segments.append(Segment(kind, part.start_s, part.duration_s))
        return [segment for segment in segments if segment.duration_s > 0]


def _phase(step: EngineStep, decode_at: float) -> str:
    """Return the phase to which a step belongs. After a pause, tokens are computed again while the answer decodes."""
    if step.kind == "prefill":
        return "prefill" if step.start_s < decode_at else "decode"
    return {"queued": "", "decode": "decode", "paused": "decode"}[step.kind]


@dataclass(frozen=True)
class ModelStage:
    """A stage of a load or unload."""

    name: LoadStage
    start_s: float
    """Seconds since the beginning of the load or unload."""
    duration_s: float


@dataclass(frozen=True, kw_only=True)
class ModelTimeline:
    """The stages of a load or unload of a model, until its end or until now."""

    kind: Literal["load", "unload"]
    model: str
    at: float
    """Unix time of the beginning."""
    outcome: Literal["running", "loaded", "unloaded", "failed"]
    message: str
    """Why a load failed, or why a model was unloaded without a request to do so."""
    total_s: float
    stages: tuple[ModelStage, ...]
    """Consecutive stages without gaps."""

    def spans(self) -> list[Span]:
        """Return the load or unload and its stages as nested spans, in order of their start."""
        stages = [Span(stage.name, 1, stage.start_s, stage.duration_s) for stage in self.stages]
        return [Span(self.kind, 0, 0.0, self.total_s), *stages]

    def segments(self) -> list[Segment]:
        """Return the load or unload as one part."""
        return [Segment(self.kind, 0.0, self.total_s)]


@dataclass(frozen=True, kw_only=True)
class ServerTimeline:
    """The requests and loads of a server in a period of time, oldest first."""

    requests: tuple[RequestTimeline, ...] = ()
    models: tuple[ModelTimeline, ...] = ()


def phase_durations(
    steps: Sequence[EngineStep], *, elapsed_s: float, report: tuple[float, float, float] | None = None
) -> tuple[float, float, float]:
    """Return the durations of queue, prefill and decoding.

    Args:
        elapsed_s: Time from the arrival of the request to its end, or to now.
        report: The engine's measurement of the three; None if the request has not ended normally.
    """
    if report is not None:
        return report
    queue_s = next((step.end_s for step in steps if step.kind == "queued"), elapsed_s)
    decode_at = next((step.start_s for step in steps if step.kind == "decode"), elapsed_s)
    decode_at = max(queue_s, decode_at)
    return queue_s, decode_at - queue_s, max(0.0, elapsed_s - decode_at)


class Others(NamedTuple):
    """The work of an engine for other requests during a period of time."""

    requests: int
    """Number of other requests that had a slot."""
    prompt_tokens: int
    """Number of their prompt tokens that were computed."""


def others_during(timelines: Sequence[RequestTimeline], one: RequestTimeline, start_s: float, end_s: float) -> Others:
    """Return the work of an engine for the other requests of a timeline during a part of the time of one of them."""
    requests = prompt_tokens = 0
    for other in timelines:
        if other is one:
            continue
        start, end = (one.at + at - other.at for at in (start_s, end_s))
        # By its middle, because the arrivals of both are known less precisely than the durations.
        requests += start < other.total_s and end > other.queue_s
        prompt_tokens += sum(
            step.tokens
            for step in other.steps
            if step.kind == "prefill" and start <= step.start_s + step.duration_s / 2 < end
        )
    return Others(requests, prompt_tokens)
