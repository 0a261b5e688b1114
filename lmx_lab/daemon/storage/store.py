"""The database: one writer, and a reader beside it, each on a thread of its own. The only importer of sqlite3.

SQLite in WAL mode with ``synchronous=NORMAL``: what is committed survives the death of the process at any point; a
power cut can take the last moments, and never tears anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

from pydantic import BaseModel
from pydantic_core import PydanticSerializationError

from lmx_lab.daemon.clock import iso
from lmx_lab.daemon.storage.schema import MIGRATIONS
from lmx_lab.errors import HostingError, LabError, StoppingError, StorageFullError
from lmx_lab.wire.identifiers import new_id
from lmx_lab.wire.sessions import TurnStats

T = TypeVar("T")
Row = Mapping[str, Any]
Publish = Callable[[Sequence["StoredEvent"]], None]
RESERVE_BYTES = 2 * 2**20
"""Kept on disk, and given up when the disk is full: so that what runs can be ended in good order."""
# What a full disk, a quota and a limit of file sizes look like.
FULL = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_SHMSIZE}
DAMAGED = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
LATEST = "SELECT coalesce((SELECT seq FROM sqlite_sequence WHERE name = 'events'), 0) AS seq"


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredEvent:
    """An event as it is in the log, encoded once for all who read it."""

    seq: int
    event: str
    session_id: str | None
    turn_id: str | None
    text: str
    """The envelope as JSON."""


class DatabaseView:
    """A consistent view of the database, for the time of one function."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    @property
    def latest_seq(self) -> int:
        """Of the newest event that this view has, or had before it was folded away."""
        return int(self._connection.execute(LATEST).fetchone()["seq"])

    def row(self, sql: str, *parameters: object) -> Row | None:
        row: Row | None = self._connection.execute(sql, parameters).fetchone()
        return row

    def each(self, sql: str, *parameters: object) -> Iterator[Row]:
        """The rows one by one, for who may not want all."""
        return iter(self._connection.execute(sql, parameters))

    def rows(self, sql: str, *parameters: object) -> list[Row]:
        rows: list[Row] = self._connection.execute(sql, parameters).fetchall()
        return rows


class Transaction(DatabaseView):
    """State and events that change together, or not at all."""

    def __init__(self, connection: sqlite3.Connection, stream_id: str) -> None:
        super().__init__(connection)
        self._stream_id = stream_id
        self.now = iso()
        self.appended: list[StoredEvent] = []

    def run(self, sql: str, *parameters: object) -> int:
        """The number of rows that this changed."""
        return self._connection.execute(sql, parameters).rowcount

    def append(
        self,
        event: str,
        data: BaseModel,
        *,
        session_id: str | None = None,
        turn_id: str | None = None,
        stats: TurnStats | None = None,
    ) -> int:
        """Write an event to the log; returns its seq. It is visible when the transaction is committed."""
        row: dict[str, Any] = {
            "at": self.now,
            "event": event,
            "session_id": session_id,
            "turn_id": turn_id,
            "data": as_json(data),
            "stats": None if stats is None else as_json(stats),
        }
        sql = f"INSERT INTO events ({', '.join(row)}) VALUES ({', '.join('?' * len(row))})"
        row["seq"] = self._connection.execute(sql, tuple(row.values())).lastrowid
        self.appended.append(stored_event(row, self._stream_id))
        return int(row["seq"])


def as_json(data: BaseModel) -> str:
    """JSON that every reader takes: a tool may return half characters, which no UTF-8 has."""
    try:
        return data.model_dump_json()
    except PydanticSerializationError:
        text = json.dumps(data.model_dump(mode="python", warnings=False), ensure_ascii=False, default=str)
        return text.encode("utf-8", "replace").decode()


