"""The metrics panel: what the lab does now and did in the last minutes, as figures, charts and a data frame."""

from __future__ import annotations

import html
import math
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter
from typing import Any

import traitlets

from lmx_lab.backend import Source
from lmx_lab.errors import InvalidRequestError
from lmx_lab.frames import pandas_for
from lmx_lab.panels.panel import Panel
from lmx_lab.panels.workbench import Workbench
from lmx_lab.wire.admin import Sample

WINDOWS_MIN = (1, 5, 15)
MOST_POINTS = 400
"""Of a window; more than a chart of usual width has pixels for."""
GAP_S = 3.0
"""Samples further apart are not joined by a line: in between nobody knows."""


@dataclass(frozen=True, kw_only=True)
class Chart:
    title: str
    unit: str
    digits: int
    """After the point."""
    least: float
    """The axis goes at least so far."""
    names: tuple[str, ...]
    lines: int
    """So many of the names are drawn; the others are figures only."""
    fields: tuple[str, ...]
    """Of a sample, one for each name."""

    def shown(self) -> dict[str, Any]:
        title = f"{self.title}, {self.unit}" if self.unit else self.title
        return {**asdict(self), "title": title}


CHARTS = (
    # Reading is so much faster than writing that on one axis nothing would be seen of the latter.
    Chart(
        title="Writing",
        unit="tokens/s",
        digits=1,
        least=1,
        names=("decode",),
        lines=1,
        fields=("decode_tokens_per_second",),
    ),
    Chart(
        title="Reading",
        unit="tokens/s",
        digits=1,
        least=1,
        names=("prompt", "encoded"),
        lines=2,
        fields=("prompt_tokens_per_second", "encoded_tokens_per_second"),
    ),
    Chart(
        title="Requests",
        unit="",
        digits=0,
        least=3,
        names=("active", "queued"),
        lines=2,
        fields=("active_requests", "queued_requests"),
    ),
    Chart(
        title="Memory",
        unit="GB",
        digits=2,
        least=0.01,
        names=("active", "cache", "peak", "of"),
        lines=3,
        fields=("memory_active_gb", "memory_cache_gb", "memory_peak_gb", "memory_total_gb"),
    ),
)
FIELDS = tuple(field for chart in CHARTS for field in chart.fields)
figures = attrgetter(*FIELDS)
NOTHING = (math.nan,) * len(FIELDS)


class MetricsPanel(Panel):
    """Speed, requests and memory over the last minutes; ``df`` has the samples behind it.

    Sampling is the workbench's and goes on while the view is paused.
    """

    SCRIPTS = ("uplot/uPlot.iife.min.js", "panel.js", "metrics.js")
    STYLES = ("panel.css", "uplot/uPlot.min.css", "metrics.css")
    REQUESTS = frozenset({"change"})

    charts: Any = traitlets.List().tag(sync=True)
    """What is drawn: ``Chart`` as dicts, their columns in this order."""
    minutes = traitlets.Int(1).tag(sync=True)
    paused = traitlets.Bool(False).tag(sync=True)
    job = traitlets.Unicode().tag(sync=True)
    """How far a measurement is; empty while there is none."""
    now: Any = traitlets.List().tag(sync=True)
    """The figures of now, a column each; none while there are none."""
    end = traitlets.Float().tag(sync=True)
    """The window's right edge, seconds since 1970. The frame's times are relative to it, since a float32 cannot hold
    seconds since 1970."""
    frame = traitlets.Bytes().tag(sync=True)
    """The window as little-endian float32: a column of times, then a column for each figure; NaN is a gap."""

    def __init__(self, workbench: Workbench) -> None:
        samples = workbench.history.samples
        drawn = _drawn(samples, window_s=60 * self.minutes) if samples else {}
        super().__init__(workbench, charts=[chart.shown() for chart in CHARTS], **drawn)

    @property
    def samples(self) -> list[Sample]:
        """Twice a second, of the last quarter of an hour; the oldest first."""
        return self.workbench.history.samples

    @property
    def df(self) -> Any:
        """The samples as a pandas data frame: ``time`` (UTC), and the figures with their units in the names.

        Raises:
            ImportError: pandas is not installed.
        """
        pandas = pandas_for("df")
        samples = self.samples
        frame = pandas.DataFrame([figures(sample) for sample in samples], columns=list(FIELDS))
        times = array("d", (sample.at for sample in samples))
        frame.insert(0, "time", pandas.to_datetime(times, unit="s", utc=True))
        return frame

    def tick(self, source: Source, sample: Sample | None) -> None:
        super().tick(source, sample)
        if (job := self.workbench.job) != self.shown("job"):
            self.show(job=job)
        if sample is not None and not self.shown("paused"):
            self._draw()
        elif self.shown("server")["state"] in {"stopped", "unreachable"} and self.shown("now"):
            self.show(now=[])

    async def do_change(self, fields: Mapping[str, Any]) -> None:
        """``minutes`` of the window, ``paused``: what is left out stays."""
        minutes = fields.get("minutes", self.shown("minutes"))
        paused = fields.get("paused", self.shown("paused"))
        if isinstance(minutes, bool) or minutes not in WINDOWS_MIN:
            raise InvalidRequestError(f"minutes is {minutes!r:.40}; it must be one of {WINDOWS_MIN}", param="minutes")
        if not isinstance(paused, bool):
            raise InvalidRequestError(f"paused is {paused!r:.40}; it must be true or false", param="paused")
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
        rows = "".join(_snapshot_row(chart, at, samples) for chart in CHARTS for at in range(len(chart.fields)))
        left = "style='text-align:left'"
        head = "".join(f"<th {left}>{name}</th>" for name in ("figure", "last", f"highest in {len(samples)} samples"))
        state = html.escape(self.server["state"])
        return f"<table><caption>Metrics: server {state}</caption><thead><tr>{head}</tr></thead>{rows}</table>"


