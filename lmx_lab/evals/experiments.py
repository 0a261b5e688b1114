"""Store evaluations in an SQLite file, one database row each, and read them again later.

The file is opened for each operation, so several notebooks can use it, and no connection has to be closed.
"""

from __future__ import annotations

import json
import numbers
import operator
import sqlite3
import zlib
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from lmx_lab.backend import Backend
from lmx_lab.errors import InvalidRequestError, LabError, did_you_mean
from lmx_lab.evals.evaluation import Evaluation
from lmx_lab.evals.rows import EvaluatedRow, RunFacts, to_json
from lmx_lab.results.database import open_database
from lmx_lab.results.frames import index_fields, make_index, make_table
from lmx_lab.results.pages import Displayed
from lmx_lab.results.tables import align_columns, html_table

if TYPE_CHECKING:
    import pandas as pd

FILE = "experiments.db"
"""Name of the file in the lab's home."""
APPLICATION = 0x4C4D5845
"""Marks the files of this module: "LMXE" in ASCII."""
COLUMNS = {
    **{"id": "int64", "at": "time", "name": "str", "model": "str", "engine": "str", "metric": "str"},
    **{"rows": "int64", "errors": "int64", "score": "float64", "low": "float64", "high": "float64"},
    **{"method": "str", "weights": "str", "frame": "str", "settings": "object", "versions": "object"},
    **{"machine": "str"},
}
"""Columns of the table of all experiments, and their types in a data frame."""
MIGRATIONS = (
    """
CREATE TABLE experiments (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    at REAL NOT NULL,
    name TEXT NOT NULL,
    model TEXT NOT NULL,
    engine TEXT NOT NULL,
    metric TEXT NOT NULL,
    rows INTEGER NOT NULL,
    errors INTEGER NOT NULL,
    score REAL,
    low REAL,
    high REAL,
    method TEXT NOT NULL,
    weights TEXT NOT NULL,
    frame TEXT NOT NULL,
    settings TEXT NOT NULL,
    versions TEXT NOT NULL,
    machine TEXT NOT NULL,
    data BLOB NOT NULL
);
""",
)
FACTS = tuple(each.name for each in fields(RunFacts))
"""Columns with the facts of an evaluation."""
REMEDY = "check its permissions and the free space, or move it elsewhere"
"""What the user can do if the file cannot be used."""
SHOWN = ("id", "at", "name", "model", "metric", "rows", "score", "low", "high")
SHOWN_ROWS = 20


