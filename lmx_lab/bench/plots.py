"""Plot medians with intervals: lines over a swept value, or bars if there is only one value.

The figures need not be closed, because pyplot is not used.
"""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from lmx_lab.bench.intervals import LEVEL
from lmx_lab.bench.statistics import CASE, MEASURED, METRICS, TOTAL, Samples, summary
from lmx_lab.errors import InvalidRequestError
from lmx_lab.extras import import_optional, optional_imports

with optional_imports("a plot"):
    from matplotlib.figure import Figure

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

LABELS = {
    TOTAL: "all requests together, tok/s",
    "ttft_ms": "time to first token, ms",
    "itl_ms_p50": "time between pieces, ms (median of each answer)",
    "itl_ms_p95": "time between pieces, ms (95th percentile of each answer)",
    "itl_ms_p99": "time between pieces, ms (99th percentile of each answer)",
    "prefill_tok_s": "prefill, tok/s",
    "decode_tok_s": "decode per request, tok/s",
    "e2e_ms": "whole answer, ms",
    "queue_ms": "time in queue, ms",
    "server_ttft_ms": "time to first token (server), ms",
    "server_prefill_tok_s": "prefill (server), tok/s",
    "server_decode_tok_s": "decode (server), tok/s",
    "late_ms": "delay of sending, ms",
    "concurrency": "concurrent requests",
    "prompt_tokens_wanted": "prompt tokens",
}
BY_CONCURRENCY = (TOTAL, "decode_tok_s", "ttft_ms")
BY_PROMPT_LENGTH = ("prefill_tok_s", "ttft_ms", "decode_tok_s")
PANEL_INCHES = (4.2, 3.6)
MAX_LINES = 20
MAX_NAME_CHARACTERS = 60
LEGEND_CHARACTERS = 55
"""Length of all names in a row of the legend, per panel."""
LEGEND_ROW_INCHES = 0.22
TITLE_CHARACTERS = 55


class NotebookFigure(Figure):
    """A matplotlib figure that notebooks display without pyplot."""

    def _repr_png_(self) -> bytes:
        out = io.BytesIO()
        self.savefig(out, format="png", dpi=110)
        return out.getvalue()


def by_concurrency(
    samples: Samples, *, metrics: Sequence[str] = BY_CONCURRENCY, level: float = LEVEL
) -> NotebookFigure:
    """Plot the median of each metric over the number of concurrent requests, with bars for intervals that are known.

    There is a line for each combination of the other values that differ, such as the target. Percentiles of the time
    between tokens are computed for each answer first: ``itl_ms_p99`` is the median of the answers' 99th percentiles.

    Raises:
        InvalidRequestError: a metric is unknown, there is no measured request, or there would be more than 20 lines.
        MissingPackageError: matplotlib or pandas is not installed.
    """
    return _chart(samples, "concurrency", metrics, level)


def by_prompt_length(
    samples: Samples, *, metrics: Sequence[str] = BY_PROMPT_LENGTH, level: float = LEVEL
) -> NotebookFigure:
    """Plot the median of each metric over the length of the prompts.

    Raises:
        InvalidRequestError, MissingPackageError: as ``by_concurrency``.
    """
    return _chart(samples, "prompt_tokens_wanted", metrics, level)


