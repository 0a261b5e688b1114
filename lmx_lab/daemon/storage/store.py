"""The daemon's SQLite database: one connection that writes and one that reads, each on its own thread.

This is the only module that imports sqlite3. The database is in WAL mode with ``synchronous=NORMAL``: committed data
survives the death of the process at any point. A power failure can lose the last moments, but never corrupts the file.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sqlite3
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

from pydantic import BaseModel

from lmx_lab.daemon.encoding import encode_event, timestamp, to_json
from lmx_lab.daemon.storage.schema import MIGRATIONS
from lmx_lab.errors import HostingError, LabError, StoppingError, StorageFullError
from lmx_lab.results.database import SchemaError, migrate
from lmx_lab.wire.base import new_id
from lmx_lab.wire.sessions import TurnStats

T = TypeVar("T")
Row = Mapping[str, Any]
Publish = Callable[[Sequence["StoredEvent"]], None]
RESERVE_BYTES = 2 * 2**20
"""Size of a file that is deleted when the disk is full, so that the ends of running turns can still be written."""
# Errors of SQLite on a full disk, an exhausted quota and a limit of the file size.
FULL = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_SHMSIZE}
DAMAGED = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
MOVE_AWAY = "move it away to start with an empty database, or put a backup in its place"


@dataclass(frozen=True, kw_only=True)
class TurnKey:
    """Identifies a turn: the ids of turns are unique only within a session."""

    session_id: str
    turn_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredEvent:
    """An event of the log, encoded once for all of its readers."""

    seq: int
    event: str
    session_id: str | None
    turn_id: str | None
    text: str
    """The envelope as JSON."""
    size_bytes: int
    """Size of ``text`` in UTF-8."""


class DatabaseView:
    """A consistent view of the database, valid within one function that ``Store.read`` calls."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    @property
    def latest_seq(self) -> int:
        """The highest ``seq`` that was ever committed, even if that event was deleted since."""
        sql = "SELECT coalesce((SELECT seq FROM sqlite_sequence WHERE name = 'events'), 0) AS seq"
        return int(self._connection.execute(sql).fetchone()["seq"])

    def fetch_one(self, sql: str, *parameters: object) -> Row | None:
        """Return the first row of the result, or None."""
        row: Row | None = self._connection.execute(sql, parameters).fetchone()
        return row

    def iterate(self, sql: str, *parameters: object) -> Iterator[Row]:
        """Return the rows one by one, for a caller that may not need all of them."""
        return iter(self._connection.execute(sql, parameters))

    def fetch_all(self, sql: str, *parameters: object) -> list[Row]:
        """Return all rows of the result."""
        rows: list[Row] = self._connection.execute(sql, parameters).fetchall()
        return rows


class Transaction(DatabaseView):
    """Changes of state and the events about them, which are committed together or not at all."""

    def __init__(self, connection: sqlite3.Connection, stream_id: str) -> None:
        super().__init__(connection)
        self._stream_id = stream_id
        self.now = timestamp()
        """The time of this transaction's changes and events."""
        self.appended: list[StoredEvent] = []
        """The events that this transaction has appended."""

    def execute(self, sql: str, *parameters: object) -> int:
        """Run a statement and return the number of rows that it changed."""
        return self._connection.execute(sql, parameters).rowcount

    def insert(self, table: str, values: Mapping[str, object]) -> None:
        """Insert a row with these values by column."""
        self.execute(f"INSERT INTO {table} ({', '.join(values)}) VALUES ({placeholders(values)})", *values.values())

    def append(
        self,
        event: str,
        data: BaseModel,
        *,
        session_id: str | None = None,
        turn_id: str | None = None,
        stats: TurnStats | None = None,
    ) -> int:
        """Append an event to the log and return its ``seq``. Readers see it once the transaction is committed."""
        row: dict[str, Any] = {
            "at": self.now,
            "event": event,
            "session_id": session_id,
            "turn_id": turn_id,
            "data": to_json(data),
            "stats": None if stats is None else to_json(stats),
        }
        sql = "INSERT INTO events (at, event, session_id, turn_id, data, stats) VALUES (?, ?, ?, ?, ?, ?)"
        row["seq"] = self._connection.execute(sql, tuple(row.values())).lastrowid
        self.appended.append(event_from_row(row, self._stream_id))
        return int(row["seq"])

    def append_to_turn(self, key: TurnKey, event: str, data: BaseModel, stats: TurnStats | None = None) -> int:
        """Append an event of a turn and return its ``seq``."""
        return self.append(event, data, session_id=key.session_id, turn_id=key.turn_id, stats=stats)


def placeholders(values: Collection[object]) -> str:
    """Return as many placeholders of SQL as there are values."""
    return ", ".join("?" * len(values))


