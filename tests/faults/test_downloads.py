"""Tests of slow, interrupted and wrong downloads from the hub, and of killed download processes."""

import os
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from filelock import FileLock
from huggingface_hub import constants, file_download

from lmx_lab.errors import DownloadError, LabError, UnusableModelError
from lmx_lab.settings import Settings
from lmx_lab.weights.catalog import Catalog
from lmx_lab.weights.hub import MARKER, mark_unverified
from tests.support.hub import REPO, git_id, hub_with, instead, use_hub, whole
from tests.support.models import LLAMA, safetensors_bytes, write_json
from tests.support.waiting import until


def redirect_forever(handler, _):
    handler.reply(b"", 302, {"Location": handler.path})


class HalfFirst:
    """Sends half of the requested bytes, calls ``then`` and disconnects. After ``times`` requests it sends all."""

    def __init__(self, then, *, times=1000):
        self._then = then
        self._left = times

    def __call__(self, handler, data):
        if handler.command == "HEAD" or not self._left:
            whole(handler, data)
            return
        self._left -= 1
        whole(handler, data, half=True)
        self._then(handler)
        handler.close_connection = True


WEIGHTS = "model.safetensors"
FETCH = """
import sys
from pathlib import Path
from lmx_lab.settings import Settings
from lmx_lab.weights.catalog import Catalog

def pause(progress):
    if progress.stage in sys.argv[2:]:
        print(progress.stage, flush=True)
        sys.stdin.read()

Catalog(Settings(home=Path(sys.argv[1]), disk_reserve_bytes=0)).fetch("org/tiny", pause)
"""


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Return a model folder that passes every check but is never loaded."""
    folder = tmp_path_factory.mktemp("small")
    write_json(folder, {"config.json": LLAMA, "tokenizer.json": {}, "tokenizer_config.json": {"model_max_length": 9}})
    (folder / WEIGHTS).write_bytes(safetensors_bytes(count=2**18))
    return folder


@pytest.fixture
def server(small):
    with hub_with(small) as server:
        yield server


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


@pytest.fixture
def catalog(tmp_path, cache, server, monkeypatch):
    use_hub(server, monkeypatch)
    # Shorten the pauses and timeouts of huggingface_hub.
    monkeypatch.setattr(file_download, "time", SimpleNamespace(sleep=lambda seconds: None))
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.3)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 2**16)
    return Catalog(Settings(home=tmp_path / "home", disk_reserve_bytes=0))


def contents(entry):
    return {path.name: path.read_bytes() for path in entry.path.iterdir()}


def partial(cache):
    return list(cache.rglob("*.incomplete"))


# Wrong files


def corrupted(server, name):
    data = bytearray(server.files[name])
    data[len(data) // 2] ^= 1
    return bytes(data)


WRONG = {
    "other content": (WEIGHTS, lambda server, name: instead(corrupted(server, name)), "sha256"),
    "other content of a small file": ("config.json", lambda server, name: instead(corrupted(server, name)), "git"),
    "shorter": (WEIGHTS, lambda server, name: instead(server.files[name][:-1]), "bytes"),
    "longer": (WEIGHTS, lambda server, name: instead(server.files[name] + b"x"), "bytes"),
    "a page": (WEIGHTS, lambda server, name: instead(b"<html>Please log in</html>", "text/html"), "bytes"),
    "a page for the API": ("api", lambda server, name: instead(b"<html>Please log in</html>", "text/html"), "hub"),
    "a redirect to itself": (WEIGHTS, lambda server, name: redirect_forever, "edirect"),
    "a redirect of the API": ("api", lambda server, name: redirect_forever, "edirect"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_file_that_differs_from_the_announced_one_is_an_error_and_is_not_kept(catalog, cache, server, wrong):
    name, sends, expected = WRONG[wrong]
    server.faults[name] = sends(server, name)
    with pytest.raises(DownloadError, match=expected) as failed:
        catalog.fetch(REPO)
    # The error names the file that differs, or what could not be downloaded.
    assert (REPO if expected in ("hub", "edirect") else name) in failed.value.message
    assert catalog.scan() == []
    assert partial(cache) == []
    assert not [path for path in cache.rglob(name) if path.exists()]
    server.faults.clear()
    assert contents(catalog.fetch(REPO)) == server.files


def test_none_of_several_wrong_files_is_kept(catalog, server):
    server.faults |= {name: instead(corrupted(server, name)) for name in server.files}
    with pytest.raises(DownloadError, match="announced"):
        catalog.fetch(REPO)
    server.faults.clear()
    assert contents(catalog.fetch(REPO)) == server.files


def test_verification_reports_its_progress(catalog, server):
    seen = []
    catalog.fetch(REPO, seen.append)
    total = sum(map(len, server.files.values()))
    verified = [progress for progress in seen if progress.stage == "verify"]
    assert {progress.total_bytes for progress in seen} == {total}
    assert [progress.done_bytes for progress in verified] == sorted(progress.done_bytes for progress in verified)
    assert 0 < verified[-1].done_bytes <= total


# Interrupted connections


def test_an_interrupted_download_is_continued_where_it_stopped(catalog, cache, server):
    server.faults[WEIGHTS] = HalfFirst(lambda handler: None, times=3)
    assert contents(catalog.fetch(REPO)) == server.files
    ranges = [asked for name, asked in server.requests if name == WEIGHTS]
    assert ranges[0] == ""
    assert len(ranges) == 4
    assert all(asked.startswith("bytes=") for asked in ranges[1:])
    assert partial(cache) == []


def test_a_download_is_retried_after_a_timeout(catalog, server):
    proceed = threading.Event()
    server.faults[WEIGHTS] = HalfFirst(lambda handler: proceed.wait(60), times=1)
    try:
        assert contents(catalog.fetch(REPO)) == server.files
    finally:
        proceed.set()


def test_a_hub_that_never_responds_is_a_download_error(catalog, cache, server):
    proceed = threading.Event()

    def silent(handler, data):
        handler.begin(len(data), 200, {"ETag": f'"{git_id(data)}"'})
        if handler.command == "GET":
            proceed.wait(60)

    server.faults[WEIGHTS] = silent
    try:
        with pytest.raises(DownloadError, match=r"org/tiny could not be downloaded.*Check the network"):
            catalog.fetch(REPO)
    finally:
        proceed.set()
    assert partial(cache) == []
    server.faults.clear()
    assert contents(catalog.fetch(REPO)) == server.files


# Killed download processes


def kill_half_way(server, home, cache):
    """Kill a process that has downloaded half of the weights and all other files."""
    half, proceed = threading.Event(), threading.Event()

    def pause(handler):
        until(lambda: partial(cache) != [] and complete_files(cache) == server.files.keys() - {WEIGHTS})
        half.set()
        proceed.wait(60)

    server.faults[WEIGHTS] = HalfFirst(pause)
    environ = {**os.environ, "HF_ENDPOINT": server.url}
    with subprocess.Popen([sys.executable, "-c", FETCH, str(home)], env=environ) as process:
        try:
            assert half.wait(60)
            process.send_signal(signal.SIGKILL)
        finally:
            process.kill()
            proceed.set()
    assert process.returncode == -signal.SIGKILL
    server.faults.clear()


def complete_files(cache):
    return {path.name for path in cache.glob("models--org--tiny/snapshots/*/*")}


def test_partial_files_of_a_killed_download_are_removed_and_complete_files_are_kept(catalog, cache, tmp_path, server):
    kill_half_way(server, tmp_path / "home", cache)
    assert partial(cache)
    server.requests.clear()
    assert contents(catalog.fetch(REPO)) == server.files
    assert partial(cache) == []
    assert {name for name, _ in server.requests} == {WEIGHTS}


def test_partial_files_that_another_program_is_downloading_are_kept(catalog, cache, server):
    part = cache / "models--org--tiny/blobs/abc.12345678.incomplete"
    lock = cache / ".locks/models--org--tiny/abc.lock"
    for file in (part, lock):
        file.parent.mkdir(parents=True)
        file.touch()
    with FileLock(lock):
        catalog.fetch(REPO)
        assert part.exists()
    (cache / "models--org--tiny/snapshots" / hub_commit(cache) / WEIGHTS).unlink()
    catalog.fetch(REPO)
    assert not part.exists()


def hub_commit(cache):
    return (cache / "models--org--tiny/refs/main").read_text()


# Downloads that ended before the verification


@contextmanager
def download_unverified(server, home):
    """Start a process that has downloaded all files and verified none. It continues when its standard input ends."""
    command = [sys.executable, "-c", FETCH, str(home), "verify"]
    environ = {**os.environ, "HF_ENDPOINT": server.url}
    with subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout.readline() == b"verify\n"
            yield process
        finally:
            process.kill()


def markers(cache):
    return list(cache.rglob(f"{MARKER}*"))


def test_a_wrong_file_of_a_killed_download_is_not_used_and_is_replaced(catalog, cache, tmp_path, server):
    server.faults[WEIGHTS] = instead(corrupted(server, WEIGHTS))
    with download_unverified(server, tmp_path / "home") as process:
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert len(markers(cache)) == len(server.files)
    snapshot = cache / "models--org--tiny/snapshots" / hub_commit(cache)
    assert (snapshot / WEIGHTS).stat().st_size == len(server.files[WEIGHTS])
    assert catalog.scan() == []
    for name in (REPO, str(snapshot)):
        with pytest.raises(UnusableModelError, match="lmx-lab pull org/tiny`"):
            catalog.resolve(name)
    with pytest.raises(DownloadError, match="sha256"):
        catalog.fetch(REPO)
    assert catalog.scan() == []
    server.faults.clear()
    server.requests.clear()
    entry = catalog.fetch(REPO)
    assert contents(entry) == server.files
    assert catalog.scan() == [entry]
    assert {name for name, _ in server.requests} == {WEIGHTS}
    assert markers(cache) == []


def test_only_the_unverified_files_of_an_interrupted_download_are_hidden(catalog, cache, server, tiny_gguf):
    data = tiny_gguf.read_bytes()
    server.files |= {"Tiny-Q4_0.gguf": data, "Tiny-Q8_0.gguf": data[:-1] + bytes([data[-1] ^ 1])}
    before = [catalog.fetch(REPO), catalog.fetch(f"{REPO}:Q4_0")]
    assert markers(cache) == []

    def interrupted(progress):
        if progress.stage == "verify":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        catalog.fetch(f"{REPO}:Q8_0", interrupted)
    assert catalog.scan() == before
    again = f"{REPO}:Tiny-Q8_0.gguf"
    with pytest.raises(UnusableModelError, match=f"lmx-lab pull {again}`"):
        catalog.resolve(f"{REPO}:Q8_0")
    server.requests.clear()
    entry = catalog.fetch(again)
    assert catalog.scan() == [*before, entry]
    assert server.requests == []


def test_links_do_not_bypass_the_verification_and_documentation_needs_none(catalog, cache, server, tmp_path):
    entry = catalog.fetch(REPO)
    link = tmp_path / "link"
    link.symlink_to(entry.path)
    documentation = [entry.path / name for name in ("README.md", "LICENSE", "LICENSE-CODE")]
    for file in documentation:
        file.write_text("Documentation.")
    mark_unverified(documentation)
    assert catalog.scan() == [entry]
    mark_unverified([entry.path / "config.json"])
    for path in (entry.path, link, entry.path / "sub" / ".."):
        with pytest.raises(LabError):
            catalog.resolve(str(path))


def test_two_homes_share_the_verification_of_one_cache(catalog, cache, tmp_path, server):
    with download_unverified(server, tmp_path / "other") as process:
        assert catalog.scan() == []
        entry = catalog.fetch(REPO)
        assert catalog.scan() == [entry]
        process.communicate(timeout=60)
    assert process.returncode == 0
    assert catalog.scan() == [entry]
    assert len(server.requests) == len(server.files)
    assert markers(cache) == []
