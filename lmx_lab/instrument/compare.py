"""Answer the same prompts under several settings, and compare the answers: texts, speeds and log-probabilities.

Answers and scores are records in a separate recording. If an interrupted comparison is run again with the same file, it
computes only the missing answers and scores.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

from lmx_lab.backend import AnswerRecorder, Backend
from lmx_lab.errors import InvalidRequestError, NotLoadedError
from lmx_lab.instrument.lens import ALTERNATIVES
from lmx_lab.instrument.store import MEMORY_BYTES, RecordStore
from lmx_lab.values.models import LoadOptions, LoadSpec
from lmx_lab.values.recording import Record
from lmx_lab.values.steering import recorded_steering

Prompt = str | Sequence[Mapping[str, Any]]
Work = Callable[[Backend], Coroutine[Any, Any, None]]
MAX_ANSWERS = 10_000
"""Maximum number of answers of a comparison."""
SCORED = "scored"
"""``outcome`` of records that are scores. Their ``logprobs`` are those of an answer under another setting."""
PROBES = ("x", "y")
"""Two texts without common tokens, except those that the tokenizer puts before each text."""


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
    answer: AnswerRecorder


class ComparisonRun:
    """Computes the missing answers and scores of a comparison.

    Args:
        path: SQLite file for answers and scores; None keeps them in memory.
        all_scores: Whether to load models a second time to score the answers of models that were loaded later.

    Raises:
        InvalidRequestError: a prompt or a setting is invalid, or the file cannot be used.
        NotLoadedError: no setting names a model, and none is loaded.
    """

    def __init__(
        self,
        backend: Backend,
        prompts: Sequence[Prompt],
        settings: Mapping[str, Mapping[str, Any]] | Sequence[Mapping[str, Any]],
        *,
        path: str | os.PathLike[str] | None,
        all_scores: bool,
    ) -> None:
        self.prompts = _checked_prompts(prompts)
        loaded = backend.state().model
        self.settings = _read_settings(settings, loaded or "")
        if (count := len(self.prompts) * len(self.settings)) > MAX_ANSWERS:
            raise InvalidRequestError(
                f"the comparison has {count} answers; the limit is {MAX_ANSWERS}; compare fewer prompts"
            )
        self._all_scores = all_scores
        self.cells = [
            Cell(
                prompt=number,
                setting=setting,
                key=_digest(prompt, setting.load_key, setting.parameters),
                answer=backend.answer_recorder(prompt, setting.parameters),
            )
            for number, prompt in enumerate(self.prompts)
            for setting in self.settings
        ]
        if loaded is None and any(setting.spec is None for setting in self.settings):
            raise NotLoadedError("no model is loaded; load one, or name a model in each setting")
        self.path = None if path is None else Path(path).expanduser()
        self.store = RecordStore(self.path) if path is not None else RecordStore(max_bytes=MEMORY_BYTES)
        self.records = {record.request_id: record for record in self.store}
        """Answers and scores by their ids."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # Both wait until all finished work is written, so that the same comparison can be continued immediately.
        if kind is not None:
            self.store.close()
        else:
            len(self.store)

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
                await backend.load(spec)

            yield f"load {setting.model}", load

    async def _answer(self, cell: Cell, _backend: Backend) -> None:
        self._save(replace(await cell.answer(), request_id=cell.key))

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
        return _digest("score", answer.key, prompt, under.load_key, parameters.get("system"), *steer)

    def _unscored(self, group: str, answered: Sequence[str]) -> list[tuple[Cell, Cell]]:
        """Return the pairs of an answer and a cell of a group under which it can be scored now.

        Args:
            answered: The groups whose answers are scored.
        """
        found: dict[str, tuple[Cell, Cell]] = {}
        for answer in (each for each in self.cells if each.setting.load_key in answered):
            for cell in self.cells_of(answer.prompt):
                if cell.setting.load_key == group and self._can_score(answer, cell):
                    found.setdefault(self._score_key(answer, cell.setting), (answer, cell))
        return [pair for key, pair in found.items() if key not in self.records]

    def _can_score(self, answer: Cell, cell: Cell) -> bool:
        record, under = self.records.get(answer.key), self.records.get(cell.key)
        if record is None or under is None or not under.prompt or not record.text:
            return False
        if answer.setting.load_key == cell.setting.load_key:
            return bool(record.answer)
        # Under another model, the text is tokenized again, which contains neither reasoning nor tool calls.
        return not record.reasoning and not record.tool_calls

    def _scoring(self, group: str, answered: Sequence[str]) -> Iterator[tuple[str, Work]]:
        for answer, cell in self._unscored(group, answered):
            text = f"score {answer.setting.name} under {cell.setting.name}, prompt {cell.prompt}"
            yield text, partial(self._score, answer, cell)

    async def _score(self, answer: Cell, cell: Cell, backend: Backend) -> None:
        record, under = self.records[answer.key], self.records[cell.key]
        if answer.setting.load_key == cell.setting.load_key:
            tokens: Sequence[int] = record.answer or ()
        else:
            tokens = await _encode(backend, record.text)
        prompt = under.prompt
        whole = await backend.score(
            [*prompt, *tokens],
            model=under.provenance.model,
            top=ALTERNATIVES,
            start=len(prompt),
            steer=recorded_steering(under.request),
        )
        if not record.reasoning and not record.tool_calls:
            whole = whole[: _tokens_of(record.text, [token.bytes for token in whole])]
        scored = replace(
            under,
            request_id=self._score_key(answer, cell.setting),
            answer=tuple(tokens),
            text=record.text,
            logprobs=tuple(whole),
            outcome=SCORED,
            timings={},
            steps=(),
        )
        self._save(scored)