def event_from_row(row: Row, stream_id: str) -> StoredEvent:
    """Build an event from a row of the table ``events``."""
    text = encode_event(**row, stream_id=stream_id)
    fields = {name: row[name] for name in ("seq", "event", "session_id", "turn_id")}
    return StoredEvent(**fields, text=text, size_bytes=len(text.encode()))


class Store:
    """The database of one daemon. Create it with ``open()`` and use it on the event loop that opened it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stream_id = ""
        """Id of the event log, created with the database."""
        self.issued_seq = 0
        """``seq`` of the newest event that may be committed. It can be ahead of what ``publish`` has received."""
        self.last_event_at: str | None = None
        """Time of the newest event that earlier runs of the daemon have written."""
        self.publish: Publish = lambda events: None
        """Called on the event loop with the events of each commit, in order, before ``write`` returns."""
        self._loop = asyncio.get_running_loop()
        self._reserve = path.with_suffix(".reserve")
        self._committed: list[StoredEvent] = []
        """The events of the last commit, until they are published. Used on the writer's thread only."""
        self._full = False
        self._closed = False
        self._writer, self._reader = (ThreadPoolExecutor(1, f"lmx-lab-{name}") for name in ("store", "reading"))
        self._writing: sqlite3.Connection
        self._reading: sqlite3.Connection

    @classmethod
    async def open(cls, path: Path) -> Self:
        """Open the database. Creates it, or migrates it to the current version, if necessary.

        Only the current user can read the file.

        Raises:
            StorageFullError: The disk is full.
            HostingError: The database is damaged, or a newer version of the package has written it.
        """
        store = cls(path)
        try:
            with translate_errors(path):
                await store._loop.run_in_executor(store._writer, store._open)
        except BaseException:
            await store.close()
            raise
        return store

    def _open(self) -> None:
        try:
            _check_size(self.path)
        except FileNotFoundError:
            # Create it under a temporary name: SQLite starts with an empty file, which ``_check_size`` refuses.
            new = self.path.with_suffix(".new")
            new.unlink(missing_ok=True)
            os.close(os.open(new, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW, 0o600))
            with contextlib.closing(_connect(new)) as connection:
                _migrate(connection, new)
            new.rename(self.path)
        self._writing = _connect(self.path)
        self._writing.execute("PRAGMA journal_mode = WAL")
        _migrate(self._writing, self.path)
        with _transaction(self._writing, "IMMEDIATE"):
            self._writing.execute("INSERT OR IGNORE INTO meta VALUES ('stream_id', ?)", (new_id("stm"),))
        self.stream_id = self._writing.execute("SELECT value FROM meta WHERE key = 'stream_id'").fetchone()["value"]
        view = DatabaseView(self._writing)
        self.issued_seq = view.latest_seq
        newest = view.fetch_one("SELECT at FROM events ORDER BY seq DESC LIMIT 1")
        self.last_event_at = newest["at"] if newest is not None else None
        self._reading = _connect(self.path)
        self._reading.execute("PRAGMA query_only = ON")
        self._create_reserve()

    async def write(self, work: Callable[[Transaction], T], *, ending: bool = False) -> T:
        """Call ``work`` with a transaction on the writer's thread, and return its result.

        When this returns, the transaction is committed and its events are published. If ``work`` raises, its changes
        are rolled back. Cancelling the caller does not undo a transaction that has started.

        Args:
            ending: Whether the transaction ends something and needs little space. It is then tried even while the disk
                is full, and uses the reserve.

        Raises:
            StorageFullError: The disk is full. Nothing was changed.
            StoppingError: The store is closed.
        """
        self._check_open()
        done: asyncio.Future[T] = self._loop.create_future()
        self._writer.submit(self._write_for, done, work, ending)
        with translate_errors(self.path):
            return await done

    def _write_for(self, done: asyncio.Future[T], work: Callable[[Transaction], T], ending: bool) -> None:
        """Write on the writer's thread, then publish the events and set the result with one wake-up of the loop.

        ``run_in_executor`` would wake the loop twice: for the events and for the result.
        """
        if done.cancelled():
            return
        error: BaseException | None = None
        try:
            result = self._write(work, ending)
        except BaseException as exc:
            error = exc
        committed, self._committed = self._committed, []

        def finish() -> None:
            # In this order, so that a caller that receives its result finds the events published.
            if committed:
                self.publish(committed)
            if done.done():
                return
            if error is not None:
                done.set_exception(error)
            else:
                done.set_result(result)

        self._loop.call_soon_threadsafe(finish)

    def _write(self, work: Callable[[Transaction], T], ending: bool) -> T:
        if self._full and not ending:
            if not self._has_free_space():
                raise sqlite3.OperationalError("database or disk is full")
            self._full = False
            self._create_reserve()
        try:
            return self._commit(work)
        except sqlite3.Error as exc:
            if is_full(exc):
                self._full = True
                self._reserve.unlink(missing_ok=True)
                if ending:
                    return self._commit(work)
            raise

    def _commit(self, work: Callable[[Transaction], T]) -> T:
        transaction = Transaction(self._writing, self.stream_id)
        with _transaction(self._writing, "IMMEDIATE"):
            result = work(transaction)
            if transaction.appended:
                self.issued_seq = transaction.appended[-1].seq
        self._committed = transaction.appended
        return result

    async def read(self, work: Callable[[DatabaseView], T]) -> T:
        """Call ``work`` with a view of the database on the reader's thread, and return its result.

        Raises:
            StoppingError: The store is closed.
        """
        self._check_open()

        def run() -> T:
            with _transaction(self._reading, "DEFERRED"):
                return work(DatabaseView(self._reading))

        with translate_errors(self.path):
            return await self._loop.run_in_executor(self._reader, run)

    def _check_open(self) -> None:
        if self._closed:
            raise StoppingError("the daemon is stopping; start it again, then repeat the request")

    async def close(self) -> None:
        """Finish the work that has started, then close the database. Idempotent."""
        if self._closed:
            return
        self._closed = True

        def close_connection(name: str) -> None:
            # The attribute does not exist if the database could not be opened.
            if (connection := self.__dict__.get(name)) is not None:
                connection.close()

        def close_all() -> None:
            for executor, name in ((self._reader, "_reading"), (self._writer, "_writing")):
                executor.submit(close_connection, name)
                executor.shutdown()

        await asyncio.to_thread(close_all)

    # A full disk

    def _create_reserve(self) -> None:
        if self._reserve.exists() and self._reserve.stat().st_size == RESERVE_BYTES:
            return
        if not self._has_free_space():
            self._reserve.unlink(missing_ok=True)
            return
        private = partial(os.open, mode=0o600)
        with contextlib.suppress(OSError), open(self._reserve, "wb", opener=private) as file:
            # Random bytes, because a file of zeros may be stored sparsely and reserve no space.
            file.write(os.urandom(RESERVE_BYTES))

    def _has_free_space(self) -> bool:
        return shutil.disk_usage(self.path.parent).free >= 2 * RESERVE_BYTES


