"""Store records in SQLite: in memory, or in a file in WAL mode.

All statements after opening run on one thread, so that neither the engine nor an event loop waits for the disk. A
record is written in one transaction: after a full disk or a killed process, each record is there completely or not at
all. Fields that this version does not know are ignored.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import sqlite3
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

from lmx_lab.errors import InvalidRequestError, LabError
from lmx_lab.results.database import open_database
from lmx_lab.values.models import ModelEntry
from lmx_lab.values.outputs import TokenLogprob
from lmx_lab.values.recording import NO_HASH, Provenance, Record
from lmx_lab.values.timeline import decode_steps, encode_steps
from lmx_lab.weights.fingerprint import known_content_digest, marks_digest
from lmx_lab.weights.tokenizer_files import chat_templates

log = logging.getLogger(__name__)
T = TypeVar("T")
ELSEWHERE = frozenset({"id", "provenance"})
"""Fields of a record that are stored in separate columns. The others are stored as JSON."""
MEMORY_BYTES = 64 * 2**20
"""Maximum size of the records in memory."""
MAX_PENDING = 1000
"""Maximum number of records that wait to be written. Additional records are dropped."""
PAGE = 500
"""Number of records that an iteration reads in one query."""
MIGRATIONS = (
    """
CREATE TABLE provenance (id INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE, data TEXT NOT NULL);
CREATE TABLE records (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    at REAL NOT NULL,
    own INTEGER NOT NULL,
    request_id TEXT NOT NULL,
    model TEXT NOT NULL,
    outcome TEXT NOT NULL,
    prompt_tokens INTEGER NOT NULL,
    output_tokens INTEGER,
    ttft_s REAL,
    total_s REAL,
    seed TEXT,
    text TEXT NOT NULL,
    size INTEGER NOT NULL,
    provenance INTEGER NOT NULL REFERENCES provenance (id),
    data BLOB NOT NULL
);
""",
)
COLUMNS = {
    **{"id": "int64", "at": "time", "own": "bool", "request_id": "str", "model": "str", "outcome": "str"},
    **{"prompt_tokens": "int64", "output_tokens": "Int64", "ttft_s": "float64", "total_s": "float64"},
    **{"seed": "Int64", "text": "str"},
}
"""Columns of the table of all records, and their types in a data frame."""
ONE = "SELECT records.id, records.data, provenance.data FROM records JOIN provenance ON provenance.id = provenance"


def encode_record(record: Record) -> bytes:
    """Return the fields of a record as JSON, without its id and its provenance."""
    values = {each.name: getattr(record, each.name) for each in fields(record) if each.name not in ELSEWHERE}
    values["logprobs"] = [_encode_token(token) for token in record.logprobs]
    values["steps"] = encode_steps(record.steps)
    return json.dumps(values, separators=(",", ":")).encode()


def decode_record(data: bytes, *, id_: int, provenance: Provenance) -> Record:
    """Return the record in the JSON of ``encode_record``."""
    values = json.loads(data)
    for name in ("prompt", "answer", "tool_calls"):
        values[name] = None if values[name] is None else tuple(values[name])
    values["logprobs"] = tuple(map(_decode_token, values["logprobs"]))
    values["steps"] = decode_steps(values["steps"])
    return _build(Record, {**values, "id": id_, "provenance": provenance})


def encode_provenance(provenance: Provenance) -> str:
    """Return a provenance as JSON. Equal values have the same JSON."""
    values = {each.name: getattr(provenance, each.name) for each in fields(provenance)}
    return json.dumps(values, sort_keys=True)


def decode_provenance(data: str) -> Provenance:
    """Return the provenance in the JSON of ``encode_provenance``."""
    return _build(Provenance, json.loads(data))


def _build(kind: type[T], values: Mapping[str, Any]) -> T:
    known = {each.name for each in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in values.items() if name in known})


def _encode_token(token: TokenLogprob) -> list[Any]:
    # In Latin-1, each byte is one character, so parts of characters can also be stored.
    data = token.bytes.decode("latin-1")
    others = [_encode_token(other) for other in token.top]
    named = [_encode_token(other) for other in token.named]
    return [token.token, token.text, data, token.logprob, token.ends, token.rank, token.entropy, others, named]


def _decode_token(values: Sequence[Any]) -> TokenLogprob:
    token, text, data, logprob, ends, rank, entropy, others, named = values[:9]
    return TokenLogprob(
        token=token,
        text=text,
        bytes=data.encode("latin-1"),
        logprob=logprob,
        ends=ends,
        rank=rank,
        entropy=entropy,
        top=tuple(map(_decode_token, others)),
        named=tuple(map(_decode_token, named)),
    )


class RecordStore:
    """Stores records, and deletes the oldest ones above its limits. All methods are thread-safe.

    Args:
        path: The file, which is created if it does not exist; None stores the records in memory.
        read_only: Whether to open an existing file without changing it.
        max_records: Maximum number of records; None sets no limit.
        max_batch_records: Maximum number of records of batches that this store has added; None sets no limit.
        max_bytes: Maximum total size of the records.

    Raises:
        InvalidRequestError: the file cannot be opened, or is not a recording.
    """

    def __init__(
        self,
        path: Path | None = None,
        *,
        read_only: bool = False,
        max_records: int | None = None,
        max_batch_records: int | None = None,
        max_bytes: int = 4 * 2**30,
    ) -> None:
        self.path = path
        self._max_records = max_records
        self._max_batch_records = max_batch_records
        self._batch_ids: deque[int] = deque()
        """Ids of the records of batches, oldest first, if their number is limited. Some may have been deleted."""
        self._max_bytes = max_bytes
        self._read_only = read_only
        # Starts its thread when the first record is added.
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="lmx-lab-records")
        self._pending = threading.Semaphore(MAX_PENDING)
        self._has_warned = False
        self._connection = open_database(
            path,
            MIGRATIONS,
            purpose="a recording",
            param="record_to",
            # Deleted records are overwritten.
            pragmas=("secure_delete = ON", "journal_mode = WAL", "synchronous = NORMAL"),
            prepare=(lambda connection: None) if read_only else self._measure,
            read_only=read_only,
        )
        # Callers do not close a list of requests, and Python warns about a connection that is deleted while open.
        weakref.finalize(self, self._connection.close)

    @classmethod
    def in_memory(cls) -> RecordStore:
        """Return a store of the last records, which are lost when it is closed."""
        # Fewer of batches, so that a batch does not replace all others.
        return cls(max_records=200, max_batch_records=50, max_bytes=MEMORY_BYTES)

    # Writing

    def add(self, make: Callable[[], Record], key: str, on_new: Callable[[int], None] = lambda id_: None) -> None:
        """Queue a record to be stored. If this fails, a warning is logged once, and the record is dropped.

        Args:
            make: Creates the record; called on the thread of the store.
            key: Digest of the model's files. With a provenance that was stored before and the same key, the hashes in
                that provenance are used.
            on_new: Called with the id of the provenance if it is new.
        """
        if not self._pending.acquire(blocking=False):
            self._warn(f"more than {MAX_PENDING} records wait to be written")
            return

        def write() -> None:
            try:
                self._insert(make(), key, on_new)
            except sqlite3.Error as exc:
                self._warn(str(exc))
            except Exception:
                log.exception("a request could not be recorded")
            finally:
                self._pending.release()

        with contextlib.suppress(RuntimeError):  # The store was closed.
            self._executor.submit(write)

    def set_hashes(self, provenance: int, *, weights: str, template: str) -> None:
        """Queue the hashes of a model's files to be stored."""

        def write() -> None:
            with contextlib.suppress(sqlite3.Error), self._connection:
                (data,) = self._connection.execute("SELECT data FROM provenance WHERE id = ?", (provenance,)).fetchone()
                changed = encode_provenance(replace(decode_provenance(data), weights=weights, template=template))
                self._connection.execute("UPDATE provenance SET data = ? WHERE id = ?", (changed, provenance))

        with contextlib.suppress(RuntimeError):
            self._executor.submit(write)

    def delete(self, ids: Sequence[int] | None = None) -> None:
        """Delete records, or all of them. Their content is overwritten in the file.

        Raises:
            InvalidRequestError: the recording was opened read-only, or cannot be written.
        """
        if self._read_only:
            raise InvalidRequestError(f"{self.path} was opened read-only; delete records in the lab that records them")

        def write() -> None:
            connection = self._connection
            with connection:
                if ids is None:
                    connection.execute("DELETE FROM records")
                else:
                    connection.executemany("DELETE FROM records WHERE id = ?", [(id_,) for id_ in ids])
            self._measure(connection)
            # The write-ahead log contains pages with deleted records until it is truncated.
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

        self._call(write)

    # Reading

    def __len__(self) -> int:
        return int(self._call(lambda: self._connection.execute("SELECT count(*) FROM records").fetchone()[0]))

    def at(self, index: int) -> Record | None:
        """Return the record at a position, counted from the oldest or, if negative, from the newest; None if there is
        none.
        """
        order, offset = ("ASC", index) if index >= 0 else ("DESC", -index - 1)
        return next(iter(self._read(f"{ONE} ORDER BY records.id {order} LIMIT 1 OFFSET ?", offset)), None)

    def get(self, id_: int) -> Record | None:
        """Return the record with this id; None if it was deleted."""
        return next(iter(self._read(f"{ONE} WHERE records.id = ?", id_)), None)

    def find(self, request_id: str) -> Record | None:
        """Return the newest record of the request with this id; None if there is none."""
        found = self._read(f"{ONE} WHERE records.request_id = ? ORDER BY records.id DESC LIMIT 1", request_id)
        return next(iter(found), None)

    def page(self, after: int) -> list[Record]:
        """Return the next records after the one with this id, at most ``PAGE`` of them."""
        return self._read(f"{ONE} WHERE records.id > ? ORDER BY records.id LIMIT {PAGE}", after)

    def rows(self, last: int | None = None) -> list[tuple[Any, ...]]:
        """Return ``COLUMNS`` of the last records, or of all of them, oldest first. Seeds are texts."""
        sql = f"SELECT {', '.join(COLUMNS)} FROM records ORDER BY id DESC LIMIT ?"
        return self._call(lambda: self._connection.execute(sql, (-1 if last is None else last,)).fetchall())[::-1]

    def close(self) -> None:
        """Write all pending records, and close the file. Idempotent."""
        with contextlib.suppress(RuntimeError):
            self._executor.submit(self._connection.close)
        self._executor.shutdown()

    # On the thread

    def _measure(self, connection: sqlite3.Connection) -> None:
        sums = connection.execute("SELECT count(*), total(size) FROM records").fetchone()
        self._count, self._bytes = int(sums[0]), int(sums[1])

    def _insert(self, record: Record, key: str, on_new: Callable[[int], None]) -> None:
        """Write a record, and delete the oldest ones above the limits."""
        data, provenance = encode_record(record), encode_provenance(record.provenance)
        seed, timings = record.request["sampling"]["seed"], record.timings
        values = {
            "at": record.at,
            "own": record.own,
            "request_id": record.request_id,
            "model": record.provenance.model,
            "outcome": record.outcome,
            "prompt_tokens": len(record.prompt),
            "output_tokens": timings.get("output_tokens", len(record.answer) if record.answer is not None else None),
            "ttft_s": timings.get("ttft_s"),
            "total_s": sum(timings[name] for name in ("queue_s", "prefill_s", "decode_s")) if timings else None,
            "seed": None if seed is None else str(seed),
            "text": record.text[:200],
            "size": len(data),
            "data": data,
        }
        connection, is_new = self._connection, False
        with connection:
            key = f"{key} {provenance}"
            found = connection.execute("SELECT id FROM provenance WHERE key = ?", (key,)).fetchone()
            if found is None:
                cursor = connection.execute("INSERT INTO provenance (key, data) VALUES (?, ?)", (key, provenance))
                found, is_new = (cursor.lastrowid,), True
            values["provenance"] = found[0]
            sql = f"INSERT INTO records ({', '.join(values)}) VALUES ({', '.join('?' * len(values))})"
            cursor = connection.execute(sql, tuple(values.values()))
            batch_id = cursor.lastrowid if record.batch else None
            count, size = self._count + 1, self._bytes + len(data)
            if batch_id is not None and self._max_batch_records is not None:
                self._batch_ids.append(batch_id)
                if len(self._batch_ids) > self._max_batch_records:
                    removed, removed_bytes = self._remove_first("WHERE id = ?", self._batch_ids.popleft())
                    count, size = count - removed, size - removed_bytes
            most = self._max_records
            while (most is not None and count > most) or (size > self._max_bytes and count > 1):
                removed, removed_bytes = self._remove_first("ORDER BY id")
                if not removed:
                    break
                count, size = count - removed, size - removed_bytes
        self._count, self._bytes = count, size
        if is_new:
            on_new(found[0])

    def _remove_first(self, selected: str, *parameters: object) -> tuple[int, int]:
        """Delete the first record that a clause selects. Returns the number of deleted records, and their size."""
        row = self._connection.execute(f"SELECT id, size FROM records {selected} LIMIT 1", parameters).fetchone()
        if row is None:
            return 0, 0
        self._connection.execute("DELETE FROM records WHERE id = ?", (row[0],))
        return 1, int(row[1])

    def _read(self, sql: str, *parameters: object) -> list[Record]:
        rows = self._call(lambda: self._connection.execute(sql, parameters).fetchall())
        return [decode_record(data, id_=id_, provenance=decode_provenance(known)) for id_, data, known in rows]

    def _call(self, work: Callable[[], T]) -> T:
        """Run a statement after all previously added records are written.

        Raises:
            LabError: the recording was closed, or cannot be read or written.
        """
        try:
            future: Future[T] = self._executor.submit(work)
        except RuntimeError:
            raise LabError("this recording was closed with its lab; load its file, or launch() a new lab") from None
        try:
            return future.result()
        except sqlite3.Error as exc:
            raise LabError(f"the recording {self.path or 'in memory'} cannot be used: {exc}") from exc

    def _warn(self, reason: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "a request could not be recorded in %s: %s; it was still answered. Further requests that "
                "cannot be recorded are not logged",
                self.path or "memory",
                reason,
            )

    def __iter__(self) -> Iterator[Record]:
        """Iterate over all records, oldest first, without reading all of them into memory."""
        after = 0
        while page := self.page(after):
            yield from page
            after = page[-1].id


def save_record(store: RecordStore, make: Callable[[], Record], entry: ModelEntry) -> None:
    """Queue a record to be stored. The files of a model are hashed in the background at its first record.

    Args:
        make: Creates the record; called on the thread of the store.
    """

    def hash_files(provenance: int) -> None:
        try:
            templates = chat_templates(entry)
            digest = hashlib.sha256("\0".join(templates).encode()).hexdigest() if templates else NO_HASH
            store.set_hashes(provenance, weights=known_content_digest(entry), template=digest)
        except Exception:
            log.warning("the files of %s could not be hashed for the records", entry.id, exc_info=True)

    def start_hashing(provenance: int) -> None:
        if entry.marks:
            # A daemon thread: hashing takes a second per gigabyte, which must not delay the exit of the process.
            threading.Thread(target=hash_files, args=(provenance,), name="lmx-lab-hashes", daemon=True).start()

    store.add(make, marks_digest(entry), start_hashing)
