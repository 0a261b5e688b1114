"""The table has ordered columns whose types do not depend on the values."""

from __future__ import annotations

import math
import sys
import time
from datetime import datetime

import pandas as pd
import pytest

from lmx_lab.bench import frame
from lmx_lab.bench.sample import COLUMNS, RunClock, row
from tests.support.samples import sample


def test_every_sample_is_a_row_and_the_table_has_the_provenance() -> None:
    table = frame([sample(request=1), sample(request=2, error="lmx-timeout: late")], {"commit": "abc"})
    assert tuple(table.columns) == COLUMNS
    assert table["request"].tolist() == [1, 2]
    assert table["error"].isna().tolist() == [True, False]
    assert table.attrs["provenance"] == {"commit": "abc"}


def test_column_types_do_not_depend_on_the_values() -> None:
    full = sample(
        engine="lmx", threads=2, output_tokens=8, ttft_ms=1.5, finish_reason="length", counted_by="usage", error="x: y"
    )
    assert (frame([]).dtypes == frame([sample()]).dtypes).all()
    assert (frame([sample()]).dtypes == frame([full]).dtypes).all()


def test_integers_are_exact_although_others_are_missing() -> None:
    table = frame([sample(seed=2**60 + 1, cached_tokens=2**60 + 1), sample(cached_tokens=None)])
    assert table["cached_tokens"].tolist() == [2**60 + 1, pd.NA]
    assert table["seed"].tolist() == [2**60 + 1, 0]


def test_nan_and_infinity_are_missing_values() -> None:
    written = row(sample(ttft_ms=math.nan, decode_tok_s=math.inf, e2e_ms=2.5))
    assert (written["ttft_ms"], written["decode_tok_s"], written["e2e_ms"]) == (None, None, 2.5)


def test_time_stamps_do_not_follow_changes_of_the_wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = RunClock()
    before = clock.stamp(100.0)
    monkeypatch.setattr(time, "time", lambda: 0.0)
    one, other = (datetime.fromisoformat(stamp) for stamp in (before, clock.stamp(102.5)))
    assert (other - one).total_seconds() == 2.5
    assert one.year > 2000


def test_without_pandas_the_error_names_the_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="pip install"):
        frame([])
