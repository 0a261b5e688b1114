"""A proxy that stores the requests of a client as files for ``tests/flows/test_client_requests.py``."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

LONGEST_TEXT = 120
"""Longer texts are cut, because only their place in a request matters."""
PAIR = re.compile(r'\[\s+("(?:[^"\\]|\\.)*"),\s+("(?:[^"\\]|\\.)*")\s+\]')
"""A list of two texts over several lines, such as a header."""
UNSTORED = frozenset({"host", "content-length", "transfer-encoding"})


@contextlib.contextmanager
def recording(client: str, folder: Path, port: int) -> Iterator[int]:
    """Run a proxy before a server on this port, and yield the port of the proxy.

    Args:
        client: Name and version of the client.
        folder: Receives a file for each request of another form.
    """
    stem = re.sub("[^a-z]+", "-", client.lower()).strip("-")
    shapes: set[str] = set()
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            self._forward()

        def do_POST(self) -> None:
            self._forward()

        def _forward(self) -> None:
            data = self.rfile.read(int(self.headers.get("content-length") or 0))
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
            with contextlib.closing(connection):
                headers = {name: value for name, value in self.headers.items() if name.lower() not in UNSTORED}
                connection.request(self.command, self.path, data or None, headers)
                response = connection.getresponse()
                answer = response.read()
            ignored = response.getheader("x-lmx-ignored")
            self._store(data, ignored.split(", ") if ignored else [])
            self.send_response(response.status)
            for name, value in response.getheaders():
                if name.lower() not in UNSTORED | {"connection"}:
                    self.send_header(name, value)
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def _store(self, data: bytes, ignored: list[str]) -> None:
            stored: dict[str, Any] = {"client": client, "method": self.command, "path": self.path}
            stored["headers"] = [[name, text] for name, text in self.headers.items() if name.lower() not in UNSTORED]
            if data:
                stored["body"] = _shortened(json.loads(data))
            if ignored:
                stored["ignored"] = ignored
            shape = json.dumps([self.path, sorted(stored.get("body", {})), stored.get("body", {}).get("stream")])
            with lock:
                if self.command == "GET" or shape in shapes:
                    return
                shapes.add(shape)
                path = folder / f"{stem}-{len(shapes)}.json"
            text = PAIR.sub(r"[\1, \2]", json.dumps(stored, indent=2, ensure_ascii=False))
            path.write_text(f"{text}\n", encoding="utf-8")

    folder.mkdir(parents=True, exist_ok=True)
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as proxy:
        thread = threading.Thread(target=proxy.serve_forever)
        thread.start()
        try:
            yield proxy.server_port
        finally:
            proxy.shutdown()
            thread.join()


def _shortened(value: Any) -> Any:
    """Return a value of JSON whose long texts are cut."""
    if isinstance(value, dict):
        return {name: _shortened(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_shortened(item) for item in value]
    return f"{value[:LONGEST_TEXT]}…" if isinstance(value, str) and len(value) > LONGEST_TEXT else value
