"""Test ``lab.evaluate`` on the echo engine: scores, errors in rows, failures, comparisons, judges and experiments."""

import asyncio
import copy
import datetime
import html
import json
import pickle
import signal
import sqlite3
import time
import zlib

import numpy as np
import pandas as pd
import polars
import pytest

import lmx_lab
from lmx_lab.batch.run import BatchRun
from lmx_lab.errors import BatchStoppedError, InvalidRequestError, LabError
from lmx_lab.evals import Choice, Judge, Metric
from lmx_lab.evals.evaluation import Evaluation
from lmx_lab.evals.experiments import Experiments
from lmx_lab.evals.rows import EvaluatedRow
from lmx_lab.notebook.lab import attach
from lmx_lab.results.statistics import BOOTSTRAP, MCNEMAR, WILSON
from tests.support.labs import forbid_waits_on_loops, serving

FRAME = pd.DataFrame(
    {"text": ["one", "two", None, "four"], "answer": ["one", "three", "x", np.nan]}, index=["a", "b", "c", "d"]
)


def test_rows_are_scored_except_rows_with_errors(lab):
    result = lab.evaluate(FRAME, "{text}", answer="answer")
    assert list(result.df.index) == ["a", "b", "c", "d"]
    assert result.df["score"].fillna(-1).tolist() == [1, 0, -1, -1]
    assert result.df["answer"].tolist() == ["one", "two", None, "four"]
    assert result.df["prompt"].tolist() == ["one", "two", None, "four"]
    assert "text has no value" in result.df.loc["c", "error"]
    assert "answer has no value" in result.df.loc["d", "error"]
    assert (result.score.mean, result.score.n, result.score.method, result.errors) == (0.5, 2, WILSON, 2)
    assert list(result.failures.index) == ["b", "c", "d"]
    assert "rows without a score: 2" in repr(result)
    assert "three" in result._repr_html_()
    # The recorded request, and the same tokens scored if it is not recorded any more.
    recorded = result.lens("b")
    assert recorded.df["token"].tolist() == lab.requests[result.df.loc["b", "request_id"]].lens().df["token"].tolist()
    with pytest.MonkeyPatch.context() as patched:
        forbid_waits_on_loops(patched)
        assert asyncio.run(result.alens("b")).df.equals(recorded.df)
    for lens in (result.lens("b", choice="one two"), asyncio.run(result.alens("b", choice="one two"))):
        assert "".join(lens.df["token"]) == "one two"
    lab.requests.clear()
    assert "".join(result.lens("b").df["token"]) == "two"
    with pytest.raises(KeyError, match="no request"):
        lab.requests[result.df.loc["b", "request_id"]]
    with pytest.raises(InvalidRequestError, match="has no answer"):
        result.lens("c")
    with pytest.raises(InvalidRequestError, match="no rows have the label 'z'"):
        result.lens("z")
    with pytest.raises(InvalidRequestError, match=f"no row has the position {len(result.rows)}; pass .* position=0 to"):
        result.lens("b", position=len(result.rows))
    without_role = lab.evaluate(["a"], lambda row: [{"content": row["text"]}], answer="text", store=False)
    with pytest.raises(InvalidRequestError, match=r"row 0 has no valid prompt: .*role"):
        without_role.lens(0, choice="a")
    assert "list of messages" in lab.evaluate(["a"], lambda row: [row["text"]], answer="text").df.loc[0, "error"]
    with pytest.raises(InvalidRequestError, match="'c'"):
        lab.evaluate(FRAME, "{text}", answer="answer", errors="raise")


def test_functions_see_the_expected_value_or_the_row(lab):
    rows = [{"text": "abc", "n": 4}, {"text": "abcde", "n": 5}]
    result = lab.evaluate(rows, "{text}", answer="n", metric=lambda answer, n: len(answer) / n)
    assert result.df["score"].tolist() == [0.75, 1]
    assert (result.score.n, result.score.method) == (2, "too few scores for an interval, 2; evaluate more rows")
    enough = lab.evaluate(rows * 3, "{text}", answer="n", metric=lambda answer, n: len(answer) / n)
    assert enough.score.method == BOOTSTRAP
    assert enough.score.low < enough.score.mean < enough.score.high
    by_row = lab.evaluate(rows, "{text}", metric=lambda answer, row: len(answer) == row["n"])
    assert by_row.df["score"].tolist() == [0, 1]
    assert by_row.failures.index.tolist() == [0]


