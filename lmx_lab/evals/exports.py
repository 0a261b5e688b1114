"""Copy evaluations to MLflow and to Weights & Biases, which are optional packages."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lmx_lab.evals.rows import RunFacts
from lmx_lab.evals.statistics import LEVEL, Score
from lmx_lab.extras import import_optional

if TYPE_CHECKING:
    import pandas as pd

PROJECT = "lmx-lab"
"""Default name of the experiment or project."""
PARAMETER_CHARACTERS = 6000
"""Maximum length of a parameter in MLflow."""


@dataclass(frozen=True, kw_only=True)
class ExportedRun:
    """The data of an evaluation that is copied."""

    facts: RunFacts
    score: Score
    errors: int
    frame: pd.DataFrame
    """One row for each row of the evaluation."""


def to_mlflow(run: ExportedRun, *, experiment: str, tracking_uri: str | None) -> str:
    """Create a run in MLflow, and return its id. See ``Evaluation.to_mlflow``."""
    mlflow = import_optional("mlflow", "to_mlflow")
    client = mlflow.MlflowClient(tracking_uri)
    found = client.get_experiment_by_name(experiment)
    experiment_id = client.create_experiment(experiment) if found is None else found.experiment_id
    facts = run.facts
    created = client.create_run(experiment_id, start_time=round(facts.at * 1000), run_name=facts.name)
    run_id: str = created.info.run_id
    for name, value in _parameters(run).items():
        client.log_param(run_id, name, _text(value)[:PARAMETER_CHARACTERS])
    for name, value in figures(run).items():
        client.log_metric(run_id, name, value)
    client.log_dict(run_id, json.loads(run.frame.to_json(orient="table", default_handler=str)), "rows.json")
    client.set_terminated(run_id)
    return run_id


def to_wandb(run: ExportedRun, *, project: str, **options: Any) -> str:
    """Create a run in Weights & Biases, and return its id. See ``Evaluation.to_wandb``."""
    wandb = import_optional("wandb", "to_wandb")
    with wandb.init(project=project, name=run.facts.name, config=_parameters(run), **options) as created:
        created.summary.update(figures(run))
        rows = run.frame.reset_index(names="label").map(_text)
        created.log({"rows": wandb.Table(dataframe=rows)})
        run_id: str = created.id
    return run_id


def _parameters(run: ExportedRun) -> dict[str, Any]:
    """Return the settings of the evaluation, and the method and level of its interval."""
    facts, score = run.facts, run.score
    return {
        "model": facts.model,
        "engine": facts.engine,
        "weights": facts.weights,
        "frame": facts.frame,
        **facts.settings,
        "versions": dict(facts.versions),
        "machine": facts.machine,
        "interval": f"{score.method}, level {LEVEL}",
    }


def figures(run: ExportedRun) -> Mapping[str, float]:
    """Return the score with its interval, unless no row has one, and the numbers of rows and errors."""
    score = run.score
    scores = {"score": score.mean, "low": score.low, "high": score.high} if score.n else {}
    return {**scores, "rows": len(run.frame), "errors": run.errors}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
