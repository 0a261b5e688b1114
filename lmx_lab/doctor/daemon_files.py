"""The daemon's folder: its token is there, and nobody else may read it."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

from lmx_lab.client.credentials import STATE, read_state_file
from lmx_lab.daemon.home import read_state
from lmx_lab.doctor.finding import Finding
from lmx_lab.errors import UnreachableError
from lmx_lab.settings import Settings

READ = "who reads the token there can let the daemon run programs; each start makes a new one"


def examine_daemon_files(settings: Settings) -> Iterator[Finding]:
    folder, file = settings.daemon_folder, settings.daemon_folder / STATE
    if not folder.exists():
        yield Finding(topic="daemon", verdict="fine", found="none has run in this home")
        return
    if (mode := _open_to_others(folder)) is not None:
        yield Finding(
            topic="daemon",
            verdict="bad",
            found=f"others may look into {folder} (its mode is {mode:o}, not 700)",
            means=READ,
            remedy=f"chmod 700 {folder}",
        )
    if not file.exists():
        yield Finding(topic="daemon", verdict="fine", found="none runs")
        return
    try:
        state = read_state_file(file)
    except UnreachableError as exc:
        mode = _open_to_others(file)
        yield Finding(
            topic="daemon",
            verdict="bad",
            found=exc.message,
            means=f"clients do not find the daemon; {READ}" if mode is not None else "clients do not find the daemon",
            remedy=f"chmod 600 {file}, and start the daemon anew" if mode is not None else f"rm {file}",
        )
        return
    if read_state(folder) is not None:
        yield Finding(topic="daemon", verdict="fine", found=f"runs at {state.url} (process {state.pid})")
    else:
        # What a killed one leaves; the next start replaces it.
        yield Finding(topic="daemon", verdict="fine", found=f"none runs; process {state.pid} did not end in good order")


def _open_to_others(path: Path) -> int | None:
    """Its mode if others have any right to it."""
    mode = stat.S_IMODE(path.lstat().st_mode)
    return mode if mode & 0o077 else None
