"""Answer the same prompts under several settings, and compare the answers: texts, speeds and log-probabilities.

``ComparisonRun`` computes, ``Comparison`` shows: as a grid with differences, as data frames, and as an HTML file.

Answers and scores are records in a separate recording. If an interrupted comparison is run again with the same file, it
computes only the missing answers and scores.
"""

from __future__ import annotations

import html
import itertools
import json
import operator
import os
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from lmx_lab.arguments import Prompt, chat_request, list_of, model_name
from lmx_lab.backend import Backend, load_or_cancel
from lmx_lab.blocking import in_thread, on_loop
from lmx_lab.errors import InvalidRequestError, NotLoadedError, counted
from lmx_lab.instrument.branches import WORD, marked_changes, word_changes
from lmx_lab.instrument.lens import ALTERNATIVES, ColorBy, TokenLens
from lmx_lab.instrument.requests import RequestList
from lmx_lab.instrument.store import MEMORY_BYTES, RecordStore
from lmx_lab.progress import counter
from lmx_lab.results.database import digest
from lmx_lab.results.frames import make_table
from lmx_lab.results.pages import Displayed, page
from lmx_lab.results.tables import Html, html_table
from lmx_lab.sanitize import escape_text
from lmx_lab.values.integers import integer
from lmx_lab.values.models import LoadOptions, LoadSpec
from lmx_lab.values.outputs import TokenLogprob
from lmx_lab.values.recording import Record
from lmx_lab.values.steering import recorded_steering
from lmx_lab.wire.admin import load_spec
from lmx_lab.wire.chat import ChatRequest

if TYPE_CHECKING:
    import pandas as pd

Settings = Mapping[str, Mapping[str, Any]] | Sequence[Mapping[str, Any]]
Work = Callable[[Backend], Coroutine[Any, Any, None]]
MAX_ANSWERS = 10_000
"""Maximum number of answers of a comparison."""
COLUMNS = {
    **{"prompt": "int64", "setting": "str", "model": "str", "text": "str", "outcome": "str", "tokens": "Int64"},
    **{"tokens_per_second": "float64", "ttft_s": "float64"},
    **{"logprob": "float64", "logprob_per_token": "float64", "first_difference": "Int64"},
}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How the prompts of a comparison are answered."""

    name: str
    spec: LoadSpec | None
    """The model; None for the loaded model."""
    model: str
    """Id of the model."""
    parameters: Mapping[str, Any]
    """``system`` and the sampling parameters."""

    @property
    def load_key(self) -> str:
        """A key that is equal for settings with the same model and load options."""
        options = {} if self.spec is None else dict(self.spec.options)
        return json.dumps([self.model, options], sort_keys=True, default=str)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One prompt under one setting."""

    prompt: int
    setting: Setting
    key: str
    """Id of the record of the answer."""
    request: ChatRequest


