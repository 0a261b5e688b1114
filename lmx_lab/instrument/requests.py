"""Read recorded requests as a sequence or a data frame, with the tokens, replays and probabilities of each.

A ``Replay`` compares an answer that was generated again with the recorded one.
"""

from __future__ import annotations

import itertools
import operator
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from lmx_lab.backend import Backend, TokenAnswer
from lmx_lab.blocking import both, in_thread, on_loop
from lmx_lab.errors import InvalidRequestError, counted
from lmx_lab.instrument.branches import HasTokens
from lmx_lab.instrument.store import COLUMNS, RecordStore
from lmx_lab.instrument.timeline import Timeline, timeline_of_record
from lmx_lab.results.figures import format_clock
from lmx_lab.results.frames import Dtype, make_table
from lmx_lab.results.pages import Displayed
from lmx_lab.results.tables import align_columns, html_table
from lmx_lab.sanitize import shorten
from lmx_lab.values.recording import Provenance, Record

if TYPE_CHECKING:
    import pandas as pd

SHOWN_ROWS = 10
SHOWN = ("id", "at", "model", "outcome", "prompt_tokens", "output_tokens", "text")
"""Columns of the display."""


class RecordedRequest(HasTokens):
    """A recorded request and its answer. ``record`` contains all stored fields."""

    def __init__(self, record: Record, store: RecordStore, backend: Backend | None) -> None:
        self.record = record
        self._store = store
        self._backend = backend

    @property
    def id(self) -> int:
        """Number of the record in its recording."""
        return self.record.id

    @property
    def text(self) -> str:
        """Text of the answer."""
        return self.record.text

    @property
    def prompt(self) -> tuple[int, ...]:
        """Token ids of the rendered prompt."""
        return self.record.prompt

    @property
    def answer(self) -> tuple[int, ...] | None:
        """Token ids of the answer; None if the engine did not return all of them."""
        return self.record.answer

    async def _replay(self) -> Replay:
        """Generate the answer again from the same tokens, settings and seed, and compare both answers.

        The new answer is not recorded.

        Raises:
            NotLoadedError: another model is loaded; load the model of the record first.
            InvalidRequestError: the recording was loaded without a lab.
        """
        if self._backend is None:
            raise InvalidRequestError("this recording was loaded without a lab; load it with lab.requests.load(path)")
        replayed = await on_loop(self._backend.portal, self._backend.answer(self.record))
        return Replay(recorded=await in_thread(lambda: self._newest), replayed=replayed)

    replay, areplay = both(_replay)

    def timeline(self) -> Timeline:
        """Return the timeline of the request: the times of its wait, prefill and decode steps.

        Raises:
            InvalidRequestError: no steps were recorded.
        """
        return timeline_of_record(self.record)

    def delete(self) -> None:
        """Delete the record. Its content is overwritten in the file."""
        self._store.delete([self.record.id])

    @property
    def _newest(self) -> Record:
        """The record in its present state: the hashes of the model's files may have been added since it was written."""
        return self._store.get(self.record.id) or self.record

    @property
    def _tokens(self) -> TokenAnswer:
        return TokenAnswer.of_record(self._newest)

    def __repr__(self) -> str:
        record = self.record
        answer = "unknown" if record.answer is None else str(len(record.answer))
        counts = f"{counted(len(record.prompt), 'token')} in, {answer} out"
        return f"<request {record.id}: {record.provenance.model}, {counts}, {record.outcome}: {record.text[:60]!r}>"