def test_functions_can_change_their_row(lab):
    rows = pd.DataFrame({"text": ["a", "b"], "n": ["a", "x"]})
    unchanged = lab.evaluate(rows, "{text}", answer="n", store=False)
    changed = lab.evaluate(rows, lambda row: row.pop("text"), answer="n", store=False)
    assert (changed.df["score"].tolist(), changed.facts.frame) == ([1, 0], unchanged.facts.frame)
    by_row = lab.evaluate(rows, "{text}", metric=lambda answer, row: row.pop("n") == answer, n=2, store=False)
    assert by_row.df["score"].tolist() == [1, 1, 0, 0]
    assert by_row.facts.frame == unchanged.facts.frame


def test_a_row_whose_score_is_invalid_keeps_its_answer(lab):
    class Known(Metric):
        @property
        def settings(self):
            return {"name": "known"}

        def score(self, answer, expected):
            return {"a": 100.0, "b": 1}[answer]

    rows = ["a", "b", "c"]
    result = lab.evaluate(rows, "{text}", metric=Known(), answer="text", store=False)
    assert result.df["answer"].tolist() == rows
    assert result.df["score"].fillna(-1).tolist() == [-1, 1, -1]
    assert "returned 100.0; it must return a number from 0" in result.df["error"][0]
    assert "raised KeyError" in result.df["error"][2]
    assert (result.errors, result.score.n) == (2, 1)


@pytest.mark.parametrize("chat_template", [True, False])
def test_choices_are_scored(lab, tmp_path, chat_template):
    rows = [{"text": "a", "right": 1, "options": ["yes", "no, never"]}, {"text": "b", "right": 0, "options": ["yes"]}]
    metric = Choice("options", chat_template=chat_template)
    result = lab.evaluate(rows, "Is it {text}? ", answer="right", metric=metric, cache=tmp_path / "a.db")
    first = result.df.iloc[0]
    assert first["answer"] in rows[0]["options"]
    assert len(first["logprobs"]) == 2
    assert all(logprob < 0 for logprob in first["logprobs"])
    assert 0.5 <= first["probability"] <= 1
    assert "column options" in result.df.loc[1, "error"]
    # An expected value that is missing or wrong does not hide which choice was the most likely one.
    wrong = pd.DataFrame({"text": ["a", "a", "a"], "right": [1, None, 7], "options": [rows[0]["options"]] * 3})
    kept = lab.evaluate(wrong, "Is it {text}? ", answer="right", metric=metric).df
    assert kept["answer"].tolist() == [first["answer"]] * 3
    assert kept["probability"].tolist() == pytest.approx([first["probability"]] * 3)
    assert kept["logprobs"].tolist() == [pytest.approx(first["logprobs"])] * 3
    assert kept["score"].isna().tolist() == [False, True, True]
    assert ["no value" in kept["error"][1], "one of the choices" in kept["error"][2]] == [True, True]
    lens = result.lens(0, choice="no, never")
    assert lens.logprob == pytest.approx(first["logprobs"][1], abs=1e-6)
    cached = lab.evaluate(rows, "Is it {text}? ", answer="right", metric=metric, cache=tmp_path / "a.db")
    assert cached.df["logprobs"][0] == pytest.approx(first["logprobs"])


def test_choices_of_one_token_need_one_request(lab):
    rows = [{"text": "a", "right": "b"}] * 12
    result = lab.evaluate(rows, "{text}", answer="right", metric=Choice(["a", "b", "c"]))
    assert "(12 rows; rows that repeat another one: 11, so the interval is too narrow; " in repr(result)
    assert "repeat" not in repr(lab.evaluate(FRAME, "{text}", answer="answer", n=2, store=False))
    assert result.df["request_id"].notna().all()
    assert result.df["logprobs"].map(len).eq(3).all()
    bins = result.calibration()
    assert bins["n"].sum() == 12
    assert 0 <= bins.attrs["expected_calibration_error"] <= 1
    with pytest.raises(InvalidRequestError, match="no choices"):
        lab.evaluate(rows, "{text}", answer="right").calibration()


