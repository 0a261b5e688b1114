"""Print the results of ``lmx-lab bench``: a table for each target, ratios and failures; or everything as JSON."""

from __future__ import annotations

import json
import math
import sys
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lmx_lab.bench.summaries import CASE, MEASURED, METRICS, TOTAL, compare, counts_pieces, summary, token_counts_differ
from lmx_lab.cli.terminal import err, out, print_line, print_note
from lmx_lab.errors import InvalidRequestError, counted
from lmx_lab.sanitize import single_line

if TYPE_CHECKING:
    import pandas as pd

METRICS_SHOWN = ("ttft_ms", "itl_ms_p50", "decode_tok_s", TOTAL)
SIZES = ("concurrency", "prompt_tokens_wanted", "output_tokens_wanted")
TOKENS = {"prompt_tokens_wanted": "prompt_tokens", "output_tokens_wanted": "output_tokens"}
"""Columns with the actual number of tokens, by the columns with the requested number."""
COUNTS = ("requests", "errors")
HEADINGS = {
    "concurrency": "concur-\nrent",
    "prompt_tokens_wanted": "prompt\ntokens",
    "output_tokens_wanted": "output\ntokens",
    "requests": "re-\nquests",
    **{name: metric.heading for name, metric in METRICS.items() if metric.heading},
    "ratio": "a / b",
}
MAX_ERRORS = 5


def print_tables(rows: pd.DataFrame) -> None:
    """Print tables to standard output, and legends and failures to standard error."""
    table = summary(rows, by=("target", *CASE))
    if not len(table):
        print_note("no request was measured")
    for target in table["target"].unique():
        # The known facts about the target.
        known = {name: rows.loc[rows["target"] == target, name].dropna() for name in MEASURED}
        facts = {name: single_line(str(values.iloc[0])) for name, values in known.items() if len(values)}
        if "threads" in facts:
            facts["threads"] += " threads"
        print_line(" · ".join(facts.values()), style="bold")
        _print(_case_table(table[table["target"] == target]))
    comparisons = _comparisons(rows)
    for a, b, ratios in comparisons:
        print_line(f"{single_line(a)} (a) compared with {single_line(b)} (b)", style="bold")
        _print(_ratio_table(ratios))
        for _, row in ratios.drop_duplicates(list(CASE)).iterrows():
            if token_counts_differ(row["output_tokens_a"], row["output_tokens_b"]):
                print_note(
                    f"concurrency {row['concurrency']}, prompts of {row['prompt_tokens_wanted']}: answers of a have "
                    f"{row['output_tokens_a']:g} tokens, of b {row['output_tokens_b']:g} (medians); they differ by "
                    f"more than 5 %, so {TOTAL} is not compared"
                )
    if len(table):
        print_note(
            "medians of ttft_ms, itl_ms_p50 (time between two pieces of the stream, which may contain several tokens) "
            "and decode_tok_s, then total_tok_s; below each, its 95 % interval, which needs 6 requests, or --repeats 3 "
            "for total_tok_s"
        )
    if any(_actual_tokens(row, name) for _, row in table.iterrows() for name in TOKENS):
        print_note(
            "in brackets: the actual number of tokens (median), if it differs by more than 5 %; ? if the server does "
            "not report it"
        )
    if table["late_ms"].notna().any():
        print_note(
            "late: time from the due time to sending (median, maximum), because --concurrency requests were running or "
            "this client was busy; it is part of the time to the first token"
        )
    for target in table["target"].unique():
        if counts_pieces(rows[rows["target"] == target]):
            print_note(
                f"{single_line(str(target))} reports no usage: pieces of its stream, which may contain several tokens, "
                "are counted as tokens"
            )
    if comparisons:
        print_note(
            "a / b is the ratio of the medians of the repeats; its interval, and which side is better, need "
            "--repeats 3 or more"
        )
    _print_errors(rows)


def print_document(rows: pd.DataFrame) -> None:
    """Print one JSON object to standard output."""
    document = {
        "provenance": rows.attrs["provenance"],
        "interrupted": rows.attrs["interrupted"],
        "rounds": rows.attrs["rounds"],
        "path": rows.attrs["path"],
        "summary": _as_json(summary(rows)),
        "comparison": [{"a": a, "b": b, "ratios": _as_json(ratios)} for a, b, ratios in _comparisons(rows)],
        "requests": _as_json(rows),
    }
    sys.stdout.write(json.dumps(document, indent=1) + "\n")


