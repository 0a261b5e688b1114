"""The timeline panel: a bar with an explanation for each of the last requests and loads."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import traitlets

from lmx_lab.backend import Backend
from lmx_lab.errors import LabError, counted, format_bytes
from lmx_lab.instrument.timeline import Timeline
from lmx_lab.panels.panel import Panel, bool_field, text_field
from lmx_lab.panels.workbench import Workbench
from lmx_lab.results.figures import format_clock
from lmx_lab.sanitize import clip
from lmx_lab.values.timeline import ModelTimeline, RequestTimeline, Segment
from lmx_lab.wire.admin import Sample

MAX_LANES = 20
"""Maximum number of requests and loads in a view; the newest are shown."""
MAX_PARTS = 60
"""Maximum number of parts of a bar. The shortest slow steps are not marked if there are more."""


class TimelinePanel(Panel):
    """Shows when the last requests waited, computed their prompts and generated tokens, and when models were loaded."""

    SCRIPTS = ("elements.js", "panel.js", "timeline.js")
    STYLES = ("panel.css", "timeline.css")
    FULL_WIDTH = True
    BY_NAME_ONLY = True

    lanes: Any = traitlets.List(allow_none=True, default_value=None).tag(sync=True)
    """The requests and loads, newest first: ``id``, ``title``, ``text`` and ``parts``, each of which has its kind,
    its beginning and its length in percent of the window, and a text. None until the timeline was read."""
    seconds = traitlets.Float().tag(sync=True)
    """Length of the window that the bars show."""
    paused = traitlets.Bool(False).tag(sync=True)
    problem = traitlets.Unicode().tag(sync=True)
    """Why there is no timeline; empty if there is one."""

    def __init__(self, workbench: Workbench) -> None:
        self._timeline = Timeline(())
        self._next_at = 0.0
        """When the timeline is read again (``time.monotonic``)."""
        super().__init__(workbench)

    def tick(self, backend: Backend, sample: Sample | None) -> None:
        super().tick(backend, sample)
        if self.task is None and not self.shown("paused") and time.monotonic() >= self._next_at:
            self.run_job(self._read(backend), lambda _error: None)

    async def _read(self, backend: Backend) -> None:
        began_at = time.monotonic()
        try:
            found = await backend.timeline(60, most=2 * MAX_LANES)
        except LabError as exc:
            if self.workbench.backend is backend and self.shown("problem") != exc.message:
                self.show(problem=exc.message, lanes=[])
            return
        finally:
            # A remote server sends all steps each time, which may take long: reading takes a fifth of the time.
            self._next_at = time.monotonic() + 4 * (time.monotonic() - began_at)
        if self.workbench.backend is not backend or self.shown("paused"):
            return
        timeline = Timeline(found.requests, found.models)
        both: list[RequestTimeline | ModelTimeline] = sorted(
            [*timeline, *timeline.models], key=lambda each: each.at, reverse=True
        )[:MAX_LANES]
        # Requests that have ended stay visible until there is a new one, so that they can be examined.
        is_same = list(timeline) == list(self._timeline) and timeline.models == self._timeline.models
        if not both:
            if self.shown("lanes") is None:
                self.show(lanes=[], problem="")
            return
        if is_same and not self.shown("problem"):
            return
        self._timeline = timeline
        first, last = min(each.at for each in both), max(each.at + each.total_s for each in both)
        percent = 100 / max(last - first, 1e-6)
        lanes = []
        for each in both:
            if isinstance(each, ModelTimeline):
                title, text = f"{each.kind} {clip(each.model, 40)}", str(each.outcome)
            else:
                caches = f"{format_bytes(each.kv_bytes)} of KV caches, " if each.kv_bytes else ""
                end = "running" if each.outcome == "running" else each.code or each.outcome
                title = clip(each.request_id, 20) or "notebook"
                text = f"{counted(each.output_tokens, 'token')}, {caches}{end}"
            parts = [
                [
                    segment.kind,
                    round(percent * (each.at - first + segment.start_s), 3),
                    round(percent * segment.duration_s, 3),
                    f"{segment.kind} {segment.duration_s:.3f} s, from {segment.start_s:.3f} s",
                ]
                for segment in _few(each.segments())
            ]
            lanes.append(
                {
                    "id": _lane_id(each),
                    "title": f"{format_clock(each.at)} {title}",
                    "text": f"{each.total_s:.2f} s, {text}",
                    "parts": parts,
                }
            )
        self.show(lanes=lanes, seconds=last - first, problem="")

    def backend_changed(self) -> None:
        self._timeline = Timeline(())
        self.show(lanes=None, problem="")

    async def do_change(self, fields: Mapping[str, Any]) -> None:
        """Set ``paused``."""
        self.show(paused=bool_field(fields, "paused"))

    async def do_explain(self, fields: Mapping[str, Any]) -> str:
        """Return the explanation of a request."""
        wanted = text_field(fields, "lane", limit=64)
        at = next((at for at, each in enumerate(self._timeline) if _lane_id(each) == wanted), None)
        if at is not None:
            return self._timeline.explain(at)
        change = next((each for each in self._timeline.models if _lane_id(each) == wanted), None)
        if change is None:
            return "This request is no longer shown; see lab.timeline()."
        took = "has been running for" if change.outcome == "running" else f"ended with {change.outcome!r} after"
        stages = [f"{stage.name} took {stage.duration_s:.3f} s" for stage in change.stages]
        summary = f"The {change.kind} of {change.model} {took} {change.total_s:.3f} s."
        return "\n".join([summary, *stages, change.message])

    def snapshot_html(self) -> str:
        return f"<div>Timeline: server {self.server['state']}</div>{self._timeline._repr_html_()}"


def _lane_id(one: RequestTimeline | ModelTimeline) -> str:
    if isinstance(one, ModelTimeline):
        return f"{one.kind}-{one.at:.6f}"
    return f"{one.request_id[:32]}-{one.index}-{one.at:.6f}"


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