def test_an_evaluation_is_copied_without_its_lab(lab):
    result = lab.evaluate(FRAME, "{text}", answer="answer")
    for again in (pickle.loads(pickle.dumps(result)), copy.deepcopy(result)):
        pd.testing.assert_frame_equal(again.df, result.df)
        assert repr(again) == repr(result)
        with pytest.raises(InvalidRequestError, match="without a lab"):
            again.lens("a")


def test_two_evaluations_of_the_same_rows_are_compared(lab):
    rows = pd.DataFrame({"text": list("abcd"), "answer": ["a", "b", "x", "y"]})
    one = lab.evaluate(rows, "{text}", answer="answer")
    other = lab.evaluate(rows.iloc[::-1], "{text}!", answer="answer")
    test = one.compare(other)
    assert (test.method, test.better, test.worse, test.n) == (MCNEMAR, 2, 0, 4)
    assert test.p_value == 0.5
    with pytest.raises(InvalidRequestError, match="different expected"):
        one.compare(lab.evaluate(rows.assign(answer="z"), "{text}", answer="answer"))
    # pandas converts labels and values to floats if some are missing; stored evaluations have those of JSON.
    numbers = pd.DataFrame({"text": ["1", "2"], "answer": [1, 3]}, index=[1, 2])
    first = lab.evaluate(numbers, "{text}", answer="answer", name="numbers")
    for dtype in ("float64", "int8", "Float64", "float32"):
        changed = numbers.astype({"answer": dtype}).set_axis(numbers.index.astype(dtype)).iloc[::-1]
        same = lab.evaluate(changed, "{text}", answer="answer")
        for each in (first, lab.experiments["numbers"]):
            assert (each.compare(same).n, same.compare(each).difference) == (2, 0)
        assert same.lens(1).df["token"][0] == "1"
    # pandas has NaN for a missing value, polars None.
    lists = [
        lab.evaluate(table, "{t}", answer="y")
        for table in (
            pd.DataFrame({"t": ["a", "b"], "y": ["a", np.nan]}),
            polars.DataFrame({"t": ["a", "b"], "y": ["a", None]}),
        )
    ]
    assert lists[0].compare(lists[1]).n == 1
    with pytest.raises(InvalidRequestError, match=r'no row is in both .*the labels are 1, 2, .* other one "1", "2"'):
        first.compare(lab.evaluate(numbers.set_axis(["1", "2"]), "{text}", answer="answer"))
    with pytest.raises(InvalidRequestError, match=r"other is 0\.5"):
        one.compare(0.5)
    with pytest.raises(InvalidRequestError, match="unique index"):
        one.compare(lab.evaluate(rows.set_index(pd.Index([0, 0, 1, 1])), "{text}", answer="answer"))


def test_a_judge_gives_a_verdict(lab):
    # The judge repeats its prompt, as far as the schema allows it.
    rows = [{"text": "good"}, {"text": "bad"}, {"text": None}]
    judge = Judge('{{"verdict":"{answer}"}}', verdicts={"good": 1, "bad": 0.25})
    result = lab.evaluate(rows, "{text}", metric=judge)
    assert result.df["verdict"].tolist() == ["good", "bad", None]
    assert result.df["score"].fillna(-1).tolist() == [1, 0.25, -1]
    assert lab.experiments[-1].facts.settings["metric"]["model"] == "echo"
    failed = lab.evaluate([*rows[:1], {"text": ""}], "{text}", metric=Judge(lambda row: 1 / len(row["answer"]) and "x"))
    assert "the judge: the prompt function raised" in failed.df.loc[1, "error"]