class ComparisonRun:
    """Computes the missing answers and scores of a comparison.

    Args:
        path: SQLite file for answers and scores; None keeps them in memory.
        all_scores: Whether to load models a second time to score the answers of models that were loaded later.
        loaded: Id of the loaded model; None if there is none.

    Raises:
        InvalidRequestError: a prompt or a setting is invalid, or the file cannot be used.
        NotLoadedError: no setting names a model, and none is loaded.
    """

    def __init__(
        self,
        backend: Backend,
        prompts: Sequence[Prompt],
        settings: Settings,
        *,
        path: str | os.PathLike[str] | None,
        all_scores: bool,
        loaded: str | None,
    ) -> None:
        self.prompts = list_of(prompts, "prompts", of="texts or conversations")
        if not self.prompts:
            raise InvalidRequestError("prompts is empty; pass a list of texts or conversations", param="prompts")
        self.settings = _read_settings(settings, loaded or "")
        if (count := len(self.prompts) * len(self.settings)) > MAX_ANSWERS:
            raise InvalidRequestError(
                f"the comparison has {count} answers; the limit is {MAX_ANSWERS}; compare fewer prompts"
            )
        self._all_scores = all_scores
        for setting in self.settings:
            # Its errors do not depend on the prompt.
            chat_request("x", setting.parameters)
        self.cells = []
        for number, prompt in enumerate(self.prompts):
            for setting in self.settings:
                try:
                    request = chat_request(prompt, setting.parameters)
                except InvalidRequestError as exc:
                    raise InvalidRequestError(f"prompts[{number}]: {exc.message}", param="prompts") from None
                key = digest(prompt, setting.load_key, setting.parameters)
                self.cells.append(Cell(prompt=number, setting=setting, key=key, request=request))
        for cell in self.cells:
            backend.check_request(cell.request)
        if loaded is None and any(setting.spec is None for setting in self.settings):
            raise NotLoadedError("no model is loaded; load one, or name a model in each setting")
        self.path = None if path is None else Path(path).expanduser()
        self.store = RecordStore(self.path) if path is not None else RecordStore(max_bytes=MEMORY_BYTES)
        self.records = {record.request_id: record for record in self.store}
        """Answers and scores by their ids."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # Both wait until all finished work is written, so that the same comparison can be continued immediately.
        if kind is not None:
            await in_thread(self.store.close)
        else:
            await in_thread(lambda: len(self.store))

    def cells_of(self, prompt: int) -> list[Cell]:
        """Return the cells of a prompt, in the order of the settings."""
        return self.cells[prompt * len(self.settings) : (prompt + 1) * len(self.settings)]

    @property
    def total(self) -> int:
        return len(self.cells)

    @property
    def done(self) -> int:
        """Number of cells with an answer."""
        return sum(cell.key in self.records for cell in self.cells)

    def remaining(self) -> Iterator[tuple[str, Work]]:
        """Yield the remaining steps, each as a description and a function. Call each before requesting the next.

        Each model is loaded once, one after the other. An answer is scored under the settings of its own
        model, and of the models that are loaded later.
        """
        groups = list(dict.fromkeys(setting.load_key for setting in self.settings))
        for number, group in enumerate(groups):
            loaded_before = groups[: number + 1]
            cells = [cell for cell in self.cells if cell.setting.load_key == group]
            missing = [cell for cell in cells if cell.key not in self.records]
            if missing or self._unscored(group, loaded_before):
                yield from self._load(cells[0].setting)
            for cell in missing:
                yield f"{cell.setting.name}, prompt {cell.prompt}", partial(self._answer, cell)
            yield from self._scoring(group, loaded_before)
        for group in reversed(groups[:-1]) if self._all_scores else ():
            if self._unscored(group, groups):
                yield from self._load(next(each for each in self.settings if each.load_key == group))
                yield from self._scoring(group, groups)

    def _load(self, setting: Setting) -> Iterator[tuple[str, Work]]:
        if (spec := setting.spec) is not None:

            async def load(backend: Backend) -> None:
                await load_or_cancel(backend, spec)

            yield f"load {setting.model}", load

    async def _answer(self, cell: Cell, backend: Backend) -> None:
        self._save(replace(await backend.answer(cell.request), request_id=cell.key))

    def _save(self, record: Record) -> None:
        self.records[record.request_id] = record
        self.store.add(lambda: record, record.provenance.model)

    # Scores

    def score_of(self, answer: Cell, under: Setting) -> Record | None:
        """Return the record whose ``logprobs`` are those of an answer under a setting; None if it was not scored."""
        return self.records.get(self._score_key(answer, under))

    def _score_key(self, answer: Cell, under: Setting) -> str:
        # Sampling parameters are not part of the key, because log-probabilities are those before sampling.
        prompt, parameters = self.prompts[answer.prompt], under.parameters
        steer = [parameters["steer"]] if parameters.get("steer") else []
        return digest("score", answer.key, prompt, under.load_key, parameters.get("system"), *steer)

    def _unscored(self, group: str, answered: Sequence[str]) -> list[tuple[Cell, Cell]]:
        """Return the pairs of an answer and a cell of a group under which it can be scored now.

        Args:
            answered: The groups whose answers are scored.
        """
        found: dict[str, tuple[Cell, Cell]] = {}
        for answer in (each for each in self.cells if each.setting.load_key in answered):
            for cell in self.cells_of(answer.prompt):
                record, under = self.records.get(answer.key), self.records.get(cell.key)
                if cell.setting.load_key != group or record is None or not record.text:
                    continue
                if answer.setting.load_key == group:
                    can_score = bool(record.answer)
                else:
                    # Under another model, the text is tokenized again, which contains neither reasoning nor tool calls.
                    can_score = not record.reasoning and not record.tool_calls
                if can_score and under is not None and under.prompt:
                    found.setdefault(self._score_key(answer, cell.setting), (answer, cell))
        return [pair for key, pair in found.items() if key not in self.records]

    def _scoring(self, group: str, answered: Sequence[str]) -> Iterator[tuple[str, Work]]:
        for answer, cell in self._unscored(group, answered):
            text = f"score {answer.setting.name} under {cell.setting.name}, prompt {cell.prompt}"
            yield text, partial(self._score, answer, cell)

    async def _score(self, answer: Cell, cell: Cell, backend: Backend) -> None:
        record, under = self.records[answer.key], self.records[cell.key]
        if answer.setting.load_key == cell.setting.load_key:
            tokens: Sequence[int] = record.answer or ()
        else:
            # Removes the tokens that the tokenizer adds before each text. These texts have no others in common.
            one, other = [await backend.encode(probe) for probe in ("x", "y")]
            before = next((at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), 0)
            tokens = (await backend.encode(record.text))[before:]
        prompt = under.prompt
        whole = await backend.score(
            [*prompt, *tokens],
            model=under.provenance.model,
            top=ALTERNATIVES,
            start=len(prompt),
            steer=recorded_steering(under.request),
        )
        if not record.reasoning and not record.tool_calls:
            # The tokens after the text ended the answer: a special token, or a stop string.
            ends = itertools.accumulate(len(token.bytes) for token in whole)
            size = len(record.text.encode())
            whole = whole[: sum(1 for _ in itertools.takewhile(lambda end: end <= size, ends))]
        scored = replace(
            under,
            request_id=self._score_key(answer, cell.setting),
            answer=tuple(tokens),
            text=record.text,
            logprobs=tuple(whole),
            # The record is a score: its ``logprobs`` are those of an answer under another setting.
            outcome="scored",
            timings={},
            steps=(),
        )
        self._save(scored)


def _read_settings(settings: Settings, loaded: str) -> list[Setting]:
    """Return the settings with their names and models.

    Args:
        loaded: The loaded model, for settings without a model.

    Raises:
        InvalidRequestError: there is none, one is not a dictionary, two have the same name, or only some of them name
            a model.
    """
    if hasattr(settings, "columns"):
        raise InvalidRequestError(
            "settings is a data frame; pass its rows as dictionaries: settings.to_dict('records')", param="settings"
        )
    listed = list(settings.values()) if isinstance(settings, Mapping) else list_of(settings, "settings", of="settings")
    for each in listed:
        if not isinstance(each, Mapping):
            raise InvalidRequestError(
                f"a setting is {each!r:.80}; pass a dictionary of parameters, such as {{'temperature': 0}}",
                param="settings",
            )
    if isinstance(settings, Mapping):
        pairs = list(settings.items())
    else:
        parts = [[str(value) if key == "model" else f"{key}={value}" for key, value in each.items()] for each in listed]
        pairs = [(", ".join(part) or "default", each) for part, each in zip(parts, listed, strict=True)]
    if not pairs:
        raise InvalidRequestError("there are no settings; pass at least one, such as {}", param="settings")
    with_model = ["model" in each for _, each in pairs]
    if any(with_model) and not all(with_model):
        raise InvalidRequestError(
            "some settings name a model and others do not; name a model in all of them", param="settings"
        )
    if len({name for name, _ in pairs}) < len(pairs):
        raise InvalidRequestError("two settings are equal, or have the same name; rename one", param="settings")
    found = []
    for name, given in pairs:
        options = {key: given[key] for key in given if key in LoadOptions.__annotations__}
        parameters = {key: value for key, value in given.items() if key not in {"model", *options}}
        if "model" not in given and options:
            raise InvalidRequestError(f"{min(options)} is a load option; also name the model", param=min(options))
        model = model_name(given["model"]) if "model" in given else loaded
        spec = load_spec(model, options) if "model" in given else None  # type: ignore[arg-type]
        found.append(Setting(name=str(name), spec=spec, model=model, parameters=parameters))
    return found


class Comparison(Displayed):
    """The answers to prompts under several settings. Notebooks display them as a grid.

    Differences from the first setting are marked by word: added words are underlined, removed words struck through.
    """

    def __init__(self, run: ComparisonRun, backend: Backend) -> None:
        self._run = run
        self._backend = backend

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
        return RequestList(self._run.store, self._backend)

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
        return make_table(map(self._row, self._answered()), COLUMNS)

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
        return make_table(
            rows,
            {
                **{"prompt": "int64", "answer": "str", "under": "str", "tokens": "int64"},
                **{"logprob": "float64", "logprob_per_token": "float64"},
            },
            needed_by="scores",
        )

    def _page(self) -> str:
        return page("Comparison", self._grid(len(self.prompts)))

    def _answered(self) -> list[Cell]:
        return [cell for cell in self._run.cells if cell.key in self._run.records]

    def _setting(self, setting: str | int) -> Setting:
        try:
            at = self.settings.index(setting) if isinstance(setting, str) else operator.index(setting)
            return self._run.settings[at]
        except (ValueError, IndexError, TypeError):
            raise InvalidRequestError(
                f"there is no setting {setting!r:.80}; the settings are {', '.join(self.settings)}", param="setting"
            ) from None

    def _cell(self, prompt: int, setting: str | int) -> Cell:
        number = integer(prompt)
        if number is None or not 0 <= number < len(self.prompts):
            raise InvalidRequestError(
                f"there is no prompt {prompt!r:.40}; the prompts are 0 to {len(self.prompts) - 1}", param="prompt"
            )
        return self._run.cells_of(number)[self._run.settings.index(self._setting(setting))]

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
        difference = None
        if first is not None and first.text != record.text:
            words, others = WORD.findall(first.text), WORD.findall(record.text)
            pairs = zip(words, others, strict=False)
            ends = min(len(words), len(others))
            difference = next((at for at, (one, other) in enumerate(pairs) if one != other), ends)
        return (
            *(cell.prompt, cell.setting.name, record.provenance.model, record.text, record.outcome, tokens),
            *(tokens / decode_s if tokens and decode_s else None, timings.get("ttft_s")),
            *(logprob, per_token, difference),
        )

    # Display

    def __repr__(self) -> str:
        prompts, names = counted(len(self.prompts), "prompt"), escape_text(", ".join(self.settings))
        return f"<Comparison of {prompts}, {names}: {self._run.done} of {counted(self._run.total, 'answer')}>"

    def _repr_html_(self) -> str:
        return self._grid(50)

    def _grid(self, prompts: int) -> str:
        rows = []
        for number, prompt in enumerate(self.prompts[:prompts]):
            messages = prompt if not isinstance(prompt, str) else ()
            lines = [f"{message.get('role')}: {message.get('content')}" for message in messages]
            name = prompt if isinstance(prompt, str) else "\n".join(lines)
            cells = [Html(self._cell_html(self._cell(number, at))) for at in range(len(self.settings))]
            rows.append((name, *cells))
        style = "text-align:left;vertical-align:top;white-space:pre-wrap;padding:4px 8px"
        table = html_table(("prompt", *self.settings), rows, row_names=True, style=style)
        more = len(self.prompts) - prompts
        return table + (f"<div>{counted(more, 'more prompt')}: see .df, or .save() a file</div>" if more > 0 else "")

    def _cell_html(self, cell: Cell) -> str:
        record = self._run.records.get(cell.key)
        if record is None:
            return "<small>no answer yet</small>"
        first = self._run.records.get(self._cell(cell.prompt, 0).key)
        parts = _aligned(first.text if first is not None else record.text, record.text)
        text = marked_changes(parts)
        values = dict(zip(COLUMNS, self._row(cell), strict=True))
        cost = [f"{values['tokens']} tokens"] if values["tokens"] is not None else [values["outcome"]]
        if values["tokens_per_second"] is not None:
            cost.append(f"{values['tokens_per_second']:.1f} tok/s")
        for under in self._run.settings:
            if (score := self._run.score_of(cell, under)) is not None and score.logprobs:
                own = "" if under is cell.setting else f" under {under.name}"
                cost.append(f"{_sums(score.logprobs)[2]:.3f} logprob/token{own}")
        return f"{text}<br><small>{html.escape(' · '.join(cost))}</small>"


def _sums(logprobs: Sequence[TokenLogprob]) -> tuple[int, float | None, float | None]:
    """Return the number of tokens, the sum of their log-probabilities, and their mean."""
    known = [token.logprob for token in logprobs if token.logprob is not None]
    return len(known), sum(known) if known else None, sum(known) / len(known) if known else None


def _aligned(one: str, other: str) -> Iterator[tuple[str, str, str]]:
    """Return the equal and the different parts of two texts, compared by words."""
    # Differences between longer answers are not marked.
    if one == other or max(len(WORD.findall(text)) for text in (one, other)) > 2000:
        return iter([("equal" if one == other else "replace", one, other)])
    return word_changes(one, other)


async def compare(
    backend: Backend,
    prompts: Sequence[Prompt],
    settings: Settings,
    *,
    path: str | os.PathLike[str] | None = None,
    all_scores: bool = False,
) -> Comparison:
    """Answer prompts under several settings, and compare the answers.

    A setting contains parameters of ``chat``, such as ``system`` and ``temperature``, and may name a ``model`` with
    options of ``load``. Models are loaded one after the other; the last one stays loaded. Each answer is
    scored under the settings of its own model, and of models that are loaded later.

    Args:
        prompts: Texts, or conversations.
        settings: A dictionary of settings by their names, or a list of settings.
        path: An SQLite file for answers and scores. Another run with the same file continues an interrupted one.
        all_scores: Whether to load models a second time, to score the answers of models that were loaded later.

    Raises:
        InvalidRequestError: a prompt or a setting is invalid, or the server runs in another process.
        NotLoadedError: no setting names a model, and none is loaded.
    """
    _ = backend.portal.thread  # Raises HostingError if the lab was stopped.
    loaded = backend.state().model
    make_run = partial(ComparisonRun, backend, prompts, settings, path=path, all_scores=all_scores, loaded=loaded)
    # In another thread, because opening and closing the file wait for the disk.
    run = await in_thread(make_run)
    async with run:
        with counter("compare", backend) as shown:
            for text, work in run.remaining():
                shown.show(text, run.done, run.total)
                await on_loop(backend.portal, work(backend))
    return Comparison(run, backend)