class Experiments(Displayed, Sequence[Evaluation]):
    """The stored evaluations, oldest first. ``df`` has one row for each; an element is an ``Evaluation`` with all rows.

    An element is selected by its position, or by its name, which returns the newest evaluation with this name.

    Args:
        path: The file, which is created with the first evaluation.
        backend: The lab that scores tokens for ``Evaluation.lens``; None if there is none.
    """

    def __init__(self, path: Path, backend: Backend | None = None) -> None:
        self.path = path
        self._backend = backend

    def add(self, evaluation: Evaluation) -> int:
        """Store an evaluation, and return its id.

        Raises:
            LabError: the file cannot be used.
        """
        facts, score = evaluation.facts, evaluation.score
        index = None if evaluation.index is None else index_fields(evaluation.index)
        data = {"rows": [row.to_fields() for row in evaluation.rows], "index": index}
        values = {
            **vars(facts),
            "settings": to_json(facts.settings),
            "versions": to_json(facts.versions),
            "metric": str(facts.settings.get("metric", {}).get("name", "")),
            "rows": len(evaluation.rows),
            "errors": evaluation.errors,
            # SQLite stores NaN as NULL.
            **{"score": score.mean, "low": score.low, "high": score.high, "method": score.method},
            "data": zlib.compress(to_json(data).encode()),
        }
        sql = f"INSERT INTO experiments ({', '.join(values)}) VALUES ({', '.join('?' * len(values))})"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as exc:
            raise LabError(f"the folder {self.path.parent} cannot be created: {exc.strerror}; {REMEDY}") from exc
        with self._open() as connection:
            return int(connection.execute(sql, tuple(values.values())).lastrowid or 0)

    def delete(self, *ids: int) -> None:
        """Delete the experiments with these ids. Ids that do not exist are ignored.

        Raises:
            InvalidRequestError: an id is not an integer.
            LabError: the file cannot be used.
        """
        for each in ids:
            if not isinstance(each, numbers.Integral):
                raise InvalidRequestError(
                    f"{each!r} is not the id of an experiment; the index of .df lists the ids", param="ids"
                )

        if self.path.exists():
            with self._open() as connection:
                connection.executemany("DELETE FROM experiments WHERE id = ?", [(int(id_),) for id_ in ids])

    def __len__(self) -> int:
        return sum(count for (count,) in self._select("SELECT count(*) FROM experiments"))

    @overload
    def __getitem__(self, at: int | str) -> Evaluation: ...
    @overload
    def __getitem__(self, at: slice) -> list[Evaluation]: ...
    def __getitem__(self, at: int | str | slice) -> Evaluation | list[Evaluation]:
        if isinstance(at, slice):
            return [self[index] for index in range(*at.indices(len(self)))]
        if isinstance(at, str):
            found = self._read("WHERE name = ? ORDER BY id DESC LIMIT 1", at)
            if not found:
                names = self._select("SELECT DISTINCT name FROM experiments")
                raise KeyError(f"there is no experiment {at!r:.80}{did_you_mean(at, [name for (name,) in names])}")
            return found[0]
        position = operator.index(at)
        order, offset = ("ASC", position) if position >= 0 else ("DESC", -position - 1)
        found = self._read(f"ORDER BY id {order} LIMIT 1 OFFSET ?", offset)
        if not found:
            raise IndexError(f"there is no experiment {at}; {len(self)} are stored")
        return found[0]

    @property
    def df(self) -> pd.DataFrame:
        """A data frame with one row for each experiment, indexed by id: its start time, what was evaluated and how, and
        the score. ``settings`` and ``versions`` are dictionaries; ``frame`` and ``weights`` are SHA-256 hashes.

        Raises:
            MissingPackageError: pandas is not installed.
        """
        sql = f"SELECT {', '.join(COLUMNS)} FROM experiments ORDER BY id"
        rows = [dict(zip(COLUMNS, row, strict=True)) for row in self._select(sql)]
        for row in rows:
            row |= {name: json.loads(row[name]) for name in ("settings", "versions")}
        return make_table(rows, COLUMNS).set_index("id")

    def _read(self, clause: str, *parameters: object) -> list[Evaluation]:
        found = []
        sql = f"SELECT id, data, {', '.join(FACTS)} FROM experiments {clause}"
        for id_, data, *values in self._select(sql, *parameters):
            try:
                stored = json.loads(zlib.decompress(data))
                rows = list(map(EvaluatedRow.of_fields, stored["rows"]))
                index = None if stored["index"] is None else make_index(stored["index"])
            except (zlib.error, ValueError, TypeError, KeyError) as exc:
                raise LabError(
                    f"the rows of the experiment {id_} in {self.path} are damaged: {exc}; delete it: "
                    f"lab.experiments.delete({id_})"
                ) from exc
            facts = dict(zip(FACTS, values, strict=True))
            facts |= {name: json.loads(facts[name]) for name in ("settings", "versions")}
            found.append(Evaluation(RunFacts(**facts), rows, id=id_, backend=self._backend, index=index))
        return found

    def _select(self, sql: str, *parameters: object) -> list[tuple[Any, ...]]:
        """Return the rows of a query; none if the file does not exist."""
        if not self.path.exists():
            return []
        with self._open() as connection:
            return connection.execute(sql, parameters).fetchall()

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """Open the file for one transaction."""
        try:
            opened = open_database(
                self.path,
                MIGRATIONS,
                application=APPLICATION,
                purpose="a file of experiments",
                param="home",
                remedy=REMEDY,
            )
            with closing(opened) as connection, connection:
                yield connection
        except sqlite3.Error as exc:
            raise LabError(f"the experiments in {self.path} cannot be used: {exc}; {REMEDY}") from exc

    # Display

    def __repr__(self) -> str:
        rows = [SHOWN, *self._shown()]
        return "\n".join([*align_columns(rows), self._footer()])

    def _repr_html_(self) -> str:
        return f"{html_table(SHOWN, self._shown())}<div>{self._footer()}</div>"

    def _shown(self) -> list[tuple[str, ...]]:
        sql = f"SELECT {', '.join(SHOWN)} FROM experiments ORDER BY id DESC LIMIT ?"
        return [tuple(map(_cell, SHOWN, row)) for row in self._select(sql, SHOWN_ROWS)[::-1]]

    def _footer(self) -> str:
        count = len(self)
        rest = f"; the newest {SHOWN_ROWS} are shown, .df contains all" if count > SHOWN_ROWS else ""
        return f"stored experiments: {count}{rest}"


def _cell(name: str, value: Any) -> str:
    if value is None:
        return ""
    if name == "at":
        return datetime.fromtimestamp(value, UTC).astimezone().strftime("%Y-%m-%d %H:%M")
    return f"{value:.3f}" if isinstance(value, float) else str(value)[:60]
