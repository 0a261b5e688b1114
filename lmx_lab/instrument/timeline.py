"""Show the steps of requests and the loads of models as a data frame, bars, an explanation, or a file for Perfetto."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from numbers import Real
from statistics import median
from typing import TYPE_CHECKING, Any, overload

from lmx_lab.backend import Backend
from lmx_lab.blocking import on_loop
from lmx_lab.errors import InvalidRequestError, counted, format_bytes
from lmx_lab.results.frames import make_table
from lmx_lab.results.pages import Displayed, Formats
from lmx_lab.values.recording import Record
from lmx_lab.values.timeline import ModelTimeline, RequestTimeline, Span, others_during, phase_durations

if TYPE_CHECKING:
    import pandas as pd

COLORS = {
    **{"queued": "#bdbdbd", "prefill": "#5b8ff9", "decode": "#5ad8a6", "paused": "#f6bd16", "slow": "#e8684a"},
    **{"load": "#9270ca", "unload": "#d3c4ec"},
}
SHOWN_REQUESTS = 30
"""Maximum number of requests in the display; the data frame contains all."""
EXPLAINED = 8
"""Maximum number of slow steps and pauses that an explanation lists."""
PROCESS = 1
"""Id of the process in a file for Perfetto; each request is a thread of it."""


class Timeline(Displayed, Sequence[RequestTimeline]):
    """The steps of an engine for each request, oldest request first. Notebooks display them as bars.

    Attributes:
        internal: The lab's own requests, such as those that score the tokens of an answer. They are not elements of
            the timeline, but explanations count them.
        models: Loads and unloads of models, oldest first.
    """

    def __init__(self, requests: Sequence[RequestTimeline], models: Sequence[ModelTimeline] = ()) -> None:
        self._requests = tuple(each for each in requests if not each.internal)
        self.internal = tuple(each for each in requests if each.internal)
        self.models = tuple(models)

    def __len__(self) -> int:
        return len(self._requests)

    @overload
    def __getitem__(self, at: int) -> RequestTimeline: ...
    @overload
    def __getitem__(self, at: slice) -> Timeline: ...
    def __getitem__(self, at: int | slice) -> RequestTimeline | Timeline:
        if isinstance(at, slice):
            return Timeline([*self._requests[at], *self.internal], self.models)
        return self._requests[at]

    @property
    def df(self) -> pd.DataFrame:
        """A data frame with one row for each span of each request, load and unload.

        ``span`` is ``request``, one of its phases ``queued``, ``prefill`` and ``decode`` (``depth`` 1), or a step
        (``depth`` 2): a chunk of the prompt, a decode step, or a pause. ``at`` is its start time, and ``start_s`` the
        start relative to the arrival of the request. ``step`` is the number of the engine's step, which is the same for
        requests in one batch; ``requests`` is the number of requests that had a slot, and ``kv_bytes`` is the estimated
        size of their KV caches (its maximum, for a request or a phase).

        For a load, ``request`` is missing, ``request_id`` is empty, and ``span`` is ``load`` or ``unload``, or one of
        its stages (``depth`` 1), such as ``download``.

        Raises:
            MissingPackageError: pandas is not installed.
        """
        parts: list[tuple[int | None, str, RequestTimeline | ModelTimeline]] = [
            *((number, each.request_id, each) for number, each in enumerate(self._requests)),
            *((None, "", each) for each in self.models),
        ]
        rows = [
            (number, id_, each.model, each.outcome, span.name, span.depth, each.at + span.start_s, *span[2:])
            for number, id_, each in parts
            for span in each.spans()
        ]
        return make_table(
            rows,
            {
                **{
                    "request": "Int64",
                    "request_id": "str",
                    "model": "str",
                    "outcome": "str",
                    "span": "str",
                    "depth": "int64",
                },
                **{"at": "time", "start_s": "float64", "duration_s": "float64", "tokens": "int64", "step": "int64"},
                **{"requests": "int64", "kv_bytes": "int64"},
            },
        )

    def explain(self, at: int = -1) -> str:
        """Explain what the time of a request was spent on, and what the engine did for other requests at that time.

        Raises:
            InvalidRequestError: the request does not exist.
        """
        try:
            one = self._requests[at]
        except (IndexError, TypeError):
            raise InvalidRequestError(
                f"there is no request {at!r:.40}; the timeline contains {len(self)}", param="at"
            ) from None
        lines = []
        ended = "is running" if one.outcome == "running" else f"ended with {one.code or one.outcome!r}"
        by = " (a stop string)" if one.stop_string else ""
        lines.append(f"The request took {one.total_s:.3f} s and {ended}{by}.")
        if one.queue_s > 0:
            lines.append(f"It waited {one.queue_s:.3f} s for a slot{self._meanwhile(one, 0.0, one.queue_s)}.")
        decode_at = one.queue_s + one.prefill_s
        chunks = [step.tokens for step in one.steps if step.kind == "prefill" and step.start_s < decode_at]
        if chunks:
            lines.append(
                f"{sum(chunks)} of its {counted(one.prompt_tokens, 'prompt token')} were computed in "
                f"{counted(len(chunks), 'chunk')}, which took {one.prefill_s:.3f} s."
            )
        usual = [step.duration_s for step in one.steps if step.kind == "decode"]
        if usual:
            lines.append(
                f"{counted(one.output_tokens, 'token')} took {one.decode_s:.3f} s; the median step took "
                f"{median(usual):.3f} s."
            )
        if one.kv_bytes:
            lines.append(f"The KV caches of all running requests took up to {format_bytes(one.kv_bytes)}.")
        marked = sorted(
            (segment for segment in one.segments() if segment.kind in ("slow", "paused")),
            key=lambda segment: -segment.duration_s,
        )
        for segment in marked[:EXPLAINED]:
            what = "A step took" if segment.kind == "slow" else "It was paused for"
            others = self._meanwhile(one, segment.start_s, segment.end_s)
            lines.append(f"{what} {segment.duration_s:.3f} s, {segment.start_s:.3f} s after its arrival{others}.")
        if len(marked) > EXPLAINED:
            lines.append(
                f"{len(marked) - EXPLAINED} shorter slow steps or pauses are not listed; .df contains all steps."
            )
        return "\n".join(lines)

    def _meanwhile(self, one: RequestTimeline, start_s: float, end_s: float) -> str:
        others = others_during([*self._requests, *self.internal], one, start_s, end_s)
        if not others.requests:
            return ""
        whose = "its" if others.requests == 1 else "their"
        computed = (
            f", and {others.prompt_tokens} of {whose} prompt tokens were computed" if others.prompt_tokens else ""
        )
        count = "another request" if others.requests == 1 else counted(others.requests, "other request")
        return f"; meanwhile {count} had a slot{computed}"

    def _formats(self) -> Formats:
        return {**super()._formats(), ".json": lambda: json.dumps(self.trace_events()).encode()}

    def trace_events(self) -> dict[str, Any]:
        """Return the spans in Chrome's trace event format, which https://ui.perfetto.dev opens and ``save`` writes to a
        ``.json`` file. Times are in microseconds since the oldest arrival."""
        beginnings = [*(each.at for each in self._requests), *(each.at for each in self.models)]
        first = min(beginnings, default=0.0)
        events = [_metadata("process_name", 0, "LMX Lab")]
        for number, each in enumerate(self._requests, 1):
            events.append(_metadata("thread_name", number, f"{number} {each.request_id or 'notebook'} {each.model}"))
            events += _span_events(each.spans(), number, each.at - first)
            if each.outcome != "running":
                name = f"end: {each.code or each.outcome}{', stop string' if each.stop_string else ''}"
                at = round((each.at - first + each.total_s) * 1e6)
                events.append(
                    {"cat": "request", "pid": PROCESS, "tid": number, "name": name, "ph": "i", "s": "t", "ts": at}
                )
        for number, change in enumerate(self.models, len(self) + 1):
            events.append(_metadata("thread_name", number, f"{change.kind} {change.model}"))
            events += _span_events(change.spans(), number, change.at - first)
        # The numbers of requests in each phase, at each change.
        changes: list[tuple[int, str, int]] = []
        for each in self._requests:
            for span in each.spans():
                if span.depth == 1:
                    start = round((each.at - first + span.start_s) * 1e6)
                    end = round((each.at - first + span.start_s + span.duration_s) * 1e6)
                    changes += [(start, span.name, 1), (end, span.name, -1)]
        counts = {"queued": 0, "prefill": 0, "decode": 0}
        for at, name, step in sorted(changes):
            counts[name] += step
            events.append({"name": "requests", "ph": "C", "pid": PROCESS, "tid": 0, "ts": at, "args": dict(counts)})
        # The size of the KV caches of all running requests, at each change.
        sizes = sorted(
            (round((each.at - first + step.end_s) * 1e6), step.kv_bytes)
            for each in self._requests
            for step in each.steps
            if step.kv_bytes
        )
        if sizes and all(each.outcome != "running" for each in self._requests):
            last_end = max(round((each.at - first + each.total_s) * 1e6) for each in self._requests)
            sizes.append((max(last_end, sizes[-1][0]), 0))
        before = 0
        for at, size in sizes:
            if size != before:
                before = size
                args = {"bytes": size}
                events.append({"name": "KV caches", "ph": "C", "pid": PROCESS, "tid": 0, "ts": at, "args": args})
        began = datetime.fromtimestamp(first, UTC).isoformat()
        return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"began": began}}

    def __repr__(self) -> str:
        if not (self._requests or self.models):
            return "<Timeline without requests>"
        lines = [
            f"{number} {each.model} {each.outcome}: queued {each.queue_s:.3f} s, prefill {each.prefill_s:.3f} s, "
            f"decode {each.decode_s:.3f} s, {counted(each.output_tokens, 'token')}"
            for number, each in enumerate(self._requests)
        ]
        loads = [f"{each.kind} {each.model} {each.outcome}: {each.total_s:.3f} s" for each in self.models]
        return "\n".join([*lines[:SHOWN_REQUESTS], *self._footer(), *loads])

    def _footer(self) -> list[str]:
        more = len(self) - SHOWN_REQUESTS
        return [f"{counted(more, 'more request')}: see .df"] if more > 0 else []

    def _repr_html_(self) -> str:
        shown = self._requests[:SHOWN_REQUESTS]
        if not (shown or self.models):
            return "<div>No request ran in this time.</div>"
        both: list[RequestTimeline | ModelTimeline] = [*shown, *self.models]
        first, last = min(each.at for each in both), max(each.at + each.total_s for each in both)
        scale = 100 / max(last - first, 1e-6)
        legend = " ".join(
            f"<span style='border-left:10px solid {color};padding:0 4px'>{kind}</span>"
            for kind, color in COLORS.items()
        )
        names = [f"{number} {each.request_id[:12]} {each.outcome}" for number, each in enumerate(shown)]
        names += [f"{each.kind} {each.model} {each.outcome}" for each in self.models]
        rows = ""
        for name, each in zip(names, both, strict=True):
            bar = _part("", (each.at - first) * scale, "")
            for segment in each.segments():
                title = f"{segment.kind} {segment.duration_s:.3f} s, from {segment.start_s:.3f} s"
                bar += _part(f"background:{COLORS[segment.kind]}", segment.duration_s * scale, title)
            rows += (
                f"<tr><td style='text-align:left'>{html.escape(name)}</td>"
                f"<td style='width:80%'><div style='display:flex;height:14px'>{bar}</div></td></tr>"
            )
        foot = "".join(f"<div>{line}</div>" for line in self._footer())
        caption = f"<div><small>{last - first:.3f} s: {legend}</small></div>"
        return f"{caption}<table style='width:100%'>{rows}</table>{foot}"


async def timeline(backend: Backend, last_s: float = 60.0) -> Timeline:
    """Return the timeline of the requests of all clients, and of loads, in the last ``last_s`` seconds.

    The server keeps the last 256 requests, including running ones, and the last 64 loads and unloads. A timeline
    contains neither texts nor tokens.

    Raises:
        InvalidRequestError: ``last_s`` is not a number of seconds.
    """
    if isinstance(last_s, bool) or not isinstance(last_s, Real) or not 0 <= last_s < math.inf:
        raise InvalidRequestError(
            f"last_s is {last_s!r:.40}; it must be a number of seconds, 0 or more", param="last_s"
        )
    found = await on_loop(backend.portal, backend.timeline(float(last_s)))
    return Timeline(found.requests, found.models)


def timeline_of_record(record: Record) -> Timeline:
    """Return the timeline of a recorded request.

    Raises:
        InvalidRequestError: the record has no steps.
    """
    if not record.steps:
        raise InvalidRequestError("no steps were recorded for this request: it ended before it had a slot")
    timings = record.timings
    report = (timings["queue_s"], timings["prefill_s"], timings["decode_s"]) if timings else None
    queue_s, prefill_s, decode_s = phase_durations(record.steps, elapsed_s=record.steps[-1].end_s, report=report)
    one = RequestTimeline(
        request_id=record.request_id,
        index=record.choice,
        model=record.provenance.model,
        at=record.at,
        outcome=record.outcome,
        code=record.code,
        stop_string=timings.get("stop_sequence") is not None,
        prompt_tokens=len(record.prompt),
        cached_tokens=int(timings.get("cached_tokens", 0)),
        output_tokens=sum(step.tokens for step in record.steps if step.kind == "decode"),
        queue_s=queue_s,
        prefill_s=prefill_s,
        decode_s=decode_s,
        steps=record.steps,
    )
    return Timeline([one])


def _part(style: str, width: float, title: str) -> str:
    return f"<div style='width:{width:.3f}%;height:14px;{style}' title='{title}'></div>"


def _metadata(name: str, thread: int, value: str) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": PROCESS, "tid": thread, "args": {"name": value}}


def _span_events(spans: Sequence[Span], thread: int, offset_s: float) -> Iterator[dict[str, Any]]:
    """Yield a complete event for each span."""
    common = {"cat": spans[0].name, "pid": PROCESS, "tid": thread}
    for span in spans:
        # Both ends are rounded, so that a span remains within the span that contains it.
        start, end = (round((offset_s + at) * 1e6) for at in (span.start_s, span.start_s + span.duration_s))
        arguments = {"tokens": span.tokens, "step": span.step, "requests": span.requests, "kv_bytes": span.kv_bytes}
        arguments = {name: value for name, value in arguments.items() if value}
        yield {**common, "name": span.name, "ph": "X", "ts": start, "dur": end - start, "args": arguments}