def _as_json(table: pd.DataFrame) -> Any:
    """Return the rows as JSON values; NaN becomes null."""
    return json.loads(table.to_json(orient="records", date_format="iso", date_unit="us"))


def _comparisons(rows: pd.DataFrame) -> list[tuple[str, str, pd.DataFrame]]:
    """Compare the first target with each of the others."""
    comparisons = []
    first, *others = rows["target"].unique() if len(rows) else [None]
    for other in others:
        try:
            ratios = compare(rows[rows["target"] == first], rows[rows["target"] == other], metrics=METRICS_SHOWN)
        except InvalidRequestError as exc:
            # An interrupted run may have no common case, and a server may have loaded another model during the run.
            names = f"{single_line(str(first))} and {single_line(str(other))}"
            print_note(f"{names} cannot be compared: {single_line(exc.message, 300)}")
        else:
            comparisons.append((str(first), str(other), ratios))
    return comparisons


def _case_table(table: pd.DataFrame) -> Table:
    late = ["late_ms"] if table["late_ms"].notna().any() else []
    cases = _new_table(*SIZES, *COUNTS, *METRICS_SHOWN, *late)
    for _, row in table.iterrows():
        sizes = [Text(f"{row[name]}{_actual_tokens(row, name)}") for name in SIZES]
        medians = [_cell(row[name], row[f"{name}_low"], row[f"{name}_high"]) for name in METRICS_SHOWN]
        lateness = [f"{_number(row[name])}\nto {_number(row[f'{name}_max'])}" for name in late]
        cases.add_row(*sizes, *(str(row[name]) for name in COUNTS), *medians, *lateness)
    return cases


def _actual_tokens(row: pd.Series[Any], wanted: str) -> str:
    """Return a second line for the cell if the actual number of tokens is unknown, or not the requested one."""
    if wanted not in TOKENS or row["requests"] == row["errors"]:
        return ""
    actual = row[TOKENS[wanted]]
    if math.isnan(actual):
        return "\n(?)"
    return f"\n({actual:.0f})" if token_counts_differ(actual, row[wanted]) else ""


def _ratio_table(table: pd.DataFrame) -> Table:
    compared = _new_table(*SIZES, "metric", "a", "b", "ratio", "better")
    for _, row in table.iterrows():
        sides = [_cell(row[side], row[f"{side}_low"], row[f"{side}_high"]) for side in ("a", "b")]
        ratio = _cell(row["ratio"], row["low"], row["high"])
        metric = HEADINGS[row["metric"]].replace("\n", ", ")
        compared.add_row(*(str(row[name]) for name in SIZES), metric, *sides, ratio, row["better"])
    return compared


def _new_table(*columns: str) -> Table:
    """Return an empty table. With usual numbers it is at most 80 characters wide."""
    table = Table(box=None, padding=(0, 1), collapse_padding=True, pad_edge=False)
    for name in columns:
        table.add_column(HEADINGS.get(name, name), justify="left" if name == "metric" else "right")
    return table


def _cell(value: float, low: float, high: float) -> Text:
    if math.isnan(value):
        return Text("-")
    interval = "-" if math.isnan(low) else f"{_number(low)}-{_number(high)}"
    return Text.assemble(_number(value), (f"\n{interval}", "dim"))


def _number(value: float) -> str:
    if math.isnan(value):
        return "-"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) < 100 else f"{value:.1f}"


def _print(table: Table) -> None:
    # Output that does not go to a terminal has a fixed width.
    console = out if out.is_terminal else Console(width=160)
    console.print(table)


def _print_errors(rows: pd.DataFrame) -> None:
    """Print how often each error has occurred, the most frequent errors first."""
    failed = rows.groupby(["target", "error"])["warm_up"].agg(["size", "sum"]).sort_values("size", ascending=False)
    lines = []
    for (target, error), (count, warm_up) in failed.head(MAX_ERRORS).iterrows():
        uncounted = f" ({warm_up} of them in the warm-up, which the table does not include)" if warm_up else ""
        lines.append(f"{single_line(str(target))}: {counted(count, 'time')} {single_line(str(error), 300)}{uncounted}")
    if len(rest := failed.iloc[MAX_ERRORS:]):
        lines.append(
            f"and {counted(len(rest), 'other error')}, {counted(rest['size'].sum(), 'request')} in total; --json "
            "prints all of them"
        )
    for line in lines:
        err.print(line, style="red", markup=False, highlight=False)
