"""Score the answers of a lab to the rows of a table: ``lab.evaluate``."""

from __future__ import annotations

import asyncio
import hashlib
import os
import platform
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from lmx_lab.backend import Backend, HasBackend
from lmx_lab.batch.answers import RowAnswer
from lmx_lab.batch.map import answer_all, map_rows, prepare_run
from lmx_lab.batch.prompts import PromptSource, Row, RowPrompts, is_missing
from lmx_lab.batch.run import UNFINISHED
from lmx_lab.batch.servers import LoadedModel, loaded_model
from lmx_lab.blocking import Portal, in_thread, on_loop
from lmx_lab.errors import BatchStoppedError, InvalidRequestError, LabError
from lmx_lab.evals.evaluation import Evaluation
from lmx_lab.evals.experiments import FILE, Experiments
from lmx_lab.evals.metrics import Choice, FunctionMetric, Judge, Metric, described_prompt, read_metric
from lmx_lab.evals.rows import EvaluatedRow, RunFacts, to_json
from lmx_lab.extras import import_optional, installed_version
from lmx_lab.results.frames import RowSource, read_source

VERDICT = "verdict"
NOT_SCORED = "was not scored, because the run was interrupted"


async def evaluate(
    backend: Backend,
    /,
    frame: Any,
    prompt: PromptSource,
    *,
    answer: str | int | None = None,
    metric: str | Metric | Callable[[str, Any], Any] = "exact_match",
    name: str = "",
    store: bool = True,
    **parameters: Any,
) -> Evaluation:
    """Answer a prompt for each row of a table like ``map``, score the answers, and return the mean score.

    Args:
        frame: A data frame, a series, or a list of dictionaries or texts.
        prompt: A template such as ``"What is {a} + {b}?"``, messages, or a function of a row, as for ``map``.
        answer: The column with the expected answers. Without it, a function as ``metric`` receives the row instead.
        metric: ``exact_match``, ``contains``, ``regex`` or ``numeric``; a metric from ``lmx_lab.evals`` with its
            options, such as ``Choice(["yes", "no"])`` or ``Judge(prompt)``; or a function of the answer and the
            expected value that returns a number from 0 (wrong) to 1 (right). Another value is an error of its row.
        name: The name of the experiment; by default the name of the metric.
        store: Whether the evaluation is stored in ``lab.experiments``. An interrupted evaluation is not stored. If
            the file cannot be written, a warning contains the reason.
        parameters: ``n``, ``cache``, ``errors``, ``retry``, ``seed``, ``system`` and the sampling parameters, as
            for ``map``. With ``n``, the score of a row is the mean of its answers.

    Raises:
        NotLoadedError: no model is loaded.
        InvalidRequestError: an argument is invalid, or a column does not exist.
        BatchStoppedError: no further row can be answered or judged, for example because the model was unloaded.
            The attribute ``frame`` of the error contains the complete answers.
        MissingPackageError: pandas is not installed.
    """
    started_at = time.time()
    table = _Table(frame, prompt, answer, read_metric(metric))
    if "schema" in parameters:
        raise InvalidRequestError(
            "evaluate has no parameter schema: score texts, or pass a function that parses the answer",
            param="schema",
        )
    if not isinstance(name, str):
        raise InvalidRequestError(f"name is {name!r:.40}; it must be a string", param="name")
    loaded = await _loaded(backend)
    judging = None
    if isinstance(table.metric, Judge):
        # Before the first row is answered, because there are no scores without a judge.
        judging = await _loaded(_judging_backend(backend, table.metric))
    scoring = None
    if isinstance(table.metric, Choice):
        # Parameters of generated answers.
        if "n" in parameters:
            raise InvalidRequestError("choices are scored and not generated; leave n out", param="n")
        if "labs" in parameters:
            raise InvalidRequestError("one lab scores the choices of all rows; leave labs out", param="labs")
        if not table.metric.chat_template and parameters.get("system") is not None:
            raise InvalidRequestError(
                "system is part of a chat; without chat_template, put it into the prompt", param="system"
            )
        scoring = {"choices": table.metric.of_row, "chat_template": table.metric.chat_template}
    run, stored = await prepare_run(backend, table.source, table.prompts, None, scoring, **parameters)
    interrupted = await answer_all(backend, run, table.source, None, stored)
    facts = table.facts(loaded, prompt, parameters, started_at=started_at, name=name, judging=judging)
    result = Evaluation(facts, [], backend=backend, index=table.source.index)
    result.rows, stopped = await table.evaluated(backend.portal, [answer for answer, _ in run.answers()])
    interrupted = stopped or interrupted
    _raise_first(result.rows, parameters, interrupted)
    if isinstance(table.metric, Judge):
        interrupted = interrupted or await _judge_all(backend, table, result, parameters)
        result.rows = [
            replace(row, error="was not judged, because the run was interrupted")
            if row.score is None and row.error is None
            else row
            for row in result.rows
        ]
        _raise_first(result.rows, parameters, interrupted)
    result.interrupted = interrupted
    if store and not interrupted:
        # A failure causes only a warning, so that the answers are not lost.
        try:
            result.id = await in_thread(partial(Experiments(backend.home / FILE, backend).add, result))
        except (LabError, KeyboardInterrupt) as exc:
            reason = exc.message if isinstance(exc, LabError) else "it was interrupted"
            warnings.warn(f"the evaluation is not stored: {reason}", RuntimeWarning, stacklevel=2)
    return result


