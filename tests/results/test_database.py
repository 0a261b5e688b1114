"""Test which SQLite files are opened, and that several programs can create one at the same time."""

import sqlite3
import threading
from functools import partial

import pytest

from lmx_lab.errors import InvalidRequestError
from lmx_lab.results.database import open_database

open_test = partial(
    open_database,
    schema="CREATE TABLE one (x); CREATE TABLE two (x);",
    application=7,
    version=2,
    purpose="a test file",
    param="path",
)


def test_a_new_file_has_the_tables_and_belongs_to_its_owner(tmp_path):
    path = tmp_path / "a.db"
    with open_test(path, pragmas=("journal_mode = WAL",)) as connection:
        connection.execute("INSERT INTO two VALUES (1)")
    connection.close()
    assert path.stat().st_mode & 0o077 == 0
    again = open_test(path, read_only=True)
    assert again.execute("SELECT x FROM two").fetchall() == [(1,)]
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        again.execute("INSERT INTO two VALUES (2)")
    again.close()
    memory = open_test(None)
    assert memory.execute("SELECT count(*) FROM one").fetchone() == (0,)
    memory.close()


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize(
    "script",
    ["CREATE TABLE t (x);", "PRAGMA application_id = 7;", "PRAGMA application_id = 8; PRAGMA user_version = 2;"],
)
def test_files_of_other_programs_and_versions_are_refused_and_not_changed(tmp_path, script, read_only):
    path = tmp_path / "other.db"
    connection = sqlite3.connect(path)
    connection.executescript(script)
    connection.close()
    before = path.read_bytes()
    with pytest.raises(InvalidRequestError, match=r"not a test file of this version.*another path") as refused:
        open_test(path, read_only=read_only)
    assert refused.value.param == "path"
    assert path.read_bytes() == before


def test_what_cannot_be_opened_is_refused_with_the_reason(tmp_path):
    (tmp_path / "text").write_text("no database " * 100)
    (tmp_path / "empty.db").touch()
    with pytest.raises(InvalidRequestError, match="as a test file: file is not a database; move it"):
        open_test(tmp_path / "text", remedy="move it")
    with pytest.raises(InvalidRequestError, match="unable to open"):
        open_test(tmp_path / "missing.db", read_only=True)
    with pytest.raises(InvalidRequestError, match="is not a test file"):
        open_test(tmp_path / "empty.db", read_only=True)
    with pytest.raises(InvalidRequestError, match="no such table: three"):
        open_test(None, prepare=lambda connection: connection.execute("SELECT * FROM three"))


def test_several_programs_can_create_the_same_file(tmp_path):
    problems = []

    def create(path, together):
        together.wait()
        try:
            open_test(path).close()
        except InvalidRequestError as exc:
            problems.append(exc)

    for number in range(20):
        together = threading.Barrier(4)
        path = tmp_path / f"{number}.db"
        threads = [threading.Thread(target=create, args=(path, together)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert problems == []