@pytest.mark.slow  # Starts a second lab.
def test_another_lab_judges(lab, tmp_path):
    rows = [{"text": "good"}, {"text": "bad"}]
    with serving(tmp_path, "echo") as other:
        elsewhere = Judge('{{"verdict":"{answer}"}}', verdicts={"good": 1, "bad": 0.25}, lab=other)
        assert asyncio.run(lab.aevaluate(rows, "{text}", metric=elsewhere)).df["verdict"].tolist()[:2] == [
            "good",
            "bad",
        ]
        assert lab.evaluate(rows, "{text}", metric=elsewhere).df["verdict"].tolist()[:2] == ["good", "bad"]
        assert len(other.requests) == 6  # Each of both runs also checks the schema with one request.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"answer": "label"}, "columns are text, answer"),
        ({}, "answer=..., one of text, answer"),
        ({"answer": "answer", "prompt": "{texts}"}, "columns are text, answer"),
        ({"answer": "answer", "metric": "exact"}, "exact_match"),
        ({"answer": "answer", "metric": Choice("options")}, "columns are text, answer"),
        ({"answer": "answer", "metric": Choice(["a", "b"], chat_template=False), "system": "s"}, "chat_template"),
        ({"metric": Judge("{verdict}")}, "columns are text, answer, expected"),
        ({"metric": Judge("{expected}")}, "contains {expected}, but no column"),
        ({"metric": Judge("{answer}", lab="http://127.0.0.1:8400")}, "pass a lab"),
        ({"answer": "answer", "metric": Choice(["a", "b"]), "errors": "rais"}, "errors is 'rais'"),
        ({"answer": "answer", "metric": Choice(["a", "b"]), "labs": []}, "leave labs out"),
        ({"answer": "answer", "n": 0}, "n is 0"),
        ({"answer": "answer", "n": 2, "metric": Choice(["a", "b"])}, "leave n out"),
        ({"answer": "answer", "temperature": -1}, "temperature"),
        ({"answer": "answer", "name": 3}, "name is 3"),
        ({"answer": "text", "frame": iter(["a"])}, "an iterable"),
    ],
)
def test_bad_arguments_are_refused(lab, arguments, message):
    with pytest.raises(InvalidRequestError, match=message):
        lab.evaluate(**{"frame": FRAME, "prompt": "{text}", **arguments})


def test_the_score_of_a_row_with_several_answers_is_their_mean(lab):
    # The metric counts its calls, because the echo engine gives the same answer each time.
    calls = {}

    def is_right(answer, row):
        calls[answer] = calls.get(answer, 0) + 1
        return calls[answer] <= row["right"]

    rows = pd.DataFrame({"text": ["a", "b", None], "right": [3, 1, 0]}, index=["x", "y", "z"])
    result = lab.evaluate(rows, "{text}", metric=is_right, n=4, name="several")
    assert result.df.index.tolist() == [label for label in "xyz" for _ in range(4)]
    assert result.df["sample"].tolist() == [0, 1, 2, 3] * 3
    assert (result.score.mean, result.score.n, result.errors) == (0.5, 2, 4)
    # There are two means, not eight scores.
    assert "too few scores for an interval, 2" in result.score.method
    assert result.pass_at(1).mean == pytest.approx(0.5)
    # The probability that one of two answers is right is 1 - 0 / 6 in the first row, and 1 - 3 / 6 in the second one.
    assert result.pass_at(2).mean == pytest.approx((1 + 0.5) / 2)
    assert (result.pass_at(4).mean, result.pass_at(4).method) == (1, WILSON)
    for k in (5, True):
        with pytest.raises(InvalidRequestError, match="from 1 to 4"):
            result.pass_at(k)
    with pytest.raises(InvalidRequestError, match="no answer has a score"):
        lab.evaluate(rows.loc[["z"]], "{text}", metric=is_right, n=2, store=False).pass_at(1)
    assert "2 rows, 4 answers each" in repr(result)
    assert result.lens(position=5).df["token"].iloc[0] == "b"
    opened = lab.experiments["several"]
    pd.testing.assert_frame_equal(opened.df, result.df)
    single = lab.evaluate(rows, "{text}", metric=lambda answer, row: answer == "a")
    test = opened.compare(single)
    assert (test.n, test.better, test.worse, test.difference) == (2, 1, 1, 0)