class _Table:
    """The rows of an evaluation with their prompts and expected values.

    Raises:
        InvalidRequestError: the rows are an iterable, or a column does not exist.
    """

    def __init__(self, frame: Any, prompt: PromptSource, answer: str | int | None, metric: Metric) -> None:
        source = read_source(frame)
        if source.columns is None or source.index is None:
            raise InvalidRequestError("the rows are an iterable; pass a data frame or a list", param="frame")
        self.metric = metric
        answer = None if answer is None else str(answer)
        self.columns = list(source.columns)
        names = ", ".join(self.columns)
        if answer is not None and answer not in self.columns:
            raise InvalidRequestError(
                f"answer names the column {answer!r:.80}, but the columns are {names}", param="answer"
            )
        if answer is None and isinstance(metric, Judge) and "expected" in RowPrompts(metric.prompt).names:
            raise InvalidRequestError(
                "the prompt of the judge contains {expected}, but no column has expected values; pass answer=..., "
                f"one of {names}",
                param="answer",
            )
        if answer is None and not isinstance(metric, FunctionMetric | Judge):
            raise InvalidRequestError(
                f"name the column of the expected answers: answer=..., one of {names}", param="answer"
            )
        metric.check(self.columns)
        self._answer = answer
        self.prompts = RowPrompts(prompt)
        self.prompts.check(self.columns)
        pandas = import_optional("pandas", "evaluate")
        index = source.index if source.library is None else pandas.RangeIndex(len(source.index))
        self.labelled = list(source.rows)
        self.source = RowSource(rows=iter(self.labelled), columns=self.columns, index=index)
        """The rows to answer, without the library of their table: an error of the run contains a pandas data frame."""

    async def evaluated(self, portal: Portal, answers: Sequence[RowAnswer]) -> tuple[list[EvaluatedRow], bool]:
        """Return the rows, and whether scoring was interrupted. With a judge, no row has a score. Has steps."""
        several = len(answers) // len(self.labelled) if answers else 1
        rows: list[EvaluatedRow] = []
        paused_at = time.monotonic()
        interrupted = False
        for at, answer in enumerate(answers):
            label, row = self.row_of(at, len(answers))
            prompt = None
            with suppress(InvalidRequestError):
                prompt = self.prompts.prompt(row)
            found = EvaluatedRow(
                label=label,
                sample=at % several if several > 1 else None,
                prompt=prompt,
                expected=None if self._answer is None else row.get(self._answer),
                answer=answer.text if answer.error is None else None,
                score=None,
                error=answer.error,
                answered=answer,
            )
            try:
                if not interrupted and time.monotonic() - paused_at > 0.1:
                    # An interrupt is raised only in a step, so that there is one between two rows every 0.1 s.
                    await on_loop(portal, asyncio.sleep(0))
                    paused_at = time.monotonic()
                scored = self._scored(found, row, NOT_SCORED if interrupted else None)
            except KeyboardInterrupt:
                interrupted = True
                scored = self._scored(found, row, NOT_SCORED)
            rows.append(scored)
        return rows, interrupted

    def row_of(self, at: int, answers: int) -> tuple[Any, Row]:
        """Return the label and the row of an answer by its position. All rows have the same number of answers."""
        return self.labelled[at * len(self.labelled) // answers]

    def _scored(self, found: EvaluatedRow, row: Row, not_scored: str | None) -> EvaluatedRow:
        """Return a row with its score, or with ``not_scored`` as its error."""
        # A function gets a copy, which it can change.
        metric, expected = self.metric, copy(row) if self._answer is None else found.expected
        if found.error is not None or not_scored is not None:
            return replace(found, error=found.error or not_scored)
        try:
            if isinstance(metric, Choice):
                choices = metric.of_row(row)
                best = metric.best(choices, found.answered.logprobs or ())
                # They are kept if the expected value is missing or wrong.
                found = replace(found, answer=choices[best], choices=choices)
            if self._answer is not None and is_missing(expected):
                raise InvalidRequestError(
                    f"the column {self._answer} has no value in this row; remove the row, or add the expected answer"
                )
            if isinstance(metric, Choice):
                return replace(found, score=float(best == metric.right(choices, expected)))
            if isinstance(metric, Judge):
                return found
            return replace(found, score=metric.checked_score(found.answer or "", expected))
        except InvalidRequestError as exc:
            return replace(found, error=exc.message)

    def facts(
        self,
        loaded: LoadedModel,
        prompt: PromptSource,
        parameters: Mapping[str, Any],
        *,
        started_at: float,
        name: str,
        judging: LoadedModel | None,
    ) -> RunFacts:
        """Return how the evaluation was computed."""
        digest = hashlib.sha256()
        for _, row in self.labelled:
            digest.update(to_json(list(row.items())).encode() + b"\n")
        metric = dict(self.metric.settings)
        if judging is not None:
            metric.update(model=judging.id, weights=judging.weights)
        kept = {key: value for key, value in parameters.items() if key not in ("cache", "errors", "retry", "labs")}
        return RunFacts(
            at=started_at,
            name=name or str(metric["name"]),
            model=loaded.id,
            engine=loaded.engine,
            weights=loaded.weights,
            settings={"prompt": described_prompt(prompt), "answer": self._answer, "metric": metric, "parameters": kept},
            frame=digest.hexdigest(),
            versions={
                "python": platform.python_version(),
                **{
                    name: found
                    for name in ("lmx-lab", "mlx", "mlx-lm", "xllamacpp", "numpy", "pandas")
                    if (found := installed_version(name)) is not None
                },
            },
            machine=f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        )


async def _loaded(backend: Backend) -> LoadedModel:
    """Return the loaded model of a lab. Has steps."""
    return await on_loop(backend.portal, loaded_model(backend, hashed=True))


def _judging_backend(backend: Backend, judge: Judge) -> Backend:
    if judge.lab is None:
        return backend
    if not isinstance(judge.lab, HasBackend):
        raise InvalidRequestError(
            f"lab is {judge.lab!r:.80}; pass a lab: Judge(..., lab=lmx_lab.attach('http://192.168.1.20:8400'))",
            param="lab",
        )
    return judge.lab.backend


async def _judge_all(backend: Backend, table: _Table, result: Evaluation, parameters: Mapping[str, Any]) -> bool:
    """Add the verdicts of a judge to the rows of a result, and return whether judging was interrupted. Has steps.

    Raises:
        BatchStoppedError: the judge cannot continue. The error contains the answers, so that they are not lost.
    """
    judge = table.metric
    assert isinstance(judge, Judge)
    rows = result.rows
    answered = [at for at, row in enumerate(rows) if row.error is None]
    given = [
        {**table.row_of(at, len(rows))[1], "expected": rows[at].expected, "answer": rows[at].answer} for at in answered
    ]
    if not given:
        return False
    lab = _judging_backend(backend, judge)
    options = {name: parameters[name] for name in ("cache", "retry") if name in parameters}
    schema = {VERDICT: Literal[tuple(judge.verdicts)]}
    stopped: LabError | None = None
    try:
        verdicts: Any = await map_rows(
            lab,
            given,
            judge.prompt,
            schema=schema,
            system=judge.system,
            temperature=0,
            **options,
        )
    except KeyboardInterrupt:
        return True
    except LabError as exc:
        stopped, verdicts = exc, exc.frame if isinstance(exc, BatchStoppedError) else None
    if verdicts is not None:
        for at, verdict, error in zip(answered, verdicts[VERDICT], verdicts["error"], strict=True):
            if error is None:
                rows[at] = replace(rows[at], verdict=verdict, score=float(judge.verdicts[verdict]))
            elif error != UNFINISHED.error:
                rows[at] = replace(rows[at], error=f"the judge: {error}")
    if stopped is None:
        return bool(verdicts.attrs["interrupted"])
    kept = "the attribute frame of this error contains the answers"
    reason = stopped.message if kept in stopped.message else f"{stopped.message.rstrip('.')}; {kept}"
    error = BatchStoppedError(f"the judge failed: {reason}")
    error.frame = result.df
    raise error from stopped


def _raise_first(rows: Sequence[EvaluatedRow], parameters: Mapping[str, Any], interrupted: bool) -> None:
    """Raise the first error of a row if ``errors`` is ``raise``, unless the run was interrupted."""
    failed = next((row for row in rows if row.error is not None), None)
    if failed is not None and parameters.get("errors") == "raise" and not interrupted:
        raise InvalidRequestError(f"row {failed.label!r:.80}: {failed.error}")