class RequestList(Displayed, Sequence[RecordedRequest]):
    """The recorded requests of a lab or a file, oldest first. Elements are read on access.

    An element is selected by its position or, for a row of ``lab.map``, by its ``request_id``; one that does not exist,
    or was deleted because the recording exceeded its limits, raises ``KeyError``.

    Args:
        backend: The lab that generates and scores; None if there is none.
    """

    def __init__(self, store: RecordStore, backend: Backend | None = None) -> None:
        self._store = store
        self._backend = backend

    def __len__(self) -> int:
        return len(self._store)

    @overload
    def __getitem__(self, at: int) -> RecordedRequest: ...
    @overload
    def __getitem__(self, at: str) -> RecordedRequest: ...
    @overload
    def __getitem__(self, at: slice) -> list[RecordedRequest]: ...
    def __getitem__(self, at: int | str | slice) -> RecordedRequest | list[RecordedRequest]:
        if isinstance(at, slice):
            return [self[index] for index in range(*at.indices(len(self)))]
        if isinstance(at, str):
            if (record := self._store.find(at)) is None:
                raise KeyError(
                    f"there is no request {at!r:.80}; memory keeps only the newest; record_to=path keeps more"
                )
            return self._element(record)
        record = self._store.at(operator.index(at))
        if record is None:
            raise IndexError(f"there is no request {at}; {len(self)} are recorded")
        return self._element(record)

    def __iter__(self) -> Iterator[RecordedRequest]:
        return map(self._element, self._store)

    def _element(self, record: Record) -> RecordedRequest:
        return RecordedRequest(record, self._store, self._backend)

    @property
    def df(self) -> pd.DataFrame:
        """A data frame with one row for each request: when it was sent, its model, how it ended, its token counts and
        times, its seed, and the beginning of its answer.

        Numbers that are not known are missing. Seeds are exact: the dtype of the column is ``Int64``, or ``object`` if
        a seed has more than 64 bits.

        Raises:
            MissingPackageError: pandas is not installed.
        """
        rows = [dict(zip(COLUMNS, row, strict=True)) for row in self._store.rows()]
        for row in rows:
            row["seed"] = None if row["seed"] is None else int(row["seed"])
        return make_table(rows, COLUMNS)

    def load(self, path: str | os.PathLike[str]) -> RequestList:
        """Return the requests in the file of another lab or an earlier run. The file is not changed.

        Raises:
            InvalidRequestError: the file does not exist, or is not a recording.
        """
        return load_requests(path, self._backend)

    def clear(self) -> None:
        """Delete all records. Their content is overwritten in the file.

        Raises:
            InvalidRequestError: the recording was loaded from a file.
        """
        self._store.delete()

    def __repr__(self) -> str:
        rows = [SHOWN, *self._shown()]
        return "\n".join([*align_columns(rows), self._footer()])

    def _repr_html_(self) -> str:
        return f"{html_table(SHOWN, self._shown())}<div>{self._footer()}</div>"

    def _shown(self) -> list[tuple[str, ...]]:
        rows = [dict(zip(COLUMNS, row, strict=True)) for row in self._store.rows(SHOWN_ROWS)]
        shown = []
        for row in rows:
            cells = {name: "" if row[name] is None else str(row[name]) for name in SHOWN}
            cells["at"] = format_clock(row["at"])
            cells["text"] = repr(shorten(row["text"], 60))
            shown.append(tuple(cells.values()))
        return shown

    def _footer(self) -> str:
        newest = f"; the newest {SHOWN_ROWS} are shown, .df contains all" if len(self) > SHOWN_ROWS else ""
        return f"recorded: {counted(len(self), 'request')}{newest}"


def load_requests(path: str | os.PathLike[str], backend: Backend | None = None) -> RequestList:
    """Return the requests in the file of a recording, without a server. The file is not changed.

    Args:
        backend: A lab that can generate and score.

    Raises:
        InvalidRequestError: the file does not exist, or is not a recording.
    """
    return RequestList(RecordStore(Path(path), read_only=True), backend)


@dataclass(frozen=True, kw_only=True, repr=False)
class Replay:
    """A recorded answer, and the answer to the same request now."""

    recorded: Record
    replayed: Record

    @property
    def unit(self) -> str:
        """The unit of comparison: ``token``, or ``character`` if the token ids of an answer are not known."""
        known = self.recorded.answer is not None and self.replayed.answer is not None
        return "token" if known else "character"

    @property
    def first_difference(self) -> int | None:
        """Position of the first token, or character, that differs; None if there is none.

        It is the length of the shorter answer if the longer one begins with it.
        """
        pairs = itertools.zip_longest(*self._sides)
        return next((at for at, (one, other) in enumerate(pairs) if one != other), None)

    @property
    def same(self) -> bool:
        """Whether both answers are the same."""
        return self.first_difference is None

    @property
    def changed(self) -> dict[str, tuple[Any, Any]]:
        """Differences between the computations of the answers, with the recorded and the present value: fields of the
        provenance, such as the version of the engine, and ``prompt`` if the chat template renders other tokens.
        """
        before, now = self.recorded.provenance, self.replayed.provenance
        names = [each.name for each in fields(Provenance)]
        pairs = {name: (getattr(before, name), getattr(now, name)) for name in names}
        differing = {
            name: pair
            for name, pair in pairs.items()
            if pair[0] != pair[1] and (name not in ("weights", "template") or all(pair))
        }
        prompts = self.recorded.prompt, self.replayed.prompt
        return differing | ({"prompt": prompts} if prompts[0] != prompts[1] else {})

    @property
    def df(self) -> pd.DataFrame:
        """A data frame with one row for each position: the id of the token, or the character, in both answers.

        Raises:
            MissingPackageError: pandas is not installed.
        """
        pairs = itertools.zip_longest(*self._sides)
        rows = [(at, one, other, one == other) for at, (one, other) in enumerate(pairs)]
        side: Dtype = "Int64" if self.unit == "token" else "str"
        return make_table(rows, {"position": "int64", "recorded": side, "replayed": side, "same": "bool"})

    @property
    def _sides(self) -> tuple[Sequence[Any], Sequence[Any]]:
        before, now = self.recorded, self.replayed
        if before.answer is None or now.answer is None:
            return before.reasoning + before.text, now.reasoning + now.text
        return before.answer, now.answer

    def __repr__(self) -> str:
        lengths = " and ".join(str(len(side)) for side in self._sides)
        result = "the same" if self.same else f"first difference at {self.unit} {self.first_difference}"
        changed = f"; changed: {', '.join(self.changed)}" if self.changed else ""
        return f"<Replay: {result}, of {lengths} {self.unit}s{changed}>"