def _check_size(path: Path) -> None:
    """Check that a file was not truncated.

    SQLite would use an empty file as a new database, and would not detect an incomplete last page.
    """
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW)) as file:
        header, size = file.read(18), os.fstat(file.fileno()).st_size
    if not header.startswith(b"SQLite format 3\0"):
        raise HostingError(f"{path} is damaged (it has {size} bytes and is not a database of SQLite); {MOVE_AWAY}")
    with contextlib.suppress(FileNotFoundError):
        if path.with_name(f"{path.name}-wal").stat().st_size:
            return  # The last page may be in the WAL file.
    if size % max(512, int.from_bytes(header[16:18])):
        raise HostingError(f"{path} is damaged (its last page is incomplete); {MOVE_AWAY}")


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=10)
    connection.row_factory = sqlite3.Row
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute("PRAGMA foreign_keys = ON")
    return connection


def _migrate(connection: sqlite3.Connection, path: Path) -> None:
    try:
        migrate(connection, MIGRATIONS)
    except SchemaError as exc:
        raise HostingError(f"{path} {exc}; set LMX_LAB_HOME to another folder") from exc


@contextlib.contextmanager
def _transaction(connection: sqlite3.Connection, kind: str) -> Iterator[None]:
    connection.execute(f"BEGIN {kind}")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        # After some errors, such as a full disk, SQLite has rolled back already.
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def is_full(exc: sqlite3.Error) -> bool:
    """Return whether the error means that the disk is full."""
    return getattr(exc, "sqlite_errorcode", None) in FULL or "disk is full" in str(exc)


@contextlib.contextmanager
def translate_errors(path: Path) -> Iterator[None]:
    """Translate errors of SQLite and of the file system, raised within the block, to ``LabError``."""
    try:
        yield
    except sqlite3.Error as exc:
        if is_full(exc):
            free = ""
            with contextlib.suppress(OSError):
                free = f" ({shutil.disk_usage(path.parent).free} bytes are free)"
            raise StorageFullError(f"no space to write {path}{free}; free disk space, then try again") from exc
        if getattr(exc, "sqlite_errorcode", None) in DAMAGED:
            raise HostingError(f"{path} is damaged ({exc}); {MOVE_AWAY}") from exc
        raise LabError(f"{path} could not be read or written: {exc}") from exc
    except OSError as exc:
        raise HostingError(f"{path} cannot be opened: {exc.strerror}") from exc
