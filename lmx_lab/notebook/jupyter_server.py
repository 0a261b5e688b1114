"""The Jupyter server above this process: where it is, and which connections are its own.

A kernel is not told where its server is. But the server is one of its ancestors, and writes its address into the
runtime folder, under its process id. jupyter-server-proxy runs inside it, asks every caller who he is, and passes the
Host header on as it came; so that a connection which is the server's own needs no known Host. For the admin rules such
callers are on this machine, as their connection is: whom that server lets in can run any code in its kernels.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True, kw_only=True)
class NotebookServer:
    process: psutil.Process
    url: str
    """As it says itself: with its base path; the machine's name where it listens everywhere."""

    def owns(self, peer: tuple[str, int], here: tuple[str, int]) -> bool:
        """Whether the server is at the other end of this connection, between ``peer`` and ``here``.

        A few milliseconds: for what is otherwise refused. Both ends count, since another process may have the same port
        at its end of a connection to somebody else.
        """
        try:
            connections = self.process.net_connections("tcp")
        except psutil.Error:
            return False
        return any((connection.laddr, connection.raddr) == (peer, here) for connection in connections)


def notebook_server() -> NotebookServer | None:
    """The nearest ancestor that is a Jupyter server; ``None`` without one, and where processes cannot be seen."""
    folder = _runtime_folder()
    if folder is None:
        return None
    try:
        ancestors = psutil.Process().parents()
    except psutil.Error:
        return None
    for process in ancestors:
        url = _written_url(folder / f"jpserver-{process.pid}.json", process.pid)
        if url is not None:
            return NotebookServer(process=process, url=url)
    return None


def _runtime_folder() -> Path | None:
    try:
        # Comes with a kernel, not with the lab.
        from jupyter_core.paths import jupyter_runtime_dir
    except ImportError:
        return None
    return Path(jupyter_runtime_dir())


def _written_url(file: Path, pid: int) -> str | None:
    try:
        written = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return None
    known = isinstance(written, dict) and written.get("pid") == pid and isinstance(written.get("url"), str)
    return written["url"] if known else None