def _checked_prompts(prompts: Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str) or not prompts:
        raise InvalidRequestError(f"prompts is {prompts!r:.40}; pass a list of texts or conversations", param="prompts")
    return list(prompts)


def _read_settings(
    settings: Mapping[str, Mapping[str, Any]] | Sequence[Mapping[str, Any]], loaded: str
) -> list[Setting]:
    """Return the settings with their names and models.

    Args:
        loaded: The loaded model, for settings without a model.

    Raises:
        InvalidRequestError: there is none, one is not a dictionary, two have the same name, or only some of them name
            a model.
    """
    for each in settings.values() if isinstance(settings, Mapping) else settings:
        if not isinstance(each, Mapping):
            raise InvalidRequestError(
                f"a setting is {each!r:.80}; pass a dictionary of parameters, such as {{'temperature': 0}}",
                param="settings",
            )
    pairs = list(settings.items()) if isinstance(settings, Mapping) else [(_name(each), each) for each in settings]
    if not pairs:
        raise InvalidRequestError("there are no settings; pass at least one, such as {}", param="settings")
    with_model = ["model" in each for _, each in pairs]
    if any(with_model) and not all(with_model):
        raise InvalidRequestError(
            "some settings name a model and others do not; name a model in all of them", param="settings"
        )
    if len({name for name, _ in pairs}) < len(pairs):
        raise InvalidRequestError("two settings are equal, or have the same name; rename one", param="settings")
    return [_read_setting(str(name), each, loaded) for name, each in pairs]


def _read_setting(name: str, given: Mapping[str, Any], loaded: str) -> Setting:
    options = {key: given[key] for key in given if key in LoadOptions.__annotations__}
    parameters = {key: value for key, value in given.items() if key not in {"model", *options}}
    if "model" not in given:
        if options:
            raise InvalidRequestError(f"{min(options)} is a load option; also name the model", param=min(options))
        return Setting(name=name, spec=None, model=loaded, parameters=parameters)
    model = os.fspath(given["model"])
    spec = LoadSpec.with_options(model, options)  # type: ignore[arg-type]
    return Setting(name=name, spec=spec, model=model, parameters=parameters)


def _name(setting: Mapping[str, Any]) -> str:
    return ", ".join(str(value) if key == "model" else f"{key}={value}" for key, value in setting.items()) or "default"


def _digest(*parts: Any) -> str:
    text = json.dumps(parts, sort_keys=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


async def _encode(backend: Backend, text: str) -> Sequence[int]:
    """Return the tokens of a text without those that the tokenizer puts before each text."""
    one, other = [await backend.encode(probe) for probe in PROBES]
    before = next((at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), 0)
    return (await backend.encode(text))[before:]


def _tokens_of(text: str, tokens: Sequence[bytes]) -> int:
    """Return the number of tokens that form a text. The others ended the answer: a special token, or a stop string."""
    left, count = len(text.encode()), 0
    for data in tokens:
        left -= len(data)
        if left < 0:
            break
        count += 1
    return count
