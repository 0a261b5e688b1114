"""Open the SQLite files of this package."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path

from lmx_lab.errors import InvalidRequestError


def open_database(
    path: Path | None,
    schema: str,
    *,
    application: int = 0,
    version: int,
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
        schema: The statements that create the tables of a new file, separated by semicolons.
        application: Marks the files of one kind, as SQLite's ``application_id``.
        version: Version of the tables.
        purpose: Description of the use of the file, for error messages.
        param: The argument that named the file, for error messages.
        remedy: What the user can do if the file cannot be opened, for error messages.
        pragmas: Settings of a connection that writes, such as ``synchronous = NORMAL``.
        prepare: Called with the connection. Errors of SQLite in it count as errors of opening.
        read_only: Whether to open an existing file without changing it.

    Raises:
        InvalidRequestError: the file cannot be opened, belongs to another program, was written by another version, or
            is empty and opened read-only.
    """
    name = ":memory:"
    if path is not None:
        absolute = path.expanduser().absolute()
        name = f"{absolute.as_uri()}?mode={'ro' if read_only else 'rwc'}"
        if not read_only:
            # SQLite gives its other files the same mode. If the file cannot be created, opening it raises the error.
            with contextlib.suppress(OSError):
                os.close(os.open(absolute, os.O_CREAT | os.O_EXCL, 0o600))

    def is_ours(connection: sqlite3.Connection) -> bool:
        """Return whether the tables exist; False if there are none. Must run in a transaction, because another process
        could create the tables between two statements.
        """
        names = ("application_id", "user_version")
        found = [int(connection.execute(f"PRAGMA {name}").fetchone()[0]) for name in names]
        if found == [application, version]:
            return True
        if found != [0, 0] or read_only or connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            raise InvalidRequestError(f"{path} is not {purpose} of this version of LMX Lab; {remedy}", param=param)
        return False

    try:
        with contextlib.ExitStack() as opened:
            # The time to wait for another process that writes to the same file.
            connection = sqlite3.connect(name, uri=path is not None, timeout=10, check_same_thread=False)
            opened.callback(connection.close)
            connection.execute("BEGIN")
            exists = is_ours(connection)
            connection.commit()
            for pragma in () if read_only else pragmas:
                connection.execute(f"PRAGMA {pragma}")
            if not exists:
                connection.execute("BEGIN IMMEDIATE")
                if not is_ours(connection):
                    marks = f"PRAGMA application_id = {application}; PRAGMA user_version = {version}"
                    for statement in filter(str.strip, f"{schema}; {marks}".split(";")):
                        connection.execute(statement)
                connection.commit()
            prepare(connection)
            opened.pop_all()
    except sqlite3.Error as exc:
        raise InvalidRequestError(f"{path} cannot be used as {purpose}: {exc}; {remedy}", param=param) from exc
    return connection
