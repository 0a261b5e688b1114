"""Test the files of the prefix cache: what is written is read again, and anything else is skipped."""

import errno
import json
import os
import shutil
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from lmx_lab.engine import prefix_files
from lmx_lab.engine.prefix_files import DamagedFileError, PrefixFiles, StoredPrefix, TensorSpec
from lmx_lab.values.models import ModelEntry
from lmx_lab.weights.fingerprint import with_marks
from tests.support.programs import run_script

STATE_BYTES = 4000


@pytest.fixture
def entry(tmp_path):
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"weights")
    return entry_at(path)


def entry_at(path):
    return with_marks(
        ModelEntry(
            id="m", path=path, source="folder", kind="chat", format="mlx", architecture="llama", size_bytes=7,
            quantization=None, context_length=99,
        )
    )  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "cache"


def opened(folder, entry, *, limit_bytes=10**6, arithmetic="a"):
    files = PrefixFiles(folder, limit_bytes=limit_bytes, reserve_bytes=0)
    files.open(entry, [arithmetic])
    return files


def prefix(first, *, count=10, trim=True, start=0, parent=None):
    tokens = np.arange(first, first + count, dtype=np.int32)
    tensors = (TensorSpec("x", "F32", (2, STATE_BYTES // 8)),)
    return StoredPrefix(
        tokens=tokens, start=start, parent=parent, can_be_trimmed=trim, layout='"plain"', tensors=tensors
    )


def write(files, stored, *, byte=b"s"):
    return files.write(stored, [byte * 1000] * (STATE_BYTES // 1000))


def prompt(first, count):
    return np.arange(first, first + count, dtype=np.int32)


def names(folder):
    return {path.name for path in folder.glob("*.safetensors")}


def test_another_process_finds_the_longest_prefix(folder, entry):
    files = opened(folder, entry)
    assert write(files, prefix(0, count=10))
    assert write(files, prefix(0, count=20), byte=b"t")
    assert files.written_bytes == sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    other = opened(folder, entry)
    stored, tokens = other.best(prompt(0, 16))
    assert (len(stored.tokens), tokens) == (20, 15), "one token is left to compute"
    assert bytes(other.read(stored)["x"]) == b"t" * STATE_BYTES
    # Any reader of the format can read the file, and only this user may.
    assert (folder / other.name_of(stored)).stat().st_mode & 0o777 == 0o600
    reader = "import sys, mlx.core as mx; print(mx.load(sys.argv[1])['tokens'].tolist())"
    assert json.loads(run_script(reader, str(folder / other.name_of(stored)))) == list(range(20))


def test_a_state_that_cannot_be_trimmed_serves_only_prompts_that_begin_with_all_of_it(folder, entry):
    files = opened(folder, entry)
    assert write(files, prefix(0, trim=False))
    assert files.best(prompt(0, 10)) == (None, 0)
    assert files.best(prompt(0, 11))[1] == 10


def test_the_files_of_other_weights_or_arithmetic_are_not_used(folder, entry):
    write(opened(folder, entry), prefix(0))
    assert opened(folder, entry, arithmetic="b").best(prompt(0, 20)) == (None, 0)
    weights = entry.path / "model.safetensors"
    times = weights.stat()
    weights.write_bytes(b"changed")
    assert opened(folder, entry_at(entry.path)).best(prompt(0, 20)) == (None, 0)
    # The same content under another name has the same files.
    weights.write_bytes(b"weights")
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns + 1))
    copy = entry.path.with_name("copy")
    shutil.copytree(entry.path, copy)
    assert opened(folder, entry_at(copy)).best(prompt(0, 20))[1] == 10


def flip(path):
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)


def fifo(path):
    path.unlink()
    os.mkfifo(path)


DAMAGES = {
    "cut": lambda path: os.truncate(path, path.stat().st_size - 1),
    "flip": flip,
    "empty": lambda path: path.write_bytes(b""),
    "foreign": lambda path: path.write_bytes((20).to_bytes(8, "little") + b'{"__metadata__": {}}'),
    "other tokens": lambda path: path.write_bytes(path.read_bytes().replace(prompt(0, 10).tobytes(), b"\1" * 40)),
    "deleted": lambda path: path.unlink(),
    "fifo": fifo,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_skipped_and_reported_once(folder, entry, damage, caplog):
    files = opened(folder, entry)
    write(files, prefix(0))
    stored, _ = files.best(prompt(0, 20))
    DAMAGES[damage](folder / files.name_of(stored))
    # A server that listed the file before the damage.
    with pytest.raises(DamagedFileError) as error:
        files.read(stored)
    files.reject(stored, error.value)
    write(files, prefix(1000))
    assert files.best(prompt(0, 20)) == (None, 0)
    assert len(caplog.records) == 1
    # A server that starts later: the data is read only when it is needed.
    later = opened(folder, entry)
    if (known := later.best(prompt(0, 20))[0]) is not None:
        with pytest.raises(DamagedFileError):
            later.read(known)
    # The state can be written again, unless something else is in its place.
    assert write(files, prefix(0))
    assert files.best(prompt(0, 20))[1] == 10


def test_the_least_recently_used_files_are_deleted_first(folder, entry):
    limit = 3 * (STATE_BYTES + 1000)
    files = opened(folder, entry, limit_bytes=limit)
    other = opened(folder, entry, limit_bytes=limit, arithmetic="other")
    (folder / "notes.safetensors").write_bytes(b"a file of another program" * 1000)
    for first in range(0, 5000, 1000):
        assert write(files if first % 2000 else other, prefix(first))
        if (stored := other.best(prompt(0, 20))[0]) is not None:
            other.touch([stored])
        assert sum((folder / name).stat().st_size for name in names(folder) - {"notes.safetensors"}) <= limit
    assert opened(folder, entry, arithmetic="other").best(prompt(0, 20))[1] == 10
    assert opened(folder, entry).best(prompt(1000, 20)) == (None, 0)
    assert opened(folder, entry).best(prompt(3000, 20))[1] == 10
    assert "notes.safetensors" in names(folder)


def test_two_servers_that_share_a_folder_do_not_disturb_each_other(folder, entry):
    """Both write and delete files at the same time. Every file that is left is complete and within the limit."""
    limit = 6 * (STATE_BYTES + 1000)

    def serve(number):
        files = opened(folder, entry, limit_bytes=limit)
        found = 0
        for first in range(0, 20_000, 1000):
            write(files, prefix(first + 500 * number))
            stored, _ = files.best(prompt(first, 20))
            if stored is None:
                continue
            try:
                found += bytes(files.read(stored)["x"]) == b"s" * STATE_BYTES
            except DamagedFileError as exc:
                # The other server has deleted it.
                files.reject(stored, exc)
        return found

    with ThreadPoolExecutor(2) as servers:
        assert max(servers.map(serve, range(2))) > 0
    files = opened(folder, entry, limit_bytes=limit)
    assert write(files, prefix(100_000))
    left = names(folder)
    assert left
    assert sum((folder / name).stat().st_size for name in left) <= limit
    assert {path.name for path in folder.iterdir()} == {*left, prefix_files.DIGESTS_NAME}
    found = [files.best(prompt(first, 11)) for first in (*range(0, 20_000, 500), 100_000)]
    whole = [stored for stored, saved in found if stored is not None and saved == 10]
    assert {files.name_of(stored) for stored in whole} == left
    for stored in whole:
        files.read(stored)


def test_a_parent_outlives_the_files_that_continue_it(folder, entry):
    files = opened(folder, entry, limit_bytes=3 * (STATE_BYTES + 1000))
    write(files, root := prefix(0))
    child = prefix(0, count=20, start=10, parent=files.name_of(root))
    write(files, child)
    write(files, prefix(1000))
    write(files, prefix(2000))
    assert files.name_of(root) in names(folder)
    assert files.name_of(child) not in names(folder)
    # A file whose parent was deleted has no complete state.
    (folder / files.name_of(root)).unlink()
    write(files, child)
    assert files.files_of(child) == []


def test_a_file_that_is_written_partly_is_discarded(folder, entry):
    files = opened(folder, entry)
    assert not files.write(prefix(0), [b"s" * 1000])
    assert names(folder) == set()
    assert [path.name for path in folder.iterdir()] == [prefix_files.DIGESTS_NAME]


def test_a_folder_that_cannot_be_used_is_reported_once(folder, entry, caplog, monkeypatch):
    folder.write_text("a file")
    files = opened(folder, entry)
    assert not files.is_open
    assert str(folder) in caplog.text
    folder.unlink()
    caplog.clear()
    # A file system without write access, and a full one.
    files = opened(folder, entry)
    write(files, prefix(0))
    for number in (errno.EROFS, errno.ENOSPC):
        with monkeypatch.context() as patch:

            def refuse(*_, number=number):
                raise OSError(number, os.strerror(number))

            patch.setattr(os, "replace", refuse)
            assert not write(files, prefix(1000))
            assert not write(files, prefix(2000))
        assert [os.strerror(number) in record.message for record in caplog.records] == [True]
        assert files.best(prompt(0, 20))[1] == 10, "what is there is still read"
        caplog.clear()
    assert len(list(folder.iterdir())) == 2
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(prefix_files.shutil, "disk_usage", lambda path: usage(100))
    assert write(files, prefix(3000)), "room is made by deleting older files"
    assert not files.write(prefix(4000, count=2000), [])
    assert "disk_reserve_bytes" in caplog.text
