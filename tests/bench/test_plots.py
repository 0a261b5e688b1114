"""Plots show medians with intervals. ``contract/test_figures`` has what all figures share."""

from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from lmx_lab.bench import by_concurrency, by_prompt_length, frame, summary
from lmx_lab.bench.summaries import TOTAL
from lmx_lab.errors import InvalidRequestError
from tests.support.samples import run_of, sample

pytestmark = pytest.mark.slow


def swept(**fields):
    return [
        sample
        for users in (1, 4, 8)
        for sample in run_of([at * users for at in range(10, 17)], per_repeat=1, concurrency=users, **fields)
    ]


def test_points_are_the_medians_and_bars_the_intervals_of_the_summary():
    samples = swept()
    chart = by_concurrency(samples, metrics=("ttft_ms",))
    (panel,) = chart.axes
    (bars,) = panel.containers
    line, _, (segments,) = bars.lines
    table = summary(samples)
    assert line.get_xdata().tolist() == [1, 4, 8]
    assert line.get_ydata().tolist() == table["ttft_ms"].tolist() == [13, 52, 104]
    ends = [sorted(y for _, y in segment) for segment in segments.get_segments()]
    assert ends == [pytest.approx(pair) for pair in zip(table["ttft_ms_low"], table["ttft_ms_high"], strict=True)]


def test_a_median_without_an_interval_has_no_bar():
    few, many = run_of([10.0, 11.0, 12.0]), run_of([20.0] * 7 + [30.0], concurrency=2)
    (panel,) = by_concurrency([*few, *many], metrics=("ttft_ms",)).axes
    (bars,) = panel.containers
    line, caps, (segments,) = bars.lines
    assert line.get_ydata().tolist() == [11, 20]
    assert [len(segment) for segment in segments.get_segments()] == [0, 2]
    assert all(np.isnan(float(cap.get_ydata()[0])) for cap in caps)


def test_lines_are_named_by_differing_values_and_the_title_has_common_ones():
    chart = by_concurrency([*swept(model="small", cache="cold"), *swept(model="small", cache="warm")])
    assert [text.get_text() for text in chart.legends[0].get_texts()] == ["cold cache", "warm cache"]
    assert chart.get_suptitle().split("\n") == [
        "lab · small · prompt 16 · answer 8",
        "totals and medians with 95 % confidence intervals",
    ]
    assert len(chart.axes) == 3


def test_a_plot_over_prompt_lengths_has_a_line_for_each_concurrency():
    samples = [one for tokens in (16, 64, 1024) for one in swept(prompt_tokens_wanted=tokens)]
    chart = by_prompt_length(samples)
    assert [text.get_text() for text in chart.legends[0].get_texts()] == [
        "1 concurrent",
        "4 concurrent",
        "8 concurrent",
    ]
    assert [axes.get_xscale() for axes in chart.axes] == ["log"] * 3


@pytest.mark.parametrize("users", [(1, 4), (1,)])
def test_all_lines_are_in_the_legend_with_different_names(users):
    names = ["long " * 40, "long " * 41, "_hidden", ""]
    samples = [one for name in names for each in users for one in run_of([1.0], target=name, concurrency=each)]
    legend = [text.get_text() for text in by_concurrency(samples, metrics=("ttft_ms",)).legends[0].get_texts()]
    assert [" ".join(name.split()) for name in legend] == [*(name.strip() for name in names[:3]), "not known"]


@pytest.mark.parametrize("plot", [by_concurrency, by_prompt_length])
def test_what_cannot_be_plotted_is_refused(plot):
    with pytest.raises(InvalidRequestError, match="nothing to plot"):
        plot(swept(warm_up=True))
    with pytest.raises(InvalidRequestError, match="unknown metric speed"):
        plot(swept(), metrics=("speed",))
    with pytest.raises(InvalidRequestError, match="empty"):
        plot(swept(), metrics=())


@pytest.mark.parametrize("samples", ["run.jsonl", None, [{"a": 1}], pd.DataFrame({"a": [1]})])
def test_rows_of_other_kinds_are_refused(samples):
    with pytest.raises(InvalidRequestError, match="pass the table of"):
        by_concurrency(samples)


def test_the_table_of_a_csv_file_is_drawn(tmp_path):
    frame(swept()).to_csv(tmp_path / "run.csv", index=False)
    table = pd.read_csv(tmp_path / "run.csv")
    pd.testing.assert_frame_equal(summary(table)[["ttft_ms", TOTAL]], summary(swept())[["ttft_ms", TOTAL]])
    assert len(by_concurrency(table).axes) == 3


def test_columns_and_numbers_are_metrics_names_and_titles():
    drawn = by_concurrency(swept(), metrics=pd.Series(["ttft_ms", "e2e_ms"]), names=np.array([3]), title=4)
    assert len(drawn.axes) == 2
    assert drawn.get_suptitle().startswith("4\n")
    for metrics in (None, 3, [None]):
        with pytest.raises(InvalidRequestError, match="unknown metric"):
            by_concurrency(swept(), metrics=metrics)
    with pytest.raises(InvalidRequestError, match=r"level is '0\.9'"):
        by_concurrency(swept(), level="0.9")


def test_control_characters_of_names_and_titles_are_escaped(tmp_path):
    samples = [one for name in ("a\0b", "c") for one in run_of([1.0], target=name, concurrency=1)]
    for options in ({}, {"title": "a\0b"}, {"names": ["a\x1b[31m", "b"]}):
        ElementTree.parse(by_concurrency(samples, **options).save(tmp_path / "run.svg"))


