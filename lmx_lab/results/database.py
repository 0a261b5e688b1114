"""Open the SQLite files of this package, bring their tables to the present version, and make keys of rows."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lmx_lab.errors import InvalidRequestError, newer_version


def open_database(
    path: Path | None,
    migrations: Sequence[str],
    *,
    application: int = 0,
    purpose: str,
    param: str,
    remedy: str = "pass another path",
    pragmas: Sequence[str] = (),
    prepare: Callable[[sqlite3.Connection], None] = lambda connection: None,
    read_only: bool = False,
) -> sqlite3.Connection:
    """Open an SQLite file, which is created if it does not exist. Only its owner can read a new file.

    Args:
        path: None opens a database in memory.
        migrations: The statements of each version of the tables, as for ``migrate``.
        application: Marks the files of one kind, as SQLite's ``application_id``.
        purpose: Description of the use of the file, for error messages.
        param: The argument that named the file, for error messages.
        remedy: What the user can do if the file cannot be opened, for error messages.
        pragmas: Settings of a connection that writes, such as ``synchronous = NORMAL``.
        prepare: Called with the connection. Errors of SQLite in it count as errors of opening.
        read_only: Whether to open an existing file without changing it.

    Raises:
        InvalidRequestError: the file cannot be opened, belongs to another program, was written by a newer version, or
            is opened read-only and empty or of an older version.
    """
    name = ":memory:"
    if path is not None:
        absolute = path.expanduser().absolute()
        name = f"{absolute.as_uri()}?mode={'ro' if read_only else 'rwc'}"
        if not read_only:
            # SQLite gives its other files the same mode. If the file cannot be created, opening it raises the error.
            with contextlib.suppress(OSError):
                os.close(os.open(absolute, os.O_CREAT | os.O_EXCL, 0o600))
    try:
        with contextlib.ExitStack() as opened:
            # The time to wait for another process that writes to the same file.
            connection = sqlite3.connect(name, uri=path is not None, timeout=10, check_same_thread=False)
            opened.callback(connection.close)
            # Files of other programs are refused before the settings, which would change them.
            version = schema_version(connection, application, len(migrations))
            if not read_only:
                for pragma in pragmas:
                    connection.execute(f"PRAGMA {pragma}")
                migrate(connection, migrations, application=application)
            elif version == 0:
                raise SchemaError("is empty")
            elif version < len(migrations):
                raise SchemaError(
                    f"was written by an older version of LMX Lab (its schema has version {version}); open it once "
                    "without read_only, which updates it"
                )
            prepare(connection)
            opened.pop_all()
    except SchemaError as exc:
        raise InvalidRequestError(f"{path} cannot be used as {purpose}: it {exc}; {remedy}", param=param) from exc
    except (sqlite3.Error, OSError) as exc:
        reason = f"{exc}; {remedy}"
        if path is not None and not path.parent.is_dir():
            reason = f"there is no folder {str(path.parent)!r}; create it first"
        raise InvalidRequestError(f"{path} cannot be used as {purpose}: {reason}", param=param) from exc
    return connection


class SchemaError(Exception):
    """A database belongs to another program, or a newer version of this package wrote it. The text begins with a verb,
    and its subject is the file.
    """


def schema_version(connection: sqlite3.Connection, application: int, latest: int) -> int:
    """Return the version of the tables of a database; 0 if it is empty.

    Raises:
        SchemaError: the version is higher than ``latest``, or the mark of the program is not ``application``.
    """
    in_transaction = connection.in_transaction
    if not in_transaction:
        # Otherwise another process could create the tables between two statements.
        connection.execute("BEGIN")
    names = ("application_id", "user_version")
    found, version = (int(connection.execute(f"PRAGMA {name}").fetchone()[0]) for name in names)
    tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    if not in_transaction:
        connection.execute("COMMIT")
    if (found, version, tables) == (0, 0, 0):
        return 0
    if found != application or version == 0:
        raise SchemaError("belongs to another program")
    if version > latest:
        raise SchemaError(newer_version(version, latest))
    return version


def migrate(connection: sqlite3.Connection, migrations: Sequence[str], *, application: int = 0) -> None:
    """Bring the tables of a database to the newest version, in one transaction.

    A database of an older version is first copied to a file beside it, with ``.version-N`` after its name.

    Args:
        migrations: The statements from each version of the tables to the next, separated by semicolons; the first
            creates them. Their number is the newest version, and is stored as SQLite's ``user_version``.
        application: Stored as SQLite's ``application_id``.

    Raises:
        SchemaError: as for ``schema_version``.
        OSError, sqlite3.Error: the database or its copy cannot be written. Its tables are unchanged.
    """
    if schema_version(connection, application, len(migrations)) == len(migrations):
        return
    connection.execute("BEGIN IMMEDIATE")
    try:
        version = schema_version(connection, application, len(migrations))
        file = connection.execute("PRAGMA database_list").fetchone()[2]
        if 0 < version < len(migrations) and file:
            # A copy of the committed content, which only its owner can read.
            copy, unfinished = Path(f"{file}.version-{version}"), Path(f"{file}.version-{version}.new")
            unfinished.unlink(missing_ok=True)
            os.close(os.open(unfinished, os.O_CREAT | os.O_EXCL, 0o600))
            with (
                contextlib.closing(sqlite3.connect(f"{Path(file).as_uri()}?mode=ro", uri=True)) as source,
                contextlib.closing(sqlite3.connect(unfinished)) as target,
            ):
                source.backup(target)
            unfinished.replace(copy)
        for script in migrations[version:]:
            for statement in filter(str.strip, script.split(";")):
                connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {application}")
        connection.execute(f"PRAGMA user_version = {len(migrations)}")
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def digest(*parts: Any) -> str:
    """Return the key of a row for values of JSON, 32 hexadecimal digits. The ``repr`` replaces any other value."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=repr).encode()).hexdigest()[:32]