def test_a_judge_reads_the_row_of_each_of_several_answers(lab):
    rows = [{"text": "a", "answer": "a"}, {"text": "b", "answer": "b"}]
    result = lab.evaluate(rows, "{text}", answer="answer", metric=Judge("{text} {expected} {answer}"), n=2)
    assert result.df["verdict"].notna().all()
    assert result.df["expected"].tolist() == ["a", "a", "b", "b"]
    assert result.errors == 0


@pytest.mark.parametrize("metric", ["contains", Choice(["one", "two words"]), Judge("{answer}")], ids=str)
def test_the_columns_do_not_depend_on_the_rows(lab, metric):
    frame = FRAME[["text", "answer"]]
    n = {} if isinstance(metric, Choice) else {"n": 2}
    options = {"answer": "answer", "metric": metric, "store": False, **n}
    full = lab.evaluate(frame, "{text}", **options).df
    for some in (frame.iloc[:0], frame.iloc[2:3]):
        pd.testing.assert_series_equal(lab.evaluate(some, "{text}", **options).df.dtypes, full.dtypes)


def test_an_empty_frame_has_no_score(lab):
    empty = pd.DataFrame({"text": [], "answer": []})
    for metric in ("exact_match", Choice(["a", "b"])):
        result = lab.evaluate(empty, "{text}", answer="answer", metric=metric)
        assert (result.score.n, len(result.df), result.errors) == (0, 0, 0)
        assert "nan" in repr(result)


def test_labels_and_numbers_are_exact_although_others_are_missing(lab):
    labels = [2**60 + 1, None, 3]
    frame = FRAME.iloc[:3].set_axis(pd.Index(labels, dtype="object"))
    result = lab.evaluate(frame, "{text}", answer="answer", store=False)
    assert list(result.df.index) == labels
    assert result.df["output_tokens"].isna().tolist() == [False, False, True]
    assert result.df["output_tokens"].dtype == "Int64"
    assert result.lens(2**60 + 1).df["token"][0] == "one"
    right = lab.evaluate(frame.iloc[:1], "{text}", answer="answer", store=False)
    assert len(right.failures) == 0
    assert right.failures.dtypes.to_dict() == right.df.dtypes.to_dict() == result.df.dtypes.to_dict()


def test_evaluations_are_stored_and_opened_again(lab, tmp_path):
    before = len(lab.experiments)
    frame = FRAME.set_index(pd.MultiIndex.from_tuples([("a", np.int64(1)), ("a", 2), ("b", 1), ("b", 2)]))
    first = lab.evaluate(frame, "{text}", answer="answer", name="first", temperature=0, system="s")
    second = lab.evaluate(frame, lambda row: f"{row['text']}!", answer="answer", name="second")
    lab.evaluate(frame, "{text}", answer="answer", store=False)
    lab.evaluate(frame.iloc[:0], "{text}", answer="answer", name="empty")
    experiments = lab.experiments
    assert len(experiments) == before + 3
    opened = experiments["first"]
    pd.testing.assert_frame_equal(opened.df, first.df)
    assert (opened.facts, opened.score, opened.id) == (first.facts, first.score, first.id)
    assert opened.facts.settings["parameters"] == {"temperature": 0, "system": "s"}
    assert opened.facts.versions["lmx-lab"] == lmx_lab.__version__
    assert "".join(opened.lens(("a", 1)).df["token"]).startswith("one")
    assert str(opened.compare(experiments[-2])) == str(first.compare(second))
    table = experiments.df
    assert table.loc[first.id, "score"] == 0.5
    assert table.loc[first.id, "frame"] == table.loc[second.id, "frame"] != ""
    assert table.loc[second.id, "settings"]["prompt"].startswith("function")
    assert pd.isna(table.iloc[-1]["score"])
    assert Experiments(tmp_path / "none.db").df.dtypes.to_dict() == table.dtypes.to_dict()
    assert "first" in repr(experiments)
    assert "second" in experiments._repr_html_()
    assert [each.name for each in experiments[-3:]] == ["first", "second", "empty"]
    # Without a lab.
    alone = Experiments(experiments.path)
    assert [each.id for each in alone] == table.index.tolist()
    with pytest.raises(InvalidRequestError, match="without a lab"):
        alone["first"].lens(("a", 2))
    with pytest.raises(KeyError, match="did you mean 'second'"):
        alone["sec0nd"]
    with pytest.raises(IndexError):
        alone[1000]
    with pytest.raises(InvalidRequestError, match="'contains' is not the id"):
        alone.delete("contains")
    alone.delete(first.id or 0)
    assert len(alone) == before + 2
    assert experiments.path.stat().st_mode & 0o077 == 0