def stored_event(row: Row, stream_id: str) -> StoredEvent:
    """The event in a row of the table."""
    session_id, turn_id = row["session_id"], row["turn_id"]
    stats = f',"stats":{row["stats"]}' if row["stats"] is not None else ""
    text = (
        f'{{"event":"{row["event"]}","seq":{row["seq"]},"at":"{row["at"]}","stream_id":"{stream_id}",'
        f'"session_id":{_quoted(session_id)},"turn_id":{_quoted(turn_id)},"data":{row["data"]}{stats}}}'
    )
    return StoredEvent(seq=row["seq"], event=row["event"], session_id=session_id, turn_id=turn_id, text=text)


def _quoted(identifier: str | None) -> str:
    # Ids have no character that JSON would escape.
    return "null" if identifier is None else f'"{identifier}"'


class Store:
    """The database of one daemon. ``open()`` makes it; on the loop that opened it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stream_id = ""
        """Made with the database."""
        self.issued_seq = 0
        """Of the newest event that may be committed by now."""
        self.last_at: str | None = None
        """When the newest event of earlier runs was written."""
        self.publish: Publish = lambda events: None
        """Called on the loop with the events of each commit, in order, before ``write`` returns."""
        self._loop = asyncio.get_running_loop()
        self._reserve = path.with_suffix(".reserve")
        self._full = False
        self._closed = False
        self._writer, self._reader = (ThreadPoolExecutor(1, f"lmx-lab-{name}") for name in ("store", "reading"))
        self._writing: sqlite3.Connection
        self._reading: sqlite3.Connection

    @classmethod
    async def open(cls, path: Path) -> Self:
        """Open the database, made and brought up to date where needed, for this user only.

        Raises:
            StorageFullError: no room for it.
            HostingError: it is damaged, or of a newer version.
        """
        store = cls(path)
        try:
            with in_plain_words(path):
                await store._loop.run_in_executor(store._writer, store._open)
        except BaseException:
            await store.close()
            raise
        return store

    def _open(self) -> None:
        os.close(os.open(self.path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600))
        self._writing = _connect(self.path)
        self._writing.execute("PRAGMA journal_mode = WAL")
        _migrate(self._writing, self.path)
        with _transaction(self._writing, "IMMEDIATE"):
            self._writing.execute("INSERT OR IGNORE INTO meta VALUES ('stream_id', ?)", (new_id("stm"),))
        self.stream_id = self._writing.execute("SELECT value FROM meta WHERE key = 'stream_id'").fetchone()["value"]
        earlier = DatabaseView(self._writing)
        self.issued_seq = earlier.latest_seq
        newest = earlier.row("SELECT at FROM events ORDER BY seq DESC LIMIT 1")
        self.last_at = newest["at"] if newest is not None else None
        self._reading = _connect(self.path)
        self._reading.execute("PRAGMA query_only = ON")
        self._keep_reserve()

    async def write(self, work: Callable[[Transaction], T], *, ending: bool = False) -> T:
        """Do the work, on the writer's thread, in one transaction; return what it returns once that is committed and
        its events are published. An exception of the work undoes it. A caller that is cancelled undoes nothing that
        has begun.

        Args:
            ending: It ends something, and needs little room: tried on a full disk, too, out of the reserve.

        Raises:
            StorageFullError: no room; nothing was changed.
        """
        self._check_open()
        with in_plain_words(self.path):
            return await self._loop.run_in_executor(self._writer, self._write, work, ending)

    def _write(self, work: Callable[[Transaction], T], ending: bool) -> T:
        if self._full and not ending and not self._has_room():
            raise sqlite3.OperationalError("database or disk is full")
        try:
            return self._committed(work)
        except sqlite3.Error as exc:
            if is_full(exc):
                self._full = True
                self._reserve.unlink(missing_ok=True)
                if ending:
                    return self._committed(work)
            raise

    def _committed(self, work: Callable[[Transaction], T]) -> T:
        transaction = Transaction(self._writing, self.stream_id)
        with _transaction(self._writing, "IMMEDIATE"):
            result = work(transaction)
            if transaction.appended:
                self.issued_seq = transaction.appended[-1].seq
        if transaction.appended:
            # Before the result, which takes the same way: who has it finds its events published.
            self._loop.call_soon_threadsafe(self.publish, transaction.appended)
        return result

    async def read(self, work: Callable[[DatabaseView], T]) -> T:
        """Do the work, on the reader's thread, with a view of the database as it is now."""
        self._check_open()
        with in_plain_words(self.path):
            return await self._loop.run_in_executor(self._reader, self._read, work)

    def _read(self, work: Callable[[DatabaseView], T]) -> T:
        with _transaction(self._reading, "DEFERRED"):
            return work(DatabaseView(self._reading))

    def _check_open(self) -> None:
        if self._closed:
            raise StoppingError("the daemon is stopping; start it again, then ask again")

    async def close(self) -> None:
        """Close the database, after what has begun. Idempotent; ``write`` and ``read`` raise afterwards."""
        if self._closed:
            return
        self._closed = True
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        for executor, name in ((self._reader, "_reading"), (self._writer, "_writing")):
            executor.submit(self._close_connection, name)
            executor.shutdown()

    def _close_connection(self, name: str) -> None:
        if (connection := self.__dict__.get(name)) is not None:
            connection.close()

    # A full disk

    def _keep_reserve(self) -> None:
        if self._reserve.exists() and self._reserve.stat().st_size == RESERVE_BYTES:
            return
        if not self._is_roomy():
            self._reserve.unlink(missing_ok=True)
            return
        with contextlib.suppress(OSError), open(self._reserve, "wb", opener=_private) as file:
            # Real bytes: a file with a hole takes no room.
            file.write(os.urandom(RESERVE_BYTES))

    def _has_room(self) -> bool:
        """Whether there is room again; then the reserve is made anew."""
        if self._is_roomy():
            self._full = False
            self._keep_reserve()
        return not self._full

    def _is_roomy(self) -> bool:
        return shutil.disk_usage(self.path.parent).free >= 2 * RESERVE_BYTES


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=10)
    connection.row_factory = sqlite3.Row
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute("PRAGMA foreign_keys = ON")
    return connection


