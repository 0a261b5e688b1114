"""The hub, played by a small server on this machine."""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from lmx_lab.errors import DownloadError, ModelNotFoundError, StorageFullError, UnusableModelError
from lmx_lab.weights import Catalog, Progress, hub

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Usage(NamedTuple):
    total: int
    used: int
    free: int


class Hub(ThreadingHTTPServer):
    """Serves ``files`` as the model ``org/tiny``; ``sent`` is what was asked for."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.sent: list[str] = []
        self.status = 200

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        path = self.path.partition("?")[0]
        files = self.server.files
        if self.server.status != 200:
            self.reply(self.server.status, b"{}")
        elif path in ("/api/models/org/tiny", "/api/models/org/tiny/revision/main"):
            siblings = [{"rfilename": name, "size": len(data)} for name, data in files.items()]
            self.reply(200, json.dumps({"id": "org/tiny", "sha": COMMIT, "siblings": siblings}).encode())
        elif path.startswith(f"/api/models/org/tiny/tree/{COMMIT}"):
            tree = [{"type": "file", "path": n, "size": len(d), "oid": etag(d)} for n, d in files.items()]
            self.reply(200, json.dumps(tree).encode())
        elif (name := path.removeprefix(f"/org/tiny/resolve/{COMMIT}/")) in files:
            if self.command == "GET":
                self.server.sent.append(name)
            self.reply(200, files[name])
        else:
            self.reply(404, b'{"error": "Repository not found"}', {"X-Error-Code": "RepoNotFound"})

    def reply(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        extra = {"ETag": f'"{etag(body)}"', "X-Repo-Commit": COMMIT, "Content-Length": str(len(body))}
        for key, value in (extra | (headers or {})).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


def etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@pytest.fixture
def server(tmp_path: Path, make_model: Callable[..., Path]) -> Iterator[Hub]:
    model = make_model(tmp_path / "original")
    with Hub() as hub_server:
        hub_server.files = {path.name: path.read_bytes() for path in model.iterdir()}
        hub_server.files |= {"code.py": b"x", "pytorch_model.bin": b"x", "original/consolidated.safetensors": b"x"}
        thread = threading.Thread(target=hub_server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield hub_server
        hub_server.shutdown()
        thread.join()


@pytest.fixture
def catalog(catalog: Catalog, server: Hub, monkeypatch: pytest.MonkeyPatch) -> Catalog:
    """The catalog, with the small server for a hub."""
    real = hub.download
    monkeypatch.setattr(hub, "download", lambda *args, **options: real(*args, endpoint=server.url, **options))
    return catalog


def test_a_hub_model_lands_in_the_hub_cache_without_code_or_pickles(catalog: Catalog, server: Hub) -> None:
    seen: list[Progress] = []
    entry = catalog.fetch("org/tiny", seen.append)
    assert (entry.id, entry.source, entry.kind) == ("org/tiny", "hub", "chat")
    assert sorted(server.sent) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert {progress.total_bytes for progress in seen} == {sum(len(server.files[name]) for name in server.sent)}
    assert catalog.resolve("org/tiny") == entry


def test_what_is_there_is_not_fetched_again_and_a_missing_file_is(catalog: Catalog, server: Hub) -> None:
    entry = catalog.fetch("org/tiny")
    server.sent.clear()
    assert catalog.fetch("org/tiny") == entry
    assert server.sent == []
    (entry.path / "tokenizer.json").resolve().unlink()
    (entry.path / "tokenizer.json").unlink()
    assert catalog.fetch("org/tiny") == entry
    assert server.sent == ["tokenizer.json"]


@pytest.mark.parametrize("name", ["org/absent", "org/.."])
def test_a_model_that_the_hub_does_not_have_is_not_found(catalog: Catalog, name: str) -> None:
    with pytest.raises(ModelNotFoundError, match="the hub has no model"):
        catalog.fetch(name)


def test_a_model_without_safetensors_is_refused_before_the_download(catalog: Catalog, server: Hub) -> None:
    server.files = {"config.json": b"{}", "pytorch_model.bin": b"x"}
    with pytest.raises(UnusableModelError, match=r"\.bin"):
        catalog.fetch("org/tiny")
    assert server.sent == []


def test_a_small_disk_is_refused_before_the_first_byte(
    catalog: Catalog, server: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(100, 0, 7))
    with pytest.raises(StorageFullError, match=r"org/tiny needs \d+ bytes.*7 are free"):
        catalog.fetch("org/tiny")
    assert server.sent == []


def test_a_disk_that_fills_up_leaves_no_half_files(
    catalog: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = tmp_path / "hub/models--org--tiny/blobs/abc.incomplete"
    half.parent.mkdir(parents=True)
    half.touch()

    def full(*args: Any, **options: Any) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(hub, "snapshot_download", full)
    with pytest.raises(StorageFullError, match="filled up"):
        catalog.fetch("org/tiny")
    assert not half.exists()


def test_a_hub_that_fails_is_a_download_error_naming_the_model(catalog: Catalog, server: Hub) -> None:
    server.status = 500
    with pytest.raises(DownloadError, match="org/tiny could not be downloaded"):
        catalog.fetch("org/tiny")


def test_a_hub_that_cannot_be_reached_is_a_download_error_with_the_next_step(tmp_path: Path) -> None:
    seen: list[Progress] = []
    with pytest.raises(DownloadError, match=r"org/tiny .* Check the network"):
        hub.download("org/tiny", tmp_path / "hub", 0, seen.append, endpoint="http://127.0.0.1:9")
    assert seen == []


def test_an_offline_session_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(DownloadError, match="HF_HUB_OFFLINE"):
        hub.download("org/tiny", tmp_path / "hub", 0, lambda progress: None)
