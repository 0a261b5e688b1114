"""The tidy table: columns in their order, types that do not depend on what is in them."""

from __future__ import annotations

import math
import sys
import time
from datetime import datetime

import pytest

from lmx_lab.bench import frame
from lmx_lab.bench.sample import COLUMNS, RunClock, row
from tests.bench.rows import sample


def test_every_sample_is_a_row_and_the_provenance_goes_with_the_table() -> None:
    table = frame([sample(request=1), sample(request=2, error="lmx-timeout: late")], {"commit": "abc"})
    assert tuple(table.columns) == COLUMNS
    assert table["request"].tolist() == [1, 2]
    assert table["error"].isna().tolist() == [True, False]
    assert table.attrs["provenance"] == {"commit": "abc"}


def test_types_are_the_same_with_nothing_in_the_table_and_with_all() -> None:
    full = sample(
        engine="lmx", threads=2, output_tokens=8, ttft_ms=1.5, finish_reason="length", counted_by="usage", error="x: y"
    )
    assert (frame([]).dtypes == frame([sample()]).dtypes).all()
    assert (frame([sample()]).dtypes == frame([full]).dtypes).all()


def test_a_figure_that_is_no_number_is_missing() -> None:
    written = row(sample(ttft_ms=math.nan, decode_tok_s=math.inf, e2e_ms=2.5))
    assert (written["ttft_ms"], written["decode_tok_s"], written["e2e_ms"]) == (None, None, 2.5)


def test_stamps_are_as_far_apart_as_the_moments_whoever_sets_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = RunClock()
    before = clock.stamp(100.0)
    monkeypatch.setattr(time, "time", lambda: 0.0)
    one, other = (datetime.fromisoformat(stamp) for stamp in (before, clock.stamp(102.5)))
    assert (other - one).total_seconds() == 2.5
    assert one.year > 2000


def test_without_pandas_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="pip install"):
        frame([])
