"""Run notebooks as a browser does, over the HTTP and WebSocket API of a Jupyter server."""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

CELL_S = 300.0


class NotebookError(Exception):
    """A cell raised an exception, a kernel died, or a page does not exist."""


@dataclass(kw_only=True)
class NotebookRun:
    """The kernel and the outputs of a notebook that was run."""

    kernel: str
    outputs: list[dict[str, Any]] = field(default_factory=list)
    """Contents of the kernel's output messages."""


@dataclass(frozen=True, kw_only=True)
class JupyterBrowser:
    """A client of a Jupyter server."""

    url: str
    """Address of the server, with its base path and a trailing slash."""
    token: str

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"token {self.token}"}

    def server_is_ready(self) -> bool:
        try:
            return httpx2.get(f"{self.url}api", timeout=5).status_code == 200
        except httpx2.TransportError:
            return False

    def require_page(self, path: str) -> None:
        """Check that a page exists and needs the token.

        Raises:
            NotebookError: the page does not exist, or is shown without the token.
        """
        page = httpx2.get(f"{self.url}{path}", headers=self.headers, timeout=30)
        if page.status_code != 200:
            raise NotebookError(f"{path} is answered with {page.status_code}")
        anonymous = httpx2.get(f"{self.url}{path}", timeout=30)
        if anonymous.status_code not in (302, 403):
            raise NotebookError(f"{path} is answered with {anonymous.status_code} without a token")

    def run_notebook(self, root: Path, path: str) -> NotebookRun:
        """Run all cells of a notebook in a new kernel, which keeps running.

        Raises:
            NotebookError: a cell raised an exception, or the kernel died.
        """
        body = {"path": path, "name": path, "type": "notebook", "kernel": {"name": "python3"}}
        created = httpx2.post(f"{self.url}api/sessions", json=body, headers=self.headers, timeout=60)
        run = NotebookRun(kernel=created.json()["kernel"]["id"])
        for cell in json.loads((root / path).read_text(encoding="utf-8"))["cells"]:
            if cell["cell_type"] == "code":
                run.outputs += self.execute(run.kernel, "".join(cell["source"]))
        return run

    def value(self, kernel: str, expression: str) -> str:
        """Return the text of an expression, evaluated in a kernel."""
        outputs = self.execute(kernel, f"print({expression})")
        return "".join(output["text"] for output in outputs if "text" in output).strip()

    def execute(self, kernel: str, code: str) -> list[dict[str, Any]]:
        """Run a cell and return its outputs.

        Raises:
            NotebookError: the cell raised an exception, or the kernel died.
        """
        address = f"{self.url.replace('http', 'ws', 1)}api/kernels/{kernel}/channels"
        try:
            with connect(address, additional_headers=self.headers, proxy=None, max_size=None) as channels:
                message_id = secrets.token_hex(8)
                channels.send(json.dumps(_request(message_id, code)))
                return _outputs_until_idle(channels, message_id)
        except (ConnectionClosed, TimeoutError) as error:
            raise NotebookError(f"the kernel does not answer: {error}") from error

    def end_kernels(self) -> None:
        with httpx2.Client(base_url=self.url, headers=self.headers, timeout=60) as http:
            for session in http.get("api/sessions").json():
                http.delete(f"api/sessions/{session['id']}")


def _request(message_id: str, code: str) -> dict[str, Any]:
    header = {
        "msg_id": message_id,
        "msg_type": "execute_request",
        "session": message_id,
        "username": "",
        "version": "5.3",
    }
    content = {"code": code, "silent": False, "allow_stdin": False, "stop_on_error": True}
    return {"channel": "shell", "header": header, "content": content, "parent_header": {}, "metadata": {}}


def _outputs_until_idle(channels: Any, message_id: str) -> list[dict[str, Any]]:
    outputs: list[dict[str, Any]] = []
    while True:
        frame = channels.recv(timeout=CELL_S)
        if isinstance(frame, bytes):
            # A buffer of a widget, which is not needed here.
            continue
        message = json.loads(frame)
        kind, content = message["msg_type"], message["content"]
        if kind == "status" and content["execution_state"] in ("restarting", "dead"):
            raise NotebookError("the kernel died")
        if message["parent_header"].get("msg_id") != message_id:
            continue
        if kind == "error":
            raise NotebookError(f"{content['ename']}: {content['evalue']}")
        if kind in ("stream", "display_data", "execute_result"):
            outputs.append(content)
        if kind == "status" and content["execution_state"] == "idle":
            return outputs
