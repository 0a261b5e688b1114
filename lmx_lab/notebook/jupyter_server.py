"""Find the Jupyter server that has started this kernel, and recognize its connections.

A kernel does not know the address of its server. But the server is one of its ancestors, and writes its address into
the runtime folder under its process id. jupyter-server-proxy runs inside the server, authenticates every caller, and
forwards the Host header unchanged; therefore connections of the server are accepted with any Host. The admin rules
treat these callers as callers on this machine, because everyone whom the server accepts can run code in its kernels.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True, kw_only=True)
class NotebookServer:
    """A running Jupyter server."""

    process: psutil.Process
    url: str
    """The address that the server has written, with its base path; the host is the machine's name if the server
    listens on all interfaces."""

    def owns(self, peer: tuple[str, int], here: tuple[str, int]) -> bool:
        """Return whether the connection from ``peer`` to ``here`` is one of this server's.

        Takes a few milliseconds, and is therefore called only for connections that would be refused. Both ends are
        compared, because another process may use the same local port for a connection to another address.
        """
        try:
            connections = self.process.net_connections("tcp")
        except psutil.Error:
            return False
        return any((connection.laddr, connection.raddr) == (peer, here) for connection in connections)


def find_notebook_server() -> NotebookServer | None:
    """Return the nearest ancestor that is a Jupyter server; None if there is none, or processes cannot be listed."""
    folder = _runtime_folder()
    if folder is None:
        return None
    try:
        ancestors = psutil.Process().parents()
    except psutil.Error:
        return None
    for process in ancestors:
        url = _read_url(folder / f"jpserver-{process.pid}.json", process.pid)
        if url is not None:
            return NotebookServer(process=process, url=url)
    return None


def _runtime_folder() -> Path | None:
    try:
        # Here, because it is installed with a kernel, not with the lab.
        from jupyter_core.paths import jupyter_runtime_dir
    except ImportError:
        return None
    return Path(jupyter_runtime_dir())


def _read_url(file: Path, pid: int) -> str | None:
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return None
    is_valid = isinstance(content, dict) and content.get("pid") == pid and isinstance(content.get("url"), str)
    return content["url"] if is_valid else None
