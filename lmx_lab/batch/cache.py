"""Store the answers or vectors of a batch in an SQLite file, so that a second run computes only what is missing.

All statements run on one thread, so that an event loop does not wait for the disk. Each answer is written in its own
transaction, and so are the vectors of each request: if the process is killed, the file contains all of a transaction
or none of it. Several processes can use the same file.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from lmx_lab.batch.answers import DTYPES, RowAnswer, answer_row
from lmx_lab.errors import InvalidRequestError, LabError
from lmx_lab.results.database import open_database
from lmx_lab.results.frames import make_table

if TYPE_CHECKING:
    import pandas as pd

T = TypeVar("T")


class AnswerCache:
    """Stores answers in a file, by the keys of their requests. The file is created if it does not exist.

    ``AnswerCache("answers.db", read_only=True).df`` returns the answers in a file, without a server.

    Args:
        read_only: Whether to open an existing file without changing it.

    Raises:
        InvalidRequestError: the file cannot be opened, or belongs to another program.
    """

    def __init__(self, path: str | os.PathLike[str], *, read_only: bool = False) -> None:
        try:
            self.path = Path(path).expanduser().absolute()
        except TypeError:
            raise InvalidRequestError(
                f"cache is {path!r:.80}; pass the path of a file, such as 'answers.db'", param="cache"
            ) from None
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="lmx-lab-batch")
        self._connection = open_database(
            self.path,
            (
                """
                CREATE TABLE answers (
                    key TEXT PRIMARY KEY, at REAL NOT NULL, model TEXT NOT NULL, data TEXT NOT NULL
                ) WITHOUT ROWID
                """,
            ),
            application=0x4C4D5842,  # "LMXB" in ASCII
            purpose="a cache",
            param="cache",
            pragmas=("journal_mode = WAL", "synchronous = NORMAL"),
            read_only=read_only,
        )

    async def find(self, keys: Sequence[str]) -> dict[str, RowAnswer]:
        """Return the stored answers for these keys. Keys without an answer are left out.

        Raises:
            LabError: the file cannot be read.
        """

        def read() -> dict[str, RowAnswer]:
            rows: list[tuple[str, str]] = []
            most = 500
            for start in range(0, len(keys), most):
                some = keys[start : start + most]
                sql = f"SELECT key, data FROM answers WHERE key IN ({', '.join('?' * len(some))})"
                rows += self._connection.execute(sql, some).fetchall()
            return {key: RowAnswer(**json.loads(data)) for key, data in rows}

        return await self._call(read)

    async def add(self, answers: Mapping[str, RowAnswer], model: str) -> None:
        """Store answers by their keys in one transaction. Returns after the operating system has received the data.

        Raises:
            LabError: the file cannot be written.
        """
        rows = [(key, time.time(), model, json.dumps(dataclasses.asdict(answer))) for key, answer in answers.items()]

        def write() -> None:
            with self._connection:
                self._connection.executemany("INSERT OR REPLACE INTO answers VALUES (?, ?, ?, ?)", rows)

        await self._call(write)

    @property
    def df(self) -> pd.DataFrame:
        """A data frame with one row for each answer: when it was stored, the model, and the columns of ``lab.map``,
        except those of a schema. Prompts are not in the file, and vectors are left out.

        Raises:
            LabError: the file cannot be read, or is closed.
            MissingPackageError: pandas is not installed.
        """
        sql = "SELECT at, model, data FROM answers ORDER BY at"
        try:
            found = self._executor.submit(lambda: self._connection.execute(sql).fetchall()).result()
        except (RuntimeError, sqlite3.Error) as exc:
            raise LabError(f"the cache {self.path} cannot be read: {exc}; open it again") from exc
        # The model of a vector is the JSON text of its settings.
        rows = [
            {"at": at, "model": model, **answer_row(RowAnswer(**json.loads(data)), {}, sample=None)}
            for at, model, data in found
            if not model.startswith("[")
        ]
        return make_table(rows, {"at": "time", "model": "text", **DTYPES})

    def close(self, *, wait: bool = True) -> None:
        """Finish pending writes and close the file. Idempotent.

        Args:
            wait: Whether to wait until the file is closed.
        """
        with contextlib.suppress(RuntimeError):  # It is already closed.
            self._executor.submit(self._connection.close)
        self._executor.shutdown(wait=wait)

    async def _call(self, work: Callable[[], T]) -> T:
        try:
            return await asyncio.wrap_future(self._executor.submit(work))
        except sqlite3.Error as exc:
            raise LabError(
                f"the cache {self.path} cannot be used: {exc}; free disk space, or pass another path"
            ) from exc
