"""Test copies of evaluations in MLflow, in Weights & Biases and in logs of Inspect, without a network."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from lmx_lab.batch.answers import RowAnswer
from lmx_lab.errors import InvalidRequestError
from lmx_lab.evals.evaluation import Evaluation
from lmx_lab.evals.exports import ExportedRun, figures, inspect_log
from lmx_lab.results.statistics import score_of
from tests.support.samples import FACTS, ROWS

INDEX = pd.MultiIndex.from_tuples([("a", 1), ("a", 2), ("b", 1)], names=["answer", "score"])
"""An index whose levels have the names of columns."""


@pytest.mark.long
def test_a_run_of_mlflow(tmp_path, monkeypatch):
    # mlflow-skinny has no database.
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow = pytest.importorskip("mlflow")
    uri = (tmp_path / "runs").as_uri()
    evaluation = Evaluation(FACTS, ROWS)
    ids = [evaluation.to_mlflow(experiment="lab", tracking_uri=uri) for _ in range(2)]
    client = mlflow.MlflowClient(uri)
    run = client.get_run(ids[1])
    assert run.info.run_name == "capitals"
    assert run.info.status == "FINISHED"
    assert run.data.metrics == pytest.approx(
        {"score": 0.5, "low": 0.0945, "high": 0.9055, "rows": 3, "errors": 1}, abs=1e-3
    )
    assert run.data.params["model"] == "m"
    assert json.loads(run.data.params["metric"]) == {"name": "contains"}
    (rows,) = Path(tmp_path).rglob(f"{ids[1]}/artifacts/rows.json")
    assert [row["answer"] for row in json.loads(rows.read_text())["data"]] == ["Paris", "Kyoto", None]
    assert len(client.search_runs([run.info.experiment_id])) == 2
    indexed = Evaluation(FACTS, ROWS, index=INDEX).to_mlflow(experiment="lab", tracking_uri=uri)
    (rows,) = Path(tmp_path).rglob(f"{indexed}/artifacts/rows.json")
    assert [row["level_0"] for row in json.loads(rows.read_text())["data"]] == ["a", "a", "b"]


@pytest.mark.long
def test_a_run_of_wandb_without_a_network(tmp_path):
    wandb = pytest.importorskip("wandb")
    id_ = Evaluation(FACTS, ROWS, index=INDEX).to_wandb(project="lab", mode="offline", dir=str(tmp_path))
    wandb.teardown()  # Its service writes the rest of the file when it ends.
    (file,) = tmp_path.rglob(f"run-{id_}.wandb")
    assert b"capitals" in file.read_bytes()
    (table,) = tmp_path.rglob("rows_*.table.json")
    assert "Kyoto" in table.read_text()
    assert json.loads(table.read_text())["columns"][:3] == ["label_0", "label_1", "prompt"]


@pytest.mark.long
def test_a_log_of_inspect_contains_the_evaluation(tmp_path):
    log = pytest.importorskip("inspect_ai.log")
    parameters = {"temperature": 0, "stop": "\n", "system": "Be brief.", "n": 2}
    facts = replace(FACTS, settings={**FACTS.settings, "parameters": parameters})
    found = RowAnswer(finish_reason="length", prompt_tokens=7, output_tokens=2, total_s=0.5, request_id="row_1")
    answered = replace(ROWS[0], sample=0, answered=found)
    chat = [
        {"role": "developer", "content": "Name a city."},
        {"role": "user", "content": [{"type": "text", "text": "Japan"}]},
    ]
    rows = [
        answered,
        replace(answered, sample=1, answer="Lyon", score=0.5, verdict="close"),
        replace(
            ROWS[1],
            sample=0,
            prompt=chat,
            choices=("Tokyo", "Kyoto"),
            expected=0,
            answered=RowAnswer(logprobs=(-2.0, -1.0)),
        ),
        replace(ROWS[1], sample=1, prompt=chat),
        replace(ROWS[2], sample=0),
        replace(ROWS[2], sample=1),
    ]
    evaluation = Evaluation(facts, rows)

    async def write():
        return evaluation.to_inspect(tmp_path / "logs" / "capitals.eval")

    path = asyncio.run(write())
    assert [Path(each.name.removeprefix("file://")) for each in log.list_eval_logs(str(path.parent))] == [path]
    read = log.read_eval_log(str(path))
    assert (read.status, read.eval.task, read.eval.model) == ("success", "capitals", "lmx-lab/m")
    assert read.eval.created.startswith("2001-09-09T01:46:40")
    config = read.eval.model_generate_config
    assert (config.temperature, config.stop_seqs, read.eval.config.epochs) == (0, ["\n"], 2)
    assert read.eval.metadata["weights"] == "abc"
    assert read.eval.packages == {"lmx-lab": "1"}
    (score,) = read.results.scores
    assert (score.name, score.scored_samples, score.unscored_samples) == ("contains", 4, 2)
    expected = evaluation.score
    # So few scores have no interval.
    assert {name: metric.value for name, metric in score.metrics.items()} == {"score": expected.mean}
    assert (read.stats.started_at[:19], read.stats.completed_at[:21]) == (
        "2001-09-09T01:46:40",
        "2001-09-09T01:46:40.5",
    )
    usage = read.stats.model_usage["lmx-lab/m"]
    assert (usage.input_tokens, usage.output_tokens) == (14, 4)
    samples = {(sample.id, sample.epoch): sample for sample in read.samples}
    assert sorted(samples) == [(label, epoch) for label in ("fr", "jp", "x") for epoch in (1, 2)]
    first = samples["fr", 1]
    assert (first.input, first.target, first.output.completion) == ("France", "Paris", "Paris")
    assert (first.output.stop_reason, first.output.usage.output_tokens) == ("max_tokens", 2)
    assert [(each.role, each.text) for each in first.messages] == [
        ("system", "Be brief."),
        ("user", "France"),
        ("assistant", "Paris"),
    ]
    assert (first.scores["contains"].value, first.scores["contains"].answer) == (1.0, "Paris")
    assert samples["fr", 2].scores["contains"].explanation == "close"
    chosen = samples["jp", 1]
    assert (chosen.choices, chosen.target) == (["Tokyo", "Kyoto"], "Tokyo")
    assert chosen.scores["contains"].metadata["logprobs"] == [-2.0, -1.0]
    assert [(each.role, each.text) for each in chosen.input[1:]] == [("system", "Name a city."), ("user", "Japan")]
    assert (samples["x", 1].error.message, samples["x", 1].scores) == ("missing", None)
    with pytest.raises(InvalidRequestError, match="exists already"):
        evaluation.to_inspect(path)


@pytest.mark.long
def test_samples_with_the_same_label_and_evaluations_without_a_score_have_a_log(tmp_path):
    log = pytest.importorskip("inspect_ai.log")
    Evaluation(FACTS, [ROWS[0], ROWS[0]]).to_inspect(tmp_path / "twice.eval")
    samples = log.read_eval_log(str(tmp_path / "twice.eval")).samples
    assert [(sample.id, sample.metadata["label"]) for sample in samples] == [("0", "fr"), ("1", "fr")]
    Evaluation(FACTS, [ROWS[2]]).to_inspect(tmp_path / "errors.eval")
    (score,) = log.read_eval_log(str(tmp_path / "errors.eval")).results.scores
    assert (score.metrics, score.unscored_samples) == ({}, 1)


@pytest.mark.parametrize(
    ("prompt", "messages"),
    [
        ([{"content": "Name a city."}], [("user", "Name a city.")]),
        ([{"role": "critic", "content": 5}], [("user", "5")]),
        ([{"role": ["user"], "content": [{"type": "text"}, None, "a", 1]}], [("user", "a1")]),
        (["hi", {"role": "developer"}], [("user", "hi"), ("system", "")]),
    ],
)
def test_a_log_of_inspect_contains_rows_whose_prompt_is_not_valid(prompt, messages):
    row = replace(ROWS[2], prompt=prompt)
    run = ExportedRun(facts=FACTS, score=score_of([]), errors=1, frame=Evaluation(FACTS, [row]).df)
    assert figures(run) == {"rows": 1, "errors": 1}
    (sample,) = inspect_log(run, [row])["samples"]
    assert [(each["role"], each["content"]) for each in sample["messages"]] == messages


def test_a_log_of_inspect_needs_a_new_file_of_its_kind(tmp_path):
    with pytest.raises(InvalidRequestError, match=r"ends with \.eval"):
        Evaluation(FACTS, ROWS).to_inspect(tmp_path)
    (tmp_path / "a.eval").touch()
    with pytest.raises(InvalidRequestError, match="exists already"):
        Evaluation(FACTS, ROWS).to_inspect(tmp_path / "a.eval")
