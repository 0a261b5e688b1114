"""Plot medians with intervals: lines over a swept value, or bars if there is only one value."""

from __future__ import annotations

import itertools
import math
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from lmx_lab.bench.summaries import CASE, MEASURED, METRICS, TOTAL, Samples, summary
from lmx_lab.errors import InvalidRequestError
from lmx_lab.extras import import_optional
from lmx_lab.results.drawing import NotebookFigure, fit, fonts, size_in_inches
from lmx_lab.results.statistics import LEVEL
from lmx_lab.sanitize import escape_text
from lmx_lab.values.models import EngineChoice

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.container import Container

LABELS = {
    **{name: metric.label for name, metric in METRICS.items()},
    **{"concurrency": "concurrent requests", "prompt_tokens_wanted": "prompt tokens"},
}
MAX_LINES = 20
PADDING_INCHES = 0.1
UNKNOWN = "not known"
ADDRESS = re.compile(r"^(https?://.*|[\w.\-\[\]:]+:\d+(/.*)?|[\w-]+(\.[\w-]+)+/.*)$")
FOLDER = re.compile(r".*/(?=.)")
VERSION = re.compile(r"[ -][a-z]?\d[^,]*")
"""The version of an engine, such as that of ``lmx-lab 0.9.0, llama.cpp-0.2.14``."""


def by_concurrency(
    samples: Samples,
    *,
    metrics: str | Sequence[str] = (TOTAL, "decode_tok_s", "ttft_ms"),
    level: float = LEVEL,
    names: str | Sequence[str] | Mapping[str, str] = (),
    title: str | None = None,
    ax: Axes | Sequence[Axes] | None = None,
    size: tuple[float, float] | None = None,
) -> NotebookFigure | None:
    """Plot the median of each metric over the number of concurrent requests, with bars for intervals that are known.

    There is a line for each combination of the other values that differ, such as the target. The legend shows the names
    of targets and the values that differ, such as the engine or the model; addresses and versions only if nothing else
    differs.
    Percentiles of the time between tokens are computed for each answer first: ``itl_ms_p99`` is the median of the
    answers' 99th percentiles. If all requests have the same concurrency, there are bars with their values. A value that
    was not measured is not drawn; a bar or a plot without values says that they are not known.

    Args:
        metrics: One or several metrics.
        names: Names of the lines or bars in the legend: a sequence in their order, or a mapping from default names.
        title: Replaces the title, which contains the values that all lines have in common. With an empty title, the
            line below it, which explains the intervals, is also omitted.
        ax: Axes of a figure of matplotlib in which to draw, one for each metric. No figure is returned then, and by
            default the axes have no title.
        size: Width and height of the figure in inches.

    Raises:
        InvalidRequestError: a metric is unknown, there is no measured request, there would be more than 20 lines, or
            the number of names or axes does not match.
        MissingPackageError: matplotlib or pandas is not installed.
    """
    with fonts():
        return _chart(samples, "concurrency", metrics=metrics, level=level, names=names, title=title, ax=ax, size=size)


def by_prompt_length(
    samples: Samples,
    *,
    metrics: str | Sequence[str] = ("prefill_tok_s", "ttft_ms", "decode_tok_s"),
    level: float = LEVEL,
    names: str | Sequence[str] | Mapping[str, str] = (),
    title: str | None = None,
    ax: Axes | Sequence[Axes] | None = None,
    size: tuple[float, float] | None = None,
) -> NotebookFigure | None:
    """Plot the median of each metric over the length of the prompts.

    Args and Raises: as ``by_concurrency``.
    """
    return _chart(
        samples, "prompt_tokens_wanted", metrics=metrics, level=level, names=names, title=title, ax=ax, size=size
    )


