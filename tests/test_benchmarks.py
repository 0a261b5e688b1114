"""Tests of the helpers of the benchmarks. ``make bench`` runs the measurements."""

import json
import math
import re
import signal
import subprocess
import sys

import pytest

from benchmarks import __main__ as program
from benchmarks import curves, gguf, harness, page, paths, report
from benchmarks.bench import BenchError
from benchmarks.rates import Timeline, decode_window, quantile
from benchmarks.report import Limit, Row
from soak import __main__ as soak

pytestmark = pytest.mark.slow


def test_the_help_describes_each_figure(capsys):
    with pytest.raises(SystemExit):
        program.main(["--help"])
    figures = capsys.readouterr().out.partition("\nfigures:\n")[2]
    assert re.findall(r"^  ([\w-]+) +\S", figures, re.MULTILINE) == list(program.FIGURES)


def test_the_docstring_of_the_long_runs_describes_each_part():
    assert re.findall(r"^\| (\w+) +\|", soak.__doc__, re.MULTILINE) == ["part", *soak.PARTS]


@pytest.mark.parametrize(
    "streams",
    [
        pytest.param([Timeline(times=[1.0, 1.5, 2.0, 2.5, 3.0], tokens=5)], id="without the first token"),
        pytest.param(
            [Timeline(times=[0.0, 0.1, 1.0, 2.0, 3.0], tokens=5), Timeline(times=[1.0, 2.0, 3.0, 3.1, 3.2], tokens=5)],
            id="only while all streams decode",
        ),
        pytest.param([Timeline(times=[1.0, 2.0, 3.0], tokens=6)], id="pieces of two tokens"),
    ],
)
def test_the_rate_of_streams_is_that_of_tokens_per_second(streams):
    assert decode_window(streams).rate == pytest.approx(2.0)


def test_streams_that_decode_at_different_times_have_no_rate():
    with pytest.raises(BenchError):
        decode_window([Timeline(times=[0.0, 1.0], tokens=2), Timeline(times=[2.0, 3.0], tokens=2)])


@pytest.mark.parametrize(("q", "value"), [(0.0, 1), (0.5, 50), (0.99, 99), (1.0, 100)])
def test_a_quantile_is_one_of_the_values(q, value):
    assert quantile([float(i) for i in range(100, 0, -1)], q) == value


@pytest.mark.parametrize(
    ("value", "bound", "binding", "verdict"),
    [
        (0.9, 1, True, "pass"),
        (1.1, 1, True, "FAIL"),
        (0.9, 1, False, "(pass)"),
        (1.1, 1, False, "(miss)"),
        (math.nan, 1, True, "ERROR"),
        (0.9, None, True, "shown"),
        (math.nan, None, True, "ERROR"),
    ],
)
def test_only_a_binding_limit_can_fail(value, bound, binding, verdict):
    limit = None if bound is None else Limit(sign="≤", bound=bound)
    row = Row(figure="f", case="c", model="tiny", value=value, limit=limit, binding=binding)
    assert row.verdict == verdict


def test_first_tokens_are_compared_by_difference_and_speeds_by_ratio():
    rounds = [{"ours": {"ms": 30.0, "rate": 9.0}, "theirs": {"ms": 25.0, "rate": 10.0}} for _ in range(3)]
    table = gguf.Turns(model="smollm2", case="1 stream", samples=rounds)
    difference, ratio = (
        table.difference("ms", "a cached prompt"),
        table.ratio("decode", "rate", limit=Limit(sign="≥", bound=0.95)),
    )
    assert (difference.value, difference.unit, difference.verdict) == (5.0, "ms", "pass")
    assert (ratio.value, ratio.verdict, ratio.summary) == (pytest.approx(0.9), "FAIL", "9.0 against 10.0 tok/s")


def small_harness(bench):
    found = harness.measure_harness(streams=2, per_second=400, tokens=20)
    share = found.decode_share
    return [
        Row(figure="harness", case="2 | streams", model="-", value=share, limit=Limit(sign="≥", bound=0.5)),
        Row(figure="cores", case="2 | streams", model="-", value=99, limit=Limit(sign="≤", bound=1), unit="cores"),
        Row(figure="other", case="", model="-", value=0.5, limit=Limit(sign="≥", bound=1), binding=False),
        Row(figure="known", case="", model="-", value=0.5, summary="no limit"),
    ]


def point(figure, server, x, value):
    return Row(figure=figure, case="", model="-", value=value, unit="tok/s", detail={"server": server, "x": x})


def figure(title, measure):
    return program.Figure(title=title, about="", measure=measure, models=("tiny",))


