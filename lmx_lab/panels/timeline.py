"""The timeline panel: what the engine did for the last requests, one bar for each, with an explanation."""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import Any

import traitlets

from lmx_lab.backend import Backend
from lmx_lab.errors import InvalidRequestError
from lmx_lab.instrument.timeline import Timeline
from lmx_lab.panels.charts import format_clock
from lmx_lab.panels.panel import Panel, text_field
from lmx_lab.panels.text import clip, table_row
from lmx_lab.panels.workbench import Workbench
from lmx_lab.values.timeline import RequestTimeline, Segment
from lmx_lab.wire.admin import Sample

WINDOW_S = 60.0
"""Requests that ended earlier are not shown."""
MAX_LANES = 20
"""Maximum number of requests in a view; the newest are shown."""
MAX_PARTS = 60
"""Maximum number of parts of a bar. The shortest slow steps are not marked if there are more."""
GONE = "This request is no longer shown; see lab.timeline()."


class TimelinePanel(Panel):
    """Shows when each of the last requests waited, computed its prompt, and generated tokens."""

    SCRIPTS = ("elements.js", "panel.js", "keyed.js", "timeline.js")
    STYLES = ("panel.css", "timeline.css")
    REQUESTS = frozenset({"change", "explain"})
    FULL_WIDTH = True
    BY_NAME_ONLY = True

    lanes: Any = traitlets.List().tag(sync=True)
    """The requests, the newest first: ``id``, ``title``, ``text`` and ``parts``, each of which has its kind, its
    beginning and its length in percent of the window, and a text."""
    seconds = traitlets.Float().tag(sync=True)
    """Length of the window that the bars show."""
    paused = traitlets.Bool(False).tag(sync=True)
    problem = traitlets.Unicode().tag(sync=True)
    """Why there is no timeline; empty if there is one."""

    def __init__(self, workbench: Workbench) -> None:
        self._timeline = Timeline(())
        super().__init__(workbench)

    def tick(self, backend: Backend, sample: Sample | None) -> None:
        super().tick(backend, sample)
        if self.shown("paused"):
            return
        try:
            requests = backend.timelines(WINDOW_S, most=MAX_LANES)
        except InvalidRequestError as exc:
            if self.shown("problem") != exc.message:
                self.show(problem=exc.message, lanes=[])
            return
        # Requests that have ended stay visible until there is a new one, so that they can be examined.
        if requests and (self.shown("problem") or list(requests) != list(self._timeline)):
            self._timeline = Timeline(requests)
            first, last = min(each.at for each in requests), max(each.at + each.total_s for each in requests)
            lanes = [_lane(each, first, max(last - first, 1e-6)) for each in reversed(requests)]
            self.show(lanes=lanes, seconds=last - first, problem="")

    def backend_changed(self) -> None:
        self._timeline = Timeline(())
        self.show(lanes=[], problem="")

    async def do_change(self, fields: Mapping[str, Any]) -> None:
        """Set ``paused``."""
        paused = fields.get("paused")
        if not isinstance(paused, bool):
            raise InvalidRequestError(f"paused is {paused!r:.40}; it must be true or false", param="paused")
        self.show(paused=paused)

    async def do_explain(self, fields: Mapping[str, Any]) -> str:
        """Return the explanation of a request."""
        wanted = text_field(fields, "lane", limit=64)
        at = next((at for at, each in enumerate(self._timeline) if _lane_id(each) == wanted), None)
        return GONE if at is None else self._timeline.explain(at)

    def snapshot_html(self) -> str:
        head = table_row(["arrival", "request", "queued", "prefill", "decode", "tokens", "end"], "th")
        rows = "".join(
            table_row(
                [
                    format_clock(each.at),
                    _name(each),
                    *(f"{seconds:.3f} s" for seconds in (each.queue_s, each.prefill_s, each.decode_s)),
                    each.output_tokens,
                    each.code or each.outcome,
                ]
            )
            for each in self._timeline
        )
        state = html.escape(self.server["state"])
        return f"<table><caption>Timeline: server {state}</caption><thead>{head}</thead>{rows}</table>"


def _lane_id(one: RequestTimeline) -> str:
    return f"{one.request_id[:32]}-{one.index}-{one.at:.6f}"


def _name(one: RequestTimeline) -> str:
    return clip(one.request_id, 20) or "notebook"


def _lane(one: RequestTimeline, first: float, seconds: float) -> dict[str, Any]:
    end = "running" if one.outcome == "running" else one.code or one.outcome
    return {
        "id": _lane_id(one),
        "title": f"{format_clock(one.at)} {_name(one)}",
        "text": f"{one.total_s:.2f} s, {one.output_tokens} tokens, {end}",
        "parts": [_part(segment, one.at - first, seconds) for segment in _few(one.segments())],
    }


def _few(segments: list[Segment]) -> list[Segment]:
    """Return at most ``MAX_PARTS`` segments: the longest ones that are slow or pauses, and the others merged."""
    if len(segments) <= MAX_PARTS:
        return segments
    marked = [segment for segment in segments if segment.kind in ("slow", "paused")]
    kept = sorted(marked, key=lambda segment: -segment.duration_s)[: MAX_PARTS // 2 - 2]
    merged: list[Segment] = []
    for segment in segments:
        kind = segment.kind if segment in kept or segment.kind not in ("slow", "paused") else "decode"
        if merged and merged[-1].kind == kind == "decode":
            last = merged[-1]
            merged[-1] = Segment(kind, last.start_s, last.duration_s + segment.duration_s)
        else:
            merged.append(Segment(kind, segment.start_s, segment.duration_s))
    return merged[:MAX_PARTS]


def _part(segment: Segment, offset_s: float, seconds: float) -> list[Any]:
    left, width = (round(100 * value / seconds, 3) for value in (offset_s + segment.start_s, segment.duration_s))
    return [segment.kind, left, width, f"{segment.kind} {segment.duration_s:.3f} s, from {segment.start_s:.3f} s"]
