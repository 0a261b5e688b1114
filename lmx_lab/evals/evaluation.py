"""Define the result of an evaluation: the score with its interval, the rows, failures, and paired comparisons."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from lmx_lab.backend import Backend, TokenAnswer
from lmx_lab.batch.run import plain_text, text_tokens
from lmx_lab.blocking import both, on_loop
from lmx_lab.errors import InvalidRequestError, counted
from lmx_lab.evals.exports import PROJECT, ExportedRun, to_mlflow, to_wandb, write_inspect_log
from lmx_lab.evals.metrics import Choice, Judge
from lmx_lab.evals.rows import EvaluatedRow, RunFacts, answers_by_row, comparable, mean_score, to_json
from lmx_lab.instrument.lens import ALTERNATIVES, ColorBy, TokenLens, lens_of
from lmx_lab.results.frames import Dtype, dtypes_of, make_table
from lmx_lab.results.pages import Displayed, html_text
from lmx_lab.results.statistics import CalibrationBin, PairedTest, Score, calibration, paired_test, pass_at, score_of
from lmx_lab.results.tables import html_table
from lmx_lab.sanitize import shorten, single_line
from lmx_lab.values.integers import integer
from lmx_lab.wire.base import ANY_MODEL
from lmx_lab.wire.chat import ChatRequest

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

    from lmx_lab.results.drawing import NotebookFigure

SHOWN_FAILURES = 10
SHOWN_CHARACTERS = 80
CALIBRATION_INCHES = (4.2, 4.2)


class Evaluation(Displayed):
    """The scored answers to the rows of a table. ``print`` and notebooks show the score and the first failures.

    Rows with an error have no score and are left out of ``score``; ``errors`` counts them.

    Attributes:
        facts: How the evaluation was computed.
        rows: The rows in the order of the table.
        id: The evaluation's id in ``lab.experiments``; None if it is not stored.
        index: The index of the table; None if only the labels of the rows are known.
        interrupted: Whether the run was interrupted, so that some rows have no score.
    """

    interrupted = False

    def __init__(
        self,
        facts: RunFacts,
        rows: Sequence[EvaluatedRow],
        *,
        id: int | None = None,
        backend: Backend | None = None,
        index: pd.Index | None = None,
    ) -> None:
        self.facts = facts
        self.rows = list(rows)
        self.id = id
        self.index = index
        self._backend = backend

    def __getstate__(self) -> dict[str, Any]:
        # A copy in another process cannot use the lab.
        return {**self.__dict__, "_backend": None}

    @property
    def name(self) -> str:
        return self.facts.name

    @property
    def score(self) -> Score:
        """The mean score with its 95 % interval, and the method that computed the interval: Wilson's score interval if
        all scores are 0 or 1, otherwise a bootstrap interval, which needs at least 6 scores that are not all equal.
        The score of a row with several answers is their mean.
        """
        return score_of([score for score in map(mean_score, self._by_row) if score is not None])

    @property
    def _by_row(self) -> list[list[EvaluatedRow]]:
        """The answers to each row of the table."""
        return answers_by_row(self.rows)

    def pass_at(self, k: int) -> Score:
        """Return the estimated probability that at least one of ``k`` answers to a row is right, with its interval.

        An answer is right if its score is 1. The estimate is unbiased (Chen et al., "Evaluating large language models
        trained on code", 2021). Rows with fewer than ``k`` scores are left out.

        Raises:
            InvalidRequestError: no row has ``k`` scores.
        """
        scores = [[answer.score for answer in answers if answer.score is not None] for answers in self._by_row]
        most = max(map(len, scores), default=0)
        if not most:
            raise InvalidRequestError("no answer has a score; the column error of df contains the reasons")
        if (number := integer(k)) is None or not 1 <= number <= most:
            raise InvalidRequestError(
                f"k is {k!r:.40}; it must be from 1 to {most}, the number of answers to a row that have a score; for a "
                "larger one, evaluate with a larger n",
                param="k",
            )
        return score_of([pass_at(number, sum(it >= 1 for it in row), len(row)) for row in scores if len(row) >= number])

    @property
    def errors(self) -> int:
        """Number of answers without a score."""
        return sum(row.score is None for row in self.rows)

    @property
    def df(self) -> pd.DataFrame:
        """A data frame with one row for each answer, with the labels of the table's index.

        If each row has several answers, labels are repeated, and ``sample`` numbers the answers. The other columns are
        the prompt, the expected value, the answer, the score and the error. With ``Choice``, the choices, their
        log-probabilities and the probability of the selected choice follow; with ``Judge``, the verdict. The last
        columns are the finish reason, the numbers of prompt and output tokens, the duration in seconds and the id of
        the request.

        Raises:
            MissingPackageError: pandas is not installed.
        """
        return self._frame(range(len(self.rows)))

    @property
    def failures(self) -> pd.DataFrame:
        """The rows of ``df`` with a score below 1 or an error. ``lens(label)`` shows the tokens of the answer to a row.

        Raises:
            MissingPackageError: pandas is not installed.
        """
        return self._frame(self._failed())

    def _failed(self) -> list[int]:
        """Return the positions of the rows with a score below 1 or an error."""
        return [at for at, row in enumerate(self.rows) if row.score is None or row.score < 1]

    def _frame(self, positions: Sequence[int]) -> pd.DataFrame:
        # The columns depend on the settings, so that they are the same if no row was answered.
        settings = self.facts.settings
        metric = settings.get("metric", {}).get("name")
        dtypes: dict[str, Dtype] = {"sample": "int64"} if settings.get("parameters", {}).get("n", 1) > 1 else {}
        dtypes |= {"prompt": "object", "expected": "object", "answer": "text", "score": "float64", "error": "text"}
        if metric == Choice.name:
            dtypes |= {"choices": "object", "logprobs": "object", "probability": "float64"}
        if metric == Judge.name:
            dtypes["verdict"] = "text"
        dtypes |= {"finish_reason": "text", "prompt_tokens": "Int64", "output_tokens": "Int64", "total_s": "float64"}
        dtypes["request_id"] = "text"
        rows = [self.rows[at] for at in positions]
        cells = [{**row.to_fields(), "probability": row.probability} for row in rows]
        if self.index is None:
            return make_table(cells, dtypes, index=[row.label for row in rows])
        # All rows of the table have the same number of answers.
        labelled = [at * len(self.index) // len(self.rows) for at in positions]
        return make_table(cells, dtypes, index=self.index.take(labelled))

    # Comparison and calibration

    def compare(self, other: Evaluation) -> PairedTest:
        """Compare this evaluation with another one of the same rows, for example with another model or prompt.

        Rows are paired by their labels, of which 1 and 1.0 are equal; the score of a row with several answers is their
        mean. If labels are not unique, both evaluations must have the same labels in the same order. Rows with an error
        in either evaluation are left out. The test is the exact McNemar test if all scores are 0 or 1, otherwise a
        permutation test; ``method`` of the result names it.

        Raises:
            InvalidRequestError: the rows cannot be paired, or their expected values differ.
        """
        if not isinstance(other, Evaluation):
            raise InvalidRequestError(f"other is {other!r:.80}; pass another result of lab.evaluate", param="other")
        rows, others = self._by_row, other._by_row
        labels, its_labels = ([comparable(answers[0].label) for answers in each] for each in (rows, others))
        if labels == its_labels:
            pairs = list(zip(rows, others, strict=True))
        else:
            its_rows = dict(zip(its_labels, others, strict=True))
            if len(its_rows) < len(its_labels) or len(set(labels)) < len(labels):
                raise InvalidRequestError(
                    "the index has duplicate labels, and the labels of both evaluations differ; give the tables a "
                    "unique index"
                )
            pairs = [(each, its_rows[label]) for each, label in zip(rows, labels, strict=True) if label in its_rows]
            if not pairs:
                raise InvalidRequestError(
                    f"no row is in both evaluations: the labels are {', '.join(labels)[:80] or 'none'}, and those of "
                    f"the other one {', '.join(its_labels)[:80] or 'none'}; evaluate tables with the same index"
                )
        different = next(
            (one for [one, *_], [its, *_] in pairs if comparable(one.expected) != comparable(its.expected)), None
        )
        if different is not None:
            raise InvalidRequestError(
                f"row {different.label!r:.80} has different expected values; compare evaluations of the same table"
            )
        means = [(mean_score(answers), mean_score(its)) for answers, its in pairs]
        scores = [(score, its) for score, its in means if score is not None and its is not None]
        return paired_test([score for score, _ in scores], [score for _, score in scores])

    def calibration(self) -> pd.DataFrame:
        """Return the accuracy for each range of the probability of the selected choice, in ten bins of equal width.

        ``.attrs["expected_calibration_error"]`` is the mean distance between confidence and accuracy, weighted by rows.

        Raises:
            InvalidRequestError: the metric is not ``Choice``.
            MissingPackageError: pandas is not installed.
        """
        rows = [row for row in self.rows if row.probability is not None and row.score is not None]
        if not rows:
            raise InvalidRequestError("the rows have no choices; pass metric=Choice([...]) to evaluate")
        bins, error = calibration([row.probability or 0.0 for row in rows], [row.score or 0.0 for row in rows])
        frame = make_table(map(vars, bins), dtypes_of(CalibrationBin), needed_by="calibration")
        frame.attrs["expected_calibration_error"] = error
        return frame

    def plot_calibration(
        self, *, title: str | None = None, ax: Axes | None = None, size: tuple[float, float] = CALIBRATION_INCHES
    ) -> NotebookFigure | None:
        """Return a reliability diagram: accuracy over confidence, with the number of rows of each bin.

        The diagonal is perfect calibration.

        Args:
            title: Replaces the title.
            ax: Axes of a figure of matplotlib in which to draw. No figure is returned then, and by default the
                axes have no title.
            size: Width and height of the figure in inches.

        Raises:
            InvalidRequestError: there are no choices.
            MissingPackageError: matplotlib or pandas is not installed.
        """
        # Imported here, because matplotlib is optional.
        from lmx_lab.results.drawing import NotebookFigure, fit, fonts, size_in_inches

        bins, size = self.calibration(), size_in_inches(size)
        with fonts(min(size) / min(CALIBRATION_INCHES)):
            figure = NotebookFigure(figsize=size, layout="constrained") if ax is None else None
            axes = figure.add_subplot() if figure is not None else ax
            assert axes is not None
            axes.plot([0, 1], [0, 1], linestyle="--", color="0.5", linewidth=1)
            axes.plot(bins["confidence"], bins["accuracy"], marker="o")
            for row in bins.itertuples():
                place = (row.confidence, row.accuracy)
                y = 6 if row.accuracy < 0.1 else -13
                axes.annotate(str(row.n), place, textcoords="offset points", xytext=(0, y), ha="center", fontsize=8)
            error = bins.attrs["expected_calibration_error"]
            axes.set(
                **{"xlim": (-0.03, 1.03), "ylim": (-0.03, 1.03)},
                **{"xlabel": "probability of the answer", "ylabel": "share of right answers"},
            )
            if figure is None:
                axes.set_title(title or "", parse_math=False)
                return None
            if title is None:
                title = f"{self.name}: {self.facts.model}\nexpected calibration error {error:.3f}"
            # Without parse_math, because two dollar signs would be a formula.
            fit(figure.suptitle(title, fontsize=9, parse_math=False), 0.95 * figure.bbox.width)
        return figure

    # Copies in other programs

    def to_mlflow(self, *, experiment: str = PROJECT, tracking_uri: str | None = None) -> str:
        """Copy the evaluation to MLflow: its settings, score and rows. Returns the id of the run.

        Args:
            experiment: Name of MLflow's experiment, which is created if it does not exist.
            tracking_uri: A server or a database, such as ``sqlite:///mlflow.db``; by default MLflow's own setting.

        Raises:
            MissingPackageError: mlflow is not installed.
        """
        return to_mlflow(self._exported, experiment=experiment, tracking_uri=tracking_uri)

    def to_wandb(self, *, project: str = PROJECT, **options: Any) -> str:
        """Copy the evaluation to Weights & Biases: its settings, score and rows. Returns the id of the run.

        Args:
            options: Arguments of ``wandb.init``, such as ``mode="offline"``.

        Raises:
            MissingPackageError: wandb is not installed.
        """
        return to_wandb(self._exported, project=project, **options)

    def to_inspect(self, path: str | os.PathLike[str]) -> Path:
        """Write the evaluation as a log file for Inspect, which ``inspect view`` displays, and return its path.

        The log contains the settings, the score, and a sample for each answer, with messages, score and token counts.
        Several answers to a row are epochs of one sample. The duration in the log is that of the longest answer.

        Args:
            path: A new file that ends with ``.eval``. Its folder is created.

        Raises:
            MissingPackageError: inspect-ai is not installed.
            InvalidRequestError: the file exists, cannot be written, or does not end with ``.eval``.
        """
        return write_inspect_log(self._exported, self.rows, path)

    @property
    def _exported(self) -> ExportedRun:
        return ExportedRun(facts=self.facts, score=self.score, errors=self.errors, frame=self.df)

    # Tokens

    async def _lens(
        self,
        label: Any = None,
        *,
        position: int | None = None,
        choice: str | None = None,
        color: ColorBy = "probability",
    ) -> TokenLens:
        """Return the probabilities of the tokens of an answer, or of a choice.

        They are read from the recorded request. If the request is not recorded, the answer is scored after the same
        prompt, which requires that the same model is loaded.

        Args:
            label: Label of the row.
            position: Position of the row, instead of its label.
            choice: Text to score instead of the answer, such as another choice. It is not read from the record.
            color: Value that determines the colours of the display: ``probability``, ``entropy`` or ``rank``.

        Raises:
            InvalidRequestError: there is no such row, or it has no answer.
            NotLoadedError: another model is loaded.
        """
        if position is not None:
            number = integer(position)
            found = self.rows[number : number + 1] if number is not None and number >= 0 else []
        else:
            found = [row for row in self.rows if comparable(row.label) == comparable(label)]
        if len(found) != 1:
            given = f"{len(found) or 'no'} rows have the label {label!r:.80}"
            if position is not None:
                given = f"no row has the position {position!r:.80}"
            raise InvalidRequestError(
                f"{given}; pass one of df.index, or position=0 to {len(self.rows) - 1}",
                param="label" if position is None else "position",
            )
        (row,) = found
        if self._backend is None:
            raise InvalidRequestError("this evaluation was opened without a lab; open it with lab.experiments")
        if choice is None and row.answered.request_id is not None and not row.choices:
            recorded = None
            with suppress(InvalidRequestError):  # An attached lab has no records.
                recorded = await on_loop(self._backend.portal, self._backend.record(row.answered.request_id))
            if recorded is not None:
                return await lens_of(self._backend, TokenAnswer.of_record(recorded), color=color)
        return await on_loop(self._backend.portal, self._scored_lens(self._backend, row, choice, color))

    lens, alens = both(_lens)

    async def _scored_lens(self, backend: Backend, row: EvaluatedRow, choice: str | None, color: ColorBy) -> TokenLens:
        text = row.answer if choice is None else choice
        if row.prompt is None or not text:
            raise InvalidRequestError(f"row {row.label!r:.80} has no answer: {row.error or 'its text is empty'}")
        if self.facts.weights:
            await backend.require_weights(self.facts.model, self.facts.weights, self.facts.engine)
        parameters: Mapping[str, Any] = self.facts.settings.get("parameters", {})
        messages = [{"role": "user", "content": row.prompt}] if isinstance(row.prompt, str) else list(row.prompt)
        if (system := parameters.get("system")) is not None:
            messages = [{"role": "system", "content": system}, *messages]
        fields = {name: parameters[name] for name in ("chat_template_kwargs",) if name in parameters}
        try:
            request = ChatRequest.model_validate({"model": ANY_MODEL, "messages": messages, **fields})
        except ValidationError as exc:
            # A prompt function can return anything; the row has an error then.
            raise InvalidRequestError(f"row {row.label!r:.80} has no valid prompt: {row.error or exc}") from exc
        if self.facts.settings.get("metric", {}).get("chat_template", True):
            prompt, tokens = await backend.encode(request), await backend.encode(text, special=False)
        else:
            prompt, (tokens,) = await text_tokens(backend, plain_text(request), [text])
        scores = await backend.score(
            [*prompt, *tokens],
            model=self.facts.model,
            top=ALTERNATIVES,
            start=len(prompt),
        )
        return TokenLens(scores, source="scoring", color=color)

    # Display

    def __repr__(self) -> str:
        score = self.score
        answers = max(map(len, self._by_row), default=1)
        each = f", {answers} answers each" if answers > 1 else ""
        scored = [answers[0] for answers in self._by_row if mean_score(answers) is not None]
        repeated = len(scored) - len({to_json([row.prompt, row.choices, row.expected]) for row in scored})
        each += f"; rows that repeat another one: {repeated}, so the interval is too narrow" if repeated else ""
        state = "interrupted; " if self.interrupted else ""
        errors = f"; rows without a score: {self.errors}" if self.errors else ""
        lines = [
            f"{single_line(self.name)}: {score} ({state}{counted(score.n, 'row')}{each}{errors}; {score.method})",
            f"failures: {len(self._failed())}, listed by .failures; .lens(label) shows the tokens of one",
        ]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        names = ("label", "prompt", "expected", "answer", "error")
        shown = [[_cell(getattr(self.rows[at], name)) for name in names] for at in self._failed()[:SHOWN_FAILURES]]
        table = html_table(names, shown, style="text-align:left;vertical-align:top") if shown else ""
        return "".join(f"<div>{html_text(line)}</div>" for line in repr(self).splitlines()) + table


def _cell(value: Any) -> str:
    if isinstance(value, list) and value and all(isinstance(message, Mapping) for message in value):
        value = "\n".join(str(message.get("content")) for message in value)
    return "" if value is None else shorten(str(value), SHOWN_CHARACTERS)
