"""Find the Jupyter server that has started this kernel, and recognize its connections.

A kernel does not know the address of its Jupyter server. But the Jupyter server is an ancestor of the kernel's process,
and writes its address to a file in Jupyter's runtime folder, which is named after its process id. jupyter-server-proxy
runs inside the Jupyter server, authenticates every caller, and forwards the Host header unchanged. Therefore
connections from the Jupyter server are accepted with any Host header. The rules for admin routes treat these callers as
callers on this machine, because every user whom the Jupyter server accepts can run code in its kernels.
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
        """Return whether this Jupyter server has opened the connection from ``peer`` to ``here``.

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
        # Imported here, because it is optional: it is installed with a kernel, not with the lab.
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
