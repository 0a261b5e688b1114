"""Serve a hub and a page of wheels on this machine, slowly enough that downloads can be interrupted."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Self

COMMIT = "0123456789abcdef0123456789abcdef01234567"
MODEL = "org/tiny"
LINKS = "/links/"
PIECE_BYTES = 65_536


class SlowHub(ThreadingHTTPServer):
    """A hub with the files of a folder as the model ``org/tiny``, and wheels at ``/links/``, as a context manager."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, folder: Path, *, wheels: Path | None = None, whole_s: float = 1.0) -> None:
        """
        Args:
            whole_s: Duration of the download of the largest file.
        """
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        self.wheels = {path.name: path.read_bytes() for path in wheels.iterdir()} if wheels is not None else {}
        self._largest = max(map(len, (*self.files.values(), *self.wheels.values())))
        self.pause_s = whole_s / (self._largest / PIECE_BYTES)
        self.began: list[str] = []
        """Names of the requested files, in order."""
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01})

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def hub_environment(self) -> dict[str, str]:
        return {"HF_ENDPOINT": self.url, "HF_HUB_OFFLINE": "0"}

    @property
    def index_environment(self) -> dict[str, str]:
        return {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": f"{self.url}{LINKS}"}

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        value: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore errors: killed clients are expected."""


class _Handler(BaseHTTPRequestHandler):
    server: SlowHub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        """Do not log."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        files, path = self.server.files, self.path.partition("?")[0]
        if path in (f"/api/models/{MODEL}", f"/api/models/{MODEL}/revision/main"):
            siblings = [{"rfilename": name, "size": len(data)} for name, data in files.items()]
            self._document({"id": MODEL, "sha": COMMIT, "siblings": siblings})
        elif path.startswith(f"/api/models/{MODEL}/tree/{COMMIT}"):
            tree = [{"type": "file", "path": name, "size": len(d), "oid": _etag(d)} for name, d in files.items()]
            self._document(tree)
        elif (name := path.removeprefix(f"/{MODEL}/resolve/{COMMIT}/")) in files:
            self._file(name, files[name])
        elif path == LINKS:
            links = "".join(f'<a href="{name}">{name}</a>' for name in self.server.wheels)
            self._whole(f"<!DOCTYPE html><html><body>{links}</body></html>".encode(), "text/html")
        elif (name := path.removeprefix(LINKS)) in self.server.wheels:
            self._file(name, self.server.wheels[name])
        else:
            self.send_error(404)

    def _document(self, document: object) -> None:
        self._whole(json.dumps(document).encode(), "application/json")

    def _whole(self, body: bytes, kind: str) -> None:
        self.send_response(200)
        self._head(len(body), "content-type", kind)
        if self.command == "GET":
            self.wfile.write(body)

    def _file(self, name: str, data: bytes) -> None:
        """Send a file, or the rest of it if the client requests a range."""
        begin = 0
        with contextlib.suppress(ValueError):
            begin = int(self.headers.get("range", "").removeprefix("bytes=").partition("-")[0])
        self.send_response(206 if begin else 200)
        if begin:
            self.send_header("content-range", f"bytes {begin}-{len(data) - 1}/{len(data)}")
        self.send_header("x-repo-commit", COMMIT)
        self._head(len(data) - begin, "etag", f'"{_etag(data)}"')
        if self.command == "GET":
            self.server.began.append(name)
            for at in range(begin, len(data), PIECE_BYTES):
                self.wfile.write(data[at : at + PIECE_BYTES])
                time.sleep(self.server.pause_s)

    def _head(self, size: int, name: str, value: str) -> None:
        self.send_header(name, value)
        self.send_header("content-length", str(size))
        self.end_headers()


def _etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()
