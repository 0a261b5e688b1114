"""What ``lmx-lab bench`` prints: a table for each target, ratios, failures; or all of it as JSON."""

from __future__ import annotations

import json
import math
import sys
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lmx_lab.bench.comparison import compare
from lmx_lab.bench.statistics import CASE, MEASURED, TOTAL, summary
from lmx_lab.cli.app import err, note, out, say
from lmx_lab.cli.terminal import line
from lmx_lab.errors import InvalidRequestError

if TYPE_CHECKING:
    import pandas as pd

FIGURES = ("ttft_ms", "itl_ms_p50", "decode_tok_s", TOTAL)
SIZES = ("concurrency", "prompt_tokens_wanted", "output_tokens_wanted")
COUNTS = ("requests", "errors")
HEADS = {
    "concurrency": "at\nonce",
    "prompt_tokens_wanted": "prompt\ntokens",
    "output_tokens_wanted": "output\ntokens",
    "requests": "re-\nquests",
    "ttft_ms": "first token\nms",
    "itl_ms_p50": "next token\nms",
    "decode_tok_s": "each\ntok/s",
    TOTAL: "together\ntok/s",
    "ratio": "a / b",
}
FILE_WIDTH = 160
"""Of what is no terminal."""
ERRORS_SHOWN = 5
LEGEND = (
    "medians of ttft_ms, itl_ms_p50 and decode_tok_s, then total_tok_s; below each, where it may as well lie (95 %)"
)


def print_tables(rows: pd.DataFrame) -> None:
    """To standard output; what failed, and how to read it, to standard error."""
    table = summary(rows, by=("target", *CASE))
    if not len(table):
        note("no request was measured")
    for target in table["target"].unique():
        say(_heading(rows[rows["target"] == target]), style="bold")
        _print(_cases(table[table["target"] == target]))
    for a, b, ratios in _comparisons(rows):
        say(f"{line(a)} (a) beside {line(b)} (b)", style="bold")
        _print(_ratios(ratios))
    if len(table):
        note(LEGEND)
    _print_errors(rows)


def print_document(rows: pd.DataFrame) -> None:
    """One JSON object on standard output."""
    document = {
        "provenance": rows.attrs["provenance"],
        "interrupted": rows.attrs["interrupted"],
        "path": rows.attrs["path"],
        "summary": _plain(summary(rows)),
        "comparison": [{"a": a, "b": b, "ratios": _plain(ratios)} for a, b, ratios in _comparisons(rows)],
        "requests": _plain(rows),
    }
    sys.stdout.write(json.dumps(document, indent=1) + "\n")


def _plain(table: pd.DataFrame) -> Any:
    """Rows as JSON has them: what is no number is null."""
    return json.loads(table.to_json(orient="records", date_format="iso", date_unit="us"))


def _comparisons(rows: pd.DataFrame) -> list[tuple[str, str, pd.DataFrame]]:
    """The first target beside each of the others."""
    found = []
    first, *others = rows["target"].unique() if len(rows) else [None]
    for other in others:
        try:
            ratios = compare(rows[rows["target"] == first], rows[rows["target"] == other], metrics=FIGURES)
        except InvalidRequestError as exc:
            # An interrupted run may have no case of both; a server may have changed its model meanwhile.
            note(f"{line(str(first))} and {line(str(other))} cannot be compared: {line(exc.message, 300)}")
        else:
            found.append((str(first), str(other), ratios))
    return found


def _heading(rows: pd.DataFrame) -> str:
    """Who was measured, by what is known of it."""
    known = {name: rows[name].dropna() for name in MEASURED}
    facts = {name: line(str(values.iloc[0])) for name, values in known.items() if len(values)}
    if "threads" in facts:
        facts["threads"] += " threads"
    return " · ".join(facts.values())


def _cases(table: pd.DataFrame) -> Table:
    shown = _table(*SIZES, *COUNTS, *FIGURES)
    for _, row in table.iterrows():
        sizes = [str(row[name]) for name in (*SIZES, *COUNTS)]
        shown.add_row(*sizes, *(_cell(row[name], row[f"{name}_low"], row[f"{name}_high"]) for name in FIGURES))
    return shown


def _ratios(table: pd.DataFrame) -> Table:
    shown = _table(*SIZES, "figure", "a", "b", "ratio", "better")
    for _, row in table.iterrows():
        sides = [_cell(row[side], row[f"{side}_low"], row[f"{side}_high"]) for side in ("a", "b")]
        ratio = _cell(row["ratio"], row["low"], row["high"])
        figure = HEADS[row["metric"]].replace("\n", ", ")
        shown.add_row(*(str(row[name]) for name in SIZES), figure, *sides, ratio, row["better"])
    return shown


def _table(*columns: str) -> Table:
    """No wider than 80 characters with usual figures."""
    shown = Table(box=None, padding=(0, 1), collapse_padding=True, pad_edge=False)
    for name in columns:
        shown.add_column(HEADS.get(name, name), justify="left" if name == "figure" else "right")
    return shown


def _cell(median: float, low: float, high: float) -> Text:
    interval = "" if math.isnan(low) else f"\n{_number(low)}-{_number(high)}"
    return Text.assemble(_number(median), (interval, "dim"))


def _number(value: float) -> str:
    if math.isnan(value):
        return "-"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) < 100 else f"{value:.1f}"


def _print(table: Table) -> None:
    console = out if out.is_terminal else Console(width=FILE_WIDTH)
    console.print(table)


def _print_errors(rows: pd.DataFrame) -> None:
    for (target, error), count in rows.groupby(["target", "error"]).size().head(ERRORS_SHOWN).items():
        text = f"{line(str(target))}: {count} times {line(str(error), 300)}"
        err.print(text, style="red", markup=False, highlight=False)