def _chart(
    samples: Samples,
    over: str,
    *,
    metrics: str | Sequence[str],
    level: float,
    names: str | Sequence[str] | Mapping[str, str],
    title: str | None,
    ax: Axes | Sequence[Axes] | None,
    size: tuple[float, float] | None,
) -> NotebookFigure | None:
    metrics = [metrics] if isinstance(metrics, str) or not isinstance(metrics, Iterable) else list(metrics)
    if unknown := [name for name in metrics if name not in METRICS]:
        raise InvalidRequestError(
            f"metrics: unknown metric {', '.join(map(str, unknown)):.200}; available are {', '.join(METRICS)}",
            param="metrics",
        )
    if not metrics:
        raise InvalidRequestError(f"metrics is empty; give at least one, such as {TOTAL!r}", param="metrics")
    title = None if title is None else escape_text(str(title))
    table = summary(samples, level=level)
    if not len(table):
        raise InvalidRequestError("there is nothing to plot: the table has no requests besides warm-up requests")
    lines = _lines(table, over)
    given = names if isinstance(names, str | Mapping) or not isinstance(names, Iterable) else list(names)
    if given:
        unknown = [name for name in given if name not in lines] if isinstance(given, Mapping) else []
        chosen = [given.get(line, line) for line in lines] if isinstance(given, Mapping) else given
        named = [escape_text(str(name)) for name in (chosen if isinstance(chosen, list) else [chosen])]
        if unknown or len(named) != len(lines) or len(set(named)) != len(named):
            wanted = f"a different name for each of {', '.join(map(repr, lines))}" if any(lines) else "one name"
            raise InvalidRequestError(f"names is {names!r:.200}; give {wanted}", param="names")
        lines = dict(zip(named, lines.values(), strict=True))
    if ax is not None:
        panels = list(np.ravel(np.asarray(ax, dtype=object)))
        if len(panels) != len(metrics) or not all(hasattr(panel, "set_ylabel") for panel in panels):
            raise InvalidRequestError(
                f"ax is {ax!r:.200}; give {len(metrics)} axes, one for each of metrics={tuple(metrics)}", param="ax"
            )
        handles, *_ = [_draw(panel, lines, over, metric) for panel, metric in zip(panels, metrics, strict=True)]
        if given or len(lines) > 1:
            _plain(panels[0].legend(handles, [textwrap.fill(name, 40) for name in lines]))
        if title:
            panels[0].set_title(title, parse_math=False)
        return None
    usual = (4.2 * len(metrics), 3.6)
    heading = escape_text(_common(table, over)) if title is None else title
    caption = _caption(lines, metrics, level) if heading or title is None else ""
    width, height = usual if size is None else size_in_inches(size)
    with fonts(min(width / usual[0], height / usual[1])):
        chart = NotebookFigure(figsize=(width, height))
        chart.set_layout_engine("constrained", w_pad=PADDING_INCHES)
        room = chart.bbox.width - 2 * PADDING_INCHES * chart.dpi
        panels = list(chart.subplots(1, len(metrics), squeeze=False)[0])
        handles, *_ = [_draw(panel, lines, over, metric) for panel, metric in zip(panels, metrics, strict=True)]
        text = "\n".join(filter(None, (heading, caption)))
        fit(chart.suptitle(text, fontsize="medium", parse_math=False), room)
        below = _legend(chart, handles, list(lines), room) if given or len(lines) > 1 else 0.0
        chart.set_figheight(height if size else height + below)
        # The layout determines the height of the axes.
        layout = chart.get_layout_engine()
        assert layout is not None
        layout.execute(chart)
        for panel in panels:
            fit(panel.yaxis.label, panel.bbox.height)
    return chart


def _caption(lines: Mapping[str, pd.DataFrame], metrics: Sequence[str], level: float) -> str:
    """Describe the values and their intervals."""
    kinds = " and ".join(dict.fromkeys("totals" if name == TOTAL else "medians" for name in metrics))
    known = {bool(value) for name in metrics for rows in lines.values() for value in rows[f"{name}_low"].notna()}
    if True in known:
        missing = " where enough requests were measured" if False in known else ""
        return f"{kinds} with {100 * level:g} % confidence intervals{missing}"
    return f"{kinds} without intervals, which need 6 requests, or 3 repeats for totals"


def _plain(legend: Any) -> None:
    """Show the texts of a legend unchanged: two dollar signs would be a formula."""
    for text in legend.get_texts():
        text.set_parse_math(False)


def _legend(chart: NotebookFigure, handles: Sequence[Any], names: Sequence[str], room: float) -> float:
    """Draw a legend in as few rows as fit into the width of the figure, and return its height in inches."""
    for characters in (60, 50, 40, 30, 20, 10):
        texts = [textwrap.fill(name, characters) for name in names]
        for columns in dict.fromkeys(math.ceil(len(names) / rows) for rows in range(1, len(names) + 1)):
            legend = chart.legend(handles, texts, loc="outside lower center", ncols=columns, frameon=False)
            _plain(legend)
            box = legend.get_window_extent()
            if box.width < room or (columns == 1 and characters == 10):
                return float(box.height / chart.dpi)
            legend.remove()
    raise AssertionError


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
    names = map(escape_text, _names(differing, [key for key, _ in groups]))
    for name, (_, group) in zip(names, groups, strict=True):
        # Values that are not known may make names equal.
        lines[name if name not in lines else f"{name} ({len(lines) + 1})"] = group
    return lines


