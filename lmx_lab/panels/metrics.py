"""The metrics panel: speed, requests and memory, as numbers, charts and a data frame."""

from __future__ import annotations

import asyncio
import html
import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import traitlets

from lmx_lab.backend import Backend
from lmx_lab.errors import InvalidRequestError, LabError, counted
from lmx_lab.panels.panel import Panel, bool_field, text_field
from lmx_lab.panels.summary import CHARTS, FIELDS, line_charts, values_of
from lmx_lab.panels.workbench import KEPT_S, Workbench
from lmx_lab.results.figures import GAP_S, format_clock
from lmx_lab.results.frames import dtypes_of, make_table
from lmx_lab.results.tables import UNBROKEN, html_table
from lmx_lab.sanitize import clip
from lmx_lab.wire.admin import Sample

WINDOWS_MIN = (1, 5, 15)
MAX_POINTS = 400
"""Maximum number of points in a window. A chart of the usual width has fewer pixels."""
MAX_FAILURES = 10
MAX_CLIENTS = 30


NO_VALUES = (math.nan,) * len(FIELDS)


class MetricsPanel(Panel):
    """Shows speed, requests and memory over the last minutes; ``df`` has the samples.

    Samples are also recorded while the view is paused.
    """

    SCRIPTS = ("uplot/uPlot.iife.min.js", "elements.js", "panel.js", "metrics.js")
    STYLES = ("panel.css", "uplot/uPlot.min.css", "metrics.css")

    charts: Any = traitlets.List().tag(sync=True)
    """``MetricChart`` as dicts; the columns of ``frame`` are in their order."""
    minutes = traitlets.Int(1).tag(sync=True)
    paused = traitlets.Bool(False).tag(sync=True)
    job = traitlets.Unicode().tag(sync=True)
    """Progress of a measurement; empty if there is none."""
    clients: Any = traitlets.List().tag(sync=True)
    """``{id, cells}`` of each request that waits or runs, oldest first; at most ``MAX_CLIENTS``."""
    failures: Any = traitlets.List().tag(sync=True)
    """One text for each of the last failed requests of all clients, newest first; at most ``MAX_FAILURES``."""
    now: Any = traitlets.List().tag(sync=True)
    """The current values, one for each column; empty if there are none."""
    end = traitlets.Float().tag(sync=True)
    """The right edge of the window in seconds since 1970. The times in ``frame`` are relative to it, because a float32
    cannot represent seconds since 1970."""
    frame = traitlets.Bytes().tag(sync=True)
    """The window in little-endian float32: a column of times, then one column for each value; NaN is a gap."""

    def __init__(self, workbench: Workbench) -> None:
        self._listing: asyncio.Task[None] | None = None
        samples = workbench.history.samples
        drawn = _drawn(samples, window_s=60 * self.minutes) if samples else {}
        super().__init__(workbench, charts=[chart.shown() for chart in CHARTS], **drawn)

    @property
    def samples(self) -> list[Sample]:
        """The samples of the last 15 minutes, two per second, oldest first."""
        return self.workbench.history.samples

    @property
    def df(self) -> Any:
        """The samples as a pandas data frame: ``time`` (UTC), and the values, whose names have their units.

        Raises:
            MissingPackageError: pandas is not installed.
        """
        dtypes = dtypes_of(Sample)
        rows = [(sample.at, *values_of(sample)) for sample in self.samples]
        return make_table(rows, {"time": "time", **{name: dtypes[name] for name in FIELDS}})

    def tick(self, backend: Backend, sample: Sample | None) -> None:
        super().tick(backend, sample)
        if (job := backend.job) != self.shown("job"):
            self.show(job=job)
        is_busy = sample is not None and sample.active_requests > 0
        if (is_busy or self.shown("clients")) and (self._listing is None or self._listing.done()):
            self._listing = self.workbench.create_task(self._list_clients(backend), "list the running requests")
        if (failures := self._failures()) != self.shown("failures"):
            self.show(failures=failures)
        if sample is not None and not self.shown("paused"):
            self._draw()
        elif self.shown("server")["state"] in {"stopped", "unreachable"} and self.shown("now"):
            self.show(now=[])

    async def _list_clients(self, backend: Backend) -> None:
        try:
            found = await backend.clients()
        except LabError:
            # The server has stopped, or is of a version that does not list them.
            found = ()
        clients = []
        for each in found[:MAX_CLIENTS]:
            what = f"prompt of {counted(each.prompt_tokens, 'token')}" if each.kind == "chat" else each.kind
            if each.state == "queued":
                what = "queued"
            elif each.completion_tokens:
                what = counted(each.completion_tokens, "token")
            name = each.client or "this notebook"
            cells = (name, f"{clip(each.model, 80)}: {what}", f"{each.age_s:.0f} s")
            clients.append({"id": each.id, "cells": cells})
        self.show(clients=clients)

    async def do_stop(self, fields: Mapping[str, Any]) -> str:
        """Stop a running request, given its id as ``request_id``."""
        return await self.workbench.backend.stop_request(text_field(fields, "request_id"))

    def _failures(self) -> list[str]:
        failed = [ended for ended in self.workbench.history.requests if ended.event.finish_reason == "error"]
        return [
            # A request that found no model has no name of one.
            f"{', '.join(filter(None, (format_clock(ended.at), ended.event.kind, clip(ended.event.model, 80))))}: "
            f"{ended.event.code}"
            for ended in failed[: -MAX_FAILURES - 1 : -1]
        ]

    async def do_change(self, fields: Mapping[str, Any]) -> None:
        """Set ``minutes``, the length of the window, and ``paused``; a missing one stays unchanged."""
        minutes = fields.get("minutes", self.shown("minutes"))
        paused = bool_field(fields, "paused", default=self.shown("paused"))
        if isinstance(minutes, bool) or minutes not in WINDOWS_MIN:
            raise InvalidRequestError(f"minutes is {minutes!r:.40}; it must be one of {WINDOWS_MIN}", param="minutes")
        self.show(minutes=minutes, paused=paused)
        self._draw()

    def _draw(self) -> None:
        samples = self.samples
        if self.shown("paused"):
            samples = [sample for sample in samples if sample.at <= self.shown("end")]
        if samples:
            self.show(**_drawn(samples, window_s=60 * self.shown("minutes")))

    def snapshot_html(self) -> str:
        samples = self.samples
        rows = []
        for chart in CHARTS:
            for name, field in chart.fields.items():
                cells, value_of = [f"{chart.title}: {name}"], attrgetter(field)
                for value in (value_of(samples[-1]), max(map(value_of, samples))) if samples else (None, None):
                    text = "none yet" if value is None else f"{value:,.{chart.digits}f} {chart.unit}".rstrip()
                    cells.append(text)
                rows.append(cells)
        names = ("measurement", "latest", f"highest of {counted(len(samples), 'sample')}")
        table = html_table(names, rows, caption=f"Metrics: server {self.server['state']}", style=UNBROKEN)
        failures = "".join(f"<li>{html.escape(text)}</li>" for text in self._failures())
        table += f"<div>Failed requests, newest first:</div><ul>{failures}</ul>" if failures else ""
        if samples:
            charts = line_charts(_recent(samples, KEPT_S))
            table += "".join(f"<div>{chart.image_html()}</div>" for chart in charts)
        return table