def test_a_single_case_is_drawn_as_a_bar_with_its_value():
    panel = by_concurrency(run_of([10.0, 20.0, 30.0, 40.0, 50.0, 60.0]), metrics=("ttft_ms",)).axes[0]
    (bar,) = panel.patches
    assert bar.get_height() == 35.0
    assert [text.get_text() for text in panel.texts] == ["35"]
    assert panel.get_xlabel() == "1 concurrent"
    assert not len(panel.get_xticks())


@pytest.mark.parametrize(("value", "label"), [(0.0, "0"), (0.01234, "0.01234"), (999.96, "1000"), (15854.2, "15,854")])
def test_a_bar_has_its_value_with_four_digits_or_without_decimals(value, label):
    (panel,) = by_concurrency([sample(ttft_ms=value)], metrics=("ttft_ms",)).axes
    assert [text.get_text() for text in panel.texts] == [label]


def test_a_bar_without_a_value_says_so_beside_others():
    (panel,) = by_concurrency([sample(ttft_ms=8.0), sample(target="other")], metrics=("ttft_ms",)).axes
    assert [(text.get_text(), text.xy) for text in panel.texts] == [("8", (0, 8)), ("not known", (1, 0))]


def legend_of(*sides, **options):
    samples = [one for side in sides for one in run_of([1.0], **side)]
    return [text.get_text() for text in by_concurrency(samples, metrics=("ttft_ms",), **options).legends[0].get_texts()]


LAB = {"target": "127.0.0.1:8400", "engine": "lmx-lab 0.9.0", "model": "org/small"}
OTHER = {"target": "http://host:8080/v1", "engine": "llama.cpp-b6123", "model": "small.gguf"}


@pytest.mark.parametrize(
    ("sides", "names"),
    [
        ((LAB, OTHER), ["lmx-lab · small", "llama.cpp · small.gguf"]),
        ((LAB, {**OTHER, "target": "other"}), ["lmx-lab · small", "other · llama.cpp · small.gguf"]),
        ((LAB, {**LAB, "target": "localhost:1", "engine": "lmx-lab 0.10.0"}), ["lmx-lab 0.9.0", "lmx-lab 0.10.0"]),
        ((LAB, {**LAB, "target": "localhost:1"}), ["127.0.0.1:8400", "localhost:1"]),
        ((LAB, {**LAB, "model": "other/small"}), ["org/small", "other/small"]),
        ((LAB, {**LAB, "threads": 2}), ["not known", "2 threads"]),
        (
            (
                {**LAB, "target": "mlx", "blas": "openblas"},
                {**LAB, "target": "llama.cpp", "engine": "x"},
            ),
            ["mlx", "llama.cpp"],
        ),
    ],
)
def test_a_legend_shows_names_engines_and_models_and_addresses_only_if_nothing_else_differs(sides, names):
    assert legend_of(*sides) == names


def test_names_a_title_and_a_size_are_chosen_by_the_caller():
    chart = by_concurrency(swept(), metrics=("ttft_ms",), title="Mine", size=(2.5, 2))
    assert chart.get_suptitle().split("\n")[0] == "Mine"
    assert list(chart.get_size_inches()) == [2.5, 2]
    assert by_concurrency(swept(), title="").get_suptitle() == ""
    assert legend_of(LAB, OTHER, names=["a $1$", "b"]) == ["a $1$", "b"]
    assert legend_of(LAB, OTHER, names={"lmx-lab · small": "mine"}) == ["mine", "llama.cpp · small.gguf"]
    assert legend_of(LAB, names="mine") == ["mine"]
    for names in (["a"], ["a", "a"], "a", {"other": "a"}):
        with pytest.raises(InvalidRequestError, match="give a different name for each of 'lmx-lab · small'"):
            legend_of(LAB, OTHER, names=names)


def test_a_plot_is_drawn_into_the_axes_of_the_caller():
    figure = Figure()
    axes = figure.subplots(1, 2)
    samples = [*swept(target="a"), *swept(target="b")]
    assert by_concurrency(samples, metrics=("ttft_ms", "e2e_ms"), ax=axes, title="$1$") is None
    assert [len(each.containers) for each in axes] == [2, 2]
    assert [text.get_text() for text in axes[0].get_legend().get_texts()] == ["a", "b"]
    assert axes[0].get_title() == "$1$"
    for wrong in (axes[0], figure, [figure] * 3):
        with pytest.raises(InvalidRequestError, match=r"give 3 axes, one for each of metrics=\('total_tok_s'"):
            by_concurrency(samples, ax=wrong)


@pytest.mark.parametrize("size", [(0, 2), (3,), (3, 1000), (float("nan"), 2), 3, "3x2", (None, 2), {"w": 3, "h": 2}])
def test_an_impossible_size_is_refused(size):
    with pytest.raises(InvalidRequestError, match="give the width and the height in inches, each from 1 to 100"):
        by_concurrency(swept(), size=size)


@pytest.mark.parametrize(
    ("count", "metrics", "words"),
    [
        (7, ("ttft_ms",), "medians with 90 % confidence intervals"),
        (7, ("ttft_ms", "queue_ms"), "medians with 90 % confidence intervals where enough requests were measured"),
        (3, ("total_tok_s",), "totals without intervals, which need 6 requests, or 3 repeats for totals"),
    ],
)
def test_the_caption_says_what_is_drawn(count, metrics, words):
    chart = by_concurrency([sample(ttft_ms=1.0 + at) for at in range(count)], metrics=metrics, level=0.9, title="t")
    assert " ".join(chart.get_suptitle().split()) == f"t {words}"