def _chart(samples: Samples, over: str, metrics: Sequence[str], level: float) -> NotebookFigure:
    if unknown := [name for name in metrics if name not in (*METRICS, TOTAL)]:
        known = ", ".join((TOTAL, *METRICS))
        raise InvalidRequestError(
            f"metrics: unknown metric {', '.join(unknown)}; available are {known}", param="metrics"
        )
    if not metrics:
        raise InvalidRequestError(f"metrics is empty; give at least one, such as {TOTAL!r}", param="metrics")
    table = summary(samples, level=level)
    if not len(table):
        raise InvalidRequestError("there is nothing to plot: the table has no requests besides warm-up requests")
    lines = _lines(table, over)
    per_row = max(1, LEGEND_CHARACTERS * len(metrics) // max(len(name) + 8 for name in lines))
    legend_rows = math.ceil(len(lines) / per_row) if len(lines) > 1 else 0
    width, height = PANEL_INCHES
    chart = NotebookFigure(
        figsize=(width * len(metrics), height + legend_rows * LEGEND_ROW_INCHES), layout="constrained"
    )
    panels = chart.subplots(1, len(metrics), squeeze=False)[0]
    for panel, metric in zip(panels, metrics, strict=True):
        _draw(panel, lines, over, metric)
    chart.suptitle(textwrap.fill(_title(table, over), TITLE_CHARACTERS * len(metrics)), fontsize="medium")
    if legend_rows:
        handles, names = panels[0].get_legend_handles_labels()
        chart.legend(handles, names, loc="outside lower center", ncols=min(per_row, len(lines)), frameon=False)
    return chart


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
        name = _name(differing, key)
        # Names that were shortened may be equal.
        lines[name if name not in lines else f"{name} ({len(lines) + 1})"] = group
    return lines


def _key_columns(table: pd.DataFrame, over: str) -> list[str]:
    """Return the columns that identify a line."""
    return [name for name in ("run", *MEASURED, *CASE) if name in table and name != over]


def _title(table: pd.DataFrame, over: str) -> str:
    """Return the values that all lines have in common."""
    same = [name for name in _key_columns(table, over) if name != "run" and table[name].nunique(dropna=False) == 1]
    return " · ".join(_parts(same, table[same].iloc[0]))


def _name(columns: Sequence[str], key: tuple[Any, ...]) -> str:
    text = " · ".join(_parts(columns, key))
    return text if len(text) <= MAX_NAME_CHARACTERS else f"{text[: MAX_NAME_CHARACTERS - 1]}…"


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
            return f"{value} threads"
        case _:
            # matplotlib would take a dollar sign for the start of a formula.
            return str(value).replace("$", r"\$")


def _draw(panel: Axes, lines: dict[str, pd.DataFrame], over: str, metric: str) -> None:
    panel.set_ylabel(LABELS[metric])
    panel.set_ylim(bottom=0)
    panel.grid(alpha=0.3)
    if len({int(x) for rows in lines.values() for x in rows[over]}) == 1:
        _draw_bars(panel, lines, over, metric)
        return
    for name, rows in lines.items():
        ordered = rows.sort_values(over)
        middle = ordered[metric].to_numpy(dtype=float)
        # matplotlib draws no bar if its length is NaN.
        bars = [abs(ordered[f"{metric}_{end}"].to_numpy(dtype=float) - middle) for end in ("low", "high")]
        panel.errorbar(
            ordered[over].to_numpy(dtype=float), middle, yerr=bars, label=name, marker="o", markersize=4, capsize=3
        )
    _scale(panel, sorted({int(x) for rows in lines.values() for x in rows[over]}))
    panel.set_xlabel(LABELS[over])
    panel.set_ylim(bottom=0)


def _draw_bars(panel: Axes, lines: dict[str, pd.DataFrame], over: str, metric: str) -> None:
    """Draw one bar with its value for each line, because a line with a single point is not visible."""
    for at, (name, rows) in enumerate(lines.items()):
        value, low, high = (float(rows[f"{metric}{end}"].iloc[0]) for end in ("", "_low", "_high"))
        bar = panel.bar(at, value, yerr=[[value - low], [high - value]], capsize=3, width=0.6, label=name)
        panel.bar_label(bar, ["not known" if math.isnan(value) else f"{value:.4g}"], padding=3)
    panel.set_xticks([])
    panel.set_xlim(-1, len(lines))
    panel.margins(y=0.15)
    panel.set_xlabel(_describe(over, next(iter(lines.values()))[over].iloc[0]))
    panel.set_ylim(bottom=0)


def _scale(panel: Axes, places: list[int]) -> None:
    """Use a logarithmic axis for a wide range, because sweeps usually double their values."""
    if len(places) > 1 and places[-1] >= 4 * places[0]:
        panel.set_xscale("log", base=2)
    panel.set_xticks(places[:: max(1, math.ceil(len(places) / 8))])
    panel.set_xticks([], minor=True)
    panel.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