def test_a_home_without_experiments_and_a_foreign_file(tmp_path):
    none = Experiments(tmp_path / "experiments.db")
    assert (len(none), len(none.df), list(none)) == (0, 0, [])
    assert none.df.dtypes.to_dict() == dict.fromkeys(none.df.columns, "str") | {
        **{"at": "datetime64[us, UTC]", "rows": "int64", "errors": "int64", "settings": "object", "versions": "object"},
        **dict.fromkeys(("score", "low", "high"), "float64"),
    }
    assert repr(none).endswith("stored experiments: 0")
    none.delete(1)
    assert not none.path.exists()
    (tmp_path / "notes.txt").write_text("not a database" * 100)
    with pytest.raises(InvalidRequestError, match="move it elsewhere"):
        len(Experiments(tmp_path / "notes.txt"))


def test_an_interrupted_evaluation_is_returned_but_not_stored(lab, monkeypatch):
    def interrupted(run):
        raise KeyboardInterrupt

    before = len(lab.experiments)
    monkeypatch.setattr(BatchRun, "read", interrupted)
    result = lab.evaluate(["a", "b"], "{text}", answer="text")
    assert isinstance(result, Evaluation)
    assert (result.interrupted, "(interrupted; 0 rows; rows without a score: 2; " in repr(result)) == (True, True)
    assert (result.errors, result.id, len(lab.experiments)) == (2, None, before)


def test_an_interrupt_while_answers_are_scored_or_judged_keeps_them(lab):
    def interrupt(*args):
        if "two" in str(args):
            raise KeyboardInterrupt
        return 1

    rows = ["one", "two", "three"]
    scored = lab.evaluate(rows, "{text}", metric=interrupt)
    assert scored.df["answer"].tolist() == rows
    assert scored.df["score"].fillna(-1).tolist() == [1, -1, -1]
    judged = lab.evaluate(rows, "{text}", metric=Judge(interrupt))
    assert judged.df["answer"].tolist() == rows
    assert judged.df["error"].str.contains("was not judged").all()
    assert (scored.id, judged.id) == (None, None)

    def slow(answer, row):
        # The first interrupt is raised between two rows, so that it does not disturb a server on this thread.
        signal.raise_signal(signal.SIGINT)
        time.sleep(0.2)
        return 1

    stopped = lab.evaluate(rows, "{text}", metric=slow)
    assert stopped.df["score"].fillna(-1).tolist() == [1, -1, -1]
    assert stopped.id is None


def test_a_judge_that_fails_keeps_the_answers(lab):
    with pytest.raises(BatchStoppedError, match=r"the judge failed: .*3.* contains the answers") as caught:
        lab.evaluate(["a", "b"], "{text}", metric=Judge("{answer}", system=3))
    assert caught.value.frame["answer"].tolist() == ["a", "b"]
    with pytest.raises(InvalidRequestError, match="row 0: the judge: "):
        lab.evaluate(["a"], "{text}", metric=Judge(lambda row: 1 / 0), errors="raise")


def test_a_missing_judge_is_detected_before_the_first_row(lab):
    before = len(lab.requests)
    with attach(lab.url) as far:
        pass
    with pytest.raises(LabError, match="was stopped"):
        lab.evaluate(["a"], "{text}", metric=Judge("{answer}", lab=far))
    assert len(lab.requests) == before


def test_an_evaluation_that_cannot_be_stored_is_returned(lab, tmp_path, monkeypatch):
    (tmp_path / "experiments.db").mkdir()
    (tmp_path / "file").touch()
    with attach(lab.url) as far:
        monkeypatch.setenv("LMX_LAB_HOME", str(tmp_path))
        with pytest.warns(RuntimeWarning, match=r"not stored: .*experiments\.db cannot be used .* move it elsewhere"):
            result = far.evaluate(["a"], "{text}", answer="text")
        assert (result.score.mean, result.id) == (1, None)
        monkeypatch.setenv("LMX_LAB_HOME", str(tmp_path / "file" / "home"))
        with pytest.warns(RuntimeWarning, match="cannot be created"):
            assert far.evaluate(["a"], "{text}", answer="text").id is None


