"""Test which SQLite files are opened, and that several programs can create one at the same time."""

import contextlib
import sqlite3
import threading
from functools import partial

import pytest

from lmx_lab.errors import InvalidRequestError
from lmx_lab.results.database import open_database

open_test = partial(
    open_database,
    migrations=("CREATE TABLE one (x); CREATE TABLE two (x);", "ALTER TABLE two ADD COLUMN y DEFAULT 5;"),
    application=7,
    purpose="a test file",
    param="path",
)


def test_a_new_file_has_the_tables_and_belongs_to_its_owner(tmp_path):
    path = tmp_path / "a.db"
    with open_test(path, pragmas=("journal_mode = WAL",)) as connection:
        connection.execute("INSERT INTO two VALUES (1, 2)")
    connection.close()
    assert path.stat().st_mode & 0o077 == 0
    again = open_test(path, read_only=True)
    assert again.execute("SELECT x, y FROM two").fetchall() == [(1, 2)]
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        again.execute("INSERT INTO two VALUES (2, 3)")
    again.close()
    memory = open_test(None)
    assert memory.execute("SELECT count(*) FROM one").fetchone() == (0,)
    memory.close()


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("CREATE TABLE t (x);", "belongs to another program"),
        ("PRAGMA application_id = 7;", "belongs to another program"),
        ("PRAGMA application_id = 8; PRAGMA user_version = 2;", "belongs to another program"),
        (
            "PRAGMA application_id = 7; PRAGMA user_version = 3;",
            "was written by a newer version of LMX Lab (its version is 3, and this version reads 2: update lmx-lab)",
        ),
    ],
)
def test_files_of_other_programs_and_newer_versions_are_refused_and_not_changed(tmp_path, script, reason, read_only):
    path = tmp_path / "other.db"
    connection = sqlite3.connect(path)
    connection.executescript(script)
    connection.close()
    before = path.read_bytes()
    with pytest.raises(InvalidRequestError) as refused:
        open_test(path, read_only=read_only)
    assert str(refused.value) == f"{path} cannot be used as a test file: it {reason}; pass another path"
    assert refused.value.param == "path"
    assert path.read_bytes() == before


def test_what_cannot_be_opened_is_refused_with_the_reason(tmp_path):
    (tmp_path / "text").write_text("no database " * 100)
    (tmp_path / "empty.db").touch()
    with pytest.raises(InvalidRequestError, match="as a test file: file is not a database; move it"):
        open_test(tmp_path / "text", remedy="move it")
    with pytest.raises(InvalidRequestError, match="unable to open"):
        open_test(tmp_path / "missing.db", read_only=True)
    with pytest.raises(InvalidRequestError, match=r"there is no folder '\S+/missing'; create it first"):
        open_test(tmp_path / "missing" / "new.db")
    with pytest.raises(InvalidRequestError, match="as a test file: it is empty; pass"):
        open_test(tmp_path / "empty.db", read_only=True)
    with pytest.raises(InvalidRequestError, match="no such table: three"):
        open_test(None, prepare=lambda connection: connection.execute("SELECT * FROM three"))


@pytest.fixture
def older(tmp_path):
    """A file of the first version, with one row."""
    with open_test(tmp_path / "a.db", migrations=open_test.keywords["migrations"][:1]) as connection:
        connection.execute("INSERT INTO two VALUES (1)")
    connection.close()
    return tmp_path / "a.db"


def read(path, sql="SELECT * FROM two"):
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return connection.execute(sql).fetchall()


@pytest.mark.parametrize("pragmas", [(), ("journal_mode = WAL",)])
def test_a_file_of_an_older_version_is_copied_and_updated(older, pragmas):
    copy = older.with_name("a.db.version-1")
    with pytest.raises(InvalidRequestError, match=r"older version .*version 1\); open it once without read_only"):
        open_test(older, read_only=True)
    assert not copy.exists()
    open_test(older, pragmas=pragmas).close()
    assert read(older) == [(1, 5)]
    assert read(copy) == [(1,)]
    assert read(copy, "PRAGMA user_version") == [(1,)]
    assert copy.stat().st_mode & 0o077 == 0
    copy.unlink()
    open_test(older).close()
    assert not copy.exists()


def test_a_migration_that_fails_changes_nothing_and_can_be_repeated(older):
    before = older.read_bytes()
    first, second = open_test.keywords["migrations"]
    with pytest.raises(InvalidRequestError, match="no such table: three"):
        open_test(older, migrations=(first, f"{second} INSERT INTO three VALUES (1);"))
    assert older.read_bytes() == before
    # The copy cannot be written.
    copy = older.with_name("a.db.version-1")
    copy.unlink()
    copy.mkdir()
    with pytest.raises(InvalidRequestError, match=r"directory: .*version-1"):
        open_test(older)
    assert older.read_bytes() == before
    copy.rmdir()
    open_test(older).close()
    assert read(older) == [(1, 5)]
    assert read(copy) == [(1,)]


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
