"""Plot medians with intervals: lines over a swept value, or bars if there is only one value.

The figures need not be closed, because pyplot is not used.
"""

from __future__ import annotations

import io
import itertools
import math
import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from lmx_lab.bench.summaries import CASE, MEASURED, METRICS, TOTAL, Samples, summary
from lmx_lab.errors import InvalidRequestError
from lmx_lab.extras import import_optional, optional_imports
from lmx_lab.results.statistics import LEVEL

with optional_imports("a plot"):
    from matplotlib.figure import Figure

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.container import Container

LABELS = {
    **{name: metric.label for name, metric in METRICS.items()},
    **{"concurrency": "concurrent requests", "prompt_tokens_wanted": "prompt tokens"},
}
MAX_LINES = 20
PADDING_INCHES = 0.1
UNKNOWN = "not known"


class NotebookFigure(Figure):
    """A matplotlib figure that notebooks display without pyplot."""

    def _repr_png_(self) -> bytes:
        out = io.BytesIO()
        self.savefig(out, format="png", dpi=110)
        return out.getvalue()

    def widen(self, *texts: Artist) -> None:
        """Widen the figure if its longest text would be cut otherwise."""
        longest = max(text.get_window_extent().width for text in texts) / self.dpi
        self.set_figwidth(max(self.get_figwidth(), longest + 2 * PADDING_INCHES))


def by_concurrency(
    samples: Samples, *, metrics: Sequence[str] = (TOTAL, "decode_tok_s", "ttft_ms"), level: float = LEVEL
) -> NotebookFigure:
    """Plot the median of each metric over the number of concurrent requests, with bars for intervals that are known.

    There is a line for each combination of the other values that differ, such as the target. Percentiles of the time
    between tokens are computed for each answer first: ``itl_ms_p99`` is the median of the answers' 99th percentiles.
    If all requests have the same concurrency, there are bars with their values. A value that was not measured is not
    drawn; a bar or a plot without values says that they are not known.

    Raises:
        InvalidRequestError: a metric is unknown, there is no measured request, or there would be more than 20 lines.
        MissingPackageError: matplotlib or pandas is not installed.
    """
    return _chart(samples, "concurrency", metrics, level)


def by_prompt_length(
    samples: Samples, *, metrics: Sequence[str] = ("prefill_tok_s", "ttft_ms", "decode_tok_s"), level: float = LEVEL
) -> NotebookFigure:
    """Plot the median of each metric over the length of the prompts.

    Raises:
        InvalidRequestError, MissingPackageError: as ``by_concurrency``.
    """
    return _chart(samples, "prompt_tokens_wanted", metrics, level)


def _chart(samples: Samples, over: str, metrics: Sequence[str], level: float) -> NotebookFigure:
    if unknown := [name for name in metrics if name not in METRICS]:
        raise InvalidRequestError(
            f"metrics: unknown metric {', '.join(unknown)}; available are {', '.join(METRICS)}", param="metrics"
        )
    if not metrics:
        raise InvalidRequestError(f"metrics is empty; give at least one, such as {TOTAL!r}", param="metrics")
    table = summary(samples, level=level)
    if not len(table):
        raise InvalidRequestError("there is nothing to plot: the table has no requests besides warm-up requests")
    lines = _lines(table, over)
    width, height = 4.2 * len(metrics), 3.6
    chart = NotebookFigure(figsize=(width, height))
    chart.set_layout_engine("constrained", w_pad=PADDING_INCHES)
    panels = chart.subplots(1, len(metrics), squeeze=False)[0]
    handles, *_ = [_draw(panel, lines, over, metric) for panel, metric in zip(panels, metrics, strict=True)]
    # The values that all lines have in common.
    same = [name for name in _key_columns(table, over) if name != "run" and table[name].nunique(dropna=False) == 1]
    text = " · ".join(_parts(same, table[same].iloc[0]))
    title = chart.suptitle(textwrap.fill(text, 55 * len(metrics)), fontsize="medium")
    below = _legend(chart, handles, list(lines)) if len(lines) > 1 else 0.0
    chart.set_figheight(height + below)
    chart.widen(title, *chart.legends)
    return chart


def _legend(chart: NotebookFigure, handles: Sequence[Any], names: Sequence[str]) -> float:
    """Draw a legend in as few rows as fit into the width of the figure, and return its height in inches."""
    rows = 0
    while True:
        rows += 1
        columns = math.ceil(len(names) / rows)
        legend = chart.legend(handles, names, loc="outside lower center", ncols=columns, frameon=False)
        box = legend.get_window_extent()
        if columns == 1 or box.width < chart.bbox.width:
            return float(box.height / chart.dpi)
        legend.remove()


