"""Run Jupyter servers with their own folders, and code in their kernels."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from tests.support.waiting import until, until_listening

END_S = 10
CELL_S = 300.0


class NotebookError(Exception):
    """A cell raised an exception, a kernel died, or a page does not exist."""


@dataclass(frozen=True, kw_only=True)
class JupyterServer:
    """A running server."""

    pid: int
    port: int
    log: Path


@contextmanager
def jupyter_server(
    folder: Path, *options: str, app: Sequence[str] = ("jupyter_server",), **environ: str
) -> Iterator[JupyterServer]:
    """Run a server until the end of the block.

    Args:
        folder: Parent of its folders, among them ``config`` and ``runtime``.
        app: The module that is run, and its arguments.
        environ: Additional environment variables.
    """
    own = {f"JUPYTER_{name.upper()}_DIR": str(folder / name) for name in ("config", "data", "runtime")}
    command = [*(sys.executable, "-m", *app, "--no-browser", "--allow-root"), *options]
    log = folder / "jupyter.log"
    with log.open("wb") as file:
        process = subprocess.Popen(command, env={**os.environ, **own, **environ}, stdout=file, stderr=file)
    try:
        # Written when the server has its port.
        state = folder / "runtime" / f"jpserver-{process.pid}.json"
        until(lambda: (state.exists() and state.stat().st_size > 0) or process.poll() is not None)
        assert process.poll() is None, log.read_text(encoding="utf-8", errors="replace")
        port = json.loads(state.read_bytes())["port"]
        until_listening(port)
        yield JupyterServer(pid=process.pid, port=port, log=log)
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
        process.kill()
        process.wait()


def execute(url: str, headers: Mapping[str, str], kernel: str, code: str) -> list[dict[str, Any]]:
    """Run a cell in a kernel of the server at ``url``, which ends with a slash, and return its outputs.

    Raises:
        NotebookError: the cell raised an exception, or the kernel died.
    """
    address = f"{url.replace('http', 'ws', 1)}api/kernels/{kernel}/channels"
    try:
        with connect(address, additional_headers=headers, proxy=None, max_size=None) as channels:
            message_id = secrets.token_hex(8)
            channels.send(json.dumps(_request(message_id, code)))
            return _outputs_until_idle(channels, message_id)
    except (ConnectionClosed, TimeoutError) as error:
        raise NotebookError(f"the kernel does not answer: {error}") from error


def printed(outputs: Iterable[Mapping[str, Any]]) -> str:
    """Return the text that a cell has printed."""
    return "".join(output["text"] for output in outputs if "text" in output)


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