def _drawn(samples: Sequence[Sample], *, window_s: float) -> dict[str, Any]:
    """Return the traits of one frame."""
    end = samples[-1].at
    return {
        "end": end,
        "now": list(values_of(samples[-1])),
        "frame": pack_columns(window(samples, window_s=window_s), end),
    }


def window(samples: Sequence[Sample], *, window_s: float) -> list[tuple[float, ...]]:
    """Return the samples of the last ``window_s`` seconds as at most ``MAX_POINTS`` rows of a time and the values.

    If a point represents several samples, it has the highest of each value, so that no peak is lost in a long window.
    Points lie on a grid of absolute time, so that the curve moves without flickering. A gap is a row of NaN.
    """
    width_s = window_s / MAX_POINTS
    rows: list[tuple[float, ...]] = []
    last = -math.inf
    for sample in _recent(samples, window_s):
        at, values = sample.at, values_of(sample)
        if rows and at - last > GAP_S:
            rows.append(((at + last) / 2, *NO_VALUES))
        elif rows and at // width_s == last // width_s:
            values = tuple(map(max, values, rows.pop()[1:]))
        rows.append((at, *values))
        last = at
    return rows[-MAX_POINTS:]


def _recent(samples: Sequence[Sample], window_s: float) -> list[Sample]:
    """Return the samples in the window in ascending order of time, without those from before the clock was set
    back."""
    recent: list[Sample] = []
    for sample in reversed(samples):
        if recent and (sample.at > recent[-1].at or sample.at < recent[0].at - window_s):
            break
        if not recent or sample.at < recent[-1].at:
            recent.append(sample)
    return recent[::-1]


def pack_columns(rows: Iterable[Sequence[float]], end: float) -> bytes:
    """Convert rows to columns of little-endian float32, with times relative to ``end``."""
    flat = array("f")
    for number, column in enumerate(zip(*rows, strict=True)):
        flat.extend(column if number else (at - end for at in column))
    return flat.tobytes()
