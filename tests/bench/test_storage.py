"""Runs are loaded as they were stored, also after a crash."""

import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pandas.testing import assert_frame_equal

from lmx_lab.bench import RequestSample, frame, load
from lmx_lab.bench.sample import COLUMNS
from lmx_lab.bench.storage import Recorder
from lmx_lab.errors import InvalidRequestError
from tests.support.samples import run_of, sample

FACTS = {"commit": "abc", "seeds": [0]}
MAYBE_TEXT = st.none() | st.text()
MAYBE_COUNT = st.none() | st.integers(0, 2**62)
MAYBE_FIGURE = st.none() | st.floats(allow_nan=False, allow_infinity=False)
SAMPLES = st.lists(
    st.builds(
        sample,
        at_s=st.floats(0, 1e8),
        target=st.text(),
        model=MAYBE_TEXT,
        error=MAYBE_TEXT,
        threads=MAYBE_COUNT,
        output_tokens=MAYBE_COUNT,
        counted_by=st.sampled_from([None, "usage", "chunks"]),
        warm_up=st.booleans(),
        repeat=st.integers(0, 1000),
        ttft_ms=MAYBE_FIGURE,
        peak_memory_gb=MAYBE_FIGURE,
    ),
    max_size=5,
)
kept_in_one_folder = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=settings().max_examples // 2
)


def save(samples, provenance=None, folder=None):
    """Store a run, and return its file."""
    with Recorder(folder, provenance=provenance) as recorder:
        for each in samples:
            recorder.add(each)
    return recorder.path


@kept_in_one_folder
@given(samples=SAMPLES)
def test_a_saved_run_can_be_loaded(tmp_path: Path, samples: list[RequestSample]) -> None:
    path = save(samples, FACTS, tmp_path)
    table = load(path)
    assert_frame_equal(table.drop(columns="run"), frame(samples, FACTS).drop(columns="run"), check_flags=False)
    assert table.attrs["provenance"] == {path.stem: FACTS}
    assert set(table["run"]) <= {path.stem}


@pytest.mark.slow
@kept_in_one_folder
@given(data=st.data())
def test_a_truncated_file_is_loaded_up_to_its_last_complete_line(tmp_path: Path, data: st.DataObject) -> None:
    path = save(run_of([1.0, 2.0, 3.0]), FACTS, tmp_path)
    content = path.read_bytes()
    rows_at = content.index(b"\n") + 1
    at = data.draw(st.integers(rows_at, len(content)))
    path.write_bytes(content[:at])
    assert load(path)["ttft_ms"].tolist() == [1.0, 2.0, 3.0][: content[rows_at:at].count(b"}")]


