"""Test copies of evaluations in MLflow and in Weights & Biases, without a network."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from lmx_lab.evals.evaluation import Evaluation
from lmx_lab.evals.rows import EvaluatedRow, RunFacts

FACTS = RunFacts(
    at=1e9,
    name="capitals",
    model="m",
    engine="mlx",
    weights="abc",
    settings={"prompt": "{country}", "metric": {"name": "contains"}, "parameters": {"temperature": 0}},
    frame="def",
    versions={"lmx-lab": "1"},
    machine="Linux",
)
ROWS = [
    EvaluatedRow(label="fr", prompt="France", expected="Paris", answer="Paris", score=1.0),
    EvaluatedRow(label="jp", prompt="Japan", expected="Tokyo", answer="Kyoto", score=0.0),
    EvaluatedRow(label="x", prompt=None, expected=None, answer=None, score=None, error="missing"),
]


@pytest.mark.long
def test_a_run_of_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.long
def test_a_run_of_wandb_without_a_network(tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb")
    id_ = Evaluation(FACTS, ROWS).to_wandb(project="lab", mode="offline", dir=str(tmp_path))
    wandb.teardown()  # Its service writes the rest of the file when it ends.
    (file,) = tmp_path.rglob(f"run-{id_}.wandb")
    assert b"capitals" in file.read_bytes()
    (table,) = tmp_path.rglob("rows_*.table.json")
    assert "Kyoto" in table.read_text()


@pytest.mark.parametrize("name", ["mlflow", "wandb"])
def test_a_missing_package_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=f"pip install {name}"):
        getattr(Evaluation(FACTS, ROWS), f"to_{name}")()