def test_damaged_rows_are_named(lab, tmp_path):
    path = tmp_path / "experiments.db"
    Experiments(path).add(lab.evaluate(["a"], "{text}", answer="text", store=False))
    connection = sqlite3.connect(path)
    with connection:
        connection.execute("UPDATE experiments SET data = X'00'")
    connection.close()
    assert len(Experiments(path).df) == 1
    with pytest.raises(LabError, match=r"experiment 1 .* damaged.*delete\(1\)"):
        Experiments(path)[0]


def test_rows_are_stored_as_flat_objects(lab, tmp_path):
    rows = [{"text": "a", "right": "b"}]
    result = lab.evaluate(rows, "{text}", answer="right", metric=Choice(["a", "b"]), store=False)
    experiments = Experiments(tmp_path / "experiments.db")
    experiments.add(result)
    connection = sqlite3.connect(experiments.path)
    (data,) = connection.execute("SELECT data FROM experiments").fetchone()
    connection.close()
    (stored,) = json.loads(zlib.decompress(data))["rows"]
    (row,) = result.rows
    assert stored == {
        **{"label": 0, "sample": None, "prompt": "a", "expected": "b", "answer": row.answer, "score": row.score},
        **{"error": None, "choices": ["a", "b"], "logprobs": list(row.logprobs), "verdict": None},
        **{"finish_reason": None, "prompt_tokens": row.answered.prompt_tokens, "output_tokens": None},
        **{"total_s": row.answered.total_s, "request_id": row.answered.request_id},
    }
    again = EvaluatedRow.of_fields({**stored, "new": 1})
    assert again.to_fields() == {**row.to_fields(), "choices": ["a", "b"], "logprobs": stored["logprobs"]}
    assert again.probability == row.probability


DAYS = [datetime.date(2026, 3, 28), datetime.date(2026, 3, 29)]
INDEXES = {
    "name": pd.Index(["u", "v"], name="id"),
    "levels": pd.MultiIndex.from_tuples([("a", 1), ("b", 2)], names=["k", "n"]),
    "categories": pd.CategoricalIndex(["x", "y"], categories=["y", "x", "z"], ordered=True, name="c"),
    "levels of categories and times": pd.MultiIndex.from_arrays(
        [pd.CategoricalIndex(["x", "y"]), pd.to_datetime(DAYS)], names=[("a", 1), None]
    ),
    "times": pd.date_range("2026-03-28", periods=2, tz="Europe/Berlin", name="day"),
    "days": pd.Index(DAYS, name="day"),
    "missing days": pd.Index([DAYS[0], None]),
    "days of pyarrow": pd.Index(DAYS, dtype="date32[day][pyarrow]"),
    "durations": pd.to_timedelta([1, 2], unit="h"),
    "months": pd.period_range("2026-01", periods=2, freq="M", name="month"),
    "bins": pd.interval_range(0.5, 2.5, name="bin", closed="left"),
    "ranges of times": pd.IntervalIndex.from_breaks(pd.to_datetime([*DAYS, datetime.date(2026, 4, 1)])),
    "small integers": pd.Index([1, 2], dtype="int8", name=0),
    "missing integers": pd.Index([1, pd.NA], dtype="Int64"),
    "missing times": pd.DatetimeIndex(["2026-01-01", pd.NaT]),
    "missing floats": pd.Index([0.5, np.nan]),
    "booleans": pd.Index([True, False]),
    "strings": pd.Index(["1", "b"], dtype="string"),
    "tuples": pd.Index([("a", "b"), "c"], tupleize_cols=False),
}


