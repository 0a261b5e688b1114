"""Copy evaluations to MLflow, to Weights & Biases and to log files of Inspect, which are optional packages."""

from __future__ import annotations

import json
import math
import os
import secrets
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmx_lab.errors import InvalidRequestError
from lmx_lab.evals.rows import EvaluatedRow, RunFacts, answers_by_row, to_plain
from lmx_lab.extras import import_optional
from lmx_lab.results.statistics import LEVEL, Score

if TYPE_CHECKING:
    import pandas as pd

PROJECT = "lmx-lab"
"""Default name of the experiment or project."""
SUFFIX = ".eval"
STOP_REASONS = {"stop": "stop", "length": "max_tokens", "tool_calls": "tool_calls"}
"""Inspect's stop reasons by finish reason."""
ROLES = {**{role: role for role in ("system", "user", "assistant", "tool")}, "developer": "system"}
"""Inspect's roles by the role of a message. Messages without one of them are those of a user."""
CONFIG = {
    "stop": "stop_seqs",
    **{
        name: name
        for name in (
            *("temperature", "top_p", "top_k", "max_tokens", "seed"),
            *("presence_penalty", "frequency_penalty"),
        )
    },
}
"""Inspect's names for sampling parameters."""


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
        # The maximum length of a parameter.
        client.log_param(run_id, name, _text(value)[:6000])
    for name, value in figures(run).items():
        client.log_metric(run_id, name, value)
    # Without names of the index, because they could be those of columns.
    rows = run.frame.rename_axis(index=[None] * run.frame.index.nlevels)
    client.log_dict(run_id, json.loads(rows.to_json(orient="table", default_handler=str)), "rows.json")
    client.set_terminated(run_id)
    return run_id


def to_wandb(run: ExportedRun, *, project: str, **options: Any) -> str:
    """Create a run in Weights & Biases, and return its id. See ``Evaluation.to_wandb``."""
    wandb = import_optional("wandb", "to_wandb")
    with wandb.init(project=project, name=run.facts.name, config=_parameters(run), **options) as created:
        created.summary.update(figures(run))
        # The index may have the names of columns.
        levels = run.frame.index.nlevels
        labels = [f"label_{level}" for level in range(levels)] if levels > 1 else "label"
        rows = run.frame.reset_index(names=labels).map(_text)
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
    """Return the score and its interval, if there are any, and the numbers of rows and errors."""
    scores = {"score": run.score.mean, "low": run.score.low, "high": run.score.high}
    known = {name: value for name, value in scores.items() if not math.isnan(value)}
    return {**known, "rows": len(run.frame), "errors": run.errors}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def write_inspect_log(run: ExportedRun, rows: Sequence[EvaluatedRow], path: str | os.PathLike[str]) -> Path:
    """Write the file. See ``Evaluation.to_inspect``."""
    file = Path(path).expanduser()
    if file.suffix != SUFFIX:
        raise InvalidRequestError(f"path is {str(file)!r:.200}; give a file that ends with {SUFFIX}", param="path")
    if file.exists():
        raise InvalidRequestError(f"{file} exists already; give another path, or delete it", param="path")
    log = import_optional("inspect_ai.log", "to_inspect")
    made = log.EvalLog.model_validate(inspect_log(run, rows))
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        # On a thread, because Inspect runs an event loop, and a notebook has one already.
        with ThreadPoolExecutor(1) as pool:
            pool.submit(log.write_eval_log, made, str(file)).result()
    except OSError as exc:
        raise InvalidRequestError(f"{file} cannot be written: {exc.strerror or exc}", param="path") from exc
    return file


