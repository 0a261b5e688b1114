"""Which MCP servers run, in a file: a daemon that was killed cannot end them, so the next one does, at its start.

Most end by themselves when their stdin is closed; this is for those that do not.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from pathlib import Path

from pydantic import BaseModel, TypeAdapter, ValidationError

from lmx_lab.daemon.mcp.process_cleanup import RootProcess, end

FILE = "mcp-processes.json"
_MOST = 1024
_BYTES = 2**20


class _Entry(BaseModel):
    pid: int
    started: float
    mark: str


_ENTRIES = TypeAdapter(list[_Entry])


class ProcessRegistry:
    """The processes that were started and have not been ended yet. On one event loop; the disk is left to threads."""

    def __init__(self, folder: Path | None) -> None:
        """
        Args:
            folder: Where the file is; without one nothing is written, and nothing found.
        """
        self._path = folder / FILE if folder is not None else None
        self._roots: dict[str, RootProcess] = {}
        self._lock = asyncio.Lock()
        self.cleared = asyncio.Event()
        """Whether what was left over has ended; nothing may be started before."""

    async def end_left_over(self) -> None:
        """End what an earlier daemon has left running; sets ``cleared`` when that is done, however it went."""
        try:
            if self._path is not None:
                roots = await asyncio.to_thread(_read, self._path)
                await asyncio.gather(*(asyncio.to_thread(end, root) for root in roots))
                await self._save()
        finally:
            self.cleared.set()

    async def add(self, root: RootProcess) -> None:
        self._roots[root.mark] = root
        await self._save()

    async def remove(self, root: RootProcess) -> None:
        self._roots.pop(root.mark, None)
        await self._save()

    async def _save(self) -> None:
        if self._path is None:
            return
        async with self._lock:
            await asyncio.to_thread(_write, self._path, list(self._roots.values()))


def _read(path: Path) -> list[RootProcess]:
    try:
        with path.open("rb") as file:
            entries = _ENTRIES.validate_json(file.read(_BYTES))
    except (OSError, ValidationError):
        return []
    return [
        RootProcess(pid=entry.pid, started=entry.started, mark=entry.mark) for entry in entries[:_MOST] if entry.mark
    ]


def _write(path: Path, roots: list[RootProcess]) -> None:
    text = json.dumps([{"pid": root.pid, "started": root.started, "mark": root.mark} for root in roots])
    new = path.with_suffix(".new")
    # A full disk must not keep a server from being started or ended.
    with contextlib.suppress(OSError):
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(text)
        new.replace(path)