@pytest.mark.parametrize("kind", INDEXES)
def test_tables_of_answers_vectors_and_scores_have_the_index_of_the_rows(lab, kind):
    index = INDEXES[kind]
    frame = pd.DataFrame({"text": ["one", "two"], "right": ["one", "x"]}, index=index)
    answers, vectors = lab.map(frame, "{text}"), lab.embed_frame(frame, "text")
    assert answers.index.identical(index)
    assert vectors.index.identical(index)
    assert lab.map(frame, "{text}", n=2).index.identical(index.repeat(2))
    assert frame.join(answers)["answer"].tolist() == ["one", "two"]
    result = lab.evaluate(frame, "{text}", answer="right", name=kind)
    opened = lab.experiments[kind]
    for each in (result, opened):
        pd.testing.assert_index_equal(each.df.index, index, exact=True, check_freq=False)
        pd.testing.assert_index_equal(each.failures.index, index[[1]], exact=True, check_freq=False)
        assert each.lens(index[0]).df["token"][0] == "one"
    assert opened.compare(result).n == 2
    several = lab.evaluate(frame, "{text}", answer="right", n=2, name="several")
    pd.testing.assert_index_equal(several.failures.index, index[[1, 1]], exact=True, check_freq=False)
    pd.testing.assert_frame_equal(lab.experiments["several"].df, several.df)
    empty = frame.iloc[:0]
    assert lab.map(empty, "{text}", n=2).index.identical(index[:0])
    lab.evaluate(empty, "{text}", answer="right", name="empty")
    pd.testing.assert_index_equal(lab.experiments["empty"].df.index, index[:0], exact=True, check_freq=False)


def test_failures_show_labels_values_and_messages(lab):
    index = pd.MultiIndex.from_tuples([("a", 7)])
    frame = pd.DataFrame({"text": ["one"], "right": [[1.5, "x"]]}, index=index)
    messages = [{"role": "system", "content": "short"}, {"role": "user", "content": "say {text}"}]
    shown = lab.evaluate(frame, messages, answer="right", metric=lambda answer, right: 0)._repr_html_()
    for text in ("('a', 7)", "short\nsay one", "[1.5, 'x']"):
        assert f">{html.escape(text)}<" in shown


def test_values_of_any_type_are_stored(lab):
    frame = pd.DataFrame({"text": ["a"], "array": [np.array([[1, 2]])], "odd": [{(1, 2): {3}}]})
    result = lab.evaluate(frame, "{text}", answer="array", metric=lambda answer, array: array.size == 2)
    assert result.score.mean == 1
    assert lab.experiments[-1].rows[0].expected == [[1, 2]]
    chosen = lab.evaluate(frame, "{text}", answer="array", metric=Choice(["a", "b"]), store=False)
    assert "one of the choices" in chosen.df.loc[0, "error"]


@pytest.mark.slow
@pytest.mark.parametrize("files", ["tiny", "tiny_gguf"])
def test_the_log_probability_of_a_choice_is_that_of_its_tokens(files, request, tmp_path):
    found = request.getfixturevalue(files)
    options = [["cold", "a warm place"], ["wet", "dry", "old"]]
    frame = pd.DataFrame({"text": ["The sea", "A stone"], "options": options, "right": 0})
    with serving(tmp_path, getattr(found, "path", found), slots=4, threads=1) as lab:
        result = lab.evaluate(frame, "{text} is ", answer="right", metric=Choice("options", chat_template=False))
        assert result.df["error"].isna().all(), result.df["error"].tolist()
        for label, row in result.df.iterrows():
            for choice, logprob in zip(row["choices"], row["logprobs"], strict=True):
                lens = result.lens(label, choice=choice)
                # The space at the end of the prompt belongs to the choice.
                assert "".join(lens.df["token"]) == f" {choice}"
                # llama.cpp rounds differently in a score than in the request that has all choices.
                assert lens.logprob == pytest.approx(logprob, abs=1e-3 if files == "tiny" else 0.01)
        chat = lab.evaluate(frame, "{text}?", answer="right", metric=Choice(["a", "b", "c"]))
        assert chat.df["request_id"].notna().all()  # Choices of one token were scored by one request.
        for label, row in chat.df.iterrows():
            lens = [chat.lens(label, choice=choice).logprob for choice in "abc"]
            assert row["logprobs"] == pytest.approx(lens, abs=1e-3 if files == "tiny" else 0.01)
