"""A browser's part of a notebook, over a real Jupyter server's HTTP and WebSocket."""

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
    """A cell raised, a kernel died, or a page is not there."""


@dataclass(kw_only=True)
class Shown:
    kernel: str
    outputs: list[dict[str, Any]] = field(default_factory=list)
    """The contents of the messages that a notebook shows."""


@dataclass(frozen=True, kw_only=True)
class Front:
    url: str
    """Of the server, with its base path and a slash."""
    token: str

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"token {self.token}"}

    def answers(self) -> bool:
        try:
            return httpx2.get(f"{self.url}api", timeout=5).status_code == 200
        except httpx2.TransportError:
            return False

    def require_page(self, path: str) -> None:
        """
        Raises:
            NotebookError: it is not there, or it is there without the token, too.
        """
        page = httpx2.get(f"{self.url}{path}", headers=self.headers, timeout=30)
        if page.status_code != 200:
            raise NotebookError(f"{path} is answered with {page.status_code}")
        stranger = httpx2.get(f"{self.url}{path}", timeout=30)
        if stranger.status_code not in (302, 403):
            raise NotebookError(f"{path} is answered with {stranger.status_code} without a token")

    def run_notebook(self, root: Path, path: str) -> Shown:
        """Open the notebook in a kernel of its own and run all its cells; the kernel stays.

        Raises:
            NotebookError: a cell raised, or the kernel died.
        """
        body = {"path": path, "name": path, "type": "notebook", "kernel": {"name": "python3"}}
        made = httpx2.post(f"{self.url}api/sessions", json=body, headers=self.headers, timeout=60)
        shown = Shown(kernel=made.json()["kernel"]["id"])
        for cell in json.loads((root / path).read_text(encoding="utf-8"))["cells"]:
            if cell["cell_type"] == "code":
                shown.outputs += self.execute(shown.kernel, "".join(cell["source"]))
        return shown

    def value(self, kernel: str, expression: str) -> str:
        """What ``str`` makes of an expression there."""
        outputs = self.execute(kernel, f"print({expression})")
        return "".join(output["text"] for output in outputs if "text" in output).strip()

    def execute(self, kernel: str, code: str) -> list[dict[str, Any]]:
        """The outputs of a cell.

        Raises:
            NotebookError: it raised, or the kernel died.
        """
        address = f"{self.url.replace('http', 'ws', 1)}api/kernels/{kernel}/channels"
        try:
            with connect(address, additional_headers=self.headers, proxy=None, max_size=None) as channels:
                asked = secrets.token_hex(8)
                channels.send(json.dumps(_request(asked, code)))
                return _outputs_until_idle(channels, asked)
        except (ConnectionClosed, TimeoutError) as error:
            raise NotebookError(f"the kernel is silent: {error}") from error

    def end_kernels(self) -> None:
        with httpx2.Client(base_url=self.url, headers=self.headers, timeout=60) as http:
            for session in http.get("api/sessions").json():
                http.delete(f"api/sessions/{session['id']}")


def _request(asked: str, code: str) -> dict[str, Any]:
    header = {"msg_id": asked, "msg_type": "execute_request", "session": asked, "username": "", "version": "5.3"}
    content = {"code": code, "silent": False, "allow_stdin": False, "stop_on_error": True}
    return {"channel": "shell", "header": header, "content": content, "parent_header": {}, "metadata": {}}


def _outputs_until_idle(channels: Any, asked: str) -> list[dict[str, Any]]:
    outputs: list[dict[str, Any]] = []
    while True:
        frame = channels.recv(timeout=CELL_S)
        if isinstance(frame, bytes):
            # Widgets send buffers; nobody looks at them here.
            continue
        message = json.loads(frame)
        kind, content = message["msg_type"], message["content"]
        if kind == "status" and content["execution_state"] in ("restarting", "dead"):
            raise NotebookError("the kernel died")
        if message["parent_header"].get("msg_id") != asked:
            continue
        if kind == "error":
            raise NotebookError(f"{content['ename']}: {content['evalue']}")
        if kind in ("stream", "display_data", "execute_result"):
            outputs.append(content)
        if kind == "status" and content["execution_state"] == "idle":
            return outputs
