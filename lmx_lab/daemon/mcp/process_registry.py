"""Record the running MCP servers, so that their processes end even if the daemon is killed.

The watchdog ends them within seconds. The file is for the case that the watchdog was killed too: the next daemon reads
it at its start.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from pydantic import BaseModel, TypeAdapter, ValidationError

from lmx_lab.daemon.mcp.process_cleanup import RootProcess, encode_roots, end_processes
from lmx_lab.daemon.mcp.watchdog import Watchdog

REGISTRY_FILE = "mcp-processes.json"
REGISTRY_ENTRIES = 1024
REGISTRY_BYTES = 2**20


class _Entry(BaseModel):
    pid: int
    started: float
    mark: str


_ENTRIES = TypeAdapter(list[_Entry])


class ProcessRegistry:
    """The running servers of this daemon, listed in a file and for the watchdog.

    Most servers exit when their stdin is closed; this is for the others. Used on one event loop; files are read and
    written in threads.
    """

    def __init__(self, folder: Path | None) -> None:
        """
        Args:
            folder: Folder of the file. If None, nothing is read or written.
        """
        self.watchdog = Watchdog()
        self._path = folder / REGISTRY_FILE if folder is not None else None
        self._roots: dict[str, RootProcess] = {}
        self._lock = asyncio.Lock()
        self.cleaned = asyncio.Event()
        """Set when the processes of an earlier daemon have ended. No server may be started before."""

    async def end_leftovers(self) -> None:
        """End the processes that an earlier daemon has left. Sets ``cleaned`` afterwards, even after an error."""
        try:
            if self._path is not None:
                if roots := await asyncio.to_thread(_read_registry, self._path):
                    await asyncio.to_thread(end_processes, roots)
                await self._save()
        finally:
            self.cleaned.set()

    async def add(self, root: RootProcess) -> None:
        """Add a server, or replace the entry with the same mark."""
        self._roots[root.mark] = root
        await self._save()

    async def remove(self, root: RootProcess) -> None:
        """Remove a server whose processes have ended."""
        self._roots.pop(root.mark, None)
        await self._save()

    async def _save(self) -> None:
        self.watchdog.watch(self._roots.values())
        if self._path is None:
            return
        async with self._lock:
            await asyncio.to_thread(_write_registry, self._path, list(self._roots.values()))


def _read_registry(path: Path) -> list[RootProcess]:
    try:
        with path.open("rb") as file:
            entries = _ENTRIES.validate_json(file.read(REGISTRY_BYTES))
    except (OSError, ValidationError):
        return []
    return [
        RootProcess(pid=entry.pid, started=entry.started, mark=entry.mark)
        for entry in entries[:REGISTRY_ENTRIES]
        if entry.mark
    ]


def _write_registry(path: Path, roots: Iterable[RootProcess]) -> None:
    new = path.with_suffix(".new")
    # Errors are ignored, since a full disk must not keep a server from being started or stopped.
    with contextlib.suppress(OSError):
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(encode_roots(roots))
        new.replace(path)
