"""Show the answers of a comparison: as a grid with differences, as data frames, and as an HTML file."""

from __future__ import annotations

import difflib
import html
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmx_lab.errors import InvalidRequestError
from lmx_lab.frames import make_table
from lmx_lab.instrument.access import LabAccess
from lmx_lab.instrument.compare import Cell, ComparisonRun, Prompt, Setting
from lmx_lab.instrument.lens import ColorBy, TokenLens
from lmx_lab.instrument.requests import RequestList
from lmx_lab.instrument.text_file import write_text_file
from lmx_lab.values.generation import TokenLogprob
from lmx_lab.values.recording import Record

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = {
    **{"prompt": "int64", "setting": "str", "model": "str", "text": "str", "outcome": "str", "tokens": "Int64"},
    **{"tokens_per_second": "float64", "ttft_s": "float64"},
    **{"logprob": "float64", "logprob_per_token": "float64", "first_difference": "Int64"},
}
SCORE_COLUMNS = {
    **{"prompt": "int64", "answer": "str", "under": "str", "tokens": "int64"},
    **{"logprob": "float64", "logprob_per_token": "float64"},
}
WORD = re.compile(r"\s*\S+|\s+")
MAX_WORDS = 2000
"""Length of an answer above which differences are not marked."""
SHOWN_PROMPTS = 50
"""Maximum number of prompts in the display; the data frame and the file contain all."""
PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Comparison</title><style>
:root {{ color-scheme: light dark; }}
body {{ font: 14px/1.5 system-ui, sans-serif; margin: 1em; overflow-wrap: anywhere; }}
</style></head><body>{content}</body></html>
"""


class Comparison:
    """The answers to prompts under several settings. Notebooks display them as a grid.

    Differences from the first setting are marked by word: added words are underlined, removed words struck through.
    """

    def __init__(self, run: ComparisonRun, lab: LabAccess) -> None:
        self._run = run
        self._lab = lab

    @property
    def prompts(self) -> list[Prompt]:
        return self._run.prompts

    @property
    def settings(self) -> list[str]:
        """The names of the settings."""
        return [setting.name for setting in self._run.settings]

    @property
    def requests(self) -> RequestList:
        """The records of all answers and scores, which can be replayed."""
        return RequestList(self._run.store, self._lab)

    def answer(self, prompt: int, setting: str | int) -> Record:
        """Return the record of an answer.

        Args:
            prompt: Index of the prompt.
            setting: Name or index of the setting.

        Raises:
            InvalidRequestError: the answer does not exist.
        """
        return self._record(self._cell(prompt, setting))

    def lens(
        self, prompt: int, setting: str | int, *, under: str | int | None = None, color: ColorBy = "probability"
    ) -> TokenLens:
        """Return the probabilities of an answer's tokens under a setting, by default the setting of the answer.

        Raises:
            InvalidRequestError: the answer does not exist, or was not scored under this setting.
        """
        cell = self._cell(prompt, setting)
        other = cell.setting if under is None else self._setting(under)
        score = self._run.score_of(cell, other)
        if score is None:
            raise InvalidRequestError(
                f"the answer of {cell.setting.name} was not scored under {other.name}; compare with all_scores=True, "
                "or list this setting later (under another model, answers with reasoning or tool calls are not scored)"
            )
        return TokenLens(score.logprobs, source="scoring", color=color)

    def diff(self, prompt: int, setting: str | int, other: str | int = 0) -> list[tuple[str, str, str]]:
        """Return the aligned parts of two answers, as ``(kind, text of other, text of setting)``.

        The kind is ``equal``, ``insert``, ``delete`` or ``replace``.
        """
        return list(_aligned(self.answer(prompt, other).text, self.answer(prompt, setting).text))

    @property
    def df(self) -> pd.DataFrame:
        """A data frame with one row for each answer.

        ``logprob`` is the log-probability of the whole answer under its own setting, before sampling, and
        ``first_difference`` the position of the first word that differs from the answer of the first setting.

        Raises:
            MissingPackageError: pandas is not installed.
        """
        frame: pd.DataFrame = make_table(map(self._row, self._answered()), COLUMNS)
        return frame

    @property
    def scores(self) -> pd.DataFrame:
        """A data frame with one row for each answer and each setting under which it was scored.

        Raises:
            MissingPackageError: pandas is not installed.
        """
        rows = [
            (cell.prompt, cell.setting.name, under.name, *_sums(score.logprobs))
            for cell in self._answered()
            for under in self._run.settings
            if (score := self._run.score_of(cell, under)) is not None
        ]
        frame: pd.DataFrame = make_table(rows, SCORE_COLUMNS, needed_by="scores")
        return frame

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the grid as a single HTML file without external resources.

        Raises:
            InvalidRequestError: the file cannot be written.
        """
        return write_text_file(path, PAGE.format(content=self._grid(len(self.prompts))))

    def _answered(self) -> list[Cell]:
        return [cell for cell in self._run.cells if cell.key in self._run.records]

    def _setting(self, setting: str | int) -> Setting:
        try:
            return self._run.settings[self.settings.index(setting) if isinstance(setting, str) else setting]
        except (ValueError, IndexError, TypeError):
            raise InvalidRequestError(
                f"there is no setting {setting!r:.80}; the settings are {', '.join(self.settings)}", param="setting"
            ) from None

    def _cell(self, prompt: int, setting: str | int) -> Cell:
        if not isinstance(prompt, int) or not 0 <= prompt < len(self.prompts):
            raise InvalidRequestError(
                f"there is no prompt {prompt!r:.40}; the prompts are 0 to {len(self.prompts) - 1}", param="prompt"
            )
        return self._run.cells_of(prompt)[self._run.settings.index(self._setting(setting))]

    def _record(self, cell: Cell) -> Record:
        record = self._run.records.get(cell.key)
        if record is None:
            raise InvalidRequestError(f"prompt {cell.prompt} has no answer under {cell.setting.name} yet")
        return record

    def _row(self, cell: Cell) -> tuple[Any, ...]:
        record, timings = self._record(cell), self._record(cell).timings
        score = self._run.score_of(cell, cell.setting)
        tokens, decode_s = timings.get("output_tokens"), timings.get("decode_s")
        _, logprob, per_token = _sums(score.logprobs) if score is not None else (None, None, None)
        first = self._run.records.get(self._cell(cell.prompt, 0).key)
        return (
            *(cell.prompt, cell.setting.name, record.provenance.model, record.text, record.outcome, tokens),
            *(tokens / decode_s if tokens and decode_s else None, timings.get("ttft_s")),
            *(logprob, per_token, None if first is None else _first_difference(first.text, record.text)),
        )

    # Display

    def __repr__(self) -> str:
        done, total = self._run.done, self._run.total
        return f"<Comparison of {len(self.prompts)} prompts, {', '.join(self.settings)}: {done} of {total} answers>"

    def _repr_html_(self) -> str:
        return self._grid(SHOWN_PROMPTS)

    def _grid(self, prompts: int) -> str:
        style = "style='text-align:left;vertical-align:top;white-space:pre-wrap;padding:4px 8px'"
        head = "".join(f"<th {style} scope='col'>{html.escape(name)}</th>" for name in ("prompt", *self.settings))
        rows = []
        for number, prompt in enumerate(self.prompts[:prompts]):
            cells = [self._cell_html(self._cell(number, at)) for at in range(len(self.settings))]
            body = "".join(f"<td {style}>{cell}</td>" for cell in cells)
            rows.append(f"<tr><th {style} scope='row'>{html.escape(_shown_prompt(prompt))}</th>{body}</tr>")
        more = len(self.prompts) - prompts
        foot = f"<div>{more} more prompts: see .df, or .save() a file</div>" if more > 0 else ""
        return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>{foot}"

    def _cell_html(self, cell: Cell) -> str:
        record = self._run.records.get(cell.key)
        if record is None:
            return "<small>no answer yet</small>"
        first = self._run.records.get(self._cell(cell.prompt, 0).key)
        parts = _aligned(first.text if first is not None else record.text, record.text)
        text = "".join(_part_html(*part) for part in parts)
        return f"{text}<br><small>{html.escape(self._cost(cell))}</small>"

    def _cost(self, cell: Cell) -> str:
        values = dict(zip(COLUMNS, self._row(cell), strict=True))
        parts = [f"{values['tokens']} tokens"] if values["tokens"] is not None else [values["outcome"]]
        if values["tokens_per_second"] is not None:
            parts.append(f"{values['tokens_per_second']:.1f} tok/s")
        for under in self._run.settings:
            if (score := self._run.score_of(cell, under)) is not None and score.logprobs:
                own = "" if under is cell.setting else f" under {under.name}"
                parts.append(f"{_sums(score.logprobs)[2]:.3f} logprob/token{own}")
        return " · ".join(parts)