KILLED = """
import os, signal, sys
from lmx_lab.bench.storage import Recorder
from tests.support.samples import run_of
with Recorder(sys.argv[1], provenance={}) as kept:
    for one in run_of([1.0, 2.0, 3.0]):
        kept.add(one)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_killed_run_has_all_added_samples(tmp_path):
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False, cwd=Path(__file__).parents[2])
    assert done.returncode == -signal.SIGKILL
    assert load(tmp_path)["ttft_ms"].tolist() == [1.0, 2.0, 3.0]


def edited(path, change):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    change(lines)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return load(path)


def test_unknown_fields_are_dropped_and_absent_ones_are_missing(tmp_path):
    def change(lines):
        lines[0]["more"] = 1
        lines[1]["joules"] = 3.5
        for name in ("ttft_ms", "warm_up", "counted_by", "threads"):
            del lines[2][name]

    table = edited(save(run_of([1.0, 2.0]), FACTS, tmp_path), change)
    assert tuple(table.columns) == COLUMNS
    assert table["ttft_ms"].isna().tolist() == [False, True]
    assert table["warm_up"].tolist() == [False, False]
    assert (table.dtypes == frame([]).dtypes).all()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("started_at", wrong) for wrong in ("yesterday", None, "2026-01-01", "0001-01-01T00:00:00+10:00")),
        *(("request", wrong) for wrong in ("1", 2**70)),
        *(("target", None), ("repeat", True), ("concurrency", 1.5)),
    ],
)
def test_a_line_with_an_invalid_required_field_is_skipped(tmp_path, field, value):
    table = edited(save(run_of([1.0, 2.0]), FACTS, tmp_path), lambda lines: lines[1].update({field: value}))
    assert table["ttft_ms"].tolist() == [2.0]


@pytest.mark.parametrize("value", ["fast", [1.0], {}, True, float("nan")])
def test_a_metric_of_a_wrong_type_is_missing(tmp_path, value):
    table = edited(save(run_of([1.0, 2.0]), FACTS, tmp_path), lambda lines: lines[1].update(ttft_ms=value))
    assert table["ttft_ms"].isna().tolist() == [True, False]


def test_lines_that_are_not_objects_are_skipped(tmp_path):
    path = save(run_of([1.0, 2.0]), FACTS, tmp_path)
    head, first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(head + b"[1]\n\xff\xfe\n\n" + first + b"x" * 3_000_000 + b"\n" + b"[" * 100_000 + b"\n" + second)
    assert load(path)["ttft_ms"].tolist() == [1.0, 2.0]


def test_the_runs_of_a_folder_are_loaded_oldest_first(tmp_path):
    for day, value in (("20260102", 2.0), ("20260101", 1.0), ("20260103", 3.0)):
        save(run_of([value]), {"day": day}, tmp_path).rename(tmp_path / f"{day}T000000Z-aaaaaa.jsonl")
    (tmp_path / "notes.txt").write_text("not one of them")
    table = load(tmp_path)
    assert table["ttft_ms"].tolist() == [1.0, 2.0, 3.0]
    assert [facts["day"] for facts in table.attrs["provenance"].values()] == ["20260101", "20260102", "20260103"]
    assert load(tmp_path, last=2)["ttft_ms"].tolist() == [2.0, 3.0]


@pytest.mark.parametrize("content", ["", "{}\n", "hello\n", '{"provenance": {}}\n', '{"lmx_lab_bench": 1}\n'])
def test_a_file_that_is_not_a_run_is_skipped_in_a_folder_but_refused_as_path(tmp_path, content):
    save(run_of([1.0]), FACTS, tmp_path)
    other = tmp_path / "other.jsonl"
    other.write_text(content)
    table = load(tmp_path)
    assert len(table) == 1
    assert list(table.attrs["skipped"]) == ["other.jsonl"]
    with pytest.raises(InvalidRequestError, match=r"other\.jsonl is not the file of a run"):
        load(other)


def test_by_default_runs_are_in_the_labs_home(tmp_path, monkeypatch):
    monkeypatch.setenv("LMX_LAB_HOME", str(tmp_path / "home"))
    assert len(load()) == 0
    path = save(run_of([1.0]), FACTS)
    assert path.parent == tmp_path / "home" / "bench"
    assert len(load()) == 1


def test_a_path_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(InvalidRequestError, match="does not exist"):
        load(tmp_path / "nothing")
    with pytest.raises(InvalidRequestError, match="last is 0"):
        load(tmp_path, last=0)


def test_only_the_owner_can_access_a_run(tmp_path):
    path = save([sample()], FACTS, tmp_path / "runs")
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(path.parent).st_mode) == 0o700


def test_a_disk_that_is_full_from_the_start_is_an_error_and_leaves_no_file(tmp_path, monkeypatch):
    make = os.open

    def full(path, *rest):
        os.close(make(path, *rest))
        return make("/dev/full", os.O_WRONLY)

    monkeypatch.setattr(os, "open", full)
    with pytest.raises(InvalidRequestError, match=r"the run cannot be stored in .*No space left"), Recorder(tmp_path):
        raise AssertionError("never entered")
    assert list(tmp_path.iterdir()) == []


def test_runs_of_the_same_second_have_different_files(tmp_path):
    assert len({save([sample()], FACTS, tmp_path) for _ in range(20)}) == 20
    assert len(load(tmp_path)) == 20


def test_a_provenance_that_is_not_valid_json_is_refused_and_leaves_no_file(tmp_path):
    with pytest.raises(InvalidRequestError, match="plain Python values"):
        save([sample()], {"home": tmp_path}, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_closed_recorder_refuses_samples(tmp_path):
    with Recorder(tmp_path, provenance={}) as kept:
        pass
    with pytest.raises(RuntimeError, match="with Recorder"):
        kept.add(sample())
