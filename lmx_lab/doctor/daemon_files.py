"""Check the daemon's folder: its state file is valid, and only this user can read the token in it."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

from lmx_lab.client.credentials import STATE, read_state_file
from lmx_lab.daemon.home import read_state
from lmx_lab.doctor import Finding
from lmx_lab.errors import UnreachableError
from lmx_lab.settings import Settings

LEAKED_TOKEN = "anyone who reads the token in it can run programs through the daemon; each start creates a new token"


def check_daemon_files(settings: Settings) -> Iterator[Finding]:
    """Check the permissions of the daemon's folder, and the state file in it."""
    folder, file = settings.daemon_folder, settings.daemon_folder / STATE
    if not folder.exists():
        yield Finding(topic="daemon", verdict="fine", found="no daemon has run with this home folder")
        return
    if (mode := _shared_mode(folder)) is not None:
        yield Finding(
            topic="daemon",
            verdict="bad",
            found=f"other users can access {folder} (mode {mode:o} instead of 700)",
            means=LEAKED_TOKEN,
            remedy=f"chmod 700 {folder}",
        )
    if not file.exists():
        yield Finding(topic="daemon", verdict="fine", found="no daemon is running")
        return
    try:
        state = read_state_file(file)
    except UnreachableError as exc:
        is_shared = _shared_mode(file) is not None
        lost = "clients cannot find the daemon"
        yield Finding(
            topic="daemon",
            verdict="bad",
            found=exc.message,
            means=f"{lost}; {LEAKED_TOKEN}" if is_shared else lost,
            remedy=f"chmod 600 {file}, then restart the daemon" if is_shared else f"rm {file}",
        )
        return
    found = f"running at {state.url} (process {state.pid})"
    if read_state(folder) is None:
        # The next start replaces the file.
        found = f"no daemon is running; process {state.pid} ended without removing its state file"
    yield Finding(topic="daemon", verdict="fine", found=found)


def _shared_mode(path: Path) -> int | None:
    """Return the mode of a file or folder to which other users have any access, and ``None`` for a private one."""
    mode = stat.S_IMODE(path.lstat().st_mode)
    return mode if mode & 0o077 else None