def _migrate(connection: sqlite3.Connection, path: Path) -> None:
    done = connection.execute("PRAGMA user_version").fetchone()[0]
    if done > len(MIGRATIONS):
        raise HostingError(
            f"{path} is of a newer version of the lab (its tables have number {done}, this version knows "
            f"{len(MIGRATIONS)}); update lmx-lab, or give LMX_LAB_HOME another folder"
        )
    for number, script in enumerate(MIGRATIONS[done:], done + 1):
        try:
            connection.executescript(f"BEGIN IMMEDIATE; {script} PRAGMA user_version = {number}; COMMIT;")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise


@contextlib.contextmanager
def _transaction(connection: sqlite3.Connection, kind: str) -> Iterator[None]:
    connection.execute(f"BEGIN {kind}")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        # Some errors, such as a full disk, have rolled back already.
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def is_full(exc: sqlite3.Error) -> bool:
    return getattr(exc, "sqlite_errorcode", None) in FULL or "disk is full" in str(exc)


def _free(path: Path) -> str:
    with contextlib.suppress(OSError):
        return f" ({shutil.disk_usage(path.parent).free} bytes are free)"
    return ""


@contextlib.contextmanager
def in_plain_words(path: Path) -> Iterator[None]:
    """Errors of SQLite, raised in the block, become the lab's own."""
    try:
        yield
    except sqlite3.Error as exc:
        if is_full(exc):
            raise StorageFullError(f"no room to write {path}{_free(path)}; free some disk, then try again") from exc
        if getattr(exc, "sqlite_errorcode", None) in DAMAGED:
            raise HostingError(f"{path} is damaged ({exc}); move it away to begin with an empty one") from exc
        raise LabError(f"{path} could not be read or written: {exc}") from exc
    except OSError as exc:
        raise HostingError(f"{path} cannot be opened: {exc.strerror}") from exc