def inspect_log(run: ExportedRun, rows: Sequence[EvaluatedRow]) -> dict[str, Any]:
    """Return the log as the values of Inspect's classes."""
    facts = run.facts
    metric: Mapping[str, Any] = facts.settings.get("metric", {})
    name, model = str(metric.get("name", PROJECT)), f"{PROJECT}/{facts.model}"
    # The end of the run is not stored. Without an end, the viewer shows NaN.
    longest_s = max((row.answered.total_s or 0.0 for row in rows), default=0.0)
    began, ended = (datetime.fromtimestamp(at, UTC).isoformat() for at in (facts.at, facts.at + longest_s))
    parameters: Mapping[str, Any] = facts.settings.get("parameters", {})
    config = {CONFIG[key]: value for key, value in parameters.items() if key in CONFIG}
    if isinstance(config.get("stop_seqs"), str):
        config["stop_seqs"] = [config["stop_seqs"]]
    measured = {key: value for key, value in figures(run).items() if key in ("score", "low", "high")}
    groups = answers_by_row(rows)
    labels = [str(to_plain(answers[0].label)) for answers in groups]
    # If labels are not unique, the ids are positions. The metadata of each sample contains its label.
    ids = labels if len(set(labels)) == len(labels) else [str(at) for at in range(len(labels))]
    samples = [
        {
            "id": id_,
            "epoch": 1 + (row.sample or 0),
            **_sample(row, metric=name, model=model, system=parameters.get("system")),
        }
        for id_, answers in zip(ids, groups, strict=True)
        for row in answers
    ]
    return {
        "status": "success",
        "eval": {
            "created": began,
            "run_id": secrets.token_hex(8),
            "task": facts.name,
            "task_id": secrets.token_hex(8),
            "task_args": {"prompt": to_plain(facts.settings.get("prompt"))},
            "dataset": {"samples": len(ids), "sample_ids": ids},
            "model": model,
            "model_generate_config": config,
            "config": {"epochs": max((sample["epoch"] for sample in samples), default=1)},
            "packages": dict(facts.versions),
            "metadata": {
                "engine": facts.engine,
                "weights": facts.weights,
                "frame": facts.frame,
                "machine": facts.machine,
                "settings": to_plain(facts.settings),
            },
            "scorers": [
                {"name": name, "options": to_plain({key: each for key, each in metric.items() if key != "name"})}
            ],
        },
        "results": {
            "total_samples": len(rows),
            "completed_samples": len(rows) - run.errors,
            "scores": [
                {
                    "name": name,
                    "scorer": name,
                    "scored_samples": len(rows) - run.errors,
                    "unscored_samples": run.errors,
                    "metrics": {key: {"name": key, "value": value} for key, value in measured.items()},
                    "metadata": {"interval": f"{run.score.method}, level {LEVEL}"},
                }
            ],
        },
        "stats": {"started_at": began, "completed_at": ended, "model_usage": {model: _usage(rows)}},
        "samples": samples,
    }


def _sample(row: EvaluatedRow, *, metric: str, model: str, system: str | None) -> dict[str, Any]:
    prompt = [{"role": "user", "content": row.prompt}] if isinstance(row.prompt, str) else row.prompt or ()
    first = [] if system is None or row.prompt is None else [{"role": "system", "content": system}]
    messages = list(map(_message, [*first, *prompt]))
    usage = _usage([row])
    target = to_plain(row.expected)
    if row.choices and isinstance(target, int) and 0 <= target < len(row.choices):
        target = row.choices[target]
    elif isinstance(target, list):
        target = [str(each) for each in target]
    else:
        target = "" if target is None else str(target)
    answer = {"role": "assistant", "content": row.answer or "", "model": model, "source": "generate"}
    reason = STOP_REASONS.get(row.answered.finish_reason or "", "unknown")
    sample: dict[str, Any] = {
        "input": row.prompt if isinstance(row.prompt, str) else messages or "",
        "choices": list(row.choices) or None,
        "target": target,
        "messages": messages,
        "metadata": {"label": to_plain(row.label), "request_id": row.answered.request_id},
        "model_usage": {model: usage},
        "total_time": row.answered.total_s,
    }
    if row.answer is not None:
        sample["messages"] = [*messages, answer]
        choice = {"message": answer, "stop_reason": reason}
        sample["output"] = {"model": model, "choices": [choice], "usage": usage, "time": row.answered.total_s}
    if row.score is not None:
        found = {"logprobs": list(row.logprobs), "probability": row.probability} if row.logprobs else None
        sample["scores"] = {
            metric: {"value": row.score, "answer": row.answer, "explanation": row.verdict, "metadata": found}
        }
    if row.error is not None:
        sample["error"] = {"message": row.error, "traceback": "", "traceback_ansi": ""}
    return sample


def _message(given: Any) -> dict[str, Any]:
    """Return a message of Inspect. If the row has an error, the message can be anything that a prompt function
    returned.
    """
    message = given if isinstance(given, Mapping) else {"content": given}
    content = message.get("content")
    parts = content if isinstance(content, list | tuple) else [content]
    texts = (part.get("text") if isinstance(part, Mapping) else part for part in parts)
    return {
        "role": ROLES.get(str(message.get("role")), "user"),
        "content": "".join(str(text) for text in texts if text is not None),
    }


def _usage(rows: Sequence[EvaluatedRow]) -> dict[str, int]:
    prompt, answer = (
        sum(getattr(row.answered, name) or 0 for row in rows) for name in ("prompt_tokens", "output_tokens")
    )
    return {"input_tokens": prompt, "output_tokens": answer, "total_tokens": prompt + answer}
