"""Two measurements of the same cases, side by side: how many times as much, and how sure that is.

What a machine does drifts, and all requests of a repeat with it. So only repeats count as independent: each gives one
ratio, and from three of them on there is an interval, however many requests they have.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from lmx_lab.bench.statistics import (
    CASE,
    CLIENT_METRICS,
    LEVEL,
    MEASURED,
    TOTAL,
    Interval,
    Samples,
    apart,
    by_repeat,
    counts_pieces,
    ended,
    measured,
    median,
    median_interval,
    numbers,
    ratio_interval,
    repeats,
    total_interval,
)
from lmx_lab.errors import InvalidRequestError

if TYPE_CHECKING:
    import pandas as pd

Better = Literal["a", "b", "-"]
COMPARED = (*CLIENT_METRICS, TOTAL)
OF_WHOLE_ANSWERS = ("e2e_ms", TOTAL)
"""What a longer answer changes, whoever gives it."""
OF_TOKENS = ("itl_ms_p50", "itl_ms_p95", "itl_ms_p99", "decode_tok_s", TOTAL)
"""What is of pieces, and not of tokens, where a server does not count its tokens."""


def compare(
    a: Samples, b: Samples, *, metrics: Sequence[str] = COMPARED, by: Sequence[str] = CASE, level: float = LEVEL
) -> pd.DataFrame:
    """For each case that both sides have, and each figure: both medians, the ratio of a's to b's, its interval.

    ``ratio`` is of the repeats' medians (of ``total_tok_s``, totals): their geometric mean, from ``low`` to ``high``.
    These are missing below 3 repeats of each side, and then ``better`` names none: measure with ``repeats=3`` or more.
    Repeats that both sides have of the same run are ``paired``, as they met the same minutes, and no others count then;
    different runs are not paired. ``repeats`` counts the pairs, or the repeats of the side that has fewer.

    ``better`` names the side of which the whole interval says so, by more tokens a second or less time; ``-`` means
    that these repeats do not tell them apart. Of equal sides 95 % of such intervals name none, one figure at a time.

    Where the answers' lengths differ by more than 5 % (``output_tokens_a``, ``output_tokens_b``: medians), ``e2e_ms``
    and ``total_tok_s`` have no ratio; nor has what is of single tokens where a side sends no usage, and pieces of its
    stream stand for tokens. ``a`` and ``b`` have medians over all requests, with intervals as in ``summary``.

    Args:
        a, b: Samples or tables, each of one target; several runs of it are taken together.
        by: Columns that both sides of a case have in common.

    Returns:
        A row each; ``.attrs["only_a"]`` and ``["only_b"]`` name the cases that the other side has not.

    Raises:
        InvalidRequestError: a side with several targets, no case in common, or a column that is not there.
        ImportError: pandas is not installed.
    """
    import pandas as pd

    sides = {}
    for name, samples in (("a", a), ("b", b)):
        table = measured(samples)
        _check(name, table, [*metrics, *by])
        # A missing value differs from itself and would find no partner.
        sides[name] = {
            tuple(None if pd.isna(value) else value for value in key): group
            for key, group in table.groupby(list(by), sort=False, dropna=False)
        }
    common = [key for key in sides["a"] if key in sides["b"]]
    if not common:
        raise InvalidRequestError(
            f"a and b have no case in common: a has {_names(sides['a'])}, b {_names(sides['b'])}; measure both by the "
            f"same sweep, or give fewer columns than by={tuple(by)}"
        )
    rows = [
        dict(zip(by, key, strict=True))
        | {"metric": metric}
        | _compared(metric, sides["a"][key], sides["b"][key], level)
        for key in common
        for metric in metrics
    ]
    table = pd.DataFrame(rows)
    table.attrs["only_a"] = [key for key in sides["a"] if key not in sides["b"]]
    table.attrs["only_b"] = [key for key in sides["b"] if key not in sides["a"]]
    return table


def _check(side: str, table: pd.DataFrame, columns: Sequence[str]) -> None:
    if missing := [name for name in columns if name not in table and name != TOTAL]:
        raise InvalidRequestError(f"no column {', '.join(missing)}; there are {', '.join(table.columns)}, {TOTAL}")
    # A request that never reached its target knows no more than the target's name.
    good = ended(table)
    for name in MEASURED:
        if len(several := good[name].dropna().unique()) > 1:
            raise InvalidRequestError(
                f"{side} has several of {name}: {', '.join(map(str, several))}; choose the rows of one, such as "
                f"{side}[{side}.{name} == {several[0]!r}]"
            )


def _compared(metric: str, a: pd.DataFrame, b: pd.DataFrame, level: float) -> dict[str, Any]:
    left, right = _figure(metric, a, level), _figure(metric, b, level)
    answer_a, answer_b = median(ended(a)["output_tokens"]), median(ended(b)["output_tokens"])
    ratio, paired = _ratio(metric, a, b, level)
    lengths_differ = metric in OF_WHOLE_ANSWERS and apart(answer_a, answer_b)
    if lengths_differ or (metric in OF_TOKENS and (counts_pieces(a) or counts_pieces(b))):
        ratio = Interval(median=math.nan, low=math.nan, high=math.nan, n=ratio.n)
    return {
        "a": left.median,
        "a_low": left.low,
        "a_high": left.high,
        "b": right.median,
        "b_low": right.low,
        "b_high": right.high,
        "ratio": ratio.median,
        "low": ratio.low,
        "high": ratio.high,
        "n_a": left.n,
        "n_b": right.n,
        "repeats": ratio.n,
        "paired": paired,
        "output_tokens_a": answer_a,
        "output_tokens_b": answer_b,
        "better": _better(metric, ratio),
    }


def _figure(metric: str, side: pd.DataFrame, level: float) -> Interval:
    if metric == TOTAL:
        return total_interval(side, level=level)
    good = ended(side)
    return median_interval(numbers(good[metric]), groups=repeats(good), level=level)


def _ratio(metric: str, a: pd.DataFrame, b: pd.DataFrame, level: float) -> tuple[Interval, bool]:
    """And whether it is of pairs."""
    left, right = by_repeat(metric, a), by_repeat(metric, b)
    if common := [repeat for repeat in left if repeat in right]:
        pairs = [left[repeat] for repeat in common], [right[repeat] for repeat in common]
        return ratio_interval(*pairs, True, level=level), True
    return ratio_interval(left.values(), right.values(), False, level=level), False


def _better(metric: str, ratio: Interval) -> Better:
    more_is_better = metric.endswith("_tok_s")
    if ratio.low > 1:
        return "a" if more_is_better else "b"
    if ratio.high < 1:
        return "b" if more_is_better else "a"
    return "-"


def _names(cases: dict[tuple[Any, ...], Any]) -> str:
    shown = [" ".join(map(str, key)) for key in list(cases)[:3]]
    return "; ".join(shown) + (f" and {len(cases) - 3} more" if len(cases) > 3 else "") if shown else "none"
