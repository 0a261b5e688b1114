"""Tests of cursor stores."""

import os

import pytest

from lmx_lab.client.subscription import Cursor, FileCursor, MemoryCursor
from lmx_lab.errors import HostingError

FIRST, SECOND = Cursor(stream_id="stm_1", seq=7), Cursor(stream_id="stm_1", seq=9)


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_the_last_saved_cursor_is_loaded(tmp_path, kind):
    store = MemoryCursor() if kind == "memory" else FileCursor(tmp_path / "cursor.json")
    assert store.load() is None
    store.save(FIRST)
    store.save(SECOND)
    assert store.load() == SECOND
    if kind == "file":
        assert FileCursor(str(tmp_path / "cursor.json")).load() == SECOND


def test_the_file_is_private_and_no_temporary_file_remains(tmp_path):
    before = os.umask(0)
    try:
        FileCursor(tmp_path / "cursor.json").save(FIRST)
    finally:
        os.umask(before)
    (file,) = tmp_path.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600


def test_a_tilde_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    FileCursor("~/cursor.json").save(FIRST)
    assert (tmp_path / "cursor.json").exists()


@pytest.mark.parametrize(
    "text",
    [b"", b"7", b"{}", b'{"stream_id": "", "seq": 1}', b'{"stream_id": "s", "seq": -1}', b"\xff\xfe", b"x" * 10**5],
    ids=["empty", "number", "no fields", "no stream", "negative", "no UTF-8", "long"],
)
def test_a_file_with_other_content_is_not_overwritten(tmp_path, text):
    path = tmp_path / "notes.txt"
    path.write_bytes(text)
    with pytest.raises(HostingError, match=r"notes\.txt does not contain a cursor.*remove the file"):
        FileCursor(path).load()
    assert path.read_bytes() == text


def test_a_folder_or_a_pipe_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(HostingError, match="does not contain a cursor"):
            FileCursor(path).load()


def test_a_path_that_cannot_be_written_is_reported(tmp_path):
    store = FileCursor(tmp_path / "missing" / "cursor.json")
    assert store.load() is None
    with pytest.raises(HostingError, match="cannot be written"):
        store.save(FIRST)
    (tmp_path / "folder").mkdir()
    with pytest.raises(HostingError, match="cannot be written"):
        FileCursor(tmp_path / "folder").save(FIRST)
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_the_longest_cursor_is_read_completely(tmp_path):
    longest = Cursor(stream_id="s" * 200, seq=10**15)
    store = FileCursor(tmp_path / "cursor.json")
    store.save(longest)
    assert store.load() == longest
