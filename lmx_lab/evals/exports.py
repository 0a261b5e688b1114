"""Copy evaluations to MLflow and to Weights & Biases, which are optional packages."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lmx_lab.evals.statistics import LEVEL

if TYPE_CHECKING:
    from lmx_lab.evals.evaluation import Evaluation

PROJECT = "lmx-lab"
"""Default name of the experiment or project."""
PARAMETER_CHARACTERS = 6000
"""Maximum length of a parameter in MLflow."""


def to_mlflow(evaluation: Evaluation, *, experiment: str, tracking_uri: str | None) -> str:
    """Create a run in MLflow, and return its id. See ``Evaluation.to_mlflow``."""
    mlflow = _import("mlflow", "to_mlflow")
    client = mlflow.MlflowClient(tracking_uri)
    found = client.get_experiment_by_name(experiment)
    experiment_id = client.create_experiment(experiment) if found is None else found.experiment_id
    facts = evaluation.facts
    run = client.create_run(experiment_id, start_time=round(facts.at * 1000), run_name=evaluation.name)
    run_id: str = run.info.run_id
    for name, value in _parameters(evaluation).items():
        client.log_param(run_id, name, _text(value)[:PARAMETER_CHARACTERS])
    for name, value in _figures(evaluation).items():
        client.log_metric(run_id, name, value)
    client.log_dict(run_id, json.loads(evaluation.df.to_json(orient="table", default_handler=str)), "rows.json")
    client.set_terminated(run_id)
    return run_id


def to_wandb(evaluation: Evaluation, *, project: str, **options: Any) -> str:
    """Create a run in Weights & Biases, and return its id. See ``Evaluation.to_wandb``."""
    wandb = _import("wandb", "to_wandb")
    with wandb.init(project=project, name=evaluation.name, config=_parameters(evaluation), **options) as run:
        run.summary.update(_figures(evaluation))
        rows = evaluation.df.reset_index(names="label").map(_text)
        run.log({"rows": wandb.Table(dataframe=rows)})
        run_id: str = run.id
    return run_id


def _parameters(evaluation: Evaluation) -> dict[str, Any]:
    """Return what the evaluation depends on, and how its interval was computed."""
    facts, score = evaluation.facts, evaluation.score
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


def _figures(evaluation: Evaluation) -> Mapping[str, float]:
    score = evaluation.score
    figures = {"score": score.mean, "low": score.low, "high": score.high} if score.n else {}
    return {**figures, "rows": len(evaluation.rows), "errors": evaluation.errors}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _import(package: str, name: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as exc:
        raise ImportError(f"{name} needs {package}, which is not installed: pip install {package}") from exc