def _names(columns: Sequence[str], keys: Sequence[Sequence[Any]]) -> list[str]:
    """Return a name for each line: the name of its target, its engine and its model. Other values, such as addresses,
    are added one after the other while names are equal.
    """
    known = dict(zip(columns, map(list, zip(*keys, strict=True)), strict=True))
    short = dict(known)
    for column, omitted in (("engine", VERSION), ("model", FOLDER), ("target", ADDRESS)):
        if column in known:
            rest = [omitted.sub("", value) if isinstance(value, str) else value for value in known[column]]
            # If only versions or folders differ, they are shown.
            if column == "target" or len(set(rest)) == len(set(known[column])):
                short[column] = rest
    compared = {"target", "engine", "model", *CASE}
    if set(known.get("target", ())) <= set(get_args(EngineChoice)):
        # The sides of a comparison of engines have the names of their engines.
        compared.remove("engine")
    shown = [name for name in columns if name in compared]
    for added in ("target", *columns, ""):
        names = [" · ".join(_parts(shown, values)) for values in zip(*(short[name] for name in shown), strict=True)]
        if all(names) and len(set(names)) == len(keys):
            break
        if added in known:
            short[added] = known[added]
            shown = [name for name in columns if name in shown or name == added]
    return [name or UNKNOWN for name in names]


def _key_columns(table: pd.DataFrame, over: str) -> list[str]:
    """Return the columns that identify a line."""
    return [name for name in ("run", *MEASURED, *CASE) if name in table and name != over]


def _common(table: pd.DataFrame, over: str) -> str:
    """Return the values that all lines have in common. An address is among them only if there is no model."""
    same = [name for name in _key_columns(table, over) if name != "run" and table[name].nunique(dropna=False) == 1]
    first = table[same].iloc[0]
    if ADDRESS.match(str(first.get("target"))) and isinstance(first.get("model"), str):
        same.remove("target")
    # By default, the next request of a user begins when the previous one has ended.
    if first.get("arrival") == "closed":
        same.remove("arrival")
    return " · ".join(_parts(same, first[same]))


def _parts(columns: Sequence[str], values: Iterable[Any]) -> list[str]:
    isna = import_optional("pandas", "a plot").isna
    shown = zip(columns, values, strict=True)
    return [_describe(column, value) for column, value in shown if not isna(value) and value != ""]


def _describe(column: str, value: Any) -> str:
    texts = {
        "prompt_tokens_wanted": f"prompt {value}",
        "output_tokens_wanted": f"answer {value}",
        "concurrency": f"{value} concurrent",
        "arrival": "requests after answers" if value == "closed" else str(value),
        "cache": f"{value} cache",
        "threads": f"{value} thread{'' if value == 1 else 's'}",
    }
    return texts.get(column, str(value))


def _draw(panel: Axes, lines: Mapping[str, pd.DataFrame], over: str, metric: str) -> list[Container]:
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
        panel.set_xticks(_apart(places, is_log=panel.get_xscale() == "log"))
        panel.set_xticks([], minor=True)
        panel.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        panel.set_xlabel(LABELS[over])
    # After the data, because matplotlib does not adapt limits that were set.
    panel.set_ylim(bottom=0)
    if all(rows[metric].isna().all() for rows in lines.values()):
        panel.text(0.5, 0.5, UNKNOWN, transform=panel.transAxes, ha="center")
        panel.set_yticks([])
    return drawn


def _apart(places: Sequence[int], *, is_log: bool) -> list[int]:
    """Return the places whose labels do not overlap."""
    at = np.log2(places) if is_log else np.asarray(places, float)
    shares = (at - at[0]) / (at[-1] - at[0])
    kept = [0]
    for index in range(1, len(places)):
        # A digit has at most 3 % of the width of axes.
        characters = (len(str(places[index])) + len(str(places[kept[-1]]))) / 2
        if shares[index] - shares[kept[-1]] >= 0.03 * characters + 0.02:
            kept.append(index)
    return [places[index] for index in kept]


def _draw_bars(panel: Axes, lines: Mapping[str, pd.DataFrame], metric: str) -> list[Container]:
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