def _lines(table: pd.DataFrame, over: str) -> dict[str, pd.DataFrame]:
    """Return the rows of each line by its name, which contains the values that differ between lines."""
    differing = [name for name in _key_columns(table, over) if table[name].nunique(dropna=False) > 1]
    if not differing:
        return {"": table}
    groups = list(table.groupby(differing, sort=False, dropna=False))
    if len(groups) > MAX_LINES:
        raise InvalidRequestError(
            f"the plot would have {len(groups)} lines; the limit is {MAX_LINES}, so choose rows by "
            f"{' or '.join(differing)}"
        )
    lines: dict[str, pd.DataFrame] = {}
    for key, group in groups:
        text = " · ".join(_parts(differing, key)) or UNKNOWN
        name = text if len(text) <= 60 else f"{text[:59]}…"
        # Names that were shortened may be equal.
        lines[name if name not in lines else f"{name} ({len(lines) + 1})"] = group
    return lines


def _key_columns(table: pd.DataFrame, over: str) -> list[str]:
    """Return the columns that identify a line."""
    return [name for name in ("run", *MEASURED, *CASE) if name in table and name != over]


def _parts(columns: Sequence[str], values: Iterable[Any]) -> list[str]:
    isna = import_optional("pandas", "a plot").isna
    return [_describe(column, value) for column, value in zip(columns, values, strict=True) if not isna(value)]


def _describe(column: str, value: Any) -> str:
    match column:
        case "prompt_tokens_wanted":
            return f"prompt {value}"
        case "output_tokens_wanted":
            return f"answer {value}"
        case "concurrency":
            return f"{value} concurrent"
        case "cache":
            return f"{value} cache"
        case "threads":
            return f"{value} thread{'' if value == 1 else 's'}"
        case _:
            # matplotlib would take a dollar sign for the start of a formula.
            return str(value).replace("$", r"\$")


def _draw(panel: Axes, lines: dict[str, pd.DataFrame], over: str, metric: str) -> list[Container]:
    """Draw the lines or bars, and return what represents each of them in the legend."""
    panel.set_ylabel(LABELS[metric])
    panel.grid(alpha=0.3)
    panel.set_axisbelow(True)
    places = sorted({int(x) for rows in lines.values() for x in rows[over]})
    drawn: list[Container] = []
    if len(places) == 1:
        drawn = _draw_bars(panel, lines, metric)
        panel.set_xlabel(_describe(over, places[0]))
    else:
        # Markers distinguish lines without colours. Together with matplotlib's ten colours, each line has its own pair.
        for marker, rows in zip(itertools.cycle("osD^vPX"), lines.values(), strict=False):
            ordered = rows.sort_values(over)
            middle = ordered[metric].to_numpy(dtype=float)
            # matplotlib draws no bar if its length is NaN.
            bars = [abs(ordered[f"{metric}_{end}"].to_numpy(dtype=float) - middle) for end in ("low", "high")]
            at = ordered[over].to_numpy(dtype=float)
            drawn.append(panel.errorbar(at, middle, yerr=bars, marker=marker, markersize=5, capsize=3))
        # Sweeps usually double their values.
        if places[-1] >= 4 * places[0]:
            panel.set_xscale("log", base=2)
        panel.set_xticks(places[:: max(1, math.ceil(len(places) / 8))])
        panel.set_xticks([], minor=True)
        panel.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        panel.set_xlabel(LABELS[over])
    # After the data, because matplotlib does not adapt limits that were set.
    panel.set_ylim(bottom=0)
    if all(rows[metric].isna().all() for rows in lines.values()):
        panel.text(0.5, 0.5, UNKNOWN, transform=panel.transAxes, ha="center")
        panel.set_yticks([])
    return drawn


def _draw_bars(panel: Axes, lines: dict[str, pd.DataFrame], metric: str) -> list[Container]:
    """Draw one bar with its value for each line, because a line with a single point is not visible."""
    values = [float(rows[metric].iloc[0]) for rows in lines.values()]
    drawn: list[Container] = []
    for at, (value, rows) in enumerate(zip(values, lines.values(), strict=True)):
        ends = [[abs(float(rows[f"{metric}_{end}"].iloc[0]) - value)] for end in ("low", "high")]
        # matplotlib's ten colours repeat after ten bars.
        bar = panel.bar(at, value, yerr=ends, capsize=3, width=0.6, hatch="//" if at >= 10 else None)
        drawn.append(bar)
        # The labels of more than five bars do not fit side by side.
        rotation = 90 if len(lines) > 5 else 0
        if math.isfinite(value):
            label = f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
            panel.bar_label(bar, [label], padding=3, rotation=rotation)
        elif any(map(math.isfinite, values)):
            # bar_label omits the label of NaN.
            panel.annotate(UNKNOWN, (at, 0), (0, 3), textcoords="offset points", ha="center", rotation=rotation)
    panel.set_xticks([])
    panel.set_xlim(-1, len(lines))
    panel.margins(y=0.15)
    return drawn
