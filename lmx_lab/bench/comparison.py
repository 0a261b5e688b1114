"""Two measurements of the same cases, side by side: how many times as much, and how sure that is."""

from __future__ import annotations

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
    measured,
    median_interval,
    numbers,
    ratio_interval,
    repeats,
    total_interval,
    total_ratio_interval,
)
from lmx_lab.errors import InvalidRequestError

if TYPE_CHECKING:
    import pandas as pd

Better = Literal["a", "b", "-"]
COMPARED = (*CLIENT_METRICS, TOTAL)
PAIR = ("repeat", "request")
ENOUGH_REQUESTS = 6
"""From here on 95 % of such intervals can hold the median: of 5 values, least to greatest, 94 % do."""
ENOUGH_REPEATS = 3


def compare(
    a: Samples, b: Samples, *, metrics: Sequence[str] = COMPARED, by: Sequence[str] = CASE, level: float = LEVEL
) -> pd.DataFrame:
    """For each case that both sides have, and each figure: both medians, the ratio of a's to b's, its interval.

    Requests are paired by repeat and number where at least half of each side's have a partner: two targets of one run
    met the same minutes. ``better`` names the side of which the interval says so, by more tokens a second or less time;
    ``-`` means that these samples do not tell them apart, or are fewer than 6. ``total_tok_s`` is known once a repeat:
    it has an interval from two on, and a better side from three on.

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
    ended = table[table["error"].isna()]
    for name in MEASURED:
        if len(several := ended[name].dropna().unique()) > 1:
            raise InvalidRequestError(
                f"{side} has several of {name}: {', '.join(map(str, several))}; choose the rows of one, such as "
                f"{side}[{side}.{name} == {several[0]!r}]"
            )


def _compared(metric: str, a: pd.DataFrame, b: pd.DataFrame, level: float) -> dict[str, Any]:
    if metric == TOTAL:
        left, right, ratio, paired = _totals(a, b, level)
    else:
        left, right, ratio, paired = _medians(metric, _ended(a), _ended(b), level)
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
        "paired": paired,
        "better": _better(metric, ratio),
    }


def _medians(metric: str, a: pd.DataFrame, b: pd.DataFrame, level: float) -> tuple[Interval, Interval, Interval, bool]:
    left = median_interval(numbers(a[metric]), groups=repeats(a), level=level)
    right = median_interval(numbers(b[metric]), groups=repeats(b), level=level)
    pairs = _pairs(metric, a, b)
    if pairs is not None:
        one, other = numbers(pairs[f"{metric}_a"]), numbers(pairs[f"{metric}_b"])
        return left, right, ratio_interval(one, other, True, groups=pairs["repeat"], level=level), True
    ratio = ratio_interval(
        numbers(a[metric]), numbers(b[metric]), False, groups=repeats(a), groups_b=repeats(b), level=level
    )
    return left, right, ratio, False


def _pairs(metric: str, a: pd.DataFrame, b: pd.DataFrame) -> pd.DataFrame | None:
    """The requests that ended on both sides; None where they are too few, or a number stands for several."""
    one, other = (side[side[metric].notna()][[*PAIR, metric]] for side in (a, b))
    if one.duplicated(list(PAIR)).any() or other.duplicated(list(PAIR)).any():
        return None
    pairs = one.merge(other, on=list(PAIR), suffixes=("_a", "_b"))
    return pairs if len(pairs) >= 2 and 2 * len(pairs) >= max(len(one), len(other)) else None


def _totals(a: pd.DataFrame, b: pd.DataFrame, level: float) -> tuple[Interval, Interval, Interval, bool]:
    left, right = total_interval(a, level=level), total_interval(b, level=level)
    return left, right, total_ratio_interval(a, b, level=level), False


def _better(metric: str, ratio: Interval) -> Better:
    if ratio.n < (ENOUGH_REPEATS if metric == TOTAL else ENOUGH_REQUESTS):
        return "-"
    more_is_better = metric.endswith("_tok_s")
    if ratio.low > 1:
        return "a" if more_is_better else "b"
    if ratio.high < 1:
        return "b" if more_is_better else "a"
    return "-"


def _ended(table: pd.DataFrame) -> pd.DataFrame:
    return table[table["error"].isna()]


def _names(cases: dict[tuple[Any, ...], Any]) -> str:
    shown = [" ".join(map(str, key)) for key in list(cases)[:3]]
    return "; ".join(shown) + (f" and {len(cases) - 3} more" if len(cases) > 3 else "") if shown else "none"