def _sums(logprobs: Sequence[TokenLogprob]) -> tuple[int, float | None, float | None]:
    """Return the number of tokens, the sum of their log-probabilities, and their mean."""
    known = [token.logprob for token in logprobs if token.logprob is not None]
    return len(known), sum(known) if known else None, sum(known) / len(known) if known else None


def _aligned(one: str, other: str) -> Iterator[tuple[str, str, str]]:
    """Yield the equal and the different parts of two texts, compared by words."""
    words, others = WORD.findall(one), WORD.findall(other)
    if one == other or max(len(words), len(others)) > MAX_WORDS:
        yield "equal" if one == other else "replace", one, other
        return
    matcher = difflib.SequenceMatcher(None, words, others, autojunk=False)
    for kind, start, end, other_start, other_end in matcher.get_opcodes():
        yield kind, "".join(words[start:end]), "".join(others[other_start:other_end])


def _first_difference(one: str, other: str) -> int | None:
    words, others = WORD.findall(one), WORD.findall(other)
    if words == others:
        return None
    pairs = zip(words, others, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(words), len(others)))


def _part_html(kind: str, before: str, after: str) -> str:
    if kind == "equal":
        return html.escape(after)
    removed = f"<del>{html.escape(before)}</del>" if before else ""
    return removed + (f"<ins>{html.escape(after)}</ins>" if after else "")


def _shown_prompt(prompt: Prompt) -> str:
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{message.get('role')}: {message.get('content')}" for message in prompt)