def failing(bench):
    raise BenchError("the measurement failed")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder to which the program writes. The only figure is fast and needs no model."""
    monkeypatch.setattr(paths, "PAGE", tmp_path / "benchmark-results.md")
    monkeypatch.setattr(paths, "IMAGES", tmp_path / "images")
    monkeypatch.setattr(report, "BUILD", tmp_path)
    monkeypatch.setattr(program, "folder_of", lambda model: tmp_path)
    only = figure("harness", small_harness)
    monkeypatch.setattr(program, "FIGURES", {"harness": only})
    ends = signal.getsignal(signal.SIGTERM)
    yield tmp_path
    signal.signal(signal.SIGTERM, ends)


def test_a_complete_run_writes_the_page_with_limits_verdicts_machine_and_commit(folder):
    section = "\n## On another machine\n\nOther results.\n"
    (folder / "benchmark-results.md").write_text(f"Previous results.\n{section}")
    assert program.main([]) == 1
    (kept,) = folder.glob("*.json")
    facts = json.loads(kept.read_text())
    text = (folder / "benchmark-results.md").read_text()
    assert text.endswith(section)
    assert "Previous" not in text
    head, _, measured, failed, other, known = [line for line in text.splitlines() if line.startswith("|")]
    assert head.split(" | ")[3:6] == ["value", "limit", "verdict"]
    assert measured.startswith("| harness | 2 \\| streams | - | ")
    assert "| ≥ 0.5 | pass |" in measured
    assert "| 99.000 cores | ≤ 1 cores | **FAIL** |" in failed
    assert "| 0.500 | ≥ 1 | (miss) |" in other
    assert "| 0.500 |  | shown |" in known
    assert "1 of 2 binding limits hold." in text
    assert facts["commit"][:12] in text
    assert facts["machine"]["cpu"] in text
    assert facts["started_at"] in text


@pytest.mark.parametrize("arguments", [["--quick"], ["--only", "harness"], ["--model", "tiny"]])
def test_a_partial_run_does_not_write_the_page(folder, arguments):
    (folder / "benchmark-results.md").write_text("unchanged")
    program.main(arguments)
    assert len(list(folder.glob("*.json"))) == 1
    assert (folder / "benchmark-results.md").read_text() == "unchanged"


def test_a_failed_measurement_prevents_writing_the_page(folder, monkeypatch):
    monkeypatch.setitem(program.FIGURES, "failing", figure("failing", failing))
    assert program.main([]) == 1
    (kept,) = folder.glob("*.json")
    assert json.loads(kept.read_text())["rows"][-1]["summary"] == "the measurement failed"
    assert not (folder / "benchmark-results.md").exists()


def test_an_interrupted_run_keeps_the_figures_before(folder, monkeypatch):
    def interrupted(bench):
        raise KeyboardInterrupt

    monkeypatch.setitem(program.FIGURES, "last", figure("last", interrupted))
    with pytest.raises(KeyboardInterrupt):
        program.main([])
    (kept,) = folder.glob("*.json")
    assert [row["figure"] for row in json.loads(kept.read_text())["rows"]] == ["harness", "cores", "other", "known"]


def test_the_page_shows_a_chart_of_each_curve(folder):
    rows = [
        point(curves.STREAMS, server, x, x * factor)
        for server, factor in {"one": 10.0, "two": 5.0}.items()
        for x in (1, 2, 4)
    ]
    facts = program.provenance(mlx_device="", settings={})
    page.write(rows, facts, folder / "benchmark-results.md")
    (chart,) = (folder / "images").iterdir()
    assert f"](images/{chart.name})" in (folder / "benchmark-results.md").read_text()
    drawn = chart.read_bytes()
    assert drawn.count(b'<g id="line2d_') > 2
    page.write(rows, facts, folder / "benchmark-results.md")
    assert chart.read_bytes() == drawn


def test_a_figure_can_be_measured_again_in_an_earlier_run(folder, monkeypatch):
    monkeypatch.setitem(program.FIGURES, "failing", figure("again", failing))
    program.main([])
    (kept,) = folder.glob("*.json")
    assert not (folder / "benchmark-results.md").exists()
    found = [
        Row(figure="again", case="a case", model="tiny", value=2.0, limit=Limit(sign="≤", bound=3)),
        Row(figure="known", case="", model="-", value=0.7),
    ]
    monkeypatch.setitem(program.FIGURES, "failing", figure("again", lambda bench: found))
    assert program.main(["--only", "failing", "--into", str(kept)]) == 1
    rows = json.loads(kept.read_text())["rows"]
    assert [(row["figure"], row["verdict"]) for row in rows] == [
        ("harness", "pass"),
        ("cores", "FAIL"),
        ("other", "(miss)"),
        ("known", "shown"),
        ("again", "pass"),
    ]
    text = (folder / "benchmark-results.md").read_text()
    assert "| again | a case | tiny | 2.000 | ≤ 3 | pass |" in text
    assert "| known |  | - | 0.700 |" in text
    assert "- measured again: `failing`; " in text


@pytest.mark.long
def test_requests_and_memory_of_a_running_server_are_measured():
    """A busy machine may miss a limit, so only the measured rows count and not the exit status."""
    command = [
        *(sys.executable, "-m", "benchmarks", "--quick", "--model", "tiny", "--only", "disconnect", "--only", "leak"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=paths.ROOT)
    assert re.findall(r"^(\w+), tiny: ", done.stdout, re.MULTILINE) == ["disconnect", "leak"], done.stderr