def _snapshot_row(chart: Chart, at: int, samples: Sequence[Sample]) -> str:
    field = attrgetter(chart.fields[at])
    last, most = (field(samples[-1]), max(map(field, samples))) if samples else (None, None)
    name = "total" if at >= chart.lines else chart.names[at]
    cells = (f"{chart.title}: {name}", _shown(chart, last), _shown(chart, most))
    return "<tr>" + "".join(f"<td style='text-align:left'>{html.escape(cell)}</td>" for cell in cells) + "</tr>"


def _shown(chart: Chart, value: float | None) -> str:
    return "none yet" if value is None else f"{value:,.{chart.digits}f} {chart.unit}".rstrip()


def _drawn(samples: Sequence[Sample], *, window_s: float) -> dict[str, Any]:
    """The traits of one frame."""
    end = samples[-1].at
    return {"end": end, "now": list(figures(samples[-1])), "frame": packed(window(samples, window_s=window_s), end)}


def window(samples: Sequence[Sample], *, window_s: float) -> list[tuple[float, ...]]:
    """The last seconds as rows of time and figures, at most ``MOST_POINTS``.

    Of samples that share a point, each figure's highest is kept: a peak must not vanish because the window is long.
    Points lie on a grid of absolute time, so that the curve moves and does not flicker. A gap is a row of NaN.
    """
    width_s = window_s / MOST_POINTS
    rows: list[tuple[float, ...]] = []
    last = -math.inf
    for sample in _recent(samples, window_s):
        at, values = sample.at, figures(sample)
        if rows and at - last > GAP_S:
            rows.append(((at + last) / 2, *NOTHING))
        elif rows and at // width_s == last // width_s:
            values = tuple(map(max, values, rows.pop()[1:]))
        rows.append((at, *values))
        last = at
    return rows[-MOST_POINTS:]


def _recent(samples: Sequence[Sample], window_s: float) -> list[Sample]:
    """Those of the window, in ascending time: what is older than a clock that was set back is left out."""
    recent: list[Sample] = []
    for sample in reversed(samples):
        if recent and (sample.at > recent[-1].at or sample.at < recent[0].at - window_s):
            break
        if not recent or sample.at < recent[-1].at:
            recent.append(sample)
    return recent[::-1]


def packed(rows: Iterable[Sequence[float]], end: float) -> bytes:
    """Rows as columns of little-endian float32, times relative to ``end``."""
    flat = array("f")
    for number, column in enumerate(zip(*rows, strict=True)):
        flat.extend(column if number else (at - end for at in column))
    if sys.byteorder == "big":
        flat.byteswap()
    return flat.tobytes()
